"""The law of the noise at the gate. Each check accepts the right noise and rejects the usual wrong ones.

Noise comes from the operating system, so these tests are random: every threshold is set for about one false
alarm in a million runs, and every wrong law is rejected with far more certainty than that.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest, norm

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import NoiseSource, SecureNoise, SeededNoise

SIGMA = 5000.0
RELEASES, QUERIES, D = 400, 5, 20
ALARM = 1e-6
INFINITE = Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact")

Draws = np.ndarray  # [releases, queries, d]: released minus total


def total(*, real: bool) -> BoundedSum:
    rows = torch.randint(-1, 2, (50, QUERIES, D), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    bound = math.sqrt(QUERIES * D)
    rows = rows.to(torch.float64) if real else rows
    return sum_bounded([Contributions(rows=rows, l2_bound=bound, diameter=2 * bound, row_unit="teacher")])


def draws_of(noise: NoiseSource, *, real: bool = False, sigma: float = SIGMA) -> Draws:
    """What the gate really added, over many releases of the same sum."""
    votes, ledger = total(real=real), Ledger.in_memory(INFINITE)
    mechanism = GaussianSum(sigma=sigma, noise=noise)
    exact = votes.private_total.numpy()
    found = []
    for _ in range(RELEASES):
        ledger._events.clear()  # pricing is not under test here, and adding up costs time
        found.append(mechanism.release(votes, ledger, step=0).value - exact)
    return np.stack(found)


# --- the checks -----------------------------------------------------------------------------------------------------


def right_scale(draws: Draws, sigma: float = SIGMA) -> bool:
    """Σ x²/σ² is chi-square, two-sided."""
    statistic = float((draws.astype(np.float64) ** 2).sum() / sigma**2)
    return bool(chi2.ppf(ALARM / 2, draws.size) < statistic < chi2.isf(ALARM / 2, draws.size))


def right_law(draws: Draws, sigma: float = SIGMA) -> bool:
    """Kolmogorov-Smirnov against N(0, σ²): the shape, not only the variance."""
    return bool(kstest(draws.ravel(), norm(scale=sigma).cdf).pvalue > ALARM)


def right_tails(draws: Draws, sigma: float = SIGMA) -> bool:
    """As many draws past 3σ and past 4σ as a normal has, two-sided by the Poisson-normal approximation."""
    for at in (3.0, 4.0):
        expected = draws.size * 2 * norm.sf(at)
        if abs(int((np.abs(draws) > at * sigma).sum()) - expected) > 6 * math.sqrt(expected):
            return False
    return True


def every_coordinate(draws: Draws, sigma: float = SIGMA) -> bool:
    """Each coordinate by itself has the right variance over the releases, and mean zero."""
    squares = (draws.astype(np.float64) ** 2).sum(axis=0) / sigma**2
    each = ALARM / draws[0].size
    right = (chi2.ppf(each, len(draws)) < squares) & (squares < chi2.isf(each, len(draws)))
    centred = np.abs(draws.mean(axis=0)) < norm.isf(each) * sigma / math.sqrt(len(draws))
    return bool((right & centred).all())


def independent_coordinates(draws: Draws) -> bool:
    """No two coordinates of a release go together, nor do their sizes (which share a radius in Box-Muller)."""
    for what in (draws.reshape(len(draws), -1), np.abs(draws).reshape(len(draws), -1)):
        with np.errstate(invalid="ignore"):  # a constant coordinate: NaN, and the check fails as it should
            correlation = np.corrcoef(what.T.astype(np.float64)) - np.eye(what.shape[1])
        if not np.abs(correlation).max() < 7.0 / math.sqrt(len(draws)):
            return False
    return True


def fresh(draws: Draws) -> bool:
    """No release repeats another, or its negative, or part of it."""
    flat = draws.reshape(len(draws), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        similarity = np.corrcoef(flat) - np.eye(len(flat))
    return bool(np.abs(similarity).max() < 8.0 / math.sqrt(flat.shape[1]))


CHECKS: dict[str, Callable[[Draws], bool]] = {
    "scale": right_scale,
    "law": right_law,
    "tails": right_tails,
    "every coordinate": every_coordinate,
    "independent coordinates": independent_coordinates,
    "fresh": fresh,
}


def failed(draws: Draws) -> set[str]:
    return {name for name, check in CHECKS.items() if not check(draws)}


# --- ours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(1)], ids=["operating system", "seeded"])
@pytest.mark.parametrize("real", [False, True], ids=["votes", "reals"])
def test_the_gate_adds_the_noise_it_charges_for(source: NoiseSource, real: bool) -> None:
    draws = draws_of(source, real=real)
    assert failed(draws) == set()
    assert (draws.dtype == np.int64) == (not real)


def test_small_noise_on_votes_is_a_rounded_normal() -> None:
    """At σ = 0.8 most of the law is in a few integers: cell by cell against Φ."""
    draws = draws_of(SecureNoise(), sigma=0.8).ravel()

    def cells(sigma: float) -> bool:
        edges = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
        chance = np.diff(np.concatenate([[0.0], norm.cdf(edges / sigma), [1.0]]))
        counted = np.bincount(np.clip(draws + 3, 0, 6), minlength=7)
        statistic = float(((counted - draws.size * chance) ** 2 / (draws.size * chance)).sum())
        return bool(statistic < chi2.isf(ALARM, 6))

    assert cells(0.8)
    assert not cells(0.8 * 2 / 3)
    assert not cells(0.8 * 3 / 2)


# --- what must be rejected ------------------------------------------------------------------------------------------


class Wrong:
    """A noise source that is wrong in one way."""

    origin = "operating-system"

    def __init__(self, spoil: Callable[[np.random.Generator, int], np.ndarray]) -> None:
        self._random, self._spoil = np.random.default_rng(0), spoil

    def standard_normal(self, count: int) -> np.ndarray:
        return self._spoil(self._random, count)


def _with_holes(random: np.random.Generator, count: int) -> np.ndarray:
    """Noise on all but one coordinate."""
    drawn = random.standard_normal(count)
    drawn[7] = 0.0
    return drawn


def _one_draw_for_all(random: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, random.standard_normal())


def _one_draw_per_query(random: np.random.Generator, count: int) -> np.ndarray:
    return np.repeat(random.standard_normal(QUERIES), D)


def _same_every_time(random: np.random.Generator, count: int) -> np.ndarray:
    return np.random.default_rng(42).standard_normal(count)


def _every_other_time_negated(random: np.random.Generator, count: int) -> np.ndarray:
    """A generator that was forked: two releases whose noise cancels out when added."""
    state = random.integers(0, RELEASES // 2)
    return np.random.default_rng(state).standard_normal(count) * random.choice([-1.0, 1.0])


def _paired(random: np.random.Generator, count: int) -> np.ndarray:
    """Box-Muller that forgot the angle: pairs of the same size."""
    radius = np.sqrt(-2 * np.log1p(-random.random((count + 1) // 2)))
    angle = 2 * np.pi * random.random()
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _truncated(random: np.random.Generator, count: int) -> np.ndarray:
    """Redrawn past 3σ, and rescaled so that the variance is right."""
    drawn = random.standard_normal(4 * count)
    return drawn[np.abs(drawn) < 3][:count] / 0.98658


WRONG: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], str]] = {
    "two thirds of sigma": (lambda r, n: r.standard_normal(n) * 2 / 3, "scale"),
    "three halves of sigma": (lambda r, n: r.standard_normal(n) * 3 / 2, "scale"),
    "five per cent less": (lambda r, n: r.standard_normal(n) * 0.95, "scale"),
    "shifted": (lambda r, n: r.standard_normal(n) + 0.1, "law"),
    "uniform of the same variance": (lambda r, n: (r.random(n) - 0.5) * math.sqrt(12), "law"),
    "Laplace of the same variance": (lambda r, n: r.laplace(size=n) / math.sqrt(2), "law"),
    "half a normal": (lambda r, n: np.abs(r.standard_normal(n)), "law"),
    "no tails": (_truncated, "tails"),
    "a coordinate without noise": (_with_holes, "every coordinate"),
    "one draw for all coordinates": (_one_draw_for_all, "independent coordinates"),
    "one draw per query": (_one_draw_per_query, "independent coordinates"),
    "pairs of the same size": (_paired, "independent coordinates"),
    "the same every time": (_same_every_time, "fresh"),
    "from a forked generator": (_every_other_time_negated, "fresh"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_noise_is_rejected_at_the_gate(name: str) -> None:
    spoil, what = WRONG[name]
    assert what in failed(draws_of(Wrong(spoil)))  # type: ignore[arg-type]


def test_the_right_law_from_elsewhere_is_accepted() -> None:
    assert failed(draws_of(Wrong(lambda r, n: r.standard_normal(n)))) == set()  # type: ignore[arg-type]


def test_the_tail_ends_where_the_docstring_says() -> None:
    """64-bit uniforms: the largest draw is √(128·ln 2) = 9.42, once in 2^64; a 32-bit source would end at 6.7."""
    from datalens.privacy.noise import _box_muller

    largest = float(np.abs(_box_muller(b"\x00" * 16, 2)).max())
    assert largest == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-12)
    assert largest > 9.4
