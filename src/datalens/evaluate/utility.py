"""Utility of synthetic images: the accuracy, on real images, of a classifier trained on synthetic ones.

Accuracies are computed from real records without any noise, so they are for the data owner: publishing them costs
privacy that no certificate accounts for.
"""

import math
import statistics
import time
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
    accuracy_real: float | None  # of the same classifier trained on real images, one seed: a ceiling; None: not known
    classifier: str
    seeds: int
    epochs: int
    synthetic: int  # number of training images
    test: int  # number of test images
    accuracy_per_class: tuple[float | None, ...]  # mean over seeds; None: no test image of that class
    confusion: tuple[tuple[int, ...], ...]  # [class, guess]: numbers of test images, summed over the seeds
    accuracy_majority: float  # of always guessing the largest class of the test set
    accuracy_real_per_class: tuple[float | None, ...] | None  # of the ceiling
    verdict: str  # the accuracy beside both, in words

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    synthetic: SyntheticDataset,
    real_train_images: NDArray[np.uint8] | None,
    real_train_labels: NDArray[np.int64] | None,
    test_images: NDArray[np.uint8],
    test_labels: NDArray[np.int64],
    *,
    seeds: int,
    epochs: int,
    device: torch.device | str,
    classifier: ClassifierName = "paper",
    first_seed: int = 0,
    accuracy_real: float | None = None,
    quick: bool = False,
) -> Utility:
    """Train a classifier on synthetic images once per seed, and test it on real ones.

    For `accuracy_real` the same classifier is trained for as many epochs on as many real images: a seeded random
    subset, or all if there are fewer. It is a ceiling for comparison, so one seed is enough, always the same one.

    Args:
        synthetic: the synthetic set.
        real_train_images: real training images [n, h, w, c]; None: there is no ceiling.
        real_train_labels: their labels [n].
        test_images: real test images [n, h, w, c].
        test_labels: their labels [n].
        seeds: number of trainings on synthetic images.
        epochs: number of epochs of each training.
        device: where to compute.
        classifier: which classifier to train.
        first_seed: the seed of the first training.
        accuracy_real: the ceiling, if it is known from another call.
        quick: use images of at most QUICK_SIDE pixels a side, and test after the last epoch only.

    Raises:
        DatalensError: images or labels do not match the synthetic set, or a number is too small.
    """
    if seeds < 1:
        raise DatalensError(f"at least one seed is needed, not {seeds}")
    if real_train_images is not None and real_train_labels is not None:
        check_like(synthetic, "real training set", real_train_images, real_train_labels)
    check_like(synthetic, "test set", test_images, test_labels)
    looked_at = smaller if quick else _unchanged
    test_seen = looked_at(test_images)

    def score(images: NDArray[np.uint8], labels: NDArray[np.int64], seed: int, label: str) -> Scores:
        return train_classifier(
            looked_at(images),
            labels,
            test_seen,
            test_labels,
            last_only=quick,
            classes=len(synthetic.classes),
            epochs=epochs,
            batch=_BATCH // 2 if quick else _BATCH,  # few images need more steps
            seed=seed,
            device=device,
            progress_label=label,
            classifier=classifier,
        )[1]

    scores = [
        score(synthetic.images, synthetic.labels, first_seed + i, f"classifier on synthetic images, {i + 1} of {seeds}")
        for i in range(seeds)
    ]
    ceiling_per_class = None
    if accuracy_real is None and real_train_images is not None and real_train_labels is not None:
        size = min(len(synthetic.images), len(real_train_images))
        subset = np.arange(size)
        if size < len(real_train_images):
            subset = np.random.default_rng(0).choice(len(real_train_images), size, replace=False)
        ceiling = score(real_train_images[subset], real_train_labels[subset], 0, "classifier on real images")
        accuracy_real, ceiling_per_class = ceiling.final, per_class(np.array(ceiling.confusion))
    finals = [s.final for s in scores]
    confusion = np.sum([s.confusion for s in scores], axis=0)
    majority = majority_share(test_labels)
    description = CLASSIFIERS[classifier].description
    if quick:
        name, _, rest = description.partition(":")
        height, width = test_seen.shape[1:3]
        description = f"{name}, {QUICK} at {height}x{width}:{rest}"
    return Utility(
        accuracy=statistics.fmean(finals),
        accuracy_std=statistics.stdev(finals) if seeds > 1 else 0.0,
        accuracy_best_epoch=statistics.fmean(s.best for s in scores),
        accuracy_real=accuracy_real,
        classifier=description,
        seeds=seeds,
        epochs=epochs,
        synthetic=len(synthetic.images),
        test=len(test_images),
        accuracy_per_class=per_class(confusion),
        confusion=tuple(map(tuple, confusion.tolist())),
        accuracy_majority=majority,
        accuracy_real_per_class=ceiling_per_class,
        verdict=verdict(statistics.fmean(finals), majority=majority, real=accuracy_real, test=len(test_images)),
    )


