"""Progress of a run on the terminal: steps, time left, the budget, and the values that the method logs.

For the owner only: logged values are not covered by ε. If stderr is not a terminal, a line every ten seconds says
which step it is, and logged values are not shown.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
)
from rich.text import Text

from datalens import progress
from datalens.privacy.ledger import Ledger

# Names of logged values, as they are shown; other names are shown unchanged.
WORDS = {
    "between_classes": "distance between classes",
    "within_classes": "within a class",
    "agreement": "agreement of teachers",
    "agreement_by_chance": "by chance",
    "real": "taken for real",
    "answered": "agreement of teachers",
    "teacher_loss": "teachers' loss",
}


class View:
    """A progress display. Call `done` after every step, and `told` with logged values."""

    def __init__(self, what: str, total: int, ledger: Ledger, console: Console) -> None:
        self.shown = console.is_terminal
        self.count = progress.Count(what, total, private=False)
        self._ledger, self._charges = ledger, -1
        width = max(len(what), len("budget"))
        self._steps = progress.steps_bar(console)
        self._budget = Progress(
            TextColumn("{task.description}"),
            BarColumn(complete_style="yellow", finished_style="yellow"),
            TextColumn("{task.fields[spent]}"),
            console=console,
        )
        self._task = self._steps.add_task(what.ljust(width), total=total)
        self._gauge = self._budget.add_task("budget".ljust(width), total=1.0, spent="")
        self._values = Text()
        self.picture = Group(self._steps, self._budget, self._values)
        self.done(0)

    def done(self, count: int) -> None:
        """Show that so many steps are complete, and what is spent."""
        self.count.done = float(count)
        if not self.shown:
            return
        self._steps.update(self._task, completed=count)
        if len(self._ledger.events) == self._charges:
            return
        self._charges = len(self._ledger.events)
        budget, spent = self._ledger.budget, self._ledger.spent()
        part = spent / budget.epsilon if math.isfinite(budget.epsilon) else 1.0
        text = f"{budget.describe(spent)} of {budget.epsilon:g}" if math.isfinite(budget.epsilon) else "NOT PRIVATE"
        self._budget.update(self._gauge, completed=min(part, 1.0), spent=text)

    def told(self, values: dict[str, float]) -> None:
        """Show logged values."""
        if self.shown and values:
            text = "   ".join(
                f"{WORDS.get(name, name.replace('_', ' '))} {value:.3g}" for name, value in values.items()
            )
            # The warning comes first, since a narrow terminal cuts off the end.
            self._values.plain = f"for the owner, not covered by ε: {text}"


@contextmanager
def view(what: str, total: int, ledger: Ledger) -> Iterator[View]:
    """Show progress until the block ends: `with view("training", 86, ledger) as display: display.done(1)`."""
    display = View(what, total, ledger, progress.console)
    if not display.shown:
        with progress.told(display.count.said):
            yield display
        return
    with Live(display.picture, console=progress.console, transient=True, refresh_per_second=4):
        yield display
