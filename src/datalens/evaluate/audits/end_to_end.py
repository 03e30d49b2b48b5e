"""Audits of whole training runs: a canary in a worst-case share, and an attacker who knows everything else.

The attacker has the source, every setting, the seed and all records but one, and sees what the student sees
(`audit_run`). So she asks which of two worlds the released sums fit, the one with the canary or the one without.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from datalens.errors import DatalensError
from datalens.evaluate.audits.mechanism import in_short
from datalens.evaluate.audits.watched_run import (
    FIRST,
    Observed,
    Setup,
    canary_images,
    digits,
    make_setup,
    share_names,
    watch,
)
from datalens.privacy import audit
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import Relation
from datalens.privacy.mechanisms import Mechanism
from datalens.private.shares import Shares
from datalens.progress import bar
from datalens.public import streams

TEACHERS = 16
OVERLAP = 2  # shares that the canary of the broken partition is in
PEEKS = 50  # runs in each world that show a sum without noise
WEAKER = 100.0  # how much less noise the control of the one-run audit has
GUESSED = (0.1, 0.3, 1.0)  # of the canaries, those of which the attacker is surest; the best of three tests counts
# The theorem gives no p-value under about 2δ(1 + e^ε), however many guesses are right: 1e-4 is out of its reach.
ONE_RUN_LEVEL = 0.01
STATISTICS = "log-likelihood ratio of the releases; nearest exact match of one image's sum"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is claimed, and how often it is asked."""

    epsilon: float
    delta: float
    relation: Relation = "add-remove"
    runs: int = 500  # in each world
    canaries: int = 1000  # of the one-run audit
    steps: int = 2

    def __post_init__(self) -> None:
        for name, least in (("runs", 20), ("canaries", 50), ("steps", 1)):
            if getattr(self, name) < least:
                raise DatalensError(f"--{name} must be at least {least} for an audit, not {getattr(self, name)}")
        if not math.isfinite(self.epsilon):
            raise DatalensError("an infinite epsilon claims nothing that an audit could prove wrong: give a finite one")
        if 4 * self.delta * (1 + math.exp(min(self.epsilon, 100.0))) > ONE_RUN_LEVEL / len(GUESSED):
            raise DatalensError(
                f"an audit by one run cannot refute epsilon {self.epsilon:g} at delta {self.delta:g}, however much "
                "leaks: lower one of them"
            )

    def setup(self, *, teachers: int, batch: int, steps: int, seed: int) -> Setup:
        return make_setup(
            epsilon=self.epsilon, delta=self.delta, relation=self.relation,
            teachers=teachers, batch=batch, steps=steps, seed=seed,
        )  # fmt: skip


# --- with and without a canary --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TwoWorlds:
    """A data set, and the same with a canary."""

    setup: Setup
    without: Shares
    with_it: Shares
    mechanism: Mechanism

    def attack(self, *, present: bool) -> tuple[np.ndarray, float]:
        """Train once in one of the worlds. Statistics that are above 0 where the canary seems to be in; the claim."""
        actual = self.with_it if present else self.without
        seen, claimed = watch(self.setup, actual, (self.without, self.with_it), self.mechanism)
        return np.array([log_likelihood(seen), exact_match(seen)]), claimed


def log_likelihood(seen: list[Observed]) -> float:
    """Σ ⟨release − half way, difference⟩: up to σ², the likelihood ratio of the whole run, so the best of all tests."""
    total = 0.0
    for step in seen:
        without, with_it = step.rows.astype(np.float64).sum(axis=1)
        total += float(((step.released - (without + with_it) / 2) * (with_it - without)).sum())
    return total


def exact_match(seen: list[Observed]) -> float:
    """For what escaped the noise: is some image's sum nearer to a world than noise ever comes?"""
    nearest = [math.inf, math.inf]
    for step in seen:
        for world, total in enumerate(step.rows.astype(np.float64).sum(axis=1)):
            away = np.linalg.norm(step.released - total, axis=1)
            nearest[world] = min(nearest[world], float(away.min()))
    return nearest[0] - nearest[1]


