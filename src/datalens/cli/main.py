"""The command line: one thin subcommand per verb. Progress and messages go to stderr, results to stdout."""

import contextlib
import errno
import functools
import io
import json
import os
import sys
from typing import Annotated, Any, NoReturn, get_args

import tyro
from tyro.conf import subcommand

from datalens.cli import train
from datalens.cli.account import Account
from datalens.cli.audit import AuditCommand
from datalens.cli.budget import DataBudgetCommand
from datalens.cli.compare import Compare
from datalens.cli.data import DataCommand
from datalens.cli.evaluate import Evaluate
from datalens.cli.inspect import Inspect
from datalens.cli.mistakes import in_one_line, no_command
from datalens.cli.output import EXIT_INTERRUPTED
from datalens.cli.plan import Plan
from datalens.cli.report import Report
from datalens.cli.reproduce import Reproduce
from datalens.cli.sample import Sample
from datalens.cli.sgd import Sgd
from datalens.cli.sign import Sign
from datalens.cli.verify import Verify
from datalens.errors import DatalensError, SaidElsewhere
from datalens.options import TrainOptions

Command = (
    Annotated[TrainOptions, subcommand("train")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Sgd, subcommand("sgd")]
    | Annotated[Sample, subcommand("sample")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Account, subcommand("account")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Sign, subcommand("sign")]
    | Annotated[DataBudgetCommand, subcommand("budget")]
    | Annotated[AuditCommand, subcommand("audit")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[DataCommand, subcommand("data")]
    | Annotated[Reproduce, subcommand("reproduce")]
)


DESCRIPTION = "Private images in, synthetic images out, with a differential-privacy certificate."
SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: list[str] | None = None) -> None:
    """The console script. Errors a person can act on are one line on stderr; the exit code says which kind."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version  # slow to import, and seldom asked

        sys.stdout.write(f"datalens {version('datalens')}\n")
        return
    if arguments in ([], ["-h"], ["--help"]):
        (sys.stdout if arguments else sys.stderr).write(_help())
        sys.exit(0 if arguments else 2)
    if arguments[:1] == ["--completion"]:
        if arguments[1:2] not in ([shell] for shell in SHELLS):
            _fail(f"say for which shell: --completion {', '.join(SHELLS)}", 2)
        arguments = ["--tyro-print-completion", arguments[1]]
    given = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    fail = functools.partial(_fail, as_json="json" in given)
    command = None
    try:
        command = _parse(arguments)
        sys.exit(_run(command, given))
    except SaidElsewhere as error:
        sys.exit(error.exit_code)
    except DatalensError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail(_stopped(arguments[0], getattr(command, "out", None)), EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away: not our trouble
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}: {_advice(error)}", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch has no class of its own on a CPU
            raise
        fail("out of memory: use fewer --teachers, a smaller --batch or --network, or a smaller --count", 2)


def _commands() -> dict[str, Any]:
    return {verb.__metadata__[0].name: verb.__origin__ for verb in get_args(Command)}


def _parse(arguments: list[str]) -> Any:
    """A parser for the one verb that was named: for all of them it takes half a second to build."""
    if arguments[0] not in _commands() and not arguments[0].startswith("-"):
        raise DatalensError(no_command(arguments[0], _commands()))
    asked: dict[str, Any] = {"f": Command, "prog": "datalens", "description": DESCRIPTION, "args": arguments}
    if arguments[0] in _commands():
        asked = {"f": _commands()[arguments[0]], "prog": f"datalens {arguments[0]}", "args": arguments[1:]}
    config = (
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.OmitArgPrefixes,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.PositionalMetavarFromFieldName,
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config=config, **asked)
    except SystemExit as error:
        if not error.code:
            raise
        raise DatalensError(in_one_line(said.getvalue(), str(asked["prog"]))) from None


def _help() -> str:
    """Every verb with the first paragraph of its docstring; no parser is built for it."""
    first = {name: " ".join(kind.__doc__.split("\n\n")[0].split()) for name, kind in _commands().items()}
    verbs = "\n".join(f"  {name:10} {said}" for name, said in first.items())
    return (
        f"usage: datalens COMMAND [OPTIONS]\n\n{DESCRIPTION}\n\n{verbs}\n\n"
        f"`datalens COMMAND --help` shows its options; `datalens --version`; `datalens --completion {'|'.join(SHELLS)}`"
        " prints a script that completes words.\n"
    )


def _advice(error: OSError) -> str:
    known = {
        errno.ENOENT: "make the folder first, or check the name",
        errno.ENOTDIR: "a file is where a folder should be: choose another name",
        errno.EEXIST: "a file is where a folder should be: choose another name",
        errno.EISDIR: "a folder is where a file should be: choose another name",
    }
    return known.get(error.errno or 0, "check space and permissions")


def _stopped(verb: str, out: Any) -> str:
    """What was paid for by then, and how to go on."""
    if verb not in ("train", "sgd") or out is None or not (out / "ledger.jsonl").is_file():
        return "stopped"
    from datalens.privacy.ledger import read_ledger

    with contextlib.suppress(DatalensError, OSError):
        budget, events = read_ledger(out / "ledger.jsonl")
        spent = budget.describe(budget.pricing().epsilon(events, budget.delta))
        return f"stopped; {spent} is charged: go on with `datalens {verb} --out {out} --resume`"
    return f"stopped: go on with `datalens {verb} --out {out} --resume`"


def _fail(message: str, code: int, *, as_json: bool = False) -> NoReturn:
    rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
    where = "" if rank == "0" else f"rank {rank}: "
    message = " ".join(message.split())
    sys.stderr.write(f"datalens: {where}{message}\n")
    if as_json and rank == "0":
        with contextlib.suppress(OSError):
            sys.stdout.write(json.dumps({"error": message, "exit_code": code}) + "\n")
            sys.stdout.flush()
    sys.exit(code)


def _run(command: Any, given: set[str]) -> int:
    if isinstance(command, TrainOptions):
        return train.train(command, given)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = "only `datalens train` runs on several ranks: call this one without torchrun"
        raise DatalensError(message) if os.environ.get("RANK", "0") == "0" else SaidElsewhere(message)
    return command()
