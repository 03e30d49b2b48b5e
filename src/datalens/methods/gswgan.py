"""GS-WGAN (Chen, Orekondy, Fritz 2020): only the generator is private, through the gradients of single images.

Discriminators train on disjoint shares of the records without noise. In each step one of them, chosen in secret, gives
the gradients of its score with respect to the synthetic images. The gradient of every image is clipped to C, noise is
added, and the generator follows it.

Differs from the paper:
- the price counts that all gradients of a step come from one discriminator (docs/decisions.md);
- which discriminators learn in a step does not depend on the one that is chosen (`private.critics`);
- the warm start shows discriminators the first images of the generator, not those of generators of their own;
- the architecture is DC-GAN's.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from datalens.bounded.clip import clip_images
from datalens.bounded.contributions import BoundedSum
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import Number, WholeNumber
from datalens.plans.base import Method, Part, Place, Request, StepSettings, asked, common
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.events import OneOfManyEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.one_of_many import charge_block
from datalens.private.critics import Critics
from datalens.private.partition import rule_named
from datalens.private.shares import Shares
from datalens.public import streams
from datalens.public.critic import Critic
from datalens.public.learner import Learner
from datalens.released.follow import follow
from datalens.released.generator import Generator, draw_latent, fresh_generator
from datalens.run.folder import Alone, Run


@dataclass(frozen=True, kw_only=True)
class Options:
    teachers: WholeNumber = None
    """Number of discriminators, each trained on its own share of the records."""
    steps: WholeNumber = None
    """Blocks of steps of the generator."""
    batch: WholeNumber = None
    """Number of records, and of generated images, in a step."""
    clip: Number = None
    """Clipping norm of the gradient of a generated image."""
    trained: WholeNumber = None
    """Number of discriminators that learn in a step, taking turns."""
    warm_steps: WholeNumber = None
    """Number of steps of every discriminator before the first step of the generator."""
    teacher_rate: Number = None
    """Learning rate of the discriminators."""
    student_rate: Number = None
    """Learning rate of the generator."""


@dataclass(frozen=True, kw_only=True)
class GswganSettings(StepSettings):
    """Settings of GS-WGAN. `steps` are blocks of `block` steps of the generator each; a block is one charge."""

    method: Literal["gswgan"]
    teachers: int
    shares: Literal["hashed", "balanced"]
    block: int
    batch: int  # synthetic images in a step, and records that a discriminator draws for it
    clip: float  # C: clipping norm of the gradient of an image
    sigma: float  # standard deviation of the noise on every coordinate: σ·2C in the paper's symbols
    trained: int  # discriminators that learn in a step, taking turns, whichever is chosen
    warm_steps: int  # steps of every discriminator before the first step
    penalty: float  # weight of the penalty on gradients whose norm is not 1
    width: int  # channels of a discriminator's first layer
    teacher_rate: float
    rate: float
    latent: int
    slim: int

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
        if not (0 < self.teacher_rate < 1 and 0 < self.rate < 1):
            raise DatalensError("--teacher-rate and --student-rate must be between 0 and 1")
        if not 0 < self.clip < 1e6:
            raise DatalensError(f"--clip must be above 0, and finite, not {self.clip:g}")
        if self.teachers > schema.nominal_size:
            raise DatalensError(
                f"--teachers {self.teachers} is more than the {schema.nominal_size} records {schema.name} has: "
                "most shares would be empty; choose fewer"
            )

    def event(self, budget: Budget, *, step: int = 0) -> OneOfManyEvent:
        """Return the event that a block is charged as."""
        return _event(self.sigma, budget, self.as_dict(), step=step, seeded=self.noise_seeded)

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = self.event(budget)
        relative = self.sigma * math.sqrt(schema.dimensions) / self.clip
        sizes: dict[str, Any] = {"cells": self.block * self.batch * schema.dimensions, "noise_to_signal": relative}
        name = f"{self.block} gradients of {self.batch}"
        return (Part(name=name, event=event, sensitivity=event.diameter, times=self.steps, **sizes),)

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
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
        return "norm of the noise on an image's gradient / norm of the gradient"


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


def plan(request: Request, schema: Schema, budget: Budget) -> GswganSettings:
    values: dict[str, Any] = {
        "noise": "gaussian",
        "teachers": max(1, schema.nominal_size // 60),
        "shares": "balanced" if budget.relation == "replace-one" else "hashed",
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
    if request.preset == "quick":
        values |= {
            "teachers": max(1, schema.nominal_size // 600),
            "block": 20,
            "steps": 50,
            "batch": 16,
            "warm_steps": 10,
        }
        values |= {"trained": 2, "width": 8, "slim": 4, "teacher_rate": 1e-3, "rate": 1e-3}
    values |= asked(request.options, "teachers", "steps", "batch", "clip", "trained", "warm_steps", "teacher_rate")
    values["rate"] = asked(request.options, "student_rate").get("student_rate", values["rate"])
    values["trained"] = min(values["trained"], values["teachers"])
    settings = {**common(request), **values}
    GswganSettings(**settings, sigma=0.0).check(schema)
    sigma = calibrate_event(
        lambda sigma: _event(sigma, budget, values, seeded=False),
        times=values["steps"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
    )
    return GswganSettings(**settings, sigma=sigma)


def gather(records: Records, settings: GswganSettings, place: Place) -> Shares:
    """Put every record into exactly one share, as bytes."""
    rule = rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)
    return Shares.gather(records, rule, features=lambda images: images.permute(0, 3, 1, 2), device=place.device)


def train(run: Run, shares: Shares, settings: GswganSettings, place: Place) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(place.device)
    student = Learner(generator, rate=s.rate)
    critic = Critic(schema.shape, classes, width=s.width)
    critics = Critics(critic, shares, batch=s.batch, rate=s.teacher_rate, penalty=s.penalty, seed=s.seed)
    noise = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)

    for block in run.steps(s.steps, student=student, teachers=Alone(critics, run.path / "checkpoints")):
        if block == 0 and s.warm_steps:
            critics.warm_up(s.warm_steps, *fakes(generator, s, step=-1))
        try:
            paid = charge_block(run.ledger, s.event(run.ledger.budget, step=block), noise)
        except BudgetExceeded:
            break  # an interruption cost a block: the run ends with fewer blocks, within the budget
        for step in range(block * s.block, (block + 1) * s.block):
            images, labels = fakes(generator, s, step=step)
            critics.fit(step * s.trained, s.trained, images, labels, step=step)

            def ask(teacher: int, images: torch.Tensor = images, labels: torch.Tensor = labels) -> BoundedSum:
                return clip_images(critics.image_gradient(teacher, images, labels), clip=s.clip, teacher=teacher)

            follow(student, images, paid.release(ask))
        run.log(block)
    return generator


def fakes(generator: Generator, s: GswganSettings, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of synthetic images, with the autograd graph back to the generator, and their labels."""
    random = streams.generator(s.seed, "fakes", step)
    device = next(generator.parameters()).device
    z = draw_latent(s.batch, generator.architecture, random).to(device)
    labels = torch.randint(generator.architecture.classes, (s.batch,), generator=random).to(device)
    return generator(z, labels), labels


METHOD = Method(
    settings=GswganSettings,
    plan=plan,
    gather=gather,
    train=train,
    options=Options,
    accountant="rdp-improved",
    persons=True,
    teachers=True,
)
