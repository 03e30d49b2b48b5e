"""The rows of private moments: for every record its coordinates, its texture and its label.

The privacy unit is a record; or a person with all of their records, wherever these are in the stream. Rows are kept in
memory, or in a file without a name, so memory does not grow with the number of records (by 40 bytes for each, where
persons are protected).

A record's row in every sum below is a function only of that record, of released values and of public ones. It does not
depend on the other records, on their number or on its position. Values are first rounded to a fine public grid, in
arithmetic that is exact in any batch, so this holds to the last bit.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.outer import TRUNCATED, Outer, on_grid, outer_diameter, sum_outer
from datalens.bounded.parts import PartSum, join
from datalens.data.records import Block, Records
from datalens.data.schema import Schema
from datalens.private.shares import FINGERPRINT_MODULUS, Rows
from datalens.progress import bar
from datalens.public import streams
from datalens.public.basis import Basis
from datalens.public.texture import Texture
from datalens.public.threads import mapped, side_by_side

FINE = 2**10  # grid steps per unit of brightness
WHITE = 2**12  # grid steps per unit of the whitening matrix
STEEPEST = 2**27  # most of these steps: with fewer than 2^10 features below 2^15 each, sums stay below 2^53
CHUNK = 1024  # records at a time, in each of a few threads
FEW_THREADS = 8  # more threads take smaller chunks, so that memory does not grow with their number
CHUNKS_ON_GPU = 8  # so many chunks at a time, on a GPU
HEAD = 2**10  # grid steps per unit of a classifier's weights
ODDS = 2**20  # grid steps of the most likely class's odds
LARGEST = 2**21  # most of a stored value that takes long to compute: squares of 2^10 of them add up to 2^52 at most
TOGETHER = 128  # records whose waves are computed together, so that they stay in the processor's cache
MEMORY = 2**28  # bytes of rows that are kept in memory: more go to a file
EXACT = 2**24  # records whose rows, of norm at most 2^28, are added in float64; their sums are added in int64
KEY = 16  # bytes of a hash that stands for a person: no two are alike

# Selects the values that a moment is of: [n, stored] integers → [n, d] integers.
View = Callable[[Tensor], Tensor]


# Labels and values of a chunk → its rows.
Row = Callable[[Tensor, Tensor], Outer]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of one kind of sum (see `sum_outer`)."""

    slots: int
    left: int
    right: int
    diameter: float | None = None


