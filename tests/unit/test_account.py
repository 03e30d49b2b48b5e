"""`datalens account`: a price, or the one quantity that makes it fit."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.api.account import account
from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy import tables
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.events import GaussianEvent

NAMES: tuple[AccountantName, ...] = ("exact", "rdp")


@pytest.fixture(autouse=True, scope="module")
def no_pld() -> Iterator[None]:
    """It is shown beside the others, takes most of the time, and has tests of its own (test_three_accountants)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "pld_composed", lambda parts, delta, chosen=(): math.inf)
        yield


def ask(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "k": None,
        "sigma": None,
        "queries": None,
        "delta": 1e-5,
        "epsilon": None,
        "accountant": "exact",
    }
    return account(**(fields | changes))


def test_the_price_is_the_price_of_the_events() -> None:
    event = GaussianEvent(
        row_unit="teacher",
        l2_bound=math.sqrt(200),
        diameter=2 * math.sqrt(200),
        relation="add-remove",
        sigma=5000.0,
        queries=1,
        step=0,
        noise="operating-system",
    )
    shown = ask(k=200, sigma=5000.0, queries=500)
    for name in NAMES:
        assert shown[f"epsilon_{name}"] == pytest.approx(Accountant(name=name).epsilon([event] * 500, 1e-5), rel=1e-9)
    assert shown["mu"] == pytest.approx(math.sqrt(500) * event.mu)
    assert (shown["delta"], shown["relation"]) == (1e-5, "add-remove")
    # Broken twin: charged as if a row appeared (√k) instead of being replaced (2√k).
    half = Accountant(name="exact").epsilon_at(500 * 200 / 5000.0**2, 1e-5)
    assert shown["epsilon_exact"] != pytest.approx(half, rel=0.1)


goals = st.tuples(st.sampled_from(NAMES), st.floats(0.2, 20))


@given(goal=goals, k=st.integers(1, 3000), queries=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_a_solved_sigma_costs_what_was_asked(goal: tuple[AccountantName, float], k: int, queries: int) -> None:
    name, epsilon = goal
    shown = ask(k=k, queries=queries, epsilon=epsilon, accountant=name)
    assert (shown["k"], shown["queries"]) == (k, queries)
    assert shown[f"epsilon_{name}"] == pytest.approx(epsilon, rel=1e-6)
    assert shown[f"epsilon_{name}"] <= epsilon * (1 + 1e-12)


@given(goal=goals, k=st.integers(1, 1000), sigma=st.floats(3000, 50_000))
@settings(max_examples=40, deadline=None)
def test_solved_queries_are_the_most_that_fit(goal: tuple[AccountantName, float], k: int, sigma: float) -> None:
    name, epsilon = goal
    shown = ask(k=k, sigma=sigma, epsilon=epsilon, accountant=name)
    assert shown[f"epsilon_{name}"] <= epsilon * (1 + 1e-12)
    more = ask(k=k, sigma=sigma, queries=shown["queries"] + 1)
    assert more[f"epsilon_{name}"] > epsilon


@given(goal=goals, queries=st.integers(1, 100), sigma=st.floats(5000, 50_000))
@settings(max_examples=40, deadline=None)
def test_a_solved_k_is_the_largest_that_fits(goal: tuple[AccountantName, float], queries: int, sigma: float) -> None:
    name, epsilon = goal
    shown = ask(queries=queries, sigma=sigma, epsilon=epsilon, accountant=name)
    assert shown["k"] >= 1
    assert shown[f"epsilon_{name}"] <= epsilon * (1 + 1e-12)
    assert ask(k=shown["k"] + 1, sigma=sigma, queries=queries)[f"epsilon_{name}"] > epsilon


def test_the_published_setting_round_trips() -> None:
    assert ask(k=200, sigma=5000.0, epsilon=1.0, accountant="rdp")["queries"] == 1300
    assert ask(k=200, sigma=5000.0, epsilon=1.0)["queries"] == 2245
    assert ask(queries=2245, sigma=5000, epsilon=1.0)["k"] == 200
    assert ask(k=200, queries=2245, epsilon=1.0)["sigma"] == pytest.approx(5000, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 200}, "--queries"),
        ({}, "--k"),
        ({"k": 200, "sigma": 1.0, "queries": 3, "epsilon": 1.0}, "exactly one"),
        ({"k": 200, "epsilon": 1.0}, "exactly one"),
        ({"k": 0, "sigma": 1.0, "queries": 3}, "--k"),
        ({"k": 1, "sigma": 0.0, "queries": 3}, "--sigma"),
        ({"k": 1, "sigma": math.inf, "queries": 3}, "--sigma"),
        ({"k": 1, "sigma": math.nan, "queries": 3}, "--sigma"),
        ({"k": 1, "sigma": 1.0, "queries": -3}, "--queries"),
        ({"k": 1, "sigma": 1.0, "epsilon": math.inf}, "--epsilon"),
        ({"k": 1, "sigma": 1.0, "queries": 3, "delta": 0.0}, "--delta"),
        ({"k": 1, "sigma": 1.0, "queries": 3, "delta": 1.0}, "--delta"),
        ({"sigma": 1.0, "queries": 10**6, "epsilon": 0.1}, "k = 1"),
    ],
)
def test_questions_without_an_answer(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DatalensError, match=message):
        ask(**fields)


def test_no_noise_large_enough_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accountant, "mu_budget", lambda self, epsilon, delta: 0.0)
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        ask(k=200, queries=10, epsilon=0.05, accountant="rdp")


@pytest.mark.parametrize("sigma", [1e-200, 1e200])
def test_any_sigma_above_zero_has_a_price(sigma: float) -> None:
    shown = ask(k=200, sigma=sigma, queries=5)
    assert shown["epsilon_exact"] == ("inf" if sigma < 1 else 0.0)


def test_not_even_one_query_is_an_error_as_it_is_for_k() -> None:
    with pytest.raises(DatalensError):
        ask(k=200, sigma=1.0, epsilon=0.1)
