"""Privacy events: complete mathematical descriptions of releases. Their price is computed by an `Accountant`.

An event never carries a sensitivity that a caller chose. It carries the facts (the privacy unit, the longest possible
row, the largest distance between two rows, the neighbouring relation), and the sensitivity follows from them.

Where a run has several kinds of release (moments, then sampled steps, then a published accuracy), an event names the
part of the run that it belongs to (`part`). The name does not affect the price. An empty name is not written, so that
the ledger lines of a run with one kind of release are the same as before parts had names.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from datalens.errors import TamperedError

Relation = Literal["add-remove", "replace-one"]
RowUnit = Literal["teacher", "record", "person"]
NoiseOrigin = Literal["operating-system", "seeded"]
NoiseLaw = Literal["gaussian", "discrete-gaussian"]

# From this sigma on the discrete Gaussian is priced as a Gaussian of variance sigma² − 4; below it, as ρ-zCDP
# (docs/privacy.md).
LEAST_SMOOTH = 10.0
ROUNDING = 4.0  # the variance lost to rounding in that comparison
# Distance in logarithms between a discrete Gaussian coordinate and that rounded Gaussian: proved to be below 1.1e-34.
CLOSENESS = 2e-34

# float64 noise of this size is still exact to a whole number; beyond it calibration makes no sense either.
MOST_NOISE = 2.0**40
LARGEST = 1e150  # its square does not overflow
# A longer number in a ledger line could hide something else.
MOST_COUNT, MOST_COORDINATES = 2**62, 10**36

_PART_NAME = re.compile(r"[A-Za-z0-9-]{0,40}")

_CHOICES: dict[str, tuple[str, ...]] = {
    "row_unit": ("teacher", "record", "person"),
    "relation": ("add-remove", "replace-one"),
    "noise": ("operating-system", "seeded"),
}


@dataclass(frozen=True, kw_only=True)
class GaussianEvent:
    """A sum of rows, one row per privacy unit, released once with N(0, sigma²) on every coordinate.

    Formal guarantees: the release is mu-GDP with mu = sensitivity / sigma (Dong, Roth, Su 2019, Theorem 2.7), and
    (λ, λ·mu²/2)-RDP for every λ > 1 (DataLens, Theorem 2).

    | sigma | sensitivity | mu |
    |---|---|---|
    | 0 | > 0 | inf (a release without noise has an infinite price) |
    | any | 0 | 0 |

    Raises:
        TamperedError: a field has an impossible value.
    """

    row_unit: RowUnit
    l2_bound: float  # the longest possible row
    diameter: float  # the largest distance between two possible rows
    relation: Relation
    sigma: float
    queries: int  # synthetic images whose directions this release holds
    step: int  # number of the step within its part
    noise: NoiseOrigin
    part: str = ""  # name of the part, where the run has several
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check(self, numbers=("l2_bound", "diameter", "sigma"), counts=("queries", "step"))
        # The zero row is always possible, so two rows can be one bound apart, and never more than two bounds.
        if not self.l2_bound <= self.diameter <= 2 * self.l2_bound:
            raise TamperedError(f"rows of norm <= {self.l2_bound} cannot be just {self.diameter} apart at most")

    @property
    def sensitivity(self) -> float:
        """The l2 sensitivity: the largest distance between the sums of two neighbouring data sets.

        A record added to or removed from a teacher's share *replaces* that teacher's row: `diameter`. A record's or
        person's own row *appears or vanishes*: `l2_bound`. Under replace-one a row is always replaced: `diameter`.
        """
        if self.relation == "add-remove" and self.row_unit != "teacher":
            return self.l2_bound
        return self.diameter

    @property
    def mu(self) -> float:
        """The GDP parameter: the release is post-processing of a Gaussian mechanism with sensitivity/sigma = mu."""
        return _ratio(self.sensitivity, self.sigma)

    @property
    def rho(self) -> float:
        """The zCDP parameter: the release is (λ, λ·rho)-RDP for every λ > 1."""
        ratio = _ratio(self.sensitivity, self.sigma)
        return ratio * ratio / 2  # overflows to inf, where ** raises

    @property
    def slack(self) -> float:
        """Distance in logarithms between the density of the release and that of the mechanism that `mu` describes."""
        return 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the event as its ledger line has them."""
        return _fields(self)


