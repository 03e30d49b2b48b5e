"""Gathering shares from a stream: the same rows wherever they lie and however teachers are split over machines."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datalens.data import records
from datalens.data.records import Dataset, record_keys
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.private import shares as shares_module
from datalens.private.partition import Balanced, Hashed, Rule, hashed
from datalens.private.shares import Shares

TEACHERS, COUNT = 9, 60
CPU = torch.device("cpu")
RULE = Hashed(teachers=TEACHERS, salt=b"salt")
ALL = torch.arange(TEACHERS)


def data(count: int = COUNT, *, nominal: int = COUNT, without: int | None = None) -> Dataset:
    rng = np.random.default_rng(1)
    keep = np.array([i for i in range(count) if i != without])
    return Dataset(
        schema=Schema(name="s", height=4, width=4, channels=3, classes=("a", "b"), nominal_size=nominal),
        images=rng.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)[keep],
        labels=rng.integers(0, 2, count)[keep],
        ids=np.arange(1000, 1000 + count)[keep],
    )


def planes(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).to(torch.float32) / 255


def gather(
    dataset: Dataset,
    rule: Rule = RULE,
    numbers: range | None = None,
    features: Callable[[Tensor], Tensor] = planes,
) -> Shares:
    return Shares.gather(dataset, rule, numbers=numbers, features=features, device=CPU)


def draw(shares: Shares, teachers: Tensor | None = None, step: int = 3) -> tuple[Tensor, Tensor]:
    teachers = torch.tensor(list(shares.numbers)) if teachers is None else teachers
    return shares.batch(teachers, size=6, seed=5, step=step, draw=1)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BLOCK_RECORDS", 7)


@pytest.fixture
def spill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda limit: monkeypatch.setattr(shares_module, "SPILL_BYTES", limit)


def test_gathered_is_what_shares_in_memory_are() -> None:
    whole, dataset = gather(data()), data()
    partition = hashed(record_keys(dataset.images, dataset.ids), teachers=TEACHERS, salt=b"salt")
    simple = Shares(planes(torch.from_numpy(dataset.images)), torch.from_numpy(dataset.labels), partition)
    assert same(draw(whole), draw(simple))
    assert whole.teachers == TEACHERS and whole.count == whole.seen == simple.count == simple.seen == COUNT
    assert torch.equal(whole.occupied(ALL), torch.from_numpy(partition.sizes > 0))


@pytest.mark.parametrize("features", [planes, lambda images: images], ids=["float32", "uint8"])
@pytest.mark.parametrize("nominal", [COUNT, 1, 10 * COUNT], ids=["as declared", "far more", "far fewer"])
@pytest.mark.parametrize("limit", [0, 5 * 192, 10**9], ids=["file", "file after a while", "memory"])
def test_where_rows_lie_changes_nothing(
    features: Callable[[Tensor], Tensor], nominal: int, limit: int, spill: Callable[[int], None]
) -> None:
    expected = gather(data(), features=features)
    assert not expected.in_file
    spill(limit)
    shares = gather(data(nominal=nominal), features=features)
    assert shares.in_file == (limit < 10**9)
    for step in range(4):
        assert same(draw(shares, step=step), draw(expected, step=step))
    assert draw(shares)[0].dtype == features(torch.zeros(1, 4, 4, 3, dtype=torch.uint8)).dtype
    assert (shares.fingerprint, shares.count) == (expected.fingerprint, expected.count)


def test_the_file_has_no_name_and_no_other_reader(
    spill: Callable[[int], None], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spill(0)
    shares = gather(data())
    assert list(tmp_path.iterdir()) == []
    handle = shares._rows._file
    assert handle is not None
    facts = os.fstat(handle.fileno())
    assert stat.S_IMODE(facts.st_mode) == 0o600 and facts.st_nlink == 0
    assert facts.st_size == (COUNT + 1) * 48 * 4


def test_a_full_disk_is_said_in_one_line(spill: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shares_module.tempfile, "TemporaryFile", lambda **_: Full())
    spill(0)
    with pytest.raises(DatalensError, match=r"no space left in .*TMPDIR"):
        gather(data())


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 1, 2, 5, 9)])
def test_parts_of_the_teachers_add_up_to_all(cuts: tuple[int, ...], spill: Callable[[int], None]) -> None:
    whole = gather(data())
    batch = draw(whole)
    spill(20 * 192)
    parts = [gather(data(), numbers=range(a, b)) for a, b in pairwise(cuts)]
    assert sum(part.fingerprint for part in parts) % 2**256 == whole.fingerprint
    assert sum(part.count for part in parts) == whole.count
    assert {part.seen for part in parts} == {COUNT}
    for part in parts:
        numbers = torch.tensor(list(part.numbers))
        assert part.teachers == len(numbers)
        assert same(draw(part), (batch[0][numbers], batch[1][numbers]))
        assert torch.equal(part.occupied(numbers), whole.occupied(numbers))


def test_the_fingerprint_is_a_sum_of_hashes() -> None:
    dataset = data()
    expected, teachers = 0, RULE.shares(np.arange(COUNT), record_keys(dataset.images, dataset.ids)).tolist()
    for index, (label, image) in enumerate(zip(dataset.labels.tolist(), dataset.images, strict=True)):
        start = b"".join(number.to_bytes(8, "little") for number in (index, label, teachers[index]))
        expected += int.from_bytes(hashlib.sha256(start + image.tobytes()).digest(), "little")
    assert gather(dataset).fingerprint == expected % 2**256


@pytest.mark.parametrize("change", ["pixel", "label", "order", "removed", "id"])
def test_the_fingerprint_sees_every_change(change: str) -> None:
    dataset = data()
    images, labels, ids = dataset.images.copy(), dataset.labels.copy(), dataset.ids
    assert ids is not None
    if change == "pixel":
        images[7, 0, 0, 0] ^= 1
    elif change == "label":
        labels[7] ^= 1
    elif change == "id":  # and with it the teacher
        ids = np.where(np.arange(COUNT) == 7, 77, ids)
    elif change == "order":
        images[[7, 8]], labels[[7, 8]] = images[[8, 7]], labels[[8, 7]]
    else:
        images, labels, ids = images[1:], labels[1:], ids[1:]
    changed = Dataset(schema=dataset.schema, images=images, labels=labels, ids=ids)
    assert gather(changed).fingerprint != gather(dataset).fingerprint


def teachers_that_change(rule: Rule, *, without: int) -> set[int]:
    """Teachers whose batches differ once a record is gone."""
    before, after = gather(data(), rule), gather(data(without=without), rule)
    different: set[int] = set()
    for step in range(5):
        (a, la), (b, lb) = draw(before, step=step), draw(after, step=step)
        different |= {t for t in range(TEACHERS) if not (torch.equal(a[t], b[t]) and torch.equal(la[t], lb[t]))}
    return different


@pytest.mark.parametrize("limit", [0, 10**9], ids=["file", "memory"])
@pytest.mark.parametrize("without", [0, 13, 59])
def test_removing_a_record_changes_its_own_teacher_only(without: int, limit: int, spill: Callable[[int], None]) -> None:
    spill(limit)
    own = int(RULE.shares(np.array([0]), [f"id:{1000 + without}".encode()])[0])
    assert teachers_that_change(RULE, without=without) <= {own}


def test_broken_twin_shares_by_position() -> None:
    assert len(teachers_that_change(Balanced(teachers=TEACHERS), without=0)) > 1


def test_an_empty_share_reads_zeros_and_says_so(spill: Callable[[int], None]) -> None:
    class NotThree:
        teachers = TEACHERS
        by_position = True

        def shares(self, index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
            return np.where(index % TEACHERS == 3, 4, index % TEACHERS)

    for limit in (0, 10**9):
        spill(limit)
        shares = gather(data(), NotThree())
        assert shares.occupied(ALL).tolist() == [t != 3 for t in range(TEACHERS)]
        images, labels = draw(shares)
        assert not images[3].any() and not labels[3].any()
        assert images[[0, 1, 2, 4]].flatten(1).any(1).all()


def test_no_record_at_all(spill: Callable[[int], None]) -> None:
    empty = Dataset(schema=data().schema, images=data().images[:0], labels=data().labels[:0])
    for limit in (0, 10**9):
        spill(limit)
        shares = gather(empty)
        assert (shares.count, shares.seen, shares.fingerprint) == (0, 0, 0)
        assert not shares.occupied(ALL).any()
        assert not draw(shares)[0].any()


@pytest.mark.parametrize("numbers", [range(0), range(0, 4, 2), range(5, 10), range(-1, 3)])
def test_numbers_are_some_teachers_in_a_row(numbers: range) -> None:
    with pytest.raises(ValueError, match="from 0 to 8, not"):
        gather(data(), numbers=numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [4, 10**12], ids=["on the device", "on the host"])
def test_rows_on_a_gpu(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "DEVICE_PART", part)
    cuda = torch.device("cuda")

    def pixels(images: Tensor) -> Tensor:  # bytes: a GPU divides by 255 with other last bits
        return images.permute(0, 3, 1, 2).contiguous()

    shares = Shares.gather(data(), RULE, features=pixels, device=cuda)
    images, labels = shares.batch(ALL.to(cuda), size=6, seed=5, step=3, draw=1)
    assert images.device.type == labels.device.type == "cuda"
    assert shares._rows._table.device.type == ("cuda" if part == 4 else "cpu")
    assert same((images.cpu(), labels.cpu()), draw(Shares.gather(data(), RULE, features=pixels, device=CPU)))