def two_worlds(question: Question, *, copies: int = 1, peek: bool = False) -> TwoWorlds:
    """The canary joins a share whose one record is its negative, and the seed is one by which only the canary is drawn.

    A teacher of that share learns from the canary alone or, without it, from its opposite: nearly all votes flip.
    Under replace-one the canary takes its negative's place. `copies` > 1 breaks the partition: the canary is in as
    many shares.
    """
    hashed = question.relation == "add-remove"
    seed, numbers = worst_seed(copies=copies, steps=question.steps) if hashed else (0, list(range(copies)))
    setup = question.setup(teachers=TEACHERS, batch=2, steps=question.steps, seed=seed)
    images, labels = digits(TEACHERS)
    negative = canary_images(1).repeat(copies, axis=0)
    images[numbers], labels[numbers] = negative, 0
    if hashed:
        with_it = np.concatenate([images, 255 - negative]), np.concatenate([labels, labels[numbers]])
        names = share_names(setup, [*range(TEACHERS), *numbers])
    else:
        replaced = images.copy()
        replaced[numbers] = 255 - negative
        with_it, names = (replaced, labels), None
    return TwoWorlds(
        setup=setup,
        without=setup.shares(images, labels, names),
        with_it=setup.shares(*with_it, names),
        mechanism=audit.Peeking(mechanism=setup.mechanism()) if peek else setup.mechanism(),
    )


def worst_seed(*, copies: int, steps: int, tries: int = 500) -> tuple[int, list[int]]:
    """A seed, and teachers that under it draw the second of two records nearly always. The seed is public: an attacker
    may hope for the worst."""
    best: tuple[int, int, list[int]] = (-1, 0, [])
    teachers = torch.arange(TEACHERS)
    draws = [(0, draw) for draw in range(FIRST)] + [(step, 0) for step in range(1, steps)]
    for seed in range(tries):
        often = torch.zeros(TEACHERS, dtype=torch.int64)
        for step, draw in draws:  # as Shares.batch draws them
            often += (streams.uniform(seed, "batch", step, draw, teachers=teachers, count=2) >= 0.5).sum(dim=1)
        most = often.topk(copies)
        best = max(best, (int(most.values.sum()), -seed, most.indices.tolist()))
        if best[0] == 2 * len(draws) * copies:
            break
    return -best[1], best[2]


def audit_two_worlds(worlds: TwoWorlds, name: str, *, runs: int, tick: Callable[[int], object]) -> audit.Finding:
    """Train `runs` times in each world. Thresholds are 0, by symmetry: no run was looked at to choose them."""
    found: list[np.ndarray] = []
    claimed = 0.0
    for present in (False, True):
        statistics = []
        for _ in range(runs):
            values, claimed = worlds.attack(present=present)
            statistics.append(values)
            tick(1)
        found.append(np.stack(statistics))
    both = [audit.count_errors(found[0][:, i], found[1][:, i], threshold=0.0) for i in range(found[0].shape[1])]

    def bound(level: float) -> float:
        """The best of the tests, each at its part of the level."""
        mu = max(errors.pooled_mu(level / len(both)) for errors in both)
        return exact_epsilon(mu**2, worlds.setup.budget.delta)

    return audit.Finding(
        name=name,
        claimed=claimed,
        lower_bound=bound(audit.REPORT_LEVEL),
        verdict_bound=bound(audit.VERDICT_LEVEL),
        trials=2 * runs,
    )


# --- many canaries, one run -----------------------------------------------------------------------


