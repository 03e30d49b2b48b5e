"""Temporary folders for what is private, which the next one clears away if their process was killed."""

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
    """A folder of mode 0700 that goes with this object. It holds a lock, by which others see that it is in use.

    A process that is killed leaves its folder behind; whoever makes the next one, as the same user, removes it first.
    """

    def __init__(self) -> None:
        clear_abandoned()
        super().__init__(prefix=PREFIX)
        draft = Path(self.name) / f"{ALIVE}.new"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(draft, Path(self.name) / ALIVE)  # under this name it was never seen without its lock
        weakref.finalize(self, os.close, descriptor)


def clear_abandoned() -> None:
    """Remove folders of this kind and this user whose process has ended. Others, and what is in doubt, are left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, of another kind, or in use
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder / ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
