"""Theorems 3, 4 and 5 of DataLens: data-independent and data-dependent bounds on the cost of a TopAgg query.

The data-dependent bounds are analysis only. They are computed from the votes before the noise, so their values depend
on the data and are not differentially private themselves: they never stop a run, are charged nowhere and enter no
certificate (a test follows the imports). See docs/theorem3.md, and items 5 and 16 of docs/decisions.md.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.special import log_ndtr, ndtr

from datalens.bounded.contributions import BoundedSum
from datalens.privacy.curves import PAPER_ORDERS

WARNING = (
    "Depends on the data and is not differentially private itself: for the owner only. "
    "It never stops a run and never enters a certificate."
)

ORDERS = np.array(PAPER_ORDERS)

# A bound on q may be too large, never too small: an allowance for rounding is added, and q = 0 is never claimed.
_ROUNDING = 1e-9
_SMALLEST_LOG_Q = -690.0


def topagg_rdp(orders: np.ndarray, *, k: int, sigma: float, queries: int = 1) -> np.ndarray:
    """Return the RDP of TopAgg by Theorem 3: 2kλ/σ² per synthetic image, which is λ·Δ²/(2σ²) with Δ = 2√k.

    Args:
        orders: Rényi orders λ.
        k: Coordinates that a teacher votes on per image.
        sigma: Standard deviation of the noise.
        queries: Synthetic images. A batch of m images costs m times one image.
    """
    return queries * 2 * k * np.asarray(orders, dtype=np.float64) / sigma**2


def rdp_to_epsilon(rdp: np.ndarray, *, delta: float, orders: np.ndarray = ORDERS) -> tuple[float, float] | None:
    """Return the smallest ε over the orders (Theorem 1), and the order at which it is reached.

    Args:
        rdp: [orders] RDP; NaN at orders that have no bound.
        delta: δ at which ε is computed.
        orders: [orders].

    Returns:
        (ε, order), or None if no order has a bound.
    """
    epsilons = np.asarray(rdp) + math.log(1 / delta) / (orders - 1)
    if np.isnan(epsilons).all():
        return None
    best = int(np.nanargmin(epsilons))
    return float(epsilons[best]), float(orders[best])


# --- Theorem 5 ------------------------------------------------------------------------------------------------------


def log_outcomes(votes: np.ndarray, *, threshold: float, sigma: float) -> np.ndarray:
    """Return log Pr[ḡ_j = −1], log Pr[ḡ_j = 0] and log Pr[ḡ_j = 1] of every coordinate: [..., d] → [..., d, 3].

    ḡ_j is 1 where f_j + N(0, σ²) ≥ βN, −1 where it is ≤ −βN, else 0; f_j are the `votes` and βN is the `threshold`:

    | ḡ_j | probability | the paper prints |
    |---|---|---|
    | 1 | Φ((f_j − βN)/σ) | the same |
    | −1 | Φ((−βN − f_j)/σ) | Φ((βN − f_j)/σ) |
    | 0 | Φ((βN − f_j)/σ) − Φ((−βN − f_j)/σ) | erf((βN − f_j)/(√2·σ)), right at f_j = 0 only |

    Args:
        votes: [..., d] sums of votes.
        threshold: βN.
        sigma: Standard deviation of the noise.
    """
    # The middle term is the same for f and −f, and with |f| both ends are computed as thin tails.
    size = np.abs(np.asarray(votes, dtype=np.float64))
    below, above = log_ndtr((-threshold - size) / sigma), log_ndtr((size - threshold) / sigma)
    high = log_ndtr((threshold - size) / sigma)
    with np.errstate(divide="ignore"):  # log 0 where there is no room between the thresholds
        within = np.log1p(-np.minimum(ndtr((-threshold - size) / sigma) + ndtr((size - threshold) / sigma), 1.0))
        # Beyond the threshold that difference is lost in rounding; there Φ(b) − Φ(a) is a difference of thin tails.
        beyond = high + _log1mexp(np.minimum(below - high, 0.0))
    middle = np.where(size > threshold, beyond, within)
    negative = np.asarray(votes) < 0
    ends = np.where(negative, above, below), np.where(negative, below, above)
    return np.stack([ends[0], middle, ends[1]], axis=-1)


def likely_outcome(votes: np.ndarray, *, threshold: float, sigma: float) -> np.ndarray:
    """Return the most likely ḡ* in {−1, 0, 1}^d: the most likely value of each coordinate, as they are independent.

    Args:
        votes: [..., d] sums of votes.
        threshold: βN.
        sigma: Standard deviation of the noise.
    """
    return (log_outcomes(votes, threshold=threshold, sigma=sigma).argmax(axis=-1) - 1).astype(np.int8)


def log_agreement(votes: np.ndarray, outcome: np.ndarray, *, threshold: float, sigma: float) -> np.ndarray:
    """Return log Pr[M = ḡ*] by Theorem 5, with its factors corrected. A product of 12,288 factors would underflow.

    Args:
        votes: [..., d] sums of votes.
        outcome: ḡ*: [..., d].
        threshold: βN.
        sigma: Standard deviation of the noise.
    """
    logs = log_outcomes(votes, threshold=threshold, sigma=sigma)
    chosen = np.take_along_axis(logs, (np.asarray(outcome, dtype=np.int64) + 1)[..., None], axis=-1)
    return chosen[..., 0].sum(axis=-1)


def log_disagreement(log_agree: np.ndarray) -> np.ndarray:
    """Return log q̃ with q̃ ≥ q = Pr[M ≠ ḡ*], from log Pr[M = ḡ*].

    Args:
        log_agree: log Pr[M = ḡ*].
    """
    with np.errstate(divide="ignore"):
        log_q = _log1mexp(np.asarray(log_agree, dtype=np.float64))
    return np.minimum(np.maximum(log_q + _ROUNDING, _SMALLEST_LOG_Q), 0.0)


def most_agreement(d: int, *, k: int, teachers: int, threshold: float, sigma: float) -> float:
    """Return an upper bound on log Pr[M = ḡ*] over all possible votes of `teachers` teachers, from public facts alone.

    A coordinate with |f_j| = s agrees with its likeliest outcome with some log-probability φ(s), and Σ |f_j| ≤ kN. So
    Σ φ(|f_j|) ≤ d·max over s of (φ(s) − a·s) + a·k·N for every price a ≥ 0 on a vote. The smallest over a grid of
    prices is returned.

    Args:
        d: Number of coordinates.
        k: Number of coordinates that each teacher votes on.
        teachers: N.
        threshold: βN.
        sigma: Standard deviation of the noise.
    """
    votes = np.arange(teachers + 1.0)
    logs = log_outcomes(votes, threshold=threshold, sigma=sigma).max(axis=-1)
    prices = np.append(0.0, np.geomspace(1e-3, 1e3, 241) / teachers)
    return float(min(d * (logs - price * votes).max() + price * k * teachers for price in prices))


# --- Theorem 4 ------------------------------------------------------------------------------------------------------


def theorem4(order: np.ndarray, log_q: float, *, mu1: np.ndarray, mu2: np.ndarray, rdp_per_order: float) -> np.ndarray:
    """Return the bound on D_λ(M(D) ‖ M(D′)) for every neighbour D′ of this D, or NaN where it does not apply.

    M is (μ, μ·`rdp_per_order`)-RDP for every μ, so ε1 and ε2 follow from μ1 and μ2. Conditions (Papernot et al. 2018,
    Theorem 6): 1 < λ ≤ μ1, 1 < μ2, and q̃ ≤ e^((μ2−1)ε2) / (μ1/(μ1−1)·μ2/(μ2−1))^μ2. One more condition is not printed
    but needed: q̃·e^ε2 < 1, since A is negative otherwise.

    The result is NaN, not a large number or the data-independent bound, so that it propagates into every sum.

    Args:
        order: λ.
        log_q: log q̃.
        mu1: μ1, an order of RDP.
        mu2: μ2, another.
        rdp_per_order: RDP of the mechanism at order 1.
    """
    order, mu1, mu2 = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (order, mu1, mu2)))
    with np.errstate(all="ignore"):
        eps1, eps2 = mu1 * rdp_per_order, mu2 * rdp_per_order
        most = (mu2 - 1) * eps2 - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1)))
        applies = (order > 1) & (order <= mu1) & (mu2 > 1) & (log_q <= most) & (log_q + eps2 < 0)
        log_a = _log1mexp(log_q) - _log1mexp((log_q + eps2) * (mu2 - 1) / mu2)
        log_b = eps1 - log_q / (mu1 - 1)
        total = np.logaddexp(_log1mexp(log_q) + (order - 1) * log_a, log_q + (order - 1) * log_b)
        return np.where(applies, total / (order - 1), np.nan)


def data_dependent_rdp(log_q: float, *, rdp_per_order: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Return Theorem 4 at its best (μ1, μ2) for each order, or NaN at orders where no pair that is tried satisfies it.

    A depends only on μ2 and is smallest at √(log(1/q̃)/c), where c is `rdp_per_order`. B depends only on μ1 and is
    smallest at 1 + √(log(1/q̃)/c) (Papernot et al. 2018, Proposition 10, for our sensitivity). The condition on q̃
    couples the two, so μ2 also runs over a grid up to where q̃·e^ε2 = 1, and μ1 is the value closest to its optimum
    that λ and the condition allow.

    Args:
        log_q: log q̃.
        rdp_per_order: RDP of the mechanism at order 1.
        orders: The orders λ.
    """
    orders = np.asarray(orders, dtype=np.float64)
    if not -math.inf < log_q < 0:
        return np.full(orders.shape, np.nan)
    best = math.sqrt(-log_q / rdp_per_order)
    last = -log_q / rdp_per_order  # beyond, q̃·e^ε2 >= 1
    if last <= 1:
        return np.full(orders.shape, np.nan)
    mu2 = np.append(1 + (last - 1) * np.geomspace(1e-9, 1.0, 240)[:-1], max(best, 1.0))
    with np.errstate(all="ignore"):
        slack = (-log_q + (mu2 - 1) * mu2 * rdp_per_order) / mu2 - np.log(mu2 / (mu2 - 1))
        least = np.where(slack > 0, (1 + _ROUNDING) / -np.expm1(-slack), np.nan)  # μ1/(μ1 − 1) <= e^slack
    mu1 = np.maximum(np.maximum(orders[:, None], 1 + best), least)
    rdp = theorem4(orders[:, None], log_q, mu1=mu1, mu2=mu2, rdp_per_order=rdp_per_order)
    smallest = np.where(np.isnan(rdp), np.inf, rdp).min(axis=1)
    return np.where(np.isinf(smallest), np.nan, smallest)


