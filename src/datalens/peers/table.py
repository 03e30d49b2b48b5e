"""Every method besides DataLens, in one table: its settings, its plan, and the file of `methods/` that does it."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import SPECIFIC, TrainOptions
from datalens.peers import dcgan, dpmerf, ensembles, gpate, gswgan, noisy_critic, pategan
from datalens.peers.settings import PeerSettings
from datalens.plans.plugins import available, named
from datalens.plans.presets import PRESETS as PRESETS_OF_OURS
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget

PRESETS = ("paper", "quick")


@dataclass(frozen=True, kw_only=True)
class Method:
    """`module` of `methods/` (or, of another package's method, any) has two functions:

    gather(records, settings, *, device) → what training needs of the records, with `count` and `fingerprint`;
    train(run, records, settings, *, device) → the generator to release.
    """

    settings: type[PeerSettings]
    plan: Callable[[TrainOptions, str, Schema, Budget], PeerSettings]  # given the preset
    module: str
    options: frozenset[str]  # of those that not every method has, the ones it knows
    accountant: AccountantName = "exact"  # unless another is asked for


METHODS: dict[str, Method] = {
    "dcgan": Method(
        settings=dcgan.DcganSettings, plan=dcgan.plan, module="dcgan", options=frozenset({"steps", "batch"})
    ),
    "dpmerf": Method(
        settings=dpmerf.DpmerfSettings,
        plan=dpmerf.plan,
        module="dpmerf",
        options=frozenset({"steps", "batch", "noise"}),
    ),
    "gswgan": Method(
        settings=gswgan.GswganSettings,
        plan=gswgan.plan,
        module="gswgan",
        options=frozenset({"teachers", "steps", "batch", "clip"}),
        accountant="rdp-improved",
    ),
    **{
        name: Method(
            settings=noisy_critic.NoisyCriticSettings,
            plan=noisy_critic.plan,
            module=name.replace("-", "_"),
            options=frozenset({"steps", "batch", "clip", "teacher_steps"}),
            accountant="rdp-improved",
        )
        for name in ("dpgan", "dpsgd-gan")
    },
    "pategan": Method(
        settings=pategan.PateGanSettings,
        plan=pategan.plan,
        module="pategan",
        options=frozenset({*ensembles.OPTIONS, "aggregate", "noise"}),
    ),
    "gpate": Method(
        settings=gpate.GPateSettings,
        plan=gpate.plan,
        module="gpate",
        options=frozenset({*ensembles.OPTIONS, "projections", "bins", "threshold"}),
    ),
}


def is_peer(name: str) -> bool:
    """Whether it is one of these, or another package's."""
    return name not in PRESETS_OF_OURS and (name in METHODS or name in available("methods"))


def method_named(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    found = named("methods", name, ours=(*PRESETS_OF_OURS, *METHODS))
    if not isinstance(found.value, Method):
        raise DatalensError(f"--method {name} of {found.owner} is no datalens.peers.table.Method")
    return found.value


def code_of(name: str) -> Any:
    """The module that does it: of `methods/`, or another package's."""
    module = method_named(name).module
    return importlib.import_module(f"datalens.methods.{module}" if name in METHODS else module)


def make_peer_plan(options: TrainOptions, schema: Schema, budget: Budget) -> PeerSettings:
    """Every setting, from public facts."""
    method = method_named(options.method)
    given = [name for name in SPECIFIC if (value := getattr(options, name)) is not None and value is not False]
    unknown = [name for name in given if name not in method.options]
    if unknown:
        known = ", ".join(f"--{name.replace('_', '-')}" for name in SPECIFIC if name in method.options)
        raise DatalensError(
            f"--{unknown[0].replace('_', '-')} means nothing to --method {options.method}: leave it out"
            + (f" (it knows {known})" if known else "")
        )
    preset = options.preset or PRESETS[0]
    if preset not in PRESETS:
        raise DatalensError(f"--preset {preset} is unknown to {options.method}: choose {' or '.join(PRESETS)}")
    settings = method.plan(options, preset, schema, budget)
    if options.method not in METHODS:
        owner = named("methods", options.method, ours=()).owner
        settings = dataclasses.replace(settings, plugins=f"the method {options.method} of {owner}")
    settings.check(schema)
    return settings
