"""Draws the pictures beside the studio's scale of ε: what such a budget gave on known public sets.

    python tools/budgets.py [--runs FOLDER]

For each set and each ε it trains with the default method, unless FOLDER has the run already: eight runs, a minute or
two each on one core. A picture is one synthetic image of each class, at its own size; `real` are images of the public
test set. The first images of each class are taken, and none is chosen.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from datalens.studio.scale import DELTA, KNOWN, PICTURES, SCALE, Known

OUT = Path("src/datalens/studio/templates") / PICTURES


def training_set(known: Known, folder: Path) -> Path | str:
    """Return the data of a run: a named set, or a file with its first images."""
    from datalens.data import formats

    if known.few is None:
        return known.data
    path = folder / f"{known.data}-{known.few}.npz"
    if not path.exists():
        whole = formats.load(known.data, "train")
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, images=whole.images[: known.few], labels=whole.labels[: known.few], classes=whole.schema.classes)
    return path


def release(known: Known, epsilon: float, runs: Path) -> Path:
    """Return the release of a run, which is trained now if it is not there."""
    from datalens.driver import train
    from datalens.options import TrainOptions

    run = runs / f"{known.name}-{epsilon:g}"
    if not (run / "release").is_dir():
        data = str(training_set(known, runs))
        train(TrainOptions(data=data, nominal_size=known.few, epsilon=epsilon, delta=DELTA, out=run))
    return run / "release"


def strip(images: np.ndarray, labels: np.ndarray) -> Image.Image:
    """Return the first image of each class, side by side."""
    firsts = [images[labels == label][0, ..., 0] for label in range(labels.max() + 1)]
    return Image.fromarray(np.concatenate(firsts, axis=1))


def main() -> None:
    from datalens.data import formats
    from datalens.released.release import sample

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/budgets"), help="where the runs are, or are put")
    runs = parser.parse_args().runs
    OUT.mkdir(parents=True, exist_ok=True)
    for data in dict.fromkeys(known.data for known in KNOWN):
        test = formats.load(data, "test")
        strip(test.images, test.labels).save(OUT / f"{data}-real.png", optimize=True)
    for known in KNOWN:
        for epsilon in SCALE:
            drawn = sample(release(known, epsilon, runs), count=100, seed=0, balanced=True)
            strip(drawn.images, drawn.labels).save(OUT / f"{known.name}-{epsilon:g}.png", optimize=True)
            print(OUT / f"{known.name}-{epsilon:g}.png", flush=True)


if __name__ == "__main__":
    main()
