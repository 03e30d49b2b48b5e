"""ε and δ as functions of mu = sensitivity/σ: the exact Gaussian curve, RDP and its conversions, sampled units.

Everything here is a formula from a paper, or a bound proved in docs/privacy.md. Nothing here depends on events, budgets
or the choice of an accountant.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

# The orders of the paper's code. A sparser set makes ε larger, never too small.
PAPER_ORDERS: tuple[float, ...] = (1.1, *(float(order) for order in range(2, 200)))
# With sampling ε may be far below 1/200, which needs higher orders: up to 2262.
SAMPLED_ORDERS: tuple[float, ...] = (*PAPER_ORDERS, *(float(int(200 * 2 ** (i / 4))) for i in range(15)))
MOMENT_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 34))  # λ + 1 for λ = 1 … 32
# For zCDP every order is valid, so the set is dense: λ − 1 from 1e-4 to 1e8.
_ZCDP_ORDERS = 1.0 + np.logspace(-4, 8, 6001)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) of a mu-GDP mechanism: Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Balle and Wang 2018, Theorem 8).

    Args:
        mu: Sensitivity/σ.
        epsilon: ε at which δ is computed.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    mu = max(mu, 1e-10)  # below it the difference is lost in rounding; δ grows with mu, so this errs on the safe side
    log_first = float(log_ndtr(-epsilon / mu + mu / 2))
    log_second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    # In logarithms, since e^ε overflows long before the difference becomes negligible.
    return math.exp(log_first) * -math.expm1(min(log_second - log_first, 0.0))


def exact_epsilon(mu_squared: float, delta: float) -> float:
    """Return the smallest ε with δ(ε) <= delta, as the upper end of a bisection: never too small but for rounding.

    Args:
        mu_squared: Sum of the squared mu of all releases.
        delta: δ at which ε is computed.
    """
    mu = math.sqrt(mu_squared)
    if math.isinf(mu):
        return math.inf
    return bisect(lambda epsilon: gaussian_delta(mu, epsilon) <= delta)[1]


def rdp_epsilon(mu_squared: float, delta: float) -> float:
    """Return ε by DataLens, Theorems 1 and 3: the minimum over the orders λ of λ·mu²/2 + log(1/δ)/(λ − 1).

    Args:
        mu_squared: Sum of the squared mu of all releases.
        delta: δ at which ε is computed.
    """
    if mu_squared == 0:
        return 0.0
    return min(order * mu_squared / 2 + math.log(1 / delta) / (order - 1) for order in PAPER_ORDERS)


def moments_epsilon(mu_squared: float, delta: float) -> float:
    """Return ε by the moments accountant: `rdp_epsilon` at the orders of Abadi et al. 2016.

    Section 3.2 there has the log moments for λ <= 32 and their tail bound.

    Args:
        mu_squared: Sum of the squared mu of all releases.
        delta: δ at which ε is computed.
    """
    if mu_squared == 0:
        return 0.0
    return min(order * mu_squared / 2 + math.log(1 / delta) / (order - 1) for order in MOMENT_ORDERS)


def improved_epsilon(mu_squared: float, delta: float) -> float:
    """Return ε at the paper's orders with the conversion of Balle et al. 2020.

    (It is Proposition 12 of Canonne, Kamath, Steinke 2020.)

    Args:
        mu_squared: Sum of the squared mu of all releases.
        delta: δ at which ε is computed.
    """
    if mu_squared == 0:
        return 0.0
    return convert_improved([order * mu_squared / 2 for order in PAPER_ORDERS], PAPER_ORDERS, delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return ε of a rho-zCDP mechanism by the improved conversion. The set of orders is fixed, so ε rises with rho.

    Args:
        rho: Sum of the ρ of all releases.
        delta: δ at which ε is computed.
    """
    if rho == 0:
        return 0.0
    return convert_improved(_ZCDP_ORDERS * rho, _ZCDP_ORDERS, delta)


def convert_improved(curve: Sequence[float] | np.ndarray, orders: Sequence[float] | np.ndarray, delta: float) -> float:
    """Return the minimum over λ of ε(λ) + log((λ − 1)/λ) − (log δ + log λ)/(λ − 1), or 0 if that is negative.

    Args:
        curve: RDP at each order: ε(λ).
        orders: The orders λ, above 1.
        delta: δ at which ε is computed.
    """
    order = np.asarray(orders)
    epsilons = np.asarray(curve) + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    return max(0.0, float(epsilons.min()))


def convert_as_printed(curve: Sequence[float], orders: Sequence[float], delta: float) -> float:
    """Return ε by DataLens, Theorem 1: the minimum over λ of ε(λ) + log(1/δ)/(λ − 1).

    Args:
        curve: RDP at each order: ε(λ).
        orders: The orders λ, above 1.
        delta: δ at which ε is computed.
    """
    return min(cost + math.log(1 / delta) / (order - 1) for cost, order in zip(curve, orders, strict=True))


