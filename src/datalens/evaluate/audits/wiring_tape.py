"""A tape that records a run for the wiring audit: its randomness, and everything that passes the gate.

While a `Tape` is playing, it replaces the operating system's random generator. It records every draw of every noise
source, every charge and every release, and can return the released values of an earlier run instead of the new ones.
The run itself is a real one: only calls are watched, and bytes and values replaced.
"""

import contextlib
import hashlib
import importlib
import inspect
import math
import os
import pkgutil
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from datalens import privacy, private
from datalens.bounded.contributions import BoundedSum
from datalens.privacy import exact, noise
from datalens.privacy.events import Charge
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.released import Released

DRAWS = ("standard_normal", "words", "below", "integers")  # the methods of a noise source
NOW = 1_700_000_000.0  # the time in every watched run, so that logs can be compared
Words = Callable[[int, int], np.ndarray]  # (number of earlier calls, number of units) → uint32 words


@dataclass(frozen=True, kw_only=True, eq=False)
class Draw:
    """One call of a noise source."""

    source: str
    origin: str
    kind: str
    count: int  # number of values; for `below`, the number of alternatives
    values: np.ndarray
    bits: int  # bits that were taken from the operating system for it
    width: float | None  # scale of integer noise

    @property
    def needed(self) -> float:
        """Return the number of bits that independent draws need at least."""
        if self.kind == "below":
            return math.ceil(math.log2(self.count))
        laplace = self.kind == "integers" and self.source == "LaplaceNoise"
        return self.count * {"words": 32, "standard_normal": 53, "integers": 8 if laplace else 53}[self.kind]


@dataclass(kw_only=True, eq=False)
class Crossing:
    """One release: its sums, its charges, its draws of noise, and the released value."""

    gate: str
    parts: "list[Contributed]" = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)  # made inside the gate
    draws: list[Draw] = field(default_factory=list)  # made inside the gate
    before: list[Draw] = field(default_factory=list)  # made since the previous release
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))  # as computed, even if the tape replaced it
    event: Charge | None = None
    number: int = -1

    @property
    def total(self) -> np.ndarray:
        return self.parts[-1].total if self.parts else np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contributed:
    """A sum that reached the gate."""

    total: np.ndarray
    row_unit: str
    l2_bound: float
    diameter: float
    queries: int
    units: list[int] | None


