"""DataLens from private moments: every record is its own teacher, and says what it knows of its class's moments.

Eight releases through the same gate, ledger and accountant as votes. A record's row is one-hot(class) ⊗ a bounded
vector, or its outer product with itself: classes are disjoint, so all of them together are one release, with noise on
every cell. In this order, each from what was released before it:

| | release | of a record | norm of its row |
|---|---|---|---|
| 0 | histogram of norms | which bin the norm of its coordinates is in | grid |
| 1 | class sums and counts | its coordinates, clipped; and a count | grid |
| 2 | histogram of residual norms | the norm of its residual around the mean of 1 | grid |
| 3 | class covariances | residual ⊗ residual, clipped | grid² |
| 4-7 | the same of its texture | features, whitened by what images from 0-3 look like | as above |

Coordinates are low-frequency cosines; clip norms are quantiles of the histograms. Everything after a release is
post-processing (`released.moments`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from tyro.conf import arg

from datalens.bounded.contributions import BoundedSum
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.options import Noise, NoiseName, Number, WholeNumber
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
)
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.privacy.released import Released
from datalens.private.moments import RecordRows
from datalens.progress import say
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released import moments as released
from datalens.run.folder import Run

# The releases of a run from moments, in this order; its `shares` say what part of the budget each gets.
RELEASES = (
    *("norms", "sums", "residual-norms", "covariances"),
    *("texture-norms", "texture-sums", "texture-residual-norms", "texture-covariances"),
)

SIGMAS = 1e-6  # of σ: what rounding in other versions of the libraries may add where it follows from the budget
# Of the noise in class covariances by what it hides, and what is then to be seen.
SEEN = (
    (0.1, "how images of a class differ is heard well: expect varied images"),
    (0.5, "how images of a class differ is heard with noise: expect recognisable images, less varied than yours"),
    (1.5, "of how images of a class differ little is heard: expect images that look alike"),
)
NOTHING_ELSE = "how images of a class differ drowns in noise: expect about one blurred image a class"
NOISE_BY = (
    "noise of a bin by all records; of a class mean's coordinate by the clip norm; the largest eigenvalue of a class "
    "covariance's noise by the squared clip norm"
)


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parts of the budget are in proportion to the shares."""

    warm_start: Annotated[Literal["moments", "off"] | None, arg(help_behavior_hint="")] = None
    """off: teachers vote (TopAgg), which has options of its own (`--warm-start off --help`)."""
    coordinates: WholeNumber = None
    """Low-frequency coordinates of an image."""
    texture: WholeNumber = None
    """Coordinates of texture; 0: images without texture."""
    texture_steps: WholeNumber = None
    """Gradient steps that carry an image to its texture."""
    sums_quantile: Number = None
    """Class sums clip at this quantile of the norms, as released."""
    covariances_quantile: Number = None
    """Covariances clip at this quantile."""
    histogram_share: Number = None
    """Share of each histogram of norms."""
    sums_share: Number = None
    """Share of class sums."""
    covariances_share: Number = None
    """Share of class covariances."""
    texture_sums_share: Number = None
    """Share of the class sums of texture."""
    texture_covariances_share: Number = None
    """Share of its class covariances."""
    noise: Noise = None


