"""GS-WGAN (Chen, Orekondy, Fritz 2020): one of many discriminators, chosen in secret, says where images should move."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.peers.settings import Part, PeerSettings, asked, common
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.events import OneOfManyEvent
from datalens.privacy.ledger import Budget


@dataclass(frozen=True, kw_only=True)
class GswganSettings(PeerSettings):
    """`steps` are blocks, charged one by one, of `block` steps of the generator each."""

    method: Literal["gswgan"]
    teachers: int
    shares: Literal["hashed", "balanced"]
    block: int
    batch: int  # synthetic images in a step, and records a discriminator draws
    clip: float  # C: the longest gradient of an image
    sigma: float  # of the noise on every number: σ·2C in the paper's letters
    trained: int  # discriminators that learn in a step, whoever is chosen: the next ones in turn
    warm_steps: int  # of every discriminator, before the first step
    penalty: float  # on gradients that are not 1 long
    width: int  # channels of a discriminator's first layer
    teacher_rate: float
    rate: float
    latent: int
    slim: int

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
        if not 0 < self.clip < 1e6:
            raise DatalensError(f"--clip must be above 0, and finite, not {self.clip:g}")
        if self.teachers > schema.nominal_size:
            raise DatalensError(
                f"--teachers {self.teachers} is more than the {schema.nominal_size} records {schema.name} has: "
                "most shares would be empty; choose fewer"
            )

    def event(self, budget: Budget, *, step: int = 0) -> OneOfManyEvent:
        """What a block is charged as."""
        return _event(self.sigma, budget, self.as_dict(), step=step, seeded=self.noise_seeded)

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = self.event(budget)
        relative = self.sigma * math.sqrt(schema.dimensions) / self.clip
        loud: dict[str, Any] = {"cells": self.block * self.batch * schema.dimensions, "noise_to_signal": relative}
        name = f"{self.block} gradients of {self.batch}"
        return (Part(name=name, event=event, sensitivity=event.diameter, times=self.steps, **loud),)

    def mechanism(self, budget: Budget) -> dict[str, str]:
        return {
            "name": "clipped image gradients of one discriminator, chosen in secret, with Gaussian noise (GS-WGAN)",
            "sensitivity": "2·clip·sqrt(batch), when the one that changed is chosen: one record changes one of them",
        }

    def price_said(self) -> str:
        return "as Gaussian noise of variance sigma² on one of many, chosen without replacement, one of them replaced"

    def said(self) -> str:
        return (
            f"{self.teachers} discriminators, {self.steps} blocks of {self.block} steps of {self.batch} images, "
            f"σ = {self.sigma:.5g} on gradients of norm {self.clip:g}"
        )

    @property
    def signal(self) -> str:
        return "length of the noise on an image's gradient by that of the gradient"


def _event(sigma: float, budget: Budget, values: dict[str, Any], *, step: int = 0, seeded: bool) -> OneOfManyEvent:
    bound = values["clip"] * math.sqrt(values["batch"]) * (1 + 1e-9)
    return OneOfManyEvent(
        row_unit="teacher",
        l2_bound=bound,
        diameter=2 * bound,
        teachers=values["teachers"],
        relation=budget.relation,
        sigma=sigma,
        repeats=values["block"],
        queries=values["batch"],
        step=step,
        noise="seeded" if seeded else "operating-system",
    )


def plan(options: TrainOptions, preset: str, schema: Schema, budget: Budget) -> GswganSettings:
    values: dict[str, Any] = {
        "noise": "gaussian",
        "teachers": max(1, schema.nominal_size // 60),
        "shares": "balanced" if options.relation == "replace-one" else "hashed",
        "block": 100,
        "steps": 200,
        "batch": 32,
        "clip": 1.0,
        "trained": 8,
        "warm_steps": 100,
        "penalty": 10.0,
        "width": 16,
        "teacher_rate": 1e-4,
        "rate": 1e-4,
        "latent": 10,
        "slim": 1,
    }
    if preset == "quick":
        values |= {
            "teachers": max(1, schema.nominal_size // 600),
            "block": 20,
            "steps": 50,
            "batch": 16,
            "warm_steps": 10,
        }
        values |= {"trained": 2, "width": 8, "slim": 4, "teacher_rate": 1e-3, "rate": 1e-3}
    values |= asked(options, "teachers", "steps", "batch", "clip")
    values["trained"] = min(values["trained"], values["teachers"])
    settings = {**common(options, preset), **values}
    GswganSettings(**settings, sigma=0.0).check(schema)
    sigma = calibrate_event(
        lambda sigma: _event(sigma, budget, values, seeded=False),
        times=values["steps"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
    )
    return GswganSettings(**settings, sigma=sigma)
