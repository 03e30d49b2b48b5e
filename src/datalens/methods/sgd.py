"""`datalens sgd`: a classifier trained by DP-SGD with compressed gradients, in a run folder, with a certificate.

Steps are charged in blocks. A run that is asked to stop finishes its step and parks what is left of its block; one that
is killed loses what it had not saved, and the block: both stay charged.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.data.records import Dataset, record_keys
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.files import write_atomically
from datalens.plans.base import Part, Settings, check_seed, checked, gaps_of_blocks
from datalens.plans.guidance import budget_warnings, read_off_warnings
from datalens.privacy.accountant import AccountantName
from datalens.privacy.events import Charge, Event, SubsampledGaussianEvent
from datalens.privacy.ledger import Budget, check_epsilon, json_number, read_ledger, sync_directory
from datalens.progress import say
from datalens.run.folder import Run, read_config
from datalens.run.places import check_vacant
from datalens.run.reservation import begin, check_room, go_on

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from datalens.gradients.optimizer import Plan
    from datalens.privacy.dpsgd import GradientGate
    from datalens.privacy.noise import NoiseSource
    from datalens.released.classifier import Classifier

PARKED = "parked.json"
MOST_AT_ONCE = 4096  # records of a batch whose gradients are held together


@dataclass(frozen=True, kw_only=True)
class SgdSettings(Settings):
    """Everything a run of DP-SGD does, resolved and public (see `methods.dpsgd`)."""

    ZERO: ClassVar[tuple[str, ...]] = ("features",)
    makes: ClassVar[Literal["generator", "moments", "classifier"]] = "classifier"
    one_part: ClassVar[bool] = True
    charges_once: ClassVar[bool] = True  # `GradientGate` charges no step twice

    method: Literal["dpsgd"]
    preset: str
    seed: int
    noise_seeded: bool
    noise: Literal["gaussian"]
    network: Literal["cnn", "linear"]
    extractor: str  # "none", or the frozen network whose features the model sees
    extractor_sha256: str
    features: int  # how many; of pixels: 0
    selector: Literal["norm", "dim", "none"]
    topk: float
    clip: float
    sigma: float  # noise multiplier: the noise on every coordinate is sigma · bound
    batch_size: int  # expected
    steps: int
    rate: float  # learning rate
    falls: bool  # whether it rises over the first tenth of the steps and then falls to nothing, or stays
    average: bool  # what is released: a mean of the weights in which late ones weigh most, or the last ones

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SgdSettings":
        settings: SgdSettings = checked(cls, fields, zero=cls.ZERO)
        if re.fullmatch("(?:[0-9a-f]{64})?", settings.extractor_sha256) is None:
            raise DatalensError("the setting extractor_sha256 is no SHA-256")
        if not (0 < settings.topk <= 1 and settings.clip > 0):
            raise DatalensError("the settings topk and clip cannot be these")
        return settings

    @property
    def bound(self) -> float:
        """What a record's compressed gradient is brought down to: √k·C where k is of the norm, else C."""
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
        """Of DP-SGD: how long a record's row is, how likely it is in, and how many steps there are."""
        found = []
        steps = [event for event in events if isinstance(event, SubsampledGaussianEvent)]
        unit = "person" if schema.by_person else "record"
        if len(steps) != len(events) or any(event.row_unit != unit for event in steps):
            found.append(f"the ledger has other events than steps over sampled {unit}s")
        if any(event.sigma != self.sigma * self.bound for event in steps):
            found.append("the settings state another sigma, topk or clip than the ledger")
        if any(event.queries != 1 for event in steps):
            found.append("the ledger has steps of several sums, of which DP-SGD has none")
        if any(event.l2_bound < self.bound for event in steps):
            found.append("the ledger was charged for shorter rows than the settings state")
        if any(event.rate != self.batch_size / schema.nominal_size for event in steps):
            found.append("the settings state another batch size than the ledger")
        if sum(event.repeats for event in steps) > self.steps:
            found.append("the ledger has more steps than the settings state")
        if any((event.noise == "seeded") != self.noise_seeded for event in steps):
            found.append("the settings are wrong about whether the noise was seeded")
        return found + gaps_of_blocks(steps)

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

    def price_said(self) -> str:
        return "as Gaussian noise of variance (sigma·bound)² on a sum over a Poisson sample"


