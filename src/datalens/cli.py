"""The command line: one thin subcommand per verb. Progress and messages go to stderr, results to stdout."""

import dataclasses
import json as json_module
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from datalens.config import MethodName, TrainOptions, WarmStart
from datalens.errors import DatalensError, SaidElsewhere, TamperedError

if TYPE_CHECKING:
    from datalens.released.synthetic import SyntheticDataset

Json = Annotated[bool, arg(help="Print one JSON object as the last line of stdout.")]
EXIT_REFUSED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show what `train` would do and what each part would cost. No record is read."""

    data: Annotated[str, arg(metavar="NAME|FILE")]
    """A named data set, or a file of your own."""
    data_folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where a named data set lies that cannot be downloaded."""
    nominal_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(required for a file)")] = None
    """For your own file or folder: about how many records it has, declared public."""
    epsilon: float = 1.0
    delta: float = 1e-5
    relation: Literal["add-remove", "replace-one"] = "add-remove"
    accountant: Annotated[
        Literal["exact", "rdp", "rdp-improved", "pld"] | None,
        arg(help_behavior_hint="(default: exact; for datalens-paper: rdp)"),
    ] = None
    method: MethodName = "datalens"
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first named)")] = None
    """As for `train`."""
    warm_start: Annotated[WarmStart | None, arg(help_behavior_hint="(default: moments, for datalens)")] = None
    json: Json = False


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
    classifier: Literal["paper", "augmented"] = "paper"
    """paper: the paper's. augmented: of its size, with batch norm, on images that are moved and noised a little."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Account:
    """The cost of TopAgg queries. With --epsilon, leave one of --k, --sigma, --queries out and it is solved for."""

    k: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Coordinates each teacher votes on. (The square of a row's length: for --compress sketch give rows·k, for klevel
    (levels − 1)²·d′, with d′ the coordinates padded to a power of two.)"""
    sigma: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of the noise on every vote sum."""
    queries: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Synthetic images asked about, one by one or in batches: the cost is the same."""
    delta: float = 1e-5
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The budget to solve for."""
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """Whose ε to solve for; all are always shown."""
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    """discrete-gaussian: what `train` uses where OpenDP is installed; it costs a little more where σ is small."""
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
    """Minutes on two cores, with fewer teachers or seeds, and labelled as such: what is done unless --full is given."""
    full: bool = False
    """The paper's sizes, and all seeds; wants a GPU."""
    data_folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where CelebA lies, for utility; without it, its rows are not run."""
    out: Path = Path("runs/reproduce")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Json = False


_Epsilon = Annotated[float, arg(help="The claim under attack.")]
_Delta = Annotated[float, arg(help="The bound on ε is at this δ too.")]
_Relation = Annotated[Literal["add-remove", "replace-one"], arg(help="Neighbouring data sets.")]


@dataclass(frozen=True, kw_only=True)
class AuditMechanism:
    """Attack the noise itself: one teacher's votes, all flipped or not, thousands of releases. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    accountant: Literal["exact", "rdp", "rdp-improved", "pld"] = "exact"
    """Whose price is the claim."""
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Which law; all that work here unless one is named."""
    trials: int = 10_000
    """Releases in each of the two worlds."""
    releases: int = 4
    """Audit a composition of so many, too, at the same total cost."""
    k: int = 8
    """Coordinates a teacher votes on, per image."""
    images: int = 4
    """Synthetic images in a release."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class AuditEndToEnd:
    """Attack whole training runs: a canary in a worst-case share, in or out. Many tiny runs on made-up records."""

    epsilon: _Epsilon = 4.0
    delta: _Delta = 1e-5
    relation: _Relation = "add-remove"
    runs: int = 500
    """Runs in each of the two worlds."""
    canaries: int = 1000
    """Canaries of the one-run audit."""
    steps: int = 2
    """Steps of each run."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class AuditMoments:
    """Attack private moments: a worst-case record, present or absent; thousands of releases. No data is read."""

    epsilon: _Epsilon = 1.0
    delta: _Delta = 1e-5
    noise: Literal["all", "discrete-gaussian", "gaussian"] = "all"
    """Which law; all that work here unless one is named."""
    trials: int = 10_000
    """Releases in each of the two worlds."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class AuditAttacks:
    """Attack a synthetic set: membership and copies. For the owner: the result is not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set it was made from; its test split is held out."""
    data_folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where a named data set lies that cannot be downloaded."""
    count: int = 10_000
    """Synthetic images to attack, when a run is given."""
    records: int = 60_000
    """Real images of each kind to use, at most."""
    shadows: int = 0
    """Train so many models of our own, with the options of the run, for a sharper attack."""
    json: Json = False


Data = Annotated[DataList, subcommand("list")] | Annotated[DataGet, subcommand("get")]


@dataclass(frozen=True, kw_only=True)
class DataCommand:
    """List the named data sets, or get one."""

    action: Data


Audit = (
    Annotated[AuditMechanism, subcommand("mechanism")]
    | Annotated[AuditEndToEnd, subcommand("end-to-end")]
    | Annotated[AuditMoments, subcommand("moments")]
    | Annotated[AuditAttacks, subcommand("attacks")]
)


@dataclass(frozen=True, kw_only=True)
class AuditCommand:
    """Try to prove the claimed ε wrong. Exit code 1 if that works, or if a deliberately broken twin is not caught."""

    action: Audit


Command = (
    Annotated[TrainOptions, subcommand("train")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Sample, subcommand("sample")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Account, subcommand("account")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[AuditCommand, subcommand("audit")]
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
        case Plan():
            return _plan(command)
        case Sample():
            return _sample(command)
        case Evaluate():
            return _evaluate(command)
        case Account():
            return _account(command)
        case Verify():
            return _verify(command)
        case AuditCommand(action=AuditMechanism() as action):
            return _audit_mechanism(action)
        case AuditCommand(action=AuditEndToEnd() as action):
            return _audit_end_to_end(action)
        case AuditCommand(action=AuditMoments() as action):
            return _audit_moments(action)
        case AuditCommand(action=AuditAttacks() as action):
            return _audit_attacks(action)
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


def _synthetic_of(path: Path, count: int) -> "SyntheticDataset":
    """So many images from a run or a release, or all that a file or folder holds."""
    from datalens.released import synthetic
    from datalens.released.release import sample

    if path.is_dir() and ((path / "ledger.jsonl").is_file() or (path / "release").is_dir()):
        return sample(_release_of(path), count=count, seed=0)
    return synthetic.load(path)


def _train(command: TrainOptions, given: set[str]) -> int:
    from datalens.training import train

    result = train(command, given)
    if not result:  # another rank leads, and says it
        return 0
    _show(result, [f"{result['run']}/release"], json=command.json)
    return EXIT_INTERRUPTED if result["interrupted"] else 0


def _plan(command: Plan) -> int:
    from datalens.config import MomentSettings
    from datalens.datasets import formats
    from datalens.peers.settings import PeerSettings
    from datalens.plan import costs, make_plan, warnings

    asked = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    schema = formats.schema(command.data, nominal_size=command.nominal_size, folder=command.data_folder)
    budget, settings = make_plan(TrainOptions(out=Path("plan"), **asked), schema)
    parts = costs(settings, schema, budget)
    if isinstance(settings, PeerSettings):
        how, signal = settings.said(), settings.signal
    elif isinstance(settings, MomentSettings):
        how, signal = "from private moments", _NOISE_OF_MOMENTS
    else:
        how, signal = "from teachers' votes (TopAgg)", "sigma by the number of teachers"
    lines = [
        f"{settings.method} [{settings.preset}] on {schema.name}, {how}; nothing has been read.",
        f"budget: {budget.describe(budget.epsilon)}",
        "",
        f"{'release':24} {'of the budget':>13} {'cells':>9} {'sensitivity':>12} {'sigma':>12} {'noise/signal':>13}",
        *(
            f"{part['release']:24} {part['share']:13.1%} {part['cells']:9} {part['sensitivity']:12.6g} "
            f"{part['sigma']:12.6g} {part['noise_to_signal']:13.2g}"
            for part in parts
        ),
        "",
        f"noise/signal: {signal}",
        "",
        *(f"{name} = {value}" for name, value in settings.as_dict().items()),
        *(f"warning: {line}" for line in warnings(budget, schema)),
    ]
    parts = [{name: _number(value) for name, value in part.items()} for part in parts]
    fields = {"budget": budget.as_dict(), "settings": settings.as_dict(), "parts": parts, "public": schema.as_dict()}
    _show(fields, lines, json=command.json)
    return 0


def _number(value: Any) -> Any:
    from datalens.privacy.ledger import json_number

    return json_number(value) if isinstance(value, float) else value


_NOISE_OF_MOMENTS = (
    "noise of a bin by all records; of a class mean's coordinate by the clip norm; the largest eigenvalue of a class "
    "covariance's noise by the squared clip norm"
)


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
    from datalens.training import choose_device

    test = formats.load(command.data, "test", folder=command.data_folder)
    dataset = _synthetic_of(command.synthetic, command.count)
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
        classifier=command.classifier,
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
        noise=command.noise,
    )
    lines = [
        f"{result['queries']} queries, k = {result['k']}, σ = {result['sigma']:g} (μ = {float(result['mu']):.6g}), "
        f"{result['noise']} noise:"
    ]
    for name, accountant in (
        ("exact", "exact accountant"),
        ("rdp-improved", "rdp-improved accountant"),
        ("rdp", "the paper's rdp accountant"),
        ("pld", "pld accountant"),
    ):
        price = result[f"epsilon_{name.replace('-', '_')}"]
        lines.append(
            f"  no ε by the {accountant.removeprefix('the ')}: {result['unpriced'][name]}"
            if price is None
            else f"  ε = {float(price):.6g} (δ = {result['delta']:g}, add-remove, {accountant})"
        )
    _show(result, lines, json=command.json)
    return 0


def _audit_mechanism(command: AuditMechanism) -> int:
    from datalens.evaluate import audit
    from datalens.privacy.audit import Plan

    plan = Plan(
        epsilon=command.epsilon,
        delta=command.delta,
        relation=command.relation,
        accountant=command.accountant,
        trials=command.trials,
        k=command.k,
        images=command.images,
    )
    if command.releases < 1:
        raise DatalensError(f"--releases must be at least 1, not {command.releases}")
    laws = audit.laws() if command.noise == "all" else (command.noise,)
    result = audit.mechanism_report(plan, laws, releases=command.releases)
    return _audited(result, audit.report_lines(result), json=command.json)


def _audit_end_to_end(command: AuditEndToEnd) -> int:
    from datalens.evaluate import audit

    result = audit.end_to_end_report(
        audit.Question(
            epsilon=command.epsilon,
            delta=command.delta,
            relation=command.relation,
            runs=command.runs,
            canaries=command.canaries,
            steps=command.steps,
        )
    )
    return _audited(result, audit.report_lines(result), json=command.json)


def _audit_moments(command: AuditMoments) -> int:
    from datalens.evaluate import audit, audit_moments

    question = audit_moments.Question(epsilon=command.epsilon, delta=command.delta, trials=command.trials)
    laws = audit.laws() if command.noise == "all" else (command.noise,)
    result = audit_moments.report(question, laws)
    return _audited(result, audit.report_lines(result), json=command.json)


def _audit_attacks(command: AuditAttacks) -> int:
    from datalens.datasets import formats
    from datalens.evaluate import attacks

    if command.records < 1:
        raise DatalensError(f"--records must be at least 1, not {command.records}")
    dataset = _synthetic_of(command.synthetic, command.count)
    training = formats.load_some(command.data, most=command.records, folder=command.data_folder)
    held_out = formats.load(command.data, "test", folder=command.data_folder)
    shadows = None
    if command.shadows:
        shadows = attacks.shadows_of(command.synthetic, training, held_out, dataset, count=command.shadows)
    result = attacks.report(dataset, training, held_out, shadows=shadows)
    return _audited(result, attacks.report_lines(result), json=command.json)


def _audited(result: dict[str, Any], lines: list[str], *, json: bool) -> int:
    _show(result, lines, json=json)
    return 0 if result["ok"] else EXIT_REFUSED


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
    problems, prices = list(found.problems), found.spent_by()
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
        **{
            f"epsilon_spent_{name.replace('-', '_')}": None if isinstance(price, str) else json_number(price)
            for name, price in prices.items()
        },
        "events": found.events,
        "private": found.private,
        "problems": problems,
    }
    stamp = "" if found.private else " NOT PRIVATE."
    verdict = "the certificate stands:" if not problems else "the certificate does NOT stand:"
    spent = found.budget.describe(found.spent)
    lines = [verdict, *(f"  {p}" for p in problems)]
    lines.append(f"  {found.events} events, spent {spent} of a budget of {found.budget.epsilon:g}.{stamp}")
    lines.append("  The same ledger by the other accountants:")
    for name, price in prices.items():
        if name != found.budget.accountant:
            other = dataclasses.replace(found.budget, accountant=name)
            lines.append(f"    {name}: {price}" if isinstance(price, str) else f"    {other.describe(price)}.{stamp}")
    _show(fields, lines, json=command.json)
    return EXIT_REFUSED if problems else 0


def _data_list(command: DataList) -> int:
    from datalens.datasets import sources

    rows = []
    for name in sources.names():
        schema = sources.schema(name)
        rows.append({**schema.as_dict(), "cached": sources.cached(name), "download": sources.downloadable(name)})
    lines = [
        f"{row['name']:17} {row['height']}x{row['width']}x{row['channels']}, {len(row['classes'])} classes, "
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
    result = harness.reproduce(
        command.what, full=command.full, out=command.out, device=command.device, data_folder=command.data_folder
    )
    _show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=command.json)
    return 0
