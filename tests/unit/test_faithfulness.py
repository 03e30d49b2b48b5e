"""Overlap with real images, nearness to training images, class balance."""

import numpy as np
import pytest
import torch

from datalens.errors import DatalensError
from datalens.evaluate.faithfulness import Nearness, _first, balance, faithfulness, nearness, overlap
from datalens.evaluate.features import pixels
from datalens.released.synthetic import SyntheticDataset


def gaussian(count: int, size: int = 4, *, seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * spread


# --- overlap --------------------------------------------------------------------------------------------------------


def test_overlap_by_its_definition() -> None:
    """Against loops over pairs, as in the two papers."""
    real, fake = gaussian(70, seed=0), gaussian(50, seed=1, spread=1.5) + 0.3

    def radius(x: torch.Tensor, k: int) -> list[float]:
        return [sorted((one - other).norm().item() for other in x)[k] for one in x]  # 0 is itself

    def distance(i: int, j: int) -> float:
        return (real[i] - fake[j]).norm().item()

    near, far, theirs = radius(real, 3), radius(real, 5), radius(fake, 3)
    found = overlap(real, fake)
    assert found.precision == sum(any(distance(i, j) <= near[i] for i in range(70)) for j in range(50)) / 50
    assert found.recall == pytest.approx(
        sum(any(distance(i, j) <= theirs[j] for j in range(50)) for i in range(70)) / 70
    )
    assert found.density == sum(distance(i, j) <= far[i] for i in range(70) for j in range(50)) / (5 * 50)
    assert found.coverage == pytest.approx(
        sum(any(distance(i, j) <= far[i] for j in range(50)) for i in range(70)) / 70
    )


def test_the_same_distribution() -> None:
    found = overlap(gaussian(1500, seed=2), gaussian(1500, seed=3))
    assert found.density == pytest.approx(1, abs=0.05)
    assert found.coverage == pytest.approx(1 - 2**-5, abs=0.02)  # Naeem et al., equation 8
    assert found.precision > 0.85 and found.recall > 0.85


def test_collapse_shows_in_recall_and_coverage() -> None:
    one_spot = gaussian(1000, seed=5, spread=0.05)
    found = overlap(gaussian(1000, seed=4), one_spot)
    assert found.precision == 1 and found.recall < 0.1 and found.coverage < 0.2


def test_images_of_nothing_show_in_precision() -> None:
    found = overlap(gaussian(500, seed=6), gaussian(500, seed=7) + 20)
    assert (found.precision, found.density, found.coverage) == (0, 0, 0)


# --- nearness -------------------------------------------------------------------------------------------------------


def photographs(count: int, seed: int) -> np.ndarray:
    """Smooth random images: neighbours differ, but not as noise does."""
    coarse = torch.rand((count, 1, 3, 3), generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, size=(12, 12), mode="bicubic").clamp(0, 1)
    return (fine * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def copied(training: np.ndarray, honest: np.ndarray, *, part: float, noise: float = 4.0) -> np.ndarray:
    """Some images are training images with a little noise, the others are what an honest generator shows."""
    random = np.random.default_rng(0)
    count = round(part * len(honest))
    noisy = training[random.integers(len(training), size=count)] + random.normal(scale=noise, size=(count, 12, 12, 1))
    return np.concatenate([np.clip(noisy, 0, 255).astype(np.uint8), honest[count:]])


def test_a_generator_that_copies_is_flagged() -> None:
    training, held_out, honest = (photographs(400, seed) for seed in (1, 2, 3))
    found = nearness(copied(training, honest, part=1), training, held_out)
    assert found.leak and found.ratio < 0.3 and found.p <= 0.001 and found.copies > 300
    assert found.interval[0] < found.ratio < found.interval[1] < found.chance[0]
    exact = nearness(training.copy(), training, held_out)
    assert exact.leak and exact.ratio < 0.05


def test_a_generator_that_copies_now_and_then_is_flagged() -> None:
    training, held_out, honest = (photographs(400, seed) for seed in (1, 2, 3))
    assert nearness(copied(training, honest, part=0.1), training, held_out).leak


def test_an_honest_generator_is_not_flagged() -> None:
    """Eight of them: not one alarm, p as good as uniform, and the ratio in its band."""
    found = []
    for seed in range(8):
        training, held_out, honest = (photographs(150, 1000 + 3 * seed + i) for i in range(3))
        found.append(nearness(honest, training, held_out))
    assert not any(one.leak for one in found)
    p = np.array([one.p for one in found])
    assert 0.2 < p.mean() < 0.8 and p.min() > 0.001
    assert all(one.chance[0] <= one.ratio <= one.chance[1] for one in found)
    assert all(one.chance[0] < 1 < one.chance[1] for one in found)


def test_the_distances_are_right() -> None:
    training, held_out, honest = (photographs(60, seed) for seed in (7, 8, 9))

    def to(images: np.ndarray) -> np.ndarray:
        return np.array([np.sqrt(np.square(images - one.astype(float)).mean(axis=(1, 2, 3))).min() for one in honest])

    found = nearness(honest, training, held_out)
    assert found.distance == pytest.approx(to(training).mean(), rel=1e-4)
    assert found.distance_held_out == pytest.approx(to(held_out).mean(), rel=1e-4)
    assert found.ratio == pytest.approx(found.distance / found.distance_held_out)
    assert (found.synthetic, found.real) == (60, 60)
    with pytest.raises(DatalensError, match="equally many"):
        nearness(honest, training, held_out[:-1])


def test_the_nearest_of_either_kind() -> None:
    distance = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    trained = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])
    mine, others = _first(distance, trained)
    assert mine.tolist() == [2, 1, 3] and others.tolist() == [1, 3, 1]  # the last stands in for what is further off


