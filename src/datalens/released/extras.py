"""Find everything in a file of synthetic images that is not part of the data set.

`loading` ignores such contents; whoever passes the file on should not.
"""

import csv
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq

from datalens.released import papers
from datalens.released.loading import parquet_images, read_text
from datalens.released.synthetic import (
    CERTIFICATE,
    CLASSES,
    COLUMNS,
    DRAWN,
    METADATA,
    features_text,
    file_name,
    folder_names,
    json_text,
    kind_of,
    more_than_pixels,
)

PIXELS = "more than pixels in an image"
_ARRAYS = ("images", "labels", "classes", "certificate", "drawn")
_LOCAL, _ENTRY, _END = 30, 46, 22  # sizes of a ZIP's headers in bytes, without names
_ZIP64 = 20  # size in bytes of the extra field that numpy writes after a member's name
_AT_ONCE = 2**20


def extras(path: Path) -> list[str]:
    """Return the names of everything in a file or folder besides the synthetic data set that `load` reads from it."""
    if path.is_dir():
        return _in_folder(path)
    return _in_npz(path) if kind_of(path) == ".npz" else _in_parquet(path)


def _rewritten(text: str, write: Callable[[Any], str]) -> bool:
    """Return whether a JSON text differs from how datalens writes its value: JSON allows repeated fields and spaces."""
    return write(json.loads(text)) != text


def _as_object(fields: dict[str, Any]) -> str:
    return json_text(fields, "text")


def _in_folder(folder: Path) -> list[str]:
    texts = {name: read_text(folder, name) for name in (CERTIFICATE, CLASSES, DRAWN) if (folder / name).exists()}
    metadata = read_text(folder, METADATA)
    rows = list(csv.reader(StringIO(metadata, newline="")))
    classes = tuple(json.loads(texts[CLASSES]))
    names = folder_names(classes)
    images = [f"{names[int(row[1])]}/{file_name(index)}" for index, row in enumerate(rows[1:])]
    expected = StringIO(newline="")
    table = csv.writer(expected, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows([image, int(row[1]), classes[int(row[1])]] for image, row in zip(images, rows[1:], strict=True))
    expected_files = {METADATA, *texts, *images, *papers.NAMES}  # `redrawing` compares the papers
    found = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_symlink() or name not in (names if file.is_dir() else expected_files):
            found.append(name)
    for name, text in texts.items():
        if _rewritten(text.removesuffix("\n"), json.dumps if name == CLASSES else _as_object) or text[-1:] != "\n":
            found.append(f"more text in {name}")
    found += [] if expected.getvalue() == metadata else [f"more text in {METADATA}"]
    named = {row[0] for row in rows[1:]} | set(images)
    files = [folder / name for name in named if (folder / name).is_file()]
    return found + [PIXELS for file in files if more_than_pixels(file.read_bytes())]


def _in_parquet(path: Path) -> list[str]:
    with pq.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.schema_arrow.metadata or {}
        texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in metadata.items()}
        classes = tuple(json.loads(texts["datalens.classes"]))
        expected_keys = {"huggingface", "datalens.classes", "datalens.certificate", "datalens.drawn"}
        found = [name for name in schema.names if name not in ("image", "label")]
        found += [key for key in texts if key not in expected_keys]
        found += [f"more text in {name}" for name, field in zip(schema.names, schema, strict=True) if field.metadata]
        if texts.get("huggingface", features_text(classes)) != features_text(classes):
            found.append("more text in huggingface")
        if texts["datalens.classes"] != json.dumps(classes):
            found.append("more text in datalens.classes")
        for key in ("datalens.certificate", "datalens.drawn"):
            if key in texts and _rewritten(texts[key], _as_object):
                found.append(f"more text in {key}")
        paths = file.read(columns=["image.path"]).column("image").combine_chunks().field("path").to_pylist()
        if paths != [file_name(index) for index in range(len(paths))]:
            found.append("more text in the names of images")
        return found + [PIXELS for blob in parquet_images(file) if more_than_pixels(blob)]


def _in_npz(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        # Counted, not as a set: of two members with the same name, numpy reads the last.
        found = sorted((Counter(archive.namelist()) - Counter(f"{name}.npy" for name in _ARRAYS)).elements())
        found += ["a comment"] if archive.comment else []
        if not found and not (_no_gaps(archive, file, path.stat().st_size) and _only_arrays(archive)):
            found.append("bytes between or behind its arrays")
    if not found:
        with np.load(path, allow_pickle=False) as arrays:
            for name in ("certificate", "drawn"):
                if name in arrays and _rewritten(arrays[name].item(), _as_object):
                    found.append(f"more text in {name}")
    return found


def _no_gaps(archive: zipfile.ZipFile, file: BinaryIO, size: int) -> bool:
    """Return whether every byte of a ZIP belongs to a header or to the compressed data of a member."""
    at, listed = 0, 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        file.seek(at)
        header, name = file.read(_LOCAL), member.filename.encode()
        behind = int.from_bytes(header[28:30], "little")
        if member.header_offset != at or file.read(len(name)) != name or behind not in (0, _ZIP64):
            return False
        if member.extra or member.comment:
            return False
        file.seek(behind, 1)
        if not _packed_exactly(file, member):
            return False
        at += _LOCAL + len(name) + behind + member.compress_size
        listed += _ENTRY + len(name)
    return archive.start_dir == at and size == at + listed + _END


def _packed_exactly(file: BinaryIO, member: zipfile.ZipInfo) -> bool:
    """Return whether the compressed data of a member ends where the member does."""
    if member.compress_type == zipfile.ZIP_STORED:
        return member.compress_size == member.file_size
    stream, remaining = zlib.decompressobj(-15), member.compress_size
    while remaining and not stream.eof:
        block = file.read(min(remaining, _AT_ONCE))
        remaining -= len(block)
        while block and not stream.eof:
            stream.decompress(block, _AT_ONCE)
            block = stream.unconsumed_tail
    return stream.eof and not remaining and not stream.unused_data


def _only_arrays(archive: zipfile.ZipFile) -> bool:
    """Return whether every member is exactly an array: the header that numpy writes, and the numbers."""
    for member in archive.infolist():
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            begins = stream.tell()
            stream.seek(0)
            header = stream.read(begins)
        expected = BytesIO()
        fields = {"shape": shape, "fortran_order": fortran, "descr": np.lib.format.dtype_to_descr(dtype)}
        np.lib.format.write_array_header_1_0(expected, fields)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if header != expected.getvalue() or member.file_size != begins + size:
            return False
    return True
