"""The bound is enforced row by row, whatever comes in: one property check, run on ours and on broken twins."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from datalens.bounded.contributions import (
    BoundedSum,
    Contributions,
    _for_the_wire,
    enforce,
    sum_bounded,
    sum_over_ranks,
)

Enforce = Callable[[Tensor, float], Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def norms(rows: Tensor) -> list[float]:
    """With exact integers or scaled floats: not the code under test's arithmetic, and no overflow."""
    if not rows.is_floating_point():
        return [math.sqrt(sum(int(value) ** 2 for value in row.flatten())) for row in rows]
    return [math.hypot(*row.flatten().to(torch.float64).tolist()) for row in rows]


def violations(candidate: Enforce, rows: Tensor, bound: float) -> set[str]:
    """What a candidate gets wrong on these rows: [] for one that keeps every promise."""
    found = set()
    result = candidate(rows.clone(), bound)
    if result.shape != rows.shape:
        return {"shape"}
    if result.is_floating_point() and not bool(result.isfinite().all()):
        return {"not finite"}
    if any(not norm <= bound * (1 + 1e-9) for norm in norms(result)):
        found.add("too long")
    for unit in range(len(rows)):
        # Judged alone: alone in the tensor, or next to a neighbour that has become something else.
        if not torch.equal(candidate(rows[unit : unit + 1].clone(), bound)[0], result[unit]):
            found.add("depends on others")
        changed = rows.clone()
        changed[unit] = 0
        others = torch.arange(len(rows)) != unit
        if not torch.equal(candidate(changed, bound)[others], result[others]):
            found.add("depends on others")
    return found


def no_enforcement(rows: Tensor, bound: float) -> Tensor:
    return rows.nan_to_num(0.0, 0.0, 0.0) if rows.is_floating_point() else rows


def global_clipping(rows: Tensor, bound: float) -> Tensor:
    """Broken twin: the longest row decides how much all rows are scaled."""
    flat = rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
    longest = flat.flatten(1).norm(dim=1).max()
    return flat * (bound / longest.clamp(min=bound))


def per_coordinate_clipping(rows: Tensor, bound: float) -> Tensor:
    """Broken twin: no coordinate is over the bound, but a row of many is."""
    return rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).clamp(-bound, bound)


def global_nan_skip(rows: Tensor, bound: float) -> Tensor:
    """Broken twin: one teacher's NaN silences all of them."""
    return enforce(rows if bool(rows.isfinite().all()) else torch.zeros_like(rows), bound)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
wild = st.one_of(
    st.floats(width=32),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1e30, -3e38]),
    st.floats(-2, 2, width=32),
)


@st.composite
def float_rows(draw: st.DrawFn) -> Tensor:
    shape = draw(sizes)
    values = draw(st.lists(wild, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(draw(st.sampled_from(FLOATS)))


@st.composite
def integer_rows(draw: st.DrawFn) -> Tensor:
    shape = draw(sizes)
    kind = draw(st.sampled_from([torch.int8, torch.uint8, torch.int16]))
    info = torch.iinfo(kind)
    value = st.one_of(st.integers(max(info.min, -2), 2), st.integers(info.min, info.max))
    values = draw(st.lists(value, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.int64).reshape(shape).to(kind)


@given(rows=float_rows(), bound=st.floats(1e-3, 1e6))
@settings(max_examples=150, deadline=None)
def test_any_floats_come_out_within_the_bound(rows: Tensor, bound: float) -> None:
    assert violations(enforce, rows, bound) == set()


@given(rows=integer_rows(), bound=st.floats(0, 300))
@settings(max_examples=100, deadline=None)
def test_any_small_integers_come_out_within_the_bound(rows: Tensor, bound: float) -> None:
    assert violations(enforce, rows, bound) == set()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (46341, torch.int32),
        (65536, torch.int32),
        (2**31 - 1, torch.int32),
        (2**32, torch.int64),
        (-(2**32) - 1, torch.int64),
        (2**62, torch.int64),
    ],
)
def test_huge_integers_come_out_within_the_bound(value: int, kind: torch.dtype) -> None:
    rows = torch.tensor([[[value, 0]], [[value, value]], [[1, 0]]], dtype=kind)
    assert violations(enforce, rows, 3.0) == set()


def test_integers_just_over_a_large_bound_are_refused() -> None:
    rows = torch.tensor([[[4096, 1]]], dtype=torch.int16)  # 2^24 + 1 against 2^24
    assert violations(enforce, rows, 4096.0) == set()


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        (no_enforcement, "too long"),
        (per_coordinate_clipping, "too long"),
        (global_clipping, "depends on others"),
        (global_nan_skip, "depends on others"),
    ],
)
def test_broken_twins_are_caught(twin: Enforce, what: str) -> None:
    rows = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]], [[math.nan, 1.0]], [[0.9, 0.9]]])
    assert what in violations(twin, rows, 1.0)
    assert violations(enforce, rows, 1.0) == set()


