"""What moments are made of: for every record its coordinates, its texture and its label. Each record is its own unit;
or each person is, with all of their records, wherever these lie in the stream.

A record's row in every sum below is a function of that record, of released values and of public ones, and of nothing
else: not of the other records, not of how many there are, not of its place. Values are put on a fine public grid
first, in arithmetic that is exact whatever the batch, so this holds to the last bit.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.outer import TRUNCATED, Outer, on_grid, outer_diameter, sum_outer
from datalens.data.records import Records
from datalens.private.shares import FINGERPRINT_MODULUS, Rows, block_fingerprint
from datalens.progress import bar
from datalens.public.basis import Basis
from datalens.public.texture import Texture

FINE = 2**10  # steps of the grid in a unit of brightness
WHITE = 2**12  # steps of the grid in a unit of the whitening matrix
STEEPEST = 2**27  # of these steps: with fewer than 2^10 features below 2^15 each, sums stay below 2^53
CHUNK = 4096  # records at a time

# [n, stored] whole numbers → [n, d] whole numbers: which values a moment is of
View = Callable[[Tensor], Tensor]


class RecordRows:
    """All records, as whole numbers in units of 1/FINE: coordinates, then texture features."""

    def __init__(
        self, rows: Rows, labels: Tensor, *, coordinates: int, fingerprint: int, persons: Tensor | None = None
    ) -> None:
        """`persons`: [n] numbers of the persons the records are of, where these are the units."""
        self._rows = rows.close()
        self._order = torch.arange(len(labels)) if persons is None else persons.argsort(stable=True)
        self._persons = None if persons is None else persons[self._order]
        self._labels = labels[self._order]
        self._coordinates = coordinates
        self.fingerprint = fingerprint

    @classmethod
    def gather(cls, records: Records, *, basis: Basis, texture: Texture) -> "RecordRows":
        """Read the stream once."""
        schema = records.schema
        cpu = torch.device("cpu")
        width = basis.size + texture.size
        rows = Rows(torch.Size([width]), torch.int32, cpu, capacity=schema.nominal_size)
        labels, persons, fingerprint = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        known: dict[bytes, int] = {}
        with bar(f"reading {schema.name}", schema.nominal_size) as (progress, task):

            def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
                progress.advance(task, len(index))
                if not schema.by_person:
                    return np.zeros(len(index), dtype=np.int64)
                return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)

            for block in records.blocks(everyone):
                if len(block.index):
                    rows.append(record_features(torch.from_numpy(block.images), basis=basis, texture=texture))
                    labels.append(block.labels)
                    persons.append(block.share)
                    part = block_fingerprint(block, shared=schema.by_person)
                    fingerprint = (fingerprint + part) % FINGERPRINT_MODULUS
        return cls(
            rows,
            torch.from_numpy(np.concatenate(labels)),
            coordinates=basis.size,
            fingerprint=fingerprint,
            persons=torch.from_numpy(np.concatenate(persons)) if schema.by_person else None,
        )

    @property
    def count(self) -> int:
        """Private under add/remove."""
        return len(self._labels)

    # --- which values ---------------------------------------------------------------------------

    def coordinates(self, stored: Tensor) -> Tensor:
        return stored[:, : self._coordinates]

    def texture(self, stored: Tensor, *, centre: Tensor, white: Tensor) -> Tensor:
        """Features around a public centre, whitened by a public matrix: both are put on their grids first."""
        centred = stored[:, self._coordinates :] - to_fine(centre)
        # Whole numbers below 2^53 all along: exact in any order, so the same for a record in any batch.
        steps = (white.to(torch.float64) * WHITE).round().clamp(-STEEPEST, STEEPEST)
        return (centred @ steps / WHITE).round()

    # --- sums of bounded rows -------------------------------------------------------------------

    def histogram(self, view: View, *, means: Tensor | None, edges: Tensor, grid: int) -> BoundedSum:
        """How many records have a norm (of what is seen, less the released mean of their class) in which bin."""
        inner = edges[1:-1].to(torch.float64) * FINE

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, means):
                norms = values.square().sum(dim=1).sqrt()  # squares of whole numbers: an exact sum
                bins = torch.bucketize(norms, inner)
                votes = torch.nn.functional.one_hot(bins, len(edges) - 1).to(torch.float64)
                one = torch.full_like(votes[:, :1], float(grid))
                yield Outer(slots=torch.zeros_like(labels), left=votes, right=one, persons=persons)

        return sum_outer(rows(), slots=1, left_bound=1, right_bound=grid, diameter=2**0.5 * grid * (1 + 1e-12))

    def sums(self, view: View, *, clip: float, classes: int, grid: int, counted: int) -> BoundedSum:
        """Class sums of clipped rows; the last coordinate counts records, in votes of `counted`."""
        room = int((grid**2 - counted**2) ** 0.5)

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, None):
                clipped = on_grid(values, clip=clip * FINE, grid=room)
                votes = torch.cat([clipped, torch.full_like(clipped[:, :1], float(counted))], dim=1)
                yield Outer(slots=labels, left=torch.ones_like(votes[:, :1]), right=votes, persons=persons)

        return sum_outer(rows(), slots=classes, left_bound=1, right_bound=grid)

    def covariances(self, view: View, *, means: Tensor, clip: float, grid: int) -> BoundedSum:
        """Class sums of u ⊗ u, u what is left of a row around the released mean of its class, clipped."""

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, means):
                clipped = on_grid(values, clip=clip * FINE, grid=grid)
                yield Outer(slots=labels, left=clipped, right=clipped, persons=persons)

        if self._persons is not None and len(means) * means.shape[1] ** 2 > TRUNCATED**2:
            raise ValueError("so many cells are more than the diameter of a person's row was proved for")
        diameter = outer_diameter(float(grid**2), truncated=0.0 if self._persons is None else TRUNCATED)
        return sum_outer(rows(), slots=len(means), left_bound=grid, right_bound=grid, diameter=diameter)

    def _chunks(self, view: View, means: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Labels, values and persons of some records; those of a person together."""
        around = None if means is None else to_fine(means)
        for start, end in self._ranges():
            values = view(self._rows.take(self._order[start:end] + 1).to(torch.float64))
            labels = self._labels[start:end]
            persons = None if self._persons is None else self._persons[start:end]
            yield labels, values if around is None else values - around[labels], persons

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """At most CHUNK records each, but never a part of a person; an empty set has a sum too, of nothing."""
        start = 0
        while start < max(self.count, 1):
            end = min(start + CHUNK, self.count)
            if self._persons is not None and 0 < end < self.count:
                first = int(torch.searchsorted(self._persons, self._persons[end]))  # of the person at the cut
                end = first if first > start else int(torch.searchsorted(self._persons, self._persons[end], right=True))
            yield start, end
            start = max(end, 1)


def record_features(images: Tensor, *, basis: Basis, texture: Texture) -> Tensor:
    """uint8 [n, h, w, c] → int32 [n, coordinates + texture], each record by itself, in units of 1/FINE."""
    pixels = images.permute(0, 3, 1, 2).to(torch.float64).contiguous()
    coordinates = basis.forward(pixels) * (FINE / 255)
    features = texture(pixels, full=255.0) * FINE
    return torch.cat([coordinates, features], dim=1).round().to(torch.int32)


def to_fine(values: Tensor) -> Tensor:
    return (values.to(torch.float64) * FINE).round()
