"""The classifier that judges synthetic images, on the 8x8 digits that come with scikit-learn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from datalens.errors import DatalensError
from datalens.evaluate.utility import PaperCNN, Scores, evaluate, train_and_score
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
    return train_and_score(**(arguments | changes))


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (1, 8, 8), (3, 9, 15), (4, 32, 8)])
def test_network_takes_any_shape_from_8x8(channels: int, height: int, width: int) -> None:
    net = PaperCNN(channels=channels, height=height, width=width, classes=7)
    assert net(torch.zeros(2, channels, height, width)).shape == (2, 7)


def test_network_refuses_smaller_images() -> None:
    with pytest.raises(DatalensError, match="at least 8x8"):
        PaperCNN(channels=1, height=8, width=7, classes=10)


def test_learns_digits(digits: Digits) -> None:
    scores = train(digits)
    assert len(scores.per_epoch) == 10
    assert scores.final > 0.9
    assert scores.best == max(scores.per_epoch)


def test_learns_nothing_from_shuffled_labels(digits: Digits) -> None:
    shuffled = np.random.default_rng(0).permutation(digits.labels)
    assert train(digits, train_labels=shuffled).final < 0.3


def test_same_seed_same_scores(digits: Digits) -> None:
    state = torch.random.get_rng_state()
    first = train(digits, epochs=2)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's random numbers move
    torch.rand(3)
    assert train(digits, epochs=2) == first
    assert train(digits, epochs=2, seed=1) != first


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
    ]
    assert report["accuracy"] > 0.8
    assert report["accuracy_real"] > 0.8
    assert report["accuracy_best_epoch"] >= report["accuracy"]
    assert report["accuracy_std"] > 0
    assert (report["seeds"], report["epochs"], report["synthetic"], report["test"]) == (2, 20, 800, 500)


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
        ({"test_labels": np.zeros(4, np.int64)}, "test set.*one int64 label"),
        ({"test_labels": np.zeros(5)}, "test set.*one int64 label"),
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
