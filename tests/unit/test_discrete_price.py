"""The price of the discrete Gaussian: the theorem of docs/privacy.md in 60 digits, and the true δ by summation."""

import functools
import math

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.errors import BudgetExceeded, UnpriceableEvent
from datalens.privacy.accountant import Accountant, AccountantName, side_by_side
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps, topagg_event
from datalens.privacy.curves import exact_epsilon, gaussian_delta, zcdp_epsilon
from datalens.privacy.events import (
    CLOSENESS,
    LEAST_SMOOTH,
    ROUNDING,
    DiscreteGaussianEvent,
    GaussianEvent,
    parse_event,
)
from datalens.privacy.ledger import Budget, Ledger

DELTA = 1e-5


def event(*, sigma: float, sensitivity: float = 1.0, coordinates: int = 1) -> DiscreteGaussianEvent:
    made = topagg_event(sensitivity=sensitivity, sigma=sigma, law="discrete-gaussian", coordinates=coordinates)
    assert isinstance(made, DiscreteGaussianEvent)
    return made


# --- the theorem: N_Z(q, σ²) against N(q, σ² − 4) rounded at random -----------------------------------------------


def rounded_gaussian(z: int, q: int, *, sigma: float, rounding: float) -> mp.mpf:
    """P[Z = z] where X ~ N(q, σ² − r) and Z is x rounded: an integer with weight exp(−(z − x)²/2r). By the trapezium
    rule, whose error for such a function is far below 1e-60."""
    r, s2 = mp.mpf(rounding), mp.mpf(sigma) ** 2 - rounding

    def integrand(x: mp.mpf) -> mp.mpf:
        nearest = int(mp.nint(x))
        weights = mp.fsum(_weight(mp.mpf(j) - x, r) for j in range(nearest - 50, nearest + 51))
        return mp.exp(-((x - q) ** 2) / (2 * s2)) / mp.sqrt(2 * mp.pi * s2) * _weight(z - x, r) / weights

    width = mp.sqrt(1 / (1 / r + 1 / s2))  # of the product of the two bells, which sits between q and z
    middle = (z * s2 + q * r) / (s2 + r)
    step = width / 6
    return step * mp.fsum(integrand(middle + i * step) for i in range(-105, 106))


def _weight(distance: mp.mpf, r: mp.mpf) -> mp.mpf:
    return mp.exp(-(distance**2) / (2 * r))


def discrete(z: int, q: int, *, sigma: float) -> mp.mpf:
    reach = int(18 * sigma) + 5
    total = mp.fsum(mp.exp(-mp.mpf(i * i) / (2 * mp.mpf(sigma) ** 2)) for i in range(-reach, reach + 1))
    return mp.exp(-mp.mpf((z - q) ** 2) / (2 * mp.mpf(sigma) ** 2)) / total


def distance(z: int, q: int, *, sigma: float, rounding: float = ROUNDING) -> float:
    with mp.workdps(50):
        ours = discrete(z, q, sigma=sigma)
        return float(abs(mp.log(ours / rounded_gaussian(z, q, sigma=sigma, rounding=rounding))))


@pytest.mark.parametrize(("sigma", "q", "z"), [(10.0, 0, 0), (10.0, 3, -25), (12.3456, -7, 40), (50.0, 2, 333)])
def test_the_discrete_gaussian_is_a_rounded_gaussian_to_34_digits(sigma: float, q: int, z: int) -> None:
    assert distance(z, q, sigma=sigma) <= CLOSENESS


def test_less_rounding_would_not_be_so_close() -> None:
    """Broken twin: give away a variance of 1/4 and not of 4, and the integers show through."""
    assert distance(4, 0, sigma=10.0, rounding=0.25) > 1e-6


def test_the_constant_is_the_one_that_poisson_summation_gives() -> None:
    with mp.workdps(50):
        ripple = 2 * mp.nsum(lambda j: mp.exp(-2 * mp.pi**2 * 4 * j**2), [1, 20])
        larger = mp.exp(-2 * mp.pi**2 * LEAST_SMOOTH**2) * 3
        assert mp.log((1 + ripple) / (1 - ripple)) / 2 < 1.1e-34
        assert -mp.log(1 - ripple) + mp.log(1 + larger) < CLOSENESS


# --- the true δ, by summation -------------------------------------------------------------------------------------


