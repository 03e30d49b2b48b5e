"""DC-GAN (Radford et al. 2016) with labels: a discriminator trained on the records, and a generator. NOT PRIVATE.

Differs from the paper: labels, in both networks; no batch norm in the discriminator; the released generator has an
average of the last weights.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812

from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import WholeNumber
from datalens.plans.base import Method, Part, Place, Request, StepSettings, asked, common
from datalens.privacy.events import unprotected
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import release_unprotected
from datalens.private.pool import Pool
from datalens.public import streams
from datalens.public.critic import fresh_critic
from datalens.public.learner import Learner
from datalens.released.generator import Generator, draw_latent, fresh_generator
from datalens.run.folder import Alone, Run


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: WholeNumber = None
    """Steps of discriminator and generator."""
    batch: WholeNumber = None
    """Number of records, and of generated images, in a step."""


@dataclass(frozen=True, kw_only=True)
class DcganSettings(StepSettings):
    method: Literal["dcgan"]
    batch: int
    rate: float  # learning rate of Adam, for both networks
    latent: int
    width: int  # channels of the discriminator's first layer
    slim: int  # factor by which the generator has fewer channels than DC-GAN's
    average: float  # decay of the average of the generator's weights over steps

    @property
    def one_charge(self) -> bool:
        return True

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: batch norm needs two images")

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = unprotected(budget.relation, origin=self.origin)
        sizes: dict[str, Any] = {"sensitivity": math.inf, "cells": 0, "noise_to_signal": 0.0}
        return (Part(name="the whole training", event=event, times=1, **sizes),)

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        return {"name": "none: a GAN trained on the records as they are (DC-GAN)", "sensitivity": "not bounded"}

    def noise_said(self) -> str:
        return "none"

    def price_said(self) -> str:
        return "at infinity"

    def said(self) -> str:
        return f"{self.steps} steps of {self.batch} images, no noise"


EPOCHS = 10


def plan(request: Request, schema: Schema, budget: Budget) -> DcganSettings:
    if budget.epsilon < float("inf"):
        raise BudgetExceeded(
            f"--method dcgan adds no noise, so it cannot meet {budget.describe(budget.epsilon)}: use --epsilon inf"
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
    if request.preset == "quick":
        values |= {"steps": 800, "rate": 1e-3, "width": 16, "slim": 4, "average": 0.99}
    return DcganSettings(**common(request), **(values | asked(request.options, "steps", "batch")))


LOG_EVERY = 100


def gather(records: Records, settings: DcganSettings, place: Place) -> Pool:
    return Pool.gather(records, device=place.device)


def train(run: Run, pool: Pool, settings: DcganSettings, place: Place) -> Generator:
    s, schema, device = settings, run.schema, place.device
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    critic = fresh_critic(schema.shape, classes, width=s.width, seed=s.seed).to(device)
    student = Learner(generator, rate=s.rate, average=s.average)
    teacher = Learner(critic, rate=s.rate)
    if not run.ledger.events:
        release_unprotected(run.ledger, origin=s.origin)

    for step in run.steps(s.steps, student=student, teachers=Alone(teacher, run.path / "checkpoints")):
        random = streams.generator(s.seed, "step", step)
        real, labels = pool.batch(torch.randint(pool.count, (s.batch,), generator=random))
        fake = generator(draw_latent(s.batch, generator.architecture, random).to(device), labels)
        says_real, says_fake = critic(real, labels), critic(fake.detach(), labels)
        loss = F.softplus(-says_real).mean() + F.softplus(says_fake).mean()
        teacher.step(loss)
        student.step(F.softplus(-critic(fake, labels)).mean())
        if step % LOG_EVERY == 0:
            run.log(step, critic_loss=float(loss.detach()))
    return student.averaged()


METHOD = Method(
    settings=DcganSettings,
    plan=plan,
    gather=gather,
    train=train,
    options=Options,
    persons=True,
)
