"""Rows of gradients as whole numbers: never longer than the bound, and exact sums in any order."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from datalens.bounded import whole_rows
from datalens.bounded.whole_rows import GRID, MOST_TOGETHER, WholeRows, WholeSum, _column_sums, _truncate

CPU = torch.device("cpu")
SIZE = 40_000  # several blocks of columns, and a part of one


def total_of(rows: WholeRows, gradients: Tensor, *, together: int = MOST_TOGETHER) -> Tensor:
    under_way = WholeSum(rows, gradients.shape[1], device=CPU)
    for part in gradients.split(together):
        under_way.add(part, torch.ones(len(part)))
    return total(under_way)


def total(under_way: WholeSum) -> Tensor:
    return under_way.bounded().private_total[0].to(torch.float64)


def gradients(count: int = 50, *, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZE, generator=random) * torch.logspace(-6, 6, count).unsqueeze(1)


def longest(rows: WholeRows, found: Tensor) -> float:
    return max(float(total_of(rows, row.unsqueeze(0)).norm()) for row in found)


SPIKE = torch.zeros(1, SIZE)
SPIKE[0, 7] = 1e18
EQUAL = torch.full((1, SIZE), 1.0)
# The squares of these, added up naively in float32, are far short: 1 and then many that are each lost beside it.
LOST = torch.full((1, SIZE), 2**-13)
LOST[0, 0] = 1.0


@pytest.mark.parametrize("found", [gradients(), SPIKE, -SPIKE, EQUAL, LOST, 1e15 * LOST])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_no_row_is_longer_than_the_grid(found: Tensor, kind: torch.dtype) -> None:
    rows = WholeRows(softening=1e-9)
    assert 0.9 * GRID < longest(rows, found.to(kind)) <= rows.l2_bound
    assert longest(rows, 1e-30 * found) <= rows.l2_bound


def test_a_twin_that_measures_naively_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(part: Tensor) -> Tensor:
        sums = np.cumsum(part.square().numpy(), axis=1, dtype=np.float32)  # one after the other
        return torch.from_numpy(sums[:, -1].astype(np.float64))

    wide = torch.full((1, 2**17), 1.7e-4)  # each of its squares is lost beside 1
    wide[0, 0] = 1.0
    assert longest(WholeRows(softening=1e-9), wide) <= GRID
    monkeypatch.setattr(whole_rows, "_squares", naive)
    monkeypatch.setattr(whole_rows, "COLUMNS", 2**17)
    assert longest(WholeRows(softening=1e-9), wide) > GRID


def test_the_constants_leave_room_for_what_rounding_does() -> None:
    """Sums of rows are whole numbers that float32 has, and no norm is measured shorter than the margin allows for."""
    assert MOST_TOGETHER * GRID <= 2**24
    too_short = whole_rows.TOGETHER * 2.0**-24 / 2  # of a norm: the squares lose twice that
    scaled = 3 * 2.0**-24  # the factor, its product with a number, and the root that was measured
    assert 2 * (too_short + scaled) < 1 - whole_rows.LESS


def test_few_squares_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many numbers a row has: the margin is for that many."""
    norm, added = torch.linalg.vector_norm, []

    def seen(numbers: Tensor, dim: int) -> Tensor:
        added.append(numbers.shape[dim])
        return norm(numbers, dim=dim)

    monkeypatch.setattr(torch.linalg, "vector_norm", seen)
    total_of(WholeRows(softening=0.01), gradients(2))
    assert len(added) == 2 * math.ceil(SIZE / whole_rows.COLUMNS) and max(added) <= whole_rows.TOGETHER


