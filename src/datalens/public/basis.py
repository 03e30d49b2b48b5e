"""Coordinates for directions in image space: pixels, or low-frequency cosines. Public and orthonormal.

Both sides of the gate use it, and it depends on no record: teachers vote in these coordinates, and the
student maps the released directions back. Since the rows are orthonormal, norms and inner products
of what lies in their span do not change.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

BasisName = Literal["pixel", "dct", "opponent"]

# Light, and two differences of colour: orthonormal, and most of what there is in an image is in the first.
OPPONENT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
OPPONENT = OPPONENT / torch.linalg.vector_norm(OPPONENT, dim=1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Basis:
    """`size` orthonormal rows over images of `shape` = [channels, height, width]; no rows: the pixels themselves."""

    name: BasisName
    shape: tuple[int, int, int]
    rows: Tensor | None  # [size, channels·height·width]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) if self.rows is None else self.rows.shape[0]

    def forward(self, images: Tensor) -> Tensor:
        """[..., channels, height, width] → [..., size]"""
        flat = images.flatten(start_dim=-3)
        return flat if self.rows is None else flat @ self.rows.T.to(flat)

    def inverse(self, coordinates: Tensor) -> Tensor:
        """[..., size] → [..., channels, height, width]: the adjoint, and on the span the inverse"""
        flat = coordinates if self.rows is None else coordinates @ self.rows.to(coordinates)
        return flat.unflatten(-1, self.shape)


def make_basis(name: BasisName, shape: tuple[int, int, int], size: int | None) -> Basis:
    """`size` low-frequency coordinates; pixels always come in full.

    dct: shared evenly by the channels. opponent: for three channels, six of eight to the light and one to each
    difference of colour.
    """
    if name == "pixel":
        return Basis(name="pixel", shape=shape, rows=None)
    channels, height, width = shape
    size = min(size or channels * height * width, channels * height * width)
    rows = np.zeros((size, channels, height, width))
    if name == "opponent" and channels == 3:
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
    # Multiples of 2^-26: sums of whole numbers times these are exact in float64, in any order (up to 2^17 values).
    rounded = np.rint(rows.reshape(size, -1) * 2**26) / 2**26
    return Basis(name=name, shape=shape, rows=torch.from_numpy(rounded).to(torch.float32))


def _lowest_frequencies(shape: tuple[int, int, int], size: int) -> list[tuple[int, int, int]]:
    """(channel, row, column) by rising frequency row² + column², the channels side by side; ties by position."""
    channels, height, width = shape
    grid = [(row, column) for row in range(height) for column in range(width)]
    grid.sort(key=lambda rc: ((rc[0] / height) ** 2 + (rc[1] / width) ** 2, rc))
    return [(channel, row, column) for row, column in grid for channel in range(channels)][:size]


def _wave(height: int, width: int, row: int, column: int) -> np.ndarray:
    return np.outer(_cosine(height, row), _cosine(width, column))


def _cosine(length: int, frequency: int) -> np.ndarray:
    """One row of the orthonormal DCT-II."""
    wave = np.cos(np.pi * (np.arange(length) + 0.5) * frequency / length)
    return wave * np.sqrt((1 if frequency == 0 else 2) / length)
