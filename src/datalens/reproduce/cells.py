"""The cells of the paper's tables: a cell is a run with ledger and certificate, and its score.

A table lists its cells. By default its lines show accuracies; other tables define their own lines and Markdown.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.data.named import sources
from datalens.errors import DatalensError
from datalens.files import write_atomically
from datalens.options import TrainOptions
from datalens.plans.registry import version_of
from datalens.reproduce.output import Row, plot_bars, show, show_cost, show_ours

if TYPE_CHECKING:
    from datalens.evaluate.classifiers import ClassifierName
    from datalens.released.synthetic import SyntheticDataset

Results = dict[str, dict[str, Any]]  # finished cells by name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of a table: the options to train it, and the paper's printed value (None: the paper has none)."""

    row: str
    column: str
    paper: float | None
    options: dict[str, Any] | None  # of TrainOptions; None: not implemented yet, so only the paper's value is shown

    @property
    def name(self) -> str:
        """Return a plain file name: "MNIST ε=1", "DataLens" → mnist-eps1-datalens; with the seed, if one is given."""
        seed = f" seed{self.options['seed']}" if self.options and "seed" in self.options else ""
        text = f"{self.row} {self.column}{seed}".lower().replace("ε=", "eps").replace("∞", "inf").replace("β", "beta")
        return "-".join("".join(c if (c.isascii() and c.isalnum()) or c == "." else " " for c in text).split())

    @property
    def asked(self) -> dict[str, Any] | None:
        """Return the options as JSON, which has no infinity."""
        if self.options is None:
            return None
        return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in self.options.items()}

    @property
    def run_name(self) -> str:
        """Return the name of its run, for tables that share runs. It is a function of the options."""
        assert self.options is not None
        asked = {k: v for k, v in (self.asked or {}).items() if (k, v) != ("seed", 0)}  # 0 is the default: same run
        asked["method version"] = self.version  # a run of older code is another run
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]
        epsilon, method = self.options.get("epsilon", 1.0), self.options.get("method", "datalens")
        return f"{self.options['data']}-eps{epsilon:g}-{method}-{digest}"

    @property
    def not_run(self) -> str:
        """Return what stands in place of a figure that was not run: whether it would take hours of two cores."""
        if self.options is None:
            return "not run"
        options, data, method = self.options, self.options["data"], self.options.get("method")
        faces = data in ("celeba-gender", "celeba-hair", "places365")  # 64 pixels, and thousands of teachers
        slow = ["gswgan", *(["dpgan"] if faces or data == "scenes" else []), *(["datalens-paper"] if faces else [])]
        if options.get("network") in ("paper", "printed") or (method in slow and options.get("preset") != "quick"):
            return "not run: needs a GPU"
        if not sources.downloadable(data):
            return "not run: needs --data-folder"
        compact = (method, options.get("network")) == ("datalens-paper", "compact")
        whole = compact and options.get("teachers", 4000) > 1000
        return "not run: up to 47 minutes of two cores" if whole else "not run"  # the longest kept run of that kind

    @property
    def version(self) -> int:
        """Return the version of the method that would make its run today."""
        assert self.options is not None
        return version_of(TrainOptions(out=Path(), **self.options))


def second_runs(cells: list[Cell]) -> list[Cell]:
    """Return a cell with another seed for every distinct run of these cells, to show how far two runs differ."""
    distinct = {cell.run_name: cell for cell in reversed(cells) if cell.options is not None}
    return [
        replace(cell, column=f"{cell.column}, second run", paper=None, options=(cell.options or {}) | {"seed": 1})
        for cell in reversed(distinct.values())
    ]


# --- running a cell -------------------------------------------------------------------------------------------------


