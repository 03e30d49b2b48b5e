"""Input that cannot work is refused in one line, with the right exit code, before anything is written."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("quickly")


def cases(table):
    """(arguments, exit code, words of the message) by name."""
    return [pytest.param(*row, id=name) for name, row in table.items()]


@pytest.fixture(autouse=True)
def _nothing_takes_long(time_limit):
    time_limit(20)


# --- train ------------------------------------------------------------------------------------


TRAIN = {
    "unknown data": (("--data", "nosuch"), 2, "no named data set of that name"),
    "misspelt data": (("--data", "digit"), 2, "did you mean digits?"),
    "unknown preset": (("--preset", "nosuch"), 2, "default or quick"),
    "epsilon 0": (("--epsilon", 0), 2, "epsilon must be above 0"),
    "epsilon negative": (("--epsilon", -1), 2, "epsilon must be above 0"),
    "epsilon -inf": (("--epsilon", "-inf"), 2, "epsilon must be above 0"),
    "epsilon NaN": (("--epsilon", "nan"), 2, "epsilon must be above 0"),
    "delta 0": (("--delta", 0), 2, "delta must lie between 0 and 1"),
    "delta 1": (("--delta", 1), 2, "delta must lie between 0 and 1"),
    "delta negative": (("--delta", -1e-5), 2, "delta must lie between 0 and 1"),
    "delta NaN": (("--delta", "nan"), 2, "delta must lie between 0 and 1"),
    "k 0": (("--k", 0), 2, "--k must be at least 1"),
    "k negative": (("--k", -3), 2, "--k must be at least 1"),
    "k more than there are": (("--k", 65), 2, "--k 65 is more than the 64 coordinates"),
    "k more than the basis": (("--k", 11, "--basis-size", 10), 2, "--k 11 is more than the 10 coordinates"),
    "basis more than there are": (("--basis-size", 65), 2, "--basis-size 65 is more"),
    "pixels have no size": (("--basis", "pixel", "--network", "compact", "--basis-size", 9), 2, "--basis-size"),
    "spectral pixels": (("--basis", "pixel", "--network", "spectral"), 2, "--network spectral"),
    "teachers 0": (("--teachers", 0), 2, "--teachers must be at least 1"),
    "more teachers than records": (("--teachers", 1438), 2, "--teachers 1438 is more than the 1437 records"),
    "steps 0": (("--steps", 0), 2, "--steps must be at least 1"),
    "teacher steps 0": (("--teacher-steps", 0), 2, "--teacher-steps must be at least 1"),
    "batch 0": (("--batch", 0), 2, "--batch must be at least"),
    "batch 1": (("--batch", 1), 2, "--batch"),
    "sigma negative": (("--sigma", -1), 2, "--sigma must be a finite number, at least 0"),
    "sigma NaN": (("--sigma", "nan"), 2, "--sigma must be a finite number, at least 0"),
    "sigma inf": (("--sigma", "inf"), 2, "--sigma must be a finite number, at least 0"),
    "sigma 0": (("--sigma", 0), 3, "use --epsilon inf"),
    "sigma for no step": (("--sigma", 1), 3, "not even one step fits into ε = 1 (δ = 1e-05, add-remove, exact"),
    "sigma for fewer steps": (("--sigma", 300, "--steps", 50), 3, "50 steps at sigma 300 do not fit into ε = 1 (δ"),
    "sigma tiny": (("--sigma", 1e-200), 3, "sigma"),
    "sigma huge": (("--sigma", 1e200), 2, "--sigma"),
    "beta negative": (("--beta", -1), 2, "--beta must be"),
    "clip 0": (("--clip", 0), 2, "--clip must be above 0"),
    "clip NaN": (("--clip", "nan"), 2, "--clip must be above 0"),
    "clip inf": (("--clip", "inf"), 2, "--clip"),
    "noise seed negative": (("--noise-seed", -1), 2, "--noise-seed"),
    "balanced under add-remove": (("--balanced",), 2, "--relation replace-one"),
    "k that sign ignores": (("--compress", "sign", "--k", 5), 2, "--k"),
    "nominal size of a named set": (("--nominal-size", 5), 2, "--nominal-size"),
}


@pytest.mark.parametrize(("options", "code", "words"), cases(TRAIN))
def test_train(datalens, small, tmp_path, options, code, words):
    steps = () if "--sigma" in options else ("--steps", 2)  # σ for the steps, or steps for the σ
    assert words in datalens("train", *small, *steps, "--out", tmp_path / "run", *options).refused(code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [("train", "--data", "digits", "--out", "run"), ("account", "--k", 9, "--queries", 9)],
    ids=lambda c: c[0],
)
def test_an_epsilon_no_noise_is_enough_for(datalens, tmp_path, monkeypatch, time_limit, command):
    """With its finitely many orders, rdp charges log(1/δ)/198 = 0.058 for anything at all."""
    time_limit(2)
    monkeypatch.chdir(tmp_path)
    line = datalens(*command, "--epsilon", 0.05, "--accountant", "rdp").refused(3)
    assert "no noise is large enough" in line
    assert list(tmp_path.iterdir()) == []


def test_next_to_no_noise_and_no_budget(datalens, small, tmp_path):
    options = ("--steps", 1, "--sigma", 1e-200, "--epsilon", "inf")
    datalens("train", *small, *options, "--out", tmp_path / "run").succeeded()
    assert datalens("verify", tmp_path / "run", "--json").succeeded().json["epsilon_spent"] == "inf"


def test_no_data(datalens, tmp_path):
    assert "--data" in datalens("train", "--out", tmp_path / "run").refused()
    assert list(tmp_path.iterdir()) == []


def test_no_cuda(datalens, small, trained, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "CUDA" in datalens("train", *small, "--device", "cuda", "--out", tmp_path / "run").refused()
    assert "CUDA" in datalens("evaluate", trained, "--data", "digits", "--count", 10, "--device", "cuda").refused()
    assert list(tmp_path.iterdir()) == []


def test_more_than_memory_holds(datalens, trained, tmp_path):
    assert "memory" in datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 10**14).refused()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--method", "nosuch"), ("--epsilon", "much"), ("--steps", "1.5"), ("--relation", "next"), ("--nosuch", 1)],
)
def test_what_the_parser_refuses(datalens, small, tmp_path, option, value):
    result = datalens("train", *small, option, value, "--out", tmp_path / "run")
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err
    assert option in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("nosuch",), ("data",), ("data", "nosuch"), ("train",), ("verify",)])
def test_what_is_no_command(datalens, arguments):
    result = datalens(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err


# --- places -----------------------------------------------------------------------------------


def test_out_exists(datalens, small, trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert "choose another --out" in datalens("train", *small, "--out", tmp_path / "mine").refused()
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    assert "--resume" in datalens("train", *small, "--out", trained).refused()


def test_out_is_a_file(datalens, small, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    datalens("train", *small, "--out", file).refused()
    assert str(file) in datalens("train", *small, "--out", file / "run").refused()
    assert file.read_text() == "x"


def test_out_may_not_be_written(datalens, small, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("root writes everywhere")
    assert "permission" in datalens("train", *small, "--out", locked / "run").refused()


def test_out_is_here(datalens, small, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    datalens("train", *small, "--steps", 1, "--out", ".").refused()


@pytest.mark.parametrize("command", ["train", "sgd"])
def test_out_is_no_text(datalens, small, tmp_path, command):
    """A release could not be written there: known before anything is charged or set aside."""
    options = small if command == "train" else ("--data", "digits", "--epsilon", 3, "--epochs", 2, "--clip", 1)
    budget = tmp_path / "budget"
    datalens("budget", budget, "--epsilon", 10, "--delta", 1e-5).succeeded()
    before = {path: path.read_bytes() for path in budget.rglob("*") if path.is_file()}
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xffy"))
    for place in (out, out / "run"):
        line = datalens(command, *options, "--budget", budget, "--out", place).refused(after_start=True)
        assert "x\\udcffy" in line and "choose another --out" in line
    assert not out.exists() and os.listdir(tmp_path) == ["budget"]
    assert {path: path.read_bytes() for path in budget.rglob("*") if path.is_file()} == before


def test_a_run_that_was_moved_where_no_text_leads(datalens, copy, tmp_path):
    moved = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xffy"))
    copy.rename(moved)
    ledger = (moved / "ledger.jsonl").read_bytes()
    line = datalens("train", "--out", moved, "--resume").refused(after_start=True)
    assert "x\\udcffy" in line and (moved / "ledger.jsonl").read_bytes() == ledger


def test_resume_of_nothing(datalens, tmp_path):
    assert "is not a run" in datalens("train", "--out", tmp_path / "nosuch", "--resume").refused()
    assert "is not a run" in datalens("train", "--out", tmp_path, "--resume").refused()
    assert list(tmp_path.iterdir()) == []


# --- one's own file ---------------------------------------------------------------------------


def arrays(**changes):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (60, 8, 8)).astype(np.uint8)
    return {"images": images, "labels": np.arange(60) % 3, "classes": np.array(["a", "b", "c"])} | changes


def with_nan():
    images = arrays()["images"] / 255
    images[17, 3, 3] = np.nan
    return images


def saved(**changes):
    return lambda path: np.savez(path, **{k: v for k, v in arrays(**changes).items() if v is not None})


def damaged(path):
    np.savez_compressed(path, **arrays())
    content = bytearray(path.read_bytes())
    content[400:420] = bytes(20)
    path.write_bytes(content)


def with_text_for_arrays(path):
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images", "hello")
        archive.writestr("labels", "world")


def an_npy_by_another_name(path):
    with open(path, "wb") as file:
        np.save(file, arrays()["images"])


def truncated(path):
    np.savez(path, **arrays())
    path.write_bytes(path.read_bytes()[:-100])


FILES = {
    "NaN": (saved(images=with_nan()), "image 17 holds NaN"),
    "infinity": (saved(images=np.full((60, 8, 8), np.inf)), "image 0 holds NaN or infinity"),
    "floats up to 255": (saved(images=arrays()["images"].astype(float)), "must lie in [0, 1]"),
    "whole numbers of 64 bits": (saved(images=arrays()["images"].astype(int)), "uint8"),
    "flat images": (saved(images=np.zeros((60, 64), np.uint8)), "images must be [n, height, width]"),
    "no record": (saved(images=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, int)), "images must be"),
    "no images": (saved(images=None), "no array images"),
    "no labels": (saved(labels=None), "no array labels"),
    "no classes": (saved(classes=None), "no array classes"),
    "neither": (saved(images=None, labels=None, x=np.zeros(3)), "no array images and no array labels"),
    "labels too few": (saved(labels=np.zeros(59, int)), "labels must be 60 whole numbers"),
    "labels too many": (saved(labels=np.zeros(61, int)), "labels must be 60 whole numbers"),
    "labels one-hot": (saved(labels=np.eye(60, dtype=int)), "labels must be 60 whole numbers"),
    "labels of text": (saved(labels=np.array(["cat"] * 60)), "labels must be 60 whole numbers"),
    "labels with half": (saved(labels=np.full(60, 0.5)), "labels must be 60 whole numbers"),
    "labels negative": (saved(labels=np.full(60, -1)), "labels must be 0 or more"),
    "labels without name": (saved(classes=np.array(["a", "b"])), "label 2 has no name"),
    "pickle": (saved(labels=np.array([{}] * 60, dtype=object)), "not a readable .npz"),
    "text": (lambda path: path.write_text("hello"), "not a readable .npz"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable .npz"),
    "folder": (Path.mkdir, "is a folder, not a file"),
    "truncated": (truncated, "not a readable .npz"),
    "damaged": (damaged, "not a readable .npz"),
    "missing": (lambda path: None, "does not exist"),
    "npy by another name": (an_npy_by_another_name, "not a readable .npz"),
    "zip of something else": (with_text_for_arrays, "own.npz"),
    "classes of the same name": (saved(classes=np.array(["a", "a", "b"])), "distinct"),
    "five channels": (saved(images=np.zeros((60, 8, 8, 5), np.uint8)), "channels"),
}


@pytest.mark.parametrize(("write", "code", "words"), cases({n: (r[0], 2, *r[1:]) for n, r in FILES.items()}))
def test_own_file(datalens, tmp_path, write, code, words):
    path = tmp_path / "own.npz"
    write(path)
    before = set(tmp_path.iterdir())
    options = ("--data", path, "--nominal-size", 60, "--teachers", 5, "--steps", 1, "--out", tmp_path / "run")
    line = datalens("train", *options).refused(code)
    assert words in line
    assert str(path) in line
    assert set(tmp_path.iterdir()) == before


def own_file(tmp_path):
    saved()(tmp_path / "own.npz")
    return ("train", "--data", tmp_path / "own.npz", "--steps", 1, "--out", tmp_path / "run")


def test_own_file_without_nominal_size(datalens, tmp_path):
    assert "--nominal-size" in datalens(*own_file(tmp_path)).refused()
    assert os.listdir(tmp_path) == ["own.npz"]


def test_more_teachers_than_declared(datalens, tmp_path):
    line = datalens(*own_file(tmp_path), "--nominal-size", 50, "--teachers", 55).refused()
    assert "--teachers 55" in line
    assert os.listdir(tmp_path) == ["own.npz"]


def test_far_more_teachers_than_records(datalens, tmp_path):
    line = datalens(*own_file(tmp_path), "--nominal-size", 5000, "--teachers", 1000).refused()
    assert "60 records are too few for 1000 teachers" in line
    assert os.listdir(tmp_path) == ["own.npz"]


@pytest.mark.parametrize("size", [0, -5])
def test_nominal_size_of_nothing(datalens, tmp_path, size):
    assert "--nominal-size" in datalens(*own_file(tmp_path), "--nominal-size", size).refused()


def test_a_folder_called_infinity(datalens, tmp_path):
    (tmp_path / "Infinity").mkdir()
    datalens(*own_file(tmp_path / "Infinity"), "--nominal-size", 60, "--teachers", 5).succeeded()


# --- sample, evaluate, verify -----------------------------------------------------------------


@pytest.fixture(params=["missing", "empty folder", "file", "folder of other things"])
def no_run(request, tmp_path):
    path = tmp_path / "thing"
    match request.param:
        case "empty folder":
            path.mkdir()
        case "file":
            path.write_text("x")
        case "folder of other things":
            path.mkdir()
            (path / "config.json").write_text("{}")
    return path


def test_not_a_run(datalens, no_run, tmp_path):
    before = set(tmp_path.rglob("*"))
    assert str(no_run) in datalens("verify", no_run).refused()
    assert str(no_run) in datalens("sample", no_run, "--out", tmp_path / "s.npz").refused()
    assert str(no_run) in datalens("evaluate", no_run, "--data", "digits").refused()
    assert set(tmp_path.rglob("*")) == before


def test_a_run_without_release(datalens, copy, tmp_path):
    shutil.rmtree(copy / "release")
    assert "--resume" in datalens("verify", copy).refused()
    assert "--resume" in datalens("sample", copy, "--out", tmp_path / "s.npz").refused()
    assert "--resume" in datalens("evaluate", copy, "--data", "digits").refused()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "s.npz", "--count", 0), "--count must be at least 1"),
        (("--out", "s.npz", "--count", -7), "--count must be at least 1"),
        (("--out", "s.txt"), ".txt"),
        (("--out", "s.npz.gz"), ".gz"),
        (("--out", "there.npz"), "--force"),
        (("--out", "full"), "--force"),
        (("--out", "full", "--force"), "holds other files"),
        (("--out", "there.npz/s.npz", "--count", 10), "there.npz"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_sample(datalens, trained, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    Path("there.npz").write_text("mine")
    Path("full").mkdir()
    Path("full", "thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert words in datalens("sample", trained, *options).refused()
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("there.npz").read_text() == Path("full", "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "nosuch"), "no named data set of that name"),
        (("--data", "digits", "--epochs", 0), "epochs"),
        (("--data", "digits", "--seeds", 0), "seed"),
        (("--data", "digits", "--count", 0), "--count"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_evaluate(datalens, trained, options, words):
    assert words in datalens("evaluate", trained, "--count", 10, *options).refused()


def test_evaluate_on_another_data_set(datalens, trained, tmp_path):
    def against(words, **changes):
        saved(**changes)(tmp_path / "own.npz")
        found = datalens("evaluate", trained, "--data", tmp_path / "own.npz", "--count", 10, "--epochs", 1)
        assert words in found.refused(after_start="test_images" not in changes)
        assert ("all 60 images of" in found.err) == ("test_images" not in changes)

    large = np.zeros((60, 9, 9), np.uint8)
    against("name the same --label, or give the classes these names")
    larger = {"classes": np.arange(10).astype(str), "test_images": large, "test_labels": np.zeros(60, int)}
    against("they must match", images=large, **larger)
    against("they must match", **larger)
    eleven = {"classes": np.arange(11).astype(str), "test_images": arrays()["images"], "test_labels": np.full(60, 10)}
    against("has the class '10'", **eleven)


@pytest.mark.parametrize("name", ["s.npz", "s.parquet", "s"])
def test_evaluate_a_damaged_file(datalens, trained, tmp_path, name):
    path = tmp_path / name
    datalens("sample", trained, "--out", path, "--count", 10).succeeded()
    broken = path / "metadata.csv" if path.is_dir() else path
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    assert str(path) in datalens("evaluate", path, "--data", "digits").refused()


# --- what was tampered with -------------------------------------------------------------------


def edit(path, change):
    """Change the JSON in a file."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    change(fields)
    path.write_text(json.dumps(fields, indent=1, ensure_ascii=False), encoding="utf-8")


