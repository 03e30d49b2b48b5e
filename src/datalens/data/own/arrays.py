"""Records that are arrays already: what is checked of them, and what --image-size and --grayscale do to them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from datalens.data.own.reading import Reading, check_size
from datalens.data.pixels import fitted
from datalens.data.records import Block, Choose, Dataset, Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError


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

    @property
    def fixed_positions(self) -> bool:
        return self.records.fixed_positions

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


def schema_of(
    images: np.ndarray, path: Path, classes: tuple[str, ...], nominal_size: int, reading: Reading, *, note: str = ""
) -> Schema:
    """What is public of a file of images: their size and channels too."""
    _, height, width, channels = images.shape
    return Schema(
        name=path.name,
        height=height,
        width=width,
        channels=channels,
        classes=classes,
        nominal_size=nominal_size,
        record_unit=reading.unit,
        note=note,
    )
