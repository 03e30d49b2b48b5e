"""What must hold between the parts of a release: small checks of one parsed release, each returning what is wrong.

None of them reads a file. Hashes and files are compared by `verification`.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from datalens.datasets.schema import IMAGE, PERSON, Schema
from datalens.moment_noise import mu_squared_for, sigma_for
from datalens.paid import steps_paid, steps_planned
from datalens.peers.gpate import GPateSettings
from datalens.peers.settings import PeerSettings, unbroken
from datalens.privacy.events import (
    Charge,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    SubsampledGaussianEvent,
    UnknownEvent,
)
from datalens.privacy.ledger import Budget, upwards
from datalens.released.certificate import VERSION, contents, lengths
from datalens.released.claim import FIRST, Claim
from datalens.released.classifier import Classifier
from datalens.released.generator import Architecture, Generator, dcgan_architecture, slimmer
from datalens.released.moments import MomentModel
from datalens.settings import RELEASES, AnySettings, MomentSettings, Settings, SgdSettings

PRICES = 1e-6  # of ε: what rounding in other versions of the libraries may add to the price of a plan
SIGMAS = 1e-6  # of σ: the same, where it follows from the budget
_VERSION_TEXT = re.compile(r"[0-9A-Za-z.+!-]{1,40}|not installed")


def problems(claim: Claim) -> list[str]:
    """Return everything that is wrong, by all checks."""
    return [problem for check in CHECKS for problem in check(claim)]


def notes(claim: Claim) -> list[str]:
    """Return what cannot be held to a release that stands: what an older one does not state, last digits of prices."""
    found = []
    planned, paid = steps_planned(claim.settings), steps_paid(claim.settings, claim.events)
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
    if claim.weights.answered is None and isinstance(claim.settings, GPateSettings):
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
    """All that settings, and the charges that were compared with them, let a run charge. (Of moments: `sigma_for`.)"""
    settings, known = claim.settings, _known(claim.events)
    if isinstance(settings, PeerSettings):
        return [(part.event, part.times) for part in settings.schedule(claim.schema, claim.budget)]
    if isinstance(settings, MomentSettings) or not known:
        return []
    first = known[0]
    if isinstance(first, SubsampledGaussianEvent):
        first = dataclasses.replace(first, repeats=1)
    return [(first, settings.steps)]


def _known(events: tuple[Event, ...]) -> list[Charge]:
    return [event for event in events if not isinstance(event, UnknownEvent)]


# --- the ledger, held against the settings --------------------------------------------------------------------------


def check_ledger(claim: Claim) -> list[str]:
    """The ledger must be one that a run with these settings leaves behind."""
    settings, schema, budget, events = claim.settings, claim.schema, claim.budget, claim.events
    found = [] if events else ["the ledger has no release at all"]
    if isinstance(settings, PeerSettings):
        found += _peer(settings, schema, budget, events)
    elif isinstance(settings, MomentSettings):
        found += _moments(settings, schema, budget, events)
    elif isinstance(settings, SgdSettings):
        found += _sgd(settings, schema, events)
    else:
        found += _topagg(settings, budget, events)
    shares = getattr(settings, "shares", None)
    if shares is not None and (shares == "balanced") != (budget.relation == "replace-one"):
        found.append(f"{shares} shares are not private under {budget.relation} at this price")
    return found


def _topagg(settings: Settings, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """Of teachers who vote."""
    found = []
    bound = settings.l2_bound
    gaussian = [event for event in events if isinstance(event, GaussianEvent)]
    if len(gaussian) != len(events):
        found.append("the ledger has other releases than sums of teachers' votes with Gaussian noise")
    if any(event.sigma != settings.sigma for event in gaussian):
        found.append("the settings state another sigma than the ledger")
    if any(not math.isclose(event.l2_bound, bound, rel_tol=1e-9) for event in gaussian):
        found.append("the settings state another k or batch than the ledger was charged for")
    if any((event.row_unit, event.diameter) != ("teacher", 2 * event.l2_bound) for event in gaussian):
        found.append(
            "the ledger has events that are not sums of teachers' votes: they cost " + lengths(settings) + " each"
        )
    discrete = [event for event in gaussian if isinstance(event, DiscreteGaussianEvent)]
    if len(discrete) != (len(gaussian) if settings.noise == "discrete-gaussian" else 0):
        found.append("the settings state another kind of noise than the ledger")
    if any(event.queries != settings.batch for event in gaussian):
        found.append("the settings state another number of images in a step than the ledger")
    if any(event.coordinates != settings.batch * settings.cells for event in discrete):
        found.append("the settings state another number of coordinates than the ledger")
    if any((event.noise == "seeded") != settings.noise_seeded for event in gaussian):
        found.append("the settings are wrong about whether the noise was seeded")
    return found + _numbered({event.step for event in gaussian}, settings.steps)


def _numbered(steps: set[int], planned: int) -> list[str]:
    """Steps are charged one after the other, and none that was not planned; one that was lost is charged again."""
    whole = unbroken(steps) == len(steps) <= planned
    return [] if whole else ["the ledger has gaps, or more steps than the settings state"]


def _moments(settings: MomentSettings, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """Of private moments: which releases there can be, how long a record's row is in each, and how loud the noise."""
    found = []
    gaussian = [event for event in events if isinstance(event, GaussianEvent)]
    expected = {RELEASES.index(name): settings.l2_bound(name) for name in settings.releases}
    # Texture may be missing where an interruption had spent its part.
    if not {0, 1, 2, 3} <= {event.step for event in gaussian} <= set(expected) or len(gaussian) != len(events):
        return ["the ledger has other releases than the settings state"]
    if any(event.row_unit != settings.unit or event.l2_bound != expected.get(event.step) for event in gaussian):
        found.append("the ledger was charged for rows of another length than the settings state")
    apart = {RELEASES.index(name): settings.diameter(name) for name in settings.releases}
    if any(event.diameter < apart.get(event.step, math.inf) for event in gaussian):
        found.append("the ledger has rows closer together than rows of these releases can be")
    slots = {RELEASES.index(name): 1 if "norms" in name else len(schema.classes) for name in settings.releases}
    if any(event.queries != slots.get(event.step) for event in gaussian):
        found.append("the settings state another number of classes than the ledger")
    discrete = [event for event in gaussian if isinstance(event, DiscreteGaussianEvent)]
    if len(discrete) != (len(gaussian) if settings.noise == "discrete-gaussian" else 0):
        found.append("the settings state another kind of noise than the ledger")
    if any((event.noise == "seeded") != settings.noise_seeded for event in gaussian):
        found.append("the settings are wrong about whether the noise was seeded")
    return found + _wrong_noise(settings, budget, gaussian)


