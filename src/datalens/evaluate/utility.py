"""Utility of synthetic images: the accuracy, on real images, of a classifier trained on synthetic ones.

Accuracies are computed from real records without any noise, so they are for the data owner: publishing them costs
privacy that no certificate accounts for.
"""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from datalens.errors import DatalensError
from datalens.evaluate.classifiers import CLASSIFIERS, ClassifierName
from datalens.progress import bar
from datalens.public import streams
from datalens.released.synthetic import SyntheticDataset

_BATCH = 128
_TEST_BATCH = 250  # on a CPU, larger ones fall out of the cache and run up to twice as long


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Test accuracy after each epoch of one training, and the confusion matrix after the last."""

    per_epoch: tuple[float, ...]
    confusion: tuple[tuple[int, ...], ...]  # [class, guess]: numbers of test images

    @property
    def final(self) -> float:
        return self.per_epoch[-1]

    @property
    def best(self) -> float:
        """Return the best epoch's accuracy. It is chosen on the test set and optimistic; for comparison with papers."""
        return max(self.per_epoch)


@dataclass(frozen=True, kw_only=True)
class Utility:
    """The result of `evaluate`. Accuracies are fractions of the test set."""

    accuracy: float  # final epoch, mean over seeds
    accuracy_std: float  # sample standard deviation over seeds; 0 for one seed
    accuracy_best_epoch: float  # mean over seeds; for comparison with papers only
    accuracy_real: float  # of the same classifier trained on real images, one seed: a ceiling
    classifier: str
    seeds: int
    epochs: int
    synthetic: int  # number of training images
    test: int  # number of test images
    accuracy_per_class: tuple[float | None, ...]  # mean over seeds; None: no test image of that class
    confusion: tuple[tuple[int, ...], ...]  # [class, guess]: numbers of test images, summed over the seeds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    synthetic: SyntheticDataset,
    real_train_images: NDArray[np.uint8],
    real_train_labels: NDArray[np.int64],
    test_images: NDArray[np.uint8],
    test_labels: NDArray[np.int64],
    *,
    seeds: int,
    epochs: int,
    device: torch.device | str,
    classifier: ClassifierName = "paper",
    first_seed: int = 0,
    accuracy_real: float | None = None,
) -> Utility:
    """Train a classifier on synthetic images once per seed, and test it on real ones.

    For `accuracy_real` the same classifier is trained for as many epochs on as many real images: a seeded random
    subset, or all if there are fewer. It is a ceiling for comparison, so one seed is enough, always the same one.

    Args:
        synthetic: the synthetic set.
        real_train_images: real training images [n, h, w, c].
        real_train_labels: their labels [n].
        test_images: real test images [n, h, w, c].
        test_labels: their labels [n].
        seeds: number of trainings on synthetic images.
        epochs: number of epochs of each training.
        device: where to compute.
        classifier: which classifier to train.
        first_seed: the seed of the first training.
        accuracy_real: the ceiling, if it is known from another call.

    Raises:
        DatalensError: images or labels do not match the synthetic set, or a number is too small.
    """
    if seeds < 1:
        raise DatalensError(f"at least one seed is needed, not {seeds}")
    check_like(synthetic, "real training set", real_train_images, real_train_labels)
    check_like(synthetic, "test set", test_images, test_labels)

    def score(images: NDArray[np.uint8], labels: NDArray[np.int64], seed: int, label: str) -> Scores:
        return train_classifier(
            images,
            labels,
            test_images,
            test_labels,
            classes=len(synthetic.classes),
            epochs=epochs,
            batch=_BATCH,
            seed=seed,
            device=device,
            progress_label=label,
            classifier=classifier,
        )[1]

    scores = [
        score(synthetic.images, synthetic.labels, first_seed + i, f"classifier on synthetic images, {i + 1} of {seeds}")
        for i in range(seeds)
    ]
    if accuracy_real is None:
        size = min(len(synthetic.images), len(real_train_images))
        subset = np.arange(size)
        if size < len(real_train_images):
            subset = np.random.default_rng(0).choice(len(real_train_images), size, replace=False)
        accuracy_real = score(
            real_train_images[subset], real_train_labels[subset], 0, "classifier on real images"
        ).final
    finals = [s.final for s in scores]
    confusion = np.sum([s.confusion for s in scores], axis=0)
    return Utility(
        accuracy=statistics.fmean(finals),
        accuracy_std=statistics.stdev(finals) if seeds > 1 else 0.0,
        accuracy_best_epoch=statistics.fmean(s.best for s in scores),
        accuracy_real=accuracy_real,
        classifier=CLASSIFIERS[classifier].description,
        seeds=seeds,
        epochs=epochs,
        synthetic=len(synthetic.images),
        test=len(test_images),
        accuracy_per_class=per_class(confusion),
        confusion=tuple(map(tuple, confusion.tolist())),
    )


