"""Read synthetic data sets that `save` wrote.

A file may come from anybody: no shape, size or path in it is trusted, and nothing is unpickled.
"""

import csv
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from datalens.data.parquet import check_unpacked
from datalens.data.regular import check_regular
from datalens.errors import DatalensError, one_line
from datalens.released.synthetic import (
    CERTIFICATE,
    CLASSES,
    COLUMNS,
    DRAWN,
    METADATA,
    MODES,
    ROWS_AT_ONCE,
    SyntheticDataset,
    by,
    check_arrays,
    check_size,
    image_type,
    kind_of,
    ticks,
)

_MAX_TEXT_BYTES = 2**26  # limit for class names and certificate, far above any real one

_CHANNELS = {mode: channels for channels, mode in MODES.items()}


def load(path: str | os.PathLike[str]) -> SyntheticDataset:
    """Read a synthetic data set from a .npz file, a .parquet file or a folder that `save` wrote.

    Raises:
        DatalensError: the path does not exist, or holds something else.
    """
    place = Path(path)
    if not place.exists():
        raise DatalensError(f"{path} does not exist")
    read = _read_folder if place.is_dir() else {".npz": _read_npz, ".parquet": _read_parquet}.get(kind_of(path))
    if read is None:
        raise DatalensError(f"{path} is a file without a suffix: expected .npz, .parquet or a folder")
    if not place.is_dir():
        check_regular(place)
    try:
        return read(place)
    except Exception as error:
        # zipfile, zlib, tokenize, Pillow and Arrow each raise their own errors on damaged bytes.
        raise DatalensError(f"{path} is not a synthetic data set: {one_line(error)}") from error


def _read_npz(path: Path) -> SyntheticDataset:
    # The headers state how much memory the arrays take: check them before reading any array.
    with zipfile.ZipFile(path) as archive:
        optional = ["drawn"] if "drawn.npy" in archive.namelist() else []
        names = ["images", "labels", "classes", "certificate", *optional]
        heads = {name: _npy_head(archive, name) for name in names}
    (shape, dtype), (labels_shape, labels_dtype) = heads["images"], heads["labels"]
    check_arrays(dtype, (*shape, 1) if len(shape) == 3 else shape, labels_dtype, labels_shape)
    for name in names[2:]:
        dimensions = 1 if name == "classes" else 0
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
            drawn=json.loads(arrays["drawn"].item()) if "drawn" in names else None,
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
            raise DatalensError(f"array {name!r} is in an npy format that plain arrays do not use")
    return shape, dtype


def _read_parquet(path: Path) -> SyntheticDataset:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        for name, expected in (("image", image_type()), ("label", pa.int64())):
            if name not in schema.names or schema.field(name).type != expected:
                raise DatalensError(f"there must be a column {name!r} of type {expected}")
        metadata = schema.metadata or {}
        for key in (b"datalens.classes", b"datalens.certificate"):
            if key not in metadata:
                raise DatalensError(f"the schema metadata has no {key.decode()!r}")
        check_unpacked(file.metadata, path)
        images = _decode(parquet_images(file), file.metadata.num_rows)
        labels = file.read(columns=["label"]).column("label")
        if labels.null_count:
            raise DatalensError("some labels are missing")
        return SyntheticDataset(
            images=images,
            labels=labels.to_numpy(),
            classes=_class_names(json.loads(metadata[b"datalens.classes"])),
            certificate=json.loads(metadata[b"datalens.certificate"]),
            drawn=json.loads(metadata.get(b"datalens.drawn", b"null")),
        )


def parquet_images(file: pq.ParquetFile) -> Iterator[bytes]:
    """Yield the PNG bytes of each image, in order."""
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=["image"]):
        for row in batch.column("image"):
            value = row.as_py()
            if value is None or value["bytes"] is None:
                raise DatalensError("some images are missing")
            yield value["bytes"]


def _read_folder(folder: Path) -> SyntheticDataset:
    classes = _class_names(json.loads(read_text(folder, CLASSES)))
    certificate = json.loads(read_text(folder, CERTIFICATE))
    rows = list(csv.reader(StringIO(read_text(folder, METADATA), newline=""), strict=True))
    if not rows or rows[0] != COLUMNS:
        raise DatalensError(f"{METADATA} must begin with the columns {','.join(COLUMNS)}")
    labels = []
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != 3 or not row[1].isdecimal() or int(row[1]) >= len(classes) or classes[int(row[1])] != row[2]:
            raise DatalensError(f"row {number} of {METADATA} does not name a file, its label and that label's class")
        labels.append(int(row[1]))
    return SyntheticDataset(
        images=_decode(_folder_images(folder, [row[0] for row in rows[1:]]), len(labels)),
        labels=np.array(labels, dtype=np.int64),
        classes=classes,
        certificate=certificate,
        drawn=json.loads(read_text(folder, DRAWN)) if (folder / DRAWN).exists() else None,
    )


def _folder_images(folder: Path, names: list[str]) -> Iterator[bytes]:
    inside = folder.resolve()
    for name in names:
        file = (inside / name).resolve()
        if not file.is_relative_to(inside):
            raise DatalensError(f"{METADATA} names a file outside the folder: {name!r}")
        if not file.is_file():
            raise DatalensError(f"image {name!r} is missing")
        yield file.read_bytes()


def read_text(folder: Path, name: str) -> str:
    """Return the text of a file in a folder, with its line ends unchanged."""
    if not (folder / name).is_file():
        raise DatalensError(f"{name} is missing")
    with (folder / name).open(encoding="utf-8", newline="") as stream:
        return stream.read()


def _class_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise DatalensError("the class names must be a JSON list")
    return tuple(value)


def _decode(blobs: Iterable[bytes], count: int) -> NDArray[np.uint8]:
    """Decode PNGs into one array [count, h, w, c]. Sizes are checked in the headers, before any decoding."""
    images: NDArray[np.uint8] | None = None
    done = 0
    with ticks("reading images", count) as tick:
        for blob in blobs:
            with Image.open(BytesIO(blob), formats=("PNG",)) as picture:
                if picture.mode not in _CHANNELS:
                    raise DatalensError(f"image {done + 1} is not 8-bit grey or colour, but {picture.mode}")
                shape = (picture.height, picture.width, _CHANNELS[picture.mode])
                if images is None:
                    check_size((count, *shape))
                    images = np.empty((count, *shape), dtype=np.uint8)
                if images.shape[1:] != shape:
                    raise DatalensError(f"image {done + 1} is {by(shape)}, the first is {by(images.shape[1:])}")
                images[done] = np.asarray(picture).reshape(shape)
            done += 1
            tick()
    if images is None or done != count:
        raise DatalensError(f"{done} images were found where {max(count, 1)} were expected")
    return images
