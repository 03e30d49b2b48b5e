"""G-PATE (Long et al. 2021), Algorithms 1 and 2: teachers vote on randomly projected gradients, a student follows.

Differs from the paper:
- a teacher's gradient is divided by its largest projected coordinate instead of clipped at a constant;
- every projected coordinate of every image is a query with its own check, and checks and answers are priced
  data-independently: the published results use the data-dependent price of Papernot et al. 2018, which depends on the
  records and so is itself private (docs/methods.md);
- where the check fails, the direction is zero, and the check stays charged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from datalens.bounded.ballots import binned
from datalens.bounded.contributions import count_ballots
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.ensemble import EnsembleSettings, TeacherOptions, make_teachers, share_out, teacher_values
from datalens.options import Number, WholeNumber
from datalens.plans.base import Method, Part, Place, Request, asked, common, unbroken
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.events import Charge, GaussianEvent, UnknownEvent, confident_answer, confident_check
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import ConfidentGNMax
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.private.shares import Shares
from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.released.decode import DecodeBins
from datalens.released.generator import Generator, dcgan_architecture
from datalens.released.student import Student
from datalens.run.folder import Alone, Run


@dataclass(frozen=True, kw_only=True)
class Options(TeacherOptions):
    projections: WholeNumber = None
    """Number of random directions in which teachers vote, per synthetic image."""
    bins: WholeNumber = None
    """Number of answers that a teacher can choose from in each direction."""
    threshold: Number = None
    """Part of the teachers that must agree, by a noisy count; else there is no answer."""


@dataclass(frozen=True, kw_only=True)
class GPateSettings(EnsembleSettings):
    answers: ClassVar[bool] = True
    method: Literal["gpate"]
    projections: int  # p: number of queries about one image
    bins: int
    threshold: float  # of the check, as a part of the teachers
    sigma_check: float
    sigma: float  # of the answers
    gamma: float
    student_rate: float

    @property
    def queries(self) -> int:
        """Number of queries of one step: one for every projected coordinate of every image."""
        return self.batch * self.projections

    @property
    def one_charge(self) -> bool:
        return True

    def check(self, schema: Schema) -> None:
        super().check(schema)
        if self.bins < 2:
            raise DatalensError(f"--bins must be at least 2, not {self.bins}")
        if self.projections > self.basis_size:
            raise DatalensError(f"--projections {self.projections} is more than the {self.basis_size} coordinates")

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """Return the most that a run charges: answers are charged only for queries that pass the check."""
        check = confident_check(budget.relation, self.queries, self.sigma_check, self.origin, 0)
        answer = confident_answer(budget.relation, self.queries, self.sigma, self.origin, 0)
        return (
            Part(
                name=f"checks of {self.queries} queries",
                event=check,
                sensitivity=check.sensitivity,
                times=self.steps,
                cells=self.queries,
                noise_to_signal=self.sigma_check / self.teachers,
            ),
            Part(
                name=f"answers to {self.queries} queries at most",
                event=answer,
                sensitivity=answer.sensitivity,
                times=self.steps,
                cells=self.queries * self.bins,
                noise_to_signal=self.sigma / self.teachers,
            ),
        )

    def possible(self, event: Charge, schema: Schema, budget: Budget) -> bool:
        if super().possible(event, schema, budget):
            return True
        answer = confident_answer(budget.relation, event.queries, self.sigma, self.origin, event.step)
        return isinstance(event, GaussianEvent) and 0 < event.queries < self.queries and event == answer

    def steps_paid(self, events: Sequence[Charge]) -> int:
        """Return the number of steps whose checks were charged. Answers are counted by `answers_paid`."""
        return unbroken({event.step for event in events if _is_check(event)})

    def answers_paid(self, events: Sequence[Charge]) -> int:
        """Return the largest number of answers that these charges can have paid for."""
        return sum(event.queries for event in events if not _is_check(event))

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        return {
            "name": "winning votes on projected gradients, checked and counted with Gaussian noise (G-PATE)",
            "sensitivity": "sqrt(queries) for the check, sqrt(2·answered) for the counts: one record changes one vote",
        }

    def noise_said(self) -> str:
        return "rounded to integers"

    def said(self) -> str:
        return (
            f"{self.teachers} teachers, {self.steps} steps of {self.batch} images in {self.projections} random "
            f"directions, {self.bins} bins, σ = {self.sigma:.5g} (check: {self.sigma_check:.5g})"
        )

    @property
    def signal(self) -> str:
        return "sigma / number of teachers"


def _is_check(event: Charge) -> bool:
    """Return whether an event is a check: a ballot moves the largest count by 1, but all counts by √2."""
    return isinstance(event, GaussianEvent) and event.diameter == event.l2_bound


DIGITS = 1 + 1e-9  # so that rounding does not let two charges cost more than the one that was calibrated
CHECK = 6.0  # σ of the check / σ of the answers, as in the published setting for ε = 10


def plan(request: Request, schema: Schema, budget: Budget) -> GPateSettings:
    quick = request.preset == "quick"
    values = teacher_values(request, schema, budget, records_each=60 if quick else 15)
    values = {"steps": 100 if quick else 300, "batch": 20 if quick else 60} | values
    values |= {"projections": min(16, values["basis_size"]), "bins": 2, "threshold": 0.5, "gamma": 1e-3}
    values |= {"student_rate": 1e-3} | asked(request.options, "projections", "bins", "threshold")
    queries = values["batch"] * values["projections"]
    sigma = calibrate_sigma(
        sensitivity=math.sqrt(queries * (2 + CHECK**-2)),  # of check and answers together, in units of the answers' σ
        steps=values["steps"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
    )
    noise: dict[str, Any] = {"noise": "gaussian", "sigma": DIGITS * sigma, "sigma_check": CHECK * DIGITS * sigma}
    return GPateSettings(**common(request), **noise, **values)


def train(run: Run, shares: Shares, settings: GPateSettings, place: Place) -> Generator:
    """Train until the last planned step, until the budget is spent, or until interrupted; the state is kept."""
    s, schema = settings, run.schema
    mechanism = ConfidentGNMax(
        sigma_check=s.sigma_check,
        sigma=s.sigma,
        threshold=s.threshold * s.teachers,
        noise=SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed),
    )
    teachers = make_teachers(shares, s, schema)
    student = Student(
        dcgan_architecture(schema.shape, len(schema.classes), latent=s.latent, latent_law="normal"),
        batch=s.batch,
        gamma=s.gamma,
        learning_rate=s.student_rate,
        decay_over=s.steps,
        balanced_labels=True,
        seed=s.seed,
        device=place.device,
    )
    decode = DecodeBins(bins=s.bins, basis=make_basis(s.basis, schema.shape, s.basis_size))

    for step in run.steps(s.steps, student=student, teachers=Alone(teachers, run.path / "checkpoints")):
        answered = _answered(run, s, before=step)
        fakes = student.generate(step)
        loss = teachers.fit_step(fakes, step=step, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        projection = random_projection(s.basis_size, s.projections, seed=s.seed, step=step)
        noisy = run.journal.find(run.ledger, step=step)  # charged and released before an interruption
        if noisy is None:
            gradients = teachers.image_gradients(fakes, step=step)
            ballots = (binned(part, projection, bins=s.bins) for part in gradients)
            try:
                noisy = mechanism.release(count_ballots(ballots, answers=s.bins), run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, within the budget
            run.journal.save(noisy)
        student.step(fakes, decode(noisy, projection))
        run.answered = answered + int((noisy.value >= 0).sum())
        run.log(step, teacher_loss=loss, answered=float((noisy.value >= 0).mean()))
    run.answered = _answered(run, s, before=s.steps)
    return student.generator


def _answered(run: Run, s: GPateSettings, *, before: int) -> int:
    """Return how many queries were answered so far: by the checkpoint or, if version 0.1.0 wrote it, by the charges."""
    if run.answered is not None:
        return run.answered
    charges = [event for event in run.ledger.events if not isinstance(event, UnknownEvent)]
    return s.answers_paid([event for event in charges if event.step < before])


def random_projection(size: int, projections: int, *, seed: int, step: int) -> Tensor:
    """Return orthonormal columns [size, projections]: public, and new in every step."""
    random = torch.randn(size, projections, generator=streams.generator(seed, "projection", step), dtype=torch.float64)
    return torch.linalg.qr(random).Q


METHOD = Method(
    settings=GPateSettings,
    plan=plan,
    gather=share_out,
    train=train,
    options=Options,
    persons=True,
    teachers=True,
)
