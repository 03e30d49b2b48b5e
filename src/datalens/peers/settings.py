"""What the settings of all these methods have in common. Every other file here has one method's settings and plan."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.plans.settings import NoiseName, checked
from datalens.privacy.events import Charge, NoiseOrigin
from datalens.privacy.ledger import Budget
from datalens.privacy.noise import opendp_installed


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of release of a run: what the ledger is charged for it, and how loud its noise is."""

    name: str
    event: Charge  # at step 0
    sensitivity: float  # how far one unit can move it
    times: int  # how often, if no interruption loses one
    cells: int  # numbers in one
    noise_to_signal: float  # for a person, see `PeerSettings.signal`


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Everything a run does, resolved and public: recorded in config.json and in the certificate.

    The schedule is fixed before the first record is read: `verify` compares every charge of the ledger with it.
    """

    method: str
    preset: str
    seed: int
    noise_seeded: bool
    noise: NoiseName
    steps: int  # of the run: checkpoints lie between them
    plugins: str = ""  # where the method is another package's: which

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return fields if self.plugins else {name: value for name, value in fields.items() if name != "plugins"}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return checked(cls, fields)

    @property
    def origin(self) -> NoiseOrigin:
        return "seeded" if self.noise_seeded else "operating-system"

    @property
    def one_charge(self) -> bool:
        """Whether the charges are not one a step."""
        return False

    def check(self, schema: Schema) -> None:
        """What no run can be done with; also asked when one goes on, since its config.json may have been edited."""

    def schedule(self, schema: Schema, budget: Budget) -> tuple[Part, ...]:
        """All that will be charged."""
        raise NotImplementedError

    def possible(self, event: Charge, schema: Schema, budget: Budget) -> bool:
        """Whether a ledger may have been charged for this."""
        return dataclasses.replace(event, step=0) in [part.event for part in self.schedule(schema, budget)]

    def steps_paid(self, events: Sequence[Charge]) -> int:
        """Return the most steps that may have been completed with these charges."""
        if self.one_charge:
            return self.steps if events else 0
        return unbroken({event.step for event in events})

    def mechanism(self, budget: Budget) -> dict[str, str]:
        """For the certificate: `name` and `sensitivity`."""
        raise NotImplementedError

    def noise_said(self) -> str:
        return "floating point (see docs/privacy.md)"

    def price_said(self) -> str:
        """By which theorem noise of this kind is paid for."""
        return "as Gaussian noise of variance sigma²"

    def said(self) -> str:
        """What is about to be done, in a line."""
        return f"{self.steps} steps"

    @property
    def signal(self) -> str:
        """What the noise is compared with in a plan."""
        return "sigma by the longest row"


def unbroken(numbers: set[int]) -> int:
    """Return the first whole number, from 0 on, that is missing."""
    return next(i for i in range(len(numbers) + 1) if i not in numbers)


def common(options: TrainOptions, preset: str) -> dict[str, Any]:
    """Settings every method has, as they were asked for."""
    return {
        "method": options.method,
        "preset": preset,
        "seed": options.seed,
        "noise_seeded": options.noise_seed is not None,
    }


def asked(options: TrainOptions, *names: str) -> dict[str, Any]:
    """Those of these options that were given, checked for being sizes at all."""
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        least = 0 if isinstance(value, float) else 1
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= least):
            raise DatalensError(f"--{name.replace('_', '-')} must be a finite number, at least {least}, not {value:g}")
    return given


def whole_number_law(options: TrainOptions, budget: Budget) -> NoiseName:
    """Of noise on sums of whole numbers: exact wherever it can be had."""
    if options.noise == "discrete-gaussian" and options.noise_seed is not None:
        raise DatalensError("--noise-seed is for --noise gaussian: OpenDP's noise has no seed")
    if options.noise == "discrete-gaussian" and not opendp_installed():
        raise DatalensError("--noise discrete-gaussian needs OpenDP: pip install opendp, or leave --noise out")
    if math.isinf(budget.epsilon):
        return "gaussian"  # of width 0
    exact = options.noise_seed is None and opendp_installed()
    return options.noise or ("discrete-gaussian" if exact else "gaussian")
