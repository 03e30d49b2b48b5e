"""Releases that datalens 0.1.0 wrote (on digits, a public set): what was sound still stands, and can still be used."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from datalens.errors import TamperedError
from datalens.pages import REPORT
from datalens.released.certificate import CERTIFICATE, PAGE
from datalens.released.release import load_classifier, sample
from datalens.released.verification import check_release
from tests.e2e.conftest import call

OLD = Path(__file__).parents[1] / "fixtures" / "release-0.1.0"


@pytest.mark.parametrize("name", ["moments", "sgd"])
def test_a_release_of_the_first_version_stands_and_what_was_not_compared_is_said(name: str) -> None:
    found = check_release(OLD / name)
    assert found.problems == () and found.private
    assert json.loads((OLD / name / CERTIFICATE).read_text())["version"] == 2
    assert found.older and "a certificate of version 2 binds less" in found.notes[0]
    assert [note.split()[0] for note in found.notes[1:]] == [REPORT]  # all planned steps are charged


def test_it_can_still_be_sampled_from() -> None:
    drawn = sample(OLD / "moments", count=20, seed=0)
    assert drawn.images.shape == (20, 8, 8, 1) and drawn.certificate["version"] == 2
    assert np.array_equal(drawn.images, sample(OLD / "moments", count=20, seed=0).images)


def test_sampling_from_it_says_that_its_certificate_binds_less(tmp_path: Path) -> None:
    said = call("sample", OLD / "moments", "--count", 20, "--out", tmp_path / "a.npz").succeeded().out
    assert "of version 2, which binds less than version 3 does: `datalens verify`" in said
    facts = call("sample", OLD / "moments", "--count", 20, "--out", tmp_path / "b.npz", "--json").succeeded().json
    assert (facts["certificate_version"], facts["qualified"]) == (2, True)


def test_a_classifier_can_still_be_loaded() -> None:
    assert load_classifier(OLD / "sgd")[0].network == "linear"


@pytest.mark.parametrize("name", [CERTIFICATE, PAGE, "ledger.jsonl", "generator.safetensors"])
def test_an_edited_one_is_not_sampled_from(name: str, tmp_path: Path) -> None:
    """Everything that goes with the images must have been verified, not the weights alone."""
    release = Path(shutil.copytree(OLD / "moments", tmp_path / "release"))
    content = (release / name).read_bytes()
    at = content.index(b"4") if name != "generator.safetensors" else len(content) - 3
    (release / name).write_bytes(content[:at] + b"3" + content[at + 1 :])
    with pytest.raises(TamperedError):
        sample(release, count=3, seed=0)
