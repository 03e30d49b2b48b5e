"""What a person may set (`TrainOptions`, the command line) and what a run then does (`Settings`, all explicit)."""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import arg

from datalens.errors import DatalensError

if TYPE_CHECKING:
    from datalens.peers.settings import PeerSettings
    from datalens.plugins import Compressor

MethodName = Literal[
    "datalens", "datalens-paper", "dcgan", "dpmerf", "gswgan", "dpgan", "dpsgd-gan", "pategan", "gpate"
]
CompressName = Literal["topk-sign", "sign", "topk", "klevel", "sketch"]
COMPRESSORS: tuple[CompressName, ...] = get_args(CompressName)
REAL_ROWS: tuple[CompressName, ...] = ("topk", "sketch")  # sums of real numbers: discrete noise does not fit them
NoiseName = Literal["discrete-gaussian", "gaussian"]
NoiseOfVotes = Literal["discrete-gaussian", "gaussian", "discrete-laplace"]
WarmStart = Literal["moments", "off"]

# How the user's own data is read: the same options for several commands (`datasets.own.Reading`).
Label = Annotated[
    str | None,
    arg(
        metavar="COLUMN",
        help_behavior_hint="",
        help="Own data: the column of labels (default: label, if there; in a folder of images the folders are the "
        "classes). none: no labels, one class called all.",
    ),
]
Classes = Annotated[
    str | None,
    arg(
        metavar="A,B,…|FILE",
        help_behavior_hint="",
        help="Own data: the classes, declared public, or a file with one a line. Left out, they are read off the data, "
        "and the certificate says so.",
    ),
]
ImageSize = Annotated[
    str | None,
    arg(
        metavar="SIZE",
        help_behavior_hint="",
        help="Own data: 32, or HEIGHTxWIDTH, 8 to 128. The largest centred part of that shape is cut out and resized. "
        "Left out, all images must have one size.",
    ),
]
Grayscale = Annotated[bool, arg(help="Own data: colour images are made grey.")]
RecordId = Annotated[
    str | None,
    arg(
        metavar="COLUMN",
        help_behavior_hint="",
        help="Own data: whose image it is. Then a person, with all of their images, is what is protected, and what "
        "--nominal-size counts. In a folder of images: prefix (file names up to the first _) or folder.",
    ),
]

