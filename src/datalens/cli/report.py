"""`datalens report`: write HTML pages about a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from datalens.cli.output import release_of, show
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write release/report.html, which may be handed on, and owner.html, which may not."""

    run: Positional[Path]
    """A run folder; or a release folder alone, for which there is no owner.html."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: report.html in the release)")] = None
    """Where to write the page that may be handed on."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate import owner_report
        from datalens.pages import OWNER, REPORT, check_may_replace
        from datalens.plans.guidance import grade
        from datalens.released import report
        from datalens.released.verification import check_release

        release = release_of(self.run)
        target = self.out or release / REPORT
        if self.out is not None:
            check_may_replace(target)
        # The old page, which is about to be replaced, may be of an older certificate.
        verification = check_release(release)
        problems = [problem for problem in verification.problems if not problem.startswith(REPORT)]
        if problems:
            raise DatalensError(f"the certificate of {self.run} does not stand: see `datalens verify {self.run}`")
        write_atomically(target, report.page(release))
        fields = {"report": str(target), "owner": None, "private": verification.private}
        weak = grade(verification.budget.epsilon) == "weak"
        may = "may be handed on, but its guarantee is weak: read its first box" if weak else "may be handed on"
        lines = [f"{target}: {may if verification.private else 'NOT PRIVATE, do not hand on'}"]
        if (self.run / "config.json").is_file():
            owner = self.run / OWNER
            write_atomically(owner, owner_report.page(self.run), private=True)
            fields["owner"] = str(owner)
            lines.append(f"{owner}: not covered by ε, do not publish")
        show(fields, lines, json=self.json)
        return 0
