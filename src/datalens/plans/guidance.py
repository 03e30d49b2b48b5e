"""Warnings for the owner of the data, whatever the method. All but `nothing_stands_out` need public facts alone."""

import math

from datalens.data.schema import Schema
from datalens.plans.base import Settings
from datalens.privacy.ledger import Budget, Ledger

SMALL_SHARE = 5  # records: a teacher learns hardly anything from fewer


def warnings(budget: Budget, schema: Schema, settings: Settings) -> list[str]:
    """Return warnings about weak budgets and about shares that are too small, and those of the method."""
    lines = []
    teachers = getattr(settings, "teachers", 0)
    if schema.nominal_size < SMALL_SHARE * teachers:
        lines.append(
            f"{teachers} teachers have shares of about {schema.nominal_size / teachers:.1f} records each, which is too "
            f"few to learn from; choose --teachers under {max(1, schema.nominal_size // SMALL_SHARE)}"
        )
    return lines + budget_warnings(budget, schema.nominal_size) + settings.warnings(schema, budget)


# Up to each ε, what a guarantee is called (docs/steward.md has the numbers); above the last one it is weak.
GRADES = ((1.5, "strong"), (4.0, "moderate"))


def grade(epsilon: float) -> str:
    """Return what a guarantee of this ε is called: strong, moderate or weak."""
    return next((word for limit, word in GRADES if epsilon <= limit), "weak")


def belief(before: float, epsilon: float) -> float:
    """Return the strongest belief that a suspicion can become, except with a probability of about δ.

    Examples:
        >>> round(belief(0.1, 1.0), 3)
        0.232
    """
    return before / (before + (1 - before) * math.exp(-min(epsilon, 700.0)))


def worth(epsilon: float) -> str:
    """Return in words what a guarantee of this ε is worth."""
    if math.isinf(epsilon):
        return ""
    shown = min(99.9, math.ceil(1000 * belief(0.1, epsilon)) / 10)
    most = "almost a certainty" if shown >= 99.9 else f"at most {shown:g} %"
    return f"That is a {grade(epsilon)} guarantee: a suspicion of 10 % can become {most}."


def nothing_stands_out(schema: Schema, ledger: Ledger) -> str:
    """Return the error message for a run that ends because its first releases, already charged, show no class."""
    spent = ledger.budget.describe(ledger.spent())
    return (
        f"no class of {schema.name} stands out of the noise, and this run ends here; {spent} is spent. Begin another "
        f"with more --epsilon or more records; or --nominal-size is wrong: are there about {schema.nominal_size}?"
    )


def read_off_warnings(schema: Schema) -> list[str]:
    """Return a warning about facts that were read off the data: the release states them, and no noise protects them."""
    if not schema.read_off:
        return []
    return [
        f"read off the data of {schema.name}, and so declared public: {schema.given}. A single record can change this: "
        "the only record of a class reveals itself by the name of the class. The guarantee holds only if these facts "
        "may be public. To declare them without reading the data, pass classes= and nominal_size= in Python, or "
        "--classes, --image-size and --grayscale (docs/data.md)"
    ]


def budget_warnings(budget: Budget, nominal_size: int) -> list[str]:
    """Return warnings about budgets that guarantee little."""
    lines = []
    if budget.delta * nominal_size > 1:
        lines.append(
            f"delta {budget.delta:g} is more than 1 / {nominal_size} records: a mechanism that publishes some records "
            "unchanged would satisfy it; choose --delta well under that"
        )
    if 10 < budget.epsilon < math.inf:
        lines.append(f"epsilon {budget.epsilon:g} is more than 10: the guarantee is weak; choose a smaller --epsilon")
    return lines
