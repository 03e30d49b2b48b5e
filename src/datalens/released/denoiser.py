"""A small diffusion model that begins where private moments end.

The noise of an image is removed in two parts. The first is the best linear estimate under the Gaussian of its class,
which is known from released moments and needs no training. The second is a correction by a small network of
convolutions, which is trained on images drawn from the moments, then on records by DP-SGD (`methods.refined`).
Sampling begins at an image drawn from the moments, with noise added, and removes the noise in a few steps.

Nothing here sees a record. The parameterisation is that of Karras et al. (2022); noise levels are relative to
brightness from −1 to 1.
"""

import copy
import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.public.threads import mapped
from datalens.released.moments import MomentModel, Start

SPREAD = 0.1  # standard deviation assumed of what low-frequency coordinates leave out, and of errors of covariances
CORRECTION = 0.35  # standard deviation of what the network corrects at high noise
LEAST_NOISE, MOST_NOISE = 0.03, 4.0  # noise levels that the network knows
TONES = 8  # sines and cosines by which it is told the noise level
STEPS = 10  # of the sampler
TRIES = 3  # draws of an image that shows its class
TOGETHER = 32  # images that go through the network together: more would not stay in the processor's cache
ON_GPU = 500  # the same on a GPU


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that is needed to rebuild a network. It is stored in the weights file."""

    image: tuple[int, int, int]
    classes: int
    wide: int  # channels at half the resolution of the image
    deep: int  # channels at a quarter
    hidden: int  # units that tell every block the class and the noise level

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.wide, self.deep, self.hidden

    @property
    def facts(self) -> int:
        """Number of values that the network is told about an image (`facts_of`)."""
        return self.classes + 2 * TONES

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(value.numel() for value in Network(self).parameters())


class Block(nn.Module):
    """Two convolutions, whose result is added to what came in; class and noise level scale and shift it in between."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.told = nn.Linear(hidden, 2 * channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        scale, shift = self.told(about)[:, :, None, None].chunk(2, dim=1)
        y = self.first(F.silu(normed(x)))
        return x + self.second(F.silu(normed(y) * (1 + scale) + shift))


def normed(x: Tensor) -> Tensor:
    """Bring the channels of every pixel to mean 0 and variance 1. Unlike batch norm, this mixes no images."""
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)


