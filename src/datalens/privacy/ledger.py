"""The ledger: every release is charged here, durably, before noise is added to its sum.

The file has one JSON object per line. The first line states the budget, which is fixed before the first record is
read. Each line carries the hash of the line before it, so that an edit, a deletion or a swap is detected. (A hash chain
detects accidents and careless edits; it cannot detect an owner who rewrites the whole file.)
"""

import fcntl
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import IO, Any, NoReturn, get_args

from datalens.errors import BudgetExceeded, DatalensError, TamperedError
from datalens.files import sync_directory, write_new
from datalens.privacy.accountant import ACCOUNTANTS, Accountant, AccountantName
from datalens.privacy.events import Charge, Event, Relation, UnknownEvent, parse_event

_GENESIS = "0" * 64
_BUDGET_LINE = {"type", "version", "epsilon", "delta", "relation", "accountant", "previous", "hash"}
_CHARGE_LINE = {"type", "number", "event", "previous", "hash"}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A privacy budget: (ε, δ), the neighbouring relation, and the accountant that prices the charges.

    Raises:
        DatalensError: a value is out of range.
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: AccountantName

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise DatalensError(f"epsilon must be above 0 (or inf for no privacy), not {self.epsilon:g}")
        if not 0 < self.delta < 1:
            raise DatalensError(f"delta must lie between 0 and 1, and well under 1/records, not {self.delta:g}")
        if self.relation not in get_args(Relation):
            raise DatalensError(f"relation must be add-remove or replace-one, not {self.relation!r}")
        if self.accountant not in ACCOUNTANTS:
            raise DatalensError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {self.accountant!r}")

    def pricing(self) -> Accountant:
        """Return the budget's accountant."""
        return Accountant(name=self.accountant)

    def describe(self, epsilon: float) -> str:
        """Return ε as text, always with its δ, relation and accountant.

        Args:
            epsilon: ε of this budget, or a part of it.
        """
        return f"ε = {upwards(epsilon, 4)} (δ = {upwards(self.delta)}, {self.relation}, {self.accountant} accountant)"

    def as_dict(self) -> dict[str, Any]:
        """Return the budget as JSON."""
        return {**asdict(self), "epsilon": json_number(self.epsilon)}


MOST_EPSILON = 1e6  # for a run with noise: beyond it σ is so small that the arithmetic of prices fails


def check_epsilon(epsilon: float) -> None:
    """Raise if no run can be planned with this ε. Ledgers that exist already are not checked.

    Args:
        epsilon: The requested ε; may be infinite.

    Raises:
        DatalensError: ε is finite and above `MOST_EPSILON`.
    """
    if MOST_EPSILON < epsilon < math.inf:
        raise DatalensError(
            f"epsilon {epsilon:g} is more than {MOST_EPSILON:g} and protects nobody: use --epsilon inf, which says so"
        )


def upwards(value: float, digits: int = 6) -> str:
    """Return the value with `digits` significant digits, rounded up (except for the last bits of a float).

    Args:
        value: The number.
        digits: How many digits to keep.
    """
    text = f"{value:.{digits}g}"
    if not value > float(text) * (1 + 1e-9):
        return text
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)):.{digits}g}"


def json_number(value: float) -> float | str:
    """Return the value as JSON can hold it: infinity, which JSON does not have, becomes the string "inf".

    Args:
        value: The number.
    """
    return "inf" if math.isinf(value) else value