# --- the plan -------------------------------------------------------------------------------------------------------


class SgdUsual(NamedTuple):
    """What `datalens sgd` does where nothing else is asked."""

    batch_size: int
    epochs: float
    clip: float
    pace: float  # learning rate times clip: how far a step goes at most, before noise
    falls: bool  # the learning rate


def sgd_usual(*, network: str, features: bool, nominal_size: int, epsilon: float) -> SgdUsual:
    """By public facts alone. Those of the cnn did best on MNIST records held out of training (docs/dpsgd.md).

    All steps together can go as far as noise lets them, which is proportional to ε and to the number of records.
    """
    n = nominal_size
    if network == "linear":
        batch = max(1, min(512, n // 20))
        return SgdUsual(batch, 15.0, 1.0, 0.5, False) if features else SgdUsual(batch, 15.0, 10.0, 1.0, False)
    epochs = min(30.0, max(1.5, 30 * epsilon * n / 60_000))
    return SgdUsual(max(1, n // 30), epochs, 0.3, 3.6, True)


@dataclass(frozen=True, kw_only=True)
class SgdOptions:
    """What may be asked for; `commands.sgd` is the command line of it."""

    data: str | None
    out: Path
    epsilon: float = 1.0
    delta: float = 1e-5
    topk: float = 1.0
    selector: Literal["norm", "dim", "none"] = "norm"
    sigma: float | None = None
    clip: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    epochs: float | None = None
    constant_rate: bool = False
    network: Literal["cnn", "linear"] | None = None
    extractor: str | None = None
    last: bool = False
    accountant: AccountantName = "prv"
    nominal_size: int | None = None
    data_folder: Path | None = None
    label: str | None = None
    classes: str | None = None
    image_size: str | None = None
    grayscale: bool = False
    record_id: str | None = None
    seed: int = 0
    noise_seed: int | None = None
    budget: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False

    def as_dict(self) -> dict[str, Any]:
        """What a run is begun with; where it runs is left out."""
        fields = dict(self.__dict__)
        for name in ("out", "device", "resume"):
            fields.pop(name)
        for name in ("data", "data_folder", "classes", "extractor", "budget"):
            value = fields[name]
            fields[name] = str(Path(value).absolute()) if value is not None and os.path.exists(value) else value
        return {k: str(v) if isinstance(v, Path) or v in (math.inf,) else v for k, v in fields.items()}


def plan(options: SgdOptions, device: "torch.device") -> tuple[SgdSettings, Schema, Budget]:
    """Every setting, before a record is read."""
    from datalens.gradients.optimizer import plan_steps
    from datalens.private import features

    if options.data is None:
        raise DatalensError("say which data: --data mnist, or see `datalens data list`")
    schema = formats.schema(
        options.data, nominal_size=options.nominal_size, folder=options.data_folder, reading=Reading.of(options)
    )
    check_epsilon(options.epsilon)
    budget = Budget(epsilon=options.epsilon, delta=options.delta, relation="add-remove", accountant=options.accountant)
    name = options.extractor or (features.DEFAULT if schema.name == "cifar10" else "none")
    extractor = None if name == "none" else features.find(name)
    small = min(schema.height, schema.width) < 14
    network = options.network or ("linear" if extractor or small else "cnn")
    if extractor and network != "linear":
        raise DatalensError("a frozen extractor has a linear head: leave --network out, or add --extractor none")
    if small and network == "cnn":
        raise DatalensError(f"--network cnn needs images of at least 14x14, not {schema.height}x{schema.width}")
    usual = sgd_usual(
        network=network,
        features=extractor is not None,
        nominal_size=schema.nominal_size,
        epsilon=budget.epsilon,
    )
    epochs = options.epochs
    if epochs is None and (options.sigma is None or math.isinf(budget.epsilon)):
        epochs = usual.epochs
    made = plan_steps(
        budget=budget,
        nominal_size=schema.nominal_size,
        batch_size=options.batch_size or usual.batch_size,
        epochs=epochs,
        clip=usual.clip if options.clip is None else options.clip,
        topk=options.topk,
        selector=options.selector,
        sigma=options.sigma,
    )
    rate = usual.pace / made.compress.clip if options.lr is None else options.lr
    if not 0 < rate < math.inf:
        raise DatalensError(f"--lr must be above 0, not {rate:g}")
    check_seed(options.seed)
    if options.noise_seed is not None and options.noise_seed < 0:
        raise DatalensError(f"--noise-seed must be at least 0, not {options.noise_seed}")
    settings = SgdSettings(
        method="dpsgd",
        preset="default",
        seed=options.seed,
        noise_seeded=options.noise_seed is not None,
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
        falls=usual.falls and not options.constant_rate,
        average=not options.last,
    )
    return settings, schema, budget


def as_begun(options: SgdOptions) -> tuple[SgdOptions, SgdSettings, Schema, Budget]:
    """The run goes on as it was begun: an option that says otherwise is an error, not a surprise."""
    config = read_config(options.out)
    if config["settings"].get("method") != "dpsgd":
        raise DatalensError(f"{options.out} was begun by `datalens train`: go on with that")
    begun, asked, default = config["options"], options.as_dict(), SgdOptions(data=None, out=options.out).as_dict()
    for name, value in asked.items():
        if value not in (default[name], begun.get(name)):
            raise DatalensError(
                f"{options.out} was begun with {name.replace('_', '-')} {begun.get(name)}; --resume cannot change it"
            )
    known = {name: begun[name] for name in default if name in begun}
    paths = {
        name: None if (path := known.pop(name, None)) is None else Path(path) for name in ("data_folder", "budget")
    }
    whole = {"epsilon": float(known.pop("epsilon")), **paths, **known}
    options = SgdOptions(**whole, out=options.out, device=options.device, resume=True)
    budget, _ = read_ledger(options.out / "ledger.jsonl")
    return options, SgdSettings.from_dict(config["settings"]), Schema.from_dict(config["schema"]), budget


def schedule_of(settings: SgdSettings, schema: Schema) -> "Plan":
    """The plan that these settings, which may come from a file, are."""
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


def train(options: SgdOptions) -> dict[str, Any]:
    """Train, or go on, and write the release. Returns the facts `--json` prints.

    `accuracy` is that on real test records, for the owner only: no ε covers it, and it does not belong into a log.
    """
    from datalens.run.ranks import choose_device

    began = time.monotonic()
    device = choose_device(options.device)
    if options.resume:
        options, settings, schema, budget = as_begun(options)
    else:
        settings, schema, budget = plan(options, device)
        check_vacant(options.out)
        check_room(options, settings, schema, budget)
        for line in budget_warnings(budget, schema.nominal_size):
            say(f"warning: {line}")
    data = Data.read(options, settings, device)
    if options.resume:
        go_on(options.out)
        run = Run.resume(options.out)
    else:
        for line in read_off_warnings(schema):
            say(f"warning: {line}")
        run = begin(
            options,
            options.out,
            options=options.as_dict(),
            settings=settings,
            budget=budget,
            schema=schema,
            data_sha256=data.sha256,
        )
    try:
        if run.config["data_sha256"] != data.sha256:
            raise DatalensError(
                f"{options.data} is not what {options.out} was begun with: put it back, or start another"
            )
        return _train(run, settings, data, device, began)
    finally:
        run.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Records as the model sees them. Private, but for the test split, which is only evaluated on."""

    x: "Tensor"
    y: "Tensor"
    test: "tuple[Tensor, Tensor] | None"
    sha256: str
    starts: "Tensor | None" = None  # where each person's records begin, and the end: where persons are the units

    @classmethod
    def read(cls, options: SgdOptions, settings: SgdSettings, device: "torch.device") -> "Data":
        import torch

        from datalens.private import features

        starts: list[int] = []

        def seen(split: str) -> tuple["Tensor", "Tensor", str]:
            nominal = options.nominal_size if split == "train" else None
            reading = Reading.of(options)
            found = formats.load(
                str(options.data), split, nominal_size=nominal, folder=options.data_folder, reading=reading
            )
            if found.schema.by_person and split == "train":
                found, starts[:] = by_person(found)
            said = found.images.tobytes() + found.labels.tobytes() + np.array(starts, np.int64).tobytes()
            sha256 = hashlib.sha256(said).hexdigest()
            y = torch.from_numpy(found.labels).to(device)
            if settings.extractor == "none":
                pixels = torch.from_numpy(found.images).to(device).permute(0, 3, 1, 2)
                return pixels.contiguous(), y, sha256
            extractor = features.find(str(options.extractor or settings.extractor))
            if extractor.sha256 != settings.extractor_sha256:
                raise DatalensError(f"{extractor.name} is not the one the run was begun with: put it back")
            return features.extract(extractor, found.images, device=device).to(device), y, sha256

        x, y, sha256 = seen("train")
        try:
            tx, ty, _ = seen("test")
            test: tuple[Tensor, Tensor] | None = (tx, ty)
        except DatalensError:  # a file of the user's own may have none
            test = None
        return cls(x=x, y=y, test=test, sha256=sha256, starts=torch.tensor(starts) if starts else None)


def by_person(found: Dataset) -> tuple[Dataset, list[int]]:
    """The records, person after person, and where each begins."""
    keys = np.array(list(record_keys(found.images, found.ids, by_person=True)), dtype=object)
    _, whose = np.unique(keys, return_inverse=True)
    order = np.argsort(whose, kind="stable")
    ordered = dataclasses.replace(found, images=found.images[order], labels=found.labels[order], ids=keys[order])
    return ordered, [0, *np.cumsum(np.bincount(whose)).tolist()]


def ready(x: "Tensor") -> "Tensor":
    """Pixels in [0, 1]; features as they are."""
    import torch

    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x


class Trainer:
    """The model and its optimizer, a step at a time; what a checkpoint keeps of them.

    `average` is a mean of the weights after every step t, weighed by t⁸ (Shamir and Zhang 2013): most of the noise of
    single steps cancels in it, and as it is made of released weights alone, it costs nothing.
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
        """One Poisson sample of the records, or of the persons, in parts if it is large; noise once.

        `starts`: where each person's records begin, and the end. A person's row is the mean of their gradients.
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
            # Each record's own gradient: a mean over the part, which Opacus multiplies by its size again.
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
    """Records of those chosen, about MOST_AT_ONCE at a time, and whose each is; a person's are together."""
    import torch

    if starts is None:
        return [(part, None) for part in chosen.split(MOST_AT_ONCE)] if len(chosen) else [(chosen, None)]
    images = (starts[1:] - starts[:-1])[chosen]
    turn = (images.cumsum(0) - 1) // MOST_AT_ONCE
    sizes = torch.unique_consecutive(turn, return_counts=True)[1].tolist() or [0]
    found: list[tuple[Tensor, Tensor | None]] = []
    for persons, counts in zip(chosen.split(sizes), images.split(sizes), strict=True):
        whose = persons.repeat_interleave(counts)
        first = (starts[:-1][persons] - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        found.append((first + torch.arange(len(whose)), whose))
    return found


def share_of_rate(step: int, steps: int) -> float:
    """Of the learning rate, at step 0, 1, …: up over the first tenth of the steps, and down to nothing at their end."""
    return min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)


def accuracy(model: "Classifier", x: "Tensor", y: "Tensor") -> float:
    """For the owner: what is found on real records is not covered by ε."""
    import torch

    was = model.training
    model.eval()
    with torch.no_grad():
        parts = zip(x.split(2000), y.split(2000), strict=True)
        right = sum(int((model(ready(a)).argmax(dim=1) == b).sum()) for a, b in parts)
    model.train(was)
    return right / len(y)


class _Nobody:
    """In the place of teachers, of which DP-SGD has none."""

    def state_bytes(self) -> int:
        return 0

    def save(self, step: int) -> list[str]:
        return []

    def restore(self, step: int, names: list[str]) -> None:
        pass


def make_trainer(
    settings: SgdSettings, schema: Schema, gate: "GradientGate", made: "Plan", device: "torch.device"
) -> Trainer:
    from datalens.released.classifier import seeded

    shape: tuple[int, ...] = (settings.features,) if settings.features else schema.shape
    model = seeded(settings.seed, shape=shape, classes=len(schema.classes), network=settings.network).to(device)
    return Trainer(model, made, gate, rate=settings.rate, falls=settings.falls)


def _train(run: Run, settings: SgdSettings, data: Data, device: "torch.device", began: float) -> dict[str, Any]:
    from datalens.privacy.dpsgd import GradientGate
    from datalens.privacy.noise import SecureNoise, SeededNoise
    from datalens.released.release import write_model

    budget = run.ledger.budget
    noise: NoiseSource = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)
    made = schedule_of(settings, run.schema)
    gate = GradientGate(run.ledger, made.schedule, noise, left=_unpark(run.path))
    trainer = make_trainer(settings, run.schema, gate, made, device)
    private = math.isfinite(budget.epsilon) and not settings.noise_seeded
    stamp = "" if private else " NOT PRIVATE."
    seen = run.schema.name if settings.extractor == "none" else f"{run.schema.name}, features of {settings.extractor}"
    say(
        f"dpsgd [{settings.network}] on {seen}: {settings.steps} steps of about {settings.batch_size} "
        f"{'persons' if run.schema.by_person else 'records'}, "
        f"clip {settings.clip:g}, topk {settings.topk:g} ({settings.selector}), sigma {settings.sigma:.4g} "
        f"(floating-point noise); budget {budget.describe(budget.epsilon)}.{stamp}"
    )
    for _ in _steps(run, settings.steps, trainer, gate):
        trainer.step(data.x, data.y, data.starts)
    if run.completed == 0:
        raise BudgetExceeded("the budget is spent and not one step survived: there is nothing to release")
    lost = gate.charged - gate.left - run.completed
    if run.interrupted:
        _park(run.path, gate.hand_over())
    model = trainer.average if settings.average else trainer.model
    write_model(run.path, model, settings=settings, schema=run.schema, ledger=run.ledger, completed=run.completed)
    reached = None if data.test is None else accuracy(model, *data.test)
    if reached is not None:
        run.log(run.completed, accuracy=reached)
    facts = {
        "run": str(run.path),
        "accuracy": reached,
        "epsilon": json_number(budget.epsilon),
        "epsilon_spent": json_number(run.ledger.spent()),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "sigma": settings.sigma,
        "steps": run.completed,
        "clip": settings.clip,
        "topk": settings.topk,
        "selector": settings.selector,
        "batch_size": settings.batch_size,
        "network": settings.network,
        "extractor": settings.extractor,
        "seconds": round(time.monotonic() - began, 2),
        "private": private,
        "interrupted": run.interrupted,
    }
    wasted = f" ({lost} more charged, and lost by an interruption)" if lost else ""
    state = "interrupted; continue with --resume. So far:" if run.interrupted else "done:"
    spent = budget.describe(run.ledger.spent())
    say(f"{state} {run.completed} of {settings.steps} steps{wasted}, spent {spent}.{stamp}")
    return facts


def _steps(run: Run, count: int, trainer: Trainer, gate: "GradientGate") -> Iterator[int]:
    """Steps to do, as long as there is one that is charged or can be: what was lost is missing at the end."""
    for step in run.steps(count, student=trainer, teachers=_Nobody()):
        if gate.left == 0 and gate.charged >= gate.schedule.steps:
            return
        yield step


def _park(folder: Path, left: int) -> None:
    """Remember what is left of a block that was charged. Written when no further step will be taken."""
    write_atomically(folder / PARKED, json.dumps({"left": left}).encode())
    sync_directory(folder)


def _unpark(folder: Path) -> int:
    """Take it back, and durably forget it, before a step is taken: after a crash it must not count twice."""
    path = folder / PARKED
    if not path.exists():
        return 0
    try:
        left = json.loads(path.read_text(encoding="utf-8"))["left"]
    except (ValueError, KeyError, TypeError) as error:
        raise DatalensError(f"{path} is damaged: delete it, and the steps it held are lost") from error
    path.unlink()
    sync_directory(folder)
    return left if type(left) is int else 0
