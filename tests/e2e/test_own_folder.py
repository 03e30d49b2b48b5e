"""A folder of sensitive images, as a person would take it all the way; and what they may get wrong on it."""

import html
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import Result

pytestmark = [pytest.mark.usefixtures("quickly"), pytest.mark.filterwarnings("ignore:Full backward hook is firing")]

SIDE, CLASSES = 16, ("left", "right", "up & down")


def stripes(label, count, *, seed):
    """Images of one class: waves of one direction, each moved and noised by itself. uint8 [count, SIDE, SIDE]"""
    random = np.random.default_rng([seed, label])
    down, across = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    angle = np.pi * label / len(CLASSES)
    waves = np.sin(9 * (across * np.cos(angle) + down * np.sin(angle)) + random.uniform(0, 1, (count, 1, 1)))
    return np.clip(128 + 90 * waves + random.normal(0, 25, waves.shape), 0, 255).astype(np.uint8)


def write(folder, count, *, seed=0, name="{i:05}.png"):
    for label, kind in enumerate(CLASSES):
        (folder / kind).mkdir(parents=True)
        for i, image in enumerate(stripes(label, count // len(CLASSES) + (label < count % len(CLASSES)), seed=seed)):
            Image.fromarray(image).save(folder / kind / name.format(i=i))
    return folder


def in_a_shell(*arguments):
    """`datalens …`, as a person types it: the console script, in a process of its own."""
    script = Path(sys.executable).with_name("datalens")
    line = shlex.join([str(script), *map(str, arguments)])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


def test_the_whole_way_from_a_folder_of_2000_png(tmp_path):
    datalens = in_a_shell
    data, run, out = tmp_path / "my höspital data", tmp_path / "run", tmp_path / "synthetic.npz"
    write(data / "train", 2000)
    write(data / "test", 150, seed=1)

    seen = datalens("inspect", data, "--json").succeeded().json
    assert (seen["records"], seen["sizes"], seen["modes"]) == (2000, {"16x16": 2000}, {"L": 2000})
    assert list(seen["classes"]) == sorted(CLASSES)
    assert not any(seen[problem] for problem in ("unreadable", "duplicates", "tiny_classes", "mixed"))
    assert [plan["epsilon"] for plan in seen["plans"]] == [1, 3, 10]
    assert "owner only" in seen["for"]

    own = ("--data", data, "--nominal-size", seen["nominal_size"])
    plan = datalens("plan", *own, "--epsilon", 3, "--json").succeeded().json
    assert plan["public"]["nominal_size"] == 2000
    trained = datalens("train", *own, "--epsilon", 3, "--out", run, "--json").succeeded().json
    assert trained["private"]
    assert trained["epsilon_spent"] <= 3

    datalens("sample", run, "--count", 900, "--out", out).succeeded()
    judged = datalens("evaluate", out, "--data", data, "--seeds", 1, "--epochs", 3, "--json").succeeded().json
    assert judged["test"] == 150
    assert judged["accuracy"] > 0.8

    pages = datalens("report", run, "--json").succeeded().json
    assert pages == {"report": f"{run}/release/report.html", "owner": f"{run}/owner.html", "private": True}
    assert data.name in (run / "release" / "report.html").read_text(encoding="utf-8")

    assert datalens("verify", run, "--json").succeeded().json["ok"]
    certificate = json.loads((run / "release" / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["privacy_unit"] == "one image"
    page = (run / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert "declared public by the owner: the classes (the names of folders)" in page

    before = out.read_bytes()
    assert "--force" in datalens("sample", run, "--count", 9, "--out", out).refused()
    assert "exists already" in datalens("train", *own, "--out", run).refused()
    assert out.read_bytes() == before
    assert datalens("verify", run).succeeded()


def test_the_whole_way_from_python(tmp_path):
    """The same images, as arrays."""
    from datalens import DataLens, TrainOptions, check_release
    from datalens.data.formats import load
    from datalens.data.own.reading import Reading
    from datalens.evaluate import utility
    from datalens.evaluate.inspection import inspect
    from datalens.plans.registry import make_plan

    write(tmp_path / "data" / "train", 2000)
    write(tmp_path / "data" / "test", 150, seed=1)
    seen = inspect(tmp_path / "data", Reading(), nominal_size=None, delta=1e-5, most=None)
    assert seen["records"] == seen["nominal_size"] == 2000
    assert [plan["epsilon"] for plan in seen["plans"]] == [1, 3, 10]
    real = load(str(tmp_path / "data"), nominal_size=2000)
    test = load(str(tmp_path / "data"), "test")
    names = np.array(real.schema.classes)
    planned, _ = make_plan(TrainOptions(epsilon=3.0, out=tmp_path / "run"), real.schema)
    assert planned.epsilon == 3.0

    model = DataLens(epsilon=3.0, delta=1e-5, nominal_size=2000, classes=list(names))
    model.fit(real.images, names[real.labels])
    synthetic = model.sample(900)
    model.save(tmp_path / "release")
    again = DataLens.load(tmp_path / "release")
    assert np.array_equal(again.sample(900).images, synthetic.images)

    asked = {"seeds": 1, "epochs": 3, "device": "cpu"}
    found = utility.evaluate(synthetic, real.images, real.labels, test.images, test.labels, **asked)
    assert found.accuracy > 0.8

    again.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "differentially private" in page
    assert all(html.escape(name) in page for name in names)

    checked = check_release(tmp_path / "release")
    assert checked.problems == ()
    assert checked.private
    assert checked.spent <= checked.budget.epsilon == 3.0


def test_persons(datalens, tmp_path):
    """An image each in every class: the certificate says whom it protects, and the check compares."""
    data, run = write(tmp_path / "data", 300, name="p{i}_scan.png"), tmp_path / "run"
    seen = datalens("inspect", data, "--record-id", "prefix", "--json").succeeded().json
    assert (seen["persons"], seen["most_images_of_a_person"]) == (100, 3)
    own = ("--data", data, "--nominal-size", 100, "--record-id", "prefix")
    small = ("--epsilon", 100, "--coordinates", 8, "--texture", 0)
    datalens("train", *own, *small, "--out", run).succeeded()
    assert datalens("verify", run, "--json").succeeded().json["ok"]
    certificate = json.loads((run / "release" / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["privacy_unit"] == "one person (all images with the same record id)"
    assert any("a person with several record ids" in said for said in certificate["not_covered"])
    assert "over all images and classes" in certificate["mechanism"]["sensitivity"]
    charged = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()][1:]
    assert {charge["event"]["row_unit"] for charge in charged} == {"person"}
    again = datalens("train", "--out", run, "--resume", "--record-id", "folder").refused()
    assert "was begun with record-id prefix" in again

    datalens("train", *own, "--teachers", 5, "--preset", "quick", "--steps", 1, "--out", tmp_path / "votes").succeeded()
    page = (tmp_path / "votes" / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert "one person changes one teacher's row" in page
    assert datalens("verify", tmp_path / "votes").succeeded()
    fast = ("--epochs", 1, "--batch-size", 20, "--accountant", "rdp-improved", "--network", "linear")
    datalens("sgd", *own, *fast, "--epsilon", 8, "--out", tmp_path / "sgd").succeeded()
    assert "persons" in (tmp_path / "sgd" / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert datalens("verify", tmp_path / "sgd", "--json").succeeded().json["ok"]
    assert '"row_unit":"person"' in (tmp_path / "sgd" / "ledger.jsonl").read_text().replace(" ", "")

    assert "--record-id" in datalens("train", *own, "--method", "dpmerf", "--out", tmp_path / "x").refused()
    assert not (tmp_path / "x").exists()


def test_inspect_names_what_is_wrong(datalens, tmp_path):
    data = write(tmp_path / "data", 90)
    (data / "left" / "00000.png").write_bytes(b"")  # the first of all
    (data / "left" / "00001.png").write_bytes((data / "right" / "00001.png").read_bytes())
    Image.new("RGB", (40, 20)).save(data / "right" / "wide.png")
    (data / "rare").mkdir()
    Image.new("L", (SIDE, SIDE)).save(data / "rare" / "one.png")
    found = datalens("inspect", data).succeeded().out
    for words in ("00000.png is empty", "00001.png is the same as", "class rare has 1 records", "images of 2 sizes"):
        assert words in found
    assert "owner only" in found
    assert found.count("ε =") == found.count("δ =") == found.count("accountant") == 3
    few = datalens("inspect", data, "--most", 10, "--json").succeeded().json
    assert (few["looked_into"], few["records"]) == (10, 92)


@pytest.mark.parametrize("most", [0, -1])
def test_inspect_of_nothing(datalens, tmp_path, most):
    assert "--most" in datalens("inspect", tmp_path, "--most", most).refused()
    assert "holds no image" in datalens("inspect", tmp_path).refused()
    assert "named data set" in datalens("inspect", "digits").refused()


def test_inspect_of_arrays(datalens, tmp_path):
    images = np.concatenate([stripes(label, 30, seed=0) for label in range(3)])
    np.savez(tmp_path / "a.npz", images=images, labels=np.repeat(range(3), 30), classes=np.array(CLASSES))
    found = datalens("inspect", tmp_path / "a.npz", "--json").succeeded().json
    assert (found["records"], found["nominal_size"], found["sizes"]) == (90, 100, {"16x16": 90})


def train(datalens, data, tmp_path, *options):
    return datalens("train", "--data", data, "--nominal-size", 60, "--out", tmp_path / "run", *options)


def test_one_class_only(datalens, tmp_path):
    """Works, as images without labels do."""
    (tmp_path / "data" / "only").mkdir(parents=True)
    for i, image in enumerate(stripes(0, 60, seed=0)):
        Image.fromarray(image).save(tmp_path / "data" / "only" / f"{i}.png")
    small = ("--coordinates", 8, "--texture", 0, "--epsilon", 50)
    train(datalens, tmp_path / "data", tmp_path, *small).succeeded()
    datalens("sample", tmp_path / "run", "--count", 10, "--out", tmp_path / "s.npz").succeeded()


BAD = {
    "empty folder": (lambda data: data.mkdir(), (), "holds no image"),
    "no labels of that name": (lambda data: write(data, 9), ("--label", "diagnosis"), "--label diagnosis"),
    "mixed sizes": (
        lambda data: Image.new("L", (9, 9)).save(write(data, 9) / "left" / "z.png"),
        (),
        "left/z.png is 9x9 where the first image is 16x16: resize all images, with --image-size",
    ),
    "0 bytes": (lambda data: (write(data, 9) / "right" / "00001.png").write_bytes(b""), (), "00001.png is empty"),
    "link": (
        lambda data: (write(data, 9) / "left" / "z.png").symlink_to("/etc/passwd"),
        (),
        "z.png is a symbolic link",
    ),
    "too small": (lambda data: write(data, 9), ("--image-size", 4), "--image-size"),
    "named set": (lambda data: None, ("--data", "digits"), "--nominal-size is for your own"),
}


@pytest.mark.parametrize(("make", "options", "words"), BAD.values(), ids=BAD.keys())
def test_refused_in_one_line_and_nothing_is_left(datalens, tmp_path, make, options, words):
    make(tmp_path / "data")
    assert words in train(datalens, tmp_path / "data", tmp_path, "--epsilon", 9, *options).refused()
    assert not (tmp_path / "run").exists()


def test_a_place_that_may_not_be_written(datalens, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    data = write(tmp_path / "data", 60)
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    line = datalens("train", "--data", data, "--nominal-size", 60, "--teachers", 5, "--out", place / "run").refused()
    assert str(place) in line


def test_small_shares_are_warned_of(datalens, tmp_path):
    data = write(tmp_path / "data", 60)
    few = ("--teachers", 20, "--preset", "quick", "--steps", 1, "--epsilon", 11, "--delta", 0.1)
    said = train(datalens, data, tmp_path, *few).succeeded().err
    for words in ("20 teachers have shares of about 3.0", "a smaller --epsilon", "choose --delta"):
        assert words in said


def test_100000_files_are_listed_in_seconds(tmp_path):
    from datalens.data import formats
    from datalens.data.own.reading import Reading

    for label in range(10):
        (tmp_path / str(label)).mkdir()
        first = tmp_path / str(label) / "0.png"
        Image.new("L", (8, 8), label).save(first)
        for i in range(1, 10_000):
            os.link(first, tmp_path / str(label) / f"{i}.png")
    began = time.monotonic()
    schema = formats.schema(str(tmp_path), nominal_size=100_000, reading=Reading())
    assert time.monotonic() - began < 10
    assert len(schema.classes) == 10


def test_grey_and_colour_together_are_pointed_out(datalens, tmp_path):
    data = write(tmp_path / "data", 60)
    Image.new("RGB", (SIDE, SIDE), "red").save(data / "right" / "z.png")
    (said,) = datalens("inspect", data, "--json").succeeded().json["mixed"]
    assert "grey and colour" in said
    assert not datalens("inspect", data, "--grayscale", "--json").succeeded().json["mixed"]
