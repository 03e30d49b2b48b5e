"""The ledger: charged durably before noise exists, refused past the budget, and every edited byte shows."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.privacy import ledger as ledger_module
from datalens.privacy.accountant import Accountant
from datalens.privacy.events import GaussianEvent, NoiseOrigin, UnknownEvent
from datalens.privacy.ledger import Budget, Ledger, canonical_json, json_number, read_ledger, upwards
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import Held, SeededNoise
from datalens.privacy.released import Released

BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")


def make_event(*, step: int = 0, sigma: float = 100.0, **changes: Any) -> GaussianEvent:
    fields: dict[str, Any] = {
        "row_unit": "teacher",
        "l2_bound": 2.0,
        "diameter": 4.0,
        "relation": "add-remove",
        "sigma": sigma,
        "queries": 1,
        "step": step,
        "noise": "operating-system",
    }
    return GaussianEvent(**(fields | changes))


def votes() -> BoundedSum:
    rows = torch.tensor([[[1, -1, 0, 1]], [[0, 1, 1, -1]]], dtype=torch.int8)
    return sum_bounded([Contributions(rows=rows, l2_bound=2.0, diameter=4.0, row_unit="teacher")])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For hypothesis, which will not share a function's fixture between examples."""
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def written(scratch: Path) -> bytes:
    """A ledger of four charges, as it lies on disk."""
    path = scratch / "written.jsonl"
    ledger = Ledger.create(path, BUDGET)
    for step in range(4):
        ledger.charge(make_event(step=step, sigma=100.0 + step))
    ledger.close()
    return path.read_bytes()


# --- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"relation": "swap"}, "relation"),
        ({"accountant": "magic"}, "accountant"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DatalensError, match=message):
        dataclasses.replace(BUDGET, **changes)


def test_an_epsilon_is_never_shown_alone() -> None:
    text = BUDGET.describe(0.5)
    for part in ("0.5", "1e-05", "add-remove", "exact"):
        assert part in text


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        (1.0, 6, "1"),
        (1.00000499, 6, "1.00001"),
        (1.0000049e-5, 6, "1.00001e-05"),
        (0.18331, 4, "0.1834"),
        (0.18334, 4, "0.1834"),
        (0.1833, 4, "0.1833"),
        (0.30000000000000004, 4, "0.3"),
        (81704.96, 4, "8.171e+04"),
        (math.inf, 4, "inf"),
        (0.0, 4, "0"),
    ],
)
def test_no_figure_is_rounded_down(value: float, digits: int, said: str) -> None:
    assert upwards(value, digits) == said


# --- one ledger, one spender ----------------------------------------------------------------------------------------


def test_a_ledger_is_not_copied(path: Path) -> None:
    for ledger in (Ledger.in_memory(BUDGET), Ledger.create(path, BUDGET)):
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(DatalensError, match="both would spend"):
                copied(ledger)
        ledger.close()


def test_a_forked_process_does_not_charge(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    child = os.fork()
    if child == 0:
        try:
            ledger.charge(make_event(step=0))
        except DatalensError as error:
            os._exit(7 if "belongs to the process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ledger.charge(make_event(step=0))
    ledger._process += 1  # as in another process, where a test's coverage is counted
    with pytest.raises(DatalensError, match="belongs to the process"):
        ledger.charge(make_event(step=1))
    ledger.close()
    assert len(read_ledger(path)[1]) == 1


class Slow(Accountant):
    """Looks for a while before it answers."""

    def epsilon(self, events: Any, delta: float) -> float:
        found = super().epsilon(events, delta)
        time.sleep(0.02)
        return found


def charged_by_threads(monkeypatch: pytest.MonkeyPatch) -> float:
    """What eight threads spend of a budget that has room for one of them."""
    ledger = Ledger.in_memory(BUDGET)
    monkeypatch.setattr(Budget, "pricing", lambda self: Slow(name=self.accountant))
    sigma = next(s for s in (1.5**n for n in range(60)) if priced(s) <= BUDGET.epsilon)

    def charge(step: int) -> None:
        with contextlib.suppress(BudgetExceeded):
            ledger.charge(make_event(step=step, sigma=sigma))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(charge, range(8)))
    return ledger.spent()


def priced(sigma: float) -> float:
    return Accountant(name=BUDGET.accountant).epsilon([make_event(step=0, sigma=sigma)], BUDGET.delta)


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charged_by_threads(monkeypatch) <= BUDGET.epsilon


def test_a_twin_without_turns_overspends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "charge", Ledger._charge)
    assert charged_by_threads(monkeypatch) > BUDGET.epsilon


