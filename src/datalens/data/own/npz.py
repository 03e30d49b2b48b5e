"""The user's own data as .npz: arrays `images`, `labels` and `classes` (and `test_images`, `test_labels`).

`ids`, if present, holds stable names of the records: a record's share of the teachers then follows from its id
instead of its pixels. `classes` holds the names of the classes, in the order of the labels: which classes exist is
declared public, not read off the labels, where one record could decide it.

Opening a file reads the headers of its arrays and the class names. Images, labels and ids are read by `OnDisk.load`.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data.own.arrays import check_images, check_label_shape, check_labels, image_shape, schema_of
from datalens.data.own.reading import Reading, check_classes
from datalens.data.records import Dataset, OnDisk
from datalens.data.regular import check_regular
from datalens.errors import DatalensError, NoTestImages, one_line

MAGIC = b"\x93NUMPY"  # how a file with a single array (.npy) begins


@dataclass(frozen=True)
class Header:
    """Shape and type of an array, as its header states them."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"


def open_npz(path: Path, split: str, nominal_size: int, reading: Reading) -> OnDisk:
    """Open a file of arrays. --label and --record-id name the arrays to use in the place of `labels` and `ids`.

    Raises:
        DatalensError: the file is damaged, lacks an array, or has one of a shape or type that does not fit.
    """
    prefix = "" if split == "train" else "test_"
    if reading.classes is not None:
        raise DatalensError(f"--classes: {path} names its classes itself, in the array classes; leave it out")
    check_regular(path)
    images, labels, ids = (
        f"{prefix}images",
        f"{prefix}{reading.label or 'labels'}",
        f"{prefix}{reading.id_column or 'ids'}",
    )
    required = (images, labels, "classes", *(() if reading.id_column is None else (ids,)))
    with _damage_explained(path):
        headers = _headers(path, (*required, ids))
        missing = [name for name in required if name not in headers]
        if images in missing and prefix:
            raise NoTestImages(f"{path} has no test images: add the arrays {images} and {labels}")
        if missing:
            why = "; it names the classes, which are declared public" if "classes" in missing else ""
            raise DatalensError(f"{path} has no array {' and no array '.join(missing)}{why}")
        names = _arrays(path, {"classes": headers["classes"]})["classes"]
    shape = image_shape(headers[images].shape, headers[images].dtype, path)
    count = shape[0]
    check_label_shape(headers[labels].shape, headers[labels].dtype, count, path)
    classes = tuple(map(str, names.reshape(-1).tolist()))
    check_classes(classes, str(path))
    if not classes:
        raise DatalensError(f"{path} names no class: put the names into the array classes")
    if len(set(classes)) != len(classes):
        raise DatalensError(f"{path}: class names must be distinct")
    if ids in headers and headers[ids].shape != (count,):
        raise DatalensError(f"{path}: ids must be {count}, one for each image")
    public = schema_of(shape, path, classes, nominal_size, reading)

    def load() -> Dataset:
        with _damage_explained(path):
            arrays = _arrays(path, {name: headers[name] for name in (images, labels, ids) if name in headers})
        pixels = check_images(arrays[images], path)
        numbers = check_labels(arrays[labels], count, path)
        if numbers.max() >= len(classes):
            raise DatalensError(f"{path}: label {numbers.max()} has no name among the {len(classes)} classes")
        return Dataset(schema=public, images=pixels, labels=numbers, ids=arrays.get(ids))

    looked_at = "the headers of its arrays and the names of the classes"
    return OnDisk(schema=public, count=count, looked_at=looked_at, load=load)


@contextlib.contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into an error of one line."""
    try:
        yield
    except FileNotFoundError:
        raise DatalensError(f"{path} does not exist") from None
    except DatalensError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own kinds
        reason = one_line(error)
        raise DatalensError(f"{path} is not a readable .npz file ({reason})") from None


def _headers(path: Path, names: tuple[str, ...]) -> dict[str, Header]:
    """Return the headers of those of the arrays that the file has, and read no more of them.

    A header may claim anything, and a few kilobytes may unpack to terabytes; numpy would believe both. So a header must
    agree with the archive, and all these arrays must fit into memory.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            raise ValueError("it holds one array without a name")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = 0
    headers: dict[str, Header] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name not in names:
                continue
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
                start = stream.tell()
            claimed = start + math.prod(shape) * dtype.itemsize
            if claimed != member.file_size:
                raise ValueError(
                    f"the header of {member.filename} says {claimed} bytes, but there are {member.file_size}"
                )
            total += claimed
            headers[name] = Header(shape, dtype)
    if total > memory:
        raise DatalensError(f"{path} unpacks to {total / 2**30:.1f} GiB, more than the memory of this machine")
    return headers


def _arrays(path: Path, headers: dict[str, Header]) -> dict[str, np.ndarray]:
    """Return these arrays, each of the shape and type that its header had when the file was opened."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in headers}
    for name, array in arrays.items():
        if (array.shape, array.dtype) != (headers[name].shape, headers[name].dtype):
            raise ValueError(f"array {name} is not the one whose header was read: was the file changed?")
    return arrays
