"""Theorems 3, 4 and 5 as functions: the right values, and NaN (never a number) where a bound does not apply."""

import ast
import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

import datalens
from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.privacy import bounds
from datalens.privacy.bounds import (
    ORDERS,
    analyse,
    combined_epsilon,
    data_dependent_rdp,
    dependent_epsilon,
    likely_outcome,
    log_agreement,
    log_disagreement,
    log_outcomes,
    most_agreement,
    needed_agreement,
    rdp_to_epsilon,
    theorem4,
    topagg_rdp,
)
from datalens.privacy.curves import rdp_epsilon
from datalens.privacy.events import GaussianEvent

SOURCE = Path(datalens.__file__).parent
PER_ORDER = 1.6e-5  # k = 200, σ = 5000


# --- Theorem 3 ------------------------------------------------------------------------------------------------------


def test_theorem_3_is_what_the_event_costs() -> None:
    """2kλ/σ² an image, and a batch as one event of sensitivity 2√(km) costs as much as m images."""
    assert float(topagg_rdp(np.array(3.0), k=200, sigma=5000.0)) == pytest.approx(2 * 200 * 3 / 5000**2, rel=1e-15)
    bound = math.sqrt(200 * 15)
    event = GaussianEvent(
        row_unit="teacher", l2_bound=bound, diameter=2 * bound, relation="add-remove", sigma=5000.0, queries=15,
        step=0, noise="operating-system",
    )  # fmt: skip
    np.testing.assert_allclose(topagg_rdp(ORDERS, k=200, sigma=5000.0, queries=15), ORDERS * event.mu**2 / 2)


def test_theorem_1_is_the_papers_conversion() -> None:
    found = rdp_to_epsilon(topagg_rdp(ORDERS, k=200, sigma=5000.0, queries=1300), delta=1e-5)
    assert found is not None
    assert found[0] == pytest.approx(rdp_epsilon(1300 * 2 * PER_ORDER, 1e-5), rel=1e-12)
    assert found[0] <= 1 < rdp_epsilon(1301 * 2 * PER_ORDER, 1e-5)


def test_an_order_without_a_bound_is_left_out() -> None:
    rdp = np.full(ORDERS.shape, np.nan)
    assert rdp_to_epsilon(rdp, delta=1e-5) is None
    rdp[7] = 0.5
    assert rdp_to_epsilon(rdp, delta=1e-5) == (0.5 + math.log(1e5) / (ORDERS[7] - 1), ORDERS[7])


# --- Theorem 5 ------------------------------------------------------------------------------------------------------


def test_factors_of_theorem_5() -> None:
    votes, at, sigma = np.linspace(-9, 9, 181), 2.5, 1.7
    low, middle, high = np.exp(log_outcomes(votes, threshold=at, sigma=sigma)).T
    np.testing.assert_allclose(low, norm.cdf((-at - votes) / sigma), rtol=1e-12)
    np.testing.assert_allclose(high, norm.sf((at - votes) / sigma), rtol=1e-12)
    expected = norm.cdf((at - votes) / sigma) - norm.cdf((-at - votes) / sigma)
    np.testing.assert_allclose(middle, expected, rtol=1e-9, atol=1e-16)
    np.testing.assert_allclose(low + middle + high, 1.0, rtol=1e-14)


def test_factors_far_out_are_exact_in_logarithms() -> None:
    low, middle, high = log_outcomes(np.array(300.0), threshold=2.0, sigma=1.0)
    assert low == pytest.approx(float(norm.logcdf(-302.0)), rel=1e-14)
    assert middle == pytest.approx(float(norm.logcdf(-298.0)), rel=1e-14)  # the other end is e^-1200 of it
    assert high == 0.0
    assert list(log_outcomes(np.array(-300.0), threshold=2.0, sigma=1.0)) == [high, middle, low]


def test_without_a_threshold_nothing_lies_between() -> None:
    logs = log_outcomes(np.array([0.0, 1.0, -1.0]), threshold=0.0, sigma=1.0)
    assert np.isneginf(logs[:, 1]).all()
    np.testing.assert_allclose(np.exp(logs[0]), [0.5, 0.0, 0.5])


