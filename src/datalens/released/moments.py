"""Generate images from released moments. All of it is post-processing; nothing here sees a record.

1. Each class has a Gaussian in low-frequency coordinates. The released covariances have noise in every cell; most of
   it is removed with the help of its known distribution (`clean`).
2. Samples of these Gaussians are blurred, and their texture is noise. The texture features of samples and of records
   differ in mean and covariance, class by class. The optimal transport map between two Gaussians gives the features
   that a sample should have, and a dozen gradient steps change the sample to have them (`MomentModel.images`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import itemgetter

import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.public import streams
from datalens.public.basis import Basis, make_basis
from datalens.public.texture import Texture
from datalens.public.threads import mapped, one_core_each

LEAST_COUNT = 20  # a class with a smaller noisy count is treated as one of this many records
PRESENT = 4.0  # a class counts as present if its noisy count is this many standard deviations of noise above zero
WHITENING = 20_000  # images drawn to estimate the texture of samples
RIDGE = 0.003  # added to the variances before whitening, relative to the leading ones: limits the magnification
RATE = 0.35  # learning rate of the gradient steps, in logits of brightness
PIECE = 250  # images that are given their texture together; of smaller pieces, last bits can differ


# --- reading released values ------------------------------------------------------------------


def quantile_edge(histogram: Released, edges: Tensor, share: float) -> float:
    """Return the first edge below which this share of the records lies, according to the noisy counts."""
    counts = _value(histogram).flatten()
    cumulated = counts.cumsum(0)
    reached = torch.nonzero(cumulated >= share * float(counts.sum()))
    return float(edges[1 + (int(reached[0]) if len(reached) else len(counts) - 1)])


def class_means(sums: Released, *, clip: float, grid: int, counted: int, floor: float) -> tuple[Tensor, Tensor]:
    """Return means [classes, d] and counts [classes]. Sums are divided by the count, or by `floor` if it is larger."""
    value = _value(sums)
    room = int((grid**2 - counted**2) ** 0.5)
    counts = value[:, -1] / counted
    return value[:, :-1] * (clip / room) / counts.clamp(min=floor).unsqueeze(1), counts


def class_covariances(outer: Released, counts: Tensor, *, clip: float, grid: int, floor: float) -> Tensor:
    """Return covariances [classes, d, d], with most of the noise removed (`clean`)."""
    value = _value(outer)
    size = math.isqrt(value.shape[1])
    matrices = value.view(-1, size, size)
    matrices = (matrices + matrices.mT) / 2  # both triangles were released, each with its own noise
    units = clip**2 / grid**2 / counts.clamp(min=floor)
    # The noise is a symmetric matrix whose off-diagonal cells have variance s²/2: its spectrum is ±2·s·sqrt(size/2).
    noise = outer.event.sigma * units * math.sqrt(size / 2)
    return clean(matrices * units.view(-1, 1, 1), noise, counts.clamp(min=floor))


def round_covariances(means: Tensor, *, clip: float) -> Tensor:
    """Return isotropic covariances [classes, d, d] with trace clip², for a budget at which none could be released."""
    classes, size = means.shape
    return torch.eye(size, dtype=means.dtype).repeat(classes, 1, 1) * (clip**2 / size)


def _value(released: Released) -> Tensor:
    if not isinstance(released, Released):
        raise TypeError("moments are read from released values only")
    return torch.from_numpy(released.value.astype("float64"))


# --- removing noise ---------------------------------------------------------------------------


def clean(matrices: Tensor, noise: Tensor, counts: Tensor) -> Tensor:
    """Estimate covariances from noisy ones [classes, d, d], where the noise of each class has the spectrum ±2·`noise`.

    The average over classes has less noise and estimates what they have in common. The difference of a class from it
    is kept where it stands out of that class's noise. The variances of single coordinates are measured well and are
    put back.
    """
    weights = counts / counts.sum()
    common = torch.einsum("c,cij->ij", weights, matrices)
    shared = _without_negative(shrink(common, float((weights * noise).square().sum().sqrt())))
    shared = shared + torch.diag((common.diagonal() - shared.diagonal()).clamp(min=0))
    cleaned = []
    for matrix, width in zip(matrices, noise.tolist(), strict=True):
        estimate = shared + (shrink(matrix - common, width) if len(matrices) > 1 else 0)
        estimate = estimate + torch.diag(matrix.diagonal() - estimate.diagonal())
        cleaned.append(_without_negative(estimate))
    return torch.stack(cleaned)


def shrink(matrix: Tensor, noise: float) -> Tensor:
    """Invert the effect of noise with spectrum ±2·`noise` on eigenvalues (spiked Wigner model): λ = θ + noise²/θ."""
    values, vectors = torch.linalg.eigh(matrix)
    size = values.abs()
    before = (size + (size.square() - 4 * noise**2).clamp(min=0).sqrt()) / 2
    return (vectors * torch.where(size > 2 * noise, before * values.sign(), 0.0)) @ vectors.mT


def _without_negative(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0)) @ vectors.mT


def _root(matrix: Tensor, power: float, floor: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=floor * float(values[-1].clamp(min=1e-12))) ** power) @ vectors.mT


# --- the generator ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start:
    """A Gaussian for each class in low-frequency coordinates. Its samples are the first images."""

    shape: tuple[int, int, int]
    means: Tensor  # [classes, r]
    factors: Tensor  # [classes, r, r]: a class's covariance is factor·factorᵀ

    @property
    def basis(self) -> Basis:
        return make_basis("opponent", self.shape, self.means.shape[1])

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        normal = torch.randn(len(labels), self.means.shape[1], generator=random)
        coordinates = torch.empty_like(normal)
        for label in labels.unique().tolist():
            here = labels == label
            coordinates[here] = self.means[label] + normal[here] @ self.factors[label].mT
        return self.basis.inverse(coordinates).clamp(0, 1)


def make_start(shape: tuple[int, int, int], means: Tensor, covariances: Tensor) -> Start:
    values, vectors = torch.linalg.eigh(covariances)
    factors = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return Start(shape=shape, means=means.to(torch.float32), factors=factors.to(torch.float32))


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """Public texture coordinates in which first images have variance about one, in order of decreasing variance."""

    centre: Tensor  # [D]
    matrix: Tensor  # [D, D]
    labels: Tensor  # [n] labels of the images it was computed from
    values: Tensor  # [n, D] their whitened texture

    def norms(self, share: float) -> float:
        return float(self.values.norm(dim=1).quantile(share))


def make_whitening(start: Start, present: Tensor, seed: int) -> Whitening:
    """Compute the mean and the principal directions of texture from images of the first model."""
    labels = present[torch.arange(WHITENING) % len(present)]
    texture, random = Texture(start.shape), streams.generator(seed, "whitening")
    first = (piece for part in labels.split(1000) for piece in start.images(part, random).split(PIECE))
    features = torch.cat(list(mapped(texture, first))).to(torch.float64)
    centre = features.mean(dim=0)
    variances, vectors = torch.linalg.eigh(torch.cov(features.mT))
    ridge = RIDGE * variances[-20:].mean()
    matrix = (vectors / (variances.clamp(min=0) + ridge).sqrt()).flip(1)
    for _ in mapped(lambda some: some.copy_((some - centre) @ matrix), features.split(1000)):
        pass  # in place: all of them take much memory
    return Whitening(centre=centre, matrix=matrix, labels=labels, values=features)


@dataclass(frozen=True, kw_only=True)
class MomentModel:
    """The generator: first images, and the map from their texture to the texture of records."""

    start: Start
    present: Tensor  # [p] classes with enough records to generate
    sizes: Tensor  # [p] number of records of each, as released
    centre: Tensor  # [D]
    white: Tensor  # [D, D]
    before: Tensor  # [classes, D] mean texture of first images
    after: Tensor  # [classes, D] mean texture of records, as released
    maps: Tensor  # [classes, t, t] linear map of the first t coordinates; the others are only shifted
    steps: int

    def to(self, device: torch.device | str) -> "MomentModel":
        """Return the model with the texture step on this device.

        First images are always drawn on the CPU, so that they are the same on every machine.
        """
        heavy = {name: getattr(self, name).to(device) for name in ("centre", "white", "before", "after", "maps")}
        return dataclasses.replace(self, **heavy)

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Return images [n, c, h, w] in [0, 1]; the same labels and randomness give the same images."""
        (images,) = self.batches([labels], random)
        return images

    def batches(self, parts: Iterable[Tensor], random: torch.Generator) -> Iterator[Tensor]:
        """Yield the images of each part of the labels, as `images` would; threads work on several parts side by side.

        Random numbers are drawn in the order of the parts, so the images do not depend on the number of threads.
        """
        side_by_side = map if self.maps.device.type == "cuda" else mapped  # a GPU works on one piece at a time
        with one_core_each():
            pieces = side_by_side(lambda piece: (piece[0], self._textured(*piece[1:])), self._pieces(parts, random))
            for _, images in groupby(pieces, key=itemgetter(0)):
                yield torch.cat([piece for _, piece in images])

    def _pieces(self, parts: Iterable[Tensor], random: torch.Generator) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the first images and the labels of each piece, with the number of its part."""
        for number, labels in enumerate(parts):
            first = self.start.images(labels, random)
            pieces = max(1, -(-len(labels) // PIECE)) if self.maps.device.type == "cpu" else 1
            yield from zip(repeat(number), first.chunk(pieces), labels.chunk(pieces), strict=False)

    def _textured(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return first images after the steps towards the texture that records have."""
        if self.steps == 0:
            return images
        texture = Texture(self.start.shape)
        images, labels = images.to(self.maps.device), labels.to(self.maps.device)
        size = self.maps.shape[1]

        def whitened(x: Tensor) -> Tensor:
            return (texture(x) - self.centre) @ self.white

        with torch.no_grad():
            offset = whitened(images) - self.before[labels]
            head = torch.einsum("nij,nj->ni", self.maps[labels], offset[:, :size])
            goal = torch.cat([head, offset[:, size:]], dim=1) + self.after[labels]
        logits = torch.logit(images.clamp(0.02, 0.98))
        return torch.sigmoid(
            _descend(logits, lambda at: (whitened(torch.sigmoid(at)) - goal).square().sum(), self.steps)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            "means": self.start.means,
            "factors": self.start.factors,
            "present": self.present,
            "sizes": self.sizes,
            "centre": self.centre,
            "white": self.white,
            "before": self.before,
            "after": self.after,
            "maps": self.maps,
        }


