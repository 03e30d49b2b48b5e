"""A run with a second stage, from start to release: what it promises, and what an interruption leaves of it."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from datalens.methods import refined
from datalens.methods.refined import LABELS, PART, ROUNDS
from datalens.privacy.dpsgd import GradientGate

SMALL = ("--data", "digits", "--epsilon", 10, "--refine", "diffusion", "--refine-steps", 8, "--pretraining", 4)
SMALL = (*SMALL, "--coordinates", 10, "--texture", 5)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(refined, "POOL", 200)


@pytest.fixture(scope="module")
def finished(datalens, tmp_path_factory):
    out = tmp_path_factory.mktemp("refined") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refined, "POOL", 200)
        return out, datalens("train", *SMALL, "--out", out, "--json").succeeded().json


def events(run):
    return [json.loads(line)["event"] for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]


def steps(run):
    return sum(event["repeats"] for event in events(run) if event.get("part") == PART)


def test_it_says_what_it_did(finished, datalens):
    run, result = finished
    assert result["private"] is True
    assert (result["refine"], result["accountant"], result["steps"]) == ("diffusion", "prv", 8)
    assert 9.8 < result["epsilon_spent"] <= 10
    assert steps(run) == 8
    assert [event.get("part", "") for event in events(run)] == [""] * 8 + [LABELS] * ROUNDS + [PART] * 8
    verified = datalens("verify", run, "--json").succeeded().json
    assert verified["epsilon_spent"] == pytest.approx(result["epsilon_spent"], rel=1e-3)
    page = (run / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert "private moments" in page
    assert "DP-SGD of a diffusion model" in page


def test_images_are_drawn_by_their_seed_and_verify(finished, datalens, tmp_path):
    run, _ = finished
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        datalens("sample", run, "--count", 50, "--seed", seed, "--out", tmp_path / f"{name}.npz").succeeded()
    a, b, c = (np.load(tmp_path / f"{name}.npz")["images"] for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    assert a.shape == (50, 8, 8, 1)
    datalens("verify", run, "--samples", tmp_path / "a.npz").succeeded()


def test_an_interrupted_run_goes_on_and_spends_no_more(datalens, tmp_path, monkeypatch):
    """Ctrl-C in the third step: what was charged and not taken is taken later."""
    run, real, calls = tmp_path / "run", refined.Trainer.step, []

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, number)

    monkeypatch.setattr(refined.Trainer, "step", interrupted)
    first = datalens("train", *SMALL, "--out", run, "--json")
    assert (first.code, first.json["interrupted"], first.json["steps"]) == (130, True, 3)
    datalens("verify", run).succeeded()  # the release of three steps stands
    last = datalens("train", "--resume", "--out", run, "--json").succeeded().json
    assert (last["interrupted"], last["steps"], steps(run)) == (False, 8, 8)
    assert calls == list(range(8))
    assert last["epsilon_spent"] <= 10
    datalens("verify", run).succeeded()


class Killed(BaseException):
    """Nothing catches it: what a kill -9 leaves behind."""


def test_a_kill_loses_what_was_charged_and_never_undercounts(datalens, tmp_path, monkeypatch):
    run, real, calls = tmp_path / "run", GradientGate.release, []

    def deadly(self, total):
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return real(self, total)

    with monkeypatch.context() as patch:
        patch.setattr(GradientGate, "release", deadly)
        with pytest.raises(Killed):
            datalens("train", *SMALL, "--out", run)
    assert steps(run) == 3
    before = (run / refined.PRETRAINED).read_bytes()
    done = datalens("train", "--resume", "--out", run, "--json").succeeded().json
    assert steps(run) == 8  # three are lost, as no checkpoint was due; five are learned from
    assert done["steps"] == 5
    assert (run / refined.PRETRAINED).read_bytes() == before
    datalens("verify", run).succeeded()


def test_pretraining_goes_on_where_it_was_stopped(datalens, tmp_path, monkeypatch):
    run, real, calls = tmp_path / "run", refined._plain_gradient, []

    def deadly(*args, **options):
        calls.append(options["step"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(refined, "SAVED_SECONDS", 0.0)
    monkeypatch.setattr(refined, "_plain_gradient", deadly)
    datalens("train", *SMALL, "--out", run)
    assert steps(run) == 0
    datalens("train", "--resume", "--out", run).succeeded()
    assert calls == [0, 1, 2, 2, 3]
    datalens("verify", run).succeeded()


def forged(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "forged")
    return tmp_path / "forged" / "release"


def resealed(release, change):
    """Rewrite certificate, page and hashes as a forger would."""
    from datalens.released import certificate as certificates

    path = release / certificates.CERTIFICATE
    fields = json.loads(path.read_text(encoding="utf-8"))
    change(fields)
    fields["sha256"] |= {
        name: value for name, value in certificates.release_hashes(release).items() if name in fields["sha256"]
    }
    fields["sha256"]["certificate"] = certificates.own_hash(fields)
    (release / certificates.PAGE).write_bytes(certificates.page_bytes(fields))
    fields["sha256"] |= {
        name: value for name, value in certificates.release_hashes(release).items() if name in fields["sha256"]
    }
    fields["sha256"]["certificate"] = certificates.own_hash(fields)
    path.write_bytes(certificates.certificate_bytes(fields))
    (release / "report.html").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sigma", 9.0, "other steps of DP-SGD"),
        ("batch_size", 10, "other steps of DP-SGD"),
        ("steps", 5, "more steps"),
        ("moments_share", 0.5, "sigma"),
        ("labels_share", 0.01, "other rounds"),
        ("rounds", 10, "too many of them"),
        ("wide", 8, "another network"),
        ("begin", 0.5, "another network"),
    ],
)
def test_settings_that_contradict_ledger_or_weights_are_found(finished, datalens, tmp_path, name, value, words):
    release = forged(finished, tmp_path)
    resealed(release, lambda fields: fields["settings"].update({name: value}))
    said = datalens("verify", release)
    assert said.code == 1
    assert words in said.out + said.err


def test_charges_that_are_left_out_are_found(finished, datalens, tmp_path):
    """The ledger of the second stage is cut: the weights have learned from more steps than it pays for."""
    from datalens.privacy.ledger import Ledger, read_ledger

    release = forged(finished, tmp_path)
    budget, charged = read_ledger(release / "ledger.jsonl")
    for kept in (charged[:-1], *([event for event in charged if event.part != part] for part in ("", LABELS, PART))):
        (release / "ledger.jsonl").unlink()
        ledger = Ledger.create(release / "ledger.jsonl", budget)
        for event in kept:
            ledger.charge(event)
        spent = ledger.spent()
        ledger.close()
        resealed(release, lambda fields, spent=spent: fields.update(epsilon_spent=spent))
        assert datalens("verify", release).code == 1


def test_a_round_that_was_lost_stays_charged_and_the_others_go_on(datalens, tmp_path, monkeypatch):
    from datalens.privacy.journal import Journal

    run, real, calls = tmp_path / "run", Journal.save, []

    def deadly(self, released):
        calls.append(released.event.part)
        if calls.count(LABELS) == 5:
            raise Killed
        return real(self, released)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", deadly)
        with pytest.raises(Killed):
            datalens("train", *SMALL, "--out", run)
    done = datalens("train", "--resume", "--out", run, "--json").succeeded().json
    numbers = [event["step"] for event in events(run) if event.get("part") == LABELS]
    assert numbers == list(range(ROUNDS))
    assert done["epsilon_spent"] <= 10
    datalens("verify", run).succeeded()


def test_from_python(tmp_path):
    from sklearn.datasets import load_digits

    from datalens import DataLens

    digits = load_digits()
    options = {"refine": "diffusion", "refine_steps": 2, "pretraining": 2, "coordinates": 10, "texture": 0}
    model = DataLens(epsilon=10.0, delta=1e-5, nominal_size=1800, classes=range(10), options=options)
    synthetic = model.fit(digits.images / 16, digits.target).sample(40)
    assert synthetic.images.shape == (40, 8, 8, 1)
    assert model.certificate.settings["refine"] == "diffusion"


def test_the_studio_counts_the_steps_of_the_second_stage(finished):
    from datalens.studio.jobs import _progress

    found = _progress(finished[0])
    assert (found["steps"], found["planned"]) == (8, 8)  # moments log lines, too
