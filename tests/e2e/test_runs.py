"""The run folder: what is in it, who may read it, what of it may leave; and going on with it."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

RELEASED = {
    *("generator.safetensors", "certificate.json", "CERTIFICATE.md", "ledger.jsonl", "samples.png", "report.html"),
}

pytestmark = pytest.mark.usefixtures("quickly")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def files_under(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def private_images():
    from datalens.data.formats import load

    return load("digits").images.reshape(-1, 64)


# --- what is there ----------------------------------------------------------------------------


def test_files(trained):
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "ledger.jsonl", "metrics.jsonl", "checkpoints", "journal", "release", "lock")
    }
    assert {path.name for path in (trained / "release").iterdir()} == RELEASED
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {
        *("latest.safetensors", "teachers-3-0-19.safetensors")
    }
    assert list((trained / "journal").iterdir()) == []  # the checkpoint holds what they did
    assert list(trained.parent.iterdir()) == [trained]


def test_what_was_asked_for_and_what_is_done_are_recorded(trained):
    config = read_json(trained / "config.json")
    assert config["options"]["teachers"] == config["settings"]["teachers"] == 20
    assert "sigma" not in config["options"]  # what was not asked for
    assert config["settings"]["sigma"] > 0
    assert config["settings"]["steps"] == 3
    assert config["schema"]["nominal_size"] == 1437


def test_metrics_are_for_the_owner(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    spent = [float(line["epsilon_spent"]) for line in lines]
    assert spent == sorted(spent)
    assert all(0 < line["teacher_loss"] < 10 for line in lines)


def test_ledger_states_budget_and_charges(trained):
    budget, *charges = [json.loads(line) for line in (trained / "ledger.jsonl").read_text().splitlines()]
    assert (budget["type"], budget["epsilon"], budget["delta"]) == ("budget", 1.0, 1e-5)
    assert [charge["number"] for charge in charges] == [0, 1, 2]
    assert [charge["event"]["step"] for charge in charges] == [0, 1, 2]
    for before, after in zip([budget, *charges], charges, strict=False):
        assert after["previous"] == before["hash"]


def test_only_the_owner_may_look_at_teachers(trained):
    assert stat.S_IMODE(trained.stat().st_mode) == 0o700
    for path in (trained / "checkpoints").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_pickle_anywhere(trained):
    for path in files_under(trained):
        assert path.suffix in {".json", ".jsonl", ".md", ".html", ".safetensors", ".png", ".release", ""}
        assert path.suffix or path.name == "lock"


def test_all_of_the_release_may_be_read_alike(trained):
    assert len({stat.S_IMODE(path.stat().st_mode) for path in (trained / "release").iterdir()}) == 1


# --- what may leave ---------------------------------------------------------------------------


def test_certificate_says_everything(trained):
    import hashlib

    certificate = read_json(trained / "release" / "certificate.json")
    assert certificate["private"] is True
    assert certificate["budget"] == {"epsilon": 1.0, "delta": 1e-5}
    assert 0.99 < certificate["epsilon_spent"] <= 1
    assert (certificate["relation"], certificate["accountant"]) == ("add-remove", "exact")
    assert certificate["privacy_unit"] == "one image"
    assert certificate["statement"].startswith("(1, 1e-05)-differentially private for one image present or absent")
    assert certificate["mechanism"]["events"] == 3
    assert "Gaussian" in certificate["mechanism"]["name"]
    assert certificate["mechanism"]["noise"] == "exact discrete Gaussian (OpenDP)"
    assert certificate["noise"] == {"origin": ["operating-system"], "secure": True}
    public = certificate["public"]
    assert (public["name"], public["height"], public["width"], public["channels"]) == ("digits", 8, 8, 1)
    assert (public["nominal_size"], public["classes"], public["value_range"]) == (1437, list("0123456789"), [0, 1])
    assert certificate["not_covered"]
    assert certificate["settings"] == read_json(trained / "config.json")["settings"]
    assert set(certificate["versions"]) >= {"datalens", "torch", "numpy"}
    for name in ("ledger.jsonl", "generator.safetensors"):
        found = hashlib.sha256((trained / "release" / name).read_bytes()).hexdigest()
        assert certificate["sha256"][name] == found
    assert len(certificate["sha256"]["certificate"]) == 64


def test_released_ledger_is_the_runs(trained):
    assert (trained / "release" / "ledger.jsonl").read_bytes() == (trained / "ledger.jsonl").read_bytes()


def test_no_losses_in_the_release(trained):
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for path in files_under(trained / "release"):
        content = path.read_bytes()
        assert b"loss" not in content
        assert b"agreement" not in content
        for line in metrics:
            assert str(line["teacher_loss"]).encode() not in content
            assert np.float64(line["teacher_loss"]).tobytes() not in content


def test_nothing_of_the_teachers_in_the_release(trained):
    """Every weight belongs to the generator, and its names give no teacher away."""
    from safetensors import safe_open

    with safe_open(trained / "release" / "generator.safetensors", "np") as file:
        names = set(file.keys())
        metadata = file.metadata()
    assert json.loads(metadata["generator"])["classes"] == list("0123456789")
    assert len(str(metadata)) < 1000
    assert not [name for name in names if "teacher" in name or "adam" in name]


def images_in(content, images):
    """How many of the images [n, d], bytes in a row, lie anywhere in `content`."""
    rows = [row.tobytes() for row in images]
    middle, length = len(rows[0]) // 2 - 4, len(rows[0])
    if len(content) < length:
        return 0
    # Eight bytes from the middle of an image, looked up at every offset at once; what matches is then compared in full.
    windows = np.lib.stride_tricks.as_strided(
        np.frombuffer(content, dtype=np.uint8), shape=(len(content) - 7, 8), strides=(1, 1)
    )
    words = np.ascontiguousarray(windows).view(np.uint64).ravel()
    keys = np.frombuffer(b"".join(row[middle : middle + 8] for row in rows), dtype=np.uint64)
    wanted = set(rows)
    places = np.flatnonzero(np.isin(words, keys)) - middle
    return len({content[place : place + length] for place in places.tolist() if place >= 0} & wanted)


def test_the_search_for_images_finds_one(private_images):
    planted = b"x" * 1001 + private_images[700].tobytes() + b"y" * 77
    assert images_in(planted, private_images) == 1
    assert images_in(planted[1:900], private_images) == 0


def test_no_training_image_in_the_release(trained, private_images):
    as_floats = (private_images / 255).astype(np.float32)
    for path in files_under(trained / "release"):
        content = path.read_bytes()
        assert images_in(content, private_images) == 0
        assert images_in(content, as_floats) == 0


def test_no_training_image_among_the_samples(datalens, trained, private_images, tmp_path):
    datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 500).succeeded()
    with np.load(tmp_path / "s.npz") as file:
        assert images_in(file["images"].tobytes(), private_images) == 0


def test_picture_has_ten_rows_of_ten(trained):
    from PIL import Image

    with Image.open(trained / "release" / "samples.png") as picture:
        assert picture.size == (10 * 66 + 2, 10 * 66 + 2)
        assert picture.info == {}  # no text chunks


# --- going on ---------------------------------------------------------------------------------


def test_resuming_a_finished_run_charges_nothing(datalens, copy):
    from safetensors.numpy import load_file

    before = (copy / "ledger.jsonl").read_bytes()
    weights = load_file(copy / "release" / "generator.safetensors")
    found = datalens("train", "--out", copy, "--resume", "--json").succeeded().json
    assert (found["steps"], found["interrupted"]) == (3, False)
    assert (copy / "ledger.jsonl").read_bytes() == before
    again = load_file(copy / "release" / "generator.safetensors")
    assert weights.keys() == again.keys()
    assert [name for name in weights if not np.array_equal(weights[name], again[name])] == []
    assert datalens("verify", copy, "--json").succeeded().json["events"] == 3


def test_resuming_with_the_same_options_is_fine(datalens, copy, small):
    datalens("train", *small, "--steps", 3, "--out", copy, "--resume").succeeded()


@pytest.mark.parametrize(
    "option",
    [
        *(("--epsilon", 2), ("--delta", 1e-6), ("--teachers", 21), ("--steps", 4), ("--sigma", 9), ("--seed", 1)),
        *(("--method", "datalens-paper"), ("--relation", "replace-one"), ("--accountant", "rdp")),
        *(("--data", "mnist"), ("--noise-seed", 1), ("--epsilon", "inf"), ("--preset", "default")),
    ],
    ids=lambda option: " ".join(map(str, option)),
)
def test_resuming_with_another_option_is_refused(datalens, copy, option):
    before = {path: path.read_bytes() for path in files_under(copy)}
    line = datalens("train", "--out", copy, "--resume", *option).refused()
    assert option[0].removeprefix("--") in line
    assert "--resume cannot change it" in line
    assert {path: path.read_bytes() for path in files_under(copy)} == before


def test_resuming_with_the_default_instead_is_refused_too(datalens, small, tmp_path):
    datalens("train", *small, "--steps", 1, "--epsilon", 2, "--out", tmp_path / "run").succeeded()
    datalens("train", "--out", tmp_path / "run", "--resume", "--epsilon", 1).refused()


def test_resuming_from_another_folder(datalens, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.chdir(tmp_path)
    np.savez(
        "own.npz",
        images=random.integers(0, 256, (50, 8, 8)).astype(np.uint8),
        labels=np.arange(50) % 2,
        classes=["a", "b"],
    )
    datalens("train", "--data", "own.npz", "--nominal-size", 50, "--teachers", 5, "--steps", 1, "--out", "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    datalens("train", "--out", tmp_path / "run", "--resume").succeeded()


def test_a_run_may_be_moved(datalens, copy, tmp_path):
    moved = Path(shutil.move(copy, tmp_path / "moved"))
    datalens("train", "--out", moved, "--resume").succeeded()
    datalens("verify", moved).succeeded()


def test_an_empty_folder_may_become_a_run(datalens, small, tmp_path):
    (tmp_path / "run").mkdir()
    datalens("train", *small, "--steps", 1, "--out", tmp_path / "run").succeeded()
    assert os.listdir(tmp_path) == ["run"]


def test_missing_folders_above_the_run_are_made(datalens, small, tmp_path):
    datalens("train", *small, "--steps", 1, "--out", tmp_path / "a" / "b" / "run").succeeded()


def test_resuming_on_other_data_is_refused(datalens, tmp_path):
    """The ledger is about the records it was begun with."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (50, 8, 8)).astype(np.uint8), np.arange(50) % 2
    path, run = tmp_path / "own.npz", tmp_path / "run"
    np.savez(path, images=images, labels=labels, classes=["a", "b"])
    datalens("train", "--data", path, "--nominal-size", 50, "--teachers", 5, "--steps", 1, "--out", run).succeeded()
    before = (run / "ledger.jsonl").read_bytes()
    for changed in ({"labels": 1 - labels}, {"images": images[:49], "labels": labels[:49]}, {"classes": ["a", "c"]}):
        np.savez(path, **({"images": images, "labels": labels, "classes": ["a", "b"]} | changed))
        assert "begun with" in datalens("train", "--out", run, "--resume").refused(after_start=True)
    assert (run / "ledger.jsonl").read_bytes() == before
    np.savez(path, images=images, labels=labels, classes=["a", "b"])
    datalens("train", "--out", run, "--resume").succeeded()
