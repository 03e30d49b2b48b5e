"""Two accountants against a 60-digit oracle, against each other, and against the ledger that uses them."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.errors import BudgetExceeded, DatalensError, UnpriceableEvent
from datalens.privacy import accountant as accountant_module
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps
from datalens.privacy.curves import PAPER_ORDERS, exact_epsilon, gaussian_delta, rdp_epsilon
from datalens.privacy.events import GaussianEvent, SubsampledGaussianEvent, UnknownEvent
from datalens.privacy.ledger import Budget, Ledger

NAMES: tuple[AccountantName, ...] = ("exact", "rdp")
MUS = (1e-9, 1e-6, 1e-3, 0.05, 0.2681, 0.7, 2.0, 6.0, 30.0, 100.0)
DELTAS = (1e-300, 1e-100, 1e-20, 1e-10, 1e-5, 1e-2, 0.5)


def oracle_delta(mu: mp.mpf, epsilon: mp.mpf) -> mp.mpf:
    """Balle and Wang 2018, Theorem 8, by erfc to `mp.dps` digits."""

    def tail(x: mp.mpf) -> mp.mpf:
        return mp.erfc(x / mp.sqrt(2)) / 2

    return tail(epsilon / mu - mu / 2) - mp.exp(epsilon) * tail(epsilon / mu + mu / 2)


def oracle_epsilon(mu: float, delta: float, *, bits: int = 70) -> float:
    """The smallest ε with δ(ε) <= delta, to 2^-70 relative; nothing in common with the code but the theorem."""
    with mp.workdps(60):
        m, d = mp.mpf(mu), mp.mpf(delta)
        if oracle_delta(m, mp.mpf(0)) <= d:
            return 0.0
        high = m * m / 2 + m * 40 + 1  # 40 standard deviations: δ < 1e-340
        assert oracle_delta(m, high) <= d
        low = mp.mpf(0)
        while high - low > high * mp.mpf(2) ** -bits:
            middle = (low + high) / 2
            low, high = (low, middle) if oracle_delta(m, middle) <= d else (middle, high)
        return float(high)


def event(*, sigma: float, l2_bound: float = 1.0, relation: str = "add-remove", **changes: object) -> GaussianEvent:
    fields: dict[str, object] = {
        "row_unit": "teacher",
        "l2_bound": l2_bound,
        "diameter": 2 * l2_bound,
        "relation": relation,
        "sigma": sigma,
        "queries": 1,
        "step": 0,
        "noise": "operating-system",
    }
    return GaussianEvent(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang becomes an error: no search needs more than ten thousand looks at a curve."""
    looks = itertools.count()

    def counted(curve: Callable[[float, float], float]) -> Callable[[float, float], float]:
        def look(mu_squared: float, delta: float) -> float:
            if next(looks) > 10_000:
                raise TimeoutError("still searching after 10,000 looks at the curve")
            return curve(mu_squared, delta)

        return look

    for name, curve in list(accountant_module._CURVES.items()):
        monkeypatch.setitem(accountant_module._CURVES, name, counted(curve))


# --- the exact curve ------------------------------------------------------------------------------------------------


def agrees_with_the_oracle(curve: Callable[[float, float], float]) -> bool:
    """Relative error under 1e-5 where μ is so small that float64 cancels, and under 1e-9 from 1e-3 on."""
    return all(
        math.isclose(
            curve(mu * mu, delta), oracle_epsilon(mu, delta), rel_tol=1e-9 if mu >= 1e-3 else 1e-5, abs_tol=1e-300
        )
        for mu, delta in itertools.product(MUS, DELTAS)
    )


def test_exact_epsilon_is_the_oracles() -> None:
    assert agrees_with_the_oracle(exact_epsilon)


