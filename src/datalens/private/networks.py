"""Discriminators whose parameters have a leading teacher dimension: N networks in one set of tensors.

Each network is a pair of pure functions: `parameters` makes the initial values of some teachers, keyed by teacher, and
`logits` maps features [n, b, …] and labels [n, b] to [n, b]. Nothing in `logits` mixes teachers: every product is
batched over them, and every mean is within one teacher.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from datalens.private import layers
from datalens.public import streams
from datalens.public.basis import Basis

Parameters = dict[str, Tensor]
Taps = dict[str, tuple[Tensor, Tensor]]


class Network(Protocol):
    """A family of discriminators that take features of images and give gradients in some basis."""

    def features(self, images: Tensor) -> Tensor:
        """Return what `logits` takes, from images […, c, h, w] in [0, 1]. The map is affine."""
        ...

    def record_features(self, records: Tensor) -> Tensor:
        """Return the rows that are kept of records, uint8 [n, h, w, c]. `from_rows` turns them into features.

        A row must be, bit for bit, a function of its record alone. A float matrix product is not: its rounding depends
        on the shape of its blocks, and so on how many records there are.
        """
        ...

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the features of rows from `record_features`, with any leading dimensions."""
        ...

    def to_basis(self, gradients: Tensor) -> Tensor:
        """Return gradients in the basis, [n, m, d], given those of features, [n, m, …], up to a public factor > 0."""
        ...

    def parameters(self, teachers: Tensor, seed: int) -> Parameters: ...

    @property
    def outer(self) -> tuple[str, ...]:
        """Names of large dense weights, whose gradient is an outer product of two factors: see `logits`."""
        ...

    def logits(
        self, parameters: Parameters, features: Tensor, labels: Tensor, groups: list[int], taps: Taps | None = None
    ) -> Tensor:
        """Return the logits, [n, b].

        Args:
            parameters: Of n teachers.
            features: [n, b, …].
            labels: [n, b].
            groups: Sizes of consecutive groups of the b images, for layers with batch statistics.
            taps: Is filled with the input and the output of the layers named in `outer`.
        """
        ...

    def bytes_per_teacher(self, batch: int) -> tuple[int, int]:
        """Return the bytes of one teacher's state (weights, two moments), and a generous estimate for its training."""
        ...


@dataclass(frozen=True, kw_only=True)
class Spectral:
    """A small network over low-frequency cosine coefficients, which is fast on a CPU.

    It has one hidden layer whose bias depends on the label, and a linear part per class. Its inputs are in the basis of
    the votes, so its gradient is never expanded to pixels.
    """

    basis: Basis
    classes: int
    hidden: int
    scale: float = 0.25  # brings the coefficients of pixels in [0, 1] to a few units
    outer: tuple[str, ...] = ()

    def features(self, images: Tensor) -> Tensor:
        return self.basis.forward(images - 0.5) * self.scale

    def record_features(self, records: Tensor) -> Tensor:
        doubled = records.flatten(1).to(torch.float64).mul_(2).sub_(255)  # 2·255·(x − 1/2), integers
        rows = self.basis.rows  # [d, c·h·w]; records have their channels last
        assert rows is not None
        rows = rows.to(records.device).view(-1, *self.basis.shape).permute(0, 2, 3, 1).flatten(1).to(torch.float64)
        exact = doubled @ rows.T.contiguous()  # sums of multiples of 2^-26: exact in any order
        return (exact * (self.scale / 510)).to(torch.float32)

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows

    def to_basis(self, gradients: Tensor) -> Tensor:
        return gradients

    def parameters(self, teachers: Tensor, seed: int) -> Parameters:
        d, hidden, classes = self.basis.size, self.hidden, self.classes
        shapes = {"w1": (d, hidden), "skip": (d, classes), "b1": (classes, hidden), "w2": (hidden,), "b2": (classes,)}
        std = {"w1": d**-0.5, "b1": 0.1}
        values = {name: _normal(seed, name, teachers, shape, std.get(name, 0.0)) for name, shape in shapes.items()}
        # The hidden layer and the linear parts have the same inputs, so one product serves both.
        return {"w1": torch.cat([values.pop("w1"), values.pop("skip")], dim=2), **values}

    def logits(
        self, parameters: Parameters, features: Tensor, labels: Tensor, groups: list[int], taps: Taps | None = None
    ) -> Tensor:
        p = parameters
        hidden, linear = layers.multiply(features, p["w1"]).split([self.hidden, self.classes], dim=2)
        hidden = F.leaky_relu(hidden + layers.lookup(p["b1"], labels), layers.SLOPE)
        out = layers.multiply(hidden, p["w2"].unsqueeze(2)) + linear.gather(2, labels.unsqueeze(2))
        return (out + layers.lookup(p["b2"].unsqueeze(2), labels)).squeeze(2)

    def bytes_per_teacher(self, batch: int) -> tuple[int, int]:
        d, hidden = self.basis.size, self.hidden
        weights = d * hidden + self.classes * (hidden + d + 1) + hidden
        return 12 * weights, 4 * (2 * weights + 2 * batch * (3 * d + 6 * (hidden + self.classes)))


