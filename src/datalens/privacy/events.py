"""What happened, said completely in mathematics. What it costs is the accountant's business.

An event never carries a sensitivity that a caller chose: it carries the facts (whose row, how long a
row can be, how far two rows can be apart, which relation), and the sensitivity follows from them.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from datalens.errors import TamperedError

Relation = Literal["add-remove", "replace-one"]
RowUnit = Literal["teacher", "record", "person"]
NoiseOrigin = Literal["operating-system", "seeded"]

LARGEST = 1e150  # squares of it are still numbers

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
    step: int
    noise: NoiseOrigin

    def __post_init__(self) -> None:
        for name in ("l2_bound", "diameter", "sigma"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < LARGEST:
                raise TamperedError(f"an event's {name} must be a number from 0 to {LARGEST:g}, not {str(value)[:40]}")
        # The zero row is always possible, so two rows can be a whole bound apart; and never more than two.
        if not self.l2_bound <= self.diameter <= 2 * self.l2_bound:
            raise TamperedError(f"rows of norm <= {self.l2_bound} cannot be just {self.diameter} apart at most")
        for name in ("queries", "step"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise TamperedError(f"an event's {name} must be a whole number >= 0, not {value!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise TamperedError(
                    f"an event's {name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )

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
        if self.sensitivity == 0:
            return 0.0
        return math.inf if self.sigma == 0 else self.sensitivity / self.sigma

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "gaussian", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class UnknownEvent:
    """An event some other version wrote. Accountants refuse it: what is not understood is not priced."""

    kind: str


Event = GaussianEvent | UnknownEvent


def parse_event(fields: dict[str, Any]) -> Event:
    """Read an event back from a ledger line. A malformed one is an error, never a cheaper event."""
    kind = fields.get("kind")
    if kind != "gaussian":
        return UnknownEvent(kind=str(kind))
    given = {name: value for name, value in fields.items() if name != "kind"}
    expected = set(GaussianEvent.__dataclass_fields__)
    if set(given) != expected:
        raise TamperedError(f"a gaussian event must have the fields {', '.join(sorted(expected))}")
    return GaussianEvent(**given)
