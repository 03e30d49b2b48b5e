"""What several commands share: how results are shown, and what may be handed to them."""

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
    """One JSON object for machines, or lines for people; on stdout either way."""
    try:
        sys.stdout.write((json_module.dumps(fields) if json else "\n".join(lines)) + "\n")
        sys.stdout.flush()
    except OSError:  # or Python tries, and fails, once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def release_of(path: Path) -> Path:
    """A run's release folder, or the folder itself if it is one."""
    from datalens.released.certificate import CERTIFICATE

    for folder in (path / "release", path):
        if (folder / CERTIFICATE).is_file():
            return folder
    if (path / "ledger.jsonl").is_file():
        raise DatalensError(
            f"{path} has no release: make it with `datalens train --out {path} --resume`, or put it back where it was"
        )
    if not path.exists():
        raise DatalensError(f"{path} does not exist: expected a folder made by `datalens train`")
    raise DatalensError(f"{path} is not a run or a release: expected a folder made by `datalens train`")


def synthetic_of(path: Path, count: int) -> "SyntheticDataset":
    """So many images from a run or a release, or all that a file or folder holds."""
    from datalens.released.loading import load
    from datalens.released.release import sample

    if path.is_dir() and ((path / "ledger.jsonl").is_file() or (path / "release").is_dir()):
        return sample(release_of(path), count=count, seed=0)
    return load(path)


def audited(result: dict[str, Any], lines: list[str], *, json: bool) -> int:
    show(result, lines, json=json)
    return 0 if result["ok"] else EXIT_REFUSED
