"""DataLens (Wang et al., CCS 2021), Algorithms 1-3: teachers vote with compressed gradients, a student learns.

Both `datalens-paper` and `datalens --warm-start off` are this loop; only their settings differ.

Differs from the paper:
- the direction is ∂ log D/∂x, which is added (see `Teachers.image_gradients`);
- the threshold uses the number of teachers N (the paper's line 14 prints T);
- one event is charged per batch of m images, with sensitivity 2√(km): the same cost as m events of 2√k.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from tyro.conf import arg

from datalens.bounded.contributions import Contributions, Gradients, sum_bounded
from datalens.bounded.count_sketch import CountSketch
from datalens.bounded.klevel import KLevel
from datalens.bounded.third_party import PerTeacher
from datalens.bounded.topk_sign import TopKSign
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.ensemble import HIDDEN, TeacherOptions
from datalens.options import CHOICE, Noise, NoiseName, Number, WholeNumber
from datalens.plans.base import (
    Method,
    Part,
    Place,
    Request,
    Settings,
    can_be_exact,
    check_exact_noise,
    checked,
    cost,
    gaps,
    gaussian_event,
    law_said,
)
from datalens.plans.plugins import COMPRESSORS, CompressName, Compressor, compressor, mechanism
from datalens.privacy.calibration import calibrate_sigma, calibrate_steps
from datalens.privacy.events import LEAST_SMOOTH, Charge, DiscreteGaussianEvent, Event, GaussianEvent
from datalens.privacy.ledger import Budget
from datalens.privacy.mechanisms import Mechanism, ThirdParty, make_mechanism
from datalens.privacy.noise import open_noise
from datalens.private.networks import Network, network_named
from datalens.private.partition import Partition, Rule, rule_named
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers, plan_memory
from datalens.progress import say
from datalens.public.basis import Basis, make_basis
from datalens.public.theorem6 import Suggestion, suggest_k
from datalens.public.transforms import Rotation, Sketch
from datalens.released import classes
from datalens.released.decode import Decode, agreement
from datalens.released.generator import Generator, can_show, dcgan_architecture
from datalens.released.student import Fakes, Student
from datalens.run.folder import Run
from datalens.run.ranks import World
from datalens.run.remote_teachers import Crowd

REAL_ROWS: tuple[CompressName, ...] = ("topk", "sketch")  # rows of real numbers, to which discrete noise does not apply
# Settings that belong to one compressor.
OF_A_COMPRESSOR: dict[str, CompressName] = {"levels": "klevel", "sketch_rows": "sketch", "sketch_columns": "sketch"}
# Texts of the certificate: what teachers' rows are if not top-k votes, and the largest distance of two rows.
ROWS = {"klevel": "rotated and quantised gradients (D²P-Fed)", "sketch": "clipped count sketches of votes (FetchSGD)"}
LENGTHS = {"klevel": "2·(levels-1)·sqrt(padded·batch)", "sketch": "2·sqrt(rows·k·batch)"}


Compress = Callable[[Gradients], Contributions]

# --- options and settings ---------------------------------------------------------------------------------------------

NetworkName = Literal["spectral", "compact", "paper", "printed"]


@dataclass(frozen=True, kw_only=True)
class Options(TeacherOptions):
    warm_start: Annotated[Literal["moments", "off"] | None, arg(help_behavior_hint="")] = None
    """off: teachers vote (TopAgg). moments: images from private moments, without teachers."""
    network: Annotated[NetworkName | None, CHOICE] = None  # type: ignore[assignment]
    """The teachers' network. spectral: on cosine coefficients. compact: small and convolutional.
    paper: of the paper's size. printed: exactly the paper's, whose votes hardly depend on the label."""
    basis: Annotated[Literal["pixel", "dct", "random"] | None, CHOICE] = None  # type: ignore[assignment]
    """Coordinates in which teachers vote. dct: low-frequency cosines. random: random directions of the pixels."""
    k: WholeNumber = None
    """Number of coordinates that a teacher votes on, per synthetic image."""
    sigma: Number = None
    """Standard deviation of the noise on every vote sum."""
    beta: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Threshold as a fraction of the teachers. Default: 0.75·σ/N, within the paper's σ/2N … σ/N."""
    clip: Number = None
    """Clipping constant c of Algorithm 2."""
    linear: Number = None
    """Gain of the linear part, one for each class, of a compact or paper network; 0: none."""
    teacher_rate: Number = None
    """Learning rate of the teachers."""
    student_rate: Number = None
    """Learning rate of the student."""
    student_decay: Annotated[Literal["cosine", "off"] | None, CHOICE] = None
    """Whether the student's learning rate falls to zero over the run."""
    gamma: Number = None
    """γ of Algorithm 1: the step of an image along a decoded vote of 1."""
    latent: WholeNumber = None
    """Dimension of the student's noise z."""
    decode: Annotated[Literal["threshold", "sign", "linear"] | None, CHOICE] = None
    """threshold: Algorithm 3. sign: no threshold. linear: the mean vote."""
    compress: Annotated[CompressName | str | None, CHOICE] = None
    """topk-sign: Algorithm 2. sign: without top-k. topk: without quantisation. klevel: D²P-Fed. sketch: FetchSGD.
    Or the name of another package's compressor (docs/extending.md)."""
    levels: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 16)")] = None
    """klevel: number of levels that a coordinate is rounded to, 2 to 128."""
    sketch_rows: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 5)")] = None
    """sketch: rows of a teacher's table, each with its own hashes."""
    sketch_columns: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: half the basis)")] = None
    """sketch: columns of the table; with fewer columns there are more collisions."""
    mechanism: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Use another package's mechanism: it sees sums before noise is added, and datalens does not check its noise."""
    balanced: bool = False
    """Equal shares by position. replace-one always uses them, and add-remove refuses them."""
    noise: Noise = None
    chunk: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: what fits)")] = None
    """Number of teachers to work on at a time: fewer take less memory. Changes no result."""


