"""`datalens audit wiring`: check that nothing reaches the released side except what the ledger was charged for.

Other audits attack the mechanisms; this one checks how a method is assembled around them. A tiny run of every method is
done in several worlds: on other records, on neighbouring data sets, with other noise, killed and resumed. Randomness is
recorded (`wiring_tape`), and from the second world on the gate returns the values that it released in the first. So the
worlds must agree bit for bit in everything that must not depend on their difference:

| the worlds differ in | what must be the same |
|---|---|
| all records | release, charges, steps, the student's state, all that is printed |
| one unit | the same; and no sum has changed by more than the charged sensitivity |
| noise, samples, secret choices | the whole run folder, including logs and private states |

These are exact comparisons, not statistical tests. The audit cannot see what leaves by other ways than files, standard
output and the facts of `--json`, nor a leak that needs more than a few steps or other records than those tried.
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

LOUD = 2.0**20  # factor of the noise that hides the teachers' votes, where charges follow from noisy counts
ROUNDING = 1e-5  # rounding error of sums in float32, relative to the maximum norm of a sum


@dataclass(kw_only=True, eq=False)
class Look:
    """The audit of one subject, and the faults found so far."""

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
        """Return a tape. By default every unit is in every sample, and teachers are chosen in turn."""
        values = None if replay is None else replay.tape.values
        return Tape(key, **{"words": everybody, "choose": in_turn, "replay": values, "loud": self.loud, **named})


def everybody(call: int, units: int) -> np.ndarray:
    """Return words that put every unit in the sample."""
    return np.zeros(units, np.uint32)


def in_turn(call: int, teachers: int) -> int:
    """Choose the teachers one after the other."""
    return call % teachers


def look(subject: Subject, folder: Path, *, checks: Sequence[str] | None = None) -> list[Fault]:
    """Return the faults of a subject that these checks find (by default, all of `CHECKS`)."""
    this = Look(subject=subject, folder=folder)
    made = records()
    first = this.run(made, this.tape())
    if not first.facts["private"]:
        this.add(stamp_faults(first))
        if math.isfinite(float(first.facts["epsilon_spent"])):
            this.fault("stamp", "a run with operating-system noise and a finite price is called not private")
        return this.faults
    for check in OF_ONE_RUN if checks is None else [name for name in OF_ONE_RUN if name in checks]:
        CHECKS[check](this, first, made)
    if any(len(crossing.charges) > 1 for crossing in first.tape.crossings):
        # Charges follow from noisy counts, so they could differ between worlds: let the noise alone decide them.
        this.loud = LOUD
        first = this.run(made, this.tape())
    for check in CHECKS if checks is None else checks:
        if check not in OF_ONE_RUN:
            CHECKS[check](this, first, made)
    return this.faults


# --- worlds ---------------------------------------------------------------------------------------


def _check_records(this: Look, first: Ran, made: Made) -> None:
    """Check that the released side depends on records only through the released values."""
    moved = False
    for name, others in other_records().items():
        scalar = -1e9 if moved else 1e9  # replaces numbers that the private side reports to the owner, such as a loss
        try:
            other = this.run(others, this.tape(replay=first, scalar=scalar))
        except DatalensError as error:
            this.fault("records", f"{name}: it ended with an error ({error}), given the same released values")
            continue
        _compare(this, "records", name, first, other, first.released, other.released)
        pairs = zip(first.tape.crossings, other.tape.crossings, strict=False)
        moved = moved or any(not same(one.total, two.total) for one, two in pairs)
    if not moved:
        this.fault("records", "no sum that reaches the gate depends on records: nothing was tested")


def _check_secrets(this: Look, first: Ran, made: Made) -> None:
    """Check that noise, samples and secret choices are not on disk or in logs, and that other bytes change them."""
    secrets: dict[str, Any] = {"words": None, "choose": lambda call, teachers: (2 * call + 1) % teachers}
    if this.loud == 1.0:
        tape = this.tape(1, replay=first, **secrets)
    else:  # charges follow from noise: use other noise with the same outcome
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
        counts = f"{lengths[1][0]} releases and {lengths[1][1]} charges"
        this.fault(kind, f"{world}: {counts} instead of {lengths[0][0]} and {lengths[0][1]}")
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
            this.fault(
                "moved", f"release {number}: one unit moves the sum by {length:.6g}, but {allowed:.6g} is paid for"
            )

    parts = first.tape.crossings[-1].parts
    if parts and parts[-1].row_unit == "teacher":
        event = first.tape.crossings[-1].event
        teachers = getattr(event, "teachers", len(parts[-1].units or []))
        changed = _changed_teachers(first, other, teachers)
        if len(changed) > 1:
            this.fault("moved", f"one unit changes teachers {sorted(changed)}, but only one teacher's row is paid for")


def _changed_teachers(first: Ran, other: Ran, teachers: int) -> set[int]:
    """Return the teachers whose states differ between two runs."""
    changed: set[int] = set()
    for path in sorted((first.folder / "run" / "checkpoints").glob("teachers-*")):
        one, two = (load_file(ran.folder / "run" / "checkpoints" / path.name) for ran in (first, other))
        for name, values in one.items():
            if values.shape[:1] == (teachers,):
                rows = zip(values, two[name], strict=True)
                changed |= {number for number, (a, b) in enumerate(rows) if not same(np.asarray(a), np.asarray(b))}
    return changed


def _allowed(crossing: Crossing, subject: Subject) -> float:
    """Return how far one unit may move this sum according to its charge."""
    event, part = crossing.event, crossing.parts[-1]
    if isinstance(event, LaplaceEvent):
        return math.sqrt(event.moved)
    if len(crossing.charges) > 1:  # the release is the argmax of counts, and the sum is one of ballots
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
    """Check that each sum is over exactly the units whose random words are below the charged sampling rate."""
    sampled = [i for i, c in enumerate(first.tape.crossings) if isinstance(c.event, SubsampledGaussianEvent)]
    if not sampled:
        return
    rate = first.tape.crossings[sampled[0]].event.rate  # type: ignore[union-attr]
    edge = math.floor(rate * 2**32)
    if rate >= 1:
        return
    sides = [this.run(made, this.tape(replay=first, words=_at_the_edge(edge, side))) for side in (True, False)]
    one_alone = 0.0
    tapes = [ran.tape.crossings for ran in (first, *sides)]
    for sample, number in enumerate(i for i in sampled if i < min(map(len, tapes))):  # a method may release others too
        whole, one, two = (crossings[number] for crossings in tapes)
        longest = whole.parts[-1].l2_bound
        tolerance = ROUNDING * longest * COUNT
        if not np.allclose(one.total + two.total, whole.total, rtol=0.0, atol=tolerance):
            this.fault(
                "sampling", f"release {number}: the sums over two complementary samples do not add up to the whole"
            )
        kind = sample % 4
        empty = (two, one)[kind] if kind < 2 else None
        if empty is not None and np.any(empty.total):
            this.fault("sampling", f"release {number}: the sum over an empty sample, at the charged rate, is not zero")
        if kind == 2:
            length = float(np.linalg.norm(one.total))
            one_alone = max(one_alone, length)
            if length > longest * (1 + 1e-6):
                this.fault("sampling", f"release {number}: the row of a single unit exceeds its norm bound")
    if len(sampled) > 2 and one_alone == 0.0:
        this.fault("sampling", "a sample of a single unit gives a sum of zero")


def _at_the_edge(edge: int, side: bool) -> Callable[[int, int], np.ndarray]:
    """Return words just below and just above the rate. The sample is every unit, none, one, or some, in turn.

    `side` chooses between this sample and its complement.
    """

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
    """Check that a run that was killed and resumed draws new noise, and charges again for lost releases only."""
    alone = len(first.tape.crossings) == 1
    before = this.tape(2, stop=(len(first.tape.crossings) + 1) // 2, saved=alone)
    killed = this.run(made, before, may_be_killed=True)
    after = this.tape(3, known=before.values)
    try:
        ran = this.subject.run(made, killed.folder, after, resume=True)
    except DatalensError as error:
        if alone:
            this.fault("charges", f"its only release was kept, but the run cannot go on: {error}")
        return  # after a loss the budget may be too small to go on, so nothing more is released
    this.add(charge_faults(ran, [killed, ran]))
    this.add(noise_faults(ran, units=_units(this, made)))
    kept = {_step(crossing) for crossing in before.crossings[: None if alone else -1]} - {None}
    if again := kept & {_step(crossing) for crossing in after.crossings}:
        this.fault(
            "charges", f"releases of steps {sorted(map(str, again))} are charged again, though their values were kept"
        )
    earlier = set(map(block, before.draws)) - {b""}
    if any(block(draw) in earlier for draw in after.draws):
        this.fault("noise", "a resumed run has used the same noise again")


def _step(crossing: Crossing) -> int | None:
    """Return the step of a release whose value the journal keeps (those that are charged one by one), else None."""
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
OF_ONE_RUN = ("charges", "noise")  # checks that need one run only
# Checks of other relations and units; the other checks would repeat those of the standard variant.
OF_VARIANTS = ("charges", "noise", "neighbours", "samples")

# --- the command ----------------------------------------------------------------------------------


def checks_of(subject: Subject) -> Sequence[str]:
    """Return the names of the checks of a subject."""
    return OF_VARIANTS if subject.person or subject.relation != "add-remove" else tuple(CHECKS)


def report(method: str | None = None) -> dict[str, Any]:
    """Audit all methods, or one, and return the results as JSON."""
    listed = list(subjects(method))
    if not listed:
        raise DatalensError(f"--method {method} is unknown: see `datalens train --help`, or install its package")
    findings = []
    with bar("methods", len(listed)) as (progress, task):
        for subject in listed:
            with tempfile.TemporaryDirectory(prefix="datalens-") as folder:
                faults = look(subject, Path(folder), checks=checks_of(subject))
            unit = "persons" if subject.person else "records"
            findings.append(
                {
                    "name": subject.name,
                    "relation": subject.relation,
                    "unit": unit,
                    "faults": [f"{fault.kind}: {fault.what}" for fault in faults],
                }
            )
            progress.advance(task)
    return {"audit": "wiring", "findings": findings, "ok": not any(one["faults"] for one in findings)}


def report_lines(result: dict[str, Any]) -> list[str]:
    """Return the results as lines of text."""
    lines = []
    for one in result["findings"]:
        name = f"{one['name']} ({one['relation']}, {one['unit']})"
        lines.append(f"{name}: " + ("BROKEN" if one["faults"] else "nothing crosses but what is paid for"))
        lines += [f"  {fault}" for fault in one["faults"]]
    return lines
