"""One small training run, watched by an attacker who knows everything but one record.

The training loop, teachers, shares and gate are the real ones; only the run folder is left out. The attacker replays
the teachers with and without the canary on the same fakes that the student made.

Canaries are made up here and the other records are public digits: no record of an owner is read.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch

from datalens.bounded.contributions import BoundedSum
from datalens.data import formats
from datalens.data.records import Dataset, record_keys
from datalens.data.schema import Schema
from datalens.evaluate.audits.mechanism import make_mechanism
from datalens.methods import topagg as method
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.plans.registry import make_plan
from datalens.privacy.events import Relation
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import Mechanism
from datalens.privacy.released import Released
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.run.folder import Run
from datalens.run.remote_teachers import Crowd, Fakes

HERE = Place(device=torch.device("cpu"), folder=Path("nowhere"))
SIDE = 8
SCHEMA = Schema(name="audit", height=SIDE, width=SIDE, channels=1, classes=("0", "1"), nominal_size=1000)
FIRST = 2  # training steps of a teacher before its first votes
WIDTH = 64  # teachers vote on all coordinates, so that a record in two shares changes both in the same direction


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings and the budget of all runs of an audit."""

    settings: TopAggSettings
    budget: Budget

    def mechanism(self, *, weaken: float = 1.0) -> Mechanism:
        return make_mechanism(self.settings.noise, self.settings.sigma / weaken)

    def shares(self, images: np.ndarray, labels: np.ndarray, names: list[str] | None) -> Shares:
        ids = None if names is None else np.array(names)
        return method.gather(Dataset(schema=SCHEMA, images=images, labels=labels, ids=ids), self.settings, HERE)


def make_setup(
    *, epsilon: float, delta: float, relation: Relation, teachers: int, batch: int, steps: int, seed: int
) -> Setup:
    """Return the setup of a small run of teachers.

    Teachers take so few steps that a teacher with two records may never draw one of them.
    """
    options = TrainOptions(
        data="audit",
        out=Path("nowhere"),
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        seed=seed,
        teachers=teachers,
        batch=batch,
        steps=steps,
        teacher_steps=1,
        k=WIDTH,
    )
    budget, settings = make_plan(options, SCHEMA)
    settings = dataclasses.replace(cast(TopAggSettings, settings), teacher_steps_first=FIRST)
    return Setup(budget=budget, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One step: the released value, and the votes of each teacher without its canary and with it."""

    released: np.ndarray  # [m, d]
    rows: np.ndarray  # [2, teachers, m, d]


class _Watched:
    """A crowd whose every call is repeated on two other sets of teachers, one without canaries and one with them."""

    def __init__(self, crowd: Crowd, setup: Setup, twins: tuple[Shares, Shares]) -> None:
        self._crowd = crowd
        self._twins = [method.make_teachers(shares, setup.settings, SCHEMA) for shares in twins]
        self._compress = method.make_compress(setup.settings)
        self.rows: list[np.ndarray] = []

    def fit_step(self, fakes: Fakes, *, repeats: int) -> float:
        for twin in self._twins:
            twin.fit_step(fakes, step=fakes.step, repeats=repeats)
        self.rows.append(np.stack([self._rows(twin, fakes) for twin in self._twins]))
        return self._crowd.fit_step(fakes, repeats=repeats)

    def votes(self, fakes: Fakes) -> BoundedSum:
        return self._crowd.votes(fakes)

    def _rows(self, twin: Teachers, fakes: Fakes) -> np.ndarray:
        parts = [self._compress(part).rows for part in twin.image_gradients(fakes, step=fakes.step)]
        return torch.cat(parts).numpy()


@dataclass(kw_only=True)
class _Journal:
    """A journal that keeps every released value in memory."""

    kept: list[Released] = field(default_factory=list)

    def find(self, ledger: Ledger, *, step: int) -> None:
        pass

    def save(self, released: Released) -> None:
        self.kept.append(released)


@dataclass(kw_only=True)
class _Run:
    """The part of `run.folder.Run` that the training loop needs, with nothing on disk."""

    schema: Schema
    ledger: Ledger
    journal: _Journal

    def steps(self, count: int, *, student: object, teachers: object) -> Iterator[int]:
        return iter(range(count))

    def log(self, step: int, **values: float) -> None:
        pass


def watch(
    setup: Setup, actual: Shares, twins: tuple[Shares, Shares], mechanism: Mechanism
) -> tuple[list[Observed], float]:
    """Train once, and record what an attacker sees and can compute.

    Args:
        setup: the settings and the budget.
        actual: the shares to train on.
        twins: the shares without canaries and with them, to replay the teachers on.
        mechanism: the mechanism of the releases.

    Returns:
        An observation for each step, and ε by the ledger.
    """
    s = setup.settings
    crowd = method.make_crowd(actual, s, SCHEMA, HERE)
    watched = _Watched(crowd, setup, twins)
    run = _Run(schema=SCHEMA, ledger=Ledger.in_memory(setup.budget), journal=_Journal())
    method.learn(cast(Run, run), cast(Crowd, watched), s, mechanism=mechanism, device=torch.device("cpu"))
    steps = zip(run.journal.kept, watched.rows, strict=True)
    return [Observed(released=released.value, rows=rows) for released, rows in steps], run.ledger.spent()


# --- its records ----------------------------------------------------------------------------------


def canary_images(count: int) -> np.ndarray:
    """Return random black-and-white images, uint8 [count, 8, 8, 1]. Image and negative have opposite cosines."""
    white = np.random.default_rng(1).random((count, SIDE, SIDE, 1)) < 0.4
    return white.astype(np.uint8) * 255


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` public handwritten digits, labelled odd or even."""
    dataset = formats.load("digits")
    return dataset.images[:count].copy(), dataset.labels[:count] % 2


def share_names(setup: Setup, numbers: list[int]) -> list[str]:
    """Return different record ids that the real rule hashes into these shares."""
    rule = method.share_rule(setup.settings)
    waiting: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        waiting.setdefault(number, []).append(place)
    names, missing, candidate = [""] * len(numbers), len(numbers), 0
    while missing:
        some = [str(name) for name in range(candidate, candidate + 1000)]
        candidate += 1000
        shares = rule.shares(np.arange(len(some)), record_keys(np.empty((len(some), 0)), np.array(some)))
        for name, share in zip(some, shares.tolist(), strict=True):
            if waiting.get(share):
                names[waiting[share].pop()] = name
                missing -= 1
    return names
