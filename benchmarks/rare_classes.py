"""What becomes of rare classes, and what helps: merging, leaving out, no texture, a larger ε.

Classes of very different sizes are drawn: X-ray-like images, each class with a shadow of its own place. A run of the
default method is made for each remedy and ε. For every class the table has its number of records, its noise-to-signal
ratio (the larger of those of its covariances and of its texture's), the part of its synthetic images that a classifier
of real images recognises, and the part of its real test images that a classifier of synthetic images recognises.

There is no remedy by a class's share of the noise: classes are disjoint, so every class already has the noise of a
whole release, and less noise in one class would cost the records of that class more than ε (docs/decisions.md).

    python -m benchmarks.rare_classes --epsilons 1 3 10 --side 32 > docs/benchmarks/rare-classes.jsonl
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from datalens import TrainOptions, sample, train
from datalens.data.own.python import from_arrays
from datalens.data.schema import Schema
from datalens.evaluate.utility import per_class, train_classifier
from datalens.plans.registry import read_settings
from datalens.privacy.ledger import read_ledger
from datalens.run.folder import read_config

SIZES = {"A": 1600, "B": 800, "C": 400, "D": 200, "E": 100, "F": 50}
TEST = 100  # test images of each class


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with classes of very different sizes, and measure each class."""

    epsilons: tuple[float, ...] = (1.0, 3.0, 10.0)
    side: int = 32
    """Side of the images."""
    remedies: tuple[str, ...] = ("none", "no texture", "merged", "left out")
    epochs: int = 8
    classifier: Literal["logistic", "paper"] = "logistic"
    """The classifier: its class is a shadow at a place, which a linear one recognises."""


def drawn(counts: dict[str, int], side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, side, side] like chest X-rays, with a shadow at the place of their class, and labels."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / (side - 1) * 2 - 1
    images, labels = [], []
    for number, count in enumerate(counts.values()):
        angle = 2 * np.pi * number / len(SIZES)
        for _ in range(count):
            cx, cy = random.normal(0, 0.04, 2)
            picture = 0.75 - 0.35 * np.exp(-((((x - cx) / 0.75) ** 2 + ((y - cy) / 0.85) ** 2) ** 3))
            for lung in (-0.36, 0.36):
                picture -= 0.3 * np.exp(-((((x - cx - lung) / 0.26) ** 2 + ((y - cy + 0.05) / 0.55) ** 2) ** 2))
            px, py = 0.5 * np.cos(angle) + random.normal(0, 0.05), 0.5 * np.sin(angle) + random.normal(0, 0.05)
            picture += random.normal(0.4, 0.05) * np.exp(-(((x - px) / 0.2) ** 2 + ((y - py) / 0.2) ** 2))
            images.append(np.clip(picture + random.normal(0, 0.04, picture.shape), 0, 1))
            labels.append(number)
    order = random.permutation(len(labels))
    return (np.stack(images) * 255).astype(np.uint8)[order], np.array(labels, dtype=np.int64)[order]


def remedied(remedy: str, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images, labels and class names as a remedy has them; of classes that are left out, nothing."""
    names = list(SIZES)
    if remedy == "merged":  # the three rarest become one class
        return images, np.minimum(labels, 3), [*names[:3], "+".join(names[3:])]
    if remedy == "left out":
        kept = labels < 4
        return images[kept], labels[kept], names[:4]
    return images, labels, names


def measured(epsilon: float, remedy: str, o: Options) -> list[dict[str, object]]:
    """Make one run, and return a line for each of its classes."""
    images, labels, names = remedied(remedy, *drawn(SIZES, o.side, 0))
    real, real_labels, _ = remedied(remedy, *drawn(dict.fromkeys(SIZES, 150), o.side, 1))
    test, test_labels, _ = remedied(remedy, *drawn(dict.fromkeys(SIZES, TEST), o.side, 2))
    records = from_arrays(images, labels, nominal_size=len(images), classes=range(len(names)))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        own = {"texture": 0} if remedy == "no texture" else {}
        train(TrainOptions(data="drawn", out=out, epsilon=epsilon, delta=1e-5, own=own), records=records)
        balanced = sample(out / "release", count=100 * len(names), seed=0, balanced=True)
        config, (budget, _) = read_config(out), read_ledger(out / "ledger.jsonl")
    settings, schema = read_settings(config["settings"]), Schema.from_dict(config["schema"])
    noise = {part["release"]: part["noise_to_signal"] for part in settings.costs(schema, budget)}
    worst = max(noise["covariances"], noise.get("texture-covariances", 0.0)) * len(images) / len(names)

    def recognised(train_images: np.ndarray, train_labels: np.ndarray, on: np.ndarray, of: np.ndarray) -> tuple:
        _, scores = train_classifier(
            train_images,
            train_labels,
            on,
            of,
            classes=len(names),
            epochs=o.epochs,
            batch=64,
            seed=0,
            device="cpu",
            progress_label="classifier",
            classifier=o.classifier,
        )
        return per_class(np.array(scores.confusion))

    shape = (-1, o.side, o.side, 1)
    by_real = recognised(real.reshape(shape), real_labels, balanced.images, balanced.labels)
    by_synthetic = recognised(balanced.images, balanced.labels, test.reshape(shape), test_labels)
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return [
        {
            "epsilon": epsilon,
            "remedy": remedy,
            "class": name,
            "records": count,
            "noise_to_signal": round(worst / count, 4),
            "recognised": seen,
            "recall": found,
        }
        for name, count, seen, found in zip(names, counts, by_real, by_synthetic, strict=True)
    ]


def main(o: Options) -> None:
    """Print a line of JSON for every ε, remedy and class."""
    for epsilon in o.epsilons:
        for remedy in o.remedies:
            for line in measured(epsilon, remedy, o):
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(tyro.cli(Options))
