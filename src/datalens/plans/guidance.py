"""What a plan costs, and what to expect of it: from public facts and the noise alone, before a record is read."""

import math
from typing import Any

from datalens.data.schema import Schema
from datalens.peers.settings import PeerSettings
from datalens.plans.settings import AnySettings, MomentSettings, Settings, TrainSettings
from datalens.privacy.ledger import Budget, Ledger
from datalens.public.texture import Texture
from datalens.public.theorem6_choose import Suggestion, suggest_k


def costs(settings: TrainSettings, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
    """What each part of a plan costs, and how loud its noise will be beside what it says. Public facts only."""
    if isinstance(settings, PeerSettings):
        return _peer_costs(settings, schema, budget)
    mu = budget.pricing().mu_budget(budget.epsilon, budget.delta)
    if isinstance(settings, Settings):
        votes = f"{settings.steps} sums of teachers' votes"
        sensitivity = 2 * settings.l2_bound
        relative = settings.sigma / settings.teachers / max(1, settings.levels - 1)
        return [_cost(votes, 1.0, settings.sigma, sensitivity, settings.batch * settings.cells, relative)]
    records = schema.nominal_size / len(schema.classes)
    parts = []
    for name, part in settings.releases.items():
        own = mu * math.sqrt(part)
        size = settings.texture if name.startswith("texture") else settings.coordinates
        slots = 1 if "norms" in name else len(schema.classes)
        bound = settings.l2_bound(name)
        sensitivity = bound if budget.relation == "add-remove" else settings.diameter(name)
        factor = sensitivity / bound
        if "norms" in name:  # of all records, in a bin
            cells, relative = settings.bins, factor / own / schema.nominal_size
        elif name.endswith("sums"):  # of a class mean, in a coordinate, by its clip norm
            size = size if name == "sums" else Texture(schema.shape).size
            cells, relative = size + 1, factor / own / records
        else:  # the largest eigenvalue of noise alone, by the square of the clip norm
            cells, relative = size**2, factor * math.sqrt(2 * size) / own / records
        parts.append(_cost(name, part, sensitivity / own if own else 0.0, sensitivity, slots * cells, relative))
    return parts


def _peer_costs(settings: PeerSettings, schema: Schema, budget: Budget) -> list[dict[str, Any]]:
    """By the schedule; a part's share is that of mu², sampled or not."""
    parts = settings.schedule(schema, budget)
    loud = [part.times * part.event.mu * part.event.mu for part in parts]
    whole = sum(loud)
    return [
        _cost(
            f"{part.times} × {part.name}",
            1.0 if len(parts) == 1 else own / whole,
            part.event.sigma,
            part.sensitivity,
            part.cells,
            part.noise_to_signal,
        )
        for part, own in zip(parts, loud, strict=True)
    ]


def _cost(name: str, part: float, sigma: float, sensitivity: float, cells: int, relative: float) -> dict[str, Any]:
    return {
        "release": name,
        "share": part,
        "sigma": sigma,
        "sensitivity": sensitivity,
        "cells": cells,
        "noise_to_signal": relative,
    }


def suggestion(settings: TrainSettings) -> Suggestion | None:
    """The k that Theorem 6 is smallest for, where teachers vote with their top k and there is noise."""
    s = settings
    if not isinstance(s, Settings) or s.compress not in ("topk-sign", "topk") or s.sigma == 0 or s.basis_size < 2:
        return None
    facts = {"dimensions": s.basis_size, "teachers": s.teachers, "k": s.k, "steps": s.steps}
    return suggest_k(sigma=s.sigma, **facts)


SMALL_SHARE = 5  # records: a teacher that has seen no more knows hardly anything


def warnings(budget: Budget, schema: Schema, settings: AnySettings | None = None) -> list[str]:
    """What an owner should hear before a run: budgets that promise little, shares that teach little."""
    found = []
    teachers = getattr(settings, "teachers", 0)
    if schema.nominal_size < SMALL_SHARE * teachers:
        found.append(
            f"{teachers} teachers have shares of about {schema.nominal_size / teachers:.1f} records each, which is too "
            f"few to learn from; choose --teachers under {max(1, schema.nominal_size // SMALL_SHARE)}"
        )
    found += budget_warnings(budget, schema.nominal_size)
    if isinstance(settings, MomentSettings):
        records = schema.nominal_size / len(schema.classes)
        heard = 4 * _noise_of_counts(settings, schema, budget)
        if why := hopeless(settings, schema, budget):
            found.append(why)
        elif records < max(heard, 20):  # what `methods.moments` leaves out
            found.append(
                f"a class has about {records:.3g} records, and one with less than {max(heard, 20):.3g} is left out: "
                "raise --epsilon, bring more records, or make fewer classes of them"
            )
    return found


def hopeless(settings: AnySettings, schema: Schema, budget: Budget) -> str | None:
    """Why nothing can come of a plan, even if all records were of one class; None where something may."""
    if not isinstance(settings, MomentSettings):
        return None
    least = max(4 * _noise_of_counts(settings, schema, budget), 20)
    if schema.nominal_size >= least:
        return None
    return (
        f"there are about {schema.nominal_size} records, and a class with less than {least:.3g} is left out: raise "
        "--epsilon, or bring more records"
    )


def nothing_stands_out(schema: Schema, ledger: Ledger) -> str:
    """For the end of a run whose first releases found no class: they are paid for, and it goes no further."""
    spent = ledger.budget.describe(ledger.spent())
    return (
        f"no class of {schema.name} stands out of the noise, and this run ends here; {spent} is spent. Begin another "
        f"with more --epsilon or more records; or --nominal-size is wrong: are there about {schema.nominal_size}?"
    )


def read_off_warnings(schema: Schema) -> list[str]:
    """What no noise protects, since it was read off the data and goes into the release as it is."""
    if not schema.read_off:
        return []
    return [
        f"read off the data of {schema.name}, and so declared public: {schema.given}. One record can decide it: the "
        "only one of its class gives itself away. The guarantee holds given that this is public; to declare it without "
        "a look at the data, say classes= and nominal_size= in Python, or --classes, --image-size and --grayscale "
        "(docs/data.md)"
    ]


def budget_warnings(budget: Budget, nominal_size: int) -> list[str]:
    """Of promises that are worth little."""
    found = []
    if budget.delta * nominal_size > 1:
        found.append(
            f"delta {budget.delta:g} is more than 1 / {nominal_size} records: it would cover giving some records away "
            "whole; choose --delta well under that"
        )
    if 10 < budget.epsilon < math.inf:
        found.append(f"epsilon {budget.epsilon:g} is more than 10: the guarantee is weak; choose a smaller --epsilon")
    return found


def _noise_of_counts(settings: MomentSettings, schema: Schema, budget: Budget) -> float:
    sums = next(part for part in costs(settings, schema, budget) if part["release"] == "sums")
    return sums["sigma"] / settings.counted


# Of the noise in class covariances by what it hides, and what is then to be seen.
SEEN = (
    (0.1, "how images of a class differ is heard well: expect varied images"),
    (0.5, "how images of a class differ is heard with noise: expect recognisable images, less varied than yours"),
    (1.5, "of how images of a class differ little is heard: expect images that look alike"),
)
NOTHING_ELSE = "how images of a class differ drowns in noise: expect about one blurred image a class"


def expect(settings: TrainSettings, schema: Schema, budget: Budget) -> list[str]:
    """What will I get for this ε? Of methods other than DataLens's the table of noise is all there is to say."""
    parts = {part["release"]: part for part in costs(settings, schema, budget)}
    if isinstance(settings, MomentSettings):
        records = schema.nominal_size / len(schema.classes)
        counts = parts["sums"]["sigma"] / settings.counted
        loudest = parts["covariances"]["noise_to_signal"]
        words = next((said for limit, said in SEEN if loudest < limit), NOTHING_ELSE)
        return [
            f"the number of records of a class is known to about ±{counts:.2g}, of about {records:.3g}",
            f"a class mean is known to {parts['sums']['noise_to_signal']:.2g} of the clip norm a coordinate; {words}",
        ]
    if isinstance(settings, Settings):
        part = 2 * settings.sigma / settings.teachers
        more = "" if part <= 4 else ": far more than there are, so expect noise"
        return [f"a vote stands out of the noise (by two σ) where {part:.0%} of the teachers agree{more}"]
    return []
