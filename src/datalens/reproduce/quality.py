"""Tables 3 and 12: Inception Score and FID of the methods' images, ε = 1 and 10. Table 3 has Table 12's scores only.

The scores come from a classifier trained on the real data set. The distances use Inception-v3's features, as published;
if Inception-v3 is not available they use that classifier's features, and are not comparable with the paper's.
"""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.errors import DatalensError
from datalens.progress import say
from datalens.reproduce.cells import Cell, Scoring, Table, marks
from datalens.reproduce.compared import OURS, PRINTED, options, said
from datalens.reproduce.output import plot_bars, show, show_cost, show_marks

if TYPE_CHECKING:
    from datalens.evaluate.features import Features
    from datalens.evaluate.judge import Judge
    from datalens.released.synthetic import SyntheticDataset

# The paper's printed values, in the order of PRINTED: (data set, ε) → Inception Scores, distances.
PAPER: dict[tuple[str, int], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("MNIST", 1): ((1.00, 1.19, 3.60, 1.00, 4.37), (470.20, 231.54, 153.38, 489.75, 186.06)),
    ("MNIST", 10): ((1.00, 1.46, 5.16, 8.59, 5.78), (304.86, 253.55, 150.62, 58.77, 173.50)),
    ("Fashion-MNIST", 1): ((1.03, 1.69, 3.41, 1.00, 3.93), (472.03, 253.19, 214.78, 587.31, 194.98)),
    ("Fashion-MNIST", 10): ((1.05, 2.35, 4.33, 5.87, 4.58), (433.38, 229.25, 171.90, 135.47, 167.68)),
    ("CelebA-Gender", 1): ((1.00, 1.15, 1.11, 1.00, 1.18), (485.92, 434.47, 302.45, 437.33, 297.73)),
    ("CelebA-Gender", 10): ((1.00, 1.16, 1.12, 1.00, 1.42), (485.41, 424.60, 323.95, 432.58, 320.84)),
}
REAL = {"MNIST": (9.86, 1.04), "Fashion-MNIST": (9.01, 1.54), "CelebA-Gender": (1.88, 2.38)}
QUICK = (("MNIST", 1),)
# The classifier of quick mode: numbers of its training images, of its steps, and of its test images.
JUDGED_BY, STEPS, TESTED = 10_000, 150, 2_000


def cells(full: bool) -> list[Cell]:
    """Return the cells. A cell has both figures; its `paper` is the score."""
    found = []
    for dataset, epsilon in PAPER if full else QUICK:
        values: dict[str, float | None] = dict(zip(PRINTED, PAPER[dataset, epsilon][0], strict=True))
        for method, value in (values | {OURS: None}).items():
            how = options(method, dataset, epsilon, full=full)
            found.append(Cell(row=f"{dataset} ε={epsilon}", column=method, paper=value, options=how))
    return found


def score_and_distance(
    cell: Cell,
    scoring: Scoring,
    synthetic: "SyntheticDataset",
    device: str,
    *,
    data_folder: Path | None,
    accuracy_real: float | None,
    distance: bool = True,
) -> dict[str, Any]:
    """Return both figures of a cell, and those of real images that the judge was not trained on as a baseline.

    Args:
        distance: whether to compute the distance too. Inception-v3 takes half an hour of a CPU core for 10,000 images.
            For the other arguments, see `accuracy`.
    """
    from datalens.data import formats
    from datalens.driver import choose_device
    from datalens.evaluate.fid import fid
    from datalens.evaluate.inception import inception_score
    from datalens.evaluate.judge import judge

    assert cell.options is not None
    data, chosen, quick = cell.options["data"], choose_device(device), scoring.count < 10_000
    test = formats.load(data, "test", folder=data_folder)
    if quick:
        test = dataclasses.replace(test, images=test.images[:TESTED], labels=test.labels[:TESTED])
    training = formats.load_some(data, most=JUDGED_BY if quick else 200_000, folder=data_folder)
    classifier = judge(training, test, epochs=scoring.epochs, device=chosen, least=STEPS if quick else None)
    score = inception_score(synthetic, test.images[: scoring.count], classifier)
    if not distance:
        return {"inception": score.as_dict()}
    count = min(scoring.count, len(training.images), len(test.images))
    features = _features(classifier, quick=quick)
    frechet = fid(synthetic.images, training.images[:count], features, held_out=test.images[:count])
    return {"inception": score.as_dict(), "fid": frechet.as_dict()}


def scoring(full: bool, *, distance: bool = True) -> Scoring:
    """Return how cells are scored. `epochs` are the judge's."""
    measure = functools.partial(score_and_distance, distance=distance)
    epochs = 20 if full else 2
    return Scoring(count=10_000 if full else 2_000, epochs=epochs, seeds=1, classifier="judge", measure=measure)


