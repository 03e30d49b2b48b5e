"""What happened, said completely in mathematics. What it costs is the accountant's business.

An event never carries a sensitivity that a caller chose: it carries the facts (whose row, how long a
row can be, how far two rows can be apart, which relation), and the sensitivity follows from them.

An event may name the part of the run that it pays for (`part`), where a run has several kinds of release: moments, then
sampled steps, then a published accuracy. The name has no price. Where it is empty it is not written, so that the lines
of a ledger with one kind of release are what they were before parts had names.
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

# From here on the discrete Gaussian is priced as a Gaussian of variance sigma² − 4, below as ρ-zCDP (docs/privacy.md).
LEAST_SMOOTH = 10.0
ROUNDING = 4.0  # the variance given away to rounding
# How far, in logarithms, a discrete Gaussian coordinate is from that rounded Gaussian: below 1.1e-34, proved there.
CLOSENESS = 2e-34

# Rounded to integers, float64 noise of this size still has its last digit; beyond, calibration makes no sense either.
MOST_NOISE = 2.0**40
LARGEST = 1e150  # squares of it are still numbers
# A longer number in a ledger would be room for something else.
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

    Formal guarantees: the release is mu-GDP with mu = sensitivity / sigma (Dong, Roth, Su 2019,
    Theorem 2.7), and (λ, λ·mu²/2)-RDP for every λ > 1 (DataLens, Theorem 2).

    | sigma | sensitivity | mu |
    |---|---|---|
    | 0 | > 0 | inf (a release without noise is priced, at infinity) |
    | any | 0 | 0 |
    """

    row_unit: RowUnit
    l2_bound: float  # the longest possible row
    diameter: float  # the largest distance between two possible rows
    relation: Relation
    sigma: float
    queries: int  # synthetic images whose directions this release holds
    step: int  # of its part
    noise: NoiseOrigin
    part: str = ""  # of the run, where it has several; steps are numbered within a part
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check(self, numbers=("l2_bound", "diameter", "sigma"), counts=("queries", "step"))
        # The zero row is always possible, so two rows can be a whole bound apart; and never more than two.
        if not self.l2_bound <= self.diameter <= 2 * self.l2_bound:
            raise TamperedError(f"rows of norm <= {self.l2_bound} cannot be just {self.diameter} apart at most")

    @property
    def sensitivity(self) -> float:
        """How far the sum can move, in l2, between neighbouring data sets.

        A record added to or removed from a teacher's share *replaces* that teacher's row: `diameter`.
        A record's or person's own row *appears or vanishes*: `l2_bound`. Under replace-one every
        row is replaced: `diameter`.
        """
        if self.relation == "add-remove" and self.row_unit != "teacher":
            return self.l2_bound
        return self.diameter

    @property
    def mu(self) -> float:
        """The release is post-processing of a Gaussian mechanism of this ratio of sensitivity to noise."""
        return _ratio(self.sensitivity, self.sigma)

    @property
    def rho(self) -> float:
        """The release is (λ, λ·rho)-RDP for every λ > 1, that is, rho-zCDP."""
        ratio = _ratio(self.sensitivity, self.sigma)
        return ratio * ratio / 2  # inf where it overflows, which ** is not

    @property
    def slack(self) -> float:
        """How far in logarithms the release is from what `mu` says."""
        return 0.0

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


def unprotected(relation: Relation, *, origin: NoiseOrigin = "operating-system", step: int = 0) -> GaussianEvent:
    """All there is to know of the records leaves without noise, as if it were a sum of them: priced at infinity."""
    bounds: dict[str, Any] = {
        "l2_bound": 1.0,
        "diameter": 2.0,
        "sigma": 0.0,
    }  # whatever the unit, the ratio is infinite
    return GaussianEvent(row_unit="record", relation=relation, queries=0, step=step, noise=origin, **bounds)


