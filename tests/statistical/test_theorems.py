"""Theorems 3, 4 and 5 against the mechanism itself: drawn at the gate, and exactly, outcome by outcome.

Each check accepts what we use and rejects what would be wrong: the factors the paper prints, Theorem 4 without one of
its conditions, half the sensitivity. The drawing is random: about one false alarm in a million runs.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import erf
from scipy.stats import binomtest, norm

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.privacy.bounds import (
    data_dependent_rdp,
    likely_outcome,
    log_agreement,
    log_disagreement,
    log_outcomes,
    theorem4,
    topagg_rdp,
)
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.public.basis import make_basis
from datalens.released.decode import Decode

ALARM = 1e-6

# --- Theorem 5: the gate and the threshold, many times ----------------------------------------------------------------

TEACHERS, SIGMA = 60, 25.0
AT = 17.5  # half a vote: rounding to whole votes moves nothing across it
SUMS = np.array([30, -40, 12, -9, 0])
RELEASES = 60_000


def drawn() -> np.ndarray:
    """ḡ of many releases of the same sums of votes: [releases, d]."""
    rows = np.zeros((TEACHERS, len(SUMS)), dtype=np.int8)
    for j, value in enumerate(SUMS):
        rows[: abs(value), j] = np.sign(value)
    bound = math.sqrt(len(SUMS) * RELEASES)
    same = torch.from_numpy(rows)[:, None, :].expand(-1, RELEASES, -1)
    chunks = (
        Contributions(rows=part, l2_bound=bound, diameter=2 * bound, row_unit="teacher") for part in same.split(10)
    )
    votes: BoundedSum = sum_bounded(chunks)
    ledger = Ledger.in_memory(Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact"))
    released = GaussianSum(sigma=SIGMA, noise=SecureNoise()).release(votes, ledger, step=0)
    basis = make_basis("pixel", (1, 1, len(SUMS)), None)
    decode = Decode(rule="threshold", beta=AT / TEACHERS, teachers=TEACHERS, basis=basis)
    return decode(released).value.reshape(RELEASES, -1).numpy().astype(np.int64)


@pytest.fixture(scope="module")
def outcomes() -> np.ndarray:
    return drawn()


Agreement = Callable[[np.ndarray, np.ndarray], float]  # Pr[M = ḡ*] of votes and outcome


def corrected(votes: np.ndarray, outcome: np.ndarray) -> float:
    return float(np.exp(log_agreement(votes, outcome, threshold=AT, sigma=SIGMA)))


def with_factors(minus: Callable[[np.ndarray], np.ndarray], zero: Callable[[np.ndarray], np.ndarray]) -> Agreement:
    def agreement(votes: np.ndarray, outcome: np.ndarray) -> float:
        plus = 1 - norm.cdf((AT - votes) / SIGMA)
        return float(np.where(outcome == 1, plus, np.where(outcome == -1, minus(votes), zero(votes))).prod())

    return agreement


def right_minus(f: np.ndarray) -> np.ndarray:
    return norm.cdf((-AT - f) / SIGMA)


def right_zero(f: np.ndarray) -> np.ndarray:
    return norm.cdf((AT - f) / SIGMA) - norm.cdf((-AT - f) / SIGMA)


def printed_minus(f: np.ndarray) -> np.ndarray:
    return norm.cdf((AT - f) / SIGMA)


def printed_zero(f: np.ndarray) -> np.ndarray:
    return np.clip(erf((AT - f) / (math.sqrt(2) * SIGMA)), 0.0, 1.0)


def fits(outcomes: np.ndarray, agreement: Agreement, outcome: np.ndarray) -> bool:
    times = int((outcomes == outcome).all(axis=1).sum())
    return binomtest(times, len(outcomes), agreement(SUMS, outcome)).pvalue > ALARM


LIKELY = np.array([1, -1, 0, 0, 0])
OTHERS = (np.array([1, -1, 1, -1, 0]), np.array([0, 0, 0, 0, 1]), np.array([1, -1, 1, 0, -1]))


def test_the_gate_agrees_with_theorem_5_put_right(outcomes: np.ndarray) -> None:
    assert (likely_outcome(SUMS, threshold=AT, sigma=SIGMA) == LIKELY).all()
    for outcome in (LIKELY, *OTHERS):
        assert fits(outcomes, corrected, outcome)
        assert fits(outcomes, with_factors(right_minus, right_zero), outcome)


@pytest.mark.parametrize(
    "printed",
    [
        with_factors(printed_minus, printed_zero),
        with_factors(printed_minus, right_zero),
        with_factors(right_minus, printed_zero),
    ],
    ids=["as printed", "its factor for -1", "its factor for 0"],
)
def test_the_printed_factors_are_rejected(outcomes: np.ndarray, printed: Agreement) -> None:
    assert not fits(outcomes, printed, LIKELY)


# --- Theorems 3 and 4: exact Rényi divergences ------------------------------------------------------------------------

LAMBDAS = np.array([1.5, 2.0, 3.0, 5.0, 9.0, 17.0])


def renyi(votes: np.ndarray, neighbour: np.ndarray, *, threshold: float, sigma: float) -> np.ndarray:
    """D_λ(M(D) ‖ M(D′)) at each of LAMBDAS. Coordinates are independent, so their divergences add up."""
    p, q = (log_outcomes(x, threshold=threshold, sigma=sigma)[None] for x in (votes, neighbour))
    orders = LAMBDAS[:, None, None]
    return (np.logaddexp.reduce(orders * p - (orders - 1) * q, axis=-1)).sum(axis=-1) / (LAMBDAS - 1)


def cases(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray, int, float, float]]:
    """Sums of votes, a neighbour's, k, βN and σ; many with a likely outcome, some without."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        d, teachers = int(generator.integers(1, 7)), int(generator.integers(3, 60))
        k = int(generator.integers(1, d + 1))
        sure = generator.random() < 0.7
        votes = (
            generator.choice([-teachers, 0, teachers], d) if sure else generator.integers(-teachers, teachers + 1, d)
        )
        rows = np.zeros((2, d))
        for row in rows:
            row[generator.permutation(d)[:k]] = generator.choice([-1, 1], k)
        if generator.random() < 0.5:  # the worst one: all signs flipped
            rows[1] = -rows[0]
        at, sigma = generator.uniform(0.05, 0.95) * teachers, generator.uniform(0.03, 0.8) * teachers
        found.append((votes.astype(float), votes + rows[0] - rows[1], k, at, sigma))
    return found


