"""From a released sum to a direction: ±βN with the configured N, and nothing but released values."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.released import Released
from datalens.public.basis import make_basis
from datalens.released.decode import Decode, DecodeName, agreement

INFINITE = Budget(epsilon=float("inf"), delta=1e-5, relation="add-remove", accountant="exact")


def votes(values: Any) -> BoundedSum:
    rows = torch.tensor([values])
    return sum_bounded([Contributions(rows=rows, l2_bound=1e5, diameter=2e5, row_unit="teacher")])


def released(values: Any) -> Released:
    """These very values, through the gate without noise."""
    return GaussianSum(sigma=0.0, noise=SecureNoise()).release(votes(values), Ledger.in_memory(INFINITE), step=0)


def decode(values: Any, *, rule: DecodeName, beta: float = 0.7, teachers: int = 4000) -> list[Any]:
    width = len(values[0])
    rule_of = Decode(rule=rule, beta=beta, teachers=teachers, basis=make_basis("pixel", (1, 1, width), None))
    return rule_of(released(values)).value.flatten(1).tolist()


def test_the_threshold_is_at_beta_n_on_both_sides_and_equality_counts() -> None:
    values = [[2799, 2800, 2801, -2799, -2800, -2801, 0]]
    assert decode(values, rule="threshold") == [[0, 1, 1, 0, -1, -1, 0]]


@given(percent=st.integers(1, 100), hundreds=st.integers(1, 80))
@settings(max_examples=60, deadline=None)
def test_equality_counts_whatever_the_rounding_of_beta_n(percent: int, hundreds: int) -> None:
    """0.55·100 is 55.00000000000001 in floats; a sum of 55 has reached it nevertheless."""
    at = percent * hundreds
    values = [[at - 1, at, at + 1]]
    assert decode(values, rule="threshold", beta=percent / 100, teachers=100 * hundreds) == [[0, 1, 1]]


def test_a_sum_of_zero_points_nowhere() -> None:
    for rule in ("threshold", "sign", "linear"):
        assert decode([[0, 5, -5]], rule=rule, beta=0.0, teachers=5) == [[0, 1, -1]]


def test_the_sign_and_the_mean() -> None:
    values = [[3, -40, 0], [-1, 1, 4000]]
    assert decode(values, rule="sign") == [[1, -1, 0], [-1, 1, 1]]
    np.testing.assert_allclose(
        decode(values, rule="linear"), [[3 / 4000, -0.01, 0], [-1 / 4000, 1 / 4000, 1]], rtol=1e-6
    )


def test_real_sums_are_decoded_too() -> None:
    assert decode([[0.5, -2.5, 1.0]], rule="threshold", beta=1.0, teachers=1) == [[0, -1, 1]]


def test_directions_leave_the_basis() -> None:
    basis = make_basis("dct", (1, 4, 4), 3)
    rule = Decode(rule="linear", beta=0.0, teachers=2, basis=basis)
    direction = rule(released([[2, 0, 0], [0, 4, 0]])).value
    assert direction.shape == (2, 1, 4, 4)
    torch.testing.assert_close(direction[0], torch.full((1, 4, 4), 0.25))
    torch.testing.assert_close(basis.forward(direction), torch.tensor([[1.0, 0, 0], [0, 2, 0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stranger", [np.ones((1, 3)), torch.ones(1, 3), None, votes([[1, 1, 1]])], ids=type)
def test_only_a_released_value_is_decoded(stranger: Any) -> None:
    rule = Decode(rule="sign", beta=0.0, teachers=1, basis=make_basis("pixel", (1, 1, 3), None))
    with pytest.raises(TypeError, match="released"):
        rule(stranger)


def test_something_that_looks_like_a_release_is_not_one() -> None:
    class Lookalike:
        value = np.ones((1, 3))

    rule = Decode(rule="sign", beta=0.0, teachers=1, basis=make_basis("pixel", (1, 1, 3), None))
    with pytest.raises(TypeError):
        rule(Lookalike())  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "expected"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_agreement_is_the_part_of_the_longest_sum_that_is_left(share: float, expected: float) -> None:
    """N teachers with ±1 on all of 400 cells, a share of them alike and the others cancelling out, and noise on it."""
    teachers, cells, sigma = 1000, 400, 50.0
    rows = torch.ones(teachers, 1, cells, dtype=torch.int8)
    against = round(teachers * (1 - share) / 2)
    rows[:against] = -1
    longest = math.sqrt(cells)
    total = sum_bounded([Contributions(rows=rows, l2_bound=longest, diameter=2 * longest, row_unit="teacher")])
    noisy = GaussianSum(sigma=sigma, noise=SecureNoise()).release(total, Ledger.in_memory(INFINITE), step=0)
    found, chance = agreement(noisy, teachers=teachers, longest=longest)
    assert found == pytest.approx(expected, abs=chance)
    assert 0 < chance < 0.04
    naive = math.sqrt(float((noisy.value.astype(float) ** 2).sum())) / (teachers * longest)
    assert share > 0 or naive > 1.5 * found  # noise not taken off would pass for agreement


@pytest.mark.parametrize("sigma", [0.0, 20.0])
def test_votes_with_nothing_in_common_agree_as_by_chance(sigma: float) -> None:
    """Also without noise: the sum of N independent votes has a norm of √N votes, not of 0."""
    teachers, cells = 400, 10_000
    longest = math.sqrt(cells)
    noise = SeededNoise(1) if sigma else SecureNoise()
    ledger = Ledger.in_memory(INFINITE)

    def found(rows: torch.Tensor, step: int) -> tuple[float, float]:
        made = Contributions(rows=rows, l2_bound=longest, diameter=2 * longest, row_unit="teacher")
        noisy = GaussianSum(sigma=sigma, noise=noise).release(sum_bounded([made]), ledger, step=step)
        return agreement(noisy, teachers=teachers, longest=longest)

    rows = torch.randint(2, (teachers, 1, cells), generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    by_votes, chance = found(rows.to(torch.int8), 0)
    assert 0.9 * chance < by_votes < 1.03 * chance
    assert chance == pytest.approx(0.05, rel=0.02)
    rows[:, :, :1000] = 1  # in a tenth of the cells all agree
    assert found(rows.to(torch.int8), 1)[0] > 5 * chance
