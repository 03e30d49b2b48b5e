"""The published figures, to the last printed digit: if one of these moves, the price of privacy has moved.

Sources: DataLens Sections 5.1 and 5.3 (k = 200, σ = 5000, δ = 1e-5), and the exact μ-GDP curve of Balle and Wang.
"""

import math
from collections.abc import Callable

import pytest

from datalens.api.account import account
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.calibration import calibrate_steps
from datalens.privacy.curves import exact_epsilon, gaussian_delta
from datalens.privacy.events import GaussianEvent
from datalens.privacy.ledger import Budget, Ledger

DELTA = 1e-5
QUERIES: dict[AccountantName, int] = {"rdp": 1300, "exact": 2245}


def topagg_event(*, k: int, sigma: float) -> GaussianEvent:
    """One synthetic image, asked about once: rows of norm √k, two of them 2√k apart."""
    return GaussianEvent(
        row_unit="teacher",
        l2_bound=math.sqrt(k),
        diameter=2 * math.sqrt(k),
        relation="add-remove",
        sigma=sigma,
        queries=1,
        step=0,
        noise="operating-system",
    )


def affordable(sensitivity_of: Callable[[GaussianEvent], float], name: AccountantName) -> int:
    """How many queries of the paper's MNIST setting fit into ε = 1, if this is what an event's sensitivity is."""
    event = topagg_event(k=200, sigma=5000.0)
    return calibrate_steps(
        sensitivity=sensitivity_of(event), sigma=event.sigma, epsilon=1.0, delta=DELTA, accountant=Accountant(name=name)
    )


@pytest.mark.parametrize("name", ["rdp", "exact"])
def test_queries_that_fit_epsilon_one(name: AccountantName) -> None:
    assert affordable(lambda event: event.sensitivity, name) == QUERIES[name]


@pytest.mark.parametrize("name", ["rdp", "exact"])
def test_a_sensitivity_of_root_k_is_caught_by_the_golden_figure(name: AccountantName) -> None:
    """Broken twin: a replaced row moves the sum by 2√k; who charges √k sells four times as many queries."""
    assert affordable(lambda event: event.l2_bound, name) > 3 * QUERIES[name]


@pytest.mark.parametrize("name", ["rdp", "exact"])
def test_the_ledger_agrees_query_by_query(name: AccountantName) -> None:
    """The last events around the limit, priced by the list of events rather than by a formula."""
    event, pricing = topagg_event(k=200, sigma=5000.0), Accountant(name=name)
    assert pricing.epsilon([event] * QUERIES[name], DELTA) <= 1.0
    assert pricing.epsilon([event] * (QUERIES[name] + 1), DELTA) > 1.0


def test_a_batch_costs_what_its_images_cost_one_by_one() -> None:
    """One event over 15 images with row norm √(15k) = 15 events of one image each."""
    pricing = Accountant(name="exact")
    batch = topagg_event(k=15 * 200, sigma=5000.0)
    single = topagg_event(k=200, sigma=5000.0)
    assert pricing.mu_squared([batch]) == pytest.approx(pricing.mu_squared([single] * 15), rel=1e-12)
    assert pricing.mu_squared([batch]) != pytest.approx(pricing.mu_squared([single]), rel=0.5)


def test_epsilon_of_the_published_mu() -> None:
    assert round(exact_epsilon(0.2681**2, DELTA), 4) == 1.0002


@pytest.mark.parametrize(("epsilon", "mu"), [(1.0, "0.2681"), (10.0, "2.000")])
def test_mu_of_the_published_epsilons(epsilon: float, mu: str) -> None:
    places = len(mu.split(".")[1])
    assert f"{Accountant(name='exact').mu_budget(epsilon, DELTA):.{places}f}" == mu


@pytest.mark.parametrize(
    ("epsilon", "rho_rdp", "rho_exact", "gain"),
    [(0.2, "0.00086", "0.00188", "2.18"), (1.0, "0.02081", "0.03593", "1.73"), (10.0, "1.541", "2.001", "1.30")],
)
def test_what_exact_accounting_is_worth(epsilon: float, rho_rdp: str, rho_exact: str, gain: str) -> None:
    """The table of ρ = μ²/2 that fits into ε, by both accountants."""
    by_rdp = Accountant(name="rdp").mu_budget(epsilon, DELTA) ** 2 / 2
    by_exact = Accountant(name="exact").mu_budget(epsilon, DELTA) ** 2 / 2
    for value, printed in ((by_rdp, rho_rdp), (by_exact, rho_exact), (by_exact / by_rdp, gain)):
        assert f"{value:.{len(printed.split('.')[1])}f}" == printed


def test_a_record_in_two_shares_costs_what_the_authors_overlap_costs() -> None:
    """Defect 1 of the authors' code: two rows change, Δ doubles, and ε = 1 is really 2.04 (exactly: 0.74, 1.59)."""
    claimed = Accountant(name="rdp").mu_squared([topagg_event(k=200, sigma=5000.0)] * 1300)
    rdp, exact = Accountant(name="rdp"), Accountant(name="exact")
    assert f"{rdp.epsilon_at(claimed, DELTA):.2f}" == "1.00"
    assert f"{rdp.epsilon_at(4 * claimed, DELTA):.2f}" == "2.04"
    assert f"{exact.epsilon_at(claimed, DELTA):.2f}" == "0.74"
    assert f"{exact.epsilon_at(4 * claimed, DELTA):.2f}" == "1.59"


def test_the_account_command_prints_the_same() -> None:
    shown = account(k=200, sigma=5000.0, queries=1300, delta=DELTA, epsilon=None, accountant="exact")
    assert f"{shown['epsilon_rdp']:.4f}" == "0.9997"
    assert f"{shown['epsilon_exact']:.4f}" == "0.7412"  # mpmath, 40 digits
    assert f"{shown['mu']:.4f}" == "0.2040"


def test_the_closed_form_at_epsilon_zero() -> None:
    """δ(0) = 2Φ(μ/2) − 1, the total variation of two unit normals μ apart."""
    for mu in (0.01, 0.2681, 1.0, 2.0, 5.0):
        assert gaussian_delta(mu, 0.0) == pytest.approx(math.erf(mu / 2 / math.sqrt(2)), rel=1e-12)


def test_a_ledger_of_the_papers_run_stops_where_the_golden_figure_says() -> None:
    """86 batches of 15 images are 1,290 queries: the 87th batch is refused by the paper's accountant."""
    ledger = Ledger.in_memory(Budget(epsilon=1.0, delta=DELTA, relation="add-remove", accountant="rdp"))
    batch = topagg_event(k=15 * 200, sigma=5000.0)
    for _ in range(86):
        ledger.charge(batch)
    assert not ledger.budget.pricing().epsilon([*ledger.events, batch], DELTA) <= 1.0
