"""Accuracy by step: "converges within 100 epochs" (Section 5). A cell is a run that stops after so many steps.

A step, which the paper's code calls an epoch, is one vote on a batch of images. σ is the printed one, so a shorter run
is the beginning of a longer one and spends less.
"""

from pathlib import Path

from datalens.reproduce.cells import Cell, Row, Table
from datalens.reproduce.compared import DATA, FEW_TEACHERS, METHODS, said
from datalens.reproduce.table1 import scoring

STEPS = {1: (5, 10, 20, 40, 60, 86), 10: (5, 10, 20, 40, 80, 118)}  # ε → steps; the last are all that ε buys
METHOD = "DataLens"


def cells(full: bool) -> list[Cell]:
    found = []
    for dataset in ("MNIST", "Fashion-MNIST") if full else ("MNIST",):
        for epsilon, steps in STEPS.items() if full else [(1, (2, 4, 6))]:
            for count in steps:
                how = {"data": DATA[dataset], "epsilon": float(epsilon), "delta": 1e-5} | METHODS[METHOD]
                how |= {} if full else FEW_TEACHERS
                if count != STEPS[epsilon][-1] or not full:  # all of them is Table 1's run
                    how |= {"steps": count, **_noise(dataset, epsilon)}
                row = f"{dataset} ε={epsilon}"
                found.append(Cell(row=row, column=f"{count} steps", paper=None, options=how))
    return found


def _noise(dataset: str, epsilon: int) -> dict[str, float]:
    """Return the preset's σ and β, which --steps would otherwise have computed anew."""
    if epsilon == 10:
        return {"sigma": 900.0, "beta": 0.2 if dataset == "MNIST" else 0.27}
    return {"sigma": 5000.0, "beta": 0.7 if dataset == "MNIST" else 0.9}


def note(full: bool) -> str:
    return (
        f"{said(full)} Each cell is a run of its own that ends after so many steps, each a vote on 15 images. "
        "The paper says that DataLens converges within 100 epochs, and shows no curve. δ = 1e-5."
    )


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Draw accuracy against steps, a line for each data set and ε."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for row in dict.fromkeys(r["row"] for r in rows):
        mine = [r for r in rows if r["row"] == row and r["ours"] is not None]
        at = [int(r["column"].split()[0]) for r in mine]
        axes.errorbar(at, [r["ours"] for r in mine], [r["std"] or 0 for r in mine], fmt="o-", ms=3, label=row)
    axes.set(xlabel="steps", ylabel="accuracy on real test images", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


TABLE = Table(
    title="Accuracy by step", cells=cells, note=note, scoring=scoring, plot=plot, shares_runs=True,
)  # fmt: skip
