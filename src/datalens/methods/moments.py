"""DataLens from private moments: every record is its own teacher, and contributes to the moments of its class.

There are eight releases, through the same gate, ledger and accountant as votes. A record's row is one-hot(class) ⊗ a
bounded vector, or ⊗ the outer product of such a vector with itself. Classes are disjoint, so all classes together are
one release, with noise on every cell. Each release may use what was released before it:

| | release | a record's row | norm of the row |
|---|---|---|---|
| 0 | histogram of norms | the bin of the norm of its coordinates | grid |
| 1 | class sums and counts | its coordinates, clipped; and a count | grid |
| 2 | histogram of residual norms | the bin of the norm of its residual around the mean from 1 | grid |
| 3 | class covariances | residual ⊗ residual, clipped | grid² |
| 4-7 | the same for its texture | features, whitened by those of images made from 0-3 | as above |

Coordinates are low-frequency cosines; clipping norms are quantiles of the histograms. Everything after a release is
post-processing (`released.moments`).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from tyro.conf import arg

from datalens.bounded.contributions import BoundedSum
from datalens.data.formats import cut
from datalens.data.own.reading import Reading
from datalens.data.parts import Part as DataPart
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import Noise, NoiseName, Number, WholeNumber
from datalens.plans.base import (
    Method,
    Outlook,
    Part,
    Place,
    Request,
    Settings,
    can_be_exact,
    check_exact_noise,
    checked,
    cost,
    gaussian_event,
    known,
    law_said,
)
from datalens.plans.guidance import nothing_stands_out
from datalens.privacy.events import (
    MOST_NOISE,
    ROUNDING,
    Charge,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    of_part,
)
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.privacy.released import Released
from datalens.private.moments import RecordRows, same_rows_on
from datalens.progress import say
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.public.threads import one_core_each, side_by_side
from datalens.released import moments as released
from datalens.run import cluster
from datalens.run.cluster import ClusterRows, check_options
from datalens.run.folder import Run
from datalens.run.rank_rows import PartOfRank, RankRows
from datalens.run.ranks import World

# The releases of a run, in this order; the settings named `…_share` say what part of the budget each gets.
RELEASES = (
    *("norms", "sums", "residual-norms", "covariances"),
    *("texture-norms", "texture-sums", "texture-residual-norms", "texture-covariances"),
)

SIGMAS = 1e-6  # relative tolerance of σ: versions of the libraries may round it differently
# What becomes of a class, by the larger noise-to-signal ratio of its covariances (of coordinates, of texture). A class
# with less than two thirds of the records of the largest one is rare: a classifier learns to know it by its noise, so
# far less noise is too much for it. Measured: benchmarks/rare_classes.py, benchmarks/small_data.py, docs/utility.md.
VARIED, USABLE, DOUBTFUL = 0.1, 0.5, 1.5
RARE, RARE_USABLE, RARE_DOUBTFUL = 2 / 3, 0.05, 0.13
WORDS = (
    "usable: recognisable, varied images",
    "usable: recognisable images, less varied than the real ones",
    "doubtful: noisy or all alike, look at its images before you use them",
    "not usable: its images are mostly noise",
    "left out: it does not stand out of the noise",
)
NOISE_BY = (
    "how large the noise is beside what it is added to. norms: noise of a bin, beside the number of records. sums: "
    "noise of a coordinate of a class mean, beside the longest row. covariances: the most that noise can change the "
    "variance of a class in any direction, beside the square of the longest row"
)


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """The budget is divided among the releases in proportion to their shares."""

    warm_start: Annotated[Literal["moments", "off"] | None, arg(help_behavior_hint="")] = None
    """off: teachers vote (TopAgg), which has other options (`--warm-start off --help`)."""
    coordinates: WholeNumber = None
    """Number of low-frequency coordinates of an image."""
    texture: WholeNumber = None
    """Number of texture coordinates; 0: images without texture."""
    texture_steps: WholeNumber = None
    """Gradient steps that give an image its texture."""
    sums_quantile: Number = None
    """Class sums are clipped at this quantile of the released norms."""
    covariances_quantile: Number = None
    """Class covariances are clipped at this quantile."""
    histogram_share: Number = None
    """Share of each histogram of norms."""
    sums_share: Number = None
    """Share of the class sums."""
    covariances_share: Number = None
    """Share of the class covariances."""
    texture_sums_share: Number = None
    """Share of the class sums of texture."""
    texture_covariances_share: Number = None
    """Share of the class covariances of texture."""
    noise: Noise = None
    engine: Annotated[Literal["dask"] | None, arg(help_behavior_hint="")] = None
    """dask: sum the records on a cluster (docs/cluster.md), with the same result."""
    scheduler: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Scheduler of the cluster, as tcp://machine:8786."""
    workers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Instead of a scheduler: processes to start on this machine."""


@dataclass(frozen=True, kw_only=True)
class MomentSettings(Settings):
    """Everything that decides what a run from private moments does (see the module): public."""

    ZERO: ClassVar[tuple[str, ...]] = ("texture", "texture_steps")
    OMITTED: ClassVar[dict[str, Any]] = {"unit": "record"}
    one_part: ClassVar[bool] = True
    makes: ClassVar[Literal["generator", "moments", "diffusion", "classifier"]] = "moments"

    method: Literal["datalens"]
    preset: str
    warm_start: Literal["moments"]
    seed: int
    noise_seeded: bool
    noise: NoiseName
    coordinates: int  # number of low-frequency coordinates of an image
    texture: int  # number of texture coordinates whose covariances are released; 0: no texture at all
    histogram_share: float  # of the budget (in mu²), for each of the four histograms of norms
    sums_share: float  # for class sums and counts
    covariances_share: float
    texture_sums_share: float
    texture_covariances_share: float
    bins: int  # of a histogram of norms
    sums_quantile: float  # of the norms, at which class sums are clipped
    covariances_quantile: float
    grid: int  # largest norm of a row, in steps of the grid that rows are rounded to
    counted: int  # value of a record's count cell, in the same steps
    texture_steps: int  # gradient steps for an image
    unit: Literal["record", "person"] = "record"  # whose row is bounded: that of an image, or of all a person's images

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MomentSettings":
        settings: MomentSettings = checked(cls, fields, zero=cls.ZERO)
        if not (settings.counted < settings.grid <= 2**14 and settings.bins <= 2**16):  # 2^24 rows add up in float64
            raise DatalensError("the settings grid, counted and bins do not fit together")
        if (settings.texture == 0) != (settings.texture_steps == 0):
            raise DatalensError("the settings texture and texture_steps do not fit together")
        return settings

    @property
    def releases(self) -> dict[str, float]:
        """Release → its part of the budget in mu²; the parts add up to one."""
        parts = dict.fromkeys(RELEASES, self.histogram_share)
        parts |= {"sums": self.sums_share, "covariances": self.covariances_share}
        parts |= {"texture-sums": self.texture_sums_share, "texture-covariances": self.texture_covariances_share}
        if self.texture == 0:
            parts = {name: part for name, part in parts.items() if not name.startswith("texture")}
        whole = sum(parts.values())
        return {name: part / whole for name, part in parts.items()}

    def l2_bound(self, release: str) -> float:
        """Return the largest norm of a row."""
        return float(self.grid**2 if release.endswith("covariances") else self.grid)

    def diameter(self, release: str) -> float:
        """Return the largest distance between the rows of two privacy units.

        Rows of sums can point in opposite directions; those of histograms and covariances cannot. A person's sum of
        squares is truncated, which moves it by less than one in each of at most 2^20 cells.
        """
        bound = self.l2_bound(release)
        if self.unit == "person" and release.endswith("covariances"):
            return min(math.sqrt(2.0) * (bound + 2**10) * (1 + 1e-12), 2 * bound)
        return bound * (2.0 if release.endswith("sums") else math.sqrt(2.0))

    def check(self, schema: Schema) -> None:
        check_moments(self, schema)

    # --- what it costs

    def own_budget(self, budget: Budget) -> Budget:
        """Return the part of a run's budget that these releases share: all of it, unless a second stage follows."""
        return budget

    @property
    def steps_planned(self) -> int:
        return len(self.releases)

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        facts: dict[str, Any] = {"relation": budget.relation, "queries": 0, "step": 0, "noise": self.origin}
        facts |= {"row_unit": "record"}
        return tuple(
            Part(
                name=line["release"],
                event=gaussian_event(
                    self.noise,
                    facts
                    | {"l2_bound": self.l2_bound(line["release"]), "diameter": self.diameter(line["release"])}
                    | {"sigma": line["sigma"], "coordinates": line["cells"]},
                ),
                sensitivity=line["sensitivity"],
                times=1,
                cells=line["cells"],
                noise_to_signal=line["noise_to_signal"],
            )
            for line in self.release_costs(schema, budget)
        )

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        return self.release_costs(schema, budget)

    def release_costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        """Return a line for each release of moments; shares are of `own_budget`."""
        budget = self.own_budget(budget)
        mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
        records = schema.nominal_size / len(schema.classes)
        parts = []
        for name, part in self.releases.items():
            release_mu = mu * math.sqrt(part)
            size = self.texture if name.startswith("texture") else self.coordinates
            slots = 1 if "norms" in name else len(schema.classes)
            bound = self.l2_bound(name)
            sensitivity = bound if budget.relation == "add-remove" else self.diameter(name)
            factor = sensitivity / bound
            if "norms" in name:  # noise of a bin / number of records
                cells, relative = self.bins, factor / release_mu / schema.nominal_size
            elif name.endswith("sums"):  # noise of a coordinate of a class mean / clipping norm
                size = size if name == "sums" else Texture(schema.shape).size
                cells, relative = size + 1, factor / release_mu / records
            else:  # largest eigenvalue of the noise / squared clipping norm
                cells, relative = size**2, factor * math.sqrt(2 * size) / release_mu / records
            sigma = sensitivity / release_mu if release_mu else 0.0
            parts.append(cost(name, part, sigma, sensitivity, slots * cells, relative))
        return parts

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        """Return nothing: `disagreements` has checked that each σ follows from what was left of the budget."""
        return []

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Compare the ledger's releases, the norms of their rows, and their noise with these settings."""
        problems = []
        gaussian = [event for event in events if isinstance(event, GaussianEvent)]
        expected = {RELEASES.index(name): self.l2_bound(name) for name in self.releases}
        # Releases of texture may be missing, if interruptions spent their part.
        if not {0, 1, 2, 3} <= {event.step for event in gaussian} <= set(expected) or len(gaussian) != len(events):
            return ["the ledger has other releases than the settings state"]
        if any(event.row_unit != self.unit or event.l2_bound != expected.get(event.step) for event in gaussian):
            problems.append("the ledger was charged for rows of another length than the settings state")
        diameters = {RELEASES.index(name): self.diameter(name) for name in self.releases}
        if any(event.diameter < diameters.get(event.step, math.inf) for event in gaussian):
            problems.append("the ledger was charged for a smaller distance of two rows than rows can have")
        slots = {RELEASES.index(name): 1 if "norms" in name else len(schema.classes) for name in self.releases}
        if any(event.queries != slots.get(event.step) for event in gaussian):
            problems.append("the settings state another number of classes than the ledger")
        discrete = [event for event in gaussian if isinstance(event, DiscreteGaussianEvent)]
        if len(discrete) != (len(gaussian) if self.noise == "discrete-gaussian" else 0):
            problems.append("the settings state another kind of noise than the ledger")
        cells = {RELEASES.index(line["release"]): line["cells"] for line in self.release_costs(schema, budget)}
        if any(event.coordinates != cells.get(event.step) for event in discrete):
            problems.append("the settings state another number of coordinates than the ledger")
        if any((event.noise == "seeded") != self.noise_seeded for event in gaussian):
            problems.append("the settings are wrong about whether the noise was seeded")
        return problems + self._wrong_noise(budget, gaussian)

    def _wrong_noise(self, budget: Budget, events: list[GaussianEvent]) -> list[str]:
        """Return a problem unless σ of every release follows from the settings, the budget and the earlier charges."""
        budget = self.own_budget(budget)
        for number, event in enumerate(events):
            name = RELEASES[event.step]
            expected = 0.0
            if math.isfinite(budget.epsilon):
                mu_squared, _ = mu_squared_for(name, self, budget, events[:number])
                expected = sigma_for(name, self, budget, mu_squared) if mu_squared > 0 else math.inf
            if not math.isclose(event.sigma, expected, rel_tol=SIGMAS):
                return [
                    f"the ledger has sigma {event.sigma:.6g} for {name}, settings and budget make it {expected:.6g}"
                ]
        return []

    def wrong_weights(self, model: released.MomentModel, events: Sequence[Charge]) -> list[str]:
        problems = []
        if model.start.means.shape[1] != self.coordinates:
            problems.append("the weights have another number of coordinates than the settings state")
        if model.steps == 0:
            return problems
        if (model.steps, model.maps.shape[-1]) != (self.texture_steps, self.texture):
            problems.append("the weights have another texture than the settings state")
        if not {4, 5, 6, 7} <= {event.step for event in known(events)}:
            problems.append("the weights have texture, and the ledger no charges for it")
        return problems

    # --- how it is described

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        moved = "the longest row" if budget.relation == "add-remove" else "the largest distance of two rows"
        rows = (
            "one person has one row, over all images and classes"
            if by_person
            else "one record has one row, in the cells of its class"
        )
        return {
            "name": "class sums and covariances of bounded rows with Gaussian noise (private moments)",
            "sensitivity": f"{moved} per event: {rows}",
        }

    def noise_said(self) -> str:
        return "exact discrete Gaussian (OpenDP)" if self.noise == "discrete-gaussian" else "rounded to integers"

    def price_said(self) -> str:
        if self.noise == "gaussian":
            return "as Gaussian noise of variance sigma²"
        return "as Gaussian noise of variance sigma² - 4 (by RDP: as zCDP)"

    def opening(self, schema: Schema, budget: Budget) -> str:
        noise = law_said(self) if math.isfinite(budget.epsilon) else "no noise"
        return (
            f"{self.method} [{self.preset}, from private moments] on {schema.name}: {self.coordinates} coordinates, "
            f"{self.texture} texture coordinates, {noise}"
        )

    def planned_as(self) -> str:
        return "from private moments"

    @property
    def step_name(self) -> str:
        return "releases"

    @property
    def signal(self) -> str:
        return NOISE_BY

    def release_name(self, event: Charge) -> str | None:
        return RELEASES[event.step].replace("-", " ")

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return no sigma: every release has its own, and the ledger names them."""
        return {"warm_start": "moments", "sigma": None}

    def expect(self, schema: Schema, budget: Budget) -> list[str]:
        parts = {part["release"]: part for part in self.release_costs(schema, budget)}
        records = schema.nominal_size / len(schema.classes)
        count_noise = parts["sums"]["sigma"] / self.counted
        one = self.outlook(schema, budget, [records] * len(schema.classes))[0]
        unit = "persons" if schema.by_person else "records"
        rare = max(self._class_noise(schema, budget) / RARE_USABLE, self._least_class(schema, budget))
        return [
            f"if all classes have the same size (about {round_number(records)} {unit}): {one.words}"
            + (f". What helps: {one.remedy}" if one.remedy else ""),
            f"a class that is much smaller than others is usable from about {round_number(rare)} {unit} on",
            f"the released number of {unit} of a class is off by about {round_number(count_noise)}",
        ]

    def _class_noise(self, schema: Schema, budget: Budget) -> float:
        """Return the noise-to-signal ratio of a class, times its number of records."""
        ratios = [
            part["noise_to_signal"] for part in self.release_costs(schema, budget) if "covariances" in part["release"]
        ]
        return max(ratios) * schema.nominal_size / len(schema.classes)

    def _needed(self, schema: Schema, budget: Budget, largest: float) -> float:
        """Return from how many records on a class is usable, beside a largest class of this size."""
        noise = self._class_noise(schema, budget)
        enough = min(noise / RARE_USABLE, max(noise / USABLE, RARE * largest))
        return max(enough, self._least_class(schema, budget))

    def outlook(self, schema: Schema, budget: Budget, counts: Sequence[float]) -> list[Outlook]:
        noise, least, largest = self._class_noise(schema, budget), self._least_class(schema, budget), max(counts)
        needed, unit = self._needed(schema, budget, largest), "persons" if schema.by_person else "records"

        def one(count: float) -> Outlook:
            ratio, rare = noise / max(count, 1e-9), count < RARE * largest
            if count >= needed:
                return Outlook(usable=True, words=WORDS[0] if ratio < VARIED else WORDS[1])
            doubtful = RARE_DOUBTFUL if rare else DOUBTFUL
            enough = self._epsilon_for(schema, budget, count, largest)
            larger = "" if enough is None else f", choose --epsilon {enough:g}"
            merged = f"merge it with a similar class (about {round_number(needed)} {unit} together are enough)"
            return Outlook(
                usable=False,
                words=WORDS[4] if count < least else WORDS[2] if ratio < doubtful else WORDS[3],
                remedy=f"{merged}{larger}, or leave it out",
            )

        return [one(count) for count in counts]

    def _epsilon_for(self, schema: Schema, budget: Budget, count: float, largest: float) -> float | None:
        """Return a larger ε, up to 10, at which a class of so many records is usable; None if there is none."""
        by_rule = self.coordinates == min(default_size(schema, budget), schema.dimensions)
        for epsilon in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
            if epsilon <= budget.epsilon:
                continue
            larger = dataclasses.replace(budget, epsilon=epsilon)
            s = self
            if by_rule:  # the number of coordinates grows with ε
                size = default_size(schema, larger)
                texture = min(size, Texture(schema.shape).size) if self.texture else 0
                s = dataclasses.replace(self, coordinates=min(size, schema.dimensions), texture=texture)
            if count >= s._needed(schema, larger, largest):
                return epsilon
        return None

    def seconds(self, schema: Schema) -> float:
        """Return an estimate from the texture of a few random images, which takes most of the time."""
        few = torch.rand(64, *schema.shape, generator=torch.Generator().manual_seed(0))
        texture, times = Texture(schema.shape), []
        for _ in range(3):  # the first one warms up
            began = time.monotonic()
            texture(few)
            times.append(time.monotonic() - began)
        each = min(times) / len(few)
        drawn = 100 * min(10, len(schema.classes)) / 10 * 3 * self.texture_steps  # a step forwards and backwards
        return each * (schema.nominal_size + (released.WHITENING if self.texture else 0) + drawn)

    def warnings(self, schema: Schema, budget: Budget) -> list[str]:
        if why := self.refusal(schema, budget):
            return [why]
        records, least = schema.nominal_size / len(schema.classes), self._least_class(schema, budget)
        if records >= least:
            return []
        return [
            f"a class has about {records:.3g} records, and a class with fewer than {least:.3g} is left out: raise "
            "--epsilon, use more records, or merge classes"
        ]

    def refusal(self, schema: Schema, budget: Budget) -> str | None:
        least = self._least_class(schema, budget)
        if schema.nominal_size >= least:
            return None
        return (
            f"there are about {schema.nominal_size} records, and a class with fewer than {least:.3g} is left out: "
            "raise --epsilon, or use more records"
        )

    def _least_class(self, schema: Schema, budget: Budget) -> float:
        """Return the number of records below which a class is likely to be left out (see `present_classes`)."""
        sums = next(part for part in self.release_costs(schema, budget) if part["release"] == "sums")
        return max(4 * sums["sigma"] / self.counted, 20)


# --- noise: a function of the settings, the budget and earlier charges only -------------------------------------------


def sensitivity(name: str, s: MomentSettings, budget: Budget) -> float:
    """Return how far one privacy unit can move the sum. (The event that is charged checks this again.)"""
    return s.l2_bound(name) if budget.relation == "add-remove" else s.diameter(name)


def mu_squared_for(name: str, s: MomentSettings, budget: Budget, charged: Sequence[Event]) -> tuple[float, float]:
    """Return mu² of the next release, and what it would be if no release had been lost.

    Each release still to come gets its part of what is left of the budget, in proportion to `releases`.
    """
    pricing = budget.pricing()
    whole = pricing.mu_budget(budget.epsilon, budget.delta) ** 2
    remaining = whole - pricing.mu_squared(charged)
    parts = s.releases
    coming = sum(part for other, part in parts.items() if RELEASES.index(other) >= RELEASES.index(name))
    return remaining * (1 - 1e-6) * parts[name] / coming, whole * parts[name]


def sigma_for(name: str, s: MomentSettings, budget: Budget, mu_squared: float) -> float:
    """Return σ of the noise with which a release costs this mu²."""
    variance = sensitivity(name, s, budget) ** 2 / mu_squared
    return math.sqrt(variance + (ROUNDING if s.noise == "discrete-gaussian" else 0.0))


# --- the plan: one rule for every data set (docs/utility.md says how it was chosen) -----------------------------------

MOST_COORDINATES, LEAST_COORDINATES = 196, 64
MOST_CELLS = 2**20  # of class covariances: each needs a draw of noise
GRID = 2**14
SMALLEST_MU = 2 * GRID**2 / MOST_NOISE  # of a release: a smaller mu needs more noise than can be drawn
RELEASE_SHARES = {
    "histogram_share": 0.005,
    "sums_share": 0.06,
    "covariances_share": 0.38,
    "texture_sums_share": 0.05,
    "texture_covariances_share": 0.49,
}
# If the noise leaves room for fewer coordinates than this, texture would be lost in noise, and little but class means
# and counts can be learned.
HARDLY_ANY, SCARCE = 16, {"texture": 0, "sums_share": 0.6}


def default_size(schema: Schema, budget: Budget) -> int:
    """Return how many coordinates the noise of a budget leaves room for."""
    most = min(MOST_COORDINATES, math.isqrt(MOST_CELLS // len(schema.classes)))
    return int(min(most, max(LEAST_COORDINATES, _above_noise(schema, budget))))


def _above_noise(schema: Schema, budget: Budget) -> float:
    """Return the number of coordinates that stand out of the noise."""
    mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
    return 0.12 * mu * (schema.nominal_size / len(schema.classes))


def round_number(value: float) -> str:
    """Return a number with two digits, written out: 1200, 260, 0.02."""
    return f"{float(f'{value:.2g}'):,.10g}".replace(",", "")


def plan(request: Request, schema: Schema, budget: Budget) -> MomentSettings:
    """Return the settings: as many coordinates as the noise leaves room for; all else is the same for all data."""
    options: Options = request.options
    check_exact_noise(request)
    exact = can_be_exact(request) and math.isfinite(budget.epsilon)
    mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
    if mu * math.sqrt(RELEASE_SHARES["covariances_share"]) < SMALLEST_MU:
        raise BudgetExceeded(
            f"no noise is large enough for {budget.describe(budget.epsilon)}: raise --epsilon, or use --accountant "
            "exact"
        )
    size = default_size(schema, budget)
    values: dict[str, Any] = RELEASE_SHARES | {
        "coordinates": min(size, schema.dimensions),
        "texture": min(size, Texture(schema.shape).size),
        "sums_quantile": 0.9,
        "covariances_quantile": 0.5,
        "texture_steps": 12,
    }
    if _above_noise(schema, budget) < HARDLY_ANY:
        values |= SCARCE
    overrides = Options.__dataclass_fields__.keys() - {"warm_start", "noise", "engine", "scheduler", "workers"}
    values |= {name: value for name in overrides if (value := getattr(options, name)) is not None}
    if values["texture"] == 0:
        values["texture_steps"] = 0
    settings = MomentSettings(
        method="datalens",
        preset=request.preset,
        warm_start="moments",
        seed=request.seed,
        noise_seeded=request.noise_seed is not None,
        noise=options.noise or ("discrete-gaussian" if exact else "gaussian"),
        bins=48,
        grid=GRID,
        counted=GRID // 2,
        unit="person" if schema.by_person else "record",
        **values,
    )
    check_moments(settings, schema)
    return settings


def check_moments(settings: MomentSettings, schema: Schema) -> None:
    """Raise DatalensError if the settings are invalid for this data."""
    most = math.isqrt(MOST_CELLS // len(schema.classes))  # more noise would take hours to draw
    for name, available in (("coordinates", schema.dimensions), ("texture", Texture(schema.shape).size)):
        size, least = getattr(settings, name), 0 if name == "texture" else 1
        if not least <= size <= min(available, most):
            raise DatalensError(
                f"--{name} must be between {least} and {min(available, most)} for this data, not {size}"
            )
    if settings.texture > 0 and settings.texture_steps < 1:
        raise DatalensError(f"--texture-steps must be at least 1, not {settings.texture_steps}: or use --texture 0")
    for name in ("sums_quantile", "covariances_quantile"):
        if not 0 < getattr(settings, name) <= 1:
            raise DatalensError(f"--{name.replace('_', '-')} must lie in (0, 1], not {getattr(settings, name)}")
    for name in RELEASE_SHARES:
        if not 1e-6 < getattr(settings, name) < 1e6:
            raise DatalensError(f"--{name.replace('_', '-')} must be above 0, not {getattr(settings, name)}")


# --- the releases, and the generator that is made from them -----------------------------------------------------------

LEAST_PART = 0.25  # of the planned mu² of a release: with less, it would be mostly noise

Ask = Callable[[str, Callable[[], BoundedSum]], Released]
Rows = RecordRows | ClusterRows | RankRows  # of all records, wherever they are


def train(run: Run, records: Rows, settings: MomentSettings, place: Place) -> released.MomentModel:
    """Make all releases, and return the generator that follows from them."""
    if isinstance(records, RankRows):
        records.meet()
    model = learn(run, records, settings)
    if isinstance(records, RankRows):
        records.dismiss()
    return model


def follow(schema: Schema, records: RankRows, settings: MomentSettings, place: Place) -> None:
    """Answer rank 0 for this rank's records; called on every other rank."""
    records.meet()
    records.follow()


