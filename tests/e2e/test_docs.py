"""The documentation does what it says: Python runs, commands parse, links lead somewhere, figures follow.

A block that cannot run here is marked, for the reader too, by ```python title="not run" (or sh), and counted below.
"""

import math
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datalens.cli.mistakes import check
from datalens.cli.train import Train, command_for
from datalens.errors import DatalensError

pytestmark = [pytest.mark.usefixtures("quickly"), pytest.mark.filterwarnings("ignore:Full backward hook is firing")]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = 0  # blocks marked so, over all pages
RUN_WHOLE = ("tutorial.md",)  # pages whose commands are run, in their order with the Python; the others' are parsed
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", flags=re.S | re.M)
Call = Callable[..., Any]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, what is said after it, text) of each fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> list[list[str]]:
    """What follows `datalens` in every line that calls it, itself or by torchrun."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    own = [words[1:] for words in lines if words[:1] == ["datalens"]]
    return own + [words[words.index("datalens") + 1 :] for words in lines if words[:1] == ["torchrun"]]


def has_code(page: Path) -> bool:
    return any(kind == "python" for kind, _, _ in blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=lambda page: page.name)
def test_python_runs_from_top_to_bottom(
    page: Path, datalens: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "a_page"}
    if page.name == "README.md":  # where a reader has it from the commands above
        one_image_of_each(tmp_path / "synthetic.npz")
    for kind, said, text in blocks(page):
        if kind == "python" and not said:
            exec(compile(text, str(page), "exec"), space)
        elif kind == "sh" and page.name in RUN_WHOLE:
            for words in commands(text):
                datalens(*words).succeeded()
    AFTER.get(page.name, lambda space, said, folder: None)(space, capsys.readouterr().out, tmp_path)


def one_image_of_each(path: Path) -> None:
    import numpy as np

    from datalens.released.synthetic import SyntheticDataset

    images = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    SyntheticDataset(images=images, labels=np.arange(2), classes=("a", "b"), certificate={}).to_npz(path)


def after_python(space: dict[str, Any], said: str, folder: Path) -> None:
    assert "(1, 1e-05)-differentially private" in said and "torch.Size([784])" in said
    assert space["arrays"]["images"].shape == (1000, 8, 8, 1) and len(space["table"]) == len(space["rows"]) == 1000
    assert set(space["only"].labels) == {3, 5}
    images, labels = next(iter(space["batches"]))
    assert images.shape == (64, 1, 8, 8) and labels.shape == (64,)


def after_dpsgd(space: dict[str, Any], said: str, folder: Path) -> None:
    assert re.match(r"ε = 0\.99\d* \(δ = 1e-05, add-remove, prv accountant\)", said)


def after_tutorial(space: dict[str, Any], said: str, folder: Path) -> None:
    assert "(2000, 8, 8, 1) (2000,) ['high' 'low' 'middle']" in said
    assert len(list((folder / "synthetic-folder").rglob("*.png"))) == 300
    assert (folder / "runs/scans/owner.html").is_file() and (folder / "runs/scans/release/report.html").is_file()
    assert (folder / "runs/scans/evaluation.json").is_file()


AFTER = {"python.md": after_python, "dpsgd.md": after_dpsgd, "tutorial.md": after_tutorial}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datalens.cli.main import _parse

    for _, said, text in blocks(page):
        for words in commands(text) if not said else []:
            if words[0].startswith("--"):  # --help, --completion
                continue
            try:
                _parse(words)
            except SystemExit:
                pytest.fail(f"{page.name}: datalens {shlex.join(words)}\n{capsys.readouterr().err}")


def test_the_slurm_script_and_the_manifest_of_the_cluster_page() -> None:
    """What users copy: valid, and driver, scheduler and workers meet at one address."""
    yaml = pytest.importorskip("yaml")
    found = {
        kind: [text for k, _, text in blocks(ROOT / "docs" / "cluster.md") if k == kind] for kind in ("sh", "yaml")
    }
    (script,) = [text for text in found["sh"] if "#SBATCH" in text]
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).stderr == ""
    lines = script.replace("\\\n", " ").splitlines()
    assert lines[0] == "#!/bin/sh" and sum(line.startswith("#SBATCH --") for line in lines) >= 4
    (driver,) = (shlex.split(line) for line in lines if line.startswith("datalens train"))
    assert driver[driver.index("--scheduler") + 1] == "tcp://$first:8786" and 'worker "tcp://$first:8786"' in script

    (text,) = found["yaml"]
    things = {(thing["kind"], thing["metadata"]["name"]): thing["spec"] for thing in yaml.safe_load_all(text)}
    assert len(things) == 4
    service = things["Service", "datalens-scheduler"]
    address = f"tcp://datalens-scheduler:{service['ports'][0]['port']}"
    commands_of = {}
    for (kind, name), spec in things.items():
        if kind != "Service":
            (container,) = spec["template"]["spec"]["containers"]
            commands_of[name] = container["command"]
            assert all(isinstance(word, str) for word in container["command"]), name
            labels = spec["template"].get("metadata", {}).get("labels")
            assert kind == "Job" or spec["selector"]["matchLabels"] == labels
    assert service["selector"] == things["Deployment", "datalens-scheduler"]["selector"]["matchLabels"]
    assert address in commands_of["datalens-worker"] and address in commands_of["datalens-train"]
    assert commands_of["datalens-train"][:2] == ["datalens", "train"]
    command, _ = command_for("train", commands_of["datalens-train"][2:], Train)
    check(command, commands_of["datalens-train"][2:], "datalens train")


def test_a_command_that_does_not_exist_would_be_found() -> None:
    from datalens.cli.main import _parse

    (words,) = commands("$ ls\ndatalens train --data mnist --epsilom 1 \\\n  --out a  # a remark\n")
    assert words == ["train", "--data", "mnist", "--epsilom", "1", "--out", "a"]
    with pytest.raises(DatalensError, match="has no option --epsilom: did you mean --epsilon"):
        _parse(words)
    assert commands("torchrun --nproc-per-node=2 -m datalens train --out a") == [["train", "--out", "a"]]


def test_all_that_is_not_run_is_marked_and_counted() -> None:
    said = [said.strip() for page in PAGES for kind, said, _ in blocks(page) if kind in ("python", "sh") and said]
    assert said == ['title="not run"'] * NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """From where a code host shows the page. (Inside docs/ the site's build looks too, at anchors as well.)"""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", re.sub(r"`[^`\n]*`", "", text)):
        assert "://" not in target or page.name == "README.md", f"{page.name}: {target}"
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def missing_tests(text: str) -> list[str]:
    """The tests that a page names and that are not there."""
    named = re.findall(r"`((?:unit|e2e|wiring|fuzz|statistical|golden)/\w+\.py)(?:::(\w+))?`", text)
    gone = []
    for file, name in named:
        path = ROOT / "tests" / file
        if not path.is_file() or (name and f"\ndef {name}(" not in path.read_text(encoding="utf-8")):
            gone.append(f"{file}::{name}")
    return gone


def test_the_tests_that_guard_against_faults_are_there() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert text.count("::test_") > 70 and missing_tests(text) == []
    assert missing_tests("`unit/test_ledger.py::test_nothing` `unit/test_none.py`") == [
        "unit/test_ledger.py::test_nothing",
        "unit/test_none.py::",
    ]


def test_the_stewards_table() -> None:
    """The most a suspicion can become: p·e^ε / (p·e^ε + 1 − p)."""
    text = (ROOT / "docs" / "steward.md").read_text(encoding="utf-8")
    head, _, *rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text, flags=re.M)][:5]
    assert len(rows) == 3
    for before, *after in rows:
        for name, shown in zip(head[1:], after, strict=True):
            odds = float(before[:-1]) / (100 - float(before[:-1])) * math.exp(float(name.removeprefix("ε = ")))
            assert shown == f"{100 * odds / (1 + odds):.1f} %"
    odds = 0.1 / 0.9
    more, less = (100 * f * odds / (1 + f * odds) for f in (math.e, 1 / math.e))
    assert f"{more:.0f} in 100, or {less:.0f} in 100" in text