def sign_again(certificate):
    """What a forger does who has read the source: the certificate's own hash fits again."""
    from datalens.privacy.ledger import canonical_json

    hashes = certificate["sha256"]
    hashes.pop("certificate")
    hashes["certificate"] = hashlib.sha256(canonical_json(certificate)).hexdigest()


def refutes(datalens, path, words):
    """Exit code 1 and a verdict, or 2 and a line; which file is named either way."""
    result = datalens("verify", path)
    assert result.code in (1, 2), result.out
    assert "Traceback" not in result.err
    if result.code == 1:
        assert result.out.startswith("the certificate does NOT stand")
        assert result.err == ""
    else:
        result.refused()
    assert words in result.out + result.err
    as_json = datalens("verify", path, "--json")
    assert as_json.code == result.code
    assert as_json.json["ok"] is False if as_json.code == 1 else as_json.json["exit_code"] == 2


LEDGER_EDITS = {
    "charge dropped": lambda lines: lines[:-1],
    "first charge dropped": lambda lines: [lines[0], *lines[2:]],
    "charges swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "charge repeated": lambda lines: [*lines, lines[-1]],
    "budget dropped": lambda lines: lines[1:],
    "budget raised": lambda lines: [lines[0].replace(b'"epsilon":1.0', b'"epsilon":2.0'), *lines[1:]],
    "sigma raised": lambda lines: [line.replace(b'"sigma":', b'"sigma":9') for line in lines],
    "space added": lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]],
    "last line torn": lambda lines: [*lines[:-1], lines[-1][:-20]],
    "not JSON": lambda lines: [b"hello\n"],
    "not text": lambda lines: [b"\xff\xfe\n"],
    "nothing": lambda lines: [],
}