@one_core_each()
def learn(run: Run, records: Rows, settings: MomentSettings) -> released.MomentModel:
    """Make all releases that were not made before an interruption, and return what follows from them."""
    s, schema = settings, run.schema
    classes, floor = len(schema.classes), smallest_class(schema)
    grid = {"grid": s.grid}
    counting = {"grid": s.grid, "counted": s.counted}
    with run.watched("private moments", len(s.releases)) as progress:

        def ask(name: str, total: Callable[[], BoundedSum]) -> Released:
            answer = _ask(run, s, name, total)
            progress.done(run.completed)
            return answer

        view = records.coordinates
        brightest = math.sqrt(schema.dimensions)  # the largest norm of an image
        edges = norm_edges(brightest / 64, brightest, s.bins)
        norms = ask("norms", lambda: records.histogram(view, means=None, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.sums_quantile)
        sums = ask("sums", lambda: records.sums(view, clip=clip, classes=classes, **counting))
        means, counts = released.class_means(sums, clip=clip, floor=floor, **counting)
        present = present_classes(counts, sums.event.sigma / s.counted, schema, run.ledger)
        warn_of_rare(s, schema, run.ledger.budget, counts, present)

        norms = ask("residual-norms", lambda: records.histogram(view, means=means, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.covariances_quantile)
        try:
            outer = ask("covariances", lambda: records.covariances(view, means=means, clip=clip, **grid))
            covariances = released.class_covariances(outer, counts, clip=clip, floor=floor, **grid)
            further = s.texture > 0
        except BudgetExceeded as error:
            say(f"warning: {error}; images differ from the mean of their class as much as records do, but at random")
            covariances, further = released.round_covariances(means, clip=clip), False
        start = released.make_start(schema.shape, means, covariances)
        if not further:
            return released.without_texture(start, present, counts)
        run.preview(released.without_texture(start, present, counts))

        try:
            return _with_texture(start, records, s, schema, ask, present=present, counts=counts)
        except BudgetExceeded as error:
            say(f"warning: {error}; images are made without texture")
            return released.without_texture(start, present, counts)


def _with_texture(
    start: released.Start,
    records: Rows,
    s: MomentSettings,
    schema: Schema,
    ask: Ask,
    *,
    present: Tensor,
    counts: Tensor,
) -> released.MomentModel:
    """Make releases 4-7: the moments of texture, in coordinates in which the texture of the first images is white."""
    floor = smallest_class(schema)
    whitening = released.make_whitening(start, present, s.seed)
    view = partial(records.texture, centre=whitening.centre, white=whitening.matrix)
    median_norm = whitening.norms(0.5)
    edges = norm_edges(median_norm / 8, median_norm * 8, s.bins)
    norms = ask("texture-norms", lambda: records.histogram(view, means=None, edges=edges, grid=s.grid))
    clip = released.quantile_edge(norms, edges, s.sums_quantile)
    counting = {"grid": s.grid, "counted": s.counted}
    sums = ask("texture-sums", lambda: records.sums(view, clip=clip, classes=len(counts), **counting))
    means, _ = released.class_means(sums, clip=clip, floor=floor, **counting)

    widest = partial(records.texture, centre=whitening.centre, white=whitening.matrix[:, : s.texture])
    head = means[:, : s.texture]
    norms = ask("texture-residual-norms", lambda: records.histogram(widest, means=head, edges=edges, grid=s.grid))
    clip = released.quantile_edge(norms, edges, s.covariances_quantile)
    outer = ask("texture-covariances", lambda: records.covariances(widest, means=head, clip=clip, grid=s.grid))
    covariances = released.class_covariances(outer, counts, clip=clip, floor=floor, grid=s.grid)
    return released.make_model(
        start,
        whitening,
        present=present,
        counts=counts,
        means=means,
        covariances=covariances,
        steps=s.texture_steps,
    )


@one_core_each()
def gather(records: Records, settings: MomentSettings, place: Place) -> Rows:
    """Return every record's rows, as whole numbers: those of this process, or those that a cluster or ranks hold."""
    shape, asked, world = records.schema.shape, place.options, place.world or World()
    if world.size > 1:
        check_ranks(asked)
    if check_options(asked):
        assert place.closing is not None

        def parts(pieces: int) -> list[DataPart]:
            folder, reading = asked.get("data_folder"), Reading.of(dict(asked))
            return cut(asked["data"], records.schema, pieces=pieces, folder=folder, reading=reading)

        return cluster.gather(asked, parts, settings.coordinates, place.closing)
    basis = make_basis("opponent", shape, settings.coordinates)
    # On the disk of the run, not that of temporary files, which may itself be memory.
    folder = next(parent for parent in place.folder.absolute().parents if parent.is_dir())
    texture, device = Texture(shape), place.device
    if device.type != "cpu" and not same_rows_on(device, records.schema, basis=basis, texture=texture):
        say(f"the {device.type} device rounds otherwise than processors do: the records are summed without it")
        device = torch.device("cpu")
    here: dict[str, Any] = {"basis": basis, "texture": texture, "folder": folder, "device": device}
    if world.size == 1:
        return RecordRows.gather(records, **here)
    part = PartOfRank(records, world)
    return RankRows(RecordRows.gather(part, **here), part, world)


def check_ranks(options: Mapping[str, Any]) -> None:
    """Raise if an option is for one process, where there are several ranks."""
    if options.get("engine") is not None:
        raise DatalensError("--engine dask has workers of its own: leave it out, or leave torchrun out")
    if options.get("skip_unreadable"):
        raise DatalensError("--skip-unreadable is for one process: leave torchrun out, or mend the images first")


def _ask(run: Run, s: MomentSettings, name: str, total: Callable[[], BoundedSum]) -> Released:
    """Return the value that was released before an interruption, or release it now.

    Args:
        name: of the release.
        total: computes the sum over records; called for a new release only.
    """
    step = RELEASES.index(name)
    answer = run.journal.find(run.ledger, step=step)
    if answer is None:
        if any(event.step == step for event in of_part(run.ledger.events, "")):
            say(
                f"warning: {name} was charged before, and an interruption lost its value: it stays charged, and the "
                "rest of the budget is divided anew among the releases still to come"
            )
        contributions = total()
        sigma = noise_for(name, s, run.ledger)
        law = s.noise if sigma > 0 else "gaussian"
        cells, threads = contributions.cells, side_by_side()
        with open_noise(law, sigma, draws=cells, seed=run.noise_seed, threads=threads) as noise:
            answer = make_mechanism(sigma, noise).release(contributions, run.ledger, step=step)
        run.journal.save(answer)
    run.log(step, sigma=answer.event.sigma)
    run.completed += 1
    return answer


def noise_for(name: str, s: MomentSettings, ledger: Ledger) -> float:
    """Return σ of the next release, from what the ledger has left of the budget (see `mu_squared_for`).

    Mu² adds up, however σ is chosen on the way. So a release that an interruption lost makes the others noisier, and
    the budget is not overspent. σ depends on public settings and the ledger alone.

    Raises:
        BudgetExceeded: too little is left for the release to be worth anything.
    """
    budget = s.own_budget(ledger.budget)
    if math.isinf(budget.epsilon):
        return 0.0
    mu_squared, planned = mu_squared_for(name, s, budget, of_part(ledger.events, ""))
    if mu_squared < LEAST_PART * planned:
        raise BudgetExceeded(
            f"interruptions have cost so much of {budget.describe(budget.epsilon)} that {name} would be mostly noise"
        )
    return sigma_for(name, s, budget, mu_squared)


def norm_edges(low: float, high: float, bins: int) -> Tensor:
    """Return the public edges of bins for norms, which grow by a constant factor.

    The first bin begins at 0, and the last has no upper end.
    """
    edges = torch.logspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
    edges[0] = 0.0
    return edges


def smallest_class(schema: Schema) -> float:
    """Return the smallest count by which the sums of a class are divided: a noisy count near 0 would blow noise up."""
    return max(released.LEAST_COUNT, schema.nominal_size / len(schema.classes) / 20)


def present_classes(counts: Tensor, noise: float, schema: Schema, ledger: Ledger) -> Tensor:
    """Return the classes whose noisy count stands out of the noise; the others are left out, with a warning.

    Args:
        counts: released counts [classes].
        noise: their standard deviation.

    Raises:
        DatalensError: no class stands out.
    """
    enough = counts > max(released.PRESENT * noise, released.LEAST_COUNT)
    if not bool(enough.any()):
        raise DatalensError(nothing_stands_out(schema, ledger))
    for label in torch.nonzero(~enough).flatten().tolist():
        say(f"warning: class {schema.classes[label]} has too few {_units(schema)} to stand out of the noise: left out")
    return torch.nonzero(enough).flatten()


def _units(schema: Schema) -> str:
    return "persons" if schema.by_person else "records"


def warn_of_rare(s: MomentSettings, schema: Schema, budget: Budget, counts: Tensor, present: Tensor) -> None:
    """Warn of classes whose images will be of little use, judged by released counts.

    Args:
        counts: released counts [classes].
        present: the classes that are not left out.
    """
    outlooks = s.outlook(schema, budget, counts.tolist())
    for label in present.tolist():
        if not outlooks[label].usable:
            one = outlooks[label]
            say(
                f"warning: class {schema.classes[label]} has about {round_number(float(counts[label]))} "
                f"{_units(schema)}, by the released count: {one.words}. What would help: {one.remedy} (another run "
                "costs more privacy)"
            )


MOMENTS = Method(
    settings=MomentSettings,
    plan=plan,
    gather=gather,
    train=train,
    follow=follow,
    options=Options,
    presets=("default",),
    persons=True,
)
