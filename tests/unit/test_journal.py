"""The journal: what was paid for and survived is reused bit for bit; what did not is asked and charged again."""

import os
import resource
import signal
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.bounded.contributions import Contributions, sum_bounded
from datalens.errors import DatalensError, TamperedError
from datalens.privacy.events import UnknownEvent
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.privacy.released import Released

BUDGET = Budget(epsilon=10.0, delta=1e-5, relation="add-remove", accountant="exact")


def release(ledger: Ledger, *, step: int, real: bool = False) -> Released:
    rows = torch.tensor([[[1, -1, 0], [0, 1, 1]]], dtype=torch.float64 if real else torch.int8)
    total = sum_bounded([Contributions(rows=rows, l2_bound=2.0, diameter=4.0, row_unit="teacher")])
    return GaussianSum(sigma=50.0, noise=SecureNoise()).release(total, ledger, step=step)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger.in_memory(BUDGET)


@pytest.mark.parametrize("real", [False, True])
def test_a_saved_release_is_found_as_it_was(tmp_path: Path, ledger: Ledger, real: bool) -> None:
    release(ledger, step=0)
    wanted = release(ledger, step=1, real=real)
    Journal(tmp_path).save(wanted)
    found = Journal(tmp_path).find(ledger, step=1)
    assert found is not None
    np.testing.assert_array_equal(found.value, wanted.value)
    assert found.value.dtype == wanted.value.dtype
    assert (found.event, found.number) == (wanted.event, 1)


def test_a_release_that_was_lost_is_not_invented(tmp_path: Path, ledger: Ledger) -> None:
    journal = Journal(tmp_path)
    journal.save(release(ledger, step=0))
    release(ledger, step=1)  # charged, then the power went out
    journal.save(release(ledger, step=2))
    assert journal.find(ledger, step=1) is None  # not the neighbours' values
    assert journal.find(ledger, step=5) is None


def test_a_replayed_step_finds_the_charge_whose_value_survived(tmp_path: Path, ledger: Ledger) -> None:
    release(ledger, step=0)  # lost
    second = release(ledger, step=0)  # asked again: a new charge
    Journal(tmp_path).save(second)
    found = Journal(tmp_path).find(ledger, step=0)
    assert found is not None and found.number == 1
    np.testing.assert_array_equal(found.value, second.value)
    assert len(ledger.events) == 2


def test_a_value_without_a_charge_is_never_used(tmp_path: Path, ledger: Ledger) -> None:
    """The ledger decides: a file whose number was not charged in it pays for nothing."""
    Journal(tmp_path).save(release(ledger, step=0))
    assert Journal(tmp_path).find(Ledger.in_memory(BUDGET), step=0) is None


def test_values_before_a_checkpoint_are_forgotten_and_later_ones_kept(tmp_path: Path, ledger: Ledger) -> None:
    journal = Journal(tmp_path)
    for step in range(4):
        journal.save(release(ledger, step=step))
    (tmp_path / "00000001.release").unlink()
    journal.forget_before(ledger, step=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000002.release", "00000003.release"]
    assert journal.find(ledger, step=0) is None
    assert journal.find(ledger, step=2) is not None


def killed_while_saving(journal: Journal, value: Released, *, left: float) -> None:
    """The process ends with so much of the value written, and before the file has its name."""

    def crash(descriptor: int) -> None:
        os.truncate(descriptor, int(os.fstat(descriptor).st_size * left))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            journal.save(value)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.99])
def test_half_a_value_is_no_value(tmp_path: Path, ledger: Ledger, left: float) -> None:
    value = release(ledger, step=0)
    killed_while_saving(Journal(tmp_path), value, left=left)
    assert Journal(tmp_path).find(ledger, step=0) is None
    Journal(tmp_path).save(value)
    assert Journal(tmp_path).find(ledger, step=0) is not None


def test_a_value_that_was_written_whole_is_found_whenever_the_process_was_killed(
    tmp_path: Path, ledger: Ledger
) -> None:
    value = release(ledger, step=0)
    killed_while_saving(Journal(tmp_path), value, left=1.0)
    found = Journal(tmp_path).find(ledger, step=0)
    assert found is not None and found.number == 0
    np.testing.assert_array_equal(found.value, value.value)
    assert [path.name for path in tmp_path.iterdir()] == ["00000000.release"]


def test_room_is_made_before_a_charge_and_taken_by_the_value(tmp_path: Path, ledger: Ledger) -> None:
    journal = Journal(tmp_path)
    journal.make_room(100_000)
    (room,) = tmp_path.iterdir()
    assert room.stat().st_blocks * 512 >= 800_000  # on the disk, not only in name
    assert stat.S_IMODE(room.stat().st_mode) == 0o600
    before = room.stat().st_ino
    journal.save(release(ledger, step=0))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_ino == before and file.stat().st_size < 1000
    assert journal.find(ledger, step=0) is not None
    journal.make_room(3)
    journal.close()  # what nobody took is given back
    assert [path.name for path in tmp_path.iterdir()] == ["00000000.release"]


