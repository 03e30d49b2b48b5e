"""Steps that were charged in a block and not taken yet, kept from one process to the next."""

import json

from datalens.errors import DatalensError
from datalens.files import sync_directory, write_atomically
from datalens.plans.base import known
from datalens.privacy.events import of_part
from datalens.progress import say
from datalens.run.folder import LATEST, Run
from datalens.run.wholeness import read_facts, used

PARKED = "parked.json"


def park(run: Run, left: int, *, part: str = "") -> None:
    """Write down how many charged steps of a block are left, and which charge they belong to.

    Called when this process will take no further step.
    """
    write_atomically(run.path / PARKED, json.dumps({"left": left, **used(run.ledger, None, part=part)}).encode())
    sync_directory(run.path)


def unpark(run: Run, *, part: str = "") -> int:
    """Return how many charged steps were not yet taken, by the file of parked steps, which is deleted first.

    So no crash lets them count twice. A file that is older than the last charge (a copy that was put back) counts as
    none, and so does one with more steps than were charged and not yet learned from.
    """
    path = run.path / PARKED
    if not path.exists():
        return 0
    try:
        parked = json.loads(path.read_text(encoding="utf-8"))
        left, chain = parked["left"], parked.get("chain")  # version 0.1 wrote no chain
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatalensError(f"{path} is damaged: delete it; the charged steps that it counts are lost") from error
    path.unlink()
    sync_directory(run.path)
    step = read_facts(run.path / "checkpoints" / LATEST).get("step", "")
    paid = run.settings.steps_paid(of_part(known(run.ledger.events), part))
    unused = paid - (int(step) if step.isdecimal() else 0)
    if type(left) is int and 0 <= left <= unused and chain in (None, run.ledger.chain(len(run.ledger.events))):
        return left
    say(f"warning: {path} is not of the last charge of this run: the steps it held are lost")
    return 0
