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
        schema: of all records.
        file: the part's own file; None: every `pieces`-th record is the part's.
        folder: see `formats.open_records`.
    """

    number: int
    name: str
    data: str
    reading: Reading
    schema: Schema
    file: Path | Remote | None = None
    folder: str | None = None
    pieces: int = 1


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
        def mine(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
            wanted = index % self.pieces == self.number
            share = np.full(len(index), -1, dtype=np.int64)
            share[wanted] = choose(index[wanted], itertools.compress(keys, wanted.tolist()))
            return share

        return self.records.blocks(mine)
