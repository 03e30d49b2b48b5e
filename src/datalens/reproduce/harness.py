"""`datalens reproduce`: a table is a list of cells, a cell is a run with ledger and certificate, and its score.

Each finished cell is a small JSON file, so an interrupted table goes on where it stopped. The output is
Markdown, CSV, JSON and a plot, with the paper's printed value beside ours.
"""

import csv
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.config import TrainOptions
from datalens.datasets import sources
from datalens.errors import DatalensError
from datalens.progress import say
from datalens.reproduce import appendix_a, dpsgd, figure2, runtime, table6
from datalens.runs import write_atomically

if TYPE_CHECKING:
    from datalens.evaluate.classifiers import ClassifierName


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a cell's release is scored; the same for every cell of a table."""

    count: int
    epochs: int
    seeds: int
    classifier: "ClassifierName" = "paper"


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
        text = f"{self.row} {self.column}{seed}".lower().replace("ε=", "eps")
        return "-".join("".join(c if (c.isascii() and c.isalnum()) or c == "." else " " for c in text).split())


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


def tables() -> dict[str, Table]:
    from datalens.reproduce import ablation, table1, table5, utility

    return {
        "table1": table1.TABLE,
        "table5": table5.TABLE,
        "utility": utility.TABLE,
        "ablation": ablation.TABLE,
    }


def listing() -> dict[str, str]:
    own = {"runtime": runtime.TITLE, "table6": table6.TITLE, "figure2": figure2.TITLE, **appendix_a.TITLES}
    return {name: table.title for name, table in tables().items()} | own


def reproduce(
    name: str,
    *,
    full: bool,
    out: Path,
    device: str,
    data_folder: Path | None = None,
    dpsgd_cells: Path | None = None,
) -> dict[str, Any]:
    """Run what is missing, then write the table. Returns where everything is.

    `data_folder`: where CelebA lies. Cells whose set cannot be downloaded and is neither there nor in its place at home
    are not run, and the table says so.
    """
    known = tables()
    if name not in listing():
        raise DatalensError(f"there is no {name!r} to reproduce: choose one of {', '.join(listing())}")
    if dpsgd_cells is not None and name not in appendix_a.TITLES:
        raise DatalensError(f"--cells is for {', '.join(appendix_a.TITLES)}: leave it out for {name}")
    if data_folder is not None:
        _check_folder(name, known[name].cells(full) if name in known else [], data_folder)
    if name == "runtime":
        return runtime.reproduce(full=full, out=out, device=device)
    if name == "table6":
        return table6.reproduce(full=full, out=out, device=device)
    if name in appendix_a.TITLES:
        return dpsgd.reproduce(name, full=full, out=out, device=device, cells=dpsgd_cells)
    if name == "figure2":
        return figure2.reproduce(full=full, out=out, device=device)
    table, folder = known[name], out / f"{name}-{'full' if full else 'quick'}"
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    cells = table.cells(full)
    runnable = [cell for cell in cells if cell.options is not None]
    results: dict[str, dict[str, Any]] = {}
    for number, cell in enumerate(runnable, start=1):
        path = folder / "cells" / f"{cell.name}.json"
        assert cell.options is not None
        data = cell.options["data"]
        if not _finished(path, cell):
            folder_of = data_folder if sources.family(data) == "celeba" else None
            if not (folder_of or sources.downloadable(data) or sources.cached(data)):
                continue
            say(f"[{number}/{len(runnable)}] {cell.row}, {cell.column}")
            # The ceiling depends on the data and the scoring alone: one cell finds it for all.
            known_real = (r["utility"]["accuracy_real"] for r in results.values() if r["options"]["data"] == data)
            result = _run_cell(
                cell,
                table.scoring(full),
                folder / "runs" / cell.name,
                device,
                data_folder=folder_of,
                accuracy_real=next(known_real, None),
            )
            write_atomically(path, json.dumps(result, indent=1).encode())
        results[cell.name] = json.loads(path.read_text(encoding="utf-8"))
    return _write(name, table, cells, results, folder, full=full)


def _check_folder(name: str, cells: list[Cell], folder: Path) -> None:
    """Now, not hours later, when the first cell needs it."""
    if not any(sources.family(cell.options["data"]) == "celeba" for cell in cells if cell.options):
        raise DatalensError(f"--data-folder is for CelebA, which cannot be downloaded; {name} reads none: leave it out")
    if not folder.is_dir():
        raise DatalensError(f"--data-folder {folder} is not a folder")


def _finished(path: Path, cell: Cell) -> bool:
    """A cell is kept as long as it was asked for in the same way."""
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("options") == cell.options


def _run_cell(
    cell: Cell, scoring: Scoring, run: Path, device: str, *, data_folder: Path | None, accuracy_real: float | None
) -> dict[str, Any]:
    """Train, check the release, sample, score. The cell's seed is that of all of it; no path gets into the result."""
    from datalens.datasets import formats
    from datalens.evaluate.utility import evaluate
    from datalens.released.certificate import check_release
    from datalens.released.release import sample
    from datalens.training import choose_device, train

    assert cell.options is not None
    data, seed = cell.options["data"], cell.options.get("seed", 0)
    where: dict[str, Any] = {"out": run, "device": device, "data_folder": data_folder}
    trained = train(TrainOptions(**where, resume=(run / "ledger.jsonl").exists(), **cell.options))
    if trained["interrupted"]:
        raise KeyboardInterrupt
    problems = check_release(run / "release").problems
    if problems:
        raise DatalensError(f"{run}: {problems[0]}")
    began = time.monotonic()
    synthetic = sample(run / "release", count=scoring.count, seed=seed, device=choose_device(device))
    sample_seconds = time.monotonic() - began
    real = formats.load_some(data, most=scoring.count, folder=data_folder)
    test = formats.load(data, "test", folder=data_folder)
    score = evaluate(
        synthetic,
        real.images,
        real.labels,
        test.images,
        test.labels,
        seeds=scoring.seeds,
        epochs=scoring.epochs,
        device=choose_device(device),
        classifier=scoring.classifier,
        first_seed=seed,
        accuracy_real=accuracy_real,
    )
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "options": cell.options,
        "date": datetime.now(UTC).date().isoformat(),
        "utility": score.as_dict(),
        "train": {key: value for key, value in trained.items() if key != "run"},
        "sample_seconds": round(sample_seconds, 2),
        "settings": synthetic.certificate["settings"],
        "certificate_sha256": synthetic.certificate["sha256"]["certificate"],
        "versions": synthetic.certificate["versions"],
    }


