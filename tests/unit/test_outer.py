"""Sums of outer products: written out, bounded whatever comes in, and as far apart as they say."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from datalens.bounded.outer import MOST, Outer, on_grid, outer_diameter, sum_outer

SLOTS, BOUND = 3, 50


def whole(rows: int, width: int, *, seed: int, most: int = 9) -> Tensor:
    drawn = np.random.default_rng(seed).integers(-most, most + 1, (rows, width))
    return torch.from_numpy(drawn).to(torch.float64)


def chunk(rows: int = 20, *, seed: int = 1, a: int = 2, b: int = 4) -> Outer:
    slots = torch.from_numpy(np.random.default_rng(seed).integers(0, SLOTS, rows))
    return Outer(slots=slots, left=whole(rows, a, seed=seed + 1), right=whole(rows, b, seed=seed + 2))


def total(*chunks: Outer, left: int = BOUND, right: int = BOUND, slots: int = SLOTS) -> Tensor:
    return sum_outer(chunks, slots=slots, left_bound=left, right_bound=right).private_total


def one(left: list[float], right: list[float], slot: int = 0) -> Outer:
    as_row = {"dtype": torch.float64}
    return Outer(slots=torch.tensor([slot]), left=torch.tensor([left], **as_row), right=torch.tensor([right], **as_row))


def written_out(*chunks: Outer) -> Tensor:
    """Row by row, in whole numbers: one-hot(slot) ⊗ left ⊗ right."""
    rows = [
        np.multiply.outer(np.eye(SLOTS, dtype=np.int64)[slot], np.multiply.outer(left, right))
        for chunk in chunks
        for slot, left, right in zip(
            chunk.slots.numpy(),
            chunk.left.numpy().astype(np.int64),
            chunk.right.numpy().astype(np.int64),
            strict=True,
        )
    ]
    return torch.from_numpy(np.sum(rows, axis=0).reshape(SLOTS, -1))


# --- the sum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_the_sum_written_out(seed: int) -> None:
    chunks = chunk(20, seed=seed), chunk(1, seed=seed + 50), chunk(7, seed=seed + 100)
    found = sum_outer(chunks, slots=SLOTS, left_bound=BOUND, right_bound=BOUND + 1)
    assert found.private_total.dtype == torch.int64
    assert torch.equal(found.private_total, written_out(*chunks))
    assert found.private_total.any()
    assert (found.l2_bound, found.diameter) == (BOUND * (BOUND + 1), 2 * BOUND * (BOUND + 1))
    assert (found.row_unit, found.queries, found.units) == ("record", SLOTS, None)


def test_how_rows_are_chunked_does_not_matter() -> None:
    whole_chunk = chunk(60)
    parts = [
        Outer(slots=whole_chunk.slots[rows], left=whole_chunk.left[rows], right=whole_chunk.right[rows])
        for rows in torch.arange(60).split(17)
    ]
    assert torch.equal(total(whole_chunk), total(*parts))


def test_large_sums_are_exact() -> None:
    """Bounds of 2^20 and products of 2^40: one record more or less is seen in the last unit."""
    rows = 1000
    left = torch.full((rows, 1), float(2**20 - 1), dtype=torch.float64)
    many = Outer(slots=torch.zeros(rows, dtype=torch.int64), left=left, right=left.clone())
    single = one([1.0], [1.0])
    found = [total(part, left=2**20, right=2**20, slots=1) for part in (many, single)]
    assert int(found[0]) == rows * (2**20 - 1) ** 2
    assert int(total(many, single, left=2**20, right=2**20, slots=1)) == int(found[0]) + 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "bad",
    [
        [BOUND, 1.0],
        [BOUND + 1.0, 0.0],
        [1e300, 1e300],
        [0.5, 0.0],
        [math.nan, 0.0],
        [math.inf, 0.0],
        [-math.inf, 1.0],
    ],
)
def test_a_factor_that_does_not_fit_makes_its_row_zero_and_no_other(side: str, bad: list[float]) -> None:
    good = [3.0, -4.0]
    culprit = one(bad, good, slot=1) if side == "left" else one(good, bad, slot=1)
    assert not total(culprit).any()
    neighbour = one([1.0, 2.0], good, slot=1)
    together = Outer(
        slots=torch.cat([culprit.slots, neighbour.slots]),
        left=torch.cat([culprit.left, neighbour.left]),
        right=torch.cat([culprit.right, neighbour.right]),
    )
    assert torch.equal(total(together), total(neighbour))
    assert total(neighbour).any()


def test_a_factor_exactly_as_long_as_its_bound_is_kept() -> None:
    kept = one([30.0, 40.0], [-40.0, 30.0])
    assert math.sqrt(float(total(kept).to(torch.float64).square().sum())) == BOUND * BOUND
    assert not total(kept, left=BOUND - 1).any()
    assert not total(kept, right=BOUND - 1).any()


def test_a_sum_that_could_pass_what_float64_holds_is_refused() -> None:
    bound = 2**26
    rows = 2
    just = Outer(
        slots=torch.zeros(rows - 1, dtype=torch.int64),
        left=torch.zeros(rows - 1, 1, dtype=torch.float64),
        right=torch.zeros(rows - 1, 1, dtype=torch.float64),
    )
    assert (rows - 1) * bound * bound < MOST == rows * bound * bound
    sum_outer([just], slots=1, left_bound=bound, right_bound=bound)
    with pytest.raises(OverflowError, match="2 rows"):  # counted over all chunks
        sum_outer([just, just], slots=1, left_bound=bound, right_bound=bound)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_out_of_range_is_an_error(slot: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        total(one([1.0], [1.0]), one([1.0], [1.0], slot=slot))


def test_no_records_have_a_sum_and_nothing_has_none() -> None:
    none = Outer(slots=torch.zeros(0, dtype=torch.int64), left=torch.zeros(0, 2), right=torch.zeros(0, 4))
    assert total(none).tolist() == [[0] * 8] * SLOTS
    with pytest.raises(ValueError, match="nothing to sum"):
        total()


def test_private_values_do_not_show() -> None:
    assert "9" not in repr(one([9.0], [9.0]))
    shown = repr(sum_outer([one([7.0], [7.0])], slots=1, left_bound=8, right_bound=8))
    assert "49" not in shown


# --- the grid -------------------------------------------------------------------------------------

coordinates = st.one_of(
    st.floats(-1e6, 1e6, allow_nan=False, width=64),
    st.integers(-(10**6), 10**6).map(float),
    st.sampled_from([0.0, 1e-9, 1e-300, 1e150, 1e300, -1e300, 3.0, 4.0, 5.0]),
)


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(coordinates, min_size=1, max_size=12),
    clip=st.floats(1e-3, 1e6),
    grid=st.sampled_from([1, 5, 100, 2**14, 2**14 - 1, 2**20]),
)
@example(row=[3.0, 4.0], clip=5.0, grid=5)
@example(row=[1.0] * 12, clip=1.0, grid=2**20)
@example(row=[0.1, 0.2, 0.3], clip=0.3, grid=2**20)
def test_the_grid_lengthens_no_row(row: list[float], clip: float, grid: int) -> None:
    found = on_grid(torch.tensor([row], dtype=torch.float64), clip=clip, grid=grid)
    numbers = [int(value) for value in found[0].tolist()]
    assert [float(number) for number in numbers] == found[0].tolist()  # whole
    assert sum(number**2 for number in numbers) <= grid**2  # in integers: exactly
    # and coordinate by coordinate: towards zero, up to the rounding of float64
    for value, number in zip(row, numbers, strict=True):
        assert abs(number) <= abs(value) * grid / clip * (1 + 1e-12)
        assert number * value >= 0


def test_the_grid_clips_what_is_long_and_keeps_what_is_short() -> None:
    rows = torch.tensor([[30.0, 40.0], [3.0, -4.0], [1.5, 2.0], [0.0, 0.0]])
    assert on_grid(rows, clip=5.0, grid=1000).tolist() == [[600, 800], [600, -800], [300, 400], [0, 0]]
    assert on_grid(rows, clip=500.0, grid=1000).tolist() == [[60, 80], [6, -8], [3, 4], [0, 0]]
    assert on_grid(rows, clip=5.0, grid=1000).dtype == torch.float64


def test_the_grid_truncates_towards_zero() -> None:
    assert on_grid(torch.tensor([[0.99, -0.09]]), clip=1.0, grid=10).tolist() == [[9, 0]]


@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, math.nan], [1e200, 1e200], [1.7e308, 1.7e308]]
)
def test_rows_of_no_numbers_or_astronomic_ones_become_zero_and_no_other_does(bad: list[float]) -> None:
    rows = torch.tensor([bad, [3.0, 4.0]], dtype=torch.float64)
    assert on_grid(rows, clip=5.0, grid=5).tolist() == [[0, 0], [3, 4]]


def test_what_the_grid_makes_always_fits_the_sum() -> None:
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(2000, 40))) * 1000
    clipped = on_grid(rows, clip=1.0, grid=2**14)
    assert (clipped != 0).any(dim=1).all()
    for row in clipped[:50]:
        single = Outer(slots=torch.tensor([0]), left=row[None], right=row[None])
        assert torch.equal(
            total(single, left=2**14, right=2**14, slots=1)[0],
            torch.outer(row, row).flatten().to(torch.int64),
        )
    lengths = clipped.square().sum(dim=1).sqrt()
    assert float(lengths.max()) <= 2**14
    assert float(lengths.min()) > 2**14 - 40  # nothing is given away but what truncation takes


# --- the diameter ---------------------------------------------------------------------------------


def distance(u: Tensor, w: Tensor, *, slots: tuple[int, int]) -> float:
    def row(factor: Tensor, slot: int) -> Tensor:
        return total(Outer(slots=torch.tensor([slot]), left=factor[None], right=factor[None]))

    return float((row(u, slots[0]) - row(w, slots[1])).to(torch.float64).norm())


@pytest.mark.parametrize("slots", [(0, 0), (0, 2)])
def test_no_two_squares_are_further_apart_than_the_diameter(slots: tuple[int, int]) -> None:
    most = outer_diameter(float(BOUND**2))
    pairs = np.random.default_rng(5).normal(size=(300, 2, 2))
    pairs[:100, 1] = pairs[:100, 0][:, ::-1] * [1, -1]  # at right angles
    found = []
    for u, w in torch.from_numpy(pairs) * 1e6:
        u, w = (on_grid(factor[None], clip=1.0, grid=BOUND)[0] for factor in (u, w))
        found.append(distance(u, w, slots=slots))
    assert max(found) <= most
    assert max(found) > 0.96 * most  # of a coarse grid
    axes = torch.tensor([[float(BOUND), 0.0], [0.0, float(BOUND)]], dtype=torch.float64)
    assert distance(*axes, slots=slots) > 0.99 * most
    assert distance(*axes, slots=slots) <= most == pytest.approx(math.sqrt(2) * BOUND**2)


def test_opposite_rows_are_the_same_square() -> None:
    """Twice the bound, the general diameter, is never reached."""
    u = torch.tensor([30.0, 40.0], dtype=torch.float64)
    assert distance(u, -u, slots=(1, 1)) == 0
    assert distance(u, -u, slots=(1, 2)) == pytest.approx(math.sqrt(2) * BOUND**2)


def test_narrow_numbers_are_summed_as_wide_ones() -> None:
    """In float32 the sum would be off, and a row a little too long would pass."""
    rows = torch.full((3000, 1), float(2**14 - 1), dtype=torch.float32)
    slots = torch.zeros(3000, dtype=torch.int64)
    total = sum_outer(
        [Outer(slots=slots, left=rows, right=rows)], slots=1, left_bound=2**14, right_bound=2**14
    ).private_total
    assert total.tolist() == [[3000 * (2**14 - 1) ** 2]]
    long = torch.tensor([[2.0**14, 1.0]], dtype=torch.float32)
    one = torch.ones(1, 1, dtype=torch.float32)
    chunk = Outer(slots=slots[:1], left=one, right=long)
    assert sum_outer([chunk], slots=1, left_bound=1, right_bound=2**14).private_total.abs().sum() == 0


def test_bounds_whose_squares_are_not_exact_are_refused() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    chunk = Outer(slots=torch.zeros(1, dtype=torch.int64), left=one, right=one)
    with pytest.raises(OverflowError, match="squares"):
        sum_outer([chunk], slots=1, left_bound=1, right_bound=2**27)
