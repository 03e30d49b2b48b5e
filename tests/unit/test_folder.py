"""A run folder by itself: who may look into it, what a checkpoint keeps and deletes, and how a run is interrupted."""

import json
import math
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datalens.errors import DatalensError
from datalens.files import load_tensors, save_tensors
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import SecureNoise
from datalens.run import folder as folders
from datalens.run.folder import LATEST, Alone, NoTeachers, Run, part_name, read_config
from tests.unit import test_wholeness as whole
from tests.unit.test_parts import votes

STEPS = whole.STEPS


class Learner:
    """Its state is the number of steps that it has seen."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1)

    def state(self) -> dict[str, Tensor]:
        return {"seen": self.seen.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.seen = state["seen"]


class Clock:
    """Stands still but where it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(folders.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = whole.begin(tmp_path / "run")
    yield made
    made.close()


def ask(run: Run, step: int, *, journaled: bool = True) -> None:
    if run.journal.find(run.ledger, step=step) is None:
        released = make_mechanism(5000.0, SecureNoise()).release(votes(), run.ledger, step=step)
        if journaled:
            run.journal.save(released)


def learn(
    run: Run, *, count: int = STEPS, after: Callable[[int], object] = lambda step: None, journaled: bool = True
) -> tuple[Learner, Learner]:
    """Take all steps; `after` each, something happens. Returns student and teachers."""
    student, teachers = Learner(), Learner()
    for step in run.steps(count, student=student, teachers=Alone(teachers, run.path / "checkpoints")):
        ask(run, step, journaled=journaled)
        student.seen += 1
        teachers.seen += 2
        after(step)
    return student, teachers


def written(run: Run) -> int:
    """How many steps the last checkpoint has learned from; 0 without one."""
    path = run.path / "checkpoints" / LATEST
    return int(load_tensors(path)[1]["step"]) if path.exists() else 0


def values(run: Run) -> list[int]:
    return sorted(int(path.stem) for path in (run.path / "journal").glob("*.release"))


# --- begun and opened -----------------------------------------------------------------------------------------------


def test_only_the_owner_may_look(run: Run) -> None:
    learn(run)
    run.log(0, loss=1.0)
    for path in (run.path, *run.path.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_what_is_kept_of_a_run(run: Run) -> None:
    config = read_config(run.path)
    assert set(config) == {"version", "options", "settings", "schema", "data_sha256", "launch"}
    assert (config["version"], config["data_sha256"], config["launch"]) == (1, "0" * 64, None)
    assert config["settings"] == run.settings.as_dict() and run.schema == whole.SCHEMA
    assert (run.completed, run.interrupted, run.answered, run.lost, run.facts) == (0, False, None, None, {})


def create(out: Path, **facts: Any) -> Run:
    budget, settings = whole.make_plan(whole.options(out), whole.SCHEMA)
    given: dict[str, Any] = {"settings": settings, "budget": budget, "schema": whole.SCHEMA, "data_sha256": "0" * 64}
    return Run.create(out, options=whole.options(out).remembered(), **{**given, **facts})


def test_a_reservation_is_the_last_thing_that_can_fail(tmp_path: Path) -> None:
    """It cannot be given back: when it is made, the rest of the folder is there."""
    drafts: list[list[str]] = []

    def reserve() -> dict[str, str]:
        (draft,) = tmp_path.glob(".run.*.new")
        drafts.append(sorted(path.name for path in draft.iterdir()))
        return {"folder": "b", "run": "r"}

    run = create(tmp_path / "run", data_budget=reserve, launch="torchrun")
    run.close()
    assert drafts == [["checkpoints", "journal", "ledger.jsonl"]]
    config = read_config(run.path)
    assert (config["data_budget"], config["launch"]) == ({"folder": "b", "run": "r"}, "torchrun")
    assert os.listdir(tmp_path) == ["run"]


def test_a_run_that_cannot_be_begun_leaves_nothing(tmp_path: Path) -> None:
    def full() -> dict[str, str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "run", data_budget=full)
    assert os.listdir(tmp_path) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(DatalensError, match="exists already"):
        create(tmp_path / "run", data_budget=full)
    assert os.listdir(tmp_path) == ["run"]


def test_folders_above_it_are_made(tmp_path: Path) -> None:
    create(tmp_path / "a" / "b" / "run").close()
    assert os.listdir(tmp_path / "a" / "b") == ["run"]


def test_one_process_at_a_time(run: Run) -> None:
    with pytest.raises(DatalensError, match="another process is training"):
        Run.open(run.path)
    run.close()
    Run.open(run.path).close()


@pytest.mark.parametrize("open_", [Run.open, Run.resume])
def test_a_run_that_is_refused_is_not_left_locked(run: Run, open_: Callable[[Path], Run]) -> None:
    learn(run)
    run.close()
    before = (run.path / "ledger.jsonl").read_bytes()
    whole.cut(run.path / "ledger.jsonl", 2)
    with pytest.raises(DatalensError, match="was cut"):
        open_(run.path)
    (run.path / "ledger.jsonl").write_bytes(before)
    open_(run.path).close()


def test_a_run_that_would_begin_again_is_not_left_locked(run: Run) -> None:
    learn(run)
    run.close()
    (run.path / "release").mkdir()
    whole.lost(run.path)
    with pytest.raises(DatalensError, match="neither a checkpoint nor a journal"):
        Run.resume(run.path)
    Run.open(run.path).close()


def test_seeded_noise_is_other_noise_after_every_charge(tmp_path: Path) -> None:
    run = whole.begin(tmp_path / "run")
    assert run.noise_seed is None
    run.config["options"]["noise_seed"] = 5
    seeds = [run.noise_seed]
    for step in range(3):
        ask(run, step)
        seeds.append(run.noise_seed)
    run.close()
    assert seeds == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.pop("settings"), "fields are missing"),
        (lambda c: c["options"].pop("data"), "fields are missing"),
        (lambda c: c["options"].pop("nominal_size"), "fields are missing"),
        (lambda c: c["options"].pop("noise_seed"), "fields are missing"),
        (lambda c: c["options"].update(data=3), "must be a name"),
        (lambda c: c["options"].update(nominal_size=-1), "whole numbers"),
        (lambda c: c["options"].update(nominal_size=True), "whole numbers"),
        (lambda c: c["options"].update(noise_seed=2**62), "whole numbers"),
        (lambda c: c["options"].update(noise_seed=1.5), "whole numbers"),
        (lambda c: c["options"].update(data_folder=3), "must be a path"),
        (lambda c: c.pop("schema"), "schema"),
        (lambda c: c.update(options=[]), "damaged"),
    ],
)
def test_a_damaged_config_is_named(run: Run, change: Callable[[dict[str, Any]], object], why: str) -> None:
    path = run.path / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(DatalensError, match=rf"config.json is damaged .*{why}|{why}"):
        read_config(run.path)