class Ledger:
    """An append-only list of charged events. `charge` is the only way to add one.

    A ledger belongs to one process, and one thread at a time charges it: copies, by pickle or by fork, would each spend
    the whole budget.
    """

    def __init__(self, budget: Budget, events: list[Event], *, hashes: list[str], file: IO[bytes] | None) -> None:
        self.budget = budget
        self._events = events
        self._hashes = hashes  # of every line, starting with the budget's
        self._file = file
        self._broken = False
        self._priced: tuple[int, float] | None = None  # number of charges, and their price
        self._turn, self._process = threading.Lock(), os.getpid()
        # The gate calls this before a charge, with the number of values: it raises if they could not be stored.
        self.make_room: Callable[[int], None] = lambda cells: None

    @classmethod
    def in_memory(cls, budget: Budget) -> "Ledger":
        """Return an empty ledger for audits and plans: the same rules, but nothing on disk.

        Args:
            budget: The budget of the ledger.
        """
        return cls(budget, [], hashes=[_GENESIS], file=None)

    @classmethod
    def create(cls, path: Path, budget: Budget) -> "Ledger":
        """Create a ledger file and return its ledger.

        Args:
            path: The new file.
            budget: What its first line states.

        Raises:
            DatalensError: the file exists. It is never replaced, since it records what was spent.
        """
        line, line_hash = _line({"type": "budget", "version": 1, **budget.as_dict()}, _GENESIS)
        try:
            write_new(path, line)
        except FileExistsError:
            raise DatalensError(f"{path} exists: it records what was spent; use --resume or another --out") from None
        sync_directory(path.parent)
        return cls(budget, [], hashes=[line_hash], file=_open_alone(path))

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """Open a ledger to continue it. An incomplete last line is cut off.

        Such a line was never acknowledged, so its noise was never used.

        Args:
            path: The file.

        Raises:
            DatalensError: another process uses the file.
            TamperedError: a line is malformed or breaks the hash chain.
        """
        file = _open_alone(path)
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            budget, events, hashes = _parse(whole, path)
            file.truncate(len(whole))
            file.seek(len(whole))
            os.fsync(file.fileno())
        except BaseException:
            file.close()
            raise
        return cls(budget, events, hashes=hashes, file=file)

    @property
    def events(self) -> tuple[Event, ...]:
        """The charged events, in their order."""
        return tuple(self._events)

    def chain(self, charges: int) -> str | None:
        """Return the hash of the line after this many charges, or None if the ledger has fewer.

        Each line carries the hash of the one before it, so equal hashes mean equal ledgers up to that line.

        Args:
            charges: Number of charges.
        """
        return self._hashes[charges] if 0 <= charges < len(self._hashes) else None

    def spent(self) -> float:
        """Return the ε spent so far, by the budget's accountant and at the budget's δ.

        It is computed once for each number of charges: a mix of releases takes a second to price.
        """
        charges = len(self._events)
        if self._priced is None or self._priced[0] != charges:
            self._priced = charges, self.budget.pricing().epsilon(self._events, self.budget.delta)
        return self._priced[1]

    def charge(self, event: Charge) -> int:
        """Record the event durably and return its number. If it would overspend, nothing is written.

        Args:
            event: The release that is about to be made.

        Returns:
            Index of the charge, counted from 0.

        Raises:
            BudgetExceeded: the event does not fit into what is left of the budget.
            UnpriceableEvent: the accountant does not price this event, or not together with the earlier ones.
            DatalensError: the event has another relation, the line could not be written, or this is a forked child.
        """
        if os.getpid() != self._process:
            raise DatalensError(
                "this ledger belongs to the process that opened it, not to a forked child: charge it there"
            )
        with self._turn:
            return self._charge(event)

    def _charge(self, event: Charge) -> int:
        if self._broken:
            raise DatalensError("the ledger could not be written: free some disk space, then continue with --resume")
        if event.relation != self.budget.relation:
            raise DatalensError(f"a {event.relation} event cannot be charged to a {self.budget.relation} ledger")
        after = self.budget.pricing().epsilon([*self._events, event], self.budget.delta)
        if not after <= self.budget.epsilon:
            raise BudgetExceeded(
                f"the next release would bring the cost to {self.budget.describe(after)}, "
                f"past the budget of {self.budget.epsilon:g}: nothing was released"
            )
        fields = {"type": "charge", "number": len(self._events), "event": event.as_dict()}
        line, line_hash = _line(fields, self._hashes[-1])
        self._broken = True  # until the line is on disk: after an interruption, the reopened file has what was charged
        if self._file is not None:
            try:
                written = self._file.write(line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes")
                os.fsync(self._file.fileno())
            except OSError as error:
                raise DatalensError(
                    f"cannot write {len(line)} bytes to the ledger {self._file.name} ({error}): nothing was released"
                ) from error
        self._hashes.append(line_hash)
        self._events.append(event)
        self._broken = False
        return len(self._events) - 1

    def close(self) -> None:
        """Close the file. Nothing can be charged afterwards."""
        if self._file is not None:
            self._file.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DatalensError("a ledger cannot be copied or sent to another process: both would spend its whole budget")


def read_ledger(path: Path) -> tuple[Budget, tuple[Event, ...]]:
    """Read a ledger file strictly, without writing to it.

    Args:
        path: The file.

    Returns:
        The budget and all events.

    Raises:
        TamperedError: a line is malformed or breaks the hash chain, or the last one is incomplete.
    """
    budget, events, _ = _parse(path.read_bytes(), path)
    return budget, tuple(events)


def canonical_json(fields: dict[str, Any]) -> bytes:
    """Return the bytes that are hashed: one spelling for one content.

    Args:
        fields: A line of a ledger or a budget.
    """
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _line(fields: dict[str, Any], previous: str) -> tuple[bytes, str]:
    body = {**fields, "previous": previous}
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    return canonical_json({**body, "hash": digest}) + b"\n", digest


def _parse(content: bytes, path: Path) -> tuple[Budget, list[Event], list[str]]:
    if not content.endswith(b"\n"):
        raise TamperedError(f"{path}: the last line is not complete")
    previous = _GENESIS
    budget: Budget | None = None
    events: list[Event] = []
    hashes: list[str] = []
    for number, raw in enumerate(content[:-1].split(b"\n")):
        try:
            fields = json.loads(raw)
            # Every byte counts: the line must be exactly what this program would have written.
            expected, digest = _line({k: v for k, v in fields.items() if k not in ("hash", "previous")}, previous)
            if raw + b"\n" != expected:
                raise TamperedError(f"{path}: line {number + 1} does not follow from the line before it")
            if set(fields) != (_BUDGET_LINE if number == 0 else _CHARGE_LINE):
                raise TamperedError(f"{path}: line {number + 1} has other fields than a ledger's lines")
            if number == 0:
                budget = _parse_budget(fields)
            elif fields["type"] != "charge" or fields["number"] != number - 1:
                raise TamperedError(f"{path}: line {number + 1} is out of order")
            else:
                events.append(_parse_charge(fields["event"], budget))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise TamperedError(f"{path}: line {number + 1} is not a ledger line ({type(error).__name__})") from error
        previous = digest
        hashes.append(digest)
    assert budget is not None  # the content ends with a newline, so there was a first line
    return budget, events, hashes


def _parse_charge(fields: dict[str, Any], budget: Budget | None) -> Event:
    event = parse_event(fields)
    if not isinstance(event, UnknownEvent) and (budget is None or event.relation != budget.relation):
        raise TamperedError(f"a {event.relation} event does not belong into this ledger")
    return event


def _parse_budget(fields: dict[str, Any]) -> Budget:
    if fields["type"] != "budget" or fields["version"] != 1:
        raise TamperedError("the first line of a ledger states its budget")
    try:
        budget = Budget(
            epsilon=float(fields["epsilon"]),
            delta=float(fields["delta"]),
            relation=fields["relation"],
            accountant=fields["accountant"],
        )
    except DatalensError as error:
        raise TamperedError(f"the ledger's budget makes no sense: {error}") from error
    if any(fields[name] != value for name, value in budget.as_dict().items()):  # text would have room for anything
        raise TamperedError("the ledger's budget is not written as this program writes it: fetch the ledger again")
    return budget


def _open_alone(path: Path) -> IO[bytes]:
    """Open the file at its end, with a lock: two writers would each spend the whole budget."""
    file = open(path, "r+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DatalensError(f"{path} is in use by another process: wait for it to end") from None
    file.seek(0, os.SEEK_END)
    return file
