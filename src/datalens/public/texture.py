"""Public features of an image: local brightness, and the local strength of each orientation and scale.

They are moduli of oriented waves at two scales, averaged over the cells of a coarse grid: the first order of a
scattering transform (Bruna and Mallat 2013). They are used on both sides of the gate and depend on no record. Their
moments are released for each class, and synthetic images are changed until their own features fit (see
`released.moments`).
"""

import math
from functools import cache, lru_cache
from threading import Lock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ORIENTATIONS = 8
SCALES = ((1.0, 7, 0.45 * math.pi), (2.0, 11, 0.225 * math.pi))  # width of the envelope, size of the filter, frequency
LARGEST = 32  # pixels per side: larger images are averaged down to this first
FINEST = 7  # most cells per side of the grid
_ALONE = Lock()  # the first of several threads computes the waves, which takes much memory, for all
_SMOOTH = 1e-6  # added under the root, so that it has a gradient at zero


class Texture:
    """Computes `size` features of images, [n, channels, height, width] → [n, size]. Differentiable.

    In float64 and for integer pixel values, an image's features have the same bits in any batch: sums are of integers
    times multiples of 2^-26, so they are exact in any order, and everything else is elementwise.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._channels, height, width = shape
        self._shrink = max(1, -(-max(height, width) // LARGEST))
        height, width = -(-height // self._shrink), -(-width // self._shrink)
        self._grid = (max(1, min(FINEST, height // 4)), max(1, min(FINEST, width // 4)))
        self._planes = ORIENTATIONS * len(SCALES)
        self.size = self._grid[0] * self._grid[1] * (self._planes + self._channels)
        self._shape = (height, width)
        self._steps = _steps(height, width)

    def __call__(self, images: Tensor, *, full: float = 1.0) -> Tensor:
        """Return the features, [n, size]. `full` is the value of the brightest pixel."""
        if self._shrink > 1:
            images = F.avg_pool2d(images, self._shrink, ceil_mode=True, divisor_override=1)
        planes, scale = images, [1.0] * self._channels  # with several channels, the first one counts as light
        if self._channels == 3:
            red, green, blue = images.unbind(dim=1)
            planes = torch.stack([red + green + blue, red - blue, red - 2 * green + blue], dim=1)  # see basis.OPPONENT
            scale = [3**-0.5, 2**-0.5, 6**-0.5]
        unit = 1 / (full * self._shrink**2)
        light = planes[:, :1]
        moduli = (self._moduli_by_rows if _is_exact(light) else self._moduli)(light.flatten(1), unit * scale[0])
        parts = [planes[:, number : number + 1] * (unit * factor) for number, factor in enumerate(scale)]
        return torch.cat([F.adaptive_avg_pool2d(part, self._grid).flatten(1) for part in (*parts, moduli)], dim=1)

    def _moduli(self, light: Tensor, unit: float) -> Tensor:
        """Return the moduli of the waves, [n, planes, *steps], from pixels [n, height·width]."""
        with _ALONE:
            every = _waves_on(*self._shape, light.dtype, light.device)
        waves = (light @ every).view(len(light), 2, self._planes, *self._steps) * unit
        return (waves.square().sum(dim=1) + _SMOOTH).sqrt()

    def _moduli_by_rows(self, light: Tensor, unit: float) -> Tensor:
        """Return the same, from the rows of pixels that each row of waves depends on: a third of the products.

        The sums have other terms that are zero only, so where they are exact, the result has the same bits.
        """
        moduli = light.new_empty(len(light), self._planes, *self._steps)
        with _ALONE:
            rows = _rows_of_waves(*self._shape, light.device)
        for row, (pixels, waves) in enumerate(rows):
            cosines, sines = ((light[:, pixels] @ waves) * unit).square_().chunk(2, dim=1)
            moduli[:, :, row] = (cosines.add_(sines)).add_(_SMOOTH).sqrt_().unflatten(1, (self._planes, -1))
        return moduli


def _is_exact(values: Tensor) -> bool:
    """Return whether sums of these are exact if they are whole numbers, and no gradient is needed."""
    return values.dtype == torch.float64 and not values.requires_grad


def _steps(height: int, width: int) -> tuple[int, int]:
    """Return the number of places of a wave, down and across: every second one, with a margin."""
    side, margin = max(size for _, size, _ in SCALES), max(size for _, size, _ in SCALES) // 2
    return (height + 2 * margin - side) // 2 + 1, (width + 2 * margin - side) // 2 + 1


@lru_cache(maxsize=4)
def _waves_on(height: int, width: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """Return all waves at all places as one matrix, [pixels, 2·planes·steps].

    For a single plane it is faster than a convolution, forwards and backwards.
    """
    impulses = torch.eye(height * width).view(-1, 1, height, width)
    waves = F.conv2d(impulses, _filters(), stride=2, padding=max(size for _, size, _ in SCALES) // 2)
    return ((waves.flatten(1) * 2**26).round() / 2**26).to(kind).to(device)


@lru_cache(maxsize=4)
def _rows_of_waves(height: int, width: int, device: torch.device) -> list[tuple[slice, Tensor]]:
    """Return for each row of waves the pixels it depends on, and their weights, [pixels, 2·planes·steps in a row]."""
    down, across = _steps(height, width)
    waves = _waves_on(height, width, torch.float64, torch.device("cpu")).view(height * width, -1, down, across)
    found = []
    for row in range(down):
        used = torch.nonzero(waves[:, :, row].flatten(1).any(dim=1)).flatten() // width * width
        pixels = slice(int(used[0]), int(used[-1]) + width)
        found.append((pixels, waves[pixels, :, row].flatten(1).contiguous().to(device)))
    return found


@cache
def _filters() -> Tensor:
    """Return cosine and then sine waves under a Gaussian envelope, [2·planes, 1, side, side]; zero for a flat image."""
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
