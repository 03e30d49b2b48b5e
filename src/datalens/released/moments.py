"""From released moments to images: all of it post-processing, none of it sees a record.

1. A Gaussian a class in low-frequency coordinates. Covariances come with noise on every cell; what is known of the
   noise takes most of it away again (`clean`).
2. Its samples are blurred and their texture is noise. Texture features of samples and of records differ in mean and
   covariance, class by class; the optimal map between two Gaussians carries the features of a sample over, and a dozen
   gradient steps carry the sample after them (`MomentModel.images`).
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.public import streams
from datalens.public.basis import Basis, make_basis
from datalens.public.texture import Texture

LEAST_COUNT = 20  # records of a class, on average, below which a class is treated as that large
PRESENT = 4.0  # standard deviations of noise that a class's count must stand above zero
WHITENING = 20_000  # images drawn to learn what texture the samples have
RIDGE = 0.003  # of the leading variances: what whitening does not magnify beyond
RATE = 0.35  # of the gradient steps, in logits of brightness


# --- reading what was released ----------------------------------------------------------------


def quantile_edge(histogram: Released, edges: Tensor, share: float) -> float:
    """The first edge under which this share of the records lies, as far as the noisy counts say."""
    counts = _value(histogram).flatten()
    cumulated = counts.cumsum(0)
    reached = torch.nonzero(cumulated >= share * float(counts.sum()))
    return float(edges[1 + (int(reached[0]) if len(reached) else len(counts) - 1)])


def class_means(sums: Released, *, clip: float, grid: int, counted: int, floor: float) -> tuple[Tensor, Tensor]:
    """Means [classes, d] and counts [classes]; for its mean no class counts less than `floor`."""
    value = _value(sums)
    room = int((grid**2 - counted**2) ** 0.5)
    counts = value[:, -1] / counted
    return value[:, :-1] * (clip / room) / counts.clamp(min=floor).unsqueeze(1), counts


def class_covariances(outer: Released, counts: Tensor, *, clip: float, grid: int, floor: float) -> Tensor:
    """[classes, d, d], cleaned."""
    value = _value(outer)
    size = math.isqrt(value.shape[1])
    matrices = value.view(-1, size, size)
    matrices = (matrices + matrices.mT) / 2  # both halves were released, each with its own noise
    units = clip**2 / grid**2 / counts.clamp(min=floor)
    # A symmetric matrix whose off-diagonal cells have variance s²/2: its spectrum ends at ±2·s·sqrt(size/2).
    noise = outer.event.sigma * units * math.sqrt(size / 2)
    return clean(matrices * units.view(-1, 1, 1), noise, counts.clamp(min=floor))


def round_covariances(means: Tensor, *, clip: float) -> Tensor:
    """[classes, d, d] where none could be released: as wide as the norm that was, in no particular direction."""
    classes, size = means.shape
    return torch.eye(size, dtype=means.dtype).repeat(classes, 1, 1) * (clip**2 / size)


def _value(released: Released) -> Tensor:
    if not isinstance(released, Released):
        raise TypeError("moments are read from released values only")
    return torch.from_numpy(released.value.astype("float64"))


# --- taking noise away ------------------------------------------------------------------------


def clean(matrices: Tensor, noise: Tensor, counts: Tensor) -> Tensor:
    """Covariances from noisy ones [classes, d, d] whose noise alone has a spectrum of ±2·`noise`.

    What classes have in common is seen by all of them together, with less noise; how a class differs from that is kept
    where it stands out of its own noise. Variances of single coordinates are measured well, and put back.
    """
    weights = counts / counts.sum()
    common = torch.einsum("c,cij->ij", weights, matrices)
    shared = _without_negative(shrink(common, float((weights * noise).square().sum().sqrt())))
    shared = shared + torch.diag((common.diagonal() - shared.diagonal()).clamp(min=0))
    found = []
    for matrix, width in zip(matrices, noise.tolist(), strict=True):
        own = shared + (shrink(matrix - common, width) if len(matrices) > 1 else 0)
        own = own + torch.diag(matrix.diagonal() - own.diagonal())
        found.append(_without_negative(own))
    return torch.stack(found)


def shrink(matrix: Tensor, noise: float) -> Tensor:
    """Eigenvalues as they were before noise of spectrum ±2·`noise` was added (spiked Wigner): λ = θ + noise²/θ."""
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
    """A Gaussian a class in low-frequency coordinates: the first images."""

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
    """Coordinates of texture in which the first images have variance about one, the widest first; public."""

    centre: Tensor  # [D]
    matrix: Tensor  # [D, D]
    labels: Tensor  # of the images it was learned from
    values: Tensor  # [n, D] theirs

    def norms(self, share: float) -> float:
        return float(self.values.norm(dim=1).quantile(share))


def make_whitening(start: Start, present: Tensor, seed: int) -> Whitening:
    """From images of the first model: how large texture is, and in which directions."""
    labels = present[torch.arange(WHITENING) % len(present)]
    texture, random = Texture(start.shape), streams.generator(seed, "whitening")
    features = torch.cat([texture(start.images(part, random)) for part in labels.split(1000)]).to(torch.float64)
    centre = features.mean(dim=0)
    values, vectors = torch.linalg.eigh(torch.cov(features.mT))
    ridge = RIDGE * values[-20:].mean()
    matrix = (vectors / (values.clamp(min=0) + ridge).sqrt()).flip(1)
    return Whitening(centre=centre, matrix=matrix, labels=labels, values=(features - centre) @ matrix)


@dataclass(frozen=True, kw_only=True)
class MomentModel:
    """The generator: first images, and where their texture should go."""

    start: Start
    present: Tensor  # [p] classes that have enough records to speak of
    sizes: Tensor  # [p] how many records each has, as released
    centre: Tensor  # [D]
    white: Tensor  # [D, D]
    before: Tensor  # [classes, D] mean texture of first images
    after: Tensor  # [classes, D] mean texture of records, as released
    maps: Tensor  # [classes, t, t] of the first t coordinates; the others are only moved
    steps: int

    def to(self, device: torch.device | str) -> "MomentModel":
        """Where images are moved to their texture; first images are drawn on the CPU, so that they are the same."""
        heavy = {name: getattr(self, name).to(device) for name in ("centre", "white", "before", "after", "maps")}
        return dataclasses.replace(self, **heavy)

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """[n, c, h, w] in [0, 1]; the same labels and randomness give the same images."""
        images = self.start.images(labels, random)
        if self.steps == 0:
            return images
        images, labels = images.to(self.maps.device), labels.to(self.maps.device)
        texture = Texture(self.start.shape)
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
    """First images as they are. `counts`: records of every class, as released."""
    classes, none = len(start.means), torch.zeros(0)
    sizes = counts[present].to(torch.float32)
    of_none = {"before": torch.zeros(classes, 0), "after": torch.zeros(classes, 0), "maps": torch.zeros(classes, 0, 0)}
    return MomentModel(
        start=start, present=present, sizes=sizes, centre=none, white=torch.zeros(0, 0), steps=0, **of_none
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
    """Class by class the optimal map from the texture of first images, N(m, S), to the released N(m', S')."""
    size = covariances.shape[1]
    before, maps = torch.zeros_like(means), torch.eye(size, dtype=torch.float64).repeat(len(means), 1, 1)
    for label in present.tolist():
        own = whitening.values[whitening.labels == label]
        before[label] = own.mean(dim=0)
        spread = torch.cov(own[:, :size].mT)
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
    """Adam, so that every pixel moves about as far as every other."""
    x = x.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=RATE)
    with torch.enable_grad():
        for _ in range(steps):
            adam.zero_grad()
            loss(x).backward()
            adam.step()
    return x.detach()
