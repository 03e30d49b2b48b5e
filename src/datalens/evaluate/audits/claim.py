"""The claims that audits try to refute."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from datalens.errors import DatalensError
from datalens.privacy.accountant import AccountantName
from datalens.privacy.ledger import Budget, Ledger

ACCOUNTANT: Literal["rdp-improved"] = "rdp-improved"  # the accountant that can price the mechanisms of other methods


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claimed (ε, δ), and the number of trials of an audit."""

    epsilon: float
    delta: float
    trials: int = 10_000  # in each of the two worlds
    accountant: ClassVar[AccountantName] = "exact"

    def __post_init__(self) -> None:
        if self.trials < 100:
            raise DatalensError(f"--trials must be at least 100 for an audit, not {self.trials}")
        if not math.isfinite(self.epsilon):
            raise DatalensError("an infinite epsilon claims nothing that an audit could refute: give a finite one")
        _ = self.budget

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta, relation="add-remove", accountant=self.accountant)


@dataclass(frozen=True, kw_only=True)
class Question(Claim):
    """A claim about the mechanism of a method other than the default one."""

    accountant: ClassVar[AccountantName] = ACCOUNTANT

    @property
    def free(self) -> Ledger:
        """Return a ledger without a limit, for releases that are not charged, or not charged correctly."""
        return Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant=ACCOUNTANT))


# (whether the record is present, number of trials) → log-likelihood ratios [trials], and ε of one trial by its ledger
Trials = Callable[[bool, int], tuple[np.ndarray, float]]
