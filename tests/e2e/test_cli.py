"""The whole chain through the command line: train, sample, evaluate, verify, account."""

import contextlib
import json
import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from datalens.released.release import load_generator

TRAIN_KEYS = {
    *("run", "method", "epsilon", "epsilon_spent", "delta", "relation", "accountant"),
    *("steps", "queries", "sigma", "seconds", "private"),
}
EVALUATE_KEYS = {
    *("accuracy", "accuracy_std", "accuracy_best_epoch", "accuracy_real"),
    *("classifier", "seeds", "epochs", "synthetic", "test"),
}
ACCOUNT_KEYS = {"epsilon_exact", "epsilon_rdp", "delta", "mu", "queries", "sigma", "k"}
VERIFY_KEYS = {"ok", "epsilon", "epsilon_spent", "delta", "events"}
QUICK_EVALUATION = ("--data", "digits", "--epochs", 1, "--seeds", 1)

pytestmark = pytest.mark.usefixtures("quickly")


def only_json(result):
    """With --json stdout is one line and nothing else."""
    result.succeeded()
    assert result.out.count("\n") == 1
    return result.json


def certificate_of(run):
    return json.loads((run / "release" / "certificate.json").read_text(encoding="utf-8"))


def settings_of(run):
    return json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]


def weights_of(run):
    from safetensors.numpy import load_file

    return load_file(run / "release" / "generator.safetensors")


def same(some, others):
    return some.keys() == others.keys() and all(np.array_equal(some[name], others[name]) for name in some)


# --- the chain --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(datalens, trained, tmp_path_factory):
    """The same 60 images in all three formats."""
    folder = tmp_path_factory.mktemp("samples")
    places = {"npz": folder / "s.npz", "parquet": folder / "s.parquet", "folder": folder / "pictures"}
    for place in places.values():
        found = only_json(datalens("sample", trained, "--out", place, "--count", 60, "--json"))
        assert (found["out"], found["count"], found["private"]) == (str(place), 60, True)
        said = {name: found[name] for name in ("epsilon", "delta", "relation", "accountant", "unit")}
        assert said == {
            "epsilon": 1.0,
            "delta": 1e-5,
            "relation": "add-remove",
            "accountant": "exact",
            "unit": "one image",
        }
    return places


def test_train_prints_one_json_object(datalens, small, tmp_path):
    found = only_json(datalens("train", *small, "--steps", 2, "--out", tmp_path / "run", "--json"))
    assert set(found) >= TRAIN_KEYS
    assert found["run"] == str(tmp_path / "run")
    assert found["method"] == "datalens"
    assert (found["epsilon"], found["delta"]) == (1.0, 1e-5)
    assert (found["relation"], found["accountant"]) == ("add-remove", "exact")
    assert 0.99 < found["epsilon_spent"] <= found["epsilon"]
    assert (found["steps"], found["queries"]) == (2, 30)
    assert found["sigma"] > 0
    assert found["seconds"] > 0
    assert found["private"] is True


def test_train_for_people_prints_the_release_alone_on_stdout(datalens, small, tmp_path):
    result = datalens("train", *small, "--steps", 1, "--out", tmp_path / "run").succeeded()
    assert result.out == f"{tmp_path / 'run'}/release\n"
    assert len(result.err.splitlines()) == 2


def test_given_sigma_takes_as_many_steps_as_fit(datalens, small, tmp_path):
    found = only_json(datalens("train", *small, "--sigma", 300, "--out", tmp_path / "run", "--json"))
    assert found["sigma"] == 300
    one_more = datalens("account", "--k", 32, "--sigma", 300, "--queries", 15 * (found["steps"] + 1), "--json").json
    assert found["epsilon_spent"] <= 1 < one_more["epsilon_exact"]


def test_all_formats_hold_the_same_images(files):
    from datalens.released.loading import load

    first, *others = (load(place) for place in files.values())
    assert first.images.shape == (60, 8, 8, 1)
    assert np.bincount(first.labels).tolist() == [6] * 10
    for other in others:
        assert np.array_equal(first.images, other.images)
        assert np.array_equal(first.labels, other.labels)
        assert first.certificate == other.certificate
        assert first.classes == other.classes


