"""Parts of the records, which several machines read side by side. Each can be read again, anywhere."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datalens.data.own.reading import Reading
from datalens.data.records import Block, Choose, Records
from datalens.data.remote import Remote
from datalens.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the records: its place, and how it is read. `formats.open_part` opens it.

    Attributes:
        number: parts are numbered from 0 on.
        name: for messages.
        data: what --data named.
        classes: of all records, as the data has them; None: they are read where a part is opened.
        declared: the schema of all records; None: it is not known, and the part can be listed only.
        split: train or test.
        file: the part's own file; None: every `pieces`-th record is the part's.
        folder: see `formats.open_records`.
    """

    number: int
    name: str
    data: str
    reading: Reading
    classes: tuple[str, ...] | None = None
    declared: Schema | None = None
    split: str = "train"
    file: Path | Remote | None = None
    folder: str | None = None
    pieces: int = 1

    @property
    def schema(self) -> Schema:
        """The schema of all records."""
        if self.declared is None:
            raise ValueError("the part was cut without a schema: it can be listed only")
        return self.declared


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Every `pieces`-th record of a stream, from the one with this number on."""

    records: Records
    number: int
    pieces: int
    fixed_positions: bool = False

    @property
    def schema(self) -> Schema:
        return self.records.schema

    def blocks(self, choose: Choose) -> Iterator[Block]:
        """Yield the piece's own records, at their positions in the whole stream."""

        def mine(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
            wanted = index % self.pieces == self.number
            share = np.full(len(index), -1, dtype=np.int64)
            share[wanted] = choose(index[wanted], itertools.compress(keys, wanted.tolist()))
            return share

        return self.records.blocks(mine)
