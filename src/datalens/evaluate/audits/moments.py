"""Audits of the private moments: one record, or one person with all their images, is present or absent.

The attacker knows all other records. The sums, their bounds, the gate, and the noise that a ledger permits for each
release are those of a run (`methods.moments`). The record is a worst case: its clipped row has the maximum norm in
every release, and no other record is in its class. Clipping norms, means and whitening, which a run takes from earlier
releases, are fixed: they are public in any case, and an audit must assume the worst.

The deliberately broken twins are defined here, and no run imports them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.outer import Outer, sum_outer
from datalens.data.schema import Schema
from datalens.evaluate.audits.claim import Claim
from datalens.evaluate.audits.mechanism import make_mechanism
from datalens.methods.moments import RELEASES, MomentSettings, noise_for
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.privacy import audit
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import Event, NoiseLaw
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.private.moments import FINE, RecordRows, record_features
from datalens.private.shares import Rows
from datalens.progress import bar
from datalens.public.basis import make_basis
from datalens.public.texture import Texture

SIDE, CLASSES = 8, 2
SCHEMA = Schema(name="audit", height=SIDE, width=SIDE, channels=1, classes=("others", "canary"), nominal_size=1000)
WIDTH = 2  # coordinates of a row; the test looks along the record's row, so more coordinates would not help
BINS = 2  # of a histogram
CLIP = 2  # clipping norm, in brightness; no row of the record is shorter
STATISTIC = "log-likelihood ratio of the releases; nearest exact match of one cell"
PART = 500  # trials in one release: as many copies of the data set, each with classes of its own


# --- two worlds -----------------------------------------------------------------------------------


@functools.cache
def _features() -> torch.Tensor:
    """Return the rows of two records of the first class, and of the canary record: int32 [3, WIDTH + texture]."""
    across = np.arange(SIDE)
    slope = np.broadcast_to(across * 30, (SIDE, SIDE))
    images = np.stack([slope, slope.T, np.broadcast_to((across < SIDE // 2) * 255, (SIDE, SIDE))])
    basis, texture = make_basis("opponent", SCHEMA.shape, WIDTH), Texture(SCHEMA.shape)
    return record_features(torch.from_numpy(images.astype(np.uint8)[..., None]), basis=basis, texture=texture)


def _records(*, present: bool, copies: int, images: int = 1, by_person: bool = False) -> RecordRows:
    """Return copies of the data set, each with labels of its own, so that no two copies share a cell.

    Args:
        present: whether the canary is present.
        copies: number of copies.
        images: number of images of the canary, all equal.
        by_person: whether they are one person's, summed to one row, or separate records.
    """
    stored = _features()[[0, 1] + [2] * images * present]
    labels = torch.tensor([0, 0] + [1] * images * present)
    persons = torch.tensor([0, 1] + [2] * images * present) + 3 * torch.arange(copies).unsqueeze(1)
    shifted = (labels + CLASSES * torch.arange(copies).unsqueeze(1)).flatten()
    rows = Rows.of(stored.repeat(copies, 1))
    numbers = persons.flatten() if by_person else None
    return RecordRows(rows, shifted, coordinates=WIDTH, fingerprint=0, persons=numbers)


def _norms(*, present: bool, copies: int) -> tuple[RecordRows, torch.Tensor]:
    """Return one-coordinate records for histograms of norms, with separate bins for each copy, and the bins' edges."""
    values = torch.tensor([0.5, 0.7, 1.5] if present else [0.5, 0.7]) * FINE  # the canary is alone in its bin
    norms = (values + BINS * FINE * torch.arange(copies).unsqueeze(1)).reshape(-1, 1).to(torch.int32)
    edges = torch.arange(copies * BINS + 1, dtype=torch.float64)
    return RecordRows(Rows.of(norms), torch.zeros(len(norms), dtype=torch.int64), coordinates=1, fingerprint=0), edges


def total_of(name: str, s: MomentSettings, *, present: bool, copies: int = 1, **person: Any) -> BoundedSum:
    """Return the sum that the release of this name is computed from, for `copies` copies of the data set.

    One release of it is equivalent to `copies` releases of one copy. `person`: see `_records`.
    """
    if name.endswith("norms"):
        alone, edges = _norms(present=present, copies=copies)
        return alone.histogram(alone.coordinates, means=None, edges=edges, grid=s.grid)
    records = _records(present=present, copies=copies, **person)
    view = records.coordinates
    if name.startswith("texture"):
        size = Texture(SCHEMA.shape).size
        white = torch.stack([torch.ones(size), (-1.0) ** torch.arange(size)], dim=1)
        view = functools.partial(records.texture, centre=torch.zeros(size), white=white)
    if name.endswith("covariances"):
        means = torch.zeros(copies * CLASSES, WIDTH, dtype=torch.float64)
        return records.covariances(view, means=means, clip=float(CLIP), grid=s.grid)
    return records.sums(view, clip=float(CLIP), classes=copies * CLASSES, grid=s.grid, counted=s.counted)


