"""Synthetic data sets: in memory, as a file (.npz, .parquet) and as a folder of PNG files.

`loading` reads these files. Everything here has been released already, so nothing in this module can leak.
"""

import csv
import json
import math
import os
import re
import secrets
import shutil
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datalens.errors import DatalensError, one_line
from datalens.files import replacing
from datalens.progress import bar
from datalens.released import papers
from datalens.released.certificate import file_hash

if TYPE_CHECKING:
    import pyarrow as pa
    from torch.utils.data import TensorDataset

MAX_PIXELS = 2**31  # pixel values, counting channels: 2 GiB once decoded


MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's modes for PNGs, by number of channels

# Says in XMP that the image is synthetic, for whoever gets it alone.
_XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    f'Iptc4xmpExt:DigitalSourceType="{papers.SOURCE_TYPE}"/></rdf:RDF></x:xmpmeta>'
)
_SAID = b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + _XMP.encode()  # a PNG's chunk of text: its name, and its contents
_CHUNK = len(_SAID[1]).to_bytes(4) + b"".join(_SAID) + zlib.crc32(b"".join(_SAID)).to_bytes(4)
_HEADER_END = 33  # where the first chunk of a PNG ends
_PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = {0: 1, 2: 3, 4: 2, 6: 4}  # number of channels, by a PNG's colour type: grey, colour, and each with alpha

# How much an image may differ when drawn on another machine: mean absolute difference, in levels of 255. Weights that
# are off by 1e-5, a hundred times the rounding of float32, change an image by at most 1.2; other images of its class
# are 5 to 40 away (docs/decisions.md).
NEARLY = 2.0

_CELL = 64  # approximate size of an image in the grid, in pixels
_GAP = 2
_MAX_ROWS = 10
_MAX_COLUMNS = 10

_BAR_FROM = 2_000  # show a progress bar from this number of images; fewer are done before it could be read
ROWS_AT_ONCE = 1_000  # rows of a parquet row group: few, so that viewers can page through

