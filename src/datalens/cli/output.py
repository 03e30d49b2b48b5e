"""Functions that several commands share: to show results, and to find a release."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.errors import DatalensError

if TYPE_CHECKING:
    from datalens.released.synthetic import SyntheticDataset

EXIT_REFUSED, EXIT_INTERRUPTED = 1, 130


def show(fields: dict[str, Any], lines: list[str], *, json: bool) -> None:
    """Print the fields as one JSON object, or the lines of text, on stdout."""
    try:
        sys.stdout.write((json_module.dumps(fields) if json else "\n".join(lines)) + "\n")
        sys.stdout.flush()
    except OSError:  # otherwise Python would try again at exit, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def release_of(path: Path) -> Path:
    """Return the release folder of a run, or the folder itself if it is one.

    Raises:
        DatalensError: there is no release.
    """
    from datalens.released.certificate import CERTIFICATE

    for folder in (path / "release", path):
        if (folder / CERTIFICATE).is_file():
            return folder
    if (path / "ledger.jsonl").is_file():
        raise DatalensError(
            f"{path} has no release: make it with `datalens train --out {path} --resume`, or put it back"
        )
    if not path.exists():
        raise DatalensError(f"{path} does not exist: expected a folder made by `datalens train`")
    raise DatalensError(f"{path} is not a run or a release: expected a folder made by `datalens train`")


def synthetic_of(path: Path, count: int) -> "SyntheticDataset":
    """Return `count` images drawn from a run or a release; or all images of a file or folder."""
    from datalens.released.loading import load
    from datalens.released.release import sample

    if path.is_dir() and ((path / "ledger.jsonl").is_file() or (path / "release").is_dir()):
        return sample(release_of(path), count=count, seed=0)
    return load(path)


def audited(result: dict[str, Any], lines: list[str], *, json: bool) -> int:
    """Print the result of an audit, and return the exit code."""
    show(result, lines, json=json)
    return 0 if result["ok"] else EXIT_REFUSED
