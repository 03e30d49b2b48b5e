"""Faults on purpose, and what must hold after each: run by test_faults.py, or by hand as

    python tests/e2e/faults.py --faults 200 --seed 1

A process that has torch loaded forks one child per attempt to train. The child carries a witness: it notes every
charge, noise draw, use of noise, release, journaled value and lesson in a log of its own, one durable line each, and
at a point drawn from the seed a fault happens. After the faults of a trial the run is resumed, and `broken_promises`
compares the witness's log, the ledger, the journal and the release.

Twins are mechanisms, ledgers and journals that break a promise. The same harness must catch each of them.
"""

import argparse
import contextlib
import ctypes
import errno
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STEPS = 4
OPTIONS = ("--data", "digits", "--preset", "quick", "--teachers", "12", "--batch", "8", "--steps", str(STEPS))
ROOMY = ("--sigma", "1000")  # the budget holds several times as many steps; without it, every charge is needed

# Where a fault can happen, by what it separates. Writes can also be torn: part of them reaches the disk.
POINTS: dict[str, tuple[str, ...]] = {
    "noise drawn | charge": ("drawn",),
    "charge | noise taken": ("charged",),
    "noise taken | journal": ("taken", "released", "journal sync", "journal replace"),
    "journal | checkpoint": ("journaled", "learned", "checkpoint begins"),
    "inside the ledger": ("ledger torn", "ledger sync", "ledger synced"),
    "inside the journal": ("journal torn",),
    "inside a checkpoint": ("checkpoint torn", "checkpoint replace", "checkpoint replaced", "forget", "forgotten"),
    "inside a release": ("release torn", "release sync", "release replace", "release replaced"),
    "inside the folder's creation": ("config sync", "run replace", "run replaced"),
}
NO_NOISE = "noise process killed"
TRAINING = (
    "drawn",
    "charged",
    "taken",
    "released",
    "journaled",
    "learned",
    "checkpoint begins",
    "forgotten",
    "release sync",
)
LASTING = ("disk full", "disk full, said by the calls", "read-only folder", "clock jumps", "second writer", NO_NOISE)
KINDS = (*POINTS, "anywhere", *LASTING)

