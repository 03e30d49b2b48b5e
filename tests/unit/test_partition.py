"""One record, one teacher, whatever the other records are: one property check, run on ours and on broken twins."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from datalens.errors import DatalensError
from datalens.private.partition import Partition, balanced, check_enough, hashed, record_keys

SALT = b"a salt"
TEACHERS = 7


@dataclass(frozen=True, kw_only=True)
class Record:
    """An image of four pixels with an id and a label."""

    id: int
    pixels: bytes
    label: int


Shares = dict[int, list[int]]  # record id → the teachers that see it (a right partition: exactly one)
Partitioner = Callable[[list[Record]], Shares]


def some_records(count: int, *, seed: int = 0) -> list[Record]:
    rng = np.random.default_rng(seed)
    return [
        Record(id=1000 + i, pixels=i.to_bytes(2, "big") + rng.bytes(2), label=int(rng.integers(0, 3)))
        for i in range(count)
    ]


def shares_of(partition: Partition, records: list[Record]) -> Shares:
    """What each teacher is really given: its slice of `order`, cut by `sizes`."""
    shares: Shares = defaultdict(list)
    ends = np.cumsum(partition.sizes)
    for teacher in range(partition.teachers):
        for position in partition.order[ends[teacher] - partition.sizes[teacher] : ends[teacher]]:
            shares[records[position].id].append(teacher)
    return shares


def by_id(records: list[Record], *, salt: bytes = SALT) -> Shares:
    keys = record_keys(_images(records), np.array([r.id for r in records]))
    return shares_of(hashed(keys, teachers=TEACHERS, salt=salt), records)


def by_content(records: list[Record]) -> Shares:
    return shares_of(hashed(record_keys(_images(records), None), teachers=TEACHERS, salt=SALT), records)


def _images(records: list[Record]) -> np.ndarray:
    return np.frombuffer(b"".join(r.pixels for r in records), dtype=np.uint8).reshape(-1, 2, 2, 1)


def violations(partitioner: Partitioner, records: list[Record]) -> set[str]:
    """Every way in which one record could touch more than one teacher's row."""
    found = set()
    shares = partitioner(records)
    if any(len(shares.get(r.id, [])) == 0 for r in records):
        found.add("dropped")
    if any(len(shares.get(r.id, [])) > 1 for r in records):
        found.add("in two shares")

    def others_moved(changed: list[Record], unit: int | None) -> bool:
        now = partitioner(changed)
        return any(r.id != unit and sorted(now.get(r.id, [])) != sorted(shares.get(r.id, [])) for r in records)

    for at in range(0, len(records), 5):
        gone = records[:at] + records[at + 1 :]
        if others_moved(gone, records[at].id):
            found.add("moves when another record goes")
        relabelled = [*records[:at], replace(records[at], label=records[at].label + 1), *records[at + 1 :]]
        if others_moved(relabelled, records[at].id):
            found.add("moves when another record is relabelled")
        if others_moved(relabelled, None):
            found.add("depends on its own label")
    if others_moved([records[i] for i in np.random.default_rng(1).permutation(len(records))], None):
        found.add("depends on its position")
    newcomer = Record(id=1, pixels=b"\xff" * 4, label=0)
    if others_moved([newcomer, *records], newcomer.id):
        found.add("moves when another record comes")
    return found


# --- broken twins ---------------------------------------------------------------------------------------------------


