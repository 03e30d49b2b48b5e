"""Where a run may lie."""

from pathlib import Path

from datalens.errors import DatalensError


def check_vacant(path: Path) -> None:
    """Whether a run may begin there."""
    check_text(path)
    if path.name in ("", ".."):
        raise DatalensError(f"--out {path} is no folder of its own: give it a name")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        resumable = (path / "ledger.jsonl").exists()
        advice = "add --resume to continue it, or choose another --out" if resumable else "choose another --out"
        raise DatalensError(f"{path} exists already: {advice}")


def check_text(path: Path) -> None:
    """Refuse a name whose bytes are no UTF-8: all would be charged, and then no weights could be written there."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise DatalensError(
            f"the name {str(path.absolute())!a} has bytes that are no text (UTF-8), and weights cannot be written "
            "there: choose another --out, or move the run"
        ) from None
