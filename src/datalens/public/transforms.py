"""Public linear maps of the vectors that teachers vote on: a random rotation, and a count sketch.

They are used on both sides of the gate and depend on no record: random numbers here come from the run's seed, which is
public. Every vector is mapped by itself, with the same bits in a batch of any size.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from datalens.public import streams


@dataclass(frozen=True)
class Rotation:
    """A randomised Hadamard transform: random signs D, then Hadamard's matrix H, scaled: H·D/√d′.

    Vectors are padded with zeros to d′, a power of two. The map is orthonormal, and with high probability the largest
    coordinate of its result is not much larger than the average one. It takes O(d log d) time.
    """

    size: int
    seed: int

    @property
    def padded(self) -> int:
        """The padded size d′: the smallest power of two that is at least `size`."""
        return 1 << (self.size - 1).bit_length()

    def forward(self, vectors: Tensor) -> Tensor:
        """Rotate vectors: […, size] → […, padded]."""
        signed = vectors * self._signs[: self.size].to(vectors)
        return hadamard(torch.nn.functional.pad(signed, (0, self.padded - self.size))) / math.sqrt(self.padded)

    def inverse(self, rotated: Tensor, *, scale: float = 1.0) -> Tensor:
        """Undo the rotation and multiply by `scale`: […, padded] → […, size]."""
        return (hadamard(rotated) * self._signs.to(rotated))[..., : self.size] * (scale / math.sqrt(self.padded))

    @cached_property
    def _signs(self) -> Tensor:
        return _random_signs(self.padded, seed=self.seed, purpose="rotation")


def hadamard(vectors: Tensor) -> Tensor:
    """Multiply the last dimension by Sylvester's Hadamard matrix, by sums and differences of halves."""
    size = vectors.shape[-1]
    half = size // 2
    while half:
        pairs = vectors.unflatten(-1, (-1, 2, half))
        one, other = pairs.unbind(-2)
        vectors = torch.stack([one + other, one - other], dim=-2).flatten(-3)
        half //= 2
    return vectors


@dataclass(frozen=True)
class Sketch:
    """A count sketch (Charikar, Chen, Farach-Colton 2002).

    Each row of the table assigns a random column and a random sign to every coordinate, and adds up what falls into
    each of its cells.
    """

    size: int
    rows: int
    columns: int
    seed: int

    @property
    def cells(self) -> int:
        """Cells of the table."""
        return self.rows * self.columns

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the tables of vectors: […, size] → […, rows·columns] float32. Exact for integers."""
        flat = vectors.reshape(-1, self.size).T.to(
            torch.float32
        )  # coordinates first, so that cells add up contiguous memory
        table = flat.new_zeros(self.cells, flat.shape[1])
        for row in range(self.rows):
            signed = flat * self._signs[row].to(flat).unsqueeze(1)
            table.index_add_(0, self._places[row].to(flat.device), signed)
        return table.T.reshape(*vectors.shape[:-1], self.cells)

    def estimates(self, table: Tensor) -> Tensor:
        """Return, for every coordinate, the median of the estimates by its cells: […, rows·columns] → […, size]."""
        by_row = torch.stack([table[..., self._places[r]] * self._signs[r].to(table) for r in range(self.rows)])
        low, high = (self.rows - 1) // 2, self.rows // 2
        ordered = by_row.sort(dim=0).values
        return (ordered[low] + ordered[high]) / 2

    def heaviest(self, table: Tensor, k: int) -> Tensor:
        """Return the `estimates` with all but the k largest set to zero."""
        estimates = self.estimates(table)
        places = estimates.abs().topk(k, dim=-1).indices
        return torch.zeros_like(estimates).scatter(-1, places, estimates.gather(-1, places))

    @cached_property
    def _places(self) -> Tensor:
        """The cell of each coordinate in each row: [rows, size]."""
        random = streams.generator(self.seed, "sketch")
        columns = torch.randint(self.columns, (self.rows, self.size), generator=random)
        return columns + self.columns * torch.arange(self.rows).unsqueeze(1)

    @cached_property
    def _signs(self) -> Tensor:
        signs = _random_signs(self.rows * self.size, seed=self.seed, purpose="sketch signs")
        return signs.view(self.rows, self.size)


def _random_signs(count: int, *, seed: int, purpose: str) -> Tensor:
    return torch.randint(2, (count,), generator=streams.generator(seed, purpose)) * 2 - 1