@dataclass(frozen=True, kw_only=True)
class MomentSettings(Settings):
    """Everything a run from private moments does, resolved and public (see `methods.moments`)."""

    ZERO: ClassVar[tuple[str, ...]] = ("texture", "texture_steps")
    OMITTED: ClassVar[dict[str, Any]] = {"unit": "record"}
    one_part: ClassVar[bool] = True
    makes: ClassVar[Literal["generator", "moments", "classifier"]] = "moments"

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

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MomentSettings":
        settings: MomentSettings = checked(cls, fields, zero=cls.ZERO)
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

    def check(self, schema: Schema) -> None:
        check_moments(self, schema)

    # --- what it costs

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
            for line in self.costs(schema, budget)
        )

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
        records = schema.nominal_size / len(schema.classes)
        parts = []
        for name, part in self.releases.items():
            own = mu * math.sqrt(part)
            size = self.texture if name.startswith("texture") else self.coordinates
            slots = 1 if "norms" in name else len(schema.classes)
            bound = self.l2_bound(name)
            sensitivity = bound if budget.relation == "add-remove" else self.diameter(name)
            factor = sensitivity / bound
            if "norms" in name:  # of all records, in a bin
                cells, relative = self.bins, factor / own / schema.nominal_size
            elif name.endswith("sums"):  # of a class mean, in a coordinate, by its clip norm
                size = size if name == "sums" else Texture(schema.shape).size
                cells, relative = size + 1, factor / own / records
            else:  # the largest eigenvalue of noise alone, by the square of the clip norm
                cells, relative = size**2, factor * math.sqrt(2 * size) / own / records
            parts.append(cost(name, part, sensitivity / own if own else 0.0, sensitivity, slots * cells, relative))
        return parts

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        """Nothing: σ of a release follows from what is left, and was compared with that (`disagreements`)."""
        return []

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Which releases there can be, how long a record's row is in each, and how loud the noise."""
        found = []
        gaussian = [event for event in events if isinstance(event, GaussianEvent)]
        expected = {RELEASES.index(name): self.l2_bound(name) for name in self.releases}
        # Texture may be missing where an interruption had spent its part.
        if not {0, 1, 2, 3} <= {event.step for event in gaussian} <= set(expected) or len(gaussian) != len(events):
            return ["the ledger has other releases than the settings state"]
        if any(event.row_unit != self.unit or event.l2_bound != expected.get(event.step) for event in gaussian):
            found.append("the ledger was charged for rows of another length than the settings state")
        apart = {RELEASES.index(name): self.diameter(name) for name in self.releases}
        if any(event.diameter < apart.get(event.step, math.inf) for event in gaussian):
            found.append("the ledger has rows closer together than rows of these releases can be")
        slots = {RELEASES.index(name): 1 if "norms" in name else len(schema.classes) for name in self.releases}
        if any(event.queries != slots.get(event.step) for event in gaussian):
            found.append("the settings state another number of classes than the ledger")
        discrete = [event for event in gaussian if isinstance(event, DiscreteGaussianEvent)]
        if len(discrete) != (len(gaussian) if self.noise == "discrete-gaussian" else 0):
            found.append("the settings state another kind of noise than the ledger")
        cells = {RELEASES.index(line["release"]): line["cells"] for line in self.costs(schema, budget)}
        if any(event.coordinates != cells.get(event.step) for event in discrete):
            found.append("the settings state another number of coordinates than the ledger")
        if any((event.noise == "seeded") != self.noise_seeded for event in gaussian):
            found.append("the settings are wrong about whether the noise was seeded")
        return found + self._wrong_noise(budget, gaussian)

    def _wrong_noise(self, budget: Budget, events: list[GaussianEvent]) -> list[str]:
        """σ of every release follows from the settings, the budget and the charges before it."""
        for number, event in enumerate(events):
            name = RELEASES[event.step]
            expected = 0.0
            if math.isfinite(budget.epsilon):
                mu_squared, _ = mu_squared_for(name, self, budget, events[:number])
                expected = sigma_for(name, self, budget, mu_squared) if mu_squared > 0 else math.inf
            if not math.isclose(event.sigma, expected, rel_tol=SIGMAS):
                said = f"sigma {event.sigma:.6g} for {name}, settings and budget make it {expected:.6g}"
                return [f"the ledger has {said}"]
        return []

    def wrong_weights(self, model: released.MomentModel, events: Sequence[Charge]) -> list[str]:
        found = []
        if model.start.means.shape[1] != self.coordinates:
            found.append("the weights have another number of coordinates than the settings state")
        if model.steps == 0:
            return found
        if (model.steps, model.maps.shape[-1]) != (self.texture_steps, self.texture):
            found.append("the weights have another texture than the settings state")
        if not {4, 5, 6, 7} <= {event.step for event in known(events)}:
            found.append("the weights have texture, and the ledger no charges for it")
        return found

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
        noisy = law_said(self) if math.isfinite(budget.epsilon) else "no noise"
        return (
            f"{self.method} [{self.preset}, from private moments] on {schema.name}: {self.coordinates} coordinates, "
            f"{self.texture} of texture, {noisy}"
        )

    def planned_as(self) -> str:
        return "from private moments"

    @property
    def step_name(self) -> str:
        return "releases"

    @property
    def one_process(self) -> str:
        return "private moments are summed by one process, in seconds: leave torchrun out, or add --warm-start off"

    @property
    def signal(self) -> str:
        return NOISE_BY

    def release_name(self, event: Charge) -> str | None:
        return RELEASES[event.step].replace("-", " ")

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        """Every release has its own σ; the ledger names them."""
        return {"warm_start": "moments", "sigma": None}

    def expect(self, schema: Schema, budget: Budget) -> list[str]:
        parts = {part["release"]: part for part in self.costs(schema, budget)}
        records = schema.nominal_size / len(schema.classes)
        counts = parts["sums"]["sigma"] / self.counted
        loudest = parts["covariances"]["noise_to_signal"]
        words = next((said for limit, said in SEEN if loudest < limit), NOTHING_ELSE)
        return [
            f"the number of records of a class is known to about ±{counts:.2g}, of about {records:.3g}",
            f"a class mean is known to {parts['sums']['noise_to_signal']:.2g} of the clip norm a coordinate; {words}",
        ]

    def warnings(self, schema: Schema, budget: Budget) -> list[str]:
        if why := self.refusal(schema, budget):
            return [why]
        records, least = schema.nominal_size / len(schema.classes), self._least_class(schema, budget)
        if records >= least:
            return []
        return [
            f"a class has about {records:.3g} records, and one with less than {least:.3g} is left out: "
            "raise --epsilon, bring more records, or make fewer classes of them"
        ]

    def refusal(self, schema: Schema, budget: Budget) -> str | None:
        least = self._least_class(schema, budget)
        if schema.nominal_size >= least:
            return None
        return (
            f"there are about {schema.nominal_size} records, and a class with less than {least:.3g} is left out: raise "
            "--epsilon, or bring more records"
        )

    def _least_class(self, schema: Schema, budget: Budget) -> float:
        """How many records a class must have, or it is left out (see `present_classes`)."""
        sums = next(part for part in self.costs(schema, budget) if part["release"] == "sums")
        return max(4 * sums["sigma"] / self.counted, 20)