METADATA = "metadata.csv"
CERTIFICATE = "certificate.json"
CLASSES = "classes.json"
DRAWN = "sampling.json"
COLUMNS = ["file_name", "label", "class"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticDataset:
    """Labelled synthetic images with the certificate they were released under.

    `drawn` states how to draw the same images from the generator again (see `redrawing`): seed, count, balanced,
    classes and device. It is None for images from elsewhere and for files of version 0.1.0.

    `verified`: they were drawn from a release whose certificate was verified (`release.sample`). Only then do folders
    and parquet files come with their papers (`papers`).

    Raises:
        DatalensError: arrays have the wrong type, shape or size, a label has no class, or a class name is unusable.
    """

    images: NDArray[np.uint8]  # [n, h, w, c]
    labels: NDArray[np.int64]  # [n], indices into `classes`
    classes: tuple[str, ...]
    certificate: dict[str, Any]
    drawn: dict[str, Any] | None = None
    verified: bool = False

    def __post_init__(self) -> None:
        check_arrays(self.images.dtype, self.images.shape, self.labels.dtype, self.labels.shape)
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise DatalensError("class names must be distinct, and there must be at least one")
        for name in self.classes:
            if not _is_text(name):
                raise DatalensError(f"class name {name!r} is not text that every file format can store")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise DatalensError(f"labels run from {low} to {high}, but there are {len(self.classes)} classes")
        if not isinstance(self.certificate, dict):
            raise DatalensError("the certificate must be a JSON object")
        if not isinstance(self.drawn, dict | None):
            raise DatalensError("the field `drawn` must be a JSON object")

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        _, height, width, channels = self.images.shape
        size = f"{height}x{width}" + (f"x{channels}" if channels > 1 else "")
        return (
            f"<{len(self)} synthetic images of {size} in {len(self.classes)} classes: "
            f"{self.certificate.get('statement', 'no statement of privacy')}>"
        )

    def to_torch(self) -> "TensorDataset":
        """Return a TensorDataset of images, float32 [n, c, h, w] in [0, 1], and labels, for a torch DataLoader."""
        import torch
        from torch.utils.data import TensorDataset

        images = torch.from_numpy(self.images).permute(0, 3, 1, 2).to(torch.float32) / 255
        return TensorDataset(images, torch.from_numpy(self.labels))

    def to_npz(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the arrays images, labels, classes and certificate to a file for `np.load`.

        Args:
            path: of the file, which ends in .npz.
            force: whether to replace what this class wrote there before.

        Raises:
            DatalensError: the target exists, or has another ending.
        """
        save(self, ending(path, ".npz"), force=force)

    def to_parquet(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write PNG bytes and labels in the format of Hugging Face datasets; the papers are beside the file.

        Args:
            path: of the file, which ends in .parquet.
            force: whether to replace what this class wrote there before.

        Raises:
            DatalensError: the target exists, or has another ending.
        """
        save(self, ending(path, ".parquet"), force=force)

    def to_folder(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write a folder of PNG files for each class, with metadata.csv, certificate and papers (`load_dataset`).

        Args:
            path: of the folder.
            force: whether to replace what this class wrote there before.

        Raises:
            DatalensError: the target exists, or has another ending.
        """
        save(self, f"{os.fspath(path).rstrip(os.sep)}{os.sep}", force=force)


def grid(images: NDArray[np.uint8], labels: NDArray[np.int64], *, per_class: int = 8) -> Image.Image:
    """Return a picture of the first `per_class` images ([n, h, w, c]) of each class, a row per class, at most 10x10."""
    _, h, w, c = images.shape
    mode = mode_of(c)
    kinds, counts = np.unique(labels, return_counts=True)
    kinds = kinds[:_MAX_ROWS]
    columns = min(per_class, _MAX_COLUMNS, int(counts[:_MAX_ROWS].max()))
    scale = _scale(h, w)
    step_y, step_x = h * scale + _GAP, w * scale + _GAP
    canvas = np.full((len(kinds) * step_y + _GAP, columns * step_x + _GAP, c), 255, dtype=np.uint8)
    for row, kind in enumerate(kinds):
        for column, index in enumerate(np.flatnonzero(labels == kind)[:columns]):
            cell = images[index].repeat(scale, axis=0).repeat(scale, axis=1)  # whole factors keep pixels square
            y, x = _GAP + row * step_y, _GAP + column * step_x
            canvas[y : y + h * scale, x : x + w * scale] = cell
    return Image.frombytes(mode, (canvas.shape[1], canvas.shape[0]), canvas.tobytes())


def cells(picture: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """Cut a picture that `grid` made of images of this size into cells [n, y, x, c], each with the lines around it."""
    pixels = np.asarray(picture).reshape(picture.height, picture.width, -1)
    scale = _scale(height, width)
    step_y, step_x = height * scale + _GAP, width * scale + _GAP
    rows, columns = (picture.height - _GAP) // step_y, (picture.width - _GAP) // step_x
    return np.stack(
        [
            pixels[row * step_y : (row + 1) * step_y + _GAP, column * step_x : (column + 1) * step_x + _GAP]
            for row in range(rows)
            for column in range(columns)
        ]
    )


def more_than_pixels(png: bytes) -> bool:
    """Return whether a PNG holds more than its pixels: text, a second picture, or bytes after the end of any part.

    The text that says that it is synthetic, and nothing else, may be there.
    """
    chunks, at = [], 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4])
        if png[end : end + 4] != zlib.crc32(png[at + 4 : end]).to_bytes(4):
            return True
        chunks.append((png[at + 4 : at + 8], png[at + 8 : end]))
        at = end + 4
    if chunks[1:2] == [_SAID]:
        del chunks[1]
    names = [name for name, _ in chunks]
    if png[:8] != _PNG or at != len(png) or names[:1] + names[-1:] != [b"IHDR", b"IEND"] or chunks[-1][1]:
        return True
    return set(names[1:-1]) != {b"IDAT"} or not _exactly_pixels(chunks[0][1], b"".join(data for _, data in chunks[1:]))


def _exactly_pixels(header: bytes, packed: bytes) -> bool:
    """Return whether the compressed data of a PNG are the rows that its header states, and nothing more."""
    if len(header) != 13 or header[8] != 8 or header[9] not in _COLOURS or any(header[10:]):
        return False
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    expected = height * (1 + width * _COLOURS[header[9]])
    stream = zlib.decompressobj()
    try:
        size = len(stream.decompress(packed, expected + 1)) if 0 < expected <= 2 * MAX_PIXELS else 0
    except zlib.error:
        return False
    return size == expected and stream.eof and not stream.unused_data


def nearly(images: NDArray[np.uint8], expected: NDArray[np.uint8]) -> bool:
    """Return whether every image [n, …] equals the expected one, up to the effect of rounding on another machine."""
    if images.shape != expected.shape:
        return False
    apart = np.abs(images.astype(np.int16) - expected.astype(np.int16)).reshape(len(images), -1)
    return bool((apart.mean(axis=1) <= NEARLY).all())


def _scale(height: int, width: int) -> int:
    return max(1, round(_CELL / max(height, width)))


def check_arrays(
    dtype: np.dtype[Any], shape: tuple[int, ...], labels_dtype: np.dtype[Any], labels_shape: tuple[int, ...]
) -> None:
    if dtype != np.uint8 or len(shape) != 4 or min(shape) < 1:
        raise DatalensError(f"images must be uint8 [n, h, w, c] and not empty, but are {dtype} {list(shape)}")
    if labels_dtype != np.int64 or labels_shape != shape[:1]:
        raise DatalensError(f"labels must be int64 [{shape[0]}], but are {labels_dtype} {list(labels_shape)}")
    check_size(shape)


def check_size(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MAX_PIXELS:
        raise DatalensError(f"{by(shape)} pixel values are more than the limit of 2^31")


def mode_of(channels: int) -> str:
    if channels not in MODES:
        raise DatalensError(f"a PNG holds 1 to 4 channels, not {channels}; save as .npz instead")
    return MODES[channels]


def _is_text(name: object) -> bool:
    """Return whether every file format can store a name: numpy drops trailing NULs, UTF-8 has no lone surrogates."""
    return isinstance(name, str) and not any(c == "\0" or unicodedata.category(c) == "Cs" for c in name)


def by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# --- files ----------------------------------------------------------------------------------------


def save(dataset: SyntheticDataset, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a synthetic data set to a .npz file, a .parquet file or a folder. All of it appears at once, or nothing.

    With `force`, replacing a folder takes two renames; a power cut between them leaves the old folder next to `path`
    under a temporary name.

    Args:
        path: where to write; the suffix chooses the format, and no suffix means a folder.
        force: replace a file, or a folder that `save` wrote.

    Raises:
        DatalensError: the path exists, cannot be written, or has another suffix; a PNG cannot hold the images.
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
            for paper in beside(target).values():
                paper.unlink(missing_ok=True)  # they are about the images that are replaced
            with replacing(target, shared=True) as stream:
                (_write_npz if kind == ".npz" else _write_parquet)(dataset, certificate, stream)
            for name, text in papers_of(dataset, target).items():
                with replacing(beside(target)[name], shared=True) as stream:
                    stream.write(text.encode())
    except OSError as error:
        raise DatalensError(f"cannot write {path}: {error.strerror or one_line(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def ending(path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
    if kind_of(path) != suffix:
        raise DatalensError(f"{path} must end in {suffix}")
    return path


def check_target(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise what `save` would raise about its target, before the work is done."""
    _check_may_write(Path(os.path.realpath(path)), folder=kind_of(path) == "", force=force)


def _write_npz(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    arrays: dict[str, Any] = {
        "images": dataset.images,
        "labels": dataset.labels,
        "classes": np.array(dataset.classes, dtype=np.str_),
        "certificate": np.array(certificate),
    }
    if dataset.drawn is not None:
        arrays["drawn"] = np.array(json_text(dataset.drawn, "way of drawing"))
    np.savez_compressed(stream, **arrays)


def _write_parquet(dataset: SyntheticDataset, certificate: str, stream: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {
        "huggingface": features_text(dataset.classes),
        "datalens.classes": json.dumps(dataset.classes),
        "datalens.certificate": certificate,
    }
    if dataset.drawn is not None:
        metadata["datalens.drawn"] = json_text(dataset.drawn, "way of drawing")
    schema = pa.schema([("image", image_type()), ("label", pa.int64())], metadata=metadata)
    count = len(dataset.images)
    # PNGs do not repeat, so a dictionary of them would be built and discarded.
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
            writer.write_batch(pa.record_batch([pa.array(rows, image_type()), labels], schema=schema))


def image_type() -> "pa.StructType":
    """Return the Arrow type of an image in a parquet file, as Hugging Face's `datasets` defines it."""
    import pyarrow as pa

    return pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def features_text(classes: tuple[str, ...]) -> str:
    """Return the JSON metadata from which `datasets` reads that there are images, and the names of classes."""
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
    for name, text in papers_of(dataset, folder).items():
        (folder / name).write_text(text, encoding="utf-8")
    if hasattr(os, "sync"):
        os.sync()  # one call: an fsync for each of 10,000 small files takes minutes on a spinning disk


def beside(path: Path) -> dict[str, Path]:
    """Return where the papers of a file are: synth.parquet has synth.README.md beside it. None for another format."""
    return {name: path.with_suffix(f".{name}") for name in papers.NAMES} if path.suffix.lower() == ".parquet" else {}


def papers_of(dataset: SyntheticDataset, path: Path) -> dict[str, str]:
    """Return the papers of a data set that was written to a folder or a parquet file, by name.

    There are none for another format, for images whose certificate was not verified, and for images from elsewhere.
    """
    table = path / METADATA if path.is_dir() else path
    if not dataset.verified or dataset.drawn is None or table.suffix.lower() == ".npz":
        return {}
    return papers.papers(
        papers.Subject(
            certificate=dataset.certificate,
            classes=dataset.classes,
            shape=dataset.images.shape,
            drawn=dataset.drawn,
            table=table.name,
            sha256=file_hash(table),
        )
    )


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
    paper = next((paper for paper in beside(target).values() if paper.exists()), None)
    if paper is not None and not force:
        raise DatalensError(f"{paper} exists; pass --force to replace it")
    if not target.exists():
        return
    if not force:
        raise DatalensError(f"{target} exists; pass --force to replace it")
    if folder != target.is_dir():
        raise DatalensError(f"{target} is a {'file' if folder else 'folder'}; choose another name")
    ours = (target / METADATA).is_file() and (target / CERTIFICATE).is_file()
    if folder and not ours and any(target.iterdir()):
        # A mistake such as `--out ~ --force` must not delete a home directory.
        raise DatalensError(f"{target} holds other files, which --force does not delete; choose another folder")


def folder_names(classes: tuple[str, ...]) -> list[str]:
    """Return a plain folder name for each class. Names that had to change, or would clash, end in ~label."""
    taken = {METADATA, CERTIFICATE, CLASSES, DRAWN, *map(_fold, papers.NAMES)}
    names = []
    for label, name in enumerate(classes):
        safe = re.sub(r"[^\w .-]", "_", name).strip(" .")[:48]
        if not safe or safe != name or _fold(safe) in taken:
            safe = f"{safe.rstrip(' .')}~{label}"  # unique, because no other name has a "~"
        taken.add(_fold(safe))
        names.append(safe)
    return names


def _fold(name: str) -> str:
    """Return a key that is equal for names that some file systems do not tell apart."""
    return unicodedata.normalize("NFC", name).casefold()


def file_name(index: int) -> str:
    """Return the file name of an image."""
    return f"{index + 1:06d}.png"


def _png(image: NDArray[np.uint8]) -> bytes:
    h, w, c = image.shape
    stream = BytesIO()
    Image.frombytes(mode_of(c), (w, h), image.tobytes()).save(stream, format="PNG")
    png = stream.getvalue()
    return png[:_HEADER_END] + _CHUNK + png[_HEADER_END:]


def json_text(fields: dict[str, Any], what: str) -> str:
    """Return a certificate, or the field `drawn`, as JSON. There is one way to write it."""
    try:
        return json.dumps(fields, allow_nan=False, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise DatalensError(f"the {what} cannot be written as JSON: {one_line(error)}") from error


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a path by its suffix: .npz, .parquet, or "" for a folder."""
    suffix = "" if os.fspath(path).endswith(("/", os.sep)) else Path(path).suffix.lower()
    if suffix not in ("", ".npz", ".parquet"):
        raise DatalensError(
            f"{path} ends in {suffix}: use .npz, .parquet, or a folder (a name without a suffix, or ending in /)"
        )
    return suffix


@contextmanager
def ticks(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call once per image. It advances a progress bar if there are many images."""
    if total < _BAR_FROM:
        yield lambda: None
        return
    with bar(description, total) as (progress, task):
        yield lambda: progress.advance(task)
