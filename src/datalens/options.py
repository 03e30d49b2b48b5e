"""The options that every method takes. The options of one method are in its file (`Options`)."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from tyro.conf import arg

from datalens.data.remote import is_address
from datalens.errors import DatalensError

NoiseName = Literal["discrete-gaussian", "gaussian"]
DeviceName = Literal["auto", "cpu", "cuda"]
Relation = Literal["add-remove", "replace-one"]

# Types for a method's own options, in which None stands for the preset's value.
_FROM_PRESET = "(default: from the preset)"
WholeNumber = Annotated[int | None, arg(metavar="INT", help_behavior_hint=_FROM_PRESET)]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_FROM_PRESET)]
CHOICE = arg(help_behavior_hint=_FROM_PRESET)
Noise = Annotated[
    NoiseName | None,
    arg(
        help="discrete-gaussian: whole numbers, sampled exactly by OpenDP. gaussian: float64 numbers, rounded where "
        "votes are whole numbers.",
        help_behavior_hint="(default: discrete-gaussian if OpenDP is installed)",
    ),
]

Json = Annotated[bool, arg(help="Print one JSON object as the last line of stdout.", help_behavior_hint="")]
DataFolder = Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")]
NominalSize = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options by which the user's own files are read (`data.own.reading.Reading`)."""

    label: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Column with the labels (default: label, or the folders). none: one class. Repeat it to combine columns."""
    classes: Annotated[str | None, arg(metavar="A,B,…|FILE", help_behavior_hint="")] = None
    """The classes, declared public (default: read off the data, with a warning)."""
    class_names: Annotated[str | None, arg(metavar="0=A,1=B,…", help_behavior_hint="")] = None
    """Names for the classes of the data. Without --classes this declares the classes, too."""
    image_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """Crop and resize images to 32, or HEIGHTxWIDTH; 8 to 128 (default: all have one size)."""
    grayscale: Annotated[bool, arg(help_behavior_hint="")] = False
    """Convert colour images to grey."""
    record_id: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Column with each image's person, to protect persons. Folder: prefix or folder. DICOM: the patient, or none."""
    skip_unreadable: Annotated[bool, arg(help_behavior_hint="")] = False
    """Leave out files that cannot be read as images; the certificate says so, but not how many."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options that have the workers of a cluster read the data (`run.cluster`)."""

    engine: Annotated[Literal["dask"] | None, arg(help_behavior_hint="")] = None
    """dask: have a cluster read your own parquet files (docs/cluster.md), with the same result."""
    scheduler: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Scheduler of the cluster, as tcp://machine:8786."""
    workers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Instead of --scheduler: so many processes on this machine."""


@dataclass(frozen=True, kw_only=True)
class _WhichData:
    data: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="")] = None
    """A named set (`datalens data list`), or your own folder of images or DICOM files, .parquet, .csv, .npz, idx."""
    data_folder: DataFolder = None
    """Folder of a named set that cannot be downloaded."""
    nominal_size: NominalSize = None
    """Your own data: about how many records (or persons) there are, declared public."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(ReadingOptions, _WhichData):
    """Options that name the data, and say how to read it. (The fields of the last base class come first.)"""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The privacy budget."""

    epsilon: float = 1.0
    """Privacy budget. `inf`: no noise and no guarantee."""
    delta: float = 1e-5
    """Probability that the guarantee of epsilon fails; choose it well under 1 / number of records."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The method, and its preset."""

    method: Annotated[str, arg(metavar="NAME")] = "datalens"
    """The method that makes images (docs/methods.md)."""
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Named settings of the method."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The folder of a run, and how it is executed."""

    out: Path
    """Folder of the run. Its `release/` may be handed on; the rest is private."""
    resume: Annotated[bool, arg(help_behavior_hint="")] = False
    """Continue the run in --out after an interruption."""
    budget: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Budget that all runs on this data share (`datalens budget`); this run is counted in it."""
    seed: int = 0
    """Seed of training. Privacy noise is not seeded: it comes from the operating system."""
    device: DeviceName = "auto"
    """auto: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """The neighbouring relation, and the accountant."""

    relation: Relation = "add-remove"
    """Neighbouring data sets. add-remove: one record is present or absent. replace-one: one of a list is replaced."""
    accountant: Annotated[
        Literal["exact", "rdp", "rdp-improved", "pld", "prv", "moments"] | None,
        arg(metavar="{exact,rdp,rdp-improved,pld}", help_behavior_hint="(default: the method's)"),
    ] = None
    """exact: true cost of Gaussian noise. rdp: the paper's bound. rdp-improved: a tighter one. pld: dp-accounting's."""


