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

from datalens.config import Settings
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError
from datalens.privacy.accountant import Accountant
from datalens.privacy.events import Event, GaussianEvent
from datalens.privacy.ledger import Budget, Ledger, canonical_json, json_number, read_ledger

WEIGHTS, LEDGER, CERTIFICATE, PICTURE = "generator.safetensors", "ledger.jsonl", "certificate.json", "samples.png"

NOT_PRIVATE = "NOT PRIVATE"
NOT_COVERED = (
    "results of evaluating on real data",
    "the choice of settings, if several runs on the same data were compared",
    "stopping a run because of what its private metrics showed",
    "other releases made from the same data (their costs add up)",
    "timing and other side channels of the machine that trained",
)


def make_certificate(*, settings: Settings, schema: Schema, ledger: Ledger, sha256: dict[str, str]) -> dict[str, Any]:
    """Everything a sceptic needs, from released and public values only."""
    certificate = _contents(settings, schema, ledger.budget, ledger.events)
    certificate |= {"versions": versions(), "sha256": sha256}
    certificate["sha256"] = {**sha256, "certificate": _own_hash(certificate)}
    return certificate


def certificate_bytes(certificate: dict[str, Any]) -> bytes:
    """The one way a certificate is written, so that a changed byte shows."""
    return json.dumps(certificate, indent=1, ensure_ascii=False, allow_nan=False).encode()


def _contents(settings: Settings, schema: Schema, budget: Budget, events: tuple[Event, ...]) -> dict[str, Any]:
    """All that follows from ledger, settings and public facts: written by `make_certificate`, compared by the check."""
    origins = {event.noise for event in events if isinstance(event, GaussianEvent)}
    private = _is_private(budget, events)
    return {
        "version": 1,
        "private": private,
        "statement": statement(budget, private=private, unit=schema.record_unit),
        "budget": {"epsilon": json_number(budget.epsilon), "delta": budget.delta},
        "epsilon_spent": json_number(budget.pricing().epsilon(events, budget.delta)),
        "relation": budget.relation,
        "accountant": budget.accountant,
        "privacy_unit": f"one {schema.record_unit}",
        "mechanism": {
            "name": "sum of teachers' compressed votes with Gaussian noise (TopAgg)",
            "sensitivity": "2·sqrt(k·batch) per event: one record changes one teacher's row",
            "noise": "rounded to integers" if settings.compress != "topk" else "floating point (see docs/privacy.md)",
            "events": len(events),
        },
        "noise": {"origin": sorted(origins), "secure": origins <= {"operating-system"}},
        "public": schema.as_dict(),
        "not_covered": list(NOT_COVERED),
        "settings": settings.as_dict(),
    }


def statement(budget: Budget, *, private: bool, unit: str) -> str:
    """The guarantee in one sentence, or the lack of one."""
    if not private:
        return f"{NOT_PRIVATE}: trained without noise, or with noise from a known seed; no guarantee holds."
    neighbours = "present or absent" if budget.relation == "add-remove" else "replaced by another"
    return (
        f"({budget.epsilon:g}, {budget.delta:g})-differentially private for one {unit} {neighbours} "
        f"({budget.relation}), priced by the {budget.accountant} accountant."
    )


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `datalens verify` found. `problems` is empty exactly when the release stands."""

    problems: tuple[str, ...]
    budget: Budget
    spent: float
    spent_by: dict[str, float]
    events: int
    private: bool


def check_release(release: Path) -> Verification:
    """Recompute ε from the ledger and compare everything the certificate says that can be compared."""
    certificate = read_certificate(release)
    problems = []
    for name in (LEDGER, WEIGHTS):
        if not (release / name).is_file():
            raise DatalensError(f"{release} is not a complete release: {name} is missing")
    hashes = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    for name in sorted(hashes.keys() | {path.name for path in release.iterdir()} - {CERTIFICATE}):
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
    return Verification(
        problems=tuple(problems),
        budget=budget,
        spent=spent,
        spent_by={name: Accountant(name=name).epsilon(events, budget.delta) for name in ("exact", "rdp")},
        events=len(events),
        private=_is_private(budget, events),
    )


def _is_private(budget: Budget, events: tuple[Event, ...]) -> bool:
    """A finite budget, and every release with noise nobody can know."""
    seeded = any(isinstance(event, GaussianEvent) and event.noise == "seeded" for event in events)
    return math.isfinite(budget.epsilon) and not seeded


def _disagreements(certificate: dict[str, Any], budget: Budget, events: tuple[Event, ...], spent: float) -> list[str]:
    """Where the certificate says something else than its ledger, settings and public facts make it say."""
    try:
        settings, schema = Settings.from_dict(certificate["settings"]), Schema.from_dict(certificate["public"])
        expected = _contents(settings, schema, budget, events)
        stated = float(certificate["epsilon_spent"])
        found = _impossible(settings, budget, events)
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


def _impossible(settings: Settings, budget: Budget, events: tuple[Event, ...]) -> list[str]:
    """Settings under which this ledger cannot have come about."""
    found = []
    bound = math.sqrt(settings.k * settings.batch)
    gaussian = [event for event in events if isinstance(event, GaussianEvent)]
    if any(event.sigma != settings.sigma for event in gaussian):
        found.append("the settings state another sigma than the ledger")
    if any(not math.isclose(event.l2_bound, bound, rel_tol=1e-9) for event in gaussian):
        found.append("the settings state another k or batch than the ledger was charged for")
    if any((event.row_unit, event.diameter) != ("teacher", 2 * event.l2_bound) for event in gaussian):
        found.append("the ledger has events that are not sums of teachers' votes: they cost 2·sqrt(k·batch) each")
    if any((event.noise == "seeded") != settings.noise_seeded for event in gaussian):
        found.append("the settings are wrong about whether the noise was seeded")
    if (settings.shares == "balanced") != (budget.relation == "replace-one"):
        found.append(f"{settings.shares} shares are not private under {budget.relation} at this price")
    return found


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
    return {name: _file_hash(release / name) for name in (LEDGER, WEIGHTS, PICTURE)}


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
