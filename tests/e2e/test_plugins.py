"""The package of docs/extending.md, built from the page and found by its entry points; and broken ones, caught."""

import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("quickly")
PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
Call = Callable[..., Any]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.S)


def install(folder: Path, project: dict[str, Any], code: str) -> None:
    """What pip leaves in a site folder."""
    name, version = project["name"], project["version"]
    (folder / f"{name.replace('-', '_')}.py").write_text(code, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("site")
    install(folder, tomllib.loads(blocks("toml")[0])["project"], "\n".join(blocks("python")))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("toy_lens", None)


def commands() -> list[list[str]]:
    return [line.split()[1:] for line in blocks("sh")[0].splitlines()]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("line", commands(), ids=lambda line: line[-1])
def test_the_pages_commands(datalens: Call, tmp_path: Path, line: list[str]) -> None:
    out = tmp_path / "run"
    quick = [] if "--method" in line else ["--preset", "quick", "--teachers", "20", "--steps", "2"]
    datalens(*line[:-2], *quick, "--out", out).succeeded()
    datalens("verify", out).succeeded()
    certificate = json.loads((out / "release" / "certificate.json").read_text())
    assert certificate["private"]
    assert any("of toy-lens 1.0: not part of datalens, and not checked" in said for said in certificate["not_covered"])
    assert "of toy-lens 1.0: not part of datalens" in (out / "release" / "CERTIFICATE.md").read_text()
    datalens("sample", out, "--count", 4, "--out", tmp_path / "s.npz").succeeded()
    datalens("train", "--resume", "--out", out).succeeded()

    certificate["settings"].pop("plugins")  # to hide it
    (out / "release" / "certificate.json").write_text(json.dumps(certificate, indent=1, ensure_ascii=False))
    assert datalens("verify", out).code == 1


@pytest.mark.usefixtures("toy")
def test_a_plan_and_a_budget_know_the_method(datalens: Call, tmp_path: Path) -> None:
    plan = datalens("plan", "--data", "digits", "--method", "means", "--json").succeeded().json
    assert plan["parts"][0]["release"] == "1 × class sums"
    datalens("budget", tmp_path / "b", "--epsilon", 1, "--delta", 1e-5).succeeded()
    asked = ("train", "--data", "digits", "--method", "means", "--budget", tmp_path / "b", "--out")
    datalens(*asked, tmp_path / "r").succeeded()
    datalens(*asked, tmp_path / "q").refused(3)


def test_without_the_package(datalens: Call, tmp_path: Path) -> None:
    for option in ("--method", "--compress", "--mechanism"):
        asked = ("train", "--data", "digits", "--warm-start", "off", option, "nosuch", "--out", tmp_path / "x")
        assert f"{option} nosuch is unknown (known: " in datalens(*asked).refused()


def test_packages_that_bring_something_else(datalens: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"compressors": "bad", "mechanisms": "bad", "methods": "bad"}
    entries = {
        f"datalens.{group}": {name: "odd_lens:VALUE", "worse": "odd_lens:nothing"} for group, name in groups.items()
    }
    install(tmp_path, {"name": "odd-lens", "version": "2", "entry-points": entries}, "VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for option in ("--method", "--compress", "--mechanism"):
        asked = ("train", "--data", "digits", "--warm-start", "off", "--out", tmp_path / "x", option)
        assert f"{option} bad of odd-lens 2" in datalens(*asked, "bad").refused()
        assert f"{option} worse of odd-lens 2 cannot be loaded" in datalens(*asked, "worse").refused()


def test_the_page_has_a_package() -> None:
    assert len(blocks("python")) == 3 and textwrap.dedent(blocks("toml")[0]).startswith("[project]")
