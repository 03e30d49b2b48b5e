"""Sums of outer products, one of bounded norm per record, without computing each of them.

A record's row is one-hot(slot) ⊗ left ⊗ right. With left = right the sum is a covariance, with left = (1) a class sum,
and with left a one-hot bin a histogram. The norm of a row is ‖left‖·‖right‖, so bounding the factors bounds the row.
Since a row lies in one slot, all slots together are one release. Factors are integers, so that sums are exact and
discrete noise can be used.

If the privacy unit is a person, the rows of all their images, in whatever slots, are added up to one row over all
slots. It is weighted so that it is no longer than the row of one image could be (docs/privacy.md).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum

MOST = 2**53  # integers up to it, and sums of integers in any order, are exact in float64


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The rows of some records, given by their factors: integers, in float64."""

    slots: Tensor = field(repr=False)  # [n] int64
    left: Tensor = field(repr=False)  # [n, a]
    right: Tensor = field(repr=False)  # [n, b]
    # [n] int64, non-decreasing; a person is in one chunk only
    persons: Tensor | None = field(default=None, repr=False)


def on_grid(values: Tensor, *, clip: float, grid: int) -> Tensor:
    """Clip rows to norm `clip`, and scale and truncate them to integers of norm at most `grid`, in float64.

    Truncation is towards zero, so that no coordinate grows, and no norm. A row with NaN or infinity becomes zero.

    Args:
        values: [n, d].
        clip: Bound on the norm before scaling.
        grid: The norm that `clip` becomes.
    """
    wide = values.to(torch.float64)
    wide = torch.where(wide.isfinite().all(dim=1, keepdim=True), wide, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    scale = grid / torch.clamp(norms, min=clip)
    return torch.where(scale > 0, (wide * scale).trunc(), 0.0)  # 0 where even the norm overflows


def sum_outer(
    chunks: Iterable[Outer], *, slots: int, left_bound: int, right_bound: int, diameter: float | None = None
) -> BoundedSum:
    """Return the sum, int64 [slots, a·b], of rows of norm at most left_bound·right_bound, after enforcing the bounds.

    | factor | its row becomes |
    |---|---|
    | longer than its bound, not an integer, or not finite | zero |
    | slot out of range | an error: labels are checked when they are read |

    Args:
        chunks: The rows.
        slots: Number of slots.
        left_bound: Bound on the norm of the left factors.
        right_bound: Bound on the norm of the right factors.
        diameter: The largest distance between two possible rows, if one under 2·l2_bound is proved.

    Raises:
        ValueError: there are no rows, a slot is out of range, chunks of records and of persons are mixed, or a person's
            images do not come together.
        OverflowError: sums could exceed what float64 holds exactly.
    """
    total: Tensor | None = None
    count, last, unit = 0, -1, None
    bound = left_bound * right_bound
    if max(left_bound, right_bound) ** 2 >= MOST:
        raise OverflowError(f"squares of {max(left_bound, right_bound):g} are more than float64 holds exactly")
    for chunk in chunks:
        count += len(chunk.slots)
        if count * bound >= MOST:
            raise OverflowError(f"{count} rows of norm {bound:g} could add up to more than float64 holds exactly")
        if len(chunk.slots) and not 0 <= int(chunk.slots.min()) <= int(chunk.slots.max()) < slots:
            raise ValueError(f"a row lies in none of the {slots} slots")
        left, right = chunk.left.to(torch.float64), chunk.right.to(torch.float64)
        fits = _fits(left, left_bound) & _fits(right, right_bound)
        left, right = torch.where(fits, left, 0.0), torch.where(fits, right, 0.0)
        if total is None:
            total = left.new_zeros(slots, left.shape[1], right.shape[1])
        if unit not in (None, "record" if chunk.persons is None else "person"):
            raise ValueError("chunks of one sum must be of records, or of persons")
        unit = "record"
        alone = torch.ones(len(chunk.slots), dtype=torch.bool, device=chunk.slots.device)
        if chunk.persons is not None:
            unit, last = "person", _after(chunk.persons, last)
            alone = _add_persons(Outer(slots=chunk.slots, left=left, right=right, persons=chunk.persons), total, bound)
        for slot in chunk.slots[alone].unique().tolist():
            rows = alone & (chunk.slots == slot)
            total[slot] += left[rows].T @ right[rows]
    if total is None:
        raise ValueError("nothing to sum: there were no records")
    return BoundedSum(
        private_total=total.flatten(1).round().to(torch.int64).cpu(),
        l2_bound=float(bound),
        diameter=2.0 * bound if diameter is None else diameter,
        row_unit="person" if unit == "person" else "record",
        queries=slots,
    )


def _after(persons: Tensor, last: int) -> int:
    """Return the last person of a chunk, after checking that no person of an earlier chunk comes again.

    Such a person would have two rows at the price of one.
    """
    rising = bool((persons[1:] >= persons[:-1]).all())
    if not rising or (len(persons) and int(persons[0]) <= last):
        raise ValueError("the images of a person must come together: the bound is for one row per person")
    return int(persons[-1]) if len(persons) else last


TRUNCATED = 2.0**10  # bound on how far truncation moves a person's row: less than one in each of at most 2^20 cells
LESS = 1 - 1e-9  # reduces the weight, so that its rounding cannot make a row too long


def _add_persons(chunk: Outer, total: Tensor, bound: float) -> Tensor:
    """Add the rows of persons with several images to `total`, and return a mask, [n] bool, of all other images.

    With m_s images in slot s, the norm of a person's sum over slots is at most bound·‖(m_s)‖, since each image's row is
    at most `bound`. So it is weighted by 1/‖(m_s)‖ and truncated towards zero. A row that is still too long becomes
    zero.
    """
    assert chunk.persons is not None
    _, whose, images = torch.unique_consecutive(chunk.persons, return_inverse=True, return_counts=True)
    alone = images[whose] == 1
    several = torch.nonzero(~alone).flatten()
    if not len(several):
        return alone
    slots = len(total)
    pairs, at, each = torch.unique(
        whose[several] * slots + chunk.slots[several], return_inverse=True, return_counts=True
    )
    person = (pairs // slots).unique_consecutive(return_inverse=True)[1]  # the person of each (person, slot) pair
    squares = torch.zeros(int(person[-1]) + 1, dtype=torch.float64)
    weights = LESS / squares.index_add(0, person, each.to(torch.float64).square()).sqrt()
    parts = _pair_sums(chunk.left[several], chunk.right[several], at, len(pairs))
    known = zip((pairs % slots).tolist(), person.tolist(), weights[person].tolist(), parts, strict=True)
    for _, row in groupby(known, key=lambda pair: pair[1]):
        weighed = [(slot, (part * weight).trunc()) for slot, _, weight, part in row]
        length = sum(float(part.square().sum()) for _, part in weighed)
        for slot, part in weighed if length <= bound * bound else ():
            total[slot] += part
    return alone


def _pair_sums(left: Tensor, right: Tensor, at: Tensor, pairs: int) -> Iterator[Tensor]:
    """Yield the sum of left ⊗ right over the images of each (person, slot) pair: [a, b]."""
    if 1 in (left.shape[1], right.shape[1]):  # small products: all at once
        thin = left.new_zeros(pairs, left.shape[1] * right.shape[1]).index_add(0, at, left * right)
        yield from thin.view(pairs, left.shape[1], right.shape[1])
        return
    order = at.argsort(stable=True)
    for rows in order.split(torch.bincount(at, minlength=pairs).tolist()):
        yield left[rows].T @ right[rows]


def outer_diameter(bound: float, *, truncated: float = 0.0) -> float:
    """Return the largest distance between two rows v ⊗ v with ‖v‖² ≤ bound, in one slot or in two: √2·bound.

    ‖uuᵀ − wwᵀ‖² = ‖u‖⁴ + ‖w‖⁴ − 2⟨u, w⟩² ≤ 2·bound²; in different slots the last term is missing. Sums A, B of such
    rows have ⟨A, B⟩ ≥ 0 as well.

    Args:
        bound: Bound on the norm of a row.
        truncated: How far truncation can move a sum of rows. The result is then √2·(bound + truncated).
    """
    return min(math.sqrt(2.0) * (bound + truncated) * (1 + 1e-12), 2 * bound)


def _fits(factor: Tensor, bound: int) -> Tensor:
    """Return whether each row is of integers and within the bound: [n, 1]. Squares of integers add up exactly."""
    whole = (factor == factor.trunc()).all(dim=1, keepdim=True) & factor.isfinite().all(dim=1, keepdim=True)
    return whole & (torch.linalg.vecdot(factor, factor).unsqueeze(1) <= bound * bound)