def _features(judge: "Judge", *, quick: bool) -> "Features":
    """Return Inception-v3's features, or the judge's own in quick mode and if Inception-v3's weights are missing."""
    from datalens.evaluate import features

    if quick:
        return features.own(judge)
    try:
        return features.inception(judge.device)
    except DatalensError as error:
        say(f"Inception-v3 is not available ({error}): distances are in the classifier's own features")
        return features.own(judge)


def note(full: bool) -> str:
    return (
        f"{said(full)} Inception Scores (higher is better; mean and spread of ten splits) by a classifier trained on "
        "the real set, distances (FID, lower is better) in the features that are named; in others than Inception-v3's "
        "they cannot be compared with the paper's. `Real data`: held-out real images. `CelebA` of the paper is "
        "CelebA-Gender. δ = 1e-5. For the owner: measured on real data, not covered by ε."
    )


# --- lines ----------------------------------------------------------------------------------------------------------


def rows_of_scores(cells: list[Cell], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return _rows(cells, results, ("inception",))


def rows_of_both(cells: list[Cell], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return _rows(cells, results, ("inception", "fid"))


def _rows(cells: list[Cell], results: dict[str, dict[str, Any]], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a line for each figure, that of real data first."""
    lines = []
    for row in dict.fromkeys(cell.row for cell in cells):
        dataset, epsilon = row.split(" ε=")
        mine = [cell for cell in cells if cell.row == row]
        for number, kind in enumerate(kinds):
            finished = [results[cell.name] for cell in mine if kind in results.get(cell.name, {})]
            printed = dict(zip(PRINTED, PAPER[dataset, int(epsilon)][number], strict=True))
            first = finished[0] if finished else None
            lines.append(_line(row, kind, "Real data", REAL[dataset][number], first, real=True))
            for cell in mine:
                lines.append(_line(row, kind, cell.column, printed.get(cell.column), results.get(cell.name)))
    return lines


def _line(
    row: str, kind: str, column: str, paper: float | None, result: dict[str, Any] | None, *, real: bool = False
) -> dict[str, Any]:
    trained = result["train"] if result and not real else {}
    ours = std = by = None
    comparable = True
    if result and kind == "inception":
        score = result["inception"]
        ours, std = (score["score_real"], score["score_real_std"]) if real else (score["score"], score["score_std"])
        by = score["judge"]
    elif result and "fid" in result:  # a cell of Table 3 has no distance, which takes hours on a CPU
        ours = result["fid"]["fid_real" if real else "fid"]
        by = result["fid"]["features"]
        comparable = by.startswith("inception")
    difference = round(ours - paper, 4) if ours is not None and paper is not None and comparable else None
    return {
        "row": row,
        "measure": "IS" if kind == "inception" else "FID",
        "column": column,
        "paper": paper,
        "ours": ours,
        "std": std,
        "marks": [] if real else marks(result),
        "difference": difference,
        "by": by,
        "epsilon_spent": trained.get("epsilon_spent"),
        "delta": trained.get("delta"),
        "relation": trained.get("relation"),
        "accountant": trained.get("accountant"),
        "private": trained.get("private"),
        "date": result["date"] if result else None,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | measure | method | paper | ours | difference | ε spent, δ, relation, accountant |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cost = "not run: needs a GPU" if r["ours"] is None else "—" if r["column"] == "Real data" else show_cost(r)
        spread = (f" ± {r['std']:.2f}" if r["std"] else "") + show_marks(r)
        difference = "—" if r["difference"] is None else f"{r['difference']:+.2f}"
        lines.append(
            f"| {r['row']} | {r['measure']} | {r['column']} | {show(r['paper'], 2)} | {show(r['ours'], 2)}{spread} | "
            f"{difference} | {cost} |"
        )
    said_by = dict.fromkeys(f"{r['row'].split(' ε=')[0]}, {r['measure']}: {r['by']}." for r in rows if r["by"])
    return "\n".join([*lines, "", *said_by]) + "\n"


def plot_scores(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    plot_bars([r for r in rows if r["measure"] == "IS"], title, path, label="Inception Score", high=None)


def plot_distances(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    distances = [r for r in rows if r["measure"] == "FID"]
    number = title.split(":")[0]
    plot_bars(distances, f"{number}: FID, lower is better (scores are in Table 3)", path, label="FID", high=None)


TABLE12 = Table(
    title="Table 12: Inception Score and FID", cells=cells, note=note, scoring=scoring, rows=rows_of_both,
    markdown=markdown, plot=plot_distances, shares_runs=True, measured=("inception", "fid"),
)  # fmt: skip
TABLE3 = Table(
    title="Table 3: Inception Score", cells=cells, note=note,
    scoring=functools.partial(scoring, distance=False), rows=rows_of_scores, markdown=markdown, plot=plot_scores,
    shares_runs=True, kept_as="table12",
)  # fmt: skip