@pytest.mark.parametrize(
    ("ratio", "p", "copies", "leak"),
    [
        (0.90, 0.0005, 0, True),
        (0.97, 0.0005, 0, False),  # the sets themselves may differ by that
        (0.90, 0.01, 0, False),  # chance may bring that
        (1.00, 0.5, 100, True),
        (1.00, 0.5, 1, False),
    ],
)
def test_the_verdict(ratio: float, p: float, copies: int, leak: bool) -> None:
    found = Nearness(
        ratio=ratio,
        interval=(0, 2),
        chance=(0, 2),
        p=p,
        copies=copies,
        copies_of_held_out=0,
        distance=1,
        distance_held_out=1,
        synthetic=1000,
        real=1000,
    )
    assert found.leak is found.as_dict()["leak"] is leak


# --- balance, and all of it -----------------------------------------------------------------------------------------


def test_balance() -> None:
    found = balance(np.array([0, 0, 0, 1]), np.array([0, 1, 1, 2]), ("a", "b", "c", "d"))
    assert found.synthetic == (0.75, 0.25, 0, 0) and found.real == (0.25, 0.5, 0.25, 0)
    assert found.distance == pytest.approx(0.5)
    assert found.missing == ("c",)  # of d there is no real image either


def test_all_of_it() -> None:
    training, held_out, honest = (photographs(count, seed) for count, seed in ((300, 1), (100, 2), (200, 3)))
    labels = [np.arange(len(images)) % 2 for images in (training, held_out, honest)]
    shown = SyntheticDataset(images=honest, labels=labels[2], classes=("even", "odd"), certificate={})
    how = pixels(144)
    found = faithfulness(shown, (training, labels[0]), (held_out, labels[1]), how).as_dict()
    assert found["features"] == "pixels: 144 values" and found["synthetic"] == 100
    assert found["density"] > 0.7 and found["overlap_real"]["density"] > 0.7
    assert found["nearness"]["leak"] is False and found["nearness"]["real"] == 100
    assert found["balance"]["distance"] == 0
    with pytest.raises(DatalensError, match="more than 5 images"):
        faithfulness(shown, (training, labels[0]), (held_out[:5], labels[1][:5]), how)