def unprotected(relation: Relation, *, origin: NoiseOrigin = "operating-system", step: int = 0) -> GaussianEvent:
    """Return the event of a release without any noise, whose price is infinite.

    Args:
        relation: Relation of the ledger.
        origin: Noise origin that the event states.
        step: Number of the step.
    """
    bounds: dict[str, Any] = {
        "l2_bound": 1.0,
        "diameter": 2.0,
        "sigma": 0.0,
    }  # with sigma 0 the price is infinite, whatever the bounds
    return GaussianEvent(row_unit="record", relation=relation, queries=0, step=step, noise=origin, **bounds)


def confident_check(
    relation: Relation, queries: int, sigma: float, noise: NoiseOrigin, step: int, part: str = ""
) -> GaussianEvent:
    """Return the event of Confident-GNMax's threshold check: the largest count of each query moves by at most one.

    Args:
        relation: Relation of the ledger.
        queries: Number of queries that are checked.
        sigma: Standard deviation of the noise.
        noise: Origin of the noise.
        step: Number of the step.
        part: Name of the part of the run.
    """
    moved = math.sqrt(queries)
    return GaussianEvent(
        row_unit="teacher",
        l2_bound=moved,
        diameter=moved,
        relation=relation,
        sigma=sigma,
        queries=queries,
        step=step,
        noise=noise,
        part=part,
    )