def without_texture(start: Start, present: Tensor, counts: Tensor) -> MomentModel:
    """Return a model that releases first images unchanged. `counts`: number of records of every class, as released."""
    classes, none = len(start.means), torch.zeros(0)
    sizes = counts[present].to(torch.float32)
    empty = {"before": torch.zeros(classes, 0), "after": torch.zeros(classes, 0), "maps": torch.zeros(classes, 0, 0)}
    return MomentModel(
        start=start, present=present, sizes=sizes, centre=none, white=torch.zeros(0, 0), steps=0, **empty
    )


def make_model(
    start: Start,
    whitening: Whitening,
    *,
    present: Tensor,
    counts: Tensor,
    means: Tensor,
    covariances: Tensor,
    steps: int,
) -> MomentModel:
    """Return a model with, for each class, the optimal transport map from first images' texture to the released one.

    The texture of first images is N(m, S), the released one N(m', S').

    Args:
        present: the classes to generate [p].
        counts: number of records of every class, as released.
        means: released mean texture [classes, D].
        covariances: released covariances of the first t texture coordinates [classes, t, t].
        steps: gradient steps that move an image towards its texture.
    """
    size = covariances.shape[1]
    before, maps = torch.zeros_like(means), torch.eye(size, dtype=torch.float64).repeat(len(means), 1, 1)
    for label in present.tolist():
        features = whitening.values[whitening.labels == label]
        before[label] = features.mean(dim=0)
        spread = torch.cov(features[:, :size].mT)
        root, inverse = _root(spread, 0.5, 1e-4), _root(spread, -0.5, 1e-4)
        maps[label] = inverse @ _root(root @ covariances[label] @ root, 0.5, 1e-6) @ inverse
    small = {
        "sizes": counts[present],
        "centre": whitening.centre,
        "white": whitening.matrix,
        "before": before,
        "after": means,
        "maps": maps,
    }
    return MomentModel(
        start=start, present=present, steps=steps, **{name: value.to(torch.float32) for name, value in small.items()}
    )


def _descend(x: Tensor, loss: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Minimise the loss with Adam, so that every pixel moves about equally far.

    These are the operations of `torch.optim.Adam`, which takes seconds to import.
    """
    x = x.clone().requires_grad_()
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    first, second = 0.9, 0.999
    for step in range(1, steps + 1):
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss(x), x)
        with torch.no_grad():
            mean.lerp_(slope, 1 - first)
            square.mul_(second).addcmul_(slope, slope, value=1 - second)
            width = (square.sqrt() / (1 - second**step) ** 0.5).add_(1e-8)
            x.addcdiv_(mean, width, value=-(RATE / (1 - first**step)))
    return x.detach()
