"""`datalens verify`: does the certificate stand?"""

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
    """A run folder, or a release folder by itself."""
    signed_by: Path | None = None
    """A file with public keys (ssh-ed25519): one of them must have signed it, see `datalens sign`."""
    samples: Path | None = None
    """Also draw this file of `datalens sample` again, and compare: is it what the generator makes?"""
    require_version: int | None = None
    """Refuse a certificate of an earlier version: 3 is the one whose weights state what they learned from."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.privacy.ledger import json_number, upwards
        from datalens.released.certificate import LEDGER
        from datalens.released.verification import check_release

        release = release_of(self.run)
        try:
            found = check_release(release)
        except (TamperedError, UnpriceableEvent) as error:
            show({"ok": False, "problems": [str(error)]}, [f"the certificate does NOT stand: {error}"], json=self.json)
            return EXIT_REFUSED
        problems, prices = list(found.problems), found.spent_by()
        own = self.run / LEDGER
        if release != self.run and own.is_file() and own.read_bytes() != (release / LEDGER).read_bytes():
            longer = own.read_bytes().startswith((release / LEDGER).read_bytes())
            problems.append(
                "the run's ledger has charges the release does not state: finish the run with --resume"
                if longer
                else "the run's ledger lacks charges that the release states: put the whole ledger back"
            )
        if self.samples is not None and not problems:
            from datalens.released.redrawing import check_samples

            problems += check_samples(release, self.samples, found.certificate)
        problems += _too_old(found.certificate.get("version"), self.require_version)
        problem, signature = _signature(release, self.signed_by)
        problems += [] if problem is None or problem in problems else [problem]
        fields = {
            "ok": not problems,
            "certificate_version": found.certificate.get("version"),
            "qualified": found.older,
            "epsilon": json_number(found.budget.epsilon),
            "epsilon_spent": json_number(found.spent),
            "delta": found.budget.delta,
            "relation": found.budget.relation,
            "accountant": found.budget.accountant,
            **{
                f"epsilon_spent_{name.replace('-', '_')}": None if isinstance(price, str) else json_number(price)
                for name, price in prices.items()
            },
            "unit": found.unit,
            "events": found.events,
            "private": found.private,
            "problems": problems,
            "not_stated": list(found.notes),
            "signature": signature,
            "samples": None if self.samples is None else str(self.samples),
            "warnings": list(found.warnings),
        }
        stamp = "" if found.private else " NOT PRIVATE."
        verdict = "the certificate stands:"
        if found.older:
            verdict = f"the certificate stands, as far as one of version {found.certificate.get('version')} can:"
        if problems:
            verdict = "the certificate does NOT stand:"
        spent = found.budget.describe(found.spent)
        lines = [verdict, *(f"  {p}" for p in problems)]
        lines.append(f"  {found.events} events, spent {spent} of a budget of {upwards(found.budget.epsilon)}.{stamp}")
        lines.append(f"  Protected is {found.unit}.")
        if self.samples is not None and not problems:
            lines.append(f"  {self.samples} is what its generator draws.")
        lines.append(f"  Signature: {signature}.")
        lines += [f"  not stated: {line}" for line in found.notes]
        lines += [f"  warning: {line}" for line in found.warnings]
        lines.append("  The same ledger by the other accountants:")
        for name, price in prices.items():
            if name != found.budget.accountant:
                other = dataclasses.replace(found.budget, accountant=name)
                said = f"{name}: {price}" if isinstance(price, str) else f"{other.describe(price)}.{stamp}"
                lines.append(f"    {said}")
        show(fields, lines, json=self.json)
        return EXIT_REFUSED if problems else 0


def _too_old(version: object, wanted: int | None) -> list[str]:
    """What is wrong with its version, if one was asked for."""
    from datalens.released.certificate import VERSION

    if wanted is None:
        return []
    if not 1 <= wanted <= VERSION:
        raise DatalensError(f"--require-version is 1 to {VERSION}, the versions of the certificate so far")
    if isinstance(version, int) and version >= wanted:
        return []
    return [f"it is a certificate of version {str(version)[:20]}, and --require-version asks for {wanted}"]


def _signature(release: Path, keys: Path | None) -> tuple[str | None, str]:
    """What is wrong with the signature, if anything, and what is to be said of it."""
    from datalens.released.certificate import CERTIFICATE, SIGNATURE
    from datalens.released.signing import MOST_BYTES, available, fingerprint, public_keys, signer

    wanted = None if keys is None else public_keys(keys.expanduser())
    path = release / SIGNATURE
    if not path.is_file():
        return None if wanted is None else f"{SIGNATURE} is missing: nobody has signed this", "none"
    if wanted is None and not available():
        return None, "there is one, and it was not checked: pip install 'datalens[sign]'"
    try:
        with open(path, "rb") as file:
            key = signer((release / CERTIFICATE).read_bytes(), file.read(MOST_BYTES + 1))
    except DatalensError as error:
        return f"{SIGNATURE}: {error}", "not checked"
    if wanted is None:
        return None, f"by {fingerprint(key)}; whose key that is was not asked (--signed-by)"
    if key not in wanted:
        return f"{SIGNATURE} is by {fingerprint(key)}, which is none of the keys in {keys}", "by another key"
    return None, f"by {fingerprint(key)}, one of the keys in {keys}"
