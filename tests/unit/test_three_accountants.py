"""Three accountants over the same ledgers: against each other, against dp-accounting, against OpenDP."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.privacy import tables
from datalens.privacy.accountant import Accountant, side_by_side
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps, topagg_event
from datalens.privacy.curves import (
    PAPER_ORDERS,
    exact_epsilon,
    improved_epsilon,
    rdp_epsilon,
    subsampled_rdp,
    zcdp_epsilon,
)
from datalens.privacy.events import GaussianEvent, SubsampledGaussianEvent, parse_event
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.tables import pld_epsilon

DELTA = 1e-5
EXACT, RDP, IMPROVED, PLD = (Accountant(name=name) for name in ("exact", "rdp", "rdp-improved", "pld"))


def event(*, sensitivity: float, sigma: float) -> GaussianEvent:
    return topagg_event(sensitivity=sensitivity, sigma=sigma, law="gaussian")


def random_ledger(random: np.random.Generator, *, most: int = 30, loudest: float = 8.0) -> list[GaussianEvent]:
    """Heterogeneous k, σ and m: any of them may change from one event to the next. μ of the whole up to `loudest`."""
    count = int(random.integers(1, most))
    k, m = random.integers(1, 800, count), random.integers(1, 40, count)
    sensitivity = 2 * np.sqrt(k * m)
    loudness = math.exp(random.uniform(math.log(1e-3), math.log(loudest)))
    share = random.exponential(size=count)
    sigma = sensitivity / np.sqrt(loudness**2 * share / share.sum())
    return [event(sensitivity=float(d), sigma=float(s)) for d, s in zip(sensitivity, sigma, strict=True)]


def out_of_order(prices: dict[str, float]) -> bool:
    exact, improved, paper = prices["exact"], prices["rdp-improved"], prices["rdp"]
    return not 0 <= exact <= improved * (1 + 1e-9) + 1e-12 or not improved <= paper


# --- thousands of ledgers -----------------------------------------------------------------------------------------


def test_exact_below_improved_below_the_papers() -> None:
    """Same orders, ε floored at 0, 3,000 random ledgers and δ."""
    random = np.random.default_rng(1)
    gaps = []
    for _ in range(3000):
        ledger, delta = random_ledger(random), float(10 ** random.uniform(-12, -1))
        prices = {a.name: a.epsilon(ledger, delta) for a in (EXACT, RDP, IMPROVED)}
        assert not out_of_order(prices), (prices, delta)
        gaps.append(prices["rdp"] - prices["exact"])
    assert min(gaps) >= 0 and np.median(gaps) > 0.01


def test_the_order_catches_a_wrong_curve() -> None:
    """Broken twins: half the ρ, or a conversion that forgets a term, would pass below the exact price."""
    random = np.random.default_rng(2)
    half, forgot = False, False
    for _ in range(100):
        mu2 = EXACT.mu_squared(random_ledger(random))
        exact, paper = exact_epsilon(mu2, DELTA), rdp_epsilon(mu2, DELTA)
        half |= out_of_order({"exact": exact, "rdp-improved": improved_epsilon(mu2 / 2, DELTA), "rdp": paper})
        without = min(order * mu2 / 2 + math.log1p(-1 / order) for order in PAPER_ORDERS)
        forgot |= out_of_order({"exact": exact, "rdp-improved": max(0.0, without), "rdp": paper})
    assert half and forgot


def far_apart(exact: float, pld: float) -> bool:
    """pld rounds up, by less than 5e-4 relative and 1e-5; never below exact by more than its own arithmetic."""
    return not -1e-6 <= pld - exact <= 5e-4 * exact + 1e-5


def pld_agrees(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(count):
        ledger = random_ledger(random, most=8, loudest=3.0)
        exact, pld = EXACT.epsilon(ledger, DELTA), PLD.epsilon(ledger, DELTA)
        assert not far_apart(exact, pld), (exact, pld)


def test_pld_agrees_with_exact() -> None:
    pld_agrees(seed=3, count=12)


@pytest.mark.slow
def test_pld_agrees_with_exact_on_many_ledgers() -> None:
    pld_agrees(seed=4, count=500)


def test_the_tolerance_catches_one_forgotten_event() -> None:
    ledger = [event(sensitivity=2.0, sigma=40.0)] * 30
    assert not far_apart(EXACT.epsilon(ledger, DELTA), PLD.epsilon(ledger, DELTA))
    assert far_apart(EXACT.epsilon(ledger, DELTA), PLD.epsilon(ledger[1:], DELTA))


# --- golden: figures from outside -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("multiplier", "steps", "rate", "pld"),
    [  # ε at δ = 1e-5, dp-accounting 0.6.0, PLDAccountant with its own discretisation of 1e-4
        (1.07, 1, 1.0, 4.0481),
        (10.0, 100, 1.0, 4.3772),
        (1.07, 1000, 0.01, 1.5966),
        (2.0, 500, 0.05, 2.5320),
        (1.07, 20_000, 0.001, 0.6100),
    ],
)
def test_against_dp_accounting(multiplier: float, steps: int, rate: float, pld: float) -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if rate == 1.0:
        counted: Any = [(event(sensitivity=1.0, sigma=multiplier), steps)]
    else:
        counted = [(sampled(rate=rate, sigma=multiplier), steps)]
    assert PLD.price(counted, DELTA) == pytest.approx(pld, rel=5e-4)
    theirs = RdpAccountant(orders=PAPER_ORDERS)
    inner: Any = dp_accounting.GaussianDpEvent(multiplier)
    theirs.compose(inner if rate == 1.0 else dp_accounting.PoissonSampledDpEvent(rate, inner), steps)
    assert IMPROVED.price(counted, DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
    assert IMPROVED.price(counted, DELTA) <= RDP.price(counted, DELTA)
    assert PLD.price(counted, DELTA) <= IMPROVED.price(counted, DELTA)


def test_against_opendps_privacy_maps() -> None:
    """Its discrete Gaussian says the ρ we charge; its conversion to ε is ours to three digits."""
    from opendp.combinators import make_fix_delta, make_zCDP_to_approxDP
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    for k, sigma in ((200, 5000.0), (700, 9000.0), (32, 300.0), (1, 3.0)):
        charged = topagg_event(sensitivity=2 * math.sqrt(k), sigma=sigma, law="discrete-gaussian")
        theirs = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=sigma)
        assert charged.rho == pytest.approx(theirs.map(2 * math.sqrt(k)), rel=1e-12)
        approximate = make_fix_delta(make_zCDP_to_approxDP(theirs), delta=DELTA)
        theirs_epsilon = approximate.map(2 * math.sqrt(k))[0]
        ours = zcdp_epsilon(charged.rho, DELTA)
        assert ours == pytest.approx(theirs_epsilon, rel=2e-3)
    assert topagg_event(sensitivity=2 * math.sqrt(200), sigma=5000.0, law="discrete-gaussian").rho == 1.6e-5


# --- there and back --------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(["exact", "rdp", "rdp-improved"]),
    epsilon=st.floats(0.2, 20),
    queries=st.integers(1, 3000),
    k=st.integers(1, 700),
    law=st.sampled_from(["gaussian", "discrete-gaussian"]),
)
@settings(max_examples=80, deadline=None)
def test_epsilon_sigma_queries_and_back(name: Any, epsilon: float, queries: int, k: int, law: Any) -> None:
    pricing = Accountant(name=name)
    goal = {"sensitivity": 2 * math.sqrt(k), "epsilon": epsilon, "delta": DELTA, "accountant": pricing, "law": law}
    sigma = calibrate_sigma(steps=queries, **goal)
    if sigma == 10.0:
        return  # where the rule changes, more queries may fit than asked for
    assert calibrate_steps(sigma=sigma, **goal) == queries
    spent = pricing.price([(topagg_event(sensitivity=2 * math.sqrt(k), sigma=sigma, law=law), queries)], DELTA)
    assert spent <= epsilon and spent == pytest.approx(epsilon, rel=1e-6)


def test_there_and_back_by_pld() -> None:
    goal = {"sensitivity": 2.0, "epsilon": 1.0, "delta": DELTA, "accountant": PLD}
    sigma = calibrate_sigma(steps=20, **goal)
    assert calibrate_steps(sigma=sigma, **goal) == 20
    assert sigma == pytest.approx(calibrate_sigma(steps=20, **goal | {"accountant": EXACT}), rel=2e-3)
    assert PLD.mu_budget(1.0, DELTA) <= EXACT.mu_budget(1.0, DELTA)


# --- the filter: σ chosen as the run goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "rdp", "rdp-improved"])
def test_adaptive_choices_stop_exactly_in_time(name: Any) -> None:
    """The next σ depends on what was just released; the ledger stops before Σ μ² passes the budget's, not sooner."""
    random = np.random.default_rng(5)
    for _ in range(15):
        ledger = Ledger.in_memory(Budget(epsilon=1.0, delta=DELTA, relation="add-remove", accountant=name))
        limit = ledger.budget.pricing().mu_budget(1.0, DELTA) ** 2
        sigma, spent = 60.0, 0.0
        while True:
            released = random.normal(scale=sigma)
            sigma *= 0.9 if released > 0 else 1.05  # an adversary's choice: louder after good news
            k = 1 + int(abs(released)) % 5
            following = (2 * math.sqrt(k) / sigma) ** 2
            charged = event(sensitivity=2 * math.sqrt(k), sigma=sigma)
            if spent + following > limit * (1 + 1e-9):
                with pytest.raises(BudgetExceeded):
                    ledger.charge(charged)
                break
            ledger.charge(charged)
            spent += following
        assert spent <= limit * (1 + 1e-12)
        # Nothing was written by the refusal, and what is left is still there to the last bit of it.
        rest = limit - ledger.budget.pricing().mu_squared(ledger.events)
        if rest > 1e-9:
            ledger.charge(event(sensitivity=1.0, sigma=1 / math.sqrt(rest * (1 - 1e-6))))
        with pytest.raises(BudgetExceeded):
            ledger.charge(event(sensitivity=1.0, sigma=1 / math.sqrt(limit * 1e-4)))