@pytest.mark.parametrize("number", [0, 2**62 - 1, None])
def test_numbers_that_a_config_may_have(run: Run, number: int | None) -> None:
    path = run.path / "config.json"
    config = json.loads(path.read_text())
    config["options"].update(nominal_size=number, data_folder="folder")
    path.write_text(json.dumps(config))
    assert read_config(run.path)["options"]["nominal_size"] == number


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl"])
def test_a_folder_that_is_no_run(run: Run, name: str, tmp_path: Path) -> None:
    (run.path / name).unlink()
    with pytest.raises(DatalensError, match=r"has no config.json and ledger.jsonl"):
        read_config(run.path)
    with pytest.raises(DatalensError, match="does not exist"):
        read_config(tmp_path / "nowhere")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_run_is_kept_at_its_end_and_no_sooner_than_it_is_worth(run: Run, clock: Clock) -> None:
    """A checkpoint costs time: one every 20 seconds, or 20 times as long as one takes."""
    kept: list[int] = []

    def later(step: int) -> None:
        kept.append(written(run))
        clock.now += folders.CHECKPOINT_SECONDS + 0.1 if step in (1, 4) else folders.CHECKPOINT_SECONDS / 4

    learn(run, after=later)
    assert kept == [0, 0, 2, 2, 2, 5, 5, 5] and written(run) == STEPS
    assert values(run) == []  # a checkpoint has what they were for


