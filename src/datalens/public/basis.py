"""Public, orthonormal coordinates for directions in image space: pixels, or low-frequency cosines.

They are used on both sides of the gate and depend on no record: teachers vote in these coordinates, and the student
maps the released directions back. Since the rows are orthonormal, norms and inner products within their span are
preserved.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datalens.public import streams

BasisName = Literal["pixel", "dct", "opponent", "random"]

# Light and two colour differences. They are orthonormal, and the first holds most of an image.
OPPONENT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
OPPONENT = OPPONENT / torch.linalg.vector_norm(OPPONENT, dim=1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Orthonormal rows over images of `shape` = [channels, height, width]. Without rows, the pixels themselves."""

    name: BasisName
    shape: tuple[int, int, int]
    rows: Tensor | None  # [size, channels·height·width]

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return int(np.prod(self.shape)) if self.rows is None else self.rows.shape[0]

    def forward(self, images: Tensor) -> Tensor:
        """Return the coordinates of images: [..., channels, height, width] → [..., size]."""
        flat = images.flatten(start_dim=-3)
        return flat if self.rows is None else flat @ self.rows.T.to(flat)

    def inverse(self, coordinates: Tensor) -> Tensor:
        """Map coordinates back by the adjoint, which on the span is the inverse: [..., size] → [..., c, h, w]."""
        flat = coordinates if self.rows is None else coordinates @ self.rows.to(coordinates)
        return flat.unflatten(-1, self.shape)


def make_basis(name: BasisName, shape: tuple[int, int, int], size: int | None) -> Basis:
    """Return a basis of low-frequency coordinates.

    Args:
        name: "pixel": all pixels. "dct": cosines, divided evenly among the channels. "opponent": for three channels,
            six of eight coordinates for light and one of eight for each colour difference; otherwise like "dct".
            "random": orthonormal random directions, always the same ones.
        shape: [channels, height, width].
        size: Number of coordinates; None for all. Ignored for pixels.
    """
    if name == "pixel":
        return Basis(name="pixel", shape=shape, rows=None)
    channels, height, width = shape
    size = min(size or channels * height * width, channels * height * width)
    rows = np.zeros((size, channels, height, width))
    if name == "random":
        normal = torch.randn(
            channels * height * width, size, generator=streams.generator(0, "basis"), dtype=torch.float64
        )
        rows = torch.linalg.qr(normal).Q.T.numpy().reshape(rows.shape)
    elif name == "opponent" and channels == 3:
        colour = min(size // 8, height * width)
        light = min(size - 2 * colour, height * width)
        parts = ((0, light), (1, colour), (2, colour))
        rows = np.concatenate(
            [
                np.stack([_wave(height, width, *at) for _, *at in _lowest_frequencies((1, height, width), count)])[
                    :, None
                ]
                * OPPONENT[plane].numpy().reshape(1, 3, 1, 1)
                for plane, count in parts
                if count
            ]
        )
        size = len(rows)
    else:
        for index, (channel, row, column) in enumerate(_lowest_frequencies(shape, size)):
            rows[index, channel] = _wave(height, width, row, column)
    # Multiples of 2^-26: sums of integers times these are exact in float64, in any order (up to 2^17 values).
    rounded = np.rint(rows.reshape(size, -1) * 2**26) / 2**26
    return Basis(name=name, shape=shape, rows=torch.from_numpy(rounded).to(torch.float32))


def _lowest_frequencies(shape: tuple[int, int, int], size: int) -> list[tuple[int, int, int]]:
    """Return (channel, row, column) in order of increasing frequency, channels alternating and ties by position."""
    channels, height, width = shape
    grid = [(row, column) for row in range(height) for column in range(width)]
    grid.sort(key=lambda rc: ((rc[0] / height) ** 2 + (rc[1] / width) ** 2, rc))
    return [(channel, row, column) for row, column in grid for channel in range(channels)][:size]


def _wave(height: int, width: int, row: int, column: int) -> np.ndarray:
    return np.outer(_cosine(height, row), _cosine(width, column))


def _cosine(length: int, frequency: int) -> np.ndarray:
    """Return one row of the orthonormal DCT-II."""
    wave = np.cos(np.pi * (np.arange(length) + 0.5) * frequency / length)
    return wave * np.sqrt((1 if frequency == 0 else 2) / length)
