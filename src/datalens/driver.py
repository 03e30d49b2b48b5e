"""One training run from start to release: what `datalens train` and the reproduce harness both call.

Under torchrun every rank comes through here. All of them plan, from public facts, and compare; each reads the records
of its own teachers; rank 0 has the run folder and leads, the others follow (see `crowd`).
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
from datalens.peers.settings import PeerSettings
from datalens.peers.table import code_of
from datalens.plans.guidance import hopeless, read_off_warnings, warnings
from datalens.plans.settings import MomentSettings, Settings, TrainSettings
from datalens.privacy.ledger import json_number
from datalens.private.partition import check_enough
from datalens.progress import say
from datalens.run.folder import Run, read_config
from datalens.run.places import check_vacant
from datalens.run.reservation import begin, check_room, go_on

if TYPE_CHECKING:
    import torch

    from datalens.data.records import Records
    from datalens.private.shares import Shares
    from datalens.released.release import AnyGenerator
    from datalens.run.ranks import World
    from datalens.run.remote_teachers import Crowd

NEWS_SECONDS = 60.0  # a network file system may take this long to show a machine what another one has written


def train(options: TrainOptions, given: set[str] | None = None, *, records: "Records | None" = None) -> dict[str, Any]:
    """Train, or continue a run, and write its release. Returns the facts `--json` prints; rank 0 alone has them.

    - `given`: options that were named by the caller, where that is known; one may repeat a default and mean it. Where
      it is not, and a run goes on, epsilon, delta, relation and noise_seed must be those it was begun with.
    - `records`: in the place of a file; `options.data` is then no more than a name.
    """
    from datalens.methods import datalens
    from datalens.run.ranks import World

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(World.start(options.device))
        job = world.together(lambda: dataclasses.replace(make_job(options, given, records), records=records))
        world.agree({"out": str(options.out), **job.facts()})
        if isinstance(job.settings, PeerSettings):
            peer = job.settings
            world.together(lambda: _check_alone(world, f"--method {peer.method} runs in one process"))
            return _peer(options, job, peer, world.device, stack, began)
        if isinstance(job.settings, MomentSettings):
            world.together(lambda: _check_alone(world))
            return _from_moments(options, job, job.settings, stack, began)
        topagg = job.settings
        world.together(lambda: _check_ranks(topagg, world))
        run = world.together(lambda: _open(options, job) if world.leads else None)
        if run is not None:
            stack.callback(run.close)
        shares = world.together(lambda: _read(job, topagg, world))  # what is broken is found before the run exists
        data = _whole(shares, world)
        if not job.begun:
            run = world.together(lambda: _create(options, job, data, teachers=topagg.teachers) if world.leads else None)
            if run is not None:
                stack.callback(run.close)
        world.together(lambda: _check_folder(options, job, data, wait=world.size > 1))
        crowd = world.together(
            lambda: datalens.make_crowd(
                shares,
                topagg,
                job.schema,
                world=world,
                folder=options.out / "checkpoints",
                chunk=options.chunk,
            )
        )
        if run is None:
            crowd.follow()
            return {}
        if options.tensorboard:
            run.open_board()
        return _lead(run, topagg, crowd, world.device, began)


def _from_moments(
    options: TrainOptions, job: Job, settings: MomentSettings, stack: contextlib.ExitStack, began: float
) -> dict[str, Any]:
    """A run from private moments, in this one process."""
    from datalens.methods import moments

    run = _open(options, job)
    if run is not None:
        stack.callback(run.close)
    records = moments.gather(_records(job), settings)
    data = Data(count=records.count, fingerprint=records.fingerprint)
    if run is None:
        run = _create(options, job, data)
        stack.callback(run.close)
    _check_folder(options, job, data, wait=False)
    if options.tensorboard:
        run.open_board()
    budget = run.ledger.budget
    private = math.isfinite(budget.epsilon) and not settings.noise_seeded
    stamp = "" if private else " NOT PRIVATE."
    noisy = _law(settings) if math.isfinite(budget.epsilon) else "no noise"
    say(
        f"{settings.method} [{settings.preset}, from private moments] on {run.schema.name}: {settings.coordinates} "
        f"coordinates, {settings.texture} of texture, {noisy}; budget {budget.describe(budget.epsilon)}.{stamp}"
    )
    model = moments.train(run, records, settings)
    _release(run, model)
    spent, steps = run.ledger.spent(), run.completed
    lost = len(run.ledger.events) - steps
    wasted = f" ({lost} more charged, and lost by an interruption)" if lost else ""
    say(
        f"done: {steps} releases{wasted}, spent {budget.describe(spent)}.{stamp} "
        f"Report: {run.path / 'release' / 'report.html'}"
    )
    return _facts(run, steps, began, sigma=None)


def _peer(
    options: TrainOptions,
    job: Job,
    settings: PeerSettings,
    device: "torch.device",
    stack: contextlib.ExitStack,
    began: float,
) -> dict[str, Any]:
    """A run of any other method, in this one process."""
    method = code_of(settings.method)
    run = _open(options, job)
    if run is not None:
        stack.callback(run.close)
    records = method.gather(_records(job), settings, device=device)
    data = Data(count=records.count, fingerprint=records.fingerprint)
    if run is None:
        run = _create(options, job, data, teachers=getattr(settings, "teachers", 1))
        stack.callback(run.close)
    _check_folder(options, job, data, wait=False)
    if options.tensorboard:
        run.open_board()
    budget = run.ledger.budget
    stamp = "" if math.isfinite(budget.epsilon) and not settings.noise_seeded else " NOT PRIVATE."
    say(
        f"{settings.method} [{settings.preset}] on {run.schema.name}: {settings.said()}; "
        f"budget {budget.describe(budget.epsilon)}.{stamp}"
    )
    generator = method.train(run, records, settings, device=device)
    if run.completed == 0:
        raise BudgetExceeded("the budget is spent and not one release survived: there is nothing to learn from")
    _release(run, generator)
    _say_end(run, settings.steps, stamp, lost=0 if settings.one_charge else len(run.ledger.events) - run.completed)
    return _facts(run, run.completed, began, sigma=getattr(settings, "sigma", None))


def _release(run: Run, generator: "AnyGenerator") -> None:
    from datalens.released.release import write_release

    release = write_release(
        run.path,
        generator,
        settings=run.settings,
        schema=run.schema,
        ledger=run.ledger,
        completed=run.completed,
        answered=run.answered,
    )
    run.show_release(release)


def _say_end(run: Run, planned: int, stamp: str, *, lost: int) -> None:
    steps, budget = run.completed, run.ledger.budget
    short = "" if run.interrupted or steps == planned else f" of {planned}"
    wasted = f" ({lost} of the charges went to releases that an interruption lost)" if lost > 0 else ""
    state = "interrupted; continue with --resume. So far:" if run.interrupted else "done:"
    say(
        f"{state} {steps}{short} steps{wasted}, spent {budget.describe(run.ledger.spent())}.{stamp} "
        f"Report: {run.path / 'release' / 'report.html'}"
    )


def _lead(run: Run, settings: Settings, crowd: "Crowd", device: "torch.device", began: float) -> dict[str, Any]:
    budget = run.ledger.budget
    private = math.isfinite(budget.epsilon) and not settings.noise_seeded
    stamp = "" if private else " NOT PRIVATE."
    noisy = "no noise" if settings.sigma == 0 else f"σ = {settings.sigma:.5g} ({_law(settings)})"
    say(
        f"{settings.method} [{settings.preset}] on {run.schema.name}: {settings.teachers} teachers, "
        f"{settings.steps} steps of {settings.batch} images, {_rows(settings)}, {noisy}; "
        f"budget {budget.describe(budget.epsilon)}.{stamp}"
    )
    steps = _train_and_release(run, settings, crowd, device)
    _say_end(run, settings.steps, stamp, lost=len(run.ledger.events) - steps)
    return _facts(run, steps, began, sigma=settings.sigma)


def _facts(run: Run, steps: int, began: float, *, sigma: float | None) -> dict[str, Any]:
    """What `--json` prints. `sigma`: None where every release has its own; the ledger names them."""
    settings, budget = run.settings, run.ledger.budget
    return {
        "run": str(run.path),
        "method": settings.method,
        "preset": settings.preset,
        "warm_start": "moments" if isinstance(settings, MomentSettings) else "off",
        "epsilon": json_number(budget.epsilon),
        "epsilon_spent": json_number(run.ledger.spent()),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "steps": steps,
        "queries": sum(getattr(event, "queries", 0) for event in run.ledger.events),
        "sigma": sigma,
        "noise": settings.noise,
        "seconds": round(time.monotonic() - began, 2),
        "private": math.isfinite(budget.epsilon) and not settings.noise_seeded,
        "interrupted": run.interrupted,
    }


def choose_device(name: str) -> "torch.device":
    from datalens.run import ranks

    return ranks.choose_device(name)


# --- on every rank --------------------------------------------------------------------------------


def _check_ranks(settings: Settings, world: "World") -> None:
    if world.size > settings.teachers:
        raise DatalensError(
            f"{world.size} ranks are more than {settings.teachers} teachers: start at most {settings.teachers}, "
            "or raise --teachers"
        )


def _check_alone(world: "World", why: str = "") -> None:
    if world.size > 1 and why:
        raise DatalensError(f"{why}: leave torchrun out")
    if world.size > 1:
        raise DatalensError(
            "private moments are summed by one process, in seconds: leave torchrun out, or add --warm-start off"
        )


def _read(job: Job, settings: Settings, world: "World") -> "Shares":
    """The records of this rank's teachers."""
    from datalens.methods import datalens

    return datalens.gather(_records(job), settings, world=world)


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


