"""The command line: one thin subcommand per verb. Progress and messages go to stderr, results to stdout."""

import json as json_module
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from datalens.config import TrainOptions
from datalens.errors import DatalensError, SaidElsewhere, TamperedError

Json = Annotated[bool, arg(help="Print one JSON object as the last line of stdout.")]
EXIT_REFUSED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Draw synthetic images from a run or a release folder."""

    run: Positional[Path]
    """A run folder, or its release folder."""
    out: Path
    """synth.npz, synth.parquet, or a folder/ of PNG files."""
    count: int = 10_000
    """How many images; the classes come evenly."""
    seed: int = 0
    """The same seed gives the same images."""
    force: bool = False
    """Replace --out if it exists."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Train a classifier on synthetic images, test it on real ones. For the owner: the result is not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set to test on."""
    data_folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where a named data set lies that cannot be downloaded."""
    seeds: int = 3
    """How many classifiers to train; mean and spread are reported."""
    epochs: int = 10
    """Epochs of each; the last one counts."""
    count: int = 10_000
    """Synthetic images to train on, when a run is given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Account:
    """The cost of TopAgg queries. With --epsilon, leave one of --k, --sigma, --queries out and it is solved for."""

    k: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Coordinates each teacher votes on."""
    sigma: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of the noise on every vote sum."""
    queries: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Synthetic images asked about, one by one or in batches: the cost is the same."""
    delta: float = 1e-5
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The budget to solve for."""
    accountant: Literal["exact", "rdp"] = "exact"
    """Whose ε to solve for; both are always shown."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Recompute ε from the ledger and check the certificate. Exit code 1 if they disagree."""

    run: Positional[Path]
    """A run folder, or a release folder by itself."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class DataList:
    """Show the named data sets."""

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class DataGet:
    """Bring a named data set into the cache ($DATALENS_HOME, else the platform's folder)."""

    name: Positional[str]
    """One of those `datalens data list` shows."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a table of the paper and put its figures beside ours."""

    what: Positional[str | None] = None
    """For example table1; see --list."""
    list: bool = False
    """Show what there is."""
    quick: bool = False
    """Minutes on two cores, with fewer teachers, and labelled as such: what is done unless --full is given."""
    full: bool = False
    """The paper's sizes; wants a GPU."""
    out: Path = Path("runs/reproduce")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Json = False


Data = Annotated[DataList, subcommand("list")] | Annotated[DataGet, subcommand("get")]


@dataclass(frozen=True, kw_only=True)
class DataCommand:
    """List the named data sets, or get one."""

    action: Data


Command = (
    Annotated[TrainOptions, subcommand("train")]
    | Annotated[Sample, subcommand("sample")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Account, subcommand("account")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[DataCommand, subcommand("data")]
    | Annotated[Reproduce, subcommand("reproduce")]
)


def main(arguments: list[str] | None = None) -> None:
    """The console script. Errors a person can act on are one line on stderr; the exit code says which kind."""
    if (arguments or sys.argv[1:])[:1] == ["--version"]:
        sys.stdout.write(f"datalens {version('datalens')}\n")
        return
    command = tyro.cli(
        Command,
        prog="datalens",
        description="Private images in, synthetic images out, with a differential-privacy certificate.",
        args=arguments,
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.PositionalMetavarFromFieldName,
        ),
    )
    given = {word[2:].split("=")[0].replace("-", "_") for word in arguments or sys.argv[1:] if word.startswith("--")}
    try:
        sys.exit(_run(command, given))
    except SaidElsewhere as error:
        sys.exit(error.exit_code)
    except DatalensError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away: not our trouble
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}: check space and permissions", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch has no class of its own on a CPU
            raise
        _fail("out of memory: use fewer --teachers, a smaller --batch or --network, or a smaller --count", 2)