def accuracy(
    cell: Cell,
    scoring: "Scoring",
    synthetic: "SyntheticDataset",
    device: str,
    *,
    data_folder: Path | None,
    accuracy_real: float | None,
) -> dict[str, Any]:
    """Score a cell by the accuracy on real images of a classifier that is trained on the synthetic ones.

    Args:
        cell: the cell to score.
        scoring: how to score it.
        synthetic: the images drawn from its release.
        device: where to compute.
        data_folder: the folder of data sets that cannot be downloaded.
        accuracy_real: the accuracy with real training images, if another cell has computed it.
    """
    from datalens.data import formats
    from datalens.driver import choose_device
    from datalens.evaluate.utility import evaluate

    assert cell.options is not None
    data = cell.options["data"]
    real = formats.load_some(data, most=scoring.count, folder=data_folder) if scoring.ceiling else None
    test = formats.load(data, "test", folder=data_folder)
    score = evaluate(
        synthetic,
        real.images if real else None,
        real.labels if real else None,
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


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A way to score the releases of a table's cells."""

    count: int
    epochs: int
    seeds: int
    classifier: "ClassifierName" = "paper"
    test: int | None = None  # number of real test images, the first ones; None: all
    ceiling: bool = True  # also train the classifier on as many real images
    measure: Callable[..., dict[str, Any]] = accuracy  # its result is added to the cell; arguments as of `accuracy`


def run_cell(
    cell: Cell, scoring: Scoring, run: Path, device: str, *, data_folder: Path | None, accuracy_real: float | None
) -> dict[str, Any]:
    """Train a cell, check its release, sample and score it, all with the cell's seed. The result holds no paths."""
    from datalens.driver import choose_device
    from datalens.released.release import sample

    assert cell.options is not None
    trained = _train(cell, run, device, data_folder)
    began = time.monotonic()
    synthetic = sample(
        run / "release", count=scoring.count, seed=cell.options.get("seed", 0), device=choose_device(device)
    )
    sample_seconds = time.monotonic() - began
    score = scoring.measure(cell, scoring, synthetic, device, data_folder=data_folder, accuracy_real=accuracy_real)
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "options": cell.asked,
        "method_version": cell.version,
        "date": datetime.now(UTC).date().isoformat(),
        **score,
        "train": {key: value for key, value in trained.items() if key != "run"},
        "sample_seconds": round(sample_seconds, 2),
        "settings": synthetic.certificate["settings"],
        "certificate_sha256": synthetic.certificate["sha256"]["certificate"],
        "versions": synthetic.certificate["versions"],
    }


def _train(cell: Cell, run: Path, device: str, data_folder: Path | None) -> dict[str, Any]:
    """Train a cell, or find the verified run of another cell with the same options. Returns the facts of the run."""
    from datalens.driver import train
    from datalens.released.verification import check_release

    facts = run / "trained.json"
    if facts.exists() and not check_release(run / "release").problems:
        shared: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
        return shared
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


def stale(cell: Cell, result: dict[str, Any], scoring: Scoring) -> str | None:
    """Return why a kept cell is not what a run would give today, or None if it is.

    A method has a version, which is raised when its results change; a cell that names none was made before cells named
    it, and nobody has shown that the code gives the same results since.
    """
    made, now = result.get("method_version"), cell.version
    if made != now:
        older = "an earlier version" if made is None else f"version {made}"
        return f"made by {older} of the method, which is at version {now}"
    if "utility" not in result:
        return None
    from datalens.evaluate.classifiers import CLASSIFIERS

    asked = {"classifier": CLASSIFIERS[scoring.classifier].description, "epochs": scoring.epochs}
    asked |= {"synthetic": scoring.count, "seeds": scoring.seeds}
    found = [name for name, value in asked.items() if result["utility"].get(name) != value]
    return f"scored with other {', '.join(found)}" if found else None


MARKED = (
    "In brackets, by rules in the code. `stale`: not shown to be what today's code gives (`--stale` runs it again). "
    "`one class`: nine tenths of the classifier's guesses are one class, or its accuracy is no more than that class "
    "has by being named always. `β above unanimity`: no vote of all teachers could reach the threshold, only noise did."
)
ONE_CLASS = 0.9  # of a classifier's guesses: from this part on it names one class always


