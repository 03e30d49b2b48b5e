"""Discriminators whose parameters have a leading teacher dimension: N networks in one set of tensors.

Each network is a pair of pure functions: `parameters` makes the start values of some teachers, keyed
by teacher, and `logits` maps features [n, b, …] and labels [n, b] to [n, b]. Nothing in `logits`
mixes teachers: every product is batched over them, every mean is taken within one.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens import streams
from datalens.basis import Basis

Parameters = dict[str, Tensor]


class Network(Protocol):
    """A family of discriminators, over features of images, voting in some basis."""

    def features(self, images: Tensor) -> Tensor:
        """[…, c, h, w] in [0, 1] → what `logits` takes; linear up to a constant shift."""
        ...

    def record_features(self, records: Tensor) -> Tensor:
        """The same of records, uint8 [n, h, w, c]: bit for bit a function of each record by itself.

        A matrix product in floats rounds by the shape it is blocked into, so a record's features could depend on
        how many other records there are.
        """
        ...

    def to_basis(self, gradients: Tensor) -> Tensor:
        """Gradient of the features [n, m, …] → gradient in the basis [n, m, d], up to one public positive factor."""
        ...

    def parameters(self, teachers: Tensor, seed: int) -> Parameters: ...

    def logits(self, parameters: Parameters, features: Tensor, labels: Tensor) -> Tensor: ...

    def bytes_per_teacher(self, batch: int) -> int:
        """A generous estimate of what one teacher needs while it trains."""
        ...


@dataclass(frozen=True, kw_only=True)
class Spectral:
    """A small network over low-frequency cosine coefficients: cheap on a CPU.

    One hidden layer whose bias depends on the label, and a linear part per class. It votes in the
    basis it sees, so its gradient is never expanded to pixels.
    """

    basis: Basis
    classes: int
    hidden: int
    scale: float = 0.25  # pixels in [0, 1] give coefficients of a few units

    def features(self, images: Tensor) -> Tensor:
        return self.basis.forward(images - 0.5) * self.scale

    def record_features(self, records: Tensor) -> Tensor:
        doubled = records.permute(0, 3, 1, 2).to(torch.float64) * 2 - 255  # 2·255·(x − 1/2), whole numbers
        exact = self.basis.forward(doubled)  # sums of multiples of 2^-26: no rounding, in whatever order
        return (exact * (self.scale / 510)).to(torch.float32)

    def to_basis(self, gradients: Tensor) -> Tensor:
        return gradients

    def parameters(self, teachers: Tensor, seed: int) -> Parameters:
        d, hidden, classes = self.basis.size, self.hidden, self.classes
        shapes = {"w1": (d, hidden), "b1": (classes, hidden), "w2": (hidden,), "b2": (classes,), "skip": (classes, d)}
        std = {"w1": d**-0.5, "b1": 0.1, "w2": 0.0, "b2": 0.0, "skip": 0.0}
        return {name: _normal(seed, name, teachers, shape, std[name]) for name, shape in shapes.items()}

    def logits(self, parameters: Parameters, features: Tensor, labels: Tensor) -> Tensor:
        bias = _by_label(parameters["b1"], labels)  # [n, b, hidden]
        hidden = F.leaky_relu(torch.baddbmm(bias, features, parameters["w1"]), 0.2)
        nonlinear = torch.bmm(hidden, parameters["w2"].unsqueeze(2)).squeeze(2)
        linear = (features * _by_label(parameters["skip"], labels)).sum(dim=2)
        return nonlinear + linear + parameters["b2"].gather(1, labels)

    def bytes_per_teacher(self, batch: int) -> int:
        d, hidden = self.basis.size, self.hidden
        weights = d * hidden + self.classes * (hidden + d + 1) + hidden
        return 4 * (4 * weights + 2 * batch * 6 * (d + hidden))


@dataclass(frozen=True, kw_only=True)
class Convolutional:
    """The DC-GAN discriminator of the paper: 5×5 convolutions of stride 2, then two dense layers.

    `paper` size: channels (11, 42), hidden 256, the label as one-hot planes at every layer (about 556 k
    parameters for 28×28 grey and ten classes). `compact`: fewer channels, the label in the dense layers
    only, and no batch norm there: normalising a batch of nothing but fakes hides from the teacher, and
    from its gradient, how all of them are off together. Batch norm is by batch statistics, per teacher, on all
    convolutions but the first.

    A one-hot plane convolved with zero padding is a fixed map per class, so it is computed once per
    class and looked up by label instead of being carried through the patches: the same function.
    """

    basis: Basis
    shape: tuple[int, int, int]
    classes: int
    channels: tuple[int, ...]
    hidden: int
    label_planes: bool
    dense_norm: bool

    def features(self, images: Tensor) -> Tensor:
        return images

    def record_features(self, records: Tensor) -> Tensor:
        return records.permute(0, 3, 1, 2).to(torch.float32) / 255

    def to_basis(self, gradients: Tensor) -> Tensor:
        return self.basis.forward(gradients)

    def parameters(self, teachers: Tensor, seed: int) -> Parameters:
        return {
            name: torch.ones((len(teachers), *shape), device=teachers.device)
            if name.endswith("scale")
            else _normal(seed, name, teachers, shape, 0.0 if name.endswith(("bias", "shift")) else 0.02)
            for name, shape in self._shapes().items()
        }

    def logits(self, parameters: Parameters, features: Tensor, labels: Tensor) -> Tensor:
        n, b = labels.shape
        x = features.movedim(2, -1)  # [n, b, h, w, c]
        for layer in range(len(self.channels)):
            x = self._convolve(parameters, layer, x, labels)
            if layer > 0:
                x = _batch_norm(x, parameters[f"conv{layer}.scale"], parameters[f"conv{layer}.shift"])
            x = F.leaky_relu(x, 0.2)
        x = torch.bmm(x.reshape(n, b, -1), parameters["dense.weight"]) + parameters["dense.bias"].unsqueeze(1)
        x = x + _by_label(parameters["dense.label"], labels)
        if self.dense_norm:
            x = _batch_norm(x, parameters["dense.scale"], parameters["dense.shift"])
        x = F.leaky_relu(x, 0.2)
        out = torch.bmm(x, parameters["out.weight"].unsqueeze(2)).squeeze(2)
        return out + parameters["out.label"].gather(1, labels) + parameters["out.bias"]

    def bytes_per_teacher(self, batch: int) -> int:
        weights = sum(torch.Size(shape).numel() for shape in self._shapes().values())
        size, inputs, activations = self.shape[1:], self.shape[0], 0
        for outputs in self.channels:
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
            activations += size[0] * size[1] * (25 * inputs + 6 * outputs)
            inputs = outputs
        return 4 * (4 * weights + 2 * 2 * batch * activations)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        (inputs, height, width), classes = self.shape, self.classes
        for layer, outputs in enumerate(self.channels):
            shapes[f"conv{layer}.weight"] = (inputs * 25, outputs)
            shapes[f"conv{layer}.bias"] = (outputs,)
            if self.label_planes:
                shapes[f"conv{layer}.label"] = (classes, 25, outputs)
            if layer > 0:
                shapes[f"conv{layer}.scale"] = shapes[f"conv{layer}.shift"] = (outputs,)
            inputs, height, width = outputs, (height + 1) // 2, (width + 1) // 2
        shapes["dense.weight"] = (height * width * inputs, self.hidden)
        shapes["dense.bias"] = (self.hidden,)
        if self.dense_norm:
            shapes["dense.scale"] = shapes["dense.shift"] = (self.hidden,)
        shapes["dense.label"] = (classes, self.hidden)
        shapes["out.weight"] = (self.hidden,)
        shapes["out.label"] = (classes,)
        shapes["out.bias"] = (1,)
        return shapes

    def _convolve(self, parameters: Parameters, layer: int, x: Tensor, labels: Tensor) -> Tensor:
        n, b, height, width, _ = x.shape
        padded = F.pad(x, (0, 0, 2, 2, 2, 2))
        patches = padded.unfold(2, 5, 2).unfold(3, 5, 2)  # [n, b, h', w', c, 5, 5], a view
        high, wide = patches.shape[2:4]
        flat = patches.reshape(n, b * high * wide, -1)
        out = torch.baddbmm(parameters[f"conv{layer}.bias"].unsqueeze(1), flat, parameters[f"conv{layer}.weight"])
        out = out.view(n, b, high, wide, -1)
        if not self.label_planes:
            return out
        inside = F.pad(x.new_ones(1, 1, height, width), (2, 2, 2, 2)).unfold(2, 5, 2).unfold(3, 5, 2)
        inside = inside.reshape(high * wide, 25)  # which taps of which position see the image
        maps = torch.einsum("pt,ncto->ncpo", inside, parameters[f"conv{layer}.label"])
        return out + _by_label(maps.flatten(2), labels).view(n, b, high, wide, -1)


def paper_network(basis: Basis, classes: int, *, hidden: int = 256) -> Convolutional:
    """The paper's discriminator at full size: about 556 k parameters on MNIST."""
    colour = basis.shape[0]
    return Convolutional(
        basis=basis,
        shape=basis.shape,
        classes=classes,
        channels=(colour + classes, 32 + classes),
        hidden=hidden,
        label_planes=True,
        dense_norm=True,
    )