class RecordRows:
    """All records as integers in units of 1/FINE: coordinates, then texture features."""

    def __init__(
        self,
        rows: Rows,
        labels: Tensor | Rows,
        *,
        coordinates: int,
        fingerprint: int,
        persons: Tensor | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        """Index the records.

        Args:
            rows: Of all records.
            labels: Their labels, [n].
            coordinates: How many numbers of a row are coordinates.
            fingerprint: Of all records.
            persons: The numbers of their persons, [n], if persons are the privacy unit.
            hashes: A hash for each person, where several parts are compared.
        """
        self._rows = rows.close()
        self._chunk = CHUNK * (CHUNKS_ON_GPU if rows.device.type == "cuda" else 1)
        self._labels = labels.close() if isinstance(labels, Rows) else Rows.of(labels).close()
        self._order = None if persons is None else persons.argsort(stable=True)
        self._persons = None if persons is None else persons[self._order]
        self._coordinates = coordinates
        self.fingerprint = fingerprint
        self.hashes = hashes

    @classmethod
    def gather(
        cls,
        records: Records,
        *,
        basis: Basis,
        texture: Texture,
        folder: Path | None = None,
        memory: int = MEMORY,
        shown: bool = True,
        device: torch.device | None = None,
    ) -> "RecordRows":
        """Read the stream once and keep the rows of all records.

        Args:
            records: The stream.
            basis: Of the coordinates.
            texture: Computes the texture features.
            folder: Where the file of rows lies, if they need one; None: that of temporary files.
            memory: Bytes of rows that are kept in memory.
            shown: Whether progress is shown.
            device: What computes rows and sums, and keeps rows if they fit (see `same_rows_on`); None: the processor.
        """
        schema = records.schema
        place: dict[str, Any] = {"capacity": schema.nominal_size, "limit": memory, "folder": folder}
        cpu, width = torch.device("cpu"), basis.size + texture.size
        device = device or cpu
        rows = Rows(torch.Size([width]), stored_type(schema), device, **place)
        labels = Rows(torch.Size([]), torch.int32, cpu, **place | {"limit": max(memory, MEMORY // 16)})
        keys = bytearray()  # of persons, in the order in which the stream asks for them
        persons: list[np.ndarray] = []
        fingerprint = asked = 0

        with bar(f"reading {schema.name}", schema.nominal_size, private=True, shown=shown) as (progress, task):

            def everyone(index: np.ndarray, names: Iterable[bytes]) -> np.ndarray:
                nonlocal asked
                if schema.by_person:
                    keys.extend(b"".join(person_hash(name) for name in names))
                asked += len(index)
                return np.arange(asked - len(index), asked, dtype=np.int64)

            def blocks() -> Iterator[tuple[Block, np.ndarray]]:
                for block in records.blocks(everyone):
                    yield block, persons_of(block, keys)

            def worked(read: tuple[Block, np.ndarray]) -> tuple[Block, Tensor, np.ndarray, int]:
                block, whose = read
                images = torch.from_numpy(block.images).to(device)
                features = torch.empty(len(images), width, dtype=stored_type(schema), device=device)
                for some, place in zip(images.split(CHUNK), features.split(CHUNK), strict=True):
                    place.copy_(record_features(some, basis=basis, texture=texture))
                return block, features, whose, fingerprint_of(block, whose)

            for block, features, whose, part_of_fingerprint in mapped(worked, blocks()):
                progress.advance(task, len(block.index))
                rows.append(features)
                labels.append(torch.from_numpy(block.labels).to(torch.int32))
                persons.append(whose)
                fingerprint = (fingerprint + part_of_fingerprint) % FINGERPRINT_MODULUS
        numbers, hashes = _numbered(persons) if schema.by_person else (None, None)
        return cls(
            rows,
            labels,
            coordinates=basis.size,
            fingerprint=fingerprint,
            persons=numbers,
            hashes=hashes,
        )

    @property
    def count(self) -> int:
        """The number of records. It is private under add/remove."""
        return self._rows.count

    @property
    def in_file(self) -> bool:
        """Whether the rows are in a file."""
        return self._rows.in_file

    # --- which values ---------------------------------------------------------------------------

    def coordinates(self, stored: Tensor) -> Tensor:
        """Return the coordinates of stored rows."""
        return stored[:, : self._coordinates].to(torch.float64)

    def texture(self, stored: Tensor, *, centre: Tensor, white: Tensor) -> Tensor:
        """Return the texture features of stored rows, centred and whitened by public tensors on grids."""
        centred = stored[:, self._coordinates :].to(torch.float64) - to_fine(centre).to(stored.device)
        # All numbers are integers below 2^53: exact in any order, so equal for a record in any batch.
        steps = (white.to(stored.device, torch.float64) * WHITE).round().clamp(-STEEPEST, STEEPEST)
        return (centred @ steps).div_(WHITE).round_().clamp_(-LARGEST, LARGEST)  # so that squares add up exactly, too

    # --- sums of bounded rows -------------------------------------------------------------------

    def histogram(self, view: View, *, means: Tensor | None, edges: Tensor, grid: int) -> BoundedSum:
        """Return the histogram of the records' norms.

        Args:
            view: Selects the values.
            means: Released class means, which are subtracted first.
            edges: Edges of the bins.
            grid: The vote of a record, an integer.
        """
        inner = (edges[1:-1].to(torch.float64) * FINE).to(self._rows.device)

        def row(labels: Tensor, values: Tensor) -> Outer:
            norms = values.square().sum(dim=1).sqrt()  # squares of integers: an exact sum
            bins = torch.bucketize(norms, inner)
            votes = torch.nn.functional.one_hot(bins, len(edges) - 1).to(torch.float64)
            one = torch.full_like(votes[:, :1], float(grid))
            return Outer(slots=torch.zeros_like(labels), left=votes, right=one)

        diameter = 2**0.5 * grid * (1 + 1e-12)
        return self._sum(row, view, means, Bounds(slots=1, left=1, right=grid, diameter=diameter))

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

        def row(labels: Tensor, values: Tensor) -> Outer:
            clipped = on_grid(values, clip=clip * FINE, grid=room)
            votes = torch.cat([clipped, torch.full_like(clipped[:, :1], float(counted))], dim=1)
            return Outer(slots=labels, left=torch.ones_like(votes[:, :1]), right=votes)

        return self._sum(row, view, None, Bounds(slots=classes, left=1, right=grid))

    def covariances(self, view: View, *, means: Tensor, clip: float, grid: int) -> BoundedSum:
        """Return class sums of u ⊗ u, where u is a row minus the released mean of its class, clipped.

        Args:
            view: Selects the values.
            means: Released class means, [classes, d].
            clip: Bound on the norm of u.
            grid: Bound on the norm of u as integers.
        """

        def row(labels: Tensor, values: Tensor) -> Outer:
            clipped = on_grid(values, clip=clip * FINE, grid=grid)
            return Outer(slots=labels, left=clipped, right=clipped)

        if self._persons is not None and len(means) * means.shape[1] ** 2 > TRUNCATED**2:
            raise ValueError("the diameter of a person's row is not proved for this many cells")
        diameter = outer_diameter(float(grid**2), truncated=0.0 if self._persons is None else TRUNCATED)
        return self._sum(row, view, means, Bounds(slots=len(means), left=grid, right=grid, diameter=diameter))

    def errors(self, view: View, *, head: Tensor, sharpness: float, least: float, grid: int) -> BoundedSum:
        """Return the sum of features ⊗ (a linear classifier's answer − the label), both of one length.

        It is the gradient of the classifier's loss, with every record's part brought to one length.

        Args:
            view: Selects the features; the last one is a constant.
            head: The released classifier, [features, classes].
            sharpness: Factor of the classifier's answers, for features of length one.
            least: Errors shorter than this, of √2 at most, count for less.
            grid: Bound on the norm of either factor, in integers.
        """
        weights = (head.to(self._rows.device, torch.float64) * HEAD).round().clamp(-STEEPEST, STEEPEST)
        per_step = sharpness / (HEAD * grid)

        def row(labels: Tensor, values: Tensor) -> Outer:
            left = on_grid(values, clip=1.0, grid=grid)
            # Exact up to here. What exp rounds is put on a grid; rows of eight leave no rest to be computed apart.
            logits = torch.nn.functional.pad(left @ weights * per_step, (0, 0, 0, -len(left) % 8))
            odds = ((logits - logits.amax(dim=1, keepdim=True)).exp() * ODDS).round()[: len(left)]
            right_answer = torch.nn.functional.one_hot(labels, head.shape[1]).to(torch.float64)
            error = (odds / odds.sum(dim=1, keepdim=True) * ODDS).round() - right_answer * ODDS
            return Outer(
                slots=torch.zeros_like(labels),
                left=left,
                right=on_grid(error, clip=least * ODDS, grid=grid),
            )

        return self._sum(row, view, None, Bounds(slots=1, left=grid, right=grid))

    def viewed(self, view: View, width: int, *, folder: Path | None = None) -> "RecordRows":
        """Return the same records with rows that hold what `view` selects, where it takes long to compute.

        Args:
            view: Selects the values. They are cut off at `LARGEST`, so that their squares add up exactly.
            width: How many numbers it returns.
            folder: Where the file of rows lies, if they need one.
        """
        found = Rows(torch.Size([width]), torch.int32, torch.device("cpu"), capacity=self.count, folder=folder)

        def worked(start: int) -> Tensor:
            values = view(self._rows.between(start, min(start + CHUNK, self.count)).cpu())
            return values.clamp(-LARGEST, LARGEST).to(torch.int32)

        for values in mapped(worked, range(0, self.count, CHUNK)):
            found.append(values)
        whose: Tensor | None = None
        if self._persons is not None and self._order is not None:
            whose = torch.empty_like(self._persons)
            whose[self._order] = self._persons
        return RecordRows(found, self._labels, coordinates=width, fingerprint=self.fingerprint, persons=whose)

    def _sum(self, row: Row, view: View, means: Tensor | None, bounds: "Bounds") -> BoundedSum:
        """Return the sum of all records' rows. Threads sum chunks of records; where they are cut does not matter."""
        around = None if means is None else to_fine(means).to(self._rows.device)
        ranges = list(self._ranges(max(1, self._chunk * FEW_THREADS // max(FEW_THREADS, side_by_side()))))

        def chunks(some: list[tuple[int, int]]) -> Iterator[Outer]:
            for start, end in some:
                stored, labels = self._read(start, end)
                values = view(stored)
                rows = row(labels, values if around is None else values - around[labels])
                if self._persons is None:
                    yield rows
                else:
                    whose, factors = self._persons[start:end], (rows.left.cpu(), rows.right.cpu())
                    yield Outer(slots=rows.slots.cpu(), left=factors[0], right=factors[1], persons=whose)

        def one(part: int) -> PartSum:
            total = sum_outer(
                chunks(ranges[part::parts]),
                slots=bounds.slots,
                left_bound=bounds.left,
                right_bound=bounds.right,
                diameter=bounds.diameter,
            )
            return PartSum(total=total, parts=(part,), records=sum(end - start for start, end in ranges[part::parts]))

        parts = min(len(ranges), max(side_by_side(), -(-self.count // EXACT)))
        return join(mapped(one, range(parts))).total

    def _read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return stored rows and labels of some records, in the order of persons where these are the units."""
        if self._order is None:
            rows, labels = self._rows.between(start, end), self._labels.between(start, end)
        else:
            index = self._order[start:end] + 1
            rows, labels = self._rows.take(index), self._labels.take(index)
            self._rows.forget()
        return rows, labels.to(rows.device, torch.int64)

    def _ranges(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most `chunk` records, more if one person has more; one empty range of an empty set."""
        start = 0
        while start < max(self.count, 1):
            end = min(start + chunk, self.count)
            if self._persons is not None and 0 < end < self.count:
                first = int(torch.searchsorted(self._persons, self._persons[end]))  # of the person at `end`
                end = first if first > start else int(torch.searchsorted(self._persons, self._persons[end], right=True))
            yield start, end
            start = max(end, 1)


def record_features(images: Tensor, *, basis: Basis, texture: Texture) -> Tensor:
    """Return the stored rows of records, in units of 1/FINE: uint8 [n, h, w, c] → int32 [n, coordinates + texture].

    Each row is a function of its record alone.
    """
    parts = []
    for some in images.split(CHUNK if images.is_cuda else TOGETHER):
        pixels = some.permute(0, 3, 1, 2).to(torch.float64).contiguous()
        coordinates = basis.forward(pixels) * (FINE / 255)
        features = texture(pixels, full=255.0) * FINE
        parts.append(torch.cat([coordinates, features], dim=1).round_().to(torch.int32))
    return torch.cat(parts)


def same_rows_on(device: torch.device, schema: Schema, *, basis: Basis, texture: Texture) -> bool:
    """Return whether a device computes the same rows as the processor, to the last bit, of some public images.

    Arithmetic is of whole numbers, or of single values in float64, which every device rounds in the same way. Only the
    means over cells of the grid are sums of rounded numbers: of few, and each of one image, but in an order of the
    device's own.
    """
    random, shape = streams.generator(0, "same rows"), (CHUNK, schema.height, schema.width, schema.channels)
    images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    images[: CHUNK // 2] //= torch.randint(1, 128, (CHUNK // 2, 1, 1, 1), generator=random, dtype=torch.uint8)  # faint
    ours, theirs = (record_features(images.to(where), basis=basis, texture=texture).cpu() for where in ("cpu", device))
    return torch.equal(ours, theirs)


def stored_type(schema: Schema) -> torch.dtype:
    """Return the type of stored rows, from public facts: two bytes for each number, where all can be that small.

    A coordinate is no larger than the norm of a whole image. A texture feature is the mean of moduli of unit waves of
    at most 11 x 11 pixels, so it is below 11·√3, with three channels.
    """
    return torch.int16 if math.sqrt(schema.dimensions) * FINE < 2**15 - FINE else torch.int32


def person_hash(name: bytes) -> bytes:
    """Return what stands for a person where persons are told apart: a hash of their key."""
    return hashlib.blake2b(name, digest_size=KEY).digest()


def persons_of(block: Block, keys: bytearray) -> np.ndarray:
    """Return the hashes of the persons of a block's records, uint8 [b, KEY]; [b, 0] where there are none."""
    if not keys or not len(block.index):
        return np.zeros((len(block.index), KEY if keys else 0), np.uint8)
    first, last = int(block.share.min()), int(block.share.max())
    asked = np.frombuffer(bytes(keys[first * KEY : (last + 1) * KEY]), np.uint8).reshape(-1, KEY)
    return asked[block.share - first]


def _numbered(persons: list[np.ndarray]) -> tuple[Tensor, np.ndarray]:
    """Return a number for each record's person, [n], and the persons' hashes, from the hashes of blocks of records."""
    hashes = np.concatenate([np.zeros((0, KEY), np.uint8), *[some for some in persons if len(some)]])
    every, numbers = np.unique(np.ascontiguousarray(hashes).view(f"V{KEY}").reshape(-1), return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), every


def fingerprint_of(block: Block, persons: np.ndarray) -> int:
    """Return the sum of hashes of the records (label, person and pixels), as a number.

    It does not depend on the order of records: it is the same whatever files and machines they are spread over.
    """
    labels = np.ascontiguousarray(block.labels, dtype="<i8").view(np.uint8).reshape(-1, 8)
    pixels = block.images.reshape(len(block.images), math.prod(block.images.shape[1:]))  # a block may be empty
    content = np.concatenate([labels, persons, pixels], axis=1)
    total = sum(int.from_bytes(hashlib.sha256(one).digest(), "little") for one in content)
    return total % FINGERPRINT_MODULUS


def to_fine(values: Tensor) -> Tensor:
    """Return the values as integers in units of 1/FINE."""
    return (values.to(torch.float64) * FINE).round()