def confident_check(
    relation: Relation, queries: int, sigma: float, noise: NoiseOrigin, step: int, part: str = ""
) -> GaussianEvent:
    """What the check of so many queries is charged: each largest count moves by at most one."""
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
    """What so many answers are charged: two counts a query move by one each."""
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

    Formal guarantees: rho-zCDP with rho = sensitivity²/(2·sigma²), as if it were continuous (Canonne, Kamath,
    Steinke 2020, Theorem 4). The Gaussian's (ε, δ) curve at the same sigma does *not* hold. For sigma >= 10 the
    release is, up to e^±slack, post-processing of a Gaussian of variance sigma² − 4 (docs/privacy.md).
    """

    coordinates: int  # numbers released
    kind: ClassVar[str] = "discrete-gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, counts=("coordinates",))

    @property
    def smooth(self) -> bool:
        """Whether a Gaussian's price holds at all."""
        return self.sigma >= LEAST_SMOOTH

    @property
    def mu(self) -> float:
        if not self.smooth:  # whoever forgets to ask pays everything
            return math.inf if self.sensitivity > 0 else 0.0
        return _ratio(self.sensitivity, math.sqrt(self.sigma * self.sigma - ROUNDING))

    @property
    def slack(self) -> float:
        return CLOSENESS * self.coordinates


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussianEvent:
    """A sum over a Poisson sample of the units, each in it with probability `rate`, with N(0, sigma²) on every
    coordinate: `repeats` times, each with a sample and noise of its own. Add-remove only, one row of norm <= l2_bound
    per unit. Priced by RDP, PRV and PLD; not a Gaussian mechanism.

    A block of repeats may be charged before the first of them is done: what is charged ahead is never too little.
    """

    row_unit: RowUnit
    l2_bound: float
    rate: float
    relation: Relation
    sigma: float
    queries: int
    step: int  # of the first
    noise: NoiseOrigin
    repeats: int = 1
    part: str = ""
    kind: ClassVar[str] = "subsampled-gaussian"

    def __post_init__(self) -> None:
        _check(self, numbers=("l2_bound", "rate", "sigma"), counts=("queries", "step", "repeats"))
        if self.repeats < 1:
            raise TamperedError("an event happened at least once")
        if self.rate > 1:
            raise TamperedError(f"a sampling rate must lie between 0 and 1, not {self.rate}")
        if self.relation != "add-remove" or self.row_unit == "teacher":
            raise TamperedError("a subsampled event is about records or persons that are present or absent")

    @property
    def mu(self) -> float:
        """Of the unit that is in the sample; what sampling saves is the accountant's business."""
        return _ratio(self.l2_bound if self.rate > 0 else 0.0, self.sigma)

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LaplaceEvent:
    """Counts of ballots, each released once with discrete Laplace noise, P[z] proportional to exp(−|z|/scale).

    Formal guarantees: between neighbours at most `moved` counts change, by one each, and a whole-number noise of this
    law tells a count from the next one exactly as well as one answer of 1/scale-DP randomised response does. So the
    release is `moved` of those (Kairouz, Oh, Viswanath 2015), and moved/scale-DP.
    """

    row_unit: RowUnit
    moved: int  # counts in which two possible ballots can differ, by one each
    relation: Relation
    scale: float
    queries: int
    step: int
    noise: NoiseOrigin
    part: str = ""
    kind: ClassVar[str] = "discrete-laplace"

    def __post_init__(self) -> None:
        _check(self, numbers=("scale",), counts=("moved", "queries", "step"))
        if self.row_unit != "teacher":
            raise TamperedError("ballots are cast by teachers")

    @property
    def loss(self) -> float:
        """What one moved count costs, as pure ε."""
        return _ratio(1.0 if self.moved else 0.0, self.scale)

    @property
    def mu(self) -> float:
        """About the mu of a Gaussian that leaks as much, for a person: no price rests on it."""
        return self.loss * math.sqrt(self.moved) if self.moved else 0.0

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise."""
        return math.sqrt(0.5) / math.sinh(0.5 / self.scale) if self.scale > 1e-3 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class OneOfManyEvent:
    """`repeats` releases; for each, one of `teachers` units is chosen, evenly and in secret, and its row alone is
    released with N(0, sigma²) on every coordinate. A record changes one unit's row, at most by `diameter`.

    Priced by RDP and PLD as sampling without replacement of a replaced unit (docs/privacy.md); not a Gaussian
    mechanism, and not the Poisson-sampled one. Repeats and sampling are fixed beforehand.
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
            raise TamperedError("one of many is one of some teachers, each with a share of its own")

    @property
    def rate(self) -> float:
        return 1 / self.teachers

    @property
    def mu(self) -> float:
        """Of the unit that is chosen; what choosing saves is the accountant's business."""
        return _ratio(self.diameter, self.sigma)

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class UnknownEvent:
    """An event some other version wrote. Accountants refuse it: what is not understood is not priced."""

    kind: str


# What a ledger takes; the first holds the discrete ones too.
Charge = GaussianEvent | SubsampledGaussianEvent | OneOfManyEvent | LaplaceEvent
Event = Charge | UnknownEvent

_KINDS: dict[str, type[Charge]] = {
    cls.kind: cls
    for cls in (GaussianEvent, DiscreteGaussianEvent, SubsampledGaussianEvent, OneOfManyEvent, LaplaceEvent)
}


def parse_event(fields: dict[str, Any]) -> Event:
    """Read an event back from a ledger line. A malformed one is an error, never a cheaper event.

    Args:
        fields: What `as_dict` of an event gave. `part` is there only where it is not empty: one event has one spelling.

    Returns:
        The event; an `UnknownEvent` where its kind is not known.

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
        raise TamperedError("an event whose part has no name is written without that field")
    return _KINDS[kind](**given)


def of_part(events: Iterable[Event], part: str) -> list[Charge]:
    """Return the events of one part of a run, in their order; the part without a name is "".

    Args:
        events: All events of a ledger. Those of an unknown kind belong to no part.
        part: The name.
    """
    return [event for event in events if not isinstance(event, UnknownEvent) and event.part == part]


def check_part(name: object) -> None:
    """Refuse what cannot be the name of a part.

    Args:
        name: At most 40 letters (of ASCII), digits and hyphens; none at all where a run has one part.

    Raises:
        TamperedError: it is something else.
    """
    if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
        raise TamperedError(f"the part of an event is at most 40 letters, digits and hyphens, not {str(name)[:60]!r}")


def _fields(event: Charge) -> dict[str, Any]:
    """What is written of an event."""
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
