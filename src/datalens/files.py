"""Files on disk: written whole or not at all, durable, and where asked readable by their owner alone."""

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
    """An opener: a new file may be read by its owner alone, whatever the process grants otherwise."""
    return os.open(path, flags, 0o600)


def sync_directory(path: Path) -> None:
    """A new file survives a crash only once its directory entry does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """A draft to write to, which takes the place of `path` when the block ends, and is removed if it fails.

    Readers see the old file or the new one, never a part, also after a crash. `private`: for the owner's eyes only.
    `shared`: other processes may write the same file at the same time, so each has a draft of its own; otherwise the
    draft's name is always the same, and one that a killed process left is written over.
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
    """Write the whole file or none of it, also after a crash. `private`: for the owner's eyes only."""
    with replacing(path, private=private) as file:
        file.write(content)


def store(path: Path, content: bytes, *, private: bool = False) -> None:
    """Do the same in a cache, where other processes may be storing the same file."""
    try:
        with replacing(path, private=private, shared=True) as file:
            file.write(content)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror}") from None


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that is whole from the start. One that is there is never replaced: FileExistsError.

    Of several processes, one is first. Durable once the folder is synced, too (`sync_directory`).
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
    """The whole file or none of it, durably, and for the owner's eyes only."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    draft = path.with_suffix(".tmp")
    draft.touch(mode=0o600)
    try:
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, draft, metadata=facts)
    except SafetensorError as error:  # also what it makes of a full disk
        draft.unlink(missing_ok=True)
        need = sum(value.nbytes for value in tensors.values())
        raise DatalensError(
            f"cannot write {draft} ({error}): {draft.parent} needs room for {need:,} bytes; make some, then continue "
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
