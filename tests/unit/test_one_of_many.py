"""One of many, chosen in secret: its price against numerical integration, and its gate."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from datalens.bounded.clip import clip_images
from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.errors import BudgetExceeded, TamperedError
from datalens.privacy.accountant import Accountant
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.curves import _gaps, exact_epsilon, one_of_many_delta, one_of_many_rdp, subsampled_rdp
from datalens.privacy.events import OneOfManyEvent, SubsampledGaussianEvent, parse_event
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.one_of_many import charge_block

X = np.linspace(-14, 14, 40_001)
STEP = X[1] - X[0]


def event(**changes: Any) -> OneOfManyEvent:
    facts: dict[str, Any] = {"row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "teachers": 5, "sigma": 2.0}
    facts |= {"relation": "add-remove", "repeats": 3, "queries": 4, "step": 0, "noise": "operating-system"}
    return OneOfManyEvent(**facts | changes)


def ledger(epsilon: float = math.inf) -> Ledger:
    return Ledger.in_memory(Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant="rdp-improved"))


def mixture(centres: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (weights[:, None] * norm.pdf(X - centres[:, None])).sum(axis=0)


def worlds(mu: float, rate: float, luck: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Densities of a release before and after one unit's row was replaced; the others' rows are anything, too."""
    others = luck.uniform(-mu / 2, mu / 2, 3) if luck.random() < 0.5 else luck.choice([-mu / 2, mu / 2], 3)
    shared = luck.dirichlet(np.ones(3)) * (1 - rate)
    before, after = luck.choice([-mu / 2, mu / 2, *others], 2)
    weights = np.append(shared, rate)
    return mixture(np.append(others, before), weights), mixture(np.append(others, after), weights)


def divergence(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * STEP)


def curve(mu: float, rate: float, epsilon: float) -> float:
    """The priced curve on both sides of 0."""
    upper = float(one_of_many_delta(mu, rate, np.array([abs(epsilon)]))[0])
    return upper if epsilon >= 0 else 1 - math.exp(epsilon) + math.exp(epsilon) * upper


@pytest.mark.parametrize(("mu", "rate"), [(1.0, 0.5), (2.5, 0.1), (0.4, 0.02), (5.0, 0.3)])
def test_no_replaced_unit_shows_more_than_the_curve(mu: float, rate: float) -> None:
    luck = np.random.default_rng(0)
    for _ in range(25):
        p, q = worlds(mu, rate, luck)
        for epsilon in (-1.5, -0.3, -0.02, 0.0, 0.02, 0.3, 1.5):
            assert divergence(p, q, epsilon) <= curve(mu, rate, epsilon) + 1e-7


@pytest.mark.parametrize("epsilon", [-0.5, -0.05, 0.0, 0.05, 0.5])
def test_the_curve_is_reached(epsilon: float) -> None:
    """By a unit that leaves the crowd, or (below 0) comes to stand with it: it cannot be lowered."""
    mu, rate = 1.5, 0.2
    alone = mixture(np.array([0.0, mu]), np.array([1 - rate, rate]))
    crowd = mixture(np.array([0.0]), np.array([1.0]))
    pair = (alone, crowd) if epsilon >= 0 else (crowd, alone)
    assert divergence(*pair, epsilon) == pytest.approx(curve(mu, rate, epsilon), abs=1e-8)


def test_the_pair_of_poisson_sampling_does_not_cover_it() -> None:
    """Neither of its two orders is above all that a replaced row can show; so it costs more here, never less."""
    mu, rate = 1.5, 0.2
    alone = mixture(np.array([0.0, mu]), np.array([1 - rate, rate]))
    crowd = mixture(np.array([0.0]), np.array([1.0]))
    assert divergence(alone, crowd, -0.1) < divergence(crowd, alone, -0.1) - 1e-3  # a unit that vanishes: not below 0
    assert divergence(crowd, alone, 0.1) < divergence(alone, crowd, 0.1) - 1e-3  # a unit that appears: not above
    facts: dict[str, Any] = {"relation": "add-remove", "queries": 1, "step": 0, "noise": "operating-system"}
    poisson = SubsampledGaussianEvent(row_unit="record", l2_bound=mu, rate=rate, sigma=1.0, **facts)
    ours = event(l2_bound=mu / 2, diameter=mu, sigma=1.0, teachers=5, repeats=20)
    for name in ("rdp", "rdp-improved", "pld"):
        accountant = Accountant(name=name)  # type: ignore[arg-type]
        assert accountant.price([(ours, 1)], 1e-5) > accountant.price([(poisson, 20)], 1e-5)