def compact_network(basis: Basis, classes: int, *, hidden: int = 16) -> Convolutional:
    """About 16 k parameters on MNIST; one more convolution for every doubling past 32 pixels keeps it small."""
    side = max(basis.shape[1:])
    channels = (8, 16, 16, 16, 16)[: 2 + max(0, (side - 1).bit_length() - 5)]
    return Convolutional(
        basis=basis,
        shape=basis.shape,
        classes=classes,
        channels=channels,
        hidden=hidden,
        label_planes=False,
        dense_norm=False,
    )


def _normal(seed: int, name: str, teachers: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    if std == 0:
        return torch.zeros((len(teachers), *shape), device=teachers.device)
    count = torch.Size(shape).numel()
    return streams.normal(seed, "teacher", name, teachers=teachers, count=count).mul_(std).view(len(teachers), *shape)


def _by_label(table: Tensor, labels: Tensor) -> Tensor:
    """Row `labels[i, j]` of teacher i's table [n, classes, d] → [n, b, d]."""
    return table.gather(1, labels.unsqueeze(2).expand(-1, -1, table.shape[2]))


def _batch_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Over everything but teacher and channel (last), by the batch's own statistics: no buffers to leak."""
    around = tuple(range(1, x.dim() - 1))
    variance, mean = torch.var_mean(x, dim=around, correction=0, keepdim=True)
    view = (x.shape[0], *[1] * len(around), x.shape[-1])
    return (x - mean) * torch.rsqrt(variance + 1e-5) * scale.view(view) + shift.view(view)
