"""Progress bars and messages for people, always on stderr."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one line on stderr."""
    console.print(message, markup=False)


@functools.cache
def say_once(message: str) -> None:
    """Print one line on stderr, but only the first time it is passed in this process."""
    say(message)


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: "1 run", "2 runs"."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


@contextmanager
def bar(description: str, total: float | None, *, shown: bool = True) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on stderr: `with bar("training", 86) as (p, task): p.advance(task)`.

    Only one can be shown at a time; `shown=False` is for work within other work that shows one.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    with progress:
        yield progress, progress.add_task(description, total=total)
