"""The layers of the convolutional teachers, each for all teachers at once: [n, …] in, [n, …] out.

On a GPU with Triton they are the kernels of `kernels.py`; elsewhere plain torch, which also is what the
kernels are tested against.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.gpu import kernels_for

SLOPE = 0.2  # of leaky ReLU


def convolve(x: Tensor, weight: Tensor, bias: Tensor, maps: Tensor | None, labels: Tensor, *, leaky: bool) -> Tensor:
    """5×5 convolution of stride 2: images [n, b, h, w, c], weights [n, (ky, kx, c), o] → [n, b, h', w', o].

    `maps` [n, classes, h'·w', o] are added by the image's label.
    """
    if kernels_for(x):
        return _kernels().Convolve.apply(x, weight, bias, maps, labels, leaky)
    n, b, height, width, _ = x.shape
    patches = F.pad(x, (0, 0, 2, 2, 2, 2)).unfold(2, 5, 2).unfold(3, 5, 2)  # [n, b, h', w', c, 5, 5], a view
    flat = patches.permute(0, 1, 2, 3, 5, 6, 4).reshape(n, b * patches.shape[2] * patches.shape[3], -1)
    out = torch.baddbmm(*_two_at_least(bias.unsqueeze(1), flat, weight))[:n]
    out = out.view(n, b, (height + 1) // 2, (width + 1) // 2, -1)
    if maps is not None:
        out = out + lookup(maps.flatten(2), labels).view(out.shape)
    return F.leaky_relu(out, SLOPE) if leaky else out


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """[n, M, K] @ [n, K, N]."""
    return _kernels().Multiply.apply(a, b, _kernels().EXACT) if kernels_for(a) else _bmm(a, b)


def multiply_large(a: Tensor, b: Tensor) -> Tensor:
    """The same where a GPU may round more, to be faster."""
    return _kernels().Multiply.apply(a, b, _kernels().PRECISION) if kernels_for(a) else _bmm(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(*_two_at_least(a, b))[: len(a)]


def _two_at_least(*tensors: Tensor) -> list[Tensor]:
    """One teacher as two: alone, its product takes another way through the library, and is rounded otherwise."""
    return [value.expand(2, *value.shape[1:]) if len(value) == 1 else value for value in tensors]


@cache
def rounds_alike() -> bool:
    """Whether a product on this CPU is the same to the last bit wherever its factors lie: see `datalens.__init__`."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 3, 784, generator=random), torch.randn(8, 784, 6, generator=random)
    whole = torch.bmm(a, b)
    return all(torch.equal(torch.bmm(a[first:], b[first:]), whole[first:]) for first in range(1, 7))


def lookup(table: Tensor, labels: Tensor) -> Tensor:
    """Row `labels[i, j]` of teacher i's table [n, classes, d] → [n, b, d]."""
    if kernels_for(table):  # the gradient of `gather` on a GPU adds in an order of its own, another one each time
        return multiply(F.one_hot(labels, table.shape[1]).to(table.dtype), table)
    return table.gather(1, labels.unsqueeze(2).expand(-1, -1, table.shape[2]))


def with_bias(table: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """`lookup(table, labels) + bias`, for bias [n, d]."""
    if not kernels_for(table):
        return lookup(table, labels) + bias.unsqueeze(1)
    one_hot = F.one_hot(labels, table.shape[1] + 1).to(table.dtype)
    one_hot[:, :, -1] = 1.0
    return multiply(one_hot, torch.cat([table, bias.unsqueeze(1)], dim=1))


def norm_leaky(x: Tensor, scale: Tensor, shift: Tensor, groups: list[int]) -> Tensor:
    """Batch norm of [n, b, …, c] by the statistics of the batch itself (no buffers to leak), then leaky ReLU.

    `groups` says how many images belong together: real and fake ones are normalised apart, as in DC-GAN.
    """
    n, b, c = x.shape[0], x.shape[1], x.shape[-1]
    flat = x.reshape(n, -1, c)
    rows = [flat.shape[1] // b * images for images in groups]
    if kernels_for(x):
        return _kernels().NormLeaky.apply(flat, scale, shift, rows).view(x.shape)
    parts = []
    for part in flat.split(rows, dim=1):
        variance, mean = torch.var_mean(part, dim=1, correction=0, keepdim=True)
        parts.append((part - mean) * torch.rsqrt(variance + 1e-5) * scale.unsqueeze(1) + shift.unsqueeze(1))
    return F.leaky_relu(torch.cat(parts, dim=1), SLOPE).view(x.shape)


def can_update_outer(x: Tensor, images: int) -> bool:
    return kernels_for(x) and images <= 128  # a batch is one block of the product


def update_outer(
    tap: tuple[Tensor, Tensor], weight: Tensor, mean: Tensor, square: Tensor, *, updates: int, rate: float, decay: float
) -> None:
    """One step of Adam for the weights of a dense layer, from its input and its output's gradient; on a GPU only."""
    _kernels().adam_outer(*tap, weight, mean, square, updates=updates, rate=rate, decay=decay)


def _kernels() -> Any:
    from datalens.private import kernels

    return kernels