TWINS = (
    "takes noise before it charges",
    "charges without waiting for the disk",
    "ledger that forgets its last line",
    "journal that forgets",
    "noise that repeats",
    "certificate of an older ledger",
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The `nth` time `point` is passed, something happens; of a torn write `fraction` is on disk."""

    kind: str
    point: str
    nth: int
    fraction: float

    @classmethod
    def draw(cls, luck: random.Random, kinds: tuple[str, ...] = KINDS) -> "Fault":
        kind = luck.choice(kinds)
        point = luck.choice(POINTS.get(kind, TRAINING))
        often = point.startswith(("drawn", "charged", "taken", "released", "journal", "learned", "ledger "))
        return cls(kind=kind, point=point, nth=luck.randint(1, 3) if often else 1, fraction=luck.random())


# --- in the child -----------------------------------------------------------------------------


class Witness:
    """Notes what happens, and makes the fault happen."""

    def __init__(
        self,
        log: Path,
        run: Path,
        fault: Fault | None,
        attempt: int,
        gate: tuple[int, int] | None,
        *,
        synced: bool = True,
    ) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._run, self._fault, self._attempt, self._gate = run, fault, attempt, gate
        self._passed: Counter[str] = Counter()
        # Before it is wrapped. A log that only has to outlive a kill needs no sync, and then it does not slow the run.
        self._fsync = os.fsync if synced else lambda descriptor: None
        self.durable = charges_in(self._ledger())  # whole charges that were on disk when this process came
        self.full = False
        self.depth = 0

    def _ledger(self) -> bytes:
        path = self._run / "ledger.jsonl"
        return path.read_bytes() if path.exists() else b""

    def note(self, what: str, **facts: Any) -> None:
        line = (
            json.dumps(
                {"what": what, "attempt": self._attempt, "durable": self.durable, "at": time.monotonic(), **facts}
            )
            + "\n"
        )
        os.write(self._log, line.encode())
        self._fsync(self._log)

    def is_due(self, point: str) -> bool:
        """Whether the fault is to happen here and now; asked once at every passing."""
        self._passed[point] += 1
        fault = self._fault
        if fault is None or fault.kind == "anywhere":  # that one comes from outside
            return False
        return (fault.point, fault.nth) == (point, self._passed[point])

    def passes(self, point: str) -> None:
        if self.is_due(point):
            self.strike()

    def strike(self) -> None:
        assert self._fault is not None
        self.note("fault", kind=self._fault.kind, point=self._fault.point, nth=self._fault.nth)
        match self._fault.kind:
            case "disk full":
                fill(self._run.parent)
            case "disk full, said by the calls":
                self.full = True
            case "read-only folder":
                obey_permissions()
                for folder in (self._run, *(path for path in self._run.iterdir() if path.is_dir())):
                    folder.chmod(0o500)
            case "clock jumps":
                jump_about(random.Random(self._fault.fraction))
            case "noise process killed":
                for process in noise_processes(os.getpid()):
                    os.kill(process, signal.SIGKILL)
            case "second writer":
                assert self._gate is not None
                os.write(self._gate[1], b"?")
                os.read(self._gate[0], 1)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    def tear(self, content: bytes) -> bytes:
        assert self._fault is not None
        return content[: int(len(content) * self._fault.fraction)]

    def synced_ledger(self) -> None:
        self.durable = charges_in(self._ledger())


def charges_in(ledger: bytes) -> int:
    """Whole lines but the first, which is the budget."""
    return max(0, ledger.count(b"\n") - 1)


def fill(folder: Path) -> None:
    """Take all that is left of a small disk."""
    with contextlib.suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def obey_permissions() -> None:
    """Give up root's right to write where permissions forbid it (CAP_DAC_OVERRIDE), for this process alone."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) or (data.__setitem__(0, data[0] & ~0b110), libc.capset(header, data))[1]:
        raise OSError(ctypes.get_errno(), "capset")


def jump_about(luck: random.Random) -> None:
    """From now on every look at a clock may be days before the last one, or years after it."""
    for name in ("time", "monotonic", "perf_counter"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: real() + luck.choice((-1e6, -3600.0, 0.0, 3600.0, 1e8)))


def noise_processes(of: int) -> list[int]:
    """Those that draw noise ahead for a process (see `privacy/exact.py`)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(word.endswith(b"/privacy/exact.py") for word in words) and str(of).encode() in words:
                found.append(int(path.parent.name))
    return found


def no_space(path: object) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def place_of(path: str, run: Path) -> str:
    """What a file of the run belongs to: ledger, journal, checkpoint, release, config or run."""
    parts = Path(path).parts
    at = next((i for i, part in enumerate(parts) if part.strip(".").startswith(run.name)), None)
    if at is None:
        return ""
    inside = parts[at + 1 :]
    if not inside:
        return "run"
    first = inside[0]
    for word in ("ledger", "journal", "checkpoint", "release", "config"):
        if first.strip(".").startswith(word):
            return word
    return ""


def instrument(witness: Witness, run: Path, twin: str | None) -> None:
    """Wrap every place of interest. Written against names, not code: mechanisms and noise sources may change."""
    import safetensors.torch

    from datalens.privacy import mechanisms, noise
    from datalens.privacy.journal import Journal
    from datalens.privacy.ledger import Ledger
    from datalens.released import release as release_module
    from datalens.released.decode import Decode
    from datalens.released.student import Student
    from datalens.run.folder import Run

    if twin is not None:
        break_promise(twin, run)
    fsync, replace_, save_file = os.fsync, os.replace, safetensors.torch.save_file

    def watched_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        place = place_of(path, run)
        if place and witness.full:
            raise no_space(path)
        if place == "journal" and Path(path).suffix == ".tmp" and witness.is_due("journal torn"):
            os.truncate(descriptor, int(os.fstat(descriptor).st_size * witness._fault.fraction))  # type: ignore[union-attr]
            witness.strike()
        witness.passes(f"{place} sync")
        if place == "ledger" and twin == "charges without waiting for the disk":
            return
        fsync(descriptor)
        if place == "ledger":
            witness.synced_ledger()
        witness.passes(f"{place} synced")

    def watched_replace(source: Any, target: Any, **how: Any) -> None:
        place = place_of(os.fspath(target), run)
        if place and witness.full:
            raise no_space(target)
        witness.passes(f"{place} replace")
        replace_(source, target, **how)
        witness.passes(f"{place} replaced")

    def watched_save(tensors: Any, path: Any, metadata: Any = None) -> None:
        place = place_of(os.fspath(path), run)
        if witness.full:
            from safetensors import SafetensorError

            raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)}")
        if witness.is_due(f"{place} torn"):
            Path(path).write_bytes(witness.tear(safetensors.torch.save(tensors, metadata)))
            witness.strike()
        save_file(tensors, path, metadata=metadata)

    os.fsync, os.replace = watched_fsync, watched_replace  # type: ignore[assignment]
    safetensors.torch.save_file = release_module.save_file = watched_save

    open_ledger = Ledger.open.__func__  # type: ignore[attr-defined]

    def opened(cls: Any, path: Path) -> Ledger:
        ledger = open_ledger(cls, path)
        ledger._file = TornFile(ledger._file, witness)
        return ledger

    Ledger.open = classmethod(opened)  # type: ignore[assignment, method-assign]

    def after(owner: Any, name: str, then: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then(result, *args, **kwargs)
            return result

        setattr(owner, name, wrapped)

    def before(owner: Any, name: str, first: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def charged(number: int, ledger: Ledger, event: Any) -> None:
        witness.note("charge", number=number, step=event.step)
        witness.passes("charged")

    def released(value: Any, *_: Any, **__: Any) -> None:
        witness.note("release", number=value.number, step=value.event.step, digest=digest(value.value))
        witness.passes("released")

    def journaled(_: None, __: Journal, value: Any) -> None:
        witness.note("journal", number=value.number, step=value.event.step, digest=digest(value.value))
        witness.passes("journaled")

    def used(_: Decode, value: Any) -> None:
        witness.note("use", number=value.number, step=value.event.step, digest=digest(value.value))

    def learned(_: None, __: Student, fakes: Any, ___: Any) -> None:
        witness.passes("learned")

    after(Ledger, "charge", charged)
    after(Journal, "save", journaled)
    before(Decode, "__call__", used)
    after(Student, "step", learned)
    before(Run, "_checkpoint", lambda *_: witness.passes("checkpoint begins"))
    before(Journal, "forget_before", lambda *_, **__: witness.passes("forget"))
    after(Journal, "forget_before", lambda *_, **__: witness.passes("forgotten"))
    for mechanism in gates(mechanisms):
        after(mechanism, "release", released)
    for source, name in draws(noise):
        setattr(source, name, watched_draw(getattr(source, name), witness))

    def taken(values: Any, _: noise.Held) -> None:
        witness.note("take", digest=digest(values))
        witness.passes("taken")

    after(noise.Held, "take", taken)


def watched_draw(draw: Callable[..., Any], witness: Witness) -> Callable[..., Any]:
    """A call from outside that brings noise is a draw; what such a call does inside is not another one."""

    @functools.wraps(draw)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        witness.depth += 1
        try:
            values = draw(*args, **kwargs)
        finally:
            witness.depth -= 1
        if witness.depth == 0 and hasattr(values, "tobytes"):
            witness.note("draw", digest=digest(values))
            witness.passes("drawn")
        return values

    return wrapped


def gates(module: Any) -> list[Any]:
    return [kind for _, kind in inspect.getmembers(module, inspect.isclass) if "release" in vars(kind)]


def draws(module: Any) -> list[tuple[Any, str]]:
    """Public methods of noise sources: the classes that say where their noise comes from."""
    sources = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if hasattr(kind, "origin")]
    return [
        (source, name)
        for source in sources
        for name, method in vars(source).items()
        if inspect.isfunction(method) and not name.startswith("_")
    ]


def digest(values: Any) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


class TornFile:
    """The ledger's file, of whose next line a part may be all that is written."""

    def __init__(self, file: Any, witness: Witness) -> None:
        self._file, self._witness = file, witness

    def write(self, line: bytes) -> int:
        if self._witness.full:
            return self._file.write(line[: len(line) // 3])
        if self._witness.is_due("ledger torn"):
            self._file.write(self._witness.tear(line))
            self._witness.strike()
        return self._file.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def break_promise(twin: str, run: Path) -> None:
    """Make the code one that the harness must catch."""
    from datalens.privacy import mechanisms, noise
    from datalens.privacy.journal import Journal
    from datalens.privacy.ledger import Ledger
    from datalens.released import release as release_module

    charge = Ledger.charge
    if twin == "takes noise before it charges":
        for gate in gates(mechanisms):
            original = gate.release

            def late(self: Any, total: Any, ledger: Any, *, step: int, original: Any = original) -> Any:
                events: list[Any] = []
                Ledger.charge = lambda ledger, event: events.append(event) or len(ledger.events)  # type: ignore
                try:
                    value = original(self, total, ledger, step=step)
                finally:
                    Ledger.charge = charge  # type: ignore[method-assign]
                charge(ledger, *events)
                return value

            gate.release = late
    elif twin == "ledger that forgets its last line":
        path = run / "ledger.jsonl"
        if path.exists() and charges_in(path.read_bytes()):
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    elif twin == "journal that forgets":
        Journal.save = lambda self, released: None  # type: ignore[method-assign, assignment]
    elif twin == "noise that repeats":
        for source, name in draws(noise):
            setattr(source, name, the_first_again(getattr(source, name)))
    elif twin == "certificate of an older ledger":
        copyfile = release_module.shutil.copyfile

        def shorter(source: Any, target: Any) -> None:
            copyfile(source, target)
            Path(target).write_bytes(b"".join(Path(source).read_bytes().splitlines(keepends=True)[:-1]))

        release_module.shutil.copyfile = shorter  # type: ignore[assignment]


def the_first_again(draw: Callable[..., Any]) -> Callable[..., Any]:
    remembered: list[Any] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        remembered.append(remembered[0] if remembered else draw(*args, **kwargs))
        return remembered[0]

    return wrapped


# --- in the harness ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: what was done to it, and which promises it broke."""

    seed: str
    faults: list[dict[str, Any]]
    problems: list[str]
    draws: int
    charges: int


def preload() -> None:
    """Everything an attempt imports, so that a fork has it."""
    import safetensors.torch  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo

    import datalens.driver
    import datalens.methods.topagg
    import datalens.released.release

    torch.set_num_threads(1)
    make = datalens.methods.topagg.dcgan_architecture  # narrow: the faults are in the files
    datalens.methods.topagg.dcgan_architecture = lambda *a, **k: replace(make(*a, **k), dense=32, widths=(8, 8))


def attempt(
    run: Path,
    log: Path,
    number: int,
    *,
    fault: Fault | None,
    options: tuple[str, ...],
    twin: str | None,
    luck: random.Random,
) -> tuple[int, str]:
    """One process that trains, or goes on training. Returns how it ended (−9: killed) and what it said."""
    import datalens.run.folder
    from datalens.cli.main import main
    from datalens.privacy import noise

    said = log.with_suffix(".said")
    ours, theirs = os.pipe(), os.pipe()
    every, delay = luck.choice((-1.0, 0.05, 20.0)), luck.uniform(0.0, 0.6)
    ahead = luck.random() < 0.3 or (fault is not None and fault.kind == NO_NOISE)
    child = os.fork()
    if child == 0:
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 99
        try:
            witness = Witness(log, run, fault, number, (theirs[0], ours[1]))
            instrument(witness, run, twin)
            datalens.run.folder.CHECKPOINT_SECONDS = every
            if ahead:
                noise.FEW_DRAWS = 0
            begin = ("--resume",) if run.exists() else (*OPTIONS, *options)
            main(["train", *begin, "--out", str(run), "--json"])
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(ours[1])
    os.close(theirs[0])
    try:
        if fault is not None and fault.kind == "anywhere":
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        if os.read(ours[0], 1):
            second_writer(run, log)
            os.write(theirs[1], b".")
    finally:
        os.close(ours[0])
        os.close(theirs[1])
        status = os.waitpid(child, 0)[1]
    if fault is not None and fault.kind == "anywhere" and os.WIFSIGNALED(status):
        add_line(log, what="fault", attempt=number, kind="anywhere", point=f"after {delay:.3f} s")
    if outlives(child):
        add_line(log, what="outlived", attempt=number)
    mend(run)
    return os.waitstatus_to_exitcode(status), said.read_text(encoding="utf-8", errors="replace")


def outlives(child: int) -> bool:
    """Whether a process that draws noise is still there some time after the one it drew for."""
    end = time.monotonic() + 300  # it ends at once; a busy machine may be slow to let it
    while noise_processes(child):
        if time.monotonic() > end:
            return True
        time.sleep(0.02)
    return False


def second_writer(run: Path, log: Path) -> None:
    """While the first is in the middle of its work: one more that resumes, and one that goes for the ledger alone."""
    from datalens.cli.main import main
    from datalens.errors import DatalensError
    from datalens.privacy.ledger import Ledger

    heard = io.StringIO()
    code: object = 0
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
        try:
            main(["train", "--resume", "--out", str(run)])
        except SystemExit as ended:
            code = ended.code
    try:
        Ledger.open(run / "ledger.jsonl").close()
        locked = False
    except DatalensError:
        locked = True
    refused = code == 2 and "another process" in heard.getvalue() and locked
    add_line(log, what="second writer", refused=refused, said=heard.getvalue()[-300:])


def add_line(log: Path, **facts: Any) -> None:
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def mend(run: Path) -> None:
    """What a person does before going on: make room, allow writing."""
    (run.parent / "filler").unlink(missing_ok=True)
    if run.exists():
        for folder in (run, *(path for path in run.iterdir() if path.is_dir())):
            folder.chmod(0o700)


def trial(folder: Path, seed: str, *, kinds: tuple[str, ...] = KINDS, twin: str | None = None, most: int = 3) -> Trial:
    """One to `most` faults, each on the run as the one before left it; then to the end; then the questions."""
    luck = random.Random(seed)
    run, log = folder / "run", folder / "witness.jsonl"
    log.touch()
    options = ROOMY if luck.random() < 0.75 else ()
    problems, ledgers = [], []
    number = 0
    for number in range(luck.randint(1, most)):
        fault = Fault.draw(luck, kinds)
        code, said = attempt(run, log, number, fault=fault, options=options, twin=twin, luck=luck)
        problems += rude(code, said, fault)
        problems += standing_release(run)
        ledgers.append(whole_lines(run))
    code, said = attempt(run, log, number + 1, fault=None, options=options, twin=twin, luck=luck)
    ledgers.append(whole_lines(run))
    seen = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    problems += broken_promises(run, code, said, seen, ledgers)
    return Trial(
        seed=seed,
        faults=[line for line in seen if line["what"] == "fault"],
        problems=problems,
        draws=sum(line["what"] == "draw" for line in seen),
        charges=charges_in(ledgers[-1]),
    )


def whole_lines(run: Path) -> bytes:
    path = run / "ledger.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def rude(code: int, said: str, fault: Fault) -> list[str]:
    """Killed, or done, or refused in one line; never a traceback."""
    if "Traceback" in said:
        return [f"{fault}: {said[-1500:]}"]
    return [] if code in (-9, 0, 2, 3) else [f"{fault}: ended with {code}: {said[-300:]}"]


def standing_release(run: Path) -> list[str]:
    """A release that is there stands, whatever happened around it."""
    from datalens.errors import DatalensError
    from datalens.released.verification import check_release

    if not (run / "release").exists():
        return []
    try:
        return [f"release: {problem}" for problem in check_release(run / "release").problems]
    except DatalensError as error:
        return [f"release: {error}"]


def broken_promises(run: Path, code: int, said: str, seen: list[dict[str, Any]], ledgers: list[bytes]) -> list[str]:
    """Of a run that was brought to its end, or could not be."""
    problems = [f"a second writer was let in: {line['said']}" for line in seen if line.get("refused") is False]
    problems += ["a process that draws noise outlived its run" for line in seen if line["what"] == "outlived"]
    for before, after in itertools.pairwise(ledgers):
        if not after.startswith(before):
            problems.append("a charge was forgotten: an earlier ledger is not the beginning of a later one")
    problems += uncharged_noise(seen)
    problems += wrong_values(seen, [json.loads(line) for line in ledgers[-1].splitlines()[1:]])
    journaled = any(line["what"] == "journal" for line in seen)
    if code == 3 and not journaled:
        return problems  # the whole budget went to faults, and that is said
    if code != 0:
        return [*problems, f"the run could not be finished ({code}): {said[-1500:]}"]
    problems += standing_release(run)
    done = json.loads(said.splitlines()[-1])
    if not done["epsilon_spent"] <= done["epsilon"]:
        problems.append(f"overspent: {done['epsilon_spent']} of {done['epsilon']}")
    if (run / "release" / "ledger.jsonl").read_bytes() != ledgers[-1]:
        problems.append("the release states other charges than the run")
    return problems


def uncharged_noise(seen: list[dict[str, Any]]) -> list[str]:
    """Noise is drawn ahead and held. Taken to be used, it has a charge of its own, on disk before that: what a process
    takes n-th follows its n-th charge, and was drawn by it."""
    problems = []
    counts = Counter(line["what"] for line in seen)
    if not counts["draw"] >= counts["take"] >= counts["release"]:
        problems.append(
            f"the witness saw {counts['draw']} draws, {counts['take']} of them taken, and {counts['release']} "
            "releases: some noise was not held"
        )
    for number in {line["attempt"] for line in seen if "attempt" in line}:
        charged = taken = 0
        last = None
        for line in (line for line in seen if line.get("attempt") == number):
            if line["what"] == "charge":
                charged, last = charged + 1, line["number"]
            if line["what"] == "take":
                taken += 1
                if taken > charged:
                    problems.append(f"attempt {number}: noise was taken that no charge had paid for")
                elif line["durable"] <= last:
                    problems.append(f"attempt {number}: noise was taken before charge {last} was on disk")
    return problems


def wrong_values(seen: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> list[str]:
    """Noise used twice, a charge with two values, an acknowledged value lost."""
    problems = []
    for what, said in (("draw", "drawn"), ("take", "taken")):
        noise = Counter(line["digest"] for line in seen if line["what"] == what)
        problems += [f"the same noise was {said} {times} times" for times in noise.values() if times > 1]
    released: dict[int, str] = {}
    for line in seen:
        if line["what"] != "release":
            continue
        if line["number"] in released:
            problems.append(f"charge {line['number']} paid for two releases")
        if line["digest"] in released.values():
            problems.append(f"step {line['step']}: the same value was released twice")
        released[line["number"]] = line["digest"]
        steps = [charge["event"]["step"] for charge in ledger]
        if line["number"] >= len(steps) or steps[line["number"]] != line["step"]:
            problems.append(f"the release of step {line['step']} is not in the ledger")
    kept: dict[int, dict[str, Any]] = {}
    for line in seen:
        if line["what"] == "journal":
            kept[line["step"]] = line
        elif line["what"] in ("charge", "use") and line["step"] in kept:
            there = kept[line["step"]]
            if line["what"] == "charge" or (line["number"], line["digest"]) != (there["number"], there["digest"]):
                problems.append(f"step {line['step']}: its value was in the journal, and was not used")
        if line["what"] == "use" and released.get(line["number"]) != line["digest"]:
            problems.append(f"step {line['step']}: a value was used that was never released")
    return problems


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """A folder on a disk of 48 MiB that is gone with this process; where that is not allowed, any folder."""
    with tempfile.TemporaryDirectory(prefix="datalens-faults-") as name:
        private_mounts, new_namespace = ("mount", "--make-rprivate", "/"), 0x00020000
        real = ctypes.CDLL(None).unshare(new_namespace) == 0 and all(
            subprocess.run(command, capture_output=True, check=False).returncode == 0
            for command in (private_mounts, ("mount", "-t", "tmpfs", "-o", "size=48m", "none", name))
        )
        try:
            yield Path(name), real
        finally:
            if real:
                subprocess.run(["umount", "-l", name], check=True)


def inject(
    count: int, seed: int, *, twin: str | None = None, most_trials: int = 10**6, one_each: bool = False
) -> dict[str, Any]:
    """Trials until `count` faults have happened. `one_each`: every kind in turn, one fault a trial.

    With a twin, until it is caught.
    """
    began = time.monotonic()
    happened: Counter[str] = Counter()
    problems: list[str] = []
    trials = drawn = charged = 0
    with small_disk() as (disk, real):
        usable = tuple(kind for kind in KINDS if real or kind != "disk full")
        while sum(happened.values()) < count and trials < most_trials and not (twin and problems):
            folder = disk / f"{trials}"
            folder.mkdir()
            kinds = (usable[sum(happened.values()) % len(usable)],) if one_each else usable
            found = trial(folder, f"{seed}-{trials}", kinds=kinds, twin=twin, most=1 if one_each or twin else 3)
            happened.update(fault["kind"] for fault in found.faults)
            problems += [f"trial {found.seed}: {problem}" for problem in found.problems]
            trials, drawn, charged = trials + 1, drawn + found.draws, charged + found.charges
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    return {
        "seed": seed,
        "trials": trials,
        "faults": sum(happened.values()),
        "kinds": {kind: happened[kind] for kind in KINDS},
        "draws": drawn,
        "charges": charged,
        "real_disk": real,
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--one-each", action="store_true", help="every kind of fault in turn, one a trial")
    parser.add_argument("--no-twins", action="store_true", help="do not check that the harness catches broken code")
    options = parser.parse_args()
    preload()
    found = inject(options.faults, options.seed, one_each=options.one_each)
    caught = {}
    for twin in () if options.no_twins else TWINS:
        seen = inject(10, options.seed, twin=twin, most_trials=10)
        caught[twin] = seen["problems"][:1]
    print(json.dumps({**found, "caught": caught}))
    sys.exit(1 if found["problems"] or not all(caught.values()) else 0)


if __name__ == "__main__":
    main()
