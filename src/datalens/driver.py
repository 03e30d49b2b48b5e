"""The one sequence of `datalens train`: open, plan, gather, reserve and create or resume, train, release, say so.

A method is asked through `plans.base.Method`; nothing here knows which one it is.
"""

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.errors import BudgetExceeded, DatalensError
from datalens.job import Job, make_job
from datalens.options import TrainOptions
from datalens.plans.base import Method, Place, Settings
from datalens.plans.guidance import read_off_warnings, warnings
from datalens.plans.registry import method_of
from datalens.privacy.ledger import json_number
from datalens.private.partition import check_enough
from datalens.progress import say
from datalens.run.folder import Run, read_config
from datalens.run.places import check_vacant
from datalens.run.reservation import begin, check_room, go_on

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from datalens.data.records import Dataset, Records
    from datalens.plans.base import Gathered
    from datalens.run.ranks import World

NEWS_SECONDS = 60.0  # a network file system may take this long to show a machine what another one has written


def train(options: TrainOptions, given: set[str] | None = None, *, records: "Records | None" = None) -> dict[str, Any]:
    """Train, or continue a run, and write its release. Returns the facts `--json` prints; rank 0 alone has them.

    Args:
        given: options that were named by the caller, where that is known; one may repeat a default and mean it. Where
            it is not, and a run goes on, epsilon, delta, relation and noise_seed must be those it was begun with.
        records: in the place of a file; `options.data` is then no more than a name.
    """
    from datalens.run.ranks import World

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(World.start(options.device))
        job = world.together(lambda: dataclasses.replace(make_job(options, given, records), records=records))
        world.agree({"out": str(options.out), **job.facts()})
        settings, method = job.settings, method_of(job.settings)
        world.together(lambda: _check_ranks(settings, method, world))
        asked = {**job.options, **options.own}
        place = Place(device=world.device, folder=options.out, world=world, options=asked, held_out=_held_out(job))

        run = world.together(lambda: _open(options, job) if world.leads else None)
        if run is not None:
            stack.callback(run.close)
        gathered = world.together(lambda: method.gather(_records(job), settings, place))  # before the run exists
        data = _whole(gathered, world)
        if not job.begun:
            run = world.together(lambda: _create(options, job, data) if world.leads else None)
            if run is not None:
                stack.callback(run.close)
        world.together(lambda: _check_folder(options, job, data, wait=world.size > 1))

        if run is None:
            assert method.follow is not None
            method.follow(job.schema, gathered, settings, place)
            return {}
        if options.tensorboard:
            run.open_board()
        say(_opening(run))
        model = method.train(run, gathered, settings, place)
        if run.completed == 0:
            raise BudgetExceeded("the budget is spent and not one release survived: there is nothing to learn from")
        if world.size == 1:
            run.keep()
        _release(run, model)
        say(_closing(run))
        return _facts(run, began)


# --- what is said and returned ----------------------------------------------------------------------------------------


def _stamp(run: Run) -> str:
    return "" if math.isfinite(run.ledger.budget.epsilon) and not run.settings.noise_seeded else " NOT PRIVATE."


def _opening(run: Run) -> str:
    budget = run.ledger.budget
    opening = run.settings.opening(run.schema, budget)
    return f"{opening}; budget {budget.describe(budget.epsilon)}.{_stamp(run)}"


def _closing(run: Run) -> str:
    settings, steps, budget = run.settings, run.completed, run.ledger.budget
    planned, counted = settings.steps_planned, settings.step_name
    short = "" if run.interrupted or steps == planned or counted != "steps" else f" of {planned}"
    lost = run.lost
    if lost is None:
        lost = 0 if settings.one_charge else len(run.ledger.events) - steps
    wasted = f" ({lost} more charged, and lost by an interruption)" if lost > 0 else ""
    state = "interrupted; continue with --resume. So far:" if run.interrupted else "done:"
    return (
        f"{state} {steps}{short} {counted}{wasted}, spent {budget.describe(run.ledger.spent())}.{_stamp(run)} "
        f"Report: {run.path / 'release' / 'report.html'}"
    )


def _facts(run: Run, began: float) -> dict[str, Any]:
    """What `--json` prints."""
    settings, budget = run.settings, run.ledger.budget
    own = settings.facts(run.ledger.events) | run.facts
    return {
        "run": str(run.path),
        "method": settings.method,
        "preset": settings.preset,
        "warm_start": own["warm_start"],
        "epsilon": json_number(budget.epsilon),
        "epsilon_spent": json_number(run.ledger.spent()),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "steps": run.completed,
        "queries": sum(getattr(event, "queries", 0) for event in run.ledger.events),
        "sigma": own["sigma"],  # None where every release has its own; the ledger names them
        "noise": settings.noise,
        "seconds": round(time.monotonic() - began, 2),
        "private": math.isfinite(budget.epsilon) and not settings.noise_seeded,
        "interrupted": run.interrupted,
        **{name: value for name, value in own.items() if name not in ("warm_start", "sigma")},
    }


