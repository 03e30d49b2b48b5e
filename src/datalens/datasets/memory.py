"""Records that are arrays already, from Python or torch; and what --image-size and --grayscale do to them."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from datalens.datasets.own import ALL, Reading, check_classes, check_size
from datalens.datasets.pixels import fitted
from datalens.datasets.records import Block, Choose, Dataset, Records
from datalens.datasets.schema import IMAGE, PERSON, READ_OFF, Schema
from datalens.errors import DatalensError


def from_arrays(
    images: Any,
    labels: Any = None,
    *,
    nominal_size: int,
    classes: Sequence[str] | None = None,
    ids: Any = None,
    by_person: bool = False,
    name: str = "arrays",
) -> Dataset:
    """Images [n, h, w] or [n, h, w, c] (a torch tensor: [n, c, h, w]), uint8 or floats in [0, 1], as records.

    labels: whole numbers, or names; none: all are of one class. classes: in the order of the numbers, declared public;
    left out, they are read off the labels, and the schema says so. ids: of the records; with `by_person`, of the
    persons whose images they are, and a person is then what is protected, and what `nominal_size` counts.
    """
    if hasattr(images, "permute") and images.ndim == 4:
        images = images.permute(0, 2, 3, 1)
    pixels = check_images(np.asarray(images), name)
    numbers, names, note = _labelled(labels, classes, len(pixels), name)
    if by_person and ids is None:
        raise DatalensError(f"{name}: give ids, one an image, to protect the persons whose images they are")
    ids = None if ids is None else np.asarray(ids)
    if ids is not None and ids.shape != (len(pixels),):
        raise DatalensError(f"{name}: ids must be {len(pixels)}, one an image")
    if nominal_size < 1:
        raise DatalensError(f"nominal_size must be at least 1, not {nominal_size}")
    _, height, width, channels = pixels.shape
    schema = Schema(
        name=name,
        height=height,
        width=width,
        channels=channels,
        classes=names,
        nominal_size=nominal_size,
        record_unit=PERSON if by_person else IMAGE,
        note=note,
    )
    return Dataset(schema=schema, images=pixels, labels=numbers, ids=ids)


def _labelled(
    labels: Any, classes: Sequence[str] | None, count: int, name: str
) -> tuple[np.ndarray, tuple[str, ...], str]:
    """Numbers, the names of the classes, and what a certificate must say about these."""
    if labels is None:
        return np.zeros(count, np.int64), (ALL,), ""
    given = np.asarray(labels)
    names = None if classes is None else tuple(str(one) for one in classes)
    if given.dtype.kind in "OUS" and given.shape == (count,):
        found = names or tuple(sorted({str(one) for one in given.tolist()}))
        number = {one: i for i, one in enumerate(found)}
        strange = next((one for one in given.tolist() if str(one) not in number), None)
        if strange is not None:
            raise DatalensError(f"{name}: label {strange!r} is not among the classes")
        numbers = np.array([number[str(one)] for one in given.tolist()], dtype=np.int64)
    else:
        numbers = check_labels(given, count, name)
        found = names or tuple(str(i) for i in range(int(numbers.max()) + 1))
    if len(set(found)) != len(found) or numbers.max() >= len(found):
        raise DatalensError(f"{name}: every label needs a class of its own name, and there are {len(found)} classes")
    check_classes(found, f"{name}: labels")
    note = f"{READ_OFF}: the classes (the labels)"
    return numbers, found, note if names is None else ""


def from_torch_dataset(
    dataset: Any, *, nominal_size: int, classes: Sequence[str] | None = None, name: str | None = None, **how: Any
) -> Dataset:
    """A torch.utils.data.Dataset of (image, label), or of images alone; read once, into memory.

    An image is a tensor [c, h, w], an array [h, w] or [h, w, c], or a PIL image; all of one size. `dataset.classes` are
    the classes, unless others are given.
    """
    images, labels = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        image, label = item[:2] if isinstance(item, tuple | list) else (item, None)
        array = np.asarray(image.permute(1, 2, 0) if hasattr(image, "permute") and image.ndim == 3 else image)
        images.append(array[..., np.newaxis] if array.ndim == 2 else array)
        labels.append(label if label is None or isinstance(label, str) else int(label))
    name = name or type(dataset).__name__
    if not images:
        raise DatalensError(f"{name} holds no image")
    if len({(image.shape, image.dtype) for image in images}) > 1:
        raise DatalensError(f"{name}: images differ in size or kind: bring them to one in the data set's transform")
    if classes is None:
        classes = getattr(dataset, "classes", None)
    return from_arrays(
        np.stack(images),
        None if None in labels else labels,
        nominal_size=nominal_size,
        classes=classes,
        name=name,
        **how,
    )


def shaped(records: Dataset, reading: Reading) -> Records:
    """As --image-size and --grayscale ask; block by block, so nothing is held."""
    size = reading.size() or (records.schema.height, records.schema.width)
    channels = 1 if reading.grayscale else records.schema.channels
    if (*size, channels) == (records.schema.height, records.schema.width, records.schema.channels):
        return records
    check_size(size)
    if records.schema.channels not in (1, 3):
        raise DatalensError(f"{records.schema.name}: --image-size and --grayscale are for images of 1 or 3 channels")
    public = dataclasses.replace(records.schema, height=size[0], width=size[1], channels=channels)
    return Reshaped(schema=public, records=records)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reshaped:
    schema: Schema
    records: Dataset

    def blocks(self, choose: Choose) -> Iterator[Block]:
        shape = (self.schema.height, self.schema.width, self.schema.channels)
        for block in self.records.blocks(choose):
            images = np.empty((len(block.images), *shape), dtype=np.uint8)
            for i, image in enumerate(block.images):
                picture = Image.fromarray(image.squeeze(axis=2) if image.shape[2] == 1 else image)
                picture = picture.convert("L") if shape[2] == 1 else picture
                images[i] = np.asarray(fitted(picture, (shape[1], shape[0]))).reshape(shape)
            yield dataclasses.replace(block, images=images)


def check_images(images: np.ndarray, where: object) -> np.ndarray:
    """uint8 [n, h, w, c], from uint8 or from floats in [0, 1]."""
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or 0 in images.shape:
        raise DatalensError(f"{where}: images must be [n, height, width] or [n, height, width, channels]")
    if images.shape[3] > 4:
        raise DatalensError(f"{where}: images have {images.shape[3]} channels; at most 4 can be shown and written")
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise DatalensError(f"{where}: images must be uint8, or floats in [0, 1], not {images.dtype}")
    if not np.isfinite(images).all():
        bad = int((~np.isfinite(images)).reshape(len(images), -1).any(axis=1).argmax())
        raise DatalensError(f"{where}: image {bad} holds NaN or infinity: mend or remove it first")
    if images.min() < 0 or images.max() > 1:
        raise DatalensError(f"{where}: float images must lie in [0, 1]; divide by 255, or save them as uint8")
    return np.rint(images * 255).astype(np.uint8)


def check_labels(labels: np.ndarray, count: int, where: object) -> np.ndarray:
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise DatalensError(f"{where}: labels must be {count} whole numbers, one an image")
    if labels.min() < 0 or labels.max() >= 2**63:  # of which uint64 has more
        raise DatalensError(f"{where}: labels must be 0 or more, and less than there are classes")
    return labels.astype(np.int64)
