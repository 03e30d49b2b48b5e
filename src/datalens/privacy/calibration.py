"""Calibration: the least noise, or the most releases, that fit into a budget."""

import math
from collections.abc import Callable

from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import Accountant
from datalens.privacy.curves import bisect, zcdp_epsilon
from datalens.privacy.events import (
    LEAST_SMOOTH,
    MOST_NOISE,
    ROUNDING,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    NoiseLaw,
)


def topagg_event(*, sensitivity: float, sigma: float, law: NoiseLaw, coordinates: int = 0) -> GaussianEvent:
    """Return an event that costs what one planned step will be charged. It is used for pricing only.

    Args:
        sensitivity: l2 sensitivity of the step.
        sigma: Standard deviation of the noise.
        law: Distribution of the noise.
        coordinates: Numbers released in the step, which the price of discrete noise depends on.
    """
    facts = {"row_unit": "teacher", "relation": "add-remove", "noise": "operating-system", "queries": 1, "step": 0}
    facts |= {"l2_bound": sensitivity / 2, "diameter": sensitivity, "sigma": sigma}
    if law == "discrete-gaussian":
        return DiscreteGaussianEvent(coordinates=coordinates, **facts)  # type: ignore[arg-type]
    return GaussianEvent(**facts)  # type: ignore[arg-type]


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
    """Return the smallest sigma with which `steps` releases of this sensitivity fit into (ε, δ); 0 if ε is infinite.

    Args:
        sensitivity: l2 sensitivity of each release.
        steps: Number of releases.
        epsilon: Budget.
        delta: Budget.
        accountant: Prices the releases.
        law: Distribution of the noise.
        coordinates: Numbers per release, which the price of discrete noise depends on.

    Raises:
        BudgetExceeded: no noise is large enough for this budget, or only noise above `MOST_NOISE`.
    """
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
            f"epsilon {epsilon:g} at delta {delta:g} would need noise of {sigma:.3g}, which would drown any data: "
            "raise --epsilon"
        )
    if law == "discrete-gaussian" and accountant.name in ("exact", "pld"):
        sigma = _discrete_sigma(sigma, sensitivity, steps, epsilon, delta, accountant)

    def overspends(sigma: float) -> bool:
        event = topagg_event(sensitivity=sensitivity, sigma=sigma, law=law, coordinates=coordinates)
        return accountant.price([(event, steps)], delta) > epsilon

    more = 1e-14 if accountant.name != "pld" else 1e-7  # rounding of the last digits; pld rounds each step up
    while overspends(sigma):
        sigma, more = sigma * (1 + more), 2 * more
    return sigma


def _discrete_sigma(
    sigma: float, sensitivity: float, steps: int, epsilon: float, delta: float, accountant: Accountant
) -> float:
    """Return the discrete sigma that costs about as much as the continuous Gaussian's; the caller checks the price."""
    smooth = math.sqrt(sigma * sigma + ROUNDING)
    if smooth >= LEAST_SMOOTH or accountant.name == "pld":
        return max(smooth, LEAST_SMOOTH)
    rho = bisect(lambda rho: zcdp_epsilon(rho, delta) > epsilon)[0]
    coarse = sensitivity * math.sqrt(steps / (2 * rho)) if rho > 0 else math.inf
    return min(coarse, LEAST_SMOOTH)


def calibrate_event(
    make: Callable[[float], Event], *, times: int, epsilon: float, delta: float, accountant: Accountant
) -> float:
    """Return the smallest sigma, to one part in 10,000, with which `times` events fit into (ε, δ); 0 if ε is infinite.

    For events whose price has no closed form: the search prices many candidates.

    Args:
        make: Returns the event with a given sigma.
        times: Number of such events.
        epsilon: Budget.
        delta: Budget.
        accountant: Prices the events.

    Raises:
        BudgetExceeded: no noise is large enough.
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
    """Return the largest number of releases that fit into a finite (ε, δ); 0 if not even one does.

    Args:
        sensitivity: l2 sensitivity of each release.
        sigma: Standard deviation of the noise.
        epsilon: Budget.
        delta: Budget.
        accountant: Prices the releases.
        law: Distribution of the noise.
        coordinates: Numbers per release, which the price of discrete noise depends on.

    Raises:
        DatalensError: nothing limits the number of releases, or sigma is above `MOST_NOISE`.
    """
    if sigma <= 0 or math.isinf(epsilon):
        raise DatalensError("without noise, or with epsilon inf, nothing limits the steps: give --steps")
    if not sigma <= MOST_NOISE:
        raise DatalensError(f"--sigma {sigma:g} is more than {MOST_NOISE:g}, which would drown any data: lower --sigma")
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
