"""Public linear maps of vectors that teachers vote in: a random rotation, and a count sketch.

Both sides of the gate use them, and they depend on no record: what is drawn here comes from the run's seed, which is
public. Every vector is mapped by itself, with the same bits however many others are beside it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from datalens.public import streams


@dataclass(frozen=True)
class Rotation:
    """H·D/√d′ of a vector padded with zeros to d′, a power of two: random signs D, then Hadamard's matrix H.

    Orthonormal, and its largest coordinate is with high probability not much larger than the average one. O(d log d).
    """

    size: int
    seed: int

    @property
    def padded(self) -> int:
        return 1 << (self.size - 1).bit_length()

    def forward(self, vectors: Tensor) -> Tensor:
        """[…, size] → […, padded]"""
        signed = vectors * self._signs[: self.size].to(vectors)
        return hadamard(torch.nn.functional.pad(signed, (0, self.padded - self.size))) / math.sqrt(self.padded)

    def inverse(self, rotated: Tensor, *, scale: float = 1.0) -> Tensor:
        """[…, padded] → […, size], times `scale`"""
        return (hadamard(rotated) * self._signs.to(rotated))[..., : self.size] * (scale / math.sqrt(self.padded))

    @cached_property
    def _signs(self) -> Tensor:
        return _random_signs(self.padded, seed=self.seed, purpose="rotation")


def hadamard(vectors: Tensor) -> Tensor:
    """Sylvester's Hadamard matrix times the last dimension, by sums and differences of halves."""
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
    """A count sketch (Charikar, Chen, Farach-Colton 2002): each row of the table has its own random column and sign for
    every coordinate, and adds them up."""

    size: int
    rows: int
    columns: int
    seed: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def forward(self, vectors: Tensor) -> Tensor:
        """[…, size] → […, rows·columns] float32; exact for whole numbers."""
        flat = vectors.reshape(-1, self.size).T.to(
            torch.float32
        )  # coordinates first: cells add up whole rows of memory
        table = flat.new_zeros(self.cells, flat.shape[1])
        for row in range(self.rows):
            signed = flat * self._signs[row].to(flat).unsqueeze(1)
            table.index_add_(0, self._places[row].to(flat.device), signed)
        return table.T.reshape(*vectors.shape[:-1], self.cells)

    def estimates(self, table: Tensor) -> Tensor:
        """[…, rows·columns] → […, size]: for every coordinate the median of what its cells say."""
        said = torch.stack([table[..., self._places[r]] * self._signs[r].to(table) for r in range(self.rows)])
        low, high = (self.rows - 1) // 2, self.rows // 2
        ordered = said.sort(dim=0).values
        return (ordered[low] + ordered[high]) / 2

    def heaviest(self, table: Tensor, k: int) -> Tensor:
        """The same, but zero outside the k largest."""
        found = self.estimates(table)
        places = found.abs().topk(k, dim=-1).indices
        return torch.zeros_like(found).scatter(-1, places, found.gather(-1, places))

    @cached_property
    def _places(self) -> Tensor:
        """[rows, size]: the cell of each coordinate."""
        random = streams.generator(self.seed, "sketch")
        columns = torch.randint(self.columns, (self.rows, self.size), generator=random)
        return columns + self.columns * torch.arange(self.rows).unsqueeze(1)

    @cached_property
    def _signs(self) -> Tensor:
        signs = _random_signs(self.rows * self.size, seed=self.seed, purpose="sketch signs")
        return signs.view(self.rows, self.size)


def _random_signs(count: int, *, seed: int, purpose: str) -> Tensor:
    return torch.randint(2, (count,), generator=streams.generator(seed, purpose)) * 2 - 1
