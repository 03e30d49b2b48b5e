"""Files at an address, such as s3://bucket/part-0.parquet, which fsspec reads; and patterns that name several files.

Credentials come from the environment of each process, as the library of the store reads them. They are never part of an
address, which is kept in the run folder.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datalens.errors import DatalensError, one_line


@dataclass(frozen=True, order=True)
class Remote:
    """One file at an address."""

    address: str

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def __str__(self) -> str:
        return self.address

    def open(self) -> Any:
        """Return the file, open for reading.

        Raises:
            DatalensError: it cannot be opened.
        """
        system, path = _system(self.address)
        try:
            return system.open(path, "rb")
        except Exception as error:  # every store has its own kinds
            raise _unreadable(self.address, error) from None

    def size(self) -> int:
        system, path = _system(self.address)
        try:
            return int(system.size(path))
        except Exception as error:
            raise _unreadable(self.address, error) from None


def is_address(data: str) -> bool:
    return "://" in data


def is_pattern(data: str) -> bool:
    """Return whether this may name several files: an address, or a path with *, ? or [ that is not itself a file."""
    return is_address(data) or (glob.has_magic(data) and not os.path.exists(data))


def matching(pattern: str) -> list[Path | Remote]:
    """Return the files that a pattern matches, sorted by name.

    Raises:
        DatalensError: there is none, or the store cannot be read.
    """
    if not is_address(pattern):
        files: list[Path | Remote] = [Path(name) for name in sorted(glob.glob(pattern))]
    else:
        system, path = _system(pattern)
        try:
            names = sorted(map(str, system.glob(path) if glob.has_magic(path) else [path]))
        except Exception as error:
            raise _unreadable(pattern, error) from None
        files = [Remote(system.unstrip_protocol(name)) for name in names]
    if not files:
        raise DatalensError(f"{pattern} matches nothing: check it, and put it in quotes, so that the shell leaves it")
    return files


def source(file: Path | Remote) -> Any:
    """Return what pyarrow opens."""
    return file.open() if isinstance(file, Remote) else file


def size_of(file: Path | Remote) -> int:
    return file.size() if isinstance(file, Remote) else file.stat().st_size


def _system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    if "@" in address.partition("://")[2].partition("/")[0]:
        raise DatalensError("the address of --data has credentials in it: put them into the environment instead")
    try:
        import fsspec
    except ImportError:
        raise DatalensError(f"{address} needs fsspec: pip install 'datalens[cluster]'") from None
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise DatalensError(f"{address} cannot be read here: {_line(error)}") from None
    except Exception as error:
        raise _unreadable(address, error) from None
    return system, path


def _unreadable(address: str, error: Exception) -> DatalensError:
    return DatalensError(
        f"{address} cannot be read ({type(error).__name__}: {_line(error)}): check the address, and the credentials in "
        "the environment"
    )


def _line(error: Exception) -> str:
    return one_line(error)[:200]