@functools.lru_cache(maxsize=2**14)
def subsampled_rdp(mu: float, rate: float, order: float) -> float:
    """Return the RDP of a Poisson-subsampled Gaussian at an integer order (Mironov, Talwar, Zhang 2019, Section 3.3).

    It is 1/(λ − 1) · log Σ_i C(λ, i) (1 − q)^(λ − i) q^i exp((i² − i)·mu²/2), and infinity at fractional orders.

    Args:
        mu: Sensitivity/σ of a unit that is in the sample.
        rate: Sampling probability q.
        order: λ.
    """
    if rate == 0 or mu == 0:
        return 0.0
    if rate == 1:
        return order * mu * mu / 2
    if order != int(order) or math.isinf(mu * mu):  # 0·∞ below would be NaN, which is no price
        return math.inf
    i = np.arange(int(order) + 1)
    choose = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
    logs = choose + (order - i) * math.log1p(-rate) + i * math.log(rate) + (i * i - i) * (mu * mu / 2)
    return max(0.0, float(logsumexp(logs))) / (order - 1)


def one_of_many_delta(mu: float, rate: float, epsilon: np.ndarray) -> np.ndarray:
    """Return an upper bound on δ(ε), for ε >= 0, of releasing one of 1/rate units, when the row of one is replaced.

    The unit is chosen uniformly. The release is (1−q)M + qA against (1−q)M + qB, where all three are (mixtures of)
    Gaussians with centres at most mu apart. By advanced joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) the
    divergence at e^ε is at most q times that of N(mu, 1) and N(0, 1) at 1 + (e^ε − 1)/q, with equality where M = B. For
    ε < 0 the same bound holds with the roles exchanged: δ(ε) = 1 − e^ε + e^ε·δ(−ε). The result is the larger of two
    curves of pairs, hence itself the curve of a pair, which composes (Zhu, Dong, Wang 2022, Theorem 10).
    docs/privacy.md has the steps.

    Args:
        mu: Diameter/σ.
        rate: q, one over the number of units.
        epsilon: Values of ε, each at least 0.
    """
    return rate * _gaussian_deltas(mu, np.log1p(np.expm1(epsilon) / rate))


def one_of_many_rdp(mu: float, rate: float, order: float) -> float:
    """Return an upper bound on the RDP, at an integer order, of the pair whose curve is `one_of_many_delta`.

    Let R and A be the curves of Poisson sampling at ε >= 0 when a unit vanishes and when one appears. The pair has R at
    ε >= 0 and the reflection of R at ε < 0, where Poisson sampling (a unit vanishes) has the reflection of A. Hence
    E[(p/q)^λ] = E_R[(p/q)^λ] + λ(λ−1)·∫ e^(−λε)·(R(ε) − A(ε)) dε over ε >= 0. Both curves fall, so the sum below, with
    R at the left end and A at the right end of each cell, is above the integral.

    Args:
        mu: Diameter/σ.
        rate: One over the number of units.
        order: λ.
    """
    poisson = subsampled_rdp(mu, rate, order)
    if rate == 1 or math.isinf(poisson):
        return poisson
    ends, gaps = _gaps(mu, rate)
    weight = np.exp(-order * ends)
    rest = (order - 1) * float(gaps @ (weight - np.append(weight[1:], 0.0)))
    with np.errstate(divide="ignore"):  # log 0 where mu is 0: nothing is added
        return float(np.logaddexp((order - 1) * poisson, np.log(rest))) / (order - 1)


@functools.lru_cache(maxsize=256)
def _gaps(mu: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the left ends of cells of ε, the last one unbounded, and an upper bound on R − A (see above) in each."""
    ends = np.concatenate([[0.0], np.geomspace(1e-3 * rate, 60.0, 600)])
    vanishes = one_of_many_delta(mu, rate, ends)
    left = np.maximum(-np.expm1(ends + math.log1p(-rate)), 0.0)  # 1 − e^ε(1 − q)
    with np.errstate(divide="ignore"):
        appears = np.where(left > 0, left * _gaussian_deltas(mu, ends + math.log(rate) - np.log(left)), 0.0)
    return ends, np.maximum(vanishes - np.append(appears[1:], 0.0), 0.0)


def _gaussian_deltas(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Return `gaussian_delta` at many ε >= 0, which may be infinite."""
    if mu == 0:
        return np.zeros_like(epsilon)
    mu = max(mu, 1e-10)
    with np.errstate(invalid="ignore", over="ignore"):
        first = log_ndtr(-epsilon / mu + mu / 2)
        gap = epsilon + log_ndtr(-epsilon / mu - mu / 2) - first
        return np.where(np.isfinite(first), np.exp(first) * -np.expm1(np.minimum(gap, 0.0)), 0.0)


def total(values: list[float]) -> float:
    """Return the sum, correctly rounded, or infinity where it overflows.

    Args:
        values: Numbers that are not negative.
    """
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def bisect(holds: Callable[[float], bool]) -> tuple[float, float]:
    """Return adjacent x >= 0 around the point where a monotone condition begins to hold: (not yet, already).

    Args:
        holds: A monotone condition: once true, it stays true for larger x.
    """
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
