"""The folder of a published table: its ledger, and the journal that keeps its value.

publication/asked.json     what was asked for, and is public
publication/ledger.jsonl   the charge of the table, and of earlier ones that were lost
publication/journal/       the value
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from datalens.bounded.contributions import VoteCounts
from datalens.privacy.events import LaplaceEvent
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import LaplaceVote
from datalens.privacy.noise import LaplaceNoise
from datalens.progress import say
from datalens.released.publication import PART

LEDGER, JOURNAL = "ledger.jsonl", "journal"


def state(folder: Path, *, step: int) -> tuple[tuple[LaplaceEvent, ...], bool]:
    """Return all charges of a publication, and whether it has the value of its table.

    Args:
        folder: of the publication.
        step: number of its table among all that were charged.
    """
    with _opened(folder) as (ledger, journal):
        events = tuple(event for event in ledger.events if isinstance(event, LaplaceEvent))
        return events, journal.find(ledger, step=step, part=PART) is not None


def table_of(folder: Path, votes: Callable[[], VoteCounts], *, scale: float, step: int) -> np.ndarray:
    """Return the noisy answers: the journaled value, or one that is made, charged and journaled now.

    Args:
        folder: of the publication.
        votes: counts the answers; called for a new value only.
        scale: of the noise.
        step: number of the table among all that were charged.
    """
    with _opened(folder) as (ledger, journal):
        released = journal.find(ledger, step=step, part=PART)
        if released is None:
            released = LaplaceVote(noise=LaplaceNoise(scale), part=PART).release(votes(), ledger, step=step)
            journal.save(released)
        else:
            say("the table was released before: it is used again, and nothing is charged")
        return released.value


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Ledger, Journal]]:
    ledger = Ledger.open(folder / LEDGER)
    journal = Journal(folder / JOURNAL, ledger)
    ledger.make_room = journal.make_room
    try:
        yield ledger, journal
    finally:
        journal.close()
        ledger.close()
