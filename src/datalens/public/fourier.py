"""Random Fourier features of images (Rahimi and Recht 2007), from a public seed. Used on both sides of the gate.

An image's features are the cosines and sines of D random projections. Their inner products approximate a Gaussian
kernel. Its bandwidth is public: half of √(d/6), where √(d/6) is the typical distance between two images of independent
uniform pixels. For integer pixels the arithmetic is exact: a projection is rounded to 1/TABLE of a turn, and cosines
come from a table.
"""

import math

import torch
from torch import Tensor

from datalens.public import streams

TABLE = 2**12  # steps per turn
FINE = 2**20  # parts of a step, per unit of brightness of 255: with 2^14 pixels of 2^8, sums stay below 2^53


def bandwidth(shape: tuple[int, int, int]) -> float:
    """Return the bandwidth b of the kernel exp(−‖x − y‖²/2b²), which depends only on the size of images."""
    return math.sqrt(math.prod(shape) / 6) / 2


class Fourier:
    """Random features for `count` frequencies over images of `shape`."""

    def __init__(self, shape: tuple[int, int, int], count: int, *, seed: int) -> None:
        pixels = math.prod(shape)
        random = streams.generator(seed, "frequencies")
        radians = torch.randn(pixels, count, generator=random, dtype=torch.float64) / bandwidth(shape)
        # Table steps per unit of brightness (of 255), rounded to a grid on which sums are exact.
        self._steps = (radians * (TABLE / (2 * math.pi * 255)) * FINE).round() / FINE
        self.count = count

    @property
    def size(self) -> int:
        """Number of features."""
        return 2 * self.count

    def whole(self, images: Tensor, *, grid: int) -> Tensor:
        """Return features as integers of norm at most `grid`, each image by itself: uint8 [n, c, h, w] → [n, size].

        The result is float64.
        """
        turn = torch.arange(TABLE, dtype=torch.float64) * (2 * math.pi / TABLE)
        unit = grid / math.sqrt(self.count)
        table = torch.stack([turn.cos(), turn.sin()], dim=1).mul(unit).trunc()
        phase = images.flatten(1).to(torch.float64) @ self._steps
        index = phase.round().to(torch.int64) % TABLE
        return table[index].flatten(1)

    def features(self, images: Tensor) -> Tensor:
        """Return differentiable features of norm 1, [n, size], of images in [0, 1]."""
        radians = self._steps.to(images) * (255 * 2 * math.pi / TABLE)
        phase = images.flatten(1) @ radians
        return torch.stack([phase.cos(), phase.sin()], dim=2).flatten(1) / math.sqrt(self.count)
