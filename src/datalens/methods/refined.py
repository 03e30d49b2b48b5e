"""Private moments, then a diffusion model: a second stage that makes images look and work like images.

1. Private moments are released with a part of the budget (`methods.moments`).
2. A linear classifier of texture is trained on all records at once, by noisy sums of one bounded row per record.
3. A small network is pre-trained to remove noise from images drawn from the moments, which costs nothing.
4. The network is trained on records by DP-SGD with the rest of the budget: Poisson samples, one row per record (or
   person), every row brought to one length, one charge for a block of steps (`gradients.rows`, `privacy.dpsgd`).
5. Images are drawn from the moments, with noise added, the network removes the noise, and the classifier says which
   class each image has come to show (`released.denoiser`).

A record's row depends on that record, on released weights and on public numbers, and on nothing else. Which noise is
added to an image follows from a hash of the record and the number of the step, not from its place in a batch. Rows are
whole numbers, whose sums are exact in any order; and it is tried at the start of a run, on random images, that
the arithmetic of this machine does not round by place.

Records may be spread over ranks (`run.rank_rows`). Each rank draws its own part of every Poisson sample and adds up the
rows of its own records, at weights that rank 0 has released. Charges, noise and weights are rank 0's alone.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from tyro.conf import arg

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.parts import PartSum
from datalens.bounded.whole_rows import GRID, WholeRows, WholeSum
from datalens.data.records import Records, record_keys
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.files import load_tensors, save_tensors
from datalens.gradients.rows import RowEngine
from datalens.methods import moments
from datalens.methods.moments import MOMENTS, MomentSettings
from datalens.options import Number, WholeNumber
from datalens.plans.base import Method, Part, Place, Request, checked, cost, gaps_of_blocks, gaussian_event, known
from datalens.privacy.accountant import Accountant
from datalens.privacy.dpsgd import GradientGate, Schedule, calibrate_sigma, poisson_sample, sample_of
from datalens.privacy.events import ROUNDING, Charge, Event, SubsampledGaussianEvent, of_part
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import NoiseSource, SecureNoise, SeededNoise, open_noise
from datalens.private.moments import FINE, RecordRows
from datalens.public import streams
from datalens.public.texture import Texture
from datalens.public.threads import mapped
from datalens.released import denoiser
from datalens.released import moments as released
from datalens.released.denoiser import DiffusionModel, Network, Shape, channels_last, fresh_network
from datalens.released.moments import MomentModel, Start
from datalens.run.folder import NoTeachers, Run
from datalens.run.parked import park, unpark
from datalens.run.rank_rows import PartOfRank, RankRows
from datalens.run.ranks import World, ranks

CPU = torch.device("cpu")
PART, LABELS = "refinement", "labels"  # the names of the second stage's releases in every charge
CHUNK = 16  # images whose gradients are computed together: more would not stay in the processor's cache
ON_GPU = 512  # the same on a GPU
SOFTENING = 0.01  # gradients much shorter than this count for less
PRETRAINED = "pretrained.safetensors"  # in a run folder; made of released values alone

# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options(moments.Options):
    """The options of private moments, and those of the second stage."""

    refine: Annotated[Literal["auto", "off", "diffusion"] | None, arg(help_behavior_hint="(default: off)")] = None
    """diffusion: train a small diffusion model after the moments, by DP-SGD. auto: where it is worth it."""
    refine_minutes: Number = None
    """About how many minutes the second stage may take on this machine; decides its steps."""
    moments_share: Number = None
    """Share of the budget (in mu²) that the moments get, if there is a second stage."""
    labels_share: Number = None
    """Share of a linear classifier, which says what class a refined image shows; 0: none."""
    refine_steps: WholeNumber = None
    """Steps of DP-SGD."""
    refine_batch: WholeNumber = None
    """Expected number of records in a step."""
    refine_copies: WholeNumber = None
    """Copies of a record in a step, each with noise of its own; its row is the mean of their gradients."""
    refine_rate: Number = None
    """Learning rate of DP-SGD."""
    pretraining: WholeNumber = None
    """Steps of training on images drawn from the moments, which costs no privacy."""


OWN = frozenset(Options.__dataclass_fields__) - frozenset(moments.Options.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class RefinedSettings(MomentSettings):
    """Everything that decides what a run with a second stage does: public."""

    one_part: ClassVar[bool] = False
    stepped: ClassVar[str] = PART
    charges_once: ClassVar[bool] = True  # `GradientGate` charges no step twice
    makes: ClassVar[Literal["generator", "moments", "diffusion", "classifier"]] = "diffusion"
    ZERO: ClassVar[tuple[str, ...]] = (*MomentSettings.ZERO, "rounds")

    refine: Literal["diffusion"]
    moments_share: float  # of the budget (in mu²) for the moments
    labels_share: float  # for a linear classifier of texture
    rounds: int  # of training it; 0: there is none
    pretraining: int  # steps on images drawn from the moments
    steps: int  # of DP-SGD
    batch_size: int  # expected number of records in a step
    copies: int  # of a record in a step, each with noise of its own
    sigma: float  # noise multiplier
    rate: float  # learning rate
    wide: int  # channels of the network
    deep: int
    hidden: int
    noise_median: float  # of the noise levels that the network is trained on
    noise_spread: float  # standard deviation of their logarithm
    begin: float  # noise level at which sampling begins

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RefinedSettings":
        MomentSettings.from_dict({name: fields[name] for name in MomentSettings.__dataclass_fields__ if name in fields})
        settings: RefinedSettings = checked(cls, fields, zero=cls.ZERO)
        if not (settings.moments_share > 0 and settings.moments_share + settings.labels_share < 1):
            raise DatalensError("the settings moments_share and labels_share do not fit together")
        if (settings.labels_share > 0) != (settings.rounds > 0):
            raise DatalensError("the settings labels_share and rounds do not fit together")
        wider = any(getattr(settings, name) > most for name, most in NETWORK.items())  # could carry other information
        if wider or settings.begin > denoiser.MOST_NOISE:
            raise DatalensError("the settings of the network are larger than any that datalens makes")
        return settings

    @property
    def steps_planned(self) -> int:
        return self.steps

    def own_budget(self, budget: Budget) -> Budget:
        """Return the budget of the moments alone: their share of mu², priced exactly."""
        return budget_of_moments(budget, self.moments_share)

    def of_moments(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        return super().schedule(schema, budget)

    def of_labels(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """Return the rounds of the linear classifier: sums over all records, of one noise, like those of moments."""
        if self.rounds == 0:
            return ()
        cells, bound = (Texture(schema.shape).size + 1) * len(schema.classes), float(HEAD_GRID**2)
        facts: dict[str, Any] = {"relation": budget.relation, "step": 0, "noise": self.origin, "part": LABELS}
        facts |= {"row_unit": self.unit, "l2_bound": bound, "diameter": 2 * bound, "queries": 1}
        facts |= {"sigma": self.sigma_of_labels(budget), "coordinates": cells}
        event = gaussian_event(self.noise, facts)
        relative = event.sigma / bound / schema.nominal_size
        name = "classifier errors"
        return (
            Part(name=name, event=event, sensitivity=bound, times=self.rounds, cells=cells, noise_to_signal=relative),
        )

    def sigma_of_labels(self, budget: Budget) -> float:
        """Return σ of every round: all rounds together have their share of mu²."""
        if math.isinf(budget.epsilon):
            return 0.0
        mu_squared = self.labels_share * exact_mu_squared(budget) * (1 - 1e-6) / self.rounds
        rounding = ROUNDING if self.noise == "discrete-gaussian" else 0.0
        return math.sqrt(float(HEAD_GRID**2) ** 2 / mu_squared + rounding)

    # --- what it costs

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        event = schedule_of(self, schema).event(repeats=self.steps, step=0, noise=self.origin)
        sums = Part(
            name=f"{self.steps} sums of gradients",
            event=event,
            sensitivity=event.l2_bound,
            times=1,
            cells=self.shape_for(schema).parameters,
            noise_to_signal=self.sigma / self.batch_size,
        )
        return (*self.of_moments(schema, budget), *self.of_labels(schema, budget), sums)

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        """Return a line for each release of the moments, and one for all steps of DP-SGD.

        There is no exact mu² of sampled steps. Their share is what the moments leave.
        """
        labels, sums = self.of_labels(schema, budget), self.schedule(schema, budget)[-1]
        rest = 1 - self.moments_share - self.labels_share
        shares = [(part, self.labels_share) for part in labels] + [(sums, rest)]
        return [line | {"share": self.moments_share * line["share"]} for line in self.release_costs(schema, budget)] + [
            cost(
                part.name if part.times == 1 else f"{part.times} × {part.name}",
                share,
                part.event.sigma,
                part.sensitivity,
                part.cells,
                part.noise_to_signal,
            )
            for part, share in shares
        ]

    def steps_paid(self, events: Sequence[Charge]) -> int:
        return sum(event.repeats for event in events if isinstance(event, SubsampledGaussianEvent))

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        """Return the moments that were charged, and all rounds and steps that the settings state."""
        steps = schedule_of(self, schema).event(repeats=1, step=0, noise=self.origin)
        labels = [(part.event, part.times) for part in self.of_labels(schema, budget)]
        return [*((event, 1) for event in of_part(charged, "")), *labels, (steps, self.steps)]

    # --- for `verify`

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Compare the ledger's parts with these settings."""
        charges = known(events)
        own, labels, steps = (of_part(charges, part) for part in ("", LABELS, PART))
        problems = list(super().disagreements(schema, budget, tuple(own)))
        expected = [part.event for part in self.of_labels(schema, budget)]
        if not all(_alike(dataclasses.replace(event, step=0), expected) for event in labels):
            problems.append("the ledger has other rounds of the linear classifier than the settings state")
        if sorted({event.step for event in labels}) != list(range(len(labels))) or len(labels) > self.rounds:
            problems.append("the ledger has gaps among the rounds of the linear classifier, or too many of them")
        if len(own) + len(labels) + len(steps) != len(events):
            problems.append("the ledger was charged for parts that this method does not have")
        planned = schedule_of(self, schema)
        sampled = [event for event in steps if isinstance(event, SubsampledGaussianEvent)]
        if len(sampled) != len(steps) or any(
            event != planned.event(repeats=event.repeats, step=event.step, noise=self.origin) for event in sampled
        ):
            return [*problems, "the ledger has other steps of DP-SGD than the settings state"]
        if sum(event.repeats for event in sampled) > self.steps:
            problems.append("the ledger has more steps of DP-SGD than the settings state")
        return problems + gaps_of_blocks(sampled)

    def wrong_weights(self, model: Any, events: Sequence[Charge]) -> list[str]:
        problems = super().wrong_weights(model.moments, of_part(events, ""))
        if (model.network.shape.sizes, model.begin) != ((self.wide, self.deep, self.hidden), self.begin):
            problems.append("the weights are of another network than the settings state")
        if len(model.head.weights) > 0 and len(of_part(events, LABELS)) < max(self.rounds, 1):
            problems.append("the weights have a linear classifier, and the ledger lacks charges for it")
        return problems

    # --- how it is described

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        said = super().mechanism_for(budget, by_person=by_person)
        unit = "person" if by_person else "record"
        labels = "sums of errors of a linear classifier; " if self.rounds > 0 else ""
        return {
            "name": f"{said['name']}; {labels}then sums of per-{unit} gradients over Poisson samples with Gaussian "
            "noise (DP-SGD of a diffusion model)",
            "sensitivity": f"{said['sensitivity']}; one {unit} has one row of one length in a step",
        }

    def noise_said(self) -> str:
        return f"{super().noise_said()} for moments; floating point for gradients (see docs/privacy.md)"

    def price_said(self) -> str:
        return f"moments: {super().price_said()}; gradients: as Gaussian noise of variance sigma² on Poisson samples"

    def opening(self, schema: Schema, budget: Budget) -> str:
        unit = "persons" if schema.by_person else "records"
        return (
            f"{super().opening(schema, budget)}; then {self.steps} steps of DP-SGD over about {self.batch_size} {unit}"
        )

    def planned_as(self) -> str:
        return "from private moments, refined by a diffusion model"

    @property
    def step_name(self) -> str:
        return "steps"

    def release_name(self, event: Charge) -> str | None:
        names = {PART: "sums of gradients", LABELS: "errors of a linear classifier"}
        return names.get(event.part) or super().release_name(event)

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        names = ("refine", "moments_share", "batch_size", "sigma")
        return super().facts(events) | {name: getattr(self, name) for name in names}

    def shape_for(self, schema: Schema) -> Shape:
        return Shape(
            image=schema.shape, classes=len(schema.classes), wide=self.wide, deep=self.deep, hidden=self.hidden
        )

    def seconds(self, schema: Schema) -> float:
        """Return an estimate of both stages, from a timed step on random images."""
        pool = min(POOL, self.pretraining * PRE_BATCH) / schema.nominal_size
        pretraining, step = seconds_of(self, schema)
        return super().seconds(schema) * (1 + pool) + pretraining + self.steps * step


