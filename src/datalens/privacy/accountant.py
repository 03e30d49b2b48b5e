"""What a list of events costs: by the exact Gaussian curve, Rényi (RDP), privacy loss (PLD, PRV) and moments.

TopAgg is an adaptive composition of plain Gaussian mechanisms, with no subsampling, so the whole of
it is exactly mu-GDP with mu² = Σ (sensitivity/sigma)², and every price is a function of mu². Discrete Gaussian
noise adds one detail (see `DiscreteGaussianEvent`), subsampling another: the exact curve does not price it.

| event | exact | rdp, rdp-improved, moments | pld | prv |
|---|---|---|---|---|
| gaussian | mu² = (Δ/σ)² | λ·mu²/2 | Gaussian of mu | as exact |
| discrete-gaussian, σ >= 10 | mu² = Δ²/(σ² − 4), a slack of 2e-34 a coordinate | λ·Δ²/(2σ²) | as exact | as exact |
| discrete-gaussian, σ < 10 | zCDP, and nothing else in the ledger | λ·Δ²/(2σ²) | refused | as exact |
| subsampled-gaussian | refused | Mironov et al. 2019, whole orders | both directions | one direction, upper end |
| one-of-many-gaussian | refused | `one_of_many_rdp`, whole orders | `one_of_many_delta`, dot by dot | refused |
| discrete-laplace | randomised responses of one scale, alone | the same, with others | as exact | refused |

A subsampled event of rate 1 is a Gaussian event. `moments` is Abadi et al. 2016: RDP at the orders 2 … 33 only.
`prv` is Opacus's, in whose tables a record is taken away; `pld`, which looks at both directions, is the check on it.
"""

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.events import (
    LEAST_SMOOTH,
    ROUNDING,
    Charge,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    NoiseLaw,
    OneOfManyEvent,
    SubsampledGaussianEvent,
)
from datalens.privacy.responses import pld_responses, response_epsilon, response_rdp

AccountantName = Literal["exact", "rdp", "rdp-improved", "pld", "prv", "moments"]
ACCOUNTANTS: tuple[AccountantName, ...] = get_args(AccountantName)

# Rounded to integers, float64 noise of this size still has its last digit; beyond, calibration makes no sense either.
MOST_NOISE = 2.0**40

# The orders of the paper's code. A sparser set only makes ε larger, never too small.
PAPER_ORDERS: tuple[float, ...] = (1.1, *(float(order) for order in range(2, 200)))
# Where units are sampled, ε may be far below 1/200, and needs orders to match: up to 2262.
SAMPLED_ORDERS: tuple[float, ...] = (*PAPER_ORDERS, *(float(int(200 * 2 ** (i / 4))) for i in range(15)))
MOMENT_ORDERS: tuple[float, ...] = tuple(float(order) for order in range(2, 34))  # λ + 1 for λ = 1 … 32
SAMPLED_ONLY: tuple[AccountantName, ...] = ("prv", "moments")  # what is not sampled has better accountants
# Of mu, and of different events, for which the pld accountant does its work.
PLD_LARGEST, PLD_MOST, PLD_EQUAL = 30.0, 200, 10_000
PLD_LOUDEST = 1e4  # of the mu of one sampled unit: beyond, dp-accounting's own numbers overflow
# For zCDP any order will do, so there are many: λ − 1 from 1e-4 to 1e8.
_ZCDP_ORDERS = 1.0 + np.logspace(-4, 8, 6001)


_Rdp = Callable[[float, float, float], float]  # (mu, rate, order)