def test_a_checkpoint_that_takes_long_is_written_less_often(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, kept = folders.save_tensors, []

    def slow(path: Path, *rest: Any) -> None:
        clock.now += 2.0 if path.name == LATEST else 0.0
        save(path, *rest)

    monkeypatch.setattr(folders, "save_tensors", slow)

    def later(step: int) -> None:
        kept.append(written(run))
        clock.now += 21.0

    learn(run, after=later)
    assert kept == [0, 1, 1, 3, 3, 5, 5, 7]  # 40 seconds after the last one, which took 2


def test_old_files_go_when_the_new_ones_are_named(run: Run, clock: Clock) -> None:
    def later(step: int) -> None:
        clock.now += 21.0
        names = sorted(path.name for path in (run.path / "checkpoints").iterdir())
        assert names == ([] if step == 0 else sorted([LATEST, part_name(step, range(1))]))

    learn(run, after=later)


def test_what_was_learned_is_what_is_gone_on_with(run: Run, clock: Clock) -> None:
    def later(step: int) -> None:
        run.interrupted = step == 4

    student, teachers = learn(run, after=later)
    assert (run.completed, run.interrupted, written(run)) == (5, True, 5)
    assert (student.seen.item(), teachers.seen.item()) == (5, 10)
    run.close()
    again = Run.resume(run.path)
    seen: list[int] = []
    student, teachers = learn(again, after=seen.append)
    assert seen == [5, 6, 7] and (student.seen.item(), teachers.seen.item()) == (8, 16)
    assert (again.completed, again.interrupted, len(again.ledger.events)) == (STEPS, False, STEPS)
    assert list(again.steps(STEPS, student=Learner(), teachers=NoTeachers())) == []
    again.close()


def test_a_large_state_is_left_to_the_journal(run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept where there is none, whatever its size: nothing else is left of what was learned."""
    monkeypatch.setattr(folders, "CHECKPOINT_BYTES", 3)  # a student's step is 4 bytes
    learn(run, after=lambda step: setattr(clock, "now", clock.now + 21.0))
    assert written(run) == 0 and values(run) == list(range(STEPS))
    assert run.completed == STEPS
    monkeypatch.setattr(folders, "CHECKPOINT_BYTES", 4)  # no larger than that
    learn(run)
    assert written(run) == STEPS


def test_a_large_state_without_a_journal_is_kept(run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "CHECKPOINT_BYTES", 3)
    learn(run, journaled=False, after=lambda step: setattr(clock, "now", clock.now + 21.0))
    assert written(run) == STEPS


def ends_early(run: Run, at: int, *, journaled: bool = True) -> None:
    student = Learner()
    for step in run.steps(STEPS, student=student, teachers=NoTeachers()):
        if step == at:
            return
        ask(run, step, journaled=journaled)
        student.seen += 1


def test_a_run_that_ends_before_its_last_step_is_kept_unless_its_journal_has_it(run: Run, clock: Clock) -> None:
    run.keep()  # before there are steps there is nothing to keep
    ends_early(run, 3)
    run.keep()
    assert written(run) == 0 and values(run) == [0, 1, 2]


def test_a_run_that_ends_before_its_last_step_is_kept(run: Run, clock: Clock) -> None:
    ends_early(run, 3, journaled=False)
    assert written(run) == 0
    run.keep()
    assert written(run) == 3
    before = (run.path / "checkpoints" / LATEST).stat().st_mtime_ns
    run.keep()  # nothing was learned since
    assert (run.path / "checkpoints" / LATEST).stat().st_mtime_ns == before


def test_a_checkpoint_that_is_damaged_is_named(run: Run, clock: Clock) -> None:
    learn(run, after=lambda step: setattr(run, "interrupted", step == 2))
    run.close()
    latest = run.path / "checkpoints" / LATEST
    state, facts = load_tensors(latest)
    part = run.path / "checkpoints" / part_name(3, range(1))
    kept, told = load_tensors(part)
    save_tensors(part, kept, {**told, "step": "2"})
    run = Run.open(run.path)
    with pytest.raises(DatalensError, match=r"teachers-3-0-0.safetensors is damaged .*delete latest"):
        learn(run)
    save_tensors(part, {"other": kept["seen"]}, told)
    with pytest.raises(DatalensError, match="is damaged"):
        learn(run)
    save_tensors(part, kept, told)
    save_tensors(latest, {"other": state["seen"]}, facts)
    with pytest.raises(DatalensError, match=r"latest.safetensors is damaged"):
        learn(run)
    latest.write_bytes(b"nothing")
    with pytest.raises(DatalensError, match=r"latest.safetensors is damaged"):
        learn(run)
    run.close()


def test_names_of_files_say_whose_state_they_have() -> None:
    assert part_name(7, range(10, 15)) == "teachers-7-10-14.safetensors"


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_keeps_it(run: Run, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    student, _ = learn(run, after=lambda step: os.kill(os.getpid(), number) if step == 2 else None)
    assert (run.completed, run.interrupted, written(run), student.seen.item()) == (3, True, 3, 3)
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.count("finishing this step; interrupt again to stop at once") == 1


def test_a_second_signal_stops_at_once(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        learn(run, after=twice)
    assert written(run) == 0 and run.completed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_in_the_last_step_cuts_nothing_short(run: Run) -> None:
    learn(run, after=lambda step: os.kill(os.getpid(), signal.SIGINT) if step == STEPS - 1 else None)
    assert (run.completed, run.interrupted, written(run)) == (STEPS, False, STEPS)


def test_in_a_thread_signals_are_left_alone(run: Run) -> None:
    before, found = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: found.append(learn(run)))
    thread.start()
    thread.join()
    assert found and run.completed == STEPS
    assert signal.getsignal(signal.SIGINT) is before


# --- for the owner ----------------------------------------------------------------------------------------------------


def test_a_line_says_what_was_spent_when_it_was_written(run: Run) -> None:
    run.log(0, loss=1.5)
    ask(run, 0)
    run.log(1, loss=0.5)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["epsilon_spent"]) for line in lines] == [
        (0, 1.5, str(0.0)),
        (1, 0.5, str(run.ledger.spent())),
    ]
    assert math.isfinite(lines[0]["time"])


def test_room_is_made_in_the_runs_own_journal(run: Run) -> None:
    room: list[bool] = []
    charge = run.ledger.charge

    def seen(event: Any) -> int:
        room.append((run.path / "journal" / "room.tmp").exists())
        return charge(event)

    run.ledger.charge = seen  # type: ignore[method-assign]
    ask(run, 0)
    run.close()
    assert room == [True]
    again = Run.open(run.path)
    again.journal.make_room(1000)  # and then the budget is spent
    assert (run.path / "journal" / "room.tmp").stat().st_size > 8000
    again.close()
    assert np.array_equal(values(run), [0]) and not list((run.path / "journal").glob("*.tmp"))