def _missing_exponential(mu_squared: float, delta: float) -> float:
    """Broken twin: forgets the second term of Theorem 8 (an upper bound on δ, but not the curve)."""
    mu = math.sqrt(mu_squared)
    low, high = 0.0, mu * mu / 2 + mu * 40 + 1
    for _ in range(200):
        middle = (low + high) / 2
        fits = math.erfc((middle / mu - mu / 2) / math.sqrt(2)) / 2 <= delta
        low, high = (low, middle) if fits else (middle, high)
    return high


def test_the_oracle_tells_wrong_curves_apart() -> None:
    assert not agrees_with_the_oracle(_missing_exponential)
    assert not agrees_with_the_oracle(rdp_epsilon)
    assert not agrees_with_the_oracle(lambda mu_squared, delta: exact_epsilon(mu_squared * (1 + 1e-6), delta))


@pytest.mark.parametrize("mu", [1e-3, 0.2681, 2.0, 100.0])
@pytest.mark.parametrize("delta", [1e-100, 1e-5, 0.5])
def test_the_true_delta_at_the_reported_epsilon_is_within_delta(mu: float, delta: float) -> None:
    """The direction that matters: ε is never reported too small (beyond the last digits)."""
    epsilon = exact_epsilon(mu * mu, delta)
    with mp.workdps(60):
        assert oracle_delta(mp.mpf(mu), mp.mpf(epsilon)) <= mp.mpf(delta) * (1 + mp.mpf("1e-7"))


@pytest.mark.parametrize("mu", [1e-16, 1e-14, 1e-13])
def test_epsilon_is_not_too_small_at_tiny_mu(mu: float) -> None:
    for delta in (1e-300, 1e-100):
        assert exact_epsilon(mu * mu, delta) >= oracle_epsilon(mu, delta) * (1 - 1e-6)


@given(mu=st.floats(1e-3, 50), delta=st.floats(1e-12, 0.5))
@settings(max_examples=60, deadline=None)
def test_epsilon_and_delta_are_each_others_inverse(mu: float, delta: float) -> None:
    epsilon = exact_epsilon(mu * mu, delta)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(mu, 0.0) <= delta


