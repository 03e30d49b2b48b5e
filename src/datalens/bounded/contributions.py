"""Rows of bounded norm, one per privacy unit, and their sum. The bound is enforced here, not assumed.

Chunks of rows are summed as they arrive, so [teachers, queries, d] is never held in memory. Only the `BoundedSum` (the
total, and the facts that its sensitivity follows from) reaches the gate.
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
    """A chunk of teachers' gradients with respect to the synthetic images: one row of `values` per teacher."""

    teachers: Tensor  # [chunk] the teachers' numbers
    values: Tensor = field(repr=False)  # [chunk, queries, d]
    step: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A chunk of teachers' scores of how real the synthetic images look: one row of `values` per teacher.

    NaN where a teacher gives no score.
    """

    teachers: Tensor  # [chunk] the teachers' numbers
    values: Tensor = field(repr=False)  # [chunk, queries]


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """A chunk of rows, one per privacy unit. A unit's row is all of `rows[i]`, over all queries together.

    `l2_bound` bounds the norm of a row, and `diameter` the distance between two possible rows.
    """

    rows: Tensor = field(repr=False)  # [units, queries, d]: integers (votes) or floats
    l2_bound: float
    diameter: float  # 2·l2_bound unless a smaller one is proved
    row_unit: Literal["teacher", "record", "person"]
    units: Tensor | None = field(default=None, repr=False)  # [units] the units' numbers, where they have numbers


@dataclass(frozen=True, kw_only=True)
class BoundedSum:
    """The sum of bounded rows. `private_total` is read only in `privacy/`; a test checks the syntax trees.

    A unit with two rows would move the sum twice as far as the bound says. So where units have numbers, each number is
    in `units` once.
    """

    private_total: Tensor = field(repr=False)  # [queries, d]: int32 or float64; kept out of logs and tracebacks
    l2_bound: float
    diameter: float
    row_unit: Literal["teacher", "record", "person"]
    queries: int
    units: Tensor | None = field(default=None, repr=False)  # [units] the units' numbers, increasing, on the CPU

    @property
    def cells(self) -> int:
        """The number of values that will be released. It is public."""
        return self.private_total.numel()


@dataclass(frozen=True, kw_only=True)
class VoteCounts(BoundedSum):
    """The number of units that chose each answer, [queries, answers]. Made only by `count_ballots`.

    If a unit's ballot changes, at most two counts per query change, by one each (that of the old answer and that of
    the new one). So two possible ballots are at most √(2·queries) apart. If a ballot appears or vanishes, at most one
    count per query changes.
    """

    @property
    def moved(self) -> int:
        """The most counts that differ between two possible ballots."""
        return min(2 * self.queries, self.cells)


@dataclass(frozen=True, kw_only=True)
class Ballots:
    """A chunk of ballots: to every query a unit chooses one of the answers 0, 1, …, or none (−1).

    The units are teachers; or records or persons, where a ballot is one held-out record's (true class, guessed class).
    """

    teachers: Tensor  # [chunk] the units' numbers
    choices: Tensor = field(repr=False)  # [chunk, queries] integers


def count_ballots(
    chunks: Iterable[Ballots], *, answers: int, row_unit: Literal["teacher", "record", "person"] = "teacher"
) -> VoteCounts:
    """Count the ballots, one per unit. A choice outside 0 … `answers`−1 is not counted.

    Args:
        chunks: The ballots.
        answers: Number of possible answers to a query.
        row_unit: Whose ballots these are.

    Raises:
        ValueError: there are no ballots, or a unit has several.
    """
    total: Tensor | None = None
    units: list[Tensor] = []
    for chunk in chunks:
        if chunk.teachers.shape != chunk.choices.shape[:1]:
            raise ValueError(
                f"{len(chunk.choices)} ballots have {chunk.teachers.numel()} {row_unit}s: each must have exactly one"
            )
        units.append(chunk.teachers)
        part = torch.stack([(chunk.choices == answer).sum(dim=0) for answer in range(answers)], dim=1)
        total = part if total is None else total + part
    if total is None:
        raise ValueError("nothing to count: there were no ballots")
    return VoteCounts(
        private_total=total.to(torch.int32),
        l2_bound=math.sqrt(len(total)),
        diameter=math.sqrt(2 * len(total)),
        row_unit=row_unit,
        queries=len(total),
        units=_each_once(units),
    )


class Ranks(Protocol):
    """The processes that a sum is distributed over (see `run.ranks.World`)."""

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
        """Return the data of every process, in the order of ranks, on every rank.

        Args:
            data: Bytes of this process.
            width: Their length, if it is the same on all ranks.
        """

    def add(self, tensor: Tensor) -> Tensor | None:
        """Return the sum of the tensors of all processes on rank 0, and None on others.

        Args:
            tensor: Of this process; the same shape and type on all ranks.
        """


def _facts(chunk: Contributions) -> tuple[object, ...]:
    numbered = chunk.units is not None
    return chunk.rows.shape[1:], chunk.rows.dtype, chunk.l2_bound, chunk.diameter, chunk.row_unit, numbered


def enforce(rows: Tensor, l2_bound: float) -> Tensor:
    """Return the rows with the norm of each brought to at most `l2_bound`. Each row is treated by itself.

    | row | becomes |
    |---|---|
    | integers, too long | zero (scaling would give fractions) |
    | floats, too long | scaled down to the bound, in float64 |
    | NaN or infinity anywhere in it | zero |

    Args:
        rows: [rows, …], integers or floats.
        l2_bound: Bound on the norm.
    """
    if not rows.is_floating_point():
        # In float64 the squares of int8 votes add up exactly; wider integers may round, but nothing overflows.
        wide = rows.flatten(1).to(torch.float64)
        fits = torch.linalg.vecdot(wide, wide) <= _most_squares(l2_bound)
        return rows if bool(fits.all()) else rows * fits.view(-1, *[1] * (rows.dim() - 1))
    flat = rows.flatten(1).to(torch.float64)
    flat = torch.where(flat.isfinite().all(dim=1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    # Where even the norm overflows, the scale is 0, and the row becomes zero.
    return (flat * torch.where(norms > l2_bound, l2_bound / norms, 1.0)).reshape(rows.shape)


def sum_bounded(chunks: Iterable[Contributions]) -> BoundedSum:
    """Enforce the bound on every row, then add the rows. The sum is int32 (for votes) or float64.

    Args:
        chunks: The rows.

    Raises:
        ValueError: there are no rows, chunks disagree on their facts, or a unit has two rows.
        OverflowError: an int32 sum could overflow.
    """
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
                raise ValueError(f"{rows.shape[0]} rows have {chunk.units.numel()} units: each must have exactly one")
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
    return l2_bound**2 * (1 + 1e-12)  # the bound itself, such as sqrt(200), is rounded


def sum_over_ranks(part: BoundedSum, ranks: Ranks, *, units: int) -> BoundedSum | None:
    """Return the sum over all ranks on rank 0, and None on the other ranks, which do not need it.

    Before anything is added, every rank checks that all have the same facts, and that each of the units 0 … `units`−1
    is in the sum once, on whichever rank.

    Args:
        part: The sum of this rank.
        ranks: All ranks.
        units: How many units there are on all ranks.

    Raises:
        ValueError: ranks disagree on the facts, or a unit is missing or there twice.
        OverflowError: an int32 sum could overflow.
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
    if not units or units[-1] - units[0] != len(units) - 1:  # they increase, and each is in once
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
        raise ValueError(f"unit {int(again[0])} is in the sum twice: the bound holds only if each is in it once")
    return numbers
