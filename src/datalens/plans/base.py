"""The interface of a method: its settings, what they cost, and how they are described.

A method is one file in `methods/`. It has settings (public, serialised into certificates), a plan that makes them from
public facts, `gather` (what it keeps of records) and `train` (what it learns through the gate). A `Method` puts these
together, and `registry.py` names its file. The driver, `verify`, reports and budgets call the settings through the
classes below; none of them depends on which method it is.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import NoiseName, NoOptions, check_value
from datalens.privacy.accountant import AccountantName
from datalens.privacy.events import (
    Charge,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    NoiseOrigin,
    SubsampledGaussianEvent,
    UnknownEvent,
    of_part,
)
from datalens.privacy.ledger import Budget
from datalens.privacy.noise import opendp_installed

if TYPE_CHECKING:
    import torch

    from datalens.data.records import Dataset, Records
    from datalens.public.theorem6 import Suggestion

# Limits for the values of settings. Settings are in the certificate, where a longer text could smuggle other data out.
MOST_SEED, MOST_TEXT = 2**62, 500
NoiseOfVotes = Literal["discrete-gaussian", "gaussian", "discrete-laplace"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of release of a run: what the ledger is charged for it, and how large its noise is.

    Attributes:
        name: for tables.
        event: the charge, as of step 0.
        sensitivity: how far one privacy unit can move the released value.
        times: number of releases of this kind, if no interruption loses one.
        cells: number of values in a release.
        noise_to_signal: ratio of the noise to the quantity that `Settings.signal` names; for people.
    """

    name: str
    event: Charge
    sensitivity: float
    times: int
    cells: int
    noise_to_signal: float


