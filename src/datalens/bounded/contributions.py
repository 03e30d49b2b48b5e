"""Rows of bounded norm, one per privacy unit, and their sum. The bound is enforced here, not assumed.

Chunks of rows are summed as they come, so [teachers, queries, d] is never held, and the `BoundedSum`
(the total and the facts its sensitivity follows from) is all that reaches the gate.
"""

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from datalens.public.triton import kernels_for


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """A chunk of what teachers say about the fakes: one row of `values` per teacher."""

    teachers: Tensor  # [chunk] numbers of the teachers
    values: Tensor = field(repr=False)  # [chunk, queries, d]
    step: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A chunk of how real teachers find the fakes: one row of `values` per teacher; NaN where one says nothing."""

    teachers: Tensor  # [chunk] numbers of the teachers
    values: Tensor = field(repr=False)  # [chunk, queries]


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Rows of one privacy unit each. A unit's row is all of `rows[i]`, over all queries at once."""

    rows: Tensor = field(repr=False)  # [units, queries, d]: integers (votes) or floats
    l2_bound: float
    diameter: float  # 2·l2_bound unless a smaller one is proved
    row_unit: Literal["teacher", "record", "person"]
    units: Tensor | None = field(default=None, repr=False)  # [units] numbers of the units, where they have any


@dataclass(frozen=True, kw_only=True)
class BoundedSum:
    """The sum of bounded rows. `private_total` is read only in `privacy/`; a test walks the syntax trees.

    A unit that was in twice would move the sum twice as far as the bound says: where units have numbers, each
    is in `units` once.
    """

    private_total: Tensor = field(repr=False)  # [queries, d]: int32 or float64; not for logs or tracebacks
    l2_bound: float
    diameter: float
    row_unit: Literal["teacher", "record", "person"]
    queries: int
    units: Tensor | None = field(default=None, repr=False)  # [units] their numbers, rising, on the CPU

    @property
    def cells(self) -> int:
        """Numbers that will be released, whatever they are."""
        return self.private_total.numel()


@dataclass(frozen=True, kw_only=True)
class VoteCounts(BoundedSum):
    """How many teachers chose each answer, [queries, answers]. Made by `count_ballots` alone.

    Between two possible ballots of a teacher at most two counts a query differ, by one each (the answer it leaves, and
    the one it goes to): they are at most √(2·queries) apart.
    """


@dataclass(frozen=True, kw_only=True)
class Ballots:
    """A chunk of ballots: a teacher chooses one of the answers 0, 1, … to every query, or none (−1)."""

    teachers: Tensor  # [chunk] numbers of the teachers
    choices: Tensor = field(repr=False)  # [chunk, queries] whole numbers


def count_ballots(chunks: Iterable[Ballots], *, answers: int) -> VoteCounts:
    """One ballot a teacher, whatever came in: what is none of the answers counts for none."""
    total: Tensor | None = None
    units: list[Tensor] = []
    for chunk in chunks:
        if chunk.teachers.shape != chunk.choices.shape[:1]:
            raise ValueError(f"{len(chunk.choices)} ballots have {chunk.teachers.numel()} teachers: each has one")
        units.append(chunk.teachers)
        part = torch.stack([(chunk.choices == answer).sum(dim=0) for answer in range(answers)], dim=1)
        total = part if total is None else total + part
    if total is None:
        raise ValueError("nothing to count: there were no ballots")
    return VoteCounts(
        private_total=total.to(torch.int32),
        l2_bound=math.sqrt(len(total)),
        diameter=math.sqrt(2 * len(total)),
        row_unit="teacher",
        queries=len(total),
        units=_each_once(units),
    )


class Ranks(Protocol):
    """The processes a sum is spread over (see `run.ranks.World`)."""

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]: ...

    def add(self, tensor: Tensor) -> Tensor | None: ...


def _facts(chunk: Contributions) -> tuple[object, ...]:
    numbered = chunk.units is not None
    return chunk.rows.shape[1:], chunk.rows.dtype, chunk.l2_bound, chunk.diameter, chunk.row_unit, numbered


