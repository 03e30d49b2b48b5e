"""ε and δ as functions of mu: the Gaussian's exact curve, Rényi (RDP) and its conversions, sampled units, one of many.

mu is sensitivity/σ. Everything here is a formula of a paper, or a bound proved in docs/privacy.md; nothing here knows
events, budgets or which accountant is asked.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

# The orders of the paper's code. A sparser set only makes ε larger, never too small.
PAPER_ORDERS: tuple[float, ...] = (1.1, *(float(order) for order in range(2, 200)))
# Where units are sampled, ε may be far below 1/200, and needs orders to match: up to 2262.
SAMPLED_ORDERS: tuple[float, ...] = (*PAPER_ORDERS, *(float(int(200 * 2 ** (i / 4))) for i in range(15)))
MOMENT_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 34))  # λ + 1 for λ = 1 … 32
# For zCDP any order will do, so there are many: λ − 1 from 1e-4 to 1e8.
_ZCDP_ORDERS = 1.0 + np.logspace(-4, 8, 6001)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of a mu-GDP mechanism: Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Balle and Wang 2018, Theorem 8)."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    mu = max(mu, 1e-10)  # below, the difference drowns in rounding; δ grows with mu, so this errs on the safe side
    log_first = float(log_ndtr(-epsilon / mu + mu / 2))
    log_second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    # Both in logarithms: e^ε overflows long before the difference stops to matter.
    return math.exp(log_first) * -math.expm1(min(log_second - log_first, 0.0))


def exact_epsilon(mu_squared: float, delta: float) -> float:
    """The smallest ε with δ(ε) <= delta. The upper end of a bisection: never below the truth by more than rounding."""
    mu = math.sqrt(mu_squared)
    if math.isinf(mu):
        return math.inf
    return bisect(lambda epsilon: gaussian_delta(mu, epsilon) <= delta)[1]


def rdp_epsilon(mu_squared: float, delta: float) -> float:
    """DataLens, Theorems 1 and 3: min over the orders λ of λ·mu²/2 + log(1/δ)/(λ − 1)."""
    if mu_squared == 0:
        return 0.0
    return min(order * mu_squared / 2 + math.log(1 / delta) / (order - 1) for order in PAPER_ORDERS)


def moments_epsilon(mu_squared: float, delta: float) -> float:
    """The same at the orders of Abadi et al. 2016, Section 3.2: the log moments for λ <= 32, and their tail bound."""
    if mu_squared == 0:
        return 0.0
    return min(order * mu_squared / 2 + math.log(1 / delta) / (order - 1) for order in MOMENT_ORDERS)


def improved_epsilon(mu_squared: float, delta: float) -> float:
    """The same orders with the conversion of Balle et al. 2020 (Canonne, Kamath, Steinke 2020, Proposition 12)."""
    if mu_squared == 0:
        return 0.0
    return convert_improved([order * mu_squared / 2 for order in PAPER_ORDERS], PAPER_ORDERS, delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """ε of a rho-zCDP mechanism: the improved conversion over a dense, fixed set of orders (so it rises with rho)."""
    if rho == 0:
        return 0.0
    return convert_improved(_ZCDP_ORDERS * rho, _ZCDP_ORDERS, delta)


def convert_improved(curve: Sequence[float] | np.ndarray, orders: Sequence[float] | np.ndarray, delta: float) -> float:
    """min over λ of ε(λ) + log((λ − 1)/λ) − (log δ + log λ)/(λ − 1), and never below 0."""
    order = np.asarray(orders)
    found = np.asarray(curve) + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    return max(0.0, float(found.min()))


def convert_as_printed(curve: Sequence[float], orders: Sequence[float], delta: float) -> float:
    """DataLens, Theorem 1: min over λ of ε(λ) + log(1/δ)/(λ − 1)."""
    return min(cost + math.log(1 / delta) / (order - 1) for cost, order in zip(curve, orders, strict=True))


@functools.lru_cache(maxsize=2**14)
def subsampled_rdp(mu: float, rate: float, order: float) -> float:
    """RDP of a Poisson-subsampled Gaussian at a whole order (Mironov, Talwar, Zhang 2019, Section 3.3).

    1/(λ − 1) · log Σ_i C(λ, i) (1 − q)^(λ − i) q^i exp((i² − i)·mu²/2), and infinity at orders between.
    """
    if rate == 0 or mu == 0:
        return 0.0
    if rate == 1:
        return order * mu * mu / 2
    if order != int(order) or math.isinf(mu * mu):  # 0·∞ below would be no number, and no number is no price
        return math.inf
    i = np.arange(int(order) + 1)
    choose = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    logs = choose + (order - i) * math.log1p(-rate) + i * math.log(rate) + (i * i - i) * (mu * mu / 2)
    return max(0.0, float(logsumexp(logs))) / (order - 1)


def one_of_many_delta(mu: float, rate: float, epsilon: np.ndarray) -> np.ndarray:
    """δ(ε), at ε >= 0, that no release of one unit of 1/rate, evenly chosen, exceeds when one unit's row is replaced.

    (1−q)M + qA against (1−q)M + qB, all three (mixtures of) Gaussians with centres at most mu apart. By advanced joint
    convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) its divergence at e^ε is at most q times that of N(mu, 1)
    and N(0, 1) at 1 + (e^ε − 1)/q, and it is that much where M = B. At ε < 0 the same bound, the other way round:
    δ(ε) = 1 − e^ε + e^ε·δ(−ε). The larger of two curves of pairs, so a curve of a pair itself, which composes (Zhu,
    Dong, Wang 2022, Theorem 10); docs/privacy.md has the steps.
    """
    return rate * _gaussian_deltas(mu, np.log1p(np.expm1(epsilon) / rate))


def one_of_many_rdp(mu: float, rate: float, order: float) -> float:
    """RDP of the pair that `one_of_many_delta` is the curve of, at whole orders.

    With R and A the curves of Poisson sampling at ε >= 0 when a unit vanishes and when one appears, the pair has R at
    ε >= 0 and A, seen from the other side, below: E[(p/q)^λ] = E_R[(p/q)^λ] + λ(λ−1)·∫ e^(−λε)·(R(ε) − A(ε)) dε over
    ε >= 0. Both curves fall, so the sum below, R at the left and A at the right of each cell, is above the integral.
    """
    poisson = subsampled_rdp(mu, rate, order)
    if rate == 1 or math.isinf(poisson):
        return poisson
    ends, gaps = _gaps(mu, rate)
    weight = np.exp(-order * ends)
    rest = (order - 1) * float(gaps @ (weight - np.append(weight[1:], 0.0)))
    with np.errstate(divide="ignore"):  # nothing is added where mu is 0
        return float(np.logaddexp((order - 1) * poisson, np.log(rest))) / (order - 1)


@functools.lru_cache(maxsize=256)
def _gaps(mu: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Cells of ε, by their left ends, the last without an end; and the most that R − A (see above) is in each."""
    ends = np.concatenate([[0.0], np.geomspace(1e-3 * rate, 60.0, 600)])
    vanishes = one_of_many_delta(mu, rate, ends)
    left = np.maximum(-np.expm1(ends + math.log1p(-rate)), 0.0)  # 1 − e^ε(1 − q)
    with np.errstate(divide="ignore"):
        appears = np.where(left > 0, left * _gaussian_deltas(mu, ends + math.log(rate) - np.log(left)), 0.0)
    return ends, np.maximum(vanishes - np.append(appears[1:], 0.0), 0.0)


def _gaussian_deltas(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """`gaussian_delta` at many ε >= 0 (also infinite ones)."""
    if mu == 0:
        return np.zeros_like(epsilon)
    mu = max(mu, 1e-10)
    with np.errstate(invalid="ignore", over="ignore"):
        first = log_ndtr(-epsilon / mu + mu / 2)
        gap = epsilon + log_ndtr(-epsilon / mu - mu / 2) - first
        return np.where(np.isfinite(first), np.exp(first) * -np.expm1(np.minimum(gap, 0.0)), 0.0)


def total(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def bisect(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbouring x >= 0 around the place where a monotone condition begins to hold: (not yet, already)."""
    if holds(0.0):
        return 0.0, 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