def test_the_product_of_12288_factors_does_not_underflow() -> None:
    votes = np.zeros((2, 12_288))
    outcome = likely_outcome(votes, threshold=7200.0, sigma=9000.0)
    assert not outcome.any()
    found = log_agreement(votes, outcome, threshold=7200.0, sigma=9000.0)
    one = math.log(2 * float(norm.cdf(0.8)) - 1)
    np.testing.assert_allclose(found, 12_288 * one, rtol=1e-12)
    assert (log_disagreement(found) == 0).all()


def test_the_likely_outcome_is_the_likeliest() -> None:
    votes = np.array([9.0, -9.0, 1.0, -3.0])
    best = likely_outcome(votes, threshold=4.0, sigma=3.0)
    assert best.tolist() == [1, -1, 0, 0]
    top = log_agreement(votes, best, threshold=4.0, sigma=3.0)
    outcomes = np.stack(np.meshgrid(*[[-1, 0, 1]] * 4), axis=-1).reshape(-1, 4)
    every = log_agreement(np.tile(votes, (81, 1)), outcomes, threshold=4.0, sigma=3.0)
    assert top == every.max()
    assert np.exp(every).sum() == pytest.approx(1.0)


def test_q_is_never_too_small() -> None:
    """Rounding goes upwards, and a certainty that is only an underflow is not claimed."""
    agree = np.array([0.0, -1e-300, -1e-12, -0.3, -2.0, -50.0, -1e4])
    found = log_disagreement(agree)
    assert (found[2:5] > np.log(-np.expm1(agree[2:5]))).all()
    np.testing.assert_allclose(found[2:5], np.log(-np.expm1(agree[2:5])), atol=2e-9)
    assert np.isfinite(found).all() and found[0] < -600
    assert found[-1] == 0


def test_no_votes_agree_more_than_public_facts_allow() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        d, teachers = int(generator.integers(1, 12)), int(generator.integers(1, 30))
        k = int(generator.integers(1, d + 1))
        at, sigma = generator.uniform(0.05, 1) * teachers, generator.uniform(0.05, 2) * teachers
        same = generator.random() < 0.5  # unanimous, or each its own
        rows = np.zeros((teachers, d))
        for row in rows:
            row[(np.arange(d) if same else generator.permutation(d))[:k]] = 1 if same else generator.choice([-1, 1], k)
        votes = rows.sum(axis=0)
        outcome = likely_outcome(votes, threshold=at, sigma=sigma)
        ceiling = most_agreement(d, k=k, teachers=teachers, threshold=at, sigma=sigma)
        assert log_agreement(votes, outcome, threshold=at, sigma=sigma) <= ceiling + 1e-9


def test_the_papers_settings_leave_no_likely_outcome() -> None:
    """MNIST and CelebA-Hair at ε = 1: 10^-261 and 10^-2941 at best, where Theorem 4 needs 0.4 %, and 95 % to pay."""
    mnist = most_agreement(784, k=200, teachers=4000, threshold=2800.0, sigma=5000.0)
    hair = most_agreement(12_288, k=700, teachers=8000, threshold=7200.0, sigma=9000.0)
    assert mnist / math.log(10) == pytest.approx(-261.83, abs=0.01)
    assert hair / math.log(10) == pytest.approx(-2941.25, abs=0.01)
    applies, pays = needed_agreement(k=200, sigma=5000.0)
    assert math.exp(applies) == pytest.approx(0.00435, abs=1e-4)
    assert math.exp(pays) == pytest.approx(0.950, abs=1e-3)
    for log_agree, works in ((applies - 1e-3, False), (applies + 1e-3, True)):
        found = data_dependent_rdp(float(log_disagreement(np.array(log_agree))), rdp_per_order=PER_ORDER)
        assert bool((found < np.inf).any()) is works


# --- Theorem 4 ------------------------------------------------------------------------------------------------------


