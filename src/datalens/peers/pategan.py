"""PATE-GAN (Yoon, Jordon, van der Schaar 2019): teachers say of generated images whether they are real."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.peers.ensembles import EnsembleSettings, teacher_values
from datalens.peers.settings import Part, common, whole_number_law
from datalens.plans.settings import NoiseOfVotes
from datalens.privacy.calibration import calibrate_event, calibrate_sigma
from datalens.privacy.events import Charge, DiscreteGaussianEvent, GaussianEvent, LaplaceEvent
from datalens.privacy.ledger import Budget


@dataclass(frozen=True, kw_only=True)
class PateGanSettings(EnsembleSettings):
    method: Literal["pategan"]
    noise: NoiseOfVotes  # type: ignore[assignment]
    scale: float  # of the noise on a count: Laplace's 1/λ, or the Gaussian's σ
    votes: Literal["absolute", "relative"]  # to the batch's other images of the same label
    labels: Literal["majority", "counts"]  # what the student makes of two noisy counts
    jitter: float  # how far images are moved before teachers are asked, in each of 64 cosines
    memory: int  # batches of answers that the critic learns from again
    width: int  # channels of the critic's first layer
    critic_steps: int
    critic_rate: float
    generator_steps: int
    generator_batch: int
    generator_rate: float
    spread: float  # weight of the term that keeps images of one label apart
    average: float  # of the generator's weights, over its steps

    @property
    def sigma(self) -> float:
        """For `--json`."""
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

    def mechanism(self, budget: Budget) -> dict[str, str]:
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
        return "sigma of a vote's margin by the teachers"


def plan(options: TrainOptions, preset: str, schema: Schema, budget: Budget) -> PateGanSettings:
    quick = preset == "quick"
    values = teacher_values(options, schema, records_each=60)
    classes = len(schema.classes)
    values = {"steps": 60 if quick else 110, "batch": max(2, classes * max(1, 100 // classes))} | values
    values |= {"votes": "relative", "labels": "counts", "jitter": 0.3, "memory": 10, "width": 32}
    values |= {"critic_steps": 15, "critic_rate": 3e-3, "generator_steps": 2, "generator_rate": 3e-4}
    values |= {"generator_batch": 20, "average": 0.9, "spread": 0.03}
    noise, scale = _noise(options, budget, steps=values["steps"], batch=values["batch"])
    return PateGanSettings(**common(options, preset), noise=noise, scale=scale, **values)


def _noise(options: TrainOptions, budget: Budget, *, steps: int, batch: int) -> tuple[Any, float]:
    """Which noise on the counts, and how much of it for so many labels."""
    goal: dict[str, Any] = {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.pricing()}
    if math.isinf(budget.epsilon):
        return "gaussian", 0.0
    if options.aggregate == "laplace":
        if options.noise is not None:
            raise DatalensError("--noise is about Gaussian noise: leave it out, or use --aggregate gnmax")
        facts: dict[str, Any] = {"row_unit": "teacher", "relation": budget.relation, "noise": "operating-system"}
        facts |= {"moved": 2 * batch * steps, "queries": batch * steps, "step": 0}
        return "discrete-laplace", calibrate_event(lambda scale: LaplaceEvent(scale=scale, **facts), times=1, **goal)
    law = whole_number_law(options, budget)
    sensitivity = math.sqrt(2 * batch)
    return law, calibrate_sigma(sensitivity=sensitivity, steps=steps, law=law, coordinates=2 * batch, **goal)