def enforce(rows: Tensor, l2_bound: float) -> Tensor:
    """Rows whose norm is at most `l2_bound`, whatever came in; each row judged by itself alone.

    | row | becomes |
    |---|---|
    | integers, too long | zero (scaling would leave the integers) |
    | floats, too long | scaled down to the bound, in float64 |
    | NaN or infinity anywhere in it | zero |
    """
    if not rows.is_floating_point():
        # In float64 squares of votes add up exactly; wider integers may round, but nothing wraps around.
        wide = rows.flatten(1).to(torch.float64)
        fits = torch.linalg.vecdot(wide, wide) <= _most_squares(l2_bound)
        return rows if bool(fits.all()) else rows * fits.view(-1, *[1] * (rows.dim() - 1))
    flat = rows.flatten(1).to(torch.float64)
    flat = torch.where(flat.isfinite().all(dim=1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    # Where even the norm overflows, the scale is 0: a row of astronomic numbers votes nothing.
    return (flat * torch.where(norms > l2_bound, l2_bound / norms, 1.0)).reshape(rows.shape)


def sum_bounded(chunks: Iterable[Contributions]) -> BoundedSum:
    """Enforce the bound row by row, then add. Sums are int32 (votes) or float64."""
    total: Tensor | None = None
    first: Contributions | None = None
    units: list[Tensor] = []
    count = 0
    for chunk in chunks:
        if first is None:
            first = chunk
        elif _facts(chunk) != _facts(first):
            raise ValueError("chunks of one sum must agree on shape, kind, bound, diameter and unit")
        rows = chunk.rows
        count += rows.shape[0]
        if not rows.is_floating_point():
            _check_room(count, chunk.l2_bound)
        if chunk.units is not None:
            if chunk.units.shape != rows.shape[:1]:
                raise ValueError(f"{rows.shape[0]} rows have {chunk.units.numel()} units: each row has one")
            units.append(chunk.units)
        part = _add_enforced(rows, chunk.l2_bound)
        total = part if total is None else total + part
    if first is None or total is None:
        raise ValueError("nothing to sum: there were no contributions")
    return BoundedSum(
        private_total=total,
        l2_bound=first.l2_bound,
        diameter=first.diameter,
        row_unit=first.row_unit,
        queries=total.shape[0],
        units=_each_once(units) if units else None,
    )


def _add_enforced(rows: Tensor, l2_bound: float) -> Tensor:
    if rows.dtype == torch.int8 and kernels_for(rows):
        from datalens.bounded.kernels import sum_votes

        return sum_votes(rows, _most_squares(l2_bound))
    rows = enforce(rows, l2_bound)
    return rows.sum(dim=0, dtype=torch.float64 if rows.is_floating_point() else torch.int32)


def _most_squares(l2_bound: float) -> float:
    return l2_bound**2 * (1 + 1e-12)  # a bound such as sqrt(200) is itself rounded


def sum_over_ranks(part: BoundedSum, ranks: Ranks, *, units: int) -> BoundedSum | None:
    """The sum over all ranks, on rank 0; None on the others: nobody else needs it.

    Before anything is added, all ranks check that they mean the same sum and that units 0 … `units`−1 are each
    in it once, whichever rank they are on.
    """
    _check_spread(ranks.gather(_for_the_wire(part), width=_WIRE.size), units, part)
    total = ranks.add(part.private_total)
    if total is None:
        return None
    return BoundedSum(
        private_total=total,
        l2_bound=part.l2_bound,
        diameter=part.diameter,
        row_unit=part.row_unit,
        queries=part.queries,
        units=torch.arange(units),
    )


_WIRE = struct.Struct("<32sqq")  # a hash of the facts, the first unit, one past the last


def _for_the_wire(part: BoundedSum) -> bytes:
    total = part.private_total
    facts = (tuple(total.shape), str(total.dtype), part.l2_bound, part.diameter, part.row_unit, part.queries)
    units = [] if part.units is None else part.units.tolist()
    if not units or units[-1] - units[0] != len(units) - 1:  # each is in once, and they rise
        raise ValueError("the units of a rank must be consecutive numbers, at least one")
    return _WIRE.pack(hashlib.sha256(repr(facts).encode()).digest(), units[0], units[-1] + 1)


def _check_spread(wired: list[bytes], units: int, part: BoundedSum) -> None:
    facts, firsts, ends = zip(*map(_WIRE.unpack, wired), strict=True)
    if len(set(facts)) > 1:
        raise ValueError("ranks of one sum must agree on shape, kind, bound, diameter and unit")
    expected = 0
    for first, end in sorted(zip(firsts, ends, strict=True)):
        if first != expected:
            problem = "in the sum twice" if first < expected else "in no rank's sum"
            raise ValueError(f"{part.row_unit} {min(first, expected)} is {problem}")
        expected = end
    if expected != units:
        raise ValueError(f"the ranks' sums hold {expected} units, not {units}")
    if not part.private_total.is_floating_point():
        _check_room(units, part.l2_bound)


def _check_room(rows: int, l2_bound: float) -> None:
    if rows * l2_bound >= 2**31:
        raise OverflowError(f"{rows} rows of norm {l2_bound:g} could overflow an int32 sum")


def _each_once(units: list[Tensor]) -> Tensor:
    numbers = torch.cat(units).cpu().sort().values
    again = numbers[1:][numbers[1:] == numbers[:-1]]
    if len(again):
        raise ValueError(f"unit {int(again[0])} is in the sum twice: the bound holds for once")
    return numbers
