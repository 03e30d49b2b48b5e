"""Figure 4: images that the generators draw, class by class. They come from releases alone, so they may be published.

Pictures made from CelebA show nobody, but must not be committed: the terms of the data set forbid publishing faces.
"""

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datalens.reproduce.cells import Cell, Scoring, Table, marks
from datalens.reproduce.compared import ALONE, OURS, options, said
from datalens.reproduce.output import show_cost, show_marks

if TYPE_CHECKING:
    from datalens.released.synthetic import SyntheticDataset

DATA = ("MNIST", "Fashion-MNIST", "CelebA-Gender")
ACROSS = 10  # images of each class


def cells(full: bool) -> list[Cell]:
    return [
        Cell(
            row=f"{dataset} ε={epsilon}", column=m, paper=None, options=options(m, dataset, epsilon, full=full)
        )
        for dataset in (DATA if full else DATA[:2])
        for epsilon in ((1, 10) if full else (1,))
        for m in ("DataLens", OURS, ALONE)
    ]  # fmt: skip


def score(
    cell: Cell,
    scoring: Scoring,
    synthetic: "SyntheticDataset",
    device: str,
    *,
    data_folder: Path | None,
    accuracy_real: float | None,
) -> dict[str, Any]:
    """Return a PNG with a row of images for each class, which is kept with the cell. For arguments, see `accuracy`."""
    import numpy as np
    from PIL import Image

    _, height, width, channels = synthetic.images.shape
    classes = len(synthetic.classes)
    sheet = np.full((classes * (height + 1) + 1, ACROSS * (width + 1) + 1, channels), 255, dtype=np.uint8)
    for number in range(classes):
        for place, image in enumerate(synthetic.images[synthetic.labels == number][:ACROSS]):
            top, left = number * (height + 1) + 1, place * (width + 1) + 1
            sheet[top : top + height, left : left + width] = image
    file = io.BytesIO()
    Image.fromarray(sheet.squeeze(-1) if channels == 1 else sheet[..., :3]).save(file, format="PNG")
    grid = {"classes": list(synthetic.classes), "across": ACROSS, "sha256": hashlib.sha256(file.getvalue()).hexdigest()}
    return {"grid": grid, "picture": file.getvalue()}


def scoring(full: bool) -> Scoring:
    return Scoring(count=400, epochs=1, seeds=1, measure=score)


def note(full: bool) -> str:
    return (
        f"{said(full)} A row of pictures is a class. They are made from the release alone, so its ε covers them. The "
        "paper shows MNIST, Fashion-MNIST and CelebA from DataLens, and says that they are noisy. Pictures of CelebA "
        "are not on this sheet, nor kept with the results: its terms do not let them be published, whatever ε says."
    )


def rows(cells: list[Cell], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for cell in cells:
        result = results.get(cell.name)
        trained = result["train"] if result else {}
        facts = ("epsilon_spent", "delta", "relation", "accountant", "private")
        lines.append(
            {
                "row": cell.row,
                "column": cell.column,
                "picture": result.get("picture") if result else None,
                "date": result["date"] if result else None,
                "marks": marks(result),
                "not_run": None if result else cell.not_run,
                **{name: trained.get(name) for name in facts},
            }
        )
    return lines


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| row | method | picture | ε spent, δ, relation, accountant |", "|---|---|---|---|"]
    for r in rows:
        cost = r["not_run"] or show_cost(r)
        picture = Path(r["picture"]).name if r["picture"] else "not kept" if r["date"] else "—"
        lines.append(f"| {r['row']} | {r['column']} | {picture}{show_marks(r)} | {cost} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw all kept pictures on one sheet, except faces, which must not be published."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    shown = [r for r in rows if r["picture"] and not r["row"].startswith("CelebA")]
    across = min(3, max(1, len(shown)))
    down = max(1, -(-len(shown) // across))
    figure = Figure(figsize=(3.6 * across, 3.9 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, r in zip(axes.flat, shown, strict=False):
        axis.imshow(imread(r["picture"]), cmap="gray")
        axis.set_title(f"{r['row']}, {r['column']}\nδ = {r['delta']:g}, {r['relation']}, {r['accountant']}", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=80)


TABLE = Table(
    title="Figure 4: what the generators draw", cells=cells, note=note, scoring=scoring, rows=rows, markdown=markdown,
    plot=plot, shares_runs=True,
)  # fmt: skip
