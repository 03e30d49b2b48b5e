"""How many steps of a run its charges pay for. A run that goes on, and a release that is checked, are held to it."""

from collections.abc import Sequence

from datalens.peers.settings import PeerSettings, unbroken
from datalens.plans.settings import AnySettings, MomentSettings, SgdSettings
from datalens.privacy.events import Event, SubsampledGaussianEvent, of_part


def steps_planned(settings: AnySettings) -> int:
    """Return the most steps (blocks, releases of moments) that a run with these settings completes."""
    return len(settings.releases) if isinstance(settings, MomentSettings) else settings.steps


def steps_paid(settings: AnySettings, events: Sequence[Event], *, part: str = "") -> int:
    """Return the most steps that may have been completed with these charges.

    A step that an interruption lost is charged again under its own number, so numbers are counted once.

    Args:
        settings: Of the run.
        events: All that its ledger was charged for.
        part: The part of the run whose steps are counted, by the charges that name it.
    """
    known = of_part(events, part)
    if isinstance(settings, PeerSettings):
        return settings.steps_paid(known)
    if isinstance(settings, SgdSettings):
        return sum(event.repeats for event in known if isinstance(event, SubsampledGaussianEvent))
    return unbroken({event.step for event in known})