class UnpriceableEvent(DatalensError):
    """An accountant met an event it does not understand, and refuses to guess."""


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
    return _bisect(lambda epsilon: gaussian_delta(mu, epsilon) <= delta)[1]


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
    return _convert_improved([order * mu_squared / 2 for order in PAPER_ORDERS], PAPER_ORDERS, delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """ε of a rho-zCDP mechanism: the improved conversion over a dense, fixed set of orders (so it rises with rho)."""
    if rho == 0:
        return 0.0
    return _convert_improved(_ZCDP_ORDERS * rho, _ZCDP_ORDERS, delta)


def _convert_improved(curve: Sequence[float] | np.ndarray, orders: Sequence[float] | np.ndarray, delta: float) -> float:
    """min over λ of ε(λ) + log((λ − 1)/λ) − (log δ + log λ)/(λ − 1), and never below 0."""
    order = np.asarray(orders)
    found = np.asarray(curve) + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    return max(0.0, float(found.min()))


def _convert_as_printed(curve: Sequence[float], orders: Sequence[float], delta: float) -> float:
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
    if rate == 1 or poisson == 0 or math.isinf(poisson):
        return poisson
    ends, gaps = _gaps(mu, rate)
    weight = np.exp(-order * ends)
    rest = (order - 1) * float(gaps @ (weight - np.append(weight[1:], 0.0)))
    log_moment = np.logaddexp((order - 1) * poisson, math.log(rest)) if rest > 0 else (order - 1) * poisson
    return float(log_moment) / (order - 1)


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


def pld_epsilon(mu_squared: float, delta: float) -> float:
    """One Gaussian of this mu, by dp-accounting."""
    return _pld_epsilon(((math.sqrt(mu_squared), 1.0, 1),), delta)


@functools.lru_cache(maxsize=256)
def _pld_epsilon(
    parts: tuple[tuple[float, float, int], ...], delta: float, chosen: tuple[tuple[float, float, int], ...] = ()
) -> float:
    """(mu, sampling rate, how many times), composed by dp-accounting, rounded towards more ε.

    `chosen`: the same for one-of-many events.
    """
    parts = tuple(part for part in parts if part[0] > 0)
    chosen = tuple(part for part in chosen if part[0] > 0)
    if not parts and not chosen:
        return 0.0
    whole = math.sqrt(_sum([_loudness(mu, rate) * count for mu, rate, count in (*parts, *chosen)]))
    if whole > PLD_LARGEST or max(mu for mu, _, _ in (*parts, *chosen)) > PLD_LOUDEST:
        return math.inf  # true, if coarse: tables of what may leak grow with mu², and there is nothing left to protect
    # A crowd of equal Gaussians is one Gaussian too, and millions of convolutions are no better a check than thousands.
    parts = tuple(
        (mu * math.sqrt(n), rate, 1) if rate == 1 and n > PLD_EQUAL else (mu, rate, n) for mu, rate, n in parts
    )
    if len(parts) > PLD_MOST:  # one Gaussian is what Gaussians compose to; the rest is refused before it takes hours
        plain = math.sqrt(_sum([mu * mu * count for mu, rate, count in parts if rate == 1]))
        parts = (*(((plain, 1.0, 1),) if plain > 0 else ()), *(part for part in parts if part[1] < 1))
        if len(parts) > PLD_MOST:
            raise UnpriceableEvent(f"the pld accountant composes at most {PLD_MOST} different subsampled events")
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError as error:
        raise DatalensError(
            f"the pld accountant needs dp-accounting, which cannot be imported ({error}): pip install dp-accounting, "
            "or use another --accountant"
        ) from error
    # Fine against the whole, and not finer: the work grows with the number of cells.
    cell = max(whole / 2000, max(mu * mu / 2 + 10 * mu for mu, _, _ in (*parts, *chosen)) / 1e6)
    composed = None
    for mu, rate, count in parts:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, sensitivity=1.0, sampling_prob=rate, value_discretization_interval=cell
        )
        many = one.self_compose(count) if count > 1 else one
        composed = many if composed is None else composed.compose(many)
    for mu, rate, count in chosen:
        # Beyond the last dot less than 1e-20 of probability is left; it counts as lost.
        last = math.ceil(math.log1p(rate * math.expm1(min(mu * mu / 2 + 10 * mu, 700.0))) / cell) + 1
        upper = one_of_many_delta(mu, rate, cell * np.arange(last + 1))
        below = np.exp(-cell * np.arange(last, 0, -1))
        curve = np.concatenate([1 - below + below * upper[:0:-1], upper])
        dots = pld_pmf.create_pmf_pessimistic_connect_dots(cell, np.arange(-last, last + 1), curve)
        one = privacy_loss_distribution.PrivacyLossDistribution(dots)
        many = one.self_compose(count) if count > 1 else one
        composed = many if composed is None else composed.compose(many)
    assert composed is not None
    return max(0.0, float(composed.get_epsilon_for_delta(delta)))