# --- charging -------------------------------------------------------------------------------------------------------


def test_what_was_charged_is_read_back(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    charged = [make_event(step=step, sigma=90.0 + step) for step in range(3)]
    assert [ledger.charge(event) for event in charged] == [0, 1, 2]
    spent = ledger.spent()
    ledger.close()
    assert read_ledger(path) == (BUDGET, tuple(charged))
    again = Ledger.open(path)
    assert again.events == tuple(charged)
    assert again.spent() == spent > 0
    assert again.charge(make_event(step=3)) == 3
    again.close()
    assert len(read_ledger(path)[1]) == 4


def test_past_the_budget_nothing_is_written_and_smaller_releases_still_fit(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    ledger.charge(make_event(sigma=16.0))
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="nothing was released") as caught:
        ledger.charge(make_event(sigma=16.0))
    assert caught.value.exit_code == 3
    assert path.read_bytes() == before
    assert len(ledger.events) == 1
    ledger.charge(make_event(sigma=1000.0))
    assert ledger.spent() <= 1.0
    ledger.close()


def test_no_noise_fits_no_finite_budget(path: Path) -> None:
    ledger = Ledger.create(path, dataclasses.replace(BUDGET, epsilon=1e9))
    with pytest.raises(BudgetExceeded):
        ledger.charge(make_event(sigma=0.0))
    assert ledger.events == ()
    ledger.close()


def test_an_infinite_budget_takes_everything_and_says_so(path: Path) -> None:
    infinite = dataclasses.replace(BUDGET, epsilon=math.inf)
    ledger = Ledger.create(path, infinite)
    ledger.charge(make_event(sigma=0.0))
    ledger.charge(make_event(sigma=1.0))
    assert ledger.spent() == math.inf
    ledger.close()
    budget, events = read_ledger(path)
    assert budget == infinite
    assert len(events) == 2
    assert json_number(math.inf) == "inf"
    assert json_number(0.5) == 0.5


def test_an_event_of_another_relation_is_not_charged(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    with pytest.raises(DatalensError, match="replace-one"):
        ledger.charge(make_event(relation="replace-one"))
    ledger.close()
    assert read_ledger(path)[1] == ()


def test_memory_and_disk_follow_the_same_rules(path: Path) -> None:
    disk, memory = Ledger.create(path, BUDGET), Ledger.in_memory(BUDGET)
    for sigma in (40.0, 30.0, 25.0, 20.0, 400.0, 19.0):
        outcomes = []
        for ledger in (disk, memory):
            try:
                outcomes.append(ledger.charge(make_event(sigma=sigma)))
            except BudgetExceeded:
                outcomes.append(-1)
        assert outcomes[0] == outcomes[1]
    assert disk.events == memory.events
    assert 0 < len(disk.events) < 6
    disk.close()
    memory.close()


def test_a_ledger_with_an_event_from_the_future_cannot_be_continued(path: Path) -> None:
    """What is not understood is not priced: neither spent() nor charge() guess."""
    content = chain([dict(BUDGET_LINE), {"type": "charge", "number": 0, "event": {"kind": "subsampled", "q": 0.01}}])
    path.write_bytes(content)
    ledger = Ledger.open(path)
    assert ledger.events == (UnknownEvent(kind="subsampled"),)
    with pytest.raises(UnpriceableEvent):
        ledger.spent()
    with pytest.raises(UnpriceableEvent):
        ledger.charge(make_event())
    ledger.close()
    assert path.read_bytes() == content


# --- charge first, noise meets the sum after ------------------------------------------------------------------------


class Disk:
    """What would survive a power cut: the bytes of a file up to the last fsync."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._safe, self._fsync = path, b"", os.fsync
        monkeypatch.setattr(ledger_module.os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
            self._safe = self._path.read_bytes()

    def charges(self) -> int:
        return self._safe.count(b'"type":"charge"')


class Witness:
    """A noise source that looks at the disk at the moment its noise, which may be drawn ahead, is taken to be used."""

    origin: NoiseOrigin = "seeded"

    def __init__(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        take = Held.take

        def watched(held: Held) -> np.ndarray:
            self.seen.append(disk.charges())
            return take(held)

        monkeypatch.setattr(Held, "take", watched)

    def standard_normal(self, count: int) -> np.ndarray:
        return np.zeros(count)


Release = Callable[[GaussianSum, BoundedSum, Ledger, int], Released]


def charged_before_noise(release: Release, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether each of three releases was durably on disk when its noise was taken."""
    disk = Disk(path, monkeypatch)
    witness = Witness(disk, monkeypatch)
    mechanism = GaussianSum(sigma=100.0, noise=witness)
    ledger = Ledger.create(path, BUDGET)
    for step in range(3):
        release(mechanism, votes(), ledger, step)
    ledger.close()
    return witness.seen == [1, 2, 3]


def ours(mechanism: GaussianSum, total: BoundedSum, ledger: Ledger, step: int) -> Released:
    return mechanism.release(total, ledger, step=step)


def noise_first(mechanism: GaussianSum, total: BoundedSum, ledger: Ledger, step: int) -> Released:
    """Broken twin (defect 6): takes its noise, and accounts afterwards."""
    drawn = Held(mechanism.noise.standard_normal(4)).take()
    event = make_event(step=step, noise="seeded")
    return Released(value=drawn, event=event, number=ledger.charge(event))


def not_durable(mechanism: GaussianSum, total: BoundedSum, ledger: Ledger, step: int) -> Released:
    """Broken twin: the charge is written, but a power cut would forget it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module.os, "fsync", lambda descriptor: None)
        return ours(mechanism, total, ledger, step)


def test_the_charge_is_durable_before_noise_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert charged_before_noise(ours, path, monkeypatch)


@pytest.mark.parametrize("broken", [noise_first, not_durable])
def test_noise_before_a_durable_charge_is_caught(broken: Release, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not charged_before_noise(broken, path, monkeypatch)


def test_a_refused_release_takes_no_noise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(Disk(path, monkeypatch), monkeypatch)
    ledger = Ledger.create(path, BUDGET)
    with pytest.raises(BudgetExceeded):
        GaussianSum(sigma=1.0, noise=witness).release(votes(), ledger, step=0)
    ledger.close()
    assert witness.seen == []


# --- a disk that fails ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(path: Path, *, room: int) -> Iterator[None]:
    """No file may grow past this one's size plus `room`: the kernel itself writes short, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def failing_fsync(path: Path) -> Iterator[None]:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module.os, "fsync", fail)
        yield


TROUBLES: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "no room at all": lambda path: full_disk(path, room=0),
    "room for half a line": lambda path: full_disk(path, room=150),
    "fsync fails": failing_fsync,
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_when_the_disk_fails_nothing_is_released(path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(Disk(path, monkeypatch), monkeypatch)
    mechanism = GaussianSum(sigma=100.0, noise=witness)
    ledger = Ledger.create(path, BUDGET)
    mechanism.release(votes(), ledger, step=0)
    with TROUBLES[trouble](path), pytest.raises(DatalensError, match="nothing was released"):
        mechanism.release(votes(), ledger, step=1)
    assert len(witness.seen) == 1
    # The end of the file is unknown: this ledger takes no more, although the disk is well again.
    with pytest.raises(DatalensError, match="--resume"):
        mechanism.release(votes(), ledger, step=1)
    ledger.close()
    assert len(witness.seen) == 1
    again = Ledger.open(path)
    lost = 1 if trouble == "fsync fails" else 0  # a whole line that was not acknowledged counts: never too little
    assert len(again.events) == 1 + lost
    mechanism.release(votes(), again, step=1)
    again.close()
    assert len(read_ledger(path)[1]) == 2 + lost


def test_an_interrupt_inside_a_charge_leaves_no_forgotten_spending(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(make_event())
    with contextlib.suppress(DatalensError):
        ledger.charge(make_event())
    ledger.close()
    read_ledger(path)  # whatever was done, the file must still be a ledger


# --- creating and opening -------------------------------------------------------------------------------------------


def budget_survives_a_power_cut(create: Callable[[Path, Budget], Any], path: Path) -> bool:
    """Whether the first line, and the name of the file, were synced by the time `create` returned."""
    synced: dict[int, int] = {}
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module.os, "fsync", record)
        create(path, BUDGET).close()
    return synced.get(path.stat().st_ino) == path.stat().st_size and path.parent.stat().st_ino in synced


def test_a_new_ledger_is_durable_before_it_is_used(path: Path, tmp_path: Path) -> None:
    assert budget_survives_a_power_cut(Ledger.create, path)

    def careless(path: Path, budget: Budget) -> Any:
        """Broken twin: written and closed, which is not yet on the disk."""
        path.write_bytes(chain([dict(BUDGET_LINE)]))
        return Ledger.in_memory(budget)

    assert not budget_survives_a_power_cut(careless, tmp_path / "careless.jsonl")


def test_create_never_replaces_a_ledger(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    ledger.charge(make_event())
    before = path.read_bytes()
    with pytest.raises(DatalensError, match="exists"):
        Ledger.create(path, dataclasses.replace(BUDGET, epsilon=100.0))
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path]
    ledger.close()


def test_create_never_replaces_a_ledger_even_after_a_crash_in_create(path: Path) -> None:
    """Until it is unlinked, the draft is a hard link to the ledger: who writes into a leftover writes into that."""

    def crash(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            Ledger.create(path, BUDGET)
    ledger = Ledger.open(path)
    ledger.charge(make_event())
    ledger.close()
    before = path.read_bytes()
    with contextlib.suppress(DatalensError, FileExistsError):
        Ledger.create(path, dataclasses.replace(BUDGET, epsilon=100.0))
    assert path.read_bytes() == before


def test_two_openers_cannot_both_spend_the_budget(path: Path) -> None:
    Ledger.create(path, BUDGET).close()
    accepted = 0
    first = Ledger.open(path)
    with contextlib.suppress(DatalensError):
        second = Ledger.open(path)
        for ledger in (first, second):
            with contextlib.suppress(DatalensError):
                ledger.charge(make_event(sigma=16.0))
                accepted += 1
            ledger.close()
    first.close()
    assert accepted <= len(read_ledger(path)[1]) <= 1


@given(cut=st.integers(min_value=0))
@settings(max_examples=60, deadline=None)
def test_a_torn_last_line_is_cut_off_and_not_counted(cut: int, written: bytes, scratch: Path) -> None:
    """Whatever part of the last line a crash left: the lines before it stand, and the next charge is well formed."""
    path = scratch / "torn.jsonl"
    start = written.rstrip(b"\n").rfind(b"\n") + 1
    cut = start + cut % (len(written) - start)
    path.write_bytes(written[:cut])
    if cut > start:
        with pytest.raises(TamperedError, match="not complete"):
            read_ledger(path)
    ledger = Ledger.open(path)
    assert len(ledger.events) == 3
    assert path.read_bytes() == written[:start]
    ledger.charge(make_event(step=7))
    ledger.close()
    assert [event.step for event in read_ledger(path)[1]] == [0, 1, 2, 7]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\n", b"\n\n", b"[]\n", b"null\n", b"7\n", b'"budget"\n', b"{}\n", b"\xff\n"]
)
def test_what_is_no_ledger_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for read in (read_ledger, Ledger.open):
        with pytest.raises(TamperedError):
            read(path)
    assert path.read_bytes() == content


# --- edits show -----------------------------------------------------------------------------------------------------


def reading(content: bytes, scratch: Path) -> Any:
    path = scratch / "edited.jsonl"
    path.write_bytes(content)
    try:
        return read_ledger(path)
    except TamperedError:
        return None


def test_every_single_byte_counts(written: bytes, scratch: Path) -> None:
    """Exhaustive over positions: one flipped bit anywhere, and the ledger is refused."""
    written = b"".join(written.splitlines(keepends=True)[:2])
    assert reading(written, scratch) is not None
    for position in range(len(written)):
        edited = bytearray(written)
        edited[position] ^= 1 << (position % 8)
        assert reading(bytes(edited), scratch) is None, position


@given(position=st.integers(min_value=0), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_any_byte_changed_to_any_other_is_detected(position: int, value: int, written: bytes, scratch: Path) -> None:
    edited = bytearray(written)
    position %= len(edited)
    if edited[position] == value:
        return
    edited[position] = value
    assert reading(bytes(edited), scratch) is None


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_inserted_or_removed_are_detected(data: st.DataObject, written: bytes, scratch: Path) -> None:
    start = data.draw(st.integers(0, len(written) - 1))
    removed = data.draw(st.integers(0, 40))
    inserted = data.draw(st.binary(max_size=20))
    edited = written[:start] + inserted + written[start + removed :]
    whole_lines = [written[: i + 1] for i, byte in enumerate(written) if byte == 10]
    if edited not in whole_lines:  # the beginning of a ledger is a ledger; see the next test
        assert reading(edited, scratch) is None


def edits() -> dict[str, Callable[[list[bytes]], list[bytes]]]:
    return {
        "budget line deleted": lambda lines: lines[1:],
        "charge deleted": lambda lines: lines[:2] + lines[3:],
        "charges swapped": lambda lines: [*lines[:1], lines[2], lines[1], *lines[3:]],
        "charge repeated": lambda lines: [*lines[:2], lines[1], *lines[2:]],
        "last charge repeated": lambda lines: [*lines, lines[-1]],
        "empty line inserted": lambda lines: [*lines[:2], b"\n", *lines[2:]],
        "empty line at the end": lambda lines: [*lines, b"\n"],
        "budget line again": lambda lines: [*lines, lines[0]],
        "carriage returns": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
        "spaces": lambda lines: [line.replace(b":", b": ") for line in lines],
        "larger sigma": lambda lines: [line.replace(b'"sigma":102.0', b'"sigma":902.0') for line in lines],
        "seeded noise hidden": lambda lines: [line.replace(b"operating-system", b"seeded") for line in lines],
        "budget raised": lambda lines: [lines[0].replace(b'"epsilon":1.0', b'"epsilon":9.0'), *lines[1:]],
        "duplicate key": lambda lines: [lines[0], lines[1].replace(b'{"event"', b'{"number":0,"event"'), *lines[2:]],
    }


@pytest.mark.parametrize("name", edits())
def test_an_edited_line_is_detected(name: str, written: bytes, scratch: Path) -> None:
    lines = written.splitlines(keepends=True)
    edited = b"".join(edits()[name](list(lines)))
    assert edited != written
    assert reading(edited, scratch) is None


def test_charges_cut_from_the_end_are_beyond_a_chain(written: bytes, scratch: Path) -> None:
    """A limit, not a feature: the beginning of a ledger is a ledger. The certificate's hash of the file catches it."""
    lines = written.splitlines(keepends=True)
    for count in range(1, len(lines)):
        budget, events = reading(b"".join(lines[:count]), scratch)
        assert budget == BUDGET
        assert len(events) == count - 1


# A chain written by somebody who knows the format: the hashes are right, so the fields have to be judged.

BUDGET_LINE = {
    "type": "budget",
    "version": 1,
    "epsilon": 1.0,
    "delta": 1e-5,
    "relation": "add-remove",
    "accountant": "exact",
}


def chain(lines: list[dict[str, Any]]) -> bytes:
    """An independent writer of the format in the module's docstring."""
    previous, content = "0" * 64, b""
    for fields in lines:
        body = {**fields, "previous": previous}
        previous = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        content += json.dumps({**body, "hash": previous}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return content


def charge_line(number: Any = 0, **changes: Any) -> dict[str, Any]:
    return {"type": "charge", "number": number, "event": make_event().as_dict() | changes}


def test_the_format_is_what_the_module_says(scratch: Path, written: bytes) -> None:
    mine = chain([BUDGET_LINE, *(charge_line(i, step=i, sigma=100.0 + i) for i in range(4))])
    assert mine == written
    assert canonical_json({"b": 1, "a": "ε"}) == b'{"a":"\\u03b5","b":1}'


@pytest.mark.parametrize(
    "lines",
    [
        [{**BUDGET_LINE, "type": "charge"}],
        [{**BUDGET_LINE, "version": 2}],
        [{**BUDGET_LINE, "epsilon": -1.0}],
        [{**BUDGET_LINE, "epsilon": "much"}],
        [{**BUDGET_LINE, "epsilon": None}],
        [{**BUDGET_LINE, "epsilon": "nan"}],
        [{**BUDGET_LINE, "delta": 2.0}],
        [{**BUDGET_LINE, "relation": "nobody"}],
        [{**BUDGET_LINE, "accountant": "magic"}],
        [{k: v for k, v in BUDGET_LINE.items() if k != "delta"}],
        [BUDGET_LINE, charge_line(1)],
        [BUDGET_LINE, charge_line("0")],
        [BUDGET_LINE, charge_line(0), charge_line(0)],
        [BUDGET_LINE, {**charge_line(), "type": "refund"}],
        [BUDGET_LINE, charge_line(sigma=-100.0)],
        [BUDGET_LINE, charge_line(sigma="100")],
        [BUDGET_LINE, charge_line(diameter=4.1)],
        [BUDGET_LINE, charge_line(relation="nobody")],
        [BUDGET_LINE, charge_line(sensitivity=0.0)],
        [BUDGET_LINE, {"type": "charge", "number": 0, "event": []}],
        [BUDGET_LINE, {"type": "charge", "number": 0}],
    ],
)
def test_a_well_hashed_lie_is_refused(lines: list[dict[str, Any]], path: Path) -> None:
    path.write_bytes(chain(lines))
    with pytest.raises(TamperedError):
        read_ledger(path)


def test_a_line_nested_too_deep_is_refused(path: Path) -> None:
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(TamperedError):
        read_ledger(path)


@pytest.mark.parametrize(
    "lines", [[{**BUDGET_LINE, "epsilon": 10**400}], [BUDGET_LINE, charge_line(sigma=10**400)]], ids=["budget", "event"]
)
def test_a_number_past_every_float_is_refused(lines: list[dict[str, Any]], path: Path) -> None:
    path.write_bytes(chain(lines))
    with pytest.raises(TamperedError):
        read_ledger(path)


def test_a_chained_event_of_another_relation_is_refused(path: Path) -> None:
    """Row unit record: under add-remove it costs half of what it costs under replace-one."""
    lines = [
        {**BUDGET_LINE, "relation": "replace-one"},
        charge_line(row_unit="record", relation="add-remove"),
    ]
    path.write_bytes(chain(lines))
    with pytest.raises(TamperedError):
        read_ledger(path)


def test_seeded_noise_stays_marked(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    GaussianSum(sigma=100.0, noise=SeededNoise(0)).release(votes(), ledger, step=0)
    ledger.close()
    (event,) = read_ledger(path)[1]
    assert isinstance(event, GaussianEvent) and event.noise == "seeded"


@pytest.mark.parametrize("number", [0, 1])
def test_a_line_with_room_for_something_else_is_refused(path: Path, number: int) -> None:
    """With every hash right: a release's ledger could carry anything in a field that nobody reads."""
    ledger = Ledger.create(path, BUDGET)
    ledger.charge(make_event())
    ledger.close()
    previous, content = "0" * 64, b""
    for at, raw in enumerate(path.read_bytes().splitlines()):
        body = {k: v for k, v in json.loads(raw).items() if k != "hash"} | {"previous": previous}
        body |= {"records": "AAAA"} if at == number else {}
        previous = hashlib.sha256(canonical_json(body)).hexdigest()
        content += canonical_json({**body, "hash": previous}) + b"\n"
    path.write_bytes(content)
    with pytest.raises(TamperedError, match=f"line {number + 1} has other fields"):
        read_ledger(path)


def test_the_chain_tells_two_ledgers_apart_by_any_line(path: Path) -> None:
    ledger = Ledger.create(path, BUDGET)
    before = ledger.chain(0)
    assert before is not None and ledger.chain(1) is None and ledger.chain(-1) is None
    ledger.charge(make_event())
    assert ledger.chain(0) == before != ledger.chain(1)
    ledger.close()
    again = Ledger.open(path)
    assert again.chain(1) == ledger.chain(1) and again.chain(2) is None
    again.close()