# --- noise: a function of settings, budget and charges before it, no more ---------------------------------------------


def sensitivity(name: str, s: MomentSettings, budget: Budget) -> float:
    """How far one record moves the sum (checked again by the event that is charged)."""
    return s.l2_bound(name) if budget.relation == "add-remove" else s.diameter(name)


def mu_squared_for(name: str, s: MomentSettings, budget: Budget, charged: Sequence[Event]) -> tuple[float, float]:
    """Return mu² of the next release, and of one before anything was lost.

    It is the release's part of what the budget has left, by the parts of the releases still to come.
    """
    pricing = budget.pricing()
    whole = pricing.mu_budget(budget.epsilon, budget.delta) ** 2
    left = whole - pricing.mu_squared(charged)
    parts = s.releases
    coming = sum(part for other, part in parts.items() if RELEASES.index(other) >= RELEASES.index(name))
    return left * (1 - 1e-6) * parts[name] / coming, whole * parts[name]


def sigma_for(name: str, s: MomentSettings, budget: Budget, mu_squared: float) -> float:
    """Return the noise with which a release has this mu²."""
    variance = sensitivity(name, s, budget) ** 2 / mu_squared
    return math.sqrt(variance + (ROUNDING if s.noise == "discrete-gaussian" else 0.0))


# --- the plan: one rule for every data set (docs/utility.md says how it was found) ------------------------------------

MOST_COORDINATES, LEAST_COORDINATES = 196, 64
MOST_CELLS = 2**20  # of class covariances: each needs a draw of noise
GRID = 2**14
SMALLEST_MU = 2 * GRID**2 / MOST_NOISE  # of a release: below, its noise would be larger than any that is drawn
RELEASE_SHARES = {
    "histogram_share": 0.005,
    "sums_share": 0.06,
    "covariances_share": 0.38,
    "texture_sums_share": 0.05,
    "texture_covariances_share": 0.49,
}
# Where the noise leaves room for hardly any coordinates, nothing about texture could be heard, and class means and
# counts are most of what can be known.
HARDLY_ANY, SCARCE = 16, {"texture": 0, "sums_share": 0.6}


