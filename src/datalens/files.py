"""Files on disk: written completely or not at all, durable, and on request readable by their owner alone."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from datalens.errors import DatalensError

if TYPE_CHECKING:
    from torch import Tensor


def for_the_owner(path: str, flags: int) -> int:
    """Open a file; a new one can be read by its owner alone, whatever the umask. To be passed to `open` as `opener`."""
    return os.open(path, flags, 0o600)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a new file survives a crash only once its directory entry does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """Yield a draft to write to. It replaces `path` when the block ends, and is removed if the block fails.

    Readers see the old file or the new one, never a part of one, even after a crash.

    Args:
        private: only the owner may read the file.
        shared: other processes may write the same file at the same time, so each has a draft of its own. Otherwise the
            draft always has the same name, and one that a killed process left is overwritten.
    """
    draft = path.with_name(f".datalens-{secrets.token_hex(6)}.tmp" if shared else f"{path.name}.tmp")
    try:
        with open(draft, "wb", opener=for_the_owner if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write the whole file or none of it, even in a crash. `private`: only the owner may read it."""
    with replacing(path, private=private) as file:
        file.write(content)


def store(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write the whole file or none of it in a cache, where other processes may be writing the same file.

    Raises:
        DatalensError: the file cannot be written.
    """
    try:
        with replacing(path, private=private, shared=True) as file:
            file.write(content)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror}") from None


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a new file, completely from the start; an existing file is never replaced.

    If several processes try, one succeeds. The file is durable once its folder is synced, too (`sync_directory`).

    Raises:
        FileExistsError: there is a file already.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=for_the_owner if private else None) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # refuses to replace
    finally:
        draft.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: "dict[str, Tensor]", facts: dict[str, str]) -> None:
    """Write tensors, and facts about them, durably: the whole file or none of it. Only the owner may read it.

    Raises:
        DatalensError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    draft = path.with_suffix(".tmp")
    draft.touch(mode=0o600)
    try:
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, draft, metadata=facts)
    except SafetensorError as error:  # raised for a full disk, too
        draft.unlink(missing_ok=True)
        need = sum(value.nbytes for value in tensors.values())
        raise DatalensError(
            f"cannot write {draft} ({error}): {draft.parent} needs {need:,} free bytes; free some space, then continue "
            "with --resume"
        ) from error
    draft.chmod(0o600)
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


def load_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors of a file by name, and the facts that were saved with them."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (no mapping)