@dataclass(frozen=True, kw_only=True)
class TopAggSettings(Settings):
    """Everything that decides what a run of TopAgg does: public, and recorded in config.json and the certificate."""

    ZERO: ClassVar[tuple[str, ...]] = tuple(OF_A_COMPRESSOR)
    one_part: ClassVar[bool] = True
    OMITTED: ClassVar[dict[str, Any]] = dict.fromkeys(OF_A_COMPRESSOR, 0) | {
        "mechanism": "",
        "plugins": "",
        "linear": 0,
    }

    method: Literal["datalens", "datalens-paper"]
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
    basis: Literal["pixel", "dct", "random"]
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
    noise: NoiseName = "gaussian"  # older runs, which had no choice, do not state it
    levels: int = 0  # of klevel; 0 for other compressors
    sketch_rows: int = 0  # of sketch
    sketch_columns: int = 0
    mechanism: str = ""  # a plug-in's name
    plugins: str = ""  # the parts that are code of other packages, and the packages
    linear: float = 0.0  # gain of a convolutional teacher's linear part; 0: it has none, as in version 0.1

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "TopAggSettings":
        settings: TopAggSettings = checked(cls, fields, zero=cls.ZERO)
        if settings.compress not in COMPRESSORS:
            settings._plugin()  # raises if there is no such plug-in
        if bool(settings.plugins) != (settings.compress not in COMPRESSORS or settings.mechanism != ""):
            raise DatalensError("the settings must name the plug-ins that they use, and no others")
        for name, compress in OF_A_COMPRESSOR.items():
            if (getattr(settings, name) > 0) != (settings.compress == compress):
                raise DatalensError(f"the setting {name} does not fit compress {settings.compress}")
        return settings

    @property
    def cells(self) -> int:
        """Number of values that are released about one image."""
        if self.compress not in COMPRESSORS:
            cells = self._plugin().cells
            return self.basis_size if cells is None else cells(self)
        if self.compress == "klevel":
            return 1 << (self.basis_size - 1).bit_length()  # padded for the rotation
        return self.sketch_rows * self.sketch_columns if self.compress == "sketch" else self.basis_size

    @property
    def l2_bound(self) -> float:
        """Largest norm of a teacher's row over a batch (see `bounded`); the distance of two is at most twice that."""
        if self.compress not in COMPRESSORS:
            return self._plugin().l2_bound(self)
        if self.compress == "klevel":
            return (self.levels - 1) * math.sqrt(self.cells * self.batch)
        rows = self.sketch_rows if self.compress == "sketch" else 1
        return math.sqrt(rows * self.k * self.batch)

    @property
    def real_rows(self) -> bool:
        """Whether sums are real numbers, to which discrete noise does not apply."""
        return self.compress in REAL_ROWS or (self.compress not in COMPRESSORS and not self._plugin().whole_numbers)

    def _plugin(self) -> Compressor:
        return compressor(self.compress)[0]

    def check(self, schema: Schema) -> None:
        check_settings(self.as_dict(), schema)

    # --- what it costs

    @property
    def sensitivity(self) -> float:
        """The sensitivity of the sum over a batch to one record, which changes one teacher's row (Lemma 1)."""
        return 2 * self.l2_bound

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        facts: dict[str, Any] = {"relation": budget.relation, "queries": 0, "step": 0, "noise": self.origin}
        facts |= {"row_unit": "teacher", "l2_bound": self.l2_bound, "diameter": self.sensitivity}
        facts |= {"sigma": self.sigma, "coordinates": self.batch * self.cells}
        return (
            Part(
                name="sums of teachers' votes",
                event=gaussian_event(self.noise, facts),
                sensitivity=self.sensitivity,
                times=self.steps,
                cells=self.batch * self.cells,
                noise_to_signal=self.sigma / self.teachers / max(1, self.levels - 1),
            ),
        )

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        relative = self.sigma / self.teachers / max(1, self.levels - 1)
        votes = f"{self.steps} sums of teachers' votes"
        return [cost(votes, 1.0, self.sigma, self.sensitivity, self.batch * self.cells, relative)]

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        return [(charged[0], self.steps)] if charged else []

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        problems = []
        bound = self.l2_bound
        gaussian = [event for event in events if isinstance(event, GaussianEvent)]
        if len(gaussian) != len(events):
            problems.append("the ledger has other releases than sums of teachers' votes with Gaussian noise")
        if any(event.sigma != self.sigma for event in gaussian):
            problems.append("the settings state another sigma than the ledger")
        if any(not math.isclose(event.l2_bound, bound, rel_tol=1e-9) for event in gaussian):
            problems.append("the settings state another k or batch than the ledger was charged for")
        if any((event.row_unit, event.diameter) != ("teacher", 2 * event.l2_bound) for event in gaussian):
            problems.append(
                "the ledger has events that are not sums of teachers' votes: they cost " + self.lengths + " each"
            )
        discrete = [event for event in gaussian if isinstance(event, DiscreteGaussianEvent)]
        if len(discrete) != (len(gaussian) if self.noise == "discrete-gaussian" else 0):
            problems.append("the settings state another kind of noise than the ledger")
        if any(event.queries != self.batch for event in gaussian):
            problems.append("the settings state another number of images in a step than the ledger")
        if any(event.coordinates != self.batch * self.cells for event in discrete):
            problems.append("the settings state another number of coordinates than the ledger")
        if any((event.noise == "seeded") != self.noise_seeded for event in gaussian):
            problems.append("the settings are wrong about whether the noise was seeded")
        return problems + gaps({event.step for event in gaussian}, self.steps)

    # --- how it is described

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        votes = f"{ROWS.get(self.compress, 'compressed votes')} with Gaussian noise (TopAgg)"
        plugged = f"bounded rows with Gaussian noise (TopAgg), with {self.plugins}"
        return {
            "name": f"sum of teachers' {plugged if self.plugins else votes}",
            "sensitivity": f"{self.lengths} per event: one {'person' if by_person else 'record'} changes one "
            "teacher's row",
        }

    @property
    def lengths(self) -> str:
        """The largest distance of two rows, as a formula for the certificate."""
        if self.compress not in COMPRESSORS:
            return "2·(the longest row that the plug-in states)"
        return LENGTHS.get(self.compress, "2·sqrt(k·batch)")

    def noise_said(self) -> str:
        if self.noise == "discrete-gaussian":
            return "exact discrete Gaussian (OpenDP)"
        return "floating point (see docs/privacy.md)" if self.real_rows else "rounded to integers"

    def price_said(self) -> str:
        if self.noise == "gaussian":
            return "as Gaussian noise of variance sigma²"
        return "as Gaussian noise of variance sigma² - 4 (by RDP: as zCDP)" if self.sigma >= LEAST_SMOOTH else "as zCDP"

    def said(self) -> str:
        noise = "no noise" if self.sigma == 0 else f"σ = {self.sigma:.5g} ({law_said(self, real=self.real_rows)})"
        return f"{self.teachers} teachers, {self.steps} steps of {self.batch} images, {self._rows_said()}, {noise}"

    def _rows_said(self) -> str:
        """Return a description of a teacher's row, for the terminal."""
        if self.compress == "klevel":
            return f"{self.basis_size} coordinates in {self.levels} levels"
        sketch = f" in a sketch of {self.sketch_rows}×{self.sketch_columns}" if self.compress == "sketch" else ""
        return f"k = {self.k} of {self.basis_size}{sketch}"

    def planned_as(self) -> str:
        return "from teachers' votes (TopAgg)"

    @property
    def signal(self) -> str:
        return "sigma / number of teachers"

    def expect(self, schema: Schema, budget: Budget) -> list[str]:
        part = 2 * self.sigma / self.teachers
        if part > 1:
            so = ": expect noise" if part > 4 else ""
            return [f"even a unanimous vote is only {2 / part:.2g} standard deviations of the noise{so}"]
        return [f"a vote exceeds two standard deviations of the noise where {part:.0%} of the teachers agree"]

    def warnings(self, schema: Schema, budget: Budget) -> list[str]:
        if self.decode != "threshold" or self.beta <= 1:
            return []
        return [
            f"beta is {self.beta:.3g}, more than 1: not even unanimous votes reach the threshold, only noise does; "
            "choose --beta up to 1, --decode sign, more --teachers, or less --sigma"
        ]

    def suggestion(self) -> Suggestion | None:
        """Return the best k by Theorem 6, if teachers vote with their top k and there is noise."""
        if self.compress not in ("topk-sign", "topk") or self.sigma == 0 or self.basis_size < 2:
            return None
        facts = {"dimensions": self.basis_size, "teachers": self.teachers, "k": self.k, "steps": self.steps}
        return suggest_k(sigma=self.sigma, **facts)

    def seconds(self, schema: Schema) -> float | None:
        return self.steps * seconds_a_step(self, schema)


