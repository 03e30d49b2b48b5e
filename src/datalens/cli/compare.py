"""`datalens compare`: show several runs on one page."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.cli.output import release_of, show
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs on one page, with accuracy against ε if `datalens evaluate` measured it. For the owner only."""

    runs: Positional[tuple[Path, ...]]
    """Run or release folders."""
    published: bool = False
    """Draw accuracies that others published, by classifiers of their own (docs/leaderboard.md), among ours."""
    out: Path = Path("compare.html")
    """The page."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.evaluate import compare
        from datalens.pages import check_may_replace
        from datalens.released.certificate import CERTIFICATE

        if not self.runs:
            raise DatalensError("name the runs: datalens compare runs/a runs/b")
        check_may_replace(self.out)
        if any((folder / CERTIFICATE).exists() for folder in self.out.resolve().parents):
            raise DatalensError(f"{self.out} is in a release, but the page is for the owner only: choose another --out")
        names = compare.names_of(self.runs)
        entries = compare.read_all([(run, release_of(run), name) for run, name in zip(self.runs, names, strict=True)])
        write_atomically(self.out, compare.page(entries, published=self.published), private=True)
        fields = {
            "out": str(self.out),
            "for_the_owner_only": compare.measured(entries),
            "runs": [entry.row() for entry in entries],
        }
        show(fields, [*compare.lines(entries), str(self.out)], json=self.json)
        return 0
