"""The registry of methods. To add one, write its file in `methods/`, and add its line here.

A method's file is imported when the method is first used. `verify` imports it for the settings; nothing that touches
records runs then.
"""

import dataclasses
import importlib
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.plans.base import Method, Request, Settings, check_seed, read_options
from datalens.plans.plugins import named
from datalens.privacy.ledger import Budget, check_epsilon

METHODS = {
    "datalens": "datalens.methods.refined:DATALENS",
    "refined": "datalens.methods.refined:REFINED",  # `--method datalens --refine diffusion`
    "topagg": "datalens.methods.topagg:TOPAGG",  # `--method datalens --warm-start off`
    "datalens-paper": "datalens.methods.topagg:PAPER",
    "dcgan": "datalens.methods.dcgan:METHOD",
    "dpmerf": "datalens.methods.dpmerf:METHOD",
    "gswgan": "datalens.methods.gswgan:METHOD",
    "dpgan": "datalens.methods.noisy_critic:METHOD",
    "dpsgd-gan": "datalens.methods.noisy_critic:METHOD",
    "pategan": "datalens.methods.pategan:METHOD",
    "gpate": "datalens.methods.gpate:METHOD",
    "sgd": "datalens.methods.sgd:METHOD",  # `datalens sgd`; its settings say "dpsgd"
}
HIDDEN = ("topagg", "sgd", "refined")  # not accepted by `--method`: they have other spellings
MAY_BE_PLUGGED = ("topagg", "datalens-paper")  # methods of datalens that take a plug-in; their settings check it


def names() -> tuple[str, ...]:
    """Return the built-in names that `--method` accepts."""
    return tuple(name for name in METHODS if name not in HIDDEN)


def method_named(name: str) -> Method:
    """Return a built-in method, or another package's.

    Raises:
        DatalensError: there is none of this name.
    """
    if name in METHODS:
        method: Method = _load(METHODS[name])
        return method
    plugin = named("methods", name, ours=names())
    if not isinstance(plugin.value, Method):
        raise DatalensError(f"--method {name} of {plugin.owner} is not a datalens.plans.base.Method")
    return plugin.value