def test_theorem_3_covers_every_neighbour() -> None:
    """And half the sensitivity (√k where 2√k is right) does not."""
    too_small = 0
    for votes, neighbour, k, at, sigma in cases(1000, seed=3):
        truth = renyi(votes, neighbour, threshold=at, sigma=sigma)
        bound = topagg_rdp(LAMBDAS, k=k, sigma=sigma)
        assert (truth <= bound * (1 + 1e-12)).all()
        too_small += int((truth > bound / 4).any())
    assert too_small > 50


def test_theorem_4_covers_every_neighbour_where_it_applies() -> None:
    applied = smaller = 0
    for votes, neighbour, k, at, sigma in cases(2000, seed=4):
        outcome = likely_outcome(votes, threshold=at, sigma=sigma)
        log_q = float(log_disagreement(log_agreement(votes, outcome, threshold=at, sigma=sigma)))
        bound = data_dependent_rdp(log_q, rdp_per_order=2 * k / sigma**2, orders=LAMBDAS)
        there = ~np.isnan(bound)
        truth = renyi(votes, neighbour, threshold=at, sigma=sigma)
        assert (truth[there] <= bound[there] * (1 + 1e-12) + 1e-300).all()
        applied += int(there.sum())
        smaller += int((bound[there] < topagg_rdp(LAMBDAS, k=k, sigma=sigma)[there]).sum())
    assert applied > 8_000
    assert smaller > 1_000  # the check is about bounds that say something


def without_conditions(order: np.ndarray, log_q: float, mu1: np.ndarray, mu2: np.ndarray, c: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        q = math.exp(log_q)
        a = (1 - q) / (1 - (q * np.exp(mu2 * c)) ** ((mu2 - 1) / mu2))
        b = np.exp(mu1 * c) / q ** (1 / (mu1 - 1))
        return np.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)


@pytest.mark.parametrize("dropped", ["λ ≤ μ1", "q·e^ε2 < 1"])
def test_theorem_4_without_a_condition_is_caught(dropped: str) -> None:
    """The same formula, with the pairs (μ1, μ2) that only this condition keeps out: too small for some neighbour."""
    generator = np.random.default_rng(5)
    mu1, mu2 = 1 + 10 ** generator.uniform(-2, 1.5, 400), 1 + 10 ** generator.uniform(-2, 2, 400)
    caught = kept = 0
    for votes, neighbour, k, at, sigma in cases(300, seed=6):
        outcome = likely_outcome(votes, threshold=at, sigma=sigma)
        log_q, c = float(log_disagreement(log_agreement(votes, outcome, threshold=at, sigma=sigma))), 2 * k / sigma**2
        truth = renyi(votes, neighbour, threshold=at, sigma=sigma)
        most = (mu2 - 1) * mu2 * c - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1)))
        for order, true in zip(LAMBDAS, truth, strict=True):
            order_fits, positive, rises = order <= mu1, log_q + mu2 * c < 0, log_q <= most
            only = rises & (~order_fits & positive if dropped == "λ ≤ μ1" else order_fits & ~positive)
            value = without_conditions(order, log_q, mu1, mu2, c)
            caught += int((only & (value < true * (1 - 1e-9))).sum())
            ours = theorem4(order, log_q, mu1=mu1, mu2=mu2, rdp_per_order=c)
            assert np.isnan(ours[only]).all()
            kept += int((~np.isnan(ours)).sum())
            assert not (ours < true * (1 - 1e-9)).any()
    assert caught > 20
    assert kept > 1000