@dataclass(frozen=True, kw_only=True)
class Convolutional:
    """The DC-GAN discriminator of the paper: 5×5 convolutions of stride 2, then two dense layers.

    - Size `paper`: channels (11, 42), hidden 256, and the label as one-hot planes at every layer (about 556 k
      parameters for 28×28 grey and ten classes).
    - Size `compact`: fewer channels, the label in the dense layers only, and no batch norm there. Normalising a batch
      that holds only fakes would hide errors that all of them share from the teacher and from its gradient.

    Batch norm uses batch statistics, per teacher, on all convolutions but the first.

    The label reaches ∂ log D/∂x only through the gates of the leaky ReLUs. So votes on an image hardly depend on the
    label, and a student of such teachers learns strokes without learning which digit was asked for. Therefore a linear
    function of the pixels can be added to the logits, one for each class, which starts at zero. `linear` is the factor
    of its inputs (0: the network as printed).

    A one-hot plane convolved with zero padding is a fixed map per class. So it is computed once per class and looked up
    by label instead of being carried through the patches, which gives the same function.
    """

    basis: Basis
    shape: tuple[int, int, int]
    classes: int
    channels: tuple[int, ...]
    hidden: int
    label_planes: bool
    dense_norm: bool
    linear: float = 0.0
    outer: tuple[str, ...] = ("dense.weight",)

    def features(self, images: Tensor) -> Tensor:
        return images

    def record_features(self, records: Tensor) -> Tensor:
        return records.permute(0, 3, 1, 2).contiguous()  # one byte per pixel until it is used

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.to(torch.float32) / 255

    def to_basis(self, gradients: Tensor) -> Tensor:
        if self.basis.rows is None:
            return self.basis.forward(gradients)
        # One product per teacher: in one large product, the rounding of a row would depend on the number of rows.
        rows = self.basis.rows.T.to(gradients)
        return layers.multiply(gradients.flatten(2), rows.expand(len(gradients), -1, -1))

    def parameters(self, teachers: Tensor, seed: int) -> Parameters:
        from_zero = ("bias", "shift", "linear.weight")
        return {
            name: torch.ones((len(teachers), *shape), device=teachers.device)
            if name.endswith("scale")
            else _normal(seed, name, teachers, shape, 0.0 if name.endswith(from_zero) else 0.02)
            for name, shape in self._shapes().items()
        }

    def logits(
        self, parameters: Parameters, features: Tensor, labels: Tensor, groups: list[int], taps: Taps | None = None
    ) -> Tensor:
        p, (n, b) = parameters, labels.shape
        x = features.movedim(2, -1)  # [n, b, h, w, c]
        linear = self._linear_part(p, features, labels) if self.linear else None
        for layer in range(len(self.channels)):
            maps = self._label_maps(p[f"conv{layer}.label"], x.shape[2:4]) if self.label_planes else None
            weight, bias = p[f"conv{layer}.weight"], p[f"conv{layer}.bias"]
            x = layers.convolve(x, weight, bias, maps, labels, leaky=layer == 0)
            if layer > 0:
                x = layers.norm_leaky(x, p[f"conv{layer}.scale"], p[f"conv{layer}.shift"], groups)
        flat = x.reshape(n, b, -1)
        x = layers.multiply_large(flat, p["dense.weight"])
        if taps is not None:
            taps["dense.weight"] = flat, x
        x = x + layers.with_bias(p["dense.label"], p["dense.bias"], labels)
        if self.dense_norm:
            x = layers.norm_leaky(x, p["dense.scale"], p["dense.shift"], groups)
        else:
            x = F.leaky_relu(x, layers.SLOPE)
        out = layers.multiply(x, p["out.weight"].unsqueeze(2))
        out = (out + layers.with_bias(p["out.label"].unsqueeze(2), p["out.bias"], labels)).squeeze(2)
        return out if linear is None else out + linear

    def _linear_part(self, p: Parameters, features: Tensor, labels: Tensor) -> Tensor:
        """Return the linear function of the pixels for each image's class: [n, b]."""
        pixels = features.flatten(2) * self.linear
        return layers.multiply(pixels, p["linear.weight"]).gather(2, labels.unsqueeze(2)).squeeze(2)

    def bytes_per_teacher(self, batch: int) -> tuple[int, int]:
        weights = sum(torch.Size(shape).numel() for shape in self._shapes().values())
        size, inputs, numbers = self.shape[1:], self.shape[0], 0
        for outputs in self.channels:
            numbers += 3 * size[0] * size[1] * inputs
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
            numbers += size[0] * size[1] * 6 * outputs
            inputs = outputs
        return 12 * weights, 4 * (weights + 2 * batch * numbers)

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
        if self.linear:
            shapes["linear.weight"] = (self.shape[0] * self.shape[1] * self.shape[2], classes)
        return shapes

    def _label_maps(self, weight: Tensor, size: torch.Size) -> Tensor:
        """Return the convolution of a plane of ones for each class: [n, classes, 25, o] → [n, classes, h'·w', o]."""
        n, classes, _, outputs = weight.shape
        ones = F.pad(weight.new_ones(1, 1, *size), (2, 2, 2, 2))
        inside = ones.unfold(2, 5, 2).unfold(3, 5, 2).reshape(1, -1, 25)  # 1 where a position's tap is in the image
        maps = layers.multiply(inside.expand(n * classes, -1, -1), weight.view(n * classes, 25, outputs))
        return maps.view(n, classes, -1, outputs)


