"""Settings and functions of methods whose teachers vote: the teachers, and how records are divided among them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import CHOICE, WholeNumber
from datalens.plans.base import Place, Request, StepSettings, asked
from datalens.privacy.ledger import Budget
from datalens.private.networks import Network, network_named
from datalens.private.partition import rule_named
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.public.basis import make_basis

HIDDEN = {"spectral": 16, "compact": 16, "paper": 256, "printed": 256}  # units of the teachers' dense layer


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """The options of every method with voting teachers."""

    teachers: WholeNumber = None
    """Number of teachers, each trained on its own share of the records."""
    network: Annotated[Literal["spectral", "compact", "paper"] | None, CHOICE] = None
    """The teachers' network. spectral: on cosine coefficients. compact: small and convolutional. paper: of its size."""
    steps: WholeNumber = None
    """Steps of the student. In each, the teachers vote on one batch of synthetic images."""
    batch: WholeNumber = None
    """Synthetic images per step."""
    teacher_steps: WholeNumber = None
    """Steps of each teacher per step of the student."""
    basis: Annotated[Literal["pixel", "dct"] | None, CHOICE] = None
    """Coordinates in which teachers vote."""
    basis_size: WholeNumber = None
    """Number of coordinates (not of pixels): low-frequency cosines, or random directions."""


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings(StepSettings):
    """Settings of methods with voting teachers, who vote on `batch` images in each step."""

    teachers: int
    shares: Literal["hashed", "balanced"]
    network: Literal["spectral", "compact", "paper"]
    hidden: int
    basis: Literal["pixel", "dct"]
    basis_size: int
    teacher_rate: float
    teacher_weight_decay: float
    teacher_steps: int  # of each teacher in a step
    teacher_steps_first: int
    teacher_batch: int  # records that a teacher draws for a step
    batch: int
    latent: int

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
        if self.basis_size > schema.dimensions:
            raise DatalensError(f"--basis-size {self.basis_size} is more than an image's {schema.dimensions} values")
        if self.basis == "pixel" and self.basis_size != schema.dimensions:
            raise DatalensError("--basis-size is for --basis dct, since --basis pixel uses all pixels: leave it out")
        if self.network == "spectral" and self.basis == "pixel":
            raise DatalensError(
                "--network spectral works on cosine coefficients: use --basis dct, or --network compact or paper"
            )
        if self.teachers > schema.nominal_size:
            raise DatalensError(
                f"--teachers {self.teachers} is more than the {schema.nominal_size} records {schema.name} has: "
                "most shares would be empty; choose fewer"
            )


def teacher_values(request: Request, schema: Schema, budget: Budget, *, records_each: int) -> dict[str, Any]:
    """Return the settings of the teachers: small ones on low-frequency cosines, of which a CPU can train thousands.

    Args:
        request: its options replace these defaults.
        records_each: about how many records a teacher gets.
    """
    values: dict[str, Any] = {
        "teachers": max(1, schema.nominal_size // records_each),
        "network": "spectral",
        "basis": "dct",
        "teacher_rate": 5e-4,
        "teacher_weight_decay": 0.03,
        "teacher_steps": 2,
        "teacher_steps_first": 10,
        "teacher_batch": 15,
        "latent": 50,
    }
    values |= asked(request.options, *TeacherOptions.__dataclass_fields__)
    full = schema.dimensions
    values.setdefault("basis_size", full if values["basis"] == "pixel" else min(64, full))
    values["hidden"] = HIDDEN[values["network"]]
    # A record that replaces another has its position, but not its hash (see `methods.topagg.plan`).
    values["shares"] = "balanced" if budget.relation == "replace-one" else "hashed"
    return values


def share_out(records: Records, settings: EnsembleSettings, place: Place) -> Shares:
    """Put every record into exactly one share, as the features that its teacher sees."""
    rule = rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)
    features = _network(settings, records.schema).record_features
    return Shares.gather(records, rule, features=features, device=place.device)


def make_teachers(shares: Shares, s: EnsembleSettings, schema: Schema) -> Teachers:
    return Teachers(
        _network(s, schema),
        shares,
        batch=s.teacher_batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
    )


def _network(s: EnsembleSettings, schema: Schema) -> Network:
    basis = make_basis(s.basis, schema.shape, s.basis_size)
    return network_named(s.network, basis, len(schema.classes), hidden=s.hidden)
