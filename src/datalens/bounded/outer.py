"""Sums of outer products, one of bounded norm per record, without writing a single one out.

A record's row is one-hot(slot) ⊗ left ⊗ right: with left = right a covariance, with left = (1) a class sum, with left a
one-hot bin a histogram. Its norm is ‖left‖·‖right‖, so bounding the factors bounds the row; and since a row lies in one
slot, all slots together are one release. Factors are whole numbers, so sums are exact and discrete noise fits.

Where a person is the unit, the rows of all their images, in whatever slots, are added up to one row over all slots,
which is weighed so that it is no longer than one image's could be (docs/privacy.md).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum

MOST = 2**53  # whole numbers up to it are exact in float64, and so are their sums, in any order


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Some records' rows, as their factors: whole numbers, in float64."""

    slots: Tensor = field(repr=False)  # [n] int64
    left: Tensor = field(repr=False)  # [n, a]
    right: Tensor = field(repr=False)  # [n, b]
    persons: Tensor | None = field(default=None, repr=False)  # [n] int64, not falling; a person is in one chunk only


def on_grid(values: Tensor, *, clip: float, grid: int) -> Tensor:
    """Rows clipped to norm `clip`, as whole numbers of norm at most `grid` (which `clip` becomes), in float64.

    Truncated towards zero: no coordinate grows, so no row does. A row with NaN or infinity in it becomes zero.
    """
    wide = values.to(torch.float64)
    wide = torch.where(wide.isfinite().all(dim=1, keepdim=True), wide, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    scale = grid / torch.clamp(norms, min=clip)
    return torch.where(scale > 0, (wide * scale).trunc(), 0.0)  # 0 where even the norm overflows


def sum_outer(
    chunks: Iterable[Outer], *, slots: int, left_bound: int, right_bound: int, diameter: float | None = None
) -> BoundedSum:
    """The sum, int64 [slots, a·b], of rows that are at most left_bound·right_bound long, whatever came in.

    | factor | its row becomes |
    |---|---|
    | longer than its bound, not whole, or not finite | zero |
    | slot out of range | an error: labels are checked when they are read |

    `diameter`: the largest distance between two possible rows, where one under 2·l2_bound is proved.
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
        alone = torch.ones(len(chunk.slots), dtype=torch.bool)
        if chunk.persons is not None:
            unit, last = "person", _after(chunk.persons, last)
            alone = _add_persons(Outer(slots=chunk.slots, left=left, right=right, persons=chunk.persons), total, bound)
        for slot in chunk.slots[alone].unique().tolist():
            rows = alone & (chunk.slots == slot)
            total[slot] += left[rows].T @ right[rows]
    if total is None:
        raise ValueError("nothing to sum: there were no records")
    return BoundedSum(
        private_total=total.flatten(1).round().to(torch.int64),
        l2_bound=float(bound),
        diameter=2.0 * bound if diameter is None else diameter,
        row_unit="person" if unit == "person" else "record",
        queries=slots,
    )


def _after(persons: Tensor, last: int) -> int:
    """The last person here. One who was in an earlier chunk too would have two rows at the price of one."""
    rising = bool((persons[1:] >= persons[:-1]).all())
    if not rising or (len(persons) and int(persons[0]) <= last):
        raise ValueError("the images of a person must come together: the bound holds for one row each")
    return int(persons[-1]) if len(persons) else last


TRUNCATED = 2.0**10  # how far truncating a person's row can move it: by less than one in each of at most 2^20 cells
LESS = 1 - 1e-9  # of the weight, so that no rounding of it makes a row too long


def _add_persons(chunk: Outer, total: Tensor, bound: float) -> Tensor:
    """Add the rows of persons with several images to `total`; [n] bool: which images are of the others.

    With m_s images in slot s a person's sum over slots is at most bound·‖(m_s)‖ long, since each image's row is at most
    `bound`. So it is weighed by 1/‖(m_s)‖ and truncated towards zero; what is longer all the same becomes zero.
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
    person = (pairs // slots).unique_consecutive(return_inverse=True)[1]  # of each pair of a person and a slot
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
    """[a, b] for each pair of a person and a slot: the sum of left ⊗ right over its images."""
    if 1 in (left.shape[1], right.shape[1]):  # thin: all at once
        thin = left.new_zeros(pairs, left.shape[1] * right.shape[1]).index_add(0, at, left * right)
        yield from thin.view(pairs, left.shape[1], right.shape[1])
        return
    order = at.argsort(stable=True)
    for rows in order.split(torch.bincount(at, minlength=pairs).tolist()):
        yield left[rows].T @ right[rows]


def outer_diameter(bound: float, *, truncated: float = 0.0) -> float:
    """How far apart two rows v ⊗ v with ‖v‖² ≤ bound can be, in one slot or in two: √2·bound.

    ‖uuᵀ − wwᵀ‖² = ‖u‖⁴ + ‖w‖⁴ − 2⟨u, w⟩² ≤ 2·bound²; in different slots the last term is missing. Sums A, B of such
    rows have ⟨A, B⟩ ≥ 0 as well. `truncated`: how far truncation can move a sum; then √2·(bound + truncated).
    """
    return min(math.sqrt(2.0) * (bound + truncated) * (1 + 1e-12), 2 * bound)


def _fits(factor: Tensor, bound: int) -> Tensor:
    """[n, 1] whether a row is whole and no longer than the bound. Squares of whole numbers add up exactly."""
    whole = (factor == factor.trunc()).all(dim=1, keepdim=True) & factor.isfinite().all(dim=1, keepdim=True)
    return whole & (torch.linalg.vecdot(factor, factor).unsqueeze(1) <= bound * bound)
