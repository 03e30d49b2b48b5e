"""`datalens evaluate`: how useful synthetic images are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from datalens.commands.common import DataFolder, Json, show, synthetic_of


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Train a classifier on synthetic images, test it on real ones. For the owner: the result is not covered by ε."""

    synthetic: Positional[Path]
    """A run or release folder, or a file written by `datalens sample`."""
    data: str
    """The real data set to test on."""
    data_folder: DataFolder = None
    """Where a named data set lies that cannot be downloaded."""
    seeds: int = 3
    """How many classifiers to train; mean and spread are reported."""
    epochs: int = 10
    """Epochs of each; the last one counts."""
    count: int = 10_000
    """Synthetic images to train on, when a run is given."""
    classifier: Literal["paper", "augmented"] = "paper"
    """paper: the paper's. augmented: of its size, with batch norm, on images that are moved and noised a little."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Json = False

    def __call__(self) -> int:
        from datalens.datasets import formats
        from datalens.evaluate import utility
        from datalens.training import choose_device

        test = formats.load(self.data, "test", folder=self.data_folder)
        dataset = synthetic_of(self.synthetic, self.count)
        real = formats.load_some(self.data, most=len(dataset.images), folder=self.data_folder)
        result = utility.evaluate(
            dataset,
            real.images,
            real.labels,
            test.images,
            test.labels,
            seeds=self.seeds,
            epochs=self.epochs,
            device=choose_device(self.device),
            classifier=self.classifier,
        ).as_dict()
        lines = [
            f"accuracy {result['accuracy']:.4f} ± {result['accuracy_std']:.4f} on {result['test']} real test images "
            f"({result['classifier']}, {result['synthetic']} synthetic images, final of {result['epochs']} epochs, "
            f"{result['seeds']} seeds)",
            f"the same classifier on as many real images: {result['accuracy_real']:.4f}",
            f"best epoch, chosen on the test set, only to compare with papers: {result['accuracy_best_epoch']:.4f}",
            "measured on real data: for the owner, not covered by ε",
        ]
        show(result, lines, json=self.json)
        return 0
