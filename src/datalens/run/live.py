"""What a person at a terminal sees while a run trains: steps, time left, the budget and what the method logs.

For the owner: what is logged is not covered by ε. Nothing is shown, or computed for it, where stderr is no terminal.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from datalens import progress
from datalens.privacy.ledger import Ledger

# What methods log, in few words; other names are shown as they are.
WORDS = {
    "between_classes": "distance between classes",
    "within_classes": "within a class",
    "agreement": "agreement of teachers",
    "agreement_noise": "noise alone would show",
    "real": "taken for real",
    "answered": "agreement of teachers",
    "teacher_loss": "teachers' loss",
}


class View:
    """`done` after every step, `told` with what was logged."""

    def __init__(self, what: str, total: int, ledger: Ledger, console: Console) -> None:
        self.shown = console.is_terminal
        self._ledger, self._charges = ledger, -1
        width = max(len(what), len("budget"))
        self._steps = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._budget = Progress(
            TextColumn("{task.description}"),
            BarColumn(complete_style="yellow", finished_style="yellow"),
            TextColumn("{task.fields[said]}"),
            console=console,
        )
        self._task = self._steps.add_task(what.ljust(width), total=total)
        self._gauge = self._budget.add_task("budget".ljust(width), total=1.0, said="")
        self._values = Text()
        self.picture = Group(self._steps, self._budget, self._values)
        self.done(0)

    def done(self, count: int) -> None:
        """So many steps, in all."""
        if not self.shown:
            return
        self._steps.update(self._task, completed=count)
        if len(self._ledger.events) == self._charges:
            return
        self._charges = len(self._ledger.events)
        budget, spent = self._ledger.budget, self._ledger.spent()
        part = spent / budget.epsilon if math.isfinite(budget.epsilon) else 1.0
        said = f"{budget.describe(spent)} of {budget.epsilon:g}" if math.isfinite(budget.epsilon) else "NOT PRIVATE"
        self._budget.update(self._gauge, completed=min(part, 1.0), said=said)

    def told(self, values: dict[str, float]) -> None:
        if self.shown and values:
            said = "   ".join(
                f"{WORDS.get(name, name.replace('_', ' '))} {value:.3g}" for name, value in values.items()
            )
            self._values.plain = f"for the owner, not covered by ε: {said}"  # first: a narrow screen cuts the end


@contextmanager
def view(what: str, total: int, ledger: Ledger) -> Iterator[View]:
    """`with view("training", 86, ledger) as seen: seen.done(1)`. Gone from the screen at the end."""
    seen = View(what, total, ledger, progress.console)
    if not seen.shown:
        yield seen
        return
    with Live(seen.picture, console=progress.console, transient=True, refresh_per_second=4):
        yield seen
