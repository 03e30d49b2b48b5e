"""Computes what a run will charge, and reserves that in the budget of the data set (`privacy/budget.py`)."""

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
    """Return everything that a run will charge, as pairs (event, times), from its settings alone."""
    return [(part.event, part.times) for part in settings.schedule(schema, budget)]


DECIDED = (
    "not all of this budget is Gaussian noise of one kind, so it is proven only for runs that were decided on "
    "beforehand (docs/budget.md)"
)


class Asked(Protocol):
    """The options of a run that a reservation depends on."""

    @property
    def budget(self) -> Path | None: ...

    @property
    def record_id(self) -> str | None: ...


def check_room(options: Asked, settings: Settings, schema: Schema, budget: Budget) -> None:
    """Raise if the budget has no room for a run. Called before the records are read; nothing is reserved yet."""
    if options.budget is not None:
        with DataBudget.open(options.budget) as data:
            data.check(planned(settings, schema, budget), budget, **_facts(options, settings, schema))


def reserve(options: Asked, settings: Settings, schema: Schema, budget: Budget) -> dict[str, str] | None:
    """Reserve everything that a run may charge. Return what config.json keeps of the reservation, for --resume."""
    folder = options.budget
    if folder is None:
        return None
    with DataBudget.open(folder) as data:
        run = data.reserve(planned(settings, schema, budget), budget, **_facts(options, settings, schema))
        if len(data.reservations) > 1 and not may_follow(data.charges):
            say(f"note: {DECIDED}")
    return {"folder": str(folder.absolute()), "run": run}


def begin(asked: Asked, out: Path, *, settings: Settings, schema: Schema, budget: Budget, **facts: Any) -> Run:
    """Create a run in `out`, with its reservation. Everything that can be refused is refused before reserving.

    Args:
        asked: the options.
        out: folder of the run.
        facts: the other arguments of `Run.create`.

    Raises:
        DatalensError: the run cannot be created there.
        BudgetExceeded: the budget of the data set has no room for it.
    """
    try:  # config.json must be readable again
        Schema.from_dict(json.loads(json.dumps(schema.as_dict())))
        read_settings(json.loads(json.dumps(settings.as_dict())))
    except (ValueError, TypeError, KeyError) as error:
        raise DatalensError(f"this run could not be opened again ({error}), and nothing was reserved for it") from None
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
    """Lock `out` against other processes that begin a run there: they wait, and are refused before they reserve."""
    check_vacant(out)
    path = out.with_name(f".{out.name}.begin")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[bytes]:
    """Return the file, open and locked. It is created again if the process that held it has removed it."""
    while True:
        lock = open(path, "ab")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            return lock
        lock.close()


def _facts(options: Asked, settings: Settings, schema: Schema) -> dict[str, Any]:
    """Return the arguments of a reservation that say what it is about.

    Persons by different ids are different privacy units: a charge for a visit and one for a patient do not add up.
    """
    return {
        "data": schema.name,
        "unit": unit_of(schema, options.record_id),
        "final": settings.charges_once,
    }


def unit_of(schema: Schema, record_id: str | None) -> str:
    """Return the privacy unit as a budget names it: persons by their kind of id."""
    unit = f"one {schema.record_unit}"
    return f"{unit}, by {record_id or 'ids from Python'}" if schema.by_person else unit


@contextlib.contextmanager
def reserved(config: dict[str, Any]) -> Iterator[tuple[DataBudget, str]]:
    """Open the budget that has a run's reservation, and yield it with the run's turn (see `go_on`).

    Raises:
        DatalensError: the budget has no reservation for this run, or a copy of the run has used it since.
    """
    kept = config["data_budget"]
    if not isinstance(kept, dict) or not all(isinstance(kept.get(name), str) for name in ("folder", "run")):
        raise DatalensError("data_budget in config.json is damaged: restore a copy of the file")
    with DataBudget.open(Path(kept["folder"])) as data:
        turn = data.turn(kept["run"])
        if turn is None:
            raise DatalensError(
                f"the budget in {kept['folder']} does not know this run: it is an older copy, or another data set's; "
                "put the right one there"
            )
        if turn not in (kept.get("turn", kept["run"]), kept.get("next")):
            raise DatalensError(
                "a copy of this run was resumed since, with the same reservation: continue that one, or start another "
                "run, which gets its own"
            )
        yield data, turn


def go_on(run: Run) -> None:
    """Check the reservation of an open run before it is resumed, and take its next turn; reserve nothing new.

    A turn is a random token, in the budget and in config.json, which changes whenever the run is resumed. A copy of the
    run folder still has the old one, and is refused. config.json gets the present turn and the next one before the
    budget gets the next, so that a kill in between locks nobody out.

    Raises:
        DatalensError: see `reserved`.
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
    """Return lines for the owner's page of a run: what is left of the budget of the data set now, if it has one."""
    if config.get("data_budget") is None:
        return []
    try:
        with reserved(config) as (data, _):
            _, lines = describe(data)
    except DatalensError as error:
        return [("Budget of the data set", f"cannot be read: {error}")]
    return [("Budget of the data set", line) for line in lines[:3]]


def describe(data: DataBudget) -> tuple[dict[str, Any], list[str]]:
    """Return cap, reservations and remainder of a budget for its owner: as JSON fields, and as lines of text."""
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
    lines.append("private, like the data: keep this folder, and never restore an older copy of it")
    return fields, lines
