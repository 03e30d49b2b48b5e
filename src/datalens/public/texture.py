"""Public features of an image: how bright it is where, and how much of each orientation and scale is where.

Moduli of oriented waves at two scales, averaged over the cells of a coarse grid: what a scattering transform sees at
its first order (Bruna and Mallat 2013). Both sides of the gate use them, and they depend on no record: released are
their moments, class by class, and synthetic images are moved until their own features fit (see `released.moments`).
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ORIENTATIONS = 8
SCALES = ((1.0, 7, 0.45 * math.pi), (2.0, 11, 0.225 * math.pi))  # width of the envelope, size of the filter, frequency
LARGEST = 32  # pixels a side: larger images are averaged down to it first
FINEST = 7  # cells a side of the grid
_SMOOTH = 1e-6  # under the root, so that it has a gradient at zero


class Texture:
    """`size` features of images [n, channels, height, width]; differentiable.

    In float64, of whole pixel values, an image's features are the same bits whatever other images are in the batch:
    sums are of whole numbers times multiples of 2^-26, so exact in any order, and all else is done value by value.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._channels, height, width = shape
        self._shrink = max(1, -(-max(height, width) // LARGEST))
        height, width = -(-height // self._shrink), -(-width // self._shrink)
        self._grid = (max(1, min(FINEST, height // 4)), max(1, min(FINEST, width // 4)))
        self._planes = ORIENTATIONS * len(SCALES)
        self.size = self._grid[0] * self._grid[1] * (self._planes + self._channels)
        # As one matrix: for a single plane that is faster than convolving, forwards and backwards.
        impulses = torch.eye(height * width).view(-1, 1, height, width)
        waves = F.conv2d(impulses, _filters(), stride=2, padding=max(size for _, size, _ in SCALES) // 2)
        self._steps = tuple(waves.shape[2:])
        self._waves = (waves.flatten(1) * 2**26).round() / 2**26  # [pixels, 2·planes·steps]

    def __call__(self, images: Tensor, *, full: float = 1.0) -> Tensor:
        """[n, size]. `full`: the value of a pixel at its brightest."""
        if self._shrink > 1:
            images = F.avg_pool2d(images, self._shrink, ceil_mode=True, divisor_override=1)
        planes, scale = images, [1.0] * self._channels  # of several, the first counts as light
        if self._channels == 3:
            red, green, blue = images.unbind(dim=1)
            planes = torch.stack([red + green + blue, red - blue, red - 2 * green + blue], dim=1)  # see basis.OPPONENT
            scale = [3**-0.5, 2**-0.5, 6**-0.5]
        unit = 1 / (full * self._shrink**2)
        light = planes[:, :1]
        waves = (light.flatten(1) @ self._waves.to(images)).view(len(images), 2, self._planes, *self._steps)
        waves = waves * (unit * scale[0])
        moduli = (waves.square().sum(dim=1) + _SMOOTH).sqrt()
        parts = [planes[:, number : number + 1] * (unit * factor) for number, factor in enumerate(scale)]
        return torch.cat([F.adaptive_avg_pool2d(part, self._grid).flatten(1) for part in (*parts, moduli)], dim=1)


def _filters() -> Tensor:
    """[2·planes, 1, side, side]: cosine, then sine waves under a Gaussian envelope; no answer to flat light."""
    side = max(size for _, size, _ in SCALES)
    cosines, sines = [], []
    for spread, size, frequency in SCALES:
        line = torch.arange(size, dtype=torch.float32) - size // 2
        down, across = torch.meshgrid(line, line, indexing="ij")
        for number in range(ORIENTATIONS):
            angle = math.pi * number / ORIENTATIONS
            along = across * math.cos(angle) + down * math.sin(angle)
            beside = down * math.cos(angle) - across * math.sin(angle)
            envelope = torch.exp(-(along**2 + beside**2 / 2) / (2 * spread**2))
            cosine, sine = envelope * torch.cos(frequency * along), envelope * torch.sin(frequency * along)
            cosine = cosine - envelope * (cosine.sum() / envelope.sum())
            norm = (cosine.square().sum() + sine.square().sum()).sqrt()
            margin = (side - size) // 2
            cosines.append(F.pad(cosine / norm, [margin] * 4))
            sines.append(F.pad(sine / norm, [margin] * 4))
    return torch.stack(cosines + sines).unsqueeze(1)
