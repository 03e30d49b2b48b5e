"""DP-MERF (Harder, Adamczewski, Park 2021): one release, the class sums of random Fourier features."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.peers.settings import Part, PeerSettings, asked, common, whole_number_law
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.events import DiscreteGaussianEvent, GaussianEvent
from datalens.privacy.ledger import Budget

GRID = 2**16
COUNTED = GRID // 2  # of a row's length, what a record counts for itself; room for features: 0.87 of the grid


@dataclass(frozen=True, kw_only=True)
class DpmerfSettings(PeerSettings):
    method: Literal["dpmerf"]
    frequencies: int
    grid: int  # steps of the grid on which a record's row lies: its length, too
    counted: int
    sigma: float
    generator_steps: int
    batch: int  # images of each class in a step
    rate: float
    latent: int
    slim: int  # the generator has so many times fewer channels than DC-GAN's

    @property
    def coordinates(self) -> int:
        """Of a record's row: cosines, sines, and a count."""
        return 2 * self.frequencies + 1

    def check(self, schema: Schema) -> None:
        if not self.counted < self.grid <= 2**20 or self.batch < 2 or self.frequencies > 2**20 or self.slim > 64:
            raise DatalensError("the settings grid, counted, frequencies, slim and --batch (at least 2) do not fit")

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        classes = len(schema.classes)
        facts: dict[str, Any] = {"row_unit": "record", "relation": budget.relation, "noise": self.origin, "step": 0}
        facts |= {"l2_bound": float(self.grid), "diameter": 2.0 * self.grid}
        facts |= {"sigma": self.sigma, "queries": classes}
        cells = classes * self.coordinates
        discrete = self.noise == "discrete-gaussian"
        event = DiscreteGaussianEvent(coordinates=cells, **facts) if discrete else GaussianEvent(**facts)
        relative = self.sigma / self.grid * math.sqrt(2 * self.frequencies) * classes / schema.nominal_size
        loud = {"sensitivity": event.sensitivity, "cells": cells, "noise_to_signal": relative}
        return (Part(name="class sums of features", event=event, times=1, **loud),)  # type: ignore[arg-type]

    def mechanism(self, budget: Budget) -> dict[str, str]:
        moved = "the length of a row" if budget.relation == "add-remove" else "the distance of two rows"
        return {
            "name": "class sums of random Fourier features with Gaussian noise (DP-MERF)",
            "sensitivity": f"{moved}: one record has one row, in the cells of its class",
        }

    def noise_said(self) -> str:
        return "exact discrete Gaussian (OpenDP)" if self.noise == "discrete-gaussian" else "rounded to integers"

    def price_said(self) -> str:
        if self.noise == "discrete-gaussian":
            return "as Gaussian noise of variance sigma² - 4 (by RDP: as zCDP)"
        return super().price_said()

    def said(self) -> str:
        return (
            f"one release of {self.coordinates} sums a class, σ = {self.sigma:.5g}, then {self.generator_steps} steps "
            "of the generator"
        )

    @property
    def signal(self) -> str:
        return "length of the noise of a class's features by the number of its records"


def plan(options: TrainOptions, preset: str, schema: Schema, budget: Budget) -> DpmerfSettings:
    law = whole_number_law(options, budget)
    values: dict[str, Any] = {
        "steps": 1,
        "frequencies": 1000,
        "grid": GRID,
        "counted": COUNTED,
        "generator_steps": 100 if preset == "quick" else 300,
        "batch": 20,
        "rate": 0.01,
        "latent": 20,
        "slim": 4,
    }
    values |= asked(options, "batch")
    values["generator_steps"] = options.steps or values["generator_steps"]
    sensitivity = GRID * (1.0 if budget.relation == "add-remove" else 2.0)
    cells = len(schema.classes) * (2 * values["frequencies"] + 1)
    sigma = calibrate_sigma(
        sensitivity=sensitivity,
        steps=1,
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
        law=law,
        coordinates=cells,
    )
    return DpmerfSettings(**common(options, preset), noise=law, sigma=sigma, **values)
