"""PATE-GAN (Yoon, Jordon, van der Schaar 2019), Algorithm 1: teachers label generated images; a student learns these.

Differs from the paper:
- all networks are convolutional and see labels; thousands of teachers are one batch dimension;
- by default a teacher compares an image with the others of its label in the batch, and the student gets the noisy
  counts, not only which one is larger (the charge covers both);
- every label is charged before it is released, and all labels are priced together, data-independently: the published
  code spends until a data-dependent estimate exceeds ε, and then once more.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn
from tyro.conf import arg

from datalens.bounded.ballots import real_or_fake
from datalens.bounded.contributions import count_ballots
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.ensemble import EnsembleSettings, TeacherOptions, make_teachers, share_out, teacher_values
from datalens.options import Noise
from datalens.plans.base import Method, NoiseOfVotes, Part, Place, Request, common, whole_number_law
from datalens.privacy.calibration import calibrate_event, calibrate_sigma
from datalens.privacy.events import Charge, DiscreteGaussianEvent, GaussianEvent, LaplaceEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import LaplaceVote, Mechanism, make_mechanism
from datalens.privacy.noise import LaplaceNoise, open_noise
from datalens.private.shares import Shares
from datalens.public.basis import make_basis
from datalens.public.critic import CosineCritic, Critic
from datalens.released.generator import Generator
from datalens.released.labelled import CriticStudent
from datalens.run.folder import Alone, Run


@dataclass(frozen=True, kw_only=True)
class Options(TeacherOptions):
    aggregate: Annotated[Literal["gnmax", "laplace"] | None, arg(help_behavior_hint="(default: gnmax)")] = None
    """Noise on the counts of votes. gnmax: Gaussian. laplace: as published."""
    noise: Noise = None


@dataclass(frozen=True, kw_only=True)
class PateGanSettings(EnsembleSettings):
    method: Literal["pategan"]
    noise: NoiseOfVotes  # type: ignore[assignment]
    scale: float  # of the noise on a count: 1/λ of Laplace noise, or σ of Gaussian noise
    votes: Literal["absolute", "relative"]  # relative: to the batch's other images of the same label
    labels: Literal["majority", "counts"]  # what the student uses of the two noisy counts of an image
    jitter: float  # size of the random change to images before teachers vote, in each of 64 cosines
    memory: int  # number of batches of released labels that the critic learns from again
    width: int  # channels of the critic's first layer
    critic_steps: int
    critic_rate: float
    generator_steps: int
    generator_batch: int
    generator_rate: float
    spread: float  # weight of the term that keeps images of one label apart
    average: float  # decay of the average of the generator's weights over its steps

    @property
    def sigma(self) -> float:
        """The scale, under the name that `--json` has for it."""
        return self.scale

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = self._event(budget)
        sensitivity = math.sqrt(2 * self.batch)
        relative = event.sigma * math.sqrt(2) / self.teachers
        name = f"labels of {self.batch} images"
        return (
            Part(
                name=name,
                event=event,
                sensitivity=sensitivity,
                times=self.steps,
                cells=2 * self.batch,
                noise_to_signal=relative,
            ),
        )

    def _event(self, budget: Budget) -> Charge:
        facts: dict[str, Any] = {"row_unit": "teacher", "relation": budget.relation, "step": 0, "noise": self.origin}
        facts |= {"queries": self.batch}
        if self.noise == "discrete-laplace":
            return LaplaceEvent(moved=2 * self.batch, scale=self.scale, **facts)
        facts |= {"l2_bound": math.sqrt(self.batch), "diameter": math.sqrt(2 * self.batch), "sigma": self.scale}
        if self.noise == "discrete-gaussian":
            return DiscreteGaussianEvent(coordinates=2 * self.batch, **facts)
        return GaussianEvent(**facts)

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        law = "Laplace" if self.noise == "discrete-laplace" else "Gaussian"
        return {
            "name": f"counts of teachers' votes on generated images with {law} noise (PATE-GAN)",
            "sensitivity": "a label is two counts: one record changes one teacher's vote, which moves each by one",
        }

    def noise_said(self) -> str:
        exact = {"discrete-laplace": "exact discrete Laplace", "discrete-gaussian": "exact discrete Gaussian (OpenDP)"}
        return exact.get(self.noise, "rounded to integers")

    def price_said(self) -> str:
        if self.noise == "discrete-laplace":
            return "as randomised responses of 1/scale, two a label"
        return "as Gaussian noise of variance sigma²" + (" - 4" if self.noise == "discrete-gaussian" else "")

    def said(self) -> str:
        law = "Laplace noise of scale" if self.noise == "discrete-laplace" else "Gaussian noise of σ ="
        return f"{self.teachers} teachers, {self.steps} steps of {self.batch} labels, {law} {self.scale:.5g}"

    @property
    def signal(self) -> str:
        return "sigma of the difference of an image's two counts / number of teachers"


def plan(request: Request, schema: Schema, budget: Budget) -> PateGanSettings:
    quick = request.preset == "quick"
    values = teacher_values(request, schema, budget, records_each=60)
    classes = len(schema.classes)
    values = {"steps": 60 if quick else 110, "batch": max(2, classes * max(1, 100 // classes))} | values
    values |= {"votes": "relative", "labels": "counts", "jitter": 0.3, "memory": 10, "width": 32}
    values |= {"critic_steps": 15, "critic_rate": 3e-3, "generator_steps": 2, "generator_rate": 3e-4}
    values |= {"generator_batch": 20, "average": 0.9, "spread": 0.03}
    noise, scale = _noise(request, budget, steps=values["steps"], batch=values["batch"])
    return PateGanSettings(**common(request), noise=noise, scale=scale, **values)


def _noise(request: Request, budget: Budget, *, steps: int, batch: int) -> tuple[Any, float]:
    """Return the kind of noise on the counts, and its scale for so many steps of `batch` labels."""
    goal: dict[str, Any] = {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.pricing()}
    if math.isinf(budget.epsilon):
        return "gaussian", 0.0
    if request.options.aggregate == "laplace":
        if request.options.noise is not None:
            raise DatalensError("--noise chooses among kinds of Gaussian noise: leave it out, or use --aggregate gnmax")
        facts: dict[str, Any] = {"row_unit": "teacher", "relation": budget.relation, "noise": "operating-system"}
        facts |= {"moved": 2 * batch * steps, "queries": batch * steps, "step": 0}
        return "discrete-laplace", calibrate_event(lambda scale: LaplaceEvent(scale=scale, **facts), times=1, **goal)
    law = whole_number_law(request, budget)
    sensitivity = math.sqrt(2 * batch)
    return law, calibrate_sigma(sensitivity=sensitivity, steps=steps, law=law, coordinates=2 * batch, **goal)


def train(run: Run, shares: Shares, settings: PateGanSettings, place: Place) -> Generator:
    """Train until the last planned step, until the budget is spent, or until interrupted; the state is kept."""
    s = settings
    if s.noise == "discrete-laplace":
        return _train(run, shares, s, LaplaceVote(noise=LaplaceNoise(s.scale, run.noise_seed)), place.device)
    with open_noise(s.noise, s.scale, draws=2 * s.steps * s.batch, seed=run.noise_seed) as noise:
        return _train(run, shares, s, make_mechanism(s.scale, noise), place.device)


def _train(
    run: Run, shares: Shares, s: PateGanSettings, mechanism: Mechanism | LaplaceVote, device: torch.device
) -> Generator:
    teachers = make_teachers(shares, s, run.schema)
    student = make_student(s, run.schema, device)
    for step in run.steps(s.steps, student=student, teachers=Alone(teachers, run.path / "checkpoints")):
        fakes = student.generate(step)
        loss = teachers.fit_step(fakes, step=step, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        noisy = run.journal.find(run.ledger, step=step)  # charged and released before an interruption
        if noisy is None:
            ballots = (
                real_or_fake(part, fakes.labels, relative=s.votes == "relative") for part in teachers.scores(fakes)
            )
            try:
                noisy = mechanism.release(count_ballots(ballots, answers=2), run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, within the budget
            run.journal.save(noisy)
        student.learn(fakes, noisy)
        run.log(step, teacher_loss=loss, real=float(noisy.value[:, 1].mean()) / s.teachers)
    return student.averaged()


def make_student(s: PateGanSettings, schema: Schema, device: torch.device) -> CriticStudent:
    basis, classes = make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes)
    if s.network == "spectral":  # the critic sees what the teachers see
        critic: nn.Module = CosineCritic(basis, classes, width=s.width)
    else:
        critic = Critic(schema.shape, classes, width=s.width)
    return CriticStudent(
        schema.shape,
        classes,
        critic,
        teachers=s.teachers,
        labels=s.labels,
        batch=s.batch,
        jitter=s.jitter,
        memory=s.memory,
        latent=s.latent,
        critic_steps=s.critic_steps,
        critic_rate=s.critic_rate,
        generator_steps=s.generator_steps,
        generator_batch=s.generator_batch,
        generator_rate=s.generator_rate,
        average=s.average,
        spread=s.spread,
        seed=s.seed,
        device=device,
    )


METHOD = Method(
    settings=PateGanSettings,
    plan=plan,
    gather=share_out,
    train=train,
    options=Options,
    persons=True,
    teachers=True,
)
