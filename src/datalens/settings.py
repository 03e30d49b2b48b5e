"""What a run does: every setting resolved, explicit and public. Recorded in config.json and in the certificate."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

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
NetworkName = Literal["spectral", "compact", "paper", "printed"]
NoiseName = Literal["discrete-gaussian", "gaussian"]
NoiseOfVotes = Literal["discrete-gaussian", "gaussian", "discrete-laplace"]
# Of what settings hold: they are in the certificate, where a longer text or number would be room for something else.
MOST_SEED, MOST_TEXT = 2**62, 500


def check_seed(seed: int) -> None:
    """Raise if no certificate could be read that states this seed."""
    if not -MOST_SEED <= seed < MOST_SEED:
        raise DatalensError("--seed has too many digits: give a whole number from -2^62 to 2^62")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run of TopAgg does, resolved and public: recorded in config.json and in the certificate."""

    method: MethodName
    preset: str
    seed: int
    noise_seeded: bool
    teachers: int
    shares: Literal["hashed", "balanced"]
    network: NetworkName
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
    linear: float = 0.0  # gain of a convolutional teacher's linear part; 0: it has none, as in version 0.1

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON, without those that are zero or empty where an older certificate has no such field."""
        fields = dataclasses.asdict(self)
        left_out = {**dict.fromkeys(OF_A_COMPRESSOR, 0), "mechanism": "", "plugins": "", "linear": 0}
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
        if re.fullmatch("(?:[0-9a-f]{64})?", settings.extractor_sha256) is None:
            raise DatalensError("the setting extractor_sha256 is no SHA-256")
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
        return type(value) is int and (-MOST_SEED if smallest is None else smallest) <= value < MOST_SEED
    if kind is float:
        return type(value) in (int, float) and (smallest is None or smallest <= value < 1e300)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return type(value) is kind and (kind is not str or len(value) <= MOST_TEXT)
