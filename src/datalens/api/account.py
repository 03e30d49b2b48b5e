"""The privacy cost of TopAgg queries; or the value of one parameter with which they cost a given ε."""

import math
from typing import Any

from datalens.errors import DatalensError
from datalens.privacy.accountant import Accountant, AccountantName, side_by_side
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps, topagg_event
from datalens.privacy.events import NoiseLaw
from datalens.privacy.ledger import json_number


def account(
    *,
    k: int | None,
    sigma: float | None,
    queries: int | None,
    delta: float,
    epsilon: float | None,
    accountant: AccountantName,
    noise: NoiseLaw = "gaussian",
) -> dict[str, Any]:
    """Return ε of queries about one image each, by every accountant; or solve for the parameter that is None.

    Args:
        k: number of coordinates that a teacher votes on; the sensitivity is 2√k.
        sigma: standard deviation of the noise.
        queries: number of queries.
        delta: δ of all prices.
        epsilon: the budget to solve for; None: k, sigma and queries are all given.
        accountant: whose ε is solved for.
        noise: kind of noise.

    Returns:
        The parameters, and ε by each accountant; None where it has no price, with the reason in `unpriced`.

    Raises:
        DatalensError: a value is invalid, too many or too few are given, or nothing fits into the budget.
    """
    if not 0 < delta < 1:
        raise DatalensError(f"--delta must lie between 0 and 1, not {delta:g}")
    for name, value in (("k", k), ("sigma", sigma), ("queries", queries), ("epsilon", epsilon)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise DatalensError(f"--{name} must be a finite number above 0, not {value:g}")
    if epsilon is not None:
        k, sigma, queries = _solve(k, sigma, queries, epsilon, delta, Accountant(name=accountant), noise)
    if k is None or sigma is None or queries is None:
        raise DatalensError("give --k, --sigma and --queries; or --epsilon and two of the three to solve for the last")
    event = topagg_event(sensitivity=2 * math.sqrt(k), sigma=min(sigma, 1e140), law=noise)
    prices = side_by_side([(event, queries)], delta)
    return {
        "epsilon_exact": _number(prices["exact"]),
        "epsilon_rdp": _number(prices["rdp"]),
        "epsilon_rdp_improved": _number(prices["rdp-improved"]),
        "epsilon_pld": _number(prices["pld"]),
        "delta": delta,
        "relation": "add-remove",
        "mu": json_number(2 * math.sqrt(k * queries) / sigma),
        "queries": queries,
        "sigma": sigma,
        "k": k,
        "noise": noise,
        "unpriced": {name: price for name, price in prices.items() if isinstance(price, str)},
    }


def _number(price: float | str) -> float | str | None:
    """Return a price as JSON has it; None if the accountant has none."""
    return None if isinstance(price, str) else json_number(price)


def _solve(
    k: int | None,
    sigma: float | None,
    queries: int | None,
    epsilon: float,
    delta: float,
    accountant: Accountant,
    noise: NoiseLaw,
) -> tuple[int, float, int]:
    goal: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "accountant": accountant, "law": noise}
    match k, sigma, queries:
        case None, float() | int(), int():
            # The cost depends on k·queries only, so solve for the number of queries with k = 1, and divide.
            k = calibrate_steps(sensitivity=2.0, sigma=sigma, **goal) // queries
            if k == 0:
                raise DatalensError(f"not even k = 1 fits: raise --sigma or --epsilon, or lower --queries {queries}")
        case int(), None, int():
            sigma = calibrate_sigma(sensitivity=2 * math.sqrt(k), steps=queries, **goal)
        case int(), float() | int(), None:
            queries = calibrate_steps(sensitivity=2 * math.sqrt(k), sigma=sigma, **goal)
            if queries == 0:
                raise DatalensError("not even one query fits: raise --sigma or --epsilon, or lower --k")
        case _:
            raise DatalensError("with --epsilon, leave out exactly one of --k, --sigma and --queries: it is solved for")
    assert k is not None and sigma is not None and queries is not None
    return k, sigma, queries