@functools.cache
def law(sigma: float) -> tuple[int, tuple[mp.mpf, ...]]:
    with mp.workdps(40):
        reach = int(20 * sigma) + 5
        weights = [mp.exp(-mp.mpf(z * z) / (2 * mp.mpf(sigma) ** 2)) for z in range(-reach, reach + 1)]
        total = mp.fsum(weights)
        return reach, tuple(weight / total for weight in weights)


def true_delta(sigma: float, shift: int, epsilon: float) -> float:
    """Σ_z max(0, P(z) − e^ε P(z − shift)): no theorem in between."""
    reach, p = law(sigma)
    with mp.workdps(40):
        factor = mp.exp(epsilon)
        return float(
            mp.fsum(max(mp.mpf(0), p[z] - (factor * p[z - shift] if z >= shift else 0)) for z in range(2 * reach + 1))
        )


def holds(price: object, *, sigma: float, shift: int, delta: float) -> bool:
    epsilon = price([(event(sigma=sigma, sensitivity=float(shift)), 1)], delta)  # type: ignore[operator]
    return true_delta(sigma, shift, epsilon) <= delta * (1 + 1e-9)


def as_if_continuous(counted: list[tuple[DiscreteGaussianEvent, int]], delta: float) -> float:
    """Broken twin: the Gaussian's curve at the same σ."""
    return exact_epsilon(sum(count * (e.sensitivity / e.sigma) ** 2 for e, count in counted), delta)


CASES = [
    (sigma, shift, delta)
    for sigma in (0.7, 1.0, 2.0, 5.0, 9.99, 10.0, 14.0)
    for shift in (1, 2, 5)
    for delta in (1e-3, 1e-5, 1e-9)
]


@pytest.mark.parametrize("name", ["exact", "rdp", "rdp-improved"])
def test_the_price_covers_the_true_delta(name: AccountantName) -> None:
    for sigma, shift, delta in CASES:
        assert holds(Accountant(name=name).price, sigma=sigma, shift=shift, delta=delta), (sigma, shift, delta)


def test_the_continuous_curve_does_not() -> None:
    caught = {
        sigma for sigma, shift, delta in CASES if not holds(as_if_continuous, sigma=sigma, shift=shift, delta=delta)
    }
    assert {0.7, 1.0, 2.0} <= caught


def test_how_much_the_continuous_curve_is_off_at_sigma_one() -> None:
    """The true δ is up to 1.8 times as large where δ > 1e-6, and 2.8 times further out."""
    ratios = {e / 20: true_delta(1.0, 1, e / 20) / gaussian_delta(1.0, e / 20) for e in range(160)}
    usual = {e: ratio for e, ratio in ratios.items() if 1e-6 < gaussian_delta(1.0, e) < 1e-2}
    assert 1.8 < max(usual.values()) < 1.9
    assert 2.7 < max(ratios.values()) < 2.9


def test_two_coordinates_and_two_releases_are_covered_too() -> None:
    """The loss of a product law, by enumeration: 2 × 2 coordinates that each move by one at σ = 3."""
    sigma, moves = 3.0, 4
    reach, p = law(sigma)
    losses: dict[int, float] = {0: 1.0}  # log P(z)/P(z−1) = (1 − 2z)/(2σ²): so the sum of z decides
    for _ in range(moves):
        grown: dict[int, float] = {}
        for total, chance in losses.items():
            for i, mass in enumerate(p):
                if mass > 1e-14:
                    grown[total + i - reach] = grown.get(total + i - reach, 0.0) + chance * float(mass)
        losses = grown
    charged = event(sigma=sigma, sensitivity=math.sqrt(2), coordinates=2)
    for delta in (1e-2, 1e-4, 1e-6):
        epsilon = Accountant(name="exact").price([(charged, 2)], delta)
        true = sum(
            chance * max(0.0, -math.expm1(epsilon - (moves - 2 * total) / (2 * sigma**2)))
            for total, chance in losses.items()
        )
        assert true <= delta


# --- what it is worth, and which rule applies ---------------------------------------------------------------------