@pytest.mark.parametrize(("mu", "rate"), [(1.0, 0.5), (2.0, 0.1), (0.4, 0.02)])
@pytest.mark.parametrize("order", [2, 5, 12])
def test_no_replaced_unit_has_a_larger_renyi_divergence(mu: float, rate: float, order: int) -> None:
    luck = np.random.default_rng(1)
    priced = one_of_many_rdp(mu, rate, float(order))
    for _ in range(15):
        p, q = worlds(mu, rate, luck)
        found = math.log(np.exp(order * np.log(p) + (1 - order) * np.log(q)).sum() * STEP) / (order - 1)
        assert found <= priced + 1e-9
    assert subsampled_rdp(mu, rate, order) <= priced


@pytest.mark.parametrize(("mu", "rate", "order"), [(1.0, 0.5, 2), (2.0, 0.1, 5), (0.4, 0.02, 12), (0.4, 0.3, 3)])
def test_what_is_added_to_the_poisson_price_is_the_integral(mu: float, rate: float, order: int) -> None:
    """λ(λ−1)·∫ e^(−λε)·(R(ε) − A(ε)) dε, both curves by numerical integration: never below it, and little above."""
    alone = mixture(np.array([0.0, mu]), np.array([1 - rate, rate]))
    crowd = mixture(np.array([0.0]), np.array([1.0]))
    grid = np.linspace(0, 12 / order, 2001)
    both = [divergence(alone, crowd, e) - divergence(crowd, alone, e) for e in grid]
    integral = order * (order - 1) * np.trapezoid(np.exp(-order * grid) * both, grid)
    plain = math.exp((order - 1) * subsampled_rdp(mu, rate, order))
    added = math.exp((order - 1) * one_of_many_rdp(mu, rate, float(order))) - plain
    assert 0.999 * integral < added < 1.05 * integral


@pytest.mark.parametrize(("mu", "rate"), [(1.0, 0.5), (2.0, 0.1), (0.4, 0.02)])
def test_no_cell_of_the_integral_is_below_its_curve(mu: float, rate: float) -> None:
    ends, gaps = _gaps(mu, rate)
    assert ends[0] == 0.0 and np.all(np.diff(ends) > 0) and len(ends) == len(gaps)
    alone = mixture(np.array([0.0, mu]), np.array([1 - rate, rate]))
    crowd = mixture(np.array([0.0]), np.array([1.0]))
    for cell in range(0, len(ends) - 1, 7):
        for epsilon in np.linspace(ends[cell], ends[cell + 1], 3):
            found = divergence(alone, crowd, epsilon) - divergence(crowd, alone, epsilon)
            assert found <= gaps[cell] + 1e-7


@pytest.mark.parametrize(("mu", "rate", "order"), [(1.0, 0.1, 2), (0.5, 0.01, 8), (1.0, 0.001, 20)])
def test_it_is_cheaper_than_the_bound_of_wang_balle_and_kasiviswanathan(mu: float, rate: float, order: int) -> None:
    """Theorem 9 of "Subsampled Rényi Differential Privacy" (2019), which is proved for any mechanism."""
    rdp = [0.0, 0.0, *(j * mu**2 / 2 for j in range(2, order + 1))]
    total = 1 + rate**2 * math.comb(order, 2) * min(4 * math.expm1(rdp[2]), 2 * math.exp(rdp[2]))
    total += sum(2 * rate**j * math.comb(order, j) * math.exp((j - 1) * rdp[j]) for j in range(3, order + 1))
    assert one_of_many_rdp(mu, rate, float(order)) <= math.log(total) / (order - 1)


def test_what_costs_nothing_and_what_costs_everything() -> None:
    assert one_of_many_rdp(0.0, 0.2, 3.0) == 0.0
    assert one_of_many_rdp(math.inf, 0.2, 3.0) == one_of_many_rdp(1.0, 0.2, 1.1) == math.inf


