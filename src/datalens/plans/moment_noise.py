"""How much noise each release of private moments gets: a function of settings, budget and charges before it, no more.

Training draws noise by it, and `verify` finds out whether a ledger's σ is what it says.
"""

import math
from collections.abc import Sequence

from datalens.plans.settings import RELEASES, MomentSettings
from datalens.privacy.events import ROUNDING, Event
from datalens.privacy.ledger import Budget


def sensitivity(name: str, s: MomentSettings, budget: Budget) -> float:
    """How far one record moves the sum (checked again by the event that is charged)."""
    return s.l2_bound(name) if budget.relation == "add-remove" else s.diameter(name)


def mu_squared_for(name: str, s: MomentSettings, budget: Budget, charged: Sequence[Event]) -> tuple[float, float]:
    """Return mu² of the next release, and of one before anything was lost.

    It is the release's part of what the budget has left, by the parts of the releases still to come.
    """
    pricing = budget.pricing()
    whole = pricing.mu_budget(budget.epsilon, budget.delta) ** 2
    left = whole - pricing.mu_squared(charged)
    parts = s.releases
    coming = sum(part for other, part in parts.items() if RELEASES.index(other) >= RELEASES.index(name))
    return left * (1 - 1e-6) * parts[name] / coming, whole * parts[name]


def sigma_for(name: str, s: MomentSettings, budget: Budget, mu_squared: float) -> float:
    """Return the noise with which a release has this mu²."""
    variance = sensitivity(name, s, budget) ** 2 / mu_squared
    return math.sqrt(variance + (ROUNDING if s.noise == "discrete-gaussian" else 0.0))