def test_room_for_every_array_is_enough(tmp_path: Path, ledger: Ledger) -> None:
    """A file never grows past what was set aside for it: on a disk that is full by then it could not."""
    for shape in ((1,), (7, 3), (2, 3, 4, 5), (1000, 1)):
        value = replace(release(ledger, step=0), value=np.zeros(shape, dtype=np.int64))
        journal = Journal(tmp_path)
        journal.make_room(value.value.size)
        (room,) = tmp_path.glob("*.tmp")
        set_aside = room.stat().st_size
        journal.save(value)
        assert (tmp_path / f"{value.number:08d}.release").stat().st_size <= set_aside


def test_no_room_is_said_before_the_charge_with_the_folder_and_how_much_is_needed(
    tmp_path: Path, ledger: Ledger
) -> None:
    ledger.make_room = Journal(tmp_path).make_room
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # what a full disk does
    try:
        with pytest.raises(DatalensError, match=rf"no room in {tmp_path} .* needs 560 bytes .*nothing was charged"):
            release(ledger, step=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not ledger.events
    release(ledger, step=0)
    assert len(ledger.events) == 1


def test_a_whole_value_outlives_room_for_the_next_and_half_a_one_does_not(tmp_path: Path, ledger: Ledger) -> None:
    journal = Journal(tmp_path)
    killed_while_saving(journal, release(ledger, step=0), left=1.0)
    journal.make_room(6)
    killed_while_saving(journal, release(ledger, step=1), left=0.5)
    journal.make_room(6)
    assert journal.find(ledger, step=0) is not None and journal.find(ledger, step=1) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000.release", "room.tmp"]


def test_nothing_but_the_released_value_is_written(tmp_path: Path, ledger: Ledger) -> None:
    """No noise, no generator state, no private sum beside it: one file, hardly larger than its one array."""
    rows = torch.ones(1, 100, 50, dtype=torch.int8)
    total = sum_bounded([Contributions(rows=rows, l2_bound=71.0, diameter=142.0, row_unit="teacher")])
    released = GaussianSum(sigma=500.0, noise=SecureNoise()).release(total, ledger, step=0)
    Journal(tmp_path).save(released)
    (file,) = tmp_path.iterdir()
    assert released.value.nbytes <= file.stat().st_size <= released.value.nbytes + 512


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ledger, bytes]:
    folder, ledger = tmp_path_factory.mktemp("journal"), Ledger.in_memory(BUDGET)
    Journal(folder).save(release(ledger, step=0))
    return folder, ledger, (folder / "00000000.release").read_bytes()


@given(cut=st.integers(min_value=0))
@settings(max_examples=40, deadline=None)
def test_a_file_cut_short_is_an_error_that_says_what_to_do(cut: int, saved: tuple[Path, Ledger, bytes]) -> None:
    folder, ledger, content = saved
    (folder / "00000000.release").write_bytes(content[: cut % len(content)])
    with pytest.raises(TamperedError, match="delete it"):
        Journal(folder).find(ledger, step=0)


def test_a_pickle_is_not_loaded(saved: tuple[Path, Ledger, bytes]) -> None:
    folder, ledger, _ = saved
    with open(folder / "00000000.release", "wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TamperedError):
        Journal(folder).find(ledger, step=0)


def test_any_flipped_byte_is_detected(saved: tuple[Path, Ledger, bytes]) -> None:
    folder, ledger, content = saved
    for position in range(len(content)):
        edited = bytearray(content)
        edited[position] ^= 1
        (folder / "00000000.release").write_bytes(edited)
        with pytest.raises(TamperedError):
            Journal(folder).find(ledger, step=0)


def test_a_zip_archive_is_refused(saved: tuple[Path, Ledger, bytes]) -> None:
    folder, ledger, _ = saved
    with open(folder / "00000000.release", "wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(TamperedError):
        Journal(folder).find(ledger, step=0)


def test_strangers_in_the_ledger_are_passed_over(tmp_path: Path, ledger: Ledger) -> None:
    """An event of another kind has no step: it is neither found nor forgotten."""
    journal = Journal(tmp_path)
    journal.save(release(ledger, step=0))
    journal.save(release(ledger, step=0))
    ledger._events[0] = UnknownEvent(kind="laplace")
    found = journal.find(ledger, step=0)
    assert found is not None and found.number == 1
    journal.forget_before(ledger, step=9)
    assert [file.name for file in tmp_path.iterdir()] == ["00000000.release"]
