"""`datalens sgd`: a classifier trained by DP-SGD with compressed gradients, in a run folder, with a certificate.

Steps are charged in blocks. A run that is interrupted finishes its step, and writes down how many charged steps of its
block are left (`run.parked`). A run that is killed loses the steps since its last checkpoint, and the rest of the
block: both stay charged.
"""

import copy
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from tyro.conf import arg

from datalens.data.records import Dataset, Records, collect, record_keys
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.plans.base import Method, Part, Place, Request, Settings, checked, gaps_of_blocks
from datalens.privacy.events import Charge, Event, SubsampledGaussianEvent
from datalens.privacy.ledger import Budget
from datalens.run.folder import NoTeachers, Run
from datalens.run.parked import park, unpark

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from datalens.gradients.optimizer import Plan
    from datalens.privacy.dpsgd import GradientGate
    from datalens.privacy.noise import NoiseSource
    from datalens.released.classifier import Classifier

_SOLVED = arg(metavar="FLOAT", help_behavior_hint="(default: solved for, from --epochs)")
MOST_AT_ONCE = 4096  # records of a batch whose gradients are in memory at the same time


@dataclass(frozen=True, kw_only=True)
class Options:
    topk: float = 1.0
    """Fraction of a record's gradient to keep: of its squared norm (norm) or of its coordinates (dim). 1: all of it."""
    selector: Literal["norm", "dim", "none"] = "norm"
    """norm: rows, and with them the noise, shrink by sqrt(topk). dim: they do not."""
    sigma: Annotated[float | None, _SOLVED] = None
    """Noise multiplier. If it is given without --epochs, as many steps are taken as fit into the budget."""
    clip: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.3; linear: 10; on features: 1)")
    ] = None
    """Clipping norm of a record's gradient."""
    batch_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 1/30 of the records; linear: 512 or 1/20)")
    ] = None
    """Expected number of records in a step: each is in it with probability batch size / nominal size."""
    lr: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: from --clip)")] = None
    """Learning rate."""
    epochs: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: from --epsilon, unless --sigma is given)")
    ] = None
    """Expected number of steps that a record is in."""
    constant_rate: bool = False
    """Keep the learning rate constant, as in the paper (and always for a linear head); else it falls to zero."""
    last: bool = False
    """Release the last weights, as in the paper, instead of a weighted mean of the weights after all steps."""
    network: Annotated[
        Literal["cnn", "linear"] | None, arg(help_behavior_hint="(default: cnn; for features and tiny images: linear)")
    ] = None
    """The classifier."""
    extractor: Annotated[str | None, arg(metavar="NAME|FILE", help_behavior_hint="(default: for cifar10 only)")] = None
    """Train on features of a frozen public network: efficientnet-lite0, a file with ResNet-18 weights, or none."""