# PRV: the finest and coarsest error of ε it is asked for, the most cells it may take, and where it hands over to RDP.
PRV_FINEST, PRV_COARSEST, PRV_CELLS, PRV_LARGEST = 5e-4, 1e-2, 2**24, 40.0
PRV_SMALLEST_DELTA = 1e-10  # below, rounding of its transforms is no longer small against δ


@functools.lru_cache(maxsize=1024)
def _prv_epsilon(parts: tuple[tuple[float, float, int], ...], delta: float, rough: float) -> float:
    """(mu, sampling rate, how many times), composed by Opacus (Gopi et al. 2021); the upper end of its interval.

    `rough`: ε by RDP. The error asked for is a fiftieth of it, so that it follows from the events alone.
    """
    if not rough <= PRV_LARGEST:
        return rough  # true, if coarse: there is nothing left to protect
    if delta < PRV_SMALLEST_DELTA:
        raise UnpriceableEvent(
            f"the prv accountant is not reliable below delta {PRV_SMALLEST_DELTA:g}: use --accountant rdp-improved"
        )
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise DatalensError(
            f"the prv accountant needs Opacus, which cannot be imported ({error}): pip install opacus, or use another "
            "--accountant"
        ) from error
    steps = sum(count for _, _, count in parts)
    wanted = min(max(rough / 50, PRV_FINEST), PRV_COARSEST)
    finest = 2 * (rough + 4) * math.sqrt(steps * math.log(12_000 / delta) / 2) / PRV_CELLS
    accountant = PRVAccountant()
    accountant.history = [(1 / mu, rate, count) for mu, rate, count in parts]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about orders of the RDP that only sizes its tables
            epsilon = float(accountant.get_epsilon(delta, eps_error=max(wanted, finest)))
    except (RuntimeError, ValueError) as error:
        raise UnpriceableEvent(
            f"the prv accountant has no price for this ({error}): use --accountant rdp-improved"
        ) from error
    if not math.isfinite(epsilon):
        raise UnpriceableEvent("the prv accountant has no price for this: use --accountant rdp-improved")
    return max(0.0, epsilon)


def _loudness(mu: float, rate: float) -> float:
    """About what an event adds to mu² of the whole: exact for plain Gaussians, the central limit for sampled ones.

    (Or twice their Kullback-Leibler divergence, at most q·mu²/2, where the noise is small.)
    """
    return mu * mu if rate == 1 else min(rate * mu * mu, rate * rate * math.expm1(min(mu * mu, 100.0)))