@given(mu=st.floats(1e-4, 90), more=st.floats(1.001, 3), delta=st.floats(1e-15, 0.3), name=st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_epsilon_rises_with_mu_and_falls_with_delta(mu: float, more: float, delta: float, name: AccountantName) -> None:
    pricing = Accountant(name=name)
    here = pricing.epsilon_at(mu**2, delta)
    assert pricing.epsilon_at((mu * more) ** 2, delta) >= here
    assert pricing.epsilon_at(mu**2, min(delta * more, 0.99)) <= here
    if here > 1e-6:
        assert pricing.epsilon_at((mu * more) ** 2, delta) > here


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    for name in NAMES:
        pricing = Accountant(name=name)
        assert pricing.epsilon([], 1e-5) == 0.0
        assert pricing.epsilon([event(sigma=0.0)], 1e-5) == math.inf
        assert pricing.epsilon([event(sigma=0.0, l2_bound=0.0)], 1e-5) == 0.0
    assert gaussian_delta(0.0, 1.0) == 0.0
    assert gaussian_delta(math.inf, 1.0) == 1.0
    assert exact_epsilon(100.0**2, 1e-5) > 5000


# --- the paper's curve ----------------------------------------------------------------------------------------------


def test_rdp_is_the_papers_minimum_over_its_orders() -> None:
    assert PAPER_ORDERS[0] == 1.1
    assert PAPER_ORDERS[1:] == tuple(float(order) for order in range(2, 200))
    # By hand: μ² = 0.04, δ = 1e-5: 0.02·λ + 11.5129/(λ − 1), least at λ = 25 among whole numbers.
    assert rdp_epsilon(0.04, 1e-5) == pytest.approx(0.02 * 25 + math.log(1e5) / 24, rel=1e-14)
    assert rdp_epsilon(50.0, 1e-5) == pytest.approx(min(2 * 25 + math.log(1e5), 1.1 * 25 + math.log(1e5) / 0.1))


events = st.lists(
    st.builds(
        lambda sigma, bound, unit, relation: event(sigma=sigma, l2_bound=bound, row_unit=unit, relation=relation),
        st.floats(0.5, 1e5),
        st.floats(0, 100),
        st.sampled_from(["teacher", "record", "person"]),
        st.sampled_from(["add-remove", "replace-one"]),
    ),
    max_size=20,
)


@given(events=events, delta=st.floats(1e-12, 0.1))
@settings(max_examples=60, deadline=None)
def test_exact_is_never_above_the_papers_rdp(events: list[GaussianEvent], delta: float) -> None:
    assert Accountant(name="exact").epsilon(events, delta) <= Accountant(name="rdp").epsilon(events, delta) + 1e-12


@given(events=events)
@settings(max_examples=60, deadline=None)
def test_mu_squared_is_the_sum_of_squares_in_any_order(events: list[GaussianEvent]) -> None:
    pricing = Accountant(name="exact")
    assert pricing.mu_squared(events) == pricing.mu_squared(list(reversed(events)))
    assert pricing.mu_squared(events) == pytest.approx(sum((e.sensitivity / e.sigma) ** 2 for e in events), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_understood_is_not_priced(name: AccountantName) -> None:
    with pytest.raises(UnpriceableEvent, match="laplace"):
        Accountant(name=name).epsilon([event(sigma=5.0), UnknownEvent(kind="laplace")], 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_next_to_no_noise_costs_everything(name: AccountantName) -> None:
    assert Accountant(name=name).epsilon([event(sigma=1e-200)], 1e-5) == math.inf


def test_two_nearly_infinite_events_cost_everything() -> None:
    assert Accountant(name="exact").epsilon([event(sigma=2e-154)] * 2, 1e-5) == math.inf


# --- from ε back to μ, σ and steps ----------------------------------------------------------------------------------


def overspends(mu: float, name: AccountantName, epsilon: float, delta: float) -> bool:
    return Accountant(name=name).epsilon_at(mu**2, delta) > epsilon


budgets = st.tuples(st.sampled_from(NAMES), st.floats(0.1, 100), st.floats(1e-10, 1e-3)).filter(
    lambda b: b[0] == "exact" or b[1] > 1.01 * math.log(1 / b[2]) / (PAPER_ORDERS[-1] - 1)
)


@given(budget=budgets)
@settings(max_examples=80, deadline=None)
def test_the_mu_budget_is_the_largest_that_fits(budget: tuple[AccountantName, float, float]) -> None:
    """Not one ulp over by the accountant's own word; and 1e-9 more would be too much."""
    name, epsilon, delta = budget
    mu = Accountant(name=name).mu_budget(epsilon, delta)
    assert not overspends(mu, name, epsilon, delta)
    assert overspends(mu * (1 + 1e-9), name, epsilon, delta)


def test_an_infinite_budget_is_infinite() -> None:
    assert Accountant(name="exact").mu_budget(math.inf, 1e-5) == math.inf
    assert calibrate_sigma(sensitivity=1.0, steps=3, epsilon=math.inf, delta=1e-5, accountant=_exact()) == 0.0


def _exact() -> Accountant:
    return Accountant(name="exact")


def ledger_accepts(sigma: float, steps: int, *, k: int, epsilon: float, delta: float, name: AccountantName) -> int:
    """How many of `steps` + 1 events a real ledger takes."""
    ledger = Ledger.in_memory(Budget(epsilon=epsilon, delta=delta, relation="add-remove", accountant=name))
    for _ in range(steps + 1):
        try:
            ledger.charge(event(sigma=sigma, l2_bound=math.sqrt(k)))
        except BudgetExceeded:
            break
    return len(ledger.events)


@given(budget=budgets, steps=st.integers(1, 40), k=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_a_calibrated_sigma_carries_exactly_its_steps_through_a_ledger(
    budget: tuple[AccountantName, float, float], steps: int, k: int
) -> None:
    name, epsilon, delta = budget
    pricing = Accountant(name=name)
    sigma = calibrate_sigma(sensitivity=2 * math.sqrt(k), steps=steps, epsilon=epsilon, delta=delta, accountant=pricing)
    goal = {"k": k, "epsilon": epsilon, "delta": delta, "name": name}
    assert ledger_accepts(sigma, steps, **goal) == steps
    # The same check catches a σ that is too small by a millionth, and one that wastes a step.
    assert ledger_accepts(sigma * (1 - 1e-6), steps, **goal) < steps
    assert ledger_accepts(sigma * math.sqrt((steps + 1) / steps) * (1 + 1e-6), steps, **goal) == steps + 1


def test_calibration_does_not_trust_the_last_digits_of_the_mu_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's own arithmetic decides: a μ that is 1e-12 too large still gives a σ whose steps fit."""
    honest = Accountant.mu_budget
    monkeypatch.setattr(
        Accountant, "mu_budget", lambda self, epsilon, delta: honest(self, epsilon, delta) * (1 + 1e-12)
    )
    sigma = calibrate_sigma(sensitivity=2.0, steps=7, epsilon=1.0, delta=1e-5, accountant=_exact())
    assert ledger_accepts(sigma, 7, k=1, epsilon=1.0, delta=1e-5, name="exact") == 7


@given(budget=budgets, steps=st.integers(1, 30), k=st.integers(1, 500))
@settings(max_examples=40, deadline=None)
def test_round_trip_of_sigma_and_steps(budget: tuple[AccountantName, float, float], steps: int, k: int) -> None:
    name, epsilon, delta = budget
    goal = {"sensitivity": 2 * math.sqrt(k), "epsilon": epsilon, "delta": delta, "accountant": Accountant(name=name)}
    sigma = calibrate_sigma(steps=steps, **goal)  # type: ignore[arg-type]
    assert calibrate_steps(sigma=sigma, **goal) == steps  # type: ignore[arg-type]
    spent = Accountant(name=name).epsilon_at(steps * (goal["sensitivity"] / sigma) ** 2, delta)  # type: ignore[operator]
    assert spent == pytest.approx(epsilon, rel=1e-6)
    assert spent <= epsilon


@given(sigma=st.floats(20, 400), epsilon=st.floats(0.3, 5), name=st.sampled_from(NAMES))
@settings(max_examples=25, deadline=None)
def test_calibrated_steps_are_the_most_a_ledger_takes(sigma: float, epsilon: float, name: AccountantName) -> None:
    steps = calibrate_steps(sensitivity=8.0, sigma=sigma, epsilon=epsilon, delta=1e-5, accountant=Accountant(name=name))
    shown = min(steps, 60)
    ledger = Ledger.in_memory(Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant=name))
    ledger._events.extend([event(sigma=sigma, l2_bound=4.0)] * (steps - shown))
    for _ in range(shown):
        ledger.charge(event(sigma=sigma, l2_bound=4.0))
    with pytest.raises(BudgetExceeded):
        ledger.charge(event(sigma=sigma, l2_bound=4.0))


def test_not_even_one_step_is_zero_steps() -> None:
    assert calibrate_steps(sensitivity=1e6, sigma=1.0, epsilon=1.0, delta=1e-5, accountant=_exact()) == 0


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.0, 1.0), (-1.0, 1.0), (5.0, math.inf)])
def test_what_limits_nothing_cannot_be_solved_for_steps(sigma: float, epsilon: float) -> None:
    with pytest.raises(DatalensError, match="--steps"):
        calibrate_steps(sensitivity=1.0, sigma=sigma, epsilon=epsilon, delta=1e-5, accountant=_exact())