def _fail(message: str, code: int) -> None:
    rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
    where = "" if rank == "0" else f"rank {rank}: "
    sys.stderr.write(f"datalens: {where}{' '.join(message.split())}\n")
    sys.exit(code)


def _run(command: Any, given: set[str]) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(command, TrainOptions):
        message = "only `datalens train` runs on several ranks: call this one without torchrun"
        raise DatalensError(message) if os.environ.get("RANK", "0") == "0" else SaidElsewhere(message)
    match command:
        case TrainOptions():
            return _train(command, given)
        case Sample():
            return _sample(command)
        case Evaluate():
            return _evaluate(command)
        case Account():
            return _account(command)
        case Verify():
            return _verify(command)
        case DataCommand(action=DataList() as action):
            return _data_list(action)
        case DataCommand(action=DataGet() as action):
            return _data_get(action)
        case Reproduce():
            return _reproduce(command)
    raise AssertionError(command)


def _show(fields: dict[str, Any], lines: list[str], *, json: bool) -> None:
    """One JSON object for machines, or lines for people; on stdout either way."""
    try:
        sys.stdout.write((json_module.dumps(fields) if json else "\n".join(lines)) + "\n")
        sys.stdout.flush()
    except OSError:  # or Python tries, and fails, once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _release_of(path: Path) -> Path:
    """A run's release folder, or the folder itself if it is one."""
    from datalens.released.certificate import CERTIFICATE

    for folder in (path / "release", path):
        if (folder / CERTIFICATE).is_file():
            return folder
    if (path / "ledger.jsonl").is_file():
        raise DatalensError(f"{path} has no release yet: finish it with `datalens train --out {path} --resume`")
    raise DatalensError(f"{path} is not a run or a release: expected a folder made by `datalens train`")


def _train(command: TrainOptions, given: set[str]) -> int:
    from datalens.training import train

    result = train(command, given)
    if not result:  # another rank leads, and says it
        return 0
    _show(result, [f"{result['run']}/release"], json=command.json)
    return EXIT_INTERRUPTED if result["interrupted"] else 0


def _sample(command: Sample) -> int:
    from datalens.released import synthetic
    from datalens.released.release import sample

    synthetic.check_target(command.out, force=command.force)  # before the work, not after it
    dataset = sample(_release_of(command.run), count=command.count, seed=command.seed)
    synthetic.save(dataset, command.out, force=command.force)
    fields = {"out": str(command.out), "count": len(dataset.images), "private": dataset.certificate["private"]}
    statement = dataset.certificate["statement"]
    _show(fields, [f"{len(dataset.images)} images in {command.out}. {statement}"], json=command.json)
    return 0


def _evaluate(command: Evaluate) -> int:
    from datalens.datasets import formats
    from datalens.evaluate import utility
    from datalens.released import synthetic
    from datalens.released.release import sample
    from datalens.training import choose_device

    test = formats.load(command.data, "test", folder=command.data_folder)
    path = command.synthetic
    if path.is_dir() and ((path / "ledger.jsonl").is_file() or (path / "release").is_dir()):
        dataset = sample(_release_of(path), count=command.count, seed=0)
    else:
        dataset = synthetic.load(path)
    real = formats.load_some(command.data, most=len(dataset.images), folder=command.data_folder)
    result = utility.evaluate(
        dataset,
        real.images,
        real.labels,
        test.images,
        test.labels,
        seeds=command.seeds,
        epochs=command.epochs,
        device=choose_device(command.device),
    ).as_dict()
    lines = [
        f"accuracy {result['accuracy']:.4f} ± {result['accuracy_std']:.4f} on {result['test']} real test images "
        f"({result['classifier']}, {result['synthetic']} synthetic images, final of {result['epochs']} epochs, "
        f"{result['seeds']} seeds)",
        f"the same classifier on as many real images: {result['accuracy_real']:.4f}",
        f"best epoch, chosen on the test set, only to compare with papers: {result['accuracy_best_epoch']:.4f}",
        "measured on real data: for the owner, not covered by ε",
    ]
    _show(result, lines, json=command.json)
    return 0


