"""The sequence of steps of `datalens train`: plan, open, gather, reserve and create or resume, train, release, report.

Methods are called through `plans.base.Method`; nothing here depends on which method it is.
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
from datalens.files import write_atomically
from datalens.job import Job, make_job
from datalens.options import TrainOptions
from datalens.plans.base import Method, Place, Settings
from datalens.plans.guidance import read_off_warnings, warnings
from datalens.plans.registry import method_of
from datalens.privacy.ledger import json_number
from datalens.private.partition import check_enough
from datalens.progress import console, counted, say
from datalens.run.folder import Run, read_config
from datalens.run.places import check_vacant
from datalens.run.reservation import begin, check_room, go_on

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from datalens.data.records import Dataset, Records
    from datalens.plans.base import Gathered
    from datalens.run.ranks import World

NEWS_SECONDS = 60.0  # a network file system may take this long to show one machine what another has written


def train(
    options: TrainOptions,
    given: set[str] | None = None,
    *,
    records: "Records | None" = None,
    kept: str | None = None,
    method: Method | None = None,
) -> dict[str, Any]:
    """Train, or resume a run, and write its release.

    Args:
        options: what to do.
        given: options that the caller named, where that is known: an option that repeats a default may be meant. Where
            it is not known, and a run is resumed, epsilon, delta, relation and noise_seed must be those it was begun
            with.
        records: used instead of a file; `options.data` is then only a name.
        kept: where the release is after this call, in words, if the caller deletes the run.
        method: used instead of the registered one, whose settings it has: a figure that watches the votes of a run.

    Returns:
        The facts that `--json` prints, on rank 0; an empty dict on other ranks.

    Raises:
        DatalensError: nothing can be trained like this.
        BudgetExceeded: the privacy budget does not cover it.
    """
    from datalens.run.ranks import World

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(World.start(options.device))
        job = world.together(lambda: make_job(options, given, records))
        world.agree({"out": str(options.out), **job.facts()})
        if job.records is not None and not job.begun:
            options = dataclasses.replace(
                options, record_id=job.options["record_id"]
            )  # DICOM files may say it themselves
        settings, method = job.settings, method or method_of(job.settings)
        world.together(lambda: _check_ranks(settings, method, world))
        asked = {**job.options, **options.own}
        held_out = _held_out(job) if records is None else None  # arrays from Python have no test split
        facts: dict[str, Any] = {"device": world.device, "folder": options.out, "options": asked}
        place = Place(**facts, world=world, held_out=held_out, closing=stack)

        run = world.together(lambda: _open(options, job) if world.leads else None)
        if run is not None:
            stack.callback(run.close)
        gathered, skipped = world.together(lambda: _gathered(job, method, place))  # before the run exists
        data = _whole(gathered, world)
        if not job.begun:
            run = world.together(lambda: _create(options, job, data) if world.leads else None)
            if run is not None:
                stack.callback(run.close)
        if run is not None and skipped:
            _tell_skipped(run, skipped)
        world.together(lambda: _check_folder(options, job, data, wait=world.size > 1))
        job = dataclasses.replace(job, records=None)  # not needed any more, and may be large

        if run is None:
            assert method.follow is not None
            method.follow(job.schema, gathered, settings, place)
            return {}
        if options.tensorboard:
            run.open_board()
        say(_opening(run))
        model = method.train(run, gathered, settings, place)
        if run.completed == 0:
            raise BudgetExceeded(
                "the budget is spent, and interruptions lost every release: there is nothing to learn from; begin "
                "another run"
            )
        if world.size == 1 or not method.teachers:
            run.keep()
        _release(run, model)
        say(_closing(run, kept))
        return _facts(run, began)


# --- messages and results ---------------------------------------------------------------------------------------------


SKIPPED = "skipped.txt"  # in a run folder, for the owner: the files that --skip-unreadable left out


def _tell_skipped(run: Run, names: list[str]) -> None:
    """Count the unreadable files that were left out, for the owner; how many there are is private."""
    write_atomically(
        run.path / SKIPPED, "".join(f"{name}\n" for name in names).encode(errors="surrogateescape"), private=True
    )
    many = f"{counted(len(names), 'unreadable file')} left out" if console.is_terminal else "unreadable files left out"
    say(f"{many}, listed in {run.path / SKIPPED}: for the owner only (the certificate does not say how many)")


def _stamp(run: Run) -> str:
    return "" if math.isfinite(run.ledger.budget.epsilon) and not run.settings.noise_seeded else " NOT PRIVATE."


def _opening(run: Run) -> str:
    budget = run.ledger.budget
    opening = run.settings.opening(run.schema, budget)
    return f"{opening}; budget {budget.describe(budget.epsilon)}.{_stamp(run)}"


def _closing(run: Run, kept: str | None) -> str:
    settings, steps, budget = run.settings, run.completed, run.ledger.budget
    planned, unit = settings.steps_planned, settings.step_name
    of_planned = "" if run.interrupted or steps == planned or unit != "steps" else f" of {planned}"
    lost = run.lost
    if lost is None:
        lost = 0 if settings.one_charge else len(run.ledger.events) - steps
    wasted = f" ({lost} more charged, and lost by an interruption)" if lost > 0 else ""
    resume = "continue with --resume" if kept is None else "only a run that was begun with out= can be continued"
    state = f"interrupted; {resume}. So far:" if run.interrupted else "done:"
    return f"{state} {steps}{of_planned} {unit}{wasted}, spent {budget.describe(run.ledger.spent())}.{_stamp(run)} " + (
        kept or f"Report: {run.path / 'release' / 'report.html'}"
    )


def _facts(run: Run, began: float) -> dict[str, Any]:
    """Return the facts that `--json` prints."""
    settings, budget = run.settings, run.ledger.budget
    method_facts = settings.facts(run.ledger.events) | run.facts
    return {
        "run": str(run.path),
        "method": settings.method,
        "preset": settings.preset,
        "warm_start": method_facts["warm_start"],
        "epsilon": json_number(budget.epsilon),
        "epsilon_spent": json_number(run.ledger.spent()),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "steps": run.completed,
        "queries": sum(getattr(event, "queries", 0) for event in run.ledger.events),
        "sigma": method_facts["sigma"],  # None where each release has its own, which the ledger names
        "noise": settings.noise,
        "seconds": round(time.monotonic() - began, 2),
        "private": math.isfinite(budget.epsilon) and not settings.noise_seeded,
        "interrupted": run.interrupted,
        **{name: value for name, value in method_facts.items() if name not in ("warm_start", "sigma")},
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
    if world.size > settings.least_records and method.teachers:
        raise DatalensError(
            f"{world.size} ranks are more than {settings.least_records} teachers: start at most "
            f"{settings.least_records}, or raise --teachers"
        )


def _held_out(job: Job) -> "Callable[[], Dataset]":
    """Return a function that reads the test split of a named data set, or of the user's own files."""
    data, folder, reading = job.options["data"], job.options.get("data_folder"), Reading.of(job.options)
    return lambda: formats.load(data, "test", folder=folder, reading=reading)