def test_the_golden_figures() -> None:
    """k = 200, σ = 5000, ε = 1, δ = 1e-5: Gaussian 2,245; as zCDP 1,909; with σ² − 4 nothing is lost."""
    goal = {"sensitivity": 2 * math.sqrt(200), "sigma": 5000.0, "epsilon": 1.0, "delta": DELTA}
    exact, improved = Accountant(name="exact"), Accountant(name="rdp-improved")
    assert calibrate_steps(**goal, accountant=exact) == 2245
    assert calibrate_steps(**goal, accountant=exact, law="discrete-gaussian", coordinates=784) == 2245
    assert calibrate_steps(**goal, accountant=improved, law="discrete-gaussian", coordinates=784) == 1909
    rho = 4 * 200 / (2 * 5000.0**2)
    assert zcdp_epsilon(1909 * rho, DELTA) <= 1.0 < zcdp_epsilon(1910 * rho, DELTA)
    # Where it costs something: σ² − 4 for σ = 20 is one query in a hundred.
    small = goal | {"sensitivity": 2.0, "sigma": 20.0, "epsilon": 5.0}
    assert calibrate_steps(**small, accountant=exact) == 125
    assert calibrate_steps(**small, accountant=exact, law="discrete-gaussian") == 124


@pytest.mark.parametrize("name", ["exact", "pld"])
def test_the_price_is_the_gaussians_of_variance_less_four(name: AccountantName) -> None:
    pricing = Accountant(name=name)
    same = GaussianEvent(
        **{k: v for k, v in event(sigma=11.0, sensitivity=2.0).as_dict().items() if k not in ("kind", "coordinates")}
        | {"sigma": math.sqrt(117.0)}
    )
    ours = [(event(sigma=11.0, sensitivity=2.0), 3)]
    assert pricing.price(ours, DELTA) == pytest.approx(pricing.price([(same, 3)], DELTA), rel=1e-12)


def test_the_slack_over_all_coordinates_is_added() -> None:
    """It is far below rounding in any run; a count nobody has shows that it is there."""
    few, many = (event(sigma=20.0, coordinates=count) for count in (1, 10**33))
    assert few.slack == CLOSENESS
    found = [Accountant(name=name).price([(many, 1)], DELTA) for name in ("exact", "pld")]  # type: ignore[arg-type]
    plain = Accountant(name="exact").price([(few, 1)], DELTA)
    assert all(price >= plain + 0.39 for price in found)


def test_coarse_noise_is_priced_as_zcdp_and_never_mixed() -> None:
    exact = Accountant(name="exact")
    coarse, smooth = event(sigma=9.0, sensitivity=2.0), event(sigma=10.0, sensitivity=2.0)
    assert exact.price([(coarse, 5)], DELTA) == zcdp_epsilon(5 * coarse.rho, DELTA)
    assert math.isinf(coarse.mu) and event(sigma=9.0, sensitivity=0.0).mu == 0.0
    assert exact.price([(event(sigma=9.0, sensitivity=0.0), 1)], DELTA) == 0.0
    for other in (smooth, topagg_event(sensitivity=2.0, sigma=9.0, law="gaussian")):
        with pytest.raises(UnpriceableEvent, match="together"):
            exact.epsilon([coarse, other], DELTA)
        assert Accountant(name="rdp-improved").epsilon([coarse, other], DELTA) > 0
    with pytest.raises(UnpriceableEvent, match="below sigma 10"):
        Accountant(name="pld").epsilon([coarse], DELTA)
    shown = side_by_side([(coarse, 1)], DELTA)
    assert isinstance(shown["pld"], str) and isinstance(shown["exact"], float)


def test_zcdp_at_its_ends() -> None:
    assert zcdp_epsilon(0.0, DELTA) == 0.0
    assert zcdp_epsilon(math.inf, DELTA) == math.inf
    assert zcdp_epsilon(1e-9, 0.5) == 0.0


budgets = st.tuples(st.sampled_from(["exact", "rdp", "rdp-improved"]), st.floats(0.2, 60), st.floats(1e-9, 1e-3))