def exactly(total: BoundedSum) -> np.ndarray:
    """Return the exact sum. The attacker knows the sums of both worlds, but not which world she is in."""
    return GaussianSum(sigma=0.0, noise=SecureNoise()).release(total, _free(), step=0).value


def _free() -> Ledger:
    return Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant="exact"))


# --- a release, and deliberately broken versions of it --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The arguments of one release: its sum, its noise, and the ledger to charge."""

    total: BoundedSum
    sigma: float
    law: NoiseLaw
    grid: int
    ledger: Ledger
    step: int


Release = Callable[[Ask], np.ndarray]


def as_it_is(ask: Ask) -> np.ndarray:
    """Release as a run does."""
    return make_mechanism(ask.law, ask.sigma).release(ask.total, ask.ledger, step=ask.step).value


def norm_for_its_square(ask: Ask) -> np.ndarray:
    """Release u ⊗ u at the price of u: rows of norm C² are charged as, and get the noise of, rows of norm C."""
    mechanism = make_mechanism(ask.law, ask.sigma / CLIP)
    empty = Outer(slots=torch.zeros(0, dtype=torch.int64), left=torch.zeros(0, WIDTH), right=torch.zeros(0, WIDTH))
    charged = sum_outer([empty], slots=CLASSES, left_bound=ask.grid, right_bound=ask.grid // CLIP)
    mechanism.release(charged, ask.ledger, step=ask.step)
    return mechanism.release(ask.total, _free(), step=ask.step).value


def no_noise_on_absent_classes(ask: Ask) -> np.ndarray:
    """Add no noise to the cells of a class without records, so that they stay zero."""
    value = as_it_is(ask).copy()
    value[(exactly(ask.total) == 0).all(axis=1)] = 0
    return value


def true_counts(ask: Ask) -> np.ndarray:
    """Add no noise to the number of records of a class."""
    value = as_it_is(ask).copy()
    value[:, -1] = exactly(ask.total)[:, -1]
    return value


# --- attacks --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question(Claim):
    """A claim about the default method."""

    def settings(self, law: NoiseLaw) -> MomentSettings:
        """Return the settings of a run, for rows of a few coordinates."""
        options = TrainOptions(data="audit", out=Path("nowhere"), epsilon=self.epsilon, delta=self.delta)
        settings = cast(MomentSettings, make_plan(options, SCHEMA)[1])
        return dataclasses.replace(settings, coordinates=WIDTH, texture=WIDTH, noise=law)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The releases of one run, in order, and the function that makes them."""

    name: str
    releases: tuple[str, ...]
    release: Release = field(default=as_it_is)
    images: int = 1  # number of images of the canary
    by_person: bool = False  # whether they are one person's, summed to one row

    def settings(self, question: Question, law: NoiseLaw) -> MomentSettings:
        """Return the settings: all releases have the budget shares of a run, a single release the whole budget."""
        settings = question.settings(law)
        if self.releases == RELEASES:
            return settings
        shares = ("histogram", "sums", "covariances", "texture_sums", "texture_covariances")
        audited = {"histogram" if name.endswith("norms") else name.replace("-", "_") for name in self.releases}
        parts: dict[str, Any] = {f"{share}_share": float(share in audited) for share in shares}
        return dataclasses.replace(settings, **parts)


HONEST = (
    Subject(name="all eight releases of a run", releases=RELEASES),
    Subject(name="a histogram of norms", releases=("texture-residual-norms",)),
    Subject(name="class sums and counts", releases=("sums",)),
    Subject(name="class covariances", releases=("covariances",)),
    Subject(name="class sums, a person of fifty images", releases=("sums",), images=50, by_person=True),
    Subject(name="class covariances, a person of fifty images", releases=("covariances",), images=50, by_person=True),
)
CONTROLS = (
    Subject(name="covariances at norm C for C²", releases=("covariances",), release=norm_for_its_square),
    Subject(name="no noise on a class without records", releases=("sums",), release=no_noise_on_absent_classes),
    Subject(name="the true count in the clear", releases=("sums",), release=true_counts),
    Subject(name="a person of fifty images at the price of one", releases=("sums",), images=50),
)


class Attack:
    """Runs a subject in both worlds, with many trials at a time."""

    def __init__(self, subject: Subject, question: Question, law: NoiseLaw) -> None:
        self._subject, self._question, self._law = subject, question, law
        self._settings = subject.settings(question, law)
        self._totals = functools.cache(self._make_totals)
        self._sigmas: dict[tuple[Event, ...], float] = {}

    def _make_totals(self, name: str, copies: int) -> list[tuple[BoundedSum, np.ndarray]]:
        """Return the sum and its exact value [copies, cells], known to the attacker, without and with the canary."""
        person = {"images": self._subject.images, "by_person": self._subject.by_person}
        both = [total_of(name, self._settings, present=present, copies=copies, **person) for present in (False, True)]
        return [(total, exactly(total).reshape(copies, -1).astype(np.float64)) for total in both]

    def _sigma(self, name: str, ledger: Ledger) -> float:
        """Return a run's noise. It depends on the charges so far only, so it is computed once for each ledger."""
        if ledger.events not in self._sigmas:
            self._sigmas[ledger.events] = noise_for(name, self._settings, ledger)
        return self._sigmas[ledger.events]

    def statistics(self, *, present: bool, copies: int) -> tuple[np.ndarray, float]:
        """Return two test statistics [copies, 2], above 0 where the canary seems to be present, and ε by the ledger."""
        ledger = Ledger.in_memory(self._question.budget)
        ratio, nearest = np.zeros(copies), np.full((2, copies), np.inf)
        for step, name in enumerate(self._subject.releases):
            both = self._totals(name, copies)
            sigma = self._sigma(name, ledger)
            value = self._subject.release(
                Ask(
                    total=both[present][0],
                    sigma=sigma,
                    law=self._law,
                    grid=self._settings.grid,
                    ledger=ledger,
                    step=step,
                )
            )
            without, with_it = (known for _, known in both)
            released = value.reshape(copies, -1).astype(np.float64)
            row = with_it - without
            ratio += ((released - (without + with_it) / 2) * row).sum(axis=1) / sigma**2
            for world, total in enumerate((without, with_it)):
                distance = np.where(row != 0, np.abs(released - total), np.inf).min(axis=1)
                nearest[world] = np.minimum(nearest[world], distance)
        return np.stack([ratio, nearest[0] - nearest[1]], axis=1), ledger.spent()

    def finding(self, tick: Callable[[int], object] = lambda done: None) -> audit.Finding:
        """Run all trials in both worlds, and bound ε by the better of the two tests.

        The thresholds are 0 by symmetry; they were not chosen from results. `tick` is called with the trials done.
        """
        trials = self._question.trials
        worlds: list[np.ndarray] = []
        claimed = 0.0
        for present in (False, True):
            parts = []
            for start in range(0, trials, PART):
                values, claimed = self.statistics(present=present, copies=min(PART, trials - start))
                parts.append(values)
                tick(len(values))
            worlds.append(np.concatenate(parts))
        without, with_it = worlds  # [trials, tests]
        tests = [audit.count_errors(without[:, i], with_it[:, i], threshold=0.0) for i in range(without.shape[1])]

        def bound(level: float) -> float:
            mu = max(errors.pooled_mu(level / len(tests)) for errors in tests)
            return exact_epsilon(mu**2, self._question.delta)

        return audit.Finding(
            name=self._subject.name,
            claimed=claimed,
            lower_bound=bound(audit.REPORT_LEVEL),
            verdict_bound=bound(audit.VERDICT_LEVEL),
            trials=2 * trials,
        )


# --- the command ----------------------------------------------------------------------------------


def report(question: Question, asked: tuple[NoiseLaw, ...]) -> dict[str, Any]:
    """Audit every noise law, every kind of release, and the broken twins. Returns the results as JSON."""
    findings: list[dict[str, Any]] = []
    controls: list[dict[str, Any]] = []
    with bar("releases", len(asked) * (len(HONEST) + len(CONTROLS)) * 2 * question.trials) as (progress, task):
        for law in asked:
            for subjects, results in ((HONEST, findings), (CONTROLS, controls)):
                for subject in subjects:
                    result = Attack(subject, question, law).finding(lambda done: progress.advance(task, done))
                    named = {"name": f"{subject.name}, {law} noise", "subject": subject.name, "law": law}
                    results.append({**result.as_dict(), **named})
    return {
        "audit": "moments",
        **{name: findings[0][name] for name in ("claimed", "lower_bound", "verdict_bound", "trials")},
        "delta": question.delta,
        "relation": question.budget.relation,
        "accountant": question.budget.accountant,
        "level": audit.VERDICT_LEVEL,
        "statistic": STATISTIC,
        "controls": {
            control.name: all(one["broken"] for one in controls if one["subject"] == control.name)
            for control in CONTROLS
        },
        "findings": findings,
        "control_findings": controls,
        "ok": not any(one["broken"] for one in findings) and all(one["broken"] for one in controls),
    }
