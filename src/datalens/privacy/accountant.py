"""What a list of events costs: the exact Gaussian accountant and the paper's Rényi accountant.

TopAgg is an adaptive composition of plain Gaussian mechanisms, with no subsampling, so the whole of
it is exactly mu-GDP with mu² = Σ (sensitivity/sigma)², and both accountants are functions of mu².
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from scipy.special import log_ndtr

from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.events import Event, GaussianEvent

AccountantName = Literal["exact", "rdp"]

# Rounded to integers, float64 noise of this size still has its last digit; beyond, calibration makes no sense either.
MOST_NOISE = 2.0**40

# The orders of the paper's code. A sparser set only makes ε larger, never too small.
PAPER_ORDERS: tuple[float, ...] = (1.1, *(float(order) for order in range(2, 200)))


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


_CURVES: dict[AccountantName, Callable[[float, float], float]] = {"exact": exact_epsilon, "rdp": rdp_epsilon}


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Prices Gaussian events by mu², and refuses every other event.

    Since mu² only adds up, "stop before Σ mu² passes the budget's mu²" is a valid privacy filter:
    sigma, k and the batch size may be chosen as the run goes (Rogers et al. 2016; for Gaussian
    mechanisms Koskela et al. 2022).
    """

    name: AccountantName

    def mu_squared(self, events: Iterable[Event]) -> float:
        squares = []
        for event in events:
            if not isinstance(event, GaussianEvent):
                raise UnpriceableEvent(
                    f"the {self.name} accountant prices Gaussian events only, not {event.kind!r}; "
                    "a newer datalens may know it"
                )
            squares.append(event.mu * event.mu)  # inf where it overflows, which ** is not
        try:
            return math.fsum(squares)
        except OverflowError:
            return math.inf

    def epsilon(self, events: Iterable[Event], delta: float) -> float:
        return self.epsilon_at(self.mu_squared(events), delta)

    def epsilon_at(self, mu_squared: float, delta: float) -> float:
        return _CURVES[self.name](mu_squared, delta)

    def mu_budget(self, epsilon: float, delta: float) -> float:
        """The largest mu that costs at most ε."""
        if math.isinf(epsilon):
            return math.inf
        return _bisect(lambda mu: self.epsilon_at(mu * mu, delta) > epsilon)[0]


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


def calibrate_sigma(*, sensitivity: float, steps: int, epsilon: float, delta: float, accountant: Accountant) -> float:
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
    while accountant.epsilon_at(steps * (sensitivity / sigma) ** 2, delta) > epsilon:
        sigma *= 1 + 1e-14
    if sigma > MOST_NOISE:
        raise BudgetExceeded(
            f"epsilon {epsilon:g} at delta {delta:g} would need noise of {sigma:.3g}, more than any data could show "
            "through: raise --epsilon"
        )
    return sigma


def calibrate_steps(*, sensitivity: float, sigma: float, epsilon: float, delta: float, accountant: Accountant) -> int:
    """The most releases of this sensitivity and noise that fit into a finite (ε, δ); 0 if not even one does."""
    if sigma <= 0 or math.isinf(epsilon):
        raise DatalensError("without noise, or with epsilon inf, nothing limits the steps: give --steps")
    if not sigma <= MOST_NOISE:
        raise DatalensError(f"--sigma {sigma:g} is more than {MOST_NOISE:g}: no data could show through that noise")
    mu_squared = (sensitivity / sigma) * (sensitivity / sigma)

    def fits(count: int) -> bool:
        return accountant.epsilon_at(count * mu_squared, delta) <= epsilon

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
        if high > 2**60:
            raise DatalensError("so many steps fit that nothing limits them: give --steps")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
