"""The records, indexed by share, and the batches that teachers draw from their own share.

Rows of features are stored on the device if all of them fit, otherwise in memory, otherwise in an unnamed temporary
file that is read through a memory map. Where they are stored changes no value.
"""

import errno
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from datalens.data.records import Block, Records, check_fixed_positions
from datalens.errors import DatalensError
from datalens.private.partition import Partition, Rule
from datalens.progress import bar
from datalens.public import streams

SPILL_BYTES = 2 * 2**30  # rows that take more memory than this go to a file
DEVICE_PART = 4  # rows may take a quarter of a GPU's memory; teachers take half

FINGERPRINT_MODULUS = 2**256


class Shares:
    """Features and labels of the records of some teachers, indexed by (teacher, position in its share).

    `numbers` are the teachers whose records are here, numbered among all teachers. All methods take these numbers too,
    so that a teacher draws the same batch on whatever machine it is.
    """

    def __init__(
        self,
        features: "Tensor | Rows",
        labels: Tensor,
        partition: Partition,
        *,
        numbers: range | None = None,
        seen: int | None = None,
        fingerprint: int = 0,
    ) -> None:
        """Index the records: one row of features and one label per record, in the order of `partition.share`."""
        rows = features if isinstance(features, Rows) else Rows.of(features)
        numbers = range(partition.teachers) if numbers is None else numbers
        device, local = rows.device, partition.share - numbers.start
        # Share after share, within a share in the order of the stream. Rows are not moved: an index points to them.
        order = torch.from_numpy(np.argsort(local, kind="stable")).to(device)
        # An empty share reads row 0, so that no index can point into another share. What a teacher computes from it is
        # masked before it votes.
        self._rows = rows.close()
        self._place = torch.cat([order.new_zeros(1), order + 1])
        self._labels = torch.cat([labels.new_zeros(1), labels[order]])
        sizes = np.bincount(local, minlength=len(numbers))
        self._sizes = torch.from_numpy(sizes).to(device)
        self._starts = torch.from_numpy(np.cumsum(sizes) - sizes + 1).to(device)
        self.numbers = numbers
        self.device = device
        self.seen = len(labels) if seen is None else seen  # records in the stream, for all teachers; private
        self.fingerprint = fingerprint

    @classmethod
    def gather(
        cls,
        records: Records,
        rule: Rule,
        *,
        numbers: range | None = None,
        features: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> "Shares":
        """Read the stream once and keep the records of some teachers.

        Args:
            records: The stream.
            rule: Assigns records to teachers.
            numbers: The teachers whose records are kept; by default all.
            features: Maps uint8 [b, h, w, c] on the device to rows. It must treat every record by itself.
            device: Where rows are stored if they fit.

        Raises:
            DatalensError: the rule needs fixed positions, and the records have none.
        """
        numbers = range(rule.teachers) if numbers is None else numbers
        _check_numbers(numbers, rule.teachers)
        if rule.by_position:
            check_fixed_positions(records)
        seen, labels, share = 0, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        fingerprint = 0

        def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
            nonlocal seen
            seen += len(index)
            answer = rule.shares(index, keys)
            progress.advance(task, len(index))
            return np.where((answer >= numbers.start) & (answer < numbers.stop), answer, -1)

        schema = records.schema
        # From public facts, like every decision here: the true number of records is private.
        expected = schema.nominal_size * len(numbers) // rule.teachers + 1
        pixels = torch.zeros(1, schema.height, schema.width, schema.channels, dtype=torch.uint8, device=device)
        example = features(pixels)
        rows = Rows(example.shape[1:], example.dtype, device, capacity=expected)
        with bar(f"reading {schema.name}", schema.nominal_size, private=True) as (progress, task):
            for block in records.blocks(choose):
                if len(block.index):
                    rows.append(features(torch.from_numpy(block.images).to(device)))
                    labels.append(block.labels)
                    share.append(block.share)
                    part = block_fingerprint(block, shared=True)  # includes shares, which other ids would change
                    fingerprint = (fingerprint + part) % FINGERPRINT_MODULUS
        return cls(
            rows,
            torch.from_numpy(np.concatenate(labels)).to(device),
            Partition(share=np.concatenate(share), teachers=rule.teachers),
            numbers=numbers,
            seen=seen,
            fingerprint=fingerprint,
        )

    @property
    def teachers(self) -> int:
        """The number of teachers whose records are here."""
        return len(self.numbers)

    @property
    def count(self) -> int:
        """The number of records that are kept. It is private under add/remove."""
        return len(self._labels) - 1

    @property
    def in_file(self) -> bool:
        """Whether the rows are in a temporary file."""
        return self._rows.in_file

    def occupied(self, teachers: Tensor) -> Tensor:
        """Return whether each teacher has any record: [chunk] bool."""
        return self._sizes[teachers - self.numbers.start] > 0

    def batch(self, teachers: Tensor, *, size: int, seed: int, step: int, draw: int) -> tuple[Tensor, Tensor]:
        """Draw a batch with replacement from each teacher's share: features [chunk, size, …], labels [chunk, size]."""
        local = teachers - self.numbers.start
        draws = streams.uniform(seed, "batch", step, draw, teachers=teachers, count=size)
        sizes = self._sizes[local].unsqueeze(1)
        position = torch.minimum((draws * sizes).to(torch.int64), (sizes - 1).clamp(min=0))
        index = torch.where(sizes > 0, self._starts[local].unsqueeze(1) + position, 0)
        return self._rows.take(self._place[index]), self._labels[index]


def block_fingerprint(block: Block, *, shared: bool = False) -> int:
    """Return the sum of the records' hashes, as a number. Sums over blocks or machines add up to that of the whole set.

    Args:
        block: The records.
        shared: Whether the hash of a record includes its share (or person).
    """
    total = 0
    for index, label, share, image in zip(block.index, block.labels, block.share, block.images, strict=True):
        digest = hashlib.sha256(np.array([index, label, share][: 3 if shared else 2], dtype="<i8").tobytes())
        digest.update(image.tobytes())
        total += int.from_bytes(digest.digest(), "little")
    return total % FINGERPRINT_MODULUS


def fingerprint_in_order(records: Records) -> int:
    """Return the sum of the records' hashes, with their positions and, if persons are the units, persons' numbers."""
    known: dict[bytes, int] = {}

    def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        if not records.schema.by_person:
            return np.zeros(len(index), dtype=np.int64)
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)

    parts = (block_fingerprint(block, shared=records.schema.by_person) for block in records.blocks(everyone))
    return sum(parts) % FINGERPRINT_MODULUS