def test_one_of_one_is_a_gaussian() -> None:
    assert one_of_many_rdp(0.7, 1.0, 3.0) == pytest.approx(3 * 0.49 / 2)
    price = Accountant(name="pld").price([(event(teachers=1, repeats=4), 1)], 1e-5)
    assert price == pytest.approx(exact_epsilon(4.0, 1e-5), rel=1e-2)
    assert price >= exact_epsilon(4.0, 1e-5)


@pytest.mark.parametrize(("sigma", "teachers", "times"), [(2.0, 10, 100), (2.0, 1000, 20_000), (6.0, 3, 50)])
def test_pld_is_under_rdp_and_a_block_is_its_releases(sigma: float, teachers: int, times: int) -> None:
    one, many = event(sigma=sigma, teachers=teachers, repeats=1), event(sigma=sigma, teachers=teachers, repeats=times)
    for name in ("rdp", "rdp-improved", "pld"):
        accountant = Accountant(name=name)  # type: ignore[arg-type]
        assert accountant.price([(many, 1)], 1e-5) == accountant.price([(one, times)], 1e-5)
    by = {name: Accountant(name=name).price([(many, 1)], 1e-5) for name in ("rdp-improved", "pld")}  # type: ignore[arg-type]
    assert 0.6 * by["rdp-improved"] < by["pld"] < by["rdp-improved"]


@pytest.mark.parametrize("name", ["rdp", "rdp-improved", "pld"])
def test_two_cost_more_than_one_and_less_than_twice_as_much(name: Any) -> None:
    one, two, three = (Accountant(name=name).price([(event(teachers=20, repeats=n), 1)], 1e-5) for n in (1, 2, 3))
    assert one < 0.999 * two < 0.998 * three < 3 * one


def test_the_published_setting_costs_347_not_10() -> None:
    """1000 discriminators, σ = 1.07, batch 32, 20,000 steps: noise σ·2C on rows that lie up to 2C·√32 apart."""
    published = event(l2_bound=math.sqrt(32), diameter=2 * math.sqrt(32), sigma=2 * 1.07, teachers=1000, repeats=20_000)
    assert Accountant(name="pld").price([(published, 1)], 1e-5) == pytest.approx(346.7, abs=0.5)
    assert Accountant(name="rdp-improved").price([(published, 1)], 1e-5) > 346


def test_without_noise_it_costs_everything_and_nothing_costs_nothing() -> None:
    for name in ("rdp", "rdp-improved", "pld"):
        accountant = Accountant(name=name)  # type: ignore[arg-type]
        assert accountant.price([(event(sigma=0.0), 1)], 1e-5) == math.inf
        assert accountant.price([(event(l2_bound=0.0, diameter=0.0), 1)], 1e-5) == 0
    assert not one_of_many_delta(0.0, 0.1, np.array([0.0, 1.0])).any()
    with pytest.raises(Exception, match="plain Gaussian events only"):
        Accountant(name="exact").price([(event(), 1)], 1e-5)


@pytest.mark.parametrize("name", ["rdp-improved", "pld"])
def test_calibrated_noise_just_fits(name: Any) -> None:
    goal: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "accountant": Accountant(name=name)}
    sigma = calibrate_event(lambda sigma: event(sigma=sigma), times=7, **goal)
    assert goal["accountant"].price([(event(sigma=sigma), 7)], 1e-5) <= 2
    assert goal["accountant"].price([(event(sigma=0.999 * sigma), 7)], 1e-5) > 2


def test_calibration_knows_its_ends() -> None:
    goal: dict[str, Any] = {"times": 1, "delta": 1e-5, "accountant": Accountant(name="rdp")}
    assert calibrate_event(lambda sigma: event(sigma=sigma), epsilon=math.inf, **goal) == 0
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        calibrate_event(lambda sigma: event(sigma=sigma), epsilon=1e-3, **goal)


@pytest.mark.parametrize(
    "changes", [{"teachers": 0}, {"row_unit": "record"}, {"diameter": 3.0}, {"diameter": 0.5}, {"repeats": -1}]
)
def test_an_event_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(TamperedError):
        event(**changes)


def test_an_event_is_read_back() -> None:
    assert parse_event(event().as_dict()) == event()


# --- the gate -------------------------------------------------------------------------------------


