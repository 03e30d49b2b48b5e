"""`datalens reproduce`: tables of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from datalens.commands.common import DataFolder, Json, show
from datalens.errors import DatalensError


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a table of the paper and put its figures beside ours."""

    what: Positional[str | None] = None
    """For example table1; see --list."""
    list: bool = False
    """Show what there is."""
    quick: bool = False
    """Minutes on two cores, with fewer teachers or seeds, and labelled as such: what is done unless --full is given."""
    full: bool = False
    """The paper's sizes, and all seeds; wants a GPU."""
    data_folder: DataFolder = None
    """Where CelebA lies, for utility; without it, its rows are not run."""
    cells: Path | None = None
    """Tables 8-11, figure3: of the trainings kept here (docs/results/dpsgd); nothing is trained."""
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
        result = harness.reproduce(
            self.what,
            full=self.full,
            out=self.out,
            device=self.device,
            data_folder=self.data_folder,
            dpsgd_cells=self.cells,
        )
        show(result, [Path(result["markdown"]).read_text(encoding="utf-8")], json=self.json)
        return 0
