"""The student's network: a DC-GAN generator with labels, for any image size."""

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.public import streams
from datalens.public.basis import Basis, make_basis

LatentName = Literal["normal", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All that is needed to rebuild a generator; travels inside the weights file."""

    shape: tuple[int, int, int]
    classes: int
    latent: int
    latent_law: LatentName
    dense: int
    widths: tuple[int, ...]  # channels before each doubling of the image
    cosines: int = 0  # of the lowest frequencies, which alone are shown; 0: all of the image

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields if self.cosines else {name: value for name, value in fields.items() if name != "cosines"}


def can_show(shape: tuple[int, int, int], cosines: int) -> bool:
    """Whether so many cosines can be kept apart from the rest of an image: their matrix must not be large."""
    channels, height, width = shape
    return cosines == 0 or (cosines > 0 and height * width <= 2**20 and cosines * channels * height * width <= 2**24)


def dcgan_architecture(
    shape: tuple[int, int, int], classes: int, *, latent: int, latent_law: LatentName, cosines: int = 0
) -> Architecture:
    """Up to 32 pixels: dense 1024 and two transposed convolutions; larger: four, as DC-GAN has for 64 × 64."""
    small = max(shape[1:]) <= 32
    return Architecture(
        shape=shape,
        classes=classes,
        latent=latent,
        latent_law=latent_law,
        dense=1024 if small else 0,
        widths=(128, 128) if small else (512, 256, 128, 64),
        cosines=cosines,
    )


def slimmer(architecture: Architecture, slim: int) -> Architecture:
    """The same with so many times fewer channels."""
    widths = tuple(max(1, width // slim) for width in architecture.widths)
    return replace(architecture, dense=architecture.dense // slim, widths=widths)


class Generator(nn.Module):
    """z and a one-hot label → an image in [0, 1]. The label is concatenated at every layer."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = a = architecture
        channels, height, width = a.shape
        doublings = len(a.widths)
        self.start = (-(-height // 2**doublings), -(-width // 2**doublings))
        inputs = a.latent + a.classes
        self.dense = nn.Sequential()
        if a.dense:
            self.dense = nn.Sequential(nn.Linear(inputs, a.dense), nn.BatchNorm1d(a.dense), nn.ReLU())
            inputs = a.dense + a.classes
        first = a.widths[0] * self.start[0] * self.start[1]
        self.project = nn.Sequential(nn.Linear(inputs, first), nn.BatchNorm1d(first), nn.ReLU())
        outputs = (*a.widths[1:], channels)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(width_in + a.classes, width_out, 5, stride=2, padding=2, output_padding=1)
            for width_in, width_out in zip(a.widths, outputs, strict=True)
        )
        self.norm = nn.ModuleList(nn.BatchNorm2d(width_out) for width_out in outputs[:-1])
        self._shown: Basis | None = None

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        one_hot = F.one_hot(labels, self.architecture.classes).to(z.dtype)
        x = torch.cat([z, one_hot], dim=1)
        if self.architecture.dense:
            x = torch.cat([self.dense(x), one_hot], dim=1)
        x = self.project(x).view(len(z), self.architecture.widths[0], *self.start)
        for layer, up in enumerate(self.up):
            planes = one_hot[:, :, None, None].expand(-1, -1, *x.shape[2:])
            x = up(torch.cat([x, planes], dim=1))
            if layer < len(self.norm):
                x = F.relu(self.norm[layer](x))
        _, height, width = self.architecture.shape
        x = torch.sigmoid(x[:, :, :height, :width])  # sizes that do not halve evenly are cropped
        if not self.architecture.cosines:
            return x
        # Teachers speak of these cosines only: what the layers leave in the others, a grid, nobody asked for.
        shown = self.shown(x.device)
        return (shown.inverse(shown.forward(x - 0.5)) + 0.5).clamp(0, 1)

    def shown(self, device: torch.device) -> Basis:
        """The cosines, on this device; made once."""
        if self._shown is None or self._shown.rows is None or self._shown.rows.device != device:
            basis = make_basis("dct", self.architecture.shape, self.architecture.cosines)
            self._shown = replace(basis, rows=None if basis.rows is None else basis.rows.to(device))
        return self._shown

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """One image a label, from latents drawn on the CPU."""
        device = next(self.parameters()).device
        return self(draw_latent(len(labels), self.architecture, random).to(device), labels.to(device))


def fresh_generator(shape: tuple[int, int, int], classes: int, *, latent: int, seed: int, slim: int = 1) -> "Generator":
    """DC-GAN's, or one with so many times fewer channels, about to be trained; from the seed alone."""
    generator = Generator(slimmer(dcgan_architecture(shape, classes, latent=latent, latent_law="normal"), slim))
    initialise(generator, streams.generator(seed, "generator"))
    return generator.train()


def initialise(generator: Generator, random: torch.Generator) -> None:
    """DC-GAN's start: normal with standard deviation 0.02, biases zero; from `random` alone."""
    for module in generator.modules():
        if isinstance(module, nn.Linear | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02, generator=random)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def recalibrated(generator: Generator, random: torch.Generator) -> Generator:
    """A copy whose batch-norm buffers are averages over many images of the final weights: what sampling uses.

    The running averages of training follow batches of a few images and weights that were still moving. Only public
    latents and labels go in, so this is post-processing.
    """
    final = copy.deepcopy(generator)
    device = next(final.parameters()).device
    for module in final.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain average over the batches that follow
    labels = torch.arange(500, device=device) % generator.architecture.classes
    with torch.no_grad():
        for _ in range(10):
            final.train()(draw_latent(len(labels), generator.architecture, random).to(device), labels)
    return final.eval()


def draw_latent(count: int, architecture: Architecture, random: torch.Generator) -> Tensor:
    """The paper says Gaussian; its code draws from U(−1, 1)."""
    if architecture.latent_law == "normal":
        return torch.randn(count, architecture.latent, generator=random)
    return torch.rand(count, architecture.latent, generator=random) * 2 - 1
