"""Whatever ends a run, and whenever: no charge is forgotten, no paid value is wasted, no noise is used twice."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

STEPS = 4
ROOMY = ("--steps", STEPS, "--sigma", 1000)  # the budget holds several times as many steps
TIGHT = ("--steps", STEPS)  # the noise is calibrated: every charge is needed

pytestmark = pytest.mark.usefixtures("quickly")


class Death(BaseException):
    """The process is gone: nothing catches this."""


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def train(datalens, small, run):
    """`train()` begins the run, `train(resume=True)` goes on with it."""
    return lambda *options, resume=False: datalens(
        "train", *(("--resume",) if resume else (*small, *options)), "--out", run, "--json"
    )


@pytest.fixture
def used(monkeypatch):
    """(number of the charge, step, value) of every release the student learned from, as it happens."""
    from datalens.released.decode import Decode

    seen, decode = [], Decode.__call__

    def spy(self, released):
        seen.append((released.number, released.event.step, released.value.copy()))
        return decode(self, released)

    monkeypatch.setattr(Decode, "__call__", spy)
    return seen


def dies_at(monkeypatch, owner, name, *, call):
    """The `call`-th time (from 0) `owner.name` is reached, the process dies there. Returns what it was called with."""
    original, count, arguments = getattr(owner, name), 0, []

    def deadly(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call + 1:
            arguments.extend(args)
            raise Death
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, deadly)
    return arguments


def kill(train, *options, resume=False):
    with pytest.raises(Death):
        train(*options, resume=resume)


def charges(run):
    """The steps that were charged, in order; from complete lines only."""
    content = (run / "ledger.jsonl").read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [json.loads(line)["event"]["step"] for line in lines[1:]]


def journal(run):
    return sorted(int(path.stem) for path in (run / "journal").glob("*.release"))


def finishes(train, datalens, run, *, steps=STEPS):
    """The run goes on to its end, and what it releases stands."""
    found = train(resume=True).succeeded().json
    assert found["steps"] == steps
    assert found["epsilon_spent"] <= found["epsilon"]
    checked = datalens("verify", run, "--json").succeeded().json
    assert checked["ok"] is True
    assert checked["events"] == len(charges(run))
    assert not list(run.rglob("*.tmp"))
    assert not list(run.glob("release.*"))


# --- one fault at a known place ---------------------------------------------------------------


def test_between_charge_and_noise(monkeypatch, train, datalens, run, used):
    from datalens.privacy.noise import Held

    with monkeypatch.context() as patch:
        dies_at(patch, Held, "take", call=2)
        kill(train, *ROOMY)
    assert charges(run) == [0, 1, 2]
    assert journal(run) == [0, 1]
    before = (run / "ledger.jsonl").read_bytes()
    del used[2:]
    finishes(train, datalens, run)
    assert (run / "ledger.jsonl").read_bytes().startswith(before)
    assert charges(run) == [0, 1, 2, 2, 3]
    first, second, *again = used
    assert [(number, step) for number, step, _ in again] == [(0, 0), (1, 1), (3, 2), (4, 3)]
    assert np.array_equal(again[0][2], first[2])
    assert np.array_equal(again[1][2], second[2])


def test_while_noise_is_drawn_nothing_is_charged_yet(monkeypatch, train, datalens, run):
    """Drawing takes longest, so that is where most kills fall."""
    from datalens.privacy.noise import ExactNoise

    with monkeypatch.context() as patch:
        dies_at(patch, ExactNoise, "integers", call=2)
        kill(train, *TIGHT)
    assert charges(run) == journal(run) == [0, 1]
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_between_noise_and_charge_nothing_is_charged_and_no_noise_is_on_disk(monkeypatch, train, datalens, run):
    from datalens.privacy.ledger import Ledger
    from datalens.privacy.noise import Held

    drawn, hold = [], Held.__init__
    with monkeypatch.context() as patch:
        patch.setattr(Held, "__init__", lambda self, values: drawn.append(values) or hold(self, values))
        dies_at(patch, Ledger, "charge", call=2)
        kill(train, *TIGHT)
    assert charges(run) == journal(run) == [0, 1] and len(drawn) == 3
    for path in filter(Path.is_file, run.rglob("*")):
        assert not any(noise.tobytes() in path.read_bytes() for noise in drawn)
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_between_the_journals_write_and_its_sync_nothing_is_lost(monkeypatch, train, datalens, run, used):
    """All of the value is written: that its process was killed before it was synced does not matter."""
    from datalens.privacy import journal as module

    fsync = module.os.fsync

    def deadly(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("00000002.tmp"):
            raise Death
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", deadly)
        kill(train, *TIGHT)
    assert charges(run) == [0, 1, 2] and journal(run) == [0, 1]
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_between_noise_and_journal(monkeypatch, train, datalens, run, used):
    from datalens.privacy.journal import Journal

    with monkeypatch.context() as patch:
        lost = dies_at(patch, Journal, "save", call=2)
        kill(train, *ROOMY)
    value = lost[1].value
    assert charges(run) == [0, 1, 2]
    assert journal(run) == [0, 1]
    for path in filter(Path.is_file, run.rglob("*")):
        assert value.tobytes() not in path.read_bytes()
    used.clear()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 2, 3]
    assert [number for number, _, _ in used] == [0, 1, 3, 4]
    # Same votes, other noise: about no coordinate is the same by more than chance (σ = 1000).
    assert (used[2][2] == value).mean() < 0.01


def test_between_journal_and_checkpoint(monkeypatch, train, datalens, run, used):
    from datalens.released.student import Student

    with monkeypatch.context() as patch:
        dies_at(patch, Student, "step", call=2)
        kill(train, *ROOMY)
    assert charges(run) == [0, 1, 2]
    assert journal(run) == [0, 1, 2]
    before = [value for _, _, value in used]
    used.clear()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]
    assert [(number, step) for number, step, _ in used] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for (_, _, value), earlier in zip(used, before, strict=False):
        assert np.array_equal(value, earlier)


class TearingFile:
    """A ledger file that gets half of its third charge onto the disk."""

    def __init__(self, file, *, after):
        self._file, self._left, self._after, self.name = file, 2, after, file.name

    def write(self, line):
        self._left -= 1
        if self._left >= 0:
            return self._file.write(line)
        written = self._file.write(line[: len(line) // 2])
        return self._after(written)

    def fileno(self):
        return self._file.fileno()

    def close(self):
        self._file.close()


def tear(monkeypatch, *, after):
    from datalens.privacy.ledger import Ledger

    original = Ledger.open.__func__

    def opened(cls, path):
        ledger = original(cls, path)
        ledger._file = TearingFile(ledger._file, after=after)
        return ledger

    monkeypatch.setattr(Ledger, "open", classmethod(opened))


def die(*_):
    raise Death


def test_inside_the_ledgers_write(monkeypatch, train, datalens, run, used):
    with monkeypatch.context() as patch:
        tear(patch, after=die)
        kill(train, *ROOMY)
    assert not (run / "ledger.jsonl").read_bytes().endswith(b"\n")
    assert charges(run) == journal(run) == [0, 1]
    assert len(used) == 2  # a charge that is not whole releases nothing
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_a_ledger_that_takes_half_a_line_releases_nothing(monkeypatch, train, datalens, run, used):
    with monkeypatch.context() as patch:
        tear(patch, after=lambda written: written)
        assert "ledger" in train(*ROOMY).refused(after_start=True)
    assert len(used) == 2
    assert not (run / "release").exists()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_between_the_ledgers_write_and_its_sync(monkeypatch, train, datalens, run):
    """The line is whole: it counts, although nothing was released for it."""
    from datalens.privacy import ledger

    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, "fsync", fail_for(run / "ledger.jsonl", lines=4, error=Death()))
        kill(train, *ROOMY)
    assert charges(run) == [0, 1, 2]
    assert journal(run) == [0, 1]
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 2, 3]


def fail_for(path, *, lines, error):
    """An os.fsync that fails for one file, once it has so many lines."""
    fsync = os.fsync

    def failing(descriptor):
        is_it = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        if is_it and path.read_bytes().count(b"\n") >= lines:
            raise error
        fsync(descriptor)

    return failing


def write_half(state, path, metadata=None):
    from safetensors.torch import save

    content = save(state, metadata)
    Path(path).write_bytes(content[: len(content) // 2])
    raise Death


@pytest.fixture
def checkpoint_early(monkeypatch):
    """One checkpoint after the first step, the next one at the end (or 20 times the first one's cost later)."""
    from datalens.run import folder

    monkeypatch.setattr(folder, "CHECKPOINT_SECONDS", -1.0)


@pytest.mark.usefixtures("checkpoint_early")
def test_inside_the_first_checkpoint(monkeypatch, train, datalens, run):
    import safetensors.torch

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", write_half)
        kill(train, *ROOMY)
    assert charges(run) == journal(run) == [0]
    (draft,) = (run / "checkpoints").iterdir()
    assert stat.S_IMODE(draft.stat().st_mode) == 0o600
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


@pytest.mark.parametrize("whole", [2, 3], ids=["teachers", "latest"])
@pytest.mark.usefixtures("checkpoint_early")
def test_inside_a_later_checkpoint(monkeypatch, train, datalens, run, whole):
    """The one before it is still there, and so are the values since. A checkpoint is two files: `whole` are written."""
    import safetensors.torch

    save, saved = safetensors.torch.save_file, 0

    def second_time(*args, **kwargs):
        nonlocal saved
        saved += 1
        return save(*args, **kwargs) if saved <= whole else write_half(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", second_time)
        kill(train, *ROOMY)
    assert (run / "checkpoints" / "latest.safetensors").exists()
    assert (run / "checkpoints" / "teachers-1-0-19.safetensors").exists()
    done = len(charges(run))
    assert journal(run) == list(range(1, done))
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


@pytest.mark.usefixtures("checkpoint_early")
def test_between_checkpoint_and_journal(monkeypatch, train, datalens, run, used):
    """Values that outlived their checkpoint are not used a second time."""
    from datalens.privacy.journal import Journal

    with monkeypatch.context() as patch:
        dies_at(patch, Journal, "forget_before", call=0)
        kill(train, *ROOMY)
    assert journal(run) == [0]
    used.clear()
    finishes(train, datalens, run)
    assert [step for _, step, _ in used] == [1, 2, 3]
    assert charges(run) == [0, 1, 2, 3]
    assert journal(run) == []


def test_inside_a_journal_file(monkeypatch, train, datalens, run):
    """Half a value is no value: the step is asked, and charged, again."""
    from datalens.privacy import journal as module

    fsync = module.os.fsync

    def half(descriptor):
        if "/journal/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            raise Death
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", half)
        kill(train, *ROOMY)
    assert charges(run) == [0]
    assert journal(run) == []
    found = train(resume=True).succeeded().json
    assert found["steps"] == STEPS
    assert charges(run) == [0, 0, 1, 2, 3]
    datalens("verify", run).succeeded()


@pytest.mark.parametrize("moment", ["old aside", "new in place"])
def test_inside_the_swap_of_releases(monkeypatch, train, datalens, run, moment):
    train(*ROOMY).succeeded()
    replace = os.replace

    def deadly(source, target):
        if Path(target).name == ("release.old" if moment == "old aside" else "release"):
            raise Death
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", deadly)
        kill(train, resume=True)
    if moment == "old aside":
        datalens("verify", run).succeeded()
    else:
        assert "--resume" in datalens("verify", run).refused()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_inside_the_folders_creation(monkeypatch, train, datalens, run):
    from datalens.privacy.ledger import Ledger

    with monkeypatch.context() as patch:
        dies_at(patch, Ledger, "create", call=0)
        kill(train, *ROOMY)
    assert not run.exists()
    assert train(*ROOMY).succeeded().json["steps"] == STEPS


def test_every_charge_counts_even_when_its_value_was_lost(monkeypatch, train, datalens, run):
    """Without room in the budget the run ends a step earlier; never over budget."""
    from datalens.privacy.noise import Held

    with monkeypatch.context() as patch:
        dies_at(patch, Held, "take", call=1)
        kill(train, *TIGHT)
    finishes(train, datalens, run, steps=STEPS - 1)
    assert charges(run) == [0, 1, 1, 2]
    finishes(train, datalens, run, steps=STEPS - 1)  # and asking once more changes nothing
    assert charges(run) == [0, 1, 1, 2]


def test_a_shortfall_is_said(monkeypatch, train, run):
    from datalens.privacy.noise import Held

    with monkeypatch.context() as patch:
        dies_at(patch, Held, "take", call=0)
        kill(train, *TIGHT)
    assert f"3 of {STEPS} steps" in train(resume=True).err


@pytest.mark.parametrize("place", ["student", "checkpoint"])
@pytest.mark.usefixtures("checkpoint_early")
def test_a_resumed_run_ends_where_an_unbroken_one_does(monkeypatch, datalens, small, tmp_path, place):
    """Without noise a run is a function of its seed: teachers, optimisers and all must come back bit by bit."""
    from safetensors.numpy import load_file

    from datalens.released.student import Student
    from datalens.run.folder import Run

    options = ("train", *small, "--steps", 4, "--epsilon", "inf")
    datalens(*options, "--out", tmp_path / "whole").succeeded()
    with monkeypatch.context() as patch:
        owner, name, call = (Student, "step", 2) if place == "student" else (Run, "_checkpoint", 1)
        dies_at(patch, owner, name, call=call)
        with pytest.raises(Death):
            datalens(*options, "--out", tmp_path / "broken")
    datalens("train", "--out", tmp_path / "broken", "--resume").succeeded()
    whole, broken = (load_file(tmp_path / run / "release" / "generator.safetensors") for run in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert [name for name in whole if not np.array_equal(whole[name], broken[name])] == []


# --- disks ------------------------------------------------------------------------------------


@pytest.fixture
def file_size_limit():
    """No file may grow past so many bytes: what a full disk does, for everybody and without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_folder(train, run, file_size_limit):
    file_size_limit(100)
    train(*ROOMY).refused()
    file_size_limit(None)
    assert list(run.parent.iterdir()) == []


def test_no_room_for_a_release_costs_nothing(train, datalens, run, file_size_limit):
    """Found out before the charge; the line names the folder and how much is needed."""
    file_size_limit(10_000)  # enough for config and ledger
    line = train(*TIGHT, "--batch", 64).refused(after_start=True)
    assert str(run / "journal") in line and "bytes" in line and "nothing was charged" in line
    assert charges(run) == [] == journal(run)
    file_size_limit(None)
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_no_room_for_the_ledger(monkeypatch, train, datalens, run, used):
    import errno

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for(run / "ledger.jsonl", lines=3, error=error))
        line = train(*ROOMY).refused(after_start=True)
    assert "ledger" in line
    assert "No space left" in line
    assert "nothing was released" in line
    assert len(used) == 1
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 1, 2, 3]  # the line was written: whether it reached the disk nobody knew


@pytest.mark.parametrize("size", [300_000, 20_000], ids=["checkpoint", "generator"])
def test_no_room_for_weights(monkeypatch, train, run, file_size_limit, size):
    from datalens.run import folder as folder

    if size == 20_000:
        monkeypatch.setattr(folder, "CHECKPOINT_BYTES", 0)  # none is written, so that the release is the first to fail
    file_size_limit(size)
    assert str(run) in train(*ROOMY).refused(after_start=True)


def test_after_making_room_the_run_goes_on(train, datalens, run, file_size_limit):
    file_size_limit(300_000)
    with pytest.raises(BaseException):  # noqa: B017, PT011 (how it ends is the test above)
        train(*ROOMY).succeeded()
    file_size_limit(None)
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_a_disk_that_is_really_full(datalens, small, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(100_000))
        line = datalens("train", *small, "--steps", 1, "--out", disk / "run").refused()
        assert "No space left" in line
        assert os.listdir(disk) == ["filler"]
    finally:
        subprocess.run(["umount", disk], check=True)


# --- people -----------------------------------------------------------------------------------


@pytest.fixture
def signals(monkeypatch):
    """Signals that arrive while the student learns from step 1."""
    from datalens.released.student import Student

    step = Student.step

    def arrange(*numbers):
        def interrupted(self, fakes, direction):
            if fakes.step == 1:
                for number in numbers:
                    signal.raise_signal(number)
            step(self, fakes, direction)

        monkeypatch.setattr(Student, "step", interrupted)

    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield arrange
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_step_and_releases(train, datalens, run, signals, number):
    signals(number)
    result = train(*TIGHT)
    assert result.code == 130
    assert (result.json["steps"], result.json["interrupted"]) == (2, True)
    assert "--resume" in result.err.splitlines()[-1]
    checked = datalens("verify", run, "--json").succeeded().json
    assert (checked["ok"], checked["events"]) == (True, 2)
    signals()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def test_two_signals_stop_at_once(train, datalens, run, signals):
    signals(signal.SIGINT, signal.SIGINT)
    line = train(*TIGHT).refused(130, after_start=True)
    assert line.startswith("datalens: stopped; ε = ") and line.endswith(f"`datalens train --out {run} --resume`")
    assert charges(run) == journal(run) == [0, 1]
    signals()
    finishes(train, datalens, run)
    assert charges(run) == [0, 1, 2, 3]


def until(condition):
    """Waits for an event, however long a busy machine takes; whoever it waits for must not be able to hang."""
    while not condition():
        time.sleep(0.005)


@pytest.fixture
def live(script, environment, small, run):
    """A real process, training. `live(steps)` returns it once it is well under way."""
    started = []

    def start(steps):
        options = ("train", *small, "--steps", str(steps), "--out", str(run), "--json")
        process = subprocess.Popen(
            [*script, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        started.append(process)
        until(lambda: process.poll() is not None or ((run / "ledger.jsonl").exists() and len(charges(run)) >= 5))
        assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c(monkeypatch, live, train, datalens, run):
    from datalens.methods import topagg as method
    from datalens.released.generator import dcgan_architecture

    steps = 50
    process = live(steps)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    found = json.loads(out.splitlines()[-1])
    assert 5 <= found["steps"] < steps
    assert found["interrupted"] is True
    assert (run / "checkpoints" / "latest.safetensors").is_file()
    checked = datalens("verify", run, "--json").succeeded().json
    assert (checked["ok"], checked["events"]) == (True, found["steps"])
    monkeypatch.setattr(method, "dcgan_architecture", dcgan_architecture)  # as wide as that process had it
    finishes(train, datalens, run, steps=steps)
    assert charges(run) == list(range(steps))


def test_two_processes(live, datalens, small, run):
    from datalens.run.folder import Run

    process = live(100_000)
    assert "another process" in datalens("train", "--out", run, "--resume").refused()
    assert "exists already" in datalens("train", *small, "--out", run).refused()
    seen = len(charges(run))
    until(lambda: len(charges(run)) > seen or process.poll() is not None)
    assert process.poll() is None  # the first one does not mind
    process.kill()
    process.wait()
    Run.open(run).close()  # the lock went with the process


# --- kill -9, again and again -----------------------------------------------------------------

KILLS = 20
LONG = 100  # steps


def test_twenty_kills(tmp_path, environment, datalens):
    run = tmp_path / "run"
    report = tmp_path / "report.json"
    command = [sys.executable, __file__, run, report]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(report.read_text())
    print("seed", seen["seed"])  # shown if anything below fails
    assert sum(one["killed"] for one in seen["attempts"]) == KILLS

    ledgers = [bytes.fromhex(one["ledger"]) for one in seen["attempts"]] + [(run / "ledger.jsonl").read_bytes()]
    whole = [ledger[: ledger.rfind(b"\n") + 1] for ledger in ledgers]
    for earlier, later in itertools.pairwise(whole):
        assert later.startswith(earlier)
    assert len(set(whole)) > 5  # the kills were not all in one place

    assert seen["code"] == 0, seen["log"]
    found = json.loads(seen["log"].splitlines()[-1])
    assert found["epsilon_spent"] <= found["epsilon"]
    assert found["steps"] <= LONG
    lost = {number for one in seen["attempts"] for number in one["lost"]}
    assert len(charges(run)) - found["steps"] == len(lost)
    kept = [step for number, step in enumerate(charges(run)) if number not in lost]
    assert kept == list(range(found["steps"]))
    checked = datalens("verify", run, "--json").succeeded().json
    assert (checked["ok"], checked["events"]) == (True, len(charges(run)))
    assert "Traceback" not in seen["log"]
    assert {path.name for path in run.iterdir()} >= {"config.json", "metrics.jsonl", "release"}
    for path in (run / "checkpoints").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def lost_releases(run):
    """Charges whose values are neither in the journal nor in the checkpoint: of a process killed just now, the last."""
    steps = charges(run) if (run / "ledger.jsonl").exists() else []
    for path in (run / "journal").glob("*.release"):
        from datalens.privacy.journal import Journal

        Journal._load(path)  # whole, or not there
    if not steps or len(steps) - 1 in journal(run) or steps[-1] < checkpointed(run):
        return []
    return [] if written_whole(run / "journal" / f"{len(steps) - 1:08d}.tmp") else [len(steps) - 1]


def written_whole(draft):
    """Whether a value lacks nothing but its name."""
    content = draft.read_bytes() if draft.exists() else b""
    return hashlib.sha256(content[32:]).digest() == content[:32]


def checkpointed(run):
    """How many steps the checkpoint holds."""
    path = run / "checkpoints" / "latest.safetensors"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return int(json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]["step"])


def ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def chain(run, report):
    """In a process of its own: import once, fork for every attempt, kill it somewhere, look, go on."""
    import safetensors.torch  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401 (torch.optim asks for it, and it takes a second)

    import datalens.driver
    import datalens.methods.topagg
    import datalens.released.release
    import datalens.run.folder
    from datalens.cli.main import main

    make = datalens.methods.topagg.dcgan_architecture  # narrow: less to compute, so more of the time is spent on files
    datalens.methods.topagg.dcgan_architecture = lambda *a, **k: replace(make(*a, **k), dense=32, widths=(8, 8))
    seed = random.SystemRandom().randrange(2**32)
    luck = random.Random(seed)
    log = run.with_name("log")

    def attempt(*, checkpoint_every):
        child = os.fork()
        if child:
            return child
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        datalens.run.folder.CHECKPOINT_SECONDS = checkpoint_every
        size = ("--data", "digits", "--preset", "quick", "--teachers", "20", "--steps", str(LONG))
        code = 99
        try:
            main(["train", *(("--resume",) if run.exists() else size), "--out", str(run), "--json"])
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    def look(kind):
        """What a kill of this kind waits for a change of."""
        path = {
            "learning": run / "ledger.jsonl",
            "charging": run / "ledger.jsonl",
            "saving": run / "checkpoints" / "latest.tmp",
            "releasing": run / "release.new",
        }.get(kind)
        if path is None or not path.exists():
            return 0
        return path.read_bytes().count(b"\n") if path.suffix == ".jsonl" else path.stat().st_mtime_ns

    def due(kind, before, lines):
        now = look(kind)
        if kind in ("learning", "charging"):
            return now >= before + lines
        return kind == "starting" or now not in (0, before)

    # Released last: after that there is nothing left to do.
    kinds = ["starting"] * 4 + ["learning"] * 5 + ["charging"] * 5 + ["saving"] * 3
    luck.shuffle(kinds)
    kinds += ["releasing"] * 3
    # From a charge to its value in the journal it is a millisecond or so: hence no delay there.
    delays = {"starting": 0.3, "learning": 0.04, "charging": 0.0, "saving": 0.02, "releasing": 0.05}
    assert len(kinds) == KILLS

    attempts = []
    for kind in kinds:
        killed = False
        while not killed:  # one that ends before its moment does not count
            before, lines = look(kind), luck.randint(1, 6)
            child = attempt(checkpoint_every=luck.uniform(0, 0.1))
            with contextlib.suppress(FileNotFoundError):  # looked at while it was moved: the moment is now
                while not due(kind, before, lines) and not ended(child):
                    time.sleep(0.0001)
            time.sleep(luck.uniform(0, delays[kind]))
            os.kill(child, signal.SIGKILL)
            killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
            ledger = (run / "ledger.jsonl").read_bytes() if run.exists() else b""
            attempts.append({"kind": kind, "killed": killed, "ledger": ledger.hex(), "lost": lost_releases(run)})
            if len(attempts) > 2 * KILLS:
                raise RuntimeError(f"too fast to be killed (seed {seed})")
    code = os.waitstatus_to_exitcode(os.waitpid(attempt(checkpoint_every=20.0), 0)[1])
    found = {"seed": seed, "attempts": attempts, "code": code, "log": log.read_text()}
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    chain(Path(sys.argv[1]), Path(sys.argv[2]))
