"""Checks of a parsed release: certificate, ledger, settings and weights must agree. Each returns the problems it finds.

None of them reads a file. `verification` compares files and hashes.
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
from datalens.released import publication
from datalens.released.certificate import VERSION, contents
from datalens.released.claim import FIRST, Claim
from datalens.released.classifier import Classifier
from datalens.released.denoiser import DiffusionModel
from datalens.released.generator import Architecture, Generator, dcgan_architecture, slimmer
from datalens.released.moments import MomentModel
from datalens.released.publication import FIELD

PRICES = 1e-6  # relative to ε: how much rounding in other versions of the libraries may add to the price of a plan
_VERSION_TEXT = re.compile(r"[0-9A-Za-z.+!-]{1,40}|not installed")


def problems(claim: Claim) -> list[str]:
    """Return the problems that all checks find."""
    return [problem for check in CHECKS for problem in check(claim)]


def notes(claim: Claim) -> list[str]:
    """Return notes on a release that are no problems.

    These are facts that an older release does not state, and prices above the budget by no more than the accountant's
    error.
    """
    lines = []
    planned, paid = claim.settings.steps_planned, _paid(claim)
    if claim.version < VERSION:
        lines.append(
            f"a certificate of version {claim.version} binds less than version {VERSION} does: you have only the "
            "owner's word that the weights learned from nothing but what was charged (to refuse such certificates, "
            "use --require-version)"
        )
    if claim.version < VERSION and getattr(claim.settings, "shares", None) == "balanced":
        lines.append(
            "datalens 0.1.0 gave records to teachers by position also for folders of images, where this price is too "
            "small, and the certificate does not state the format of the data: if it was such a folder, the "
            "certificate does not hold (docs/privacy.md)"
        )
    if claim.weights.completed is None and paid < planned:
        lines.append(
            f"the weights do not state how many steps they learned from (datalens 0.1.0 did not write it): you have "
            f"only the owner's word that the ledger has a charge for each; the budget covers all {planned} planned "
            "steps, and the cost of all of them is given as spent"
        )
    if claim.weights.answered is None and claim.settings.answers:
        lines.append(
            "the weights do not state how many queries were answered (datalens 0.1.0 did not write it): you have only "
            "the owner's word that the ledger has all of them; the budget covers an answer to every query"
        )
    for subject, cost, _ in _prices(claim):
        if cost > _limit(claim.budget):
            lines.append(
                f"{subject} {claim.budget.describe(cost)} with the libraries installed here: more than the budget of "
                f"{upwards(claim.budget.epsilon)}, but within the accountant's error of it (with the libraries of the "
                "run it was within the budget)"
            )
    return lines


# --- the certificate ------------------------------------------------------------------------------------------------


def check_contents(claim: Claim) -> list[str]:
    """Check that the certificate has exactly the fields and values that ledger, settings and public facts give."""
    c, budget = claim.certificate, claim.budget
    expected = contents(
        claim.settings, claim.schema, budget, claim.events, version=claim.version, published=claim.published
    )
    wrong = [f"the certificate has an unknown field {name!r}" for name in _unknown_fields(c, expected)]
    stated = float(c["epsilon_spent"])
    tolerance = budget.pricing().tolerance(claim.events, budget.delta)
    if stated != claim.spent and not abs(stated - claim.spent) <= tolerance:
        wrong.append(f"the certificate states that {stated:g} was spent, the ledger {budget.describe(claim.spent)}")
    wrong += [
        f"the certificate states {name} {c.get(name)!r}, but its ledger and settings give {value!r}"
        for name, value in expected.items()
        if name not in ("epsilon_spent", FIELD) and c.get(name) != value  # `check_published` compares the last
    ]
    versions = c.get("versions")
    if not isinstance(versions, dict) or set(versions) != {"datalens", "torch", "numpy", "scipy"}:
        wrong.append("the certificate must state the versions of datalens, torch, numpy and scipy, and no others")
    elif not all(isinstance(text, str) and _VERSION_TEXT.fullmatch(text) for text in versions.values()):
        wrong.append("the certificate states something that is not a version number as the version of a package")
    return wrong


def check_published(claim: Claim) -> list[str]:
    """Check the published accuracy, if there is one: its charges, its price, and the figures that its table gives."""
    if claim.published is None:
        return []
    return publication.problems(claim.certificate[FIELD], claim.published, claim.budget, claim.schema)


def _unknown_fields(certificate: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(set(certificate) - set(expected) - {"versions", "sha256"})


def check_budget(claim: Claim) -> list[str]:
    """Check that neither the charges nor the plan cost more than the budget, which is what is guaranteed.

    Both are priced again here, so each may differ by the error of the accountant's price. The ε that the certificate
    states was compared with the budget when it was written, and gets no such tolerance.
    """
    budget = claim.budget
    over = f"over the budget of {upwards(budget.epsilon)}"
    wrong = []
    if not float(claim.certificate["epsilon_spent"]) <= _limit(budget):
        wrong.append(f"the certificate states more spent than {upwards(budget.epsilon)}, its budget")
    for subject, cost, tolerance in _prices(claim):
        if not cost <= _limit(budget) + tolerance:
            wrong.append(f"{subject} {budget.describe(cost)}, {over}")
    return wrong


def _limit(budget: Budget) -> float:
    return budget.epsilon * (1 + PRICES)


def _prices(claim: Claim) -> list[tuple[str, float, float]]:
    """Return the prices of the ledger and of the plan: the beginning of a sentence, ε, and the error of ε."""
    pricing, delta = claim.budget.pricing(), claim.budget.delta
    prices = [("the ledger adds up to", claim.spent, pricing.tolerance(claim.events, delta))]
    if plan := _plan(claim):
        prices.append(
            ("the steps that the settings state cost", pricing.price(plan, delta), pricing.tolerance_of(plan, delta))
        )
    return prices


def whole_price(claim: Claim) -> float:
    """Return the most ε that can have been spent; where weights do not state their steps, that of the whole plan."""
    plan = _plan(claim) if claim.weights.completed is None else []
    return max(claim.spent, claim.budget.pricing().price(plan, claim.budget.delta)) if plan else claim.spent


def _plan(claim: Claim) -> list[tuple[Event, int]]:
    """Return everything that a run with these settings and charges can have charged, as (event, times)."""
    return claim.settings.whole_plan(claim.schema, claim.budget, known(claim.events))


# --- the ledger, compared with the settings -------------------------------------------------------------------------


def check_ledger(claim: Claim) -> list[str]:
    """Check that a run with these settings can have written this ledger."""
    settings, schema, budget, events = claim.settings, claim.schema, claim.budget, claim.events
    wrong = [] if events else ["the ledger has no release at all"]
    wrong += settings.disagreements(schema, budget, events)
    if settings.one_part and len(of_part(events, "")) != len(known(events)):
        wrong.append("the ledger was charged for parts that this method does not have")
    shares = getattr(settings, "shares", None)
    if shares is not None and (shares == "balanced") != (budget.relation == "replace-one"):
        wrong.append(f"{shares} shares are not private under {budget.relation} at this price")
    return wrong


def check_unit(claim: Claim) -> list[str]:
    """Check that certificate and ledger protect the same privacy unit."""
    return _wrong_unit(claim.settings, claim.schema, claim.events)


def _wrong_unit(settings: Settings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """Return what is wrong with the privacy unit.

    Charges for single images do not protect persons, and charges for persons need a certificate that says person.
    Events without noise (DC-GAN) protect nobody and are stated as such, so their unit does not matter.
    """
    units = {event.row_unit for event in known(events) if math.isfinite(event.mu)}
    if schema.by_person and "record" in units:
        return ["the ledger was charged for single images, not for persons with all their images"]
    if schema.by_person and getattr(settings, "shares", "") == "balanced":
        return ["shares by position do not keep a person's images together"]
    if schema.record_unit not in (IMAGE, PERSON) or (not schema.by_person and "person" in units):
        return [f"the certificate protects one {schema.record_unit}, the ledger was charged for {' and '.join(units)}"]
    return []


# --- the weights, compared with settings and ledger -----------------------------------------------------------------


def check_steps(claim: Claim) -> list[str]:
    """Check that every step that the weights learned from, and every answer, was charged."""
    settings, weights = claim.settings, claim.weights
    planned, paid = settings.steps_planned, _paid(claim)
    wrong = []
    if weights.completed is None and claim.version > FIRST:
        wrong.append("the weights do not state how many steps they learned from")
    if weights.completed is not None and not 1 <= weights.completed <= planned:
        wrong.append(f"the weights learned from {weights.completed} steps, but the settings state {planned}")
    if weights.completed is not None and weights.completed > paid:
        wrong.append(f"the weights learned from {weights.completed} steps, the ledger has charges for {paid}")
    if not settings.answers:
        return wrong + (["the weights state answers, but this method has none"] if weights.answered else [])
    if weights.answered is None and claim.version > FIRST:
        wrong.append("the weights do not state how many queries were answered")
    answers = settings.answers_paid(known(claim.events))
    if weights.answered is None and answers == 0:
        wrong.append("the ledger has no charge for any answer, but the model can only learn from answers")
    if weights.answered is not None and weights.answered > answers:
        wrong.append(f"{weights.answered} queries were answered, the ledger has charges for {answers}")
    return wrong


def _paid(claim: Claim) -> int:
    """Return the most steps that may have been completed with the charges of the part that they are of."""
    return claim.settings.steps_paid(of_part(claim.events, claim.settings.stepped))


KINDS = {"generator": Generator, "moments": MomentModel, "diffusion": DiffusionModel, "classifier": Classifier}


def check_weights(claim: Claim) -> list[str]:
    """Check that the trained model has the kind and the sizes that settings and public facts give."""
    settings, schema, model = claim.settings, claim.schema, claim.weights.model
    wrong = []
    if claim.weights.classes != schema.classes:
        wrong.append("the weights name other classes than the certificate")
    plugged = settings.makes == "generator" and not is_ours(settings)  # a plug-in may release any kind of generator
    wrong_kind = not isinstance(model, KINDS[settings.makes])
    if isinstance(model, Classifier):
        wrong_shape = model.shape != schema.shape and not getattr(settings, "features", 0)
        if wrong_kind or wrong_shape:
            return [*wrong, "the weights are of another network than the settings state"]
        return wrong + settings.wrong_weights(model, known(claim.events))
    if wrong_kind and not plugged:
        return [*wrong, "the weights are of another kind than the settings state"]
    if (model.architecture.shape if isinstance(model, Generator) else model.start.shape) != schema.shape:
        wrong.append("the weights make images of another size than the certificate states")
    if isinstance(model, Generator) and not plugged:
        law, latent = getattr(settings, "latent_law", "normal"), getattr(settings, "latent", None)
        if (model.architecture.latent, model.architecture.latent_law) != (latent, law):
            wrong.append("the weights are of another generator than the settings state")
        elif _wider(model.architecture, getattr(settings, "slim", 1)):
            wrong.append("the weights are of a wider generator than the settings make")
    return wrong if plugged else wrong + settings.wrong_weights(model, known(claim.events))


def _wider(given: Architecture, slim: int) -> bool:
    """Return whether a generator has more weights than its method makes: they could carry other information."""
    made = slimmer(dcgan_architecture(given.shape, given.classes, latent=given.latent, latent_law="normal"), slim)
    if len(given.widths) != len(made.widths) or given.dense > made.dense:
        return True
    return any(one > most for one, most in zip(given.widths, made.widths, strict=True))


CHECKS: tuple[Callable[[Claim], list[str]], ...] = (
    check_published,
    check_contents,
    check_budget,
    check_ledger,
    check_unit,
    check_steps,
    check_weights,
)