@pytest.mark.parametrize("change", LEDGER_EDITS.values(), ids=LEDGER_EDITS.keys())
def test_tampered_ledger(datalens, copy, change):
    path = copy / "release" / "ledger.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    refutes(datalens, copy / "release", "ledger.jsonl")
    refutes(datalens, copy, "ledger.jsonl")


def test_a_runs_tampered_ledger_cannot_be_continued(datalens, copy):
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"sigma":', b'"sigma":9'))
    assert "ledger.jsonl: line 2" in datalens("train", "--out", copy, "--resume").refused()
    refutes(datalens, copy, "ledger")


def test_a_release_older_than_its_run(datalens, small, tmp_path):
    """Charges that the release does not state: until --resume has rewritten it, it does not stand."""
    from datalens.privacy.ledger import Ledger

    run = tmp_path / "run"
    datalens("train", *small, "--steps", 1, "--sigma", 1000, "--out", run).succeeded()
    ledger = Ledger.open(run / "ledger.jsonl")
    ledger.charge(ledger.events[0])
    ledger.close()
    refutes(datalens, run, "--resume")
    datalens("verify", run / "release").succeeded()
    datalens("train", "--out", run, "--resume").succeeded()
    assert datalens("verify", run, "--json").succeeded().json["events"] == 2