def _whole(shares: "Shares", world: "World") -> Data:
    parts = [part.decode().split() for part in world.gather(f"{shares.count} {shares.fingerprint}".encode())]
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


# --- on rank 0 ------------------------------------------------------------------------------------


def _open(options: TrainOptions, job: Job) -> Run | None:
    """A run that goes on is locked now; for a new one, its place is looked at before the long reading."""
    if job.begun:
        go_on(options.out)
        return Run.resume(options.out)
    check_vacant(options.out)
    assert job.budget is not None
    check_room(options, job.settings, job.schema, job.budget)
    if why := hopeless(job.settings, job.schema, job.budget):
        raise DatalensError(f"nothing would come of this, and nothing was spent: {why}")
    for line in warnings(job.budget, job.schema, job.settings):
        say(f"warning: {line}")
    return None


def _create(options: TrainOptions, job: Job, data: Data, *, teachers: int = 1) -> Run:
    from datalens.run.ranks import launch

    check_enough(data.count, teachers)
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


def _rows(s: Settings) -> str:
    """What a teacher says about an image, for a person."""
    if s.compress == "klevel":
        return f"{s.basis_size} coordinates in {s.levels} levels"
    sketched = f" in a sketch of {s.sketch_rows}×{s.sketch_columns}" if s.compress == "sketch" else ""
    return f"k = {s.k} of {s.basis_size}{sketched}"


