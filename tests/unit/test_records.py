"""Records as a stream: blocks of what is in memory, and drawing some into memory."""

from collections.abc import Iterable

import numpy as np
import pytest

from datalens.data import records
from datalens.data.own.python import from_arrays
from datalens.data.records import Block, Choose, Dataset, Records, collect, record_keys
from datalens.data.schema import Schema
from datalens.errors import DatalensError

SCHEMA = Schema(name="s", height=2, width=3, channels=1, classes=("a", "b"), nominal_size=50)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 2, 3, 1), dtype=np.uint8)
LABELS = RNG.integers(0, 2, 50)
WHOLE = Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS)


class Stream:
    """The same records, every third left out (as by a set that takes some classes only), behind a stream."""

    schema = SCHEMA
    kept = np.flatnonzero(np.arange(50) % 3 > 0)

    def blocks(self, choose: Choose) -> Iterable[Block]:
        for index in np.array_split(self.kept, 7):
            share = choose(index, record_keys(IMAGES[index], None))
            index, share = index[share >= 0], share[share >= 0]
            yield Block(images=IMAGES[index], labels=LABELS[index], index=index, share=share)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_RECORDS", 8)


def by_parity(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
    return np.where(index % 2 == 0, index, -1)


@pytest.mark.usefixtures("small_blocks")
def test_a_data_set_in_memory_is_a_stream_of_blocks() -> None:
    stream: Records = WHOLE
    blocks = list(stream.blocks(by_parity))
    assert len(blocks) == 7
    assert max(len(block.index) for block in blocks) == 4
    index = np.concatenate([block.index for block in blocks])
    np.testing.assert_array_equal(index, np.arange(0, 50, 2))
    np.testing.assert_array_equal(np.concatenate([block.share for block in blocks]), index)
    np.testing.assert_array_equal(np.concatenate([block.images for block in blocks]), IMAGES[index])
    np.testing.assert_array_equal(np.concatenate([block.labels for block in blocks]), LABELS[index])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ids", [None, np.arange(100, 150)])
def test_keys_are_those_of_the_whole(ids: np.ndarray | None) -> None:
    seen: list[bytes] = []

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        seen.extend(keys)
        return np.full(len(index), -1)

    assert sum(len(b.index) for b in Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS, ids=ids).blocks(choose)) == 0
    assert seen == list(record_keys(IMAGES, ids))
    assert seen[3] == (b"content:" + IMAGES[3].tobytes() if ids is None else b"id:103")


def test_blocks_of_large_images_are_small() -> None:
    wide = Schema(name="s", height=512, width=512, channels=3, classes=("a",), nominal_size=1)
    assert records.block_records(SCHEMA) == records.BLOCK_RECORDS
    assert records.block_records(wide) * wide.dimensions <= records.BLOCK_BYTES


def test_collect_takes_all() -> None:
    assert collect(WHOLE) is WHOLE
    all_of_it = collect(Stream())
    np.testing.assert_array_equal(all_of_it.images, IMAGES[Stream.kept])
    np.testing.assert_array_equal(all_of_it.labels, LABELS[Stream.kept])


def test_collect_draws_the_same_few_from_memory_and_from_a_stream() -> None:
    kept = Dataset(schema=SCHEMA, images=IMAGES[Stream.kept], labels=LABELS[Stream.kept])
    expected = np.random.default_rng(0).choice(len(Stream.kept), 10, replace=False)
    for source in (kept, Stream()):
        some = collect(source, most=10)
        np.testing.assert_array_equal(some.images, kept.images[expected])
        np.testing.assert_array_equal(some.labels, kept.labels[expected])
    np.testing.assert_array_equal(collect(Stream(), most=1000).images, kept.images)


def test_nothing_to_collect_is_an_error() -> None:
    class Nothing(Stream):
        kept = np.arange(0)

    for most in (None, 5):
        with pytest.raises(DatalensError, match="s has no record here"):
            collect(Nothing(), most=most)


