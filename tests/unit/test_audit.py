"""The arithmetic of audits: known values, simulations, and the broken twins by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.errors import DatalensError
from datalens.privacy import audit
from datalens.privacy.audit import Errors, Neighbours, Plan, count_errors, one_run_epsilon, one_run_p_value
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SeededNoise

FREE = Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact")


def seeded(sigma: float) -> GaussianSum:
    return GaussianSum(sigma=sigma, noise=SeededNoise(7))


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "trials", "level", "lower", "upper"),
    [
        (0, 10, 0.025, 0.0, 0.3085),  # the usual 95 % intervals, from printed tables
        (1, 10, 0.025, 0.0025, 0.4450),
        (5, 10, 0.025, 0.1871, 0.8129),
        (10, 10, 0.025, 0.6915, 1.0),
        (0, 100, 0.05, 0.0, 0.0295),  # the rule of three
    ],
)
def test_clopper_pearson_against_tables(count: int, trials: int, level: float, lower: float, upper: float) -> None:
    assert audit.rate_lower(count, trials, level) == pytest.approx(lower, abs=6e-5)
    assert audit.rate_upper(count, trials, level) == pytest.approx(upper, abs=6e-5)


@pytest.mark.parametrize("count", [0, 1, 3, 17, 39])
def test_clopper_pearson_is_the_rate_at_which_the_count_becomes_unlikely(count: int) -> None:
    upper = audit.rate_upper(count, 40, 1e-4)
    assert binom.cdf(count, 40, upper) == pytest.approx(1e-4, rel=1e-6)
    if count:
        assert binom.sf(count - 1, 40, audit.rate_lower(count, 40, 1e-4)) == pytest.approx(1e-4, rel=1e-6)


# --- μ --------------------------------------------------------------------------------------------


def test_mu_from_rates() -> None:
    """With so many trials that the intervals close, the bound is the μ whose best test errs so often."""
    many = 10**9
    errors = Errors(
        false_alarms=round(many * norm.cdf(-0.4)), without=many, misses=round(many * norm.cdf(-0.6)), with_it=many
    )
    assert errors.mu(0.05) == pytest.approx(1.0, abs=1e-3)
    assert errors.mu(0.05) < 1.0
    assert errors.epsilon(1e-5, 0.05) == pytest.approx(exact_epsilon(1.0, 1e-5), rel=2e-3)


def test_mu_uses_half_of_the_level_for_each_rate() -> None:
    errors = Errors(false_alarms=300, without=1000, misses=100, with_it=500)
    by_hand = -norm.ppf(audit.rate_upper(300, 1000, 0.025)) - norm.ppf(audit.rate_upper(100, 500, 0.025))
    assert errors.mu(0.05) == pytest.approx(by_hand)
    assert errors.mu(1e-4) < errors.mu(0.05)


def test_pooled_errors_prove_more_and_hold_as_often() -> None:
    random = np.random.default_rng(1)
    mu, trials = 0.8, 300
    rates = norm.cdf(-0.7), norm.cdf(0.7 - mu)  # a threshold off the middle
    false_alarms, misses = (random.binomial(trials, rate, size=1000) for rate in rates)
    found = [
        Errors(false_alarms=int(a), without=trials, misses=int(b), with_it=trials)
        for a, b in zip(false_alarms, misses, strict=True)
    ]
    pooled = np.array([errors.pooled_mu(0.05) for errors in found])
    assert np.mean(pooled > mu) < 0.05
    best = Errors(false_alarms=103, without=trials, misses=103, with_it=trials)
    assert best.mu(0.05) < best.pooled_mu(0.05) < mu
    assert Errors(false_alarms=9, without=9, misses=9, with_it=9).pooled_mu(0.05) == 0.0
    with pytest.raises(ValueError, match="use equal numbers"):
        Errors(false_alarms=1, without=9, misses=1, with_it=8).pooled_mu(0.05)


def test_a_test_that_is_always_wrong_proves_nothing() -> None:
    errors = Errors(false_alarms=10, without=10, misses=10, with_it=10)
    assert errors.mu(0.05) == 0.0
    assert errors.epsilon(1e-5, 0.05) == 0.0


def test_errors_are_counted_on_their_sides_of_the_threshold() -> None:
    errors = count_errors(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0, 3.0]), threshold=1.0)
    assert errors == Errors(false_alarms=1, without=3, misses=2, with_it=4)


def test_the_bound_holds_as_often_as_it_says() -> None:
    """1,000 audits of a perfect attack on N(0, 1) against N(μ, 1): too high in at most 5 %."""
    random = np.random.default_rng(0)
    mu, trials = 0.5, 400
    false_alarms = random.binomial(trials, norm.cdf(-mu / 2), size=1000)
    misses = random.binomial(trials, norm.cdf(-mu / 2), size=1000)
    found = [
        Errors(false_alarms=int(a), without=trials, misses=int(b), with_it=trials).mu(0.05)
        for a, b in zip(false_alarms, misses, strict=True)
    ]
    assert np.mean(np.array(found) > mu) < 0.05
    assert np.median(found) > mu / 3


# --- one run --------------------------------------------------------------------------------------


def test_one_run_at_delta_0_is_a_binomial_test() -> None:
    assert one_run_p_value(canaries=100, guesses=100, right=100, epsilon=0.0, delta=0.0) == pytest.approx(2.0**-100)
    assert one_run_p_value(canaries=9, guesses=4, right=0, epsilon=1.0, delta=0.1) == 1.0
    # All of 100 right: q^100 = 0.05 where q = e^ε/(1 + e^ε), so ε = 3.49 (Steinke et al. 2023 print the same curve).
    found = one_run_epsilon(canaries=100, guesses=100, right=100, delta=0.0, level=0.05)
    assert found == pytest.approx(math.log(0.05**0.01 / (1 - 0.05**0.01)), abs=1e-6)


def test_one_run_delta_by_hand() -> None:
    """m = r = v = 2, ε = 0: β = 1/4, max over i of P[2 − i ≤ Bin < 2]/i = max(1/2, 3/8) = 1/2."""
    p = one_run_p_value(canaries=2, guesses=2, right=2, epsilon=0.0, delta=0.01)
    assert p == pytest.approx(0.25 + 2 * 2 * 0.01 * 0.5)


def test_one_run_more_delta_more_guesses_wrong_or_more_confidence_prove_less() -> None:
    def at(**changed: float) -> float:
        given = {"canaries": 500, "guesses": 200, "right": 180, "delta": 1e-5, "level": 0.05}
        return one_run_epsilon(**{**given, **changed})  # type: ignore[arg-type]

    assert at() > 1.5
    assert at(delta=1e-3) < at() < at(delta=0.0)
    assert at(right=150) < at()
    assert at(level=1e-3) < at()
    assert at(right=100) == 0.0


def test_one_run_refuses_counts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="is impossible"):
        one_run_epsilon(canaries=10, guesses=11, right=5, delta=0.0, level=0.05)


def test_one_run_on_randomised_response() -> None:
    """The worst case of the theorem: right with probability e^ε/(1 + e^ε). Too high a bound in at most 5 % of runs."""
    epsilon, canaries = 1.5, 400
    right = np.random.default_rng(0).binomial(canaries, 1 / (1 + math.exp(-epsilon)), size=300)
    bounds = {
        int(v): one_run_epsilon(canaries=canaries, guesses=canaries, right=int(v), delta=0.0, level=0.05)
        for v in np.unique(right)
    }
    found = np.array([bounds[int(v)] for v in right])
    assert np.mean(found > epsilon) <= 0.08  # 0.05, and three standard errors of 300 runs
    assert np.mean(found) > 0.7 * epsilon


# --- neighbours and broken twins ------------------------------------------------------------------


def test_neighbours_are_as_far_apart_as_rows_can_be() -> None:
    neighbours = Neighbours(k=5, images=3)
    one, other = (neighbours.votes(flipped=flipped) for flipped in (False, True))
    distance = float((one.private_total - other.private_total).to(torch.float64).norm())
    assert distance == pytest.approx(2 * math.sqrt(5 * 3))
    assert distance == pytest.approx(one.diameter) == pytest.approx(other.diameter)
    half_way = (one.private_total + other.private_total).to(torch.float64) / 2
    assert float((half_way * neighbours.direction).sum()) == neighbours.threshold


def test_many_trials_are_the_same_votes_again_and_again() -> None:
    neighbours = Neighbours(k=5, images=3)
    one, many = neighbours.votes(flipped=True), neighbours.votes(flipped=True, trials=4)
    assert torch.equal(many.private_total, one.private_total.repeat(4, 1))
    assert many.diameter == pytest.approx(2 * one.diameter)  # and so the price of four


def test_the_claim_is_the_ledgers_own() -> None:
    plan = Plan(epsilon=1.0, delta=1e-5, releases=3)
    subject = audit.honest(plan, seeded)
    assert subject.claimed(1e-5, "add-remove", "exact") == pytest.approx(1.0, abs=1e-9)
    assert subject.claimed(1e-5, "add-remove", "rdp") > 1.0


def test_controls_claim_the_same_and_do_more() -> None:
    plan = Plan(epsilon=1.0, delta=1e-5)
    true_mu = 2 * math.sqrt(plan.k * plan.images) / plan.sigma(2 * math.sqrt(plan.k * plan.images))
    for control in audit.controls(plan, seeded):
        assert control.claimed(plan.delta, plan.relation, plan.accountant) == pytest.approx(1.0, abs=1e-9)
        mechanism = control.mechanism
        assert isinstance(mechanism, GaussianSum)
        real_mu = 2 * math.sqrt(plan.k * plan.images) / mechanism.sigma
        assert real_mu == pytest.approx(2 * true_mu), control.name


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"trials": 10}, "--trials"),
        ({"images": 1}, "--images"),
        ({"epsilon": math.inf}, "finite"),
        ({"epsilon": 0.0}, "above 0"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_plans_that_make_no_sense(changed: dict[str, float], says: str) -> None:
    with pytest.raises(DatalensError, match=says):
        Plan(**{"epsilon": 1.0, "delta": 1e-5, **changed})  # type: ignore[arg-type]


def small_sum() -> BoundedSum:
    rows = torch.ones(2, 3, 4, dtype=torch.int8)
    return sum_bounded(
        [Contributions(rows=rows, l2_bound=math.sqrt(12), diameter=2 * math.sqrt(12), row_unit="teacher")]
    )


def test_peeking_shows_one_sum_and_pays_as_if_it_did_not() -> None:
    ledger = Ledger.in_memory(FREE)
    released = audit.Peeking(mechanism=seeded(1000.0)).release(small_sum(), ledger, step=0)
    assert released.value[0].tolist() == [2, 2, 2, 2]
    assert (np.abs(released.value[1:] - 2) > 5).all()
    assert [event.sigma for event in ledger.events] == [1000.0]  # type: ignore[union-attr]


def test_weakened_releases_one_thing_and_pays_for_another() -> None:
    ledger = Ledger.in_memory(FREE)
    broken = audit.Weakened(charged=seeded(1000.0), released=seeded(0.01))
    assert (broken.release(small_sum(), ledger, step=0).value == 2).all()
    assert [event.sigma for event in ledger.events] == [1000.0]  # type: ignore[union-attr]


def test_a_finding_is_broken_by_the_verdict_bound_alone() -> None:
    errors = Errors(false_alarms=400, without=1000, misses=400, with_it=1000)
    found = audit.finding("x", errors, claimed=1.3, delta=1e-5)
    assert found.verdict_bound < 1.3 < found.lower_bound
    assert not found.broken
    assert audit.finding("x", errors, claimed=0.5, delta=1e-5).broken
    assert found.as_dict()["broken"] is False
    assert found.trials == 2000