def authors_round_robin(records: list[Record]) -> Shares:
    """Defects 1 and 2 of the authors' code: as much of each class for each teacher, around again at the end."""
    shares: Shares = defaultdict(list)
    classes = sorted({r.label for r in records})
    size = -(-len(records) // TEACHERS)
    for number, label in enumerate(classes):
        members = [r for r in records if r.label == label]
        each = size // len(classes) + (1 if number < size % len(classes) else 0)
        for teacher in range(TEACHERS):
            for place in range(each):
                shares[members[(teacher * each + place) % len(members)].id].append(teacher)
    return shares


def with_label(records: list[Record]) -> Shares:
    keys = (bytes([r.label]) + r.pixels for r in records)
    return shares_of(hashed(keys, teachers=TEACHERS, salt=SALT), records)


def by_position(records: list[Record]) -> Shares:
    return shares_of(balanced(len(records), teachers=TEACHERS), records)


def without_a_remainder(records: list[Record]) -> Shares:
    """Shares of the same size; who does not fit is left out."""
    size = len(records) // TEACHERS
    ranked = sorted(records, key=lambda r: hashlib.sha256(r.pixels).digest())
    return {r.id: [rank // size] for rank, r in enumerate(ranked) if rank < size * TEACHERS}


@pytest.mark.parametrize("partitioner", [by_id, by_content])
@pytest.mark.parametrize("count", [8, 52, 100])
def test_every_record_has_one_teacher_and_moves_no_other(partitioner: Partitioner, count: int) -> None:
    assert violations(partitioner, some_records(count)) == set()


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        (authors_round_robin, "in two shares"),
        (authors_round_robin, "moves when another record goes"),
        (authors_round_robin, "moves when another record is relabelled"),
        (with_label, "depends on its own label"),
        (by_position, "depends on its position"),
        (by_position, "moves when another record goes"),
        (by_position, "moves when another record comes"),
        (without_a_remainder, "dropped"),
        (without_a_remainder, "moves when another record goes"),
    ],
)
def test_broken_twins_are_caught(twin: Partitioner, what: str) -> None:
    assert what in violations(twin, some_records(52))


def test_replacing_a_record_keeps_the_balanced_shares_of_the_others() -> None:
    """Why `balanced` is right under replace-one: the position stays."""
    records = some_records(52)
    shares = by_position(records)
    replaced = [*records[:10], Record(id=1, pixels=b"new!", label=9), *records[11:]]
    now = by_position(replaced)
    assert all(now[r.id] == shares[r.id] for r in records if r.id != records[10].id)
    assert now[1] == shares[records[10].id]
    sizes = balanced(52, teachers=TEACHERS).sizes
    assert sizes.max() - sizes.min() <= 1


def test_a_run_does_not_depend_on_the_private_count() -> None:
    records = some_records(TEACHERS)
    assert by_id(records[:-1]).keys() | {records[-1].id} == by_id(records).keys()


# --- the pieces -----------------------------------------------------------------------------------------------------


@given(
    ids=st.lists(st.one_of(st.integers(), st.text(max_size=5)), min_size=10, max_size=30),
    teachers=st.integers(1, 10),
    salt=st.binary(max_size=64),
)
@settings(max_examples=80, deadline=None)
def test_shares_orders_and_sizes_agree(ids: list[Any], teachers: int, salt: bytes) -> None:
    array = np.array(ids, dtype=object)
    partition = hashed(record_keys(np.zeros((len(ids), 1, 1, 1)), array), teachers=teachers, salt=salt)
    assert partition.share.shape == (len(ids),)
    assert partition.share.dtype == np.int64
    assert partition.share.min() >= 0 and partition.share.max() < teachers
    assert partition.sizes.shape == (teachers,)
    assert partition.sizes.sum() == len(ids)
    assert sorted(partition.order) == list(range(len(ids)))
    assert (np.diff(partition.share[partition.order]) >= 0).all()
    within = np.diff(partition.order)[np.diff(partition.share[partition.order]) == 0]
    assert (within > 0).all()  # in the order they came


def test_empty_shares_are_counted() -> None:
    """Shares by hash vary in size; a teacher without records is still a teacher."""
    partition = hashed((bytes([i]) for i in range(8)), teachers=8, salt=SALT)
    assert partition.sizes.shape == (8,)
    assert (partition.sizes == 0).any()


def test_the_id_decides_where_there_is_one_else_the_content() -> None:
    images = np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1)
    same = np.stack([images[0], images[0]])
    assert len(set(record_keys(same, np.array([1, 2])))) == 2
    assert len(set(record_keys(images, np.array([1, 1])))) == 1
    assert len(set(record_keys(same, None))) == 1
    assert len(set(record_keys(images, None))) == 2
    # One bit of one pixel is another record.
    flipped = images.copy()
    flipped[1, 0, 0, 0] ^= 1
    assert list(record_keys(images, None))[1] != list(record_keys(flipped, None))[1]
    # The layout in memory is not content.
    fortran = np.asfortranarray(images)
    assert list(record_keys(fortran, None)) == list(record_keys(images, None))


