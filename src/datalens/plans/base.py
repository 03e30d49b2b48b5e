"""A method, as everything outside `methods/` sees it: its settings, what they cost, and how they are described.

A method is one file in `methods/`. It has settings (public, serialised into certificates), a plan that makes them from
public facts, `gather` (what it keeps of records) and `train` (what it learns through the gate), put together in one
`Method`; `registry.py` names the file. The driver, `verify`, reports and budgets ask the settings, and never for their
class.
"""

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

# Of what settings hold: they are in the certificate, where a longer text or number would be room for something else.
MOST_SEED, MOST_TEXT = 2**62, 500
NoiseOfVotes = Literal["discrete-gaussian", "gaussian", "discrete-laplace"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of release of a run: what the ledger is charged for it, and how loud its noise is."""

    name: str
    event: Charge  # at step 0
    sensitivity: float  # how far one unit can move it
    times: int  # how often, if no interruption loses one
    cells: int  # numbers in one
    noise_to_signal: float  # for a person, see `Settings.signal`


class Settings:
    """Everything a run does, resolved and public: recorded in config.json and in the certificate.

    A subclass is a frozen dataclass that declares the fields; their order is that of the JSON. What is asked of all
    settings has an answer here that fits most methods.
    """

    method: str
    preset: str
    seed: int
    noise_seeded: bool
    noise: str
    steps: int  # of the run: checkpoints lie between them

    ZERO: ClassVar[tuple[str, ...]] = ()  # whole numbers that may be 0
    OMITTED: ClassVar[dict[str, Any]] = {}  # field → value with which it is left out, as older certificates lack it
    makes: ClassVar[Literal["generator", "moments", "classifier"]] = "generator"  # what is released
    answers: ClassVar[bool] = False  # whether answers are charged for apart, and the weights state how many there were
    one_part: ClassVar[bool] = False  # whether no charge may name a part of the run
    stepped: ClassVar[str] = (
        ""  # the part of `Run.steps`, where parts have names: of its steps the weights state how many
    )
    charges_once: ClassVar[bool] = False  # whether a step that an interruption lost is never charged again
    plugins: str = ""  # where the method, or a part of it, is another package's: which

    # --- as JSON

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON, without those that `OMITTED` leaves out."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload] # subclasses are dataclasses
        return {
            name: value for name, value in fields.items() if name not in self.OMITTED or value != self.OMITTED[name]
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Return settings from JSON that anybody may have edited.

        Raises:
            DatalensError: a field is missing, unknown, or of a value it cannot have.
        """
        return checked(cls, fields, zero=cls.ZERO)

    # --- public facts about the run

    @property
    def origin(self) -> NoiseOrigin:
        return "seeded" if self.noise_seeded else "operating-system"

    @property
    def one_charge(self) -> bool:
        """Whether the charges are not one a step."""
        return False

    @property
    def least_records(self) -> int:
        """How many records there must be for a run to make sense: the number of teachers, where there are some."""
        return int(getattr(self, "teachers", 1))

    @property
    def steps_planned(self) -> int:
        """The most steps (blocks, releases of moments) that a run with these settings completes."""
        return self.steps

    def check(self, schema: Schema) -> None:
        """Raise DatalensError if no run can be done with these; asked on --resume too, as config.json may be edited."""

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """Return all that will be charged."""
        raise NotImplementedError

    def costs(self, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
        """Return what each part costs, and how loud its noise will be beside what it says; its share is that of mu²."""
        parts = self.schedule(schema, budget)
        loud = [part.times * part.event.mu * part.event.mu for part in parts]
        whole = sum(loud)
        return [
            cost(
                f"{part.times} × {part.name}",
                1.0 if len(parts) == 1 else own / whole,
                part.event.sigma,
                part.sensitivity,
                part.cells,
                part.noise_to_signal,
            )
            for part, own in zip(parts, loud, strict=True)
        ]

    def steps_paid(self, events: Sequence[Charge]) -> int:
        """Return the most steps that may have been completed with these charges.

        A step that an interruption lost is charged again under its own number, so numbers are counted once.
        """
        if self.one_charge:
            return self.steps if events else 0
        return unbroken({event.step for event in events})

    def answers_paid(self, events: Sequence[Charge]) -> int:
        """Return the most queries that may have been answered with these charges, where answers are charged apart."""
        return 0

    # --- for `verify`

    def possible(self, event: Charge, schema: Schema, budget: Budget) -> bool:
        """Whether a ledger may have been charged for this."""
        return dataclasses.replace(event, step=0) in [part.event for part in self.schedule(schema, budget)]

    def disagreements(self, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
        """Return what is wrong with a ledger that is said to be of a run with these settings."""
        self.check(schema)
        charges = known(events)
        if not all(self.possible(event, schema, budget) for event in charges):
            return ["the ledger has other releases than the settings state"]
        found = self._left_out(schema, budget, charges)
        if self.one_charge:
            return found
        names = sorted({event.part for event in charges})  # steps are numbered within a part of the run
        found += [line for name in names for line in self._gaps(of_part(events, name))]
        return list(dict.fromkeys(found))

    def _left_out(self, schema: Schema, budget: Budget, charges: Sequence[Charge]) -> list[str]:
        """What is missing of the parts that come before the one whose steps the weights state.

        Without all of them there were no such steps.
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
        """Return all that a run may charge, of whose price `verify` makes sure that it fits into the budget.

        Args:
            charged: what the ledger has, already compared with these settings.
        """
        return [(part.event, part.times) for part in self.schedule(schema, budget)]

    def wrong_weights(self, model: Any, events: Sequence[Charge]) -> list[str]:
        """Return what is wrong with weights that are said to be of a run with these settings, besides their kind."""
        return []

    # --- for people

    def mechanism_said(self, budget: Budget) -> dict[str, str]:
        """Return the certificate's `name` and `sensitivity`."""
        raise NotImplementedError

    def mechanism_for(self, budget: Budget, *, by_person: bool) -> dict[str, str]:
        """Return the same where persons are protected."""
        said = self.mechanism_said(budget)
        return {name: text.replace("one record", "one person") if by_person else text for name, text in said.items()}

    def noise_said(self) -> str:
        return "floating point (see docs/privacy.md)"

    def price_said(self) -> str:
        """By which theorem noise of this kind is paid for."""
        return "as Gaussian noise of variance sigma²"

    def said(self) -> str:
        """What is about to be done, in a line."""
        return f"{self.steps} steps"

    def opening(self, schema: Schema, budget: Budget) -> str:
        """The first line of a run, without its budget."""
        return f"{self.method} [{self.preset}] on {schema.name}: {self.said()}"

    def planned_as(self) -> str:
        """How a plan says it, in a few words."""
        return self.said()

    @property
    def step_name(self) -> str:
        """What a step is called when a run ends."""
        return "steps"

    @property
    def one_process(self) -> str:
        """Why several processes cannot share the work, where they cannot."""
        return f"--method {self.method} runs in one process: leave torchrun out"

    @property
    def signal(self) -> str:
        """What the noise is compared with in a plan."""
        return "sigma by the longest row"

    def release_name(self, event: Charge) -> str | None:
        """Return the report's name of a release; None: the name of its kind."""
        return None

    def expect(self, schema: Schema, budget: Budget) -> list[str]:
        """What will I get for this ε? Where nothing is known, the table of noise is all there is to say."""
        return []

    def warnings(self, schema: Schema, budget: Budget) -> list[str]:
        """Return what an owner should hear of these settings before a run."""
        return []

    def refusal(self, schema: Schema, budget: Budget) -> str | None:
        """Return why nothing can come of a run, even if all records were of one class; None where something may."""
        return None

    def suggestion(self) -> "Suggestion | None":
        """Return the k that Theorem 6 is smallest for, where teachers vote with their top k."""
        return None

    def seconds(self, schema: Schema) -> float | None:
        """Return how long training will take on this machine's CPU, where that can be estimated."""
        return None

    def facts(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return what `--json` says of a run besides what it says of all."""
        return {"warm_start": "off", "sigma": getattr(self, "sigma", None)}


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """The fields that most methods have in common, and begin with.

    The schedule is fixed before the first record is read: `verify` compares every charge of the ledger with it.
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
    """Where a run is done; nothing of it changes a result."""

    device: "torch.device"
    folder: Path  # of the run
    world: Any = None  # a `run.ranks.World`: all ranks; None: this process alone
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # all that was given: where files lie
    held_out: "Callable[[], Dataset] | None" = None  # reads the test split, for the owner: not covered by ε

    @property
    def chunk(self) -> int | None:
        """Return how many teachers to work on at a time; None: as many as fit."""
        return self.options.get("chunk")


class Gathered(Protocol):
    """What a method keeps of records. Private."""

    @property
    def count(self) -> int: ...

    @property
    def fingerprint(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: `registry.METHODS` has its name, and where to find this.

    Attributes:
        options: a frozen dataclass of the options that this method has and not every method; its fields are its part
            of the command line, each with a default and a docstring. None stands for the preset's value.
        settings: what it does, as certificates have it.
        plan: (request, schema, budget) → settings, from public facts alone.
        gather: (records, settings, place) → what training needs of the records.
        train: (`run.folder.Run`, gathered, settings, place) → the model to release. It stops at the last planned
            step, at the budget, or when a person asks.
        follow: (schema, gathered, settings, place), on ranks 1, 2, …; None: it runs in one process.
        presets: the first one is taken unless another is asked for.
        accountant: unless another is asked for.
        command: the command that runs it.
        persons: whether it can protect a person with all of their images.
        teachers: whether records are shared out to teachers.
    """

    settings: type[Settings]
    plan: Callable[["Request", Schema, Budget], Settings]
    gather: "Callable[[Records, Any, Place], Gathered]"
    train: Callable[[Any, Any, Any, Place], Any]
    follow: Callable[[Schema, Any, Any, Place], None] | None = None
    options: type[Any] = NoOptions
    presets: tuple[str, ...] = ("paper", "quick")
    accountant: AccountantName = "exact"
    command: Literal["train", "sgd"] = "train"
    persons: bool = False
    teachers: bool = False


# --- for plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked of a method, as its plan sees it: public facts.

    Attributes:
        options: an instance of the method's own `options`.
    """

    method: str
    preset: str
    seed: int
    noise_seed: int | None
    options: Any


Own = TypeVar("Own")


def read_options(kind: type[Own], given: Mapping[str, Any]) -> Own:
    """Return a method's own options, of which these were given by name.

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
    """Return the settings that every method has, as they were asked for."""
    return {
        "method": request.method,
        "preset": request.preset,
        "seed": request.seed,
        "noise_seeded": request.noise_seed is not None,
    }


def asked(options: Any, *names: str) -> dict[str, Any]:
    """Return those of these options that were given, checked for being sizes at all."""
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        least = 0 if isinstance(value, float) else 1
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
            raise DatalensError(f"--{name.replace('_', '-')} must be a finite number, at least {least}, not {value:g}")
    return given


def check_seed(seed: int) -> None:
    """Raise if no certificate could be read that states this seed."""
    if not -MOST_SEED <= seed < MOST_SEED:
        raise DatalensError("--seed has too many digits: give a whole number from -2^62 to 2^62")


def check_exact_noise(request: Request) -> None:
    """Raise if exact noise is asked for, and cannot be had."""
    if request.options.noise == "discrete-gaussian" and request.noise_seed is not None:
        raise DatalensError("--noise-seed is for --noise gaussian: OpenDP's noise has no seed")
    if request.options.noise == "discrete-gaussian" and not opendp_installed():
        raise DatalensError("--noise discrete-gaussian needs OpenDP: pip install opendp, or leave --noise out")


def can_be_exact(request: Request) -> bool:
    """Return whether exact noise can be had: it is OpenDP's, and has no seed."""
    return request.noise_seed is None and opendp_installed()


def whole_number_law(request: Request, budget: Budget) -> NoiseName:
    """Return the kind of noise on sums of whole numbers: exact wherever it can be had."""
    check_exact_noise(request)
    if math.isinf(budget.epsilon):
        return "gaussian"  # of width 0
    asked_for: NoiseName | None = request.options.noise
    return asked_for or ("discrete-gaussian" if can_be_exact(request) else "gaussian")


def law_said(settings: Settings, *, real: bool = False) -> str:
    """Which noise, for a person; and why not the exact one, where that could be had. `real`: sums are real numbers."""
    if settings.noise == "discrete-gaussian":
        return "exact discrete Gaussian noise"
    kind = "floating-point Gaussian noise" if real else "rounded Gaussian noise"
    missing = not real and not settings.noise_seeded and not opendp_installed()
    return kind + ("; OpenDP, for exact noise, is not installed" if missing else "")


def gaussian_event(law: str, facts: dict[str, Any]) -> GaussianEvent:
    """The event of one release with noise of this law; `facts` has `coordinates`, which only exact noise is told."""
    if law == "discrete-gaussian":
        return DiscreteGaussianEvent(**facts)
    return GaussianEvent(**{name: value for name, value in facts.items() if name != "coordinates"})


def cost(name: str, part: float, sigma: float, sensitivity: float, cells: int, relative: float) -> dict[str, Any]:
    """A line of a plan's table."""
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
    """The events that this version can price."""
    return [event for event in events if not isinstance(event, UnknownEvent)]


def _times(charges: Sequence[Charge]) -> int:
    """Return how often something was released with these charges; what was lost, and charged again, counts once."""
    return sum({event.step: getattr(event, "repeats", 1) for event in charges}.values())


def unbroken(numbers: set[int]) -> int:
    """Return the first whole number, from 0 on, that is missing."""
    return next(i for i in range(len(numbers) + 1) if i not in numbers)


def gaps(steps: set[int], planned: int) -> list[str]:
    """Steps are charged one after the other, and none that was not planned; one that was lost is charged again."""
    whole = unbroken(steps) == len(steps) <= planned
    return [] if whole else ["the ledger has gaps, or more steps than the settings state"]


def gaps_of_blocks(events: Sequence[SubsampledGaussianEvent]) -> list[str]:
    """Blocks of sampled steps are charged one after the other, each beginning where the last one ended."""
    steps = [event.step for event in events]
    begins = [sum(event.repeats for event in events[:number]) for number in range(len(events))]
    return [] if steps == begins else ["the ledger has gaps: a block of steps does not begin where the last one ended"]


# --- settings from JSON ---------------------------------------------------------------------------------------------


def checked(cls: type[Any], fields: dict[str, Any], *, zero: tuple[str, ...] = ()) -> Any:
    """From JSON, which anybody may have edited: what does not fit is said here, not found out in mid-run."""
    try:
        settings = cls(**fields)
    except TypeError as error:
        raise DatalensError(f"these settings are not of this version of datalens: {error}") from error
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        value = getattr(settings, name)
        least = None if name == "seed" else 1 if kind is int and name not in zero else 0
        if not _fits(value, kind, smallest=least):
            raise DatalensError(f"the setting {name} cannot be {str(value)[:40]!r}")
    return settings


def _fits(value: Any, kind: Any, *, smallest: int | None) -> bool:
    """Whether a value read from JSON is one of the field's type, and of a size that means something."""
    if kind is int:
        return type(value) is int and (-MOST_SEED if smallest is None else smallest) <= value < MOST_SEED
    if kind is float:
        return type(value) in (int, float) and (smallest is None or smallest <= value < 1e300)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return type(value) is kind and (kind is not str or len(value) <= MOST_TEXT)
