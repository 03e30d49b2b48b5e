"""What an audit tries to prove wrong."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from datalens.errors import DatalensError
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget, Ledger

ACCOUNTANT: Literal["rdp-improved"] = "rdp-improved"  # it prices the mechanisms of all other methods


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


@dataclass(frozen=True, kw_only=True)
class Question(Claim):
    """What is claimed of a mechanism of another method."""

    accountant: ClassVar[AccountantName] = ACCOUNTANT

    @property
    def free(self) -> Ledger:
        """For what is released and not, or not rightly, paid for."""
        return Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant=ACCOUNTANT))


# (whether the record is there, how many trials) → log-likelihood ratios [trials], and the ε a ledger says one cost
Trials = Callable[[bool, int], tuple[np.ndarray, float]]