class Network(nn.Module):
    """A U-Net of two levels, on images whose 2×2 squares are folded into channels."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        channels = 4 * shape.image[0]
        self.about = nn.Linear(shape.facts, shape.hidden)
        self.enter = nn.Conv2d(2 * channels, shape.wide, 3, padding=1)
        self.high = nn.ModuleList([Block(shape.wide, shape.hidden), Block(shape.wide, shape.hidden)])
        self.down = nn.Conv2d(shape.wide, shape.deep, 3, stride=2, padding=1)
        self.low = nn.ModuleList([Block(shape.deep, shape.hidden), Block(shape.deep, shape.hidden)])
        self.up = nn.Conv2d(shape.deep, shape.wide, 1)
        self.last = nn.ModuleList([Block(shape.wide, shape.hidden)])
        self.leave = nn.Conv2d(shape.wide, channels, 3, padding=1)

    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        """Return the correction, [n, 4·c, h / 2, w / 2].

        Args:
            images: folded noisy images and their linear estimates, [n, 8·c, h / 2, w / 2].
            facts: class and noise level, as `facts_of` returns them.
        """
        about = F.silu(self.about(facts))
        x = self.enter(images)
        for block in self.high:
            x = block(x, about)
        y = self.down(x)
        for block in self.low:
            y = block(y, about)
        y = F.interpolate(self.up(y), scale_factor=2, mode="nearest")
        x = x + y[:, :, : x.shape[2], : x.shape[3]]
        for block in self.last:
            x = block(x, about)
        return self.leave(F.silu(normed(x)))


def fresh_network(shape: Shape, seed: int) -> Network:
    """Return a newly initialised network, a function of the seed alone. Its correction is zero."""
    network, random = Network(shape), streams.generator(seed, "denoiser")
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(1 / fan), generator=random)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
        if name.endswith(("second", "leave", "told")):
            nn.init.zeros_(module.weight)
    return channels_last(network)


def channels_last(network: Network) -> Network:
    """Return the network with its weights in the order in which convolutions on a CPU are fastest."""
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def facts_of(labels: Tensor, noise: Tensor, classes: int) -> Tensor:
    """Return what the network is told about each image, [n, classes + 2·TONES]: its class and its noise level."""
    angles = noise.log().unsqueeze(1) * torch.arange(1, TONES + 1, device=noise.device) * (math.pi / 5)
    one_hot = F.one_hot(labels, classes).to(angles.dtype) * math.sqrt(classes)
    return torch.cat([one_hot, angles.cos(), angles.sin()], dim=1)


def folded(images: Tensor) -> Tensor:
    """Fold 2×2 squares into channels; a side of odd length is padded by a row of zeros first."""
    return F.pixel_unshuffle(F.pad(images, (0, images.shape[3] % 2, 0, images.shape[2] % 2)), 2)


def unfolded(planes: Tensor, height: int, width: int) -> Tensor:
    return F.pixel_shuffle(planes, 2)[:, :, :height, :width]


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """The best linear estimate of an image from a noisy one, class by class, under the moments' Gaussians.

    Attributes:
        start: the Gaussians.
        device: where the noisy images are.
    """

    start: Start
    device: torch.device | str = "cpu"

    @cached_property
    def _directions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return [classes, r, r] orthonormal directions, their variances [classes, r], and the means [classes, r]."""
        factors = self.start.factors.to(torch.float64)
        values, vectors = torch.linalg.eigh(factors @ factors.mT)
        centre = self.start.basis.forward(torch.ones(1, *self.start.shape))  # brightness 2·x − 1
        found = (vectors.to(torch.float32), (4 * values).to(torch.float32), 2 * self.start.means - centre)
        vectors, values, means = (value.to(self.device) for value in found)
        return vectors, values, means

    @cached_property
    def _rows(self) -> Tensor:
        rows = make_basis("opponent", self.start.shape, self.start.means.shape[1]).rows
        assert rows is not None
        return rows.to(self.device)

    def __call__(self, noisy: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the estimates [n, c, h, w] of images whose noise has standard deviations `noise` [n]."""
        vectors, values, means = self._directions
        flat = noisy.flatten(1)
        within = flat @ self._rows.mT
        variance = noise.square().unsqueeze(1)
        known = values[labels] + SPREAD**2
        turned = torch.bmm((within - means[labels]).unsqueeze(1), vectors[labels])
        kept = turned * (known / (known + variance)).unsqueeze(1)
        estimate = means[labels] + torch.bmm(kept, vectors[labels].mT).squeeze(1)
        rest = SPREAD**2 / (SPREAD**2 + variance)
        return (rest * flat + (estimate - rest * within) @ self._rows).view(noisy.shape)


def correction_size(noise: Tensor) -> Tensor:
    """Return the scale of what the network corrects at these noise levels."""
    return noise * CORRECTION / (noise.square() + CORRECTION**2).sqrt()


def network_inputs(noisy: Tensor, linear: Tensor, noise: Tensor) -> Tensor:
    """Return what the network sees: the noisy images, scaled to about one, and their linear estimates."""
    scale = (noise.square() + 0.5).rsqrt().view(-1, 1, 1, 1)
    inputs = torch.cat([folded(noisy * scale), folded(linear * 1.4)], dim=1)
    return inputs.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """A linear classifier of texture, which says what an image shows.

    Attributes:
        weights: [features + 1, classes], for features of length one; [0, classes]: there is none.
    """

    weights: Tensor

    def answers(self, moments: MomentModel, images: Tensor) -> Tensor:
        """Return the class of each image [n, c, h, w], as a number."""
        texture = (Texture(moments.start.shape)(images.to(moments.centre.device)) - moments.centre) @ moments.white
        return (with_constant(texture) @ self.weights.to(texture.device)).argmax(dim=1).cpu()


def with_constant(features: Tensor) -> Tensor:
    """Return features with one more that is the same for all images: about an eighth of the length of the others."""
    return torch.cat([features, torch.full_like(features[:, :1], math.sqrt(features.shape[1]) / 8)], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffusionModel:
    """The generator of the second stage.

    Attributes:
        moments: whose images sampling begins at.
        network: the correction.
        begin: noise level that is added to these images.
        head: says which class an image has come to show.
    """

    moments: MomentModel
    network: Network
    begin: float
    head: Head

    @property
    def start(self) -> Start:
        return self.moments.start

    @property
    def present(self) -> Tensor:
        return self.moments.present

    @property
    def sizes(self) -> Tensor:
        return self.moments.sizes

    @property
    def device(self) -> torch.device:
        return self.network.leave.weight.device

    @cached_property
    def linear(self) -> Linear:
        return Linear(start=self.start, device=self.device)

    def to(self, device: torch.device | str) -> "DiffusionModel":
        """Return the model with the texture step of the moments, and a copy of the network, on this device.

        First images and noise are always drawn on the CPU, so that they are the same on every machine.
        """
        network = channels_last(copy.deepcopy(self.network).to(device))
        return dataclasses.replace(self, moments=self.moments.to(device), network=network)

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        first = {f"moments.{name}": value for name, value in self.moments.tensors().items()}
        return first | weights | {"head.weights": self.head.weights}

    def denoised(self, noisy: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return estimates of images without their noise."""
        linear = self.linear(noisy, labels, noise)
        inputs = network_inputs(noisy, linear, noise)
        facts = facts_of(labels, noise, self.network.shape.classes)
        kind = self.network.leave.weight.dtype
        found = self.network(inputs.to(kind), facts.to(kind)).to(torch.float32)
        _, height, width = self.network.shape.image
        return linear + unfolded(found, height, width) * correction_size(noise).view(-1, 1, 1, 1)

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Return images [n, c, h, w] in [0, 1]; the same labels and randomness give the same images.

        An image that has come to show another class, by the answer of the head, is used for a label of that class, if
        one is still without an image. After `TRIES` draws a label gets the last image that was drawn for it.
        """
        labels = labels.cpu()
        found, missing = self._drawn(labels, random), torch.ones(len(labels), dtype=torch.bool)
        if not len(self.head.weights):
            return found
        for attempt in range(TRIES):
            at = torch.nonzero(missing).flatten()
            drawn = found[at].clone() if attempt == 0 else self._drawn(labels[at], random)
            shown = self.head.answers(self.moments, drawn)
            for label in labels[at].unique().tolist():
                wanting, fitting = at[labels[at] == label], torch.nonzero(shown == label).flatten()
                fitting = fitting[: len(wanting)]
                found[wanting[: len(fitting)]], missing[wanting[: len(fitting)]] = drawn[fitting], False
            last = missing[at]
            found[at[last]] = drawn[last]
            if not bool(missing.any()):
                break
        return found

    def _drawn(self, labels: Tensor, random: torch.Generator) -> Tensor:
        first = self.moments.images(labels, random).cpu()
        noisy = 2 * first - 1 + self.begin * torch.randn(first.shape, generator=random)
        each, together = (mapped, TOGETHER) if self.device.type == "cpu" else (map, ON_GPU)
        parts = zip(noisy.to(self.device).split(together), labels.to(self.device).split(together), strict=True)
        return torch.cat(list(each(lambda part: self._cleared(*part), parts))).cpu()

    @torch.no_grad()
    def _cleared(self, x: Tensor, labels: Tensor) -> Tensor:
        """Remove the noise step by step, each step with a correction (Heun)."""
        levels = noise_levels(self.begin, STEPS)
        for now, then in itertools.pairwise(levels):
            slope = (x - self.denoised(x, labels, x.new_full((len(x),), now))) / now
            further = x + (then - now) * slope
            if then > 0:
                again = (further - self.denoised(further, labels, x.new_full((len(x),), then))) / then
                further = x + (then - now) * (slope + again) / 2
            x = further
        return ((x + 1) / 2).clamp(0, 1)


def noise_levels(begin: float, steps: int) -> list[float]:
    """Return the noise levels of the sampler, from `begin` to zero (Karras et al. 2022, with their exponent 7)."""
    high, low = begin ** (1 / 7), LEAST_NOISE ** (1 / 7)
    return [(high + i / (steps - 1) * (low - high)) ** 7 for i in range(steps)] + [0.0]