QUICK, QUICK_SIDE = "quick look", 32
# Up to each part of the way from guessing to real images, what is said of an accuracy.
_WAY = (
    (0.15, "hardly better than guessing"),
    (0.29, "a quarter of the way from guessing to real images"),
    (0.42, "a third of the way from guessing to real images"),
    (0.58, "half of the way from guessing to real images"),
    (0.71, "two thirds of the way from guessing to real images"),
    (0.85, "three quarters of the way from guessing to real images"),
    (0.97, "most of the way from guessing to real images"),
)


def majority_share(labels: NDArray[np.int64]) -> float:
    """Return the accuracy of always guessing the largest class."""
    return float(np.bincount(labels).max() / len(labels))


def verdict(accuracy: float, *, majority: float, real: float | None, test: int) -> str:
    """Return in words how good an accuracy is, beside always guessing the largest class and beside real images.

    A difference counts if it is more than two standard errors of an accuracy on so many test images.

    Examples:
        >>> verdict(0.5333, majority=0.5333, real=0.97, test=600)
        'no better than guessing the largest class'
        >>> verdict(0.82, majority=0.5333, real=0.97, test=600)
        'two thirds of the way from guessing to real images'
    """
    margin = 2 * math.sqrt(max(majority * (1 - majority), 1e-9) / test)
    if accuracy <= majority + margin:
        if real is not None and real <= majority + margin:
            return "no better than guessing the largest class, and nor are real images: this classifier cannot tell"
        return "no better than guessing the largest class"
    if real is None:
        return "better than guessing the largest class; how far real images would get is not known"
    if real <= majority + margin:
        return "better than real images, of which this classifier learns nothing: take another --classifier"
    part = (accuracy - majority) / (real - majority)
    return next((words for limit, words in _WAY if part < limit), "as good as real images")


def _unchanged(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return images


def smaller(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images of at most QUICK_SIDE pixels a side, or a little more: means over whole blocks of pixels."""
    _, height, width, _ = images.shape
    by = max(height, width) // QUICK_SIDE
    if by < 2 or min(height, width) // by < 8:
        return images
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return F.avg_pool2d(pixels, by).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def step_seconds(shape: tuple[int, int, int], classifier: ClassifierName, *, device: torch.device | str) -> float:
    """Return how long a training step takes here for images [c, h, w], by timing one of a quarter of its size."""
    recipe, (channels, height, width), part = CLASSIFIERS[classifier], shape, _BATCH // 4
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        net = recipe.network(channels=channels, height=height, width=width, classes=2)
        net = net.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer, _ = recipe.optimizer(net, 10)
        images = torch.zeros(part, height, width, channels, dtype=torch.uint8, device=device)
        labels = torch.arange(part, device=device) % 2
        for _ in range(2):  # the first one warms up
            began = time.monotonic()
            random = torch.Generator(device).manual_seed(0)
            loss = F.cross_entropy(net(recipe.augment(normalise(images), random)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # waits for a GPU
    return 4 * (time.monotonic() - began)


def training_seconds(step: float, *, images: int, test: int, epochs: int, tests: int) -> float:
    """Return how long a training takes, from the time of a step; testing an image takes a third of learning it."""
    return step * (epochs * math.ceil(images / _BATCH) + tests * test / _BATCH / 3)


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
    last_only: bool = False,
) -> tuple[nn.Module, Scores]:
    """Train a classifier on images [n, h, w, c] and test it after every epoch, or after the last one only.

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
        for epoch in range(epochs):
            net.train()
            for chosen in torch.randperm(count, generator=shuffles).to(device).split(batch)[:batches]:
                augmented = recipe.augment(normalise(images[chosen]), moves)
                loss = F.cross_entropy(net(augmented), labels[chosen], label_smoothing=recipe.smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            if last_only and epoch + 1 < epochs:
                continue
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
        raise DatalensError(f"the {name} must have at least one image, and an int64 label for each")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DatalensError(f"the {name} has labels {low} to {high}, but the synthetic one has {classes} classes")