class Tape:
    """Records one run.

    Args:
        key: seed of the bytes that the run gets from the operating system.
        replay: released values to return instead of the new ones, in order.
        known: values that an earlier part of the run, which was killed, has released.
        words: words of Poisson samples, instead of random ones.
        choose: secret choices, instead of random ones.
        stop: raise `Killed` right after so many releases.
        saved: raise it once the journal has the value of the last of them.
        loud: factor by which normal draws are multiplied.
        scalar: number to return instead of those that the private side reports to the owner, such as a loss.
    """

    def __init__(
        self,
        key: int = 0,
        *,
        replay: "list[np.ndarray] | None" = None,
        known: "list[np.ndarray] | None" = None,
        words: Words | None = None,
        choose: Callable[[int, int], int] | None = None,
        stop: int | None = None,
        saved: bool = False,
        loud: float = 1.0,
        scalar: float | None = None,
    ) -> None:
        self.crossings: list[Crossing] = []
        self.charges: list[tuple[Ledger, Charge]] = []
        self.draws: list[Draw] = []
        self.outside: list[np.ndarray] = []  # values of `Released` objects that no gate of this run has released
        self.reshaped = False  # whether a release had another shape than its replacement
        self._key, self._replay, self._words, self._choose = key, replay, words, choose
        self._stop, self._loud, self._earlier, self._scalar = stop, loud, known or [], scalar
        self._width: float | None = None  # scale of the last draw of the exact sampler
        self._saved = saved
        self._calls = self._bits = self._sampled = self._chosen = 0
        self._served: bytes | None = None
        self._open: list[Crossing] = []
        self._within = 0  # depth of nested calls of sources
        self._paused = False
        self._unnoted: list[Draw] = []

    @property
    def values(self) -> list[np.ndarray]:
        return [crossing.value for crossing in self.crossings]

    @contextlib.contextmanager
    def playing(self) -> Iterator["Tape"]:
        """Return a context in which the process has no other randomness, and everything is recorded."""
        with contextlib.ExitStack() as stack:

            def put(where: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(where, name, value))

            put(os, "urandom", self._bytes)
            put(random, "_urandom", self._bytes)
            put(time, "time", lambda: NOW)
            put(os, "fsync", lambda descriptor: None)  # these files need not survive a crash
            put(exact, "sampler", self._sampler)
            put(noise, "FEW_DRAWS", 2**62)  # so that no other process, which has no tape, draws noise in advance
            for source in sources():
                for name in DRAWS:
                    if name in vars(source):
                        put(source, name, self._tapped(name, vars(source)[name]))
            for gate in gates():
                put(gate, "release", self._watched(vars(gate)["release"]))
            put(Released, "__init__", self._making(Released.__init__))
            put(Ledger, "charge", self._charging(Ledger.charge))
            put(Journal, "save", self._saving(Journal.save))
            for kind, name in told_the_owner() if self._scalar is not None else []:
                put(kind, name, self._told(vars(kind)[name]))
            yield self

    # --- randomness -------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        """Replace `os.urandom`. The n-th call of a tape begins with the same bytes, whatever number is requested."""
        self._bits += 8 * count
        if self._served is not None:
            served, self._served = self._served, None
            if len(served) == count:
                return served
        self._calls += 1
        return hashlib.shake_256(f"{self._key} {self._calls}".encode()).digest(count)

    def _sampler(self, sigma: float) -> Callable[[int], list[int]]:
        """Replace OpenDP's sampler: approximately the same distribution, from the tape's bytes."""

        def draw(count: int) -> list[int]:
            self._width = sigma
            return np.rint(sigma * noise._box_muller(self._bytes(16 * ((count + 1) // 2)), count)).astype(int).tolist()

        return draw

    def _tapped(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(source: Any, count: int) -> Any:
            if self._paused or self._within:
                return original(source, count)
            before, self._within, self._width = self._bits, self._within + 1, None
            try:
                self._serve(kind, count)
                values = original(source, count)
            finally:
                self._within -= 1
                self._served = None
            if kind == "standard_normal":
                values = values * self._loud
            noted = Draw(
                source=type(source).__name__,
                origin=source.origin,
                kind=kind,
                count=count,
                values=np.array(values),
                bits=self._bits - before,
                width=getattr(source, "scale", None) if self._width is None else self._width,
            )
            self.draws.append(noted)
            (self._open[-1].draws if self._open else self._unnoted).append(noted)
            return values

        return draw

    def _serve(self, kind: str, count: int) -> None:
        if kind == "words" and self._words is not None:
            self._served = self._words(self._sampled, count).astype(np.uint32).tobytes()
            self._sampled += 1
        if kind == "below" and self._choose is not None:
            bits = count.bit_length()
            size = (bits + 7) // 8
            self._served = (self._choose(self._chosen, count) << (8 * size - bits)).to_bytes(size, "big")
            self._chosen += 1

    def _told(self, original: Callable[..., float]) -> Callable[..., float]:
        def tell(*given: Any, **named: Any) -> float:
            original(*given, **named)
            assert self._scalar is not None
            return self._scalar

        return tell

    # --- the gate ---------------------------------------------------------------------------------

    def _charging(self, original: Callable[..., int]) -> Callable[..., int]:
        def charge(ledger: Ledger, event: Charge) -> int:
            number = original(ledger, event)
            if not self._paused:
                self.charges.append((ledger, event))
                for crossing in self._open:
                    crossing.charges.append(event)
            return number

        return charge

    def _watched(self, original: Callable[..., Released]) -> Callable[..., Released]:
        def release(gate: Any, contributions: Any, *rest: Any, **named: Any) -> Released:
            if self._paused or self._open:
                return original(gate, contributions, *rest, **named)
            crossing = Crossing(gate=type(gate).__name__, before=self._unnoted)
            self._unnoted = []

            def seen(asked: Any) -> Any:
                """Record what enters the gate: a sum, or a function that returns one."""
                if isinstance(asked, BoundedSum):
                    crossing.parts.append(self._contributed(asked))
                    return asked
                return lambda *which: seen(asked(*which))

            self._open.append(crossing)
            try:
                released = original(gate, seen(contributions), *rest, **named)
            finally:
                self._open.pop()
            crossing.event, crossing.number = released.event, released.number
            self.crossings.append(crossing)
            if not self._saved:
                self._end()
            return released

        return release

    def _end(self) -> None:
        if self._stop is not None and len(self.crossings) >= self._stop:
            raise Killed

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(journal: Journal, released: Released) -> None:
            original(journal, released)
            self._end()

        return save

    def _contributed(self, asked: BoundedSum) -> Contributed:
        """Return a record of a sum. Its total is read through a gate without noise, the only way to read it."""
        free = Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant="exact"))
        self._paused = True
        try:
            total = GaussianSum(sigma=0.0, noise=noise.SeededNoise(0)).release(asked, free, step=0).value
        finally:
            self._paused = False
        return Contributed(
            total=total,
            row_unit=asked.row_unit,
            l2_bound=asked.l2_bound,
            diameter=asked.diameter,
            queries=asked.queries,
            units=None if asked.units is None else asked.units.tolist(),
        )

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(released: Released, *, value: np.ndarray, event: Charge, number: int) -> None:
            if not self._paused and self._open:
                self._open[-1].value = value.copy()
                value = self._handed_out(value)
            elif not self._paused and not any(same(value, known) for known in self._known()):
                self.outside.append(value)
            original(released, value=value, event=event, number=number)

        return make

    def _known(self) -> list[np.ndarray]:
        return [*self.values, *(self._replay or []), *self._earlier]

    def _handed_out(self, value: np.ndarray) -> np.ndarray:
        place = len(self.crossings)
        if self._replay is None or place >= len(self._replay):
            self.reshaped = self.reshaped or self._replay is not None
            return value
        known = self._replay[place]
        if known.shape != value.shape or known.dtype != value.dtype:
            self.reshaped = True
            return value
        return known.copy()


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it, and only what is on disk remains."""


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are equal bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def sources() -> list[type]:
    """Return every class of noise sources."""
    return [kind for kind in classes(privacy) if set(DRAWS) & set(vars(kind))]


def told_the_owner() -> list[tuple[type, str]]:
    """Return the methods of the private side that return a plain number, such as a loss.

    Such numbers are reported to the owner only, and nothing public may depend on them.
    """
    return [
        (kind, name)
        for kind in classes(private)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and method.__annotations__.get("return") in (float, "float")
    ]


def gates() -> list[type]:
    """Return every class of `privacy/` that has a method `release`."""
    return [kind for kind in classes(privacy) if "release" in vars(kind)]


def classes(package: ModuleType) -> list[type]:
    """Return the classes of all modules of a package, without protocols."""
    found: list[type] = []
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for _, kind in inspect.getmembers(loaded, inspect.isclass):
            if kind.__module__ == loaded.__name__ and not getattr(kind, "_is_protocol", False):
                found.append(kind)
    return found