def plan(request: Request, schema: Schema, budget: Budget) -> MomentSettings:
    """Fix every setting: as many coordinates as the noise leaves room for; all else is the same for all data."""
    options: Options = request.options
    check_exact_noise(request)
    exact = can_be_exact(request) and math.isfinite(budget.epsilon)
    records = schema.nominal_size / len(schema.classes)
    mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
    if mu * math.sqrt(RELEASE_SHARES["covariances_share"]) < SMALLEST_MU:
        raise BudgetExceeded(
            f"no noise is large enough for {budget.describe(budget.epsilon)}: raise --epsilon, or use --accountant "
            "exact"
        )
    room, heard = min(MOST_COORDINATES, math.isqrt(MOST_CELLS // len(schema.classes))), 0.12 * mu * records
    size = int(min(room, max(LEAST_COORDINATES, heard)))
    values: dict[str, Any] = RELEASE_SHARES | {
        "coordinates": min(size, schema.dimensions),
        "texture": min(size, Texture(schema.shape).size),
        "sums_quantile": 0.9,
        "covariances_quantile": 0.5,
        "texture_steps": 12,
    }
    if heard < HARDLY_ANY:
        values |= SCARCE
    overrides = Options.__dataclass_fields__.keys() - {"warm_start", "noise"}
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
    """Raise DatalensError if no run can be done with these settings."""
    most = math.isqrt(MOST_CELLS // len(schema.classes))  # or noise would take hours to draw
    for name, there in (("coordinates", schema.dimensions), ("texture", Texture(schema.shape).size)):
        asked, least = getattr(settings, name), 0 if name == "texture" else 1
        if not least <= asked <= min(there, most):
            raise DatalensError(f"--{name} must be between {least} and {min(there, most)} for this data, not {asked}")
    if settings.texture > 0 and settings.texture_steps < 1:
        raise DatalensError(f"--texture-steps must be at least 1, not {settings.texture_steps}: or use --texture 0")
    for name in ("sums_quantile", "covariances_quantile"):
        if not 0 < getattr(settings, name) <= 1:
            raise DatalensError(f"--{name.replace('_', '-')} must lie in (0, 1], not {getattr(settings, name)}")
    for name in RELEASE_SHARES:
        if not 1e-6 < getattr(settings, name) < 1e6:
            raise DatalensError(f"--{name.replace('_', '-')} must be above 0, not {getattr(settings, name)}")


# --- the releases, and the generator that follows from them -----------------------------------------------------------

LEAST_PART = 0.25  # of what was planned for a release: with less it would be noise

Ask = Callable[[str, Callable[[], BoundedSum]], Released]


def train(run: Run, records: RecordRows, settings: MomentSettings, place: Place) -> released.MomentModel:
    """All releases, and the generator that follows from them."""
    s, schema = settings, run.schema
    classes, floor = len(schema.classes), smallest_class(schema)
    grid = {"grid": s.grid}
    counting = {"grid": s.grid, "counted": s.counted}
    with run.watched("private moments", len(s.releases)) as seen:

        def ask(name: str, total: Callable[[], BoundedSum]) -> Released:
            answer = _ask(run, s, name, total)
            seen.done(run.completed)
            return answer

        view = records.coordinates
        brightest = math.sqrt(schema.dimensions)  # no image is longer
        edges = norm_edges(brightest / 64, brightest, s.bins)
        norms = ask("norms", lambda: records.histogram(view, means=None, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.sums_quantile)
        sums = ask("sums", lambda: records.sums(view, clip=clip, classes=classes, **counting))
        means, counts = released.class_means(sums, clip=clip, floor=floor, **counting)
        present = present_classes(counts, sums.event.sigma / s.counted, schema, run.ledger)

        norms = ask("residual-norms", lambda: records.histogram(view, means=means, edges=edges, **grid))
        clip = released.quantile_edge(norms, edges, s.covariances_quantile)
        try:
            outer = ask("covariances", lambda: records.covariances(view, means=means, clip=clip, **grid))
            covariances = released.class_covariances(outer, counts, clip=clip, floor=floor, **grid)
            further = s.texture > 0
        except BudgetExceeded as error:
            say(f"warning: {error}; images differ from their class's mean as far as records do, but at random")
            covariances, further = released.round_covariances(means, clip=clip), False
        start = released.make_start(schema.shape, means, covariances)
        if not further:
            return released.without_texture(start, present, counts)

        try:
            return _with_texture(start, records, s, schema, ask, present=present, counts=counts)
        except BudgetExceeded as error:
            say(f"warning: {error}; images are made without texture")
            return released.without_texture(start, present, counts)


def _with_texture(
    start: released.Start,
    records: RecordRows,
    s: MomentSettings,
    schema: Schema,
    ask: Ask,
    *,
    present: Tensor,
    counts: Tensor,
) -> released.MomentModel:
    """Releases 4-7: the moments of texture, in coordinates in which that of the first images is even."""
    floor = smallest_class(schema)
    whitening = released.make_whitening(start, present, s.seed)
    view = partial(records.texture, centre=whitening.centre, white=whitening.matrix)
    usual = whitening.norms(0.5)
    edges = norm_edges(usual / 8, usual * 8, s.bins)
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


def gather(records: Records, settings: MomentSettings, place: Place) -> RecordRows:
    """Every record's rows, as whole numbers."""
    shape = records.schema.shape
    basis = make_basis("opponent", shape, settings.coordinates)
    return RecordRows.gather(records, basis=basis, texture=Texture(shape))


def _ask(run: Run, s: MomentSettings, name: str, total: Callable[[], BoundedSum]) -> Released:
    """What was released before an interruption, or a new release; σ from what is left of the budget."""
    step = RELEASES.index(name)
    found = run.journal.find(run.ledger, step=step)
    if found is None:
        if any(getattr(event, "step", None) == step for event in run.ledger.events):
            say(
                f"warning: {name} was charged before, and an interruption lost its value: it stays charged, and what "
                "is left of the budget is divided anew among what is still to be released"
            )
        contributions = total()
        sigma = noise_for(name, s, run.ledger)
        law = s.noise if sigma > 0 else "gaussian"
        with open_noise(law, sigma, draws=contributions.cells, seed=run.noise_seed) as noise:
            found = make_mechanism(sigma, noise).release(contributions, run.ledger, step=step)
        run.journal.save(found)
    run.log(step, sigma=found.event.sigma)
    run.completed += 1
    return found


def noise_for(name: str, s: MomentSettings, ledger: Ledger) -> float:
    """σ of a release: its part of what the ledger has left, by the parts of the releases still to come.

    Mu² adds up, whatever σ is chosen on the way, so a release that an interruption lost makes the others noisier
    and overspends nothing. It depends on the ledger alone.
    """
    budget = ledger.budget
    if math.isinf(budget.epsilon):
        return 0.0
    mu_squared, planned = mu_squared_for(name, s, budget, ledger.events)
    if mu_squared < LEAST_PART * planned:
        raise BudgetExceeded(
            f"of {budget.describe(budget.epsilon)} an interruption has cost too much to release {name} in earnest"
        )
    return sigma_for(name, s, budget, mu_squared)


def norm_edges(low: float, high: float, bins: int) -> Tensor:
    """Public bins for norms, growing by a constant factor; the first begins at 0, the last has no end."""
    edges = torch.logspace(math.log10(low), math.log10(high), bins + 1, dtype=torch.float64)
    edges[0] = 0.0
    return edges


def smallest_class(schema: Schema) -> float:
    """A count no class is taken to be below when its sums are divided: noise stays noise, it does not explode."""
    return max(released.LEAST_COUNT, schema.nominal_size / len(schema.classes) / 20)


def present_classes(counts: Tensor, noise: float, schema: Schema, ledger: Ledger) -> Tensor:
    """Classes whose noisy count stands out of the noise; the others are left out of the synthetic set, and named."""
    enough = counts > max(released.PRESENT * noise, released.LEAST_COUNT)
    if not bool(enough.any()):
        raise DatalensError(nothing_stands_out(schema, ledger))
    for label in torch.nonzero(~enough).flatten().tolist():
        say(f"warning: class {schema.classes[label]} has too few records to say anything of: it is left out")
    return torch.nonzero(enough).flatten()


MOMENTS = Method(
    settings=MomentSettings,
    plan=plan,
    gather=gather,
    train=train,
    options=Options,
    presets=("default",),
    persons=True,
)
