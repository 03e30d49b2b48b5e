"""The user's own data. So far: .npz with arrays `images`, `labels` and `classes` (and `test_images`, `test_labels`).

`ids`, if there, are stable names of the records: a record's share follows its id instead of its pixels.
`classes` names the classes, in the order of the labels: which classes there are is declared public, not read off
the labels, where one record could decide it.
"""

import dataclasses
import math
import os
import zipfile
from pathlib import Path

import numpy as np

from datalens.datasets import sources
from datalens.datasets.records import Dataset, Records, collect
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError


def open_records(
    data: str, split: str = "train", *, nominal_size: int | None = None, folder: Path | str | None = None
) -> Records:
    """A named data set, or a file, as a stream of records: what training reads.

    `nominal_size` is what the owner declares: a file's true count is private. `folder`: where a set that cannot be
    downloaded lies; what of it is there is private too, so a nominal size may be declared with it.
    """
    _check(data, nominal_size, folder)
    if data.endswith(".npz"):
        if split == "train" and nominal_size is None:
            raise DatalensError(
                f"how many records {data} holds is private: declare a public round figure with --nominal-size"
            )
        return _load_npz(Path(data), split, nominal_size or 0)
    records = sources.open_records(data, split, data_folder=None if folder is None else Path(folder))
    return records if nominal_size is None else _declared(records, nominal_size)


def load(
    data: str, split: str = "train", *, nominal_size: int | None = None, folder: Path | str | None = None
) -> Dataset:
    """The same, all of it in memory: for test sets and small sets."""
    return collect(open_records(data, split, nominal_size=nominal_size, folder=folder))


def load_some(data: str, *, most: int, folder: Path | str | None = None) -> Dataset:
    """At most so many training records, drawn at random, in memory: enough to compare with as many synthetic ones."""
    nominal = 1 if data.endswith(".npz") else None  # nothing is planned by it here
    return collect(open_records(data, nominal_size=nominal, folder=folder), most=most)


def schema(data: str, *, nominal_size: int | None = None, folder: Path | str | None = None) -> Schema:
    """What is public. Of a named data set no file is touched for it."""
    if data.endswith(".npz"):
        return open_records(data, nominal_size=nominal_size, folder=folder).schema
    _check(data, nominal_size, folder)
    public = sources.schema(data)
    return public if nominal_size is None else dataclasses.replace(public, nominal_size=nominal_size)


def _check(data: str, nominal_size: int | None, folder: Path | str | None) -> None:
    if nominal_size is not None and nominal_size < 1:
        raise DatalensError(f"--nominal-size must be at least 1, not {nominal_size}")
    if data.endswith(".npz") and folder is not None:
        raise DatalensError(f"--data-folder is for named data sets: {data} is a file, leave it out")
    if not data.endswith(".npz") and nominal_size is not None and folder is None:
        raise DatalensError(
            "--nominal-size is for your own file, or with --data-folder: what a named data set holds is public"
        )


def _declared(records: Records, nominal_size: int) -> Records:
    public = dataclasses.replace(records.schema, nominal_size=nominal_size)
    return dataclasses.replace(records, schema=public)  # type: ignore[type-var]


def _load_npz(path: Path, split: str, nominal_size: int) -> Dataset:
    prefix = "" if split == "train" else "test_"
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        wanted = (f"{prefix}images", f"{prefix}labels", "classes")
        with file:
            _check_sizes(path, (*wanted, f"{prefix}ids"))
            missing = [name for name in wanted if name not in file]
            if missing:
                why = "; it names the classes, which are declared public" if "classes" in missing else ""
                raise DatalensError(f"{path} has no array {' and no array '.join(missing)}{why}")
            images, labels, names = (file[name] for name in wanted)
            ids = file.get(f"{prefix}ids")
            if not all(isinstance(part, np.ndarray) for part in (images, labels, names, ids) if part is not None):
                raise ValueError("not all of it is arrays")
    except FileNotFoundError:
        raise DatalensError(f"{path} does not exist") from None
    except DatalensError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own kinds for damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DatalensError(f"{path} is not a readable .npz file ({reason})") from None
    images, labels = check_images(images, path), check_labels(labels, len(images), path)
    classes = tuple(map(str, names.reshape(-1).tolist()))
    if len(set(classes)) != len(classes):
        raise DatalensError(f"{path}: class names must be distinct")
    if ids is not None and ids.shape != (len(images),):
        raise DatalensError(f"{path}: ids must be {len(images)}, one an image")
    if labels.max() >= len(classes):
        raise DatalensError(f"{path}: label {labels.max()} has no name among the {len(classes)} classes")
    _, height, width, channels = images.shape
    public = Schema(
        name=path.name, height=height, width=width, channels=channels, classes=classes, nominal_size=nominal_size
    )
    return Dataset(schema=public, images=images, labels=labels, ids=ids)


def _check_sizes(path: Path, names: tuple[str, ...]) -> None:
    """Before an array is read: its header must agree with the archive, and all must fit into memory.

    A header may say anything, and a few kilobytes may unpack to terabytes; numpy would believe both.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.removesuffix(".npy") not in names:
                continue
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
                head = stream.tell()
            said = head + math.prod(shape) * dtype.itemsize
            if said != member.file_size:
                raise ValueError(f"the header of {member.filename} says {said} bytes, but there are {member.file_size}")
            total += said
    if total > memory:
        raise DatalensError(f"{path} unpacks to {total / 2**30:.1f} GiB, more than the memory of this machine")


def check_images(images: np.ndarray, path: Path) -> np.ndarray:
    """uint8 [n, h, w, c], from uint8 or from floats in [0, 1]."""
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or 0 in images.shape:
        raise DatalensError(f"{path}: images must be [n, height, width] or [n, height, width, channels]")
    if images.shape[3] > 4:
        raise DatalensError(f"{path}: images have {images.shape[3]} channels; at most 4 can be shown and written")
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise DatalensError(f"{path}: images must be uint8, or floats in [0, 1], not {images.dtype}")
    if not np.isfinite(images).all():
        bad = int((~np.isfinite(images)).reshape(len(images), -1).any(axis=1).argmax())
        raise DatalensError(f"{path}: image {bad} holds NaN or infinity: mend or remove it first")
    if images.min() < 0 or images.max() > 1:
        raise DatalensError(f"{path}: float images must lie in [0, 1]; divide by 255, or save them as uint8")
    return np.rint(images * 255).astype(np.uint8)


def check_labels(labels: np.ndarray, count: int, path: Path) -> np.ndarray:
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise DatalensError(f"{path}: labels must be {count} whole numbers, one an image")
    if labels.min() < 0 or labels.max() >= 2**63:  # of which uint64 has more
        raise DatalensError(f"{path}: labels must be 0 or more, and less than there are classes")
    return labels.astype(np.int64)
