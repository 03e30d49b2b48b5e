"""Scores on records that are held out of training: a sixth of the training set. The test set is never read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datalens.data import formats
from datalens.evaluate.utility import train_classifier
from datalens.released.drawing import draw

COUNT, EPOCHS = 20_000, 8  # numbers of training images and of epochs of a classifier


def split(data: str, folder: Path, count: int | None = None) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Split a training set into five sixths, of which `count` records are written to a file, and a held-out sixth.

    Returns:
        The options of TrainOptions for the file, and the held-out images and labels.
    """
    records = formats.load(data, "train")
    order = np.random.default_rng(7).permutation(len(records.images))
    inside, held = order[: len(order) * 5 // 6][:count], order[len(order) * 5 // 6 :]
    file = folder / f"{data}-{len(inside)}.npz"
    np.savez(file, images=records.images[inside], labels=records.labels[inside], classes=records.schema.classes)
    return {"data": str(file), "nominal_size": len(inside)}, records.images[held], records.labels[held]


def score(what: str, generator: Any, held: np.ndarray, labels: np.ndarray, device: torch.device, **facts: Any) -> None:
    """Train a classifier on images of a generator, and print its accuracy on held-out images as a JSON line."""
    classes = int(labels.max()) + 1
    images, shown = draw(generator, count=COUNT, seed=0, classes=classes)
    _, accuracies = train_classifier(
        *(images, shown, held, labels),
        classes=classes,
        epochs=EPOCHS,
        batch=128,
        seed=0,
        device=device,
        progress_label=what,
        classifier="augmented",
    )
    print(json.dumps({"what": what, "accuracy": round(accuracies.final, 4), **facts}), flush=True)
