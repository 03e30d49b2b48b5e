"""The budget of a data set: what all runs on the same records may spend together.

It is one file outside every run folder, and as private as the data. Before a run charges anything, it reserves here the
most that its own ledger can ever let it charge. Reservations are events, and all of them are priced together at the one
total δ: ε's are never summed. What is reserved stays reserved, whatever happens to the run.

| reserved so far | priced by |
|---|---|
| Gaussian events only | the exact accountant: Σ mu² is a filter, so earlier results may decide what is run next |
| any other mix | the lower of rdp-improved and prv, each valid by itself; all runs must be decided on beforehand |
"""

import fcntl
import json
import math
import os
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, get_args

from datalens.errors import BudgetExceeded, DatalensError, TamperedError
from datalens.files import sync_directory, write_new
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.events import (
    Charge,
    GaussianEvent,
    Relation,
    UnknownEvent,
    parse_event,
)
from datalens.privacy.ledger import _GENESIS, Budget, _line
from datalens.privacy.owned import Owned
from datalens.privacy.reserve import Counted, all_of_it, largest, most_charged, price, with_noise

FILE = "budget.jsonl"


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The total that may be spent, and the neighbouring relation. Set once.

    Raises:
        DatalensError: a value is out of range.
    """

    epsilon: float
    delta: float
    relation: Relation

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise DatalensError(f"--epsilon of a budget must be a number above 0, not {self.epsilon:g}")
        if not 0 < self.delta < 1:
            raise DatalensError(f"--delta must lie between 0 and 1, and well under 1/records, not {self.delta:g}")
        if self.relation not in get_args(Relation):
            raise DatalensError(f"--relation must be add-remove or replace-one, not {self.relation!r}")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The most that one run may charge. `unit` names what is protected, such as one image."""

    run: str
    data: str
    unit: str
    charges: Counted


