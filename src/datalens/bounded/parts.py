"""Sums of parts of the records, each of which is in the whole sum once.

Parts are chunks of threads, or partitions that machines of a cluster work on. Their sums are whole numbers, so it does
not matter where, in what order or how often a part was computed; but it must be added once. A part's sum therefore
names the parts that are in it, and two sums with a part in common cannot be joined.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from datalens.bounded.contributions import BoundedSum

ROUNDING = 1 + 1e-9  # of a norm that is computed in float64


@dataclass(frozen=True, kw_only=True)
class PartSum:
    """The bounded sum of the records of some parts.

    Attributes:
        parts: numbers of the parts, increasing.
        records: number of records in them. Private.
    """

    total: BoundedSum = field(repr=False)
    parts: tuple[int, ...]
    records: int = field(repr=False)


def join(sums: Iterable[PartSum]) -> PartSum:
    """Return the sum of parts that have nothing in common.

    Args:
        sums: At least one; no part is in two of them.

    Raises:
        ValueError: there is none, they are not of one kind, a part is in two of them, or a sum is longer than its
            number of records allows.
        OverflowError: an int64 sum could overflow.
    """
    sums = list(sums)
    if not sums:
        raise ValueError("nothing to sum: there were no parts")
    first = sums[0].total
    parts: set[int] = set()
    for one in sums:
        if _kind(one.total) != _kind(first):
            raise ValueError("parts of one sum must agree on shape, kind, bound, diameter and unit")
        again = parts.intersection(one.parts)
        if again or len(set(one.parts)) < len(one.parts):
            number = min(again or one.parts)
            raise ValueError(f"part {number} is in the sum twice: the bound holds only if each is in it once")
        parts.update(one.parts)
        check_length(one)
    records = sum(one.records for one in sums)
    if records * first.l2_bound >= 2**63:
        raise OverflowError(f"{records} rows of norm {first.l2_bound:g} could overflow an int64 sum")
    total = first.private_total
    for one in sums[1:]:
        total = total + one.total.private_total
    return PartSum(
        total=BoundedSum(
            private_total=total,
            l2_bound=first.l2_bound,
            diameter=first.diameter,
            row_unit=first.row_unit,
            queries=first.queries,
        ),
        parts=tuple(sorted(parts)),
        records=records,
    )


def whole(joined: PartSum, *, like: BoundedSum, parts: int, records: int) -> BoundedSum:
    """Return the sum over all parts, for the gate, after checking what was computed elsewhere.

    Args:
        joined: The sum of parts.
        like: A sum of the same kind that was made here, of no records: its bounds are those that will be charged.
        parts: How many parts there are.
        records: How many records they had when they were first read.

    Raises:
        ValueError: it is of another kind, a part is missing, records came or went, or it is too long.
    """
    if _kind(joined.total) != _kind(like):
        raise ValueError("the parts were summed with another shape, kind, bound, diameter or unit than is charged")
    if joined.parts != tuple(range(parts)):
        missing = next((number for number in range(parts) if number not in set(joined.parts)), parts)
        raise ValueError(f"part {missing} is not in the sum as often as it should be")
    if joined.records != records:
        raise ValueError("the parts have another number of records than when they were first read")
    check_length(joined)
    return joined.total


def check_length(one: PartSum) -> None:
    """Raise ValueError if a sum is longer than the sum of its records' rows can be.

    Args:
        one: A sum, and the number of its records.
    """
    length = float(torch.linalg.vector_norm(one.total.private_total.to(torch.float64)))
    if not length <= one.records * one.total.l2_bound * ROUNDING or not math.isfinite(length):
        raise ValueError("a part's sum is longer than the bound on its records' rows allows")


def _kind(total: BoundedSum) -> tuple[object, ...]:
    if total.private_total.dtype != torch.int64 or total.units is not None:
        raise ValueError("parts must be sums of whole numbers, in int64, of units without numbers")
    return tuple(total.private_total.shape), total.l2_bound, total.diameter, total.row_unit, total.queries
