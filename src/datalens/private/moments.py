"""The rows of private moments: for every record its coordinates, its texture and its label.

The privacy unit is a record; or a person with all of their records, wherever these are in the stream.

A record's row in every sum below is a function only of that record, of released values and of public ones. It does not
depend on the other records, on their number or on its position. Values are first rounded to a fine public grid, in
arithmetic that is exact in any batch, so this holds to the last bit.
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

FINE = 2**10  # grid steps per unit of brightness
WHITE = 2**12  # grid steps per unit of the whitening matrix
STEEPEST = 2**27  # most of these steps: with fewer than 2^10 features below 2^15 each, sums stay below 2^53
CHUNK = 4096  # records at a time

# Selects the values that a moment is of: [n, stored] integers → [n, d] integers.
View = Callable[[Tensor], Tensor]


class RecordRows:
    """All records as integers in units of 1/FINE: coordinates, then texture features."""

    def __init__(
        self, rows: Rows, labels: Tensor, *, coordinates: int, fingerprint: int, persons: Tensor | None = None
    ) -> None:
        """Index the records. `persons` are their persons' numbers, [n], if persons are the privacy unit."""
        self._rows = rows.close()
        self._order = torch.arange(len(labels)) if persons is None else persons.argsort(stable=True)
        self._persons = None if persons is None else persons[self._order]
        self._labels = labels[self._order]
        self._coordinates = coordinates
        self.fingerprint = fingerprint

    @classmethod
    def gather(cls, records: Records, *, basis: Basis, texture: Texture) -> "RecordRows":
        """Read the stream once and keep the rows of all records."""
        schema = records.schema
        cpu = torch.device("cpu")
        width = basis.size + texture.size
        rows = Rows(torch.Size([width]), torch.int32, cpu, capacity=schema.nominal_size)
        labels, persons, fingerprint = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        person_numbers: dict[bytes, int] = {}
        with bar(f"reading {schema.name}", schema.nominal_size, private=True) as (progress, task):

            def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
                progress.advance(task, len(index))
                if not schema.by_person:
                    return np.zeros(len(index), dtype=np.int64)
                return np.array([person_numbers.setdefault(key, len(person_numbers)) for key in keys], dtype=np.int64)

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
        """The number of records. It is private under add/remove."""
        return len(self._labels)

    # --- which values ---------------------------------------------------------------------------

    def coordinates(self, stored: Tensor) -> Tensor:
        """Return the coordinates of stored rows."""
        return stored[:, : self._coordinates]

    def texture(self, stored: Tensor, *, centre: Tensor, white: Tensor) -> Tensor:
        """Return the texture features of stored rows, centred and whitened by public tensors on grids."""
        centred = stored[:, self._coordinates :] - to_fine(centre)
        # All numbers are integers below 2^53: exact in any order, so equal for a record in any batch.
        steps = (white.to(torch.float64) * WHITE).round().clamp(-STEEPEST, STEEPEST)
        return (centred @ steps / WHITE).round()

    # --- sums of bounded rows -------------------------------------------------------------------

    def histogram(self, view: View, *, means: Tensor | None, edges: Tensor, grid: int) -> BoundedSum:
        """Return the histogram of the records' norms.

        Args:
            view: Selects the values.
            means: Released class means, which are subtracted first.
            edges: Edges of the bins.
            grid: The vote of a record, an integer.
        """
        inner = edges[1:-1].to(torch.float64) * FINE

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, means):
                norms = values.square().sum(dim=1).sqrt()  # squares of integers: an exact sum
                bins = torch.bucketize(norms, inner)
                votes = torch.nn.functional.one_hot(bins, len(edges) - 1).to(torch.float64)
                one = torch.full_like(votes[:, :1], float(grid))
                yield Outer(slots=torch.zeros_like(labels), left=votes, right=one, persons=persons)

        return sum_outer(rows(), slots=1, left_bound=1, right_bound=grid, diameter=2**0.5 * grid * (1 + 1e-12))

    def sums(self, view: View, *, clip: float, classes: int, grid: int, counted: int) -> BoundedSum:
        """Return class sums of clipped rows. The last coordinate counts records, in units of `counted`.

        Args:
            view: Selects the values.
            clip: Bound on the norm of a row.
            classes: Number of classes.
            grid: Bound on the norm of a row of integers, count included.
            counted: A record's entry in the last coordinate.
        """
        room = int((grid**2 - counted**2) ** 0.5)

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, None):
                clipped = on_grid(values, clip=clip * FINE, grid=room)
                votes = torch.cat([clipped, torch.full_like(clipped[:, :1], float(counted))], dim=1)
                yield Outer(slots=labels, left=torch.ones_like(votes[:, :1]), right=votes, persons=persons)

        return sum_outer(rows(), slots=classes, left_bound=1, right_bound=grid)

    def covariances(self, view: View, *, means: Tensor, clip: float, grid: int) -> BoundedSum:
        """Return class sums of u ⊗ u, where u is a row minus the released mean of its class, clipped.

        Args:
            view: Selects the values.
            means: Released class means, [classes, d].
            clip: Bound on the norm of u.
            grid: Bound on the norm of u as integers.
        """

        def rows() -> Iterator[Outer]:
            for labels, values, persons in self._chunks(view, means):
                clipped = on_grid(values, clip=clip * FINE, grid=grid)
                yield Outer(slots=labels, left=clipped, right=clipped, persons=persons)

        if self._persons is not None and len(means) * means.shape[1] ** 2 > TRUNCATED**2:
            raise ValueError("the diameter of a person's row is not proved for this many cells")
        diameter = outer_diameter(float(grid**2), truncated=0.0 if self._persons is None else TRUNCATED)
        return sum_outer(rows(), slots=len(means), left_bound=grid, right_bound=grid, diameter=diameter)

    def _chunks(self, view: View, means: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield labels, values and persons of the records in chunks; a person's records are in one chunk."""
        around = None if means is None else to_fine(means)
        for start, end in self._ranges():
            values = view(self._rows.take(self._order[start:end] + 1).to(torch.float64))
            labels = self._labels[start:end]
            persons = None if self._persons is None else self._persons[start:end]
            yield labels, values if around is None else values - around[labels], persons

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most CHUNK records, more if one person has more. An empty set has one empty range."""
        start = 0
        while start < max(self.count, 1):
            end = min(start + CHUNK, self.count)
            if self._persons is not None and 0 < end < self.count:
                first = int(torch.searchsorted(self._persons, self._persons[end]))  # of the person at `end`
                end = first if first > start else int(torch.searchsorted(self._persons, self._persons[end], right=True))
            yield start, end
            start = max(end, 1)


def record_features(images: Tensor, *, basis: Basis, texture: Texture) -> Tensor:
    """Return the stored rows of records, in units of 1/FINE: uint8 [n, h, w, c] → int32 [n, coordinates + texture].

    Each row is a function of its record alone.
    """
    pixels = images.permute(0, 3, 1, 2).to(torch.float64).contiguous()
    coordinates = basis.forward(pixels) * (FINE / 255)
    features = texture(pixels, full=255.0) * FINE
    return torch.cat([coordinates, features], dim=1).round().to(torch.int32)


def to_fine(values: Tensor) -> Tensor:
    """Return the values as integers in units of 1/FINE."""
    return (values.to(torch.float64) * FINE).round()
