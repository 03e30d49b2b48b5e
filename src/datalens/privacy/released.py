"""The type that carries the guarantee: only `Released` values may reach a student."""

from dataclasses import dataclass

import numpy as np

from datalens.privacy.events import Charge


@dataclass(frozen=True, kw_only=True)
class Released:
    """A value that went through the gate, with the event it was charged as. Constructed only in `privacy/`."""

    value: np.ndarray  # [queries, d], integers for votes
    event: Charge
    number: int  # index of the charge in the ledger
