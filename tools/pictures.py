"""Makes the pictures at the top of README: real images, and below them synthetic ones at several ε.

    python tools/pictures.py [--runs FOLDER]

It trains with the default method on MNIST and Fashion-MNIST, about a minute a run on one core, half an hour if
refined, unless FOLDER has the run already. Real images are of public test sets. A further row is one more line in
`ROWS`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path("docs/pictures")
DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
DELTA = 1e-5
DEEP, SCALE = 2, 2  # images of a class in a row, one below the other; pixels of the picture for one of an image


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of pictures: its name, the name of its runs, and the options that they are trained with."""

    name: str
    run: str
    options: dict[str, Any]


ROWS = [
    *(Row(name=f"ε = {e}", run=f"{e}", options={"epsilon": float(e)}) for e in (1, 3, 10)),
    Row(name="refined", run="10-refined", options={"epsilon": 10.0, "refine": "diffusion"}),
]


def release(data: str, row: Row, runs: Path) -> Path:
    """Return the release of a run, which is trained now if it is not there."""
    from datalens.driver import train
    from datalens.options import TrainOptions

    run = runs / f"{data}-{row.run}"
    if not (run / "release").is_dir():
        train(TrainOptions(data=data, delta=DELTA, out=run, **row.options))
    return run / "release"


def sheet(images: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the first images of each class, a class a column, as one grey picture."""
    side = images.shape[1] + 2
    grid = np.full((DEEP * side, classes * side), 255, dtype=np.uint8)
    for label in range(classes):
        for place, image in enumerate(images[labels == label][:DEEP]):
            top, left = place * side + 1, label * side + 1
            grid[top : top + side - 2, left : left + side - 2] = image[..., 0]
    return grid.repeat(SCALE, 0).repeat(SCALE, 1)


def rows(data: str, runs: Path) -> tuple[tuple[str, ...], list[tuple[str, np.ndarray]]]:
    """Return the names of the classes, and each row's name with its picture."""
    from datalens.data import formats
    from datalens.released.release import sample

    real = formats.load(data, "test")
    classes = real.schema.classes
    found = [("real", sheet(real.images, real.labels, len(classes)))]
    for row in ROWS:
        synthetic = sample(release(data, row, runs), count=20 * len(classes), seed=0, balanced=True)
        found.append((row.name, sheet(synthetic.images, synthetic.labels, len(classes))))
    return classes, found


def draw(data: str, runs: Path) -> Path:
    """Draw the picture of a data set, and return its file."""
    from matplotlib.figure import Figure

    classes, found = rows(data, runs)
    height, width = found[0][1].shape
    figure = Figure(figsize=((width + 90) / 100, (len(found) * (height + 10) + 70) / 100), dpi=100)
    for number, (name, picture) in enumerate(found):
        whole = figure.get_size_inches() * 100
        top = 62 + number * (height + 10)
        axis = figure.add_axes((80 / whole[0], 1 - (top + height) / whole[1], width / whole[0], height / whole[1]))
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
        axis.set_axis_off()
        figure.text(70 / whole[0], 1 - (top + height / 2) / whole[1], name, ha="right", va="center", fontsize=11)
    for label, name in enumerate(classes):
        at = 80 + (label + 0.5) * width / len(classes)
        figure.text(at / whole[0], 1 - 54 / whole[1], name, ha="center", va="bottom", fontsize=7.5)
    title = f"{DATA[data]}: real, and synthetic (δ = 1e-5, add-remove, exact accountant; refined: prv)"
    figure.text(8 / whole[0], 1 - 18 / whole[1], title, fontsize=11)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{data}.png"
    figure.savefig(path, metadata={"Software": None})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"), help="where the runs are, or are put")
    parser.add_argument("--data", choices=DATA, nargs="*", default=list(DATA))
    chosen = parser.parse_args()
    for data in chosen.data:
        path = draw(data, chosen.runs)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
