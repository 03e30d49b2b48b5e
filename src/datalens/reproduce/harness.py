"""`datalens reproduce`: a table is a list of cells, a cell is a run with ledger and certificate, and its score.

Each finished cell is a small JSON file, so an interrupted table goes on where it stopped. The output is
Markdown, CSV, JSON and a plot, with the paper's printed value beside ours.
"""

import fnmatch
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datalens.data.named import sources
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.progress import say
from datalens.reproduce import appendix_a, dpsgd, figure2, runtime, table6, theory
from datalens.reproduce.output import write
from datalens.run.folder import write_atomically

if TYPE_CHECKING:
    from datalens.evaluate.classifiers import ClassifierName


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a cell's release is scored; the same for every cell of a table."""

    count: int
    epochs: int
    seeds: int
    classifier: "ClassifierName" = "paper"
    test: int | None = None  # real images it is tested on: the first so many, or all
    measure: Literal["utility", "quality", "grid"] = "utility"  # accuracy; Inception Score and FID; pictures


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of a table: how to train it, and what the paper prints (None: the paper has no such cell)."""

    row: str
    column: str
    paper: float | None
    options: dict[str, Any] | None  # for TrainOptions; None: not built yet, the paper's value stands alone

    @property
    def name(self) -> str:
        """A plain file name: "MNIST ε=1", "DataLens" → mnist-eps1-datalens; and the seed, where one is asked for."""
        seed = f" seed{self.options['seed']}" if self.options and "seed" in self.options else ""
        text = f"{self.row} {self.column}{seed}".lower().replace("ε=", "eps").replace("∞", "inf").replace("β", "beta")
        return "-".join("".join(c if (c.isascii() and c.isalnum()) or c == "." else " " for c in text).split())

    @property
    def asked(self) -> dict[str, Any] | None:
        """The options as JSON has them, which knows no infinity."""
        if self.options is None:
            return None
        return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in self.options.items()}

    @property
    def run_name(self) -> str:
        """Of its run, where tables share runs: what was asked for decides it."""
        assert self.options is not None
        asked = {k: v for k, v in (self.asked or {}).items() if (k, v) != ("seed", 0)}  # the default: the same run
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]
        epsilon, method = self.options.get("epsilon", 1.0), self.options.get("method", "datalens")
        return f"{self.options['data']}-eps{epsilon:g}-{method}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper. `cells(full)` lists its figures; `note(full)` says honestly how they were made.

    A table whose lines are not its cells brings its own `rows` (of cells, and results by a cell's name) and `markdown`.
    """

    title: str
    cells: Callable[[bool], list[Cell]]
    note: Callable[[bool], str]
    scoring: Callable[[bool], Scoring]
    rows: Callable[[list[Cell], dict[str, dict[str, Any]]], list[dict[str, Any]]] | None = None
    markdown: Callable[[list[dict[str, Any]]], str] | None = None
    plot: Callable[[list[dict[str, Any]], str, Path], None] | None = None
    shares_runs: bool = False  # with other tables: what one has trained the others find
    kept_as: str | None = None  # under which name its cells are kept, where another table has the same ones


def tables() -> dict[str, Table]:
    from datalens.reproduce import ablation, figure4, quality, table1, table2, table4, table5, table7, utility

    return {
        "table1": table1.TABLE,
        "table2": table2.TABLE,
        "table3": quality.TABLE3,
        "table4": table4.TABLE,
        "table5": table5.TABLE,
        "table7": table7.TABLE,
        "table12": quality.TABLE12,
        "figure4": figure4.TABLE,
        "utility": utility.TABLE,
        "ablation": ablation.TABLE,
    }


def listing() -> dict[str, str]:
    """What there is, tables and figures by their numbers."""
    own = {"runtime": runtime.TITLE, "table6": table6.TITLE, "figure2": figure2.TITLE, "theory": theory.TITLE}
    every = {name: table.title for name, table in tables().items()} | own | appendix_a.TITLES
    order = [f"{kind}{number}" for kind in ("table", "figure") for number in range(1, 13)]
    return {name: every[name] for name in sorted(every, key=lambda n: order.index(n) if n in order else len(order))}


