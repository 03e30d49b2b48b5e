"""Attacks on a synthetic set: the statistics by hand, and sets that must and must not be caught."""

import dataclasses
import math

import numpy as np
import pytest

from datalens.data import formats
from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate import attacks
from datalens.privacy.audit import Errors
from datalens.released.synthetic import SyntheticDataset

CLAIM = {"budget": {"epsilon": 1.0, "delta": 1e-5}, "relation": "add-remove", "accountant": "exact"}


def pick(dataset: Dataset, places: np.ndarray) -> Dataset:
    return dataclasses.replace(dataset, images=dataset.images[places], labels=dataset.labels[places])


def shown(dataset: Dataset, certificate: dict[str, object] = CLAIM) -> SyntheticDataset:
    return SyntheticDataset(
        images=dataset.images, labels=dataset.labels, classes=dataset.schema.classes, certificate=certificate
    )


@pytest.fixture(scope="module")
def thirds() -> tuple[Dataset, Dataset, Dataset]:
    """Digits for training, held out, and of which nobody knows."""
    digits = formats.load("digits")
    order = np.random.default_rng(0).permutation(len(digits.images))
    return tuple(pick(digits, order[i::3]) for i in range(3))  # type: ignore[return-value]


# --- distances and scores -------------------------------------------------------------------------


def test_nearest_is_the_nearest_of_the_class() -> None:
    random = np.random.default_rng(0)
    images, among = (random.integers(0, 256, (n, 3, 3, 1), dtype=np.uint8) for n in (40, 70))
    labels, among_labels = random.integers(0, 4, 40), random.integers(0, 3, 70)  # nobody has class 3 there
    found = attacks.nearest(images, labels, among, among_labels)
    for i in range(40):
        of_class = among[among_labels == labels[i]].astype(float)
        away = np.sqrt(((of_class - images[i]) ** 2).mean(axis=(1, 2, 3)))
        assert found[i] == pytest.approx(away.min() if len(away) else math.inf, rel=1e-5)
    assert np.isinf(found).any()


def test_an_image_that_is_there_is_at_distance_0() -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), dtype=np.uint8)
    assert (attacks.nearest(images, np.zeros(300), images, np.zeros(300)) == 0).all()


def test_area_counts_pairs() -> None:
    random = np.random.default_rng(1)
    members, others = random.integers(0, 9, 30).astype(float), random.integers(0, 7, 50).astype(float)
    pairs = (members[:, None] > others).mean() + 0.5 * (members[:, None] == others).mean()
    assert attacks.area(members, others) == pytest.approx(pairs)


def test_the_spread_of_an_area_by_simulation() -> None:
    random = np.random.default_rng(2)
    areas = [attacks.area(random.normal(0.3, size=150), random.normal(size=200)) for _ in range(500)]
    assert attacks.auc_spread(float(np.mean(areas)), 150, 200) == pytest.approx(np.std(areas), rel=0.15)


