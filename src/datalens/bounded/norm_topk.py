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
        few = self.selector == "norm" and not total.is_cuda
        for start in range(0, len(flat[0]), size):
            rows = torch.cat([g[start : start + size].to(kind) for g in flat], dim=1)  # [some, d]
            (self._add_few if few else self._add_rows)(rows, total)
        return total

    def _add_rows(self, rows: Tensor, total: Tensor) -> None:
        """Dense: [n, d] rows with what is not kept set to zero."""
        squares = _squared_norms(rows)
        if self.selector == "dim":
            kept = torch.where(top_k_mask(rows.abs(), math.ceil(self.topk * rows.shape[1])), rows, 0.0)
        else:
            kept = torch.where(rows.abs() > largest_dropped(rows, self.topk), rows, 0.0)
        kept = torch.where(squares.isfinite().unsqueeze(1), kept, 0.0)  # NaN, or too large to square
        total += bounded_scale(squares, _squared_norms(kept), clip=self.clip, bound=self.bound).to(total.dtype) @ kept

    def _add_few(self, rows: Tensor, total: Tensor) -> None:
        """Row by row, and of a row only what is kept, which is little: on a CPU every look at all of it counts."""
        chosen = [keep_largest(row, self.topk) for row in rows.numpy()]
        squares = torch.tensor([[whole, float(np.dot(v, v))] for _, v, whole in chosen], dtype=torch.float64)
        scales = bounded_scale(squares[:, 0], squares[:, 1], clip=self.clip, bound=self.bound).tolist()
        summed = total.numpy()
        for (at, values, _), scale in zip(chosen, scales, strict=True):
            summed[at] += scale * values


def bounded_scale(squares: Tensor, kept: Tensor, *, clip: float, bound: float) -> Tensor:
    """By what each row is multiplied: clipped as it came, and then short enough whatever was kept of it. [n] float64

    `squares`, `kept`: squared norms of the whole row and of what is added of it, [n] float64.
    """
    scale = (clip / squares.sqrt()).clamp(max=1.0)
    length = kept.sqrt() * scale
    scale = scale * (bound / length).clamp(max=1.0)
    return torch.where(length > 0, scale, 0.0)  # where it is 0, or no number, there is nothing


_EVERY, _FEWEST = 17, 2**12  # of a sample; not a power of two, in whose rhythm gradients of images repeat


def keep_largest(row: np.ndarray, k: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Where the largest are whose squares sum to at most k of all, what is there (float64), and the sum of all squares.

    A sample says about how large they are; if that was wrong, a bound does: squares below (1 − k) of their mean always
    go, since all of them together are less than what has to go.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        whole = float(np.dot(row, row))
    if not 0 < whole < math.inf:
        return np.zeros(0, dtype=np.intp), np.zeros(0), 0.0
    sizes = np.abs(row)
    floor = math.sqrt((1 - k) * whole / len(row)) * (1 - 1e-4)
    about = floor
    if len(row) >= _FEWEST:
        sample = np.sort(sizes[::_EVERY])
        sums = np.cumsum(sample * sample)
        about = 0.9 * float(sample[min(int(np.searchsorted(sums, (1 - k) * whole / _EVERY)), len(sample) - 1)])
    for lowest in (max(about, floor), floor):
        at = np.flatnonzero(sizes >= lowest)
        may = sizes[at]
        rising = np.sort(may)
        kept = int(np.searchsorted(np.cumsum(np.square(rising[::-1], dtype=np.float64)), k * whole, side="right"))
        if kept < len(rising):  # the largest that is not kept is here, and all of its size go with it
            at = at[may > rising[-1 - kept]]
            break
    return at, row[at].astype(np.float64), whole


def largest_dropped(rows: Tensor, k: float) -> Tensor:
    """[n, 1] per row the smallest size such that the squares of what is larger sum to at most k of all squares."""
    if kernels_for(rows):
        from datalens.bounded.kernels import largest_dropped as on_gpu

        return on_gpu(rows, k)
    return by_bisection(rows, k)


def by_bisection(rows: Tensor, k: float) -> Tensor:
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
    return high.view(torch.float32).to(rows.dtype)


def _squared_norms(rows: Tensor) -> Tensor:
    """[n] float64. In float32 over few coordinates at a time: over many, what is small is lost, and rows look short."""
    whole = rows.shape[1] // 512 * 512
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, 512)), dim=2) if whole else rows[:, :0]
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1)
    return parts.to(torch.float64).square().sum(dim=1) + rest.to(torch.float64).square()
