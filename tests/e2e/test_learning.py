"""Every generator learns what its classes look like; and the same run on records with random labels does not.

A run can be private, certified and useless: a student that learns strokes and ignores its labels passes every other
test. Here a nearest-centroid classifier is trained on synthetic digits and tested on real ones. All randomness is
seeded and there is no noise (ε = ∞), or noise from a known seed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import NearestCentroid

from datalens import TrainOptions, sample, train
from datalens.data import formats

INF = float("inf")
ALGORITHM_1 = {
    "method": "datalens-paper",
    "network": "compact",
    "teachers": 64,
    "steps": 60,
    "k": 32,
    "student_rate": 2e-3,
    "epsilon": INF,
}
IGNORED = 0.35  # what a student reaches by luck whose images say nothing about their labels

# Method → its options and what it must reach; found with seeds 0 to 11, under the worst of them.
QUICK: dict[str, tuple[dict[str, Any], float]] = {
    "datalens-paper": (ALGORITHM_1, 0.6),
    "datalens": ({"method": "datalens", "epsilon": 10.0, "noise_seed": 1}, 0.7),
    "datalens, warm start off": ({"method": "datalens", "warm_start": "off", "epsilon": INF, "steps": 40}, 0.5),
}
SLOW: dict[str, tuple[dict[str, Any], float]] = {
    "dpmerf": ({"method": "dpmerf", "epsilon": 10.0, "noise_seed": 1}, 0.7),
    "dcgan": ({"method": "dcgan", "epsilon": INF, "steps": 300, "batch": 64}, 0.6),
    "pategan": ({"method": "pategan", "epsilon": INF}, 0.6),
    "gpate": ({"method": "gpate", "epsilon": INF, "steps": 60}, 0.5),
    "gswgan": ({"method": "gswgan", "epsilon": INF, "preset": "quick"}, 0.5),
    "dpgan": ({"method": "dpgan", "epsilon": INF, "preset": "quick", "steps": 200}, 0.4),
    "dpsgd-gan": ({"method": "dpsgd-gan", "epsilon": INF, "preset": "quick", "steps": 40}, 0.6),
}
EVERY = [
    *(pytest.param(*how, id=name) for name, how in QUICK.items()),
    *(pytest.param(*how, id=name, marks=pytest.mark.slow) for name, how in SLOW.items()),
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_digits(tmp_path_factory.mktemp("digits"))


def write_digits(folder: Path) -> dict[str, Path]:
    """Write the training digits, and the same with labels that mean nothing; return their files."""
    data = formats.load("digits", "train")
    shuffled = np.random.default_rng(0).permutation(data.labels)
    for name, labels in (("real", data.labels), ("shuffled", shuffled)):
        np.savez(folder / f"{name}.npz", images=data.images, labels=labels, classes=[str(i) for i in range(10)])
    return {name: folder / f"{name}.npz" for name in ("real", "shuffled")}


def accuracy(data: Path, out: Path, **options: Any) -> float:
    """Train, sample a thousand images, and classify real test digits by the nearest mean of a class."""
    if train(TrainOptions(data=str(data), nominal_size=1437, out=out, **options))["interrupted"]:
        raise KeyboardInterrupt  # fewer steps than planned would be judged
    made, test = sample(out / "release", count=1000, seed=0), formats.load("digits", "test")
    judge = NearestCentroid().fit(made.images.reshape(len(made.images), -1), made.labels)
    return float(judge.score(test.images.reshape(len(test.images), -1), test.labels))


@pytest.mark.parametrize(("options", "least"), EVERY)
def test_it_learns(options: dict[str, Any], least: float, digits: dict[str, Path], tmp_path: Path) -> None:
    assert accuracy(digits["real"], tmp_path / "run", **options) > least


@pytest.mark.parametrize(("options", "least"), EVERY)
def test_labels_that_mean_nothing_teach_nothing(
    options: dict[str, Any], least: float, digits: dict[str, Path], tmp_path: Path
) -> None:
    """Else the test above would pass for a method that learns no labels."""
    assert accuracy(digits["shuffled"], tmp_path / "run", **options) < IGNORED < least


def test_algorithm_1_does_not_learn_where_labels_do_not_reach_the_votes(
    digits: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The broken twin: without the linear part votes hardly depend on the label. The run says so itself."""
    assert accuracy(digits["real"], tmp_path / "run", **ALGORITHM_1, linear=0.0) < IGNORED
    assert "the student ignores its labels" in capfd.readouterr().err
