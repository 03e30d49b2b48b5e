"""Triton kernels for the expensive layers of the convolutional teachers, used by `layers.py` on a GPU.

An ordinary convolution would copy every 5×5 patch (9 GB per layer for 4000 teachers) before multiplying it. These
kernels read patches directly from the image while they multiply. Every program works for one teacher, and does not
depend on the other teachers: a row is bit for bit the same in chunks of 16 or a multiple (see `teachers.plan_memory`),
and in every run (there are no atomics).

Large products use tf32, like PyTorch's own convolutions by default. docs/benchmarks.md states how many votes that
changes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PRECISION = "tf32"  # for convolutions and the dense layer
EXACT = "tf32x3"  # for small products: three tf32 products are nearly as precise as float32
SLOPE = tl.constexpr(0.2)  # negative slope of leaky ReLU


@triton.jit
def _patches(x, p, k, P, K, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr):
    """Load taps k = (ky, kx, channel) of output positions p = (image, row, column); zero outside the image."""
    image = p // (OH * OW)
    row = 2 * ((p // OW) % OH) - 2 + k // (5 * C)
    column = 2 * (p % OW) - 2 + (k % (5 * C)) // C
    inside = (p < P) & (k < K) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(x + ((image * H + row) * W + column) * C + k % C, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x, weight, bias, maps, labels, out, CLASSES,
    P: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr,
    WITH_MAPS: tl.constexpr, LEAKY: tl.constexpr, TF: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = 25 * C
    blocks_p, blocks_o = tl.cdiv(P, BP), tl.cdiv(F, BO)
    teacher = (tl.program_id(0) // (blocks_p * blocks_o)).to(tl.int64)
    p = (tl.program_id(0) // blocks_o) % blocks_p * BP + tl.arange(0, BP)
    o = tl.program_id(0) % blocks_o * BO + tl.arange(0, BO)
    x += teacher * (P // (OH * OW)) * (H * W * C)
    total = tl.zeros((BP, BO), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        patch = _patches(x, p[:, None], k[None, :], P, K, H, W, C, OH, OW)
        w = tl.load(weight + (teacher * K + k[:, None]) * F + o[None, :], mask=(k < K)[:, None] & (o < F)[None, :])
        total = tl.dot(patch, tl.where((k < K)[:, None] & (o < F)[None, :], w, 0.0), total, input_precision=TF)
    total += tl.load(bias + teacher * F + o, mask=o < F, other=0.0)[None, :]
    here = (p < P)[:, None] & (o < F)[None, :]
    if WITH_MAPS:
        label = tl.load(labels + teacher * (P // (OH * OW)) + p // (OH * OW), mask=p < P, other=0)
        row = (teacher * CLASSES + label) * (OH * OW) + p % (OH * OW)
        total += tl.load(maps + row[:, None] * F + o[None, :], mask=here, other=0.0)
    if LEAKY:
        total = tl.where(total > 0, total, SLOPE * total)
    tl.store(out + (teacher * P + p[:, None]) * F + o[None, :], total, mask=here)


@triton.jit
def _weight_gradient(
    x, dy, dw, db,
    P: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr,
    TF: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = 25 * C
    blocks_k, blocks_o = tl.cdiv(K, BK), tl.cdiv(F, BO)
    teacher = (tl.program_id(0) // (blocks_k * blocks_o)).to(tl.int64)
    k = (tl.program_id(0) // blocks_o) % blocks_k * BK + tl.arange(0, BK)
    o = tl.program_id(0) % blocks_o * BO + tl.arange(0, BO)
    x += teacher * (P // (OH * OW)) * (H * W * C)
    total = tl.zeros((BK, BO), dtype=tl.float32)
    along = tl.zeros((BO,), dtype=tl.float32)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        patch = _patches(x, p[None, :], k[:, None], P, K, H, W, C, OH, OW)
        here = (p < P)[:, None] & (o < F)[None, :]
        d = tl.load(dy + (teacher * P + p[:, None]) * F + o[None, :], mask=here, other=0.0)
        total = tl.dot(patch, d, total, input_precision=TF)
        along += tl.sum(d, axis=0)
    tl.store(dw + (teacher * K + k[:, None]) * F + o[None, :], total, mask=(k < K)[:, None] & (o < F)[None, :])
    if (tl.program_id(0) // blocks_o) % blocks_k == 0:
        tl.store(db + teacher * F + o, along, mask=o < F)


@triton.jit
def _input_gradient(
    dy, weight, dx,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, TF: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the four input pixels 2·(i, j) + (a, b) together, which depend on the same 3×3 outputs.

    A column of the product is (kind of pixel, channel). Output (i + s, j + t) is connected to pixel kind (a, b) by the
    tap (2 − 2s + a, 2 − 2t + b), if there is one.
    """
    blocks_q, blocks_c = tl.cdiv(B * OH * OW, BQ), tl.cdiv(C, BC)
    teacher = (tl.program_id(0) // (blocks_q * blocks_c)).to(tl.int64)
    q = (tl.program_id(0) // blocks_c) % blocks_q * BQ + tl.arange(0, BQ)
    column = tl.arange(0, 4 * BC)
    a, b = column // (2 * BC), (column // BC) % 2
    c = tl.program_id(0) % blocks_c * BC + column % BC
    image, i, j = q // (OH * OW), (q // OW) % OH, q % OW
    dy += teacher * (B * OH * OW * F)
    weight += teacher * (25 * C * F)
    dx += teacher * (B * H * W * C)
    total = tl.zeros((BQ, 4 * BC), dtype=tl.float32)
    for s in tl.static_range(-1, 2):
        for t in tl.static_range(-1, 2):
            inside = (q < B * OH * OW) & (i + s >= 0) & (i + s < OH) & (j + t >= 0) & (j + t < OW)
            ky, kx = 2 - 2 * s + a, 2 - 2 * t + b
            tap = (ky * 5 + kx) * C + c
            known = (ky < 5) & (kx < 5) & (c < C)
            for start in range(0, F, BF):
                f = start + tl.arange(0, BF)
                d = tl.load(
                    dy + (q + s * OW + t)[:, None] * F + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0
                )
                w = tl.load(weight + tap[None, :] * F + f[:, None], mask=known[None, :] & (f < F)[:, None], other=0.0)
                total = tl.dot(d, w, total, input_precision=TF)
    y, x = 2 * i[:, None] + a[None, :], 2 * j[:, None] + b[None, :]
    here = (q < B * OH * OW)[:, None] & (c < C)[None, :] & (y < H) & (x < W)
    tl.store(dx + ((image[:, None] * H + y) * W + x) * C + c[None, :], total, mask=here)


@triton.jit
def _multiply(
    a, b, out, a_n, a_m, a_k, b_n, b_k, b_m,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute out[n] = a[n] @ b[n] for each teacher n, with any strides."""
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    teacher = (tl.program_id(0) // (blocks_m * blocks_n)).to(tl.int64)
    m = (tl.program_id(0) // blocks_n) % blocks_m * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks_n * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(
            a + teacher * a_n + m[:, None] * a_m + k[None, :] * a_k, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0
        )
        right = tl.load(
            b + teacher * b_n + k[:, None] * b_k + n[None, :] * b_m, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=TF)
    tl.store(out + (teacher * M + m[:, None]) * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _norm_forward(
    x, scale, shift, out, mean, deviation,
    FIRST: tl.constexpr, SECOND: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Apply batch norm over one group of one teacher (its first rows, or the second ones, if any), then leaky ReLU."""
    G: tl.constexpr = 1 if SECOND == 0 else 2
    LONGEST: tl.constexpr = FIRST if FIRST > SECOND else SECOND
    blocks = tl.cdiv(C, BC)
    part = (tl.program_id(0) // blocks).to(tl.int64)  # teacher · G + group
    R = tl.where(part % G == 0, FIRST, SECOND)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    x += (part // G * (FIRST + SECOND) + part % G * FIRST) * C
    out += (part // G * (FIRST + SECOND) + part % G * FIRST) * C
    total = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, LONGEST, BR):
        r = start + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        total += tl.sum(tl.load(x + r[:, None] * C + c[None, :], mask=here, other=0.0), axis=0)
    mu = total / R
    square = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, LONGEST, BR):
        r = start + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        off = tl.load(x + r[:, None] * C + c[None, :], mask=here, other=0.0) - mu[None, :]
        square += tl.sum(tl.where(here, off * off, 0.0), axis=0)
    inverse = 1.0 / tl.sqrt(square / R + 1e-5)
    tl.store(mean + part * C + c, mu, mask=c < C)
    tl.store(deviation + part * C + c, inverse, mask=c < C)
    gain = inverse * tl.load(scale + part // G * C + c, mask=c < C, other=0.0)
    bias = tl.load(shift + part // G * C + c, mask=c < C, other=0.0)
    for start in range(0, LONGEST, BR):
        r = start + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        z = (tl.load(x + at, mask=here, other=0.0) - mu[None, :]) * gain[None, :] + bias[None, :]
        tl.store(out + at, tl.where(z > 0, z, SLOPE * z), mask=here)


@triton.jit
def _norm_backward(
    x, dy, scale, shift, mean, deviation, dx, dscale, dshift,
    FIRST: tl.constexpr, SECOND: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = 1 if SECOND == 0 else 2
    LONGEST: tl.constexpr = FIRST if FIRST > SECOND else SECOND
    blocks = tl.cdiv(C, BC)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    R = tl.where(part % G == 0, FIRST, SECOND)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    x += (part // G * (FIRST + SECOND) + part % G * FIRST) * C
    dy += (part // G * (FIRST + SECOND) + part % G * FIRST) * C
    dx += (part // G * (FIRST + SECOND) + part % G * FIRST) * C
    mu = tl.load(mean + part * C + c, mask=c < C, other=0.0)
    inverse = tl.load(deviation + part * C + c, mask=c < C, other=0.0)
    gain = tl.load(scale + part // G * C + c, mask=c < C, other=0.0)
    bias = tl.load(shift + part // G * C + c, mask=c < C, other=0.0)
    first = tl.zeros((BC,), dtype=tl.float32)
    second = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, LONGEST, BR):
        r = start + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        unit = (tl.load(x + at, mask=here, other=0.0) - mu[None, :]) * inverse[None, :]
        d = tl.load(dy + at, mask=here, other=0.0)
        d = tl.where(unit * gain[None, :] + bias[None, :] > 0, d, SLOPE * d)
        first += tl.sum(d, axis=0)
        second += tl.sum(d * unit, axis=0)
    tl.store(dshift + part * C + c, first, mask=c < C)
    tl.store(dscale + part * C + c, second, mask=c < C)
    for start in range(0, LONGEST, BR):
        r = start + tl.arange(0, BR)
        here = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        unit = (tl.load(x + at, mask=here, other=0.0) - mu[None, :]) * inverse[None, :]
        d = tl.load(dy + at, mask=here, other=0.0)
        d = tl.where(unit * gain[None, :] + bias[None, :] > 0, d, SLOPE * d)
        d = (d - first[None, :] / R - unit * second[None, :] / R) * (gain * inverse)[None, :]
        tl.store(dx + at, d, mask=here)


@triton.jit
def _adam_outer(
    x, dy, weight, mean, square, rate, decay, eps, fix_mean, fix_square,
    B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, TF: tl.constexpr,
    BB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Make an Adam step for weights [M, N] whose gradient is xᵀ·dy, without writing the gradient to memory."""
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    teacher = (tl.program_id(0) // (blocks_m * blocks_n)).to(tl.int64)
    m = (tl.program_id(0) // blocks_n) % blocks_m * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks_n * BN + tl.arange(0, BN)
    r = tl.arange(0, BB)
    at = teacher * (M * N) + m[:, None] * N + n[None, :]
    here = (m < M)[:, None] & (n < N)[None, :]
    w = tl.load(weight + at, mask=here, other=0.0)
    first = tl.load(mean + at, mask=here, other=0.0)
    second = tl.load(square + at, mask=here, other=0.0)
    left = tl.load(
        x + teacher * (B * M) + r[None, :] * M + m[:, None], mask=(r < B)[None, :] & (m < M)[:, None], other=0.0
    )
    right = tl.load(
        dy + teacher * (B * N) + r[:, None] * N + n[None, :], mask=(r < B)[:, None] & (n < N)[None, :], other=0.0
    )
    gradient = tl.dot(left, right, input_precision=TF) + decay * w
    first += (1 - BETA1) * (gradient - first)
    second = BETA2 * second + (1 - BETA2) * gradient * gradient
    tl.store(mean + at, first, mask=here)
    tl.store(square + at, second, mask=here)
    tl.store(weight + at, w - rate * (first / fix_mean) / (tl.sqrt(second / fix_square) + eps), mask=here)


def _block(size: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least `size`, within limits."""
    return max(least, min(most, triton.next_power_of_2(size)))


class Convolve(torch.autograd.Function):
    """5×5 convolution, stride 2, padding 2: images [n, b, h, w, c], weights [n, 25·c, o] → [n, b, h', w', o].

    If there are `maps`, [n, classes, h'·w', o], the one of an image's label is added: the effect of one-hot planes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, maps: Tensor | None, labels: Tensor, leaky: bool
    ) -> Tensor:
        n, b, h, w, c = x.shape
        o, oh, ow = weight.shape[2], (h + 1) // 2, (w + 1) // 2
        x, weight, bias, labels = x.contiguous(), weight.contiguous(), bias.contiguous(), labels.contiguous()
        out = x.new_empty(n, b, oh, ow, o)
        positions, bp, bo = b * oh * ow, 256, _block(o, 16, 64)
        _convolve[(n * triton.cdiv(positions, bp) * triton.cdiv(o, bo),)](
            x, weight, bias, bias if maps is None else maps.contiguous(), labels, out,
            0 if maps is None else maps.shape[1], positions, h, w, c, o, oh, ow, maps is not None, leaky, PRECISION,
            bp, 32, bo, num_warps=4, num_stages=1,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, labels, out if leaky else None)
        ctx.leaky, ctx.classes = leaky, None if maps is None else maps.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, out = ctx.saved_tensors
        n, b, h, w, c = x.shape
        oh, ow, o = dy.shape[2:]
        dy = dy.contiguous()
        if ctx.leaky:
            dy = torch.ops.aten.leaky_relu_backward(dy, out, SLOPE.value, True)
        sizes = (h, w, c, o, oh, ow)
        bo = _block(o, 16, 64)
        dx = dw = db = dmaps = None
        if ctx.needs_input_grad[0]:
            dx, bc = torch.empty_like(x), _block(c, 4, 16)
            _input_gradient[(n * triton.cdiv(b * oh * ow, 64) * triton.cdiv(c, bc),)](
                dy, weight, dx, b, *sizes, PRECISION, 64, bc, bo
            )
        if ctx.needs_input_grad[1]:
            dw, db = torch.empty_like(weight), dy.new_empty(n, o)
            bk = _block(25 * c, 32, 128)
            _weight_gradient[(n * triton.cdiv(25 * c, bk) * triton.cdiv(o, bo),)](
                x, dy, dw, db, b * oh * ow, *sizes, PRECISION, 32, bk, bo, num_warps=2, num_stages=1
            )
        if ctx.classes is not None and ctx.needs_input_grad[3]:
            one_hot = torch.nn.functional.one_hot(labels, ctx.classes).to(dy.dtype)
            dmaps = multiply(one_hot.transpose(1, 2), dy.view(n, b, -1)).view(n, ctx.classes, oh * ow, o)
        return dx, dw, db, dmaps, None, None


def multiply(a: Tensor, b: Tensor, precision: str = EXACT) -> Tensor:
    """Return [n, M, K] @ [n, K, N], each teacher's product by itself."""
    (n, m, k), width = a.shape, b.shape[2]
    out = a.new_empty(n, m, width)
    bm, bn, bk = _block(m, 16, 64), _block(width, 16, 64), _block(k, 16, 64)
    _multiply[(n * triton.cdiv(m, bm) * triton.cdiv(width, bn),)](
        a, b, out, *a.stride(), *b.stride(), m, width, k, precision, bm, bn, bk
    )
    return out


def adam_outer(
    x: Tensor, dy: Tensor, weight: Tensor, mean: Tensor, square: Tensor, *, updates: int, rate: float, decay: float
) -> None:
    """Make Adam's update number `updates` + 1 of weights [n, M, N] in place, for a dense layer's gradient xᵀ·dy."""
    (n, b, m), width = x.shape, dy.shape[2]
    beta1, beta2, step = 0.5, 0.999, updates + 1
    bm, bn = _block(m, 16, 32), _block(width, 16, 64)
    _adam_outer[(n * triton.cdiv(m, bm) * triton.cdiv(width, bn),)](
        x.contiguous(), dy.contiguous(), weight, mean, square, rate, decay, 1e-8, 1 - beta1**step, 1 - beta2**step,
        b, m, width, beta1, beta2, PRECISION, _block(b, 16, 128), bm, bn,
    )  # fmt: skip


class Multiply(torch.autograd.Function):
    """`multiply` with its gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return multiply(a, b, precision)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = multiply(dy, b.transpose(1, 2), ctx.precision) if ctx.needs_input_grad[0] else None
        db = multiply(a.transpose(1, 2), dy, ctx.precision) if ctx.needs_input_grad[1] else None
        return da, db, None


class NormLeaky(torch.autograd.Function):
    """Batch norm of [n, rows, c] within each teacher and group (one or two groups), then leaky ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, rows: list[int]) -> Tensor:
        x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
        n, _, c = x.shape
        out, mean = torch.empty_like(x), x.new_empty(n, len(rows), c)
        deviation, bc = torch.empty_like(mean), _block(c, 16, 64)
        first, second = (*rows, 0)[:2]
        _norm_forward[(n * len(rows) * triton.cdiv(c, bc),)](
            x, scale, shift, out, mean, deviation, first, second, c, 64, bc
        )
        ctx.save_for_backward(x, scale, shift, mean, deviation)
        ctx.sizes = (first, second, c, 64, bc)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, mean, deviation = ctx.saved_tensors
        n, groups, c = mean.shape
        dx, dscale, dshift = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        _norm_backward[(n * groups * triton.cdiv(c, ctx.sizes[-1]),)](
            x, dy.contiguous(), scale, shift, mean, deviation, dx, dscale, dshift, *ctx.sizes
        )
        return dx, _add_groups(dscale), _add_groups(dshift), None


def _add_groups(parts: Tensor) -> Tensor:
    """Sum over dimension 1 in a fixed order. The order of torch's own sum may depend on the number of teachers."""
    total = parts[:, 0]
    for group in range(1, parts.shape[1]):
        total = total + parts[:, group]
    return total
