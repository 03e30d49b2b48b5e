"""What a run can charge at most, as events, and what events of several runs cost together."""

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

Counted = tuple[tuple[Charge, int], ...]  # (event, how many times)

# Sigma of the one event that stands for all Gaussian releases of a run: so wide that its mu² is 2·rho, to the last bit.
_WIDE = 1e9
_CELLS = 2**50  # and the numbers in it: more than any run releases


def price(charges: Sequence[tuple[Charge, int]], delta: float) -> tuple[float, AccountantName]:
    """ε of all of it at this δ, and whose ε that is."""
    plain = all(isinstance(event, GaussianEvent) for event, _ in charges)
    found: list[tuple[float, AccountantName]] = []
    for name in ("exact",) if plain else ("rdp-improved", "prv"):
        try:
            found.append((Accountant(name=name).price(charges, delta), name))  # type: ignore[arg-type]
        except DatalensError:  # not for this mix, or not installed
            continue
    if not found:  # coarse discrete noise beside other noise
        found.append((Accountant(name="rdp-improved").price(charges, delta), "rdp-improved"))
    return min(found)


def may_follow(charges: Sequence[tuple[Charge, int]]) -> bool:
    """Whether what some of these showed may decide about the next: their price adds up in one number, by one rule.

    It does for Gaussian noise, and for coarse discrete noise alone (zCDP); a filter that changes its rule is none.
    """
    coarse = {isinstance(event, DiscreteGaussianEvent) and not event.smooth for event, _ in charges}
    return len(coarse) < 2 and all(isinstance(event, GaussianEvent) for event, _ in charges)


def most_charged(parts: Sequence[tuple[Charge, int]], budget: Budget, *, final: Collection[str] = ()) -> Counted:
    """The most that a ledger with this budget lets a run of these parts charge.

    An interruption loses releases that were charged, and they are asked and charged again, as long as the run's own
    budget lasts. So it is not the plan that is reserved.

    Args:
        parts: (event, how many times) of the whole plan.
        budget: The run's own.
        final: Names of parts of a mix whose gate charges what is planned, and no more (`GradientGate`).

    Returns:
        Events that cost, beside any others, at least what any ledger that this run can leave behind does.

    Raises:
        BudgetExceeded: the plan does not fit into the run's own budget.
        DatalensError: what may be charged at most cannot be said.
    """
    accountant = budget.pricing()

    def fits(charges: Sequence[tuple[Charge, int]]) -> bool:
        return accountant.price(charges, budget.delta) <= budget.epsilon

    if math.isinf(budget.epsilon):
        return ((unprotected(budget.relation), 1),)
    gaussian = [event for event, _ in parts if isinstance(event, GaussianEvent)]
    smooth = all(event.smooth for event in gaussian if isinstance(event, DiscreteGaussianEvent))
    if len(gaussian) == len(parts) and smooth:
        # mu² adds up to whatever the budget holds. By RDP discrete noise counts as less than the Gaussian behind it.
        # What pld takes costs no more by the exact curve, which is quicker to ask.
        accountant = Accountant(name="exact") if accountant.name == "pld" else accountant
        more = 1.0
        if accountant.name != "exact":
            more = max([event.mu * event.mu / (2 * event.rho) for event in gaussian if event.rho > 0], default=1.0)
        mu = largest(lambda mu: fits([(all_of_it(mu, budget.relation), 1)]))
        return ((all_of_it(mu * math.sqrt(more), budget.relation), 1),)
    if not smooth and len(parts) != 1:
        raise DatalensError(
            f"discrete noise below sigma {LEAST_SMOOTH:g} beside other releases: what this method may charge at most "
            "cannot be reserved"
        )
    if not fits(parts):
        raise BudgetExceeded(f"the plan itself does not fit into {budget.describe(budget.epsilon)}")
    if len(parts) != 1:
        return _most_of_a_mix(parts, budget, final)
    (event, times), *_ = parts
    return ((event, most_times(event, times, fits)),)


def _most_of_a_mix(parts: Sequence[tuple[Charge, int]], budget: Budget, final: Collection[str]) -> Counted:
    """Every kind at the most that the ledger can take of it, as if it took nothing else.

    Releases of one kind leave less for the others, never more; so whatever the ledger holds in the end, it holds no
    more of any kind than this. It is more than one ledger can hold of all of them: a run whose parts are `final` as far
    as they can be sets aside less.

    - Gaussian: whatever the accountant, its price of the whole is at least the exact price of the Gaussian part.
    - Others: as many as cost ε alone, by the budget's accountant, and its own error: where a table is coarser, the
      price of a mix may be nearer to the truth than the price of one kind.
    """
    accountant, exact = budget.pricing(), Accountant(name="exact")

    def may_fit(charges: Sequence[tuple[Charge, int]]) -> bool:
        error = accountant.tolerance_of(charges, budget.delta)
        return accountant.price(charges, budget.delta) <= budget.epsilon + error

    counted = [(event, times) for event, times in parts if event.part in final]
    gaussian = [event for event, _ in parts if isinstance(event, GaussianEvent) and event.part not in final]
    if gaussian:
        # By RDP discrete noise counts as less than the Gaussian behind it, see above.
        more = max([event.mu * event.mu / (2 * event.rho) for event in gaussian if event.rho > 0], default=1.0)
        mu = exact.mu_budget(budget.epsilon, budget.delta)
        counted.append((all_of_it(mu * math.sqrt(more), budget.relation), 1))
    for event, times in parts:
        if event.part not in final and not isinstance(event, GaussianEvent):
            counted.append((event, most_times(event, times, may_fit)))
    return tuple(counted)


def most_times(event: Charge, times: int, fits: Callable[[Sequence[tuple[Charge, int]]], bool]) -> int:
    """How often an event fits, `times` and more: the last of a row of numbers that all do."""
    step = 1
    while fits([(event, times + step)]):
        times, step = times + step, 2 * step
    while step > 1:
        step //= 2
        times += step if fits([(event, times + step)]) else 0
    return times


def all_of_it(mu: float, relation: Relation) -> DiscreteGaussianEvent:
    moved = mu * math.sqrt(_WIDE * _WIDE - 4)
    facts: dict[str, Any] = {"row_unit": "record", "relation": relation, "noise": "operating-system"}
    facts |= {"l2_bound": moved, "diameter": moved, "sigma": _WIDE, "queries": 0, "step": 0, "coordinates": _CELLS}
    return DiscreteGaussianEvent(**facts)


def largest(holds: Callable[[float], bool], *, digits: float = 1e-15) -> float:
    """The largest x >= 0 for which a falling condition holds, from below."""
    low, high = 0.0, 1.0
    while holds(high) and high < 1e12:
        low, high = high, 2 * high
    while high - low > digits * high and (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def with_noise(charges: Counted, factor: float) -> Counted:
    def more(event: Charge) -> Charge:
        if isinstance(event, LaplaceEvent):
            return dataclasses.replace(event, scale=event.scale * factor)
        return dataclasses.replace(event, sigma=event.sigma * factor)

    return tuple((more(event), times) for event, times in charges)