def _account(command: Account) -> int:
    from datalens.account import account

    result = account(
        k=command.k,
        sigma=command.sigma,
        queries=command.queries,
        delta=command.delta,
        epsilon=command.epsilon,
        accountant=command.accountant,
    )
    lines = [
        f"{result['queries']} queries, k = {result['k']}, σ = {result['sigma']:g} (μ = {float(result['mu']):.6g}):",
        f"  ε = {float(result['epsilon_exact']):.6g} (δ = {result['delta']:g}, add-remove, exact accountant)",
        f"  ε = {float(result['epsilon_rdp']):.6g} (δ = {result['delta']:g}, add-remove, the paper's rdp accountant)",
    ]
    _show(result, lines, json=command.json)
    return 0


def _verify(command: Verify) -> int:
    from datalens.privacy.accountant import UnpriceableEvent
    from datalens.privacy.ledger import json_number
    from datalens.released.certificate import LEDGER, check_release

    release = _release_of(command.run)
    try:
        found = check_release(release)
    except (TamperedError, UnpriceableEvent) as error:
        _show({"ok": False, "problems": [str(error)]}, [f"the certificate does NOT stand: {error}"], json=command.json)
        return EXIT_REFUSED
    problems = list(found.problems)
    own = command.run / LEDGER
    if release != command.run and own.is_file() and own.read_bytes() != (release / LEDGER).read_bytes():
        problems.append("the run's ledger has charges the release does not state: finish the run with --resume")
    fields = {
        "ok": not problems,
        "epsilon": json_number(found.budget.epsilon),
        "epsilon_spent": json_number(found.spent),
        "delta": found.budget.delta,
        "relation": found.budget.relation,
        "accountant": found.budget.accountant,
        "epsilon_spent_exact": json_number(found.spent_by["exact"]),
        "epsilon_spent_rdp": json_number(found.spent_by["rdp"]),
        "events": found.events,
        "private": found.private,
        "problems": problems,
    }
    stamp = "" if found.private else " NOT PRIVATE."
    verdict = "the certificate stands:" if not problems else "the certificate does NOT stand:"
    spent = found.budget.describe(found.spent)
    lines = [verdict, *(f"  {p}" for p in problems)]
    lines.append(f"  {found.events} events, spent {spent} of a budget of {found.budget.epsilon:g}.{stamp}")
    _show(fields, lines, json=command.json)
    return EXIT_REFUSED if problems else 0


def _data_list(command: DataList) -> int:
    from datalens.datasets import sources

    rows = []
    for name in sources.names():
        schema = sources.schema(name)
        rows.append({**schema.as_dict(), "cached": sources.cached(name), "download": sources.downloadable(name)})
    lines = [
        f"{row['name']:15} {row['height']}x{row['width']}x{row['channels']}, {len(row['classes'])} classes, "
        f"about {row['nominal_size']} records"
        + (f" ({row['note']})" if row.get("note") else "")
        + ("" if row["cached"] else f"; {'get it' if row['download'] else 'by hand'}: datalens data get {row['name']}")
        for row in rows
    ]
    _show({"datasets": rows}, lines, json=command.json)
    return 0


def _data_get(command: DataGet) -> int:
    from datalens.datasets import sources

    path = sources.get(command.name)
    _show({"name": command.name, "path": str(path)}, [str(path)], json=command.json)
    return 0


def _reproduce(command: Reproduce) -> int:
    from datalens.reproduce import harness

    if command.quick and command.full:
        raise DatalensError("choose one of --quick and --full")
    if command.list or command.what is None:
        table = harness.listing()
        _show({"available": table}, [f"{name:10} {title}" for name, title in table.items()], json=command.json)
        return 0
    result = harness.reproduce(command.what, full=command.full, out=command.out, device=command.device)
    _show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=command.json)
    return 0