def row(teacher: int, value: float = 0.5) -> BoundedSum:
    return clip_images(torch.full((4, 9), value), clip=0.4, teacher=teacher)


def test_charged_before_anybody_is_asked() -> None:
    book = ledger()
    block = charge_block(book, event(), SecureNoise())
    assert book.events == (event(),)
    asked: list[int] = []
    for _ in range(3):
        released = block.release(lambda teacher: (asked.append(teacher), row(teacher))[1])
        assert released.value.shape == (4, 9)
        assert released.event == event()
    assert len(book.events) == 1
    assert set(asked) <= set(range(5))
    with pytest.raises(ValueError, match="used up"):
        block.release(row)


def test_a_block_that_does_not_fit_is_not_begun() -> None:
    book = ledger(epsilon=0.5)
    with pytest.raises(BudgetExceeded):
        charge_block(book, event(), SecureNoise())
    assert book.events == ()


@pytest.mark.parametrize("wrong", [{"noise": "seeded"}, {"relation": "replace-one"}])
def test_a_block_says_where_its_noise_comes_from(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="name the origin of its noise"):
        charge_block(ledger(), event(**wrong), SecureNoise())


def test_rows_that_were_not_paid_for_are_refused() -> None:
    def long(teacher: int) -> BoundedSum:
        return clip_images(torch.ones(4, 9), clip=0.6, teacher=teacher)

    def somebody_else(teacher: int) -> BoundedSum:
        return row((teacher + 1) % 5)

    def fewer(teacher: int) -> BoundedSum:
        return clip_images(torch.ones(3, 9), clip=0.5, teacher=teacher)

    def nobody(teacher: int) -> BoundedSum:
        return sum_bounded([Contributions(rows=torch.ones(1, 4, 9), l2_bound=1.0, diameter=2.0, row_unit="teacher")])

    block = charge_block(ledger(), event(l2_bound=1.0 + 1e-8, diameter=2.0, repeats=9), SecureNoise())
    for ask in (long, somebody_else, fewer, nobody):
        with pytest.raises(ValueError, match="not that of the chosen teacher"):
            block.release(ask)
    block.release(row)


def test_a_row_exactly_as_long_as_was_paid_for_is_released() -> None:
    paid = event(l2_bound=row(0).l2_bound, diameter=row(0).diameter, repeats=9)
    assert charge_block(ledger(), paid, SecureNoise()).release(row).event == paid


def test_everybody_is_chosen_as_often_and_noise_is_as_wide_as_was_paid_for() -> None:
    times, asked, values = 3000, [], []
    block = charge_block(ledger(), event(repeats=times, sigma=3.0), SecureNoise())
    for _ in range(times):
        values.append(block.release(lambda teacher: (asked.append(teacher), row(teacher, 0.0))[1]).value)
    counts = np.bincount(asked, minlength=5)
    assert ((counts - times / 5) ** 2 / (times / 5)).sum() < 25  # χ² with 4 degrees of freedom: one in 20,000
    spread = np.stack(values).std()
    assert 0.98 * 3.0 < spread < 1.02 * 3.0


def test_seeded_choices_are_known() -> None:
    assert [SeededNoise(3).below(1000)] * 2 == [SeededNoise(3).below(1000) for _ in range(2)]
    assert SeededNoise(3).origin == "seeded"


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [torch.randn(6, 3, 2), torch.full((6, 3, 2), math.inf), torch.full((6, 6), 1e30)])
def test_no_image_counts_for_more_than_the_clip(values: torch.Tensor) -> None:
    total = clip_images(values, clip=0.3, teacher=2)
    assert (total.l2_bound, total.diameter) == (pytest.approx(0.3 * math.sqrt(6)), pytest.approx(0.6 * math.sqrt(6)))
    norms = total.private_total.norm(dim=1)
    assert float(norms.max()) <= 0.3 * (1 + 1e-9)
    assert total.l2_bound == 0.3 * math.sqrt(6) * (1 + 1e-9)  # as is paid for, with room for rounding


def test_images_as_long_as_the_clip_are_not_shortened() -> None:
    images = torch.tensor([[3.0, 4.0]]).repeat(16, 1)
    total = clip_images(images, clip=5.0, teacher=0)
    assert torch.equal(total.private_total, images.to(total.private_total)) and total.l2_bound > 5.0 * 4
