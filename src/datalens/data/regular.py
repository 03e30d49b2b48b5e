"""Files of the user's, read only where they are plain files: a device or a pipe may never end, or never begin."""

import os
import stat
from pathlib import Path

from datalens.errors import DatalensError

MOST_BYTES = 2**29  # of one image file: 2^26 pixels, the most that are decoded, of 16 bits and four channels


def check_regular(path: Path | str) -> None:
    """Raise if there is something at `path` that is no plain file. What does not exist is another's to report."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise DatalensError(f"{path} is {_kind(mode)}, not a file: put the file itself there")


def read_regular(path: Path | str, most: int = MOST_BYTES) -> bytes:
    """All of a plain file. OSError or ValueError where it cannot be read, DatalensError where it is no such file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # or a pipe would wait for a writer
    with open(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise DatalensError(f"{path} is {_kind(mode)}, not a file: put the file itself there")
        data = file.read(most + 1)
    if len(data) > most:
        raise DatalensError(f"{path} is larger than the limit of {most / 2**20:g} MiB for an image: leave it out")
    return data


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")
