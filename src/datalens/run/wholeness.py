"""Check that a run folder is complete before the run is resumed.

The ledger must have every charge that the run has used; otherwise the certificate would be false. If the run has a
release, what it has learned must be there.
"""

import json
import math
from pathlib import Path
from typing import Any

from datalens.errors import DatalensError, TamperedError
from datalens.plans.base import Settings
from datalens.privacy.events import UnknownEvent, of_part
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger

LEDGER = "ledger.jsonl"


def used(ledger: Ledger, answered: int | None, *, part: str = "") -> dict[str, str]:
    """Return the facts that a checkpoint states about the charges it depends on.

    Args:
        ledger: whose number of charges, and hash of the last one, are stated.
        answered: number of answered queries, if the method counts them.
        part: the part of the run that the steps belong to; "" (and not stated) where the run has one part.
    """
    charges = len(ledger.events)
    facts = {"charges": str(charges), "chain": str(ledger.chain(charges))}
    facts |= {"part": part} if part else {}
    return facts if answered is None else {**facts, "answered": str(answered)}


def check_whole(run: Path, *, settings: Settings, ledger: Ledger, checkpoint: Path) -> None:
    """Compare the ledger with everything that its charges paid for: released values, the checkpoint, the last release.

    Raises:
        TamperedError: the ledger lacks charges that the run has used, or is another run's.
    """
    unpaid = (
        _unpaid_values(Journal(run / "journal"), ledger)
        or _unpaid_checkpoint(checkpoint, settings, ledger)
        or _unpaid_release(run / "release" / LEDGER, run / LEDGER)
    )
    if unpaid:
        raise TamperedError(
            f"{run / LEDGER} has {len(ledger.events)} charges, but {unpaid}: it was cut, or is another run's, and a "
            "certificate made from it would be false; put the whole ledger back, or start another run"
        )


def check_promised(run: Path, *, options: dict[str, Any], settings: Settings, budget: Budget) -> None:
    """Compare what config.json says was asked for with what the ledger, and the settings, are held to.

    Whoever goes on with a run is told that it is what was asked for by the first, and charged by the others.

    Raises:
        DatalensError: they differ, so config.json was edited, or is another run's.
    """
    asked = {name: options[name] for name in ("epsilon", "delta", "relation") if name in options}
    found: list[str] = [name for name, value in asked.items() if value != budget.as_dict()[name]]
    if (options.get("noise_seed") is not None) != settings.noise_seeded:
        found.append("noise_seed")
    if found:
        raise DatalensError(
            f"{run / 'config.json'} says {found[0].replace('_', '-')} {str(options[found[0]])[:40]}, and this run was "
            "begun with another: put a copy of the file in its place"
        )


def check_kept(run: Path, *, settings: Settings, ledger: Ledger, journal: Journal, checkpoint: Path) -> None:
    """Raise if nothing of what a run has learned is left, so that it would start over and replace its good release.

    Of a run of several parts, what counts is the part whose steps it learns from, once it has begun: what others have
    released is a start for it, and not what it has learned.

    Raises:
        DatalensError: there is a release within a finite budget, and neither a checkpoint nor a journal.
    """
    begun = bool(ledger.events) and math.isfinite(ledger.budget.epsilon) and (run / "release").exists()
    named = {event.part for event in ledger.events if not isinstance(event, UnknownEvent)}
    named = {settings.stepped} if settings.stepped in named else named
    journaled = any(journal.find(ledger, step=0, part=part) is not None for part in sorted(named))
    if begun and not checkpoint.exists() and not journaled:
        raise DatalensError(
            f"{run} has neither a checkpoint nor a journal of what it has learned, and would begin again with what is "
            "left of its budget. Nothing was spent, and its release stays valid: keep it, or move it away to go on"
        )


def _unpaid_values(journal: Journal, ledger: Ledger) -> str | None:
    """Return, as part of a sentence, which value the ledger did not pay for; the functions below do the same."""
    names = journal.unpaid(ledger)
    return f"journal/{names[0]} is a released value that none of them paid for" if names else None


def _unpaid_checkpoint(path: Path, settings: Settings, ledger: Ledger) -> str | None:
    """Compare the header of the checkpoint with the ledger. Damage to its tensors is found when it is loaded."""
    facts = read_facts(path)
    if "chain" in facts:
        charges = int(facts["charges"]) if facts.get("charges", "").isdecimal() else -1
        if ledger.chain(charges) != facts["chain"]:
            return f"the checkpoint was written after charge {facts.get('charges')} of another one"
    step, paid = facts.get("step", ""), settings.steps_paid(of_part(ledger.events, facts.get("part", "")))
    if step.isdecimal() and int(step) > paid:
        return f"the checkpoint has learned from {step} steps, of which they pay for {paid}"
    return None


def read_facts(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file without reading its tensors; an empty dict if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 2**26)))
        facts = header.get("__metadata__", {})
        return {str(name): str(value) for name, value in facts.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _unpaid_release(released: Path, own: Path) -> str | None:
    if not released.is_file() or own.read_bytes().startswith(released.read_bytes()):
        return None
    return f"{released.parent.name}/{released.name} has others"
