"""The command line: one thin subcommand per verb. Progress and messages go to stderr, results to stdout."""

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from datalens.commands import train
from datalens.commands.account import Account
from datalens.commands.audit import AuditCommand
from datalens.commands.common import EXIT_INTERRUPTED
from datalens.commands.compare import Compare
from datalens.commands.data import DataCommand
from datalens.commands.evaluate import Evaluate
from datalens.commands.inspect import Inspect
from datalens.commands.plan import Plan
from datalens.commands.report import Report
from datalens.commands.reproduce import Reproduce
from datalens.commands.sample import Sample
from datalens.commands.sgd import Sgd
from datalens.commands.verify import Verify
from datalens.config import TrainOptions
from datalens.errors import DatalensError, SaidElsewhere

Command = (
    Annotated[TrainOptions, subcommand("train")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Sgd, subcommand("sgd")]
    | Annotated[Sample, subcommand("sample")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Account, subcommand("account")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[AuditCommand, subcommand("audit")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Compare, subcommand("compare")]
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
    if isinstance(command, TrainOptions):
        return train.train(command, given)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = "only `datalens train` runs on several ranks: call this one without torchrun"
        raise DatalensError(message) if os.environ.get("RANK", "0") == "0" else SaidElsewhere(message)
    return command()