def test_the_table_in_the_docstring() -> None:
    votes = torch.tensor([[[1, 1, 0]], [[1, 1, 1]]], dtype=torch.int8)
    assert enforce(votes, math.sqrt(2)).tolist() == [[[1, 1, 0]], [[0, 0, 0]]]
    assert enforce(votes, math.sqrt(2)).dtype == torch.int8
    reals = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]], [[math.nan, 0.1]], [[math.inf, 0.1]]])
    scaled = enforce(reals, 1.0)
    assert scaled.dtype == torch.float64
    torch.testing.assert_close(scaled[0], torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    assert torch.equal(scaled[1], reals[1].double())
    assert scaled[2:].count_nonzero() == 0


@given(k=st.integers(1, 3000), images=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_full_row_of_votes_is_kept_although_its_bound_is_rounded(k: int, images: int) -> None:
    """√(k·m) is irrational mostly: a row of exactly k·m votes must not be zeroed, one more vote must be."""
    bound = math.sqrt(k * images)
    row = torch.ones(1, images, k + 1, dtype=torch.int8)
    row[:, :, -1] = 0
    assert torch.equal(enforce(row, bound), row)
    row[0, 0, -1] = 1
    assert enforce(row, bound).count_nonzero() == 0


def test_a_float_row_of_length_zero_and_a_bound_of_zero() -> None:
    assert enforce(torch.zeros(2, 1, 3), 1.0).count_nonzero() == 0
    assert enforce(torch.ones(2, 1, 3), 0.0).count_nonzero() == 0
    assert enforce(torch.ones(2, 1, 3, dtype=torch.int8), 0.0).count_nonzero() == 0


def test_a_zero_row_under_a_bound_of_zero_stays_zero() -> None:
    assert violations(enforce, torch.zeros(1, 1, 3), 0.0) == set()


# --- sums -----------------------------------------------------------------------------------------------------------


def chunk(rows: Tensor, **changes: Any) -> Contributions:
    fields: dict[str, Any] = {"l2_bound": 4.0, "diameter": 8.0, "row_unit": "teacher"}
    return Contributions(rows=rows, **(fields | changes))


def split(rows: Tensor, at: list[int]) -> list[Contributions]:
    return [chunk(part) for part in torch.tensor_split(rows, sorted(set(at))) if len(part)]


@given(seed=st.integers(0, 2**31), units=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_do_not_change_the_sum(seed: int, units: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    cuts = data.draw(st.lists(st.integers(0, units), max_size=5))
    rows = torch.randint(-2, 3, (units, 2, 5), generator=generator, dtype=torch.int8)
    kept = [row for row in rows.long() if int(row.square().sum()) <= 16]
    expected = torch.stack(kept).sum(0) if kept else torch.zeros(2, 5, dtype=torch.int64)
    total = sum_bounded(split(rows, cuts)).private_total
    assert torch.equal(total.long(), expected)
    assert total.dtype == torch.int32
    reals = torch.randn(units, 2, 5, generator=generator)
    one, many = sum_bounded([chunk(reals)]), sum_bounded(split(reals, cuts))
    assert one.private_total.dtype == torch.float64
    torch.testing.assert_close(one.private_total, many.private_total, rtol=1e-12, atol=1e-12)


def how_far_one_row_moves(candidate: Callable[[list[Contributions]], BoundedSum]) -> float:
    """Replace a teacher's row by its worst opposite, and measure the sum."""
    base = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for size in (1.0, 1e3, 1e30):
        totals = []
        for sign in (1.0, -1.0):
            rows = base.clone()
            rows[2] = sign * size
            totals.append(candidate([chunk(rows[:3]), chunk(rows[3:])]).private_total.double())
        worst = max(worst, float((totals[0] - totals[1]).norm()))
    return worst


def test_one_row_moves_the_sum_by_at_most_the_diameter() -> None:
    def without(chunks: list[Contributions]) -> BoundedSum:
        total = torch.stack([c.rows.double().sum(0) for c in chunks]).sum(0)
        return BoundedSum(private_total=total, l2_bound=4.0, diameter=8.0, row_unit="teacher", queries=2)

    assert how_far_one_row_moves(sum_bounded) == pytest.approx(8.0, rel=1e-9)
    assert how_far_one_row_moves(without) > 8.0


def test_the_facts_travel_with_the_sum() -> None:
    total = sum_bounded([chunk(torch.zeros(3, 7, 2, dtype=torch.int8), diameter=5.0, row_unit="record")])
    assert (total.l2_bound, total.diameter, total.row_unit, total.queries) == (4.0, 5.0, "record", 7)


@pytest.mark.parametrize("changes", [{"l2_bound": 5.0}, {"diameter": 7.0}, {"row_unit": "record"}])
def test_chunks_that_disagree_are_an_error(changes: dict[str, Any]) -> None:
    rows = torch.zeros(2, 1, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="agree"):
        sum_bounded([chunk(rows), chunk(rows, **changes)])


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 3, 1)])
def test_chunks_of_different_shapes_are_an_error(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="agree"):
        sum_bounded([chunk(torch.zeros(2, 3, 4, dtype=torch.int8)), chunk(torch.ones(shape, dtype=torch.int8))])


def test_nothing_to_sum_is_an_error() -> None:
    with pytest.raises(ValueError, match="no contributions"):
        sum_bounded([])


@pytest.mark.parametrize(("bound", "fits"), [(2**29, True), (2**30, False), (2**31, False), (1e300, False)])
def test_a_sum_that_could_overflow_is_refused(bound: float, fits: bool) -> None:
    rows = torch.full((2, 1, 1), 100, dtype=torch.int8)
    if fits:
        assert int(sum_bounded([chunk(rows, l2_bound=float(bound))]).private_total) == 200
        return
    with pytest.raises(OverflowError):
        sum_bounded([chunk(rows, l2_bound=float(bound))])
    with pytest.raises(OverflowError):  # over several chunks too
        sum_bounded([chunk(rows[:1], l2_bound=float(bound)), chunk(rows[1:], l2_bound=float(bound))])


def test_a_sum_of_many_int8_rows_does_not_wrap() -> None:
    rows = torch.ones(1000, 1, 2, dtype=torch.int8)
    assert sum_bounded([chunk(rows)] * 3).private_total.tolist() == [[3000, 3000]]


@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
def test_a_chunk_without_units_adds_nothing(kind: torch.dtype) -> None:
    empty, some = torch.zeros(0, 1, 2, dtype=kind), torch.ones(3, 1, 2, dtype=kind)
    assert np.array_equal(sum_bounded([chunk(empty), chunk(some)]).private_total.numpy(), [[3, 3]])


def test_the_private_total_is_not_in_the_repr() -> None:
    rows = torch.full((1, 1, 1), 3, dtype=torch.int8)
    assert "private_total=tensor" not in repr(sum_bounded([chunk(rows)]))


# --- units that have numbers ----------------------------------------------------------------------------------------


def numbered(rows: Tensor, units: Sequence[int], **changes: Any) -> Contributions:
    return chunk(rows, units=torch.tensor(units), **changes)


def test_each_unit_is_in_the_sum_once() -> None:
    rows = torch.ones(2, 1, 3, dtype=torch.int8)
    total = sum_bounded([numbered(rows, [4, 2]), numbered(rows, [3, 0])])
    assert total.units is not None
    assert total.units.tolist() == [0, 2, 3, 4]
    assert total.private_total.tolist() == [[4, 4, 4]]


@pytest.mark.parametrize("chunks", [[[0, 1], [1, 2]], [[0, 0]], [[0, 1], [2, 3], [0, 4]]])
def test_a_unit_in_twice_is_an_error(chunks: list[list[int]]) -> None:
    """Were it not, replacing one record could move the sum by twice the diameter."""
    rows = torch.ones(2, 1, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="twice"):
        sum_bounded([numbered(rows, units) for units in chunks])


def test_a_unit_in_twice_moves_the_sum_too_far() -> None:
    """The twin: as many rows as before, but one unit's in two chunks, and no numbers by which to notice."""
    up, down = torch.full((1, 1, 4), 2.0), torch.full((1, 1, 4), -2.0)
    totals = [sum_bounded([chunk(row), chunk(row)]).private_total for row in (up, down)]
    assert float((totals[0] - totals[1]).norm()) > 8.0
    with pytest.raises(ValueError, match="twice"):
        sum_bounded([numbered(up, [7]), numbered(up, [7])])


def test_rows_and_units_come_in_pairs() -> None:
    rows = torch.ones(2, 1, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="each must have exactly one"):
        sum_bounded([numbered(rows, [1, 2, 3])])
    with pytest.raises(ValueError, match="agree"):
        sum_bounded([numbered(rows, [0, 1]), chunk(rows)])


# --- sums over ranks ------------------------------------------------------------------------------------------------


class Rank:
    """One of several, of which the others' parts are known beforehand."""

    def __init__(self, parts: Sequence[BoundedSum], rank: int) -> None:
        self.parts, self.rank, self.added = parts, rank, 0

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
        assert len(data) == width
        sent = [_for_the_wire(part) for part in self.parts]
        assert sent[self.rank] == data
        return sent

    def add(self, tensor: Tensor) -> Tensor | None:
        self.added += 1
        return (
            torch.stack([part.private_total for part in self.parts]).sum(0).to(tensor.dtype) if not self.rank else None
        )


def part(first: int, end: int, *, kind: torch.dtype = torch.int8, **changes: Any) -> BoundedSum:
    rows = torch.ones(end - first, 1, changes.pop("d", 3), dtype=kind)
    return sum_bounded([numbered(rows, range(first, end), **changes)])


def added(*parts: BoundedSum, units: int) -> BoundedSum:
    """On rank 0; the others get nothing, and all of them check the same."""
    for rank in range(1, len(parts)):
        assert sum_over_ranks(parts[rank], Rank(parts, rank), units=units) is None
    total = sum_over_ranks(parts[0], Rank(parts, 0), units=units)
    assert total is not None
    return total


@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
def test_ranks_add_up_on_rank_0(kind: torch.dtype) -> None:
    total = added(part(2, 5, kind=kind), part(0, 2, kind=kind), part(5, 6, kind=kind), units=6)
    assert total.private_total.tolist() == [[6, 6, 6]]
    assert (total.l2_bound, total.diameter, total.row_unit, total.queries) == (4.0, 8.0, "teacher", 1)
    assert total.units is not None
    assert total.units.tolist() == [0, 1, 2, 3, 4, 5]


SPREADS: dict[str, tuple[list[BoundedSum], str]] = {
    "a unit on two ranks": ([part(0, 3), part(2, 6)], "teacher 2 is in the sum twice"),
    "a rank within another": ([part(0, 6), part(2, 3)], "teacher 2 is in the sum twice"),
    "the same on both": ([part(0, 6), part(0, 6)], "teacher 0 is in the sum twice"),
    "a unit on none": ([part(0, 3), part(4, 6)], "teacher 3 is in no rank's sum"),
    "not the first": ([part(1, 3), part(3, 6)], "teacher 0 is in no rank's sum"),
    "not the last": ([part(0, 3), part(3, 5)], "hold 5 units, not 6"),
    "one too many": ([part(0, 3), part(3, 7)], "hold 7 units, not 6"),
    "bounds": ([part(0, 3), part(3, 6, l2_bound=5.0)], "agree"),
    "diameters": ([part(0, 3), part(3, 6, diameter=7.0)], "agree"),
    "kinds of unit": ([part(0, 3), part(3, 6, row_unit="record")], "agree"),
    "shapes": ([part(0, 3), part(3, 6, d=4)], "agree"),
    "kinds of number": ([part(0, 3), part(3, 6, kind=torch.float32)], "agree"),
}


@pytest.mark.parametrize(("parts", "words"), SPREADS.values(), ids=SPREADS)
def test_ranks_that_do_not_fit_together(parts: list[BoundedSum], words: str) -> None:
    """Every rank refuses, and before anything is added."""
    for number, mine in enumerate(parts):
        rank = Rank(parts, number)
        with pytest.raises(ValueError, match=words):
            sum_over_ranks(mine, rank, units=6)
        assert rank.added == 0


def test_a_sum_over_ranks_that_could_overflow_is_refused() -> None:
    bound = float(2**29)
    parts = [part(0, 3, l2_bound=bound), part(3, 6, l2_bound=bound)]  # 3 · 2^29 fits on each
    with pytest.raises(OverflowError):
        added(*parts, units=6)
    reals = [part(0, 3, l2_bound=bound, kind=torch.float32), part(3, 6, l2_bound=bound, kind=torch.float32)]
    assert added(*reals, units=6).private_total.tolist() == [[6.0, 6.0, 6.0]]


@pytest.mark.parametrize("units", [None, [0, 2]])
def test_units_of_a_rank_must_be_consecutive(units: list[int] | None) -> None:
    rows = torch.ones(2, 1, 3, dtype=torch.int8)
    mine = sum_bounded([chunk(rows) if units is None else numbered(rows, units)])
    with pytest.raises(ValueError, match="consecutive"):
        sum_over_ranks(mine, Rank([mine], 0), units=2)