# --- presets: the paper's, those of its code where the two differ, and ours -------------------------------------------


def _celeba(*, teachers: int, k: int, sigma: float, beta: float, batch: int) -> dict[str, Any]:
    """Return a row for colour images of 64×64.

    The batch is the size of a share: 162,770, 92,529 or 120,000 records / the number of teachers.
    """
    row = {"teachers": teachers, "k": k, "sigma": sigma, "beta": beta, "batch": batch}
    return row | {"latent": 100, "teacher_steps_first": 30}


# DataLens, Sections 5.1 and 5.3 and Table 4. The paper does not print β at ε = 10 for every set, nor the number of
# teachers for CelebA; the values of its code are used there. `steps` counts where there is no noise (ε = ∞): as many as
# the printed σ allows at ε = 10, so that noise is the only difference.
_PAPER: dict[tuple[str, int], dict[str, Any]] = {
    ("mnist", 1): {"teachers": 4000, "k": 200, "sigma": 5000.0, "beta": 0.7, "latent": 50},
    ("mnist", 10): {"teachers": 4000, "k": 350, "sigma": 900.0, "beta": 0.2, "latent": 50, "steps": 118},
    ("fashion-mnist", 1): {"teachers": 4000, "k": 200, "sigma": 5000.0, "beta": 0.9, "latent": 50},
    ("fashion-mnist", 10): {"teachers": 4000, "k": 350, "sigma": 900.0, "beta": 0.27, "latent": 64, "steps": 118},
    ("celeba-gender", 1): _celeba(teachers=6000, k=700, sigma=9000.0, beta=0.85, batch=27),
    ("celeba-gender", 10): _celeba(teachers=6000, k=500, sigma=700.0, beta=0.12, batch=27) | {"steps": 27},
    ("celeba-hair", 1): _celeba(teachers=8000, k=700, sigma=9000.0, beta=0.9, batch=12),
    ("celeba-hair", 10): _celeba(teachers=4000, k=500, sigma=700.0, beta=0.25, batch=23) | {"steps": 32},
    ("places365", 1): _celeba(teachers=8000, k=700, sigma=9000.0, beta=0.9, batch=15),
    ("places365", 10): _celeba(teachers=4000, k=700, sigma=700.0, beta=0.25, batch=30) | {"steps": 17},
}
# For Places365 the paper prints only k and the latent dimension; the rest is that of CelebA-Hair.
_PARTLY = {"places365": "; N, σ and β as for celeba-hair"}
# Where the authors' code differs from their paper.
_CODE: dict[tuple[str, int], dict[str, Any]] = {
    ("mnist", 10): {"k": 300, "sigma": 800.0, "steps": 109},
    ("fashion-mnist", 10): {"sigma": 1000.0, "steps": 146},
}


