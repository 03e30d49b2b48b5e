"""Audits of whole training runs: a canary in a worst-case share, and an attacker who knows everything else.

The attacker knows the source code, every setting, the seed and all records but one, and sees what the student sees
(`watched_run`). She decides which of two worlds fits the released sums better: with the canary, or without it.
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
OVERLAP = 2  # number of shares that hold the canary in the control with a broken partition
PEEKS = 50  # runs in each world of the control that reveals a sum without noise
WEAKER = 100.0  # factor by which the noise is smaller in the control of the one-run audit
GUESSED = (0.1, 0.3, 1.0)  # fractions of canaries to guess, the most certain first; the best of three tests counts
# The theorem gives no p-value below about 2δ(1 + e^ε), however many guesses are right: it cannot reach 1e-4.
ONE_RUN_LEVEL = 0.01
STATISTICS = "log-likelihood ratio of the releases; nearest exact match of one image's sum"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A claimed (ε, δ), and the size of the audits."""

    epsilon: float
    delta: float
    relation: Relation = "add-remove"
    runs: int = 500  # in each of the two worlds
    canaries: int = 1000  # of the one-run audit
    steps: int = 2

    def __post_init__(self) -> None:
        for name, least in (("runs", 20), ("canaries", 50), ("steps", 1)):
            if getattr(self, name) < least:
                raise DatalensError(f"--{name} must be at least {least} for an audit, not {getattr(self, name)}")
        if not math.isfinite(self.epsilon):
            raise DatalensError("an infinite epsilon claims nothing that an audit could refute: give a finite one")
        if 4 * self.delta * (1 + math.exp(min(self.epsilon, 100.0))) > ONE_RUN_LEVEL / len(GUESSED):
            raise DatalensError(
                f"an audit by one run cannot refute epsilon {self.epsilon:g} at delta {self.delta:g}, however much "
                "leaks: use a smaller epsilon or delta"
            )

    def setup(self, *, teachers: int, batch: int, steps: int, seed: int) -> Setup:
        return make_setup(
            epsilon=self.epsilon, delta=self.delta, relation=self.relation,
            teachers=teachers, batch=batch, steps=steps, seed=seed,
        )  # fmt: skip


# --- with and without a canary --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TwoWorlds:
    """A data set without a canary, and the same data set with it."""

    setup: Setup
    without: Shares
    with_it: Shares
    mechanism: Mechanism

    def attack(self, *, present: bool) -> tuple[np.ndarray, float]:
        """Train once in one of the worlds.

        Returns:
            Two test statistics, which are above 0 if the canary seems to be present, and ε by the ledger.
        """
        actual = self.with_it if present else self.without
        observed, claimed = watch(self.setup, actual, (self.without, self.with_it), self.mechanism)
        return np.array([log_likelihood(observed), exact_match(observed)]), claimed


def log_likelihood(seen: list[Observed]) -> float:
    """Return Σ ⟨release − midpoint, difference⟩ of the two worlds' sums.

    Up to the factor σ² it is the log-likelihood ratio of the whole run, which is the most powerful test statistic.
    """
    total = 0.0
    for step in seen:
        without, with_it = step.rows.astype(np.float64).sum(axis=1)
        total += float(((step.released - (without + with_it) / 2) * (with_it - without)).sum())
    return total


def exact_match(seen: list[Observed]) -> float:
    """Return the difference of the distances from the nearest image's sum to the world without and with the canary.

    It finds a sum that was released without noise, which is nearer to its world than noise ever is.
    """
    nearest = [math.inf, math.inf]
    for step in seen:
        for world, total in enumerate(step.rows.astype(np.float64).sum(axis=1)):
            away = np.linalg.norm(step.released - total, axis=1)
            nearest[world] = min(nearest[world], float(away.min()))
    return nearest[0] - nearest[1]