def test_the_epsilon_that_rates_force() -> None:
    many = 10**9
    errors = Errors(false_alarms=many // 100, without=many, misses=many // 2, with_it=many)
    assert attacks.rate_epsilon(errors, 0.0, 0.05) == pytest.approx(math.log(50), abs=1e-3)
    assert attacks.rate_epsilon(errors, 0.1, 0.05) == pytest.approx(math.log(40), abs=1e-3)
    other_way = Errors(false_alarms=many // 2, without=many, misses=many // 100, with_it=many)
    assert attacks.rate_epsilon(other_way, 0.0, 0.05) == pytest.approx(math.log(50), abs=1e-3)
    blind = Errors(false_alarms=many // 2, without=many, misses=many // 2, with_it=many)
    assert attacks.rate_epsilon(blind, 0.0, 0.05) == 0.0


def test_scores_that_know_nothing_and_scores_that_know_all() -> None:
    random = np.random.default_rng(3)
    blind = attacks.membership("x", random.normal(size=4000), random.normal(size=4000), delta=1e-5)
    assert blind.auc_interval[0] < 0.5 < blind.auc_interval[1]
    assert blind.tpr_interval[0] < blind.fpr < 0.02
    assert blind.verdict_bound < 0.1
    knowing = attacks.membership("x", random.normal(9.0, size=4000), random.normal(size=4000), delta=1e-5)
    assert knowing.auc == 1.0
    assert knowing.tpr > 0.999
    assert knowing.verdict_bound > 3


def test_shadow_models_sharpen_what_distances_alone_cannot_tell() -> None:
    """Records differ in how far they are from anything; membership moves each a little."""
    random = np.random.default_rng(4)
    records, models = 2000, 16
    base, inside = random.normal(0, 10, records), np.zeros((models, records), dtype=bool)
    for i in range(0, models, 2):
        inside[i] = random.random(records) < 0.5
        inside[i + 1] = ~inside[i]
    shadows = attacks.Shadows(inside=inside, distances=base - 1.0 * inside + random.normal(size=inside.shape))
    truth = random.random(records) < 0.5
    target = base - 1.0 * truth + random.normal(size=records)
    plain = attacks.area(-target[truth], -target[~truth])
    sharp = attacks.area(*(shadows.scores(target)[chosen] for chosen in (truth, ~truth)))
    assert plain < 0.6 < sharp
    assert "16 shadow models" in shadows.name


# --- sets -----------------------------------------------------------------------------------------


def test_images_of_strangers_are_not_caught_and_copies_are(thirds: tuple[Dataset, Dataset, Dataset]) -> None:
    training, held_out, strangers = thirds
    result = attacks.report(shown(strangers), training, held_out)
    assert result["ok"]
    assert result["controls"] == {"a generator that copies training images": True}
    assert not result["reconstruction"]["found"]
    assert result["lower_bound"] < 1
    assert result["control_findings"]["reconstruction"]["copies"] > 0.9 * len(strangers.images)
    assert any("not covered by ε" in line for line in attacks.report_lines(result))


@pytest.mark.parametrize("epsilon", [1.0, 50.0])
def test_copies_are_caught_whatever_was_claimed(thirds: tuple[Dataset, Dataset, Dataset], epsilon: float) -> None:
    training, held_out, _ = thirds
    copied = attacks.copying(shown(training, {**CLAIM, "budget": {"epsilon": epsilon, "delta": 1e-5}}), training)
    result = attacks.report(copied, training, held_out)
    assert not result["ok"]
    assert result["reconstruction"]["found"]
    assert result["verdict_bound"] > 1


def test_a_few_copies_among_many_are_caught(thirds: tuple[Dataset, Dataset, Dataset]) -> None:
    training, held_out, strangers = thirds
    mixed = shown(strangers)
    mixed.images[:25], mixed.labels[:25] = training.images[:25], training.labels[:25]
    found = attacks.reconstruction(mixed, training, held_out)
    assert 25 <= found.copies < 40
    assert found.found


def test_images_near_those_held_out_are_not_called_copies(thirds: tuple[Dataset, Dataset, Dataset]) -> None:
    training, held_out, _ = thirds
    found = attacks.reconstruction(attacks.copying(shown(held_out), held_out), training, held_out)
    assert not found.found
    assert found.copies_of_held_out > 100


def test_what_cannot_be_attacked_is_said(thirds: tuple[Dataset, Dataset, Dataset]) -> None:
    training, held_out, strangers = thirds
    few = pick(held_out, np.arange(50))
    with pytest.raises(DatalensError, match="too few"):
        attacks.report(shown(strangers), training, few)
    wide = dataclasses.replace(training, images=training.images.repeat(2, axis=1))
    with pytest.raises(DatalensError, match="--data"):
        attacks.report(shown(strangers), wide, held_out)
    with pytest.raises(DatalensError, match="states no budget"):
        attacks.report(shown(strangers, {"private": True}), training, held_out)
