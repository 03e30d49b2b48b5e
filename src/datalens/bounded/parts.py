"""Sums of parts of the records, each of which is in the whole sum once.

Parts are chunks of threads, partitions that machines of a cluster work on, or the records of a rank. Their sums are
whole numbers, so it does not matter where, in what order or how often a part was computed; but it must be added once. A
part's sum therefore names the parts that are in it, and two sums with a part in common cannot be joined.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum, Ranks

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
    for one in sums:
        check_length(one)
    records = sum(one.records for one in sums)
    parts = _check_joined([_kind(one.total) for one in sums], [one.parts for one in sums], records, first.l2_bound)
    total = first.private_total
    for one in sums[1:]:
        total = total + one.total.private_total
    return PartSum(total=_with_total(first, total), parts=parts, records=records)


def join_over_ranks(mine: PartSum, ranks: Ranks) -> PartSum | None:
    """Return the sum over all ranks on rank 0, and None on the other ranks, which do not need it.

    Before anything is added, every rank checks what `join` checks.

    Args:
        mine: The sum of this rank's records.
        ranks: All ranks.

    Raises:
        ValueError: ranks disagree on the kind of sum, a part is on two ranks, or this rank's sum is too long.
        OverflowError: an int64 sum could overflow.
    """
    check_length(mine)
    facts = {"kind": repr(_kind(mine.total)), "parts": mine.parts, "records": mine.records}
    everybody = [json.loads(one) for one in ranks.gather(json.dumps(facts).encode())]
    records = sum(one["records"] for one in everybody)
    kinds, numbers = [one["kind"] for one in everybody], [tuple(one["parts"]) for one in everybody]
    parts = _check_joined(kinds, numbers, records, mine.total.l2_bound)
    total = ranks.add(mine.total.private_total.cpu())  # ranks may have other devices
    if total is None:
        return None
    return PartSum(total=_with_total(mine.total, total), parts=parts, records=records)


def _with_total(like: BoundedSum, total: Tensor) -> BoundedSum:
    return BoundedSum(
        private_total=total,
        l2_bound=like.l2_bound,
        diameter=like.diameter,
        row_unit=like.row_unit,
        queries=like.queries,
    )


def _check_joined(
    kinds: Sequence[object], numbers: Sequence[tuple[int, ...]], records: int, l2_bound: float
) -> tuple[int, ...]:
    """Raise unless sums of these kinds and parts can be added; return the numbers of all parts."""
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError("parts of one sum must agree on shape, kind, bound, diameter and unit")
    every = sorted(number for some in numbers for number in some)
    again = [number for number, following in itertools.pairwise(every) if number == following]
    if again:
        raise ValueError(f"part {again[0]} is in the sum twice: the bound holds only if each is in it once")
    if records * l2_bound >= 2**63:
        raise OverflowError(f"{records} rows of norm {l2_bound:g} could overflow an int64 sum")
    return tuple(every)


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
