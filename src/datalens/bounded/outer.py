"""Sums of outer products, one of bounded norm per record, without writing a single one out.

A record's row is one-hot(slot) ⊗ left ⊗ right: with left = right a covariance, with left = (1) a class sum, with left a
one-hot bin a histogram. Its norm is ‖left‖·‖right‖, so bounding the factors bounds the row; and since a row lies in one
slot, all slots together are one release. Factors are whole numbers, so sums are exact and discrete noise fits.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    count = 0
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
        for slot in chunk.slots.unique().tolist():
            rows = chunk.slots == slot
            total[slot] += left[rows].T @ right[rows]
    if total is None:
        raise ValueError("nothing to sum: there were no records")
    return BoundedSum(
        private_total=total.flatten(1).round().to(torch.int64),
        l2_bound=float(bound),
        diameter=2.0 * bound if diameter is None else diameter,
        row_unit="record",
        queries=slots,
    )


def outer_diameter(bound: float) -> float:
    """How far apart two rows v ⊗ v with ‖v‖² ≤ bound can be, in one slot or in two: √2·bound.

    ‖uuᵀ − wwᵀ‖² = ‖u‖⁴ + ‖w‖⁴ − 2⟨u, w⟩² ≤ 2·bound²; in different slots the last term is missing.
    """
    return math.sqrt(2.0) * bound * (1 + 1e-12)


def _fits(factor: Tensor, bound: int) -> Tensor:
    """[n, 1] whether a row is whole and no longer than the bound. Squares of whole numbers add up exactly."""
    whole = (factor == factor.trunc()).all(dim=1, keepdim=True) & factor.isfinite().all(dim=1, keepdim=True)
    return whole & (torch.linalg.vecdot(factor, factor).unsqueeze(1) <= bound * bound)
