"""`datalens reproduce`: reproduce tables of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import EXIT_REFUSED, show
from datalens.errors import DatalensError
from datalens.options import DataFolder, Json


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a table of the paper, and show the published results beside ours."""

    what: Positional[str | None] = None
    """For example table1; see --list. `all` runs all tables, one after the other."""
    list: bool = False
    """List the tables."""
    quick: bool = False
    """Run for minutes on two cores, with fewer teachers or seeds; the result is labelled so. The default."""
    full: bool = False
    """Run at the paper's sizes, with all seeds; this needs a GPU."""
    data_folder: DataFolder = None
    """Folder of CelebA or Places365, or with folders celeba, places365 and scenes in it.
    Without it, their rows are not run."""
    cells: Annotated[str | None, arg(metavar="PATTERN", help_behavior_hint="")] = None
    """Run only cells whose names match, such as 'mnist-eps1-*' (tables 8-11: 'mnist-eps0.3-norm0.6').
    Of the others, finished ones are shown."""
    from_: Annotated[Path | None, arg(name="from", metavar="FOLDER", help_behavior_hint="")] = None
    """Run nothing, and make the table from the cells in FOLDER/NAME.jsonl, such as those in docs/results.
    (Table 3 has those of table12; tables 8-11 and figure3 have those of dpsgd.)"""
    stale: bool = False
    """Run kept cells again that older code made; otherwise they are shown, and marked."""
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 10)")] = None
    """Number of seeds of each training of tables 8 to 11 and figure3."""
    rule: bool = False
    """Tables 8 to 11, figure3: one setting for a data set (MNIST: default of `datalens sgd`), instead of a search."""
    small: bool = False
    """dpimagebench: score by our small network in place of its three, which need a GPU."""
    out: Path = Path("runs/reproduce")
    """Folder for runs and results."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.reproduce import harness

        if self.quick and self.full:
            raise DatalensError("choose one of --quick and --full")
        if self.list or self.what is None:
            table = harness.listing()
            show({"available": table}, [f"{name:10} {title}" for name, title in table.items()], json=self.json)
            return 0
        how: dict[str, Any] = {"full": self.full, "out": self.out, "device": self.device}
        if self.what == "all":
            if self.cells or self.from_ or self.stale or self.seeds or self.rule:
                raise DatalensError(
                    "--cells, --from, --stale, --seeds and --rule are for a single table: leave them out, or name the "
                    "table"
                )
            return self._all(how)
        how |= {"data_folder": self.data_folder, "only": self.cells, "stored": self.from_, "again": self.stale}
        how |= {"seeds": self.seeds, "small": self.small, "rule": self.rule}
        if self.stale and self.from_:
            raise DatalensError("--from runs nothing: leave out --stale, or --from")
        result = harness.reproduce(self.what, **how)
        show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=self.json)
        return 0

    def _all(self, how: dict[str, Any]) -> int:
        from datalens.reproduce.harness import reproduce_all

        result = reproduce_all(data_folder=self.data_folder, **how)
        show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=self.json)
        return EXIT_REFUSED if result["failed"] else 0
