"""Read the user's files only if they are regular files: reading a device or a pipe may never end, or never begin."""

import os
import stat
from pathlib import Path

from datalens.errors import DatalensError, UnreadableImage

MOST_BYTES = 2**29  # of an image file: 2^26 pixels, the most that are decoded, with four channels of 16 bits


def check_regular(path: Path | str) -> None:
    """Raise if there is something at `path` that is not a regular file. A missing file is left to the caller."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise DatalensError(f"{path} is {_kind(mode)}, not a file: put the file itself there")


def read_regular(path: Path | str, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: its name cannot be one.
        DatalensError: it is not a regular file, or too large.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without it, opening a pipe waits for a writer
    with open(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise DatalensError(f"{path} is {_kind(mode)}, not a file: put the file itself there")
        data = file.read(most + 1)
    if len(data) > most:
        raise UnreadableImage(f"{path} is larger than the limit of {most / 2**20:g} MiB for an image: leave it out")
    return data


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")