# Gain of the convolutional teachers' linear part, times √d for images of d values: 5.1 at 28×28, 17.9 at 8×8. It
# depends on the norm of an image, and was chosen on training images held out of three sets (docs/decisions.md).
LINEAR = 1000 / 7

# For larger images DC-GAN's discriminator has millions of parameters, and no machine has memory for thousands of it.
PAPER_SIDE = 32  # pixels
LARGE_BUDGET = 10**0.5  # from this ε on, the settings for ε = 10 are used, below those for ε = 1
RECORDS_PER_TEACHER = 15  # the paper's 60,000 / 4,000


def preset(method: str, name: str, schema: Schema, epsilon: float) -> tuple[str, dict[str, Any]]:
    """Return the preset's full name and its settings. Published rows are for ε = 1 and 10: the nearer one is used."""
    if method == "datalens":
        return name, _ours(name, schema, epsilon)
    row = (schema.name, 10 if epsilon >= LARGE_BUDGET else 1)
    settings = _as_printed(schema) | _PAPER.get(row, {})
    if name == "code":
        settings |= {"latent_law": "uniform"} | _CODE.get(row, {})
    known_row = "no published row: scaled from MNIST"
    if row in _PAPER:
        known_row = f"{row[0]}, ε={row[1]}{_PARTLY.get(schema.name, '')}"
    return f"{name} ({known_row})", settings


