"""`datalens sgd`: a classifier trained by DP-SGD with compressed gradients, in a run folder, with a certificate.

Steps are charged in blocks. A run that is asked to stop finishes its step and parks what is left of its block; one that
is killed loses what it had not saved, and the block: both stay charged.
"""

import copy
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.data.records import Dataset, record_keys
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.sgd_plan import SgdOptions, as_begun, plan, schedule_of
from datalens.plans.guidance import read_off_warnings, warnings
from datalens.plans.settings import SgdSettings
from datalens.privacy.ledger import json_number, sync_directory
from datalens.progress import say
from datalens.run.folder import Run, write_atomically
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


def train(options: SgdOptions) -> dict[str, Any]:
    """Train, or go on, and write the release. Returns the facts `--json` prints.

    `accuracy` is that on real test records, for the owner only: no ε covers it, and it does not belong into a log.
    """
    from datalens.driver import choose_device

    began = time.monotonic()
    device = choose_device(options.device)
    if options.resume:
        options, settings, schema, budget = as_begun(options)
    else:
        settings, schema, budget = plan(options, device)
        check_vacant(options.out)
        check_room(options, settings, schema, budget)
        for line in warnings(budget, schema):
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
