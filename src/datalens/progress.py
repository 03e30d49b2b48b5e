"""Progress bars and messages for people, always on stderr.

Where stderr is no terminal (logs, notebooks), a line every ten seconds stands for the bar. The first one comes after
two seconds, and says about how long the work takes, by the part that is done, if that is ten seconds or more.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

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
_last_said = 0.0  # by `time.monotonic`


def say(message: str) -> None:
    """Print one line on stderr."""
    global _last_said
    _last_said = time.monotonic()
    console.print(message, markup=False)


@functools.cache
def say_once(message: str) -> None:
    """Print one line on stderr, but only the first time it is passed in this process."""
    say(message)


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: "1 run", "2 runs"."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


FIRST, EVERY = 2.0, 10.0  # seconds until the first line outside a terminal, and between lines
LONG = 10.0  # seconds: what will take longer says how long


class Ticking(Protocol):
    """A counter, as `bar` yields it."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None: ...

    def update(self, task_id: TaskID, *, completed: float) -> None: ...


class Count:
    """The count of a bar that is not shown, and what is said of it."""

    def __init__(self, description: str, total: float | None, *, private: bool) -> None:
        self.description, self.total, self.private, self.done = description, total, private, 0.0
        self._told = 0.0  # what was done at the last line

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.done += advance

    def update(self, task_id: TaskID, *, completed: float) -> None:
        self.done = completed

    def said(self, seconds: float) -> str:
        """Return a line about what is done after so many seconds; "" if it will be over soon.

        A private count, such as that of records read, is not in it: others read logs. Its first line estimates how
        long a public number of them takes (`total`), which tells the speed alone.
        """
        if self.private and self.total and self.done and seconds < LONG:
            whole = seconds * self.total / self.done
            return f"{self.description}: about {duration(whole)}, by a timed part" if whole >= LONG else ""
        if self.private or not self.total or not self.done:
            return f"{self.description}: {duration(seconds)} so far" if seconds >= LONG else ""
        if self.done >= self.total:
            return ""
        left = seconds * max(self.total - self.done, 0) / self.done
        if seconds + left < LONG:
            return ""
        stands = self.done == self._told  # then the pace so far says nothing about how long it will
        self._told = self.done
        when = f"{duration(seconds)} so far" if stands else f"about {duration(left)} left"
        return f"{self.description}: {self.done:.0f} of {self.total:.0f}, {when}"


def duration(seconds: float) -> str:
    """Return a length of time in words: 20 s, 3 minutes, 1.5 hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@contextmanager
def told(said: Callable[[float], str], *, first: float | None = None, every: float | None = None) -> Iterator[None]:
    """Say what `said` returns for the seconds so far, every ten seconds until the block ends; "" is not said.

    It is for where stderr is no terminal. Of several ranks, the first one speaks.

    Args:
        said: what to say.
        first, every: seconds until it is asked, and between two times; None: `FIRST` and `EVERY`.
    """
    if os.environ.get("RANK", "0") != "0" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def speak() -> None:
        wait = FIRST if first is None else first
        while not over.wait(wait):
            wait = EVERY if every is None else every
            if line := said(time.monotonic() - began):
                say(line)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def spoken_for(name: str) -> Iterator[None]:
    """Say every ten seconds that a command is still at work, where nothing else did, until the block ends."""
    if console.is_terminal:
        yield
        return
    began = time.monotonic()

    def said(seconds: float) -> str:
        silent = time.monotonic() - max(_last_said, began)
        return f"{name}: {duration(seconds)} so far" if silent > EVERY + 1 else ""

    with told(said, first=1.0, every=1.0):
        yield


def steps_bar(on: Console, **options: Any) -> Progress:
    """Return a progress display with bar, count and times.

    Args:
        on: the console to show it on.
        options: other arguments of `Progress`.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=on, **options)


@contextmanager
def bar(
    description: str, total: float | None, *, private: bool = False, shown: bool = True
) -> Iterator[tuple[Ticking, TaskID]]:
    """Show a progress bar on stderr: `with bar("training", 86) as (p, task): p.advance(task)`.

    Args:
        total: the number to come; with `private`, a public figure near it.
        private: whether the count says how many records there are, which logs must not.
        shown: False for work within other work that shows a bar: only one can be shown at a time.
    """
    if not shown:
        yield Count(description, total, private=private), TaskID(0)
        return
    if not console.is_terminal:
        count = Count(description, total, private=private)
        with told(count.said):
            yield count, TaskID(0)
        return
    with steps_bar(console, transient=True) as progress:
        yield progress, progress.add_task(description, total=total)
