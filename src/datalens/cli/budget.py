"""`datalens budget`: a budget that all runs on the same records share."""

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
    """Make a budget for all runs on a data set (with --epsilon and --delta), or show what is left of it.

    For the owner only: the budget is private, like the data.
    """

    folder: Positional[Path]
    """Folder of the budget, outside run folders. It must never be restored from an older copy."""
    epsilon: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_ONCE)] = None
    """The most that all runs on this data may spend together. It cannot be changed later."""
    delta: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_ONCE)] = None
    """δ of all runs together; choose it well under 1 / number of records."""
    relation: Annotated[
        Literal["add-remove", "replace-one"] | None, arg(help_behavior_hint="(default: add-remove)")
    ] = None
    """Neighbouring data sets: one record is present or absent, or one record of a list is replaced."""
    data: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first run's data)")] = None
    """Name of a data set or file that holds these records. More names may be added later."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.privacy.budget import Cap, DataBudget
        from datalens.run.reservation import describe

        if self.epsilon is None and (self.delta is not None or self.relation is not None):
            raise DatalensError("a new budget needs --epsilon too; an existing one cannot be changed")
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