def test_theorem_4_is_the_printed_formula() -> None:
    q, order, mu1, mu2, c = 1e-3, 3.0, 7.0, 5.0, 0.02
    a = (1 - q) / (1 - (q * math.exp(mu2 * c)) ** ((mu2 - 1) / mu2))
    b = math.exp(mu1 * c) / q ** (1 / (mu1 - 1))
    expected = math.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
    found = theorem4(np.array(order), math.log(q), mu1=np.array(mu1), mu2=np.array(mu2), rdp_per_order=c)
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"order": 1.0}, "an order is above 1"),
        ({"order": 7.1}, "λ ≤ μ1"),
        ({"mu2": 1.0}, "μ2 > 1"),
        ({"q": 0.5}, "q̃ within where the bound rises with it"),
        ({"q": 0.5, "mu2": 50.0}, "q̃·e^ε2 < 1"),
    ],
)
def test_outside_its_conditions_there_is_no_bound(change: dict[str, float], why: str) -> None:
    given = {"order": 3.0, "q": 1e-3, "mu1": 7.0, "mu2": 5.0} | change
    found = theorem4(
        np.array(given["order"]), math.log(given["q"]), mu1=np.array(given["mu1"]), mu2=np.array(given["mu2"]),
        rdp_per_order=0.02,
    )  # fmt: skip
    assert math.isnan(float(found)), why


@pytest.mark.parametrize("log_q", [-0.02, -0.3, -1.0, -3.0, -12.0, -80.0, -690.0])
@pytest.mark.parametrize("per_order", [PER_ORDER, 1e-3, 0.1])
def test_the_best_pair_of_orders(log_q: float, per_order: float) -> None:
    """As good as a wide search over (μ1, μ2), and never a value that no pair gives."""
    orders = np.array([1.1, 2.0, 8.0, 60.0])
    found = data_dependent_rdp(log_q, rdp_per_order=per_order, orders=orders)
    mu1, mu2 = np.meshgrid(1 + np.geomspace(0.05, 1e5, 150), 1 + np.geomspace(1e-3, 1e5, 150))
    for order, ours in zip(orders, found, strict=True):
        searched = theorem4(order, log_q, mu1=np.append(mu1, order), mu2=np.append(mu2, 2.0), rdp_per_order=per_order)
        if np.isnan(searched).all():
            continue
        assert ours <= np.nanmin(searched) * (1 + 0.02)
        assert ours > 0


def test_papernots_orders_are_among_those_tried() -> None:
    """Where μ2 = √(log(1/q)/c), μ1 = μ2 + 1 satisfy the conditions, the result is never worse than theirs."""
    for log_q in (-3.0, -12.0, -80.0):
        mu2 = math.sqrt(-log_q / PER_ORDER)
        theirs = theorem4(ORDERS, log_q, mu1=np.array(mu2 + 1), mu2=np.array(mu2), rdp_per_order=PER_ORDER)
        assert not np.isnan(theirs).any()
        assert (data_dependent_rdp(log_q, rdp_per_order=PER_ORDER) <= theirs * (1 + 1e-12)).all()


@pytest.mark.parametrize("log_q", [0.0, -0.0, -1e-300, -1e-6, -math.inf, math.nan])
def test_without_a_likely_outcome_it_is_inapplicable(log_q: float) -> None:
    assert np.isnan(data_dependent_rdp(log_q, rdp_per_order=PER_ORDER)).all()


def test_a_very_likely_outcome_costs_next_to_nothing() -> None:
    assert (data_dependent_rdp(-100.0, rdp_per_order=PER_ORDER) < 1e-30 * ORDERS).all()


# --- a run's queries ------------------------------------------------------------------------------------------------


def votes_of(rows: np.ndarray, k: int) -> BoundedSum:
    bound = math.sqrt(k * rows.shape[1])
    tensor = torch.from_numpy(rows.astype(np.int8))
    return sum_bounded([Contributions(rows=tensor, l2_bound=bound, diameter=2 * bound, row_unit="teacher")])


def test_analysis_of_a_batch() -> None:
    """A unanimous image has a likely outcome, one with votes at the threshold has none; each by itself."""
    rows = np.zeros((40, 3, 2))
    rows[:, 0, 0] = 1
    rows[:, 1, 1] = -1
    rows[:20, 2] = 1
    found = analyse(votes_of(rows, 2), k=2, threshold=20.0, sigma=2.0)
    np.testing.assert_allclose(np.exp(found.log_agree[:2]), 1.0)
    assert math.exp(found.log_agree[2]) == pytest.approx(0.25)
    assert (found.dependent[:2, 1:4] < found.independent[1:4]).all()
    assert not (found.dependent[2] < found.independent).any()
    np.testing.assert_allclose(found.independent, ORDERS * 2 * 2 / 2.0**2)
    assert "not differentially private" in found.warning
    assert "log_agree" not in repr(found) and "dependent=" not in repr(found)


