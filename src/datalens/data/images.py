"""Encoded images (JPEG, PNG) as a stream of records: decoded block by block, and only those that are wanted."""

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from datalens.data.records import Block, Choose, content_key, id_key, person_key
from datalens.data.schema import Schema
from datalens.errors import DatalensError

WORKERS = min(8, os.cpu_count() or 1)  # Pillow decodes outside Python's lock
CUT_BEFORE = (64, 64)  # of this size are the copies of CelebA that are passed on: the square is cut out already
MOST_PIXELS = 2**26  # of one image: a few kilobytes can claim any size, and each worker decodes one


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Some consecutive records, still encoded. `index` has gaps where records are not of the data set."""

    index: np.ndarray  # int64 [b]: position in the whole stream
    labels: np.ndarray  # int64 [b]
    ids: list[Any]  # stable names of the records, or whose they are; None: has none
    names: list[str]  # for messages
    read: Callable[[int], bytes]  # the bytes of the i-th of them


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRecords:
    """Records whose images are decoded as they are wanted, cropped at the centre and resized to the schema."""

    schema: Schema
    encoded: Callable[[], Iterator[Encoded]]
    crop: int | None = None  # side of the square that is cut out first; None: the largest there is
    decoder: Callable[[bytes, str], np.ndarray] | None = None  # in the place of `decode`, for the user's own files
    fixed_positions: bool = False  # True only where the images come from a list

    def blocks(self, choose: Choose) -> Iterator[Block]:
        shape = (self.schema.height, self.schema.width, self.schema.channels)
        with ThreadPoolExecutor(WORKERS) as pool:
            for some in self.encoded():
                if not len(some.index):
                    continue

                def decoded(i: int, some: Encoded = some) -> np.ndarray:
                    if self.decoder is not None:
                        return self.decoder(some.read(i), some.names[i])
                    return decode(some.read(i), some.names[i], self.schema, self.crop)

                def fill(rows: np.ndarray) -> None:
                    for row in rows.tolist():
                        images[row] = decoded(int(wanted[row]))  # noqa: B023 (done within the turn)

                def key(i: int, some: Encoded = some, decoded: Callable[[int], np.ndarray] = decoded) -> bytes:
                    if self.schema.by_person:
                        return person_key(some.ids[i], some.names[i])
                    return content_key(decoded(i)) if some.ids[i] is None else id_key(some.ids[i])

                share = choose(some.index, map(key, range(len(some.ids))))
                wanted = np.flatnonzero(share >= 0)
                images = np.empty((len(wanted), *shape), dtype=np.uint8)
                list(pool.map(fill, np.array_split(np.arange(len(wanted)), 4 * WORKERS)))
                yield Block(images=images, labels=some.labels[wanted], index=some.index[wanted], share=share[wanted])


def decode(data: bytes, name: str, schema: Schema, crop: int | None = None) -> np.ndarray:
    """uint8 [h, w, c]. An image that has the right size already is taken as it is."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels are more than the limit of 2^26")
            pixels = image.convert("RGB" if schema.channels == 3 else "L")
    except MemoryError:
        raise
    except Exception as error:  # Pillow has many kinds for damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DatalensError(f"{name} is not a readable image ({reason}): mend it, or leave that record out") from None
    goal = (schema.width, schema.height)
    if pixels.size != goal:
        square = pixels if pixels.size == CUT_BEFORE else _cut(pixels, name, crop)
        pixels = square.resize(goal, Image.Resampling.BILINEAR)
    return np.asarray(pixels).reshape(schema.height, schema.width, schema.channels)


def _cut(image: Image.Image, name: str, crop: int | None) -> Image.Image:
    """The square in the middle."""
    width, height = image.size
    side = min(width, height) if crop is None else crop
    if side > min(width, height):
        raise DatalensError(f"{name} is {width}x{height}, too small to cut {side}x{side} out of it")
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))
