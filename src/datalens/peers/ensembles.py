"""What methods whose teachers vote have in common: the teachers, and how records are shared out."""

from dataclasses import dataclass
from typing import Any, Literal

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.peers.settings import PeerSettings, asked
from datalens.plans.presets import HIDDEN

OPTIONS = ("teachers", "network", "basis", "basis_size", "teacher_steps", "batch", "steps")


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings(PeerSettings):
    """`batch` images are asked about in a step."""

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
    teacher_batch: int  # records a teacher draws
    batch: int
    latent: int

    def check(self, schema: Schema) -> None:
        if self.batch < 2:
            raise DatalensError("--batch must be at least 2: the generator's batch norm needs two images")
        if self.basis_size > schema.dimensions:
            raise DatalensError(f"--basis-size {self.basis_size} is more than an image's {schema.dimensions} values")
        if self.basis == "pixel" and self.basis_size != schema.dimensions:
            raise DatalensError("--basis-size belongs to --basis dct; pixels always come in full")
        if self.network == "spectral" and self.basis == "pixel":
            raise DatalensError(
                "--network spectral sees cosine coefficients: use --basis dct, or --network compact or paper"
            )
        if self.teachers > schema.nominal_size:
            raise DatalensError(
                f"--teachers {self.teachers} is more than the {schema.nominal_size} records {schema.name} has: "
                "most shares would be empty; choose fewer"
            )


def teacher_values(options: TrainOptions, schema: Schema, *, records_each: int) -> dict[str, Any]:
    """Small teachers over low-frequency cosines, which a CPU carries by the thousand; or as asked."""
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
    values |= asked(options, *OPTIONS)
    full = schema.dimensions
    values.setdefault("basis_size", full if values["basis"] == "pixel" else min(64, full))
    values["hidden"] = HIDDEN[values["network"]]
    # A replaced record keeps its position, but not its hash (see `plan.topagg_plan`).
    values["shares"] = "balanced" if options.relation == "replace-one" else "hashed"
    return values
