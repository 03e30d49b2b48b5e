"""Records that are arrays already: which arrays are accepted, and the effect of --image-size and --grayscale."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from datalens.data.own.reading import Reading, check_size
from datalens.data.pixels import fitted
from datalens.data.records import Block, Choose, OnDisk, Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError


def shaped(records: OnDisk, reading: Reading) -> Records:
    """Apply --image-size and --grayscale, block by block, so that the converted images are never all in memory."""
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
    """Records of arrays, converted to the size and channels of `schema` as they are read."""

    schema: Schema
    records: OnDisk

    @property
    def fixed_positions(self) -> bool:
        return self.records.fixed_positions

    @property
    def looked_at(self) -> str:
        return self.records.looked_at

    def blocks(self, choose: Choose) -> Iterator[Block]:
        shape = (self.schema.height, self.schema.width, self.schema.channels)
        for block in self.records.blocks(choose):
            images = np.empty((len(block.images), *shape), dtype=np.uint8)
            for i, image in enumerate(block.images):
                picture = Image.fromarray(image.squeeze(axis=2) if image.shape[2] == 1 else image)
                picture = picture.convert("L") if shape[2] == 1 else picture
                images[i] = np.asarray(fitted(picture, (shape[1], shape[0]))).reshape(shape)
            yield dataclasses.replace(block, images=images)


def image_shape(shape: tuple[int, ...], dtype: "np.dtype[Any]", where: object) -> tuple[int, int, int, int]:
    """Return [n, height, width, channels] of an array of images, from its shape and type alone.

    Raises:
        DatalensError: images cannot have this shape or type.
    """
    if len(shape) == 3:
        shape = (*shape, 1)
    if len(shape) != 4 or 0 in shape:
        raise DatalensError(f"{where}: images must be [n, height, width] or [n, height, width, channels]")
    if shape[3] > 4:
        raise DatalensError(f"{where}: images have {shape[3]} channels; at most 4 can be shown and written")
    if dtype != np.uint8 and not np.issubdtype(dtype, np.floating):
        raise DatalensError(f"{where}: images must be uint8, or floats in [0, 1], not {dtype}")
    count, height, width, channels = shape
    return count, height, width, channels


def check_images(images: np.ndarray, where: object) -> np.ndarray:
    """Return images as uint8 [n, h, w, c], from uint8 or from floats in [0, 1].

    Raises:
        DatalensError: they are something else.
    """
    images = images.reshape(image_shape(images.shape, images.dtype, where))
    if images.dtype == np.uint8:
        return images
    if not np.isfinite(images).all():
        bad = int((~np.isfinite(images)).reshape(len(images), -1).any(axis=1).argmax())
        raise DatalensError(f"{where}: image {bad} holds NaN or infinity: mend or remove it first")
    if images.min() < 0 or images.max() > 1:
        raise DatalensError(f"{where}: float images must lie in [0, 1]; divide by 255, or save them as uint8")
    return np.rint(images * 255).astype(np.uint8)


def check_label_shape(shape: tuple[int, ...], dtype: "np.dtype[Any]", count: int, where: object) -> None:
    """Raise unless an array of this shape and type can hold one whole number for each of `count` images."""
    if shape != (count,) or not np.issubdtype(dtype, np.integer):
        raise DatalensError(f"{where}: labels must be {count} whole numbers, one for each image")


def check_labels(labels: np.ndarray, count: int, where: object) -> np.ndarray:
    """Return the labels of `count` images as int64 [n].

    Raises:
        DatalensError: they are not whole numbers from 0 on, one for each image.
    """
    check_label_shape(labels.shape, labels.dtype, count, where)
    if labels.min() < 0 or labels.max() >= 2**63:  # uint64 has larger numbers than int64
        raise DatalensError(f"{where}: labels must be 0 or more, and less than the number of classes")
    return labels.astype(np.int64)


def schema_of(
    shape: tuple[int, int, int, int],
    path: Path,
    classes: tuple[str, ...],
    nominal_size: int,
    reading: Reading,
    *,
    note: str = "",
) -> Schema:
    """Return the public facts about a file of images, whose array has this shape; size and channels are among them."""
    _, height, width, channels = shape
    return Schema(
        name=path.name,
        height=height,
        width=width,
        channels=channels,
        classes=reading.shown(classes),
        nominal_size=nominal_size,
        record_unit=reading.unit,
        note=note,
    )
