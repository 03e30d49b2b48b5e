"""What an owner should hear before a run, whatever its method: from public facts alone, before a record is read."""

import math

from datalens.data.schema import Schema
from datalens.plans.base import Settings
from datalens.privacy.ledger import Budget, Ledger

SMALL_SHARE = 5  # records: a teacher that has seen no more knows hardly anything


def warnings(budget: Budget, schema: Schema, settings: Settings) -> list[str]:
    """Return warnings: budgets that promise little, shares that teach little, and what the method has to say."""
    found = []
    teachers = getattr(settings, "teachers", 0)
    if schema.nominal_size < SMALL_SHARE * teachers:
        found.append(
            f"{teachers} teachers have shares of about {schema.nominal_size / teachers:.1f} records each, which is too "
            f"few to learn from; choose --teachers under {max(1, schema.nominal_size // SMALL_SHARE)}"
        )
    return found + budget_warnings(budget, schema.nominal_size) + settings.warnings(schema, budget)


def nothing_stands_out(schema: Schema, ledger: Ledger) -> str:
    """For the end of a run whose first releases found no class: they are paid for, and it goes no further."""
    spent = ledger.budget.describe(ledger.spent())
    return (
        f"no class of {schema.name} stands out of the noise, and this run ends here; {spent} is spent. Begin another "
        f"with more --epsilon or more records; or --nominal-size is wrong: are there about {schema.nominal_size}?"
    )


def read_off_warnings(schema: Schema) -> list[str]:
    """What no noise protects, since it was read off the data and goes into the release as it is."""
    if not schema.read_off:
        return []
    return [
        f"read off the data of {schema.name}, and so declared public: {schema.given}. One record can decide it: the "
        "only one of its class gives itself away. The guarantee holds given that this is public; to declare it without "
        "a look at the data, say classes= and nominal_size= in Python, or --classes, --image-size and --grayscale "
        "(docs/data.md)"
    ]


def budget_warnings(budget: Budget, nominal_size: int) -> list[str]:
    """Of promises that are worth little."""
    found = []
    if budget.delta * nominal_size > 1:
        found.append(
            f"delta {budget.delta:g} is more than 1 / {nominal_size} records: it would cover giving some records away "
            "whole; choose --delta well under that"
        )
    if 10 < budget.epsilon < math.inf:
        found.append(f"epsilon {budget.epsilon:g} is more than 10: the guarantee is weak; choose a smaller --epsilon")
    return found
