"""`datalens budget`: what all runs on the same records may spend together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import show
from datalens.errors import DatalensError
from datalens.options import Json

_ONCE = "(to make a new budget)"


@dataclass(frozen=True, kw_only=True)
class DataBudgetCommand:
    """A data set's own budget: make it with --epsilon and --delta, then see what runs with --budget have left of it.

    For the owner: like the data itself, it is private.
    """

    folder: Positional[Path]
    """A folder for the budget, outside run folders; not one that is rolled back to older copies."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_ONCE)] = None
    """The most that all runs on this data may spend together. It cannot be changed later."""
    delta: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_ONCE)] = None
    """The one δ of all of them together; choose it well under 1 / number of records."""
    relation: Annotated[
        Literal["add-remove", "replace-one"] | None, arg(help_behavior_hint="(default: add-remove)")
    ] = None
    data: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: of the first run's data)")] = None
    """Name of a data set, or of a file, that holds these records. May be added later."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.privacy.budget import Cap, DataBudget
        from datalens.run.reservation import describe

        if self.epsilon is None and (self.delta is not None or self.relation is not None):
            raise DatalensError("a new budget needs --epsilon too; of one that is there, nothing can be changed")
        if self.epsilon is not None:
            if self.delta is None:
                raise DatalensError("a new budget needs --delta too, such as --delta 1e-5")
            cap = Cap(epsilon=self.epsilon, delta=self.delta, relation=self.relation or "add-remove")
            DataBudget.create(self.folder, cap, data=self.data).close()
        with DataBudget.open(self.folder) as budget:
            if self.data is not None:
                budget.allow(self.data)
            fields, lines = describe(budget)
        show(
            {"folder": str(self.folder), **fields}, [f"{self.folder}", *(f"  {line}" for line in lines)], json=self.json
        )
        return 0