class Settings:
    """Everything that decides what a run does: public, and recorded in config.json and in the certificate.

    A subclass is a frozen dataclass that declares the fields; the JSON has them in the same order. The defaults of the
    methods below fit most subclasses.

    Attributes:
        steps: steps of the run, between which checkpoints may be written.
        plugins: names the package that brings the method, or a part of it; "" if none does.
        ZERO: fields of whole numbers that may be 0.
        OMITTED: field → value at which it is left out of the JSON, since older certificates do not have it.
        makes: what the run releases.
        answers: whether answers are charged separately, so that the weights state how many there were.
        one_part: whether no charge may name a part of the run.
        stepped: the part whose steps `Run.steps` counts and the weights state; "" if parts have no names.
        charges_once: whether a step that an interruption lost is never charged again.
    """

    method: str
    preset: str
    seed: int
    noise_seeded: bool
    noise: str
    steps: int

    ZERO: ClassVar[tuple[str, ...]] = ()
    OMITTED: ClassVar[dict[str, Any]] = {}
    makes: ClassVar[Literal["generator", "moments", "diffusion", "classifier"]] = "generator"
    answers: ClassVar[bool] = False
    one_part: ClassVar[bool] = False
    stepped: ClassVar[str] = ""
    charges_once: ClassVar[bool] = False
    plugins: str = ""

    # --- JSON

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, except those that `OMITTED` leaves out."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload] # subclasses are dataclasses
        return {
            name: value for name, value in fields.items() if name not in self.OMITTED or value != self.OMITTED[name]
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Return settings from JSON, which anybody may have edited.

        Args:
            fields: the JSON.

        Raises:
            DatalensError: a field is missing or unknown, or has a value that it cannot have.
        """
        return checked(cls, fields, zero=cls.ZERO)

    # --- public facts about the run

    @property
    def origin(self) -> NoiseOrigin:
        """The origin of the noise, as events state it."""
        return "seeded" if self.noise_seeded else "operating-system"

    @property
    def one_charge(self) -> bool:
        """Whether charges do not correspond to steps one by one."""
        return False

    @property
    def least_records(self) -> int:
        """The least number of records that a run needs: the number of teachers, if there are any."""
        return int(getattr(self, "teachers", 1))

    @property
    def steps_planned(self) -> int:
        """The number of steps (blocks, releases of moments) of a run that is not cut short."""
        return self.steps

    def check(self, schema: Schema) -> None:
        """Raise if the settings are invalid. Called on --resume too: config.json may have been edited.

        Args:
            schema: of the data.

        Raises:
            DatalensError: no run can be done with these settings.
        """

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """Return everything that a run will charge.

        Args:
            schema: of the data.
            budget: of the run.

        Raises:
            NotImplementedError: the subclass does not say.
        """
        raise NotImplementedError

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        """Return a line for each part of the schedule (see `cost`). Its share of the budget is its share of mu².

        Args:
            schema: of the data.
            budget: of the run.
        """
        parts = self.schedule(schema, budget)
        mu_squared = [part.times * part.event.mu * part.event.mu for part in parts]
        total = sum(mu_squared)
        return [
            cost(
                f"{part.times} × {part.name}",
                1.0 if len(parts) == 1 else part_mu_squared / total,
                part.event.sigma,
                part.sensitivity,
                part.cells,
                part.noise_to_signal,
            )
            for part, part_mu_squared in zip(parts, mu_squared, strict=True)
        ]

    def steps_paid(self, events: Sequence[Charge]) -> int:
        """Return the largest number of steps that these charges can have paid for.

        A step that an interruption lost is charged again under its own number, so every number counts once.

        Args:
            events: the ledger's charges.
        """
        if self.one_charge:
            return self.steps if events else 0
        return unbroken({event.step for event in events})

    def answers_paid(self, events: Sequence[Charge]) -> int:
        """Return the largest number of answers that these charges can have paid for; 0 if answers are not charged.

        Args:
            events: the ledger's charges.
        """
        return 0

    # --- for `verify`

    def possible(self, event: Charge, schema: Schema, budget: Budget) -> bool:
        """Return whether a run with these settings may charge this event.

        Args:
            event: a charge of the ledger.
            schema: of the data.
            budget: of the run.
        """
        return dataclasses.replace(event, step=0) in [part.event for part in self.schedule(schema, budget)]

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Compare a ledger with these settings, and return what contradicts them, a sentence each.

        Args:
            schema: of the data.
            budget: of the run.
            events: of the ledger, in their order.
        """
        self.check(schema)
        charges = known(events)
        if not all(self.possible(event, schema, budget) for event in charges):
            return ["the ledger has other releases than the settings state"]
        problems = self._left_out(schema, budget, charges)
        if self.one_charge:
            return problems
        names = sorted({event.part for event in charges})  # steps are numbered within a part of the run
        problems += [line for name in names for line in self._gaps(of_part(events, name))]
        return list(dict.fromkeys(problems))

    def _left_out(self, schema: Schema, budget: Budget, charges: Sequence[Charge]) -> list[str]:
        """Return a sentence for each earlier part whose charges are incomplete.

        Parts run in order, so the steps that the weights state need all charges of the parts before theirs.
        """
        due: dict[str, int] = {}
        for part in self.schedule(schema, budget):
            due[part.event.part] = due.get(part.event.part, 0) + part.times * getattr(part.event, "repeats", 1)
        names = list(due)
        before = names[: names.index(self.stepped)] if self.stepped in names else names
        return [
            f"the ledger lacks charges for the part {name or 'without a name'}, which comes before what was learned"
            for name in before
            if _times(of_part(charges, name)) < due[name]
        ]

    def _gaps(self, charges: Sequence[Charge]) -> list[str]:
        if all(isinstance(event, SubsampledGaussianEvent) for event in charges):
            return gaps_of_blocks([event for event in charges if isinstance(event, SubsampledGaussianEvent)])
        return [] if self.plugins else gaps({event.step for event in charges}, self.steps)

    def whole_plan(self, schema: Schema, budget: Budget, charged: Sequence[Charge]) -> list[tuple[Event, int]]:
        """Return everything that a run may charge: pairs (event, times). `verify` checks that it fits into the budget.

        Args:
            schema: of the data.
            budget: of the run.
            charged: the ledger's charges, already compared with these settings.
        """
        return [(part.event, part.times) for part in self.schedule(schema, budget)]

    def wrong_weights(self, model: Any, events: Sequence[Charge]) -> list[str]:
        """Compare released weights with these settings, and return what contradicts them. (Their kind was checked.)

        Args:
            model: the loaded weights.
            events: the ledger's charges.
        """
        return []

    # --- texts

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        """Return the certificate's texts `name` and `sensitivity` of the mechanism.

        Args:
            budget: of the run.

        Raises:
            NotImplementedError: the subclass does not say.
        """
        raise NotImplementedError

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        """Return the texts of `mechanism_said`; with `by_person`, for persons as privacy units.

        Args:
            budget: of the run.
            by_person: whether the privacy unit is a person.
        """
        said = self.mechanism_said(budget)
        return {name: text.replace("one record", "one person") if by_person else text for name, text in said.items()}

    def noise_said(self) -> str:
        """Return the certificate's text about how noise is represented."""
        return "floating point (see docs/privacy.md)"

    def price_said(self) -> str:
        """Return the certificate's text about how noise of this kind is priced."""
        return "as Gaussian noise of variance sigma²"

    def said(self) -> str:
        """Return one line about what the run will do, for the terminal."""
        return f"{self.steps} steps"

    def opening(self, schema: Schema, budget: Budget) -> str:
        """Return the first line of a run, to which the driver adds the budget.

        Args:
            schema: of the data.
            budget: of the run.
        """
        return f"{self.method} [{self.preset}] on {schema.name}: {self.said()}"

    def planned_as(self) -> str:
        """Return a few words about what the run will do, for `datalens plan`."""
        return self.said()

    @property
    def step_name(self) -> str:
        """The word for steps in the last line of a run."""
        return "steps"

    @property
    def one_process(self) -> str:
        """The error message for several processes, of a method that runs in one."""
        return f"--method {self.method} runs in one process: leave torchrun out"

    @property
    def signal(self) -> str:
        """The two quantities whose ratio `noise_to_signal` is, in words."""
        return "sigma / the largest norm of a row"

    def release_name(self, event: Charge) -> str | None:
        """Return the report's name for a release; None: the name of its kind.

        Args:
            event: the charge for it.
        """
        return None

    def expect(self, schema: Schema, budget: Budget) -> list[str]:
        """Return sentences about the images that this budget will give, as far as that can be predicted.

        Args:
            schema: of the data.
            budget: of the run.
        """
        return []

    def outlook(self, schema: Schema, budget: Budget, counts: Sequence[float]) -> "list[Outlook]":
        """Return how usable the images of each class will be if it has so many records; empty: that is not known.

        It is computed from its arguments alone. From released counts the result may be released; from exact ones it is
        for the owner.

        Args:
            schema: of the data.
            budget: of the run.
            counts: number of records of each class.
        """
        return []

    def warnings(self, schema: Schema, budget: Budget) -> list[str]:
        """Return warnings about these settings, for the owner to read before a run.

        Args:
            schema: of the data.
            budget: of the run.
        """
        return []

    def refusal(self, schema: Schema, budget: Budget) -> str | None:
        """Return why a run cannot succeed, even if all records were of one class; None if it may.

        Args:
            schema: of the data.
            budget: of the run.
        """
        return None

    def suggestion(self) -> "Suggestion | None":
        """Return the k that minimises the bound of Theorem 6, if teachers vote with their top k."""
        return None

    def seconds(self, schema: Schema) -> float | None:
        """Return an estimate of how long training takes on this machine's CPU, if there is one.

        Args:
            schema: of the data.
        """
        return None

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the facts that `--json` prints about runs of this method, besides those about all runs.

        Args:
            events: the ledger's charges.
        """
        return {"warm_start": "off", "sigma": getattr(self, "sigma", None)}


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A judgement of how usable the images of a class are.

    Attributes:
        usable: whether the class is learned well enough for its images to be of use.
        words: in words.
        remedy: what helps; "" if no help is needed.
    """

    usable: bool
    words: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """The fields that most methods have in common. They come first.

    The schedule is fixed before training: `verify` compares every charge of the ledger with it.
    """

    OMITTED: ClassVar[dict[str, Any]] = {"plugins": ""}

    method: str
    preset: str
    seed: int
    noise_seeded: bool
    noise: NoiseName
    steps: int
    plugins: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a run. None of this changes a result.

    Attributes:
        folder: of the run.
        world: all ranks, a `run.ranks.World`; None: this process alone.
        options: all options that were given; some name files.
        held_out: reads the test split, for the owner: what is measured on it is not covered by ε.
        closing: what is to be closed when the run ends; None: nothing can be.
    """

    device: "torch.device"
    folder: Path
    world: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    held_out: "Callable[[], Dataset] | None" = None
    closing: "contextlib.ExitStack | None" = None

    @property
    def chunk(self) -> int | None:
        """Number of teachers to work on at a time; None: as many as fit."""
        return self.options.get("chunk")


class Gathered(Protocol):
    """The part of the records that a method keeps for training; private."""

    @property
    def count(self) -> int:
        """Number of records."""

    @property
    def fingerprint(self) -> int:
        """Hash of all records; those of several ranks add up to that of the whole data set."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method. `registry.METHODS` maps its name to the place of this object.

    Attributes:
        settings: the class of its settings, which certificates contain.
        plan: (request, schema, budget) → settings, from public facts alone.
        gather: (records, settings, place) → what training needs of the records.
        train: (`run.folder.Run`, gathered, settings, place) → the model to release. It stops at the last planned
            step, when the budget is spent, or when it is interrupted.
        follow: (schema, gathered, settings, place), called on ranks 1, 2, …; None: the method runs in one process.
        options: a frozen dataclass of the method's own options, beside those that every method takes. Its fields become
            options of the command line; each needs a default and a docstring. None stands for the preset's value.
        presets: names of its presets; the first is the default.
        accountant: its default accountant.
        instead: (request, schema, budget) → the registered name of a method to use instead of this one, decided by
            public facts; None: this one. For options whose value is "auto".
        command: the command that runs it.
        persons: whether it can protect a person with all of their images.
        teachers: whether each record belongs to one of several teachers.
        version: raised whenever the same options and seed would give other results than before. Kept results name it,
            so that those of older code are known.
    """

    settings: type[Settings]
    plan: Callable[["Request", Schema, Budget], Settings]
    gather: "Callable[[Records, Any, Place], Gathered]"
    train: Callable[[Any, Any, Any, Place], Any]
    follow: Callable[[Schema, Any, Any, Place], None] | None = None
    options: type[Any] = NoOptions
    presets: tuple[str, ...] = ("paper", "quick")
    accountant: AccountantName = "exact"
    instead: Callable[["Request", Schema, Budget], str | None] | None = None
    command: Literal["train", "sgd"] = "train"
    persons: bool = False
    teachers: bool = False
    version: int = 1


# --- for plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """The public facts that a method's plan gets, besides schema and budget.

    Attributes:
        options: an instance of the method's `options`.
    """

    method: str
    preset: str
    seed: int
    noise_seed: int | None
    options: Any


Own = TypeVar("Own")


def read_options(kind: type[Own], given: Mapping[str, Any]) -> Own:
    """Return a method's own options, with the given values.

    Args:
        kind: the method's `options`.
        given: name → value; the other options keep their defaults.

    Raises:
        DatalensError: there is no such option, or it cannot have this value.
    """
    kinds = get_type_hints(kind, include_extras=True)
    for name, value in given.items():
        if name not in kinds:
            raise DatalensError(f"there is no option {name!r}")
        check_value(f"--{name.replace('_', '-')}", value, kinds[name])
    return kind(**given)


def common(request: Request) -> dict[str, Any]:
    """Return the settings that every method has, from the request.

    Args:
        request: the plan's.
    """
    return {
        "method": request.method,
        "preset": request.preset,
        "seed": request.seed,
        "noise_seeded": request.noise_seed is not None,
    }


def asked(options: Any, *names: str) -> dict[str, Any]:
    """Return those of the named options that were given.

    Args:
        options: the method's own.
        names: of the options.

    Raises:
        DatalensError: a whole number is less than 1, or a number is negative or not finite.
    """
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        least = 0 if isinstance(value, float) else 1
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
            raise DatalensError(f"--{name.replace('_', '-')} must be a finite number, at least {least}, not {value:g}")
    return given


def check_seed(seed: int) -> None:
    """Raise if a certificate with this seed could not be read again.

    Args:
        seed: of training.

    Raises:
        DatalensError: it has too many digits.
    """
    if not -MOST_SEED <= seed < MOST_SEED:
        raise DatalensError("--seed has too many digits: give a whole number from -2^62 to 2^62")


def check_exact_noise(request: Request) -> None:
    """Raise if exact noise is requested and not available.

    Args:
        request: its options have a field `noise`.

    Raises:
        DatalensError: the noise would have a seed, or OpenDP is not installed.
    """
    if request.options.noise == "discrete-gaussian" and request.noise_seed is not None:
        raise DatalensError("--noise-seed is for --noise gaussian: OpenDP's noise has no seed")
    if request.options.noise == "discrete-gaussian" and not opendp_installed():
        raise DatalensError("--noise discrete-gaussian needs OpenDP: pip install opendp, or leave --noise out")


def can_be_exact(request: Request) -> bool:
    """Return whether exact noise is available: it comes from OpenDP, and cannot be seeded.

    Args:
        request: the plan's.
    """
    return request.noise_seed is None and opendp_installed()


def whole_number_law(request: Request, budget: Budget) -> NoiseName:
    """Return the kind of noise for sums of whole numbers: the requested one, else exact noise if it is available.

    Args:
        request: its options have a field `noise`.
        budget: of the run.

    Raises:
        DatalensError: exact noise is requested and not available.
    """
    check_exact_noise(request)
    if math.isinf(budget.epsilon):
        return "gaussian"  # of width 0
    asked_for: NoiseName | None = request.options.noise
    return asked_for or ("discrete-gaussian" if can_be_exact(request) else "gaussian")


def law_said(settings: Settings, *, real: bool = False) -> str:
    """Return a description of the noise; and why it is not exact, if it could be.

    Args:
        settings: of the run.
        real: whether sums are real numbers, for which there is no exact noise.
    """
    if settings.noise == "discrete-gaussian":
        return "exact discrete Gaussian noise"
    kind = "floating-point Gaussian noise" if real else "rounded Gaussian noise"
    missing = not real and not settings.noise_seeded and not opendp_installed()
    return kind + ("; OpenDP, for exact noise, is not installed" if missing else "")


def gaussian_event(law: str, facts: dict[str, Any]) -> GaussianEvent:
    """Return the event of one release with noise of this kind.

    Args:
        law: the kind of noise.
        facts: fields of the event. `coordinates` among them is used for exact noise only.
    """
    if law == "discrete-gaussian":
        return DiscreteGaussianEvent(**facts)
    return GaussianEvent(**{name: value for name, value in facts.items() if name != "coordinates"})


def cost(name: str, part: float, sigma: float, sensitivity: float, cells: int, relative: float) -> dict[str, Any]:
    """Return one line of a plan's table.

    Args:
        name: of the release.
        part: its share of the budget.
        sigma: standard deviation of its noise.
        sensitivity: how far one privacy unit can move it.
        cells: number of values in it.
        relative: noise-to-signal ratio (see `Settings.signal`).
    """
    return {
        "release": name,
        "share": part,
        "sigma": sigma,
        "sensitivity": sensitivity,
        "cells": cells,
        "noise_to_signal": relative,
    }


# --- for ledgers ----------------------------------------------------------------------------------------------------


def known(events: Sequence[Event]) -> list[Charge]:
    """Return the events that this version can price.

    Args:
        events: of a ledger.
    """
    return [event for event in events if not isinstance(event, UnknownEvent)]


def _times(charges: Sequence[Charge]) -> int:
    """Return how often something was released with these charges; what was lost, and charged again, counts once."""
    return sum({event.step: getattr(event, "repeats", 1) for event in charges}.values())


def unbroken(numbers: set[int]) -> int:
    """Return the smallest whole number from 0 on that is not among these.

    Args:
        numbers: whole numbers from 0 on.
    """
    return next(i for i in range(len(numbers) + 1) if i not in numbers)


def gaps(steps: set[int], planned: int) -> list[str]:
    """Return a list with one problem, unless the charged steps are 0, 1, 2, … and at most as many as planned.

    A step that an interruption lost is charged again under the same number.

    Args:
        steps: the charged steps.
        planned: number of steps of the whole run.
    """
    complete = unbroken(steps) == len(steps) <= planned
    return [] if complete else ["the ledger has gaps, or more steps than the settings state"]


def gaps_of_blocks(events: Sequence[SubsampledGaussianEvent]) -> list[str]:
    """Return a list with one problem, unless every block of sampled steps begins where the one before it ended.

    Args:
        events: one for each block, in their order.
    """
    steps = [event.step for event in events]
    begins = [sum(event.repeats for event in events[:number]) for number in range(len(events))]
    return [] if steps == begins else ["the ledger has gaps: a block of steps does not begin where the last one ended"]


# --- settings from JSON ---------------------------------------------------------------------------------------------


def checked(cls: type[Any], fields: dict[str, Any], *, zero: tuple[str, ...] = ()) -> Any:
    """Return settings of class `cls` from JSON, which anybody may have edited.

    Args:
        cls: a subclass of `Settings`.
        fields: the JSON.
        zero: fields of whole numbers that may be 0.

    Raises:
        DatalensError: a field is missing or unknown, or has a value that it cannot have.
    """
    try:
        settings = cls(**fields)
    except TypeError as error:
        raise DatalensError(f"these settings are not those of this version of datalens: {error}") from error
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        value = getattr(settings, name)
        least = None if name == "seed" else 1 if kind is int and name not in zero else 0
        if not _fits(value, kind, smallest=least):
            raise DatalensError(f"the setting {name} cannot be {str(value)[:40]!r}")
    return settings


def _fits(value: Any, kind: Any, *, smallest: int | None) -> bool:
    """Return whether a value read from JSON has the field's type, and a valid size."""
    if kind is int:
        return type(value) is int and (-MOST_SEED if smallest is None else smallest) <= value < MOST_SEED
    if kind is float:
        return type(value) in (int, float) and (smallest is None or smallest <= value < 1e300)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return type(value) is kind and (kind is not str or len(value) <= MOST_TEXT)
