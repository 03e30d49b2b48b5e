"""GANs whose critic is trained by DP-SGD. The generator learns from the critic, which every step releases.

DP-GAN (Xie, Lin, Wang, Wang, Zhou 2018): a Wasserstein GAN. The critic's weights are clipped to a small box after every
step, which bounds its slopes. Differs from the paper: gradients are clipped per example (weight clipping alone bounds
them by constants that are not computed in practice; the published code adds noise to a batch mean that nothing bounds);
Poisson samples; Adam; labels; an average of the generator's weights; a ledger that prices it, where the published code
has no accountant.

DP-SGD-GAN, after "Private GANs, revisited" (Bie, Kamath, Zhang 2023): many steps of a noisy critic for one of the
generator. Differs from the paper: gradients on fakes are clipped like those on records, but get no noise, since they
are not private; noise and samples come from the operating system; batches are large and steps few, which takes less
time at the same ε; the released generator has an average of its last weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.bounded.norm_topk import NormTopK
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import Number, WholeNumber
from datalens.plans.base import Method, Part, Place, Request, StepSettings, asked, common
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.dpsgd import GradientGate, Schedule, poisson_sample
from datalens.privacy.events import Charge, SubsampledGaussianEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.private.critic_rows import sum_gradients
from datalens.private.pool import Pool
from datalens.public.critic import fresh_critic
from datalens.public.learner import Learner
from datalens.released.critic import fake_gradient, fakes, learn
from datalens.released.generator import Generator, fresh_generator
from datalens.run.folder import Alone, Run

# The bound is enforced in float32, so rows are charged as if they were longer by the factor 1 + ROUNDING. Norms much
# smaller than LEAST_CLIP cannot be computed in float32. `bounded.norm_topk` has the same, and is slow to import.
ROUNDING, LEAST_CLIP = 1e-6, 1e-12


@dataclass(frozen=True, kw_only=True)
class Options:
    steps: WholeNumber = None
    """Blocks of steps."""
    batch: WholeNumber = None
    """Expected number of records in a step of the critic."""
    clip: Number = None
    """Clipping norm of a record's gradient."""
    teacher_steps: WholeNumber = None
    """Steps of the critic per step of the generator."""


@dataclass(frozen=True, kw_only=True)
class NoisyCriticSettings(StepSettings):
    """Settings of both methods. `steps` are blocks of `block` steps of the critic each; a block is one charge."""

    method: Literal["dpgan", "dpsgd-gan"]
    block: int
    critic_steps: int  # steps of the critic for one of the generator
    batch: int  # expected number of records in a sample
    rate: float  # probability that a record is in a sample
    clip: float  # C: clipping norm of a record's gradient
    sigma: float  # noise multiplier: the noise on every coordinate has standard deviation σ·C
    fakes: int  # synthetic images in a step of the critic, and in one of the generator
    weight_clip: float  # the critic's weights stay in [-weight_clip, weight_clip]; 0: they are not clipped
    width: int
    critic_rate: float
    generator_rate: float
    latent: int
    slim: int
    average: float  # decay of the average of the generator's weights over steps

    def check(self, schema: Schema) -> None:
        if not 0 < self.rate <= 1 or self.fakes < 2:
            raise DatalensError("--batch must be at most the nominal number of records")
        if self.rate != self.batch / schema.nominal_size:
            raise DatalensError(
                f"the sampling rate {self.rate:g} is not batch {self.batch} / nominal size {schema.nominal_size}"
            )
        if not LEAST_CLIP <= self.clip < 1e6:
            raise DatalensError(f"--clip must be at least {LEAST_CLIP:g}, and below a million, not {self.clip:g}")

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = _event(self.sigma, self.as_dict(), seeded=self.noise_seeded)
        sizes: dict[str, Any] = {"cells": 0, "noise_to_signal": self.sigma / self.batch}
        name = f"{self.block} sums of gradients"
        return (Part(name=name, event=event, sensitivity=event.l2_bound, times=self.steps, **sizes),)

    def steps_paid(self, events: Sequence[Charge]) -> int:
        """Return the number of blocks that these charges have paid for."""
        return sum(event.repeats for event in events if isinstance(event, SubsampledGaussianEvent)) // self.block

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        return {
            "name": "sums of a critic's clipped gradients over Poisson samples of records with Gaussian noise (DP-SGD)",
            "sensitivity": "clip per step, when a record is in the sample: one record has one gradient",
        }

    def price_said(self) -> str:
        return "as Poisson-sampled Gaussian noise of variance sigma²"

    def said(self) -> str:
        return (
            f"{self.steps} blocks of {self.block} steps of the critic on about {self.batch} records, "
            f"{self.critic_steps} for one of the generator, σ = {self.sigma:.4g}·{self.clip:g}"
        )

    @property
    def signal(self) -> str:
        return "noise on a coordinate of the mean gradient / clipping norm"


