"""All records in one pool, for methods without shares: images, labels, and batches of them."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from datalens.data.records import Records
from datalens.private.shares import FINGERPRINT_MODULUS, Rows, block_fingerprint
from datalens.progress import bar


class Pool:
    """The images of all records, as bytes, and their labels. `shares.Rows` decides where the images are stored."""

    def __init__(self, rows: Rows, labels: Tensor, *, fingerprint: int) -> None:
        self._rows = rows.close()
        self._labels = labels
        self.fingerprint = fingerprint

    @classmethod
    def gather(cls, records: Records, *, device: torch.device) -> "Pool":
        """Read the stream once and keep all records."""
        schema = records.schema
        rows = Rows(torch.Size(schema.shape), torch.uint8, device, capacity=schema.nominal_size)
        labels, fingerprint = [np.zeros(0, np.int64)], 0
        with bar(f"reading {schema.name}", schema.nominal_size, private=True) as (progress, task):

            def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
                progress.advance(task, len(index))
                return np.zeros(len(index), dtype=np.int64)

            for block in records.blocks(everyone):
                if len(block.index):
                    rows.append(torch.from_numpy(block.images).permute(0, 3, 1, 2).contiguous())
                    labels.append(block.labels)
                    fingerprint = (fingerprint + block_fingerprint(block)) % FINGERPRINT_MODULUS
        return cls(rows, torch.from_numpy(np.concatenate(labels)).to(device), fingerprint=fingerprint)

    @property
    def count(self) -> int:
        """The number of records. It is private under add/remove."""
        return len(self._labels)

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all records in chunks: images as bytes [n, c, h, w], and labels [n]. Always at least one chunk."""
        for start in range(0, max(self.count, 1), size):
            index = torch.arange(start, min(start + size, self.count), device=self._labels.device)
            yield self._rows.take(index + 1), self._labels[index]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records at these positions, [n] from 0: images [n, c, h, w] in [0, 1], and labels [n]."""
        index = index.to(self._labels.device)
        return self._rows.take(index + 1).to(torch.float32) / 255, self._labels[index]