def _law(settings: TrainSettings) -> str:
    """Which noise, for a person; and why not the exact one, where that could be had."""
    from datalens.privacy.noise import opendp_installed

    if settings.noise == "discrete-gaussian":
        return "exact discrete Gaussian noise"
    real = isinstance(settings, Settings) and settings.real_rows
    kind = "floating-point Gaussian noise" if real else "rounded Gaussian noise"
    missing = not real and not settings.noise_seeded and not opendp_installed()
    return kind + ("; OpenDP, for exact noise, is not installed" if missing else "")


def _train_and_release(run: Run, s: Settings, crowd: "Crowd", device: "torch.device") -> int:
    """Steps whose releases the student has learned from."""
    from datalens.methods import datalens
    from datalens.privacy.mechanisms import Mechanism, ThirdParty, make_mechanism
    from datalens.privacy.noise import open_noise

    with open_noise(s.noise, s.sigma, draws=s.steps * s.batch * s.cells, seed=run.noise_seed) as noise:
        gate: Mechanism = make_mechanism(s.sigma, noise)
        if s.mechanism:
            from datalens.plans.plugins import mechanism

            gate = ThirdParty(mechanism=mechanism(s.mechanism)[0](s.sigma, noise), sigma=s.sigma, noise=noise)
        student = datalens.train(run, crowd, s, mechanism=gate, device=device)
    crowd.dismiss()
    if run.completed == 0:
        raise BudgetExceeded("the budget is spent and not one release survived: there is nothing to learn from")
    _release(run, student.generator)
    return run.completed
