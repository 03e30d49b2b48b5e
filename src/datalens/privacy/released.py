"""The type that carries the guarantee: only what is `Released` may reach a student."""

from dataclasses import dataclass

import numpy as np

from datalens.privacy.events import Charge


@dataclass(frozen=True, kw_only=True)
class Released:
    """A value that went through the gate, and the event that paid for it. Built only in `privacy/`."""

    value: np.ndarray  # [queries, d], integers for votes
    event: Charge
    number: int  # of the charge in the ledger