CERTIFICATE_EDITS = {
    "smaller budget": (lambda c: c["budget"].update(epsilon=0.1),),
    "smaller delta": (lambda c: c["budget"].update(delta=1e-9),),
    "less spent": (lambda c: c.update(epsilon_spent=0.1),),
    "nothing spent": (lambda c: c.pop("epsilon_spent"),),
    "other relation": (lambda c: c.update(relation="replace-one"),),
    "other accountant": (lambda c: c.update(accountant="rdp"),),
    "not private": (lambda c: c.update(private=False),),
    "other statement": (lambda c: c.update(statement="(0.1, 1e-05)-differentially private"),),
    "other settings": (lambda c: c["settings"].update(teachers=4000),),
    "no hash": (lambda c: c["sha256"].pop("certificate"),),
    "spent in words": (lambda c: c.update(epsilon_spent="little"),),
    "spent in a list": (lambda c: c.update(epsilon_spent=[0.1]),),
    "spent NaN": (lambda c: c.update(epsilon_spent=float("nan")),),
}


@pytest.mark.parametrize(
    ("change", "code", "words"), cases({n: (r[0], 1, "certificate", *r[1:]) for n, r in CERTIFICATE_EDITS.items()})
)
def test_tampered_certificate(datalens, copy, change, code, words):
    edit(copy / "release" / "certificate.json", change)
    refutes(datalens, copy, words)
    if "NaN" not in (copy / "release" / "certificate.json").read_text():  # then it is not even JSON
        assert datalens("verify", copy).code == code


