"""The methods that there are, by name. To add one: its file in `methods/`, and its line here.

A method's file is loaded when it is first asked for, by name: `verify` needs its settings, and nothing that touches
records is run by that.
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
    "datalens": "datalens.methods.moments:MOMENTS",
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
HIDDEN = ("topagg", "sgd")  # what `--method` does not take: other words stand for them
MAY_BE_PLUGGED = ("topagg", "datalens-paper")  # of ours, whose parts may be another package's; their settings check it


def names() -> tuple[str, ...]:
    """Return what `--method` takes, of ours."""
    return tuple(name for name in METHODS if name not in HIDDEN)


def method_named(name: str) -> Method:
    """Return one of ours, or another package's.

    Raises:
        DatalensError: there is none of this name.
    """
    if name in METHODS:
        found: Method = _load(METHODS[name])
        return found
    plugin = named("methods", name, ours=names())
    if not isinstance(plugin.value, Method):
        raise DatalensError(f"--method {name} of {plugin.owner} is no datalens.plans.base.Method")
    return plugin.value


def _load(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


def read_settings(fields: Any) -> Settings:
    """Return settings from JSON, of whichever method."""
    method = fields.get("method") if isinstance(fields, dict) else None
    if not isinstance(method, str):
        raise DatalensError("these settings are not of this version of datalens: they name no method")
    name = _registered(method, warm="warm_start" in fields)
    settings = method_named(name).settings.from_dict(fields)
    if settings.plugins and name in METHODS and name not in MAY_BE_PLUGGED:
        raise DatalensError(f"the settings name a plug-in, which the method {method} has no place for")
    return settings


def method_of(settings: Settings) -> Method:
    """Return the method whose settings these are."""
    return method_named(_registered(settings.method, warm=hasattr(settings, "warm_start")))


def is_ours(settings: Settings) -> bool:
    """Return whether the method is part of this package, whatever parts of it are another's."""
    return _registered(settings.method, warm=hasattr(settings, "warm_start")) in METHODS


def _registered(name: str, *, warm: bool) -> str:
    """Return the registered name of a method that settings name."""
    if name == "dpsgd":
        return "sgd"
    return "topagg" if name == "datalens" and not warm else name


def options_of(method: str) -> frozenset[str]:
    """Return the names of a method's own options; `method` as `METHODS` or a plug-in names it."""
    return frozenset(field.name for field in dataclasses.fields(method_named(method).options))


def chosen(options: TrainOptions) -> str:
    """Return the registered name of what was asked for.

    `datalens` is private moments; or TopAgg, where that or something about teachers is asked for.
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
            f"{flag(teachers)} is about teachers, which --warm-start moments has none of: leave one out"
        )
    topagg_asked = start == "off" or not default or teachers is not None
    if images and topagg_asked:
        raise DatalensError(
            f"{flag(images)} is about private moments, which this run does not start from: leave it out, or what "
            "speaks of teachers"
        )
    return "topagg" if topagg_asked else "datalens"


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def make_plan(options: TrainOptions, schema: Schema) -> tuple[Budget, Settings]:
    """Fix the budget and every setting before training, from public facts: no record is touched here.

    Raises:
        DatalensError: nothing of the kind can be planned.
    """
    if options.method not in METHODS:
        named("methods", options.method, ours=names())  # or what there is
    if options.method == "topagg":
        raise DatalensError("--method topagg is --method datalens --warm-start off")
    name = chosen(options)
    method = method_named(name)
    if schema.by_person:
        _check_persons(options, method)
    budget = _budget(options, method)
    own = _own(options, name, method)
    alone = options.method == "datalens" and options.preset == "topagg"  # `chosen` has heard what it says
    preset = method.presets[0] if alone or options.preset is None else options.preset
    if preset not in method.presets:
        raise DatalensError(f"--preset {preset} is unknown to {options.method}: choose {' or '.join(method.presets)}")
    request = Request(
        method=options.method, preset=preset, seed=options.seed, noise_seed=options.noise_seed, options=own
    )
    settings = method.plan(request, schema, budget)
    if options.method not in METHODS:
        owner = named("methods", options.method, ours=()).owner
        settings = dataclasses.replace(settings, plugins=f"the method {options.method} of {owner}")  # type: ignore[type-var]
    settings.check(schema)
    return budget, settings


def _own(options: TrainOptions, name: str, method: Method) -> Any:
    """Return the method's own options, or raise if one is given that it would ignore."""
    known = options_of(name)
    for given in options.own:
        if given not in known:
            raise DatalensError(unknown(given, options.method))
    return read_options(method.options, options.own)


def unknown(option: str, method: str) -> str:
    """Return what to say of an option that this method does not have."""
    owners = [other for other in METHODS if option in options_of(other)]
    called = {"datalens": "private moments", "topagg": "--warm-start off", "sgd": "`datalens sgd`"}
    belongs = ", ".join(called.get(owner, f"--method {owner}") for owner in owners[:3])
    shown = f"`datalens train --method {method} --help` shows what it takes"
    if not owners:
        return f"there is no option {flag(option)}; {shown}"
    return f"{flag(option)} means nothing to --method {method}: it belongs to {belongs}; {shown}"


def _check_persons(options: TrainOptions, method: Method) -> None:
    """Raise if a person with all of their images cannot be protected."""
    if not method.persons:
        raise DatalensError(
            f"--method {options.method} protects single images, not persons: leave --record-id out, or use --method "
            "datalens"
        )
    if method.teachers and options.relation == "replace-one":
        raise DatalensError(
            "--relation replace-one gives teachers their shares by position, which the images of a person do not have "
            "in common: leave it out, or leave --record-id out"
        )


def _budget(options: TrainOptions, method: Method) -> Budget:
    """The budget; and what no plan can be made with."""
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
