"""The site is built without a warning and fetches nothing; the notebook runs."""

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tools.notebook_page import as_markdown, cells

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


class Loads(HTMLParser):
    """What a browser would fetch by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == LOADING.get(tag)]


def far(address: str) -> bool:
    return re.match(r"(\w+:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        ROOT / "mkdocs.yml",
        "--site-dir",
        out,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file()
    assert (site / NOTEBOOK.name).read_bytes() == NOTEBOOK.read_bytes()
    text = (site / "notebook.html").read_text(encoding="utf-8")
    assert "LogisticRegression" in text and "<!-- cells of" not in text


def test_nothing_is_fetched(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found
        assert not [address for address in loads.found if far(address)], page.name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not [
            found for found in re.findall(r"url\(['\"]?([^)'\"]*)|@import ['\"]([^'\"]*)", text) if far("".join(found))
        ]


def test_the_search_works_from_disk(site: Path) -> None:
    """A page that is opened from disk may not fetch the index, nor start a worker: both are scripts instead."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ") and "Ten minutes with your own folder" in index
    text = (site / "tutorial.html").read_text(encoding="utf-8")
    assert '<script src="javascripts/iframe-worker.js">' in text
    assert "IFrameWorker" in (site / "javascripts" / "iframe-worker.js").read_text(encoding="utf-8")


def test_a_page_that_fetches_would_be_found() -> None:
    loads = Loads()
    loads.feed(
        '<link rel="stylesheet" href="//fonts.example/x.css"><script src="a.js"></script><img src="https://b/c.png">'
    )
    assert [far(address) for address in loads.found] == [True, False, True]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import datalens

    text = (site / "api.html").read_text(encoding="utf-8")
    for name in datalens.__all__:
        assert f'id="datalens.{name}"' in text, name
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)  # examples are code, not quotations


def run(notebook: Path) -> list[Any]:
    """The value of each code cell's last line, as a notebook shows it; and last all that was defined.

    In this process: a kernel takes seconds to start and dozens of packages to install, and would run the same lines, as
    there are no magics in them.
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for kind, text in cells(notebook):
        if kind == "code":
            body = ast.parse(text).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), notebook.name, "exec"), space)
            values.append(last and eval(compile(ast.Expression(last.value), notebook.name, "eval"), space))
    return [*values, space]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    _, _, _, problems, accuracy, _, space = run(NOTEBOOK)
    space["figure"].savefig(tmp_path / "picture.png")
    assert problems == () and accuracy > 0.7
    assert "(3, 1e-05)-differentially private" in capsys.readouterr().out
    assert (tmp_path / "synthetic.npz").is_file() and (tmp_path / "release" / "report.html").is_file()


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) == 6
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert as_markdown(NOTEBOOK).count("```python\n") == len(code)
