"""Inception Score, and the judge: the classifier of real images that it goes by."""

import stat
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from datalens.data.named import sources
from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate import cache, judge
from datalens.evaluate.inception import inception_score, score_of
from datalens.evaluate.judge import Judge
from datalens.released.synthetic import SyntheticDataset


def synthetic(images: np.ndarray, labels: np.ndarray | None = None) -> SyntheticDataset:
    labels = np.zeros(len(images), np.int64) if labels is None else labels
    return SyntheticDataset(images=images, labels=labels, classes=tuple("0123456789"), certificate={})


# --- the formula ----------------------------------------------------------------------------------------------------


def test_sure_of_every_class_alike_scores_the_number_of_classes() -> None:
    sure = torch.eye(10).repeat_interleave(100, dim=0)  # one class after the other, as a file may hold them
    score, spread = score_of(sure, splits=10)
    assert 9.5 < score < 10.0 and 0 < spread < 0.5  # by chance, parts have a few more of one class
    assert score_of(sure, splits=1) == (pytest.approx(10.0), 0.0)


def test_the_same_for_every_image_scores_one() -> None:
    assert score_of(torch.full((50, 4), 0.25)) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    assert score_of(torch.eye(4)[[2]].repeat(50, 1))[0] == pytest.approx(1.0)  # sure, but always of the same


def test_the_formula_of_the_paper() -> None:
    found = torch.rand(200, 7, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    p = found.double().numpy()
    expected = np.exp(np.mean([entropy(row, p.mean(axis=0)) for row in p]))
    assert score_of(found, splits=1)[0] == pytest.approx(expected)


def test_splits_are_scored_one_by_one() -> None:
    found = torch.rand(100, 3, generator=torch.Generator().manual_seed(2)).mul(5).softmax(dim=1)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    parts = [score_of(part, splits=1)[0] for part in found[order].split(20)]
    assert score_of(found, splits=5) == (pytest.approx(np.mean(parts)), pytest.approx(np.std(parts)))


@pytest.mark.parametrize(("images", "splits"), [(9, 10), (5, 0)])
def test_refuses_fewer_images_than_splits(images: int, splits: int) -> None:
    with pytest.raises(DatalensError, match="--splits"):
        score_of(torch.full((images, 2), 0.5), splits=splits)


# --- the judge ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Dataset, Dataset]:
    return sources.load("digits"), sources.load("digits", "test")


@pytest.fixture(scope="module")
def judge_of_digits(digits: tuple[Dataset, Dataset]) -> Judge:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "STEPS", 200)
        return judge.judge(*digits, epochs=1, device="cpu")


def test_real_images_score_high_and_what_is_no_digit_low(
    digits: tuple[Dataset, Dataset], judge_of_digits: Judge
) -> None:
    training, test = digits
    part = synthetic(training.images[:500], training.labels[:500])
    found = inception_score(part, test.images, judge_of_digits, splits=2)
    assert found.judge_accuracy > 0.95 and f"{found.judge_accuracy:.4f}" in found.judge
    assert found.score > 8 and found.score_real > 8
    assert found.label_agreement > 0.95
    assert (found.synthetic, found.real, found.splits, found.judge_accuracy_paper) == (500, 360, 2, None)
    grey = inception_score(synthetic(np.full_like(training.images[:500], 128)), test.images, judge_of_digits)
    assert grey.score == pytest.approx(1.0)
    one = training.images[training.labels == 3][:100]  # good images, of one class
    assert inception_score(synthetic(one), test.images, judge_of_digits).score < 1.5
    noise = np.random.default_rng(0).integers(0, 256, training.images[:500].shape, dtype=np.uint8)
    assert inception_score(synthetic(noise), test.images, judge_of_digits).score < 3


def test_a_judge_is_kept_for_its_owner_alone(
    digits: tuple[Dataset, Dataset], judge_of_digits: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "STEPS", 200)
    path = cache.path_of(f"judge-{judge_of_digits.fingerprint}", ".safetensors")
    assert path.parent == cache.folder() and judge_of_digits.fingerprint not in path.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(judge, "train_classifier", forbidden)
    again = judge.judge(*digits, epochs=1, device="cpu")
    assert (again.accuracy, again.name) == (judge_of_digits.accuracy, judge_of_digits.name)
    images = torch.tensor(digits[1].images)
    assert torch.equal(again.features(images), judge_of_digits.features(images))
    for other in ({"epochs": 30}, {"epochs": 1, "fresh": True}):
        with pytest.raises(AssertionError, match="trained again"):
            judge.judge(*digits, device="cpu", **other)  # type: ignore[arg-type]
    path.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="trained again"):
        judge.judge(*digits, epochs=1, device="cpu")


def test_refuses_no_epochs(digits: tuple[Dataset, Dataset]) -> None:
    with pytest.raises(DatalensError, match="--judge-epochs"):
        judge.judge(*digits, epochs=0, device="cpu")


@pytest.mark.slow
def test_mnist() -> None:
    """Real images ≥ 9.8, noise ≈ 1, by a judge as good as the paper's. Half an hour on a CPU."""
    training, test = sources.load("mnist"), sources.load("mnist", "test")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = judge.judge(training, test, epochs=15, device=device)
    assert found.accuracy > 0.99
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, test.images.shape, dtype=np.uint8)
    score = inception_score(synthetic(noise), test.images, found)
    assert score.score_real >= 9.8
    assert score.score < 1.5