def _gathered(job: Job, method: Method, place: Place) -> "tuple[Gathered, list[str]]":
    """Return what training needs of the records, and the unreadable files that were left out: the same on all ranks."""
    records = _records(job)
    gathered = method.gather(records, job.settings, place)
    return gathered, sorted(getattr(records, "skipped", ()))


def _records(job: Job) -> "Records":
    """Return the training records; raise if their schema is not the run's."""
    records = job.records or formats.training_records(job.options)
    if records.schema != job.schema:
        raise DatalensError(
            f"{job.options['data']} is not the data this run was begun with: put that back, or start another run"
        )
    return records


@dataclass(frozen=True, kw_only=True)
class Data:
    """All records, over all ranks. Private."""

    count: int
    fingerprint: int  # tells whether a resumed run has the data that it was begun with


def _whole(gathered: "Gathered", world: "World") -> Data:
    """Return the number of records and their fingerprint, summed over all ranks."""
    if world.size == 1:
        return Data(count=gathered.count, fingerprint=gathered.fingerprint)
    parts = [part.decode().split() for part in world.gather(f"{gathered.count} {gathered.fingerprint}".encode())]
    count, fingerprint = (sum(int(part[i]) for part in parts) for i in (0, 1))
    return Data(count=count, fingerprint=fingerprint % 2**256)


def _check_folder(options: TrainOptions, job: Job, data: Data, *, wait: bool) -> None:
    """Raise unless this rank sees the run folder, where its teachers' states are kept, and has the data of the run."""
    end = time.monotonic() + (NEWS_SECONDS if wait else 0.0)
    while not (options.out / "config.json").is_file() and time.monotonic() < end:
        time.sleep(0.05)
    if not (options.out / "config.json").is_file():
        raise DatalensError(f"{options.out} is not there: --out must be on a file system that all machines share")
    begun_with = read_config(options.out).get("data_sha256")
    if begun_with != f"{data.fingerprint:064x}" and begun_with != _earlier_fingerprint(job, wait=wait):
        raise DatalensError(
            f"{job.options['data']} is not the data {options.out} was begun with: put that back, or start another run"
        )


def _earlier_fingerprint(job: Job, *, wait: bool) -> str | None:
    """Return the fingerprint by which private moments of 0.2.0.dev0 knew the data; None where none was resumed."""
    from datalens.private.shares import fingerprint_in_order

    if not job.begun or wait or job.settings.makes != "moments":
        return None
    return f"{fingerprint_in_order(_records(job)):064x}"


# --- on rank 0 --------------------------------------------------------------------------------------------------------


def _open(options: TrainOptions, job: Job) -> Run | None:
    """Lock and return a run that is resumed. For a new one, find what would refuse it before the records are read."""
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
        raise DatalensError(f"this run cannot succeed, so nothing was charged: {why}")
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
