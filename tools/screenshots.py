"""Draws the pictures of the studio in the documentation: a Chromium goes the whole way, on drawn DICOM files.

    python tools/screenshots.py [--patients 1000] [--out docs/pictures]

It needs playwright and Chromium, as `make browser` does, and some minutes for the run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from datalens.data.studies import draw_studies

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
LATER = 1_800_000  # milliseconds
WIDEST = 1000  # pixels of a picture


class Pictures:
    """Writes the pictures of one page."""

    def __init__(self, page: Any, out: Path) -> None:
        self.page = page
        self.out = out

    def take(self, name: str, *sections: str) -> None:
        """Write a picture of these sections of the page, which stand one below the other."""
        self.page.evaluate(
            "document.querySelectorAll('.banner, nav.steps').forEach(e => e.style.visibility = 'hidden')"
        )
        boxes = [self.page.locator(section).bounding_box() for section in sections]
        top, left = boxes[0]["y"] - 8, max(0, boxes[0]["x"] - 8)
        clip = {
            "x": left,
            "y": top + self.page.evaluate("scrollY"),
            "width": min(boxes[0]["width"] + 16, self.page.viewport_size["width"] - left),
            "height": boxes[-1]["y"] + boxes[-1]["height"] - top + 8,
        }
        path = self.out / f"studio-{name}.png"
        self.page.screenshot(path=path, full_page=True, clip=clip)
        self._banners("")
        print(path, f"{path.stat().st_size:,} bytes", flush=True)

    def _banners(self, visibility: str) -> None:
        """Hide what sticks to the window, or show it again."""
        script = "how => document.querySelectorAll('.banner, nav.steps').forEach(e => { e.style.visibility = how; })"
        self.page.evaluate(script, visibility)


def walk(browser: Any, address: str, out: Path, patients: int) -> None:
    """Go from a folder of DICOM files to a release, and write a picture of every step."""
    page = browser.new_context(viewport=DESK, color_scheme="light").new_page()
    page.set_default_timeout(LATER)
    pictures = Pictures(page, out)
    page.goto(address)
    page.get_by_role("button", name="chest/").click()
    page.get_by_role("button", name="findings.csv").click()
    page.get_by_label("Column with the labels").fill("finding")
    page.get_by_label("Classes", exact=True).fill("clear,effusion")
    page.get_by_role("button", name="Look", exact=True).click()
    page.locator("#found-facts").get_by_text("studies").wait_for()
    page.get_by_label("Size of images").fill("32")
    page.get_by_label("Convert to grey").check()
    page.get_by_label("About how many").fill(str(patients * 4 // 5))
    page.get_by_role("button", name="Show some of the images").click()
    page.locator("#real-figure").wait_for()
    page.locator("#look .command").get_by_text("--grayscale").wait_for()
    pictures.take("look", "#choose", "#look")
    page.locator("#new-budget summary").click()
    page.get_by_role("button", name="Make the budget").click()
    page.locator("#budget-list").get_by_text("left for one more run").wait_for()
    page.get_by_label("ε = 3").check()
    page.locator("#protect .command").get_by_text("--epsilon=3.0").wait_for()
    pictures.take("protect", "#declare", "#protect")
    page.get_by_role("button", name="What to expect").click()
    page.locator("#planned-lines").get_by_text("Budget").wait_for()
    pictures.take("expect", "#expect")
    page.get_by_role("button", name="Start").click()
    run = page.locator('[data-run="first"]')
    first, done = run.get_by_text("First images"), run.get_by_text("done", exact=True)
    first.or_(done).wait_for()
    if first.is_visible():  # a small set may be done before anybody sees them
        pictures.take("watch", "#runs")
    done.wait_for()
    run.get_by_role("button", name="Show real images beside").click()
    run.get_by_text("Real: for you alone").wait_for()
    run.get_by_role("button", name="Measure").click()
    run.get_by_text("a classifier that learned").wait_for()
    run.get_by_role("button", name="Draw", exact=True).click()
    run.get_by_role("button", name="and their papers").wait_for()
    run.get_by_role("button", name="Show real images beside").click()
    run.get_by_text("Real: for you alone").wait_for()
    pictures.take("run", "#runs")
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(500)
    pictures.take("phone", "#runs")


def main() -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patients", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    chosen = parser.parse_args()
    browser_path = os.environ.get("DATALENS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder) / "hospital", Path(folder) / "runs"
        data.mkdir()
        draw_studies(data / "chest", patients=chosen.patients, seed=0)
        words = [sys.executable, "-m", "datalens", "studio", str(data), "--out", str(runs), "--no-browser", "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as studio, sync_playwright() as playwright:
            try:
                assert studio.stdout is not None
                address = json.loads(studio.stdout.readline())["address"]
                browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
                walk(browser, address, chosen.out, chosen.patients)
                browser.close()
            finally:
                studio.terminate()
    for path in chosen.out.glob("studio-*.png"):
        with Image.open(path) as image:
            small = image.convert("RGB")
        small.thumbnail((WIDEST, 10_000))
        small.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
