"""The methods that there are, by name. To add one: its file in `methods/`, and its line here.

A method's file is loaded when it is first asked for, by name: `verify` needs its settings, and nothing that touches
records is run by that.
"""

import dataclasses
import importlib
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import MOMENT_OVERRIDES, OVERRIDES, SPECIFIC, TrainOptions
from datalens.plans.base import Method, Settings, check_seed
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
}
OURS = ("datalens", "datalens-paper")


def names() -> tuple[str, ...]:
    """Return what `--method` takes, of ours."""
    return tuple(name for name in METHODS if name != "topagg")


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
    if method == "dpsgd":  # begun by `datalens sgd`
        settings: type[Settings] = _load("datalens.methods.sgd:SgdSettings")
        return settings.from_dict(fields)
    if not isinstance(method, str):
        raise DatalensError("these settings are not of this version of datalens: they name no method")
    if method == "datalens" and "warm_start" not in fields:
        method = "topagg"
    return method_named(method).settings.from_dict(fields)


def method_of(settings: Settings) -> Method:
    """Return the method whose settings these are."""
    name = settings.method
    return method_named("topagg" if name == "datalens" and not hasattr(settings, "warm_start") else name)


def chosen(options: TrainOptions) -> str:
    """Return the registered name of what was asked for. Whoever sets something about teachers gets teachers."""
    topagg = [name for name in OVERRIDES if getattr(options, name) is not None]
    moments = [name for name in MOMENT_OVERRIDES if getattr(options, name) is not None]
    default = options.method == "datalens" and options.preset in (None, "default")
    choice = default and not topagg and not options.balanced if options.warm_start is None else None
    if moments and (choice is False or options.warm_start == "off"):
        raise DatalensError(
            f"--{moments[0].replace('_', '-')} is about private moments, which this run does not start from: leave it "
            "out, or what speaks of teachers"
        )
    if options.warm_start == "moments" and not default:
        raise DatalensError("--warm-start moments belongs to --method datalens with its default preset")
    if options.warm_start == "moments" and topagg:
        raise DatalensError(
            f"--{topagg[0].replace('_', '-')} is about teachers, which --warm-start moments has none of: leave one out"
        )
    if options.method == "datalens":
        return "datalens" if choice or options.warm_start == "moments" else "topagg"
    return options.method


def make_plan(options: TrainOptions, schema: Schema) -> tuple[Budget, Settings]:
    """Fix the budget and every setting before training, from public facts: no record is touched here."""
    if options.method not in names():
        named("methods", options.method, ours=names())  # or what there is
    of_ours = options.method in OURS
    method = method_named(chosen(options) if of_ours else options.method)
    if schema.by_person:
        _check_persons(options, method)
    budget = _budget(options, method)
    if not of_ours:
        _check_known(options, method)
    alone = options.method == "datalens" and options.preset == "topagg"  # `chosen` has heard what it says
    preset = method.presets[0] if alone or options.preset is None else options.preset
    if preset not in method.presets:
        raise DatalensError(f"--preset {preset} is unknown to {options.method}: choose {' or '.join(method.presets)}")
    settings = method.plan(options, preset, schema, budget)
    if options.method not in METHODS:
        owner = named("methods", options.method, ours=()).owner
        settings = dataclasses.replace(settings, plugins=f"the method {options.method} of {owner}")  # type: ignore[type-var]
    settings.check(schema)
    return budget, settings


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
    if options.balanced and options.relation != "replace-one":
        raise DatalensError(
            "--balanced shares are not private under add-remove (removing a record shifts all later ones): "
            "add --relation replace-one, or leave --balanced out"
        )
    check_seed(options.seed)
    if options.noise_seed is not None and options.noise_seed < 0:
        raise DatalensError(f"--noise-seed must be at least 0, not {options.noise_seed}")
    if options.chunk is not None and options.chunk < 1:
        raise DatalensError(f"--chunk must be at least 1, not {options.chunk}")
    return budget


def _check_known(options: TrainOptions, method: Method) -> None:
    """Raise if an option is given that this method would ignore."""
    given = [name for name in SPECIFIC if (value := getattr(options, name)) is not None and value is not False]
    unknown = [name for name in given if name not in method.options]
    if unknown:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in SPECIFIC if name in method.options)
        raise DatalensError(
            f"--{unknown[0].replace('_', '-')} means nothing to --method {options.method}: leave it out"
            + (f" (it knows {names})" if names else "")
        )
