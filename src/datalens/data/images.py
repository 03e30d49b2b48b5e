"""Encoded images (JPEG, PNG) as a stream of records: block by block, and only the chosen ones are decoded."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datalens.data.pixels import checked_kind, decode
from datalens.data.records import Block, Choose, content_key, id_key, person_key
from datalens.data.schema import Schema
from datalens.errors import UnreadableImage

WORKERS = min(8, os.cpu_count() or 1)  # Pillow decodes outside Python's lock


Listed = Callable[[], Iterator[tuple[np.ndarray, list[Any] | None]]]  # labels [b], and ids, if there are any


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Some consecutive records, still encoded. `index` has gaps where a record does not belong to the data set."""

    index: np.ndarray  # int64 [b]: position in the whole stream
    labels: np.ndarray  # int64 [b]
    ids: list[Any]  # a stable name of each record, or the person whose it is; None: the record has none
    names: list[str]  # for messages
    read: Callable[[int], bytes]  # returns the bytes of the i-th record


def readable(blocks: Iterator[Encoded], skipped: set[str]) -> Iterator[Encoded]:
    """Yield the records whose image can be decoded, at their positions, and add the names of the others to `skipped`.

    Each record is judged by its own bytes alone, so leaving one out changes no other record.
    """

    def whole(some: Encoded, i: int) -> bool:
        try:
            checked_kind(some.read(i), some.names[i])
        except UnreadableImage:
            return False
        return True

    with ThreadPoolExecutor(WORKERS) as pool:
        for some in blocks:
            fine = np.fromiter(pool.map(lambda i, some=some: whole(some, i), range(len(some.index))), bool)
            kept = np.flatnonzero(fine).tolist()
            skipped.update(some.names[i] for i in np.flatnonzero(~fine).tolist())
            yield Encoded(
                index=some.index[fine],
                labels=some.labels[fine],
                ids=[some.ids[i] for i in kept],
                names=[some.names[i] for i in kept],
                read=lambda i, some=some, kept=kept: some.read(kept[i]),  # type: ignore[misc]
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRecords:
    """Records whose images are decoded when they are chosen, cropped at the centre and resized to the schema.

    Attributes:
        encoded: yields the records, still encoded.
        crop: side of the square that is cut out first; None: the largest possible one.
        decoder: used instead of `decode` for the user's own files.
        looked_at: what was read of the user's own files to know the schema, in words.
        listed: yields labels and ids of the user's own images without reading an image; None: it would take too long.
        fixed_positions: whether the images come from a list (`records.Records`).
        record_id: whose each image is, where the files themselves say it and no option did.
        skipped: names of unreadable files that were left out so far (--skip-unreadable). Private.
    """

    schema: Schema
    encoded: Callable[[], Iterator[Encoded]]
    crop: int | None = None
    decoder: Callable[[bytes, str], np.ndarray] | None = None
    looked_at: str = ""
    listed: Listed | None = None
    fixed_positions: bool = False
    record_id: str | None = None
    skipped: set[str] = field(default_factory=set)

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
