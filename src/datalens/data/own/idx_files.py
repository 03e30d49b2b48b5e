"""The user's own idx files, named and laid out as those of MNIST."""

from pathlib import Path

import numpy as np

from datalens.data.idx import mapped
from datalens.data.own.arrays import check_labels, schema_of
from datalens.data.own.reading import ALL, NONE, Reading
from datalens.data.records import Dataset
from datalens.data.schema import READ_OFF
from datalens.errors import DatalensError

_TEST = ("t10k", "test")


def is_idx(path: Path) -> bool:
    return (path.is_dir() and any(path.glob("*-images*idx*"))) or (path.is_file() and "idx" in path.name)


def open_idx(path: Path, split: str, nominal_size: int, reading: Reading) -> Dataset:
    """`…images-idx3-ubyte`, or a folder with train-images… and t10k-images… in it; labels lie beside."""
    for option, value in (
        ("record-id", reading.record_id),
        ("label", reading.label if reading.label != NONE else None),
    ):
        if value is not None:
            raise DatalensError(
                f"--{option}: idx files have no columns; name a .csv, .parquet or .npz file with --data"
            )
    file = _images_of(path, split)
    images = mapped(file, (3, 4))
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.shape[3] not in (1, 3):
        raise DatalensError(f"{file}: images have {images.shape[3]} channels, not 1 or 3")
    classes: tuple[str, ...] = (ALL,)
    labels, note = np.zeros(len(images), np.int64), ""
    if reading.label != NONE:
        beside = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
        if not beside.is_file() or beside == file:
            raise DatalensError(
                f"{file} has no labels beside it ({beside.name}): put them there, or add --label {NONE}"
            )
        labels = check_labels(np.array(mapped(beside, (1,))), len(images), beside)
        classes = reading.named_classes() or tuple(str(i) for i in range(int(labels.max()) + 1))
        if labels.max() >= len(classes):
            raise DatalensError(f"{beside}: label {labels.max()} has no name among the {len(classes)} of --classes")
        if reading.classes is None:
            note = f"{READ_OFF}: the classes (the largest label)"
    public = schema_of(images, path, classes, nominal_size, reading, note=note)
    return Dataset(schema=public, images=images, labels=labels)


def _images_of(path: Path, split: str) -> Path:
    if not path.is_dir():
        if split == "train":
            return path
        folder, name = path.parent, path.name
        found = [folder / name.replace("train", one) for one in _TEST if "train" in name]
    elif split == "train":
        found = sorted(path.glob("train-images*idx*")) or sorted(path.glob("*-images*idx*"))
    else:
        found = [file for one in _TEST for file in sorted(path.glob(f"{one}-images*idx*"))]
    there = [file for file in found if file.is_file()]
    if not there:
        raise DatalensError(f"{path} has no test images: put t10k-images-idx3-ubyte and its labels beside it")
    return there[0]
