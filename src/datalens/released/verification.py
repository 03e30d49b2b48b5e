"""The check of a release, with nothing but its folder: ε is computed anew, and all that can be compared is."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datalens.datasets.schema import IMAGE, PERSON, Schema
from datalens.errors import DatalensError
from datalens.guidance import budget_warnings, read_off_warnings
from datalens.pages import MOST_BYTES, REPORT, seal_problem
from datalens.peers.settings import PeerSettings
from datalens.privacy.accountant import AccountantName, side_by_side
from datalens.privacy.events import DiscreteGaussianEvent, Event, GaussianEvent, SubsampledGaussianEvent, UnknownEvent
from datalens.privacy.ledger import Budget, read_ledger
from datalens.released.certificate import (
    CERTIFICATE,
    LEDGER,
    PAGE,
    certificate_bytes,
    contents,
    file_hash,
    is_private,
    lengths,
    own_hash,
    page_bytes,
    read_certificate,
    statement,
    weights_of,
)
from datalens.settings import RELEASES, AnySettings, MomentSettings, Settings, SgdSettings, parse_settings

# What a certificate of version 1, which had no page, did not say yet.
_NEW = {"": ("declared_public", "chain"), "mechanism": ("price",), "settings": ("noise",)}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `datalens verify` found. `problems` is empty exactly when the release stands."""

    problems: tuple[str, ...]
    budget: Budget
    spent: float
    charged: tuple[Event, ...]
    private: bool
    unit: str  # what is protected
    warnings: tuple[str, ...]  # of promises that hold, and are worth little

    @property
    def events(self) -> int:
        return len(self.charged)

    def spent_by(self) -> dict[AccountantName, float | str]:
        """What every accountant makes of the ledger, or why it has no price. (Not needed to verify, and slower.)"""
        return side_by_side([(event, 1) for event in self.charged], self.budget.delta)


def check_release(release: Path) -> Verification:
    """Recompute ε from the ledger and compare everything the certificate says that can be compared."""
    certificate = read_certificate(release)
    problems = []
    for name in (LEDGER, weights_of(certificate)):
        if not (release / name).is_file():
            raise DatalensError(f"{release} is not a complete release: {name} is missing")
    hashes = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    for name in sorted(hashes.keys() | {path.name for path in release.iterdir()} - {CERTIFICATE, REPORT}):
        if name not in hashes:
            problems.append(f"{name} is not part of what was certified")
        elif Path(name).name != name or not (release / name).is_file() or file_hash(release / name) != hashes[name]:
            problems.append(f"{name} is not the file the certificate was written for (SHA-256 differs)")
    if (release / CERTIFICATE).read_bytes() != certificate_bytes(certificate) or own_hash(certificate) != certificate[
        "sha256"
    ].get("certificate"):
        problems.append(f"{CERTIFICATE} was changed after it was written")
    budget, events = read_ledger(release / LEDGER)
    spent = budget.pricing().epsilon(events, budget.delta)
    if not spent <= budget.epsilon:
        problems.append(f"the ledger adds up to {budget.describe(spent)}, over its budget of {budget.epsilon:g}")
    problems += _disagreements(certificate, budget, events, spent)
    problems += _page_problems(release, certificate) + _report_problems(release, certificate)
    return Verification(
        problems=tuple(problems),
        budget=budget,
        spent=spent,
        charged=events,
        private=is_private(budget, events),
        unit=str(certificate.get("privacy_unit")),
        warnings=_warnings(certificate, budget),
    )