_CURVES: dict[AccountantName, Callable[[float, float], float]] = {
    "exact": exact_epsilon,
    "rdp": rdp_epsilon,
    "rdp-improved": improved_epsilon,
    "pld": pld_epsilon,
    "prv": exact_epsilon,
    "moments": moments_epsilon,
}


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Prices the events it understands, and refuses every other event.

    Since mu² only adds up, "stop before Σ mu² passes the budget's mu²" is a valid privacy filter:
    sigma, k and the batch size may be chosen as the run goes (Rogers et al. 2016; for Gaussian
    mechanisms Koskela et al. 2022). The same holds for ρ of zCDP. A filter may not change its rule on the way,
    so `exact` takes coarse discrete noise (σ < 10) by itself or not at all. The rates of subsampled events must be
    fixed beforehand.
    """

    name: AccountantName

    def mu_squared(self, events: Iterable[Event]) -> float:
        """Σ mu² of Gaussian events, discrete ones as the Gaussian they are post-processing of."""
        return _sum([event.mu * event.mu for event in map(self._gaussian, events)])  # inf where it overflows

    def epsilon(self, events: Iterable[Event], delta: float) -> float:
        return self.price([(event, 1) for event in events], delta)

    def epsilon_at(self, mu_squared: float, delta: float) -> float:
        """ε of Gaussian mechanisms that add up to mu²."""
        return _CURVES[self.name](mu_squared, delta)

    def price(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """ε of (event, how many times)."""
        counted = [_spread_out(event, count) for event, count in counted]
        if self.name in ("exact", "pld") and any(isinstance(event, LaplaceEvent) for event, _ in counted):
            return self._responses(counted, delta)
        match self.name:
            case "prv":
                return self._prv(counted, delta)
            case "exact":
                return self._exact(counted, delta)
            case "pld":
                return self._pld(counted, delta)
            case _:
                return self._rdp(counted, delta)

    def _exact(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        events = [(self._gaussian(event), count) for event, count in counted]
        coarse = [isinstance(event, DiscreteGaussianEvent) and not event.smooth for event, _ in events]
        if any(coarse):
            if not all(coarse):
                raise UnpriceableEvent(
                    f"the exact accountant does not price discrete noise below sigma {LEAST_SMOOTH:g} together with "
                    "other noise: use --accountant rdp-improved"
                )
            return zcdp_epsilon(_sum([event.rho * count for event, count in events]), delta)
        slack = _sum([event.slack * count for event, count in events])
        mu_squared = _sum([event.mu * event.mu * count for event, count in events])
        # Pointwise within e^±slack of the Gaussian's post-processing: (ε, δ) becomes (ε + 2·slack, e^slack·δ).
        return self.epsilon_at(mu_squared, delta * math.exp(-slack)) + 2 * slack

    def _responses(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        """Ballots with Laplace noise of one scale, on a fixed schedule: all of it is so many randomised responses."""
        laplace = [(event, count) for event, count in counted if isinstance(event, LaplaceEvent)]
        losses = {event.loss for event, _ in laplace if event.moved}
        if len(laplace) != len(counted) or len(losses) > 1:
            raise UnpriceableEvent(
                f"the {self.name} accountant prices Laplace noise of one scale and no other noise beside it: "
                "use --accountant rdp-improved"
            )
        times = sum(event.moved * count for event, count in laplace)
        price = response_epsilon if self.name == "exact" else pld_responses
        return price(max(losses, default=0.0), times, delta)

    def _rdp(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        known = [(self._known(event), count) for event, count in counted]
        rho = _sum([event.rho * count for event, count in known if isinstance(event, GaussianEvent)])
        sampled: Counter[tuple[_Rdp, float, float]] = Counter()
        for event, count in known:
            if isinstance(event, SubsampledGaussianEvent):
                sampled[subsampled_rdp, event.mu, event.rate] += count
            if isinstance(event, OneOfManyEvent):
                sampled[one_of_many_rdp, event.mu, event.rate] += count * event.repeats
            if isinstance(event, LaplaceEvent):
                sampled[_laplace_rdp, event.loss, 1.0] += count * event.moved
        if not any(mu > 0 for _, mu, _ in sampled):
            return self.epsilon_at(2 * rho, delta)
        orders = MOMENT_ORDERS if self.name == "moments" else SAMPLED_ORDERS
        curve = [
            _sum([order * rho, *(rdp(mu, rate, order) * n for (rdp, mu, rate), n in sampled.items())])
            for order in orders
        ]
        convert = _convert_improved if self.name == "rdp-improved" else _convert_as_printed
        return convert(curve, orders, delta)

    def _prv(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        known = [(self._known(event), count) for event, count in counted]
        sampled: Counter[tuple[float, float]] = Counter()
        for event, count in known:
            if isinstance(event, SubsampledGaussianEvent):
                sampled[event.mu, event.rate] += count
        if not sampled:
            return self._exact(counted, delta)
        if len(known) > sum(isinstance(event, SubsampledGaussianEvent) for event, _ in known):
            raise UnpriceableEvent(
                "the prv accountant does not price sampled and unsampled events together: use --accountant rdp-improved"
            )
        parts = tuple(sorted((mu, rate, n) for (mu, rate), n in sampled.items() if mu > 0 and n > 0))
        if not parts:
            return 0.0
        return _prv_epsilon(parts, delta, Accountant(name="rdp-improved")._rdp(counted, delta))  # already spread out

    def _pld(self, counted: Sequence[tuple[Event, int]], delta: float) -> float:
        parts: Counter[tuple[float, float]] = Counter()
        chosen: Counter[tuple[float, float]] = Counter()
        slack = 0.0
        for event, count in counted:
            known = self._known(event)
            if isinstance(known, SubsampledGaussianEvent):
                parts[known.mu, known.rate] += count
                continue
            if isinstance(known, OneOfManyEvent):
                chosen[known.mu, known.rate] += count * known.repeats
                continue
            if isinstance(known, DiscreteGaussianEvent) and not known.smooth:
                raise UnpriceableEvent(
                    f"the pld accountant does not price discrete noise below sigma {LEAST_SMOOTH:g}: "
                    "use --accountant rdp-improved"
                )
            assert isinstance(known, GaussianEvent)  # Laplace went elsewhere
            slack += known.slack * count
            parts[known.mu, 1.0] += count
        listed = tuple(sorted((mu, rate, count) for (mu, rate), count in parts.items()))
        picked = tuple(sorted((mu, rate, count) for (mu, rate), count in chosen.items()))
        return _pld_epsilon(listed, delta * math.exp(-slack), picked) + 2 * slack

    def _known(self, event: Event) -> Charge:
        if not isinstance(event, GaussianEvent | SubsampledGaussianEvent | OneOfManyEvent | LaplaceEvent):
            raise UnpriceableEvent(
                f"the {self.name} accountant prices Gaussian events only, not {event.kind!r}; "
                "a newer datalens may know it"
            )
        return event

    def _gaussian(self, event: Event) -> GaussianEvent:
        known = self._known(event)
        if not isinstance(known, GaussianEvent):
            raise UnpriceableEvent(
                f"the {self.name} accountant prices plain Gaussian events only, not {known.kind!r}: "
                "use --accountant rdp-improved or pld"
            )
        return known

    def mu_budget(self, epsilon: float, delta: float) -> float:
        """The largest mu that costs at most ε."""
        if math.isinf(epsilon):
            return math.inf
        if self.name == "pld":  # a look at it is slow, and it is never more than a little above the exact curve
            mu, less = Accountant(name="exact").mu_budget(epsilon, delta), 1e-7
            while self.epsilon_at(mu * mu, delta) > epsilon:
                mu, less = mu * max(1 - less, 0.5), 2 * less
            return mu
        return _bisect(lambda mu: self.epsilon_at(mu * mu, delta) > epsilon)[0]


def side_by_side(counted: Sequence[tuple[Event, int]], delta: float) -> dict[AccountantName, float | str]:
    """Every accountant's ε of the same (event, how many times), or why it has none."""
    found: dict[AccountantName, float | str] = {}
    sampled = any(isinstance(event, SubsampledGaussianEvent) for event, _ in counted)
    for name in ACCOUNTANTS if sampled else (name for name in ACCOUNTANTS if name not in SAMPLED_ONLY):
        try:
            found[name] = Accountant(name=name).price(counted, delta)
        except DatalensError as error:
            found[name] = str(error)
    return found