def _load(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


def read_settings(fields: Any) -> Settings:
    """Return settings from JSON, whichever method they are of.

    Raises:
        DatalensError: they name no known method, or do not fit it.
    """
    method = fields.get("method") if isinstance(fields, dict) else None
    if not isinstance(method, str):
        raise DatalensError("these settings are not those of this version of datalens: they name no method")
    name = _registered(method, warm="warm_start" in fields, refined="refine" in fields)
    settings = method_named(name).settings.from_dict(fields)
    if settings.plugins and name in METHODS and name not in MAY_BE_PLUGGED:
        raise DatalensError(f"the settings name a plug-in, but the method {method} takes none")
    return settings


def method_of(settings: Settings) -> Method:
    """Return the method whose settings these are."""
    return method_named(_name_of(settings))


def is_ours(settings: Settings) -> bool:
    """Return whether the method is part of this package, whatever parts of it are another's."""
    return _name_of(settings) in METHODS


def _name_of(settings: Settings) -> str:
    return _registered(settings.method, warm=hasattr(settings, "warm_start"), refined=hasattr(settings, "refine"))


def _registered(name: str, *, warm: bool, refined: bool) -> str:
    """Return the registered name of the method that settings name.

    Args:
        name: the method that the settings name.
        warm: whether they have a field warm_start.
        refined: whether they have a field refine.
    """
    if name == "dpsgd":
        return "sgd"
    if name != "datalens":
        return name
    return "refined" if refined else "datalens" if warm else "topagg"


def options_of(method: str) -> frozenset[str]:
    """Return the names of a method's own options. `method`: a key of `METHODS`, or the name of a plug-in."""
    return frozenset(field.name for field in dataclasses.fields(method_named(method).options))


def chosen(options: TrainOptions) -> str:
    """Return the registered name of the method that the options choose.

    `--method datalens` means private moments ("datalens"), unless `--warm-start off`, a preset of TopAgg or an option
    about teachers chooses TopAgg ("topagg"), or `--refine` a second stage ("refined"; for `--refine auto`, its plan may
    choose moments after all).

    Raises:
        DatalensError: options contradict each other.
    """
    start, default = options.own.get("warm_start"), options.preset in (None, "default")
    if start == "moments" and (options.method != "datalens" or not default):
        raise DatalensError("--warm-start moments belongs to --method datalens with its default preset")
    if options.method != "datalens":
        return options.method
    moments, topagg = options_of("datalens"), options_of("topagg")
    teachers = next((name for name in options.own if name in topagg - moments - {"chunk"}), None)
    images = next((name for name in options.own if name in moments - topagg), None)
    if start == "moments" and teachers:
        raise DatalensError(
            f"{flag(teachers)} is about teachers, and --warm-start moments has none: leave one of the two out"
        )
    is_topagg = start == "off" or not default or teachers is not None
    if images and is_topagg:
        raise DatalensError(
            f"{flag(images)} is about private moments, which a run with teachers does not use: leave it out, or leave "
            "out the options about teachers"
        )
    if is_topagg:
        return "topagg"
    return "refined" if options.own.get("refine") in ("auto", "diffusion") else "datalens"


def version_of(options: TrainOptions) -> int:
    """Return the version of the code that a run with these options would be made by (`Method.version`)."""
    return method_named(chosen(options)).version


def flag(name: str) -> str:
    """Return an option as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def make_plan(options: TrainOptions, schema: Schema) -> tuple[Budget, Settings]:
    """Fix the budget and every setting before training, from public facts alone.

    Args:
        options: what was asked for.
        schema: the public facts about the data.

    Returns:
        The budget, and the settings of the chosen method.

    Raises:
        DatalensError: the options contradict each other, or do not fit the data.
        BudgetExceeded: the budget does not cover what was asked for.
    """
    if options.method not in METHODS:
        named("methods", options.method, ours=names())  # raises if there is no such plug-in
    if options.method == "topagg":
        raise DatalensError("--method topagg is --method datalens --warm-start off")
    if options.method == "refined":
        raise DatalensError("--method refined is --method datalens --refine diffusion")
    name = chosen(options)
    method = method_named(name)
    if schema.by_person:
        _check_persons(options, method)
    if schema.left_out and options.relation == "replace-one":
        raise DatalensError(
            "--skip-unreadable is for --relation add-remove: under replace-one, a file that is replaced by an "
            "unreadable one would change the number of records; take such files out first"
        )
    budget = _budget(options, method)
    own = _own(options, name, method)
    # `--preset topagg` chose the method (see `chosen`), and is not a preset of that.
    names_method = options.method == "datalens" and options.preset == "topagg"
    preset = method.presets[0] if names_method or options.preset is None else options.preset
    if preset not in method.presets:
        raise DatalensError(f"--preset {preset} is unknown to {options.method}: choose {' or '.join(method.presets)}")
    request = Request(
        method=options.method, preset=preset, seed=options.seed, noise_seed=options.noise_seed, options=own
    )
    if method.instead is not None and (other := method.instead(request, schema, budget)) is not None:
        method = method_named(other)
        budget = _budget(options, method)
    settings = method.plan(request, schema, budget)
    if options.method not in METHODS:
        owner = named("methods", options.method, ours=()).owner
        settings = dataclasses.replace(settings, plugins=f"the method {options.method} of {owner}")  # type: ignore[type-var]
    settings.check(schema)
    return budget, settings


def _own(options: TrainOptions, name: str, method: Method) -> Any:
    """Return the method's own options; raise if an option is given that the method does not have."""
    known = options_of(name)
    for given in options.own:
        if given not in known:
            raise DatalensError(unknown(given, options.method))
    return read_options(method.options, options.own)


def unknown(option: str, method: str) -> str:
    """Return the error message for an option that this method does not have."""
    owners = [other for other in METHODS if option in options_of(other) and other != "refined"]
    spellings = {"datalens": "private moments", "topagg": "--warm-start off", "sgd": "`datalens sgd`"}
    belongs = ", ".join(spellings.get(owner, f"--method {owner}") for owner in owners[:3])
    help_hint = f"`datalens train --method {method} --help` shows its options"
    if not owners:
        return f"there is no option {flag(option)}; {help_hint}"
    return f"{flag(option)} is not an option of --method {method}: it belongs to {belongs}; {help_hint}"


def _check_persons(options: TrainOptions, method: Method) -> None:
    """Raise if the method cannot protect a person with all of their images."""
    if not method.persons:
        raise DatalensError(
            f"--method {options.method} protects single images, not persons: leave --record-id out, or use --method "
            "datalens"
        )
    if method.teachers and options.relation == "replace-one":
        raise DatalensError(
            "--relation replace-one shares records out to teachers by position, so the images of a person would reach "
            "several teachers: leave it out, or leave --record-id out"
        )


def _budget(options: TrainOptions, method: Method) -> Budget:
    """Return the budget; raise if a shared option has an invalid value."""
    check_epsilon(options.epsilon)
    budget = Budget(
        epsilon=options.epsilon,
        delta=options.delta,
        relation=options.relation,
        accountant=options.accountant or method.accountant,
    )
    if options.own.get("balanced") and options.relation != "replace-one":
        raise DatalensError(
            "--balanced shares are not private under add-remove (removing a record shifts all later ones): "
            "add --relation replace-one, or leave --balanced out"
        )
    check_seed(options.seed)
    if options.noise_seed is not None and options.noise_seed < 0:
        raise DatalensError(f"--noise-seed must be at least 0, not {options.noise_seed}")
    if (chunk := options.own.get("chunk")) is not None and chunk < 1:
        raise DatalensError(f"--chunk must be at least 1, not {chunk}")
    return budget
