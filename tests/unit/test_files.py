"""Files are whole or not there, durable in the right order, and readable by their owner alone where asked."""

import os
import stat
from pathlib import Path

import pytest
import torch

from datalens import files
from datalens.errors import DatalensError
from datalens.files import load_tensors, replacing, save_tensors, store, sync_directory, write_atomically, write_new

WRITERS = [write_atomically, store]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What reached the disk or got its name, in order; with sizes of files, and how many names a synced folder had."""
    found: list[tuple[str, int]] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def watched_fsync(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(facts.st_mode)
        found.append(("folder", len(os.listdir(descriptor))) if is_folder else ("file", facts.st_size))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        found.append(("name", os.stat(source).st_size))
        replace(source, target)

    def watched_link(source: Path, target: Path) -> None:
        found.append(("name", os.stat(source).st_size))
        link(source, target)

    monkeypatch.setattr(files.os, "fsync", watched_fsync)
    monkeypatch.setattr(files.os, "replace", watched_replace)
    monkeypatch.setattr(files.os, "link", watched_link)
    return found


@pytest.mark.parametrize("write", [*WRITERS, write_new])
@pytest.mark.parametrize("private", [False, True])
def test_all_of_it_is_on_disk_before_it_has_its_name(
    write: object, private: bool, tmp_path: Path, happened: list[tuple[str, int]]
) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "a", b"hello", private=private)  # type: ignore[operator]
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"hello"
    assert happened == [("file", 5), ("name", 5)]
    assert mode(tmp_path / "a") == (0o600 if private else 0o666)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("write", WRITERS)
def test_files_are_not_private_unless_asked(write: object, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "a", b"hello")  # type: ignore[operator]
        write_new(tmp_path / "b", b"hello")
        with replacing(tmp_path / "c", shared=True) as file:
            file.write(b"hello")
    finally:
        os.umask(before)
    assert {mode(path) for path in tmp_path.iterdir()} == {0o666}


def test_what_is_written_is_private_from_the_start(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for shared in (False, True):
            with replacing(tmp_path / "a", private=True, shared=shared):
                (draft,) = tmp_path.glob("*.tmp")
                assert mode(draft) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("shared", [False, True])
def test_a_failure_leaves_the_old_file_and_no_draft(shared: bool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def interrupted() -> None:
        with replacing(tmp_path / "a", shared=shared) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_readers_see_the_old_file_while_the_new_one_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with replacing(tmp_path / "a") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_one_writer_has_one_draft_and_several_have_several(tmp_path: Path) -> None:
    """A draft that a killed process left is written over; of two processes neither writes into the other's."""
    (tmp_path / "a.tmp").write_bytes(b"left by a process that was killed")
    write_atomically(tmp_path / "a", b"hello")
    assert os.listdir(tmp_path) == ["a"]
    with (
        replacing(tmp_path / "b", shared=True) as first,
        replacing(tmp_path / "b", shared=True) as second,
    ):
        assert first.name != second.name
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "b").read_bytes() == b"first"  # whose block ended last
    with replacing(tmp_path / "c") as file:
        assert Path(file.name) == tmp_path / "c.tmp"
    with replacing(tmp_path / "c"):
        store(tmp_path / "c", b"in a cache")  # as if by another process
        assert (tmp_path / "c.tmp").exists()


def test_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "a", b"hello")
    with pytest.raises(DatalensError, match=r"cannot write .*/no/a: No such file or directory"):
        store(tmp_path / "no" / "a", b"hello")


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    write_new(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "a", b"hello")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [write_atomically, write_new])
def test_why_it_cannot_be_written_is_said(write: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that there is no draft to remove."""

    def refused(path: str, flags: int) -> int:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(files, "for_the_owner", refused)
    with pytest.raises(PermissionError):
        write(tmp_path / "a", b"hello", private=True)  # type: ignore[operator]


def test_a_folder_is_synced_by_its_name(tmp_path: Path, happened: list[tuple[str, int]]) -> None:
    (tmp_path / "a").touch()
    sync_directory(tmp_path)
    assert happened == [("folder", 1)]


def test_tensors_come_back(tmp_path: Path, happened: list[tuple[str, int]]) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"weight": torch.arange(6.0).reshape(2, 3).T, "step": torch.tensor(3)}  # one of them not contiguous
    before = os.umask(0)
    try:
        save_tensors(path, tensors, {"step": "3"})
    finally:
        os.umask(before)
    size = path.stat().st_size
    assert happened == [("file", size), ("name", size), ("folder", 1)]
    assert mode(path) == 0o600
    found, facts = load_tensors(path)
    assert facts == {"step": "3"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_tensors_are_private_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def looked_at(tensors: object, path: Path, metadata: object) -> None:
        assert mode(path) == 0o600
        path.unlink()
        path.touch(mode=0o644)  # as a library might that writes beside it

    monkeypatch.setattr(safetensors.torch, "save_file", looked_at)
    before = os.umask(0)
    try:
        save_tensors(tmp_path / "a.safetensors", {}, {})
    finally:
        os.umask(before)
    assert mode(tmp_path / "a.safetensors") == 0o600


@pytest.mark.parametrize("gone", [False, True])
def test_tensors_on_a_full_disk(gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    import safetensors.torch

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.unlink() if gone else path.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device")

    (tmp_path / "a.safetensors").write_bytes(b"old")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    wanted = r"cannot write .*/a\.tmp .*No space left.*needs 4,024 free bytes; free some space.*--resume"
    with pytest.raises(DatalensError, match=wanted):
        save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.int64)}, {})
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == b"old"