def reproduce(
    name: str,
    *,
    full: bool,
    out: Path,
    device: str,
    data_folder: Path | None = None,
    only: str | None = None,
    stored: Path | None = None,
) -> dict[str, Any]:
    """Run what is missing, then write the table. Returns where everything is.

    `data_folder`: where sets lie that cannot be downloaded. Cells whose set is neither there nor in its place at home
    are not run, and the table says so. `only`: a pattern of cells' names; others are shown where they are finished.
    `stored`: nothing is run; the cells are those kept in this folder.
    """
    known = tables()
    if name not in listing():
        raise DatalensError(f"there is no {name!r} to reproduce: choose one of {', '.join(listing())}")
    cells = known[name].cells(full) if name in known else []
    if data_folder is not None:
        _check_folder(name, cells, data_folder)
    if only is not None and not any(fnmatch.fnmatch(cell.name, only) for cell in cells):
        some = f", such as {cells[0].name}" if cells else ": it is not made of such cells"
        raise DatalensError(f"--cells {only} fits no cell of {name}{some}")
    if stored is not None and not stored.is_dir():
        raise DatalensError(f"--from {stored} is not a folder: docs/results is one")
    if name == "figure2":
        return figure2.reproduce(full=full, out=out, device=device, stored=stored)
    if name in appendix_a.TITLES:
        return dpsgd.reproduce(name, full=full, out=out, device=device, cells=stored and stored / "dpsgd")
    if name == "theory":
        return theory.reproduce(full=full, out=out, device=device, stored=stored)
    if name not in known and stored is not None:
        raise DatalensError(f"{name} cannot be made --from kept cells: leave it out")
    if name == "runtime":
        return runtime.reproduce(full=full, out=out, device=device)
    if name == "table6":
        return table6.reproduce(full=full, out=out, device=device)
    table, mode = known[name], "full" if full else "quick"
    kept_as = table.kept_as or name
    folder = out / f"{name}-{mode}"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    place = out / f"{kept_as}-{mode}" / "cells" if stored is None else stored / kept_as
    if stored is None:
        place.mkdir(parents=True, exist_ok=True)
    runnable = [cell for cell in cells if cell.options is not None]
    for number, cell in enumerate(runnable, start=1):
        path = place / f"{cell.name}.json"
        assert cell.options is not None
        data = cell.options["data"]
        if not _finished(path, cell):
            folder_of = _folder_of(data, data_folder)
            here = folder_of or sources.downloadable(data) or sources.cached(data)
            if stored is not None or not here or (only is not None and not fnmatch.fnmatch(cell.name, only)):
                continue
            say(f"[{number}/{len(runnable)}] {cell.row}, {cell.column}")
            shared = out / f"runs-{mode}" / cell.run_name if table.shares_runs else None
            result = _run_cell(
                cell,
                table.scoring(full),
                shared or folder / "runs" / cell.name,
                device,
                data_folder=folder_of,
                accuracy_real=_ceiling(results, data),
            )
            keep(path, result)
        results[cell.name] = json.loads(path.read_text(encoding="utf-8"))
        if path.with_suffix(".png").exists():
            results[cell.name]["picture"] = str(path.with_suffix(".png"))
    return write(name, table, cells, results, folder, full=full)


def keep(path: Path, result: dict[str, Any]) -> None:
    """A finished cell as JSON, and its picture beside it, where it has one."""
    if "picture" in result:
        write_atomically(path.with_suffix(".png"), result["picture"])
    facts = {name: value for name, value in result.items() if name != "picture"}
    write_atomically(path, json.dumps(facts, indent=1).encode())


def _ceiling(results: dict[str, dict[str, Any]], data: str) -> float | None:
    """It depends on the data and the scoring alone: one cell finds it for all."""
    scored = (r for r in results.values() if "utility" in r and r["options"]["data"] == data)
    return next((r["utility"]["accuracy_real"] for r in scored), None)


def _check_folder(name: str, cells: list[Cell], folder: Path) -> None:
    """Now, not hours later, when the first cell needs it."""
    if not reads_a_folder(cells):
        raise DatalensError(f"--data-folder is for sets that cannot be downloaded; {name} reads none: leave it out")
    if not folder.is_dir():
        raise DatalensError(f"--data-folder {folder} is not a folder")


