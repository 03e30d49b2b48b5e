"""The pages in a real browser: nothing fetched, no errors, nothing wider than a phone, readable in the dark.

Skipped where there is no Chromium or no playwright; `make browser` insists on both.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import SMALL, _quickly, call
from tests.unit.html_rules import contrast

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAGES = ("report", "owner", "compare", "classifier", "seeded")
PHONE, DESK = {"width": 375, "height": 812}, {"width": 1200, "height": 900}


def chromium() -> str | None:
    return os.environ.get("DATALENS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if found is None or sync_playwright is None:
        missing = "no Chromium" if found is None else "no playwright: pip install 'datalens[browser]'"
        if os.environ.get("DATALENS_BROWSER"):
            pytest.fail(f"make browser: {missing}")
        pytest.skip(missing)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of every kind, of small runs."""
    folder = tmp_path_factory.mktemp("pages")
    with _quickly():
        call("train", *SMALL, "--steps", 20, "--out", folder / "a").succeeded()
        call("train", *SMALL, "--steps", 3, "--noise-seed", 1, "--out", folder / "seeded").succeeded()
        call("sgd", "--data", "digits", "--epochs", 0.2, "--accountant", "rdp", "--out", folder / "b").succeeded()
    utility = (
        '{"utility": {"accuracy": 0.7, "accuracy_real": 0.9, "confusion": [[9, 1], [2, 8]], "per_class": [0.9, 0.8]}}'
    )
    (folder / "a" / "evaluation.json").write_text(utility)
    call("report", folder / "a").succeeded()
    call("compare", folder / "a", folder / "b", "--out", folder / "compare.html").succeeded()
    return {
        "report": folder / "a" / "release" / "report.html",
        "owner": folder / "a" / "owner.html",
        "compare": folder / "compare.html",
        "classifier": folder / "b" / "release" / "report.html",
        "seeded": folder / "seeded" / "release" / "report.html",
    }


def opened(browser: Any, path: Path, **how: Any) -> tuple[Any, list[str], list[str]]:
    """The page, what it complained about, and what it asked for besides itself."""
    page = browser.new_page(**how)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    return page, said, [url for url in asked if url != path.as_uri() and not url.startswith("data:")]


@pytest.mark.parametrize("name", PAGES)
def test_no_errors_and_nothing_fetched(browser: Any, pages: dict[str, Path], name: str) -> None:
    page, said, asked = opened(browser, pages[name], viewport=DESK)
    assert (said, asked) == ([], [])
    assert page.locator("main section").count() >= 4
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    page.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    page, _, _ = opened(browser, pages[name], viewport=PHONE, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.close()


SCROLLING = """[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)
  .map(box => `${box.getAttribute('aria-label')}: ${box.scrollWidth} > ${box.clientWidth}`)"""
GERMAN = ("Lungenentzündung", "Pneumothorax, größerer als 2 cm", "Tuberkulose (geschlossene Höhle)", "unauffällig")


def test_tables_with_long_class_names_fit_a_phone(browser: Any, tmp_path: Path) -> None:
    """Private moments have the most parts of a budget; the owner's page has a table of them, and one of confusions."""
    drawn = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), (200, 20, 80, 300))
    images = np.clip(drawn.normal(60 + 40 * labels[:, None, None], 20, (600, 8, 8)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=labels, classes=np.array(GERMAN))
    run = tmp_path / "run"
    call("train", "--data", tmp_path / "x.npz", "--nominal-size", 600, "--epsilon", 10, "--out", run).succeeded()
    confusion = [[183, 0, 0, 17], [0, 0, 0, 25], [2, 0, 10, 113], [1, 0, 0, 399]]
    utility = {"accuracy": 0.7, "accuracy_real": 0.9, "confusion": confusion, "per_class": [0.915, 0, 0.08, 0.9975]}
    (run / "evaluation.json").write_text(json.dumps({"utility": utility}))
    call("report", run).succeeded()
    for path in (run / "owner.html", run / "release" / "report.html"):
        page, _, _ = opened(browser, path, viewport={"width": 390, "height": 844})
        assert page.evaluate(SCROLLING) == []
        page.evaluate("document.querySelector('.scroll').style.width = '4rem'")
        assert len(page.evaluate(SCROLLING)) == 1  # one that is too narrow is found
        page.close()


def test_a_page_that_is_too_wide_would_be_found(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "wide.html").write_text("<div style='width: 600px'>wide</div>")
    page, _, _ = opened(browser, tmp_path / "wide.html", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]
    page.close()


# The colour of each text and of what is behind it, where transparent colours are mixed as the browser mixes them.
COLOURS = """() => {
  const parts = (colour) => {
    const numbers = colour.match(/[\\d.]+(e-?\\d+)?/g).map(Number);
    const scale = colour.startsWith('color(') ? 255 : 1;
    return [...numbers.slice(0, 3).map(one => one * scale), numbers.length > 3 ? numbers[3] : 1];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (e) => {
    const own = e ? parts(getComputedStyle(e).backgroundColor) : [255, 255, 255, 1];
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(e.parentElement));
  };
  const said = (colour) => `rgb(${colour.map(Math.round).join(', ')})`;
  return [...document.querySelectorAll('h1, h2, h3, p, li, dt, dd, td, th, a, summary, pre, caption, text')]
    .filter(e => e.getClientRects().length && e.textContent.trim()).map(e => {
      const style = getComputedStyle(e), behind = ground(e);
      const colour = parts(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
      return [said(over(colour, behind)), said(behind)];
    });
}"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_as_drawn(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    page, _, _ = opened(browser, pages[name], viewport=DESK, color_scheme=scheme)
    found = {tuple(pair) for pair in page.evaluate(COLOURS)}
    assert len(found) >= 3
    assert [pair for pair in found if contrast(*map(_hex, pair)) < 4.5] == []
    grounds = {ground for _, ground in found}
    assert all((sum(_parts(ground)) < 3 * 128) == (scheme == "dark") for ground in grounds)
    page.close()


def _parts(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def _hex(colour: str) -> str:
    return "#" + "".join(f"{part:02x}" for part in _parts(colour))


def test_the_keyboard_reaches_everything(browser: Any, pages: dict[str, Path]) -> None:
    page, _, _ = opened(browser, pages["report"], viewport=DESK)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.tagName"))
    assert {"A", "SUMMARY"} <= seen
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_it_prints(browser: Any, pages: dict[str, Path], name: str) -> None:
    page, _, _ = opened(browser, pages[name], color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


def test_the_stamp_is_the_first_thing_seen(browser: Any, pages: dict[str, Path]) -> None:
    page, _, _ = opened(browser, pages["seeded"], viewport=PHONE)
    stamp = page.get_by_text("NOT PRIVATE", exact=True).first
    assert stamp.is_visible()
    assert stamp.bounding_box()["y"] < PHONE["height"] / 2
    page.close()
