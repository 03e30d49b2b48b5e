"""The certificate of a release: what is guaranteed, and to whom. `verification` checks it.

The guarantee is the **budget** (ε, δ), which is fixed before training from public facts. The ε spent is stated for
information only.

Most texts in this module are data: `verify` recomputes them and compares them byte for byte with the certificate.
"""

import hashlib
import json
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.plans.base import Settings
from datalens.privacy.events import (
    Event,
    UnknownEvent,
)
from datalens.privacy.ledger import Budget, Ledger, canonical_json, json_number, upwards
from datalens.released import publication as publications
from datalens.released.publication import Publication

WEIGHTS, LEDGER, CERTIFICATE, PICTURE = "generator.safetensors", "ledger.jsonl", "certificate.json", "samples.png"
MODEL = "model.safetensors"  # replaces WEIGHTS where a classifier was trained
PAGE = "CERTIFICATE.md"
SIGNATURE = CERTIFICATE + ".sig"  # the owner's signature, if any (see `signing`)
VERSION = 3  # version 2 is datalens 0.1.0's, whose weights do not state how many steps they learned from

NOT_PRIVATE = "NOT PRIVATE"
EVALUATION = "results of evaluating on real data"
NOT_COVERED = (
    EVALUATION,
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
    """Return what is declared public, with notes on facts that were read off the data and on files left out, if any."""
    declared = list(DECLARED_PUBLIC)
    if schema.by_person:
        declared[1] = declared[1].replace("records", "persons")
    if schema.left_out:
        declared.append(schema.left_out)
    return [*declared, schema.note] if schema.read_off else declared


CHAIN = (
    "Hashes and the chain of the ledger detect accidents and careless edits. They do not detect an owner who rewrites "
    "all of it: that the ledger is the whole truth is the owner's word."
)


def make_certificate(
    *,
    settings: Settings,
    schema: Schema,
    ledger: Ledger,
    sha256: dict[str, str],
    published: Publication | None = None,
) -> dict[str, Any]:
    """Return the certificate of a release, computed from released and public values only.

    Args:
        settings: the settings of the run.
        schema: the public facts about the data set.
        ledger: the ledger of the run.
        sha256: the hash of each certified file of the release, except the page.
        published: its accuracy, if that was published.
    """
    certificate = contents(settings, schema, ledger.budget, ledger.events, published=published)
    certificate |= {"versions": versions(), "sha256": sha256}
    certificate["sha256"] = {**sha256, PAGE: hashlib.sha256(page_bytes(certificate)).hexdigest()}
    certificate["sha256"] |= {"certificate": own_hash(certificate)}
    return certificate


def certificate_bytes(certificate: dict[str, Any]) -> bytes:
    """Return the certificate as JSON. There is one way to write it, so a changed byte is detected."""
    return json.dumps(certificate, indent=1, ensure_ascii=False, allow_nan=False).encode()


def contents(
    settings: Settings,
    schema: Schema,
    budget: Budget,
    events: tuple[Event, ...],
    *,
    version: int = VERSION,
    published: Publication | None = None,
) -> dict[str, Any]:
    """Return the fields of a certificate that follow from ledger, settings and public facts.

    `make_certificate` writes them; `verify` computes them again and compares.

    Args:
        version: the version of the certificate whose fields are returned.
        published: the published accuracy, if there is one.
    """
    if published is not None:
        certificate = contents(settings, schema, budget, events, version=version)
        fields = published.fields(budget, schema)
        certificate["statement"] += " " + fields["statement"]
        certificate["not_covered"] = [
            f"{EVALUATION}, other than the published accuracy",
            *certificate["not_covered"][1:],
        ]
        return {**certificate, publications.FIELD: fields}
    origins = {event.noise for event in events if not isinstance(event, UnknownEvent)}
    private = is_private(budget, events)
    return {
        "version": version,
        "private": private,
        "statement": statement(
            budget, private=private, unit=schema.record_unit, given=schema.given if version > 2 else ""
        ),
        "budget": {"epsilon": json_number(budget.epsilon), "delta": budget.delta},
        "epsilon_spent": json_number(budget.pricing().epsilon(events, budget.delta)),
        "relation": budget.relation,
        "accountant": budget.accountant,
        "privacy_unit": f"one {schema.record_unit}",
        "mechanism": {
            **settings.mechanism_for(budget, by_person=schema.by_person),
            "noise": settings.noise_said(),
            "price": settings.price_said(),
            "events": len(events),
        },
        "noise": {"origin": sorted(origins), "secure": origins <= {"operating-system"}},
        "public": schema.as_dict(),
        "declared_public": declared_public(schema),
        "not_covered": [*NOT_COVERED, *([SEVERAL_IDS] if schema.by_person else []), *_third_party(settings)],
        "chain": CHAIN,
        "settings": settings.as_dict(),
    }


def is_private(budget: Budget, events: tuple[Event, ...]) -> bool:
    """Return whether the budget is finite and no release used noise from a known seed."""
    seeded = any(not isinstance(event, UnknownEvent) and event.noise == "seeded" for event in events)
    return math.isfinite(budget.epsilon) and not seeded


def _third_party(settings: Settings) -> tuple[str, ...]:
    plugins = settings.plugins
    note = f"{plugins}: not part of datalens, and not checked by it; the guarantee holds if that code does what it says"
    return (note,) if plugins else ()


def statement(budget: Budget, *, private: bool, unit: str, given: str = "") -> str:
    """Return the guarantee in one sentence, or that there is none.

    Args:
        given: the facts that were read off the data and that the guarantee assumes to be public.
    """
    if not private:
        return f"{NOT_PRIVATE}: trained without noise, or with noise from a known seed; no guarantee holds."
    neighbours = "present or absent" if budget.relation == "add-remove" else "replaced by another"
    condition = f", given that what was read off the data is public: {given}" if given else ""
    return (
        f"({upwards(budget.epsilon)}, {upwards(budget.delta)})-differentially private for one {unit} {neighbours} "
        f"({budget.relation}), priced by the {budget.accountant} accountant{condition}."
    )


def page_bytes(certificate: dict[str, Any]) -> bytes:
    """Return the certificate as a Markdown page for the person responsible for the data. `verify` compares it."""
    c = certificate
    epsilon, delta, spent = float(c["budget"]["epsilon"]), float(c["budget"]["delta"]), float(c["epsilon_spent"])
    stamp = "" if c["private"] else f" **{NOT_PRIVATE}.**"
    cost = f"ε = {upwards(spent, 4)} (δ = {upwards(delta)}, {c['relation']}, {c['accountant']} accountant)"
    made = "a classifier trained on" if c["settings"].get("method") == "dpsgd" else "synthetic data made from"
    lines = [f"# Privacy certificate: {made} {c['public']['name']}", "", f"**{c['statement']}**", ""]
    if c["private"]:
        happens = "was in the data or not" if c["relation"] == "add-remove" else "was this one or any other"
        told, factor = how_well_told(epsilon), odds_factor(epsilon)
        if c["version"] == 2:  # as datalens 0.1.0 wrote it, for every ε
            told, factor = "can hardly tell", f"{math.exp(min(epsilon, 700.0)):.3g}"
        lines += [
            f"In words: take {c['privacy_unit']}. Whoever holds this whole folder, and every other record too, {told} "
            f"whether it {happens}: whatever they compute, the odds move by a factor of at most e^ε = "
            f"{factor}, except with a probability of about δ = {upwards(delta)}. It stays "
            "so whatever is done with the folder later.",
            "",
        ]
    else:
        lines += ["Treat this folder as you would treat the data it was made from.", ""]
    if publications.FIELD in c:
        lines += ["**Published accuracy.** " + "; ".join(publications.said(c[publications.FIELD])) + ".", ""]
    lines += [
        "| | |",
        "|---|---|",
        f"| protected | {c['privacy_unit']}; data sets that differ in one are {c['relation']} neighbours |",
        f"| budget | ε = {upwards(epsilon)} (δ = {upwards(delta)}, {c['relation']}, {c['accountant']} accountant), "
        f"fixed before training.{stamp} |",
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


# Up to each ε, how well a holder of the release can tell at best: a belief of 50 % becomes at most 62.3 %, 81.8 %,
# 98.3 %.
_TOLD = (
    (0.5, "can hardly tell"),
    (1.5, "can tell, at best, with little confidence"),
    (4.0, "may at best tell with some confidence"),
)
_TOLD_FOR_SURE = "may at best tell almost for certain, for all that this guarantee says,"


def how_well_told(epsilon: float) -> str:
    """Return in words how well anybody can tell whether a record was in the data, as far as ε alone limits it."""
    return next((words for limit, words in _TOLD if epsilon <= limit), _TOLD_FOR_SURE)


def odds_factor(epsilon: float) -> str:
    """Return e^ε with four significant digits, rounded up."""
    return upwards(math.exp(epsilon), 4) if epsilon < 700 else "more than 1e+304"


def weights_of(certificate: dict[str, Any]) -> str:
    """Return the name of the file that holds the trained model."""
    settings = certificate.get("settings")
    return MODEL if isinstance(settings, dict) and settings.get("method") == "dpsgd" else WEIGHTS


def files_of(certificate: dict[str, Any]) -> set[str]:
    """Return the names of the files that a release must have besides its certificate."""
    weights = weights_of(certificate)
    table = (publications.LEDGER,) if publications.FIELD in certificate else ()
    return {LEDGER, PAGE, weights, *((PICTURE,) if weights == WEIGHTS else ()), *table}


def read_certificate(release: Path) -> dict[str, Any]:
    """Read the certificate of a release folder, without checking what it states.

    Raises:
        DatalensError: the folder has no certificate, or the file is not one.
    """
    path = release / CERTIFICATE
    if not path.is_file():
        raise DatalensError(f"{release} is not a release: it has no {CERTIFICATE}")
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(certificate, dict) or not isinstance(certificate.get("sha256"), dict):
            raise ValueError("fields are missing")
        certificate_bytes(certificate)  # values that JSON reads but cannot write (1e400, a lone surrogate) raise here
    except (ValueError, RecursionError) as error:
        raise DatalensError(f"{path} is not a certificate ({error})") from error
    return certificate


def release_hashes(release: Path) -> dict[str, str]:
    names = (LEDGER, WEIGHTS, PICTURE, MODEL, publications.LEDGER)
    return {name: file_hash(release / name) for name in names if (release / name).exists()}


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_hash(certificate: dict[str, Any]) -> str:
    """Return the SHA-256 of the certificate, excluding this hash itself."""
    others = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    return hashlib.sha256(canonical_json({**certificate, "sha256": others})).hexdigest()


def versions() -> dict[str, str]:
    installed = {}
    for package in ("datalens", "torch", "numpy", "scipy"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            installed[package] = "not installed"
    return installed
