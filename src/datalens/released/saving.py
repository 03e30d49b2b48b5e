"""Writing the synthetic data set, in three formats: .npz, .parquet, and a folder of PNG files (read: `loading`)."""

import csv
import json
import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from datalens.errors import DatalensError
from datalens.files import replacing
from datalens.progress import bar
from datalens.released.synthetic import SyntheticDataset, mode_of

_BAR_FROM = 2_000  # images; fewer are done before a bar could be read
ROWS_AT_ONCE = 1_000  # a parquet row group; small, so that viewers can page through

METADATA = "metadata.csv"
CERTIFICATE = "certificate.json"
CLASSES = "classes.json"
DRAWN = "sampling.json"
COLUMNS = ["file_name", "label", "class"]

IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def save(dataset: SyntheticDataset, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write to `path`: .npz, .parquet, or else a folder. All of it appears at once, or nothing does.

    (With `force`, replacing a folder takes two renames; a power cut between them leaves the old
    folder next to `path` under a temporary name.)
    """
    kind = kind_of(path)
    if kind != ".npz":
        mode_of(dataset.images.shape[3])
    certificate = json_text(dataset.certificate, "certificate")
    target = Path(os.path.realpath(path))  # write through a link, rather than replace the link
    staging = target.with_name(f".datalens-{secrets.token_hex(6)}.tmp")
    try:
        _check_may_write(target, folder=kind == "", force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "":
            staging.mkdir()
            _write_folder(dataset, certificate, staging)
            _put_folder(staging, target)
        else:
            with replacing(target, shared=True) as stream:
                (_write_npz if kind == ".npz" else _write_parquet)(dataset, certificate, stream)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror or one_line(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def ending(path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
    if kind_of(path) != suffix:
        raise DatalensError(f"{path} must end in {suffix}")
    return path


def check_target(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise what `save` would raise about the place it is to write to, before the work is done."""
    _check_may_write(Path(os.path.realpath(path)), folder=kind_of(path) == "", force=force)


def _write_npz(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    grey = dataset.images.shape[3] == 1
    arrays: dict[str, Any] = {
        "images": dataset.images[..., 0] if grey else dataset.images,
        "labels": dataset.labels,
        "classes": np.array(dataset.classes, dtype=np.str_),
        "certificate": np.array(certificate),
    }
    if dataset.drawn is not None:
        arrays["drawn"] = np.array(json_text(dataset.drawn, "way of drawing"))
    np.savez_compressed(stream, **arrays)


def _write_parquet(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    metadata = {
        "huggingface": features_text(dataset.classes),
        "datalens.classes": json.dumps(dataset.classes),
        "datalens.certificate": certificate,
    }
    if dataset.drawn is not None:
        metadata["datalens.drawn"] = json_text(dataset.drawn, "way of drawing")
    schema = pa.schema([("image", IMAGE_TYPE), ("label", pa.int64())], metadata=metadata)
    count = len(dataset.images)
    # PNGs do not repeat, so a dictionary of them would only be built and thrown away
    with (
        ticks("writing images", count) as tick,
        pq.ParquetWriter(stream, schema, use_dictionary=["label"], write_statistics=["label"]) as writer,
    ):
        for start in range(0, count, ROWS_AT_ONCE):
            rows = []
            for index in range(start, min(start + ROWS_AT_ONCE, count)):
                rows.append({"bytes": _png(dataset.images[index]), "path": file_name(index)})
                tick()
            labels = pa.array(dataset.labels[start : start + ROWS_AT_ONCE], pa.int64())
            writer.write_batch(pa.record_batch([pa.array(rows, IMAGE_TYPE), labels], schema=schema))


def features_text(classes: tuple[str, ...]) -> str:
    """What `datasets` reads its features from, to show images and class names."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(classes), "_type": "ClassLabel"}}
    return json.dumps({"info": {"features": features}})


def _write_folder(dataset: SyntheticDataset, certificate: str, folder: Path) -> None:
    names = folder_names(dataset.classes)
    for name in names:
        (folder / name).mkdir()
    (folder / CERTIFICATE).write_text(certificate + "\n", encoding="utf-8")
    (folder / CLASSES).write_text(json.dumps(dataset.classes) + "\n", encoding="utf-8")
    if dataset.drawn is not None:
        (folder / DRAWN).write_text(json_text(dataset.drawn, "way of drawing") + "\n", encoding="utf-8")
    with (
        ticks("writing images", len(dataset.images)) as tick,
        (folder / METADATA).open("w", encoding="utf-8", newline="") as stream,
    ):
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(COLUMNS)
        for index, label in enumerate(dataset.labels.tolist()):
            file = f"{names[label]}/{file_name(index)}"
            (folder / file).write_bytes(_png(dataset.images[index]))
            table.writerow([file, label, dataset.classes[label]])
            tick()
    if hasattr(os, "sync"):
        os.sync()  # one call: an fsync for each of 10,000 small files takes minutes on a spinning disk


def _put_folder(staging: Path, target: Path) -> None:
    if not target.exists():
        os.rename(staging, target)
        return
    retired = staging.with_suffix(".old")
    os.rename(target, retired)
    try:
        os.rename(staging, target)
    except OSError:
        os.rename(retired, target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _check_may_write(target: Path, *, folder: bool, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise DatalensError(f"{target} exists; pass --force to replace it")
    if folder != target.is_dir():
        raise DatalensError(f"{target} is a {'file' if folder else 'folder'}; choose another name")
    ours = (target / METADATA).is_file() and (target / CERTIFICATE).is_file()
    if folder and not ours and any(target.iterdir()):
        # a slip such as `--out ~ --force` must not delete a home directory
        raise DatalensError(f"{target} holds other files, which --force does not delete; choose another folder")


def folder_names(classes: tuple[str, ...]) -> list[str]:
    """A plain folder name for each class. Names that had to change, or would clash, end in ~label."""
    taken = {METADATA, CERTIFICATE, CLASSES, DRAWN}
    names = []
    for label, name in enumerate(classes):
        safe = re.sub(r"[^\w .-]", "_", name).strip(" .")[:48]
        if not safe or safe != name or _fold(safe) in taken:
            safe = f"{safe.rstrip(' .')}~{label}"  # "~" never survives the line above, so this is unique
        taken.add(_fold(safe))
        names.append(safe)
    return names


def _fold(name: str) -> str:
    """Equal for names that some file system would take for the same."""
    return unicodedata.normalize("NFC", name).casefold()


def file_name(index: int) -> str:
    """The name of an image's file."""
    return f"{index + 1:06d}.png"


def _png(image: NDArray[np.uint8]) -> bytes:
    h, w, c = image.shape
    stream = BytesIO()
    Image.frombytes(mode_of(c), (w, h), image.tobytes()).save(stream, format="PNG")
    return stream.getvalue()


def json_text(fields: dict[str, Any], what: str) -> str:
    """The one way that certificates and ways of drawing are written."""
    try:
        return json.dumps(fields, allow_nan=False, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise DatalensError(f"the {what} cannot be written as JSON: {one_line(error)}") from error


def kind_of(path: str | os.PathLike[str]) -> str:
    """The format by its suffix: .npz, .parquet, or none for a folder."""
    suffix = "" if os.fspath(path).endswith(("/", os.sep)) else Path(path).suffix.lower()
    if suffix not in ("", ".npz", ".parquet"):
        raise DatalensError(
            f"{path} ends in {suffix}: use .npz, .parquet, or a folder (a name without a suffix, or ending in /)"
        )
    return suffix


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def ticks(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call once per image; it drives a progress bar when there are many."""
    if total < _BAR_FROM:
        yield lambda: None
        return
    with bar(description, total) as (progress, task):
        yield lambda: progress.advance(task)