def _warnings(certificate: dict[str, Any], budget: Budget) -> tuple[str, ...]:
    try:
        schema = Schema.from_dict(certificate["public"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()  # which is a problem of its own
    return (*budget_warnings(budget, schema.nominal_size), *read_off_warnings(schema))


def _disagreements(certificate: dict[str, Any], budget: Budget, events: tuple[Event, ...], spent: float) -> list[str]:
    """Where the certificate says something else than its ledger, settings and public facts make it say."""
    try:
        settings, schema = parse_settings(certificate["settings"]), Schema.from_dict(certificate["public"])
        expected = contents(settings, schema, budget, events)
        unqualified = statement(budget, private=expected["private"], unit=schema.record_unit)
        if certificate.get("statement") == unqualified:
            expected["statement"] = unqualified  # as 0.1.0 wrote it; `_warnings` says on what it rests
        if certificate["version"] == 1:
            expected = _as_of_version_1(expected)
        stated = float(certificate["epsilon_spent"])
        if isinstance(settings, PeerSettings):
            found = _impossible_peer(settings, schema, budget, events)
        elif isinstance(settings, MomentSettings):
            found = _impossible_moments(settings, schema, events)
        elif isinstance(settings, SgdSettings):
            found = _impossible_sgd(settings, schema, events)
        else:
            found = _impossible(settings, budget, events)
        found += _wrong_unit(settings, schema, events)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, DatalensError) as error:
        return [f"the certificate holds something that cannot be read ({type(error).__name__})"]
    if not math.isclose(stated, spent, rel_tol=1e-9, abs_tol=1e-12):
        found.append(f"the certificate says {stated:g} was spent, the ledger {budget.describe(spent)}")
    found += [
        f"the certificate says {name} {certificate.get(name)!r}, its ledger and settings say {value!r}"
        for name, value in expected.items()
        if name != "epsilon_spent" and certificate.get(name) != value
    ]
    return found


def _as_of_version_1(contents: dict[str, Any]) -> dict[str, Any]:
    """Old releases still stand: the same, less what had not been thought of."""
    old = {name: value for name, value in contents.items() if name not in _NEW[""]} | {"version": 1}
    for part in ("mechanism", "settings"):
        old[part] = {name: value for name, value in old[part].items() if name not in _NEW[part]}
    return old


def _page_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """The page must be there, and say what the certificate says."""
    if certificate.get("version") == 1:
        return []
    if not (release / PAGE).is_file():
        return [f"{PAGE} is missing"]
    try:
        same = (release / PAGE).read_bytes() == page_bytes(certificate)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        same = False
    return [] if same else [f"{PAGE} does not say what {CERTIFICATE} says"]


def _report_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """The page for people is not certified, it may be written anew; but it must be whole, and of this certificate."""
    if not (release / REPORT).exists():
        return []
    if not (release / REPORT).is_file() or (release / REPORT).stat().st_size > MOST_BYTES:
        return [f"{REPORT} is not a page of ours"]
    problem = seal_problem((release / REPORT).read_bytes(), str(certificate["sha256"].get("certificate")))
    return [] if problem is None else [f"{REPORT} {problem}"]


def _impossible(settings: Settings, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """Settings under which this ledger cannot have come about."""
    found = []
    bound = settings.l2_bound
    gaussian = [event for event in events if isinstance(event, GaussianEvent)]
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
    if any(event.coordinates != settings.batch * settings.cells for event in discrete):
        found.append("the settings state another number of coordinates than the ledger")
    if any((event.noise == "seeded") != settings.noise_seeded for event in gaussian):
        found.append("the settings are wrong about whether the noise was seeded")
    if (settings.shares == "balanced") != (budget.relation == "replace-one"):
        found.append(f"{settings.shares} shares are not private under {budget.relation} at this price")
    return found


def _wrong_unit(settings: AnySettings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """Rows of images do not protect persons, and what a ledger calls a person must be one in the certificate too.

    What has no noise (DC-GAN) protects nobody, and says so: whose row it was does not matter.
    """
    units = {event.row_unit for event in events if not isinstance(event, UnknownEvent) and math.isfinite(event.mu)}
    if schema.by_person and "record" in units:
        return ["the ledger was charged for single images, not for persons with all of theirs"]
    if schema.by_person and getattr(settings, "shares", "") == "balanced":
        return ["shares by position do not keep a person's images together"]
    if schema.record_unit not in (IMAGE, PERSON) or (not schema.by_person and "person" in units):
        return [f"the certificate protects one {schema.record_unit}, the ledger was charged for {' and '.join(units)}"]
    return []


def _impossible_moments(settings: MomentSettings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """The same for a run from moments: which releases there can be, and how long a record's row is in each."""
    found = []
    gaussian = [event for event in events if isinstance(event, GaussianEvent)]
    expected = {RELEASES.index(name): settings.l2_bound(name) for name in settings.releases}
    # Texture may be missing where an interruption had spent its part.
    if not {0, 1, 2, 3} <= {event.step for event in gaussian} <= set(expected) or len(gaussian) != len(events):
        found.append("the ledger has other releases than the settings state")
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
    return found


def _impossible_peer(settings: PeerSettings, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """The same for any other method: every charge must be one that its schedule has, and there must be some."""
    settings.check(schema)
    found = [] if events else ["the ledger has no release at all"]
    shares = getattr(settings, "shares", None)
    if shares is not None and (shares == "balanced") != (budget.relation == "replace-one"):
        found.append(f"{shares} shares are not private under {budget.relation} at this price")
    for event in events:
        if isinstance(event, UnknownEvent) or not settings.possible(event, schema, budget):
            return [*found, "the ledger has other releases than the settings state"]
    return found


def _impossible_sgd(settings: SgdSettings, schema: Schema, events: tuple[Event, ...]) -> list[str]:
    """The same for a run of DP-SGD: how long a record's row is, how likely it is in, and how many steps there are."""
    found = []
    steps = [event for event in events if isinstance(event, SubsampledGaussianEvent)]
    unit = "person" if schema.by_person else "record"
    if len(steps) != len(events) or any(event.row_unit != unit for event in steps):
        found.append(f"the ledger has other events than steps over sampled {unit}s")
    if any(event.sigma != settings.sigma * settings.bound for event in steps):
        found.append("the settings state another sigma, topk or clip than the ledger")
    if any(event.l2_bound < settings.bound for event in steps):
        found.append("the ledger was charged for shorter rows than the settings state")
    if any(event.rate != settings.batch_size / schema.nominal_size for event in steps):
        found.append("the settings state another batch size than the ledger")
    if sum(event.repeats for event in steps) > settings.steps:
        found.append("the ledger has more steps than the settings state")
    if any((event.noise == "seeded") != settings.noise_seeded for event in steps):
        found.append("the settings are wrong about whether the noise was seeded")
    return found