def marks(result: dict[str, Any] | None) -> list[str]:
    """Return what a reader must know beside a figure: that it is stale, or that the classifier tells nothing apart.

    The second is a rule over the confusion matrix: nine tenths of all guesses are one class, or the accuracy is no more
    than that of naming the commonest class always.
    """
    if result is None:
        return []
    found = ["stale"] if result.get("stale") else []
    score = result.get("utility", {})
    settings = result.get("settings", {})
    if settings.get("decode") == "threshold" and settings["beta"] > 1:
        found.append("β above unanimity")
    if confusion := score.get("confusion"):
        guesses, total = [sum(column) for column in zip(*confusion, strict=True)], sum(map(sum, confusion))
        commonest = max(sum(row) for row in confusion) / total
        if (most := max(guesses) / total) >= ONE_CLASS:
            found.append(f"one class in {most:.0%} of guesses")
        elif score["accuracy"] <= commonest:
            found.append(f"one class always has {commonest:.3f}")
    return found


# --- lines of accuracies --------------------------------------------------------------------------------------------


def rows_of_accuracies(cells: list[Cell], results: Results) -> list[Row]:
    return [_row(cell, results.get(cell.name)) for cell in cells]


def _row(cell: Cell, result: dict[str, Any] | None) -> Row:
    """Return one flat line per cell, with None where the cell was not run or the paper has no figure."""
    score, trained = (result["utility"], result["train"]) if result else ({}, {})
    ours = score.get("accuracy")
    return {
        "row": cell.row,
        "column": cell.column,
        "paper": cell.paper,
        "ours": ours,
        "marks": marks(result),
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
        "beta": result["settings"]["beta"] if result and result["settings"].get("decode") == "threshold" else None,
        "train_seconds": trained.get("seconds"),
        "certificate": result.get("certificate_sha256") if result else None,
        "not_run": None if result else cell.not_run,
    }


def how_scored(scoring: Scoring) -> str:
    """Return the line above a table of accuracies: which classifier scores, and how it is trained."""
    from datalens.evaluate.classifiers import CLASSIFIERS, TRAINED

    return (
        f"Scored by the `{scoring.classifier}` classifier ({CLASSIFIERS[scoring.classifier].description}), trained on "
        f"{scoring.count} synthetic images for {scoring.epochs} epochs by {TRAINED[scoring.classifier]}; the last "
        "epoch counts."
    )


def show_accuracies(rows: list[Row]) -> str:
    lines = [
        "| row | method | paper | ours | difference | best epoch¹ | real data² | ε spent, δ, relation, accountant | "
        "teachers | β | steps | seconds | certificate³ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cost = r["not_run"] or show_cost(r)
        difference = "—" if r["difference"] is None else f"{r['difference']:+.4f}"
        lines.append(
            f"| {r['row']} | {r['column']} | {show(r['paper'])} | {show_ours(r)} | {difference} | "
            f"{show(r['best_epoch'])} | {show(r['real'])} | {cost} | {r['teachers'] or '—'} | {show(r['beta'], 2)} | "
            f"{r['steps'] or '—'} | "
            f"{show(r['train_seconds'], 1)} | {(r['certificate'] or '—')[:8]} |"
        )
    notes = (
        "\n±: the spread over classifiers, each trained on images of the same run; runs would differ by more.\n"
        "¹ The best epoch is chosen on the test set, as the paper's code does: only for comparison.\n"
        "² The same classifier trained on as many real images: the ceiling.\n"
        "³ How the SHA-256 of its certificate begins; the whole of it is kept with the cell.\n"
        f"{MARKED}\n"
    )
    return "\n".join(lines) + "\n" + notes


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper. `cells(full)` lists its figures, and `note(full)` states how they were made.

    A table whose lines are not its cells defines `rows` (a function of cells and results by name) and `markdown`.
    """

    title: str
    cells: Callable[[bool], list[Cell]]
    note: Callable[[bool], str]
    scoring: Callable[[bool], Scoring]
    rows: Callable[[list[Cell], Results], list[Row]] = rows_of_accuracies
    markdown: Callable[[list[Row]], str] = show_accuracies
    plot: Callable[[list[Row], str, Path], None] = plot_bars
    shares_runs: bool = False  # with other tables, so that equal runs are trained once
    measured: tuple[str, ...] = ()  # keys of scores: a kept cell without one of them is scored again
    kept_as: str | None = None  # the name of another table that has the same cells and keeps them

    def said(self, full: bool) -> str:
        """Return what stands above the table: the note and, for accuracies, how they are scored."""
        scoring = self.scoring(full)
        return self.note(full) + (f"\n\n{how_scored(scoring)}" if scoring.measure is accuracy else "")