FORGERIES = {
    "smaller budget": (lambda c: c["budget"].update(epsilon=0.1),),
    "less spent": (lambda c: c.update(epsilon_spent=0.1),),
    "other relation": (lambda c: c.update(relation="replace-one"),),
    "not private": (lambda c: c.update(private=False),),
    "other statement": (lambda c: c.update(statement="(0.1, 1e-05)-differentially private"),),
    "other unit": (lambda c: c.update(privacy_unit="one person"),),
    "other noise": (lambda c: c["noise"].update(origin=["seeded"], secure=False),),
    "other number of events": (lambda c: c["mechanism"].update(events=1),),
    "other sigma": (lambda c: c["settings"].update(sigma=1e9),),
}


@pytest.mark.parametrize(
    ("change", "code", "words"), cases({n: (r[0], 1, "certificate", *r[1:]) for n, r in FORGERIES.items()})
)
def test_forged_certificate(datalens, copy, change, code, words):
    """Its own hash fits; but what it says can be compared with the ledger."""

    def forge(certificate):
        change(certificate)
        sign_again(certificate)

    edit(copy / "release" / "certificate.json", forge)
    refutes(datalens, copy / "release", words)


def test_signing_again_without_a_change_stands(datalens, copy):
    edit(copy / "release" / "certificate.json", sign_again)
    datalens("verify", copy).succeeded()


