"""The job of a training run, decided by public facts: planned anew, or read from the run that is resumed."""

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
    """The data, budget, settings and options of a run, decided by public facts.

    Attributes:
        options: those that config.json keeps.
        budget: None for a run that is resumed: its ledger has the budget.
        begun: whether a run is resumed.
        records: where they are open already: given by a Python program, or opened for their schema.
    """

    options: dict[str, Any]
    settings: Settings
    schema: Schema
    budget: Budget | None
    begun: bool
    records: "Records | None" = None

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks."""
        from datalens.released.certificate import versions

        facts: dict[str, Any] = {f"the version of {name}": versions()[name] for name in ("datalens", "torch")}
        facts |= {"resume": self.begun, "the data set": self.schema.as_dict()}
        not_given = dict.fromkeys(f.name for f in dataclasses.fields(method_of(self.settings).options))
        facts |= {name.replace("_", "-"): value for name, value in (not_given | self.options).items()}
        facts |= {f"the setting {name}": value for name, value in self.settings.as_dict().items()}
        return facts | {"the budget": None if self.budget is None else self.budget.as_dict()}


def make_job(options: TrainOptions, given: set[str] | None, records: "Records | None") -> Job:
    """Return what this rank is to do. Own data is opened for its schema, and no more of it is read than that needs.

    Args:
        given: options that the caller named, where that is known (see `driver.train`).
        records: given by a Python program instead of a file.

    Raises:
        DatalensError: the options fit neither each other nor the data, or not the run that is resumed.
    """
    if options.tensorboard:
        writer_class()  # raises now, not after the records are read
    if options.resume or _restarted(options):
        return dataclasses.replace(_as_begun(options, given), records=records)
    if options.data is None:
        raise DatalensError("name the data: --data mnist, for example; `datalens data list` shows what there is")
    if records is None:
        reading = Reading.of(options)
        schema, records = formats.schema_and_records(
            options.data, nominal_size=options.nominal_size, folder=options.data_folder, reading=reading
        )
    else:
        schema = records.schema
    budget, settings = make_plan(options, schema)
    return Job(
        options=options.remembered(),
        settings=settings,
        schema=schema,
        budget=budget,
        begun=False,
        records=records,
    )


def _restarted(options: TrainOptions) -> bool:
    """Return whether torchrun has started this process again, after the run that it began was interrupted."""
    from datalens.run.ranks import launch, restarted

    exists = launch() is not None and (options.out / "config.json").is_file()
    return exists and restarted(read_config(options.out).get("launch"))


# A caller from Python does not say which options it named; these are never taken for defaults.
PROMISED = ("epsilon", "delta", "relation", "noise_seed")


def _as_begun(options: TrainOptions, given: set[str] | None) -> Job:
    """Return what a resumed run is to do: what it was begun with. Raise if an option says otherwise."""
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
                    "or begin another run in another folder"
                )
            raise DatalensError(
                f"{options.out} was begun with {name.replace('_', '-')} {begun.get(name)}; --resume cannot change it"
            )
    settings, schema = read_settings(config["settings"]), Schema.from_dict(config["schema"])
    command = method_of(settings).command
    if command != ("sgd" if options.method == "sgd" else "train"):
        raise DatalensError(f"{options.out} was begun by `datalens {command}`: resume it with that command")
    settings.check(schema)
    return Job(options=begun, settings=settings, schema=schema, budget=None, begun=True)