def _alike(event: Charge, expected: Sequence[Charge]) -> bool:
    """Return whether a charge is one of these, but for σ's last digits, which versions of libraries may change."""
    for one in expected:
        near = math.isclose(event.sigma, one.sigma, rel_tol=moments.SIGMAS)
        if near and event.as_dict() | {"sigma": 0.0} == one.as_dict() | {"sigma": 0.0}:
            return True
    return False


def schedule_of(settings: RefinedSettings, schema: Schema) -> Schedule:
    """Return the schedule of DP-SGD that these settings describe; they may come from a file."""
    s, bound = settings, WholeRows(softening=SOFTENING).l2_bound
    return Schedule(
        sigma=s.sigma,
        rate=s.batch_size / schema.nominal_size,
        steps=s.steps,
        unit=bound,
        l2_bound=bound,
        row_unit="person" if schema.by_person else "record",
        part=PART,
    )


# --- the plan ---------------------------------------------------------------------------------------------------------

MOMENTS_SHARE, LABELS_SHARE = 0.1, 0.05
STEPS, BATCH, LARGEST_SAMPLE, COPIES = 60, 8192, 0.25, 1
PRETRAINING, PRE_BATCH, POOL = 2000, 256, 20_000  # steps; images in a step; most images drawn from the moments
NETWORK: dict[str, Any] = {"wide": 48, "deep": 64, "hidden": 64}
LEVELS: dict[str, Any] = {"noise_median": 0.3, "noise_spread": 1.0, "begin": 1.0}
RATE = 2e-3


