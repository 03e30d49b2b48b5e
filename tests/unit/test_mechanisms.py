"""The gate, exactly: total plus σ times what the source drew, on every coordinate. (Its law: tests/statistical.)"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.events import NoiseOrigin
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.released import Released

BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")
INFINITE = Budget(epsilon=math.inf, delta=1e-5, relation="add-remove", accountant="exact")


class Scripted:
    """Returns the numbers it was given, each once."""

    origin: NoiseOrigin = "seeded"

    def __init__(self, *draws: float) -> None:
        self._draws = list(draws)

    def standard_normal(self, count: int) -> np.ndarray:
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return np.array(drawn, dtype=np.float64)


def votes(*rows: Any, bound: float = 3.0, dtype: torch.dtype = torch.int8, **changes: Any) -> BoundedSum:
    fields: dict[str, Any] = {"l2_bound": bound, "diameter": 2 * bound, "row_unit": "teacher"}
    return sum_bounded([Contributions(rows=torch.tensor(rows, dtype=dtype), **(fields | changes))])


def test_integers_stay_integers_and_rounding_comes_after_the_noise() -> None:
    total = votes([[1, -1, 0, 1]], [[1, 0, 0, 1]])
    noise = Scripted(0.12, -0.12, 1.0, -2.46)
    released = GaussianSum(sigma=10.0, noise=noise).release(total, Ledger.in_memory(INFINITE), step=4)
    assert released.value.dtype == np.int64
    np.testing.assert_array_equal(released.value, [[2 + 1, -1 - 1, 0 + 10, 2 - 25]])


def test_real_rows_stay_real() -> None:
    total = votes([[0.5, -0.25]], [[0.25, 0.0]], dtype=torch.float32)
    released = GaussianSum(sigma=2.0, noise=Scripted(1.5, -0.5)).release(total, Ledger.in_memory(INFINITE), step=0)
    assert released.value.dtype == np.float64
    np.testing.assert_array_equal(released.value, [[0.75 + 3.0, -0.25 - 1.0]])


def test_the_event_states_the_facts_of_the_sum() -> None:
    total = votes([[1, 0], [0, 1]], row_unit="person", bound=3.0, diameter=5.0)
    ledger = Ledger.in_memory(BUDGET)
    released = GaussianSum(sigma=100.0, noise=SecureNoise()).release(total, ledger, step=7)
    event = released.event
    assert (event.row_unit, event.l2_bound, event.diameter, event.relation) == ("person", 3.0, 5.0, "add-remove")
    assert (event.sigma, event.queries, event.step, event.noise) == (100.0, 2, 7, "operating-system")
    assert ledger.events == (event,)
    assert released.number == 0
    assert event.sensitivity == 3.0


def test_the_relation_is_the_ledgers_not_the_callers() -> None:
    ledger = Ledger.in_memory(Budget(epsilon=1.0, delta=1e-5, relation="replace-one", accountant="exact"))
    total = votes([[1, 0]], row_unit="record", bound=3.0)
    released = GaussianSum(sigma=100.0, noise=SeededNoise(0)).release(total, ledger, step=0)
    assert released.event.relation == "replace-one"
    assert released.event.sensitivity == 6.0


def test_seeded_noise_is_written_into_the_event() -> None:
    ledger = Ledger.in_memory(BUDGET)
    assert GaussianSum(sigma=100.0, noise=SeededNoise(0)).release(votes([[1]]), ledger, step=0).event.noise == "seeded"
    secure = GaussianSum(sigma=100.0, noise=SecureNoise()).release(votes([[1]]), ledger, step=1)
    assert secure.event.noise == "operating-system"


def test_without_noise_only_an_infinite_budget_pays() -> None:
    exact = GaussianSum(sigma=0.0, noise=SecureNoise())
    with pytest.raises(BudgetExceeded):
        exact.release(votes([[1, -1]]), Ledger.in_memory(BUDGET), step=0)
    released = exact.release(votes([[1, -1]]), Ledger.in_memory(INFINITE), step=0)
    np.testing.assert_array_equal(released.value, [[1, -1]])


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
def test_a_sigma_that_is_no_sigma_is_refused(sigma: float) -> None:
    with pytest.raises(DatalensError, match="sigma"):
        GaussianSum(sigma=sigma, noise=SecureNoise())


def test_each_release_draws_anew() -> None:
    ledger = Ledger.in_memory(INFINITE)
    mechanism = GaussianSum(sigma=1e6, noise=SecureNoise())
    first, second = (mechanism.release(votes([[0] * 8]), ledger, step=0).value for _ in range(2))
    assert not np.array_equal(first, second)
    assert len(np.unique(first)) > 4


def test_a_source_that_draws_too_few_releases_and_costs_nothing() -> None:
    ledger = Ledger.in_memory(BUDGET)
    with pytest.raises(ValueError, match="reshape"):
        GaussianSum(sigma=100.0, noise=Scripted(1.0)).release(votes([[1, 1, 1]]), ledger, step=0)
    assert not ledger.events


def test_released_is_frozen_and_names_its_charge() -> None:
    ledger = Ledger.in_memory(BUDGET)
    mechanism = GaussianSum(sigma=100.0, noise=SecureNoise())
    numbers = [mechanism.release(votes([[1]]), ledger, step=step).number for step in range(3)]
    assert numbers == [0, 1, 2]
    with pytest.raises(AttributeError):
        mechanism.release(votes([[1]]), ledger, step=3).value = np.zeros(1)  # type: ignore[misc]


def test_seeds_repeat_and_the_operating_system_does_not() -> None:
    np.testing.assert_array_equal(SeededNoise(3).standard_normal(9), SeededNoise(3).standard_normal(9))
    assert not np.array_equal(SeededNoise(3).standard_normal(9), SeededNoise(4).standard_normal(9))
    assert not np.array_equal(SecureNoise().standard_normal(9), SecureNoise().standard_normal(9))
    seeded = SeededNoise(3)
    assert not np.array_equal(seeded.standard_normal(9), seeded.standard_normal(9))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_as_many_draws_as_asked(count: int) -> None:
    for source in (SecureNoise(), SeededNoise(0)):
        draws = source.standard_normal(count)
        assert draws.shape == (count,)
        assert draws.dtype == np.float64
        assert np.isfinite(draws).all()


def test_extreme_entropy_gives_finite_noise() -> None:
    """All zero bits and all one bits: the ends of (0, 1] must not become infinite or NaN."""
    from datalens.privacy.noise import _box_muller

    for word in (b"\x00", b"\xff"):
        draws = _box_muller(word * 32, 4)
        assert np.isfinite(draws).all()
        assert np.abs(draws).max() <= 9.5


def leaks_through_noise(sigma: float, *, releases: int = 40) -> bool:
    """Whether the low bit of integer releases tells two totals apart that differ by one vote in each coordinate."""

    def odd(vote: int) -> float:
        ledger = Ledger.in_memory(INFINITE)
        mechanism = GaussianSum(sigma=sigma, noise=SecureNoise())
        values = [mechanism.release(votes([[vote] * 50], bound=8.0), ledger, step=0).value for _ in range(releases)]
        return float(np.mean(np.stack(values) % 2))

    return abs(odd(1) - odd(0)) > 0.15  # fair coins, 2000 of each: 0.15 is ten standard deviations


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    "sigma",
    [
        5000.0,
        1e9,
        1e17,
        1e25,
    ],
)
def test_large_noise_hides_the_low_bit(sigma: float) -> None:
    """Either the gate hides a vote, or it refuses the sigma; it must never release it in the clear."""
    try:
        assert not leaks_through_noise(sigma)
    except DatalensError:
        assert sigma > 1e12  # refusing such noise is fine too, but not noise that people use


def test_the_leak_check_catches_no_noise_at_all() -> None:
    assert leaks_through_noise(0.0)


def test_released_takes_keywords_only() -> None:
    """Positional arguments that shift are how a seed once became a privacy flag elsewhere."""
    with pytest.raises(TypeError):
        Released(np.zeros(1), None, 0)  # type: ignore[misc, arg-type]
