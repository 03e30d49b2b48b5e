"""What a run will charge, from its settings alone, and its place in the data set's own budget (`privacy/budget.py`)."""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.plans.base import Settings
from datalens.plans.registry import read_settings
from datalens.privacy.budget import DataBudget
from datalens.privacy.events import Charge, GaussianEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.reserve import Counted, may_follow
from datalens.progress import counted, say
from datalens.run.folder import Run, read_config
from datalens.run.places import check_vacant


def planned(settings: Settings, schema: Schema, budget: Budget) -> list[tuple[Charge, int]]:
    """(event, how many times) of the whole run, before the first record is read."""
    return [(part.event, part.times) for part in settings.schedule(schema, budget)]


DECIDED = (
    "not all of this budget is Gaussian noise of one kind: it holds for runs that were decided on beforehand "
    "(docs/budget.md)"
)


class Asked(Protocol):
    """The options that a run is begun with."""

    @property
    def budget(self) -> Path | None: ...

    @property
    def record_id(self) -> str | None: ...


def check_room(options: Asked, settings: Settings, schema: Schema, budget: Budget) -> None:
    """Before the long reading: would there be room?"""
    if options.budget is not None:
        with DataBudget.open(options.budget) as data:
            data.check(planned(settings, schema, budget), budget, **_facts(options, settings, schema))


def reserve(options: Asked, settings: Settings, schema: Schema, budget: Budget) -> dict[str, str] | None:
    """Before a run begins: set aside all it may charge. What config.json keeps of it, to show it again on --resume."""
    folder = options.budget
    if folder is None:
        return None
    with DataBudget.open(folder) as data:
        run = data.reserve(planned(settings, schema, budget), budget, **_facts(options, settings, schema))
        if len(data.reservations) > 1 and not may_follow(data.charges):
            say(f"note: {DECIDED}")
    return {"folder": str(folder.absolute()), "run": run}


def begin(asked: Asked, out: Path, *, settings: Settings, schema: Schema, budget: Budget, **facts: Any) -> Run:
    """Create a run in `out`, with its reservation. What can be refused is refused before anything is set aside.

    `facts`: the other arguments of `Run.create`.
    """
    try:  # what would be written must be readable again
        Schema.from_dict(json.loads(json.dumps(schema.as_dict())))
        read_settings(json.loads(json.dumps(settings.as_dict())))
    except (ValueError, TypeError, KeyError) as error:
        raise DatalensError(f"this run could not be opened again ({error}), and nothing was set aside for it") from None
    with _alone_beginning(out):
        return Run.create(
            out,
            settings=settings,
            schema=schema,
            budget=budget,
            data_budget=lambda: reserve(asked, settings, schema, budget),
            **facts,
        )


@contextlib.contextmanager
def _alone_beginning(out: Path) -> Iterator[None]:
    """One process at a time begins a run in `out`: a second one waits, and finds the place taken before it reserves."""
    check_vacant(out)
    path = out.with_name(f".{out.name}.begin")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[bytes]:
    """The file, open and locked; made anew where the process that had it before has removed it."""
    while True:
        lock = open(path, "ab")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            return lock
        lock.close()


def _facts(options: Asked, settings: Settings, schema: Schema) -> dict[str, Any]:
    """What a reservation is about.

    Persons by other ids are other units: what is paid for a visit does not add up to what is paid for a patient.
    """
    unit = f"one {schema.record_unit}"
    if schema.by_person:
        unit += f", by {options.record_id or 'ids from Python'}"
    return {"data": schema.name, "unit": unit, "final": settings.charges_once}


@contextlib.contextmanager
def reserved(config: dict[str, Any]) -> Iterator[tuple[DataBudget, str]]:
    """The budget a run has its reservation in, and the run's turn: refused where it has none, or a copy has it."""
    kept = config["data_budget"]
    if not isinstance(kept, dict) or not all(isinstance(kept.get(name), str) for name in ("folder", "run")):
        raise DatalensError("data_budget in config.json is damaged: put a copy of the file in its place")
    with DataBudget.open(Path(kept["folder"])) as data:
        turn = data.turn(kept["run"])
        if turn is None:
            raise DatalensError(
                f"the budget in {kept['folder']} does not know this run: it is an older copy, or another data set's; "
                "put the right one in its place"
            )
        if turn not in (kept.get("turn", kept["run"]), kept.get("next")):
            raise DatalensError(
                "a copy of this run has gone on since, by the same reservation: go on with that one, or start another "
                "run with one of its own"
            )
        yield data, turn


def go_on(run: Run) -> None:
    """Before an open run goes on: its reservation is there, is not made twice, and no copy of it has gone on.

    config.json has the turn it has now and the one it takes next; written first, so that a kill in between locks
    nobody out. A copy still shows the turn that was taken.
    """
    config = read_config(run.path)  # again: the run was not locked when it was read
    if config.get("data_budget") is None:
        if config["options"].get("budget") is not None:
            raise DatalensError(
                f"{run.path} was begun with a budget, and its config.json has no data_budget, which says what is set "
                "aside for it: put a copy of the file in its place"
            )
        return
    with reserved(config) as (data, turn):
        _check_covered(run, data.set_aside(config["data_budget"]["run"]))
        following = secrets.token_hex(16)
        config["data_budget"] |= {"turn": turn, "next": following}
        write_atomically(run.path / "config.json", json.dumps(config, indent=1).encode(), private=True)
        data.next_turn(config["data_budget"]["run"], following)


def _check_covered(run: Run, aside: Counted) -> None:
    """Raise if the settings, which may have been edited, plan other charges than those that were set aside.

    For Gaussian noise all that the ledger's budget holds was, whatever the plan, unless its gate charges the plan only.
    """
    for event, times in planned(run.settings, run.schema, run.ledger.budget):
        free = isinstance(event, GaussianEvent) and not run.settings.charges_once
        if not free and not any(event == one and times <= most for one, most in aside):
            raise DatalensError(
                f"the settings in {run.path / 'config.json'} plan other charges than the budget has set aside for this "
                "run: put a copy of the file in its place"
            )


def standing(config: dict[str, Any]) -> list[tuple[str, str]]:
    """For the owner's page of a run: what is left of the data set's own budget, now; nothing where it has none."""
    if config.get("data_budget") is None:
        return []
    try:
        with reserved(config) as (data, _):
            _, lines = describe(data)
    except DatalensError as error:
        return [("Budget of the data set", f"cannot be read: {error}")]
    return [("Budget of the data set", line) for line in lines[:3]]


def describe(data: DataBudget) -> tuple[dict[str, Any], list[str]]:
    """For the owner: the cap, what is reserved, and what is left."""
    spent, accountant = data.spent()
    left, cap = data.left(), data.cap
    fields = {
        "epsilon": cap.epsilon,
        "delta": cap.delta,
        "relation": cap.relation,
        "epsilon_reserved": spent,
        "accountant": accountant,
        "epsilon_left": left,
        "runs": [{"run": r.run, "data": r.data, "unit": r.unit} for r in data.reservations],
        "data": list(data.names),
    }
    names = ", ".join(data.names) or "it"
    lines = [
        f"cap: ε = {cap.epsilon:g} (δ = {cap.delta:g}, {cap.relation}, by the tightest accountant that applies), over "
        f"all runs on {names}",
        f"reserved by {counted(len(data.reservations), 'run')}: {data.describe(spent, accountant)}",
        f"left for one more run with Gaussian noise: {data.describe(left, 'exact')}",
    ]
    if not may_follow(data.charges):
        lines.append(DECIDED)
    lines.append("private, like the data: keep this folder, and no older copy of it")
    return fields, lines
