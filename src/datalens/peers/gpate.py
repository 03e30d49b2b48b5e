"""G-PATE (Long et al. 2021): teachers vote on the sign and size of randomly projected gradients of images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.peers.ensembles import EnsembleSettings, teacher_values
from datalens.peers.settings import Part, asked, common, unbroken
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.events import Charge, GaussianEvent, confident_answer, confident_check
from datalens.privacy.ledger import Budget


@dataclass(frozen=True, kw_only=True)
class GPateSettings(EnsembleSettings):
    method: Literal["gpate"]
    projections: int  # p: queries about one image
    bins: int
    threshold: float  # of the check, as a part of the teachers
    sigma_check: float
    sigma: float  # of the answers
    gamma: float
    student_rate: float

    @property
    def queries(self) -> int:
        """Of one step: every projected coordinate of every image is one."""
        return self.batch * self.projections

    @property
    def one_charge(self) -> bool:
        return True

    def check(self, schema: Schema) -> None:
        super().check(schema)
        if self.bins < 2:
            raise DatalensError(f"--bins must be at least 2, not {self.bins}")
        if self.projections > self.basis_size:
            raise DatalensError(
                f"--projections {self.projections} is more than the {self.basis_size} coordinates there are"
            )

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """At most: answers are charged for the queries that pass the check."""
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
        """Every step has a check; answers follow where it passes (see `answers_paid`)."""
        return unbroken({event.step for event in events if _is_check(event)})

    def answers_paid(self, events: Sequence[Charge]) -> int:
        """Return the most queries that may have been answered with these charges."""
        return sum(event.queries for event in events if not _is_check(event))

    def mechanism(self, budget: Budget) -> dict[str, str]:
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
        return "sigma by the teachers"


def _is_check(event: Charge) -> bool:
    """A ballot moves the largest of a query's counts by one, and the counts themselves by √2 (see `events`)."""
    return isinstance(event, GaussianEvent) and event.diameter == event.l2_bound


DIGITS = 1 + 1e-9  # for the last digits of two charges that together cost what was calibrated
CHECK = 6.0  # the check's noise by that of the answers, as in the published setting for ε = 10


def plan(options: TrainOptions, preset: str, schema: Schema, budget: Budget) -> GPateSettings:
    quick = preset == "quick"
    values = teacher_values(options, schema, records_each=60 if quick else 15)
    values = {"steps": 100 if quick else 300, "batch": 20 if quick else 60} | values
    values |= {"projections": min(16, values["basis_size"]), "bins": 2, "threshold": 0.5, "gamma": 1e-3}
    values |= {"student_rate": 1e-3} | asked(options, "projections", "bins", "threshold")
    queries = values["batch"] * values["projections"]
    sigma = calibrate_sigma(
        sensitivity=math.sqrt(queries * (2 + CHECK**-2)),  # of check and answers together, in units of the answers' σ
        steps=values["steps"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
    )
    noise: dict[str, Any] = {"noise": "gaussian", "sigma": DIGITS * sigma, "sigma_check": CHECK * DIGITS * sigma}
    return GPateSettings(**common(options, preset), **noise, **values)
