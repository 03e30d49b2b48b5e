"""The partition of the records into shares: each record goes to one teacher, whatever the other records are.

Under add/remove a record's share is a keyed hash of its stable id (or, without one, of its content) modulo the number
of teachers. Nothing else enters: not its position, its label or the other records. So adding or removing a record
changes one share and leaves all others as they are, which is why one record affects one teacher's row only. Shares
therefore vary in size, and a share may be empty.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from datalens.data.records import record_keys as record_keys
from datalens.errors import DatalensError


class Rule(Protocol):
    """A rule that assigns each record of a stream to a share, without using any later record."""

    @property
    def teachers(self) -> int: ...

    @property
    def by_position(self) -> bool:
        """Whether shares depend on positions. Then the records must be a list (`Records.fixed_positions`)."""
        ...

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        """Return the share of each record, int64 [b], from positions in the stream [b] and the records' keys."""
        ...


@dataclass(frozen=True, kw_only=True)
class Hashed:
    """Assigns records by keyed hash, whatever their positions. Valid under add/remove only.

    A *replaced* record has another hash, so it would leave one share and enter another: two rows would change.
    """

    teachers: int
    salt: bytes
    by_position: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_teachers(self.teachers)

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        key = hashlib.blake2b(self.salt, digest_size=32).digest()  # a key of fixed length from a salt of any length
        return np.fromiter((_share(record, self.teachers, key) for record in keys), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Assigns records by position: record i goes to share i mod N. Valid under replace-one only.

    In a list a replaced record keeps its position, and so do all others: one share changes. If a record is removed,
    every later record moves to another share, so under add/remove the stated price would be wrong. It would also be
    wrong under replace-one if records are sorted by their content: all between the old and the new place would move.
    """

    teachers: int
    by_position: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_teachers(self.teachers)

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        return np.asarray(index, dtype=np.int64) % self.teachers


def rule_named(name: Literal["hashed", "balanced"], *, teachers: int, seed: int) -> Rule:
    """Return the rule that assigns the records of a run to teachers."""
    if name == "balanced":
        return Balanced(teachers=teachers)
    return Hashed(teachers=teachers, salt=f"datalens shares, seed {seed}".encode())


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The share of every record."""

    share: np.ndarray  # [records] int64, in 0 … teachers−1
    teachers: int

    @property
    def sizes(self) -> np.ndarray:
        """Records in each share: [teachers]."""
        return np.bincount(self.share, minlength=self.teachers)

    @property
    def order(self) -> np.ndarray:
        """Record numbers, share after share; within a share in the order of the stream."""
        return np.argsort(self.share, kind="stable")


def hashed(records: Iterable[bytes], *, teachers: int, salt: bytes) -> Partition:
    """Return the partition of all records at once by `Hashed`."""
    share = Hashed(teachers=teachers, salt=salt).shares(np.empty(0, dtype=np.int64), records)
    return Partition(share=share, teachers=teachers)


def balanced(count: int, *, teachers: int) -> Partition:
    """Return the partition of all records at once by `Balanced`."""
    check_enough(count, teachers)
    share = Balanced(teachers=teachers).shares(np.arange(count, dtype=np.int64), ())
    return Partition(share=share, teachers=teachers)


def _share(record: bytes, teachers: int, key: bytes) -> int:
    digest = hashlib.blake2b(record, key=key, digest_size=16).digest()
    return int.from_bytes(digest, "little") % teachers  # with 128 bits the bias of the modulo is under 1e-30


def check_enough(count: int, teachers: int) -> None:
    """Raise if there are far too many teachers.

    The message is for the owner, before a run exists, since the count is private under add/remove.
    """
    _check_teachers(teachers)
    if count < teachers:
        raise DatalensError(
            f"{count} records are too few for {teachers} teachers: most shares would be empty; "
            f"choose --teachers well under {max(count, 1)}"
        )


def _check_teachers(teachers: int) -> None:
    if teachers < 1:
        raise DatalensError(f"--teachers must be at least 1, not {teachers}")
