"""Named sets that lie in a folder, through the command line: from training to evaluation, and what is refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

pytestmark = pytest.mark.usefixtures("quickly")
Call = Callable[..., "Result"]  # noqa: F821 (of conftest)


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty records to train on and ten to test on, in shards; dark ones are male."""
    folder = tmp_path_factory.mktemp("faces")
    rng = np.random.default_rng(0)
    for split, count in (("train-00000-of-00001", 40), ("valid", 5), ("test", 10)):
        images, labels = [], []
        for number in range(count):
            male = number % 2
            pixels = rng.integers(0, 100, (64, 64, 3), dtype=np.uint8) + (0 if male else 120)
            out = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG")
            images.append({"bytes": out.getvalue(), "path": f"{split}-{number}.jpg"})
            labels.append(male)
        pq.write_table(pa.table({"image": images, "male": labels}), folder / f"{split}.parquet")
    return folder


FEW = ("--data", "celeba-gender", "--teachers", 6, "--steps", 2, "--batch", 4)


@pytest.fixture(scope="module")
def run(faces: Path, tmp_path_factory: pytest.TempPathFactory, datalens: Call) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    datalens("train", *FEW, "--data-folder", faces, "--out", out).succeeded()
    return out


def test_from_a_folder_to_a_release(run: Path, faces: Path, tmp_path: Path, datalens: Call) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["data_folder"] == str(faces)
    assert config["schema"]["nominal_size"] == 162_770
    assert datalens("verify", run, "--json").succeeded().json["ok"]
    datalens("sample", run, "--count", 6, "--out", tmp_path / "s.npz").succeeded()
    assert np.load(tmp_path / "s.npz")["images"].shape == (6, 64, 64, 3)
    asked = ("evaluate", run, "--data", "celeba-gender", "--data-folder", faces, "--count", 20)
    result = datalens(*asked, "--seeds", 1, "--epochs", 1, "--json").succeeded().json
    assert (result["test"], result["synthetic"]) == (10, 20)


def test_nothing_about_the_folder_is_released(run: Path, faces: Path) -> None:
    for file in (run / "release").iterdir():
        assert str(faces).encode() not in file.read_bytes()
        assert b"train-3.jpg" not in file.read_bytes()


def test_resume_needs_no_folder_and_the_same_one(run: Path, faces: Path, tmp_path: Path, datalens: Call) -> None:
    datalens("train", "--out", run, "--resume").succeeded()
    line = datalens("train", "--out", run, "--resume", "--data-folder", tmp_path).refused()
    assert f"was begun with data-folder {faces}" in line


def test_a_relative_folder_is_kept_absolute(
    faces: Path, tmp_path: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(faces.parent)
    datalens("train", *FEW, "--data-folder", faces.name, "--out", tmp_path / "run").succeeded()
    monkeypatch.chdir(tmp_path)
    datalens("train", "--out", "run", "--resume").succeeded()


def damaged(faces: Path, tmp_path: Path) -> Path:
    """One JPEG of the training set is cut short."""
    table = pq.read_table(faces / "train-00000-of-00001.parquet").to_pylist()
    table[17]["image"]["bytes"] = table[17]["image"]["bytes"][:400]
    folder = tmp_path / "damaged"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(table), folder / "train.parquet")
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda faces, tmp: tmp / "nowhere", "is not a folder"),
        (lambda faces, tmp: tmp, "holds no train*.parquet: put img_align_celeba/, list_attr_celeba.txt"),
        (damaged, "image train-00000-of-00001-17.jpg is not a readable image"),
    ],
)
def test_what_is_broken_is_said_before_a_run_exists(
    make: Callable[[Path, Path], Path], says: str, faces: Path, tmp_path: Path, datalens: Call
) -> None:
    folder = make(faces, tmp_path)
    # The fewer teachers, the better the chance that a lazy reader never meets the broken image: it is met all the same.
    result = datalens("train", *FEW, "--delta", 1e-6, "--data-folder", folder, "--out", tmp_path / "run")
    assert says in result.refused()
    assert not (tmp_path / "run").exists()


def test_a_folder_without_its_attribute_file(tmp_path: Path, datalens: Call) -> None:
    (tmp_path / "celeba" / "img_align_celeba").mkdir(parents=True)
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("000001.jpg 0\n")
    asked = ("train", *FEW, "--delta", 1e-6, "--data-folder", tmp_path / "celeba", "--out", tmp_path / "run")
    line = datalens(*asked).refused()
    assert "list_attr_celeba.txt does not exist" in line
    assert not (tmp_path / "run").exists()


def test_sets_that_cannot_be_downloaded(tmp_path: Path, datalens: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path))
    for name, file in (
        ("celeba-gender", "list_attr_celeba.txt"),
        ("places365", "data_256/"),
        ("scenes", "train*.parquet"),
    ):
        line = datalens("data", "get", name).refused()
        assert f"{name} cannot be downloaded: put" in line and file in line and str(tmp_path) in line
        assert "--data-folder" in line
        assert "cannot be downloaded" in datalens("evaluate", tmp_path, "--data", name).refused()
    rows = {row["name"]: row for row in datalens("data", "list", "--json").succeeded().json["datasets"]}
    assert {name for name, row in rows.items() if not row["download"]} == {
        *("celeba-gender", "celeba-gender-32", "celeba-hair", "places365", "scenes")
    }
    assert rows["scenes"]["note"] == "a stand-in for Places365"
    listing = datalens("data", "list").succeeded().out
    assert "a stand-in for Places365" in listing
    assert "where to put it: datalens data get celeba-hair" in listing


def test_a_folder_for_a_set_that_has_none(faces: Path, tmp_path: Path, datalens: Call) -> None:
    line = datalens("train", "--data", "digits", "--data-folder", faces, "--out", tmp_path / "run").refused()
    assert "digits can: leave it out" in line
    assert not (tmp_path / "run").exists()


def test_a_part_of_a_set_with_its_size_declared(faces: Path, tmp_path: Path, datalens: Call) -> None:
    asked = ("train", "--data", "celeba-gender", "--steps", 1, "--batch", 4, "--nominal-size", 90)
    datalens(*asked, "--data-folder", faces, "--out", tmp_path / "run").succeeded()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["schema"]["nominal_size"] == 90
    assert config["settings"]["teachers"] == 6
    datalens("train", "--out", tmp_path / "run", "--resume").succeeded()
    line = datalens(*asked, "--out", tmp_path / "other").refused()
    assert "the size of a named data set is public" in line
