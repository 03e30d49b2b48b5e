"""The journal: released values, kept until the next checkpoint, so that a crash does not waste their charges.

A charged release that is found here is reused as it is. One that is not was lost with the process, and asking again is
a new charge: the noise that was drawn is gone, and must not be drawn again for the old charge.
"""

import contextlib
import hashlib
import io
import os
from pathlib import Path

import numpy as np

from datalens.errors import DatalensError, TamperedError
from datalens.files import for_the_owner, sync_directory
from datalens.privacy.events import UnknownEvent
from datalens.privacy.ledger import Ledger
from datalens.privacy.released import Released

_SIZE = hashlib.sha256().digest_size
_MOST_HEADER = 512  # upper bound on the size of both hashes and numpy's header
_ROOM = "room.tmp"
# On systems without this call, a full disk is noticed only when the value is written, after the charge.
_allocate = getattr(os, "posix_fallocate", lambda descriptor, start, size: None)


class Journal:
    """A folder with one file per release, named by the number of its charge.

    A file has a SHA-256 of the rest, the array in numpy's format, and the hash of the ledger line that charged for it.

    Args:
        directory: The folder.
        ledger: The ledger that is charged. Without it (and in files of version 0.1.0) the hash of the line is left out.
    """

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        self._directory = directory
        self._ledger = ledger

    def make_room(self, cells: int) -> None:
        """Reserve disk space for the next release before it is charged, so that on a full disk nothing is charged.

        Args:
            cells: How many numbers will be released.

        Raises:
            DatalensError: there is no space.
        """
        size = _MOST_HEADER + 8 * cells
        try:
            for draft in self._directory.glob("*.tmp"):
                self._rescue(draft.with_suffix(".release"))
                draft.unlink(missing_ok=True)  # a value that was not written completely is lost
            with open(self._directory / _ROOM, "wb", opener=for_the_owner) as file:
                _allocate(file.fileno(), 0, size)
        except OSError as error:
            raise DatalensError(
                f"no room in {self._directory} for the next release, which needs {size:,} bytes ({error.strerror}): "
                "nothing was charged for it. Make room, then continue with --resume"
            ) from error

    def save(self, released: Released) -> None:
        """Write a released value. To be called right after the charge.

        Once everything is written, a kill loses nothing; once it is synced, a power cut loses nothing either.

        Args:
            released: The value, with the number of its charge.
        """
        target = self._directory / f"{released.number:08d}.release"
        draft = target.with_suffix(".tmp")
        value = io.BytesIO()
        np.lib.format.write_array(value, released.value, allow_pickle=False)
        value.write(self._line(released.number).encode())
        content = _digest(value.getvalue()) + value.getvalue()
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._directory / _ROOM, draft)
        with open(os.open(draft, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(len(content))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._finish(draft, target)

    def close(self) -> None:
        """Free the reserved disk space that no release has used."""
        with contextlib.suppress(OSError):
            (self._directory / _ROOM).unlink(missing_ok=True)

    def find(self, ledger: Ledger, *, step: int, part: str = "") -> Released | None:
        """Return the release of a step, or None if it was not charged or its value was lost.

        Args:
            ledger: The ledger that was charged.
            step: Number of the step within its part.
            part: The part of the run that the charge names. Each part numbers its own steps.

        Raises:
            TamperedError: the file of the release is damaged.
        """
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and (event.part, event.step) == (part, step):
                path = self._directory / f"{number:08d}.release"
                self._rescue(path)
                if path.exists():
                    return Released(value=self._load(path), event=event, number=number)
        return None

    def forget_before(self, ledger: Ledger, *, step: int, part: str = "") -> None:
        """Delete values that a checkpoint has made unnecessary.

        Args:
            ledger: The ledger that was charged.
            step: The first step whose value is still needed.
            part: The part of the run that the checkpoint covers. Values of other parts are kept: without them a resumed
                run would charge for these steps again.
        """
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and event.part == part and event.step < step:
                (self._directory / f"{number:08d}.release").unlink(missing_ok=True)

    def unpaid(self, ledger: Ledger) -> list[str]:
        """Return the names of the files whose charge is not in the ledger. No run leaves any.

        Args:
            ledger: The ledger of the run.

        Raises:
            TamperedError: a file is damaged.
        """
        names = []
        for path in sorted(self._directory.glob("*.release")):
            number = int(path.stem) if path.stem.isdecimal() else len(ledger.events)
            if number >= len(ledger.events) or self._read(path)[1] not in ("", ledger.chain(number + 1)):
                names.append(path.name)
        return names

    def _line(self, number: int) -> str:
        return "" if self._ledger is None else self._ledger.chain(number + 1) or ""

    def _rescue(self, path: Path) -> None:
        """Give a value its final name, if it was written completely before its process was killed."""
        draft = path.with_suffix(".tmp")
        if path.exists() or not draft.exists():
            return
        content = draft.read_bytes()
        if _digest(content[_SIZE:]) == content[:_SIZE]:
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            self._finish(draft, path)

    def _finish(self, draft: Path, target: Path) -> None:
        os.replace(draft, target)
        sync_directory(self._directory)

    @staticmethod
    def _load(path: Path) -> np.ndarray:
        return Journal._read(path)[0]

    @staticmethod
    def _read(path: Path) -> tuple[np.ndarray, str]:
        """Return the value and the hash of the ledger line that charged for it."""
        content = path.read_bytes()
        try:
            if _digest(content[_SIZE:]) != content[:_SIZE]:
                raise ValueError("its SHA-256 differs")
            stream = io.BytesIO(content[_SIZE:])
            return np.lib.format.read_array(stream, allow_pickle=False), stream.read().decode("ascii")
        except Exception as error:  # numpy raises a dozen types of exception for malformed arrays
            raise TamperedError(
                f"{path} is damaged: delete it, and the step will be asked (and charged) again"
            ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
