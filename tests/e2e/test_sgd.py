"""`datalens sgd` through the command line: train, verify, resume after a stop and after a crash, and bad input."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.driver import train
from datalens.errors import DatalensError
from datalens.methods import sgd
from datalens.options import TrainOptions
from datalens.privacy.events import SubsampledGaussianEvent
from datalens.privacy.ledger import read_ledger
from datalens.released.release import load_classifier
from datalens.released.verification import check_release
from datalens.run import folder
from datalens.run.folder import Run
from datalens.run.parked import unpark

pytestmark = [pytest.mark.usefixtures("quickly"), pytest.mark.filterwarnings("ignore:Full backward hook is firing")]

# 40 steps; a price in milliseconds
SMALL = ("--data", "digits", "--epsilon", 3, "--sigma", 2.5, "--epochs", 2, "--clip", 1, "--lr", 0.5, "--topk", 0.8)
SMALL += ("--accountant", "rdp-improved")
KEYS = {"accuracy", "epsilon", "delta", "sigma", "steps", "clip", "topk", "selector", "seconds"}


@pytest.fixture(scope="module")
def trained(datalens: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("sgd") / "run"
    return out, datalens("sgd", *SMALL, "--out", out, "--json", "--show-accuracy").succeeded().json


def charged(run: Path) -> int:
    _, events = read_ledger(run / "ledger.jsonl")
    return sum(event.repeats for event in events if isinstance(event, SubsampledGaussianEvent))


def test_it_trains_and_says_what_it_did(trained: tuple[Path, dict[str, Any]]) -> None:
    run, said = trained
    assert set(said) >= KEYS
    assert (said["steps"], said["sigma"], said["clip"], said["topk"]) == (40, 2.5, 1.0, 0.8)
    assert said["accuracy"] > 0.3  # 0.65 to 0.76 in eight runs; chance is 0.1
    assert said["private"] and 0 < said["epsilon_spent"] <= said["epsilon"] == 3.0
    assert sorted(path.name for path in (run / "release").iterdir()) == sorted(
        ["CERTIFICATE.md", "certificate.json", "ledger.jsonl", "model.safetensors", "report.html"]
    )
    assert (run / "config.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_accuracy_on_real_records_is_not_in_a_jobs_log(datalens: Any, tmp_path: Path, as_json: bool) -> None:
    """Neither stream has it, unless it is asked for; the run folder, which is private, has."""
    run = tmp_path / "run"
    found = datalens("sgd", *SMALL, "--out", run, *(["--json"] if as_json else [])).succeeded()
    (kept,) = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "accuracy" in line]
    assert 0 < kept["accuracy"] <= 1
    assert str(kept["accuracy"]) not in found.out + found.err and "ccuracy" not in found.err.replace(str(run), "")
    if as_json:
        assert found.json["accuracy"] is None and found.json["accuracy_for_the_owner"] == f"{run}/metrics.jsonl"
    else:
        said = f"accuracy on real test records: for the owner only, in {run}/metrics.jsonl (--show-accuracy prints it)"
        assert found.out.splitlines()[1:] == [said]
    assert (run / "metrics.jsonl").stat().st_mode & 0o077 == 0
    assert all(b"accuracy" not in path.read_bytes() for path in (run / "release").iterdir())


def test_in_a_terminal_accuracy_is_shown_and_labelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from datalens.cli.train import Sgd, accuracy_said

    line = accuracy_said({"run": "r", "accuracy": 0.5}, shown=True)[1]
    assert line == "accuracy on real test records, for the owner only (no epsilon covers it): 0.5000"
    told: list[bool] = []
    facts = {"run": "r", "accuracy": 0.5, "interrupted": False}
    monkeypatch.setattr("datalens.driver.train", lambda options, given: facts)
    monkeypatch.setattr("datalens.cli.train.show", lambda said, lines, json: told.append("0.5000" in lines[1]))
    for terminal, asked in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        Sgd(data="digits", out=tmp_path, show_accuracy=asked).run(set())
    assert told == [False, True, True]


def test_the_certificate_stands_by_itself(trained: tuple[Path, dict[str, Any]], datalens: Any) -> None:
    run, said = trained
    found = datalens("verify", run / "release", "--json").succeeded().json
    assert found["ok"] and found["epsilon_spent"] == pytest.approx(said["epsilon_spent"])
    assert found["epsilon_spent_prv"] < found["epsilon_spent_rdp_improved"] < found["epsilon_spent_moments"]
    page = (run / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert "a classifier trained on digits" in page and "floating point" in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigma": 9.0}, "another sigma"),
        ({"clip": 0.5}, "another sigma"),
        ({"topk": 0.05}, "another sigma"),
        ({"batch_size": 10}, "another batch size"),
        ({"steps": 7}, "more steps"),
        ({"noise_seeded": True}, "seeded"),
    ],
)
def test_settings_that_do_not_fit_the_ledger_are_found(
    trained: tuple[Path, dict[str, Any]], change: dict[str, Any], said: str
) -> None:
    from datalens.data.schema import Schema
    from datalens.methods.sgd import SgdSettings

    certificate = json.loads((trained[0] / "release" / "certificate.json").read_text(encoding="utf-8"))
    settings = SgdSettings.from_dict({**certificate["settings"], **change})
    budget, events = read_ledger(trained[0] / "release" / "ledger.jsonl")
    schema = Schema.from_dict(certificate["public"])
    assert any(said in problem for problem in settings.disagreements(schema, budget, events))
    own = SgdSettings.from_dict(certificate["settings"])
    assert own.disagreements(schema, budget, events) == []


def test_the_released_model_is_the_one_that_was_measured(trained: tuple[Path, dict[str, Any]], datalens: Any) -> None:
    from datalens.data import formats

    run, said = trained
    model, names = load_classifier(run / "release")
    test = formats.load("digits", "test")
    x = torch.from_numpy(test.images).permute(0, 3, 1, 2).float() / 255
    right = (model(x).argmax(dim=1).numpy() == test.labels).mean()
    assert right == pytest.approx(said["accuracy"]) and names == tuple("0123456789")
    assert "classifier" in datalens("sample", run, "--out", run.parent / "s.npz").refused()
    with pytest.raises(DatalensError, match="made by `datalens sgd`"):
        load_classifier(run)


def test_a_damaged_model_is_said_to_be_one(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    content = (trained[0] / "release" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(DatalensError, match="not a classifier of datalens"):
        load_classifier(tmp_path)


class Killed(BaseException):
    """What nobody catches, as kill -9."""


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, what: Any) -> None:
    """Something happens after so many steps."""
    at_every_step(monkeypatch, lambda taken: what() if taken == number else None)


def at_every_step(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """Something happens after every step, which is told how many there were."""
    step, taken = sgd.Trainer.step, [0]

    def watched(self: sgd.Trainer, *data: Any) -> None:
        step(self, *data)
        taken[0] += 1
        what(taken[0])

    monkeypatch.setattr(sgd.Trainer, "step", watched)


def test_a_run_that_was_asked_to_stop_loses_nothing(
    datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    at_step(monkeypatch, 13, lambda: os.kill(os.getpid(), signal.SIGINT))
    first = datalens("sgd", *SMALL, "--out", run, "--json")
    assert first.code == 130 and first.json["steps"] == 13 and first.json["interrupted"]
    assert check_release(run / "release").problems == ()
    assert json.loads((run / "parked.json").read_text())["left"] == charged(run) - 13 > 0
    again = datalens("sgd", "--out", run, "--resume", "--json").succeeded().json
    assert again["steps"] == 40 and charged(run) == 40
    assert not (run / "parked.json").exists()
    assert check_release(run / "release").problems == ()


@pytest.fixture
def stopped(datalens: Any, tmp_path: Path) -> Path:
    """A run that was asked to stop after 13 steps, with steps of a block parked."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 13, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert datalens("sgd", *SMALL, "--out", tmp_path / "run").code == 130
    return tmp_path / "run"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"right": 3}'])
