"""What is wrong, and what to do, in one line: for what a newcomer types; and as JSON for a machine."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from datalens.cli.main import _advice, _stopped
from datalens.data.own.reading import Reading
from datalens.evaluate.inspection import _round, inspect

TRAIN = ("train", "--data", "digits", "--out", "z")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TRAIN, "--nominal-size", "2,000"), "--nominal-size must be a whole number, not '2,000'"),
        ((*TRAIN, "--epsilon", "three"), "--epsilon must be a number, not 'three'"),
        ((*TRAIN, "--epsilom", "3"), "datalens train has no option --epsilom: did you mean --epsilon?"),
        ((*TRAIN, "--relation", "both"), "--relation must be one of add-remove, replace-one, not 'both'"),
        (
            ("train", "digits", "--out", "z"),
            "datalens train does not take the argument digits: `datalens train --help` shows all",
        ),
        (("train", "--data", "digits"), "datalens train needs --out PATH; `datalens train --help` shows all options"),
        (("sample",), "datalens sample needs RUN and --out PATH; `datalens sample --help` shows all options"),
        (
            ("trian", "--data", "digits"),
            "there is no command 'trian': did you mean train? `datalens --help` lists them",
        ),
        (("frobnicate",), "there is no command 'frobnicate': `datalens --help` lists them"),
        (("verify", "nope"), "nope does not exist: expected a folder made by `datalens train`"),
        (("plan", "--data", "mnits", "--nominal-size", "5"), "no named data set of that name (did you mean mnist?)"),
        (("evaluate", "a", "--data", "mnits", "--record-id", "prefix"), "no named data set of that name"),
        (("train", "--out", "nowhere", "--resume"), "it does not exist; to begin one, leave out --resume"),
    ],
)
def test_one_line_says_it(datalens, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = datalens(*words).refused()
    assert said in line
    spoken = datalens(*words, "--json")
    assert spoken.json == {"error": line.removeprefix("datalens: "), "exit_code": 2}


def test_what_a_command_of_several_needs(datalens):
    said = "datalens data needs one of list, get; `datalens data --help` describes them"
    assert datalens("data").refused() == datalens("data", "--json").refused() == f"datalens: {said}"
    assert "datalens audit needs one of mechanism, end-to-end, " in datalens("audit", "--json").refused()
    assert "did you mean" not in datalens("audit", "--json").refused()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--data", "digits", "--out", "file/x"), "a file is where a folder should be"),
        (("budget", "file", "--epsilon", "1", "--delta", "1e-5"), "a file is where a folder should be"),
    ],
)
def test_a_file_in_the_way(datalens, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("hello")
    assert said in datalens(*words).refused(after_start=True)


def test_other_trouble_with_files():
    assert _advice(FileNotFoundError(2, "No such file")) == "make the folder first, or check the name"
    assert _advice(OSError(28, "No space left")) == "check space and permissions"


def test_after_ctrl_c_it_says_what_was_spent_and_how_to_go_on(datalens, tmp_path, monkeypatch):
    from datalens.methods import moments

    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(moments, "present_classes", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = tmp_path / "run"
        line = datalens("train", "--data", "digits", "--epsilon", 5, "--out", run).refused(130, after_start=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped; ε = " in line and "add-remove, exact accountant) is charged" in line
    assert f"continue with `datalens train --out {run} --resume`" in line
    monkeypatch.undo()
    assert "more charged, and lost" not in datalens("train", "--out", run, "--resume").succeeded().err


def test_stopped_before_there_was_a_run(tmp_path):
    assert _stopped("train", tmp_path / "run") == _stopped("verify", tmp_path) == _stopped("train", None) == "stopped"
    (tmp_path / "ledger.jsonl").write_text("torn")
    assert _stopped("sgd", tmp_path) == f"stopped: continue with `datalens sgd --out {tmp_path} --resume`"


def test_a_class_that_was_left_out_is_named(datalens, tmp_path):
    random = np.random.default_rng(0)
    labels = np.repeat([0, 1], [400, 4])
    images = random.integers(0, 256, (404, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=labels, classes=np.array(["common", "rare"]))
    asked = ("--data", tmp_path / "a.npz", "--nominal-size", 400, "--epsilon", 5, "--out", tmp_path / "run")
    datalens("train", *asked).succeeded()
    line = datalens("sample", tmp_path / "run", "--class", "rare", "--out", tmp_path / "s.npz").refused()
    assert "there are no images of class rare" in line


def test_verify_says_what_is_protected_and_what_it_is_worth(datalens, tmp_path):
    asked = ("train", "--data", "digits", "--epsilon", 12, "--delta", 0.01)
    datalens(*asked, "--out", tmp_path / "run").succeeded()
    said = datalens("verify", tmp_path / "run").succeeded().out
    assert "The privacy unit is one image." in said
    assert "warning: delta 0.01 is more than 1 / 1437 records" in said and "warning: epsilon 12 is more than 10" in said
    assert datalens("verify", tmp_path / "run", "--json").succeeded().json["unit"] == "one image"


def test_the_largest_epsilon_that_fits_does(datalens, tmp_path):
    datalens("budget", tmp_path / "b", "--epsilon", 1, "--delta", "1e-5").succeeded()
    asked = ("train", "--data", "digits", "--budget", tmp_path / "b", "--out", tmp_path / "run")
    line = datalens(*asked, "--epsilon", 1.0001).refused(3)
    assert "the largest that fits is --epsilon 1 (" in line
    datalens(*asked, "--epsilon", 1).succeeded()
    assert "reserved by 1 run:" in datalens("budget", tmp_path / "b").succeeded().out


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_counts_persons_where_they_are_protected(tmp_path):
    random = np.random.default_rng(0)
    ids = np.concatenate([np.arange(60), 100 + np.arange(60) // 30])  # "rare": two persons with thirty images each
    facts = {"labels": np.repeat([0, 1], 60), "classes": np.array(["common", "rare"]), "patient": ids}
    np.savez(tmp_path / "a.npz", images=random.integers(0, 256, (120, 8, 8), dtype=np.uint8), **facts)
    asked = {"nominal_size": None, "delta": 1e-5, "most": None}
    found = inspect(tmp_path / "a.npz", Reading(record_id="patient"), **asked)
    assert found["persons_of_classes"] == {"common": 60, "rare": 2} and found["classes"] == {"common": 60, "rare": 60}
    (said,) = found["tiny_classes"]
    assert said.startswith("class rare has 2 persons, too few")
    alone = inspect(tmp_path / "a.npz", Reading(), **asked)
    assert alone["persons_of_classes"] is None and not alone["tiny_classes"] and alone["test_images"] is None


def test_inspect_says_whether_there_are_test_images(datalens, tmp_path):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (90, 8, 8), dtype=np.uint8), np.arange(90) % 2
    own = {"images": images, "labels": labels, "classes": np.array(["a", "b"])}
    np.savez(tmp_path / "a.npz", **own)
    assert "no test images: `datalens evaluate` needs some" in datalens("inspect", tmp_path / "a.npz").succeeded().out
    facts = {"test_images": images[:30], "test_labels": labels[:30]}
    np.savez(tmp_path / "b.npz", **own, **facts)
    assert "test images, for `datalens evaluate`: 30" in datalens("inspect", tmp_path / "b.npz").succeeded().out


@pytest.mark.parametrize(
    ("count", "figure"),
    [(0, 1), (1, 1), (17, 15), (60, 60), (95, 100), (150, 150), (525, 500), (1437, 1500), (58_000, 60_000)],
)
def test_a_round_figure_is_near_and_round(count, figure):
    assert _round(count) == figure


def test_json_of_an_error_is_the_last_line(datalens):
    found = datalens("sample", "nope", "--out", "x.npz", "--json")
    assert json.loads(found.out.splitlines()[-1])["exit_code"] == found.code == 2
