"""Temporary folders for private files. One that a killed process left behind is removed when the next is made."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

PREFIX, ALIVE = "datalens-", ".alive"


class Scratch(tempfile.TemporaryDirectory[str]):
    """A folder of mode 0700 that is deleted with this object. A lock in it shows other processes that it is in use.

    A process that is killed leaves its folder behind. The next process of the same user that makes one removes it.
    """

    def __init__(self) -> None:
        clear_abandoned()
        super().__init__(prefix=PREFIX)
        draft = Path(self.name) / f"{ALIVE}.new"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(draft, Path(self.name) / ALIVE)  # so under this name the file is never unlocked
        weakref.finalize(self, os.close, descriptor)


def clear_abandoned() -> None:
    """Remove this user's folders of this kind whose process has ended. Others, and doubtful ones, are kept."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, of another kind, or in use
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder / ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