def _laplace_rdp(loss: float, rate: float, order: float) -> float:
    return response_rdp(loss, order)


def _spread_out(event: Event, count: int) -> tuple[Event, int]:
    """A block as its repeats; and sampling that leaves nobody out as no sampling."""
    if not isinstance(event, SubsampledGaussianEvent):
        return event, count
    if event.rate < 1:
        return event, count * event.repeats
    plain = GaussianEvent(
        row_unit=event.row_unit,
        l2_bound=event.l2_bound,
        diameter=2 * event.l2_bound,
        relation=event.relation,
        sigma=event.sigma,
        queries=event.queries,
        step=event.step,
        noise=event.noise,
    )
    return plain, count * event.repeats


def topagg_event(*, sensitivity: float, sigma: float, law: NoiseLaw, coordinates: int = 0) -> GaussianEvent:
    """One step of a plan: what a ledger will be charged, for its price only."""
    facts = {"row_unit": "teacher", "relation": "add-remove", "noise": "operating-system", "queries": 1, "step": 0}
    facts |= {"l2_bound": sensitivity / 2, "diameter": sensitivity, "sigma": sigma}
    if law == "discrete-gaussian":
        return DiscreteGaussianEvent(coordinates=coordinates, **facts)  # type: ignore[arg-type]
    return GaussianEvent(**facts)  # type: ignore[arg-type]


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _bisect(holds: Callable[[float], bool]) -> tuple[float, float]:
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