def test_a_filter_that_prices_only_the_last_sigma_is_caught() -> None:
    """Broken twin: as if all events had the σ of the last one. It lets Σ μ² pass the budget's."""
    limit, spent = EXACT.mu_budget(1.0, DELTA) ** 2, 0.0
    sigma = 8.0
    ledger = Ledger.in_memory(Budget(epsilon=1.0, delta=DELTA, relation="add-remove", accountant="exact"))
    for count in range(1, 5):
        assert count * (2.0 / sigma) ** 2 <= limit  # the twin lets it through
        spent += (2.0 / sigma) ** 2
        if spent > limit:
            with pytest.raises(BudgetExceeded):
                ledger.charge(event(sensitivity=2.0, sigma=sigma))
            return
        ledger.charge(event(sensitivity=2.0, sigma=sigma))
        sigma *= 1.5
    pytest.fail("the twin never overspent")


# --- subsampled events -----------------------------------------------------------------------------------------------


def sampled(*, rate: float = 0.01, sigma: float = 1.0, **changes: Any) -> SubsampledGaussianEvent:
    fields: dict[str, Any] = {"row_unit": "record", "l2_bound": 1.0, "rate": rate, "relation": "add-remove"}
    fields |= {"sigma": sigma, "queries": 1, "step": 0, "noise": "operating-system"}
    return SubsampledGaussianEvent(**(fields | changes))


