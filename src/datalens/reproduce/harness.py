"""placeholder"""

from pathlib import Path
from typing import Any


def listing() -> dict[str, str]:
    return {}


def reproduce(what: str, *, full: bool, out: Path, device: str) -> dict[str, Any]:
    raise NotImplementedError
