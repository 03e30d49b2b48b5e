"""The layers of the convolutional teachers, each for all teachers at once: [n, …] in, [n, …] out.

On a GPU with Triton they use the kernels of `kernels.py`; elsewhere plain torch, against which the kernels are tested.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.public.triton import kernels_for

SLOPE = 0.2  # negative slope of leaky ReLU


def convolve(x: Tensor, weight: Tensor, bias: Tensor, maps: Tensor | None, labels: Tensor, *, leaky: bool) -> Tensor:
    """Apply a 5×5 convolution of stride 2: images [n, b, h, w, c], weights [n, (ky, kx, c), o] → [n, b, h', w', o].

    If there are `maps`, [n, classes, h'·w', o], the one of an image's label is added to its output.
    """
    if kernels_for(x):
        return _kernels().Convolve.apply(x, weight, bias, maps, labels, leaky)
    out = _OneByOne.apply(x, weight, bias)
    if maps is not None:
        out = out + lookup(maps.flatten(2), labels).view(out.shape)
    return F.leaky_relu(out, SLOPE) if leaky else out


class _OneByOne(torch.autograd.Function):
    """The convolution on a CPU, one teacher after the other, in channels-last order, without copying patches.

    Torch's own input gradient of a convolution of stride 2 takes longer than everything else. Input pixel
    2·(i, j) + (a, b) is connected to the 3×3 outputs (i + s, j + t) by the taps (2 − 2s + a, 2 − 2t + b). So the input
    gradient is an ordinary 3×3 convolution with four times as many outputs, one set for each of the four (a, b).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        n, outputs = len(x), weight.shape[2]
        kernels = weight.transpose(1, 2).contiguous().view(n, outputs, 5, 5, x.shape[-1]).permute(0, 1, 4, 2, 3)
        images = x.contiguous().permute(0, 1, 4, 2, 3)
        made = [F.conv2d(images[i], kernels[i], bias[i], stride=2, padding=2) for i in range(n)]
        # The stack of a single teacher has another memory layout, in which sums would be rounded differently.
        return torch.stack([out.permute(0, 2, 3, 1) for out in made]).contiguous()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        slope = slopes[0].contiguous()
        of_x = _input_slope(slope, weight, x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        images, slopes_first = x.contiguous().permute(0, 1, 4, 2, 3), slope.permute(0, 1, 4, 2, 3)
        like = weight[0].view(5, 5, x.shape[-1], -1).permute(3, 2, 0, 1)  # only its shape is used
        made = [_weight_slope(slopes_first[i], images[i], like) for i in range(len(x))]
        of_weight = torch.stack([weights for weights, _ in made]).permute(0, 3, 4, 2, 1).reshape(weight.shape)
        return of_x, of_weight, torch.stack([biases for _, biases in made])


def _weight_slope(slope: Tensor, images: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of one teacher's weights [o, c, 5, 5] and biases [o]."""
    settings = [len(like)], [2, 2], [2, 2], [1, 1], False, [0, 0], 1  # biases, stride, padding, dilation; no groups
    _, weights, biases = torch.ops.aten.convolution_backward(slope, images, like, *settings, [False, True, True])
    return weights, biases


def _input_slope(slope: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of the input: [n, b, h', w', o] → [n, b, h, w, c]."""
    n, b, height, width, c = shape
    rows, columns, outputs = slope.shape[2:]
    six = F.pad(weight.view(n, 5, 5, c, outputs), (0, 0, 0, 0, 0, 1, 0, 1))  # a sixth tap of zeros, to form pairs
    pairs = six.view(n, 3, 2, 3, 2, c, outputs).flip(1, 3)  # [n, s, a, t, b, c, o]
    kernels = pairs.permute(0, 2, 4, 5, 1, 3, 6).reshape(n, 4 * c, 3, 3, outputs).permute(0, 1, 4, 2, 3)
    slopes_first = slope.permute(0, 1, 4, 2, 3)
    made = [F.conv2d(slopes_first[i], kernels[i], padding=1).permute(0, 2, 3, 1) for i in range(n)]
    pixels = torch.stack(made).contiguous().view(n, b, rows, columns, 2, 2, c).permute(0, 1, 2, 4, 3, 5, 6)
    return pixels.reshape(n, b, 2 * rows, 2 * columns, c)[:, :, :height, :width].contiguous()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of each teacher: [n, M, K] @ [n, K, N]."""
    return _kernels().Multiply.apply(a, b, _kernels().EXACT) if kernels_for(a) else _bmm(a, b)


def multiply_large(a: Tensor, b: Tensor) -> Tensor:
    """Return the same product, with the lower precision that a GPU may use to be faster."""
    return _kernels().Multiply.apply(a, b, _kernels().PRECISION) if kernels_for(a) else _bmm(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(*_two_at_least(a, b))[: len(a)]


def _two_at_least(*tensors: Tensor) -> list[Tensor]:
    """Duplicate a single teacher: the library computes a batch of one in another way, which rounds differently."""
    return [value.expand(2, *value.shape[1:]) if len(value) == 1 else value for value in tensors]


@cache
def rounds_alike() -> bool:
    """Return whether products on this CPU are equal to the last bit at any memory address: see `datalens.__init__`."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 3, 784, generator=random), torch.randn(8, 784, 6, generator=random)
    whole = torch.bmm(a, b)
    return all(torch.equal(torch.bmm(a[first:], b[first:]), whole[first:]) for first in range(1, 7))


@cache
def convolves_alike() -> bool:
    """Return whether the same holds for `convolve` and its gradients."""
    random = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 9, 9, 2), (3, 50, 8), (3, 8), (3, 4, 5, 5, 8))
    numbers = [torch.randn(shape, generator=random) for shape in shapes]

    def slopes(by: int) -> list[Tensor]:
        x, weight, bias, slope = (moved(values, by) for values in numbers)
        inputs = [value.requires_grad_() for value in (x, weight, bias)]
        out = _OneByOne.apply(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, slope)]

    first = slopes(0)
    return all(all(map(torch.equal, first, slopes(by))) for by in (1, 3, 4, 7, 8, 13))


def moved(values: Tensor, by: int) -> Tensor:
    """Return the same numbers at an address that is `by` floats later, relative to an allocation."""
    return torch.cat([torch.zeros(by), values.flatten()])[by:].view(values.shape)


def lookup(table: Tensor, labels: Tensor) -> Tensor:
    """Return row `labels[i, j]` of teacher i's table: [n, classes, d] → [n, b, d]."""
    if kernels_for(table):  # on a GPU the gradient of `gather` adds in an order that is not deterministic
        return multiply(F.one_hot(labels, table.shape[1]).to(table.dtype), table)
    return table.gather(1, labels.unsqueeze(2).expand(-1, -1, table.shape[2]))


def with_bias(table: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return `lookup(table, labels) + bias`, for bias [n, d]."""
    if not kernels_for(table):
        return lookup(table, labels) + bias.unsqueeze(1)
    one_hot = F.one_hot(labels, table.shape[1] + 1).to(table.dtype)
    one_hot[:, :, -1] = 1.0
    return multiply(one_hot, torch.cat([table, bias.unsqueeze(1)], dim=1))


def norm_leaky(x: Tensor, scale: Tensor, shift: Tensor, groups: list[int]) -> Tensor:
    """Apply batch norm to [n, b, …, c] by the batch's own statistics (no buffers that could leak), then leaky ReLU.

    `groups` are the sizes of consecutive groups of images. Real and fake ones are normalised separately, as in DC-GAN.
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
    """Return whether `update_outer` can be used for batches of this many images."""
    return kernels_for(x) and images <= 128  # the kernel takes the whole batch as one block


def update_outer(
    tap: tuple[Tensor, Tensor], weight: Tensor, mean: Tensor, square: Tensor, *, updates: int, rate: float, decay: float
) -> None:
    """Make one step of Adam for the weights of a dense layer, from its input and its output's gradient. GPU only."""
    _kernels().adam_outer(*tap, weight, mean, square, updates=updates, rate=rate, decay=decay)


def _kernels() -> Any:
    from datalens.private import kernels

    return kernels