@dataclass(frozen=True, kw_only=True)
class RareOptions:
    """Options that few runs need."""

    noise_seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Seed the privacy noise, for debugging: the run is stamped NOT PRIVATE."""
    tensorboard: Annotated[bool, arg(help_behavior_hint="")] = False
    """Write scalars and pictures for TensorBoard to the run folder (private: not covered by ε)."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a method that has none of its own."""


# Options that change no result, or name places: config.json does not keep them, and --resume may change them.
FORGOTTEN = ("out", "resume", "json", "device", "chunk", "tensorboard", "engine", "scheduler", "workers")


@dataclass(frozen=True, kw_only=True, init=False)
class TrainOptions(RareOptions, PriceOptions, RunOptions, MethodOptions, BudgetOptions, DataOptions):
    """The options of a run, as `datalens train` takes them, including those of its method.

    Args:
        out: folder of the run.
        own: options of the method, by name.
        options: any other option, by name. One that is not shared by all methods is added to `own`, and one that is
            None or False counts as not given. The plan checks that the method has it.

    Attributes:
        own: the options of the method that were given, by name.

    Examples:
        >>> from pathlib import Path
        >>> options = TrainOptions(data="mnist", out=Path("runs/a"), method="gpate", bins=3)
        >>> options.epsilon, options.own
        (1.0, {'bins': 3})
    """

    json: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, *, out: Path, own: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = {name: value for name, value in options.items() if name not in SHARED}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        values = {f.name: f.default for f in dataclasses.fields(TrainOptions) if f.name not in ("out", "own")}
        values |= {name: value for name, value in options.items() if name in SHARED}
        vars(self).update({**values, "out": Path(out), "own": {**(own or {}), **given}})

    def remembered(self) -> dict[str, Any]:
        """Return the options that config.json keeps: all that decide a result, in one dict, with absolute paths."""
        from datalens.data import formats

        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "own"} | dict(self.own)
        fields = {name: value for name, value in fields.items() if name not in FORGOTTEN}
        if fields["data"] is not None and formats.is_own(fields["data"]) and not is_address(fields["data"]):
            fields["data"] = os.path.abspath(fields["data"])  # --resume may be called from another folder
        for name in ("data_folder", "budget"):
            if fields[name] is not None:
                fields[name] = os.path.abspath(fields[name])
        for name in ("classes", "extractor"):
            if fields.get(name) is not None and os.path.isfile(fields[name]):
                fields[name] = os.path.abspath(fields[name])
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


SHARED = frozenset(f.name for f in dataclasses.fields(TrainOptions)) - {"own"}


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise if an option of this type cannot have this value.

    Args:
        name: of the option, for the message.
        value: from Python.
        kind: the option's type, perhaps with `Annotated`.
    """
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    kinds = get_args(kind) if get_origin(kind) not in (None, Literal) else (kind,)
    choices = [choice for part in kinds if get_origin(part) is Literal for choice in get_args(part)]
    if value is None and type(None) in kinds:
        return
    if choices and str not in kinds and value not in choices:
        raise DatalensError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    if float in kinds and type(value) not in (int, float):
        raise DatalensError(f"{name} must be a number, not {value!r}")
    if int in kinds and float not in kinds and type(value) is not int:
        raise DatalensError(f"{name} must be a whole number, not {value!r}")