def test_a_budget_of_no_mu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's orders end at 199: under log(1/δ)/198 no noise is ever enough."""
    monkeypatch.setattr(Accountant, "mu_budget", lambda self, epsilon, delta: 0.0)
    with pytest.raises(BudgetExceeded, match="--accountant exact"):
        calibrate_sigma(sensitivity=1.0, steps=1, epsilon=0.05, delta=1e-5, accountant=Accountant(name="rdp"))


def test_an_epsilon_below_the_papers_reach_is_refused_and_does_not_hang(patience: None) -> None:
    assert Accountant(name="rdp").mu_budget(0.05, 1e-5) == 0.0
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        calibrate_sigma(sensitivity=1.0, steps=1, epsilon=0.05, delta=1e-5, accountant=Accountant(name="rdp"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("epsilon", [0.06, 1.0, 1e6])
def test_a_search_that_has_an_answer_ends(name: AccountantName, epsilon: float, patience: None) -> None:
    """The patience of these tests is not what fails."""
    assert 0 < Accountant(name=name).mu_budget(epsilon, 1e-5) < 1e6


def test_noise_so_large_that_mu_underflows_is_an_error_a_person_can_act_on(patience: None) -> None:
    with pytest.raises(DatalensError):
        calibrate_steps(sensitivity=1.0, sigma=1e200, epsilon=1.0, delta=1e-5, accountant=_exact())


def test_noise_that_no_machine_adds_faithfully_is_not_calibrated_to(patience: None) -> None:
    """At δ = 1e-20 a tiny ε would take noise past 2^40, whose rounded float64 draws have no low digits to spare."""
    with pytest.raises(BudgetExceeded, match="raise --epsilon"):
        calibrate_sigma(sensitivity=1e3, steps=1000, epsilon=1e-7, delta=1e-20, accountant=_exact())


def test_steps_without_end_are_an_error_a_person_can_act_on(patience: None) -> None:
    with pytest.raises(DatalensError, match="--steps"):
        calibrate_steps(sensitivity=1e-6, sigma=1e12, epsilon=1.0, delta=1e-5, accountant=_exact())


# --- how far two versions of the libraries may differ ----------------------------------------------------------------


def test_prices_may_differ_by_what_each_accountant_allows_itself() -> None:
    plain = GaussianEvent(
        row_unit="record", l2_bound=1.0, diameter=2.0, relation="add-remove", sigma=4.0, queries=1, step=0,
        noise="operating-system",
    )  # fmt: skip
    sampled = SubsampledGaussianEvent(
        row_unit="record", l2_bound=1.0, rate=0.05, relation="add-remove", sigma=1.5, queries=1, step=0,
        noise="operating-system", repeats=200,
    )  # fmt: skip
    for name in ("exact", "rdp", "rdp-improved", "prv"):
        accountant = Accountant(name=name)
        epsilon = accountant.epsilon([plain], 1e-5)
        assert accountant.tolerance([plain], 1e-5) == pytest.approx(1e-9 * epsilon + 1e-12)
    # PRV answers with the upper end of an interval that is twice the error wide, which is a fiftieth of ε by RDP.
    prv, rough = Accountant(name="prv"), Accountant(name="rdp-improved").epsilon([sampled], 1e-5)
    assert rough / 50 > 1e-2  # so it is asked for a hundredth
    assert prv.tolerance([sampled], 1e-5) == pytest.approx(2e-2)
    # What is charged in blocks is priced, and so allowed, as the steps it consists of.
    block = dataclasses.replace(sampled, repeats=100)
    assert prv.tolerance([block, block], 1e-5) == prv.tolerance([sampled], 1e-5)
    less = dataclasses.replace(sampled, repeats=1, rate=0.01)
    less_rough = Accountant(name="rdp-improved").epsilon([less], 1e-5)
    assert 5e-4 < less_rough / 50 < 1e-2
    assert prv.tolerance([less], 1e-5) == pytest.approx(2 * less_rough / 50)
    pld = Accountant(name="pld")
    assert pld.tolerance([plain], 1e-5) == pytest.approx(5e-4 * pld.epsilon([plain], 1e-5) + 1e-5)
    assert prv.tolerance_of([(sampled, 3)], 1e-5) == prv.tolerance([sampled] * 3, 1e-5)
    for accountant in (prv, pld):  # or what has no price at all would be near to any that is stated
        assert accountant.tolerance([dataclasses.replace(plain, sigma=0.0)], 1e-5) == 0