def _check_numbers(numbers: range, teachers: int) -> None:
    if numbers.step != 1 or numbers.start < 0 or numbers.stop > teachers or not len(numbers):
        raise ValueError(f"teachers must be a range of consecutive numbers from 0 to {teachers - 1}, not {numbers}")


class Rows:
    """A table of rows that are appended, and then read by number. Row 0 is all zeros.

    It is on the GPU if `capacity` rows, the expected number, fit there. Otherwise it is in memory until it passes
    `limit`, and from then on in an unlinked temporary file that only this process can read.

    Args:
        limit: Bytes; None: SPILL_BYTES.
        folder: Where the file lies; None: where temporary files do.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        *,
        capacity: int,
        limit: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.device = device
        self._folder = folder
        self._shape = shape
        self._row_bytes = max(1, shape.numel() * dtype.itemsize)
        fits = device.type == "cuda" and (capacity + 1) * self._row_bytes <= _device_room(device)
        self._home = device if fits or device.type == "cpu" else torch.device("cpu")
        self._limit = _device_room(device) if fits else SPILL_BYTES if limit is None else limit
        self._file: IO[bytes] | None = None
        self._mapped: mmap.mmap | None = None
        self._written = 1
        if (capacity + 1) * self._row_bytes > self._limit:
            self._table = torch.zeros((1, *shape), dtype=dtype, device=self._home)
            self._spill()
        else:
            self._table = torch.zeros((capacity + 1, *shape), dtype=dtype, device=self._home)

    @classmethod
    def of(cls, rows: Tensor) -> "Rows":
        """Return a table of these rows."""
        table = cls(rows.shape[1:], rows.dtype, rows.device, capacity=len(rows))
        table.append(rows)
        return table

    @property
    def in_file(self) -> bool:
        """Whether the table is in a temporary file."""
        return self._file is not None

    @property
    def count(self) -> int:
        """Number of rows that were appended."""
        return self._written - 1

    def append(self, rows: Tensor) -> None:
        """Add rows at the end.

        Raises:
            DatalensError: the disk of the temporary file is full.
        """
        needed = self._written + len(rows)
        if self._file is None and needed > len(self._table):
            if needed * self._row_bytes > self._limit:
                self._spill()
            else:  # more records than expected
                self._grow(min(needed * 5 // 4, max(needed, self._limit // self._row_bytes)))
        if self._file is not None:
            self._write(rows)
        else:
            self._table[self._written : needed] = rows.to(self._home)
        self._written = needed

    def close(self) -> "Rows":
        """Finish writing, so that rows can be read, and return the table."""
        if self._file is not None:
            self._file.flush()
        return self

    def take(self, index: Tensor) -> Tensor:
        """Return the rows with these numbers, on the device: [...] → [..., row]."""
        if self._file is not None and self._mapped is None:
            self._map(self._file)
        flat = index.reshape(-1).to(self._home)
        rows = self._table.index_select(0, flat)  # several times faster than self._table[index] on a CPU
        return rows.view(*index.shape, *self._shape).to(self.device)

    def between(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`, which count from 0 without the row of zeros. Not to be written to."""
        if self._file is None:
            return self._table[start + 1 : end + 1].to(self.device)
        # Not through the map, whose pages would count as this process's memory.
        data = bytearray((end - start) * self._row_bytes)
        view, at = memoryview(data), (start + 1) * self._row_bytes
        while view:
            read = os.preadv(self._file.fileno(), [view], at)
            if not read:
                raise OSError(f"the file of rows ends {len(view)} bytes too early")
            view, at = view[read:], at + read
        rows = torch.frombuffer(data, dtype=self._table.dtype) if data else self._table.new_empty(0)
        return rows.view(end - start, *self._shape).to(self.device)

    def forget(self) -> None:
        """Give back the memory of the file's pages that `take` has read; the file keeps them."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: IO[bytes]) -> None:
        # A shared mapping: its pages belong to the file, so the system may drop them from memory at any time.
        self._mapped = mmap.mmap(file.fileno(), self._written * self._row_bytes, access=mmap.ACCESS_WRITE)
        flat = torch.frombuffer(self._mapped, dtype=self._table.dtype)
        self._table = flat.view(self._written, *self._shape)

    def _grow(self, rows: int) -> None:
        table = torch.zeros((rows, *self._shape), dtype=self._table.dtype, device=self._home)
        table[: self._written] = self._table[: self._written]
        self._table = table

    def _spill(self) -> None:
        rows, self._table = self._table[: self._written], self._table[:0].cpu()
        self._home = torch.device("cpu")
        self._file = tempfile.TemporaryFile(prefix="datalens-", dir=self._folder)  # noqa: SIM115 (mode 0600, and without a name)
        self._write(rows)

    def _write(self, rows: Tensor) -> None:
        assert self._file is not None
        try:
            for part in rows.split(1024):
                self._file.write(part.cpu().numpy().tobytes())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DatalensError(
                f"no space left in {self._folder or tempfile.gettempdir()} for the copy of the records that training "
                "reads: free some, or "
                + ("set TMPDIR to a folder" if self._folder is None else "put --out")
                + " on a larger disk"
            ) from None


def _device_room(device: torch.device) -> int:
    """Return the bytes that rows may take on a device: a part of its memory, free or not.

    How much is free could depend on the records.
    """
    return torch.cuda.get_device_properties(device).total_memory // DEVICE_PART
