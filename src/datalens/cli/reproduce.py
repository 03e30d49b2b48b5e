"""`datalens reproduce`: tables of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from datalens.cli.output import EXIT_REFUSED, show
from datalens.errors import DatalensError
from datalens.options import DataFolder, Json


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a table of the paper and put its figures beside ours."""

    what: Positional[str | None] = None
    """For example table1; see --list. `all` does one after the other."""
    list: bool = False
    """Show what there is."""
    quick: bool = False
    """Minutes on two cores, with fewer teachers or seeds, and labelled as such: what is done unless --full is given."""
    full: bool = False
    """The paper's sizes, and all seeds; wants a GPU."""
    data_folder: DataFolder = None
    """Where CelebA or Places365 lies, or a folder with folders celeba, places365 and scenes; without it, rows of these
    are not run."""
    cells: Annotated[str | None, arg(metavar="PATTERN", help_behavior_hint="")] = None
    """Run only cells whose names fit, such as 'mnist-eps1-*'; the others are shown where they are finished."""
    from_: Annotated[Path | None, arg(name="from", metavar="FOLDER", help_behavior_hint="")] = None
    """Run nothing: make the table of the cells kept in FOLDER/NAME.jsonl (table 3: table12; tables 8-11 and figure3:
    dpsgd), such as docs/results has them."""
    out: Path = Path("runs/reproduce")
    device: Literal["auto", "cpu", "cuda"] = "auto"
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
            if self.cells or self.from_:
                raise DatalensError("--cells and --from are for one table at a time: leave them out, or name it")
            return self._all(how)
        how |= {"data_folder": self.data_folder, "only": self.cells, "stored": self.from_}
        result = harness.reproduce(self.what, **how)
        show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=self.json)
        return 0

    def _all(self, how: dict[str, Any]) -> int:
        from datalens.reproduce.harness import reproduce_all

        result = reproduce_all(data_folder=self.data_folder, **how)
        show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=self.json)
        return EXIT_REFUSED if result["failed"] else 0