def _write(
    name: str, table: Table, cells: list[Cell], results: dict[str, dict[str, Any]], folder: Path, *, full: bool
) -> dict[str, Any]:
    rows = table.rows(cells, results) if table.rows else [_row(cell, results.get(cell.name)) for cell in cells]
    base = folder / name
    write_atomically(
        base.with_suffix(".json"), json.dumps({"table": name, "full": full, "rows": rows}, indent=1).encode()
    )
    with open(base.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    heading = f"# {table.title} ({'full' if full else 'quick'})\n\n{table.note(full)}\n\n"
    write_atomically(base.with_suffix(".md"), (heading + (table.markdown or _markdown)(rows)).encode())
    _plot(rows, table.title, base.with_suffix(".png"))
    return {
        "table": name,
        "full": full,
        "markdown": str(base.with_suffix(".md")),
        "csv": str(base.with_suffix(".csv")),
        "plot": str(base.with_suffix(".png")),
        "rows": rows,
    }


def _row(cell: Cell, result: dict[str, Any] | None) -> dict[str, Any]:
    """One flat line per cell; empty where the cell was not run or the paper has no figure."""
    score, trained = (result["utility"], result["train"]) if result else ({}, {})
    ours = score.get("accuracy")
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "ours": ours,
        "difference": round(ours - cell.paper, 4) if ours is not None and cell.paper is not None else None,
        "std": score.get("accuracy_std"),
        "best_epoch": score.get("accuracy_best_epoch"),
        "real": score.get("accuracy_real"),
        "epsilon": trained.get("epsilon"),
        "epsilon_spent": trained.get("epsilon_spent"),
        "delta": trained.get("delta"),
        "relation": trained.get("relation"),
        "accountant": trained.get("accountant"),
        "private": trained.get("private"),
        "steps": trained.get("steps"),
        "teachers": result["settings"].get("teachers") if result else None,
        "train_seconds": trained.get("seconds"),
    }


def show(value: float | None, digits: int = 4) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def show_ours(row: dict[str, Any]) -> str:
    return show(row["ours"]) + (f" ± {row['std']:.4f}" if row["std"] else "")


def show_cost(row: dict[str, Any]) -> str:
    """What a figure of ours cost: never ε without the rest."""
    cost = f"{float(row['epsilon_spent']):.4g}, {row['delta']:g}, {row['relation']}, {row['accountant']}"
    return cost + ("" if row["private"] else " NOT PRIVATE")


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | method | paper | ours | difference | best epoch¹ | real data² | ε spent, δ, relation, accountant | "
        "teachers | steps | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cost = "not run: its method is not built yet" if r["ours"] is None else show_cost(r)
        difference = "—" if r["difference"] is None else f"{r['difference']:+.4f}"
        lines.append(
            f"| {r['row']} | {r['column']} | {show(r['paper'])} | {show_ours(r)} | {difference} | "
            f"{show(r['best_epoch'])} | {show(r['real'])} | {cost} | {r['teachers'] or '—'} | {r['steps'] or '—'} | "
            f"{show(r['train_seconds'], 1)} |"
        )
    notes = (
        "\n¹ The best epoch is chosen on the test set, as the paper's code does: only for comparison.\n"
        "² The same classifier trained on as many real images: the ceiling.\n"
    )
    return "\n".join(lines) + "\n" + notes


def _plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Paper and ours side by side, for the cells we ran; and the best that others print, where a table has it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in rows if r["ours"] is not None]
    figure, axes = plt.subplots(figsize=(1.6 + 1.3 * len(shown), 4.2), layout="constrained")
    places = range(len(shown))
    axes.bar([p - 0.2 for p in places], [r["paper"] or 0 for r in shown], 0.38, label="paper", color="#9aa5b1")
    axes.bar(
        [p + 0.2 for p in places], [r["ours"] for r in shown], 0.38, yerr=[r["std"] or 0 for r in shown],
        label="ours", color="#2463b4",
    )  # fmt: skip
    for p, r in zip(places, shown, strict=True):
        axes.text(p + 0.2, r["ours"] + (r["std"] or 0) + 0.015, f"{r['ours']:.2f}", ha="center", fontsize=8)
        if r["paper"] is not None:
            axes.text(p - 0.2, r["paper"] + 0.015, f"{r['paper']:.2f}", ha="center", fontsize=8)
    if best := {p + 0.2: r["best"] for p, r in zip(places, shown, strict=True) if r.get("best")}:
        axes.plot(list(best), list(best.values()), "k_", markersize=30, label="best published")
    axes.set_xticks(list(places), [f"{r['row']}\n{r['column']}" for r in shown], fontsize=8)
    axes.set(ylim=(0, 1.15), ylabel="accuracy on real test images", title=title)
    axes.legend(loc="upper right", frameon=False, ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
