"""Sums of parts: each part is in the whole sum once, and what comes from elsewhere is checked before it is charged."""

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.outer import Outer, sum_outer
from datalens.bounded.parts import PartSum, join, join_over_ranks, whole
from datalens.public.threads import AHEAD, mapped, one_core_each, side_by_side

GRID = 100


def total(rows: list[list[int]], *, grid: int = GRID) -> BoundedSum:
    right = torch.tensor(rows, dtype=torch.float64).view(len(rows), 3)
    left, slots = torch.ones(len(rows), 1, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.int64)
    return sum_outer([Outer(slots=slots, left=left, right=right)], slots=1, left_bound=1, right_bound=grid)


def part(number: int, *rows: list[int]) -> PartSum:
    return PartSum(total=total(list(rows)), parts=(number,), records=len(rows))


ONE, TWO, THREE = part(0, [1, 2, 3], [4, 5, 6]), part(1, [7, 8, 9]), part(2)
EMPTY = total([])


def test_parts_add_up_in_any_order_and_grouping() -> None:
    flat = whole(join([ONE, TWO, THREE]), like=EMPTY, parts=3, records=3)
    nested = whole(join([THREE, join([TWO, ONE])]), like=EMPTY, parts=3, records=3)
    assert flat.private_total.tolist() == nested.private_total.tolist() == [[12, 15, 18]]
    assert (flat.l2_bound, flat.diameter, flat.row_unit, flat.queries) == (GRID, 2.0 * GRID, "record", 1)
    assert ONE.total.private_total.tolist() == [[5, 7, 9]]  # nothing is added in place


@pytest.mark.parametrize("again", [[ONE, TWO, ONE], [join([ONE, TWO]), TWO], [dataclasses.replace(ONE, parts=(4, 4))]])
def test_a_part_is_never_counted_twice(again: list[PartSum]) -> None:
    with pytest.raises(ValueError, match=r"part \d is in the sum twice"):
        join(again)


def test_sums_of_another_kind_are_refused() -> None:
    others = [
        PartSum(total=total([], grid=GRID + 1), parts=(1,), records=0),
        PartSum(total=sum_outer([_chunk(2)], slots=1, left_bound=1, right_bound=GRID), parts=(1,), records=0),
    ]
    for other in others:
        with pytest.raises(ValueError, match="must agree"):
            join([ONE, other])
        with pytest.raises(ValueError, match="than is charged"):
            whole(join([other]), like=EMPTY, parts=1, records=0)
    with pytest.raises(ValueError, match="no parts"):
        join([])


def _chunk(width: int) -> Outer:
    none = torch.zeros(0, width, dtype=torch.float64)
    return Outer(slots=torch.zeros(0, dtype=torch.int64), left=none[:, :1], right=none)


def test_a_sum_that_its_records_cannot_have_is_refused() -> None:
    """A worker that did not bound its rows, or counted a record less than it summed."""
    long = PartSum(total=total([[100, 0, 0]] * 3), parts=(0,), records=2)
    with pytest.raises(ValueError, match="longer than the bound"):
        join([long])
    with pytest.raises(ValueError, match="longer than the bound"):
        whole(long, like=EMPTY, parts=1, records=2)
    assert join([dataclasses.replace(long, records=3)]).records == 3


def test_all_parts_and_all_records_must_be_there() -> None:
    with pytest.raises(ValueError, match="part 1 is not in the sum"):
        whole(join([ONE, THREE]), like=EMPTY, parts=3, records=2)
    with pytest.raises(ValueError, match="part 2 is not in the sum"):
        whole(join([ONE, TWO, THREE]), like=EMPTY, parts=2, records=3)
    with pytest.raises(ValueError, match="another number of records"):
        whole(join([ONE, TWO, THREE]), like=EMPTY, parts=3, records=4)


def test_sums_beyond_float64_are_exact_and_beyond_int64_refused() -> None:
    grid = 2**26
    row = total([[grid, 0, 0]] * 4, grid=grid)
    many = [PartSum(total=row, parts=(number,), records=2**27) for number in range(64)]
    assert join(many).total.private_total.tolist() == [[4 * 64 * grid, 0, 0]]
    with pytest.raises(OverflowError, match="int64"):
        join([dataclasses.replace(one, records=2**32) for one in many])


def test_the_limit_is_that_of_int64() -> None:
    row = total([[2**26, 0, 0]], grid=2**26)
    below = PartSum(total=row, parts=(0,), records=2**37 - 1)
    assert join([below]).records == 2**37 - 1
    with pytest.raises(OverflowError, match="int64"):
        join([dataclasses.replace(below, records=2**37)])