def paper_network(basis: Basis, classes: int, *, hidden: int = 256, linear: float = 0.0) -> Convolutional:
    """Return the paper's discriminator at full size: about 556 k parameters on MNIST.

    With a linear part it has no batch norm in its dense layer. Without both changes it does not learn labels.
    """
    colour = basis.shape[0]
    return Convolutional(
        basis=basis,
        shape=basis.shape,
        classes=classes,
        channels=(colour + classes, 32 + classes),
        hidden=hidden,
        label_planes=True,
        dense_norm=linear == 0,
        linear=linear,
    )


def compact_network(basis: Basis, classes: int, *, hidden: int = 16, linear: float = 0.0) -> Convolutional:
    """Return a small discriminator, with about 16 k parameters on MNIST.

    It has one more convolution for every doubling past 32 pixels, which keeps it small.
    """
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
        linear=linear,
    )


def network_named(
    name: Literal["spectral", "compact", "paper", "printed"],
    basis: Basis,
    classes: int,
    *,
    hidden: int,
    linear: float = 0.0,
) -> Network:
    """Return the teachers' network; `linear` is the gain of a convolutional network's linear part."""
    if name == "spectral":
        return Spectral(basis=basis, classes=classes, hidden=hidden)
    if name == "compact":
        return compact_network(basis, classes, hidden=hidden, linear=linear)
    return paper_network(basis, classes, hidden=hidden, linear=0.0 if name == "printed" else linear)


def _normal(seed: int, name: str, teachers: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    if std == 0:
        return torch.zeros((len(teachers), *shape), device=teachers.device)
    count = torch.Size(shape).numel()
    return streams.normal(seed, "teacher", name, teachers=teachers, count=count).mul_(std).view(len(teachers), *shape)
