"""The gate of GS-WGAN: releases the noisy row of one of many teachers, chosen at random and in secret.

There are thousands of releases, so a whole block of them is charged before the first choice. What is left of a block
when a run is killed is lost: its steps are charged again.
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
    """Charge for `event.repeats` releases and return them as a block.

    Args:
        ledger: The ledger to charge.
        event: The event of this step, from the schedule.
        noise: Source of the noise and of the secret choices.

    Raises:
        BudgetExceeded: the block does not fit into what is left of the budget.
        ValueError: the event names another noise origin than the source's, or another relation than the ledger's.
    """
    if event.noise != noise.origin or event.relation != ledger.budget.relation:
        raise ValueError("an event must name the origin of its noise and have the relation of its ledger")
    return Block(event, ledger.charge(event), noise)


class Block(Owned):
    """A block of charged releases, which can be made only in the process that charged for them."""

    def __init__(self, event: OneOfManyEvent, number: int, noise: SecretSource) -> None:
        super().__init__()
        self._event = event
        self._number = number
        self._noise = noise
        self._left = event.repeats

    def release(self, ask: Callable[[int], BoundedSum]) -> Released:
        """Choose one teacher in secret, and release its row with noise.

        Args:
            ask: Returns the bounded row of a given teacher. The row must be a function of that teacher's share, of
                released values and of public values alone: not of who was chosen before.

        Raises:
            ValueError: the block is used up, or the row is not what was charged for.
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
                raise ValueError("the row is not that of the chosen teacher, or not as bounded as what was charged for")
            total = row.private_total.cpu().numpy().astype(np.float64)
            value = total + event.sigma * self._noise.standard_normal(total.size).reshape(total.shape)
            return Released(value=value, event=event, number=self._number)
