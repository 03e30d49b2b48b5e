"""A run from private moments, from start to release: what it promises, and what an interruption leaves of it."""

import json
import shutil

import numpy as np
import pytest

from datalens.methods.moments import RELEASES

DIGITS = ("--data", "digits", "--epsilon", 10)


@pytest.fixture(scope="module")
def finished(datalens, tmp_path_factory):
    out = tmp_path_factory.mktemp("moments") / "run"
    return out, datalens("train", *DIGITS, "--out", out, "--json").succeeded().json


def charges(run):
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()][1:]


class Killed(BaseException):
    """Nothing catches it: what a kill -9 leaves behind."""


def killed_at(monkeypatch, datalens, run, owner, name, *, call, options=()):
    calls = 0
    real = getattr(owner, name)

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly)
        with pytest.raises(Killed):
            datalens("train", *DIGITS, *options, "--out", run)


def test_it_says_what_it_did(finished, datalens):
    run, result = finished
    assert result["warm_start"] == "moments"
    assert result["private"] is True
    assert result["steps"] == len(RELEASES) == len(charges(run))
    assert 9.999 < result["epsilon_spent"] <= 10
    verified = datalens("verify", run, "--json").succeeded().json
    assert verified["epsilon_spent"] == pytest.approx(result["epsilon_spent"])
    page = (run / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    assert "private moments" in page
    assert "exact discrete Gaussian" in page


def test_one_record_has_one_row_and_every_cell_has_noise(finished):
    run, _ = finished
    events = [charge["event"] for charge in charges(run)]
    assert {event["row_unit"] for event in events} == {"record"}
    grid = 2**14
    assert [event["l2_bound"] for event in events] == [grid, grid, grid, grid**2] * 2
    cells = {event["step"]: event["coordinates"] for event in events}
    size = json.loads((run / "config.json").read_text())["settings"]["coordinates"]
    assert size > 30
    assert cells[1] == 10 * (size + 1)  # ten classes, absent or not
    assert cells[3] == 10 * size**2


def test_the_images_are_worth_something(finished, datalens, tmp_path):
    run, _ = finished
    datalens("sample", run, "--count", 1000, "--out", tmp_path / "s.npz").succeeded()
    options = ("--data", "digits", "--seeds", 1, "--epochs", 8, "--json")
    assert datalens("evaluate", tmp_path / "s.npz", *options).succeeded().json["accuracy"] > 0.6


def test_samples_follow_their_seed(finished, datalens, tmp_path):
    run, _ = finished

    def images(seed, name):
        datalens("sample", run, "--count", 20, "--seed", seed, "--out", tmp_path / name).succeeded()
        return np.load(tmp_path / name)["images"]

    assert np.array_equal(images(1, "a.npz"), images(1, "b.npz"))
    assert not np.array_equal(images(1, "c.npz"), images(2, "d.npz"))


def test_nothing_of_a_record_is_in_the_release(finished):
    from datalens.data import formats

    run, _ = finished
    content = b"".join(path.read_bytes() for path in (run / "release").iterdir())
    for image in formats.load("digits").images[:100]:
        for kind in ("uint8", "float32", "float64"):
            assert image.astype(kind).tobytes() not in content


@pytest.mark.parametrize("call", [1, 2])
def test_killed_between_charge_and_journal(monkeypatch, datalens, tmp_path, call):
    """The charge stays, the value is lost, and what is still to come gets noisier: nothing is overspent."""
    from datalens.privacy.journal import Journal

    run = tmp_path / "run"
    killed_at(monkeypatch, datalens, run, Journal, "save", call=call)
    before = charges(run)
    assert len(before) == call
    assert datalens("train", "--resume", "--out", run, "--json").succeeded().json["epsilon_spent"] <= 10
    after = charges(run)
    assert after[: len(before)] == before
    assert len(after) == len(RELEASES) + 1
    assert after[call]["event"]["sigma"] > before[call - 1]["event"]["sigma"]
    datalens("verify", run).succeeded()


def test_a_lost_texture_is_left_out(monkeypatch, datalens, tmp_path):
    """The last release had all that was left; to ask again would release noise and call it texture."""
    from datalens.privacy.journal import Journal

    run = tmp_path / "run"
    killed_at(monkeypatch, datalens, run, Journal, "save", call=8)
    before = charges(run)
    said = datalens("train", "--resume", "--out", run).succeeded().err
    assert "images are made without texture" in said
    assert "7 releases (1 more charged" in said
    assert charges(run) == before
    datalens("verify", run).succeeded()
    datalens("sample", run, "--count", 10, "--out", tmp_path / "s.npz").succeeded()


def test_half_the_budget_lost_is_half_kept(monkeypatch, datalens, tmp_path):
    """Covariances lost once: asked again with what is left, and more noise."""
    from datalens.privacy.journal import Journal

    run = tmp_path / "run"
    killed_at(monkeypatch, datalens, run, Journal, "save", call=4)
    datalens("train", "--resume", "--out", run).succeeded()
    steps = [charge["event"]["step"] for charge in charges(run)]
    assert steps[:5] == [0, 1, 2, 3, 3]
    datalens("verify", run).succeeded()


@pytest.mark.parametrize("release", range(4))
def test_whichever_one_release_a_kill_loses_the_run_is_finished(monkeypatch, datalens, tmp_path, release):
    """Without texture nothing is planned after covariances, so nothing is left to ask for them again."""
    from datalens.privacy.noise import Held

    run = tmp_path / "run"
    options = ("--texture", 0, "--coordinates", 20)
    killed_at(monkeypatch, datalens, run, Held, "take", call=release + 1, options=options)
    before = charges(run)
    assert [charge["event"]["step"] for charge in before] == list(range(release + 1))  # paid for, and never seen
    result = datalens("train", "--resume", "--out", run, "--json").succeeded()
    assert result.json["epsilon_spent"] <= 10
    name = RELEASES[release]
    assert f"warning: {name} was charged before, and an interruption lost its value" in result.err
    assert ("differ from the mean of their class" in result.err) == (name == "covariances")
    assert charges(run)[: len(before)] == before
    datalens("verify", run).succeeded()
    datalens("sample", run, "--count", 1000, "--out", tmp_path / "s.npz").succeeded()
    judged = ("--data", "digits", "--seeds", 1, "--epochs", 8, "--json")
    assert datalens("evaluate", tmp_path / "s.npz", *judged).succeeded().json["accuracy"] > 0.5  # worth having


def test_a_kill_while_noise_is_drawn_costs_nothing(monkeypatch, datalens, tmp_path):
    """Drawing the noise of covariances takes longest of all that a run does."""
    from datalens.privacy.noise import ExactNoise

    run = tmp_path / "run"
    options = ("--texture", 0, "--coordinates", 20)
    killed_at(monkeypatch, datalens, run, ExactNoise, "integers", call=4, options=options)
    assert [charge["event"]["step"] for charge in charges(run)] == [0, 1, 2]
    said = datalens("train", "--resume", "--out", run).succeeded().err
    assert "lost" not in said and [charge["event"]["step"] for charge in charges(run)] == [0, 1, 2, 3]


def test_killed_between_releases(monkeypatch, datalens, tmp_path):
    """What was journaled is used as it is: not one more charge."""
    from datalens.privacy.ledger import Ledger

    run = tmp_path / "run"
    killed_at(monkeypatch, datalens, run, Ledger, "charge", call=5)
    values = {path.name: path.read_bytes() for path in (run / "journal").iterdir()}
    assert len(values) == 4
    datalens("train", "--resume", "--out", run).succeeded()
    assert len(charges(run)) == len(RELEASES)
    assert {name: (run / "journal" / name).read_bytes() for name in values} == values


def test_other_data_cannot_go_on(monkeypatch, datalens, tmp_path):
    from datalens.privacy.ledger import Ledger

    run, data = tmp_path / "run", tmp_path / "own.npz"
    luck = np.random.default_rng(0)
    arrays = {"images": luck.integers(0, 256, (300, 8, 8), dtype=np.uint8), "labels": np.arange(300) % 2}
    np.savez(data, **arrays, classes=np.array(["a", "b"]))
    options = ("--data", data, "--nominal-size", 300, "--epsilon", 10, "--out", run)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            datalens("train", *options)
    arrays["images"][0, 0, 0] ^= 1
    np.savez(data, **arrays, classes=np.array(["a", "b"]))
    assert "is not the data" in datalens("train", "--resume", "--out", run).refused()
    assert charges(run) == []


def test_a_class_without_records_is_left_out_and_named(datalens, tmp_path):
    luck = np.random.default_rng(0)
    images = luck.integers(0, 256, (600, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(600) % 2, classes=np.array(["a", "b", "none"]))
    run = tmp_path / "run"
    options = ("--data", tmp_path / "own.npz", "--nominal-size", 600, "--epsilon", 10, "--out", run)
    said = datalens("train", *options).succeeded().err
    assert "class none has too few records" in said
    assert "class a" not in said
    datalens("sample", run, "--count", 30, "--out", tmp_path / "s.npz").succeeded()
    assert set(np.load(tmp_path / "s.npz")["labels"].tolist()) == {0, 1}
    assert charges(run)[1]["event"]["queries"] == 3  # its cells were released too, with noise


def test_hardly_any_budget_is_said(datalens, tmp_path):
    """Where nothing can come of it, before anything is spent; else at the end, with what was."""
    line = datalens("train", "--data", "digits", "--epsilon", 0.01, "--out", tmp_path / "run").refused()
    assert "nothing was charged: there are about 1437 records" in line and not (tmp_path / "run").exists()
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (60, 8, 8), dtype=np.uint8), random.integers(0, 2, 60)
    np.savez(tmp_path / "few.npz", images=images, labels=labels, classes=np.array(["a", "b"]))
    asked = ("--data", tmp_path / "few.npz", "--nominal-size", 5000, "--epsilon", 0.1, "--out", tmp_path / "few")
    line = datalens("train", *asked).refused(after_start=True)
    assert "no class of few.npz stands out of the noise, and this run ends here; ε = " in line
    assert "add-remove, exact accountant) is spent" in line and "are there about 5000?" in line
    assert datalens("train", "--out", tmp_path / "few", "--resume").refused(after_start=True) == line


@pytest.mark.parametrize(
    ("options", "stamp"),
    [(("--epsilon", "inf"), True), (("--noise-seed", 3), True), (("--noise", "gaussian"), False)],
    ids=lambda value: str(value),
)
def test_without_a_guarantee_it_is_stamped(datalens, tmp_path, options, stamp):
    result = datalens("train", "--data", "digits", "--epsilon", 10, *options, "--out", tmp_path / "run").succeeded()
    assert ("NOT PRIVATE" in result.err) == stamp
    assert ("NOT PRIVATE" in (tmp_path / "run" / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")) == stamp


def test_under_replace_one_a_record_moves_a_sum_twice_as_far(datalens, tmp_path):
    run = tmp_path / "run"
    datalens("train", *DIGITS, "--relation", "replace-one", "--out", run).succeeded()
    events = [charge["event"] for charge in charges(run)]
    assert [event["diameter"] / event["l2_bound"] for event in events] == pytest.approx([2**0.5, 2, 2**0.5, 2**0.5] * 2)
    datalens("verify", run).succeeded()


def rechained(lines):
    from datalens.privacy.ledger import _line

    previous, written = "0" * 64, b""
    for line in lines:
        raw, previous = _line({k: v for k, v in line.items() if k not in ("hash", "previous")}, previous)
        written += raw
    return written


LIES = {
    "a shorter row": (3, {"l2_bound": 2.0**14, "diameter": 2.0**15}),
    "of a teacher": (1, {"row_unit": "teacher"}),
    "closer together": (1, {"diameter": 2.0**14}),
    "fewer classes": (3, {"queries": 9}),
    "another release": (2, {"step": 1}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_ledger_that_cannot_have_come_about(finished, datalens, tmp_path, lie):
    """Chained and hashed again, as an owner could: but not what these settings release."""
    from datalens.released.certificate import certificate_bytes, own_hash, page_bytes, release_hashes

    run, _ = finished
    release = shutil.copytree(run / "release", tmp_path / "release")
    number, change = LIES[lie]
    lines = [json.loads(line) for line in (release / "ledger.jsonl").read_text().splitlines()]
    lines[number + 1]["event"] |= change
    (release / "ledger.jsonl").write_bytes(rechained(lines))
    certificate = json.loads((release / "certificate.json").read_text())
    certificate["sha256"] |= release_hashes(release)
    import hashlib

    page = page_bytes(certificate)
    (release / "CERTIFICATE.md").write_bytes(page)
    certificate["sha256"]["CERTIFICATE.md"] = hashlib.sha256(page).hexdigest()
    certificate["sha256"]["certificate"] = own_hash(certificate)
    (release / "certificate.json").write_bytes(certificate_bytes(certificate))
    (release / "report.html").unlink()  # it would tell
    found = datalens("verify", release)
    assert found.code == 1
    assert "ledger" in found.out + found.err


def test_a_plan_reads_nothing(datalens, monkeypatch):
    from datalens.data import formats

    monkeypatch.setattr(formats, "open_records", None)
    shown = datalens("plan", "--data", "mnist", "--epsilon", 1).succeeded().out
    assert "private moments" in shown
    assert "ε = 1 (δ = 1e-05, add-remove, exact accountant)" in shown
    parts = datalens("plan", "--data", "mnist", "--json").succeeded().json["parts"]
    assert [part["release"] for part in parts] == list(RELEASES)
    assert "TopAgg" in datalens("plan", "--data", "mnist", "--warm-start", "off").succeeded().out


def test_ranks_are_refused_in_a_line_where_a_method_has_none(datalens, monkeypatch, tmp_path):
    from datalens import driver
    from datalens.data.named import sources
    from datalens.options import TrainOptions
    from datalens.plans.registry import make_plan, method_of
    from datalens.run.ranks import World

    two = World(rank=0, size=2)
    alone = make_plan(TrainOptions(out=tmp_path, method="dpgan"), sources.schema("digits"))[1]
    with pytest.raises(Exception, match="one process"):
        driver._check_ranks(alone, method_of(alone), two)
    settings = make_plan(TrainOptions(out=tmp_path), sources.schema("digits"))[1]
    driver._check_ranks(settings, method_of(settings), two)  # the default runs on any number of ranks


@pytest.mark.parametrize("channels", [2, 4])
def test_channels_of_any_number(datalens, tmp_path, channels):
    luck = np.random.default_rng(0)
    images = luck.integers(0, 256, (300, 8, 9, channels), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(300) % 2, classes=np.array(["a", "b"]))
    run = tmp_path / "run"
    options = ("--data", tmp_path / "own.npz", "--nominal-size", 300, "--epsilon", 10, "--out", run)
    datalens("train", *options).succeeded()
    datalens("sample", run, "--count", 6, "--out", tmp_path / "s.npz").succeeded()
    assert np.load(tmp_path / "s.npz")["images"].shape == (6, 8, 9, channels)