def test_only_rdp_and_pld_price_subsampled_events() -> None:
    with pytest.raises(UnpriceableEvent, match=r"'subsampled-gaussian'.*rdp-improved or pld"):
        EXACT.epsilon([event(sensitivity=1.0, sigma=5.0), sampled()], DELTA)
    mixed = [(sampled(), 100), (event(sensitivity=1.0, sigma=5.0), 3)]
    shown = side_by_side(mixed, DELTA)
    assert isinstance(shown["exact"], str)
    assert 0 < shown["pld"] < shown["rdp-improved"] < shown["rdp"]  # type: ignore[operator]
    assert PLD.price(mixed, DELTA) > PLD.price(mixed[:1], DELTA)


def test_sampling_everybody_is_no_sampling_and_nobody_costs_nothing() -> None:
    for pricing in (RDP, IMPROVED, PLD):
        everybody = pricing.epsilon([sampled(rate=1.0, sigma=4.0)], DELTA)
        assert everybody == pytest.approx(pricing.epsilon([event(sensitivity=1.0, sigma=4.0)], DELTA), rel=1e-6)
        assert pricing.epsilon([sampled(rate=0.0)], DELTA) == 0.0
        assert pricing.epsilon([sampled(sigma=0.0)], DELTA) == math.inf
    assert subsampled_rdp(1.0, 0.5, 1.1) == math.inf
    assert subsampled_rdp(0.0, 0.5, 2.0) == 0.0