def _wrong_noise(settings: MomentSettings, budget: Budget, events: list[GaussianEvent]) -> list[str]:
    """σ of every release follows from the settings, the budget and the charges before it."""
    for number, event in enumerate(events):
        name = RELEASES[event.step]
        expected = 0.0
        if math.isfinite(budget.epsilon):
            mu_squared, _ = mu_squared_for(name, settings, budget, events[:number])
            expected = sigma_for(name, settings, budget, mu_squared) if mu_squared > 0 else math.inf
        if not math.isclose(event.sigma, expected, rel_tol=SIGMAS):
            said = f"sigma {event.sigma:.6g} for {name}, settings and budget make it {expected:.6g}"
            return [f"the ledger has {said}"]
    return []


def _peer(settings: PeerSettings, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """Of any other method: every charge must be one that its schedule has."""
    settings.check(schema)
    if not all(settings.possible(event, schema, budget) for event in _known(events)):
        return ["the ledger has other releases than the settings state"]
    return [] if settings.one_charge else _numbered_peer(settings, events)


def _numbered_peer(settings: PeerSettings, events: tuple[Event, ...]) -> list[str]:
    known = _known(events)
    if all(isinstance(event, SubsampledGaussianEvent) for event in known):
        return _blocks([event for event in known if isinstance(event, SubsampledGaussianEvent)])
    return [] if settings.plugins else _numbered({event.step for event in known}, settings.steps)


def _blocks(events: list[SubsampledGaussianEvent]) -> list[str]:
    """Blocks of sampled steps are charged one after the other, each beginning where the last one ended."""
    steps = [event.step for event in events]
    begins = [sum(event.repeats for event in events[:number]) for number in range(len(events))]
    return [] if steps == begins else ["the ledger has gaps: a block of steps does not begin where the last one ended"]


def _sgd(settings: SgdSettings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """Of DP-SGD: how long a record's row is, how likely it is in, and how many steps there are."""
    found = []
    steps = [event for event in events if isinstance(event, SubsampledGaussianEvent)]
    unit = "person" if schema.by_person else "record"
    if len(steps) != len(events) or any(event.row_unit != unit for event in steps):
        found.append(f"the ledger has other events than steps over sampled {unit}s")
    if any(event.sigma != settings.sigma * settings.bound for event in steps):
        found.append("the settings state another sigma, topk or clip than the ledger")
    if any(event.queries != 1 for event in steps):
        found.append("the ledger has steps of several sums, of which DP-SGD has none")
    if any(event.l2_bound < settings.bound for event in steps):
        found.append("the ledger was charged for shorter rows than the settings state")
    if any(event.rate != settings.batch_size / schema.nominal_size for event in steps):
        found.append("the settings state another batch size than the ledger")
    if sum(event.repeats for event in steps) > settings.steps:
        found.append("the ledger has more steps than the settings state")
    if any((event.noise == "seeded") != settings.noise_seeded for event in steps):
        found.append("the settings are wrong about whether the noise was seeded")
    return found + _blocks(steps)


def check_unit(claim: Claim) -> list[str]:
    """Who is protected must be the same in the certificate and in the ledger."""
    return _wrong_unit(claim.settings, claim.schema, claim.events)


def _wrong_unit(settings: AnySettings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """Rows of images do not protect persons, and what a ledger calls a person must be one in the certificate too.

    What has no noise (DC-GAN) protects nobody, and says so: whose row it was does not matter.
    """
    units = {event.row_unit for event in _known(events) if math.isfinite(event.mu)}
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
    planned, paid = steps_planned(settings), steps_paid(settings, claim.events)
    found = []
    if weights.completed is None and claim.version > FIRST:
        found.append("the weights do not state how many steps they learned from")
    if weights.completed is not None and not 1 <= weights.completed <= planned:
        found.append(f"the weights learned from {weights.completed} steps, of {planned} that the settings state")
    if weights.completed is not None and weights.completed > paid:
        found.append(f"the weights learned from {weights.completed} steps, the ledger has charges for {paid}")
    if not isinstance(settings, GPateSettings):
        return found + (["the weights state answers that this method has none of"] if weights.answered else [])
    if weights.answered is None and claim.version > FIRST:
        found.append("the weights do not state how many queries were answered")
    answers = settings.answers_paid(_known(claim.events))
    if weights.answered is None and answers == 0:
        found.append("the ledger has no charge for any answer, without which nothing could be learned")
    if weights.answered is not None and weights.answered > answers:
        found.append(f"{weights.answered} queries were answered, the ledger has charges for {answers}")
    return found


def check_weights(claim: Claim) -> list[str]:
    """What was trained must be of the kind and the sizes that settings and public facts make it."""
    settings, schema, model = claim.settings, claim.schema, claim.weights.model
    found = []
    if claim.weights.classes != schema.classes:
        found.append("the weights name other classes than the certificate")
    if isinstance(model, Classifier):
        assert isinstance(settings, SgdSettings)  # it is in their file
        seen = (settings.features,) if settings.features else schema.shape
        if (model.shape, model.network) != (seen, settings.network):
            found.append("the weights are of another network than the settings state")
        return found
    plugged = isinstance(settings, PeerSettings) and bool(settings.plugins)
    if not plugged and isinstance(model, MomentModel) != isinstance(settings, MomentSettings):
        return [*found, "the weights are of another kind than the settings state"]
    if (model.start.shape if isinstance(model, MomentModel) else model.architecture.shape) != schema.shape:
        found.append("the weights make images of another size than the certificate states")
    if isinstance(model, Generator):
        law, latent = getattr(settings, "latent_law", "normal"), getattr(settings, "latent", None)
        if not plugged and (model.architecture.latent, model.architecture.latent_law) != (latent, law):
            found.append("the weights are of another generator than the settings state")
        elif not plugged and _wider(model.architecture, getattr(settings, "slim", 1)):
            found.append("the weights are of a wider generator than the settings make")
    elif isinstance(settings, MomentSettings):
        found += _moment_weights(settings, model, claim.events)
    return found


def _wider(given: Architecture, slim: int) -> bool:
    """Whether a generator has more weights than the one of its method: room for something else."""
    made = slimmer(dcgan_architecture(given.shape, given.classes, latent=given.latent, latent_law="normal"), slim)
    if len(given.widths) != len(made.widths) or given.dense > made.dense:
        return True
    return any(one > most for one, most in zip(given.widths, made.widths, strict=True))


def _moment_weights(settings: MomentSettings, model: MomentModel, events: tuple[Event, ...]) -> list[str]:
    found = []
    if model.start.means.shape[1] != settings.coordinates:
        found.append("the weights have another number of coordinates than the settings state")
    if model.steps == 0:
        return found
    if (model.steps, model.maps.shape[-1]) != (settings.texture_steps, settings.texture):
        found.append("the weights have another texture than the settings state")
    if not {4, 5, 6, 7} <= {event.step for event in _known(events)}:
        found.append("the weights have texture, and the ledger no charges for it")
    return found


CHECKS: tuple[Callable[[Claim], list[str]], ...] = (
    check_contents,
    check_budget,
    check_ledger,
    check_unit,
    check_steps,
    check_weights,
)
