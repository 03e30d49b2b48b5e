"""The user's own data as .npz: arrays `images`, `labels` and `classes` (and `test_images`, `test_labels`).

`ids`, if there, are stable names of the records: a record's share follows its id instead of its pixels.
`classes` names the classes, in the order of the labels: which classes there are is declared public, not read off
the labels, where one record could decide it.
"""

import math
import os
import zipfile
from pathlib import Path

import numpy as np

from datalens.data.own.arrays import check_images, check_labels, schema_of
from datalens.data.own.reading import Reading, check_classes
from datalens.data.records import Dataset
from datalens.data.regular import check_regular
from datalens.errors import DatalensError


def open_npz(path: Path, split: str, nominal_size: int, reading: Reading) -> Dataset:
    """--label and --record-id name other arrays than `labels` and `ids`."""
    prefix = "" if split == "train" else "test_"
    if reading.classes is not None:
        raise DatalensError(f"--classes: {path} names its classes itself, in the array classes; leave it out")
    check_regular(path)
    ids_name = f"{prefix}{reading.record_id or 'ids'}"
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        wanted = (f"{prefix}images", f"{prefix}{reading.label or 'labels'}", "classes")
        with file:
            _check_sizes(path, (*wanted, ids_name))
            needed = wanted if reading.record_id is None else (*wanted, ids_name)
            missing = [name for name in needed if name not in file]
            if missing:
                why = "; it names the classes, which are declared public" if "classes" in missing else ""
                raise DatalensError(f"{path} has no array {' and no array '.join(missing)}{why}")
            images, labels, names = (file[name] for name in wanted)
            ids = file.get(ids_name)
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
    check_classes(classes, str(path))
    if len(set(classes)) != len(classes):
        raise DatalensError(f"{path}: class names must be distinct")
    if ids is not None and ids.shape != (len(images),):
        raise DatalensError(f"{path}: ids must be {len(images)}, one an image")
    if labels.max() >= len(classes):
        raise DatalensError(f"{path}: label {labels.max()} has no name among the {len(classes)} classes")
    public = schema_of(images, path, classes, nominal_size, reading)
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