def confident_answer(
    relation: Relation, queries: int, sigma: float, noise: NoiseOrigin, step: int, part: str = ""
) -> GaussianEvent:
    """Return the event of Confident-GNMax's answers: two counts per query move by at most one each.

    Args:
        relation: Relation of the ledger.
        queries: Number of queries that are answered.
        sigma: Standard deviation of the noise.
        noise: Origin of the noise.
        step: Number of the step.
        part: Name of the part of the run.
    """
    return GaussianEvent(
        row_unit="teacher",
        l2_bound=math.sqrt(queries),
        diameter=math.sqrt(2 * queries),
        relation=relation,
        sigma=sigma,
        queries=queries,
        step=step,
        noise=noise,
        part=part,
    )


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianEvent(GaussianEvent):
    """A sum of integer rows, released once with the exact discrete Gaussian N_Z(0, sigma²) on every coordinate.

    Formal guarantees: rho-zCDP with rho = sensitivity²/(2·sigma²), as for the continuous Gaussian (Canonne, Kamath,
    Steinke 2020, Theorem 4). The Gaussian's (ε, δ) curve at the same sigma does *not* hold. For sigma >= 10 the
    release is, up to e^±slack, post-processing of a Gaussian of variance sigma² − 4 (docs/privacy.md).
    """

    coordinates: int  # how many numbers are released
    kind: ClassVar[str] = "discrete-gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, counts=("coordinates",))

    @property
    def smooth(self) -> bool:
        """Whether the event may be priced as a Gaussian, by `mu` and `slack`."""
        return self.sigma >= LEAST_SMOOTH

    @property
    def mu(self) -> float:
        if not self.smooth:  # a caller that did not check `smooth` gets the highest price
            return math.inf if self.sensitivity > 0 else 0.0
        return _ratio(self.sensitivity, math.sqrt(self.sigma * self.sigma - ROUNDING))

    @property
    def slack(self) -> float:
        """The amount added to δ, since discrete noise is close to Gaussian noise, but not equal to it."""
        return CLOSENESS * self.coordinates


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussianEvent:
    """Noisy sums over Poisson samples of the units, `repeats` times.

    Each sum is over a fresh sample, which holds each unit with probability `rate`, and gets fresh noise N(0, sigma²) on
    every coordinate. Add-remove only; one row of norm <= l2_bound per unit. Not a Gaussian mechanism: priced by RDP,
    PRV and PLD.

    A block of repeats may be charged before the first of them is made: charging ahead never charges too little.
    """

    row_unit: RowUnit
    l2_bound: float
    rate: float
    relation: Relation
    sigma: float
    queries: int
    step: int  # number of the first repeat
    noise: NoiseOrigin
    repeats: int = 1
    part: str = ""
    kind: ClassVar[str] = "subsampled-gaussian"

    def __post_init__(self) -> None:
        _check(self, numbers=("l2_bound", "rate", "sigma"), counts=("queries", "step", "repeats"))
        if self.repeats < 1:
            raise TamperedError("the repeats of an event must be at least 1")
        if self.rate > 1:
            raise TamperedError(f"a sampling rate must lie between 0 and 1, not {self.rate}")
        if self.relation != "add-remove" or self.row_unit == "teacher":
            raise TamperedError("a subsampled event must be of records or persons, under add-remove")

    @property
    def mu(self) -> float:
        """Mu of one repeat for a unit that is in the sample. Accountants add the effect of sampling."""
        return _ratio(self.l2_bound if self.rate > 0 else 0.0, self.sigma)

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LaplaceEvent:
    """Counts of ballots, each released once with discrete Laplace noise, P[z] proportional to exp(−|z|/scale).

    Formal guarantees: between neighbours at most `moved` counts change, by one each. With this noise, two counts that
    differ by one are exactly as distinguishable as the two answers of 1/scale-DP randomised response. So the release is
    equivalent to `moved` of these (Kairouz, Oh, Viswanath 2015), and is moved/scale-DP.
    """

    row_unit: RowUnit
    moved: int  # counts in which the sums of two neighbouring data sets can differ, by one each
    relation: Relation
    scale: float
    queries: int
    step: int
    noise: NoiseOrigin
    part: str = ""
    kind: ClassVar[str] = "discrete-laplace"

    def __post_init__(self) -> None:
        _check(self, numbers=("scale",), counts=("moved", "queries", "step"))

    @property
    def loss(self) -> float:
        """Pure ε of one count that moves by one."""
        return _ratio(1.0 if self.moved else 0.0, self.scale)

    @property
    def mu(self) -> float:
        """Mu of a Gaussian mechanism that leaks about as much. For display: no price depends on it."""
        return self.loss * math.sqrt(self.moved) if self.moved else 0.0

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise."""
        return math.sqrt(0.5) / math.sinh(0.5 / self.scale) if self.scale > 1e-3 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class OneOfManyEvent:
    """Noisy rows of single units that are chosen at random and in secret, `repeats` times.

    For each release one of `teachers` units is chosen uniformly, and its row alone is released with N(0, sigma²) on
    every coordinate. A record changes one unit's row, by at most `diameter`.

    Not a Gaussian mechanism, and not the Poisson-sampled one: priced by RDP and PLD as sampling without replacement of
    a replaced unit (docs/privacy.md). The repeats and the sampling rate must be fixed beforehand.
    """

    row_unit: RowUnit
    l2_bound: float
    diameter: float
    teachers: int
    relation: Relation
    sigma: float
    repeats: int
    queries: int
    step: int
    noise: NoiseOrigin
    part: str = ""
    kind: ClassVar[str] = "one-of-many-gaussian"

    def __post_init__(self) -> None:
        _check(self, numbers=("l2_bound", "diameter", "sigma"), counts=("teachers", "repeats", "queries", "step"))
        if not self.l2_bound <= self.diameter <= 2 * self.l2_bound:
            raise TamperedError(f"rows of norm <= {self.l2_bound} cannot be just {self.diameter} apart at most")
        if self.teachers < 1 or self.row_unit != "teacher":
            raise TamperedError("a one-of-many event must be of teachers, and of at least one")

    @property
    def rate(self) -> float:
        """Probability with which a given unit is chosen."""
        return 1 / self.teachers

    @property
    def mu(self) -> float:
        """Mu of one repeat for the unit that is chosen. Accountants add the effect of the choice."""
        return _ratio(self.diameter, self.sigma)

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class UnknownEvent:
    """An event of a kind that this version does not know. Accountants refuse to price it."""

    kind: str


# Events that a ledger can be charged. (`DiscreteGaussianEvent` is a subclass of the first.)
Charge = GaussianEvent | SubsampledGaussianEvent | OneOfManyEvent | LaplaceEvent
Event = Charge | UnknownEvent

_KINDS: dict[str, type[Charge]] = {
    cls.kind: cls
    for cls in (GaussianEvent, DiscreteGaussianEvent, SubsampledGaussianEvent, OneOfManyEvent, LaplaceEvent)
}


def parse_event(fields: dict[str, Any]) -> Event:
    """Read an event back from the fields of a ledger line. A malformed event is an error, never a cheaper event.

    Args:
        fields: The result of an event's `as_dict`. `part` is present only if it is not empty, so that an event can be
            written in one way only.

    Returns:
        The event, or an `UnknownEvent` if its kind is not known.

    Raises:
        TamperedError: a field is missing, is not known or has an impossible value.
    """
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        return UnknownEvent(kind=str(kind))
    given = {name: value for name, value in fields.items() if name != "kind"}
    expected = set(_KINDS[kind].__dataclass_fields__) - {"kind", "part"}
    if set(given) - {"part"} != expected:
        raise TamperedError(f"a {kind} event must have the fields {', '.join(sorted(expected))}")
    if given.get("part") == "":
        raise TamperedError("an event with an empty part must be written without that field")
    return _KINDS[kind](**given)


def of_part(events: Iterable[Event], part: str) -> list[Charge]:
    """Return the events of one part of a run, in their order.

    Args:
        events: All events of a ledger. Those of an unknown kind belong to no part.
        part: Name of the part; "" for the part without a name.
    """
    return [event for event in events if not isinstance(event, UnknownEvent) and event.part == part]


def check_part(name: object) -> None:
    """Raise if this cannot be the name of a part.

    Args:
        name: At most 40 ASCII letters, digits and hyphens; empty where a run has one part.

    Raises:
        TamperedError: it is something else.
    """
    if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
        raise TamperedError(f"the part of an event is at most 40 letters, digits and hyphens, not {str(name)[:60]!r}")


def _fields(event: Charge) -> dict[str, Any]:
    """Return the fields of an event as a ledger line has them: without `part` where it is empty."""
    fields = {"kind": event.kind, **asdict(event)}
    return fields if event.part else {name: value for name, value in fields.items() if name != "part"}


def _ratio(sensitivity: float, sigma: float) -> float:
    if sensitivity == 0:
        return 0.0
    return math.inf if sigma == 0 else sensitivity / sigma


def _check(event: Charge, *, numbers: tuple[str, ...] = (), counts: tuple[str, ...] = ()) -> None:
    for name in numbers:
        value = getattr(event, name)
        if type(value) not in (int, float) or not 0 <= value < LARGEST:
            raise TamperedError(f"an event's {name} must be a number from 0 to {LARGEST:g}, not {str(value)[:40]}")
    for name in counts:
        value = getattr(event, name)
        most = MOST_COORDINATES if name == "coordinates" else MOST_COUNT
        if type(value) is not int or not 0 <= value < most:
            raise TamperedError(f"an event's {name} must be a whole number from 0 to {most:g}, not {str(value)[:40]}")
    for name, allowed in _CHOICES.items():
        if getattr(event, name) not in allowed:
            raise TamperedError(f"an event's {name} must be one of {', '.join(allowed)}, not {getattr(event, name)!r}")
    check_part(event.part)
