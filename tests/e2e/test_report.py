"""`datalens report` and `compare`: what is on the pages, and what must never be."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from datalens.pages import REPORT
from tests.e2e.conftest import SMALL, call
from tests.unit.html_rules import Page, problems

pytestmark = pytest.mark.usefixtures("quickly")

# Where a run keeps what is private, and a value there that must not come through.
CANARIES = {
    "metrics.jsonl": ('{"step": 0, "time": 1.0, "epsilon_spent": "1", "teacher_loss": 0.31337133}', "0.3134"),
    "evaluation.json": (
        '{"utility": {"accuracy": 0.987654, "note": "canary-evaluation"}, "fid": {"fid": 12.5, "features": "own"}}',
        "canary-evaluation",
    ),
    "audit.json": ('{"attacks": {"lines": ["canary-audit"], "lower_bound": 0.31}}', "canary-audit"),
}


def planted(run: Path) -> list[str]:
    """Canaries in every private file; returns what to look for."""
    for name, (content, _) in CANARIES.items():
        (run / name).write_text(content + "\n")
    config = json.loads((run / "config.json").read_text())
    config["options"]["data"] = "canary-data"
    (run / "config.json").write_text(json.dumps(config))
    return [canary for _, canary in CANARIES.values()] + ["canary", "0.3133", "0.9876", config["data_sha256"]]


def text_of(path: Path) -> str:
    return Page(path.read_text(encoding="utf-8")).text


def test_every_run_ends_in_a_page(trained):
    path = trained / "release" / REPORT
    assert problems(path.read_bytes()) == []
    text = text_of(path)
    certificate = json.loads((trained / "release" / "certificate.json").read_text())
    assert certificate["statement"] in text
    # Plain words first: the terms, with their jargon, come after them.
    first = text[text.index("Strong protection") : text.index("The terms of the guarantee")]
    assert "a suspicion of 10 % can become at most 23.2 %" in first
    assert "accountant" not in first and "add-remove" not in first
    for words in (*certificate["not_covered"], *certificate["declared_public"], certificate["chain"]):
        assert words in text
    assert "the odds move by a factor of at most e ε = 2.719" in text
    assert "be at most 73.11 % sure" in text
    assert "exact accountant" in text and "rdp accountant" in text
    assert "datalens verify release" in text and "from datalens import sample" in text
    assert "NOT PRIVATE" not in text and "do not publish" not in text
    for name, value in certificate["settings"].items():
        assert name.replace("_", " ") in text
        assert not isinstance(value, str) or value in text


def test_an_epsilon_is_never_alone(trained):
    text = text_of(trained / "release" / REPORT)
    for found in re.finditer(r"(?<!e )ε = \d", text):
        near = text[found.start() : found.start() + 160]
        assert "δ = 1e-05" in near and "add-remove" in near, near
        assert "exact" in near, near


def test_the_page_says_how_to_load_the_data_and_that_works(trained, monkeypatch):
    code = next(
        line for line in re.findall(r"<pre><code>(.*?)</code>", _read(trained), re.S) if "import sample" in line
    )
    code = code.replace("&#34;", '"').replace("10_000", "20")
    assert len(code.splitlines()) == 3
    monkeypatch.chdir(trained)
    found: dict = {}
    compile(code, "page", "exec")
    exec(code, found)
    assert len(found["synthetic"].images) == 20


def _read(run: Path) -> str:
    return (run / "release" / REPORT).read_text(encoding="utf-8")


def test_nothing_private_reaches_the_page_that_is_handed_on(copy):
    canaries = planted(copy)
    (copy / "release" / REPORT).unlink()
    result = call("report", copy, "--json").succeeded().json
    assert result == {"report": str(copy / "release" / REPORT), "owner": str(copy / "owner.html"), "private": True}
    page, owner = _read(copy), (copy / "owner.html").read_text(encoding="utf-8")
    assert [canary for canary in canaries if canary in page] == []
    for canary in (
        "0.3134",
        "canary-evaluation",
        "canary-audit",
        "canary-data",
        "0.9877",
    ):  # the search would find them
        assert canary in owner
    assert problems(owner.encode()) == []
    assert "Not covered by ε, do not publish" in text_of(copy / "owner.html")
    assert (copy / "owner.html").stat().st_mode & 0o777 == 0o600
    assert not (copy / "release" / "owner.html").exists()
    call("verify", copy).succeeded()


def test_the_page_is_made_of_the_release_alone(trained, tmp_path):
    """The same bytes with the private side gone, and wherever the folder lies."""
    alone = Path(shutil.copytree(trained / "release", tmp_path / "elsewhere"))
    (alone / REPORT).unlink()
    result = call("report", alone, "--json").succeeded().json
    assert result["owner"] is None
    assert (alone / REPORT).read_bytes() == (trained / "release" / REPORT).read_bytes()
    assert list(tmp_path.iterdir()) == [alone]
    call("verify", alone).succeeded()
    call("sample", alone, "--count", 10, "--out", tmp_path / "a.npz").succeeded()


def test_a_page_elsewhere(copy, tmp_path):
    before = _read(copy)
    out = tmp_path / "page.html"
    call("report", copy, "--out", out).succeeded()
    call("report", copy, "--out", out).succeeded()  # ours: may be written again
    assert out.read_text(encoding="utf-8") == before
    (tmp_path / "mine.html").write_text("mine")
    assert "--out" in call("report", copy, "--out", tmp_path / "mine.html").refused()
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_no_page_for_a_certificate_that_does_not_stand(copy):
    before = _read(copy)
    (copy / "release" / "samples.png").write_bytes(b"another")
    assert "datalens verify" in call("report", copy).refused()
    assert _read(copy) == before
    assert not (copy / "owner.html").exists()
    assert "is not a run" in call("report", copy / "journal").refused()


def test_a_page_of_another_certificate_is_written_anew(copy):
    (copy / "release" / REPORT).write_text("forged")
    assert call("verify", copy).code == 1
    call("report", copy).succeeded()
    call("verify", copy).succeeded()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*SMALL, "--steps", 3, "--noise-seed", 1), "would have been worth"),
        ((*SMALL, "--steps", 3, "--epsilon", "inf"), "Nothing bounds ε here"),
    ],
    ids=["seeded", "infinite"],
)
def test_what_is_not_private_is_stamped(options, words, tmp_path):
    call("train", *options, "--out", tmp_path / "run").succeeded()
    path = tmp_path / "run" / "release" / REPORT
    assert problems(path.read_bytes()) == []
    text = text_of(path)
    assert words in text
    assert text.count("NOT PRIVATE") >= 4
    assert "Do not hand it on" in text and "may be handed on" not in text
    for found in re.finditer(r"ε = (\d|inf)", text):
        assert "NOT PRIVATE" in text[found.start() : found.start() + 100]
    assert "NOT PRIVATE, do not hand on" in call("report", tmp_path / "run").succeeded().out
    assert text_of(tmp_path / "run" / "owner.html").count("NOT PRIVATE") == 2


def test_a_run_from_moments_names_its_releases(tmp_path):
    call("train", "--data", "digits", "--out", tmp_path / "run").succeeded()
    text = text_of(tmp_path / "run" / "release" / REPORT)
    for name in ("norms", "sums", "residual norms", "covariances"):
        assert name in text
    assert problems((tmp_path / "run" / "release" / REPORT).read_bytes()) == []
    call("report", tmp_path / "run").succeeded()
    assert problems((tmp_path / "run" / "owner.html").read_bytes()) == []


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    run = tmp_path_factory.mktemp("sgd") / "run"
    call("sgd", "--data", "digits", "--epochs", 0.1, "--sigma", 2, "--accountant", "rdp", "--out", run).succeeded()
    return run


def test_a_classifier_has_a_page_too(classifier, tmp_path):
    path = classifier / "release" / REPORT
    assert problems(path.read_bytes()) == []
    text = text_of(path)
    assert "A classifier trained on digits" in text and "holds no images" in text
    assert "load_classifier" in text and "from datalens import sample" not in text
    assert Page(_read(classifier)).all("img") == []
    call("verify", classifier).succeeded()
    # An accuracy of this run's own may be a round number that a chart prints too: look for one nothing else can be.
    copy = Path(shutil.copytree(classifier, tmp_path / "run"))
    metrics = json.loads((copy / "metrics.jsonl").read_text())
    (copy / "metrics.jsonl").write_text(json.dumps(metrics | {"accuracy": 0.98765432}) + "\n")
    (copy / "release" / REPORT).unlink()
    call("report", copy).succeeded()
    assert "0.9876" not in _read(copy) and "98.76" not in _read(copy) and "98.77" not in _read(copy)
    assert _read(copy) == path.read_text(encoding="utf-8")
    assert "0.9877" in (copy / "owner.html").read_text(encoding="utf-8")  # the search would find it


def test_the_owner_sees_whether_teachers_agree_and_the_student_heeds_its_labels(copy):
    """By step, each beside what it must be compared with; in a picture, and as numbers in metrics.jsonl."""
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "between_classes" in line] == [0, 1, 2]
    for line in lines:
        assert line["agreement_by_chance"] > 1 / 20**0.5  # of the 20 teachers' votes; noise comes on top
    call("report", copy).succeeded()
    titles = ("Agreement of teachers: 1 if all", "Distance between class means")
    for number, title in enumerate(titles):
        [chart] = [one for one in _charts(copy) if title in one]
        assert ("by chance", "within a class")[number] in chart
    (copy / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "teacher_loss": 1.0}) + "\n" for i in (0, 1)))
    call("report", copy).succeeded()
    assert not [one for one in _charts(copy) if any(title in one for title in titles)]


def _charts(run: Path) -> list[str]:
    page = (run / "owner.html").read_text(encoding="utf-8")
    return re.findall(r"<figure.*?</figure>", page, re.S)


def test_runs_side_by_side(copy, classifier, tmp_path):
    planted(copy)
    out = tmp_path / "compare.html"
    result = call("compare", copy, classifier, "--out", out, "--json").succeeded().json
    assert result["for_the_owner_only"]
    assert [run["accuracy"] is not None for run in result["runs"]] == [True, True]
    assert result["runs"][0]["accuracy"] == 0.987654
    assert (result["runs"][0]["FID, own"], result["runs"][0]["run"]) == (12.5, f"{tmp_path.name}/run")
    assert {"epsilon", "delta", "relation", "accountant", "private"} <= set(result["runs"][0])
    assert problems(out.read_bytes()) == []
    text = text_of(out)
    assert "Not covered by ε, do not publish" in text
    assert "Accuracy against ε: digits" in text
    assert out.stat().st_mode & 0o777 == 0o600
    lines = call("compare", copy, classifier, "--out", out).succeeded().out.splitlines()
    assert lines[1].split()[0] == f"{tmp_path.name}/run" and "for the owner" in lines[3]


def test_what_was_measured_in_other_ways_is_not_joined(copy, tmp_path):
    """Nor what teachers and moments reach."""
    other, moments = tmp_path / "other", tmp_path / "moments"
    shutil.copytree(copy, other)
    call("train", "--data", "digits", "--out", moments).succeeded()
    for run, images in ((copy, 1000), (other, 9000), (moments, 1000)):
        by = {"accuracy": 0.5, "classifier": "PaperCNN: conv", "synthetic": images, "epochs": 3}
        (run / "evaluation.json").write_text(json.dumps({"utility": by}))
    out = tmp_path / "compare.html"
    result = call("compare", copy, other, moments, "--out", out, "--json").succeeded().json
    assert [run["accuracy_by"] for run in result["runs"]] == [
        f"PaperCNN, {n} images, 3 epochs" for n in (1000, 9000, 1000)
    ]
    assert [run["method"].split(", ")[-1] for run in result["runs"]] == ["teachers", "teachers", "moments"]
    assert out.read_text(encoding="utf-8").count('<path class="line s') == 2 * 3  # in the plot, and in its legend


def test_the_owners_comparison_is_not_put_into_a_release(copy):
    assert "is in a release" in call("compare", copy, "--out", copy / "release" / "compare.html").refused()
    assert not (copy / "release" / "compare.html").exists()
    (copy / "release" / "more").mkdir()
    (copy.parent / "link").symlink_to(copy / "release" / "more")
    assert "is in a release" in call("compare", copy, "--out", copy.parent / "link" / "c.html").refused()


def test_releases_side_by_side_hold_nothing_private(trained, tmp_path):
    out = tmp_path / "compare.html"
    result = call("compare", trained / "release", "--out", out, "--json").succeeded().json
    assert not result["for_the_owner_only"]
    assert problems(out.read_bytes()) == []
    assert "do not publish" not in text_of(out)
    (tmp_path / "mine.html").write_text("mine")
    assert "--out" in call("compare", trained, "--out", tmp_path / "mine.html").refused()


def test_comparing_refuses_a_certificate_that_does_not_stand(copy, tmp_path):
    (copy / "release" / "samples.png").write_bytes(b"another")
    assert "does not stand" in call("compare", copy, "--out", tmp_path / "c.html").refused()
    assert not (tmp_path / "c.html").exists()


# --- TensorBoard ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [(*SMALL, "--steps", 3), ("--data", "digits")], ids=["topagg", "moments"])
def test_tensorboard_logs_lie_on_the_private_side(method, tmp_path):
    run = tmp_path / "run"
    call("train", *method, "--out", run, "--tensorboard").succeeded()
    assert [path.stat().st_mode & 0o777 for path in (run / "tensorboard").iterdir()] == [0o600]
    assert (run / "tensorboard").stat().st_mode & 0o777 == 0o700
    assert "tensorboard" not in json.loads((run / "config.json").read_text())["options"]
    assert not [path for path in (run / "release").iterdir() if b"tfevents" in path.read_bytes()]
    call("verify", run).succeeded()
    call("train", "--resume", "--out", run).succeeded()  # with or without: it changes no result


def test_without_tensorboard_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    line = call("train", *SMALL, "--steps", 3, "--out", tmp_path / "run", "--tensorboard").refused()
    assert "datalens[tensorboard]" in line
    assert list(tmp_path.iterdir()) == []