@given(budget=budgets, steps=st.integers(1, 40), k=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_calibrated_discrete_noise_carries_its_steps_through_a_ledger(
    budget: tuple[AccountantName, float, float], steps: int, k: int
) -> None:
    """Planned budgets hold, never over; and a σ calibrated as if continuous would not carry them at small σ."""
    name, epsilon, delta = budget
    goal = {"sensitivity": 2 * math.sqrt(k), "epsilon": epsilon, "delta": delta, "accountant": Accountant(name=name)}
    try:
        sigma = calibrate_sigma(steps=steps, law="discrete-gaussian", coordinates=9, **goal)  # type: ignore[arg-type]
    except BudgetExceeded:
        return  # under what the paper's orders can express
    ledger = Ledger.in_memory(Budget(epsilon=epsilon, delta=delta, relation="add-remove", accountant=name))
    for _ in range(steps):
        ledger.charge(event(sigma=sigma, sensitivity=2 * math.sqrt(k), coordinates=9))
    assert ledger.spent() <= epsilon
    assert calibrate_steps(sigma=sigma, law="discrete-gaussian", coordinates=9, **goal) >= steps  # type: ignore[arg-type]
    if sigma != LEAST_SMOOTH:
        less = event(sigma=sigma * (1 - 1e-6), sensitivity=2 * math.sqrt(k), coordinates=9)
        assert Accountant(name=name).price([(less, steps)], delta) > epsilon


def test_a_sigma_calibrated_as_if_continuous_overspends() -> None:
    """Broken twin of the plan."""
    goal = {"sensitivity": 2.0, "steps": 4, "epsilon": 2.0, "delta": DELTA, "accountant": Accountant(name="exact")}
    continuous = calibrate_sigma(**goal)  # type: ignore[arg-type]
    assert calibrate_sigma(**goal, law="discrete-gaussian") > continuous  # type: ignore[arg-type]
    ledger = Ledger.in_memory(Budget(epsilon=2.0, delta=DELTA, relation="add-remove", accountant="exact"))
    for _ in range(3):
        ledger.charge(event(sigma=continuous, sensitivity=2.0))
    with pytest.raises(BudgetExceeded):
        ledger.charge(event(sigma=continuous, sensitivity=2.0))


def test_calibration_around_the_change_of_rules() -> None:
    """Where zCDP would want more than 10 and the Gaussian less, 10 it is; pld has no rule below 10 at all."""
    exact = Accountant(name="exact")
    found = set()
    for tenth in range(60, 120):
        goal = {"sensitivity": tenth / 10, "steps": 1, "epsilon": 3.5, "delta": DELTA, "accountant": exact}
        sigma = calibrate_sigma(law="discrete-gaussian", **goal)  # type: ignore[arg-type]
        assert exact.price([(event(sigma=sigma, sensitivity=tenth / 10), 1)], DELTA) <= 3.5
        found.add("below" if sigma < 10 else "at" if sigma == 10 else "above")
    assert found == {"below", "at", "above"}
    goal = {"sensitivity": 2.0, "steps": 1, "epsilon": 20.0, "delta": DELTA}
    assert calibrate_sigma(law="discrete-gaussian", accountant=Accountant(name="pld"), **goal) == 10.0  # type: ignore[arg-type]
    # So small an ε that no order is small enough for zCDP: the noise is 10 only if 10 is enough.
    tiny = {"sensitivity": 1e-9, "steps": 1, "epsilon": 1e-9, "delta": 1e-5, "accountant": exact}
    assert calibrate_sigma(law="discrete-gaussian", **tiny) <= 10.0  # type: ignore[arg-type]


# --- the event ----------------------------------------------------------------------------------------------------


def test_the_event_says_which_noise_it_was_and_reads_back() -> None:
    charged = event(sigma=20.0, sensitivity=2.0, coordinates=7)
    fields = charged.as_dict()
    assert fields["kind"] == "discrete-gaussian" and fields["coordinates"] == 7
    assert parse_event(fields) == charged
    assert charged != GaussianEvent(**{k: v for k, v in fields.items() if k not in ("kind", "coordinates")})
    ratio = 2.0 / math.sqrt(396.0)
    assert charged.mu == pytest.approx(ratio)
    assert charged.rho == pytest.approx((2.0 / 20.0) ** 2 / 2)


def test_an_old_ledgers_event_is_a_gaussian_one() -> None:
    old = {"kind": "gaussian", "row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "relation": "add-remove"}
    old |= {"sigma": 20.0, "queries": 1, "step": 0, "noise": "operating-system"}
    read = parse_event(old)
    assert type(read) is GaussianEvent and read.mu == 0.1 and read.slack == 0.0


@pytest.mark.parametrize("coordinates", [-1, 1.5, None, True])
def test_a_malformed_discrete_event_is_refused(coordinates: object) -> None:
    from datalens.errors import TamperedError

    with pytest.raises(TamperedError, match="coordinates"):
        parse_event(event(sigma=20.0).as_dict() | {"coordinates": coordinates})
    without = {name: value for name, value in event(sigma=20.0).as_dict().items() if name != "coordinates"}
    with pytest.raises(TamperedError, match="fields"):
        parse_event(without)
