"""Every other method, from start to release: it trains, survives a kill, samples, and its certificate stands."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest

from tests.e2e.test_moments import rechained

# Two steps each, on 1,437 small digits.
RUNS = {
    "dcgan": ("--epsilon", "inf", "--steps", 2, "--batch", 8),
    "dpmerf": ("--epsilon", 10, "--steps", 2, "--batch", 2),
    "gswgan": ("--epsilon", 10, "--preset", "quick", "--teachers", 3, "--steps", 2, "--batch", 4),
    "dpgan": ("--epsilon", 10, "--preset", "quick", "--steps", 2, "--batch", 16),
    "dpsgd-gan": ("--epsilon", 10, "--preset", "quick", "--steps", 2, "--batch", 16),
}
ONE_RELEASE = ("dpmerf",)  # and all the rest is post-processing: no checkpoints, the journal has it
PRIVATE = [name for name in RUNS if name != "dcgan"]


@pytest.fixture(autouse=True, scope="module")
def small():
    """A generator of a few thousand weights."""
    from datalens.released import generator

    make = generator.dcgan_architecture
    narrow = {"dense": 32, "widths": (8, 8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
        yield


@pytest.fixture(scope="module", params=RUNS)
def finished(request, datalens, tmp_path_factory):
    out = tmp_path_factory.mktemp("peers") / "run"
    options = ("--method", request.param, "--data", "digits", *RUNS[request.param])
    return request.param, out, datalens("train", *options, "--out", out, "--json").succeeded().json


class Killed(BaseException):
    """Nothing catches it: what a kill -9 leaves behind."""


def charges(run):
    return [json.loads(line)["event"] for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]


def test_it_says_what_it_did(finished, datalens):
    name, run, result = finished
    assert result["method"] == name
    assert result["private"] == (name in PRIVATE)
    assert charges(run)
    verified = datalens("verify", run, "--json").succeeded().json
    assert verified["epsilon_spent"] == result["epsilon_spent"]
    assert float(result["epsilon_spent"]) <= float(result["epsilon"])
    page = (run / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert ("NOT PRIVATE" in page) == (name not in PRIVATE)


def test_it_samples(finished, datalens, tmp_path):
    _, run, _ = finished
    datalens("sample", run, "--count", 20, "--out", tmp_path / "s.npz").succeeded()
    assert np.load(tmp_path / "s.npz")["images"].shape == (20, 8, 8, 1)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ONE_RELEASE])
def test_killed_and_resumed(monkeypatch, datalens, tmp_path, name, call):
    """Before the first checkpoint, and before the second: what was charged stays charged, and nothing is overspent."""
    from datalens.run import folder

    real, calls = folder.Run._checkpoint, 0

    def deadly(*arguments):
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return real(*arguments)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "CHECKPOINT_SECONDS", -1.0)
        patch.setattr(folder.Run, "_checkpoint", deadly)
        with pytest.raises(Killed):
            datalens("train", "--method", name, "--data", "digits", *RUNS[name], "--out", run)
    before = charges(run)
    result = datalens("train", "--resume", "--out", run, "--json").succeeded().json
    assert charges(run)[: len(before)] == before
    assert float(result["epsilon_spent"]) <= float(result["epsilon"])
    datalens("verify", run).succeeded()


def interrupted(monkeypatch, datalens, run, name):
    """A person asks it to stop after its first step: it releases what it has, and keeps its state."""
    from datalens.run import folder as folder

    log = folder.Run.log

    def ask(self, step, **values):
        log(self, step, **values)
        self.interrupted = True

    with monkeypatch.context() as patch:
        patch.setattr(folder.Run, "log", ask)
        done = datalens("train", "--method", name, "--data", "digits", *RUNS[name], "--out", run, "--json")
    assert done.code == 130 and done.json["steps"] == 1
    return charges(run)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ONE_RELEASE])
def test_a_state_that_is_too_large_to_be_written_often_is_not_left_out(monkeypatch, datalens, tmp_path, name):
    """They keep no journal: without a checkpoint a resumed run would begin again, with what is left to spend."""
    from datalens.run import folder as folder

    monkeypatch.setattr(folder, "CHECKPOINT_BYTES", 0)  # every state is past it
    run = tmp_path / "run"
    before = interrupted(monkeypatch, datalens, run, name)
    result = datalens("train", "--resume", "--out", run, "--json").succeeded().json
    steps = json.loads((run / "config.json").read_text())["settings"]["steps"]
    assert result["steps"] == steps > 1
    after = [event["step"] for event in charges(run)]
    assert after[: len(before)] == [event["step"] for event in before]
    assert len(after) == len(set(after))  # not one step was paid for twice
    datalens("verify", run).succeeded()


def test_a_run_whose_state_is_gone_does_not_replace_a_better_release(monkeypatch, datalens, tmp_path):
    """What version 0.1.0 left of a large GS-WGAN: a release, and neither checkpoint nor journal."""
    run = tmp_path / "run"
    interrupted(monkeypatch, datalens, run, "gswgan")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    before = {path.name: path.read_bytes() for path in (run / "release").iterdir()}
    ledger = (run / "ledger.jsonl").read_bytes()
    line = datalens("train", "--resume", "--out", run).refused(after_start=True)
    assert "Nothing was spent" in line and "its release stays valid" in line
    assert (run / "ledger.jsonl").read_bytes() == ledger
    assert {path.name: path.read_bytes() for path in (run / "release").iterdir()} == before
    datalens("verify", run).succeeded()


@pytest.mark.parametrize("name", ONE_RELEASE)
def test_one_release_is_asked_once(monkeypatch, datalens, tmp_path, name):
    """Killed after it was kept: used as it is. Killed before: it is lost, and so is the budget."""
    from datalens.privacy.journal import Journal
    from datalens.released.generator import Generator

    def deadly(*_, **__):
        raise Killed

    for owner, method in ((Generator, "forward"), (Journal, "save")):
        run = tmp_path / method
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, deadly)
            with pytest.raises(Killed):
                datalens("train", "--method", name, "--data", "digits", *RUNS[name], "--out", run)
        before = charges(run)
        assert len(before) == 1
        if method == "forward":
            datalens("train", "--resume", "--out", run).succeeded()
            datalens("verify", run).succeeded()
        else:
            assert "past the budget" in datalens("train", "--resume", "--out", run).refused(3, after_start=True)
        assert charges(run) == before


def test_a_run_without_noise_goes_on_as_if_nothing_had_happened(monkeypatch, datalens, tmp_path):
    test_killed_and_resumed(monkeypatch, datalens, tmp_path / "killed", "dcgan", 2)
    datalens("train", "--method", "dcgan", "--data", "digits", *RUNS["dcgan"], "--out", tmp_path / "whole").succeeded()
    weights = "run/release/generator.safetensors", "release/generator.safetensors"
    assert (tmp_path / "killed" / weights[0]).read_bytes() == (tmp_path / "whole" / weights[1]).read_bytes()


LIES = {
    "dcgan": {"sigma": 1.0},
    "dpmerf": {"l2_bound": 2.0**15, "diameter": 2.0**16},
    "gswgan": {"teachers": 1000},
    "dpgan": {"rate": 1e-6},
    "dpsgd-gan": {"repeats": 1},
}


def forged(release, *, event=None, settings=None):
    """A release whose ledger or settings say something else, chained and hashed again, as an owner could."""
    from datalens.released.certificate import certificate_bytes, own_hash, page_bytes, release_hashes

    lines = [json.loads(line) for line in (release / "ledger.jsonl").read_text().splitlines()]
    lines[1]["event"] |= event or {}
    (release / "ledger.jsonl").write_bytes(rechained(lines))
    certificate = json.loads((release / "certificate.json").read_text())
    certificate["settings"] |= settings or {}
    certificate["sha256"] |= release_hashes(release)
    page = page_bytes(certificate)
    (release / "CERTIFICATE.md").write_bytes(page)
    certificate["sha256"]["CERTIFICATE.md"] = hashlib.sha256(page).hexdigest()
    certificate["sha256"]["certificate"] = own_hash(certificate)
    (release / "certificate.json").write_bytes(certificate_bytes(certificate))
    (release / "report.html").unlink()  # it would tell
    return release


def test_a_ledger_that_its_settings_cannot_have_made(finished, datalens, tmp_path):
    name, run, _ = finished
    honest = forged(shutil.copytree(run / "release", tmp_path / "honest"))
    datalens("verify", honest).succeeded()
    found = datalens("verify", forged(shutil.copytree(run / "release", tmp_path / "lie"), event=LIES[name]))
    assert found.code == 1
    assert "other releases than the settings state" in found.out


@pytest.mark.parametrize("finished", ["gswgan"], indirect=True)
def test_shares_that_do_not_go_with_the_relation(finished, datalens, tmp_path):
    _, run, _ = finished
    lie = forged(shutil.copytree(run / "release", tmp_path / "lie"), settings={"shares": "balanced"})
    found = datalens("verify", lie)
    assert found.code == 1
    assert "balanced shares are not private under add-remove" in found.out


def test_relations(datalens, tmp_path):
    """Under replace-one shares go by place; and what samples records has no price there."""
    plan = ("plan", "--data", "mnist", "--relation", "replace-one", "--preset", "quick")
    settings = datalens(*plan, "--method", "gswgan", "--json").succeeded().json["settings"]
    assert settings["shares"] == "balanced"
    parts = datalens(*plan, "--method", "dpmerf", "--json").succeeded().json["parts"]
    assert parts[0]["sensitivity"] == 2 * 2**16
    assert "add-remove only" in datalens(*plan, "--method", "dpgan").refused()


def test_a_method_without_noise_needs_an_infinite_budget(datalens, tmp_path):
    line = datalens("train", "--method", "dcgan", "--data", "digits", "--out", tmp_path / "run").refused(3)
    assert "use --epsilon inf" in line


def test_options_of_other_methods_are_refused_by_name(datalens, tmp_path):
    options = ("--method", "dcgan", "--data", "digits", "--epsilon", "inf", "--out", tmp_path / "run")
    assert "--k is not an option of --method dcgan" in datalens("train", *options, "--k", 3).refused()
    assert "--batch must be at least 2" in datalens("train", *options, "--batch", 1).refused()
    assert "--preset other is unknown to dcgan" in datalens("train", *options, "--preset", "other").refused()


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_reads_nothing(monkeypatch, datalens, name):
    from datalens.data import formats

    monkeypatch.setattr(formats, "open_records", None)
    epsilon = ("--epsilon", 1 if name in PRIVATE else "inf")
    fields = datalens("plan", "--method", name, "--data", "mnist", *epsilon, "--json").succeeded().json
    assert fields["settings"]["method"] == name
    assert len(fields["parts"]) >= 1
    assert name in datalens("plan", "--method", name, "--data", "mnist", *epsilon, "--preset", "quick").succeeded().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_on_a_gpu(datalens, tmp_path, name):
    """Trained, resumed and verified there too."""
    run = tmp_path / "run"
    options = ("--method", name, "--data", "digits", *RUNS[name], "--device", "cuda")
    datalens("train", *options, "--out", run).succeeded()
    datalens("train", "--resume", "--out", run, "--device", "cuda").succeeded()
    datalens("verify", run).succeeded()
