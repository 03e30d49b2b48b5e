"""DP-MERF (Harder, Adamczewski, Park 2021): release a noisy mean embedding once, then train a generator to match it.

Differs from the paper:
- sums over records are released, not means over n: n is private, so every record's row also counts the record;
- the bandwidth is public (`fourier`), not the median distance of the records;
- rows are whole numbers, so that the noise is exact.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import Noise, WholeNumber
from datalens.plans.base import Method, Part, Place, Request, StepSettings, asked, common, whole_number_law
from datalens.plans.guidance import nothing_stands_out
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.events import DiscreteGaussianEvent, GaussianEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.private.embedding import embed
from datalens.private.pool import Pool
from datalens.progress import say
from datalens.public.fourier import Fourier
from datalens.released.embedding import fit, read_embedding
from datalens.released.generator import Generator, fresh_generator
from datalens.run.folder import Run

GRID = 2**16
COUNTED = GRID // 2  # value of a row's count cell; a norm of 0.87 · GRID is left for the features


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: WholeNumber = None
    """Steps of the generator, after the one release."""
    batch: WholeNumber = None
    """Number of generated images of each class in a step."""
    noise: Noise = None


@dataclass(frozen=True, kw_only=True)
class DpmerfSettings(StepSettings):
    method: Literal["dpmerf"]
    frequencies: int
    grid: int  # largest norm of a row, in steps of the grid that rows are rounded to
    counted: int  # value of a record's count cell, in the same steps
    sigma: float
    generator_steps: int
    batch: int  # images of each class in a step
    rate: float
    latent: int
    slim: int  # factor by which the generator has fewer channels than DC-GAN's

    @property
    def coordinates(self) -> int:
        """Number of values of a record's row: cosines, sines, and a count."""
        return 2 * self.frequencies + 1

    def check(self, schema: Schema) -> None:
        if not self.counted < self.grid <= 2**20 or self.batch < 2 or self.frequencies > 2**20 or self.slim > 64:
            raise DatalensError(
                "the settings grid, counted, frequencies, slim and --batch (at least 2) do not fit together"
            )

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        classes = len(schema.classes)
        facts: dict[str, Any] = {"row_unit": "record", "relation": budget.relation, "noise": self.origin, "step": 0}
        facts |= {"l2_bound": float(self.grid), "diameter": 2.0 * self.grid}
        facts |= {"sigma": self.sigma, "queries": classes}
        cells = classes * self.coordinates
        discrete = self.noise == "discrete-gaussian"
        event = DiscreteGaussianEvent(coordinates=cells, **facts) if discrete else GaussianEvent(**facts)
        relative = self.sigma / self.grid * math.sqrt(2 * self.frequencies) * classes / schema.nominal_size
        sizes = {"sensitivity": event.sensitivity, "cells": cells, "noise_to_signal": relative}
        return (Part(name="class sums of features", event=event, times=1, **sizes),)  # type: ignore[arg-type]

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
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
            f"one release of {self.coordinates} sums for each class, σ = {self.sigma:.5g}, then {self.generator_steps} "
            "steps of the generator"
        )

    @property
    def signal(self) -> str:
        return "norm of the noise on the features of a class, in rows / number of records of the class"


def plan(request: Request, schema: Schema, budget: Budget) -> DpmerfSettings:
    law = whole_number_law(request, budget)
    values: dict[str, Any] = {
        "steps": 1,
        "frequencies": 1000,
        "grid": GRID,
        "counted": COUNTED,
        "generator_steps": 100 if request.preset == "quick" else 300,
        "batch": 20,
        "rate": 0.01,
        "latent": 20,
        "slim": 4,
    }
    values |= asked(request.options, "batch")
    values["generator_steps"] = request.options.steps or values["generator_steps"]
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
    return DpmerfSettings(**common(request), noise=law, sigma=sigma, **values)


def gather(records: Records, settings: DpmerfSettings, place: Place) -> Pool:
    return Pool.gather(records, device=torch.device("cpu"))  # it is read only once


def train(run: Run, pool: Pool, settings: DpmerfSettings, place: Place) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    fourier = Fourier(schema.shape, s.frequencies, seed=s.seed)
    noisy = run.journal.find(run.ledger, step=0)  # charged and released before an interruption
    if noisy is None:
        sums = embed(pool, fourier, classes=classes, grid=s.grid, counted=s.counted)
        with open_noise(s.noise, s.sigma, draws=sums.cells, seed=run.config["options"]["noise_seed"]) as noise:
            noisy = make_mechanism(s.sigma, noise).release(sums, run.ledger, step=0)
        run.journal.save(noisy)
    run.completed = 1

    embedding = read_embedding(noisy, grid=s.grid, counted=s.counted)
    if not bool(embedding.present.any()):
        raise DatalensError(nothing_stands_out(schema, run.ledger))
    for label in torch.nonzero(~embedding.present).flatten().tolist():
        say(f"warning: class {schema.classes[label]} has too few records to say anything of: its images mean nothing")
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(place.device)
    return fit(generator, embedding, fourier, steps=s.generator_steps, batch=s.batch, rate=s.rate, seed=s.seed)


METHOD = Method(
    settings=DpmerfSettings,
    plan=plan,
    gather=gather,
    train=train,
    options=Options,
)
