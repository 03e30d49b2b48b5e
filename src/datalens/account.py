"""`datalens account`: the cost of TopAgg queries, or the one quantity that makes them cost ε."""

import math
from typing import Any

from datalens.errors import DatalensError
from datalens.privacy.accountant import (
    Accountant,
    AccountantName,
    calibrate_sigma,
    calibrate_steps,
    exact_epsilon,
    rdp_epsilon,
)
from datalens.privacy.ledger import json_number


def account(
    *,
    k: int | None,
    sigma: float | None,
    queries: int | None,
    delta: float,
    epsilon: float | None,
    accountant: AccountantName,
) -> dict[str, Any]:
    """ε of `queries` single-image queries of sensitivity 2√k; or solve for the one that is None."""
    if not 0 < delta < 1:
        raise DatalensError(f"--delta must lie between 0 and 1, not {delta:g}")
    for name, value in (("k", k), ("sigma", sigma), ("queries", queries), ("epsilon", epsilon)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise DatalensError(f"--{name} must be a finite number above 0, not {value:g}")
    if epsilon is not None:
        k, sigma, queries = _solve(k, sigma, queries, epsilon, delta, Accountant(name=accountant))
    if k is None or sigma is None or queries is None:
        raise DatalensError("give --k, --sigma and --queries; or --epsilon and two of the three to solve for the last")
    mu = 2 * math.sqrt(k * queries) / sigma
    mu_squared = mu * mu
    return {
        "epsilon_exact": json_number(exact_epsilon(mu_squared, delta)),
        "epsilon_rdp": json_number(rdp_epsilon(mu_squared, delta)),
        "delta": delta,
        "relation": "add-remove",
        "mu": json_number(mu),
        "queries": queries,
        "sigma": sigma,
        "k": k,
    }


def _solve(
    k: int | None, sigma: float | None, queries: int | None, epsilon: float, delta: float, accountant: Accountant
) -> tuple[int, float, int]:
    match k, sigma, queries:
        case None, float() | int(), int():
            # The cost depends on k·queries only: so many queries of k = 1, shared out.
            k = (
                calibrate_steps(sensitivity=2.0, sigma=sigma, epsilon=epsilon, delta=delta, accountant=accountant)
                // queries
            )
            if k == 0:
                raise DatalensError(f"not even k = 1 fits: raise --sigma or --epsilon, or lower --queries {queries}")
        case int(), None, int():
            sigma = calibrate_sigma(
                sensitivity=2 * math.sqrt(k), steps=queries, epsilon=epsilon, delta=delta, accountant=accountant
            )
        case int(), float() | int(), None:
            queries = calibrate_steps(
                sensitivity=2 * math.sqrt(k), sigma=sigma, epsilon=epsilon, delta=delta, accountant=accountant
            )
            if queries == 0:
                raise DatalensError("not even one query fits: raise --sigma or --epsilon, or lower --k")
        case _:
            raise DatalensError("with --epsilon, leave exactly one of --k, --sigma, --queries out: it is solved for")
    assert k is not None and sigma is not None and queries is not None
    return k, sigma, queries