def plan(request: Request, schema: Schema, budget: Budget) -> RefinedSettings:
    """Return the settings of both stages: the moments' own, and the smallest noise with which all steps fit."""
    o: Options = request.options
    if budget.relation != "add-remove":
        raise DatalensError("--refine diffusion samples records, which is priced for add-remove only: use that")
    if o.engine is not None:
        raise DatalensError("--refine diffusion runs in one process: leave --engine out, or use --refine off")
    if budget.accountant == "exact":
        raise DatalensError(
            "--accountant exact does not price sampled steps, which --refine diffusion takes: leave --accountant out"
        )
    share = MOMENTS_SHARE if o.moments_share is None else o.moments_share
    labels_share = LABELS_SHARE if o.labels_share is None else o.labels_share
    if not (0 < share < 1 and 0 <= labels_share < 1 - share):
        raise DatalensError(
            f"--moments-share and --labels-share must lie between 0 and 1 together, not {share:g} and {labels_share:g}"
        )
    batch = o.refine_batch or max(1, min(BATCH, int(LARGEST_SAMPLE * schema.nominal_size)))
    if batch > schema.nominal_size:
        raise DatalensError(f"--refine-batch must be at most the {schema.nominal_size} records declared, not {batch}")
    own = budget_of_moments(budget, share)
    first = moments.plan(dataclasses.replace(request, options=_moment_options(o)), schema, own)
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    fields |= NETWORK | LEVELS
    fields |= {
        "refine": "diffusion",
        "moments_share": share,
        "labels_share": labels_share if first.texture > 0 else 0.0,
        "rounds": ROUNDS if labels_share > 0 and first.texture > 0 else 0,
        "pretraining": PRETRAINING if o.pretraining is None else o.pretraining,
        "batch_size": batch,
        "copies": o.refine_copies or COPIES,
        "rate": RATE if o.refine_rate is None else o.refine_rate,
    }
    check_timed(o)
    draft = RefinedSettings(**fields, steps=o.refine_steps or STEPS, sigma=0.0)
    if o.refine_minutes is not None and o.refine_steps is None:
        draft = dataclasses.replace(draft, steps=steps_within(o.refine_minutes, draft, schema))
    first_parts = (*draft.of_moments(schema, budget), *draft.of_labels(schema, budget))
    beside = [part.event for part in first_parts for _ in range(part.times)]
    sigma = calibrate_sigma(
        rate=batch / schema.nominal_size, steps=draft.steps, budget=budget, rounding=0.0, beside=beside
    )
    return dataclasses.replace(draft, sigma=sigma)


def check_timed(options: Options) -> None:
    """Raise if the plan would follow from a timed step, where several ranks would each time their own."""
    if ranks() > 1 and (options.refine == "auto" or options.refine_minutes is not None):
        raise DatalensError(
            "ranks would not agree on a plan that follows from a timed step: leave --refine-minutes out, and choose "
            "--refine diffusion or off"
        )


@functools.lru_cache(maxsize=64)
def budget_of_moments(budget: Budget, share: float) -> Budget:
    """Return a budget with this share of the mu² of another one, priced exactly, as moments are Gaussian releases."""
    if math.isinf(budget.epsilon):
        return dataclasses.replace(budget, accountant="exact")
    epsilon = Accountant(name="exact").epsilon_at(share * exact_mu_squared(budget), budget.delta)
    return dataclasses.replace(budget, epsilon=epsilon, accountant="exact")


def exact_mu_squared(budget: Budget) -> float:
    """Return the mu² of plain Gaussian releases that would cost the whole budget."""
    return Accountant(name="exact").mu_budget(budget.epsilon, budget.delta) ** 2


def _moment_options(options: Options) -> moments.Options:
    return moments.Options(**{name: getattr(options, name) for name in moments.Options.__dataclass_fields__})