def needed_agreement(*, k: int, sigma: float) -> tuple[float, float]:
    """Return the least log Pr[M = ḡ*] at which Theorem 4 applies, and the least at which it beats Theorem 3.

    Each is for the most favourable order.

    Args:
        k: Coordinates that a teacher votes on per image.
        sigma: Standard deviation of the noise.
    """
    per_order = float(topagg_rdp(np.array(1.0), k=k, sigma=sigma))
    whatever, cheaper = np.full(ORDERS.shape, np.inf), ORDERS * per_order

    def first(limit: np.ndarray) -> float:
        low, high = 1e-12, -_SMALLEST_LOG_Q  # bracket of log(1/q̃): too little, enough
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            rdp = data_dependent_rdp(-middle, rdp_per_order=per_order)
            low, high = (low, middle) if bool((rdp < limit).any()) else (middle, high)
        return float(_log1mexp(-high))

    return first(whatever), first(cheaper)


# --- a run's queries, for its owner ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The cost of the votes on some synthetic images by Theorem 4. Private: see `WARNING`."""

    warning: str = field(default=WARNING, init=False)
    log_agree: np.ndarray = field(repr=False)  # [queries] log Pr[M = ḡ*]
    dependent: np.ndarray = field(repr=False)  # [queries, orders] RDP; NaN where Theorem 4 does not apply
    independent: np.ndarray = field(repr=False)  # [orders] RDP of one query by Theorem 3