def test_the_smaller_bound_says_which_it_was() -> None:
    independent = ORDERS * 0.01
    dependent = np.stack([ORDERS * 0.001, ORDERS * 0.02, np.full(ORDERS.shape, np.nan)])
    found = combined_epsilon(dependent, independent, delta=1e-5)
    assert (found.used_dependent, found.used_independent, found.inapplicable) == (1, 2, 1)
    expected = rdp_to_epsilon(ORDERS * 0.021, delta=1e-5)
    assert expected is not None
    assert (found.epsilon, found.order) == pytest.approx(expected)
    assert "not differentially private" in found.warning


def test_one_inapplicable_query_leaves_no_data_dependent_bound() -> None:
    """Never a silent minimum: NaN spoils the sum. Leaving it out (nansum) would give a number that nothing proves."""
    dependent = np.stack([ORDERS * 0.001, np.full(ORDERS.shape, np.nan)])
    assert dependent_epsilon(dependent, delta=1e-5) is None
    assert rdp_to_epsilon(np.nansum(dependent, axis=0), delta=1e-5) is not None
    assert dependent_epsilon(dependent[:1], delta=1e-5) == pytest.approx(rdp_epsilon(0.002, 1e-5))
    dependent[1, 5] = 0.1
    assert dependent_epsilon(dependent, delta=1e-5) == pytest.approx(
        0.1 + 0.001 * ORDERS[5] + math.log(1e5) / (ORDERS[5] - 1)
    )


# --- it stays where it is -------------------------------------------------------------------------------------------

# Whoever decides, charges, certifies or learns. `cli` calls `reproduce`, by name only.
APART = (
    "released/",
    "methods/",
    "private/",
    "bounded/",
    "privacy/",
    "data/",
    "run/ranks.py",
    "run/remote_teachers.py",
)
APART += (
    "job.py",
    "driver.py",
    "run/folder.py",
    "plans/",
    "options.py",
)
APART += ("api/account.py",)


def modules() -> dict[str, str]:
    """datalens.a.b → its text."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = "datalens." + path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
        found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def named(text: str) -> frozenset[str]:
    """What a module imports, anywhere in its text; also by a name in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def reaches_bounds(texts: dict[str, str]) -> set[str]:
    """Modules from which imports, direct or through others, lead to privacy.bounds."""
    direct = {name: named(text) & set(texts) for name, text in texts.items()}
    reached = {"datalens.privacy.bounds"}
    while more := {name for name, others in direct.items() if others & reached} - reached:
        reached |= more
    return reached - {"datalens.privacy.bounds"}


def apart(name: str) -> bool:
    inside = name.removeprefix("datalens.").replace(".", "/")
    return f"{inside}.py" in APART or any(f"{inside}/".startswith(folder) for folder in APART if folder[-1] == "/")


def test_no_run_and_no_release_can_reach_the_analysis() -> None:
    texts = modules()
    reached = reaches_bounds(texts)
    assert "datalens.reproduce.figure2" in reached  # the walker sees what is there
    assert not [name for name in reached if apart(name)]
    for planted in ("released.certificate", "privacy.ledger", "driver"):
        broken = {**texts, f"datalens.{planted}": "def f():\n    from datalens.privacy import bounds\n"}
        assert f"datalens.{planted}" in reaches_bounds(broken) and apart(f"datalens.{planted}")
    indirect = {**texts, "datalens.plans.registry": "from datalens.reproduce.figure2 import summary\n"}
    assert [name for name in reaches_bounds(indirect) if apart(name)]


def test_the_warning_says_what_it_must() -> None:
    for word in ("depends on the data", "not differentially private", "owner", "never stops a run", "certificate"):
        assert word in bounds.WARNING.lower()


def test_the_proof_names_what_exists() -> None:
    """docs/theorem3.md: every `file: name` and every test file it points to."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "theorem3.md").read_text(encoding="utf-8")
    named_code = re.findall(r"`([\w/]+\.py): (\w+)`", text)
    assert len(named_code) >= 8
    for file, name in named_code:
        tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
        assert name in {getattr(node, "name", None) for node in ast.walk(tree)}, f"{file}: {name}"
    tests = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert tests and all((root / test).is_file() for test in tests)