@pytest.mark.parametrize("content", [b"", b"hello", b"[]", b"{}", b"\xff\xfe", b'{"sha256": 1}', b"[" * 100_000])
def test_not_a_certificate(datalens, copy, tmp_path, content):
    (copy / "release" / "certificate.json").write_bytes(content)
    assert "certificate.json" in datalens("verify", copy).refused()
    assert "certificate.json" in datalens("sample", copy, "--out", tmp_path / "s.npz", "--count", 10).refused()
    assert not (tmp_path / "s.npz").exists()


def test_sample_from_a_certificate_with_gaps(datalens, copy, tmp_path):
    edit(copy / "release" / "certificate.json", lambda c: (c.pop("private"), c.pop("statement")))
    assert "certificate" in datalens("sample", copy, "--out", tmp_path / "s.npz", "--count", 10).refused()
    assert not (tmp_path / "s.npz").exists()


def flip(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("change", [flip, lambda c: c[:-1], lambda c: c[:100], lambda c: b""])
def test_tampered_weights(datalens, copy, change):
    path = copy / "release" / "generator.safetensors"
    path.write_bytes(change(path.read_bytes()))
    refutes(datalens, copy, "generator.safetensors")


@pytest.mark.parametrize("change", [flip, lambda c: c[:-1], lambda c: c[:100], lambda c: b"", lambda c: b"x" * 1000])
def test_sample_from_damaged_weights(datalens, copy, tmp_path, change):
    path = copy / "release" / "generator.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert "generator.safetensors" in datalens("sample", copy, "--out", tmp_path / "s.npz", "--count", 10).refused()
    assert not (tmp_path / "s.npz").exists()


@pytest.mark.parametrize("name", ["generator.safetensors", "ledger.jsonl"])
def test_incomplete_release(datalens, copy, name):
    (copy / "release" / name).unlink()
    assert name in datalens("verify", copy).refused()


def test_swapped_release(datalens, small, copy, tmp_path):
    """Weights of one run with the papers of another."""
    datalens("train", *small, "--steps", 3, "--seed", 1, "--out", tmp_path / "other").succeeded()
    shutil.copy(tmp_path / "other" / "release" / "generator.safetensors", copy / "release")
    refutes(datalens, copy, "generator.safetensors")
    line = datalens("sample", copy, "--out", tmp_path / "s.npz", "--count", 10).refused()
    assert "is not the file the certificate was written for" in line and not (tmp_path / "s.npz").exists()


# --- what was damaged -------------------------------------------------------------------------

CONFIGS = {
    "not JSON": (lambda c: b"hello",),
    "not an object": (lambda c: b"[]",),
    "without fields": (lambda c: b"{}",),
    "settings of another version": (lambda c: c["settings"].update(nosuch=1),),
    "settings missing": (lambda c: c["settings"].clear(),),
    "schema missing": (lambda c: c["schema"].clear(),),
    "options missing": (lambda c: c["options"].clear(),),
}


@pytest.mark.parametrize(("change", "code", "words"), cases({n: (r[0], 2, "", *r[1:]) for n, r in CONFIGS.items()}))
def test_resume_with_a_damaged_config(datalens, copy, change, code, words):
    path = copy / "config.json"
    config = json.loads(path.read_text())
    changed = change(config)
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(config).encode())
    before = (copy / "ledger.jsonl").read_bytes()
    datalens("train", "--out", copy, "--resume").refused(code, after_start=True)
    assert (copy / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("size", [0, 5000])
@pytest.mark.parametrize("name", ["latest", "teachers-3-0-19"])
def test_resume_with_a_damaged_checkpoint(datalens, copy, name, size):
    path = copy / "checkpoints" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in datalens("train", "--out", copy, "--resume").refused(after_start=True)


def test_resume_without_the_teachers(datalens, copy):
    path = copy / "checkpoints" / "teachers-3-0-19.safetensors"
    path.unlink()
    assert str(path) in datalens("train", "--out", copy, "--resume").refused(after_start=True)


def test_resume_with_a_damaged_journal(datalens, copy):
    """A value in the journal that is not whole was not written by us: say which, and what to do."""
    (copy / "checkpoints" / "latest.safetensors").unlink()
    path = copy / "journal" / "00000000.release"
    path.write_bytes(b"\x93NUMPY")
    assert str(path) in datalens("train", "--out", copy, "--resume").refused(after_start=True)


def test_resume_with_minus_infinity(datalens, copy):
    assert "clip" in datalens("train", "--out", copy, "--resume", "--clip=-inf").refused()


# --- account ----------------------------------------------------------------------------------

ACCOUNT = {
    "nothing": ((), 2, "--queries"),
    "two of three": (("--k", 200, "--sigma", 5000), 2, "--queries"),
    "too much": (("--k", 200, "--sigma", 5000, "--queries", 9, "--epsilon", 1), 2, "exactly one"),
    "too little": (("--k", 200, "--epsilon", 1), 2, "exactly one"),
    "k 0": (("--k", 0, "--sigma", 5000, "--queries", 9), 2, "--k"),
    "sigma negative": (("--k", 1, "--sigma", -1, "--queries", 9), 2, "--sigma"),
    "sigma NaN": (("--k", 1, "--sigma", "nan", "--queries", 9), 2, "--sigma"),
    "delta 2": (("--k", 1, "--sigma", 1, "--queries", 9, "--delta", 2), 2, "--delta"),
    "epsilon inf": (("--k", 1, "--sigma", 1, "--epsilon", "inf"), 2, "--epsilon"),
    "no k fits": (("--sigma", 1, "--queries", 9, "--epsilon", 1), 2, "not even k = 1"),
    "sigma huge": (("--k", 1, "--sigma", 1e200, "--epsilon", 1), 2, "--sigma"),
}


@pytest.mark.parametrize(("options", "code", "words"), cases(ACCOUNT))
def test_account(datalens, options, code, words):
    assert words in datalens("account", *options).refused(code)


@pytest.mark.parametrize("sigma", [1e-200, 1e-154])
def test_account_for_next_to_no_noise(datalens, sigma):
    """A price beyond all numbers is said to be infinite, or refused; either will do."""
    result = datalens("account", "--k", 1, "--sigma", sigma, "--queries", 100)
    assert "ε = inf" in result.out if result.code == 0 else "--sigma" in result.refused()


def test_data_get(datalens):
    assert "unknown data set" in datalens("data", "get", "nosuch").refused()
