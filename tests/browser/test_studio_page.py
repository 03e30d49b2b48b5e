"""The studio in a real browser: from a folder of DICOM files to a release that verifies; its server is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from datalens.data.studies import draw_studies
from datalens.studio.server import KEY
from tests.browser.test_chromium import COLOURS, _hex, browser, chromium  # noqa: F401 (a fixture)
from tests.e2e.conftest import call
from tests.unit.html_rules import contrast

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SOON, LATER = 60_000, 300_000  # milliseconds


class Started:
    """`datalens studio` as a process, which can be killed."""

    def __init__(self, folder: Path) -> None:
        words = ["studio", str(folder / "data"), "--out", str(folder / "runs"), "--no-browser", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "datalens", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.origin, _, token = json.loads(self.process.stdout.readline())["address"].partition("/#")
        self.key = self.ask("/api/key", {"token": token})["key"]

    def ask(self, path: str, fields: dict[str, Any], key: str = "") -> dict[str, Any]:
        headers = {"Origin": self.origin, "Content-Type": "application/json", KEY: key}
        request = urllib.request.Request(self.origin + path, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def address(self) -> str:
        """Another address that opens the studio once, as its page asks for it."""
        return str(self.ask("/api/address", {}, self.key)["address"])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("studio")
    (made / "data").mkdir()
    draw_studies(made / "data/chest", patients=60, seed=0)
    return made


@pytest.fixture(scope="module")
def studio(folder: Path) -> Iterator[list[Started]]:
    """The studio that runs now is the last one."""
    started = [Started(folder)]
    yield started
    for one in started:
        one.kill()


def opened(browser: Any, address: str, **how: Any) -> tuple[Any, list[str], list[str]]:  # noqa: F811
    """The page, what it complained about, and what it asked of any other address."""
    page = browser.new_context(accept_downloads=True, **how).new_page()
    page.set_default_timeout(SOON)
    said: list[str] = []
    asked: list[str] = []
    origin = address.partition("/#")[0]
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.get_by_role("button", name="chest/").wait_for()
    return page, said, [url for url in asked if not url.startswith((origin, "blob:"))]


def test_from_a_folder_of_dicom_files_to_a_release_that_verifies(
    browser: Any,  # noqa: F811
    folder: Path,
    studio: list[Started],
    tmp_path: Path,
) -> None:
    page, said, asked = opened(browser, studio[-1].address(), viewport=DESK)
    assert page.url.endswith("/")  # the token is gone from the address

    page.get_by_role("button", name="chest/").click()
    page.get_by_role("button", name="findings.csv").click()
    page.get_by_label("Column with the labels").fill("finding")
    page.get_by_label("Classes", exact=True).fill("clear,effusion")
    page.get_by_role("button", name="Look", exact=True).click()
    page.locator("#found-facts").get_by_text("studies").wait_for(timeout=LATER)
    assert "48" in page.locator("#found-facts").inner_text()  # patients, of whom every fifth is for testing
    assert page.locator("#found-classes tr").count() == 2
    page.get_by_role("button", name="Show some of the images").click()
    page.locator("#real").wait_for(timeout=LATER)
    _shot(page, "look")

    page.get_by_label("Size of images").fill("16")
    page.get_by_label("Convert to grey").check()
    page.get_by_label("About how many").fill("50")
    assert page.locator(".choice img").count() == 8
    assert page.evaluate("[...document.querySelectorAll('.known img')].every(i => i.naturalWidth === 280)")
    page.get_by_text("Make a budget").click()
    page.get_by_label("Largest ε of all runs").fill("20")
    page.get_by_role("button", name="Make the budget").click()
    page.locator("#budget-list").get_by_text("reserved by 0 runs").wait_for(timeout=LATER)
    page.get_by_label("ε = 10").check()
    page.get_by_role("button", name="What to expect").click()
    page.locator("#planned-lines").get_by_text("Budget: ε = 10 (δ = 0.00001, add-remove, exact accountant)").wait_for(
        timeout=LATER
    )
    page.locator("#expect").get_by_text("--budget=").wait_for()
    for section, verb in (("#choose", "inspect"), ("#look", "inspect"), ("#declare", "plan"), ("#protect", "plan")):
        assert f"datalens {verb} " in (page.locator(f"{section} .command pre").text_content() or "")
    typed = page.locator('[data-command="train"]').text_content() or ""
    page.get_by_role("button", name="Start").click()
    page.locator('[data-run="first"]').wait_for()

    studio[-1].kill()  # the run does not need it
    studio.append(Started(folder))
    page.get_by_text("The studio does not answer").wait_for()
    page.context.close()
    page, said, more = opened(browser, studio[-1].address(), viewport=DESK)
    run = page.locator('[data-run="first"]')
    run.get_by_text("done", exact=True).wait_for(timeout=LATER)
    done = run.locator("progress.steps-done")
    assert done.get_attribute("value") == done.get_attribute("max")
    assert typed in (run.locator(".command pre").text_content() or "")
    page.locator("#budget-list").get_by_text("reserved by 1 run").wait_for(timeout=LATER)
    run.get_by_role("img", name="this is what a recipient sees").wait_for()
    run.get_by_role("button", name="Show real images beside").click()
    run.get_by_role("img", name="for you alone").wait_for(timeout=LATER)
    assert "Spent ε = " in run.locator(".spent").inner_text()

    run.get_by_role("button", name="Verify").click()
    page.locator("#said").get_by_text("The certificate of first stands: ε = 10").wait_for(timeout=LATER)
    assert "one person" in page.locator("#said").inner_text()
    with page.expect_download(timeout=LATER) as got:
        run.get_by_role("button", name="Download the release").click()
    got.value.save_as(tmp_path / "release.zip")
    with zipfile.ZipFile(tmp_path / "release.zip") as archive:
        archive.extractall(tmp_path)
    assert call("verify", tmp_path / "release", "--json").succeeded().json["unit"].startswith("one person")

    with page.context.expect_page() as new:
        run.get_by_role("button", name="See what a recipient reads").click()
    assert "ε = 10" in new.value.locator("main").inner_text(timeout=LATER)
    assert new.value.evaluate("document.images.length") > 0
    new.value.close()

    run.get_by_label("Images to hand on").fill("30")
    run.get_by_role("button", name="Draw", exact=True).click()
    download = run.get_by_role("button", name="Download 30 images and their papers")
    download.wait_for(timeout=LATER)
    with page.expect_download(timeout=LATER) as got:
        download.click()
    got.value.save_as(tmp_path / "images.zip")
    with zipfile.ZipFile(tmp_path / "images.zip") as archive:
        archive.extractall(tmp_path)
    samples = tmp_path / "first-images"
    assert {"README.md", "croissant.json", "deployment.yaml"} <= {path.name for path in samples.iterdir()}
    assert call("verify", tmp_path / "release", "--samples", samples, "--json").succeeded().json["ok"]
    _shot(page, "run")
    assert (said, asked, more) == ([], [], [])
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "desk"])
def test_it_fits_stands_out_and_is_named(
    browser: Any,  # noqa: F811
    studio: list[Started],
    scheme: str,
    size: str,
) -> None:
    viewport = PHONE if size == "phone" else DESK
    page, said, asked = opened(browser, studio[-1].address(), viewport=viewport, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    found = {tuple(pair) for pair in page.evaluate(COLOURS.replace("'h1,", "'button, label, legend, .hint, h1,"))}
    assert [pair for pair in found if contrast(*map(_hex, pair)) < 4.5] == []
    unnamed = page.evaluate("[...document.querySelectorAll('input')].filter(i => !i.labels.length).map(i => i.name)")
    assert unnamed == [] and page.locator("[aria-live]").count() >= 1
    _shot(page, f"{size}-{scheme}")
    assert (said, asked) == ([], [])
    page.context.close()


def test_it_is_used_by_the_keyboard_alone(browser: Any, studio: list[Started]) -> None:  # noqa: F811
    page, _, _ = opened(browser, studio[-1].address(), viewport=DESK)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # behind the last one
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        outlined = page.evaluate(
            "(e => getComputedStyle(e.closest('.choice') || e).outlineStyle !== 'none')(document.activeElement)"
        )
        assert outlined, seen[-1]
    assert {"chest/", "choose-this", "label", "nominal_size", "delta", "budget", "name", "Start"} <= set(seen)
    page.get_by_role("button", name="chest/").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="findings.csv").wait_for()
    page.get_by_role("button", name="findings.csv").focus()
    page.keyboard.press("Enter")
    assert page.locator("#chosen").inner_text() == "chest/findings.csv"
    assert page.evaluate("document.activeElement.id") == "look-title"  # read out next
    page.get_by_label("ε = 1 strong").focus()
    page.keyboard.press("ArrowDown")
    assert page.get_by_label("ε = 3").is_checked()
    page.context.close()


def test_two_tabs_begin_one_run(browser: Any, studio: list[Started]) -> None:  # noqa: F811
    tabs = [opened(browser, studio[-1].address(), viewport=DESK)[0] for _ in range(2)]
    for tab in tabs:
        tab.get_by_role("button", name="Choose this folder").click()
        tab.get_by_label("About how many").fill("50")
        tab.get_by_label("Name of the run").fill("both")
    for tab in tabs:
        tab.get_by_role("button", name="Start").click()
    tabs[1].get_by_role("alert").get_by_text("there is a run both already").wait_for()
    for tab in tabs:
        tab.locator('[data-run="both"]').wait_for()
        assert tab.locator('[data-run="both"]').count() == 1
        tab.context.close()


class Cached(BaseHTTPRequestHandler):
    """A server that allows caching, which the studio does not."""

    def do_GET(self) -> None:
        content = TRACE * 500
        self.send_response(200)
        headers = {"Content-Type": "text/plain", "Cache-Control": "max-age=3600"}
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


TRACE = bytes(range(33, 127))


def test_the_browser_keeps_no_real_image(browser: Any, studio: list[Started], tmp_path: Path) -> None:  # noqa: F811
    with HTTPServer(("127.0.0.1", 0), Cached) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        context = browser.browser_type.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=chromium(), args=["--no-sandbox"]
        )
        page, seen = context.new_page(), []
        page.on("request", lambda request: seen.append(request.url) if "/api/real" in request.url else None)
        page.goto(f"http://127.0.0.1:{other.server_address[1]}/")  # the control: what may be kept is found
        page.goto(studio[-1].address())
        page.get_by_role("button", name="chest/").click()
        page.get_by_role("button", name="findings.csv").click()
        page.get_by_label("Column with the labels").fill("finding")
        page.get_by_role("button", name="Look", exact=True).click()
        page.get_by_role("button", name="Show some of the images").click(timeout=LATER)
        page.locator("#real-figure").wait_for(timeout=LATER)
        context.close()
        other.shutdown()
    with urllib.request.urlopen(urllib.request.Request(seen[0], headers={KEY: studio[-1].key}), timeout=60) as answer:
        image = answer.read()
    kept = [path.read_bytes() for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert image.startswith(b"\x89PNG") and len(image) > 1000
    assert any(TRACE in content for content in kept)
    assert not [content for content in kept if image[100:140] in content]


@pytest.mark.parametrize("token", ["", "#" + "x" * 43])
def test_a_wrong_token_shows_nothing(browser: Any, studio: list[Started], token: str) -> None:  # noqa: F811
    page = browser.new_context().new_page()
    page.goto(studio[-1].origin + "/" + token)
    page.get_by_role("alert").wait_for(timeout=SOON)
    assert "open the" in page.get_by_role("alert").inner_text()
    assert page.locator("#entries li").count() == 0
    page.context.close()


def test_a_page_of_another_site_can_do_nothing(browser: Any, studio: list[Started], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "other.html").write_text("<p>another site</p>", encoding="utf-8")
    page = browser.new_context().new_page()
    page.goto((tmp_path / "other.html").as_uri())
    tried = page.evaluate(
        """async (origin) => {
          const said = [];
          for (const how of [{}, {method: 'POST', body: '{}'},
              {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}}, {mode: 'no-cors'}])
            try { const r = await fetch(origin + '/api/runs', how); said.push(r.type + (await r.text())); }
            catch { said.push('refused'); }
          return said;
        }""",
        studio[-1].origin,
    )
    assert set(tried) <= {"refused", "opaque"}
    page.context.close()


def _shot(page: Any, name: str) -> None:
    """Keep a picture of the page, if a folder for it is named: for a person to look at."""
    if folder := os.environ.get("DATALENS_SHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)
