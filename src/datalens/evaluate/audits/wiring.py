"""`datalens audit wiring`: does anything cross from the private side to the released one besides what was paid for?

The mechanisms have audits of their own; this one is about how a method is put together around them. Every method is
run, tiny, in several worlds: on other records, on neighbouring ones, with other noise, killed and resumed. Randomness
is recorded (`wiring_tape`), and from the second world on the gate hands out the values of the first. So the worlds
must agree bit for bit in all that may not know what they differ in:

| the worlds differ in | what must be the same |
|---|---|
| all records | release, charges, steps, the student's state, all that is printed |
| one unit | the same; and no sum has moved by more than was paid for |
| noise, samples, secret choices | the whole run folder, logs and private states too |

No statistics: nothing here is right with some probability. What it cannot see: what leaves by other ways than files,
standard output and the facts of `--json`; a leak that needs more than a few steps, or other records than those tried.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from datalens.errors import DatalensError
from datalens.evaluate.audits.wiring_noise import Fault, block, charge_faults, draws_of, noise_faults, stamp_faults
from datalens.evaluate.audits.wiring_runs import COUNT, Made, Ran, Subject, neighbour, other_records, records, subjects
from datalens.evaluate.audits.wiring_tape import Crossing, Tape, same
from datalens.privacy.events import GaussianEvent, LaplaceEvent, OneOfManyEvent, SubsampledGaussianEvent
from datalens.progress import bar
from datalens.released.verification import check_release

LOUD = 2.0**20  # drowns what teachers say, where charges follow from noisy counts
ROUNDING = 1e-5  # of sums in float32, relative to the longest they can be


@dataclass(kw_only=True, eq=False)
class Look:
    """A subject, and what was found so far."""

    subject: Subject
    folder: Path
    loud: float = 1.0
    faults: list[Fault] = field(default_factory=list)
    runs: int = 0

    def fault(self, kind: str, what: str) -> None:
        self.add([Fault(kind=kind, what=what)])

    def add(self, faults: Iterable[Fault]) -> None:
        self.faults += [fault for fault in dict.fromkeys(faults) if fault not in self.faults]

    def run(self, made: Made, tape: Tape, **named: Any) -> Ran:
        self.runs += 1
        return self.subject.run(made, self.folder / str(self.runs), tape, **named)

    def tape(self, key: int = 0, *, replay: Ran | None = None, **named: Any) -> Tape:
        """Everybody is in every sample, and teachers are chosen in turn, unless it is said otherwise."""
        values = None if replay is None else replay.tape.values
        return Tape(key, **{"words": everybody, "choose": in_turn, "replay": values, "loud": self.loud, **named})


def everybody(call: int, units: int) -> np.ndarray:
    return np.zeros(units, np.uint32)


def in_turn(call: int, teachers: int) -> int:
    return call % teachers


def look(subject: Subject, folder: Path, *, checks: Sequence[str] | None = None) -> list[Fault]:
    """All faults of a subject that these checks find (default: all of `CHECKS`)."""
    this = Look(subject=subject, folder=folder)
    made = records()
    first = this.run(made, this.tape())
    if not first.facts["private"]:
        this.add(stamp_faults(first))
        if math.isfinite(float(first.facts["epsilon_spent"])):
            this.fault("stamp", "a run with noise of the operating system's and a finite price is called not private")
        return this.faults
    for check in OF_ONE_RUN if checks is None else [name for name in OF_ONE_RUN if name in checks]:
        CHECKS[check](this, first, made)
    if any(len(crossing.charges) > 1 for crossing in first.tape.crossings):
        # What is charged follows from noisy counts, and may so be another in another world: let noise alone decide.
        this.loud = LOUD
        first = this.run(made, this.tape())
    for check in CHECKS if checks is None else checks:
        if check not in OF_ONE_RUN:
            CHECKS[check](this, first, made)
    return this.faults


# --- worlds ---------------------------------------------------------------------------------------


def _check_records(this: Look, first: Ran, made: Made) -> None:
    """Everything on the released side is the same whatever the records are, given what the gate let out."""
    moved = False
    for name, others in other_records().items():
        told = -1e9 if moved else 1e9  # the owner, of teachers: such as their loss
        try:
            other = this.run(others, this.tape(replay=first, scalar=told))
        except DatalensError as error:
            this.fault("records", f"{name}: it ended with an error ({error}), given the same released values")
            continue
        _compare(this, "records", name, first, other, first.released, other.released)
        pairs = zip(first.tape.crossings, other.tape.crossings, strict=False)
        moved = moved or any(not same(one.total, two.total) for one, two in pairs)
    if not moved:
        this.fault("records", "no sum that reaches the gate depends on records: nothing was looked at")


def _check_secrets(this: Look, first: Ran, made: Made) -> None:
    """Noise, samples and choices are nowhere on disk, and in no log; and with other bytes they are others."""
    secrets: dict[str, Any] = {"words": None, "choose": lambda call, teachers: (2 * call + 1) % teachers}
    if this.loud == 1.0:
        tape = this.tape(1, replay=first, **secrets)
    else:  # charges follow from noise: other noise with the same outcome
        tape = this.tape(replay=first, **secrets | {"loud": 2 * this.loud})
    other = this.run(made, tape)
    _compare(this, "secrets", "other noise, samples and choices", first, other, first.files, other.files)
    for number, (one, two) in enumerate(zip(first.tape.crossings, other.tape.crossings, strict=False)):
        drawn = [draws_of(crossing) for crossing in (one, two)]
        if drawn[0].size >= 16 and same(*drawn):
            this.fault("noise", f"release {number} has the same noise in two runs whose random bytes differ")


def _compare(
    this: Look, kind: str, world: str, first: Ran, other: Ran, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    lengths = [(len(ran.tape.crossings), len(ran.tape.charges)) for ran in (first, other)]
    if lengths[0] != lengths[1]:
        this.fault(kind, f"{world}: {lengths[1][0]} releases and {lengths[1][1]} charges, for {lengths[0]}")
    if other.tape.reshaped:
        this.fault(kind, f"{world}: releases have another shape or number")
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            this.fault(kind, f"{world}: {name} differs")
    for name in sorted(first.facts.keys() | other.facts.keys()):
        if first.facts.get(name) != other.facts.get(name):
            this.fault(kind, f"{world}: the fact {name} differs")
    if first.said != other.said:
        this.fault(kind, f"{world}: what is printed differs")


def _check_neighbours(this: Look, first: Ran, made: Made) -> None:
    subject = this.subject
    other = this.run(neighbour(made, subject.relation, person=subject.person), this.tape(replay=first))
    _compare(this, "records", "one unit", first, other, first.released, other.released)
    for number, (one, two) in enumerate(zip(first.tape.crossings, other.tape.crossings, strict=False)):
        if one.total.shape != two.total.shape:
            this.fault("moved", f"release {number}: one unit changes the shape of a sum")
            continue
        moved = (one.total - two.total).astype(np.float64)
        length, allowed, longest = float(np.linalg.norm(moved)), _allowed(one, subject), one.parts[-1].l2_bound
        exact = np.issubdtype(one.total.dtype, np.integer)
        if length > allowed * (1 + 1e-9) + (0.0 if exact else ROUNDING * longest * COUNT):
            this.fault("moved", f"release {number}: one unit moves the sum by {length:.6g}, and {allowed:.6g} is paid")

    parts = first.tape.crossings[-1].parts
    if parts and parts[-1].row_unit == "teacher":
        event = first.tape.crossings[-1].event
        teachers = getattr(event, "teachers", len(parts[-1].units or []))
        changed = _changed_teachers(first, other, teachers)
        if len(changed) > 1:
            this.fault("moved", f"one unit changes teachers {sorted(changed)}, and one teacher's row is paid for")


def _changed_teachers(first: Ran, other: Ran, teachers: int) -> set[int]:
    """Whose states differ."""
    changed: set[int] = set()
    for path in sorted((first.folder / "run" / "checkpoints").glob("teachers-*")):
        one, two = (load_file(ran.folder / "run" / "checkpoints" / path.name) for ran in (first, other))
        for name, values in one.items():
            if values.shape[:1] == (teachers,):
                rows = zip(values, two[name], strict=True)
                changed |= {number for number, (a, b) in enumerate(rows) if not same(np.asarray(a), np.asarray(b))}
    return changed


def _allowed(crossing: Crossing, subject: Subject) -> float:
    """How far one unit may move this sum by what was charged for it."""
    event, part = crossing.event, crossing.parts[-1]
    if isinstance(event, LaplaceEvent):
        return math.sqrt(event.moved)
    if len(crossing.charges) > 1:  # the largest of some counts: the sum itself is of ballots
        return part.diameter
    if isinstance(event, GaussianEvent):
        if event.relation != subject.relation or (event.row_unit == "record" and subject.person):
            return 0.0
        return event.sensitivity
    if isinstance(event, OneOfManyEvent):
        return event.diameter
    assert isinstance(event, SubsampledGaussianEvent)
    if event.row_unit == "record" and subject.person:
        return 0.0
    return event.l2_bound


# --- samples --------------------------------------------------------------------------------------


def _check_poisson(this: Look, first: Ran, made: Made) -> None:
    """A sum is over exactly the units whose words are below the rate that was charged: one by one, step by step."""
    events = [c.event for c in first.tape.crossings if isinstance(c.event, SubsampledGaussianEvent)]
    if not events:
        return
    edge = math.floor(events[0].rate * 2**32)
    if events[0].rate >= 1:
        return
    sides = [this.run(made, this.tape(replay=first, words=_at_the_edge(edge, side))) for side in (True, False)]
    one_alone = 0.0
    for number, (whole, one, two) in enumerate(
        zip(first.tape.crossings, sides[0].tape.crossings, sides[1].tape.crossings, strict=False)
    ):
        longest = whole.parts[-1].l2_bound
        near = ROUNDING * longest * COUNT
        if not np.allclose(one.total + two.total, whole.total, rtol=0.0, atol=near):
            this.fault("sampling", f"release {number}: two samples that share all units out do not add up to all")
        kind = number % 4
        nobody = (two, one)[kind] if kind < 2 else None
        if nobody is not None and np.any(nobody.total):
            this.fault("sampling", f"release {number}: a sum over nobody, at the rate that was charged, is not zero")
        if kind == 2:
            length = float(np.linalg.norm(one.total))
            one_alone = max(one_alone, length)
            if length > longest * (1 + 1e-6):
                this.fault("sampling", f"release {number}: one unit alone is longer than its bound")
    if len(first.tape.crossings) > 2 and one_alone == 0.0:
        this.fault("sampling", "one unit alone is in no sum")


def _at_the_edge(edge: int, side: bool) -> Callable[[int, int], np.ndarray]:
    """Words just in and just out: of everybody, nobody, one unit, and some; or of all the others."""

    def words(call: int, units: int) -> np.ndarray:
        chosen = np.random.default_rng(call).integers(0, 2, units) == 1
        if call % 4 == 2:
            chosen = np.arange(units) == (call // 4) % max(units, 1)
        elif call % 4 < 2:
            chosen = np.full(units, call % 4 == 0)
        return np.where(chosen == side, edge - 1, edge)

    return words


# --- noise and charges ----------------------------------------------------------------------------


def _check_noise(this: Look, first: Ran, made: Made) -> None:
    this.add(noise_faults(first, units=_units(this, made)))


def _units(this: Look, made: Made) -> int:
    return len(set(made.whose.tolist())) if this.subject.person else len(made.labels)


def _check_charges(this: Look, first: Ran, made: Made) -> None:
    this.add(charge_faults(first, [first]))
    for problem in check_release(first.folder / "run" / "release").problems:
        this.fault("charges", f"its own certificate does not stand: {problem}")


def _check_resumed(this: Look, first: Ran, made: Made) -> None:
    """After a kill in the middle of it noise is new, and what was lost is charged again."""
    alone = len(first.tape.crossings) == 1
    before = this.tape(2, stop=(len(first.tape.crossings) + 1) // 2, saved=alone)
    killed = this.run(made, before, may_be_killed=True)
    after = this.tape(3, known=before.values)
    try:
        ran = this.subject.run(made, killed.folder, after, resume=True)
    except DatalensError as error:
        if alone:
            this.fault("charges", f"its one release was kept, and it cannot go on: {error}")
        return  # else with what was lost too little may be left: nothing more is released
    this.add(charge_faults(ran, [killed, ran]))
    this.add(noise_faults(ran, units=_units(this, made)))
    kept = {_step(crossing) for crossing in before.crossings[: None if alone else -1]} - {None}
    if again := kept & {_step(crossing) for crossing in after.crossings}:
        this.fault(
            "charges", f"releases of steps {sorted(map(str, again))} are paid for again, though their values were kept"
        )
    earlier = set(map(block, before.draws)) - {b""}
    if any(block(draw) in earlier for draw in after.draws):
        this.fault("noise", "a run that went on has used noise again")


def _step(crossing: Crossing) -> int | None:
    """Of a release whose value is kept until the next checkpoint: those that are charged one by one."""
    return None if hasattr(crossing.event, "repeats") else getattr(crossing.event, "step", None)


def _check_seeded(this: Look, first: Ran, made: Made) -> None:
    this.add(stamp_faults(this.run(made, this.tape(), noise_seed=7)))


CHECKS: dict[str, Callable[[Look, Ran, Made], None]] = {
    "charges": _check_charges,
    "noise": _check_noise,
    "neighbours": _check_neighbours,
    "samples": _check_poisson,
    "records": _check_records,
    "secrets": _check_secrets,
    "resumed": _check_resumed,
    "seeded": _check_seeded,
}
OF_ONE_RUN = ("charges", "noise")
# Of other relations and units: they share the rest with the method as it is.
OF_VARIANTS = ("charges", "noise", "neighbours", "samples")

# --- the command ----------------------------------------------------------------------------------


def checks_of(subject: Subject) -> Sequence[str]:
    return OF_VARIANTS if subject.person or subject.relation != "add-remove" else tuple(CHECKS)


def report(method: str | None = None) -> dict[str, Any]:
    listed = list(subjects(method))
    if not listed:
        raise DatalensError(f"--method {method} is unknown: see `datalens train --help`, or install its package")
    found = []
    with bar("methods", len(listed)) as (progress, task):
        for subject in listed:
            with tempfile.TemporaryDirectory(prefix="datalens-") as folder:
                faults = look(subject, Path(folder), checks=checks_of(subject))
            unit = "persons" if subject.person else "records"
            found.append(
                {
                    "name": subject.name,
                    "relation": subject.relation,
                    "unit": unit,
                    "faults": [f"{fault.kind}: {fault.what}" for fault in faults],
                }
            )
            progress.advance(task)
    return {"audit": "wiring", "findings": found, "ok": not any(one["faults"] for one in found)}


def report_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for one in result["findings"]:
        name = f"{one['name']} ({one['relation']}, {one['unit']})"
        lines.append(f"{name}: " + ("BROKEN" if one["faults"] else "nothing crosses but what is paid for"))
        lines += [f"  {fault}" for fault in one["faults"]]
    return lines
