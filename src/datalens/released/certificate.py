"""The certificate: what is guaranteed, to whom, and how to check it. And the check.

It states the **budget** (ε, δ), fixed before training from public facts; what was spent is information.
`check_release` needs the release folder and nothing else.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from datalens.config import COMPRESSORS, RELEASES, AnySettings, MomentSettings, Settings, SgdSettings, parse_settings
from datalens.datasets.schema import IMAGE, PERSON, Schema
from datalens.errors import DatalensError
from datalens.pages import MOST_BYTES, REPORT, seal_problem
from datalens.peers.settings import PeerSettings
from datalens.privacy.accountant import AccountantName, side_by_side
from datalens.privacy.events import (
    LEAST_SMOOTH,
    DiscreteGaussianEvent,
    Event,
    GaussianEvent,
    SubsampledGaussianEvent,
    UnknownEvent,
)
from datalens.privacy.ledger import Budget, Ledger, canonical_json, json_number, read_ledger

WEIGHTS, LEDGER, CERTIFICATE, PICTURE = "generator.safetensors", "ledger.jsonl", "certificate.json", "samples.png"
MODEL = "model.safetensors"  # in the place of a generator, where a classifier was trained
PAGE = "CERTIFICATE.md"
VERSION = 2
# What a certificate of version 1, which had no page, did not say yet.
_NEW = {"": ("declared_public", "chain"), "mechanism": ("price",), "settings": ("noise",)}

NOT_PRIVATE = "NOT PRIVATE"
NOT_COVERED = (
    "results of evaluating on real data",
    "the choice of settings, if several runs on the same data were compared",
    "stopping a run because of what its private metrics showed",
    "other releases made from the same data (their costs add up)",
    "timing and other side channels of the machine that trained",
)
SEVERAL_IDS = "a person with several record ids: all images of one id are protected together, several ids are not"
DECLARED_PUBLIC = (
    "the name of the data set, its classes, and the size and channels of its images",
    "the nominal number of records (under add-remove the true number is private)",
    "all settings of the run, and the seed of its training randomness (not of its noise)",
    "the number of releases, and what each cost (the ledger)",
)


def declared_public(schema: Schema) -> list[str]:
    """And how it came to be known, where it was read off the data."""
    said = list(DECLARED_PUBLIC)
    if schema.by_person:
        said[1] = said[1].replace("records", "persons")
    return [*said, schema.note] if schema.read_off else said


CHAIN = (
    "Hashes and the chain of the ledger detect accidents and careless edits. They do not detect an owner who rewrites "
    "all of it: that the ledger is the whole truth is the owner's word."
)


def make_certificate(
    *, settings: AnySettings, schema: Schema, ledger: Ledger, sha256: dict[str, str]
) -> dict[str, Any]:
    """Everything a sceptic needs, from released and public values only."""
    certificate = _contents(settings, schema, ledger.budget, ledger.events)
    certificate |= {"versions": versions(), "sha256": sha256}
    certificate["sha256"] = {**sha256, PAGE: hashlib.sha256(page_bytes(certificate)).hexdigest()}
    certificate["sha256"] |= {"certificate": _own_hash(certificate)}
    return certificate


def certificate_bytes(certificate: dict[str, Any]) -> bytes:
    """The one way a certificate is written, so that a changed byte shows."""
    return json.dumps(certificate, indent=1, ensure_ascii=False, allow_nan=False).encode()


def _contents(settings: AnySettings, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> dict[str, Any]:
    """All that follows from ledger, settings and public facts: written by `make_certificate`, compared by the check."""
    origins = {event.noise for event in events if not isinstance(event, UnknownEvent)}
    private = _is_private(budget, events)
    return {
        "version": VERSION,
        "private": private,
        "statement": statement(budget, private=private, unit=schema.record_unit),
        "budget": {"epsilon": json_number(budget.epsilon), "delta": budget.delta},
        "epsilon_spent": json_number(budget.pricing().epsilon(events, budget.delta)),
        "relation": budget.relation,
        "accountant": budget.accountant,
        "privacy_unit": f"one {schema.record_unit}",
        "mechanism": {
            **_mechanism_of(settings, budget, by_person=schema.by_person),
            "noise": _noise_of(settings),
            "price": _price_of(settings),
            "events": len(events),
        },
        "noise": {"origin": sorted(origins), "secure": origins <= {"operating-system"}},
        "public": schema.as_dict(),
        "declared_public": declared_public(schema),
        "not_covered": [*NOT_COVERED, *([SEVERAL_IDS] if schema.by_person else []), *_third_party(settings)],
        "chain": CHAIN,
        "settings": settings.as_dict(),
    }


def _third_party(settings: AnySettings) -> tuple[str, ...]:
    plugins = getattr(settings, "plugins", "")
    said = f"{plugins}: not part of datalens, and not checked by it; the guarantee holds if that code does what it says"
    return (said,) if plugins else ()


def _mechanism_of(settings: AnySettings, budget: Budget, *, by_person: bool) -> dict[str, str]:
    if isinstance(settings, PeerSettings):
        said = settings.mechanism(budget)
        return {name: text.replace("one record", "one person") if by_person else text for name, text in said.items()}
    if isinstance(settings, Settings):
        votes = f"{_ROWS.get(settings.compress, 'compressed votes')} with Gaussian noise (TopAgg)"
        plugged = f"bounded rows with Gaussian noise (TopAgg), with {settings.plugins}"
        return {
            "name": f"sum of teachers' {plugged if settings.plugins else votes}",
            "sensitivity": f"{_lengths(settings)} per event: one {'person' if by_person else 'record'} changes one "
            "teacher's row",
        }
    if isinstance(settings, SgdSettings):
        kept = {"norm": "the largest squares, up to topk of the norm", "dim": "a share topk of the coordinates"}
        return {
            "name": f"sums of {'mean gradients of persons' if by_person else 'per-record gradients'} over Poisson "
            "samples with Gaussian noise (DP-SGD, TopAgg); kept: " + kept.get(settings.selector, "all"),
            "sensitivity": "the longest row per step: sqrt(topk)·clip where topk is of the norm, else clip",
        }
    moved = "the longest row" if budget.relation == "add-remove" else "the largest distance of two rows"
    rows = (
        "one person has one row, over all images and classes" if by_person else "one record has one row, in the cells "
    )
    return {
        "name": "class sums and covariances of bounded rows with Gaussian noise (private moments)",
        "sensitivity": f"{moved} per event: {rows}" + ("" if by_person else "of its class"),
    }


# What teachers' rows are, where they are not top-k votes; and how far two are apart.
_ROWS = {"klevel": "rotated and quantised gradients (D²P-Fed)", "sketch": "clipped count sketches of votes (FetchSGD)"}


def _lengths(settings: Settings) -> str:
    if settings.compress not in COMPRESSORS:
        return "2·(the longest row that the plug-in states)"
    lengths = {"klevel": "2·(levels-1)·sqrt(padded·batch)", "sketch": "2·sqrt(rows·k·batch)"}
    return lengths.get(settings.compress, "2·sqrt(k·batch)")


def _noise_of(settings: AnySettings) -> str:
    if isinstance(settings, PeerSettings):
        return settings.noise_said()
    if settings.noise == "discrete-gaussian":
        return "exact discrete Gaussian (OpenDP)"
    real = isinstance(settings, SgdSettings) or (isinstance(settings, Settings) and settings.real_rows)
    return "floating point (see docs/privacy.md)" if real else "rounded to integers"


def _price_of(settings: AnySettings) -> str:
    """By which theorem noise of this kind is paid for."""
    if isinstance(settings, PeerSettings):
        return settings.price_said()
    if isinstance(settings, SgdSettings):
        return "as Gaussian noise of variance (sigma·bound)² on a sum over a Poisson sample"
    if settings.noise == "gaussian":
        return "as Gaussian noise of variance sigma²"
    if isinstance(settings, MomentSettings) or settings.sigma >= LEAST_SMOOTH:
        return "as Gaussian noise of variance sigma² - 4 (by RDP: as zCDP)"
    return "as zCDP"


def statement(budget: Budget, *, private: bool, unit: str) -> str:
    """The guarantee in one sentence, or the lack of one."""
    if not private:
        return f"{NOT_PRIVATE}: trained without noise, or with noise from a known seed; no guarantee holds."
    neighbours = "present or absent" if budget.relation == "add-remove" else "replaced by another"
    return (
        f"({budget.epsilon:g}, {budget.delta:g})-differentially private for one {unit} {neighbours} "
        f"({budget.relation}), priced by the {budget.accountant} accountant."
    )


def page_bytes(certificate: dict[str, Any]) -> bytes:
    """The certificate on one page, for who answers for the data: generated, and compared by the check."""
    c = certificate
    epsilon, delta, spent = float(c["budget"]["epsilon"]), float(c["budget"]["delta"]), float(c["epsilon_spent"])
    stamp = "" if c["private"] else f" **{NOT_PRIVATE}.**"
    cost = f"ε = {spent:.4g} (δ = {delta:g}, {c['relation']}, {c['accountant']} accountant)"
    made = "a classifier trained on" if c["settings"].get("method") == "dpsgd" else "synthetic data made from"
    lines = [f"# Privacy certificate: {made} {c['public']['name']}", "", f"**{c['statement']}**", ""]
    if c["private"]:
        happens = "was in the data or not" if c["relation"] == "add-remove" else "was this one or any other"
        lines += [
            f"In words: take {c['privacy_unit']}. Whoever holds this whole folder, and every other record too, can "
            f"hardly tell whether it {happens}: whatever they compute, the odds move by a factor of at most e^ε = "
            f"{math.exp(min(epsilon, 700.0)):.3g}, except with a probability of about δ = {delta:g}. It stays so "
            "whatever is done with the folder later.",
            "",
        ]
    else:
        lines += ["Treat this folder as you would treat the data it was made from.", ""]
    lines += [
        "| | |",
        "|---|---|",
        f"| protected | {c['privacy_unit']}; data sets that differ in one are {c['relation']} neighbours |",
        f"| budget | ε = {epsilon:g} (δ = {delta:g}, {c['relation']}, {c['accountant']} accountant), fixed before "
        f"training.{stamp} |",
        f"| spent | {cost}, in {c['mechanism']['events']} releases.{stamp} |",
        f"| mechanism | {c['mechanism']['name']}; {c['mechanism']['sensitivity']} |",
        f"| noise | {c['mechanism']['noise']}, from: {', '.join(c['noise']['origin'])}; "
        f"priced {c['mechanism']['price']} |",
        "",
        "Declared public, so not protected:",
        "",
        *(f"- {item}" for item in c["declared_public"]),
        "",
        "Not covered by the guarantee:",
        "",
        *(f"- {item}" for item in c["not_covered"]),
        "",
        "To check it, with nothing but this folder: `datalens verify FOLDER`. " + c["chain"],
        "",
        "| file | SHA-256 |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in sorted(c["sha256"].items()) if name not in (PAGE, "certificate")),
        "",
    ]
    return "\n".join(lines).encode()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `datalens verify` found. `problems` is empty exactly when the release stands."""

    problems: tuple[str, ...]
    budget: Budget
    spent: float
    charged: tuple[Event, ...]
    private: bool

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
        elif Path(name).name != name or not (release / name).is_file() or _file_hash(release / name) != hashes[name]:
            problems.append(f"{name} is not the file the certificate was written for (SHA-256 differs)")
    if (release / CERTIFICATE).read_bytes() != certificate_bytes(certificate) or _own_hash(certificate) != certificate[
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
        private=_is_private(budget, events),
    )