# --- data sets that are read item by item -----------------------------------------------------------------------------


class Items:
    """A data set of (image, label) pairs with a transform."""

    def __init__(self, images, transform, labels=None):
        self.images, self.transform = images, transform
        self.labels = np.zeros(len(images), int) if labels is None else labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.transform(self.images[number]), int(self.labels[number])


class Alone(Items):
    """The same without labels."""

    def __getitem__(self, number):
        return self.transform(self.images[number])


class Columns:
    """As a Hugging Face data set with a transform has them."""

    column_names = ("image", "label")
    features = {"image": object(), "label": object()}  # noqa: RUF012

    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __getitem__(self, name):
        return [self.transform(image) for image in self.images] if name == "image" else [0] * len(self.images)


def shifted_by_a_stream(seed=0):
    random = np.random.default_rng(seed)
    return lambda image: np.roll(image, random.integers(1, 8), axis=0)


def shifted_by_a_counter():
    """No randomness at all: which of seven shifts a record gets is how many were read before it."""
    read = 0

    def transform(image):
        nonlocal read
        read += 1
        return np.roll(image, read % 7, axis=0)

    return transform


def into_one_buffer():
    """Every item is the same array, written anew: what was read first must have been copied."""
    buffer, random = np.zeros((8, 8), np.uint8), np.random.default_rng(0)

    def transform(image):
        buffer[:] = np.roll(image, random.integers(1, 8), axis=0)
        return buffer

    return transform


RANDOM = {"stream": shifted_by_a_stream, "counter": shifted_by_a_counter, "buffer": into_one_buffer}
PICTURES = np.random.default_rng(2).integers(0, 256, (200, 8, 8), dtype=np.uint8)


@pytest.mark.parametrize("kind", [Items, Alone, Columns])
@pytest.mark.parametrize("transform", RANDOM.values(), ids=RANDOM.keys())
def test_a_data_set_that_changes_as_it_is_read_is_refused(kind, transform):
    with pytest.raises(DatalensError, match="differs when it is read again: leave random transforms out"):
        from_arrays(kind(PICTURES, transform()), nominal_size=200)


@pytest.mark.parametrize("kind", [Items, Alone, Columns])
def test_one_that_does_not_change_is_read(kind):
    found = from_arrays(kind(PICTURES, lambda image: np.roll(image, 3, axis=0)), nominal_size=200)
    assert np.array_equal(found.images[..., 0], np.roll(PICTURES, 3, axis=1))


def test_labels_that_change_are_refused():
    random = np.random.default_rng(0)

    class Relabelled(Items):
        def __getitem__(self, number):
            return self.images[number], int(random.integers(10**6))

    with pytest.raises(DatalensError, match="differs when it is read again"):
        from_arrays(Relabelled(PICTURES, None), nominal_size=200)


def test_a_missing_label_is_not_a_changing_one():
    class Missing(Columns):
        def __getitem__(self, name):
            return super().__getitem__(name) if name == "image" else [0.0, 1.0, float("nan")]

    with pytest.raises(DatalensError, match="image 2 has no label"):
        from_arrays(Missing(PICTURES[:3], lambda image: image), nominal_size=3)


def test_why_they_are_refused():
    """Read once, as it came, most other records change when the first one goes."""

    def read_once(images):
        items = Items(images, shifted_by_a_stream())
        return [items[number][0] for number in range(len(items))]

    there, gone = read_once(PICTURES)[1:], read_once(PICTURES[1:])
    assert sum(not np.array_equal(a, b) for a, b in zip(there, gone, strict=True)) > 90


def test_pairs_beside_images_alone_are_refused():
    class Mixed(Items):
        def __getitem__(self, number):
            return super().__getitem__(number) if number else self.images[number]

    with pytest.raises(DatalensError, match="not of both"):
        from_arrays(Mixed(PICTURES, lambda image: image), nominal_size=200)