def _as_printed(schema: Schema) -> dict[str, Any]:
    """Return Algorithm 1 as the paper and its code run it, scaled from MNIST for sets that the paper does not have."""
    return {
        "teachers": max(1, schema.nominal_size // RECORDS_PER_TEACHER),
        "network": "paper" if max(schema.height, schema.width) <= PAPER_SIDE else "compact",
        "linear": LINEAR / math.sqrt(schema.dimensions),
        "teacher_rate": 1e-3,
        "teacher_weight_decay": 0.0,
        "teacher_steps": 2,
        "teacher_steps_first": 10,
        "basis": "pixel",
        "basis_size": schema.dimensions,
        "compress": "topk-sign",
        "k": max(1, round(schema.dimensions * 200 / 784)),
        "clip": 1e-5,
        "decode": "threshold",
        "steps": 86,
        "batch": RECORDS_PER_TEACHER,
        "gamma": 1e-3,
        "student_rate": 1e-3,
        "student_decay": False,
        "balanced_labels": False,
        "latent": 50 if schema.channels == 1 else 100,
        "latent_law": "normal",
    }


def _ours(name: str, schema: Schema, epsilon: float) -> dict[str, Any]:
    """Return settings for the same loop on low-frequency cosines, with teachers that a CPU can train.

    A teacher has about 15 records. Where noise is strong it learns slowly, with weight decay, so that it does not
    memorise them. With a larger budget it may learn more of them, and images move further in fewer steps.
    """
    size = min(64, schema.dimensions)
    settings = _as_printed(schema) | {
        "network": "spectral",
        "teacher_rate": 5e-4,
        "teacher_weight_decay": 0.03,
        "student_decay": True,
        "balanced_labels": True,
        "basis": "dct",
        "basis_size": size,
        "k": max(1, size // 2),
        "decode": "linear",
        "steps": 150,
    }
    if epsilon >= LARGE_BUDGET:
        settings |= {"teacher_rate": 1e-3, "teacher_weight_decay": 0.0, "gamma": 2e-3, "steps": 100}
    if name == "quick":  # to try the whole sequence in seconds; not for results
        settings |= {"teachers": max(1, schema.nominal_size // 60), "steps": 20}
    return settings


# --- the plan ---------------------------------------------------------------------------------------------------------

# The papers print neither the levels used for D²P-Fed nor the table used for FetchSGD: these are ours.
LEVELS, MOST_LEVELS = 16, 128
SKETCH_ROWS, MOST_SKETCH = 5, 2**16


def plan(request: Request, schema: Schema, budget: Budget) -> TopAggSettings:
    """Return the settings, from public facts."""
    options: Options = request.options
    name, values = preset(request.method, request.preset, schema, budget.epsilon)
    overrides = Options.__dataclass_fields__.keys() - {"warm_start", "balanced", "noise", "chunk"}
    asked = {field: value for field in overrides if (value := getattr(options, field)) is not None}
    if options.student_decay is not None:
        asked["student_decay"] = options.student_decay == "cosine"
    if asked.get("beta", 0) > 1:  # settings of older runs may have it: `check_settings` lets it pass
        raise DatalensError(f"--beta must be at most 1 (not even unanimous votes pass above), not {asked['beta']:g}")
    _adjust_to_what_was_asked(values, asked, schema)
    values |= asked
    values["hidden"] = HIDDEN[values["network"]]
    check_settings(values, schema)
    if values["compress"] in ("sign", "klevel"):
        values["k"] = values["basis_size"]  # no top-k: every coordinate votes, and is charged for
    values["plugins"] = _plugins(values)
    values["noise"] = _law(request, values)
    draft = TopAggSettings(
        method=request.method,  # type: ignore[arg-type] # one of ours
        preset=name,
        seed=request.seed,
        noise_seeded=request.noise_seed is not None,
        # A record that replaces another has its position, but not its hash. With hashed shares one teacher would lose a
        # record and another would get one: two rows would change, where one is charged for.
        shares="balanced" if budget.relation == "replace-one" else "hashed",
        **values | {"sigma": values.get("sigma") or 0.0, "beta": values.get("beta") or 0.0},
    )
    sigma, steps = _noise_and_steps(draft, values, asked, budget)
    beta = values.get("beta")
    if beta is None:  # proportional to the noise of a decoded coordinate
        beta = 0.75 * sigma / values["teachers"] / max(1, draft.levels - 1)
    noise = draft.noise if sigma > 0 else "gaussian"  # of width 0
    return dataclasses.replace(draft, sigma=sigma, steps=steps, beta=beta, noise=noise)


def _adjust_to_what_was_asked(values: dict[str, Any], asked: dict[str, Any], schema: Schema) -> None:
    """Change preset values that only make sense together with one that an option changes.

    Raises:
        DatalensError: options contradict each other.
    """
    if asked.get("basis", values["basis"]) == "pixel" and "basis_size" in asked:
        raise DatalensError("--basis-size is for --basis dct, since --basis pixel uses all pixels: leave it out")
    if asked.get("basis", values["basis"]) == "pixel":
        values["basis_size"] = schema.dimensions
    if asked.get("network", values["network"]) == "spectral" and asked.get("basis", values["basis"]) != "dct":
        raise DatalensError(
            "--network spectral works on cosine coefficients: use --basis dct, or --network compact or paper"
        )
    network = asked.get("network", values["network"])
    if network in ("spectral", "printed"):
        values["linear"] = 0.0
        if "linear" in asked:
            raise DatalensError("--linear belongs to --network compact or paper: leave it out")
    compress = asked.get("compress", values["compress"])
    if compress in ("sign", "klevel") and "k" in asked:
        raise DatalensError(f"--compress {compress} votes on every coordinate: leave --k out")
    for name, owner in OF_A_COMPRESSOR.items():
        if name in asked and compress != owner:
            raise DatalensError(f"--{name.replace('_', '-')} belongs to --compress {owner}: leave it out")
    if compress not in ("topk-sign", "sign", "topk"):
        values.pop("sigma", None)  # a printed σ is for rows of norm √(k·m)
    if compress == "klevel":
        values["levels"] = LEVELS
    if compress == "sketch":  # Algorithm 7 has no threshold
        columns = max(1, asked.get("basis_size", values["basis_size"]) // 2)
        values |= {"sketch_rows": SKETCH_ROWS, "sketch_columns": columns, "decode": "linear"}
    if "basis_size" in asked and "k" not in asked:
        values["k"] = min(values["k"], asked["basis_size"])
    if asked.keys() & {"sigma", "steps", "teachers", "compress", "levels"} and "beta" not in asked:
        values["beta"] = None  # the printed β is for the printed σ and N


def _plugins(values: dict[str, Any]) -> str:
    """Return the certificate's text about the parts of a plan that are code of other packages; "" if there are none."""
    parts = []
    if values["compress"] not in COMPRESSORS:
        parts.append(f"the compressor {values['compress']} of {compressor(values['compress'])[1]}")
    if values.get("mechanism"):
        parts.append(f"the mechanism {values['mechanism']} of {mechanism(values['mechanism'])[1]}")
    return " and ".join(parts)


def _law(request: Request, values: dict[str, Any]) -> NoiseName:
    """Return the kind of noise: the requested one, else exact whole-number noise if it is available."""
    real = values["compress"] in REAL_ROWS
    if values["compress"] not in COMPRESSORS:
        real = not compressor(values["compress"])[0].whole_numbers
    if request.options.noise == "discrete-gaussian" and real:
        raise DatalensError(
            f"--compress {values['compress']} sums real numbers, to which discrete noise does not apply: leave one out"
        )
    check_exact_noise(request)
    if request.options.noise is not None:
        return request.options.noise
    exact = not real and not values.get("mechanism") and can_be_exact(request)
    return "discrete-gaussian" if exact else "gaussian"


def _noise_and_steps(
    draft: TopAggSettings, values: dict[str, Any], asked: dict[str, Any], budget: Budget
) -> tuple[float, int]:
    """Return σ for the given steps, or steps for the given σ. Options take precedence over the preset."""
    sensitivity = 2 * draft.l2_bound  # DataLens, Lemma 1, over a batch
    sigma = asked.get("sigma", None if "steps" in asked else values.get("sigma"))
    steps = asked.get("steps", values["steps"] if sigma is None else None)
    goal: dict[str, Any] = {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.pricing()}
    goal |= {"law": draft.noise, "coordinates": draft.batch * draft.cells}
    if math.isinf(budget.epsilon):
        return asked.get("sigma", 0.0), asked.get("steps", values["steps"])
    if sigma == 0:
        raise BudgetExceeded("--sigma 0 adds no noise, so no finite epsilon holds: use --epsilon inf")
    if sigma is None:
        assert steps is not None
        return calibrate_sigma(sensitivity=sensitivity, steps=steps, **goal), steps
    affordable = calibrate_steps(sensitivity=sensitivity, sigma=sigma, **goal)
    if affordable == 0:
        raise BudgetExceeded(
            f"not even one step fits into {budget.describe(budget.epsilon)} at sigma {sigma:g}: "
            "raise --sigma or --epsilon, or lower --k or --batch"
        )
    if steps is not None and steps > affordable:
        raise BudgetExceeded(
            f"{steps} steps at sigma {sigma:g} do not fit into {budget.describe(budget.epsilon)}, {affordable} do: "
            "leave out --sigma or --steps to have it solved for"
        )
    return sigma, steps or affordable


def check_settings(values: dict[str, Any], schema: Schema) -> None:
    """Raise if the settings are invalid. Called for a resumed run, too, since its config.json may have been edited."""
    for name in ("basis_size", "teachers", "k", "steps", "teacher_steps", "batch", "latent"):
        if values[name] < 1:
            raise DatalensError(f"--{name.replace('_', '-')} must be at least 1, not {values[name]}")
    for name in ("sigma", "beta", "linear"):
        value = values.get(name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DatalensError(f"--{name} must be a finite number, at least 0, not {value:g}")
    for name in ("clip", "gamma", "teacher_rate", "student_rate"):
        if not 0 < values[name] < math.inf:
            raise DatalensError(f"--{name.replace('_', '-')} must be above 0, and finite, not {values[name]:g}")
    if values["batch"] < 2:
        raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
    if values["basis_size"] > schema.dimensions:
        raise DatalensError(f"--basis-size {values['basis_size']} is more than an image's {schema.dimensions} values")
    if values["k"] > values["basis_size"]:
        raise DatalensError(f"--k {values['k']} is more than the {values['basis_size']} coordinates teachers vote in")
    if values["compress"] == "klevel" and not 2 <= values["levels"] <= MOST_LEVELS:
        raise DatalensError(f"--levels must be from 2 to {MOST_LEVELS}, not {values['levels']}")
    for name in ("sketch_rows", "sketch_columns") if values["compress"] == "sketch" else ():
        if not 1 <= values[name] <= MOST_SKETCH:
            raise DatalensError(f"--{name.replace('_', '-')} must be from 1 to {MOST_SKETCH}, not {values[name]}")
    if values["teachers"] > schema.nominal_size:
        raise DatalensError(
            f"--teachers {values['teachers']} is more than the {schema.nominal_size} records {schema.name} has: "
            "most shares would be empty; choose fewer"
        )


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def learn(
    run: Run,
    crowd: Crowd,
    settings: TopAggSettings,
    *,
    mechanism: Mechanism,
    device: torch.device,
    start: dict[str, torch.Tensor] | None = None,
) -> Student:
    """Run Algorithm 1 until the last planned step, until the budget is spent, or until interrupted; the state is kept.

    Args:
        crowd: all teachers.
        mechanism: the gate.
        device: of the student.
        start: weights of a generator made from released values, to begin with instead of random ones.

    Returns:
        The student.
    """
    s, schema = settings, run.schema
    student = Student(
        dcgan_architecture(
            schema.shape,
            len(schema.classes),
            latent=s.latent,
            latent_law=s.latent_law,
            cosines=shown_cosines(s, schema) if start is None else 0,
        ),
        batch=s.batch,
        gamma=s.gamma,
        learning_rate=s.student_rate,
        decay_over=s.steps if s.student_decay else None,
        balanced_labels=s.balanced_labels,
        seed=s.seed,
        device=device,
    )
    if start is not None:
        student.generator.load_state_dict(start)
    decode = make_decode(s, schema)

    for step in run.steps(s.steps, student=student, teachers=crowd):
        fakes = student.generate(step)
        loss = crowd.fit_step(fakes, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        noisy = run.journal.find(run.ledger, step=step)  # charged and released before an interruption
        if noisy is None:
            votes = crowd.votes(fakes)
            try:
                noisy = mechanism.release(votes, run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, within the budget
            run.journal.save(noisy)
        student.step(fakes, decode(noisy))
        agreed, chance = agreement(noisy, teachers=s.teachers, longest=s.l2_bound)
        found = {"agreement": agreed, "agreement_by_chance": chance, **diagnose(student, step, s.steps)}
        run.log(step, teacher_loss=loss, **found)
    return student


def diagnose(student: Student, step: int, steps: int) -> dict[str, float]:
    """Measure at some steps whether the student's images depend on their labels; return what to log.

    Warns half-way and at the end if they do not.
    """
    due = {steps // 2, steps - 1}
    if step % classes.EVERY and step not in due:
        return {}
    spread = classes.spread_of(student.generator, seed=step)
    trouble = classes.trouble(spread, classes=student.generator.architecture.classes)
    if trouble and step in due and steps >= classes.FEWEST_STEPS:
        say(f"warning: after {step + 1} of {steps} steps {trouble}")
    return {"between_classes": spread.between, "within_classes": spread.within}


def shown_cosines(settings: TopAggSettings, schema: Schema) -> int:
    """Return the number of cosines of the student's images: those that teachers vote on.

    0: the whole image, where teachers vote on all of it, or on too many cosines to separate from the rest (`can_show`).
    """
    s = settings
    some = s.basis == "dct" and s.basis_size < schema.dimensions and can_show(schema.shape, s.basis_size)
    return s.basis_size if some else 0


def train(run: Run, shares: Shares, settings: TopAggSettings, place: Place) -> Generator:
    """Train teachers and student, and return the student's generator."""
    crowd = make_crowd(shares, settings, run.schema, place)
    generator = train_student(run, crowd, settings, place)
    crowd.dismiss()
    return generator


def train_student(run: Run, crowd: Crowd, settings: TopAggSettings, place: Place) -> Generator:
    """Open the noise, and return the generator that learns from the votes of these teachers."""
    s = settings
    with open_noise(s.noise, s.sigma, draws=s.steps * s.batch * s.cells, seed=run.noise_seed) as noise:
        gate: Mechanism = make_mechanism(s.sigma, noise)
        if s.mechanism:
            gate = ThirdParty(mechanism=mechanism(s.mechanism)[0](s.sigma, noise), sigma=s.sigma, noise=noise)
        return learn(run, crowd, s, mechanism=gate, device=place.device).generator


def follow(schema: Schema, shares: Shares, settings: TopAggSettings, place: Place) -> None:
    """Follow the orders of rank 0 with this rank's teachers; called on every other rank."""
    make_crowd(shares, settings, schema, place).follow()


def gather(records: Records, settings: TopAggSettings, place: Place) -> Shares:
    """Put every record into exactly one share; keep the shares of this rank's teachers, as the features they see."""
    s, schema, world = settings, records.schema, place.world or World()
    network = make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes))
    return Shares.gather(
        records, share_rule(s), numbers=world.numbers(s.teachers), features=network.record_features, device=world.device
    )


def share_rule(settings: TopAggSettings) -> Rule:
    """Return the rule by which records are assigned to teachers."""
    return rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)


def make_crowd(
    shares: Shares,
    settings: TopAggSettings,
    schema: Schema,
    place: Place,
    wrap: Callable[[Compress], Compress] | None = None,
) -> Crowd:
    """Return the teachers of all ranks, of which this rank trains its own. `wrap` is applied to their compressor."""
    s, world, folder = settings, place.world or World(), place.folder / "checkpoints"

    def here() -> Crowd:
        mine, compress = make_teachers(shares, s, schema, chunk=place.chunk), make_compress(s)
        wrapped = compress if wrap is None else wrap(compress)
        return Crowd(mine, wrapped, world=world, count=s.teachers, shape=(s.batch, *schema.shape), folder=folder)

    return world.together(here)


def make_teachers(shares: Shares, settings: TopAggSettings, schema: Schema, *, chunk: int | None = None) -> Teachers:
    s = settings
    return Teachers(
        make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes)),
        shares,
        batch=s.batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
        chunk=chunk,
    )


def seconds_a_step(settings: TopAggSettings, schema: Schema) -> float:
    """Estimate the time of a step on this machine's CPU, from one timed step of a few teachers on random images."""
    s, random = settings, torch.Generator().manual_seed(0)
    network = make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes))
    chunk = plan_memory(s.teachers, *network.bytes_per_teacher(s.batch), torch.device("cpu")).chunk
    some = dataclasses.replace(s, teachers=min(s.teachers, chunk * torch.get_num_threads()))
    shown = Fakes(
        images=torch.rand(s.batch, *schema.shape, generator=random),
        labels=torch.arange(s.batch) % len(schema.classes),
        step=0,
    )
    share = np.arange(some.teachers)
    pixels = torch.randint(256, (len(share), schema.height, schema.width, schema.channels), generator=random)
    features = network.record_features(pixels.to(torch.uint8))
    labels = torch.from_numpy(share % len(schema.classes))
    teachers = make_teachers(Shares(features, labels, Partition(share=share, teachers=some.teachers)), some, schema)
    compress = make_compress(s)

    def once(repeats: int) -> float:
        began = time.perf_counter()
        teachers.fit_step(shown, step=0, repeats=repeats)
        sum_bounded(teachers.rows(shown, compress, step=0))
        return time.perf_counter() - began

    once(1)  # warms up the libraries
    return once(s.teacher_steps) * s.teachers / some.teachers


def make_compress(settings: TopAggSettings) -> Compress:
    """Return the function that turns teachers' gradients into their rows."""
    s = settings
    if s.compress not in COMPRESSORS:
        theirs = compressor(s.compress)[0]
        return PerTeacher(
            row=lambda gradient, uniform: theirs.row(gradient, uniform, s),
            l2_bound=s.l2_bound,
            cells=s.cells,
            whole_numbers=theirs.whole_numbers,
            seed=s.seed,
        )
    if s.compress == "klevel":
        return KLevel(levels=s.levels, clip=s.clip, seed=s.seed, size=s.basis_size)
    votes = TopKSign(k=s.k, clip=s.clip, quantise=s.compress != "topk", seed=s.seed)
    if s.compress == "sketch":
        return CountSketch(votes=votes, rows=s.sketch_rows, columns=s.sketch_columns, size=s.basis_size)
    return votes


def make_decode(settings: TopAggSettings, schema: Schema) -> Decode:
    """Return the function that turns a released sum of rows into directions of the images."""
    s, unpack = settings, None
    if s.compress == "klevel":
        unpack = partial(Rotation(s.basis_size, s.seed).inverse, scale=1 / (s.levels - 1))
    if s.compress == "sketch":
        unpack = partial(Sketch(s.basis_size, s.sketch_rows, s.sketch_columns, s.seed).heaviest, k=s.k)
    theirs = None if s.compress in COMPRESSORS else compressor(s.compress)[0].unpack
    if theirs is not None:
        unpack = partial(_unpacked, theirs, s)
    basis = make_basis(s.basis, schema.shape, s.basis_size)
    return Decode(rule=s.decode, beta=s.beta, teachers=s.teachers, basis=basis, unpack=unpack)


def _unpacked(theirs: Callable[[Tensor, TopAggSettings], Tensor], s: TopAggSettings, votes: Tensor) -> Tensor:
    return theirs(votes, s)


def make_network(settings: TopAggSettings, basis: Basis, classes: int) -> Network:
    s = settings
    return network_named(s.network, basis, classes, hidden=s.hidden, linear=s.linear)


TOPAGG = Method(
    settings=TopAggSettings,
    plan=plan,
    gather=gather,
    train=train,
    follow=follow,
    options=Options,
    presets=("default", "quick"),
    persons=True,
    teachers=True,
    version=2,  # 1: without the linear part of convolutional teachers, and with other settings above ε = 1
)
PAPER = dataclasses.replace(TOPAGG, presets=("paper", "code"), accountant="rdp")
