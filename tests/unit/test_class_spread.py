"""Whether a student heeds its labels: the measure, and the words for what is wrong."""

import math
from types import SimpleNamespace

import pytest
import torch

from datalens.methods import topagg
from datalens.released import classes
from datalens.released.classes import ClassSpread, class_spread, spread_of, trouble
from datalens.released.generator import Generator, fresh_generator


def images_of(classes: int, each: int, *, apart: float, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = torch.randn(classes, 400, generator=random) * apart
    return centres[labels] + torch.randn(len(labels), 400, generator=random) * spread, labels


def test_it_measures_what_was_put_in() -> None:
    found = class_spread(*images_of(10, 20, apart=0.3, spread=0.2))
    assert found.within == pytest.approx(0.2, rel=0.02)
    assert found.between == pytest.approx(0.3 * math.sqrt(2), rel=0.1)  # two centres of standard deviation 0.3


def test_random_labels_are_no_distance_between_classes() -> None:
    images, labels = images_of(10, 20, apart=0.0, spread=0.2)
    found = class_spread(images, labels)
    assert found.ratio < 0.05
    naive = torch.pdist(torch.stack([images[labels == c].mean(dim=0) for c in range(10)])).mean() / math.sqrt(400)
    assert float(naive) / found.within > 0.3  # what means of twenty images show by chance alone


def test_what_is_wrong_is_said() -> None:
    assert trouble(ClassSpread(between=0.2, within=0.2), classes=10) is None
    assert "ignores its labels" in str(trouble(ClassSpread(between=0.01, within=0.2), classes=10))
    assert trouble(ClassSpread(between=0.0, within=0.2), classes=1) is None  # there is nothing to heed
    assert "collapsed" in str(trouble(ClassSpread(between=0.0, within=0.001), classes=10))
    assert trouble(ClassSpread(between=0.3, within=0.0), classes=10) is None  # one image a class is poor, and heeds


def test_a_look_leaves_the_generator_as_it_was() -> None:
    generator = fresh_generator((1, 8, 8), 3, latent=4, seed=0, slim=16)
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    first, again = spread_of(generator, seed=1), spread_of(generator, seed=1)
    assert first == again
    assert generator.training
    assert all(torch.equal(value, before[name]) for name, value in generator.state_dict().items())


# --- what a run says ------------------------------------------------------------------------------------------------


def said_in_a_run(generator: Generator, steps: int, capfd: pytest.CaptureFixture[str]) -> tuple[list[int], str]:
    """Return the steps at which distances are logged, and what is printed."""
    student = SimpleNamespace(generator=generator)
    found = [topagg.diagnose(student, step, steps) for step in range(steps)]  # type: ignore[arg-type]
    assert all(set(one) in (set(), {"between_classes", "within_classes"}) for one in found)
    return [step for step, one in enumerate(found) if one], " ".join(capfd.readouterr().err.split())


def test_a_run_logs_distances_and_warns_half_way_and_at_its_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = fresh_generator((1, 8, 8), 3, latent=4, seed=0, slim=16)
    with torch.no_grad():  # draws one image for all labels
        for weight in generator.parameters():
            weight.zero_()
    logged, text = said_in_a_run(generator, 40, capfd)
    assert logged == [0, 5, 10, 15, 20, 25, 30, 35, 39]
    assert text.count("it has collapsed") == 2
    assert "after 21 of 40 steps" in text and "after 40 of 40 steps" in text
    assert said_in_a_run(generator, classes.FEWEST_STEPS - 1, capfd)[1] == ""  # too early to tell
    monkeypatch.setattr(classes, "spread_of", lambda generator, seed: ClassSpread(between=0.01, within=0.2))
    assert said_in_a_run(generator, 40, capfd)[1].count("the student ignores its labels") == 2
    monkeypatch.setattr(classes, "spread_of", lambda generator, seed: ClassSpread(between=0.2, within=0.2))
    assert said_in_a_run(generator, 40, capfd)[1] == ""
