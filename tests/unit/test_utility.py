"""The classifier that judges synthetic images, on the 8x8 digits that come with scikit-learn."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from datalens.cli import main
from datalens.errors import DatalensError
from datalens.evaluate.classifiers import (
    CLASSIFIERS,
    MLP,
    AugmentedCNN,
    Logistic,
    PaperCNN,
    SmallResNet,
    augment,
    shift,
)
from datalens.evaluate.utility import Scores, Utility, evaluate, per_class, train_classifier
from datalens.released.synthetic import SyntheticDataset


@dataclass(frozen=True, kw_only=True)
class Digits:
    images: NDArray[np.uint8]  # [1297, 8, 8, 1]
    labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]  # [500, 8, 8, 1]
    test_labels: NDArray[np.int64]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits() -> Digits:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))  # they are stored writer by writer
    images = (data.images * 15.9).astype(np.uint8)[order][..., None]
    labels = data.target.astype(np.int64)[order]
    return Digits(images=images[500:], labels=labels[500:], test_images=images[:500], test_labels=labels[:500])


def synthetic(images: NDArray[np.uint8], labels: NDArray[np.int64], *, classes: int = 10) -> SyntheticDataset:
    return SyntheticDataset(images=images, labels=labels, classes=tuple(str(i) for i in range(classes)), certificate={})


def train(digits: Digits, **changes: Any) -> Scores:
    arguments: dict[str, Any] = {
        "train_images": digits.images,
        "train_labels": digits.labels,
        "test_images": digits.test_images,
        "test_labels": digits.test_labels,
        "classes": 10,
        "epochs": 10,
        "batch": 32,
        "seed": 0,
        "device": "cpu",
        "progress_label": "test",
    }
    return train_classifier(**(arguments | changes))[1]


@pytest.mark.parametrize("network", [PaperCNN, AugmentedCNN, Logistic, MLP, SmallResNet])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (1, 8, 8), (3, 9, 15), (4, 32, 8)])
def test_network_takes_any_shape_from_8x8(network: type[nn.Module], channels: int, height: int, width: int) -> None:
    net = network(channels=channels, height=height, width=width, classes=7)
    assert net(torch.zeros(2, channels, height, width)).shape == (2, 7)


@pytest.mark.parametrize("network", [PaperCNN, AugmentedCNN, SmallResNet])
def test_network_refuses_smaller_images(network: type[nn.Module]) -> None:
    with pytest.raises(DatalensError, match="at least 8x8"):
        network(channels=1, height=8, width=7, classes=10)


def test_learns_digits(digits: Digits) -> None:
    scores = train(digits)
    assert len(scores.per_epoch) == 10
    assert scores.final > 0.9
    assert scores.best == max(scores.per_epoch)


def test_learns_nothing_from_shuffled_labels(digits: Digits) -> None:
    shuffled = np.random.default_rng(0).permutation(digits.labels)
    assert train(digits, train_labels=shuffled).final < 0.3


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_same_seed_same_scores(digits: Digits, classifier: str) -> None:
    few: dict[str, Any] = {"train_images": digits.images[:500], "train_labels": digits.labels[:500]}
    state = torch.random.get_rng_state()
    first = train(digits, epochs=2, classifier=classifier, **few)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's random numbers move
    torch.rand(3)
    assert train(digits, epochs=2, classifier=classifier, **few) == first
    assert train(digits, epochs=2, classifier=classifier, seed=1, **few) != first


def test_the_papers_classifier_is_trained_as_it_always_was(digits: Digits) -> None:
    """Its figures stand in tables: the same numbers, to the last bit, as this plain training gives."""

    def pixels(images: NDArray[np.uint8]) -> torch.Tensor:
        return torch.tensor(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)

    labels, test_labels = torch.tensor(digits.labels), torch.tensor(digits.test_labels)
    order, per_epoch = torch.Generator().manual_seed(3), []
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = PaperCNN(channels=1, height=8, width=8, classes=10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * 41)
        for _ in range(2):
            net.train()
            for chosen in torch.randperm(1297, generator=order).split(32):  # 40 batches, and what is left
                loss = F.cross_entropy(net(pixels(digits.images[chosen.numpy()])), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                decay.step()
            with torch.no_grad():
                guesses = [net.eval()(part).argmax(dim=1) for part in pixels(digits.test_images).split(250)]
            per_epoch.append((torch.cat(guesses) == test_labels).double().mean().item())
    assert train(digits, epochs=2, seed=3).per_epoch == tuple(per_epoch)


# The augmented classifier


def test_the_augmented_classifier_learns_digits(digits: Digits) -> None:
    assert train(digits, epochs=3, classifier="augmented").final > 0.95


def test_the_augmented_classifier_learns_nothing_from_shuffled_labels(digits: Digits) -> None:
    shuffled = np.random.default_rng(0).permutation(digits.labels)
    assert train(digits, epochs=3, train_labels=shuffled, classifier="augmented").final < 0.3


def test_the_augmented_classifier_needs_two_images_a_batch(digits: Digits) -> None:
    """Batch norm has no statistics of one; so a lonely last image of an epoch is left out."""
    few = {"train_images": digits.images[:33], "train_labels": digits.labels[:33], "classifier": "augmented"}
    for epochs in (1, 10):  # steps: too few for a schedule whose warm-up is a tenth of it
        assert len(train(digits, epochs=epochs, **few).per_epoch) == epochs
    for one in ({"batch": 1}, {"train_images": digits.images[:1], "train_labels": digits.labels[:1]}):
        with pytest.raises(DatalensError, match="at least two images"):
            train(digits, epochs=1, **(few | one))


@pytest.mark.parametrize(("classifier", "at_least"), [("logistic", 0.7), ("mlp", 0.85), ("resnet", 0.93)])
def test_other_models_learn_digits_and_nothing_from_shuffled_labels(
    digits: Digits, classifier: str, at_least: float
) -> None:
    assert train(digits, epochs=4, classifier=classifier).final > at_least
    shuffled = np.random.default_rng(0).permutation(digits.labels)
    assert train(digits, epochs=4, train_labels=shuffled, classifier=classifier).final < 0.3


def test_a_class_without_test_images_has_no_accuracy() -> None:
    assert per_class(np.array([[3, 1], [0, 0]])) == (0.75, None)


def test_shifts_by_whole_pixels_and_repeats_the_border() -> None:
    images = dots() + torch.arange(28) / 100  # brighter to the right: what enters from there is as bright
    moved = shift(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape and moved.dtype == torch.float32
    found = centres(moved - moved.min() - 1)
    assert len({tuple(row) for row in found.round().tolist()}) == 25  # two pixels each way
    assert moved.min() >= images.min() and moved.max() <= images.max()
    assert torch.equal(shift(dots(8, 8)[:, :, :3, :3], torch.Generator()), dots(8, 8)[:, :, :3, :3])


def dots(height: int = 28, width: int = 28, *, count: int = 256, channels: int = 1) -> torch.Tensor:
    """A bright square of 4x4 in the middle of black images, as the classifier sees them."""
    images = torch.full((count, channels, height, width), -1.0)
    images[:, :, height // 2 - 2 : height // 2 + 2, width // 2 - 2 : width // 2 + 2] = 1.0
    return images


def centres(images: torch.Tensor) -> torch.Tensor:
    """Where the bright part of each image lies, in pixels from the middle: [n, 2], down and across."""
    weight = (images.sum(dim=1) + images.shape[1]).clamp(min=0) * (images.sum(dim=1) > 0)
    down, across = (torch.arange(n) + 0.5 - n / 2 for n in images.shape[2:])
    total = weight.sum(dim=(1, 2))
    return torch.stack([(weight.sum(dim=2) @ down) / total, (weight.sum(dim=1) @ across) / total], dim=1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 56, 28)])
def test_augmentation_moves_every_image_a_little(shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    images = dots(height, width, channels=channels)
    moved = augment(images.clone(), torch.Generator().manual_seed(0))
    assert moved.shape == images.shape and moved.dtype == torch.float32
    assert torch.isfinite(moved).all() and moved.abs().max() < 1 + 0.4 * 7
    found = centres(moved)
    assert len({tuple(row) for row in found.tolist()}) == len(images)  # each by its own amounts
    most = torch.tensor([height, width]) * 2 / 28
    assert (found.abs() < 1.1 * most + 1).all()  # the middle stays where it is when turned; 1: what noise does
    assert (found.abs().max(dim=0).values > 0.8 * most).all()
    assert (found.mean(dim=0).abs() < 0.2 * most).all()
    assert not torch.equal(moved, augment(images.clone(), torch.Generator().manual_seed(1)))
    assert torch.equal(moved, augment(images.clone(), torch.Generator().manual_seed(0)))


def test_augmentation_noises_by_up_to_a_fifth_of_the_range_and_pads_with_the_border() -> None:
    plain = augment(torch.full((256, 1, 28, 28), 0.5), torch.Generator().manual_seed(0))
    assert plain.mean().item() == pytest.approx(0.5, abs=0.01)  # no black corners from outside of the image
    loud = plain.std(dim=(1, 2, 3))  # of each image, in a range of 2: anything from 0 to 0.4
    assert loud.min() < 0.02 and 0.37 < loud.max() < 0.42
    assert loud.mean().item() == pytest.approx(0.2, rel=0.1)


def test_augmentation_turns_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datalens.evaluate.classifiers._NOISE", 0.0)
    monkeypatch.setattr("datalens.evaluate.classifiers._SHIFT", 0.0)
    bars = torch.full((256, 1, 56, 28), -1.0)
    bars[:, :, 8:48, 12:16] = 1.0  # 40 high, 4 across
    moved = augment(bars, torch.Generator().manual_seed(0))[:, 0]
    bright = moved.clamp(min=-1) + 1
    across = torch.arange(28) + 0.5 - 14
    down = torch.arange(56) + 0.5 - 28
    size = bright.sum(dim=(1, 2)) / (2 * 160)
    assert 0.8 < size.min() < 0.86 and 1.17 < size.max() < 1.25  # 1.1² and less: an area
    slant = torch.einsum("nhw,h,w->n", bright, down, across) / torch.einsum("nhw,h->n", bright, down**2)
    assert 0.11 < slant.max() < 0.16 and -0.16 < slant.min() < -0.11  # in pixels, though the image is no square
    assert slant.abs().median() < 0.06  # most are turned by less than half of that


def test_the_test_set_decides_nothing(digits: Digits) -> None:
    whole = train(digits, epochs=2)
    halves = [
        train(digits, epochs=2, test_images=digits.test_images[part], test_labels=digits.test_labels[part])
        for part in (slice(None, 250), slice(250, None))
    ]
    means = np.mean([half.per_epoch for half in halves], axis=0)
    assert means == pytest.approx(whole.per_epoch)


def test_utility(digits: Digits) -> None:
    found = evaluate(
        synthetic(digits.images[:800], digits.labels[:800]),
        digits.images,
        digits.labels,
        digits.test_images,
        digits.test_labels,
        seeds=2,
        epochs=20,
        device="cpu",
    )
    report = found.as_dict()
    assert report["classifier"] == "PaperCNN: conv 3x3 32, conv 3x3 64, FC 64, dropout 0.5"
    assert list(report) == [
        "accuracy",
        "accuracy_std",
        "accuracy_best_epoch",
        "accuracy_real",
        "classifier",
        "seeds",
        "epochs",
        "synthetic",
        "test",
        "accuracy_per_class",
        "confusion",
        "accuracy_majority",
        "accuracy_real_per_class",
        "verdict",
    ]
    assert report["accuracy_majority"] == np.bincount(digits.test_labels).max() / len(digits.test_labels)
    shares = np.array(report["accuracy_real_per_class"])
    weighted = (shares * np.bincount(digits.test_labels)).sum() / len(digits.test_labels)
    assert weighted == pytest.approx(report["accuracy_real"])
    confusion = np.array(report["confusion"])
    assert confusion.sum(axis=1).tolist() == (2 * np.bincount(digits.test_labels)).tolist()  # rows: what they are
    assert np.trace(confusion) / confusion.sum() == pytest.approx(report["accuracy"])
    assert report["accuracy_per_class"] == pytest.approx(np.diag(confusion) / confusion.sum(axis=1))
    assert report["accuracy"] > 0.8
    assert report["accuracy_real"] > 0.8
    assert report["accuracy_best_epoch"] >= report["accuracy"]
    assert report["accuracy_std"] > 0
    assert (report["seeds"], report["epochs"], report["synthetic"], report["test"]) == (2, 20, 800, 500)


def test_utility_by_the_augmented_classifier(digits: Digits) -> None:
    part = synthetic(digits.images[:400], digits.labels[:400])
    real, test = (digits.images, digits.labels), (digits.test_images, digits.test_labels)

    def found(seeds: int = 1, **more: Any) -> Utility:
        return evaluate(part, *real, *test, seeds=seeds, epochs=6, device="cpu", classifier="augmented", **more)

    two = found(seeds=2)
    assert two.classifier.startswith("AugmentedCNN") and "noise" in two.classifier
    assert two.accuracy > 0.6 and two.accuracy_real > 0.6
    first, second = found(), found(first_seed=1, accuracy_real=0.125)
    assert two.accuracy == pytest.approx((first.accuracy + second.accuracy) / 2)
    assert first.accuracy_real == two.accuracy_real  # of a seed of its own
    assert second.accuracy_real == 0.125  # known, so not measured


def test_the_command_chooses_the_classifier(
    digits: Digits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "datalens.cli.evaluate.synthetic_of",
        lambda path, count: synthetic(digits.images[:200], digits.labels[:200]),
    )
    for more, expected in (([], "PaperCNN"), (["--classifier", "augmented"], "AugmentedCNN")):
        with pytest.raises(SystemExit) as ended:
            main.main(["evaluate", "run", "--data", "digits", "--seeds", "1", "--epochs", "1", "--json", *more])
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)["classifier"].startswith(expected)


def test_broken_synthetic_images_score_at_chance_below_the_ceiling(digits: Digits) -> None:
    found = evaluate(
        synthetic(digits.images, np.random.default_rng(0).permutation(digits.labels)),
        digits.images,
        digits.labels,
        digits.test_images,
        digits.test_labels,
        seeds=1,
        epochs=8,
        device="cpu",
    )
    assert found.accuracy < 0.3
    assert found.accuracy_real > 0.8
    assert found.accuracy_std == 0.0
    assert found.accuracy_best_epoch >= found.accuracy


def test_the_ceiling_uses_no_more_real_images_than_there_are(digits: Digits) -> None:
    found = evaluate(
        synthetic(digits.images, digits.labels),
        digits.images[:20],
        digits.labels[:20],
        digits.test_images,
        digits.test_labels,
        seeds=1,
        epochs=1,
        device="cpu",
    )
    assert found.synthetic == len(digits.images)
    assert found.accuracy_real < 0.6  # one step on 20 images


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"test_images": np.zeros((5, 9, 8, 1), np.uint8)}, r"test set.*\[9, 8, 1\]"),
        ({"test_images": np.zeros((5, 8, 8), np.uint8)}, r"test set.*\[8, 8\]"),
        ({"test_images": np.zeros((5, 8, 8, 1), np.float32)}, "test set.*float32"),
        ({"test_labels": np.full(5, 3)}, "test set.*labels 3 to 3.*3 classes"),
        ({"test_labels": np.full(5, -1)}, "test set.*labels -1"),
        ({"test_labels": np.zeros(4, np.int64)}, "test set.*int64 label"),
        ({"test_labels": np.zeros(5)}, "test set.*int64 label"),
        ({"real_train_images": np.zeros((5, 8, 8, 3), np.uint8)}, "real training set"),
        ({"seeds": 0}, "seed"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_refuses_what_does_not_match(changes: dict[str, Any], expected: str) -> None:
    images, labels = np.zeros((5, 8, 8, 1), np.uint8), np.zeros(5, np.int64)
    arguments: dict[str, Any] = {
        "real_train_images": images,
        "real_train_labels": labels,
        "test_images": images,
        "test_labels": labels,
        "seeds": 1,
        "epochs": 1,
        "device": "cpu",
    }
    with pytest.raises(DatalensError, match=expected) as caught:
        evaluate(synthetic(images, labels, classes=3), **(arguments | changes))
    assert "\n" not in str(caught.value)
