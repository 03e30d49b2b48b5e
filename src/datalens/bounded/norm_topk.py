"""NormTopK, DataLens Algorithm 4: per-sample gradients of parameters, clipped, compressed and summed.

A record's row is its whole gradient, over all parameters at once. Rows are looked at a few at a time, so the
per-sample gradients are read where they lie, and no copy of all of them is made.

Differs from the paper: of coordinates of equal size all are kept, or none.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.topk_sign import top_k_mask
from datalens.errors import DatalensError
from datalens.gpu import kernels_for

Selector = Literal["norm", "dim", "none"]

# Rows are enforced in float32, so they are declared, and paid for, as this much longer than asked.
ROUNDING = 1e-6
_CPU_BYTES, _GPU_BYTES = 2**21, 2**24  # of the rows looked at together: in a CPU's cache, or busy on a GPU


@dataclass(frozen=True, kw_only=True)
class NormTopK:
    """Clip to C, keep the largest coordinates, sum. With k = 1 or selector "none" it is plain DP-SGD (GM-DP).

    | selector | a clipped row g keeps | its norm is at most |
    |---|---|---|
    | norm | the largest squares, as long as they sum to at most k‖g‖² | √k·C |
    | dim | the ⌈k·d⌉ largest of its d coordinates | C: they may hold all of the norm |
    | none | everything | C |

    | row | becomes |
    |---|---|
    | NaN or infinity anywhere in it | zero |
    | one coordinate holds more than k of the squared norm | zero |
    """

    clip: float
    topk: float = 1.0
    selector: Selector = "norm"

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise DatalensError(f"clip must be above 0, and finite, not {self.clip:g}")
        if not 0 < self.topk <= 1:
            raise DatalensError(f"topk is a fraction, above 0 and at most 1, not {self.topk:g}")
        if self.selector not in ("norm", "dim", "none"):
            raise DatalensError(f"selector must be norm, dim or none, not {self.selector!r}")

    @property
    def bound(self) -> float:
        """What the norm of a row is brought down to: the paper's √k·C, or C."""
        return self.clip * (math.sqrt(self.topk) if self.selector == "norm" else 1.0)

    @property
    def l2_bound(self) -> float:
        """What a row is never longer than, rounding included."""
        return self.bound * (1 + ROUNDING)

    @property
    def keeps_all(self) -> bool:
        return self.selector == "none" or self.topk == 1.0

    def sum(self, gradients: list[Tensor], onto: BoundedSum | None = None) -> BoundedSum:
        """The sum over records of the rows, one [records, …] tensor per parameter; plus `onto`, other records' sum.

        An empty batch sums to zero.
        """
        if len({len(g) for g in gradients}) != 1:
            raise ValueError("every parameter must have the gradients of the same records")
        flat = [g.flatten(1) for g in gradients]  # views
        total = self._plain(flat) if self.keeps_all else self._compressed(flat)
        if onto is not None:
            if (onto.l2_bound, onto.private_total.shape) != (self.l2_bound, (1, len(total))):
                raise ValueError("sums of one release must agree on bound and shape")
            total = total + onto.private_total[0]
        return BoundedSum(
            private_total=total.unsqueeze(0),
            l2_bound=self.l2_bound,
            diameter=2 * self.l2_bound,
            row_unit="record",
            queries=1,
        )

    def _plain(self, flat: list[Tensor]) -> Tensor:
        """As Opacus does it, but for the rounding of a norm: theirs is off by 1e-5 in 10⁴ coordinates, 4e-4 in 10⁶."""
        norms = sum(map(_squared_norms, flat)).sqrt()  # type: ignore[union-attr]
        finite = norms.isfinite()
        if not bool(finite.all()):
            flat = [torch.where(finite.unsqueeze(1), g, 0.0) for g in flat]
        scale = torch.where(finite, (self.clip / (norms + 1e-6)).clamp(max=1.0), 0.0)
        return torch.cat([torch.einsum("i,i...", scale.to(g.dtype), g) for g in flat])

    def _compressed(self, flat: list[Tensor]) -> Tensor:
        """Some rows at a time, each as one vector over all parameters."""
        d = sum(g.shape[1] for g in flat)
        kind = torch.float64 if any(g.dtype == torch.float64 for g in flat) else torch.float32
        total = torch.zeros(d, dtype=kind, device=flat[0].device)
        size = max(1, (_GPU_BYTES if total.is_cuda else _CPU_BYTES) // (4 * d))
        for start in range(0, len(flat[0]), size):
            rows = torch.cat([g[start : start + size].to(kind) for g in flat], dim=1)  # [some, d]
            kept, squares = self.compress(rows)
            total += bounded_scale(kept, squares, clip=self.clip, bound=self.bound).to(kind) @ kept
        return total

    def compress(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[n, d] rows with what is not kept set to zero, and [n] their squared norms before, float64.

        The choice does not depend on how long a row is, so clipping can wait.
        """
        if self.selector == "dim":
            squares = _squared_norms(rows)
            kept = torch.where(top_k_mask(rows.abs(), math.ceil(self.topk * rows.shape[1])), rows, 0.0)
        else:
            limits, squares = largest_dropped(rows, self.topk)
            kept = (all_at_once if rows.is_cuda else row_by_row)(rows, limits)
        finite = squares.isfinite()
        if not bool(finite.all()):  # NaN, or too large to square
            kept = torch.where(finite.unsqueeze(1), kept, 0.0)
        return kept, squares


def bounded_scale(kept: Tensor, squares: Tensor, *, clip: float, bound: float) -> Tensor:
    """By what each row is multiplied: clipped as it came, and then short enough whatever was kept of it. [n] float64"""
    scale = (clip / squares.sqrt()).clamp(max=1.0)
    length = _squared_norms(kept).sqrt() * scale
    scale = scale * (bound / length).clamp(max=1.0)
    return torch.where(length > 0, scale, 0.0)  # where it is 0, or no number, there is nothing


def largest_dropped(rows: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """[n, 1] per row the smallest size such that the squares of what is larger sum to at most k of all squares.

    And that sum of all squares, [n] float64. Of a row of zeros any size will do.
    """
    if kernels_for(rows):
        from datalens.bounded.kernels import largest_dropped as on_gpu

        return on_gpu(rows, k)
    return by_bisection(rows, k) if rows.is_cuda else by_sorting(rows, k)


def all_at_once(rows: Tensor, limits: Tensor) -> Tensor:
    """Zero where a row is not larger than its limit."""
    return torch.where(rows.abs() > limits, rows, 0.0)


def row_by_row(rows: Tensor, limits: Tensor) -> Tensor:
    """The same; on a CPU many times faster than `where` with a limit a row."""
    kept = torch.empty_like(rows)
    for row, limit, place in zip(rows, limits[:, 0].tolist(), kept, strict=True):
        torch.ops.aten.hardshrink.out(row, limit, out=place)
    return kept


_EVERY, _FEWEST = 17, 2**12  # of a sample; not a power of two, in whose rhythm gradients of images repeat


def by_sorting(rows: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """Sorts only coordinates that can matter, which numpy does faster than a few masked sums over all of them."""
    sizes = rows.abs().numpy()
    limits, squares = np.zeros((len(rows), 1), dtype=sizes.dtype), np.zeros(len(rows))
    for i, row in enumerate(sizes):
        with np.errstate(over="ignore"):  # infinity is an answer
            squares[i] = whole = float(np.dot(row, row))
        if 0 < whole < math.inf:
            limits[i] = _limit(row, whole, k)
    return torch.from_numpy(limits), torch.from_numpy(squares)


def _limit(sizes: np.ndarray, whole: float, k: float) -> np.floating:
    """One row's. A sample says about how small the largest that goes is, and if that was wrong, a bound does.

    Squares below (1 − k) of their mean always go: all of them together are less than what has to go.
    """
    floor = math.sqrt((1 - k) * whole / len(sizes)) * (1 - 1e-4)
    about = floor
    if len(sizes) >= _FEWEST:
        sample = np.sort(sizes[::_EVERY])
        sums = np.cumsum(sample * sample)
        about = 0.9 * float(sample[min(int(np.searchsorted(sums, (1 - k) * whole / _EVERY)), len(sample) - 1)])
    for lowest in (max(about, floor), floor):
        may = np.compress(sizes >= lowest, sizes)
        may.sort()
        kept = int(np.searchsorted(np.cumsum(np.square(may[::-1], dtype=np.float64)), k * whole, side="right"))
        if kept < len(may):
            return may[-1 - kept]
    return np.nextafter(may[0], 0, dtype=may.dtype)  # rounding: all that may stay do


def by_bisection(rows: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """Floats that are not negative are ordered as their bits are: thirty-one halvings find the size exactly."""
    sizes = rows.abs().to(torch.float32)
    squares = sizes * sizes
    whole = squares.sum(dim=1, keepdim=True, dtype=torch.float64)
    low = torch.full((len(rows), 1), -1, dtype=torch.int32, device=rows.device)  # drops nothing
    high = torch.full_like(low, 0x7F7FFFFF)  # the largest number: drops all
    for _ in range(31):
        middle = low + (high - low) // 2
        kept = torch.where(sizes > middle.view(torch.float32), squares, 0.0).sum(dim=1, keepdim=True)
        fits = (kept <= k * whole) & (middle >= 0)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high.view(torch.float32).to(rows.dtype), whole[:, 0]


def _squared_norms(rows: Tensor) -> Tensor:
    """[n] float64. In float32 over few coordinates at a time: over many, what is small is lost, and rows look short."""
    whole = rows.shape[1] // 512 * 512
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, 512)), dim=2) if whole else rows[:, :0]
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1)
    return parts.to(torch.float64).square().sum(dim=1) + rest.to(torch.float64).square()
