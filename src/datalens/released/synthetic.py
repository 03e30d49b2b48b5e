"""The synthetic images, as they are handed out: three file formats and a picture of samples.

Everything here has been released already, so nothing in this module can leak. A file may come from
anybody, though: `load` trusts no shape, size or path in it, and never unpickles.
"""

import csv
import json
import math
import os
import re
import secrets
import shutil
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from datalens.datasets.parquet import check_unpacked
from datalens.errors import DatalensError
from datalens.progress import bar

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

MAX_PIXELS = 2**31  # pixel values, channels counted: 2 GiB once decoded
_MAX_TEXT_BYTES = 2**26  # class names, certificate: far above any real one
_BAR_FROM = 2_000  # images; fewer are done before a bar could be read
_ROWS_AT_ONCE = 1_000  # a parquet row group; small, so that viewers can page through

_METADATA = "metadata.csv"
_CERTIFICATE = "certificate.json"
_CLASSES = "classes.json"
_COLUMNS = ["file_name", "label", "class"]

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # what a PNG can hold, by channels
_CHANNELS = {mode: channels for channels, mode in _MODES.items()}
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_CELL = 64  # pixels, about
_GAP = 2
_MAX_ROWS = 10
_MAX_COLUMNS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticDataset:
    """Labelled synthetic images with the certificate they were released under."""

    images: NDArray[np.uint8]  # [n, h, w, c]
    labels: NDArray[np.int64]  # [n], an index into `classes`
    classes: tuple[str, ...]
    certificate: dict[str, Any]

    def __post_init__(self) -> None:
        _check_arrays(self.images.dtype, self.images.shape, self.labels.dtype, self.labels.shape)
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise DatalensError("class names must be distinct, and there must be at least one")
        for name in self.classes:
            if not _is_text(name):
                raise DatalensError(f"class name {name!r} is not text that a file can hold")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise DatalensError(f"labels run from {low} to {high}, but there are {len(self.classes)} classes")
        if not isinstance(self.certificate, dict):
            raise DatalensError("the certificate must be a JSON object")

    def __len__(self) -> int:
        return len(self.images)

    def to_torch(self) -> "TensorDataset":
        """Images as float32 [n, c, h, w] in [0, 1], and labels: for a torch DataLoader."""
        import torch
        from torch.utils.data import TensorDataset

        images = torch.from_numpy(self.images).permute(0, 3, 1, 2).to(torch.float32) / 255
        return TensorDataset(images, torch.from_numpy(self.labels))

    def to_npz(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Arrays images, labels, classes and certificate: np.load(path)."""
        save(self, _ending(path, ".npz"), force=force)

    def to_parquet(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """PNG bytes and labels as Hugging Face datasets has them; the certificate is in the schema's metadata."""
        save(self, _ending(path, ".parquet"), force=force)

    def to_folder(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """A folder of PNG files a class, metadata.csv and certificate.json: Hugging Face's imagefolder."""
        save(self, f"{os.fspath(path).rstrip(os.sep)}{os.sep}", force=force)


def save(dataset: SyntheticDataset, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write to `path`: .npz, .parquet, or else a folder. All of it appears at once, or nothing does.

    (With `force`, replacing a folder takes two renames; a power cut between them leaves the old
    folder next to `path` under a temporary name.)
    """
    kind = _kind(path)
    if kind != ".npz":
        _mode(dataset.images.shape[3])
    certificate = _certificate_text(dataset.certificate)
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
            with staging.open("xb") as stream:
                (_write_npz if kind == ".npz" else _write_parquet)(dataset, certificate, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(staging, target)
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror or _one_line(error)}") from error
    finally:
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            with suppress(OSError):  # mostly not there any more; and the first error is the one to tell
                staging.unlink()


def _ending(path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
    if _kind(path) != suffix:
        raise DatalensError(f"{path} must end in {suffix}")
    return path


def check_target(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise what `save` would raise about the place it is to write to, before the work is done."""
    _check_may_write(Path(os.path.realpath(path)), folder=_kind(path) == "", force=force)


def load(path: str | os.PathLike[str]) -> SyntheticDataset:
    """Read what `save` wrote. Anything else is a DatalensError."""
    place = Path(path)
    if not place.exists():
        raise DatalensError(f"{path} does not exist")
    read = _read_folder if place.is_dir() else {".npz": _read_npz, ".parquet": _read_parquet}.get(_kind(path))
    if read is None:
        raise DatalensError(f"{path} is a file without a suffix: expected .npz, .parquet or a folder")
    try:
        return read(place)
    except Exception as error:
        # zipfile, zlib, tokenize, Pillow and Arrow each raise their own kinds on damaged bytes
        raise DatalensError(f"{path} is not a synthetic data set: {_one_line(error)}") from error


def grid(images: NDArray[np.uint8], labels: NDArray[np.int64], *, per_class: int = 8) -> Image.Image:
    """The first `per_class` images ([n, h, w, c]) of each class, one row a class, at most 10 x 10."""
    _, h, w, c = images.shape
    mode = _mode(c)
    kinds, counts = np.unique(labels, return_counts=True)
    kinds = kinds[:_MAX_ROWS]
    columns = min(per_class, _MAX_COLUMNS, int(counts[:_MAX_ROWS].max()))
    scale = max(1, round(_CELL / max(h, w)))
    step_y, step_x = h * scale + _GAP, w * scale + _GAP
    canvas = np.full((len(kinds) * step_y + _GAP, columns * step_x + _GAP, c), 255, dtype=np.uint8)
    for row, kind in enumerate(kinds):
        for column, index in enumerate(np.flatnonzero(labels == kind)[:columns]):
            cell = images[index].repeat(scale, axis=0).repeat(scale, axis=1)  # whole factors keep pixels square
            y, x = _GAP + row * step_y, _GAP + column * step_x
            canvas[y : y + h * scale, x : x + w * scale] = cell
    return Image.frombytes(mode, (canvas.shape[1], canvas.shape[0]), canvas.tobytes())


# --- writing ---------------------------------------------------------------------------------


def _write_npz(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    grey = dataset.images.shape[3] == 1
    np.savez_compressed(
        stream,
        images=dataset.images[..., 0] if grey else dataset.images,
        labels=dataset.labels,
        classes=np.array(dataset.classes, dtype=np.str_),
        certificate=np.array(certificate),
    )


def _write_parquet(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    # `datasets` reads its features from this key, and then shows images and class names
    features = {"image": {"_type": "Image"}, "label": {"names": list(dataset.classes), "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", _IMAGE_TYPE), ("label", pa.int64())],
        metadata={
            "huggingface": json.dumps({"info": {"features": features}}),
            "datalens.classes": json.dumps(dataset.classes),
            "datalens.certificate": certificate,
        },
    )
    count = len(dataset.images)
    # PNGs do not repeat, so a dictionary of them would only be built and thrown away
    with (
        _ticks("writing images", count) as tick,
        pq.ParquetWriter(stream, schema, use_dictionary=["label"], write_statistics=["label"]) as writer,
    ):
        for start in range(0, count, _ROWS_AT_ONCE):
            rows = []
            for index in range(start, min(start + _ROWS_AT_ONCE, count)):
                rows.append({"bytes": _png(dataset.images[index]), "path": _file_name(index)})
                tick()
            labels = pa.array(dataset.labels[start : start + _ROWS_AT_ONCE], pa.int64())
            writer.write_batch(pa.record_batch([pa.array(rows, _IMAGE_TYPE), labels], schema=schema))


def _write_folder(dataset: SyntheticDataset, certificate: str, folder: Path) -> None:
    names = _folder_names(dataset.classes)
    for name in names:
        (folder / name).mkdir()
    (folder / _CERTIFICATE).write_text(certificate + "\n", encoding="utf-8")
    (folder / _CLASSES).write_text(json.dumps(dataset.classes) + "\n", encoding="utf-8")
    with (
        _ticks("writing images", len(dataset.images)) as tick,
        (folder / _METADATA).open("w", encoding="utf-8", newline="") as stream,
    ):
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(_COLUMNS)
        for index, label in enumerate(dataset.labels.tolist()):
            file_name = f"{names[label]}/{_file_name(index)}"
            (folder / file_name).write_bytes(_png(dataset.images[index]))
            table.writerow([file_name, label, dataset.classes[label]])
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
    ours = (target / _METADATA).is_file() and (target / _CERTIFICATE).is_file()
    if folder and not ours and any(target.iterdir()):
        # a slip such as `--out ~ --force` must not delete a home directory
        raise DatalensError(f"{target} holds other files, which --force does not delete; choose another folder")


def _folder_names(classes: tuple[str, ...]) -> list[str]:
    """A plain folder name for each class. Names that had to change, or would clash, end in ~label."""
    taken = {_METADATA, _CERTIFICATE, _CLASSES}
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


def _file_name(index: int) -> str:
    return f"{index + 1:06d}.png"


def _png(image: NDArray[np.uint8]) -> bytes:
    h, w, c = image.shape
    stream = BytesIO()
    Image.frombytes(_mode(c), (w, h), image.tobytes()).save(stream, format="PNG")
    return stream.getvalue()


def _certificate_text(certificate: dict[str, Any]) -> str:
    try:
        return json.dumps(certificate, allow_nan=False, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise DatalensError(f"the certificate cannot be written as JSON: {_one_line(error)}") from error


# --- reading ---------------------------------------------------------------------------------


def _read_npz(path: Path) -> SyntheticDataset:
    # the headers alone tell how much memory the arrays take: judge them before reading any
    with zipfile.ZipFile(path) as archive:
        heads = {name: _npy_head(archive, name) for name in ("images", "labels", "classes", "certificate")}
    (shape, dtype), (labels_shape, labels_dtype) = heads["images"], heads["labels"]
    _check_arrays(dtype, (*shape, 1) if len(shape) == 3 else shape, labels_dtype, labels_shape)
    for name, dimensions in (("classes", 1), ("certificate", 0)):
        text_shape, text_dtype = heads[name]
        if text_dtype.kind != "U" or len(text_shape) != dimensions:
            raise DatalensError(f"array {name!r} must be {dimensions}-dimensional text")
        if math.prod(text_shape) * text_dtype.itemsize > _MAX_TEXT_BYTES:
            raise DatalensError(f"array {name!r} is too large")
    with np.load(path, allow_pickle=False) as arrays:
        images = arrays["images"]
        return SyntheticDataset(
            images=images[..., None] if images.ndim == 3 else images,
            labels=arrays["labels"],
            classes=tuple(arrays["classes"].tolist()),
            certificate=json.loads(arrays["certificate"].item()),
        )


def _npy_head(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if f"{name}.npy" not in archive.namelist():
        raise DatalensError(f"array {name!r} is missing")
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DatalensError(f"array {name!r} is in an npy format that is not used for plain arrays")
    return shape, dtype


def _read_parquet(path: Path) -> SyntheticDataset:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        for name, expected in (("image", _IMAGE_TYPE), ("label", pa.int64())):
            if name not in schema.names or schema.field(name).type != expected:
                raise DatalensError(f"column {name!r} must be there, as {expected}")
        metadata = schema.metadata or {}
        for key in (b"datalens.classes", b"datalens.certificate"):
            if key not in metadata:
                raise DatalensError(f"the schema metadata has no {key.decode()!r}")
        check_unpacked(file.metadata, path)
        images = _decode(_parquet_images(file), file.metadata.num_rows)
        labels = file.read(columns=["label"]).column("label")
        if labels.null_count:
            raise DatalensError("some labels are missing")
        return SyntheticDataset(
            images=images,
            labels=labels.to_numpy(),
            classes=_class_names(json.loads(metadata[b"datalens.classes"])),
            certificate=json.loads(metadata[b"datalens.certificate"]),
        )


def _parquet_images(file: pq.ParquetFile) -> Iterator[bytes]:
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["image"]):
        for row in batch.column("image"):
            value = row.as_py()
            if value is None or value["bytes"] is None:
                raise DatalensError("some images are missing")
            yield value["bytes"]


def _read_folder(folder: Path) -> SyntheticDataset:
    classes = _class_names(json.loads(_read_text(folder, _CLASSES)))
    certificate = json.loads(_read_text(folder, _CERTIFICATE))
    rows = list(csv.reader(StringIO(_read_text(folder, _METADATA), newline=""), strict=True))
    if not rows or rows[0] != _COLUMNS:
        raise DatalensError(f"{_METADATA} must begin with the columns {','.join(_COLUMNS)}")
    labels = []
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != 3 or not row[1].isdecimal() or int(row[1]) >= len(classes) or classes[int(row[1])] != row[2]:
            raise DatalensError(f"row {number} of {_METADATA} does not name a file, its label and that label's class")
        labels.append(int(row[1]))
    return SyntheticDataset(
        images=_decode(_folder_images(folder, [row[0] for row in rows[1:]]), len(labels)),
        labels=np.array(labels, dtype=np.int64),
        classes=classes,
        certificate=certificate,
    )


def _folder_images(folder: Path, names: list[str]) -> Iterator[bytes]:
    inside = folder.resolve()
    for name in names:
        file = (inside / name).resolve()
        if not file.is_relative_to(inside):
            raise DatalensError(f"{_METADATA} names a file outside the folder: {name!r}")
        if not file.is_file():
            raise DatalensError(f"image {name!r} is missing")
        yield file.read_bytes()


def _read_text(folder: Path, name: str) -> str:
    if not (folder / name).is_file():
        raise DatalensError(f"{name} is missing")
    with (folder / name).open(encoding="utf-8", newline="") as stream:
        return stream.read()


def _class_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise DatalensError("the class names must be a JSON list")
    return tuple(value)


def _decode(blobs: Iterable[bytes], count: int) -> NDArray[np.uint8]:
    """PNGs to one array [count, h, w, c]. Sizes are judged from the headers, before any decoding."""
    images: NDArray[np.uint8] | None = None
    done = 0
    with _ticks("reading images", count) as tick:
        for blob in blobs:
            with Image.open(BytesIO(blob), formats=("PNG",)) as picture:
                if picture.mode not in _CHANNELS:
                    raise DatalensError(f"image {done + 1} is not 8-bit grey or colour, but {picture.mode}")
                shape = (picture.height, picture.width, _CHANNELS[picture.mode])
                if images is None:
                    _check_size((count, *shape))
                    images = np.empty((count, *shape), dtype=np.uint8)
                if images.shape[1:] != shape:
                    raise DatalensError(f"image {done + 1} is {_by(shape)}, the first is {_by(images.shape[1:])}")
                images[done] = np.asarray(picture).reshape(shape)
            done += 1
            tick()
    if images is None or done != count:
        raise DatalensError(f"{done} images were found where {max(count, 1)} were expected")
    return images


# --- shared ----------------------------------------------------------------------------------


def _kind(path: str | os.PathLike[str]) -> str:
    """The format by its suffix: .npz, .parquet, or none for a folder."""
    suffix = "" if os.fspath(path).endswith(("/", os.sep)) else Path(path).suffix.lower()
    if suffix not in ("", ".npz", ".parquet"):
        raise DatalensError(
            f"{path} ends in {suffix}: use .npz, .parquet, or a folder (a name without a suffix, or ending in /)"
        )
    return suffix


def _check_arrays(
    dtype: np.dtype[Any], shape: tuple[int, ...], labels_dtype: np.dtype[Any], labels_shape: tuple[int, ...]
) -> None:
    if dtype != np.uint8 or len(shape) != 4 or min(shape) < 1:
        raise DatalensError(f"images must be uint8 [n, h, w, c] and not empty, but are {dtype} {list(shape)}")
    if labels_dtype != np.int64 or labels_shape != shape[:1]:
        raise DatalensError(f"labels must be int64 [{shape[0]}], but are {labels_dtype} {list(labels_shape)}")
    _check_size(shape)


def _check_size(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MAX_PIXELS:
        raise DatalensError(f"{_by(shape)} pixel values are more than the limit of 2^31")


def _mode(channels: int) -> str:
    if channels not in _MODES:
        raise DatalensError(f"a PNG holds 1 to 4 channels, not {channels}; save as .npz instead")
    return _MODES[channels]


def _is_text(name: object) -> bool:
    """Whether every format can hold it: numpy drops trailing NULs, and UTF-8 has no lone surrogates."""
    return isinstance(name, str) and not any(c == "\0" or unicodedata.category(c) == "Cs" for c in name)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _ticks(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call once per image; it drives a progress bar when there are many."""
    if total < _BAR_FROM:
        yield lambda: None
        return
    with bar(description, total) as (progress, task):
        yield lambda: progress.advance(task)
