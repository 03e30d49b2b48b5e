"""The scale of ε that the studio shows: in words, in numbers, and in pictures of what it gave on known public sets."""

from dataclasses import dataclass
from typing import Any

from datalens.plans.guidance import belief

SCALE = (0.5, 1.0, 3.0, 10.0)
WORDS = {0.5: "very strong", 1.0: "strong", 3.0: "moderate", 10.0: "weak"}
SUSPECTED = (0.01, 0.1, 0.5)
DELTA = 1e-5
PICTURES = "pictures"  # a folder of templates/, drawn by tools/budgets.py


@dataclass(frozen=True, kw_only=True)
class Known:
    """A public set that the pictures are of. `few`: only so many of its images were used."""

    data: str
    title: str
    few: int | None = None

    @property
    def name(self) -> str:
        return self.data if self.few is None else f"{self.data}-{self.few}"


KNOWN = (
    Known(data="fashion-mnist", title="60,000 photographs of clothes"),
    Known(data="fashion-mnist", title="only 6,000 of them", few=6000),
)


def percent(value: float) -> str:
    """Format a belief, which is never certain."""
    return f"{100 * value:.1f} %" if value < 0.9995 else "over 99.9 %"


def files() -> tuple[str, ...]:
    """Return the names of all pictures."""
    real = {f"{known.data}-real.png": None for known in KNOWN}
    return (*real, *(f"{known.name}-{epsilon:g}.png" for known in KNOWN for epsilon in SCALE))


def rows() -> list[dict[str, Any]]:
    """Return what the page shows of each ε."""
    return [
        {
            "epsilon": epsilon,
            "word": WORDS[epsilon],
            "after": [(f"{100 * before:g}", percent(belief(before, epsilon))) for before in SUSPECTED],
            "pictures": [(f"{PICTURES}/{known.name}-{epsilon:g}.png", known.title) for known in KNOWN],
        }
        for epsilon in SCALE
    ]


def real() -> str:
    """Return the address of the picture of real images."""
    return f"{PICTURES}/{KNOWN[0].data}-real.png"
