"""A classifier's answers on held-out records, as ballots on two questions.

| question | a record chooses |
|---|---|
| the table | the cell (true class, guessed class) |
| the counts | right, or wrong |

The second repeats what the first says. It is asked since a sum of all the table's right cells has the noise of each.

One privacy unit casts one ballot. A person with several images casts that of one image, which is chosen by a hash of
the images alone. Each image is classified by itself, so a ballot is a function of one unit and of the classifier,
whoever else is held out.
"""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

from datalens.bounded.contributions import Ballots, VoteCounts, count_ballots
from datalens.data.records import Dataset, Records, record_keys
from datalens.errors import DatalensError
from datalens.private.moments import fingerprint_of, person_hash, persons_of
from datalens.private.shares import FINGERPRINT_MODULUS, block_fingerprint
from datalens.progress import bar

Classify = Callable[[np.ndarray], int]  # one image, uint8 [h, w, c] → the number of a class


def answers(held_out: Dataset, classify: Classify, *, about: int | None = None) -> VoteCounts:
    """Return the answers, [2, classes²]: each unit adds one to one cell of the table, and one to one of two counts.

    Row 0 is the table. Row 1 begins with the counts of right and of wrong answers; the rest of it is zero.

    Args:
        held_out: the records.
        classify: the classifier, a function of released values only.
        about: about how many units answer, a public number; for the progress that is shown.

    Raises:
        DatalensError: persons are the units, and records have no ids.
    """
    schema, classes = held_out.schema, len(held_out.schema.classes)
    chosen = ballots_of(held_out)
    choices = np.empty((len(chosen), 2), dtype=np.int64)
    with bar("held-out images", about, private=True) as (progress, task):
        for number, index in enumerate(chosen):
            label, guess = int(held_out.labels[index]), classify(held_out.images[index])
            choices[number] = label * classes + guess, label != guess
            progress.advance(task)
    ballots = Ballots(teachers=torch.from_numpy(chosen), choices=torch.from_numpy(choices))
    return count_ballots([ballots], answers=classes**2, row_unit="person" if schema.by_person else "record")


def ballots_of(held_out: Dataset) -> np.ndarray:
    """Return the numbers of the images that answer, int64: all of them, or one of each person."""
    if not held_out.schema.by_person:
        return np.arange(len(held_out.images), dtype=np.int64)
    if held_out.ids is None:
        raise DatalensError("to protect persons, every held-out image needs an id that says whose it is: --record-id")
    first: dict[bytes, tuple[bytes, int]] = {}
    for index, key in enumerate(person_keys(held_out)):
        label = np.int64(held_out.labels[index]).tobytes()
        rank = hashlib.sha256(label + np.ascontiguousarray(held_out.images[index]).tobytes()).digest()
        first[key] = min(first.get(key, (rank, index)), (rank, index))
    return np.array(sorted(index for _, index in first.values()), dtype=np.int64)


def person_keys(records: Dataset) -> list[bytes]:
    """Return the key of the person of each record."""
    ids = records.ids
    if ids is not None and all(isinstance(one, bytes) and one.startswith(b"id:") for one in ids.tolist()):
        return list(ids)  # `records.collect` has made keys of them
    return list(record_keys(records.images, ids, by_person=True))


def units_of(records: Records) -> tuple[set[bytes], set[int]]:
    """Return what tells privacy units apart, and the records' fingerprints, from one pass over the stream. Private.

    A unit is told by the person's id, or by the image's pixels. The fingerprints are those of `RecordRows` and `Pool`:
    a run that was trained on these records has one of them, unless its method counts records by teacher.
    """
    by_person = records.schema.by_person
    units: set[bytes] = set()
    hashes = bytearray()  # of persons, in the order in which the stream asks for them
    of_rows = of_pool = asked = 0

    def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        nonlocal asked
        if by_person:
            names = list(keys)
            units.update(names)
            hashes.extend(b"".join(map(person_hash, names)))
        asked += len(index)
        return np.arange(asked - len(index), asked, dtype=np.int64)

    with bar("training records", records.schema.nominal_size, private=True) as (progress, task):
        for block in records.blocks(everyone):
            of_rows += fingerprint_of(block, persons_of(block, hashes))
            of_pool += block_fingerprint(block)
            units |= set() if by_person else set(map(pixel_hash, block.images))
            progress.advance(task, len(block.index))
    return units, {of_rows % FINGERPRINT_MODULUS, of_pool % FINGERPRINT_MODULUS}


def in_both(held_out: Dataset, training: set[bytes]) -> int:
    """Return how many held-out images have a privacy unit that is among the training ones (`units_of`). Private."""
    units = person_keys(held_out) if held_out.schema.by_person else map(pixel_hash, held_out.images)
    return sum(unit in training for unit in units)


def pixel_hash(image: np.ndarray) -> bytes:
    """Return a hash of an image's pixels."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