def audit_one_run(question: Question, name: str, *, weaken: float = 1.0) -> audit.Finding:
    """Every teacher's share has a canary in it or not, by a coin; train once; guess the coins (Steinke et al. 2023).

    `weaken` > 1 is a control: noise smaller by that factor, at the price of the whole.
    """
    count = question.canaries
    setup = question.setup(teachers=count, batch=8, steps=4, seed=0)
    negatives, labels = canary_images(count), np.zeros(count, dtype=np.int64)
    coins = np.random.default_rng().random(count) < 0.5  # from the operating system
    if question.relation == "add-remove":
        names = np.array(share_names(setup, [*range(count), *range(count)]))
        images, twice = np.concatenate([negatives, 255 - negatives]), np.concatenate([labels, labels])

        def shares(canaries: np.ndarray) -> Shares:
            there = np.concatenate([np.ones(count, dtype=bool), canaries])
            return setup.shares(images[there], twice[there], names[there].tolist())
    else:

        def shares(canaries: np.ndarray) -> Shares:
            return setup.shares(np.where(canaries[:, None, None, None], 255 - negatives, negatives), labels, None)

    everyone = np.ones(count, dtype=bool)
    twins = shares(~everyone), shares(everyone)
    mechanism = setup.mechanism()
    if weaken != 1:
        mechanism = audit.Weakened(charged=mechanism, released=setup.mechanism(weaken=weaken))
    seen, claimed = watch(setup, shares(coins), twins, mechanism)
    scores = coin_scores(seen, setup.settings.sigma / weaken)
    right = (scores > 0) == coins
    surest = np.argsort(-np.abs(scores), kind="stable")

    def bound(level: float) -> float:
        return max(
            audit.one_run_epsilon(
                canaries=count,
                guesses=guesses,
                right=int(right[surest[:guesses]].sum()),
                delta=setup.budget.delta,
                level=level / len(GUESSED),
            )
            for guesses in (max(1, round(part * count)) for part in GUESSED)
        )

    return audit.Finding(
        name=name,
        claimed=claimed,
        lower_bound=bound(audit.REPORT_LEVEL),
        verdict_bound=bound(ONE_RUN_LEVEL),
        trials=count,
    )


def coin_scores(seen: list[Observed], sigma: float) -> np.ndarray:
    """[canaries]: a linear estimate of each coin, in −½ … ½, that minds both the noise and the other canaries."""
    rows = np.concatenate([step.rows.astype(np.float64).reshape(*step.rows.shape[:2], -1) for step in seen], axis=2)
    released = np.concatenate([step.released.astype(np.float64).ravel() for step in seen])
    moves = rows[1] - rows[0]  # [canaries, everything released]
    rest = released - rows.sum(axis=(0, 1)) / 2
    scores: np.ndarray = np.linalg.solve(moves @ moves.T + 4 * sigma**2 * np.eye(len(moves)), moves @ rest)
    return scores


# --- the command ----------------------------------------------------------------------------------


def end_to_end_report(question: Question) -> dict[str, Any]:
    """Some thousand tiny runs: with and without a canary, one with many, and all that are broken on purpose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on two
    try:
        with bar("runs", 4 * question.runs + 2 * PEEKS + 2) as (progress, task):

            def tick(done: int) -> None:
                progress.advance(task, done)

            def both(worlds: TwoWorlds, name: str, runs: int) -> audit.Finding:
                return audit_two_worlds(worlds, name, runs=runs, tick=tick)

            found = [both(two_worlds(question), "with and without a canary", question.runs)]
            found.append(audit_one_run(question, "many canaries in one run"))
            tick(1)
            overlapping, peeking = two_worlds(question, copies=OVERLAP), two_worlds(question, peek=True)
            caught = [both(overlapping, f"overlapping shares: a record in {OVERLAP} of them", question.runs)]
            caught.append(both(peeking, "a student that peeks at one raw gradient", PEEKS))
            caught.append(audit_one_run(question, f"one run with noise / {WEAKER:g}", weaken=WEAKER))
            tick(1)
    finally:
        torch.set_num_threads(threads)
    return {
        "audit": "end-to-end",
        **in_short(found[0].as_dict()),
        "delta": question.delta,
        "relation": question.relation,
        "accountant": "exact",
        "level": audit.VERDICT_LEVEL,
        "one_run_level": ONE_RUN_LEVEL,
        "statistic": STATISTICS,
        "controls": {one.name: one.broken for one in caught},
        "findings": [one.as_dict() for one in found],
        "control_findings": [one.as_dict() for one in caught],
        "ok": not any(one.broken for one in found) and all(one.broken for one in caught),
    }
