"""Upper bounds on what a run can charge, as events, and the joint price of the events of several runs."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.events import (
    LEAST_SMOOTH,
    Charge,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    Relation,
    unprotected,
)
from datalens.privacy.ledger import Budget

Counted = tuple[tuple[Charge, int], ...]  # (event, multiplicity)

# Sigma of the single event that stands for all Gaussian releases of a run: so large that its mu² is 2·rho to the last
# bit.
_WIDE = 1e9
_CELLS = 2**50  # coordinates of that event: more numbers than any run releases


def price(charges: Sequence[tuple[Charge, int]], delta: float) -> tuple[float, AccountantName]:
    """Return the lowest ε of all charges together at this δ, and the accountant that computed it.

    Counts with Laplace noise are purely ε-private. So next to Gaussian noise they cost at most their ε on top of the
    exact price of that (basic composition), which is often less than the price of the mix by RDP.

    Args:
        charges: (event, multiplicity) of all runs together.
        delta: δ at which ε is computed.
    """
    plain = all(isinstance(event, GaussianEvent) for event, _ in charges)
    prices: list[tuple[float, AccountantName]] = []
    for name in ("exact",) if plain else ("rdp-improved", "prv"):
        try:
            prices.append((Accountant(name=name).price(charges, delta), name))  # type: ignore[arg-type]
        except DatalensError:  # this accountant does not price the mix, or its library is not installed
            continue
    gaussian = [(event, times) for event, times in charges if isinstance(event, GaussianEvent)]
    counts = [(event, times) for event, times in charges if isinstance(event, LaplaceEvent)]
    smooth = all(event.smooth for event, _ in gaussian if isinstance(event, DiscreteGaussianEvent))
    if counts and smooth and len(gaussian) + len(counts) == len(charges):
        pure = math.fsum(event.loss * event.moved * times for event, times in counts)
        prices.append((Accountant(name="exact").price(gaussian, delta) + pure, "exact"))
    if not prices:  # discrete noise below LEAST_SMOOTH together with other noise
        prices.append((Accountant(name="rdp-improved").price(charges, delta), "rdp-improved"))
    return min(prices)


def may_follow(charges: Sequence[tuple[Charge, int]]) -> bool:
    """Return whether later charges may be chosen adaptively, by what earlier ones released.

    That needs a privacy filter: a price that adds up in one number, by one rule. Gaussian noise has one, and so does
    coarse discrete noise (sigma below `LEAST_SMOOTH`) by itself, as zCDP. A filter that changes its rule is not valid.

    Args:
        charges: (event, multiplicity) of all charges.
    """
    coarse = {isinstance(event, DiscreteGaussianEvent) and not event.smooth for event, _ in charges}
    return len(coarse) < 2 and all(isinstance(event, GaussianEvent) for event, _ in charges)


def most_charged(parts: Sequence[tuple[Charge, int]], budget: Budget, *, final: Collection[str] = ()) -> Counted:
    """Return the most that a ledger with this budget lets a run with these parts charge.

    This can be more than the plan: releases that were charged and then lost in an interruption are charged again, as
    long as the run's own budget lasts. So the reservation is for this bound, not for the plan.

    Args:
        parts: (event, multiplicity) of the whole plan.
        budget: The run's own budget.
        final: Names of parts of a mix whose gate never charges more than the plan (`GradientGate`).

    Returns:
        Events that, together with any others, cost at least as much as any ledger that this run can leave behind.

    Raises:
        BudgetExceeded: the plan does not fit into the run's own budget.
        DatalensError: no upper bound is known for this mix of events.
    """
    accountant = budget.pricing()

    def fits(charges: Sequence[tuple[Charge, int]]) -> bool:
        return accountant.price(charges, budget.delta) <= budget.epsilon

    if math.isinf(budget.epsilon):
        return ((unprotected(budget.relation), 1),)
    gaussian = [event for event, _ in parts if isinstance(event, GaussianEvent)]
    smooth = all(event.smooth for event in gaussian if isinstance(event, DiscreteGaussianEvent))
    if len(gaussian) == len(parts) and smooth:
        # mu² can add up to all that the budget allows. RDP prices discrete noise lower than the Gaussian that it is
        # post-processing of, hence `more`. What pld accepts costs no more by the exact curve, which is faster.
        accountant = Accountant(name="exact") if accountant.name == "pld" else accountant
        more = 1.0
        if accountant.name != "exact":
            more = max([event.mu * event.mu / (2 * event.rho) for event in gaussian if event.rho > 0], default=1.0)
        mu = largest(lambda mu: fits([(all_of_it(mu, budget.relation), 1)]))
        return ((all_of_it(mu * math.sqrt(more), budget.relation), 1),)
    if not smooth and len(parts) != 1:
        raise DatalensError(
            f"discrete noise below sigma {LEAST_SMOOTH:g} together with other releases cannot be reserved, since the "
            "most that they may charge is not known: use --noise gaussian, or a smaller --epsilon"
        )
    if not fits(parts):
        raise BudgetExceeded(f"the plan itself does not fit into {budget.describe(budget.epsilon)}")
    if len(parts) != 1:
        return _most_of_a_mix(parts, budget, final)
    (event, times), *_ = parts
    return ((event, most_times(event, times, fits)),)


def _most_of_a_mix(parts: Sequence[tuple[Charge, int]], budget: Budget, final: Collection[str]) -> Counted:
    """Return, for every kind of release, the most that the ledger can hold of it if it holds nothing else.

    Releases of one kind leave less budget for the others, never more. So whatever the ledger holds in the end, it holds
    no more of any kind than this. Together the maxima are more than one ledger can hold; parts named in `final` are
    counted as planned, which makes the reservation smaller.

    - Gaussian: whatever the accountant, its price of the whole is at least the exact price of the Gaussian part.
    - Others: as many as cost ε by themselves, by the budget's accountant, plus its own error: where a table is coarser,
      the price of a mix may be closer to the truth than the price of one kind.
    """
    accountant, exact = budget.pricing(), Accountant(name="exact")

    def may_fit(charges: Sequence[tuple[Charge, int]]) -> bool:
        error = accountant.tolerance_of(charges, budget.delta)
        return accountant.price(charges, budget.delta) <= budget.epsilon + error

    counted = [(event, times) for event, times in parts if event.part in final]
    gaussian = [event for event, _ in parts if isinstance(event, GaussianEvent) and event.part not in final]
    if gaussian:
        # RDP prices discrete noise lower than the Gaussian behind it, as in `most_charged`.
        more = max([event.mu * event.mu / (2 * event.rho) for event in gaussian if event.rho > 0], default=1.0)
        mu = exact.mu_budget(budget.epsilon, budget.delta)
        counted.append((all_of_it(mu * math.sqrt(more), budget.relation), 1))
    for event, times in parts:
        if event.part not in final and not isinstance(event, GaussianEvent):
            counted.append((event, most_times(event, times, may_fit)))
    return tuple(counted)


def most_times(event: Charge, times: int, fits: Callable[[Sequence[tuple[Charge, int]]], bool]) -> int:
    """Return how often an event fits into a budget: `times`, or as many more as the search finds to fit.

    Args:
        event: The event.
        times: A multiplicity that fits.
        fits: Whether charges fit into the budget.
    """
    step = 1
    while fits([(event, times + step)]):
        times, step = times + step, 2 * step
    while step > 1:
        step //= 2
        times += step if fits([(event, times + step)]) else 0
    return times


def all_of_it(mu: float, relation: Relation) -> DiscreteGaussianEvent:
    """Return the one discrete Gaussian event that stands for all Gaussian releases of a run with this mu in total.

    Args:
        mu: mu of all releases together.
        relation: Of the ledger.
    """
    moved = mu * math.sqrt(_WIDE * _WIDE - 4)
    facts: dict[str, Any] = {"row_unit": "record", "relation": relation, "noise": "operating-system"}
    facts |= {"l2_bound": moved, "diameter": moved, "sigma": _WIDE, "queries": 0, "step": 0, "coordinates": _CELLS}
    return DiscreteGaussianEvent(**facts)


def largest(holds: Callable[[float], bool], *, digits: float = 1e-15) -> float:
    """Return the largest x >= 0 for which `holds(x)`, approached from below.

    Args:
        holds: A monotone condition: once false, it stays false for larger x.
        digits: Relative precision.
    """
    low, high = 0.0, 1.0
    while holds(high) and high < 1e12:
        low, high = high, 2 * high
    while high - low > digits * high and (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def with_noise(charges: Counted, factor: float) -> Counted:
    """Return the same charges with all noise scaled by `factor`.

    Args:
        charges: (event, multiplicity).
        factor: More than 1: more noise.
    """

    def more(event: Charge) -> Charge:
        if isinstance(event, LaplaceEvent):
            return dataclasses.replace(event, scale=event.scale * factor)
        return dataclasses.replace(event, sigma=event.sigma * factor)

    return tuple((more(event), times) for event, times in charges)