@dataclass(frozen=True, kw_only=True)
class SgdSettings(Settings):
    """Everything that decides what a run of DP-SGD does (see the module): public."""

    ZERO: ClassVar[tuple[str, ...]] = ("features",)
    makes: ClassVar[Literal["generator", "moments", "diffusion", "classifier"]] = "classifier"
    one_part: ClassVar[bool] = True
    charges_once: ClassVar[bool] = True  # `GradientGate` charges no step twice

    method: Literal["dpsgd"]
    preset: str
    seed: int
    noise_seeded: bool
    noise: Literal["gaussian"]
    network: Literal["cnn", "linear"]
    extractor: str  # the frozen network whose features the model is trained on, or "none"
    extractor_sha256: str
    features: int  # number of features; 0: the model is trained on pixels
    selector: Literal["norm", "dim", "none"]
    topk: float
    clip: float
    sigma: float  # noise multiplier: the noise on every coordinate has standard deviation sigma · bound
    batch_size: int  # expected number of records in a step
    steps: int
    rate: float  # learning rate
    falls: bool  # whether the rate rises over the first tenth of the steps and then falls to zero; else it is constant
    average: bool  # whether a mean of the weights, in which late ones weigh most, is released; else the last weights

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SgdSettings":
        settings: SgdSettings = checked(cls, fields, zero=cls.ZERO)
        if re.fullmatch("(?:[0-9a-f]{64})?", settings.extractor_sha256) is None:
            raise DatalensError("the setting extractor_sha256 is not a SHA-256")
        if not (0 < settings.topk <= 1 and settings.clip > 0):
            raise DatalensError("the setting topk must be in (0, 1], and clip above 0")
        return settings

    @property
    def bound(self) -> float:
        """Largest norm of a record's compressed gradient: √k·C if k is a fraction of the squared norm, else C."""
        return self.clip * (math.sqrt(self.topk) if self.selector == "norm" else 1.0)

    # --- what it costs

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        planned = schedule_of(self, schema).schedule
        event = planned.event(repeats=planned.steps, step=0, noise=self.origin)
        return (
            Part(
                name=f"{self.steps} sums of gradients",
                event=event,
                sensitivity=event.l2_bound,
                times=1,
                cells=0,
                noise_to_signal=self.sigma / self.batch_size,
            ),
        )

    def steps_paid(self, events: Sequence[Charge]) -> int:
        return sum(event.repeats for event in events if isinstance(event, SubsampledGaussianEvent))

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        if not charged:
            return []
        first = charged[0]
        if isinstance(first, SubsampledGaussianEvent):
            first = dataclasses.replace(first, repeats=1)
        return [(first, self.steps)]

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Compare the norm of a row, the sampling rate, the noise and the steps of a ledger with these settings."""
        problems = []
        steps = [event for event in events if isinstance(event, SubsampledGaussianEvent)]
        unit = "person" if schema.by_person else "record"
        if len(steps) != len(events) or any(event.row_unit != unit for event in steps):
            problems.append(f"the ledger has other events than steps over sampled {unit}s")
        if any(event.sigma != self.sigma * self.bound for event in steps):
            problems.append("the settings state another sigma, topk or clip than the ledger")
        if any(event.queries != 1 for event in steps):
            problems.append("the ledger has steps of several sums, of which DP-SGD has none")
        if any(event.l2_bound < self.bound for event in steps):
            problems.append("the ledger was charged for shorter rows than the settings state")
        if any(event.rate != self.batch_size / schema.nominal_size for event in steps):
            problems.append("the settings state another batch size than the ledger")
        if sum(event.repeats for event in steps) > self.steps:
            problems.append("the ledger has more steps than the settings state")
        if any((event.noise == "seeded") != self.noise_seeded for event in steps):
            problems.append("the settings are wrong about whether the noise was seeded")
        return problems + gaps_of_blocks(steps)

    def wrong_weights(self, model: Any, events: Sequence[Charge]) -> list[str]:
        same = model.network == self.network and (not self.features or model.shape == (self.features,))
        return [] if same else ["the weights are of another network than the settings state"]

    # --- how it is described

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        kept = {"norm": "the largest squares, up to topk of the norm", "dim": "a share topk of the coordinates"}
        return {
            "name": f"sums of {'mean gradients of persons' if by_person else 'per-record gradients'} over Poisson "
            "samples with Gaussian noise (DP-SGD, TopAgg); kept: " + kept.get(self.selector, "all"),
            "sensitivity": "the longest row per step: sqrt(topk)·clip where topk is of the norm, else clip",
        }

    def opening(self, schema: Schema, budget: Budget) -> str:
        seen = schema.name if self.extractor == "none" else f"{schema.name}, features of {self.extractor}"
        return f"dpsgd [{self.network}] on {seen}: {self.said_of(schema)}"

    def said_of(self, schema: Schema) -> str:
        """Return one line about what the run will do, for the terminal."""
        return (
            f"{self.steps} steps of about {self.batch_size} {'persons' if schema.by_person else 'records'}, "
            f"clip {self.clip:g}, topk {self.topk:g} ({self.selector}), sigma {self.sigma:.4g} (floating-point noise)"
        )

    @property
    def one_process(self) -> str:
        return "`datalens sgd` runs in one process: leave torchrun out"

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        names = ("clip", "topk", "selector", "batch_size", "network", "extractor")
        return (
            super().facts(events)
            | {"accuracy": None, "accuracy_majority": None}
            | {name: getattr(self, name) for name in names}
        )

    def price_said(self) -> str:
        return "as Gaussian noise of variance (sigma·bound)² on a sum over a Poisson sample"


# --- the plan -------------------------------------------------------------------------------------------------------


class SgdUsual(NamedTuple):
    """The defaults of `datalens sgd`."""

    batch_size: int
    epochs: float
    clip: float
    pace: float  # learning rate · clipping norm: the largest step, before noise
    falls: bool  # whether the learning rate falls


def sgd_usual(*, network: str, features: bool, nominal_size: int, epsilon: float) -> SgdUsual:
    """Return the defaults, from public facts alone.

    Those of the cnn did best on MNIST records held out of training (docs/dpsgd.md). The number of epochs grows with ε
    and with the number of records, since noise limits the total distance of all steps in proportion to these.
    """
    n = nominal_size
    if network == "linear":
        batch = max(1, min(512, n // 20))
        return SgdUsual(batch, 15.0, 1.0, 0.5, False) if features else SgdUsual(batch, 15.0, 10.0, 1.0, False)
    epochs = min(30.0, max(1.5, 30 * epsilon * n / 60_000))
    return SgdUsual(max(1, n // 30), epochs, 0.3, 3.6, True)


def plan(request: Request, schema: Schema, budget: Budget) -> SgdSettings:
    """Return the settings, from public facts and, where one is used, a frozen public network."""
    from datalens.gradients.optimizer import plan_steps
    from datalens.private import features

    options: Options = request.options
    if budget.relation != "add-remove":
        raise DatalensError(
            "`datalens sgd` samples records, which has a price for --relation add-remove only: use that"
        )
    name = options.extractor or (features.DEFAULT if schema.name == "cifar10" else "none")
    extractor = None if name == "none" else features.find(name)
    small = min(schema.height, schema.width) < 14
    network = options.network or ("linear" if extractor or small else "cnn")
    if extractor and network != "linear":
        raise DatalensError(
            "features of an extractor need --network linear: leave --network out, or add --extractor none"
        )
    if small and network == "cnn":
        raise DatalensError(f"--network cnn needs images of at least 14x14, not {schema.height}x{schema.width}")
    defaults = sgd_usual(
        network=network,
        features=extractor is not None,
        nominal_size=schema.nominal_size,
        epsilon=budget.epsilon,
    )
    epochs = options.epochs
    if epochs is None and (options.sigma is None or math.isinf(budget.epsilon)):
        epochs = defaults.epochs
    made = plan_steps(
        budget=budget,
        nominal_size=schema.nominal_size,
        batch_size=options.batch_size or defaults.batch_size,
        epochs=epochs,
        clip=defaults.clip if options.clip is None else options.clip,
        topk=options.topk,
        selector=options.selector,
        sigma=options.sigma,
    )
    rate = defaults.pace / made.compress.clip if options.lr is None else options.lr
    if not 0 < rate < math.inf:
        raise DatalensError(f"--lr must be above 0, not {rate:g}")
    return SgdSettings(
        method="dpsgd",
        preset=request.preset,
        seed=request.seed,
        noise_seeded=request.noise_seed is not None,
        noise="gaussian",
        network=network,
        extractor=extractor.name if extractor else "none",
        extractor_sha256=extractor.sha256 if extractor else "",
        features=extractor.size if extractor else 0,
        selector=options.selector,
        topk=options.topk,
        clip=made.compress.clip,
        sigma=made.schedule.sigma,
        batch_size=made.batch_size,
        steps=made.schedule.steps,
        rate=rate,
        falls=defaults.falls and not options.constant_rate,
        average=not options.last,
    )


def schedule_of(settings: SgdSettings, schema: Schema) -> "Plan":
    """Return the plan that these settings describe; they may come from a file."""
    from datalens.bounded.norm_topk import NormTopK
    from datalens.gradients.optimizer import Plan
    from datalens.privacy.dpsgd import Schedule

    s = settings
    compress = NormTopK(clip=s.clip, topk=s.topk, selector=s.selector)
    rate = s.batch_size / schema.nominal_size
    schedule = Schedule(
        sigma=s.sigma,
        rate=rate,
        steps=s.steps,
        unit=compress.bound,
        l2_bound=compress.l2_bound,
        row_unit="person" if schema.by_person else "record",
    )
    return Plan(compress=compress, schedule=schedule, batch_size=s.batch_size)


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class SgdRecords:
    """Records as the model is trained on them; private. The test split is used to report accuracy to the owner only.

    Attributes:
        x: pixels, uint8 [n, c, h, w]; or features [n, features].
        y: labels [n].
        test: the same of the test split, if there is one.
        fingerprint: a hash of all records.
        starts: where persons are the units, the first record of each, and n at the end [persons + 1].
    """

    x: "Tensor"
    y: "Tensor"
    test: "tuple[Tensor, Tensor] | None"
    fingerprint: int
    starts: "Tensor | None" = None

    @property
    def count(self) -> int:
        return len(self.y)


def gather(records: Records, settings: SgdSettings, place: Place) -> SgdRecords:
    """Return the records in memory; where persons are the units, sorted by person."""
    import torch

    dataset, starts = collect(records), list[int]()
    if dataset.schema.by_person:
        dataset, starts = by_person(dataset)
    content = dataset.images.tobytes() + dataset.labels.tobytes() + np.array(starts, np.int64).tobytes()
    x, y = _inputs(dataset, settings, place)
    try:
        test = None if place.held_out is None else _inputs(place.held_out(), settings, place)
    except DatalensError:  # the user's own data may have no test split
        test = None
    return SgdRecords(
        x=x,
        y=y,
        test=test,
        fingerprint=int(hashlib.sha256(content).hexdigest(), 16),
        starts=torch.tensor(starts) if starts else None,
    )


def _inputs(dataset: Dataset, settings: SgdSettings, place: Place) -> tuple["Tensor", "Tensor"]:
    """Return the inputs of the model, pixels or features, and the labels."""
    import torch

    from datalens.private import features

    y = torch.from_numpy(dataset.labels).to(place.device)
    if settings.extractor == "none":
        return torch.from_numpy(dataset.images).to(place.device).permute(0, 3, 1, 2).contiguous(), y
    extractor = features.find(str(place.options.get("extractor") or settings.extractor))
    if extractor.sha256 != settings.extractor_sha256:
        raise DatalensError(f"{extractor.name} is not the one the run was begun with: put that back")
    about = dataset.schema.nominal_size
    return features.extract(extractor, dataset.images, device=place.device, about=about).to(place.device), y


def by_person(dataset: Dataset) -> tuple[Dataset, list[int]]:
    """Return the records sorted by person, and where each person's begin; the last number is the end."""
    keys = np.array(list(record_keys(dataset.images, dataset.ids, by_person=True)), dtype=object)
    _, whose = np.unique(keys, return_inverse=True)
    order = np.argsort(whose, kind="stable")
    ordered = dataclasses.replace(dataset, images=dataset.images[order], labels=dataset.labels[order], ids=keys[order])
    return ordered, [0, *np.cumsum(np.bincount(whose)).tolist()]


