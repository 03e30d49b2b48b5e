"""What may be asked of a run: the options that every method takes. A method's own are in its file (`Options`)."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from tyro.conf import arg

from datalens.errors import DatalensError

NoiseName = Literal["discrete-gaussian", "gaussian"]
DeviceName = Literal["auto", "cpu", "cuda"]
Relation = Literal["add-remove", "replace-one"]

# For a method's own options: None stands for what its preset has.
_FROM_PRESET = "(default: from the preset)"
WholeNumber = Annotated[int | None, arg(metavar="INT", help_behavior_hint=_FROM_PRESET)]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_FROM_PRESET)]
CHOICE = arg(help_behavior_hint=_FROM_PRESET)
Noise = Annotated[
    NoiseName | None,
    arg(
        help="discrete-gaussian: whole numbers, sampled exactly by OpenDP. gaussian: from float64, rounded for whole "
        "votes.",
        help_behavior_hint="(default: discrete-gaussian where OpenDP is installed)",
    ),
]

Json = Annotated[bool, arg(help="Print one JSON object as the last line of stdout.", help_behavior_hint="")]
DataFolder = Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")]
NominalSize = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How files of the user's own are read (`data.own.reading.Reading`)."""

    label: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Column of labels (default: label; folders of images: the folders). none: one class."""
    classes: Annotated[str | None, arg(metavar="A,B,…|FILE", help_behavior_hint="")] = None
    """The classes, declared public. Left out, they are read off the data."""
    image_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """32, or HEIGHTxWIDTH, 8 to 128: cut to that shape and resized. Left out: all have one size."""
    grayscale: Annotated[bool, arg(help_behavior_hint="")] = False
    """Make colour images grey."""
    record_id: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Whose image it is: protects persons, not images. Folders of images: prefix, or folder."""


@dataclass(frozen=True, kw_only=True)
class _WhichData:
    data: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="")] = None
    """A named set (`datalens data list`), or your own folder of images, .parquet, .csv, .npz, idx."""
    data_folder: DataFolder = None
    """Where a named set lies that cannot be downloaded."""
    nominal_size: NominalSize = None
    """For your own data: about how many records there are. Declared public."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(ReadingOptions, _WhichData):
    """Which data, and how it is read. (Fields of the last base come first.)"""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """What is promised."""

    epsilon: float = 1.0
    """Privacy budget. `inf`: no noise and no guarantee."""
    delta: float = 1e-5
    """Well under 1 / number of records."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """How images are made."""

    method: Annotated[str, arg(metavar="NAME")] = "datalens"
    """How images are made (docs/methods.md)."""
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """A method's ready-made settings."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is kept, and how it is done."""

    out: Path
    """Folder of the run. Its `release/` may be handed on; the rest is private."""
    resume: Annotated[bool, arg(help_behavior_hint="")] = False
    """Continue the run in --out after an interruption."""
    budget: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The data set's own budget (`datalens budget`), of which this run takes its part."""
    seed: int = 0
    """Of training. Privacy noise comes from the operating system."""
    device: DeviceName = "auto"
    """auto: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """What neighbouring data sets are, and who prices a release."""

    relation: Relation = "add-remove"
    """Neighbouring data sets: one record present or absent, or one record of a list replaced."""
    accountant: Annotated[
        Literal["exact", "rdp", "rdp-improved", "pld", "prv", "moments"] | None,
        arg(metavar="{exact,rdp,rdp-improved,pld}", help_behavior_hint="(default: the method's)"),
    ] = None
    """exact: the true cost of Gaussian noise. rdp: the paper's bound. rdp-improved: with a better conversion. pld: by
    dp-accounting."""


@dataclass(frozen=True, kw_only=True)
class RareOptions:
    """What few runs need."""

    noise_seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Seed the privacy noise, for debugging: the run is stamped NOT PRIVATE."""
    tensorboard: Annotated[bool, arg(help_behavior_hint="")] = False
    """Log scalars and pictures for TensorBoard into the run folder (private: not covered by ε)."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a method that has none of its own."""


# Options that change no result, or say where things are: a run does not remember them, and --resume may change them.
FORGOTTEN = ("out", "resume", "json", "device", "chunk", "tensorboard")


@dataclass(frozen=True, kw_only=True, init=False)
class TrainOptions(RareOptions, PriceOptions, RunOptions, MethodOptions, BudgetOptions, DataOptions):
    """What is asked of a run, from Python: the options of `datalens train`, the method's own among them.

    Attributes:
        own: those of the method's own options that were given, by name. `TrainOptions(k=200, …)` puts them there; the
            plan checks that the method has them.

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
        """Return what config.json keeps: all that decides a result, flat, with absolute paths."""
        from datalens.data import formats

        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "own"} | dict(self.own)
        fields = {name: value for name, value in fields.items() if name not in FORGOTTEN}
        if fields["data"] is not None and formats.is_own(fields["data"]):
            fields["data"] = os.path.abspath(fields["data"])  # --resume may be called from elsewhere
        for name in ("data_folder", "budget"):
            if fields[name] is not None:
                fields[name] = os.path.abspath(fields[name])
        for name in ("classes", "extractor"):
            if fields.get(name) is not None and os.path.isfile(fields[name]):
                fields[name] = os.path.abspath(fields[name])
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


SHARED = frozenset(f.name for f in dataclasses.fields(TrainOptions)) - {"own"}


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise if a value from Python is none that the option of this type can have."""
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
