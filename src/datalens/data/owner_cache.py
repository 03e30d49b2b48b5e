"""What was computed from real records and is kept for next time, for the owner alone, under names that tell nothing.

A hash of all images, as a name, would tell whoever sees a listing (of a backup, say) whether these very images were
used. So names are keyed by a salt that lies in the cache beside them, and only its owner can read.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from datalens.data.named import sources
from datalens.errors import DatalensError
from datalens.files import write_new

SALT = "names.salt"


def folder(name: str) -> Path:
    """A folder of the cache, made when it is first needed; nobody else can look into it."""
    here = sources.folder(name)
    try:
        here.mkdir(parents=True, exist_ok=True, mode=0o700)
        here.chmod(0o700)
    except OSError as error:
        raise DatalensError(f"cannot write into {here}: {error.strerror}; set DATALENS_HOME to a folder") from None
    return here


def file(here: Path, key: str, *, kind: str = "", suffix: str) -> Path:
    """Where what follows from records with this hash is kept. What version 0.1.0 kept under the hash is renamed."""
    path = here / f"{kind}{hmac.new(_salt(here), key.encode(), hashlib.sha256).hexdigest()}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        os.replace(here / f"{kind}{key}{suffix}", path)
    return path


def _salt(here: Path) -> bytes:
    """32 random bytes, made once for a folder. Deleted with it."""
    path = here / SALT
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    try:
        with contextlib.suppress(FileExistsError):  # of two processes one is first
            write_new(path, secrets.token_bytes(32), private=True)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror}") from None
    return path.read_bytes()
