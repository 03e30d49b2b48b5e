"""Verify a release from its folder alone: recompute ε, and compare everything that can be compared."""

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from datalens.data.schema import Schema
from datalens.errors import DatalensError, TamperedError
from datalens.pages import FORMAT, MOST_BYTES, REPORT, page_format, seal_problem
from datalens.plans.guidance import budget_warnings, read_off_warnings
from datalens.plans.registry import read_settings
from datalens.privacy.accountant import AccountantName, side_by_side
from datalens.privacy.events import Event
from datalens.privacy.ledger import Budget, read_ledger
from datalens.released import checks, publication, report, signing
from datalens.released.certificate import (
    CERTIFICATE,
    LEDGER,
    PAGE,
    PICTURE,
    SIGNATURE,
    VERSION,
    certificate_bytes,
    file_hash,
    files_of,
    is_private,
    own_hash,
    page_bytes,
    read_certificate,
    weights_of,
)
from datalens.released.claim import FIRST, Claim, check_version
from datalens.released.drawing import draw_picture
from datalens.released.synthetic import cells, more_than_pixels, nearly
from datalens.released.weights import AnyGenerator, read_weights

_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `datalens verify`. `problems` is empty exactly when the release stands."""

    problems: tuple[str, ...]
    budget: Budget
    spent: float  # by the ledger, or by the whole plan if the weights do not state how many steps they learned from
    charged: tuple[Event, ...]
    private: bool
    unit: str  # the privacy unit
    warnings: tuple[str, ...]  # of guarantees that hold but are weak
    notes: tuple[str, ...] = ()  # facts that an older release does not state, so that they are the owner's word
    certificate: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def events(self) -> int:
        """Number of charges."""
        return len(self.charged)

    @property
    def older(self) -> bool:
        """Return whether the certificate has an earlier version, which states less."""
        return self.certificate.get("version") != VERSION

    def spent_by(self) -> dict[AccountantName, float | str]:
        """Return ε of the ledger by every accountant, or why one cannot price it. (Slow, and not needed to verify.)"""
        return side_by_side([(event, 1) for event in self.charged], self.budget.delta)


def check_release(release: Path, *, redraw: bool = True) -> Verification:
    """Recompute ε from the ledger, and compare everything in the release folder that can be compared.

    Args:
        release: the release folder.
        redraw: also draw the picture and compute the HTML page again, and compare. It takes a second or two.

    Returns:
        The result; its `problems` are empty exactly when the release stands.

    Raises:
        DatalensError: the folder is not a release, or not a complete one.
        TamperedError: the hash chain of its ledger is broken.
    """
    certificate = read_certificate(release)
    published = (publication.LEDGER,) if publication.FIELD in certificate else ()
    for name in (LEDGER, weights_of(certificate), *published):
        if not (release / name).is_file():
            raise DatalensError(f"{release} is not a complete release: {name} is missing")
    problems = _file_problems(release, certificate)
    budget, events = read_ledger(release / LEDGER)
    spent = shown = budget.pricing().epsilon(events, budget.delta)
    problems += _page_problems(release, certificate)
    notes: list[str] = []
    try:
        check_version(certificate)
        claim = Claim(
            certificate=certificate,
            settings=read_settings(certificate["settings"]),
            schema=Schema.from_dict(certificate["public"]),
            budget=budget,
            events=events,
            spent=spent,
            weights=read_weights(release / weights_of(certificate)),
            published=_published(release, certificate),
        )
        claim.settings.check(claim.schema)  # no run was ever done with others, and no price is asked of them
        problems += checks.problems(claim)
        shown = checks.whole_price(claim)
        notes += checks.notes(claim)
        if redraw and not problems and not isinstance(claim.weights.model, checks.Classifier):
            problems += _picture_problems(release, claim.weights.model, claim.schema)
    except DatalensError as error:
        problems.append(f"the release is not valid: {error}")
    except _UNREADABLE as error:
        problems.append(f"the certificate holds something that cannot be read ({type(error).__name__})")
    report_problems, report_notes = _report_problems(release, certificate, redraw=redraw and not problems)
    return Verification(
        problems=(*problems, *report_problems),
        budget=budget,
        spent=shown,
        charged=events,
        private=is_private(budget, events),
        unit=str(certificate.get("privacy_unit")),
        warnings=_warnings(certificate, budget),
        notes=(*notes, *report_notes),
        certificate=certificate,
    )


def verified(release: Path) -> dict[str, Any]:
    """Verify a release (without redrawing), and return its certificate.

    Raises:
        TamperedError: the release does not stand.
    """
    result = check_release(release, redraw=False)
    if result.problems:
        raise TamperedError(f"the certificate of {release} does not stand ({result.problems[0]}): fetch it again")
    return result.certificate


def _published(release: Path, certificate: dict[str, Any]) -> publication.Publication | None:
    """Return the published accuracy that the certificate states, if any, with its ledger."""
    if publication.FIELD not in certificate:
        return None
    ledger = read_ledger(release / publication.LEDGER)
    return publication.read(certificate[publication.FIELD], *ledger, Schema.from_dict(certificate["public"]))


def _warnings(certificate: dict[str, Any], budget: Budget) -> tuple[str, ...]:
    try:
        schema = Schema.from_dict(certificate["public"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()  # reported as a problem elsewhere
    return (*budget_warnings(budget, schema.nominal_size), *read_off_warnings(schema))


def _file_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """Check that the release has exactly the expected files, each with the hash that the certificate states."""
    wrong = []
    hashes = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    required = files_of(certificate)
    for path in sorted(release.iterdir()):
        if path.name not in {*required, CERTIFICATE, REPORT, SIGNATURE}:
            wrong.append(f"{path.name} is no file of a release: remove it")
        elif path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no plain file")
    wrong += [
        f"the certificate has a hash of {name}, which is no file of a release" for name in hashes.keys() - required
    ]
    for name in sorted(required):
        if not (release / name).is_file():
            wrong.append(f"{name} is missing")
        elif file_hash(release / name) != hashes.get(name):
            wrong.append(f"{name} is not the file the certificate was written for (SHA-256 differs)")
    wrong += _signature_problems(release)
    unchanged = (release / CERTIFICATE).read_bytes() == certificate_bytes(certificate)
    if not unchanged or own_hash(certificate) != certificate["sha256"].get("certificate"):
        wrong.append(f"{CERTIFICATE} was changed after it was written")
    return wrong


def _signature_problems(release: Path) -> list[str]:
    """Check the form of the signature, if there is one.

    The certificate has no hash of it, so it must not have room for anything else. `signing` checks whose it is.
    """
    if not (release / SIGNATURE).is_file():
        return []
    try:
        with (release / SIGNATURE).open("rb") as file:
            signing.check_form(file.read(signing.MOST_BYTES + 1))
    except DatalensError as error:
        return [f"{SIGNATURE}: {error}"]
    return []


def _page_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """Check that the Markdown page is the one that follows from the certificate."""
    try:
        same = not (release / PAGE).is_file() or (release / PAGE).read_bytes() == page_bytes(certificate)
    except _UNREADABLE:
        same = False
    return [] if same else [f"{PAGE} does not say what {CERTIFICATE} says"]


def _picture_problems(release: Path, generator: AnyGenerator, schema: Schema) -> list[str]:
    """Check that the picture is what the generator draws, and that the file holds nothing else."""
    content = (release / PICTURE).read_bytes()
    if more_than_pixels(content):
        return [f"{PICTURE} holds something besides a picture"]
    expected = draw_picture(generator, schema)
    try:
        with Image.open(BytesIO(content), formats=("PNG",)) as picture:
            same = (picture.mode, picture.size) == (expected.mode, expected.size)
            same = same and nearly(*(cells(one, schema.height, schema.width) for one in (picture, expected)))
    except (OSError, ValueError, SyntaxError):
        same = False
    return [] if same else [f"{PICTURE} is not what the generator draws"]


def _is_earlier(form: int, certificate: dict[str, Any]) -> bool:
    """Return whether the writer of a certificate wrote pages in this earlier format, which cannot be compared."""
    writer = certificate.get("versions", {}).get("datalens")
    return form < FORMAT and (certificate.get("version") == FIRST or (form == 2 and writer == "0.2.0.dev0"))


def _report_problems(release: Path, certificate: dict[str, Any], *, redraw: bool) -> tuple[list[str], list[str]]:
    """Check the HTML page, and return problems and notes.

    The certificate has no hash of the page, so that it can be written again; but it must be complete and say the same
    as the certificate. A page of an earlier version cannot be compared, since this version writes another one: a note.
    """
    path = release / REPORT
    if not path.exists():
        return [], []
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return [f"{REPORT} is not a page of datalens"], []
    content = path.read_bytes()
    problem = seal_problem(content, str(certificate["sha256"].get("certificate")))
    if problem is not None:
        return [f"{REPORT} {problem}"], []
    if _is_earlier(page_format(content), certificate):
        return [], [
            f"{REPORT} was written by an earlier version, and is not compared: run `datalens report` to write it again"
        ]
    if page_format(content) != FORMAT:
        return [
            f"{REPORT} was written by another version than the certificate: run `datalens report` to write it again"
        ], []
    if redraw and content != report.page(release, like=content):
        return [f"{REPORT} does not say what {CERTIFICATE} says: run `datalens report` to write it again"], []
    return [], []
