"""Which teacher sees which record: one record, one teacher, whatever the other records are.

Under add/remove a record's share is a keyed hash of its stable id (else of its content) modulo the
number of teachers. Nothing else enters: not its position, not its label, not the other records. So adding
or removing a record changes one share and leaves every other as it is, which is what makes "one
record" cost "one teacher's row". Shares therefore vary in size, and a share may be empty.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from datalens.errors import DatalensError


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
    """A share per record by keyed hash. Valid under add/remove only.

    A *replaced* record has another hash, so it would leave one share and enter another: two rows would change.
    """
    _check_teachers(teachers)
    key = hashlib.blake2b(salt, digest_size=32).digest()  # a salt of any length
    share = np.fromiter((_share(record, teachers, key) for record in records), dtype=np.int64)
    return Partition(share=share, teachers=teachers)


def balanced(count: int, *, teachers: int) -> Partition:
    """Equal shares by fixed position: record i goes to share i mod N. Valid under replace-one only.

    Replacing a record keeps its position, so one share changes. Removing one would shift every later
    record into another share: under add/remove this is not private at the stated price.
    """
    check_enough(count, teachers)
    return Partition(share=np.arange(count, dtype=np.int64) % teachers, teachers=teachers)


def record_keys(images: np.ndarray, ids: np.ndarray | None) -> Iterable[bytes]:
    """What identifies a record: its id where there is one, else its pixels. Never its position or label."""
    if ids is not None:
        if len(ids) != len(images):
            raise DatalensError(f"there are {len(ids)} record ids for {len(images)} images: give one id an image")
        return (b"id:" + str(identity).encode() for identity in ids.tolist())
    return (b"content:" + np.ascontiguousarray(image).tobytes() for image in images)


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