def test_subsampled_rdp_by_integration() -> None:
    """λ = 2, 5: E over N(0, 1) of ((1 − q) + q·e^(μx − μ²/2))^λ, on a grid."""
    x = np.linspace(-30, 30, 600_001)
    weight = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    for mu, rate, order in ((0.5, 0.1, 2), (1.0, 0.3, 5), (0.2, 0.01, 5)):
        moment = float((weight * ((1 - rate) + rate * np.exp(mu * x - mu * mu / 2)) ** order).sum())
        assert subsampled_rdp(mu, rate, float(order)) == pytest.approx(math.log(moment) / (order - 1), rel=1e-9)


def test_a_subsampled_event_survives_its_ledger(tmp_path: Any) -> None:
    budget = Budget(epsilon=5.0, delta=DELTA, relation="add-remove", accountant="rdp-improved")
    ledger = Ledger.create(tmp_path / "ledger.jsonl", budget)
    ledger.charge(sampled())
    ledger.close()
    assert read_ledger(tmp_path / "ledger.jsonl")[1] == (sampled(),)
    refused = Ledger.in_memory(Budget(epsilon=5.0, delta=DELTA, relation="add-remove", accountant="exact"))
    with pytest.raises(UnpriceableEvent):
        refused.charge(sampled())
    assert not refused.events


@pytest.mark.parametrize(
    "changes", [{"rate": 1.5}, {"rate": -0.1}, {"relation": "replace-one"}, {"row_unit": "teacher"}, {"sigma": "1"}]
)
def test_a_subsampled_event_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TamperedError):
        parse_event(sampled().as_dict() | changes)


# --- limits of the pld accountant ----------------------------------------------------------------------------------


def test_pld_without_dp_accounting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    tables.pld_composed.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(DatalensError, match="pip install dp-accounting"):
        pld_epsilon(0.04, DELTA)
    shown = side_by_side([(event(sensitivity=1.0, sigma=5.0), 1)], DELTA)
    assert [name for name in shown if isinstance(shown[name], str)] == ["pld"]


def test_pld_takes_no_hours() -> None:
    """Loud ledgers cost everything, and many different Gaussians are one."""
    assert PLD.price([(event(sensitivity=2.0, sigma=1e-3), 10)], DELTA) == math.inf
    ledger = [event(sensitivity=1.0, sigma=200.0 + i) for i in range(400)]
    assert not far_apart(EXACT.epsilon(ledger, DELTA), PLD.epsilon(ledger, DELTA))
    crowd = [(event(sensitivity=2.0, sigma=50_000.0), 10_000_000)]
    assert not far_apart(EXACT.price(crowd, DELTA), PLD.price(crowd, DELTA))
    with_sample = [*ledger, sampled(rate=0.01, sigma=5.0)]
    assert PLD.epsilon(with_sample, DELTA) > EXACT.epsilon(ledger, DELTA)
    with pytest.raises(UnpriceableEvent, match="200 different"):
        PLD.epsilon([sampled(sigma=5.0 + i) for i in range(300)], DELTA)
    assert PLD.mu_budget(2000.0, DELTA) <= tables.PLD_LARGEST
