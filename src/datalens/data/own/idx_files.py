"""The user's own idx files, named and laid out as those of MNIST."""

from pathlib import Path

import numpy as np

from datalens.data.idx import mapped
from datalens.data.own.arrays import check_label_shape, check_labels, schema_of
from datalens.data.own.reading import ALL, NONE, Reading
from datalens.data.records import Dataset, OnDisk
from datalens.data.schema import READ_OFF
from datalens.errors import DatalensError, NoTestImages

_TEST = ("t10k", "test")


def is_idx(path: Path) -> bool:
    return (path.is_dir() and any(path.glob("*-images*idx*"))) or (path.is_file() and "idx" in path.name)


def open_idx(path: Path, split: str, nominal_size: int, reading: Reading) -> OnDisk:
    """Open `…images-idx3-ubyte`, or a folder with train-images… and t10k-images… in it, with labels beside the images.

    The header of the images is read; and all labels, where the classes are not declared and so follow from the largest.

    Raises:
        DatalensError: a file is missing or damaged, labels and images do not fit, or an option does not apply to idx.
    """
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
    count, height, width, channels = images.shape
    if channels not in (1, 3):
        raise DatalensError(f"{file}: images have {channels} channels, not 1 or 3")
    classes: tuple[str, ...] = (ALL,)
    labels: np.ndarray | None = np.zeros(count, np.int64)
    beside, note, looked_at = file, "", "the header of the images"
    if reading.label != NONE:
        beside = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
        if not beside.is_file() or beside == file:
            raise DatalensError(
                f"{file} has no labels beside it ({beside.name}): put them there, or add --label {NONE}"
            )
        declared = reading.named_classes()
        if reading.classes is None and declared is not None and declared != tuple(map(str, range(len(declared)))):
            raise DatalensError(f"--class-names must name the labels of {beside} from 0 on, none left out: 0=…,1=…")
        if declared is None:
            labels = _labels(beside, count)
            classes = tuple(str(i) for i in range(int(labels.max()) + 1))
            note = f"{READ_OFF}: the classes (the largest label)"
            looked_at += " and all labels, of which the largest says how many classes there are"
        else:
            labels, classes = None, declared  # and no label is read before the records are
            stored = mapped(beside, (1,))
            check_label_shape(stored.shape, stored.dtype, count, beside)
            looked_at += " and that of the labels"
    public = schema_of((count, height, width, channels), path, classes, nominal_size, reading, note=note)

    def load() -> Dataset:
        numbers = _labels(beside, count) if labels is None else labels
        if numbers.max() >= len(classes):
            raise DatalensError(f"{beside}: label {numbers.max()} has no name among the {len(classes)} of --classes")
        return Dataset(schema=public, images=images, labels=numbers)

    return OnDisk(schema=public, count=count, looked_at=looked_at, load=load)


def _labels(file: Path, count: int) -> np.ndarray:
    return check_labels(np.array(mapped(file, (1,))), count, file)


def _images_of(path: Path, split: str) -> Path:
    """Return the file with the images of a split."""
    if not path.is_dir():
        if split == "train":
            return path
        folder, name = path.parent, path.name
        candidates = [folder / name.replace("train", test) for test in _TEST if "train" in name]
    elif split == "train":
        candidates = sorted(path.glob("train-images*idx*")) or sorted(path.glob("*-images*idx*"))
    else:
        candidates = [file for test in _TEST for file in sorted(path.glob(f"{test}-images*idx*"))]
    present = [file for file in candidates if file.is_file()]
    if not present:
        raise NoTestImages(f"{path} has no test images: put t10k-images-idx3-ubyte and its labels beside it")
    return present[0]
