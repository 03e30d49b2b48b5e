"""Released values kept until the next checkpoint, so that a crash does not waste what was paid for.

A charged release that is found here is reused as it is. One that is not was lost with the process,
and asking again is a new charge: the noise that was drawn is gone, and must be.
"""

import hashlib
import io
import os
from pathlib import Path

import numpy as np

from datalens.errors import TamperedError
from datalens.privacy.events import UnknownEvent
from datalens.privacy.ledger import Ledger, sync_directory
from datalens.privacy.released import Released


class Journal:
    """One file per release, named by the number of its charge: a SHA-256 of the rest, the array in numpy's format, and
    the hash of the ledger's line that charged for it.

    `ledger`: the one that is charged; without it (and in files of version 0.1.0) that last hash is left out.
    """

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        self._directory = directory
        self._ledger = ledger

    def save(self, released: Released) -> None:
        target = self._directory / f"{released.number:08d}.release"
        temporary = target.with_suffix(".tmp")
        content = io.BytesIO()
        np.lib.format.write_array(content, released.value, allow_pickle=False)
        content.write(self._line(released.number).encode())
        with open(temporary, "wb", opener=for_the_owner) as file:
            file.write(_digest(content.getvalue()) + content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_directory(self._directory)

    def find(self, ledger: Ledger, *, step: int) -> Released | None:
        """The release of this step, if it was charged and its value survived."""
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and event.step == step:
                path = self._directory / f"{number:08d}.release"
                if path.exists():
                    return Released(value=self._load(path), event=event, number=number)
        return None

    def forget_before(self, ledger: Ledger, *, step: int) -> None:
        """A checkpoint holds what these values did; they are not needed again."""
        for number, event in enumerate(ledger.events):
            if not isinstance(event, UnknownEvent) and event.step < step:
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

    @staticmethod
    def _load(path: Path) -> np.ndarray:
        return Journal._read(path)[0]

    @staticmethod
    def _read(path: Path) -> tuple[np.ndarray, str]:
        """The value, and the hash of the line that charged for it."""
        content = path.read_bytes()
        size = hashlib.sha256().digest_size
        try:
            if _digest(content[size:]) != content[:size]:
                raise ValueError("its SHA-256 differs")
            stream = io.BytesIO(content[size:])
            return np.lib.format.read_array(stream, allow_pickle=False), stream.read().decode("ascii")
        except Exception as error:  # numpy has a dozen kinds for bytes that are no array
            raise TamperedError(
                f"{path} is damaged: delete it, and the step will be asked (and charged) again"
            ) from error


def for_the_owner(path: str, flags: int) -> int:
    """An opener: a new file may be read by its owner alone, whatever the process grants otherwise."""
    return os.open(path, flags, 0o600)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