def test_samples_repeat_with_their_seed_and_change_with_it(datalens, trained, files, tmp_path):
    def images(name, *options):
        datalens("sample", trained, "--out", tmp_path / name, "--count", 60, *options).succeeded()
        with np.load(tmp_path / name) as file:
            return file["images"]

    with np.load(files["npz"]) as file:
        assert np.array_equal(images("again.npz"), file["images"])
        assert not np.array_equal(images("other.npz", "--seed", 1), file["images"])


def test_force_replaces_and_nothing_else_does(datalens, trained, tmp_path):
    place = tmp_path / "s.npz"
    for count, options in ((10, ()), (20, ("--force",))):
        datalens("sample", trained, "--out", place, "--count", count, *options).succeeded()
        with np.load(place) as file:
            assert len(file["images"]) == count


def test_a_release_folder_works_by_itself(datalens, trained, files, tmp_path):
    import shutil

    alone = shutil.copytree(trained / "release", tmp_path / "handed on")
    assert only_json(datalens("verify", alone, "--json"))["ok"] is True
    datalens("sample", alone, "--out", tmp_path / "s.npz", "--count", 60).succeeded()
    with np.load(tmp_path / "s.npz") as ours, np.load(files["npz"]) as theirs:
        assert np.array_equal(ours["images"], theirs["images"])
    assert only_json(datalens("evaluate", alone, *QUICK_EVALUATION, "--count", 40, "--json"))["synthetic"] == 40


def test_evaluate_a_run(datalens, copy):  # which gets an evaluation.json
    found = only_json(datalens("evaluate", copy, *QUICK_EVALUATION, "--count", 80, "--json"))
    assert set(found) >= EVALUATE_KEYS
    assert (found["synthetic"], found["seeds"], found["epochs"], found["test"]) == (80, 1, 1, 360)
    assert found["accuracy_std"] == 0
    for name in ("accuracy", "accuracy_best_epoch", "accuracy_real"):
        assert 0 <= found[name] <= 1


@pytest.mark.parametrize("kind", ["npz", "parquet", "folder"])
def test_evaluate_a_file(datalens, files, kind):
    found = only_json(datalens("evaluate", files[kind], *QUICK_EVALUATION, "--json"))
    assert set(found) >= EVALUATE_KEYS
    assert found["synthetic"] == 60


def test_verify(datalens, trained):
    found = only_json(datalens("verify", trained, "--json"))
    assert set(found) >= VERIFY_KEYS
    assert found["ok"] is True
    assert found["problems"] == []
    assert (found["epsilon"], found["delta"], found["events"]) == (1.0, 1e-5, 3)
    assert 0.99 < found["epsilon_spent"] <= 1
    assert found["epsilon_spent_exact"] == found["epsilon_spent"] < found["epsilon_spent_rdp"]


@pytest.mark.parametrize(
    "options",
    [
        ("--k", 200, "--sigma", 5000, "--queries", 1290),
        ("--epsilon", 1, "--sigma", 5000, "--queries", 1290),
        ("--epsilon", 1, "--k", 200, "--queries", 1290),
        ("--epsilon", 1, "--k", 200, "--sigma", 5000, "--accountant", "rdp"),
    ],
    ids=["cost", "solve k", "solve sigma", "solve queries"],
)
def test_account(datalens, options):
    found = only_json(datalens("account", *options, "--json"))
    assert set(found) >= ACCOUNT_KEYS
    assert found["mu"] == pytest.approx(2 * math.sqrt(found["k"] * found["queries"]) / found["sigma"])
    assert 0 < found["epsilon_exact"] < found["epsilon_rdp"]
    if "--epsilon" in options:
        assert found["epsilon_rdp" if "rdp" in options else "epsilon_exact"] <= 1


def test_account_agrees_with_the_ledger_of_a_run(datalens, trained):
    ran = only_json(datalens("verify", trained, "--json"))
    asked = settings_of(trained)
    queries = ran["events"] * asked["batch"]
    sigma = ("--sigma", asked["sigma"], "--noise", asked["noise"])
    cost = only_json(datalens("account", "--k", asked["k"], *sigma, "--queries", queries, "--json"))
    for name in ("exact", "rdp", "rdp_improved"):
        assert cost[f"epsilon_{name}"] == pytest.approx(ran[f"epsilon_spent_{name}"], rel=1e-9)
    assert cost["epsilon_pld"] == pytest.approx(ran["epsilon_spent_pld"], rel=1e-3)


