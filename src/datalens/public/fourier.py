"""Random Fourier features of images (Rahimi and Recht 2007), from a public seed: both sides of the gate use them.

An image's features are cos and sin of D random projections; their inner products are those of a Gaussian kernel. Its
bandwidth is public: half of √(d/6), which lies between two images of independent uniform pixels. On whole numbers
all is exact: a projection is rounded to 1/TABLE of a turn, and cosines come from a table.
"""

import math

import torch
from torch import Tensor

from datalens.public import streams

TABLE = 2**12  # steps of a turn
FINE = 2**20  # of a step, per unit of brightness of 255: with 2^14 pixels of 2^8, sums stay below 2^53


def bandwidth(shape: tuple[int, int, int]) -> float:
    """Of the kernel exp(−‖x − y‖²/2b²), from the size of an image alone."""
    return math.sqrt(math.prod(shape) / 6) / 2


class Fourier:
    """`count` frequencies over images of `shape`."""

    def __init__(self, shape: tuple[int, int, int], count: int, *, seed: int) -> None:
        pixels = math.prod(shape)
        random = streams.generator(seed, "frequencies")
        radians = torch.randn(pixels, count, generator=random, dtype=torch.float64) / bandwidth(shape)
        # In steps of the table for a pixel that is one of 255 brighter, on a grid so fine that sums of them are exact.
        self._steps = (radians * (TABLE / (2 * math.pi * 255)) * FINE).round() / FINE
        self.count = count

    @property
    def size(self) -> int:
        return 2 * self.count

    def whole(self, images: Tensor, *, grid: int) -> Tensor:
        """uint8 [n, c, h, w] → [n, size] whole numbers in float64, of norm at most `grid`; each image by itself."""
        turn = torch.arange(TABLE, dtype=torch.float64) * (2 * math.pi / TABLE)
        unit = grid / math.sqrt(self.count)
        table = torch.stack([turn.cos(), turn.sin()], dim=1).mul(unit).trunc()
        phase = images.flatten(1).to(torch.float64) @ self._steps
        index = phase.round().to(torch.int64) % TABLE
        return table[index].flatten(1)

    def features(self, images: Tensor) -> Tensor:
        """Images in [0, 1] → [n, size] of norm 1, with gradients."""
        radians = self._steps.to(images) * (255 * 2 * math.pi / TABLE)
        phase = images.flatten(1) @ radians
        return torch.stack([phase.cos(), phase.sin()], dim=2).flatten(1) / math.sqrt(self.count)