_FROM_PRESET = "(default: from the preset)"
_WholeNumber = Annotated[int | None, arg(metavar="INT", help_behavior_hint=_FROM_PRESET)]
_Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_FROM_PRESET)]
_CHOICE = arg(help_behavior_hint=_FROM_PRESET)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a generator on private images and write a release with its certificate.

    Settings that are left out come from the preset. Give --sigma, and as many steps are taken as the budget
    allows; give --steps, and the noise is calibrated to them.
    """

    data: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="(required unless --resume)")] = None
    """A named data set (see `datalens data list`), or your own: a folder of images (class/xxx.png), .parquet, .csv,
    .npz or idx (docs/data.md)."""
    data_folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where a named data set lies that cannot be downloaded, such as celeba-gender."""
    nominal_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(required for a file)")] = None
    """For your own file or folder: about how many records it has, declared public (the true count is private)."""
    label: Label = None
    classes: Classes = None
    image_size: ImageSize = None
    grayscale: Grayscale = False
    record_id: RecordId = None
    out: Path
    """Folder of the run. Its `release/` is what may be handed on; the rest is private."""
    method: MethodName | str = "datalens"
    """datalens: our default. datalens-paper: Algorithm 1 with the paper's settings and accountant. The others are the
    systems it is compared with (docs/methods.md)."""
    epsilon: float = 1.0
    """Privacy budget; `inf` trains without noise and without any guarantee."""
    delta: float = 1e-5
    """Choose it well under 1 / number of records."""
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first named)")] = None
    """datalens: default, topagg, quick. datalens-paper: paper, code (where the paper and its code differ). All others:
    paper, quick."""
    warm_start: Annotated[WarmStart | None, arg(help_behavior_hint="(default: moments, for datalens [default])")] = None
    """moments: every record adds to private moments of its class, and images are made from those (docs/utility.md).
    off: teachers vote (TopAgg)."""
    seed: int = 0
    """Of training randomness only. Privacy noise comes from the operating system."""
    budget: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The data set's own budget, over all runs on it (see `datalens budget`): this run is set aside in it first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    chunk: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: what fits)")] = None
    """How many teachers to work on at a time: less takes less memory, and changes no result."""
    resume: bool = False
    """Continue the run in --out after an interruption."""
    relation: Literal["add-remove", "replace-one"] = "add-remove"
    """Neighbouring data sets: one record present or absent, or one record replaced."""
    accountant: Annotated[
        Literal["exact", "rdp", "rdp-improved", "pld"] | None,
        arg(help_behavior_hint="(default: exact; for datalens-paper: rdp; for what samples records: rdp-improved)"),
    ] = None
    """exact: the true cost of Gaussian noise. rdp: the paper's bound on it; rdp-improved: with a better conversion.
    pld: by dp-accounting, where that is installed."""
    noise: Annotated[
        NoiseName | None, arg(help_behavior_hint="(default: discrete-gaussian where OpenDP is installed)")
    ] = None
    """discrete-gaussian: whole numbers, sampled exactly by OpenDP. gaussian: from float64, rounded for whole votes."""
    teachers: _WholeNumber = None
    """Number of teachers, each on its own share of the records."""
    balanced: bool = False
    """Equal shares by position: what replace-one always uses, and add-remove refuses."""
    network: Annotated[Literal["spectral", "compact", "paper"] | None, _CHOICE] = None
    """The teachers' network: over cosine coefficients, a small convolutional one, or the paper's."""
    k: _WholeNumber = None
    """Coordinates a teacher votes on, per synthetic image."""
    sigma: _Number = None
    """Standard deviation of the noise on every vote sum."""
    beta: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Threshold as a fraction of the teachers. Default: 0.75·σ/N, within the paper's σ/2N … σ/N."""
    clip: _Number = None
    """Clipping constant c of Algorithm 2."""
    steps: _WholeNumber = None
    """Steps of the student; each asks the teachers about one batch."""
    teacher_steps: _WholeNumber = None
    """Steps of each teacher per step of the student."""
    batch: _WholeNumber = None
    """Synthetic images per step, and records a teacher draws per step."""
    basis: Annotated[Literal["pixel", "dct"] | None, _CHOICE] = None
    """Coordinates in which teachers vote."""
    basis_size: _WholeNumber = None
    """How many low-frequency coordinates (dct only)."""
    compress: Annotated[CompressName | str | None, _CHOICE] = None
    """topk-sign: Algorithm 2. sign: without top-k. topk: without quantisation. klevel: D²P-Fed. sketch: FetchSGD. Or
    one that another package brings (docs/extending.md)."""
    mechanism: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """A mechanism that another package brings, in the place of ours: it is inside the gate, and not checked by us."""
    levels: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 16)")] = None
    """klevel: how many levels a coordinate is rounded to, 2 to 128."""
    sketch_rows: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 5)")] = None
    """sketch: rows of a teacher's table, each with hashes of its own."""
    sketch_columns: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: half the basis)")] = None
    """sketch: columns of the table; fewer columns, more collisions."""
    decode: Annotated[Literal["threshold", "sign", "linear"] | None, _CHOICE] = None
    """threshold: Algorithm 3. sign: no threshold. linear: the mean vote."""
    coordinates: _WholeNumber = None
    """Private moments: low-frequency coordinates of an image."""
    texture: _WholeNumber = None
    """Private moments: coordinates of texture; 0: images without texture."""
    texture_steps: _WholeNumber = None
    """Private moments: gradient steps that carry an image to its texture."""
    sums_quantile: _Number = None
    """Private moments: class sums clip at this quantile of the norms, as released."""
    covariances_quantile: _Number = None
    """Private moments: covariances clip at this quantile."""
    histogram_share: _Number = None
    """Private moments: parts of the budget are in proportion to the shares. This one is of each histogram of norms."""
    sums_share: _Number = None
    """Private moments: share of class sums."""
    covariances_share: _Number = None
    """Private moments: share of class covariances."""
    texture_sums_share: _Number = None
    """Private moments: share of the class sums of texture."""
    texture_covariances_share: _Number = None
    """Private moments: share of its class covariances."""
    aggregate: Annotated[Literal["gnmax", "laplace"] | None, arg(help_behavior_hint="(default: gnmax)")] = None
    """pategan: Gaussian noise on the counts of votes, or Laplace noise, as published."""
    projections: _WholeNumber = None
    """gpate: random directions in which teachers vote, per synthetic image."""
    bins: _WholeNumber = None
    """gpate: answers a teacher may choose from, in each direction."""
    threshold: _Number = None
    """gpate: the part of the teachers that must seem to agree, or there is no answer."""
    noise_seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Seed the privacy noise, for debugging: the run is stamped NOT PRIVATE."""
    tensorboard: bool = False
    """Log scalars and pictures for TensorBoard into the run folder (private: not covered by ε)."""
    json: Annotated[bool, arg(help="Print one JSON object as the last line of stdout.")] = False


# Options that mean something to some methods only.
OVERRIDES = (
    *("teachers", "network", "k", "sigma", "beta", "clip", "steps", "teacher_steps", "batch"),
    *("basis", "basis_size", "compress", "decode", "levels", "sketch_rows", "sketch_columns", "mechanism"),
)
MOMENT_OVERRIDES = (
    *("coordinates", "texture", "texture_steps", "sums_quantile", "covariances_quantile", "histogram_share"),
    *("sums_share", "covariances_share", "texture_sums_share", "texture_covariances_share"),
)
OF_PEERS = ("aggregate", "projections", "bins", "threshold")
SPECIFIC = (*OVERRIDES, *MOMENT_OVERRIDES, *OF_PEERS, "balanced", "warm_start", "noise", "chunk")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run of TopAgg does, resolved and public: recorded in config.json and in the certificate."""

    method: MethodName
    preset: str
    seed: int
    noise_seeded: bool
    teachers: int
    shares: Literal["hashed", "balanced"]
    network: Literal["spectral", "compact", "paper"]
    hidden: int
    teacher_rate: float
    teacher_weight_decay: float
    teacher_steps: int
    teacher_steps_first: int
    basis: Literal["pixel", "dct"]
    basis_size: int
    compress: str  # a CompressName, or a plug-in's
    k: int
    clip: float
    sigma: float
    decode: Literal["threshold", "sign", "linear"]
    beta: float
    steps: int
    batch: int
    gamma: float
    student_rate: float
    student_decay: bool
    balanced_labels: bool
    latent: int
    latent_law: Literal["normal", "uniform"]
    noise: NoiseName = "gaussian"  # runs of before there was a choice
    levels: int = 0  # of klevel; 0 elsewhere
    sketch_rows: int = 0  # of sketch
    sketch_columns: int = 0
    mechanism: str = ""  # a plug-in's name
    plugins: str = ""  # what of this is code of other packages, and which

    def as_dict(self) -> dict[str, Any]:
        """Without what belongs to another compressor: so older certificates have it too."""
        fields = dataclasses.asdict(self)
        left_out = {**dict.fromkeys(OF_A_COMPRESSOR, 0), "mechanism": "", "plugins": ""}
        return {name: value for name, value in fields.items() if value != left_out.get(name)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Settings":
        settings = checked(cls, fields, zero=tuple(OF_A_COMPRESSOR))
        if settings.compress not in COMPRESSORS:
            settings._plugin()  # or what there is
        if bool(settings.plugins) != (settings.compress not in COMPRESSORS or settings.mechanism != ""):
            raise DatalensError("the settings must name the plug-ins they use, and no others")
        for name, compress in OF_A_COMPRESSOR.items():
            if (getattr(settings, name) > 0) != (settings.compress == compress):
                raise DatalensError(f"the setting {name} does not fit compress {settings.compress}")
        return settings

    @property
    def cells(self) -> int:
        """Numbers that are released about one image."""
        if self.compress not in COMPRESSORS:
            cells = self._plugin().cells
            return self.basis_size if cells is None else cells(self)
        if self.compress == "klevel":
            return 1 << (self.basis_size - 1).bit_length()  # padded for the rotation
        return self.sketch_rows * self.sketch_columns if self.compress == "sketch" else self.basis_size

    @property
    def l2_bound(self) -> float:
        """How long a teacher's row over a batch can be (see `bounded`); two are at most twice that apart."""
        if self.compress not in COMPRESSORS:
            return self._plugin().l2_bound(self)
        if self.compress == "klevel":
            return (self.levels - 1) * math.sqrt(self.cells * self.batch)
        rows = self.sketch_rows if self.compress == "sketch" else 1
        return math.sqrt(rows * self.k * self.batch)

    @property
    def real_rows(self) -> bool:
        """Whether sums are of real numbers, which discrete noise does not fit."""
        return self.compress in REAL_ROWS or (self.compress not in COMPRESSORS and not self._plugin().whole_numbers)

    def _plugin(self) -> "Compressor":
        from datalens.plugins import compressor

        return compressor(self.compress)[0]


OF_A_COMPRESSOR: dict[str, CompressName] = {"levels": "klevel", "sketch_rows": "sketch", "sketch_columns": "sketch"}


# The releases of a run from moments, in this order; its `shares` say what part of the budget each gets.
RELEASES = (
    *("norms", "sums", "residual-norms", "covariances"),
    *("texture-norms", "texture-sums", "texture-residual-norms", "texture-covariances"),
)


@dataclass(frozen=True, kw_only=True)
class MomentSettings:
    """Everything a run from private moments does, resolved and public (see `methods.moments`)."""

    method: Literal["datalens"]
    preset: str
    warm_start: Literal["moments"]
    seed: int
    noise_seeded: bool
    noise: NoiseName
    coordinates: int  # low-frequency coordinates of an image
    texture: int  # coordinates of texture whose covariances are released; 0: no texture at all
    histogram_share: float  # of the budget (of mu²), for each of four histograms of norms
    sums_share: float  # for class sums and counts
    covariances_share: float
    texture_sums_share: float
    texture_covariances_share: float
    bins: int  # of a histogram of norms
    sums_quantile: float  # of the norms, where class sums clip
    covariances_quantile: float
    grid: int  # steps of the grid on which a clipped row lies
    counted: int  # of these, how many a record counts for itself
    texture_steps: int  # gradient steps of an image
    unit: Literal["record", "person"] = "record"  # whose row is bounded: an image's, or that of all a person's images

    def as_dict(self) -> dict[str, Any]:
        """Without the unit where it is the usual one: so older certificates have it."""
        fields = dataclasses.asdict(self)
        return fields if self.unit == "person" else {name: value for name, value in fields.items() if name != "unit"}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MomentSettings":
        settings = checked(cls, fields, zero=("texture", "texture_steps"))
        if not (settings.counted < settings.grid <= 2**14 and settings.bins <= 2**16):  # room for 33 million records
            raise DatalensError("the settings grid, counted and bins do not fit together")
        if (settings.texture == 0) != (settings.texture_steps == 0):
            raise DatalensError("the settings texture and texture_steps do not fit together")
        return settings

    @property
    def releases(self) -> dict[str, float]:
        """Release → its part of the budget; they add up to one."""
        parts = dict.fromkeys(RELEASES, self.histogram_share)
        parts |= {"sums": self.sums_share, "covariances": self.covariances_share}
        parts |= {"texture-sums": self.texture_sums_share, "texture-covariances": self.texture_covariances_share}
        if self.texture == 0:
            parts = {name: part for name, part in parts.items() if not name.startswith("texture")}
        whole = sum(parts.values())
        return {name: part / whole for name, part in parts.items()}

    def l2_bound(self, release: str) -> float:
        """How long a record's row can be."""
        return float(self.grid**2 if release.endswith("covariances") else self.grid)

    def diameter(self, release: str) -> float:
        """How far apart two units' rows can be. Sums can point opposite ways; bins and squares cannot. A person's sum
        of squares is truncated, and that moves it by less than one in each of at most 2^20 cells."""
        bound = self.l2_bound(release)
        if self.unit == "person" and release.endswith("covariances"):
            return min(math.sqrt(2.0) * (bound + 2**10) * (1 + 1e-12), 2 * bound)
        return bound * (2.0 if release.endswith("sums") else math.sqrt(2.0))


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """Everything a run of DP-SGD does, resolved and public (see `methods.dpsgd`)."""

    method: Literal["dpsgd"]
    preset: str
    seed: int
    noise_seeded: bool
    noise: Literal["gaussian"]
    network: Literal["cnn", "linear"]
    extractor: str  # "none", or the frozen network whose features the model sees
    extractor_sha256: str
    features: int  # how many; of pixels: 0
    selector: Literal["norm", "dim", "none"]
    topk: float
    clip: float
    sigma: float  # noise multiplier: the noise on every coordinate is sigma · bound
    batch_size: int  # expected
    steps: int
    rate: float  # learning rate
    falls: bool  # whether it rises over the first tenth of the steps and then falls to nothing, or stays
    average: bool  # what is released: a mean of the weights in which late ones weigh most, or the last ones

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SgdSettings":
        settings = checked(cls, fields, zero=("features",))
        if not (0 < settings.topk <= 1 and settings.clip > 0):
            raise DatalensError("the settings topk and clip cannot be these")
        return settings

    @property
    def bound(self) -> float:
        """What a record's compressed gradient is brought down to: √k·C where k is of the norm, else C."""
        return self.clip * (math.sqrt(self.topk) if self.selector == "norm" else 1.0)


TrainSettings = Union[Settings, MomentSettings, "PeerSettings"]  # of `datalens train`
AnySettings = Union[Settings, MomentSettings, "PeerSettings", SgdSettings]


def parse_settings(fields: dict[str, Any]) -> AnySettings:
    """From JSON, of whichever kind."""
    if isinstance(fields, dict) and fields.get("method") == "dpsgd":
        return SgdSettings.from_dict(fields)
    from datalens.peers.table import is_peer, method_named

    if isinstance(fields, dict) and isinstance(fields.get("method"), str) and is_peer(fields["method"]):
        return method_named(fields["method"]).settings.from_dict(fields)
    kind = MomentSettings if isinstance(fields, dict) and "warm_start" in fields else Settings
    return kind.from_dict(fields)


def checked(cls: type[Any], fields: dict[str, Any], *, zero: tuple[str, ...] = ()) -> Any:
    """From JSON, which anybody may have edited: what does not fit is said here, not found out in mid-run."""
    try:
        settings = cls(**fields)
    except TypeError as error:
        raise DatalensError(f"these settings are not of this version of datalens: {error}") from error
    for name, kind in get_type_hints(cls).items():
        value = getattr(settings, name)
        least = None if name == "seed" else 1 if kind is int and name not in zero else 0
        if not _fits(value, kind, smallest=least):
            raise DatalensError(f"the setting {name} cannot be {str(value)[:40]!r}")
    return settings


def _fits(value: Any, kind: Any, *, smallest: int | None) -> bool:
    """Whether a value read from JSON is one of the field's type, and of a size that means something."""
    if kind is int:
        return type(value) is int and (smallest is None or smallest <= value < 2**62)
    if kind is float:
        return type(value) in (int, float) and (smallest is None or smallest <= value < 1e300)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return type(value) is kind


def options_as_dict(options: TrainOptions) -> dict[str, Any]:
    """What was asked for, as JSON; where it was run and how it was shown is left out."""
    from datalens.datasets import formats

    fields = dataclasses.asdict(options)
    for name in ("out", "resume", "json", "device", "chunk", "tensorboard"):
        fields.pop(name)
    if fields["data"] is not None and formats.is_own(fields["data"]):
        fields["data"] = str(Path(fields["data"]).absolute())  # --resume may be called from elsewhere
    for name in ("data_folder", "budget"):
        if fields[name] is not None:
            fields[name] = str(Path(fields[name]).absolute())
    if fields["classes"] is not None and os.path.isfile(fields["classes"]):
        fields["classes"] = str(Path(fields["classes"]).absolute())
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
