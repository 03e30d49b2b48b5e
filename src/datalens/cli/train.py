"""`datalens train` and `datalens sgd`; and the options of methods, which `datalens plan` takes, too.

`--help` alone shows the options of all methods; with `--method NAME` it also shows those of that method.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from datalens.cli.output import EXIT_INTERRUPTED, show
from datalens.errors import DatalensError
from datalens.options import (
    SHARED,
    BudgetOptions,
    DataOptions,
    Json,
    MethodOptions,
    NoOptions,
    PriceOptions,
    RareOptions,
    RunOptions,
    TrainOptions,
)


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions, MethodOptions, BudgetOptions, DataOptions):
    """Train a generator on private images and write a release with its certificate.

    Each method has options of its own: `datalens train --method NAME --help`.
    """

    json: Json = False

    def run(self, given: set[str]) -> int:
        from datalens.driver import train

        result = train(asked(self, given), given)
        if not result:  # rank 0 prints the result
            return 0
        show(result, [f"{result['run']}/release"], json=self.json)
        return EXIT_INTERRUPTED if result["interrupted"] else 0


@dataclass(frozen=True, kw_only=True)
class Sgd(RunOptions, BudgetOptions, DataOptions):
    """Train a classifier by DP-SGD, with compressed gradients, and write it with its certificate.

    Without --sigma, the noise is calibrated to the budget. With --sigma and without --epochs, as many steps are taken
    as fit into the budget.
    """

    accountant: Literal["prv", "rdp", "rdp-improved", "pld", "moments"] = "prv"
    """prv: Opacus's. rdp: the paper's. moments: of Abadi et al. 2016 (DPDL). `datalens verify` shows all."""
    noise_seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Seed samples and noise, for debugging: the run is stamped NOT PRIVATE."""
    show_accuracy: bool = False
    """Print the accuracy on real test records even if stdout is not a terminal. No epsilon covers it."""
    json: Json = False

    def run(self, given: set[str]) -> int:
        from datalens.driver import train

        result = train(asked(self, given), given - {"show_accuracy"})
        fields, line = accuracy_said(result, shown=self.show_accuracy or sys.stdout.isatty())
        show(fields, [f"{result['run']}/release", line], json=self.json)
        return EXIT_INTERRUPTED if result["interrupted"] else 0


# How to choose the registered methods that `--method` does not accept.
IS = {"topagg": "--method datalens --warm-start off", "sgd": "a command of its own: `datalens sgd`"}


def with_options(command: type, own: type, *more: type) -> type:
    """Return a command's class with more options.

    Args:
        command: the class.
        own: the options of a method.
        more: classes of options that few runs need.
    """
    field = ("own", own, dataclasses.field(default_factory=own))
    whole = dataclasses.make_dataclass(command.__name__, [field], bases=(*more, command), frozen=True, kw_only=True)
    whole.__doc__, whole.__module__ = command.__doc__, __name__
    return whole


def naming_methods(command: type) -> type:
    """Return a command's class with the names of the methods in its description."""
    from datalens.plans.registry import names

    listed = with_options(command, NoOptions)
    listed.__doc__ = f"{command.__doc__.rstrip()} NAME: {', '.join(names())}, or another package's."  # type: ignore[union-attr]
    return listed


def asked(command: Any, given: set[str]) -> TrainOptions:
    """Return a command's options as those of a run: the shared ones, and those of the method that were given."""
    method = {} if hasattr(command, "method") else {"method": "sgd" if isinstance(command, Sgd) else "datalens"}
    fields = {name: getattr(command, name) for name in SHARED if hasattr(command, name)} | method
    own = getattr(command, "own", None)
    chosen = {}
    for field in dataclasses.fields(own) if own is not None else ():
        value = getattr(own, field.name)
        if field.name in given or value != field.default:
            chosen[field.name] = value
    return TrainOptions(**{"out": Path("plan"), **fields}, own=chosen)


def command_for(verb: str, words: list[str], base: type) -> tuple[type, str]:
    """Return the command's class with the options of the method that the words choose, and that method's name.

    The name is the registered one. A resumed run has the method that it was begun with. Methods take seconds to import,
    so none is imported (and the name is "") if no word can be an option of a method.

    Args:
        verb: train, plan or sgd.
        words: the command line after the verb.
        base: the command's class without the options of methods.
    """
    if verb != "sgd" and words in (["-h"], ["--help"]):
        return naming_methods(base), ""
    more = (RareOptions, PriceOptions) if verb == "train" else ()
    shared = with_options(base, NoOptions, *more)
    name = _value(words, "--method") or ""
    if name in IS and verb != "sgd":
        raise DatalensError(f"--method {name} is {IS[name]}")
    if not given_in(words) - {field.name for field in dataclasses.fields(shared)} - {"help"} and "--help" not in words:
        return shared, ""
    from datalens.plans.registry import method_named

    if verb == "sgd":
        return with_options(base, method_named("sgd").options), "sgd"
    method = _value(words, "--method") or _begun(words) or "datalens"
    name = _ours(words) if method == "datalens" else method
    return with_options(base, method_named(name).options, *more), name


def _ours(words: list[str]) -> str:
    """Return which of the two methods of `--method datalens` the words choose: private moments, or TopAgg."""
    from datalens.plans.registry import options_of

    start, preset = _value(words, "--warm-start"), _value(words, "--preset")
    if start is not None:
        return "topagg" if start == "off" else "datalens"
    if preset not in (None, "default"):
        return "topagg"
    given = given_in(words)
    moments, topagg = options_of("datalens"), options_of("topagg")
    return "topagg" if given & (topagg - moments) and not given & (moments - topagg) else "datalens"


def explain(name: str, method: str) -> str | None:
    """Return the message about an option of another method; None if no method has it."""
    from datalens.plans.registry import METHODS, options_of, unknown

    option = name.removeprefix("--").replace("-", "_")
    if not any(option in options_of(other) for other in METHODS):
        return None
    return unknown(option, "datalens" if method == "topagg" else method)


def given_in(words: list[str]) -> set[str]:
    """Return the names of the options that are in a command line."""
    return {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def _value(words: list[str], option: str) -> str | None:
    """Return the last value of an option in a command line."""
    value = None
    for number, word in enumerate(words):
        if word.startswith(f"{option}="):
            value = word.split("=", 1)[1]
        elif word == option and number + 1 < len(words):
            value = words[number + 1]
    return value


def _begun(words: list[str]) -> str | None:
    """Return the method of the run that is resumed, if one is."""
    out = _value(words, "--out")
    if "--resume" not in words or out is None or not (Path(out) / "config.json").is_file():
        return None
    from datalens.run.folder import read_config

    method = read_config(Path(out))["options"].get("method", "datalens")
    return method if isinstance(method, str) else None


def accuracy_said(result: dict[str, Any], *, shown: bool) -> tuple[dict[str, Any], str]:
    """Return the JSON fields and the line to print; with the accuracy only if `shown`, since others read job logs."""
    what = "accuracy on real test records"
    if result["accuracy"] is None:
        return result, f"{what}: unknown, since there is no test split"
    if shown:
        majority = result.get("accuracy_majority")
        beside = "" if majority is None else f" (always guessing the largest class: {majority:.4f})"
        return result, f"{what}, for the owner only (no epsilon covers it): {result['accuracy']:.4f}{beside}"
    where = f"{result['run']}/metrics.jsonl"
    line = f"{what}: for the owner only, in {where} (--show-accuracy prints it)"
    return {**result, "accuracy": None, "accuracy_majority": None, "accuracy_for_the_owner": where}, line
