"""`datalens verify`: does the certificate stand?"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.commands.common import EXIT_REFUSED, Json, release_of, show
from datalens.errors import TamperedError, UnpriceableEvent


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Recompute ε from the ledger and check the certificate. Exit code 1 if they disagree."""

    run: Positional[Path]
    """A run folder, or a release folder by itself."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.privacy.ledger import json_number
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
            problems.append("the run's ledger has charges the release does not state: finish the run with --resume")
        fields = {
            "ok": not problems,
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
            "warnings": list(found.warnings),
        }
        stamp = "" if found.private else " NOT PRIVATE."
        verdict = "the certificate stands:" if not problems else "the certificate does NOT stand:"
        spent = found.budget.describe(found.spent)
        lines = [verdict, *(f"  {p}" for p in problems)]
        lines.append(f"  {found.events} events, spent {spent} of a budget of {found.budget.epsilon:g}.{stamp}")
        lines.append(f"  Protected is {found.unit}.")
        lines += [f"  warning: {line}" for line in found.warnings]
        lines.append("  The same ledger by the other accountants:")
        for name, price in prices.items():
            if name != found.budget.accountant:
                other = dataclasses.replace(found.budget, accountant=name)
                said = f"{name}: {price}" if isinstance(price, str) else f"{other.describe(price)}.{stamp}"
                lines.append(f"    {said}")
        show(fields, lines, json=self.json)
        return EXIT_REFUSED if problems else 0
