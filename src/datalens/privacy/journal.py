"""Released values kept until the next checkpoint, so that a crash does not waste what was paid for.

A charged release that is found here is reused as it is. One that is not was lost with the process,
and asking again is a new charge: the noise that was drawn is gone, and must be.
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
_MOST_HEADER = 512  # hash and numpy's header
_ROOM = "room.tmp"
# Where the system has no such call, a full disk shows when the value is written, after the charge.
_allocate = getattr(os, "posix_fallocate", lambda descriptor, start, size: None)


class Journal:
    """One file per release, named by the number of its charge: a SHA-256 of the rest, the array in numpy's format, and
    the hash of the ledger's line that charged for it.

    `ledger`: the one that is charged; without it (and in files of version 0.1.0) that last hash is left out.
    """

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        self._directory = directory
        self._ledger = ledger

    def make_room(self, cells: int) -> None:
        """Set disk space aside for the next release, before it is charged: on a full disk nothing is charged."""
        size = _MOST_HEADER + 8 * cells
        try:
            for draft in self._directory.glob("*.tmp"):
                self._rescue(draft.with_suffix(".release"))
                draft.unlink(missing_ok=True)  # of a value that was lost
            with open(self._directory / _ROOM, "wb", opener=for_the_owner) as file:
                _allocate(file.fileno(), 0, size)
        except OSError as error:
            raise DatalensError(
                f"no room in {self._directory} for the next release, which needs {size:,} bytes ({error.strerror}): "
                "nothing was charged for it. Make room, then continue with --resume"
            ) from error

    def save(self, released: Released) -> None:
        """Right after the charge. Once all is written, a kill loses nothing; once it is synced, a power cut neither."""
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
        """Give back the room that no release has taken."""
        with contextlib.suppress(OSError):
            (self._directory / _ROOM).unlink(missing_ok=True)

    def find(self, ledger: Ledger, *, step: int, part: str = "") -> Released | None:
        """The release of this step, if it was charged and its value survived.

        Args:
            ledger: The one that was charged.
            step: Its number, within its part.
            part: The part of the run that the charge names; steps of other parts have numbers of their own.

        Raises:
            TamperedError: its file is damaged.
        """
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and (event.part, event.step) == (part, step):
                path = self._directory / f"{number:08d}.release"
                self._rescue(path)
                if path.exists():
                    return Released(value=self._load(path), event=event, number=number)
        return None

    def forget_before(self, ledger: Ledger, *, step: int, part: str = "") -> None:
        """A checkpoint holds what these values did; they are not needed again.

        Args:
            ledger: The one that was charged.
            step: The first whose value is still needed.
            part: The part of the run that the checkpoint is of. Values of other parts are in no such checkpoint: they
                stay, or a run that goes on would ask for them, and charge them, again.
        """
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and event.part == part and event.step < step:
                (self._directory / f"{number:08d}.release").unlink(missing_ok=True)

    def unpaid(self, ledger: Ledger) -> list[str]:
        """Return the names of the files whose charge the ledger does not have: no run leaves any."""
        found = []
        for path in sorted(self._directory.glob("*.release")):
            number = int(path.stem) if path.stem.isdecimal() else len(ledger.events)
            if number >= len(ledger.events) or self._read(path)[1] not in ("", ledger.chain(number + 1)):
                found.append(path.name)
        return found

    def _line(self, number: int) -> str:
        return "" if self._ledger is None else self._ledger.chain(number + 1) or ""

    def _rescue(self, path: Path) -> None:
        """A value that was written whole when its process was killed, and only lacks its name."""
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
        """The value, and the hash of the line that charged for it."""
        content = path.read_bytes()
        try:
            if _digest(content[_SIZE:]) != content[:_SIZE]:
                raise ValueError("its SHA-256 differs")
            stream = io.BytesIO(content[_SIZE:])
            return np.lib.format.read_array(stream, allow_pickle=False), stream.read().decode("ascii")
        except Exception as error:  # numpy has a dozen kinds for bytes that are no array
            raise TamperedError(
                f"{path} is damaged: delete it, and the step will be asked (and charged) again"
            ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
