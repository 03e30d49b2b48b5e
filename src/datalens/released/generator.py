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
    """Everything that is needed to rebuild a generator. It is stored in the weights file."""

    shape: tuple[int, int, int]
    classes: int
    latent: int
    latent_law: LatentName
    dense: int
    widths: tuple[int, ...]  # channels before each doubling of the image
    cosines: int = 0  # if not 0, images are projected onto this many cosines of the lowest frequencies

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields if self.cosines else {name: value for name, value in fields.items() if name != "cosines"}


def can_show(shape: tuple[int, int, int], cosines: int) -> bool:
    """Return whether images of this shape can be projected onto so many cosines: the matrix must not be too large."""
    channels, height, width = shape
    return cosines == 0 or (cosines > 0 and height * width <= 2**20 and cosines * channels * height * width <= 2**24)


def dcgan_architecture(
    shape: tuple[int, int, int], classes: int, *, latent: int, latent_law: LatentName, cosines: int = 0
) -> Architecture:
    """Return DC-GAN's architecture for an image size.

    Up to 32 pixels a side it has a dense layer of 1024 units and two transposed convolutions; for larger images it has
    four transposed convolutions, like DC-GAN's for 64 × 64.
    """
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
    """Return the architecture with `slim` times fewer channels."""
    widths = tuple(max(1, width // slim) for width in architecture.widths)
    return replace(architecture, dense=architecture.dense // slim, widths=widths)


class Generator(nn.Module):
    """A network from z and a label to an image in [0, 1]. The one-hot label is concatenated at every layer."""

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
        x = torch.sigmoid(x[:, :, :height, :width])  # crop where a size is not divisible by the upsampling factor
        if not self.architecture.cosines:
            return x
        # Teachers give feedback on these cosines only. The layers leave a grid pattern in the others: remove it.
        shown = self.shown(x.device)
        return (shown.inverse(shown.forward(x - 0.5)) + 0.5).clamp(0, 1)

    def shown(self, device: torch.device) -> Basis:
        """Return the basis of cosines on this device, computed once."""
        if self._shown is None or self._shown.rows is None or self._shown.rows.device != device:
            basis = make_basis("dct", self.architecture.shape, self.architecture.cosines)
            self._shown = replace(basis, rows=None if basis.rows is None else basis.rows.to(device))
        return self._shown

    def images(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Return one image per label, from latents drawn on the CPU."""
        device = next(self.parameters()).device
        return self(draw_latent(len(labels), self.architecture, random).to(device), labels.to(device))


def fresh_generator(shape: tuple[int, int, int], classes: int, *, latent: int, seed: int, slim: int = 1) -> "Generator":
    """Return a newly initialised DC-GAN generator, with `slim` times fewer channels: a function of the seed alone."""
    generator = Generator(slimmer(dcgan_architecture(shape, classes, latent=latent, latent_law="normal"), slim))
    initialise(generator, streams.generator(seed, "generator"))
    return generator.train()


def initialise(generator: Generator, random: torch.Generator) -> None:
    """Initialise as DC-GAN does: weights normal with standard deviation 0.02, biases zero, from `random` alone."""
    for module in generator.modules():
        if isinstance(module, nn.Linear | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02, generator=random)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def recalibrated(generator: Generator, random: torch.Generator) -> Generator:
    """Return a copy for sampling, whose batch-norm buffers are averages over many images of the final weights.

    The running averages of training come from small batches and from weights that were still changing. Only public
    latents and labels are used, so this is post-processing.
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
    """Draw latents [count, latent]. The paper states a Gaussian; its code draws from U(−1, 1)."""
    if architecture.latent_law == "normal":
        return torch.randn(count, architecture.latent, generator=random)
    return torch.rand(count, architecture.latent, generator=random) * 2 - 1
