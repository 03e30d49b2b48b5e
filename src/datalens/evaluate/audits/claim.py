"""What an audit tries to prove wrong."""

import math
from dataclasses import dataclass
from typing import ClassVar

from datalens.errors import DatalensError
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed, and how often it is asked."""

    epsilon: float
    delta: float
    trials: int = 10_000  # in each world
    accountant: ClassVar[AccountantName] = "exact"

    def __post_init__(self) -> None:
        if self.trials < 100:
            raise DatalensError(f"--trials must be at least 100 for an audit, not {self.trials}")
        if not math.isfinite(self.epsilon):
            raise DatalensError("an infinite epsilon claims nothing that an audit could prove wrong: give a finite one")
        _ = self.budget

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta, relation="add-remove", accountant=self.accountant)