class DataBudget(Owned):
    """The open and locked budget file.

    Each line carries the hash of the line before it, so that an edit is detected. An older copy of the file put in its
    place is not.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__()
        self.path = path
        self._file = file
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # an incomplete last line was never acknowledged: no run began
        self.cap, self.names, self.reservations, self._turns, self._last_hash = _parse(whole, path)
        self._end = len(whole)

    @classmethod
    def create(cls, folder: Path, cap: Cap, *, data: str | None = None) -> "DataBudget":
        """Create a budget. An existing one is never replaced, since it records what was spent.

        Args:
            folder: Where the file is put; created where it does not exist.
            cap: The total.
            data: Name of the data set, if the budget is for one name from the start.

        Raises:
            DatalensError: the folder has a budget already.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / FILE
        fields = {"type": "cap", "version": 1, "epsilon": cap.epsilon, "delta": cap.delta, "relation": cap.relation}
        line, _ = _line(fields, _GENESIS)
        try:
            write_new(path, line, private=True)
        except FileExistsError:
            raise DatalensError(
                f"{path} exists: a cap is set once; leave --epsilon and --delta out to see it"
            ) from None
        sync_directory(folder)
        made = cls.open(folder)
        if data is not None:
            made.allow(data)
        return made

    @classmethod
    def open(cls, folder: Path) -> "DataBudget":
        """Open the budget in this folder, and wait while another process has it open: a reservation takes a moment.

        Args:
            folder: The folder with the file.

        Raises:
            DatalensError: the folder has no budget.
            TamperedError: the file is damaged or was edited.
        """
        try:
            file = open(folder / FILE, "r+b", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise DatalensError(
                f"{folder} has no {FILE}: make it with `datalens budget {folder} --epsilon 3 --delta 1e-5`"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            return cls(folder / FILE, file)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> "DataBudget":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let other runs use the budget."""
        self._file.close()

    @property
    def charges(self) -> Counted:
        """All reserved charges, as (event, multiplicity)."""
        return tuple(charge for reservation in self.reservations for charge in reservation.charges)

    def spent(self) -> tuple[float, AccountantName]:
        """Return the ε of all reservations at the cap's δ, and the accountant that computed it."""
        return price(self.charges, self.cap.delta)

    def describe(self, epsilon: float, accountant: AccountantName) -> str:
        """Return ε as text, with the cap's δ and relation, and the accountant.

        Args:
            epsilon: ε at the δ of the cap.
            accountant: The accountant that computed it.
        """
        return Budget(epsilon=1.0, delta=self.cap.delta, relation=self.cap.relation, accountant=accountant).describe(
            epsilon
        )

    def left(self) -> float:
        """Return the largest ε of one more run with Gaussian noise, at the cap's δ and by the exact accountant."""
        quick = all(isinstance(event, GaussianEvent) for event, _ in self.charges)
        digits = 1e-9 if quick else 1e-3  # the price of a mix takes a moment each time
        mu = largest(lambda mu: self._fits(((all_of_it(mu, self.cap.relation), 1),)), digits=digits)
        return Accountant(name="exact").epsilon_at(mu * mu, self.cap.delta)

    def turn(self, run: str) -> str | None:
        """Return the token that a run must show to go on, or None if the run is not known.

        It changes each time the run goes on, so that only one copy of a run folder can.

        Args:
            run: The run's id.
        """
        return self._turns.get(run)

    def set_aside(self, run: str) -> Counted:
        """Return what a run may charge; nothing for one that is not known.

        Args:
            run: The run's id.
        """
        return tuple(charge for own in self.reservations if own.run == run for charge in own.charges)

    def next_turn(self, run: str, turn: str) -> None:
        """Record the token that the run must show next time.

        Args:
            run: The run's id.
            turn: The new token.

        Raises:
            DatalensError: the file cannot be written.
        """
        self._append({"type": "turn", "run": run, "turn": turn})
        self._turns[run] = turn

    def allow(self, data: str) -> None:
        """Add the name of a data set whose runs belong to this budget.

        Args:
            data: The name.

        Raises:
            DatalensError: the file cannot be written.
        """
        if data not in self.names:
            self._append({"type": "data", "name": data})
            self.names = (*self.names, data)

    def check(
        self,
        parts: Sequence[tuple[Charge, int]],
        budget: Budget,
        *,
        data: str,
        unit: str,
        final: bool | Collection[str] = False,
    ) -> Counted:
        """Return what would be reserved for a run, without reserving it.

        Args:
            parts: (event, multiplicity) of the run's plan.
            budget: The run's own budget.
            data: Name of the run's data set.
            unit: What the run protects, such as one image.
            final: Whether the run's gate never charges more than the plan; or the names of the parts for which that is
                true.

        Raises:
            BudgetExceeded: the reservation does not fit under the cap.
            DatalensError: the run does not belong to this budget (relation, data set or unit), or its noise is seeded.
        """
        if budget.relation != self.cap.relation:
            raise DatalensError(
                f"{self.path.parent} counts {self.cap.relation} neighbours, this run {budget.relation}: use --relation "
                f"{self.cap.relation}, where the method has it, or another --budget"
            )
        if any(event.noise == "seeded" for event, _ in parts):
            raise DatalensError("--noise-seed is not private, so it cannot go with --budget: leave one of them out")
        if self.names and data not in self.names:
            raise DatalensError(
                f"{self.path.parent} is the budget of {', '.join(self.names)}, not of {data}: use that data's own "
                f"--budget, or, if these are the same records, `datalens budget {self.path.parent} --data {data}`"
            )
        other = {reservation.unit for reservation in self.reservations} - {unit}
        if other:
            raise DatalensError(
                f"{self.path.parent} protects {other.pop()}, this run {unit}: use the same --record-id in all runs, or "
                "another --budget"
            )
        charges = tuple(parts) if final is True else most_charged(parts, budget, final=final or ())
        if not self._fits(charges):
            self._refuse(charges, budget)
        return charges

    def reserve(
        self,
        parts: Sequence[tuple[Charge, int]],
        budget: Budget,
        *,
        data: str,
        unit: str,
        final: bool | Collection[str] = False,
    ) -> str:
        """Durably reserve all that a run may charge. On an error nothing is written.

        Args:
            parts: (event, multiplicity) of the run's plan.
            budget: The run's own budget.
            data: Name of the run's data set.
            unit: What the run protects, such as one image.
            final: As for `check`.

        Returns:
            The run's id.

        Raises:
            BudgetExceeded: the reservation does not fit under the cap.
            DatalensError: the run does not belong to this budget, or the file cannot be written.
        """
        with self._alone():  # no other thread may reserve between the check and the line that is written
            charges = self.check(parts, budget, data=data, unit=unit, final=final)
            self.allow(data)
            run = secrets.token_hex(16)
            listed = [{"times": times, "event": event.as_dict()} for event, times in charges]
            self._append(
                {"type": "run", "run": run, "data": data, "unit": unit, "time": int(time.time()), "charges": listed}
            )
            self.reservations = (*self.reservations, Reservation(run=run, data=data, unit=unit, charges=charges))
            self._turns[run] = run
            return run

    def _fits(self, charges: Counted) -> bool:
        return price((*self.charges, *charges), self.cap.delta)[0] <= self.cap.epsilon

    def _refuse(self, charges: Counted, budget: Budget) -> None:
        spent, accountant = self.spent()
        most = _down(self._room(charges, budget))
        room = f"the largest that fits is --epsilon {most:g}" if most >= 1e-3 else "nothing more fits"
        raise BudgetExceeded(
            f"this run would pass the cap of {self.path.parent}, ε = {self.cap.epsilon:g}: "
            f"{self.describe(spent, accountant)} is reserved, and --epsilon {budget.epsilon:g} does not fit beside it; "
            f"{room} (at --delta {budget.delta:g}, {budget.accountant} accountant)"
        )

    def _room(self, charges: Counted, budget: Budget) -> float:
        """Return the ε, by the run's own accountant, of the same releases with just enough more noise to fit."""
        if math.isinf(budget.epsilon):
            charges = ((all_of_it(1.0, budget.relation), 1),)
        share = largest(lambda x: self._fits(with_noise(charges, 1 / x)) if x > 1e-9 else True, digits=1e-6)
        return 0.0 if share <= 1e-9 else budget.pricing().price(with_noise(charges, 1 / share), budget.delta)

    def _append(self, fields: dict[str, Any]) -> None:
        with self._alone():  # a forked child shares the lock on the file, and would overwrite its parent's lines
            self._write(fields)

    def _write(self, fields: dict[str, Any]) -> None:
        line, line_hash = _line(fields, self._last_hash)
        try:
            self._file.truncate(self._end)  # cut off an incomplete line
            self._file.seek(self._end)
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DatalensError(f"cannot write {self.path} ({error}): no run was begun") from error
        self._last_hash, self._end = line_hash, self._end + len(line)


def _down(epsilon: float) -> float:
    """Return ε rounded down to four digits, with an allowance for the error of the search that found it."""
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 3) if epsilon > 0 else 1.0
    return math.floor(epsilon / step * (1 + 3e-6)) * step


def _parse(content: bytes, path: Path) -> tuple[Cap, tuple[str, ...], tuple[Reservation, ...], dict[str, str], str]:
    previous = _GENESIS
    cap: Cap | None = None
    names: list[str] = []
    reservations: list[Reservation] = []
    turns: dict[str, str] = {}
    for number, raw in enumerate(content.splitlines()):
        try:
            fields = json.loads(raw)
            expected, digest = _line({k: v for k, v in fields.items() if k not in ("hash", "previous")}, previous)
            if raw + b"\n" != expected or (number == 0) != (fields["type"] == "cap"):
                raise ValueError("it does not follow from the line before it")
            if fields["type"] == "cap":
                cap = Cap(**{name: fields[name] for name in ("epsilon", "delta", "relation")})
            elif fields["type"] == "data":
                names.append(str(fields["name"]))
            elif fields["type"] == "turn":
                if fields["run"] not in turns:
                    raise ValueError("it names a run that reserved nothing")
                turns[fields["run"]] = str(fields["turn"])
            else:
                assert cap is not None
                reservations.append(_parse_run(fields, cap))
                turns[reservations[-1].run] = reservations[-1].run
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, DatalensError) as error:
            raise TamperedError(f"{path}: line {number + 1} is not one of a budget ({error})") from error
        previous = digest
    if cap is None:
        raise TamperedError(f"{path} states no cap")
    return cap, tuple(names), tuple(reservations), turns, previous


def _parse_run(fields: dict[str, Any], cap: Cap) -> Reservation:
    charges: list[tuple[Charge, int]] = []
    for charge in fields["charges"]:
        event, times = parse_event(charge["event"]), charge["times"]
        if isinstance(event, UnknownEvent) or event.relation != cap.relation or type(times) is not int or times < 1:
            raise TamperedError("it reserves something that cannot be priced")
        charges.append((event, times))
    return Reservation(
        run=str(fields["run"]), data=str(fields["data"]), unit=str(fields["unit"]), charges=tuple(charges)
    )