def per_class(confusion: NDArray[np.int64]) -> tuple[float | None, ...]:
    """Return the fraction of each row that is on the diagonal; None for rows without entries."""
    rows = confusion.sum(axis=1)
    return tuple(float(confusion[i, i] / row) if row else None for i, row in enumerate(rows.tolist()))


def train_classifier(
    train_images: NDArray[np.uint8],
    train_labels: NDArray[np.int64],
    test_images: NDArray[np.uint8],
    test_labels: NDArray[np.int64],
    *,
    classes: int,
    epochs: int,
    batch: int,
    seed: int,
    device: torch.device | str,
    progress_label: str,
    classifier: ClassifierName = "paper",
) -> tuple[nn.Module, Scores]:
    """Train a classifier on images [n, h, w, c] and test it after every epoch.

    Nothing is chosen on the test set. The same seed gives the same scores on the same machine.

    Returns:
        The network, in evaluation mode, and its scores.
    """
    if epochs < 1 or batch < 1:
        raise DatalensError(f"epochs and batch must be at least 1, not {epochs} and {batch}")
    recipe = CLASSIFIERS[classifier]
    if recipe.whole_batches and min(batch, len(train_images)) < 2:
        raise DatalensError(f"the classifier {classifier} needs batches of at least two images")
    images, labels = _on(device, train_images), _on(device, train_labels)
    held_images, held_labels = _on(device, test_images), _on(device, test_labels)
    count, height, width, channels = images.shape
    batches = max(1, count // batch) if recipe.whole_batches else math.ceil(count / batch)
    steps = epochs * batches
    shuffles = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same order
    moves = torch.Generator(device).manual_seed(streams.derive(seed, "augmentation"))
    per_epoch = []
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
        bar(progress_label, steps) as (progress, task),
    ):
        torch.manual_seed(seed)  # initial weights and dropout
        net = recipe.network(channels=channels, height=height, width=width, classes=classes)
        # channels_last takes half the time on a CPU; torch's stubs do not know the argument
        net = net.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer, schedule = recipe.optimizer(net, steps)
        for _ in range(epochs):
            net.train()
            for chosen in torch.randperm(count, generator=shuffles).to(device).split(batch)[:batches]:
                augmented = recipe.augment(normalise(images[chosen]), moves)
                loss = F.cross_entropy(net(augmented), labels[chosen], label_smoothing=recipe.smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            guesses = _guesses(net, held_images)
            per_epoch.append((guesses == held_labels).double().mean().item())
    pairs = torch.bincount(held_labels * classes + guesses, minlength=classes**2)
    confusion = tuple(map(tuple, pairs.view(classes, classes).tolist()))
    return net, Scores(per_epoch=tuple(per_epoch), confusion=confusion)


def _guesses(net: nn.Module, images: Tensor) -> Tensor:
    net.eval()
    with torch.inference_mode():
        return torch.cat([net(normalise(part)).argmax(dim=1) for part in images.split(_TEST_BATCH)])


def _on(device: torch.device | str, array: NDArray[Any]) -> Tensor:
    return torch.tensor(array, device=device)


def normalise(images: Tensor) -> Tensor:
    """Convert uint8 [b, h, w, c] to [b, c, h, w] in [-1, 1]. The permuted tensor is channels_last already."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def check_like(synthetic: SyntheticDataset, name: str, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Raise DatalensError unless real images and labels have the synthetic set's types, shape and classes."""
    expected, classes = synthetic.images.shape[1:], len(synthetic.classes)
    if images.dtype != np.uint8 or images.shape[1:] != expected:
        raise DatalensError(
            f"the {name} holds {images.dtype} images of shape {list(images.shape[1:])}, "
            f"the synthetic one uint8 images of shape {list(expected)}: they must match"
        )
    if labels.dtype != np.int64 or labels.shape != images.shape[:1] or not len(labels):
        raise DatalensError(f"the {name} must have one int64 label for each of at least one image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DatalensError(f"the {name} has labels {low} to {high}, but the synthetic one has {classes} classes")