def reads_a_folder(cells: list[Cell]) -> bool:
    """Whether any of them needs a set that cannot be downloaded."""
    return any(not sources.downloadable(cell.options["data"]) for cell in cells if cell.options)


def _folder_of(data: str, folder: Path | None) -> Path | None:
    """Where a set lies in a folder that was named: in one named by its family, or right there.

    Right there it is Places365 where that layout is found, and CelebA otherwise.
    """
    if folder is None or sources.downloadable(data):
        return None
    families = {sources.family(other) for other in sources.names() if not sources.downloadable(other)}
    if any((folder / family).is_dir() for family in families):
        own = folder / sources.family(data)
        return own if own.is_dir() else None
    local = sources.CATALOGUE["places365"].local
    holds = "places365" if local is not None and local.present(folder) else "celeba"
    return folder if sources.family(data) == holds else None


def _finished(path: Path, cell: Cell) -> bool:
    """A cell is kept as long as it was asked for in the same way."""
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("options") == cell.asked


def _run_cell(
    cell: Cell, scoring: Scoring, run: Path, device: str, *, data_folder: Path | None, accuracy_real: float | None
) -> dict[str, Any]:
    """Train, check the release, sample, score. The cell's seed is that of all of it; no path gets into the result."""
    from datalens.driver import choose_device
    from datalens.released.release import sample

    assert cell.options is not None
    trained = _train(cell, run, device, data_folder)
    began = time.monotonic()
    synthetic = sample(
        run / "release", count=scoring.count, seed=cell.options.get("seed", 0), device=choose_device(device)
    )
    sample_seconds = time.monotonic() - began
    if scoring.measure == "grid":
        from datalens.reproduce.figure4 import score as measured
    elif scoring.measure == "quality":
        from datalens.reproduce.quality import score as measured
    else:
        measured = _utility
    score = measured(cell, scoring, synthetic, device, data_folder=data_folder, accuracy_real=accuracy_real)
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "options": cell.asked,
        "date": datetime.now(UTC).date().isoformat(),
        **score,
        "train": {key: value for key, value in trained.items() if key != "run"},
        "sample_seconds": round(sample_seconds, 2),
        "settings": synthetic.certificate["settings"],
        "certificate_sha256": synthetic.certificate["sha256"]["certificate"],
        "versions": synthetic.certificate["versions"],
    }


def _train(cell: Cell, run: Path, device: str, data_folder: Path | None) -> dict[str, Any]:
    """The run of a cell, or the one that another cell has made with the same options, checked."""
    from datalens.driver import train
    from datalens.released.verification import check_release

    facts = run / "trained.json"
    if facts.exists() and not check_release(run / "release").problems:
        found: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
        return found
    assert cell.options is not None
    where: dict[str, Any] = {"out": run, "device": device, "data_folder": data_folder}
    trained = train(TrainOptions(**where, resume=(run / "ledger.jsonl").exists(), **cell.options))
    if trained["interrupted"]:
        raise KeyboardInterrupt
    problems = check_release(run / "release").problems
    if problems:
        raise DatalensError(f"{run}: {problems[0]}")
    write_atomically(facts, json.dumps(trained, indent=1).encode())
    return trained


def _utility(
    cell: Cell,
    scoring: Scoring,
    synthetic: Any,
    device: str,
    *,
    data_folder: Path | None,
    accuracy_real: float | None,
) -> dict[str, Any]:
    """Accuracy on real images of a classifier trained on the synthetic ones."""
    from datalens.data import formats
    from datalens.driver import choose_device
    from datalens.evaluate.utility import evaluate

    assert cell.options is not None
    data = cell.options["data"]
    real = formats.load_some(data, most=scoring.count, folder=data_folder)
    test = formats.load(data, "test", folder=data_folder)
    score = evaluate(
        synthetic,
        real.images,
        real.labels,
        test.images[: scoring.test],
        test.labels[: scoring.test],
        seeds=scoring.seeds,
        epochs=scoring.epochs,
        device=choose_device(device),
        classifier=scoring.classifier,
        first_seed=cell.options.get("seed", 0),
        accuracy_real=accuracy_real,
    )
    return {"utility": score.as_dict()}