def test_own_file_goes_all_the_way(datalens, tmp_path):
    """Floats in [0, 1], three named classes, a test split; the schema in the certificate is what was declared."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(n_class=3, return_X_y=True)
    images = (pixels / 16).reshape(-1, 8, 8)
    np.savez(
        tmp_path / "own.npz",
        **{"images": images[:400], "labels": labels[:400]},
        **{"test_images": images[400:], "test_labels": labels[400:], "classes": np.array(["zero", "one", "two"])},
    )
    data = ("--data", tmp_path / "own.npz")
    out = tmp_path / "run"
    datalens("train", *data, "--nominal-size", 450, "--teachers", 10, "--steps", 2, "--out", out).succeeded()
    public = certificate_of(out)["public"]
    assert public["nominal_size"] == 450
    assert public["classes"] == ["zero", "one", "two"]
    found = only_json(datalens("evaluate", out, *data, "--epochs", 1, "--seeds", 1, "--count", 30, "--json"))
    assert found["test"] == len(images) - 400
    assert only_json(datalens("verify", out, "--json"))["ok"] is True


# --- what is said about ε ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_noise(datalens, small, tmp_path_factory):
    out = tmp_path_factory.mktemp("inf") / "run"
    return out, datalens("train", *small, "--steps", 2, "--epsilon", "inf", "--out", out, "--json")


@pytest.fixture(scope="module")
def with_known_noise(datalens, small, tmp_path_factory):
    out = tmp_path_factory.mktemp("seeded") / "run"
    return out, datalens("train", *small, "--steps", 2, "--noise-seed", 1, "--out", out, "--json")


def test_without_noise_epsilon_is_inf(datalens, without_noise):
    out, result = without_noise
    found = only_json(result)
    assert (found["epsilon"], found["epsilon_spent"]) == ("inf", "inf")
    assert found["private"] is False
    assert found["sigma"] == 0
    certificate = certificate_of(out)
    assert certificate["statement"].startswith("NOT PRIVATE")
    assert certificate["private"] is False
    assert certificate["budget"]["epsilon"] == certificate["epsilon_spent"] == "inf"
    checked = only_json(datalens("verify", out, "--json"))
    assert checked["ok"] is True
    assert (checked["epsilon"], checked["epsilon_spent"], checked["private"]) == ("inf", "inf", False)


def test_a_seed_of_noise_moves_on_with_every_charge(trained, with_known_noise):
    from datalens.run.folder import Run

    with contextlib.closing(Run.open(with_known_noise[0])) as run:
        assert len(run.ledger.events) == 2 and run.noise_seed == 1 + 2
    with contextlib.closing(Run.open(trained)) as run:
        assert run.noise_seed is None


def test_with_a_noise_seed_nothing_is_private(datalens, with_known_noise):
    out, result = with_known_noise
    found = only_json(result)
    assert found["private"] is False
    assert found["epsilon"] == 1.0
    certificate = certificate_of(out)
    assert certificate["statement"].startswith("NOT PRIVATE")
    assert certificate["private"] is False
    assert certificate["noise"] == {"origin": ["seeded"], "secure": False}
    assert only_json(datalens("verify", out, "--json"))["ok"] is True


@pytest.mark.parametrize("which", ["without_noise", "with_known_noise"])
def test_not_private_is_said_by_every_command(datalens, request, which, tmp_path):
    out, trained = request.getfixturevalue(which)
    assert "NOT PRIVATE" in trained.err.splitlines()[-1]
    assert "NOT PRIVATE" in datalens("verify", out).succeeded().out
    sampled = datalens("sample", out, "--out", tmp_path / "s.npz", "--count", 10).succeeded()
    assert "NOT PRIVATE" in sampled.out
    with np.load(tmp_path / "s.npz") as file:
        assert "NOT PRIVATE" in json.loads(file["certificate"].item())["statement"]
    assert datalens("sample", out, "--out", tmp_path / "t.npz", "--count", 10, "--json").json["private"] is False


def test_not_private_is_said_wherever_epsilon_is(datalens, with_known_noise):
    out, trained = with_known_noise
    said = trained.err + datalens("verify", out).out
    for line in [line for line in said.splitlines() if "ε = " in line]:
        assert "NOT PRIVATE" in line


def lines_with_epsilon(*results):
    said = [line for result in results for line in (result.out + result.err).splitlines()]
    return [line for line in said if re.search(r"ε\s*=|\bepsilon [\d.]|-differentially private", line)]


def names_the_rest(line):
    return (
        bool(re.search(r"δ = |, 1e-05\)", line))
        and bool(re.search(r"add-remove|replace-one", line))
        and bool(re.search(r"(exact|rdp|improved|pld) accountant", line))
    )


def test_every_line_with_an_epsilon_names_the_rest(datalens, small, trained, copy, tmp_path):
    results = [
        datalens("train", *small, "--steps", 1, "--out", tmp_path / "a").succeeded(),
        datalens(
            *("train", *small, "--steps", 1, "--out", tmp_path / "b"),
            *("--relation", "replace-one", "--accountant", "rdp", "--epsilon", 3),
        ).succeeded(),
        datalens("train", *small, "--steps", 1, "--out", tmp_path / "c", "--epsilon", "inf").succeeded(),
        datalens("train", *small, "--out", tmp_path / "d", "--sigma", 5),
        datalens("train", *small, "--out", tmp_path / "d", "--sigma", 500, "--steps", 100_000),
        datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 10).succeeded(),
        datalens("verify", trained).succeeded(),
        datalens("verify", tmp_path / "b").succeeded(),
        datalens("evaluate", copy, *QUICK_EVALUATION, "--count", 10).succeeded(),
    ]
    lines = lines_with_epsilon(*results)
    assert len(lines) >= 11
    assert [line for line in lines if not names_the_rest(line)] == []


def test_account_names_the_rest_on_every_line(datalens):
    lines = lines_with_epsilon(datalens("account", "--k", 200, "--sigma", 5000, "--queries", 1290).succeeded())
    assert len(lines) == 4  # exact, the paper's RDP and the improved one, PLD
    assert all(map(names_the_rest, lines))


def test_evaluation_says_that_it_is_not_covered(datalens, copy):
    assert "not covered by ε" in datalens("evaluate", copy, *QUICK_EVALUATION, "--count", 10).succeeded().out


# --- methods and options ----------------------------------------------------------------------

OPTIONS = {
    "compress sign": (("--compress", "sign"), {"compress": "sign", "k": 64}),
    "compress topk": (("--compress", "topk"), {"compress": "topk"}),
    "decode sign": (("--decode", "sign"), {"decode": "sign"}),
    "decode linear": (("--decode", "linear"), {"decode": "linear"}),
    "decode threshold": (("--decode", "threshold", "--beta", 0.5), {"decode": "threshold", "beta": 0.5}),
    "basis pixel": (("--basis", "pixel", "--network", "compact"), {"basis": "pixel", "basis_size": 64}),
    "basis dct": (("--basis", "dct", "--basis-size", 20), {"basis": "dct", "basis_size": 20, "k": 20}),
    "k, clip, batch": (("--k", 3, "--clip", 0.1, "--batch", 4), {"k": 3, "clip": 0.1, "batch": 4}),
    "teacher steps": (("--teacher-steps", 1, "--seed", 7), {"teacher_steps": 1, "seed": 7}),
}


@pytest.mark.parametrize(("options", "recorded"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options_run_and_record_themselves(datalens, small, tmp_path, options, recorded):
    out = tmp_path / "run"
    datalens("train", *small, "--steps", 2, *options, "--out", out).succeeded()
    for settings in (settings_of(out), certificate_of(out)["settings"]):
        assert {name: settings[name] for name in recorded} == recorded
    shown = 20 if "--basis-size" in options else 0  # the cosines that teachers voted on, and nothing else
    assert load_generator(out / "release")[0].architecture.cosines == shown
    assert only_json(datalens("verify", out, "--json"))["ok"] is True


@pytest.mark.parametrize(
    ("options", "relation", "accountant", "shares"),
    [
        (("--relation", "replace-one"), "replace-one", "exact", "balanced"),
        (("--relation", "replace-one", "--balanced"), "replace-one", "exact", "balanced"),
        (("--accountant", "rdp"), "add-remove", "rdp", "hashed"),
    ],
)
def test_relation_and_accountant_are_recorded_everywhere(
    datalens, small, tmp_path, options, relation, accountant, shares
):
    out = tmp_path / "run"
    found = only_json(datalens("train", *small, "--steps", 2, *options, "--out", out, "--json"))
    assert (found["relation"], found["accountant"]) == (relation, accountant)
    certificate = certificate_of(out)
    assert (certificate["relation"], certificate["accountant"]) == (relation, accountant)
    assert relation in certificate["statement"]
    assert accountant in certificate["statement"]
    assert certificate["settings"]["shares"] == shares
    first, *charges = map(json.loads, (out / "release" / "ledger.jsonl").read_text().splitlines())
    assert (first["relation"], first["accountant"]) == (relation, accountant)
    assert {charge["event"]["relation"] for charge in charges} == {relation}
    assert only_json(datalens("verify", out, "--json"))["ok"] is True


@pytest.mark.parametrize(
    "options",
    [("--network", "paper"), ("--network", "compact"), ("--preset", "code", "--epsilon", 10)],
    ids=["paper", "compact", "code"],
)
def test_the_papers_method(datalens, tmp_path, options):
    out = tmp_path / "run"
    size = ("--data", "digits", "--teachers", 6, "--steps", 2)
    found = only_json(datalens("train", "--method", "datalens-paper", *size, *options, "--out", out, "--json"))
    assert (found["method"], found["accountant"], found["steps"]) == ("datalens-paper", "rdp", 2)
    settings = settings_of(out)
    assert (settings["basis"], settings["decode"], settings["k"]) == ("pixel", "threshold", 16)
    assert settings["latent_law"] == ("uniform" if "code" in options else "normal")
    assert only_json(datalens("verify", out, "--json"))["ok"] is True
    datalens("sample", out, "--out", tmp_path / "s.npz", "--count", 10).succeeded()


def test_basis_size_is_not_recorded_for_pixels(datalens, tmp_path):
    size = ("--data", "digits", "--teachers", 6, "--steps", 1)
    out = tmp_path / "run"
    datalens("train", "--method", "datalens-paper", *size, "--basis-size", 10, "--out", out).refused()


# --- seeds ------------------------------------------------------------------------------------


def test_both_seeds_give_the_same_weights_again(datalens, small, with_known_noise, tmp_path):
    """The fixture's run once more, and each of its seeds changed."""
    weights = weights_of(with_known_noise[0])

    def again(name, *options):
        datalens("train", *small, "--steps", 2, *options, "--out", tmp_path / name).succeeded()
        return weights_of(tmp_path / name)

    assert same(again("same", "--noise-seed", 1), weights)
    assert not same(again("other noise", "--noise-seed", 2), weights)
    assert not same(again("other seed", "--noise-seed", 1, "--seed", 1), weights)


def test_privacy_noise_does_not_follow_the_seed(datalens, small, trained, tmp_path):
    datalens("train", *small, "--steps", 3, "--out", tmp_path / "run").succeeded()
    assert not same(weights_of(tmp_path / "run"), weights_of(trained))


# --- real processes ---------------------------------------------------------------------------


def test_the_console_script(script, environment, trained, copy):
    def run(*arguments):
        return subprocess.run(
            [*script, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=60, check=False
        )

    good = run("verify", trained, "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["ok"] is True

    with open(copy / "release" / "generator.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    bad = run("verify", copy)
    assert bad.returncode == 1
    assert "generator.safetensors" in bad.stdout

    broke = run("train", "--data", "digits", "--out", Path(copy).with_name("new"), "--sigma", 1)
    assert broke.returncode == 3
    assert broke.stdout == ""
    assert broke.stderr.startswith("datalens: ")
    assert broke.stderr.count("\n") == 1


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_nobody_reads_the_output(script, environment, reader):
    command = [*script, "account", "--k", "200", "--sigma", "5000", "--queries", "1290"]
    if reader == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        read, output = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    finally:
        os.close(output)
    assert "Exception" not in done.stderr
    assert done.returncode == (2 if reader == "full" else 130)