def _release(run: Run, model: Any) -> None:
    from datalens.released.release import write_release

    release = write_release(
        run.path,
        model,
        settings=run.settings,
        schema=run.schema,
        ledger=run.ledger,
        completed=run.completed,
        answered=run.answered,
    )
    run.show_release(release)


def choose_device(name: str) -> "torch.device":
    from datalens.run import ranks

    return ranks.choose_device(name)


# --- on every rank ----------------------------------------------------------------------------------------------------


def _check_ranks(settings: Settings, method: Method, world: "World") -> None:
    if world.size > 1 and method.follow is None:
        raise DatalensError(settings.one_process)
    if world.size > settings.least_records and method.follow is not None:
        raise DatalensError(
            f"{world.size} ranks are more than {settings.least_records} teachers: start at most "
            f"{settings.least_records}, or raise --teachers"
        )


def _held_out(job: Job) -> "Callable[[], Dataset] | None":
    """Return a reader of the test split, where the data came by a name or from files."""
    if job.records is not None:
        return None
    data, folder, reading = job.options["data"], job.options.get("data_folder"), Reading.of(job.options)
    return lambda: formats.load(data, "test", folder=folder, reading=reading)


def _records(job: Job) -> "Records":
    records = job.records or formats.open_records(
        job.options["data"],
        nominal_size=job.options["nominal_size"],
        folder=job.options.get("data_folder"),
        reading=Reading.of(job.options),
    )
    if records.schema != job.schema:
        raise DatalensError(f"{job.options['data']} is not what this run was begun with: put it back, or start another")
    return records


@dataclass(frozen=True, kw_only=True)
class Data:
    """All records, over all ranks. Private."""

    count: int
    fingerprint: int  # a resumed run must go on with the data it was begun with


def _whole(gathered: "Gathered", world: "World") -> Data:
    if world.size == 1:
        return Data(count=gathered.count, fingerprint=gathered.fingerprint)
    parts = [part.decode().split() for part in world.gather(f"{gathered.count} {gathered.fingerprint}".encode())]
    count, fingerprint = (sum(int(part[i]) for part in parts) for i in (0, 1))
    return Data(count=count, fingerprint=fingerprint % 2**256)


def _check_folder(options: TrainOptions, job: Job, data: Data, *, wait: bool) -> None:
    """Every rank must see the one run folder, to keep its teachers' states there; and the data it was begun with."""
    end = time.monotonic() + (NEWS_SECONDS if wait else 0.0)
    while not (options.out / "config.json").is_file() and time.monotonic() < end:
        time.sleep(0.05)
    if not (options.out / "config.json").is_file():
        raise DatalensError(f"{options.out} is not there: --out must lie on a file system that all machines share")
    if read_config(options.out).get("data_sha256") != f"{data.fingerprint:064x}":
        raise DatalensError(
            f"{job.options['data']} is not what {options.out} was begun with: put it back, or start another run"
        )


# --- on rank 0 --------------------------------------------------------------------------------------------------------


def _open(options: TrainOptions, job: Job) -> Run | None:
    """A run that goes on is locked now; for a new one, its place is looked at before the long reading."""
    if job.begun:
        run = Run.resume(options.out)
        try:
            go_on(run)
        except BaseException:
            run.close()
            raise
        return run
    check_vacant(options.out)
    assert job.budget is not None
    check_room(options, job.settings, job.schema, job.budget)
    if why := job.settings.refusal(job.schema, job.budget):
        raise DatalensError(f"nothing would come of this, and nothing was spent: {why}")
    for line in warnings(job.budget, job.schema, job.settings):
        say(f"warning: {line}")
    return None


def _create(options: TrainOptions, job: Job, data: Data) -> Run:
    from datalens.run.ranks import launch

    check_enough(data.count, job.settings.least_records)
    assert job.budget is not None
    for line in read_off_warnings(job.schema):
        say(f"warning: {line}")
    return begin(
        options,
        options.out,
        options=job.options,
        settings=job.settings,
        budget=job.budget,
        schema=job.schema,
        data_sha256=f"{data.fingerprint:064x}",
        launch=launch(),
    )
