"""What a person may set (`TrainOptions`, the command line); what a run then does is in its method's settings."""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tyro.conf import arg

MethodName = Literal[
    "datalens", "datalens-paper", "dcgan", "dpmerf", "gswgan", "dpgan", "dpsgd-gan", "pategan", "gpate"
]
CompressName = Literal["topk-sign", "sign", "topk", "klevel", "sketch"]
COMPRESSORS: tuple[CompressName, ...] = get_args(CompressName)
NetworkName = Literal["spectral", "compact", "paper", "printed"]
NoiseName = Literal["discrete-gaussian", "gaussian"]
WarmStart = Literal["moments", "off"]

# How the user's own data is read: the same options for several commands (`data.own.reading.Reading`).
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
    nominal_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(required for your own data)")] = None
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
    """Neighbouring data sets: one record present or absent, or one record of a list replaced."""
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
    network: Annotated[NetworkName | None, _CHOICE] = None
    """The teachers' network. spectral: over cosine coefficients. compact: a small convolutional one. paper: of the
    paper's size. printed: the paper's to the letter, whose votes hardly depend on the label."""
    linear: _Number = None
    """Gain of the linear part, one per class, of a compact or paper network; 0: none."""
    teacher_rate: _Number = None
    """Learning rate of the teachers."""
    student_rate: _Number = None
    """Learning rate of the student."""
    student_decay: Annotated[Literal["cosine", "off"] | None, _CHOICE] = None
    """Whether the student's rate falls to zero over the run."""
    gamma: _Number = None
    """γ of Algorithm 1: how far an image moves along a decoded vote of 1."""
    latent: _WholeNumber = None
    """Dimensions of the student's noise z."""
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
    *("linear", "teacher_rate", "student_rate", "student_decay", "gamma", "latent"),
    *("basis", "basis_size", "compress", "decode", "levels", "sketch_rows", "sketch_columns", "mechanism"),
)
MOMENT_OVERRIDES = (
    *("coordinates", "texture", "texture_steps", "sums_quantile", "covariances_quantile", "histogram_share"),
    *("sums_share", "covariances_share", "texture_sums_share", "texture_covariances_share"),
)
OF_PEERS = ("aggregate", "projections", "bins", "threshold")
SPECIFIC = (*OVERRIDES, *MOMENT_OVERRIDES, *OF_PEERS, "balanced", "warm_start", "noise", "chunk")


def options_as_dict(options: TrainOptions) -> dict[str, Any]:
    """What was asked for, as JSON; where it was run and how it was shown is left out."""
    from datalens.data import formats

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
