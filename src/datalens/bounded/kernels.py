"""Triton kernels for TopkStoSignGrad, the bounded sum of votes, and NormTopK.

Votes and their sums are bit for bit those of the torch code on a CPU. The gradient of one image is read once and stays
in registers while its k-th largest magnitude is found by bisection (non-negative floats are ordered like their bits). A
vote is written as one byte.

For NormTopK there are norms of rows, the limit of what is kept, and the sum in float64, each in one pass; torch would
first write every number as float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _mix(x):
    """The mixing function of the random streams: `streams._mix`."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _top_k_sign(
    values, keys, again, votes, clip,
    IMAGES: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    v = tl.load(values + row * D + at, mask=at < D, other=0.0)
    size = tl.abs(v)
    finite = tl.sum((size < float("inf")).to(tl.int32)) == BD  # the comparison is false for NaN too
    size = tl.where(finite, size, 0.0)
    bits = size.to(tl.int32, bitcast=True)
    chosen = bits > 0
    if tl.sum(chosen.to(tl.int32)) > K:
        # Halve [low, high) until exactly K are at or above low. If it cannot be halved further, there are ties.
        low = tl.full((), 1, tl.int32)
        high = tl.max(bits) + 1
        count = tl.sum((bits >= low).to(tl.int32))
        while (count != K) & (high - low > 1):
            middle = low + (high - low) // 2
            there = tl.sum((bits >= middle).to(tl.int32))
            count = tl.where(there >= K, there, count)
            high = tl.where(there >= K, high, middle)
            low = tl.where(there >= K, middle, low)
        chosen = bits >= low
        if count > K:
            above = bits > low
            room = K - tl.sum(above.to(tl.int32))
            level = bits == low
            chosen = above | (level & (tl.cumsum(level.to(tl.int32)) <= room))
    clipped = tl.where(chosen, tl.minimum(size, clip), 0.0)
    largest = tl.max(clipped)
    clipped = tl.where(v < 0, -clipped, clipped)
    counter = (row % IMAGES).to(tl.int32) * D + at
    key = tl.load(keys + row // IMAGES).to(tl.uint32, bitcast=True)
    word = _mix(_mix((counter // 2).to(tl.uint32) + key) ^ tl.load(again + row // IMAGES).to(tl.uint32, bitcast=True))
    half = tl.where(counter % 2 == 0, word & 0xFFFF, word >> 16)
    level = half.to(tl.float32) * (1.0 / 32768.0) - 1.0
    vote = tl.where(level * largest < clipped, 1, -1)
    tl.store(votes + row * D + at, tl.where(clipped != 0, vote, 0).to(tl.int8), mask=at < D)


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _squares(rows, out, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BD,), dtype=tl.int32)
    for start in range(0, D, BD):
        at = start + tl.arange(0, BD)
        x = tl.load(rows + row * D + at, mask=at < D, other=0).to(tl.int32)
        total += x * x
    tl.store(out + row, tl.sum(total.to(tl.int64)))


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _add(rows, fits, out, N, D: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Add up the rows of one part that fit, per coordinate. These are integers, so the order does not matter."""
    blocks = tl.cdiv(D, BD)
    at = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    first = (tl.program_id(0) // blocks).to(tl.int64) * PART
    total = tl.zeros((BD,), dtype=tl.int32)
    for start in range(0, PART, BN):
        row = first + start + tl.arange(0, BN)
        keep = tl.load(fits + row, mask=row < N, other=0) != 0
        x = tl.load(rows + row[:, None] * D + at[None, :], mask=keep[:, None] & (at < D)[None, :], other=0)
        total += tl.sum(x.to(tl.int32), axis=0)
    tl.atomic_add(out + at, total, mask=at < D)


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _cut(rows, squares, kept, limits, k, D: tl.constexpr, BD: tl.constexpr):
    """Find the limit of one row by bisection over its bits; the row stays in its processor's cache meanwhile."""
    row = tl.program_id(0).to(tl.int64)
    total, exact = tl.zeros((BD,), dtype=tl.float32), tl.zeros((BD,), dtype=tl.float64)
    for start in range(0, D, BD):
        at = start + tl.arange(0, BD)
        x = tl.load(rows + row * D + at, mask=at < D, other=0.0)
        total += x * x
        exact += (x * x).to(tl.float64)
    whole = tl.sum(total)
    finite = whole < float("inf")  # the comparison is false for NaN too
    low = tl.full((), -1, tl.int32)  # a limit that drops nothing
    high = tl.full((), 0x7F7FFFFF, tl.int32)  # the largest finite float: a limit that drops everything
    while high - low > 1:
        middle = low + (high - low) // 2
        total = tl.zeros((BD,), dtype=tl.float32)
        for start in range(0, D, BD):
            at = start + tl.arange(0, BD)
            x = tl.load(rows + row * D + at, mask=at < D, other=0.0)
            total += tl.where(tl.abs(x).to(tl.int32, bitcast=True) > middle, x * x, 0.0)
        fits = tl.sum(total) <= k * whole
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
    limit = high.to(tl.float32, bitcast=True)
    rest = tl.zeros((BD,), dtype=tl.float64)
    for start in range(0, D, BD):
        at = start + tl.arange(0, BD)
        x = tl.load(rows + row * D + at, mask=at < D, other=0.0)
        rest += tl.where(tl.abs(x) > limit, x * x, 0.0).to(tl.float64)
    tl.store(squares + row, tl.where(finite, tl.sum(exact), 0.0))
    tl.store(kept + row, tl.where(finite, tl.sum(rest), 0.0))
    tl.store(limits + row, tl.where(finite, limit, float("inf")))


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _squared_norms(rows, out, D, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BD,), dtype=tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < D:
        at = start + tl.arange(0, BD)
        x = tl.load(rows + row * D + at, mask=at < D, other=0.0)
        total += (x * x).to(tl.float64)  # infinity where the square overflows, as on a CPU
        start += BD
    tl.store(out + row, tl.sum(total))


@triton.jit  # pragma: no cover (compiled, or rewritten by the interpreter)
def _weighed_sum(weights, rows, limits, out, N, D, CUT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    at = tl.program_id(0) * BD + tl.arange(0, BD)
    total = tl.zeros((BN, BD), dtype=tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < N:
        row = start + tl.arange(0, BN)
        weight = tl.load(weights + row, mask=row < N, other=0.0)
        there = (weight != 0)[:, None] & (at < D)[None, :]
        x = tl.load(rows + row.to(tl.int64)[:, None] * D + at[None, :], mask=there, other=0.0)
        if CUT:
            limit = tl.load(limits + row, mask=row < N, other=0.0)
            x = tl.where(tl.abs(x) > limit[:, None], x, 0.0)
        total += weight[:, None] * x.to(tl.float64)
        start += BN
    tl.store(out + at, tl.sum(total, axis=0), mask=at < D)


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared norms, [n] float64, of float32 rows [n, d].

    Args:
        rows: On a GPU.
    """
    n, d = rows.shape
    out = torch.zeros(n, dtype=torch.float64, device=rows.device)
    if rows.numel():
        _squared_norms[(n,)](rows.contiguous(), out, d, min(1024, triton.next_power_of_2(d)), num_warps=4)
    return out


def weighed_sum(weights: Tensor, rows: Tensor, limits: Tensor | None = None) -> Tensor:
    """Return Σ weights_i · rows_i, [d] float64. Rows of weight 0 are not read.

    Args:
        weights: [n] float64.
        rows: [n, d] float32.
        limits: [n] float32; only entries of a row with a larger magnitude are added. None: all are.
    """
    n, d = rows.shape
    out = torch.zeros(d, dtype=torch.float64, device=rows.device)
    if rows.numel():
        block, cut = min(64, triton.next_power_of_2(d)), limits is not None
        grid = (triton.cdiv(d, block),)
        _weighed_sum[grid](
            weights, rows.contiguous(), limits if cut else weights, out, n, d, cut, 1024 // block, block, num_warps=4
        )
    return out


def cut(rows: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `NormTopK` keeps of each row: squared norms, squared norms of what is kept, and limits.

    Of rows with NaN, or with entries too large to square, nothing is kept.

    Args:
        rows: [n, d] float32.
        k: Fraction of the squared norm that may be kept.

    Returns:
        Squared norms of the rows, [n] float64; of what is kept of them, [n] float64; and the largest magnitude that is
        dropped (`norm_topk.by_bisection`), [n] float32.
    """
    n, d = rows.shape
    squares, kept = torch.empty(2, n, dtype=torch.float64, device=rows.device)
    limits = torch.empty(n, dtype=torch.float32, device=rows.device)
    block = min(4096, triton.next_power_of_2(d))
    _cut[(n,)](rows.contiguous(), squares, kept, limits, k, d, block, num_warps=8)
    return squares, kept, limits


def top_k_sign(values: Tensor, keys: Tensor, again: Tensor, *, k: int, clip: float) -> Tensor:
    """Return the votes of teachers, [n, m, d] int8, as `TopKSign` makes them.

    Args:
        values: [n, m, d] float32, the teachers' gradients.
        keys: First part of `streams.row_keys` of the teachers.
        again: Second part.
        k: Coordinates that a teacher votes on per image.
        clip: Bound on the magnitude of a coordinate.
    """
    n, images, d = values.shape
    votes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    block = triton.next_power_of_2(d)
    _top_k_sign[(n * images,)](
        values.contiguous(),
        keys,
        again,
        votes,
        clip,
        images,
        d,
        k,
        block,
        num_warps=max(1, min(32, block // 512)),
    )
    return votes


def sum_votes(rows: Tensor, most: float) -> Tensor:
    """Return the sum of the rows whose squares sum to at most `most`: int8 [n, …] → int32 […].

    Args:
        rows: Votes, on a GPU.
        most: The largest sum of squares of a row that is counted.
    """
    n, shape = len(rows), rows.shape[1:]
    flat = rows.reshape(n, -1)
    d = flat.shape[1]
    squares = torch.empty(n, dtype=torch.int64, device=rows.device)
    _squares[(n,)](flat, squares, d, min(8192, triton.next_power_of_2(d)), num_warps=8)
    fits = (squares.to(torch.float64) <= most).to(torch.int8)
    total = torch.zeros(d, dtype=torch.int32, device=rows.device)
    part, block = 512, 1024
    _add[(triton.cdiv(d, block) * triton.cdiv(n, part),)](flat, fits, total, n, d, part, 8, block, num_warps=8)
    return total.view(shape)
