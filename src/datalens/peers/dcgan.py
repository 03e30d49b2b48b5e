"""DC-GAN (Radford et al. 2016), with labels: no noise at all. The ceiling that private methods are held against."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import TrainOptions
from datalens.peers.settings import Part, PeerSettings, asked, common
from datalens.privacy.events import unprotected
from datalens.privacy.ledger import Budget


@dataclass(frozen=True, kw_only=True)
class DcganSettings(PeerSettings):
    method: Literal["dcgan"]
    batch: int
    rate: float  # of Adam, for both networks
    latent: int
    width: int  # channels of the discriminator's first layer
    slim: int  # the generator has so many times fewer channels than DC-GAN's
    average: float  # of the generator's weights, over steps

    @property
    def one_charge(self) -> bool:
        return True

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: batch norm needs two images")

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = unprotected(budget.relation, origin=self.origin)
        loud: dict[str, Any] = {"sensitivity": math.inf, "cells": 0, "noise_to_signal": 0.0}
        return (Part(name="the whole training", event=event, times=1, **loud),)

    def mechanism(self, budget: Budget) -> dict[str, str]:
        return {"name": "none: a GAN trained on the records as they are (DC-GAN)", "sensitivity": "not bounded"}

    def noise_said(self) -> str:
        return "none"

    def price_said(self) -> str:
        return "at infinity"

    def said(self) -> str:
        return f"{self.steps} steps of {self.batch} images, no noise"


EPOCHS = 10


def plan(options: TrainOptions, preset: str, schema: Schema, budget: Budget) -> DcganSettings:
    if budget.epsilon < float("inf"):
        raise BudgetExceeded(
            f"--method dcgan has no noise, which {budget.describe(budget.epsilon)} does not cover: use --epsilon inf"
        )
    batch = 64
    values: dict[str, Any] = {
        "noise": "gaussian",
        "steps": max(1, EPOCHS * schema.nominal_size // batch),
        "batch": batch,
        "rate": 2e-4,
        "latent": 100,
        "width": 64,
        "slim": 1,
        "average": 0.999,
    }
    if preset == "quick":
        values |= {"steps": 800, "rate": 1e-3, "width": 16, "slim": 4, "average": 0.99}
    return DcganSettings(**common(options, preset), **(values | asked(options, "steps", "batch")))
