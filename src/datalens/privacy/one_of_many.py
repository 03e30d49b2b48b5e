"""The gate of GS-WGAN: one of many teachers, chosen in secret, says something; nobody learns which one it was.

A block of releases is charged at once, before the first choice, since there are thousands: what is left of a block
when a run is killed is lost, and its steps are charged again.
"""

from collections.abc import Callable

import numpy as np

from datalens.bounded.contributions import BoundedSum
from datalens.privacy.events import OneOfManyEvent
from datalens.privacy.ledger import Ledger
from datalens.privacy.noise import SecretSource
from datalens.privacy.owned import Owned
from datalens.privacy.released import Released


def charge_block(ledger: Ledger, event: OneOfManyEvent, noise: SecretSource) -> "Block":
    """Pay for `event.repeats` releases; raises before overspending. `event`: as the schedule has it, for this step."""
    if event.noise != noise.origin or event.relation != ledger.budget.relation:
        raise ValueError("an event must say where its noise comes from, and be of its ledger's relation")
    return Block(event, ledger.charge(event), noise)


class Block(Owned):
    """Releases that are paid for. Each takes one, in the process that paid."""

    def __init__(self, event: OneOfManyEvent, number: int, noise: SecretSource) -> None:
        super().__init__()
        self._event = event
        self._number = number
        self._noise = noise
        self._left = event.repeats

    def release(self, ask: Callable[[int], BoundedSum]) -> Released:
        """Choose one teacher, ask it for its row, and release that with noise.

        `ask(teacher)` must answer with what depends on that teacher's share, on what was released and on public
        values alone: not on who was chosen before.
        """
        with self._alone():
            if self._left < 1:
                raise ValueError("this block of releases is used up: charge another")
            self._left -= 1
            chosen = self._noise.below(self._event.teachers)
            row = ask(chosen)
            event = self._event
            facts = (row.row_unit, row.queries, None if row.units is None else row.units.tolist())
            if facts != ("teacher", event.queries, [chosen]) or row.l2_bound > event.l2_bound:
                raise ValueError("the row is not that of the teacher that was chosen, as it was paid for")
            total = row.private_total.cpu().numpy().astype(np.float64)
            value = total + event.sigma * self._noise.standard_normal(total.size).reshape(total.shape)
            return Released(value=value, event=event, number=self._number)
