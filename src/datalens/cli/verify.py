"""`datalens verify`: check the certificate of a release."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.cli.output import EXIT_REFUSED, release_of, show
from datalens.errors import DatalensError, TamperedError, UnpriceableEvent
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Recompute ε from the ledger and check the certificate. Exit code 1 if they disagree."""

    run: Positional[Path]
    """A run folder, or a release folder alone."""
    signed_by: Path | None = None
    """A file of public keys (ssh-ed25519), one of which must have signed the release (see `datalens sign`)."""
    samples: Path | None = None
    """Draw this file of `datalens sample` again, too, and check that the generator makes the same images."""
    require_version: int | None = None
    """Refuse certificates of earlier versions. From 3 on, weights state what they were learned from."""
    details: bool = False
    """Also show what other accountants make of the same ledger."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.privacy.ledger import json_number, upwards
        from datalens.released import publication
        from datalens.released.certificate import LEDGER
        from datalens.released.synthetic import NEARLY
        from datalens.released.verification import check_release

        release = release_of(self.run)
        try:
            verification = check_release(release)
        except (TamperedError, UnpriceableEvent) as error:
            show({"ok": False, "problems": [str(error)]}, [f"the certificate does NOT stand: {error}"], json=self.json)
            return EXIT_REFUSED
        problems = list(verification.problems)
        prices = verification.spent_by() if self.details or self.json else {}
        certificate, budget = verification.certificate, verification.budget
        published = certificate.get(publication.FIELD)
        run_ledger = self.run / LEDGER
        if release != self.run and run_ledger.is_file() and run_ledger.read_bytes() != (release / LEDGER).read_bytes():
            longer = run_ledger.read_bytes().startswith((release / LEDGER).read_bytes())
            problems.append(
                "the run's ledger has charges that the release does not state: finish the run with --resume"
                if longer
                else "the run's ledger lacks charges that the release states: put the whole ledger back"
            )
        if self.samples is not None and not problems:
            from datalens.released.redrawing import check_samples

            problems += check_samples(release, self.samples, certificate)
        problems += _too_old(certificate.get("version"), self.require_version)
        problem, signature = _signature(release, self.signed_by)
        problems += [] if problem is None or problem in problems else [problem]
        fields = {
            "ok": not problems,
            "certificate_version": certificate.get("version"),
            "qualified": verification.older,
            "epsilon": json_number(budget.epsilon),
            "epsilon_spent": json_number(verification.spent),
            "delta": budget.delta,
            "relation": budget.relation,
            "accountant": budget.accountant,
            **{
                f"epsilon_spent_{name.replace('-', '_')}": None if isinstance(price, str) else json_number(price)
                for name, price in prices.items()
            },
            "unit": verification.unit,
            "events": verification.events,
            "private": verification.private,
            "problems": problems,
            "not_stated": list(verification.notes),
            "published_accuracy": published,
            "signature": signature,
            "samples": None if self.samples is None else str(self.samples),
            "warnings": list(verification.warnings),
        }
        stamp = "" if verification.private else " NOT PRIVATE."
        verdict = "the certificate stands:"
        if verification.older:
            verdict = f"the certificate stands, as far as one of version {certificate.get('version')} can:"
        if problems:
            verdict = "the certificate does NOT stand:"
        spent = budget.describe(verification.spent)
        lines = [verdict, *(f"  {p}" for p in problems)]
        lines.append(f"  {verification.events} events, spent {spent} of a budget of {upwards(budget.epsilon)}.{stamp}")
        lines.append(f"  The privacy unit is {verification.unit}.")
        if self.samples is not None and not problems:
            lines.append(
                f"  {self.samples} is what its generator draws (up to {NEARLY:g} of 255 levels in the mean of an "
                "image, by which machines differ)."
            )
        if published is not None and not problems:
            lines += [f"  {line}." for line in publication.said(published)]
        lines.append(f"  Signature: {signature}.")
        lines += [f"  not stated: {line}" for line in verification.notes]
        lines += [f"  warning: {line}" for line in verification.warnings]
        if self.details:
            lines += OTHERS
        for name, price in prices.items():
            if name != budget.accountant:
                other = dataclasses.replace(budget, accountant=name)
                text = f"{name}: {price}" if isinstance(price, str) else f"{other.describe(price)}.{stamp}"
                lines.append(f"    {text}")
        show(fields, lines, json=self.json)
        return EXIT_REFUSED if problems else 0


OTHERS = (
    "  For comparison, the same ledger by other accountants. Each is another proof about the same noise, and all hold",
    "  at once, so the guarantee is the one above. A larger figure comes from a looser proof, and breaks nothing:",
)


def _too_old(version: object, wanted: int | None) -> list[str]:
    """Return what is wrong with the certificate's version, if one is required."""
    from datalens.released.certificate import VERSION

    if wanted is None:
        return []
    if not 1 <= wanted <= VERSION:
        raise DatalensError(f"--require-version must be 1 to {VERSION}, the versions of certificates that there are")
    if isinstance(version, int) and version >= wanted:
        return []
    return [f"it is a certificate of version {str(version)[:20]}, and --require-version requires {wanted}"]


def _signature(release: Path, keys: Path | None) -> tuple[str | None, str]:
    """Return what is wrong with the signature, if anything, and a description of it."""
    from datalens.released.certificate import CERTIFICATE, SIGNATURE
    from datalens.released.signing import MOST_BYTES, available, fingerprint, public_keys, signer

    wanted = None if keys is None else public_keys(keys.expanduser())
    path = release / SIGNATURE
    if not path.is_file():
        return None if wanted is None else f"{SIGNATURE} is missing: nobody has signed this", "none"
    if wanted is None and not available():
        return None, "there is one, which was not checked: pip install 'datalens[sign]'"
    try:
        with open(path, "rb") as file:
            key = signer((release / CERTIFICATE).read_bytes(), file.read(MOST_BYTES + 1))
    except DatalensError as error:
        return f"{SIGNATURE}: {error}", "not checked"
    if wanted is None:
        return None, f"by {fingerprint(key)}; it was not checked whose key that is (--signed-by)"
    if key not in wanted:
        return f"{SIGNATURE} is by {fingerprint(key)}, which is not among the keys in {keys}", "by another key"
    return None, f"by {fingerprint(key)}, one of the keys in {keys}"
