"""Checks of the folder in which a run is to be kept."""

from pathlib import Path

from datalens.errors import DatalensError


def check_vacant(path: Path) -> None:
    """Raise unless a new run may be made there."""
    check_text(path)
    if path.name in ("", ".."):
        raise DatalensError(f"--out {path} does not name a new folder: give it a name")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        resumable = (path / "ledger.jsonl").exists()
        advice = "add --resume to continue it, or choose another --out" if resumable else "choose another --out"
        raise DatalensError(f"{path} exists already: {advice}")


def check_text(path: Path) -> None:
    """Raise if the name is not UTF-8: weights could not be written there after everything is charged."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise DatalensError(
            f"the name {str(path.absolute())!a} is not UTF-8 text, and weights cannot be written there: choose another "
            "--out, or move the run"
        ) from None
