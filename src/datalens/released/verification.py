"""The check of a release, with nothing but its folder: ε is computed anew, and all that can be compared is."""

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
from datalens.released import checks, report, signing
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
    """What `datalens verify` found. `problems` is empty exactly when the release stands."""

    problems: tuple[str, ...]
    budget: Budget
    spent: float  # by the ledger; where weights do not state what they learned from, by the whole plan
    charged: tuple[Event, ...]
    private: bool
    unit: str  # what is protected
    warnings: tuple[str, ...]  # of promises that hold, and are worth little
    notes: tuple[str, ...] = ()  # what an older release does not state, so that it is the owner's word
    certificate: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def events(self) -> int:
        return len(self.charged)

    @property
    def older(self) -> bool:
        """Whether its certificate is of an earlier version, which states less."""
        return self.certificate.get("version") != VERSION

    def spent_by(self) -> dict[AccountantName, float | str]:
        """What every accountant makes of the ledger, or why it has no price. (Not needed to verify, and slower.)"""
        return side_by_side([(event, 1) for event in self.charged], self.budget.delta)


def check_release(release: Path, *, redraw: bool = True) -> Verification:
    """Recompute ε from the ledger and compare everything in the folder that can be compared.

    Args:
        redraw: also draw the picture and write the page for people anew, and compare; it takes a second or two.

    Raises:
        DatalensError: it is not a release, or not a whole one.
        TamperedError: its ledger is no chain.
    """
    certificate = read_certificate(release)
    for name in (LEDGER, weights_of(certificate)):
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
        )
        claim.settings.check(claim.schema)  # no run was ever done with others, and no price is asked of them
        problems += checks.problems(claim)
        shown = checks.whole_price(claim)
        notes += checks.notes(claim)
        if redraw and not problems and not isinstance(claim.weights.model, checks.Classifier):
            problems += _picture_problems(release, claim.weights.model, claim.schema)
    except DatalensError as error:
        problems.append(f"this cannot be: {error}")
    except _UNREADABLE as error:
        problems.append(f"the certificate holds something that cannot be read ({type(error).__name__})")
    wrong, unsaid = _report_problems(release, certificate, redraw=redraw and not problems)
    return Verification(
        problems=(*problems, *wrong),
        budget=budget,
        spent=shown,
        charged=events,
        private=is_private(budget, events),
        unit=str(certificate.get("privacy_unit")),
        warnings=_warnings(certificate, budget),
        notes=(*notes, *unsaid),
        certificate=certificate,
    )


def verified(release: Path) -> dict[str, Any]:
    """Return the certificate of a release, once it was found to stand.

    Raises:
        TamperedError: it does not.
    """
    found = check_release(release, redraw=False)
    if found.problems:
        raise TamperedError(f"the certificate of {release} does not stand ({found.problems[0]}): fetch it again")
    return found.certificate


def _warnings(certificate: dict[str, Any], budget: Budget) -> tuple[str, ...]:
    try:
        schema = Schema.from_dict(certificate["public"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()  # which is a problem of its own
    return (*budget_warnings(budget, schema.nominal_size), *read_off_warnings(schema))


def _file_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """A release has exactly its own files, each with the hash that the certificate states."""
    found = []
    hashes = {name: value for name, value in certificate["sha256"].items() if name != "certificate"}
    own = files_of(certificate)
    for path in sorted(release.iterdir()):
        if path.name not in {*own, CERTIFICATE, REPORT, SIGNATURE}:
            found.append(f"{path.name} is no file of a release: take it out, whatever it is")
        elif path.is_symlink() or not path.is_file():
            found.append(f"{path.name} is no plain file")
    found += [f"the certificate has a hash of {name}, which is no file of a release" for name in hashes.keys() - own]
    for name in sorted(own):
        if not (release / name).is_file():
            found.append(f"{name} is missing")
        elif file_hash(release / name) != hashes.get(name):
            found.append(f"{name} is not the file the certificate was written for (SHA-256 differs)")
    found += _signature_problems(release)
    unchanged = (release / CERTIFICATE).read_bytes() == certificate_bytes(certificate)
    if not unchanged or own_hash(certificate) != certificate["sha256"].get("certificate"):
        found.append(f"{CERTIFICATE} was changed after it was written")
    return found


def _signature_problems(release: Path) -> list[str]:
    """A signature is not certified, so it must be nothing else: it has no room for anything. (Whose: `signing`.)"""
    if not (release / SIGNATURE).is_file():
        return []
    try:
        with (release / SIGNATURE).open("rb") as file:
            signing.check_form(file.read(signing.MOST_BYTES + 1))
    except DatalensError as error:
        return [f"{SIGNATURE}: {error}"]
    return []


def _page_problems(release: Path, certificate: dict[str, Any]) -> list[str]:
    """The page must say what the certificate says."""
    try:
        same = not (release / PAGE).is_file() or (release / PAGE).read_bytes() == page_bytes(certificate)
    except _UNREADABLE:
        same = False
    return [] if same else [f"{PAGE} does not say what {CERTIFICATE} says"]


def _picture_problems(release: Path, generator: AnyGenerator, schema: Schema) -> list[str]:
    """The picture must be what the generator draws, and hold nothing else."""
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


def _report_problems(release: Path, certificate: dict[str, Any], *, redraw: bool) -> tuple[list[str], list[str]]:
    """The page for people is not certified, it may be written anew; but it must be whole, and say the same.

    Returns problems, and notes: a page that version 0.1.0 wrote cannot be written by this one.
    """
    path = release / REPORT
    if not path.exists():
        return [], []
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return [f"{REPORT} is not a page of ours"], []
    content = path.read_bytes()
    problem = seal_problem(content, str(certificate["sha256"].get("certificate")))
    if problem is not None:
        return [f"{REPORT} {problem}"], []
    if page_format(content) < FORMAT and certificate.get("version") == FIRST:
        return [], [
            f"{REPORT} was written by an earlier version, and is not compared: `datalens report` writes it anew"
        ]
    if page_format(content) != FORMAT:
        return [f"{REPORT} was written by another version than the certificate: `datalens report` writes it anew"], []
    if redraw and content != report.page(release, like=content):
        return [f"{REPORT} does not say what {CERTIFICATE} says: `datalens report` writes it anew"], []
    return [], []