def test_only_whole_numbers_of_units_without_numbers_are_joined() -> None:
    """Sums of reals would depend on their order, and units with numbers on which of them a machine has."""
    whole_numbers = ONE.total.private_total
    others = [
        dataclasses.replace(ONE.total, private_total=whole_numbers.to(torch.float64)),
        dataclasses.replace(ONE.total, private_total=whole_numbers.to(torch.int32)),
        dataclasses.replace(ONE.total, units=torch.tensor([0, 1])),
    ]
    for other in others:
        one = dataclasses.replace(ONE, total=other)
        with pytest.raises(ValueError, match="whole numbers, in int64, of units without numbers"):
            join([one])
        with pytest.raises(ValueError, match="whole numbers, in int64, of units without numbers"):
            whole(one, like=EMPTY, parts=1, records=2)


def test_a_total_is_not_shown() -> None:
    assert "tensor" not in repr(join([ONE, TWO])) and "records" not in repr(ONE)


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_little_is_taken_ahead(threads: int) -> None:
    taken, before = 0, torch.get_num_threads()

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield number

    def work(number: int) -> tuple[int, int]:
        time.sleep(0.002 * (number % 3))
        return number, torch.get_num_threads()

    torch.set_num_threads(threads)
    try:
        found = []
        for number, inside in mapped(work, items()):
            found.append(number)
            assert inside == 1  # whole chunks side by side, and no threads within
            assert taken - len(found) <= threads + AHEAD
        assert found == list(range(40))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_has_one_core_where_chunks_are_side_by_side(threads: int) -> None:
    before = torch.get_num_threads()

    @one_core_each()
    def work() -> list[tuple[int, int]]:
        with one_core_each():  # again, by what is called
            assert (torch.get_num_threads(), side_by_side()) == (1, threads)
            found = list(mapped(lambda _: (torch.get_num_threads(), side_by_side()), range(9)))
        assert (torch.get_num_threads(), side_by_side()) == (1, threads)
        return found

    try:
        torch.set_num_threads(threads)
        # In one thread, work is done where it is called.
        assert set(work()) == {(1, 1)}
        assert (torch.get_num_threads(), side_by_side()) == (threads, threads)
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_thread_reaches_the_caller_and_ends_the_threads() -> None:
    before, alive = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            list(mapped(lambda number: 1 // (3 - number), range(1000)))
        assert threading.active_count() == alive
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- ranks --------------------------------------------------------------------------------------------------------


class Everybody:
    """The ranks, as one of them sees them: what the others send is known."""

    def __init__(self, sums: list[PartSum], *, rank: int = 0) -> None:
        self._sums, self._rank, self.added = sums, rank, 0

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
        return [data if i == self._rank else _facts_of(one) for i, one in enumerate(self._sums)]

    def add(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self.added += 1
        others = [one.total.private_total for i, one in enumerate(self._sums) if i != self._rank]
        return sum(others, tensor) if self._rank == 0 else None


def _facts_of(one: PartSum) -> bytes:
    """What a rank with this sum sends."""
    sent: list[bytes] = []

    class Listening(Everybody):
        def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
            sent.append(data)
            return [data]

    join_over_ranks(one, Listening([one]))
    return sent[0]


def test_sums_of_ranks_add_up_on_rank_0() -> None:
    joined = join_over_ranks(ONE, Everybody([ONE, TWO, THREE]))
    assert joined is not None
    assert whole(joined, like=EMPTY, parts=3, records=3).private_total.tolist() == [[12, 15, 18]]
    assert join_over_ranks(TWO, Everybody([ONE, TWO, THREE], rank=1)) is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ([ONE, dataclasses.replace(TWO, parts=(0,))], "part 0 is in the sum twice"),
        ([ONE, PartSum(total=total([], grid=GRID + 1), parts=(1,), records=0)], "must agree"),
    ],
)
def test_every_rank_checks_before_anything_is_added(rank: int, sums: list[PartSum], words: str) -> None:
    everybody = Everybody(sums, rank=rank)
    with pytest.raises(ValueError, match=words):
        join_over_ranks(sums[rank], everybody)
    assert everybody.added == 0


def test_a_rank_whose_sum_is_too_long_gives_nothing() -> None:
    everybody = Everybody([dataclasses.replace(TWO, records=0)])
    with pytest.raises(ValueError, match="longer than the bound"):
        join_over_ranks(dataclasses.replace(TWO, records=0), everybody)
    assert everybody.added == 0


def test_a_rank_that_is_missing_is_found() -> None:
    joined = join_over_ranks(ONE, Everybody([ONE, TWO]))
    assert joined is not None
    with pytest.raises(ValueError, match="part 2 is not in the sum"):
        whole(joined, like=EMPTY, parts=3, records=3)