def test_a_damaged_file_of_parked_steps_is_not_guessed_at(content: str, stopped: Path) -> None:
    parked = stopped / "parked.json"
    left = json.loads(parked.read_text())["left"]
    with contextlib.closing(Run.resume(stopped)) as run:
        assert unpark(run) == left > 0 == unpark(run)  # once
        parked.write_text(content)
        with pytest.raises(DatalensError, match="damaged"):
            unpark(run)
    assert parked.read_text() == content


def test_a_file_of_parked_steps_that_was_put_back_pays_for_nothing(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parked = stopped / "parked.json"
    old = json.loads(parked.read_text())

    def taken(**change: Any) -> int:
        parked.write_text(json.dumps({name: value for name, value in (old | change).items() if value is not None}))
        with contextlib.closing(Run.resume(stopped)) as run:
            return unpark(run)

    assert taken() == taken(chain=None, charges=None) == old["left"]  # as version 0.1 wrote it
    for wrong in ({"left": charged(stopped) - 12}, {"left": -1}, {"left": "3"}, {"chain": "0" * 64}):
        assert taken(**wrong) == 0
        assert "not of the last charge" in capsys.readouterr().err
    with contextlib.closing(Run.resume(stopped)) as run:  # the run went on, and was killed
        run.ledger.charge(sgd.schedule_of(run.settings, run.schema).schedule.event(  # type: ignore[arg-type]
            repeats=4, step=charged(stopped), noise="operating-system"))  # fmt: skip
    assert taken() == 0


def test_a_run_does_not_go_on_with_other_records(
    datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    at_step(monkeypatch, 13, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert datalens("sgd", *SMALL, "--out", run).code == 130
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data_sha256": "0" * 64}))
    before = (run / "ledger.jsonl").read_bytes()
    assert "is not the data" in datalens("sgd", "--out", run, "--resume").refused(after_start=True)
    assert (run / "ledger.jsonl").read_bytes() == before


def test_a_run_whose_checkpoint_is_gone_does_not_replace_its_release(
    datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin at step 0 with what is left to spend."""
    run = tmp_path / "run"
    at_step(monkeypatch, 13, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert datalens("sgd", *SMALL, "--out", run).code == 130
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    kept = ["ledger.jsonl", "parked.json", *(f"release/{path.name}" for path in (run / "release").iterdir())]
    before = {name: (run / name).read_bytes() for name in kept}
    line = datalens("sgd", "--out", run, "--resume").refused(after_start=True)
    assert "Nothing was spent" in line and "its release stays valid" in line
    assert {name: (run / name).read_bytes() for name in kept} == before
    (run / "release").rename(run / "kept")  # as the line says
    assert datalens("sgd", "--out", run, "--resume", "--json").succeeded().json["steps"] < 40


def test_a_run_that_was_killed_pays_for_what_it_lost(
    datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def die() -> None:
        raise Killed

    at_step(monkeypatch, 13, die)
    with pytest.raises(Killed):
        train(TrainOptions(method="sgd", data="digits", out=run, epsilon=3.0, sigma=2.5, epochs=2, clip=1.0, lr=0.5,
                           accountant="rdp-improved"))  # fmt: skip
    lost = charged(run)
    assert lost >= 13
    result = datalens("sgd", "--out", run, "--resume", "--json").succeeded()
    assert result.json["steps"] == 40 - lost and charged(run) == 40
    assert f"{lost} more charged" in result.err
    assert check_release(run / "release").problems == ()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_that_ended_short_has_no_less_to_release_when_it_goes_on(
    datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """It was charged for all of its steps, so what it has lost it cannot learn again. (`keeps`: not so its twin.)"""
    run = tmp_path / "run"

    def after(number: int) -> None:
        """A checkpoint after step 5, and no other; the end after step 13."""
        monkeypatch.setattr(folder, "CHECKPOINT_SECONDS", -1.0 if number == 5 else 1e9)
        if number == 13:
            raise Killed

    with monkeypatch.context() as patch:
        at_every_step(patch, after)
        with pytest.raises(Killed):
            datalens("sgd", *SMALL, "--out", run)
    if not keeps:
        monkeypatch.setattr(folder.Run, "keep", lambda self: None)
    steps = [datalens("sgd", "--out", run, "--resume", "--json").succeeded().json["steps"] for _ in range(2)]
    assert 5 < steps[0] < 40
    assert steps[1] == (steps[0] if keeps else 5)
    assert check_release(run / "release").problems == ()


def test_a_run_goes_on_as_it_was_begun(datalens: Any, trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, _ = trained
    assert "--resume cannot change it" in datalens("sgd", "--out", run, "--resume", "--clip", 3).refused()
    assert "exists already" in datalens("sgd", *SMALL, "--out", run).refused()
    assert "begun by `datalens sgd`" in datalens("train", "--out", run, "--resume").refused()
    (run / "parked.json").write_text("[]")
    assert "damaged" in datalens("sgd", "--out", run, "--resume").refused(after_start=True)
    (run / "parked.json").unlink()


def test_seeded_noise_and_no_noise_are_stamped(datalens: Any, tmp_path: Path) -> None:
    for name, asked in (("seeded", ("--noise-seed", 1)), ("none", ("--epsilon", "inf"))):
        asked = tuple(a for a in SMALL if name != "none" or a not in ("--sigma", 2.5)) + asked
        result = datalens("sgd", *asked, "--out", tmp_path / name, "--json").succeeded()
        assert result.json["private"] is False and "NOT PRIVATE" in result.err
        certificate = json.loads((tmp_path / name / "release" / "certificate.json").read_text())
        assert certificate["statement"].startswith("NOT PRIVATE")
        assert check_release(tmp_path / name / "release").problems == ()


def test_a_file_of_ones_own_without_a_test_split(datalens: Any, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 1), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(60) % 2, classes=np.array(["a", "b"]))
    asked = ("--data", tmp_path / "own.npz", "--nominal-size", 50, "--sigma", 3, "--epochs", 0.5, "--batch-size", 5)
    found = datalens("sgd", *asked, "--epsilon", 4, "--accountant", "rdp-improved", "--out", tmp_path / "r", "--json")
    assert found.succeeded().json["accuracy"] is None and found.json["network"] == "cnn"
    model, _ = load_classifier(tmp_path / "r" / "release")
    assert model(torch.zeros(3, 1, 16, 16)).shape == (3, 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--data", "digits", "--topk", 0), "topk"),
        (("--data", "digits", "--clip", 0), "clip"),
        (("--data", "digits", "--batch-size", 9999), "--batch-size"),
        (("--data", "digits", "--lr", 0), "--lr"),
        (("--data", "digits", "--noise-seed", -1), "--noise-seed"),
        (("--data", "digits", "--network", "cnn"), "14x14"),
        (("--data", "digits", "--extractor", "nowhere.pth"), "--extractor"),
        (("--data", "digits", "--epsilon", 0.3, "--accountant", "moments"), "no noise brings"),
        (("--data", "digits", "--epsilon", 0.3, "--sigma", 0.1), "not even one step"),
        ((), "--data"),
    ],
)
def test_bad_input_is_one_line(datalens: Any, tmp_path: Path, asked: tuple[Any, ...], said: str) -> None:
    line = datalens("sgd", *asked, "--out", tmp_path / "run").refused(3 if "--epsilon" in asked else 2)
    assert said in line
    assert not (tmp_path / "run").exists()


# --- features -------------------------------------------------------------------------------------------------------


def test_a_linear_head_on_features_of_a_file(datalens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    from datalens.data.named import sources
    from datalens.private import features

    torch.manual_seed(0)
    weights = tmp_path / "resnet.safetensors"
    save_file({**features.ResNet18().state_dict(), "fc.weight": torch.zeros(1000, 512)}, weights)
    monkeypatch.setattr(sources, "folder", lambda name: tmp_path / "home" / name)
    images = np.random.default_rng(0).integers(0, 255, (12, 9, 9, 3), dtype=np.uint8)
    arrays = {"images": images, "labels": np.arange(12) % 2, "test_images": images, "test_labels": np.arange(12) % 2}
    np.savez(tmp_path / "own.npz", **arrays, classes=np.array(["a", "b"]))
    asked = ("--data", tmp_path / "own.npz", "--nominal-size", 12, "--sigma", 3, "--epochs", 2, "--batch-size", 2)
    asked += ("--epsilon", 9, "--accountant", "rdp-improved", "--extractor", weights)
    found = datalens("sgd", *asked, "--out", tmp_path / "r", "--json").succeeded().json
    assert (found["extractor"], found["network"]) == ("resnet18", "linear")
    kept = list((tmp_path / "home" / "features").glob("*.npy"))
    assert len(kept) == 1 and kept[0].stat().st_mode & 0o077 == 0  # the same images twice
    extractor = features.find(str(weights))
    device = torch.device("cpu")
    from_cache = features.extract(extractor, images, device=device)
    alone = features.extract(extractor, images[:1], device=device)  # a record's features are its own affair
    torch.testing.assert_close(alone, from_cache[:1], rtol=1e-2, atol=1e-2)
    assert "need --network linear" in datalens("sgd", *asked, "--network", "cnn", "--out", tmp_path / "r2").refused()
    (tmp_path / "wrong.pth").write_bytes(b"no weights")
    with pytest.raises(DatalensError, match="has no weights"):
        features.find(str(tmp_path / "wrong.pth")).load()
    save_file({"a": torch.zeros(1)}, weights)
    with pytest.raises(DatalensError, match="does not hold the weights"):
        features.find(str(weights)).load()


def test_packaged_weights_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datalens.data.named import sources
    from datalens.private import features

    monkeypatch.setattr(sources, "folder", lambda name: tmp_path / name)

    class Corrupt:
        def fetch(self, wanted: Any, folder: Path) -> Any:
            yield wanted[0], b"something else"

    monkeypatch.setattr(features, "_LITE0_SOURCE", Corrupt())
    with pytest.raises(DatalensError, match="cannot download the weights"):
        features.find(features.DEFAULT)


def test_the_networks_have_the_published_sizes() -> None:
    from datalens.private import features

    lite, resnet = features.EfficientNetLite0(), features.ResNet18()
    assert sum(p.numel() for p in lite.parameters()) == 4_652_008 - 1280 * 1000 - 1000
    assert sum(p.numel() for p in resnet.parameters()) == 11_689_512 - 512 * 1000 - 1000
    with torch.inference_mode():
        assert lite.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1280)
        assert resnet.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 512)


def test_the_papers_network() -> None:
    from datalens.released.classifier import Classifier

    assert sum(p.numel() for p in Classifier(shape=(1, 28, 28), classes=10, network="cnn").parameters()) == 26_010