MOST_STEPS, LEAST_STEPS = 400, 20


def steps_within(minutes: float, settings: RefinedSettings, schema: Schema) -> int:
    """Return how many steps of DP-SGD take about so many minutes on this machine, from a timed step."""
    pretraining, step = seconds_of(settings, schema)
    return int(min(MOST_STEPS, max(LEAST_STEPS, (60 * minutes - pretraining) / step)))


def seconds_of(settings: RefinedSettings, schema: Schema) -> tuple[float, float]:
    """Return the seconds of pre-training, and of a step of DP-SGD, on all cores of this machine."""
    shape, cores = settings.shape_for(schema), torch.get_num_threads()
    alone = seconds_a_step(shape)
    together = alone if settings.copies == 1 else seconds_a_step(shape, settings.copies)
    return 0.7 * alone * settings.pretraining * PRE_BATCH / cores, together * settings.batch_size / cores


def seconds_a_step(shape: Shape, copies: int = 1) -> float:
    """Return the seconds that one core takes for each record of a step of DP-SGD, from timed random images."""
    network, random, chunk = fresh_network(shape, 0), torch.Generator().manual_seed(0), chunk_on(CPU, copies)
    engine = RowEngine(network, kind=kind_of_numbers(), device=CPU)
    size, images = WholeSum(WholeRows(softening=SOFTENING), engine.size, device=CPU), chunk * copies
    inputs = torch.randn(images, 8 * shape.image[0], -(-shape.image[1] // 2), -(-shape.image[2] // 2), generator=random)
    facts, goal = torch.randn(images, shape.facts, generator=random), inputs[:, : 4 * shape.image[0]]
    examples = Examples(
        inputs=inputs.contiguous(memory_format=torch.channels_last).to(kind_of_numbers()),
        facts=facts.to(kind_of_numbers()),
        goal=goal,
    )
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            began = time.monotonic()
            size.add(engine.rows(examples.losses, records=chunk, repeats=copies), torch.ones(chunk))
            times.append(time.monotonic() - began)
    finally:
        torch.set_num_threads(threads)
    return min(times) / chunk


# --- a linear classifier of texture, which says what a refined image shows --------------------------------------------

ROUNDS, HEAD_GRID = 60, 2**12  # rounds of training; norm of features, and of errors, in steps of a grid
SHARPNESS, LEAST_ERROR, HEAD_RATE, MOMENTUM = 10.0, 0.5, 8.0, 0.9


def learn_labels(run: Run, data: RecordRows | RankRows, model: MomentModel, s: RefinedSettings) -> denoiser.Head:
    """Train the classifier by gradient descent on noisy sums over all records, and return it.

    A round whose value an interruption lost stays charged, and is left out.
    """
    classes, width = len(run.schema.classes), len(model.centre) + 1
    weights, moving = torch.zeros(width, classes), torch.zeros(width, classes)
    if s.rounds == 0 or model.steps == 0:
        return denoiser.Head(weights=weights[:0])
    count, rows = max(float(model.sizes.sum()), released.LEAST_COUNT), None
    with run.watched("labels", s.rounds) as progress:
        for number in range(s.rounds):
            answer = run.journal.find(run.ledger, step=number, part=LABELS)
            if answer is None and not any(event.step == number for event in of_part(run.ledger.events, LABELS)):
                rows = _features_anywhere(data, model, run.path) if rows is None else rows
                limits: dict[str, Any] = {"sharpness": SHARPNESS, "least": LEAST_ERROR, "grid": HEAD_GRID}
                total = rows.errors(rows.coordinates, head=weights, **limits)
                sigma = s.sigma_of_labels(run.ledger.budget)
                law = s.noise if sigma > 0 else "gaussian"
                with open_noise(law, sigma, draws=total.cells, seed=run.noise_seed) as noise:
                    answer = make_mechanism(sigma, noise, part=LABELS).release(total, run.ledger, step=number)
                run.journal.save(answer)
            if answer is not None:
                gradient = torch.from_numpy(answer.value.astype(np.float64)).view(width, classes).to(torch.float32)
                moving = MOMENTUM * moving + gradient / (HEAD_GRID**2 * count)
                weights = weights - HEAD_RATE * (1 - number / s.rounds) * moving
            progress.done(number + 1)
    return denoiser.Head(weights=weights)


FEATURES, ERRORS, BEGIN, STEP = "features", "errors", "second stage", "step"  # orders of rank 0 to other ranks


def _features_anywhere(data: RecordRows | RankRows, model: MomentModel, folder: Path) -> RecordRows | RankRows:
    """Return the texture features of all records, with a constant, in place of their rows."""
    if isinstance(data, RecordRows):
        return features_of(data, model.centre, model.white, folder)
    data.order(FEATURES, centre=model.centre, white=model.white)
    return data.viewed(features_of(data.mine, model.centre, model.white, folder), name=ERRORS)


def features_of(data: RecordRows, centre: Tensor, white: Tensor, folder: Path) -> RecordRows:
    """Return the texture features of this process's records, with a constant, in place of their rows."""

    def view(stored: Tensor) -> Tensor:
        values = data.texture(stored, centre=centre, white=white)
        return denoiser.with_constant(values / FINE).mul(FINE).round()

    return data.viewed(view, len(centre) + 1, folder=folder)


# --- examples: an image with noise, and what the network should say of it ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Noisy images as the network sees them, and the corrections that it should return."""

    inputs: Tensor
    facts: Tensor
    goal: Tensor

    def losses(self, network: Any) -> Tensor:
        """Return the mean squared error of each image's correction, relative to `correction_size`."""
        return (network(self.inputs, self.facts).to(torch.float32) - self.goal).square().mean(dim=(1, 2, 3))


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes examples, each a function of one image, its label, its key and the number of the step."""

    linear: denoiser.Linear
    settings: RefinedSettings
    schema: Schema

    @property
    def classes(self) -> int:
        return len(self.schema.classes)

    @property
    def device(self) -> torch.device:
        return torch.device(self.linear.device)

    @property
    def kind(self) -> torch.dtype:
        return kind_of_numbers(self.device)

    def network(self) -> Network:
        """Return a newly initialised network on the device."""
        fresh = fresh_network(self.settings.shape_for(self.schema), self.settings.seed)
        return channels_last(fresh.to(self.device))

    def __call__(
        self, images: Tensor, labels: Tensor, keys: Tensor, *, stage: str, step: int, copies: int = 1
    ) -> Examples:
        """Add noise to images, uint8 [n, c, h, w], wherever they are.

        Returns:
            `copies` examples of the first image, then of the second, and so on, on the device. Each copy of an image
            has its noise level from another part of their distribution.
        """
        s, pixels = self.settings, images[0].numel()
        images, labels = (value.to(self.device).repeat_interleave(copies, dim=0) for value in (images, labels))
        normal = streams.normal(s.seed, stage, step, teachers=keys.to(self.device), count=copies * (pixels + 1))
        normal = normal.view(-1, pixels + 1)
        level = normal[:, 0] if copies == 1 else _spread(normal[:, 0].view(-1, copies)).flatten()
        noise = s.noise_median * torch.exp(level * s.noise_spread)
        noise = noise.clamp(denoiser.LEAST_NOISE, denoiser.MOST_NOISE)
        clear = images.to(torch.float32) / 127.5 - 1
        noisy = clear + normal[:, 1:].view(clear.shape) * noise.view(-1, 1, 1, 1)
        linear = self.linear(noisy, labels, noise)
        goal = denoiser.folded((clear - linear) / denoiser.correction_size(noise).view(-1, 1, 1, 1))
        return Examples(
            inputs=denoiser.network_inputs(noisy, linear, noise).to(self.kind),
            facts=denoiser.facts_of(labels, noise, self.classes).to(self.kind),
            goal=goal,
        )


def _spread(normal: Tensor) -> Tensor:
    """Move the j-th of k standard normals into the j-th of k equally likely parts of their distribution, [n, k]."""
    copies = normal.shape[1]
    places = (torch.arange(copies, device=normal.device) + torch.special.ndtr(normal)) / copies
    return torch.special.ndtri(places.clamp(1e-6, 1 - 1e-6))


def kind_of_numbers(device: torch.device = CPU) -> torch.dtype:
    """Return bfloat16 where this processor or GPU computes with it faster, and else float32."""
    fast = torch.cuda.is_bf16_supported if device.type == "cuda" else torch.ops.mkldnn._is_mkldnn_bf16_supported
    return torch.bfloat16 if fast() else torch.float32


def chunk_on(device: torch.device, copies: int) -> int:
    """Return how many records' gradients are computed together on this device."""
    return max(1, (CHUNK if device.type == "cpu" else ON_GPU) // copies)


def each_on(device: torch.device) -> Any:
    """Return `map`, by threads where this device is the CPU."""
    return mapped if device.type == "cpu" else map


# --- pre-training: released values only -------------------------------------------------------------------------------


@dataclass
class Adam:
    """Adam on one vector of weights, with a rate that rises and then falls on a cosine, and a mean of the weights."""

    weights: Tensor
    first: Tensor
    second: Tensor
    mean: Tensor
    taken: int = 0

    @classmethod
    def of(cls, weights: Tensor) -> "Adam":
        return cls(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights), weights.clone())

    def step(self, gradient: Tensor, *, rate: float, steps: int) -> None:
        """Take one of so many steps."""
        self.taken += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.01)
        size = (self.second / (1 - 0.99**self.taken)).sqrt() + 1e-8
        now = rate * min(1.0, 20 * self.taken / steps) * (0.5 + 0.5 * math.cos(math.pi * (self.taken - 1) / steps))
        self.weights -= now * (self.first / (1 - 0.9**self.taken)) / size
        self.mean.lerp_(self.weights, max(0.05, 1 / self.taken))

    def state(self) -> dict[str, Tensor]:
        parts = {"weights": self.weights, "first": self.first, "second": self.second, "mean": self.mean}
        return {name: value.cpu() for name, value in parts.items()} | {"taken": torch.tensor(self.taken)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.taken = int(state["taken"])
        for name in ("weights", "first", "second", "mean"):
            getattr(self, name).copy_(state[name])


PRE_RATE = 2e-3
PRE_TOGETHER = 32  # images that go through the network together
SAVED_SECONDS = 30.0


def pretrained(
    run: Run, model: MomentModel, s: RefinedSettings, make: Maker, *, beat: Callable[[], None] = lambda: None
) -> Network:
    """Train the network on images drawn from the moments. What was trained before an interruption is read again.

    `beat` is called again and again: other ranks, if there are any, wait meanwhile.
    """
    network = make.network()
    engine = RowEngine(network, kind=make.kind, device=make.device)
    adam, path = Adam.of(engine.flat(network)), run.path / PRETRAINED
    if path.exists():
        adam.load_state(load_tensors(path)[0])
    if adam.taken < s.pretraining:
        images, labels = _pool(run, model.to(make.device), s, beat)
        together = PRE_TOGETHER if make.device.type == "cpu" else PRE_BATCH
        saved = time.monotonic()
        with run.watched("pre-training, which costs no privacy", s.pretraining) as progress:
            while adam.taken < s.pretraining:
                random = streams.generator(s.seed, "pre-training", adam.taken)
                chosen = torch.randint(len(images), (PRE_BATCH,), generator=random)
                keys = torch.arange(PRE_BATCH)
                parts = [
                    (images[c], labels[c], k) for c, k in zip(chosen.split(together), keys.split(together), strict=True)
                ]
                gradient = _plain_gradient(engine, network, adam, parts, make, step=adam.taken)
                adam.step(gradient / PRE_BATCH, rate=PRE_RATE, steps=s.pretraining)
                beat()
                progress.done(adam.taken)
                if time.monotonic() - saved > SAVED_SECONDS or adam.taken == s.pretraining:
                    save_tensors(path, adam.state(), {})
                    saved = time.monotonic()
    engine.put(adam.weights, network)
    return network


def _pool(run: Run, model: MomentModel, s: RefinedSettings, beat: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """Draw the images for pre-training, with as many of each class as the released counts say."""
    random, count = streams.generator(s.seed, "pool"), min(POOL, s.pretraining * PRE_BATCH)
    drawn = model.sizes.to(torch.float64).multinomial(count, replacement=True, generator=random)
    labels, images = model.present[drawn], []
    with run.watched("images from the moments", count) as progress:
        for part in labels.split(250):
            images.append((model.images(part, random) * 255).round().to(torch.uint8).cpu())
            beat()
            progress.done(250 * len(images))
    return torch.cat(images), labels


def _plain_gradient(
    engine: RowEngine,
    network: Network,
    adam: Adam,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    make: Maker,
    *,
    step: int,
) -> Tensor:
    """Return the gradient of the sum of losses over released images, summed over the parts in their order."""
    engine.put(adam.weights, network)

    def of_part(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        own = _copy(network, make.kind)
        with torch.enable_grad():
            make(*part, stage="pre-training", step=step).losses(own).sum().backward()
        return engine.flat(own, gradients=True)

    total = torch.zeros_like(adam.weights)
    for gradient in each_on(make.device)(of_part, parts):
        total += gradient
    return total


def _copy(network: Network, kind: torch.dtype) -> Network:
    return channels_last(copy.deepcopy(network).to(kind))


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class RefinedRecords:
    """The part of the records that both stages need, of all records or of those of this rank; private.

    Attributes:
        rows: for the moments.
        images: uint8 [n, c, h, w].
        labels: [n].
        keys: a hash of every record [n], which decides the noise that is added to its image.
        starts: where persons are the units, the first record of each, and n at the end [persons + 1]; records are
            sorted by person.
        persons: a hash of every person [persons], where these are the units.
        numbers: the numbers of this rank's units among those of all ranks [units], and `everyone`, how many these are:
            as one process would have them. Only where the noise has a seed.
    """

    rows: RecordRows | RankRows
    images: Tensor
    labels: Tensor
    keys: Tensor
    starts: Tensor | None = None
    persons: Tensor | None = None
    numbers: Tensor | None = None
    everyone: int = 0

    @property
    def count(self) -> int:
        return self.rows.count

    @property
    def fingerprint(self) -> int:
        return self.rows.fingerprint

    @property
    def units(self) -> int:
        return len(self.labels) if self.starts is None else len(self.starts) - 1

    def chosen(self, units: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, labels and keys of sampled units: of a person one image, by a hash of the person and step."""
        if self.starts is None or self.persons is None:
            return self.images[units], self.labels[units], self.keys[units]
        share = streams.uniform(seed, "image of a person", step, teachers=self.persons[units], count=1)[:, 0]
        first, images = self.starts[units], self.starts[units + 1] - self.starts[units]
        at = first + (share.to(torch.float64) * images).to(torch.int64).clamp(max=images - 1)
        return self.images[at], self.labels[at], self.keys[at]


def gather(records: Records, settings: RefinedSettings, place: Place) -> RefinedRecords:
    """Return the rows of the moments and the images themselves, in memory."""
    rows = moments.gather(records, settings, place)
    assert isinstance(rows, RecordRows | RankRows)
    by_person = records.schema.by_person
    part = PartOfRank(records, rows.world) if isinstance(rows, RankRows) else None
    if part is not None:
        records, part.names = part, [] if settings.noise_seeded else None
    images, owners = [torch.zeros(0, *records.schema.shape, dtype=torch.uint8)], list[bytes]()
    labels, keys = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    positions = [torch.zeros(0, dtype=torch.int64)]

    def choose(index: np.ndarray, names: Any) -> np.ndarray:
        if by_person:
            owners.extend(names)
        return np.zeros(len(index), dtype=np.int64)

    for block in records.blocks(choose):
        images.append(torch.from_numpy(block.images).permute(0, 3, 1, 2).contiguous())
        labels.append(torch.from_numpy(block.labels))
        positions.append(torch.from_numpy(block.index))
        contents = zip(record_keys(block.images, None), block.labels.tolist(), strict=True)
        numbers = [_number(content + str(label).encode()) for content, label in contents]
        keys.append(torch.tensor(numbers, dtype=torch.int64))
    found = RefinedRecords(rows=rows, images=torch.cat(images), labels=torch.cat(labels), keys=torch.cat(keys))
    found = _sorted_by_person(found, owners) if by_person else found
    if part is None or part.names is None:
        return found
    if not by_person:
        return dataclasses.replace(found, numbers=torch.cat(positions), everyone=part.seen)
    order = {name: number for number, name in enumerate(sorted(set(part.names)))}
    places = torch.tensor([order[name] for name in sorted(set(owners))], dtype=torch.int64)
    return dataclasses.replace(found, numbers=places, everyone=len(order))


def _sorted_by_person(found: RefinedRecords, owners: list[bytes]) -> RefinedRecords:
    """Sort records by person, and a person's by their keys, so that nothing depends on the order of the stream."""
    names, whose = np.unique(np.array(owners, dtype=object), return_inverse=True)
    order = np.lexsort((found.keys.numpy(), whose))
    counts = np.bincount(whose, minlength=len(names))
    at = torch.from_numpy(order)
    return RefinedRecords(
        rows=found.rows,
        images=found.images[at],
        labels=found.labels[at],
        keys=found.keys[at],
        starts=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        persons=torch.tensor([_number(name) for name in names], dtype=torch.int64),
    )


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1


class Worker:
    """Adds up the rows of samples of this process's records, at released weights."""

    def __init__(self, network: Network, data: RefinedRecords, make: Maker) -> None:
        self._network, self._data, self._make = network, data, make
        self._rule, self._engines = WholeRows(softening=SOFTENING), _Engines(network, make)
        with self._engines.lent() as engine:
            self._layout = engine

    def bounded(self, sample: np.ndarray, weights: Tensor, number: int) -> BoundedSum:
        """Return the sum for step `number`. A sample has the positions of units."""
        self._engines.load(weights)
        unit: Literal["record", "person"] = "record" if self._data.starts is None else "person"
        return self._sum(torch.from_numpy(sample), number).bounded(unit=unit)

    def of_rank(self, weights: Tensor, number: int, words: Tensor | None) -> PartSum:
        """Return the sum over this rank's part of the Poisson sample, which this rank draws itself.

        Args:
            weights: of the network, released.
            number: of the step.
            words: where the noise has a seed, random words for the units of all ranks, as one process would draw them.
        """
        data, rows, rate = self._data, self._data.rows, schedule_of(self._make.settings, self._make.schema).rate
        assert isinstance(rows, RankRows)
        if words is None:
            sample = poisson_sample(SecureNoise(), data.units, rate)
        else:
            assert data.numbers is not None
            sample = sample_of(words[data.numbers].numpy(), rate)
        return PartSum(total=self.bounded(sample, weights, number), parts=(rows.world.rank,), records=len(sample))

    def _sum(self, sample: Tensor, number: int) -> WholeSum:
        """Return the sum of the rows of a sample, which is the same for any order and any number of threads."""
        totals: list[WholeSum] = []
        make, own, copies = self._make, threading.local(), self._make.settings.copies
        chunk = chunk_on(make.device, copies)
        places = torch.arange(chunk, device=make.device)

        def add(part: Tensor) -> None:
            if not hasattr(own, "total"):
                own.total = WholeSum(self._rule, self._layout.size, device=make.device)
                totals.append(own.total)
            filled = torch.cat([part, part[:1].expand(chunk - len(part))])  # all chunks have one size
            images, labels, keys = self._data.chosen(filled, seed=make.settings.seed, step=number)
            examples = make(images, labels, keys, stage="records", step=number, copies=copies)
            with self._engines.lent() as engine:  # until its rows, which lie in its memory, were added
                rows = engine.rows(examples.losses, records=chunk, repeats=copies)
                own.total.add(rows, (places < len(part)).to(torch.float32))

        for _ in each_on(make.device)(add, sample.split(chunk) if len(sample) else []):
            pass
        whole = WholeSum(self._rule, self._layout.size, device=make.device)
        for total in totals:
            whole.join(total)
        return whole


class Trainer(Worker):
    """The network and its optimizer. Takes steps, and has the state that a checkpoint keeps.

    All of it is made of released values: the network was pre-trained on released images, and then moves by noisy sums
    only. So a checkpoint is as public as the release; it is private only because it is in the run folder.
    """

    def __init__(self, network: Network, gate: GradientGate, data: RefinedRecords, make: Maker) -> None:
        super().__init__(network, data, make)
        self._gate, self._adam = gate, Adam.of(self._layout.flat(network))

    def step(self, number: int) -> float:
        """Take one step on a Poisson sample, and return the length of the released gradient, for the owner."""
        s = self._make.settings
        released = self._gate.release(self._total(number))
        value = torch.from_numpy(released.value[0]).to(torch.float32)
        gradient = value.to(self._make.device) / (GRID * s.batch_size)
        self._adam.step(gradient, rate=s.rate, steps=s.steps)
        return float(gradient.norm())

    def _total(self, number: int) -> BoundedSum:
        """Return the sum over a fresh Poisson sample of all units, wherever they are."""
        gate, data, weights = self._gate, self._data, self._adam.weights
        if isinstance(data.rows, RecordRows):
            return self.bounded(poisson_sample(gate.noise, data.units, gate.schedule.rate), weights, number)
        words = None
        if gate.noise.origin == "seeded" and gate.schedule.rate < 1:
            words = torch.from_numpy(gate.noise.words(data.everyone).astype(np.int64))
        data.rows.order(STEP, {"step": number}, weights=weights, **({} if words is None else {"words": words}))
        return data.rows.joined(self.of_rank(weights, number, words))

    def network(self) -> Network:
        """Return the network with the mean of the weights after the last steps."""
        found = channels_last(Network(self._network.shape))
        self._layout.put(self._adam.mean.cpu(), found)
        return found

    def state(self) -> dict[str, Tensor]:
        return self._adam.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._adam.load_state(state)


class Helper:
    """Another rank than 0 in the second stage: answers for its own records."""

    def __init__(self, data: RefinedRecords, settings: RefinedSettings, schema: Schema, place: Place) -> None:
        self._data, self._settings, self._schema, self._place = data, settings, schema, place
        self._features: RankRows | None = None
        self._worker: Worker | None = None

    def follow(self) -> None:
        """Carry out the orders of rank 0 until it dismisses this rank."""
        orders = {FEATURES: self.make_features, ERRORS: self.errors, BEGIN: self.begin, STEP: self.step}
        _rows_of_ranks(self._data).follow(orders)

    def make_features(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        rows = _rows_of_ranks(self._data)
        found = features_of(rows.mine, tensors["centre"], tensors["white"], self._place.folder)
        self._features = rows.viewed(found, name=ERRORS)

    def errors(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        assert self._features is not None
        self._features.answer(facts, tensors)

    def begin(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        start = Start(shape=self._schema.shape, means=tensors["means"], factors=tensors["factors"])
        linear = denoiser.Linear(start=start, device=self._place.device)
        make = Maker(linear=linear, settings=self._settings, schema=self._schema)
        self._worker = Worker(make.network(), self._data, make)

    def step(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        assert self._worker is not None
        part = self._worker.of_rank(tensors["weights"], facts["step"], tensors.get("words"))
        _rows_of_ranks(self._data).give(part)


def _rows_of_ranks(data: RefinedRecords) -> RankRows:
    assert isinstance(data.rows, RankRows)
    return data.rows


class _Engines:
    """Engines that threads borrow, as an engine is for one at a time: no more than there are threads at once.

    They are kept from step to step. The threads are not, so an engine of each thread would be a new one in every step.
    """

    def __init__(self, network: Network, make: Maker) -> None:
        self._network, self._make, self._idle = network, make, list[RowEngine]()
        self._weights: Tensor | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[RowEngine]:
        try:
            engine = self._idle.pop()
        except IndexError:
            engine = RowEngine(self._network, kind=self._make.kind, device=self._make.device)
            if self._weights is not None:
                engine.load(self._weights)
        try:
            yield engine
        finally:
            self._idle.append(engine)

    def load(self, weights: Tensor) -> None:
        """Compute with these weights from now on. No engine may be lent now."""
        self._weights = weights
        for engine in self._idle:
            engine.load(weights)


def check_places(settings: RefinedSettings, schema: Schema, device: torch.device = CPU) -> None:
    """Raise if a row depends, on this machine, on the place of its record in a chunk, or on its neighbours.

    Random images are given to a random network in two orders and among two sets of others; rows must be equal bit for
    bit.
    """
    classes, random = len(schema.classes), torch.Generator().manual_seed(0)
    chunk = chunk_on(device, settings.copies)
    start = Start(
        shape=schema.shape,
        means=torch.rand(classes, settings.coordinates, generator=random),
        factors=torch.rand(classes, settings.coordinates, settings.coordinates, generator=random),
    )
    make = Maker(linear=denoiser.Linear(start=start, device=device), settings=settings, schema=schema)
    network = fresh_network(settings.shape_for(schema), settings.seed)
    for value in network.parameters():
        value.data += 0.05 * torch.randn(value.shape, generator=random)
    images = torch.randint(256, (2 * chunk, *schema.shape), dtype=torch.uint8, generator=random)
    labels, keys = torch.arange(2 * chunk) % classes, torch.arange(2 * chunk)
    engine = RowEngine(network, kind=make.kind, device=device)
    [alike] = each_on(device)(lambda _: rounds_alike(engine, make, images, labels, keys), [0])  # on one core, as a step
    if not alike:
        raise DatalensError(
            "on this machine the gradient of a record depends on its place in a batch, so that its bound would not "
            "hold, and nothing was charged: use --refine off"
        )


def rounds_alike(engine: RowEngine, make: Maker, images: Tensor, labels: Tensor, keys: Tensor) -> bool:
    """Return whether rows of two chunks of records are the same bits in another order and among others."""
    chunk, copies = len(images) // 2, make.settings.copies

    def rows(at: Tensor) -> Tensor:
        examples = make(images[at], labels[at], keys[at], stage="tried", step=0, copies=copies)
        return engine.rows(examples.losses, records=chunk, repeats=copies).clone()

    here, half = torch.arange(chunk), chunk // 2
    first = rows(here)
    mixed = rows(torch.cat([here[half:] + chunk, here[:half]]))[chunk - half :]
    return torch.equal(first, rows(here.flip(0)).flip(0)) and torch.equal(first[:half], mixed)


def train(run: Run, data: RefinedRecords, settings: RefinedSettings, place: Place) -> DiffusionModel:
    """Release the moments, pre-train, and take all steps that are charged already or fit into the budget."""
    s, rows = settings, data.rows
    _check_here(data, s, run.schema, place)
    model = moments.learn(run, rows, s)
    head = learn_labels(run, rows, model, s)
    make = Maker(linear=denoiser.Linear(start=model.start, device=place.device), settings=s, schema=run.schema)
    network = pretrained(run, model, s, make, beat=rows.beat if isinstance(rows, RankRows) else lambda: None)
    if isinstance(rows, RankRows):
        rows.order(BEGIN, means=model.start.means, factors=model.start.factors)
    noise: NoiseSource = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)
    gate = GradientGate(run.ledger, schedule_of(s, run.schema), noise, left=unpark(run, part=PART))
    trainer = Trainer(network, gate, data, make)
    for step in run.steps(s.steps, student=trainer, teachers=NoTeachers(), part=PART):
        if gate.left == 0 and gate.charged >= gate.schedule.steps:
            break
        run.log(step, gradient=trainer.step(step))
    run.lost = gate.charged - gate.left - run.completed
    if run.interrupted:
        park(run, gate.hand_over(), part=PART)
    if isinstance(rows, RankRows):
        rows.dismiss()
    return DiffusionModel(moments=model, network=trainer.network(), begin=s.begin, head=head)


def follow(schema: Schema, data: RefinedRecords, settings: RefinedSettings, place: Place) -> None:
    """Answer rank 0 for this rank's records; called on every other rank."""
    _check_here(data, settings, schema, place)
    Helper(data, settings, schema, place).follow()


def _check_here(data: RefinedRecords, settings: RefinedSettings, schema: Schema, place: Place) -> None:
    """Raise, on all ranks, unless rows and records are as they must be on each of them. Nothing is charged yet."""
    world = place.world or World()
    world.together(lambda: check_places(settings, schema, place.device))
    if isinstance(data.rows, RankRows):
        data.rows.meet()


def worth_it(request: Request, schema: Schema, budget: Budget) -> str | None:
    """Return "datalens" (moments alone) where `--refine auto` does not expect a second stage to pay; else None.

    The rule is the same for all data: see docs/utility.md for what it was chosen on.
    """
    o: Options = request.options
    if o.refine != "auto":
        return None
    check_timed(o)
    if budget.relation != "add-remove" or o.engine is not None or schema.nominal_size < LEAST_RECORDS:
        return "datalens"
    exact = Accountant(name="exact")
    mu = exact.mu_budget(budget.epsilon, budget.delta)
    if mu * schema.nominal_size / len(schema.classes) < LEAST_SIGNAL or max(schema.shape[1:]) > LARGEST_SIDE:
        return "datalens"
    settings = plan(request, schema, budget)
    return "datalens" if settings.seconds(schema) > 60 * (o.refine_minutes or MINUTES) else None


# `--refine auto`: the fewest records, the least mu · records of a class, the largest side, the most minutes.
LEAST_RECORDS, LEAST_SIGNAL, LARGEST_SIDE, MINUTES = 20_000, 8_000, 32, 60.0


def plan_moments(request: Request, schema: Schema, budget: Budget) -> MomentSettings:
    """Return the settings of private moments alone; raise if an option of the second stage is given without it."""
    o: Options = request.options
    given = [name for name in sorted(OWN - {"refine"}) if getattr(o, name) is not None]
    if given and o.refine != "auto":
        raise DatalensError(f"--{given[0].replace('_', '-')} is for a second stage: add --refine diffusion")
    return moments.plan(request, schema, budget)


REFINED = Method(
    settings=RefinedSettings,
    plan=plan,
    gather=gather,
    train=train,
    follow=follow,
    options=Options,
    presets=("default",),
    accountant="prv",
    version=2,
    instead=worth_it,
    persons=True,
)
DATALENS = dataclasses.replace(MOMENTS, options=Options, plan=plan_moments)
