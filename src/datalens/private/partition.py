"""Which teacher sees which record: one record, one teacher, whatever the other records are.

Under add/remove a record's share is a keyed hash of its stable id (else of its content) modulo the
number of teachers. Nothing else enters: not its position, not its label, not the other records. So adding
or removing a record changes one share and leaves every other as it is, which is what makes "one
record" cost "one teacher's row". Shares therefore vary in size, and a share may be empty.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from datalens.data.records import record_keys as record_keys
from datalens.errors import DatalensError


class Rule(Protocol):
    """Gives a record its share, on a stream: nothing about records that come later may enter."""

    @property
    def teachers(self) -> int: ...

    @property
    def by_position(self) -> bool:
        """Whether positions decide: then the records must be a list (`Records.fixed_positions`)."""
        ...

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        """Positions in the stream [b] and what identifies each record → the share of each, int64 [b]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Hashed:
    """A share per record by keyed hash, whatever its position. Valid under add/remove only.

    A *replaced* record has another hash, so it would leave one share and enter another: two rows would change.
    """

    teachers: int
    salt: bytes
    by_position: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_teachers(self.teachers)

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        key = hashlib.blake2b(self.salt, digest_size=32).digest()  # a salt of any length
        return np.fromiter((_share(record, self.teachers, key) for record in keys), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Equal shares by fixed position: record i goes to share i mod N. Valid under replace-one only.

    In a list a record that is replaced keeps its position, and so does everybody else: one share changes. Removing one
    would shift every later record into another share: under add/remove this is not private at the stated price. Nor is
    it under replace-one where records are sorted by what they are: all between the old place and the new one shift.
    """

    teachers: int
    by_position: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_teachers(self.teachers)

    def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        return np.asarray(index, dtype=np.int64) % self.teachers


def rule_named(name: Literal["hashed", "balanced"], *, teachers: int, seed: int) -> Rule:
    """Which teacher a record of a run goes to."""
    if name == "balanced":
        return Balanced(teachers=teachers)
    return Hashed(teachers=teachers, salt=f"datalens shares, seed {seed}".encode())


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The share of every record, and the records of every share."""

    share: np.ndarray  # [records] int64, in 0 … teachers−1
    teachers: int

    @property
    def sizes(self) -> np.ndarray:
        return np.bincount(self.share, minlength=self.teachers)

    @property
    def order(self) -> np.ndarray:
        """Record numbers, share after share; within a share in the order they came."""
        return np.argsort(self.share, kind="stable")


def hashed(records: Iterable[bytes], *, teachers: int, salt: bytes) -> Partition:
    """All records at once by `Hashed`."""
    share = Hashed(teachers=teachers, salt=salt).shares(np.empty(0, dtype=np.int64), records)
    return Partition(share=share, teachers=teachers)


def balanced(count: int, *, teachers: int) -> Partition:
    """All records at once by `Balanced`."""
    check_enough(count, teachers)
    share = Balanced(teachers=teachers).shares(np.arange(count, dtype=np.int64), ())
    return Partition(share=share, teachers=teachers)


def _share(record: bytes, teachers: int, key: bytes) -> int:
    digest = hashlib.blake2b(record, key=key, digest_size=16).digest()
    return int.from_bytes(digest, "little") % teachers  # 128 bits: the modulo's bias is under 1e-30


def check_enough(count: int, teachers: int) -> None:
    """Refuse far too many teachers. For the owner, before a run exists: the count is private under add/remove."""
    _check_teachers(teachers)
    if count < teachers:
        raise DatalensError(
            f"{count} records are too few for {teachers} teachers: most shares would be empty; "
            f"choose --teachers well under {max(count, 1)}"
        )


def _check_teachers(teachers: int) -> None:
    if teachers < 1:
        raise DatalensError(f"--teachers must be at least 1, not {teachers}")