@dataclass(frozen=True, kw_only=True)
class Combined:
    """ε of a sequence of queries with the smaller of both bounds for each, and how often each bound was used."""

    warning: str = field(default=WARNING, init=False)
    epsilon: float
    order: float
    used_dependent: int
    used_independent: int
    inapplicable: int  # of the queries that used the data-independent bound: Theorem 4 does not apply at this order


def analyse(votes: BoundedSum, *, k: int, threshold: float, sigma: float) -> Analysis:
    """Apply Theorems 4 and 5 to each image of a batch of votes, before any noise. The votes are not returned.

    Images are analysed one by one: given the data their noises are independent, so Rényi divergences add up.

    Args:
        votes: The sum of the teachers' votes.
        k: Coordinates that `TopKSign` lets a teacher vote on per image.
        threshold: βN.
        sigma: Standard deviation of the noise.
    """
    totals = votes.private_total.cpu().numpy()
    outcome = likely_outcome(totals, threshold=threshold, sigma=sigma)
    log_agree = log_agreement(totals, outcome, threshold=threshold, sigma=sigma)
    per_order = float(topagg_rdp(np.array(1.0), k=k, sigma=sigma))
    per_query = [data_dependent_rdp(float(q), rdp_per_order=per_order) for q in log_disagreement(log_agree)]
    return Analysis(log_agree=log_agree, dependent=np.stack(per_query), independent=ORDERS * per_order)


def dependent_epsilon(dependent: np.ndarray, *, delta: float) -> float | None:
    """Return ε of all queries by Theorem 4 alone, or None if at every order it fails to apply to some query.

    Args:
        dependent: [queries, orders] RDP by Theorem 4.
        delta: δ at which ε is computed.
    """
    converted = rdp_to_epsilon(dependent.sum(axis=0), delta=delta)
    return None if converted is None else converted[0]


def combined_epsilon(dependent: np.ndarray, independent: np.ndarray, *, delta: float) -> Combined:
    """Return ε with the smaller of both bounds for each query, and how often each bound was used.

    Args:
        dependent: [queries, orders] RDP by Theorem 4, NaN where it does not apply.
        independent: [orders] RDP of one query by Theorem 3.
        delta: δ at which ε is computed.
    """
    applies = ~np.isnan(dependent)
    smaller = applies & (np.where(applies, dependent, np.inf) < independent)
    converted = rdp_to_epsilon(np.where(smaller, dependent, independent).sum(axis=0), delta=delta)
    assert converted is not None  # the data-independent bound applies at every order
    at = int(np.flatnonzero(converted[1] == ORDERS)[0])
    used = int(smaller[:, at].sum())
    return Combined(
        epsilon=converted[0],
        order=converted[1],
        used_dependent=used,
        used_independent=len(dependent) - used,
        inapplicable=int((~applies[:, at]).sum()),
    )


def _log1mexp(x: np.ndarray | float) -> np.ndarray:
    """Return log(1 − e^x) for x <= 0, without cancellation at either end."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))
