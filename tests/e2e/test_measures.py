"""`datalens evaluate --measures …`: all measures, where they are kept, and that none is measured twice."""

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from datalens.evaluate import cache, judge, measures

pytestmark = pytest.mark.usefixtures("quickly")
QUICK = ("--data", "digits", "--seeds", 1, "--epochs", 1, "--judge-epochs", 1, "--splits", 2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "STEPS", 10)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_measures_of_a_run(datalens, copy, monkeypatch):
    before = sorted(path.name for path in (copy / "release").iterdir())
    asked = ("evaluate", copy, *QUICK, "--count", 80, "--measures", "all")
    found = json.loads(datalens(*asked, "--json").succeeded().out.splitlines()[-1])
    assert found["accuracy"] == found["utility"]["accuracy"] and len(found["confusion"]) == 10
    assert found["inception_score"]["judge_accuracy"] > 0 and found["inception_score"]["splits"] == 2
    assert found["fid"]["features"].startswith("own: 64 features of the classifier trained on 1437 real images")
    assert found["faithfulness"]["nearness"]["leak"] is False
    assert found["note"] == "measured on real data: for the owner, not covered by ε"
    kept = json.loads((copy / "evaluation.json").read_text())
    for key in ("utility", "inception_score", "fid", "faithfulness"):
        assert kept[key] == found[key]
        assert {"date", "settings"} <= set(kept[key]) and kept[key]["settings"]["data"] == "digits"
    # for the owner's eyes only, and nothing of it in what is handed on
    assert mode(copy / "evaluation.json") == 0o600
    assert sorted(path.name for path in (copy / "release").iterdir()) == before
    assert mode(copy) == 0o700
    assert all(mode(path) == 0o600 for path in cache.folder().iterdir())
    assert datalens("verify", copy).succeeded()

    def forbidden(*arguments, **options):
        raise AssertionError("measured again")

    for name in ("_utility", "_inception", "_fid", "_faithfulness"):
        monkeypatch.setattr(measures.Bench, name, forbidden)
    said = datalens(*asked).succeeded().out
    for words in ("accuracy by class", "Inception Score", "FID", "precision", "no leak", "for the owner, not covered"):
        assert words in said
    with pytest.raises(AssertionError, match="measured again"):
        datalens(*asked, "--fresh")
    with pytest.raises(AssertionError, match="measured again"):
        datalens(*asked[:-2], "--count", 81)


def test_what_was_measured_before_stays(datalens, copy):
    (copy / "evaluation.json").write_text("damaged")
    datalens("evaluate", copy, *QUICK, "--count", 40).succeeded()
    datalens("evaluate", copy, *QUICK, "--count", 40, "--measures", "fid", "--features", "pixels").succeeded()
    kept = json.loads((copy / "evaluation.json").read_text())
    assert set(kept) == {"note", "utility", "fid"}
    assert kept["fid"]["features"] == "pixels: 64 values" and kept["fid"]["enough"] is False


def test_a_release_or_a_file_gets_no_evaluation_beside_it(datalens, trained, tmp_path):
    alone = Path(shutil.copytree(trained / "release", tmp_path / "release"))
    before = sorted(alone.iterdir())
    datalens("evaluate", alone, *QUICK, "--count", 40).succeeded()
    assert sorted(alone.iterdir()) == before and sorted(tmp_path.iterdir()) == [alone]


def test_sizes_and_classifiers(datalens, trained):
    asked = ("evaluate", trained, *QUICK, "--sizes", 40, 90, "--classifier", "paper", "logistic", "--json")
    found = json.loads(datalens(*asked).succeeded().out.splitlines()[-1])
    assert [(one["name"], one["synthetic"]) for one in found["all"]] == [
        *(("paper", 90), ("paper", 40)),
        *(("logistic", 90), ("logistic", 40)),
    ]
    assert found["synthetic"] == 90 and found["classifier"].startswith("PaperCNN")
    assert found["accuracy"] == found["all"][0]["accuracy"]
    every = ("evaluate", trained, *QUICK, "--count", 40, "--classifier", "all")
    said = datalens(*every).succeeded().out
    assert all(name in said for name in ("paper", "augmented", "logistic", "mlp", "resnet"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sizes", 0), "--sizes must be at least 1"),
        (("--real", 5), "--real must be at least 10"),
        (("--measures", "inception", "--judge-epochs", 0), "--judge-epochs"),
        (("--measures", "inception", "--splits", 50), "--splits"),
    ],
)
def test_refuses(datalens, trained, options, words):
    assert words in datalens("evaluate", trained, *QUICK, "--count", 40, *options).refused()


def test_a_file_with_too_few_images(datalens, trained, tmp_path):
    datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 30).succeeded()
    assert "--sizes 40" in datalens("evaluate", tmp_path / "s.npz", *QUICK, "--sizes", 40).refused()


def test_a_set_that_holds_training_images_is_flagged(datalens, tmp_path):
    from datalens.data.named import sources
    from datalens.released.synthetic import SyntheticDataset, save

    real = sources.load("digits")
    stolen = SyntheticDataset(
        images=real.images[:500], labels=real.labels[:500], classes=real.schema.classes, certificate={}
    )
    save(stolen, tmp_path / "stolen.npz")
    asked = ("evaluate", tmp_path / "stolen.npz", *QUICK, "--measures", "faithfulness", "--features", "pixels")
    assert "A LEAK" in datalens(*asked).succeeded().out
    near = json.loads(datalens(*asked, "--json").succeeded().out.splitlines()[-1])["faithfulness"]["nearness"]
    assert near["leak"] is True and near["ratio"] < 0.9 and near["copies"] > 50
    assert np.isfinite([*near["interval"], *near["chance"]]).all()
