"""The data set's own classifier: it is trained on real images and judges synthetic ones.

It is trained on records without noise, so it stays in the owner's cache (mode 0600), and no ε covers its results.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate import cache
from datalens.evaluate.classifiers import CLASSIFIERS, SmallResNet
from datalens.evaluate.utility import normalise, train_classifier
from datalens.progress import bar

_BATCH, _SEED = 128, 0
_LOOK = 250  # images at a time
STEPS = 1000  # minimum of training steps: on a small set, few epochs would leave the judge uncertain of everything

# Test accuracy of the classifiers that the paper's Inception Scores come from (DataLens, Appendix A.3).
PAPER = {"mnist": 0.99, "fashion-mnist": 0.93, "celeba-gender": 0.97}


@dataclass(frozen=True, kw_only=True, eq=False)
class Judge:
    """A network with its accuracy on real images that it was not trained on."""

    network: SmallResNet
    accuracy: float
    data: str
    images: int  # number of training images
    epochs: int
    fingerprint: str
    device: torch.device

    @property
    def name(self) -> str:
        return (
            f"classifier trained on {self.images} real images of {self.data} for {self.epochs} epochs, "
            f"test accuracy {self.accuracy:.4f}"
        )

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the last layer [b, f] for images uint8 [b, h, w, c]."""
        return self.network.features(normalise(images.to(self.device)))

    def probabilities(self, images: np.ndarray, label: str) -> Tensor:
        """Return class probabilities [n, classes], float64, on the CPU."""
        parts = []
        with torch.inference_mode(), bar(label, len(images)) as (progress, task):
            for part in batches(images, _LOOK):
                parts.append(self.network(normalise(part.to(self.device))).double().softmax(dim=1).cpu())
                progress.advance(task, len(part))
        return torch.cat(parts)


def batches(images: np.ndarray, size: int) -> Iterator[Tensor]:
    """Yield images in batches of at most `size`."""
    for start in range(0, len(images), size):
        yield torch.tensor(images[start : start + size])


def judge(
    training: Dataset,
    test: Dataset,
    *,
    epochs: int,
    device: torch.device | str,
    fresh: bool = False,
    least: int | None = None,
) -> Judge:
    """Return the classifier of a real data set, from the cache or trained now.

    Args:
        training: images and labels to train on.
        test: images and labels to measure its accuracy on.
        epochs: number of epochs; more, if they have fewer than `least` steps.
        device: where to compute.
        fresh: train again even if it is in the cache.
        least: minimum of training steps; by default STEPS.
    """
    if epochs < 1:
        raise DatalensError(f"--judge-epochs must be at least 1, not {epochs}")
    epochs = max(epochs, math.ceil((least or STEPS) / max(1, len(training.images) // _BATCH)))
    schema = training.schema
    shape = {"channels": schema.channels, "height": schema.height, "width": schema.width}
    arrays = (training.images, training.labels, test.images, test.labels)
    settings = {**shape, "epochs": epochs, "batch": _BATCH, "seed": _SEED, "how": CLASSIFIERS["judge"].description}
    name = cache.key("judge", *arrays, settings)

    def train() -> dict[str, Tensor]:
        network, scores = train_classifier(
            *arrays,
            classes=len(schema.classes),
            epochs=epochs,
            batch=_BATCH,
            seed=_SEED,
            device=device,
            progress_label="judge: classifier on real images",
            classifier="judge",
        )
        return {**network.state_dict(), "accuracy": torch.tensor(scores.final, dtype=torch.float64)}

    state = dict(cache.remembered_tensors(f"judge-{name}", train, fresh=fresh))
    accuracy = state.pop("accuracy").item()
    network = SmallResNet(**shape, classes=len(schema.classes))
    network.load_state_dict(state)
    # torch's stubs do not know memory_format
    network = network.eval().requires_grad_(False).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Judge(
        network=network,
        accuracy=accuracy,
        data=schema.name,
        images=len(training.images),
        epochs=epochs,
        fingerprint=name,
        device=torch.device(device),
    )
