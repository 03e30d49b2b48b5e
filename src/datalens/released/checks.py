"""What must hold between the parts of a release: small checks of one parsed release, each returning what is wrong.

None of them reads a file. Hashes and files are compared by `verification`.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from datalens.data.schema import IMAGE, PERSON, Schema
from datalens.plans.base import Settings, known
from datalens.plans.registry import is_ours
from datalens.privacy.events import (
    Event,
    of_part,
)
from datalens.privacy.ledger import Budget, upwards
from datalens.released.certificate import VERSION, contents
from datalens.released.claim import FIRST, Claim
from datalens.released.classifier import Classifier
from datalens.released.generator import Architecture, Generator, dcgan_architecture, slimmer
from datalens.released.moments import MomentModel

PRICES = 1e-6  # of ε: what rounding in other versions of the libraries may add to the price of a plan
_VERSION_TEXT = re.compile(r"[0-9A-Za-z.+!-]{1,40}|not installed")


def problems(claim: Claim) -> list[str]:
    """Return everything that is wrong, by all checks."""
    return [problem for check in CHECKS for problem in check(claim)]


def notes(claim: Claim) -> list[str]:
    """Return what cannot be held to a release that stands: what an older one does not state, last digits of prices."""
    found = []
    planned, paid = claim.settings.steps_planned, _paid(claim)
    if claim.version < VERSION:
        found.append(
            f"a certificate of version {claim.version} binds less than version {VERSION} does: that weights learned "
            "from what was charged, and from nothing else, is the owner's word (--require-version asks for more)"
        )
    if claim.weights.completed is None and paid < planned:
        found.append(
            f"the weights do not state how many steps they learned from (datalens 0.1.0 did not write it): that the "
            f"ledger has a charge for each is the owner's word; the budget covers all {planned} planned steps, "
            "and what these cost is given as spent"
        )
    if claim.weights.answered is None and claim.settings.answers:
        found.append(
            "the weights do not state how many queries were answered (datalens 0.1.0 did not write it): that the "
            "ledger has all of them is the owner's word; the budget covers an answer to every query"
        )
    for said, cost, _ in _prices(claim):
        if cost > _limit(claim.budget):
            found.append(
                f"{said} {claim.budget.describe(cost)} with the libraries here, within the accountant's error of the "
                f"budget of {upwards(claim.budget.epsilon)}, which the run was held to with its own"
            )
    return found


# --- the certificate ------------------------------------------------------------------------------------------------


def check_contents(claim: Claim) -> list[str]:
    """The certificate must say what its ledger, settings and public facts make it say, and no more."""
    c, budget = claim.certificate, claim.budget
    expected = contents(claim.settings, claim.schema, budget, claim.events, version=claim.version)
    found = [f"the certificate has a field {name!r} that no certificate has" for name in _strange(c, expected)]
    stated = float(c["epsilon_spent"])
    tolerance = budget.pricing().tolerance(claim.events, budget.delta)
    if stated != claim.spent and not abs(stated - claim.spent) <= tolerance:
        found.append(f"the certificate says {stated:g} was spent, the ledger {budget.describe(claim.spent)}")
    found += [
        f"the certificate says {name} {c.get(name)!r}, its ledger and settings say {value!r}"
        for name, value in expected.items()
        if name != "epsilon_spent" and c.get(name) != value
    ]
    versions = c.get("versions")
    if not isinstance(versions, dict) or set(versions) != {"datalens", "torch", "numpy", "scipy"}:
        found.append("the certificate names other packages than it was made with")
    elif not all(isinstance(text, str) and _VERSION_TEXT.fullmatch(text) for text in versions.values()):
        found.append("the certificate has something else in the place of a version's number")
    return found


def _strange(certificate: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(set(certificate) - set(expected) - {"versions", "sha256"})


def check_budget(claim: Claim) -> list[str]:
    """Neither what was charged nor what was planned may cost more than the budget, which is what is guaranteed.

    Both are priced anew here, so that each may be off by what the accountant's own price is uncertain by; what the
    certificate states was compared when it was written, and may not.
    """
    budget = claim.budget
    over = f"over the budget of {upwards(budget.epsilon)}"
    found = []
    if not float(claim.certificate["epsilon_spent"]) <= _limit(budget):
        found.append(f"the certificate states more spent than {upwards(budget.epsilon)}, its budget")
    for said, cost, tolerance in _prices(claim):
        if not cost <= _limit(budget) + tolerance:
            found.append(f"{said} {budget.describe(cost)}, {over}")
    return found


def _limit(budget: Budget) -> float:
    return budget.epsilon * (1 + PRICES)


def _prices(claim: Claim) -> list[tuple[str, float, float]]:
    """What the ledger and the plan cost here, and how far each price may be off."""
    pricing, delta = claim.budget.pricing(), claim.budget.delta
    found = [("the ledger adds up to", claim.spent, pricing.tolerance(claim.events, delta))]
    if plan := _plan(claim):
        found.append(
            ("the steps that the settings state cost", pricing.price(plan, delta), pricing.tolerance_of(plan, delta))
        )
    return found


def whole_price(claim: Claim) -> float:
    """Return the most that can have been spent: where weights do not state what they learned from, the whole plan."""
    plan = _plan(claim) if claim.weights.completed is None else []
    return max(claim.spent, claim.budget.pricing().price(plan, claim.budget.delta)) if plan else claim.spent


def _plan(claim: Claim) -> list[tuple[Event, int]]:
    """All that settings, and the charges that were compared with them, let a run charge."""
    return claim.settings.whole_plan(claim.schema, claim.budget, known(claim.events))


# --- the ledger, held against the settings --------------------------------------------------------------------------


def check_ledger(claim: Claim) -> list[str]:
    """The ledger must be one that a run with these settings leaves behind."""
    settings, schema, budget, events = claim.settings, claim.schema, claim.budget, claim.events
    found = [] if events else ["the ledger has no release at all"]
    found += settings.disagreements(schema, budget, events)
    if settings.one_part and len(of_part(events, "")) != len(known(events)):
        found.append("the ledger was charged for parts that this method does not have")
    shares = getattr(settings, "shares", None)
    if shares is not None and (shares == "balanced") != (budget.relation == "replace-one"):
        found.append(f"{shares} shares are not private under {budget.relation} at this price")
    return found


def check_unit(claim: Claim) -> list[str]:
    """Who is protected must be the same in the certificate and in the ledger."""
    return _wrong_unit(claim.settings, claim.schema, claim.events)


def _wrong_unit(settings: Settings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """Rows of images do not protect persons, and what a ledger calls a person must be one in the certificate too.

    What has no noise (DC-GAN) protects nobody, and says so: whose row it was does not matter.
    """
    units = {event.row_unit for event in known(events) if math.isfinite(event.mu)}
    if schema.by_person and "record" in units:
        return ["the ledger was charged for single images, not for persons with all of theirs"]
    if schema.by_person and getattr(settings, "shares", "") == "balanced":
        return ["shares by position do not keep a person's images together"]
    if schema.record_unit not in (IMAGE, PERSON) or (not schema.by_person and "person" in units):
        return [f"the certificate protects one {schema.record_unit}, the ledger was charged for {' and '.join(units)}"]
    return []


# --- the weights, held against settings and ledger ------------------------------------------------------------------


def check_steps(claim: Claim) -> list[str]:
    """Every step that the weights learned from, and every answer, must have been charged."""
    settings, weights = claim.settings, claim.weights
    planned, paid = settings.steps_planned, _paid(claim)
    found = []
    if weights.completed is None and claim.version > FIRST:
        found.append("the weights do not state how many steps they learned from")
    if weights.completed is not None and not 1 <= weights.completed <= planned:
        found.append(f"the weights learned from {weights.completed} steps, of {planned} that the settings state")
    if weights.completed is not None and weights.completed > paid:
        found.append(f"the weights learned from {weights.completed} steps, the ledger has charges for {paid}")
    if not settings.answers:
        return found + (["the weights state answers that this method has none of"] if weights.answered else [])
    if weights.answered is None and claim.version > FIRST:
        found.append("the weights do not state how many queries were answered")
    answers = settings.answers_paid(known(claim.events))
    if weights.answered is None and answers == 0:
        found.append("the ledger has no charge for any answer, without which nothing could be learned")
    if weights.answered is not None and weights.answered > answers:
        found.append(f"{weights.answered} queries were answered, the ledger has charges for {answers}")
    return found


def _paid(claim: Claim) -> int:
    """Return the most steps that may have been completed with the charges of the part that they are of."""
    return claim.settings.steps_paid(of_part(claim.events, claim.settings.stepped))


KINDS = {"generator": Generator, "moments": MomentModel, "classifier": Classifier}


def check_weights(claim: Claim) -> list[str]:
    """What was trained must be of the kind and the sizes that settings and public facts make it."""
    settings, schema, model = claim.settings, claim.schema, claim.weights.model
    found = []
    if claim.weights.classes != schema.classes:
        found.append("the weights name other classes than the certificate")
    plugged = settings.makes == "generator" and not is_ours(settings)  # of another package: a generator of any kind
    wrong_kind = not isinstance(model, KINDS[settings.makes])
    if isinstance(model, Classifier):
        wrong_shape = model.shape != schema.shape and not getattr(settings, "features", 0)
        if wrong_kind or wrong_shape:
            return [*found, "the weights are of another network than the settings state"]
        return found + settings.wrong_weights(model, known(claim.events))
    if wrong_kind and not plugged:
        return [*found, "the weights are of another kind than the settings state"]
    if (model.start.shape if isinstance(model, MomentModel) else model.architecture.shape) != schema.shape:
        found.append("the weights make images of another size than the certificate states")
    if isinstance(model, Generator) and not plugged:
        law, latent = getattr(settings, "latent_law", "normal"), getattr(settings, "latent", None)
        if (model.architecture.latent, model.architecture.latent_law) != (latent, law):
            found.append("the weights are of another generator than the settings state")
        elif _wider(model.architecture, getattr(settings, "slim", 1)):
            found.append("the weights are of a wider generator than the settings make")
    return found if plugged else found + settings.wrong_weights(model, known(claim.events))


def _wider(given: Architecture, slim: int) -> bool:
    """Whether a generator has more weights than the one of its method: room for something else."""
    made = slimmer(dcgan_architecture(given.shape, given.classes, latent=given.latent, latent_law="normal"), slim)
    if len(given.widths) != len(made.widths) or given.dense > made.dense:
        return True
    return any(one > most for one, most in zip(given.widths, made.widths, strict=True))


CHECKS: tuple[Callable[[Claim], list[str]], ...] = (
    check_contents,
    check_budget,
    check_ledger,
    check_unit,
    check_steps,
    check_weights,
)
