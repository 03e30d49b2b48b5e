"""NormTopK, DataLens Algorithm 4: per-sample gradients of parameters, clipped, compressed and summed.

A record's row is its whole gradient, over all parameters at once. Rows are processed a few at a time: the per-sample
gradients are read in place, and no copy of all of them is made.

Rows are added up in float64. In float32, each of thousands of rows in the same direction would move the sum by more, or
less, than its own norm.

Differs from the paper: of coordinates of equal magnitude either all are kept, or none.
"""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.topk_sign import top_k_mask
from datalens.errors import DatalensError
from datalens.public.triton import kernels_for

Selector = Literal["norm", "dim", "none"]
Numbers = TypeVar("Numbers", np.ndarray, Tensor)

# Norms are computed in float32, so rows are declared, and charged for, as longer than the bound by this fraction.
ROUNDING = 1e-6
LEAST_CLIP = 1e-12  # squares of much shorter rows underflow in float32, and their norm is lost
_CPU_BYTES, _GPU_BYTES = 2**21, 2**25  # rows that are processed together: they fit a CPU's cache, or keep a GPU busy


@dataclass(frozen=True, kw_only=True)
class NormTopK:
    """Clips rows to norm C, keeps their largest coordinates, and sums. Plain DP-SGD (GM-DP) with k = 1 or "none".

    | selector | a clipped row g keeps | its norm is at most |
    |---|---|---|
    | norm | the largest squares, as long as they sum to at most k‖g‖² | √k·C |
    | dim | the ⌈k·d⌉ largest of its d coordinates | C: they may hold all of the norm |
    | none | everything | C |

    | row | becomes |
    |---|---|
    | NaN or infinity anywhere in it | zero |
    | one coordinate holds more than k of the squared norm | zero |

    Args:
        clip: C.
        topk: k, a fraction.
        selector: Which coordinates are kept.

    Raises:
        DatalensError: an argument is out of range.
    """

    clip: float
    topk: float = 1.0
    selector: Selector = "norm"

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise DatalensError(f"clip must be above 0 and finite, not {self.clip:g}")
        if self.clip < LEAST_CLIP:
            raise DatalensError(f"clip must be at least {LEAST_CLIP:g}: rows of {self.clip:g} cannot be measured")
        if not 0 < self.topk <= 1:
            raise DatalensError(f"topk must be a fraction above 0 and at most 1, not {self.topk:g}")
        if self.selector not in ("norm", "dim", "none"):
            raise DatalensError(f"selector must be norm, dim or none, not {self.selector!r}")

    @property
    def bound(self) -> float:
        """The norm that rows are scaled down to: the paper's √k·C, or C."""
        return self.clip * (math.sqrt(self.topk) if self.selector == "norm" else 1.0)

    @property
    def l2_bound(self) -> float:
        """The bound on the norm of a row, rounding included."""
        return self.bound * (1 + ROUNDING)

    @property
    def keeps_all(self) -> bool:
        """Whether every coordinate is kept, so that nothing is compressed."""
        return self.selector == "none" or self.topk == 1.0

    def sum(self, gradients: list[Tensor], onto: BoundedSum | None = None) -> BoundedSum:
        """Return the bounded sum of the records' rows. An empty batch sums to zero.

        Args:
            gradients: One [records, …] tensor per parameter.
            onto: The sum of other records' rows, which is added.

        Raises:
            ValueError: parameters have gradients of different numbers of records, or `onto` has another bound or shape.
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
        """Clip and sum as Opacus does, but with smaller rounding errors of the norm.

        Theirs are 1e-5 for 10⁴ coordinates and 4e-4 for 10⁶.
        """
        norms = sum(map(_squared_norms, flat)).sqrt()  # type: ignore[union-attr]
        scale = torch.where(norms.isfinite(), (self.clip / (norms + 1e-6)).clamp(max=1.0), 0.0)
        return torch.cat([_weighed_sum(scale, g) for g in flat])

    def _compressed(self, flat: list[Tensor]) -> Tensor:
        """Clip, compress and sum some rows at a time, each as one vector over all parameters."""
        d = sum(g.shape[1] for g in flat)
        kind = torch.float64 if any(g.dtype == torch.float64 for g in flat) else torch.float32
        if self.selector == "norm" and not flat[0].is_cuda:
            return torch.from_numpy(self._by_threads([g.to(kind).numpy() for g in flat]))
        total = torch.zeros(d, dtype=torch.float64, device=flat[0].device)
        size = max(1, (_GPU_BYTES if total.is_cuda else _CPU_BYTES) // (4 * d))
        for start in range(0, len(flat[0]), size):
            self._add_rows(torch.cat([g[start : start + size].to(kind) for g in flat], dim=1), total)
        return total

    def _by_threads(self, flat: list[np.ndarray]) -> np.ndarray:
        """Do so on a CPU, in as many threads as torch has. numpy releases the interpreter lock during its work."""
        count = len(flat[0])
        threads = min(torch.get_num_threads(), max(1, count))
        cuts = [i * count // threads for i in range(threads + 1)]
        parts = [[g[begin:end] for g in flat] for begin, end in itertools.pairwise(cuts)]
        with ThreadPoolExecutor(threads) as pool:
            return np.sum(list(pool.map(self._sum_few, parts)), axis=0)

    def _sum_few(self, flat: list[np.ndarray]) -> np.ndarray:
        """Do so in one thread: in blocks that fit the cache, and in the same memory, since new pages are slow."""
        count, d, kind = len(flat[0]), sum(g.shape[1] for g in flat), flat[0].dtype
        total = np.zeros(d)
        size = max(1, min(count, _CPU_BYTES // (4 * d)))
        block, sizes, kept = np.empty((size, d), kind), np.empty((size, d), kind), np.empty((size, d), bool)
        guess = 2.0
        for start in range(0, count, size):
            few = [g[start : start + size] for g in flat]
            rows = np.concatenate(few, axis=1, out=block[: len(few[0])])
            n = len(rows)
            squares = _squares_by_numpy(rows)
            wrong = ~np.isfinite(squares)
            rows[wrong], squares[wrong] = 0.0, 0.0
            limits, guess = find_limits(np.abs(rows, out=sizes[:n]), squares, self.topk, guess)
            rows *= np.greater(sizes[:n], limits[:, None], out=kept[:n])
            scale = bounded_scale(squares, _squares_by_numpy(rows), clip=self.clip, bound=self.bound)
            total += np.einsum("i,ij->j", scale, rows)
        return total

    def _add_rows(self, rows: Tensor, total: Tensor) -> None:
        """Add the compressed rows, [n, d], to `total`. What is not kept is set to zero in place, to save memory."""
        if self.selector == "norm" and _by_kernels(rows):
            from datalens.bounded.kernels import cut, weighed_sum

            squares, kept, limits = cut(rows, self.topk)
            total += weighed_sum(bounded_scale(squares, kept, clip=self.clip, bound=self.bound), rows, limits)
            return
        squares = _squared_norms(rows)
        finite = squares.isfinite()  # otherwise the row has NaN, or entries too large to square
        squares = torch.where(finite, squares, 0.0)
        rows.masked_fill_(~finite.unsqueeze(1), 0.0)
        if self.selector == "dim":
            rows.masked_fill_(~top_k_mask(rows.abs(), math.ceil(self.topk * rows.shape[1])), 0.0)
        else:
            rows.masked_fill_(rows.abs() <= by_bisection(rows, self.topk), 0.0)
        total += _weighed_sum(bounded_scale(squares, _squared_norms(rows), clip=self.clip, bound=self.bound), rows)


def _by_kernels(rows: Tensor) -> bool:
    return kernels_for(rows) and kernels_agree(rows.device)


@cache
def kernels_agree(device: torch.device) -> bool:
    """Return whether the kernels compute the same norms and sums as torch on this GPU. The bounds depend on it.

    Checked once per device, on random rows. Where they disagree, torch is used instead.

    Args:
        device: A GPU.
    """
    from datalens.bounded import kernels

    random = torch.Generator().manual_seed(0)
    rows = torch.randn(19, 9000, generator=random).to(device)  # several whole blocks of every kernel, and partial ones
    weights = torch.rand(19, generator=random, dtype=torch.float64).to(device)
    squares, kept, limits = kernels.cut(rows, 0.7)
    larger = torch.where(rows.abs() > limits.unsqueeze(1), rows, 0.0)
    pairs = (
        (ROUNDING, squares, squares_by_torch(rows)),
        (ROUNDING, kernels.squared_norms(rows), squares_by_torch(rows)),
        (ROUNDING, kept, squares_by_torch(larger)),
        (1e-12, kernels.weighed_sum(weights, rows), weights @ rows.to(torch.float64)),
        (1e-12, kernels.weighed_sum(weights, rows, limits), weights @ larger.to(torch.float64)),
    )
    return all(torch.allclose(ours, theirs, rtol=off, atol=1e-12) for off, ours, theirs in pairs)


def bounded_scale(squares: Numbers, kept: Numbers, *, clip: float, bound: float) -> Numbers:
    """Return the factor of each row, [n] float64: it clips the whole row, and then bounds what is kept of it.

    Args:
        squares: Squared norms of the whole rows, [n] float64, finite.
        kept: Squared norms of what is kept of them, [n] float64, finite.
        clip: Bound on the norm of a whole row.
        bound: Bound on the norm of what is kept.
    """
    scale = clip / (squares**0.5).clip(min=clip)
    return scale * bound / (kept**0.5 * scale).clip(min=bound) * (kept > 0)  # 0 where the norm underflowed


def find_limits(sizes: np.ndarray, whole: np.ndarray, k: float, guess: float) -> tuple[np.ndarray, float]:
    """Return the limit of each row, and a guess for similar rows.

    The limit is the smallest entry such that the squares of all larger entries sum to at most k of all squares. The
    entries up to it hold at least 1 − k of all squares, in at most d entries, so the limit is at least
    √((1 − k)·whole/d). Only entries above `guess` times that are sorted. If all of them may be kept, the search is
    repeated with more. So a bad guess costs time and does not change the result.

    Args:
        sizes: [n, d] magnitudes.
        whole: [n] float64, the sum of squares of each row.
        k: Fraction of the squares that may be kept.
        guess: Where to begin; 0 sorts everything.

    Returns:
        Limits, [n], and a guess for rows that are similar to these.
    """
    (n, d), least = sizes.shape, np.sqrt((1 - k) * whole / sizes.shape[1])
    chosen = sizes > (guess * least).astype(sizes.dtype)[:, None] if guess > 0 else np.ones((n, d), bool)
    counts = np.count_nonzero(chosen, axis=1)
    falling = np.zeros((n, max(1, int(counts.max()))), sizes.dtype)
    falling[np.arange(falling.shape[1]) < counts[:, None]] = sizes[chosen]
    falling.sort(axis=1)
    falling = falling[:, ::-1]
    kept = np.where(whole > 0, how_many_fit(falling, k * whole), 0)
    limits = falling[np.arange(n), np.minimum(kept, falling.shape[1] - 1)]
    more = (kept >= counts) & (whole > 0)
    if guess == 0:
        limits[more] = -1.0  # by rounding, the whole row may be kept
    elif more.any():
        limits[more] = find_limits(sizes[more], whole[more], k, 0.99 if guess > 1 else 0.0)[0]
    known = (limits > 0) & (least > 0)
    return limits, max(1.0, 0.9 * float((limits[known] / least[known]).min())) if known.any() else guess


def how_many_fit(falling: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return how many leading entries of each row have squares that sum to at most `most`: [n, m], [n] → [n].

    Sums of groups come first, and then one group is searched: numpy's cumsum is slow and holds the interpreter lock.

    Args:
        falling: [n, m] the sizes of entries, largest first.
        most: [n] the limit on the sum of their squares.
    """
    (n, m), each = falling.shape, np.arange(len(falling))
    squares = np.empty((n, m // 64 + 1, 64))
    np.square(falling, out=squares.reshape(n, -1)[:, :m], dtype=np.float64)
    squares.reshape(n, -1)[:, m:] = np.inf  # padding never fits
    ends = np.cumsum(squares.sum(axis=2), axis=1)
    groups = np.count_nonzero(ends <= most[:, None], axis=1)
    before = np.where(groups > 0, ends[each, groups - 1], 0.0)
    sums = before[:, None] + np.cumsum(squares[each, groups], axis=1)
    return 64 * groups + np.count_nonzero(sums <= most[:, None], axis=1)


def by_bisection(rows: Tensor, k: float) -> Tensor:
    """Return the limit of each row (see `find_limits`) by bisection: [n, d] → [n, 1].

    Non-negative floats are ordered like their bits, so 31 halvings find the limit exactly.

    Args:
        rows: [n, d].
        k: Fraction of the squared norm to drop.
    """
    sizes = rows.abs().to(torch.float32)
    squares = sizes * sizes
    whole = squares.sum(dim=1, keepdim=True, dtype=torch.float64)
    low = torch.full((len(rows), 1), -1, dtype=torch.int32, device=rows.device)  # a limit that drops nothing
    high = torch.full_like(low, 0x7F7FFFFF)  # the largest finite float: a limit that drops everything
    for _ in range(31):
        middle = low + (high - low) // 2
        kept = torch.where(sizes > middle.view(torch.float32), squares, 0.0).sum(dim=1, keepdim=True)
        fits = (kept <= k * whole) & (middle >= 0)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high.view(torch.float32).to(rows.dtype)


def _weighed_sum(scale: Tensor, rows: Tensor) -> Tensor:
    """Return Σ scale_i · rows_i: [n] float64, [n, d] → [d] float64. A row of scale 0 adds nothing, whatever it holds.

    Without the kernel, rows are converted to float64 a few at a time.
    """
    if _by_kernels(rows):
        from datalens.bounded.kernels import weighed_sum

        return weighed_sum(scale, rows)
    if not bool(scale.all()):
        rows = torch.where(scale.unsqueeze(1) != 0, rows, 0.0)
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    size = max(1, (_GPU_BYTES // 2 if rows.is_cuda else 4 * _CPU_BYTES) // (8 * max(1, rows.shape[1])))
    for few, weights in zip(rows.split(size), scale.split(size), strict=True):
        total += weights @ few.to(torch.float64)
    return total


def _squared_norms(rows: Tensor) -> Tensor:
    """Return the squared norms of rows: [n, d] → [n] float64.

    Squares are summed in float32 over few coordinates at a time. Over many, small ones would be lost, and the norm
    would come out too small.
    """
    if _by_kernels(rows):
        from datalens.bounded.kernels import squared_norms

        return squared_norms(rows)
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):  # numpy is faster here
        return torch.from_numpy(_squares_by_numpy(rows.numpy()))
    return squares_by_torch(rows)


def squares_by_torch(rows: Tensor) -> Tensor:
    """Return the squared norms of rows in torch, summed in float32 over 512 coordinates at a time: [n, d] → [n].

    Args:
        rows: [n, d], of any floating-point type.
    """
    whole = rows.shape[1] // 512 * 512
    parts, rest = rows[:, :whole].unflatten(1, (-1, 512)), rows[:, whole:]
    kind = torch.promote_types(rows.dtype, torch.float32)  # a half-precision norm would be wrong by a thousandth
    norms = torch.linalg.vector_norm(parts, dim=2, dtype=kind).to(torch.float64).square().sum(dim=1)
    return norms + torch.linalg.vector_norm(rest, dim=1, dtype=kind).to(torch.float64).square()


def _squares_by_numpy(rows: np.ndarray) -> np.ndarray:
    whole = rows.shape[1] // 512 * 512
    parts, rest = rows[:, :whole].reshape(len(rows), whole // 512, 512), rows[:, whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.vecdot(parts, parts).sum(axis=1, dtype=np.float64) + np.vecdot(rest, rest)