def two_worlds(question: Question, *, copies: int = 1, peek: bool = False) -> TwoWorlds:
    """Return two worlds in which a canary has the largest effect that a record can have.

    The canary joins a share whose only other record is its negative, and the seed is one for which nearly always the
    canary is drawn. So the teacher of that share learns from the canary alone or, without it, from its negative, and
    nearly all of its votes flip. Under replace-one the canary replaces its negative.

    Args:
        question: the claim.
        copies: number of shares that hold the canary; more than 1 is a control with a broken partition.
        peek: return a control that reveals a sum without noise.
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
    """Return a seed and `copies` teachers which, with this seed, nearly always draw the second of two records.

    The seed of a run is public and arbitrary, so an audit must assume the worst one.
    """
    best: tuple[int, int, list[int]] = (-1, 0, [])
    teachers = torch.arange(TEACHERS)
    draws = [(0, draw) for draw in range(FIRST)] + [(step, 0) for step in range(1, steps)]
    for seed in range(tries):
        seconds = torch.zeros(TEACHERS, dtype=torch.int64)  # how often each teacher draws its second record
        for step, draw in draws:  # as Shares.batch draws them
            seconds += (streams.uniform(seed, "batch", step, draw, teachers=teachers, count=2) >= 0.5).sum(dim=1)
        most = seconds.topk(copies)
        best = max(best, (int(most.values.sum()), -seed, most.indices.tolist()))
        if best[0] == 2 * len(draws) * copies:
            break
    return -best[1], best[2]


def audit_two_worlds(worlds: TwoWorlds, name: str, *, runs: int, tick: Callable[[int], object]) -> audit.Finding:
    """Train `runs` times in each world, and bound ε by the errors of the tests.

    The thresholds are 0 by symmetry; they were not chosen from results.
    """
    by_world: list[np.ndarray] = []
    claimed = 0.0
    for present in (False, True):
        statistics = []
        for _ in range(runs):
            values, claimed = worlds.attack(present=present)
            statistics.append(values)
            tick(1)
        by_world.append(np.stack(statistics))
    without, with_it = by_world  # [runs, tests]
    tests = [audit.count_errors(without[:, i], with_it[:, i], threshold=0.0) for i in range(without.shape[1])]

    def bound(level: float) -> float:
        """Return the best bound of the tests, each at its share of the level."""
        mu = max(errors.pooled_mu(level / len(tests)) for errors in tests)
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
    """Audit with one training run (Steinke et al. 2023).

    A coin decides for every teacher's share whether it holds a canary. After one run the attacker guesses the coins.

    Args:
        question: the claim.
        name: the name of the finding.
        weaken: the factor by which noise is too small; more than 1 in a control, which is charged for the full noise.
    """
    count = question.canaries
    setup = question.setup(teachers=count, batch=8, steps=4, seed=0)
    negatives, labels = canary_images(count), np.zeros(count, dtype=np.int64)
    coins = np.random.default_rng().random(count) < 0.5  # from the operating system
    if question.relation == "add-remove":
        names = np.array(share_names(setup, [*range(count), *range(count)]))
        images, twice = np.concatenate([negatives, 255 - negatives]), np.concatenate([labels, labels])

        def shares(canaries: np.ndarray) -> Shares:
            kept = np.concatenate([np.ones(count, dtype=bool), canaries])
            return setup.shares(images[kept], twice[kept], names[kept].tolist())
    else:

        def shares(canaries: np.ndarray) -> Shares:
            return setup.shares(np.where(canaries[:, None, None, None], 255 - negatives, negatives), labels, None)

    all_canaries = np.ones(count, dtype=bool)
    twins = shares(~all_canaries), shares(all_canaries)
    mechanism = setup.mechanism()
    if weaken != 1:
        mechanism = audit.Weakened(charged=mechanism, released=setup.mechanism(weaken=weaken))
    observed, claimed = watch(setup, shares(coins), twins, mechanism)
    scores = coin_scores(observed, setup.settings.sigma / weaken)
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
    """Return a linear estimate of each coin [canaries], from −½ to ½, given the noise and the other canaries."""
    rows = np.concatenate([step.rows.astype(np.float64).reshape(*step.rows.shape[:2], -1) for step in seen], axis=2)
    released = np.concatenate([step.released.astype(np.float64).ravel() for step in seen])
    moves = rows[1] - rows[0]  # [canaries, everything released]
    rest = released - rows.sum(axis=(0, 1)) / 2
    scores: np.ndarray = np.linalg.solve(moves @ moves.T + 4 * sigma**2 * np.eye(len(moves)), moves @ rest)
    return scores


# --- the command ----------------------------------------------------------------------------------


def end_to_end_report(question: Question) -> dict[str, Any]:
    """Run all audits of training runs and their controls: over a thousand tiny runs. Returns the results as JSON."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on two
    try:
        with bar("runs", 4 * question.runs + 2 * PEEKS + 2) as (progress, task):

            def tick(done: int) -> None:
                progress.advance(task, done)

            def both(worlds: TwoWorlds, name: str, runs: int) -> audit.Finding:
                return audit_two_worlds(worlds, name, runs=runs, tick=tick)

            findings = [both(two_worlds(question), "with and without a canary", question.runs)]
            findings.append(audit_one_run(question, "many canaries in one run"))
            tick(1)
            overlapping, peeking = two_worlds(question, copies=OVERLAP), two_worlds(question, peek=True)
            controls = [both(overlapping, f"overlapping shares: a record in {OVERLAP} of them", question.runs)]
            controls.append(both(peeking, "a student that peeks at one raw gradient", PEEKS))
            controls.append(audit_one_run(question, f"one run with noise / {WEAKER:g}", weaken=WEAKER))
            tick(1)
    finally:
        torch.set_num_threads(threads)
    return {
        "audit": "end-to-end",
        **in_short(findings[0].as_dict()),
        "delta": question.delta,
        "relation": question.relation,
        "accountant": "exact",
        "level": audit.VERDICT_LEVEL,
        "one_run_level": ONE_RUN_LEVEL,
        "statistic": STATISTICS,
        "controls": {one.name: one.broken for one in controls},
        "findings": [one.as_dict() for one in findings],
        "control_findings": [one.as_dict() for one in controls],
        "ok": not any(one.broken for one in findings) and all(one.broken for one in controls),
    }