def calibrate_sigma(
    *,
    sensitivity: float,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: Accountant,
    law: NoiseLaw = "gaussian",
    coordinates: int = 0,
) -> float:
    """The smallest noise with which `steps` releases of this sensitivity fit into (ε, δ)."""
    if math.isinf(epsilon):
        return 0.0
    budget = accountant.mu_budget(epsilon, delta)
    if budget == 0:
        raise BudgetExceeded(
            f"no noise is large enough for epsilon {epsilon:g} at delta {delta:g} with the {accountant.name} "
            "accountant: raise --epsilon, or use --accountant exact"
        )
    sigma = sensitivity * math.sqrt(steps) / budget
    if sigma > MOST_NOISE:
        raise BudgetExceeded(
            f"epsilon {epsilon:g} at delta {delta:g} would need noise of {sigma:.3g}, more than any data could show "
            "through: raise --epsilon"
        )
    if law == "discrete-gaussian" and accountant.name in ("exact", "pld"):
        sigma = _discrete_sigma(sigma, sensitivity, steps, epsilon, delta, accountant)

    def overspends(sigma: float) -> bool:
        event = topagg_event(sensitivity=sensitivity, sigma=sigma, law=law, coordinates=coordinates)
        return accountant.price([(event, steps)], delta) > epsilon

    more = 1e-14 if accountant.name != "pld" else 1e-7  # the last digits; pld rounds each step towards more ε
    while overspends(sigma):
        sigma, more = sigma * (1 + more), 2 * more
    return sigma


def calibrate_event(
    make: Callable[[float], Event], *, times: int, epsilon: float, delta: float, accountant: Accountant
) -> float:
    """The smallest noise, to a part in 10,000, with which `times` events made of it fit into (ε, δ); 0 without a limit.

    `make(sigma)`. For events whose price is no closed formula: it is asked for again and again.
    """
    if math.isinf(epsilon):
        return 0.0

    def fits(sigma: float) -> bool:
        return accountant.price([(make(sigma), times)], delta) <= epsilon

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise BudgetExceeded(
                f"no noise is large enough for epsilon {epsilon:g} at delta {delta:g} with the {accountant.name} "
                "accountant: raise --epsilon, or use another --accountant"
            )
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _discrete_sigma(
    sigma: float, sensitivity: float, steps: int, epsilon: float, delta: float, accountant: Accountant
) -> float:
    """From the continuous Gaussian's sigma to a discrete one of the same price (nearly: the caller checks)."""
    smooth = math.sqrt(sigma * sigma + ROUNDING)
    if smooth >= LEAST_SMOOTH or accountant.name == "pld":
        return max(smooth, LEAST_SMOOTH)
    rho = _bisect(lambda rho: zcdp_epsilon(rho, delta) > epsilon)[0]
    coarse = sensitivity * math.sqrt(steps / (2 * rho)) if rho > 0 else math.inf
    return min(coarse, LEAST_SMOOTH)


def calibrate_steps(
    *,
    sensitivity: float,
    sigma: float,
    epsilon: float,
    delta: float,
    accountant: Accountant,
    law: NoiseLaw = "gaussian",
    coordinates: int = 0,
) -> int:
    """The most releases of this sensitivity and noise that fit into a finite (ε, δ); 0 if not even one does."""
    if sigma <= 0 or math.isinf(epsilon):
        raise DatalensError("without noise, or with epsilon inf, nothing limits the steps: give --steps")
    if not sigma <= MOST_NOISE:
        raise DatalensError(f"--sigma {sigma:g} is more than {MOST_NOISE:g}: no data could show through that noise")
    event = topagg_event(sensitivity=sensitivity, sigma=sigma, law=law, coordinates=coordinates)

    def fits(count: int) -> bool:
        return accountant.price([(event, count)], delta) <= epsilon

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
        if high > 2**60:
            raise DatalensError("so many steps fit that nothing limits them: give --steps")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