def test_a_row_whose_squares_are_lost_is_not_made_longer_than_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of numbers below 1e-19 are lost in float32, so such rows seem to have no length."""
    tiny = [torch.full((1, SIZE), value) for value in (1e-15, 1e-18, 1e-19, 3e-20, 1e-22, 1e-26, 1e-40)]
    least = whole_rows.LEAST_SOFTENING
    assert all(longest(WholeRows(softening=least), row) <= GRID for row in tiny)
    with pytest.raises(ValueError, match="softening must be at least 2\\^-40"):
        WholeRows(softening=least / 2)
    monkeypatch.setattr(whole_rows, "LEAST_SOFTENING", 0.0)  # the twin
    assert max(longest(WholeRows(softening=1e-25), row) for row in tiny) > 10 * GRID


def test_weights_and_gradients_that_do_not_fit_are_refused() -> None:
    under_way = WholeSum(WholeRows(softening=0.01), 4, device=CPU)
    for shape, weights in (((3, 4), (1,)), ((3, 4), (3, 1)), ((3, 3), (3,)), ((3, 8), (3,))):
        with pytest.raises(ValueError, match="do not fit"):
            under_way.add(torch.ones(shape), torch.ones(weights))
    assert not total(under_way).any()


def test_a_twin_that_rounds_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.ones(1, 10**6)  # a row of 524.2 in each
    assert longest(WholeRows(softening=1e-9), wide) <= GRID
    monkeypatch.setattr(whole_rows, "_truncate", Tensor.ceil_)
    assert longest(WholeRows(softening=1e-9), wide) > GRID


def test_sums_are_exact_in_any_order_and_in_any_chunks() -> None:
    rows, found = WholeRows(softening=0.01), gradients()
    whole = total_of(rows, found)
    assert torch.equal(whole, whole.trunc())
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1))
    for together in (1, 7, MOST_TOGETHER):
        assert torch.equal(total_of(rows, found[order], together=together), whole)


def test_a_record_moves_the_sum_by_its_own_row_and_by_nothing_else() -> None:
    rows, found = WholeRows(softening=0.01), gradients()
    without = total_of(rows, torch.cat([found[:20], found[21:]]))
    assert torch.equal(total_of(rows, found) - without, total_of(rows, found[20:21]))


def test_more_rows_than_float32_holds_exactly_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 32 rows"):
        total_of(WholeRows(softening=0.01), gradients(), together=MOST_TOGETHER + 1)
    # A twin that adds more of the longest rows than that is off by something.
    odd = torch.full((64, 1), float(GRID * whole_rows.LESS)).trunc()
    assert float(torch.cat([odd, torch.ones(1, 1)]).sum(dim=0)) != 64 * float(odd[0]) + 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_a_row_that_cannot_be_measured_adds_nothing(bad: float) -> None:
    rows, found = WholeRows(softening=0.01), gradients(4)
    broken = torch.cat([found, found[:1]])
    broken[-1, 5:] = bad
    assert torch.equal(total_of(rows, broken), total_of(rows, found))


def test_rows_that_fill_up_a_chunk_add_nothing() -> None:
    rows, found = WholeRows(softening=0.01), gradients(4)
    under_way = WholeSum(rows, SIZE, device=CPU)
    under_way.add(found, torch.tensor([1, 1, 0, 0]))
    assert torch.equal(total(under_way), total_of(rows, found[:2]))
    with pytest.raises(ValueError, match="a weight is 0 or 1"):
        under_way.add(found, torch.tensor([1.0, 2.0, 0.0, 0.0]))


def test_sums_of_several_threads_are_joined() -> None:
    rows, found = WholeRows(softening=0.01), gradients()
    one, other = (WholeSum(rows, SIZE, device=CPU) for _ in range(2))
    one.add(found[:30], torch.ones(30))
    other.add(found[30:], torch.ones(20))
    one.join(other)
    assert torch.equal(total(one), total_of(rows, found))
    with pytest.raises(ValueError, match="must agree"):
        one.join(WholeSum(WholeRows(softening=0.02), SIZE, device=CPU))


def test_short_gradients_count_for_less_and_long_ones_alike() -> None:
    rows = WholeRows(softening=1.0)
    direction = torch.zeros(1, SIZE)
    direction[0, 0] = 1.0
    for length, expected in ((1e-3, 1e-3 / 1.001), (1.0, 0.5), (1e6, 1.0)):
        assert float(total_of(rows, length * direction)[0]) / GRID == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for nothing in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softening must be at least"):
            WholeRows(softening=nothing)


def test_a_public_scale_weighs_coordinates_before_rows_are_measured() -> None:
    scale = torch.ones(SIZE)
    scale[: SIZE // 2] = 0.0
    rows = WholeRows(softening=1e-9, scale=scale)
    found = total_of(rows, EQUAL)
    assert float(found[: SIZE // 2].abs().max()) == 0.0
    assert 0.9 * GRID < float(found.norm()) <= GRID


def test_the_sum_for_the_gate() -> None:
    under_way = WholeSum(WholeRows(softening=0.01), SIZE, device=CPU)
    under_way.add(gradients(4), torch.ones(4))
    assert under_way.bounded().row_unit == "record"
    found = under_way.bounded(unit="person")
    assert (found.private_total.dtype, found.private_total.shape) == (torch.int64, (1, SIZE))
    assert (found.l2_bound, found.diameter, found.row_unit, found.queries) == (GRID, 2 * GRID, "person", 1)


def test_rows_on_a_gpu_are_truncated_there() -> None:
    """A stand-in for a tensor on a GPU: numpy cannot read such memory, so its own method is called."""
    numbers = torch.tensor([1.7, -1.7])
    _truncate(SimpleNamespace(is_cuda=True, trunc_=numbers.trunc_))  # type: ignore[arg-type]
    assert numbers.tolist() == [1.0, -1.0]


def test_many_rows_are_added_exactly_as_a_gpu_adds_them() -> None:
    """The broken twin: the same rows added in float32, whose whole numbers end at 2^24."""
    rows = (GRID - torch.arange(400.0)).unsqueeze(1)
    exact = sum(GRID - i for i in range(400))
    assert int(_column_sums(rows)) == exact
    assert int(rows.sum(dim=0)) != exact
    assert torch.equal(_column_sums(rows[:32]).double(), rows[:32].sum(dim=0, dtype=torch.float64))
