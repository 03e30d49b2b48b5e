"""What a training run is to do, from public facts: planned anew, or read from the run that goes on."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.plans.base import Settings
from datalens.plans.registry import make_plan, method_of, read_settings
from datalens.privacy.ledger import Budget
from datalens.run.board import writer_class
from datalens.run.folder import read_config

if TYPE_CHECKING:
    from datalens.data.records import Records


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, from public facts. `budget` is None where a run goes on: its ledger has it."""

    options: dict[str, Any]
    settings: Settings
    schema: Schema
    budget: Budget | None
    begun: bool
    records: "Records | None" = None  # where a Python program has them, and no file

    def facts(self) -> dict[str, Any]:
        """What all ranks must have alike."""
        from datalens.released.certificate import versions

        facts: dict[str, Any] = {f"the version of {name}": versions()[name] for name in ("datalens", "torch")}
        facts |= {"resume": self.begun, "the data set": self.schema.as_dict()}
        own = dict.fromkeys(f.name for f in dataclasses.fields(method_of(self.settings).options))  # given or not
        facts |= {name.replace("_", "-"): value for name, value in (own | self.options).items()}
        facts |= {f"the setting {name}": value for name, value in self.settings.as_dict().items()}
        return facts | {"the budget": None if self.budget is None else self.budget.as_dict()}


def make_job(options: TrainOptions, given: set[str] | None, records: "Records | None") -> Job:
    """What this rank would do, without a look at any record."""
    if options.tensorboard:
        writer_class()  # or an error now, and not after the reading
    if options.resume or _restarted(options):
        return _as_begun(options, given)
    if options.data is None:
        raise DatalensError("say which data: --data mnist, or see `datalens data list`")
    if records is None:
        schema = formats.schema(
            options.data, nominal_size=options.nominal_size, folder=options.data_folder, reading=Reading.of(options)
        )
    else:
        schema = records.schema
    budget, settings = make_plan(options, schema)
    return Job(options=options.remembered(), settings=settings, schema=schema, budget=budget, begun=False)


def _restarted(options: TrainOptions) -> bool:
    """Whether torchrun has started this process again, after the run it had begun broke off."""
    from datalens.run.ranks import launch, restarted

    exists = launch() is not None and (options.out / "config.json").is_file()
    return exists and restarted(read_config(options.out).get("launch"))


# From Python nobody can tell what was named and what is a default; these are never taken for defaults.
PROMISED = ("epsilon", "delta", "relation", "noise_seed")


def _as_begun(options: TrainOptions, given: set[str] | None) -> Job:
    """The run goes on as it was begun: an option that says otherwise is an error, not a surprise."""
    config = read_config(options.out)
    begun, asked = config["options"], options.remembered()
    defaults = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for name, value in asked.items():
        if given is None:
            named = name in PROMISED or name in options.own or getattr(options, name) != defaults[name]
        else:
            named = name in given
        if named and value != begun.get(name):
            if name == "budget" and begun.get(name) is None:
                raise DatalensError(
                    f"{options.out} was begun without a budget, so nothing is reserved for it: leave the budget out, "
                    "or begin another run, in another folder"
                )
            raise DatalensError(
                f"{options.out} was begun with {name.replace('_', '-')} {begun.get(name)}; --resume cannot change it"
            )
    settings, schema = read_settings(config["settings"]), Schema.from_dict(config["schema"])
    command = method_of(settings).command
    if command != ("sgd" if options.method == "sgd" else "train"):
        raise DatalensError(f"{options.out} was begun by `datalens {command}`: go on with that")
    settings.check(schema)
    return Job(options=begun, settings=settings, schema=schema, budget=None, begun=True)