def test_every_image_needs_its_id() -> None:
    with pytest.raises((DatalensError, ValueError)):
        list(record_keys(np.zeros((3, 2, 2, 1), dtype=np.uint8), np.array([1, 2])))


def test_an_id_is_not_mistaken_for_content() -> None:
    image = np.frombuffer(b"1", dtype=np.uint8).reshape(1, 1, 1, 1)
    assert set(record_keys(image, np.array(["1"]))).isdisjoint(record_keys(image, None))


def test_the_salt_changes_the_shares() -> None:
    records = some_records(200)
    one, other = by_id(records), by_id(records, salt=b"another salt")
    moved = sum(one[r.id] != other[r.id] for r in records)
    assert moved > 100  # 6 of 7 are expected to move
    assert one == by_id(records)


def test_a_long_salt_is_no_trouble() -> None:
    by_id(some_records(20), salt=b"datalens shares, seed " + str(10**60).encode())


@pytest.mark.parametrize(("count", "teachers"), [(5, 6), (0, 1), (10, 0), (10, -1)])
def test_too_few_records_or_teachers_under_replace_one(count: int, teachers: int) -> None:
    """There the number of records is the same for all neighbours, and may be talked about."""
    with pytest.raises(DatalensError, match="--teachers"):
        balanced(count, teachers=teachers)


@pytest.mark.parametrize(("count", "teachers"), [(5, 6), (0, 1)])
def test_too_few_records_is_for_the_owner_to_hear(count: int, teachers: int) -> None:
    """Asked before a run exists; the shares themselves do not depend on the private count."""
    with pytest.raises(DatalensError, match="too few"):
        check_enough(count, teachers)
    assert len(hashed((bytes([i]) for i in range(count)), teachers=teachers, salt=SALT).share) == count


def test_zero_teachers_is_an_error_that_says_so() -> None:
    with pytest.raises(DatalensError, match="--teachers"):
        hashed([b"a"], teachers=0, salt=SALT)


# --- uniformity -----------------------------------------------------------------------------------------------------


def looks_uniform(sizes: np.ndarray) -> bool:
    """Chi-square, both ends: neither too uneven nor too even to be chance (p = 1e-6 each)."""
    expected = sizes.sum() / len(sizes)
    statistic = float(((sizes - expected) ** 2 / expected).sum())
    return bool(chi2.ppf(1e-6, len(sizes) - 1) < statistic < chi2.isf(1e-6, len(sizes) - 1))


def test_shares_are_uniform() -> None:
    for salt in (SALT, b"", b"datalens shares, seed 0"):
        keys = (b"id:%d" % i for i in range(30_000))
        assert looks_uniform(hashed(keys, teachers=50, salt=salt).sizes)


def test_shares_that_are_not_uniform_are_caught() -> None:
    """Broken twins: one byte of a hash modulo 50 (256 is no multiple of 50), and shares dealt out evenly."""
    first_byte = [hashlib.blake2b(b"id:%d" % i, key=SALT).digest()[0] % 50 for i in range(30_000)]
    assert not looks_uniform(np.bincount(first_byte, minlength=50))
    assert not looks_uniform(balanced(30_000, teachers=50).sizes)


# --- replace-one ----------------------------------------------------------------------------------------------------


def shares_changed_by_a_replacement(shares: Any) -> int:
    """How many shares hold other records after record 10's pixels were replaced; one teacher's row is paid for."""
    random = np.random.default_rng(0)
    before = random.integers(0, 256, (60, 4, 4, 1), dtype=np.uint8)
    after = before.copy()
    after[10] = 255 - after[10]

    def held(images: np.ndarray) -> list[set[bytes]]:
        share = shares(images).share
        return [{images[i].tobytes() for i in np.flatnonzero(share == teacher)} for teacher in range(TEACHERS)]

    return sum(a != b for a, b in zip(held(before), held(after), strict=True))


def test_a_replaced_record_changes_one_share() -> None:
    assert shares_changed_by_a_replacement(lambda images: balanced(len(images), teachers=TEACHERS)) == 1
    # Broken twin: by the hash of its content the record leaves one share and enters another, at the price of one.
    by_content = lambda images: hashed(record_keys(images, None), teachers=TEACHERS, salt=SALT)  # noqa: E731
    assert shares_changed_by_a_replacement(by_content) == 2