def ready(x: "Tensor") -> "Tensor":
    """Return pixels scaled to [0, 1], and features unchanged."""
    import torch

    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x


class Trainer:
    """The model and its optimizer. Takes steps, and has the state that a checkpoint keeps.

    `average` is the mean of the weights after every step t, weighted by t⁸ (Shamir and Zhang 2013). Most of the noise
    of single steps cancels in it. It is made of released weights alone, so it costs no privacy.
    """

    def __init__(self, model: "Classifier", made: "Plan", gate: "GradientGate", *, rate: float, falls: bool) -> None:
        import torch

        from datalens.gradients.optimizer import PrivateOptimizer, sampled_module

        self.model, self._gate = model, gate
        self.average = copy.deepcopy(model)
        self._taken, self._rate, self._falls = 0, rate, falls
        self._sampled = sampled_module(model)
        self._optimizer = PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=rate), plan=made, gate=gate)
        self._optimizer.watch(self._sampled)

    def step(self, x: "Tensor", y: "Tensor", starts: "Tensor | None" = None) -> None:
        """Take one step on a Poisson sample of the records or persons: in parts if it is large, with noise added once.

        Args:
            x: inputs of all records [n, …].
            y: labels [n].
            starts: where persons are sampled, the first record of each, and n at the end. A person's row is the mean of
                the gradients of their records.
        """
        import torch
        from torch.nn import functional as F  # noqa: N812 (the usual name)

        from datalens.privacy.dpsgd import poisson_sample

        units = len(x) if starts is None else len(starts) - 1
        chosen = torch.from_numpy(poisson_sample(self._gate.noise, units, self._gate.schedule.rate))
        parts = _parts(chosen, starts)
        if self._falls:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * share_of_rate(self._taken, self._gate.schedule.steps)
        for number, (part, whose) in enumerate(parts, start=1):
            part = part.to(x.device)
            self._optimizer.whose = None if whose is None else whose.to(x.device)
            self._optimizer.signal_skip_step(do_skip=number < len(parts))
            self._optimizer.zero_grad()
            # Opacus needs the gradient of each record. The loss is a mean over the part; Opacus multiplies by its size.
            F.cross_entropy(self._sampled(ready(x[part])), y[part]).backward()
            self._optimizer.step()
        self._taken += 1
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 9 / (self._taken + 8))

    def state(self) -> "dict[str, Tensor]":
        import torch

        counts = {"taken": torch.tensor(self._taken)}
        last = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items()}
        return counts | last | {f"average.{name}": value.detach() for name, value in self.average.state_dict().items()}

    def load_state(self, state: "dict[str, Tensor]") -> None:
        self._taken = int(state["taken"])
        for name, model in (("model.", self.model), ("average.", self.average)):
            model.load_state_dict({key.removeprefix(name): v for key, v in state.items() if key.startswith(name)})