def _is_private(budget: Budget, events: tuple[Event, ...]) -> bool:
    """A finite budget, and every release with noise nobody can know."""
    seeded = any(not isinstance(event, UnknownEvent) and event.noise == "seeded" for event in events)
    return math.isfinite(budget.epsilon) and not seeded


def _disagreements(certificate: dict[str, Any], budget: Budget, events: tuple[Event, ...], spent: float) -> list[str]:
    """Where the certificate says something else than its ledger, settings and public facts make it say."""
    try:
        settings, schema = parse_settings(certificate["settings"]), Schema.from_dict(certificate["public"])
        expected = _contents(settings, schema, budget, events)
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
            "the ledger has events that are not sums of teachers' votes: they cost " + _lengths(settings) + " each"
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


def weights_of(certificate: dict[str, Any]) -> str:
    """Which file of a release holds what was trained."""
    settings = certificate.get("settings")
    return MODEL if isinstance(settings, dict) and settings.get("method") == "dpsgd" else WEIGHTS


def read_certificate(release: Path) -> dict[str, Any]:
    path = release / CERTIFICATE
    if not path.is_file():
        raise DatalensError(f"{release} is not a release: it has no {CERTIFICATE}")
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(certificate, dict) or not isinstance(certificate.get("sha256"), dict):
            raise ValueError("fields are missing")
        certificate_bytes(certificate)  # what JSON reads and cannot write (1e400, half a character) is not ours
    except (ValueError, RecursionError) as error:
        raise DatalensError(f"{path} is not a certificate ({error})") from error
    return certificate


def release_hashes(release: Path) -> dict[str, str]:
    return {name: _file_hash(release / name) for name in (LEDGER, WEIGHTS, PICTURE, MODEL) if (release / name).exists()}


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(certificate: dict[str, Any]) -> str:
    """Of everything but itself."""
    others = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    return hashlib.sha256(canonical_json({**certificate, "sha256": others})).hexdigest()


def versions() -> dict[str, str]:
    found = {}
    for package in ("datalens", "torch", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "not installed"
    return found
