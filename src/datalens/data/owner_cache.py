"""A cache for results computed from real records. Only its owner can read it, and its file names reveal nothing.

If files were named by a hash of the images, anybody who sees a listing (of a backup, say) could tell whether given
images were used. So names are keyed hashes; the key is a salt beside the files, which only the owner can read.
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
    """Return a folder of the cache. It is made when it is first needed, with access for the owner alone."""
    here = sources.folder(name)
    try:
        here.mkdir(parents=True, exist_ok=True, mode=0o700)
        here.chmod(0o700)
    except OSError as error:
        raise DatalensError(f"cannot write into {here}: {error.strerror}; set DATALENS_HOME to a folder") from None
    return here


def file(here: Path, key: str, *, kind: str = "", suffix: str) -> Path:
    """Return the path for results about records with this hash. A file that version 0.1.0 named by it is renamed."""
    path = here / f"{kind}{hmac.new(_salt(here), key.encode(), hashlib.sha256).hexdigest()}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        os.replace(here / f"{kind}{key}{suffix}", path)
    return path


def _salt(here: Path) -> bytes:
    """Return the 32 random bytes of a folder; they are made once, and deleted with it."""
    path = here / SALT
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    try:
        with contextlib.suppress(FileExistsError):  # another process was first
            write_new(path, secrets.token_bytes(32), private=True)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror}") from None
    return path.read_bytes()