def _parts(chosen: "Tensor", starts: "Tensor | None") -> "list[tuple[Tensor, Tensor | None]]":
    """Return the records of the chosen units, about MOST_AT_ONCE at a time; of persons, also whose each record is.

    The records of a person are in one part.
    """
    import torch

    if starts is None:
        return [(part, None) for part in chosen.split(MOST_AT_ONCE)] if len(chosen) else [(chosen, None)]
    images = (starts[1:] - starts[:-1])[chosen]
    part_number = (images.cumsum(0) - 1) // MOST_AT_ONCE
    sizes = torch.unique_consecutive(part_number, return_counts=True)[1].tolist() or [0]
    parts: list[tuple[Tensor, Tensor | None]] = []
    for persons, counts in zip(chosen.split(sizes), images.split(sizes), strict=True):
        whose = persons.repeat_interleave(counts)
        first = (starts[:-1][persons] - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        parts.append((first + torch.arange(len(whose)), whose))
    return parts


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step: it rises over the first tenth of the steps, then falls to 0."""
    return min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)


def accuracy(model: "Classifier", x: "Tensor", y: "Tensor") -> float:
    """Return the accuracy on real records, for the owner only: it is not covered by ε."""
    import torch

    was = model.training
    model.eval()
    with torch.no_grad():
        parts = zip(x.split(2000), y.split(2000), strict=True)
        right = sum(int((model(ready(a)).argmax(dim=1) == b).sum()) for a, b in parts)
    model.train(was)
    return right / len(y)


def make_trainer(
    settings: SgdSettings, schema: Schema, gate: "GradientGate", made: "Plan", device: "torch.device"
) -> Trainer:
    from datalens.released.classifier import seeded

    shape: tuple[int, ...] = (settings.features,) if settings.features else schema.shape
    model = seeded(settings.seed, shape=shape, classes=len(schema.classes), network=settings.network).to(device)
    return Trainer(model, made, gate, rate=settings.rate, falls=settings.falls)


def train(run: Run, data: SgdRecords, settings: SgdSettings, place: Place) -> "Classifier":
    """Take all steps that are charged already or fit into the budget, and return the classifier."""
    from datalens.privacy.dpsgd import GradientGate
    from datalens.privacy.noise import SecureNoise, SeededNoise

    noise: NoiseSource = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)
    made = schedule_of(settings, run.schema)
    gate = GradientGate(run.ledger, made.schedule, noise, left=unpark(run))
    trainer = make_trainer(settings, run.schema, gate, made, place.device)
    for _ in _steps(run, settings.steps, trainer, gate):
        trainer.step(data.x, data.y, data.starts)
    run.lost = gate.charged - gate.left - run.completed
    if run.interrupted:
        park(run, gate.hand_over())
    model = trainer.average if settings.average else trainer.model
    if data.test is not None and run.completed > 0:
        run.facts["accuracy"] = accuracy(model, *data.test)
        run.facts["accuracy_majority"] = int(data.test[1].bincount().max()) / len(data.test[1])  # for comparison
        run.log(run.completed, accuracy=run.facts["accuracy"])
    return model


def _steps(run: Run, count: int, trainer: Trainer, gate: "GradientGate") -> Iterator[int]:
    """Yield steps until no charged step is left and no more can be charged. Lost steps are not made up for."""
    for step in run.steps(count, student=trainer, teachers=NoTeachers()):
        if gate.left == 0 and gate.charged >= gate.schedule.steps:
            return
        yield step


METHOD = Method(
    options=Options,
    settings=SgdSettings,
    plan=plan,
    gather=gather,
    train=train,
    presets=("default",),
    accountant="prv",
    command="sgd",
    persons=True,
)