def _event(sigma: float, values: dict[str, Any], *, seeded: bool) -> SubsampledGaussianEvent:
    """Return the event that a block is charged as."""
    return SubsampledGaussianEvent(
        row_unit="record",
        l2_bound=values["clip"] * (1 + ROUNDING),
        rate=values["rate"],
        relation="add-remove",
        sigma=sigma * values["clip"],
        queries=1,
        step=0,
        noise="seeded" if seeded else "operating-system",
        repeats=values["block"],
    )


PRESETS: dict[str, dict[str, Any]] = {
    "dpgan": {
        "steps": 20,
        "block": 100,
        "critic_steps": 5,
        "batch": 4096,
        "clip": 1.0,
        "fakes": 512,
        "weight_clip": 0.1,
        "width": 32,
        "critic_rate": 2e-4,
        "generator_rate": 2e-4,
        "latent": 100,
        "slim": 1,
        "average": 0.99,
    },
    "dpsgd-gan": {
        "steps": 100,
        "block": 200,
        "critic_steps": 5,
        "batch": 2048,
        "clip": 1.0,
        "fakes": 512,
        "weight_clip": 0.0,
        "width": 32,
        "critic_rate": 5e-4,
        "generator_rate": 5e-4,
        "latent": 100,
        "slim": 1,
        "average": 0.99,
    },
}
QUICK: dict[str, Any] = {"steps": 20, "block": 20, "batch": 64, "fakes": 32, "width": 8, "slim": 4}
QUICK |= {"critic_rate": 1e-3, "generator_rate": 1e-3}


def plan(request: Request, schema: Schema, budget: Budget) -> NoisyCriticSettings:
    if budget.relation != "add-remove":
        raise DatalensError(
            f"--method {request.method} samples records, which is priced for add-remove only: use --relation add-remove"
        )
    values = PRESETS[request.method] | (QUICK if request.preset == "quick" else {})
    options: Options = request.options
    values |= asked(options, "steps", "batch", "clip")
    values["critic_steps"] = options.teacher_steps or values["critic_steps"]
    values["batch"] = min(values["batch"], schema.nominal_size) if options.batch is None else options.batch
    values["rate"] = values["batch"] / schema.nominal_size
    settings = {**common(request), "noise": "gaussian", **values}
    NoisyCriticSettings(**settings, sigma=0.0).check(schema)
    sigma = calibrate_event(
        lambda sigma: _event(sigma, values, seeded=False),
        times=values["steps"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        accountant=budget.pricing(),
    )
    return NoisyCriticSettings(**settings, sigma=sigma)


# --- training -------------------------------------------------------------------------------------------------------


def real_loss(says: Tensor) -> Tensor:
    return F.softplus(-says)


def fake_loss(says: Tensor) -> Tensor:
    return F.softplus(says)


Loss = Callable[[Tensor], Tensor]
# The critic's losses, of its scores for records and for fakes. The generator's loss is the first, of its own images.
LOSSES: dict[str, tuple[Loss, Loss]] = {"dpgan": (torch.neg, torch.clone), "dpsgd-gan": (real_loss, fake_loss)}


def gather(records: Records, settings: NoisyCriticSettings, place: Place) -> Pool:
    return Pool.gather(records, device=place.device)


def train(run: Run, pool: Pool, settings: NoisyCriticSettings, place: Place) -> Generator:
    s, schema, device = settings, run.schema, place.device
    on_records, on_fakes = LOSSES[s.method]
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    student = Learner(generator, rate=s.generator_rate, average=s.average)
    network = fresh_critic(schema.shape, classes, width=s.width, seed=s.seed).to(device)
    critic = Learner(network, rate=s.critic_rate)
    rows = NormTopK(clip=s.clip, selector="none")
    noise = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)
    whole = Schedule(sigma=s.sigma, rate=s.rate, steps=s.steps * s.block, unit=rows.bound, l2_bound=rows.l2_bound)
    gate = GradientGate(run.ledger, whole, noise, blocks=s.steps)

    for block in run.steps(s.steps, student=student, teachers=Alone(critic, run.path / "checkpoints")):
        for step in range(block * s.block, (block + 1) * s.block):
            sample = torch.from_numpy(poisson_sample(noise, pool.count, s.rate))
            try:
                noisy = gate.release(sum_gradients(network, pool, sample, on_records, rows))
            except BudgetExceeded:  # an interruption cost a block: the run ends with fewer blocks, within the budget
                return student.averaged()
            with torch.no_grad():
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="critic", step=step)
            learn(critic, noisy, fake_gradient(network, images, labels, on_fakes, clip=s.clip), batch=s.batch)
            if s.weight_clip > 0:
                with torch.no_grad():
                    for weight in network.parameters():
                        weight.clamp_(-s.weight_clip, s.weight_clip)
            if (step + 1) % s.critic_steps == 0:
                images, labels = fakes(generator, s.fakes, seed=s.seed, purpose="generator", step=step)
                student.step(on_records(network(images, labels)).mean())
        run.log(block)
    return student.averaged()


METHOD = Method(
    settings=NoisyCriticSettings,
    plan=plan,
    gather=gather,
    train=train,
    options=Options,
    accountant="rdp-improved",
)
