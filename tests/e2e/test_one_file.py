"""To add a method takes one file and one line of the registry: the method of docs/extending.md, as if it were ours."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datalens.plans import registry
from tests.e2e.test_plugins import blocks

pytestmark = pytest.mark.usefixtures("quickly")
Call = Callable[..., Any]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(blocks("python")).replace("    sigma: float\n", '    sigma: float\n    makes = "moments"\n', 1)
    (tmp_path / "toy_method.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.METHODS, "means", "toy_method:METHOD")  # the line
    monkeypatch.delitem(sys.modules, "toy_method", raising=False)


@pytest.mark.usefixtures("toy")
def test_everything_knows_the_method(datalens: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = ("--data", "digits", "--method", "means", "--epsilon", 1)
    assert datalens("plan", *asked, "--json").succeeded().json["parts"][0]["release"] == "1 × class sums"
    datalens("budget", tmp_path / "b", "--epsilon", 1, "--delta", 1e-5).succeeded()
    trained = datalens("train", *asked, "--budget", tmp_path / "b", "--out", out, "--json").succeeded().json
    assert (trained["method"], trained["private"], trained["steps"]) == ("means", True, 1)
    datalens("verify", out).succeeded()
    datalens("sample", out, "--count", 10, "--out", tmp_path / "s.npz").succeeded()
    datalens("report", out).succeeded()
    datalens("train", "--resume", "--out", out).succeeded()
    certificate = json.loads((out / "release" / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["settings"]["method"] == "means" and not any(
        "not part of" in s for s in certificate["not_covered"]
    )


@pytest.mark.usefixtures("toy")
def test_its_certificate_can_be_caught_lying(datalens: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    datalens("train", "--data", "digits", "--method", "means", "--out", out).succeeded()
    path = out / "release" / "certificate.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"coordinates": 36', '"coordinates": 35'), encoding="utf-8"
    )
    assert datalens("verify", out).code == 1
