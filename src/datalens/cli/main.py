"""The command line: one thin subcommand for each verb. Progress and messages go to stderr, results to stdout."""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, Union

import tyro
from tyro.conf import subcommand

from datalens.cli import audit, data
from datalens.cli.account import Account
from datalens.cli.budget import DataBudgetCommand
from datalens.cli.compare import Compare
from datalens.cli.evaluate import Evaluate
from datalens.cli.inspect import Inspect
from datalens.cli.mistakes import check, joined_labels, no_command
from datalens.cli.output import EXIT_INTERRUPTED
from datalens.cli.plan import Plan
from datalens.cli.report import Report
from datalens.cli.reproduce import Reproduce
from datalens.cli.sample import Sample
from datalens.cli.sign import Sign
from datalens.cli.studio import StudioCommand
from datalens.cli.train import Sgd, Train, command_for, explain, given_in
from datalens.cli.verify import Verify
from datalens.errors import DatalensError, SaidElsewhere

# The class of each command; for a command with subcommands, their classes by name.
COMMANDS: dict[str, type | dict[str, type]] = {
    "studio": StudioCommand,
    "train": Train,
    "inspect": Inspect,
    "plan": Plan,
    "sgd": Sgd,
    "sample": Sample,
    "evaluate": Evaluate,
    "account": Account,
    "verify": Verify,
    "sign": Sign,
    "budget": DataBudgetCommand,
    "audit": audit.COMMANDS,
    "report": Report,
    "compare": Compare,
    "data": data.COMMANDS,
    "reproduce": Reproduce,
}
OF_METHODS = ("train", "plan", "sgd")  # they also take the options of a method
SERVES = ("studio",)  # these go on until they are stopped
SAID = {"audit": audit.DESCRIPTION, "data": data.DESCRIPTION}  # descriptions of commands without a class

DESCRIPTION = "Private images in, synthetic images out, with a differential-privacy certificate."
SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors that a person can act on are one line on stderr, and an exit code for their kind."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version  # slow to import, and seldom needed

        sys.stdout.write(f"datalens {version('datalens')}\n")
        return
    if arguments in ([], ["-h"], ["--help"]):
        (sys.stdout if arguments else sys.stderr).write(_help())
        sys.exit(0 if arguments else 2)
    if arguments[:1] == ["--completion"]:
        if arguments[1:2] not in ([shell] for shell in SHELLS):
            _fail(f"--completion needs a shell: {', '.join(SHELLS)}", 2)
        tyro.cli(_all(), prog="datalens", config=CONFIG, args=["--tyro-print-completion", arguments[1]])
        return
    given = given_in(arguments)
    fail = functools.partial(_fail, as_json="json" in given)
    command = None
    try:
        command = _parse(arguments)
        from datalens.progress import spoken_for  # `rich`, which --help does not need

        with contextlib.nullcontext() if arguments[0] in SERVES else spoken_for(arguments[0]):
            code = _run(command, given)
        sys.exit(code)
    except SaidElsewhere as error:
        sys.exit(error.exit_code)
    except DatalensError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail(_stopped(arguments[0], getattr(command, "out", None)), EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has ended, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}: {_advice(error)}", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's error on a CPU is a RuntimeError
            raise
        fail("out of memory: use fewer --teachers, a smaller --batch or --network, or a smaller --count", 2)


CONFIG = (
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.PositionalMetavarFromFieldName,
)


def _parse(words: list[str]) -> Any:
    """Return the command, parsed with a parser for it alone: one for all commands takes half a second to build."""
    verb, rest = words[0], joined_labels(words[1:])
    if verb not in COMMANDS:
        raise DatalensError(no_command(verb, COMMANDS))
    command, prog, method = COMMANDS[verb], f"datalens {verb}", ""
    if isinstance(command, dict):
        if rest[:1] in (["-h"], ["--help"]):
            sys.stdout.write(_help(prog, SAID[verb], command))
            sys.exit(0)
        if rest[:1] == [] or rest[0] not in command:
            raise DatalensError(f"{prog} needs one of {', '.join(command)}; `{prog} --help` describes them")
        command, prog, rest = command[rest[0]], f"{prog} {rest[0]}", rest[1:]
    elif verb in OF_METHODS:
        command, method = command_for(verb, rest, command)
    check(command, rest, prog, explain=functools.partial(explain, method=method) if method else None)
    parser_output = io.StringIO()
    try:
        with contextlib.redirect_stderr(parser_output):
            return tyro.cli(command, prog=prog, args=rest, config=CONFIG)
    except SystemExit as error:
        if not error.code:
            raise
        raise DatalensError(f"this command line cannot be read: `{prog} --help` shows all options") from None


def _all() -> Any:
    """Return a type of all commands, for the completion script."""
    commands = []
    for name, command in COMMANDS.items():
        if isinstance(command, dict):
            subcommands = tuple(Annotated[kind, subcommand(verb)] for verb, kind in command.items())
            command = dataclasses.make_dataclass(name, [("action", Union[subcommands])], kw_only=True)  # noqa: UP007
        elif name in OF_METHODS:
            command, _ = command_for(name, ["--seed"], command)
        commands.append(Annotated[command, subcommand(name)])
    return Union[tuple(commands)]  # noqa: UP007


def _help(prog: str = "datalens", description: str = DESCRIPTION, commands: Mapping[str, Any] = COMMANDS) -> str:
    """Return the help on commands: each with the first paragraph of its docstring. No parser is built for it."""
    first = {name: SAID.get(name) or " ".join(kind.__doc__.split("\n\n")[0].split()) for name, kind in commands.items()}
    verbs = "\n".join(f"  {name:10} {description}" for name, description in first.items())
    more = f"; `datalens --version`; `datalens --completion {'|'.join(SHELLS)}` prints a completion script"
    return (
        f"usage: {prog} COMMAND [OPTIONS]\n\n{description}\n\n{verbs}\n\n"
        f"`{prog} COMMAND --help` shows its options{more if prog == 'datalens' else ''}.\n"
    )


def _advice(error: OSError) -> str:
    """Return what to do about an error of the operating system."""
    known = {
        errno.ENOENT: "make the folder first, or check the name",
        errno.ENOTDIR: "a file is where a folder should be: choose another name",
        errno.EEXIST: "a file is where a folder should be: choose another name",
        errno.EISDIR: "a folder is where a file should be: choose another name",
    }
    return known.get(error.errno or 0, "check space and permissions")


def _stopped(verb: str, out: Any) -> str:
    """Return the message about an interrupted command: what was charged by then, and how to continue."""
    if verb not in ("train", "sgd") or out is None or not (out / "ledger.jsonl").is_file():
        return "stopped"
    from datalens.privacy.ledger import read_ledger

    with contextlib.suppress(DatalensError, OSError):
        budget, events = read_ledger(out / "ledger.jsonl")
        spent = budget.describe(budget.pricing().epsilon(events, budget.delta))
        return f"stopped; {spent} is charged: continue with `datalens {verb} --out {out} --resume`"
    return f"stopped: continue with `datalens {verb} --out {out} --resume`"


def _fail(message: str, code: int, *, as_json: bool = False) -> NoReturn:
    """Print an error as one line, and as JSON if that was asked for, and exit."""
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
    if isinstance(command, Train):
        return command.run(given)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = "only `datalens train` runs on several ranks: run this command without torchrun"
        raise DatalensError(message) if os.environ.get("RANK", "0") == "0" else SaidElsewhere(message)
    return command.run(given) if isinstance(command, Plan | Sgd) else command()
