"""Pages: the rules they keep, charts, colours; and pages that break a rule must be found."""

import base64
import json
import math
import re
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datalens.errors import DatalensError
from datalens.evaluate import owner_report
from datalens.pages import GENERATOR, charts, check_may_replace, render, said, seal_problem, sealed
from datalens.plans.base import Settings
from datalens.privacy.events import GaussianEvent, SubsampledGaussianEvent, UnknownEvent, unprotected
from datalens.privacy.ledger import Budget, upwards
from datalens.released import report
from tests.unit.html_rules import Page, colours, contrast, problems

CSS = (resources.files("datalens.pages") / "templates" / "style.css").read_text(encoding="utf-8")
ON_PAPERS = ("ink", "soft", "accent", "good", "bad", "s0", "s1", "s2", "s3", "s4", "s5")
PAIRS = [(text, paper) for text in ON_PAPERS for paper in ("paper", "panel")]
PAIRS += [("ink", "code"), ("ink", "good-paper"), ("good", "good-paper"), ("ink", "bad-paper"), ("bad", "bad-paper")]


# --- colours --------------------------------------------------------------------------------------


def test_contrast_is_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#ffffff", "#777777") == contrast("#777777", "#ffffff")


@pytest.mark.parametrize("which", ["light", "dark", "print"])
def test_every_text_can_be_read_on_every_ground(which: str) -> None:
    light, dark, printed = colours(CSS)
    assert set(light) == set(dark) == set(printed)
    found = {"light": light, "dark": dark, "print": printed}[which]
    assert {
        name: contrast(found[name[0]], found[name[1]]) for name in PAIRS if contrast(*map(found.get, name)) < 4.5
    } == {}


def test_only_named_colours_are_used() -> None:
    rest = CSS
    for block in CSS.split(":root")[1:]:
        rest = rest.replace(block.split("}")[0], "")
    assert "#" not in rest


# --- rules ----------------------------------------------------------------------------------------

FINE = (
    '<html lang="en"><head><meta name="viewport" content="w"><title>t</title></head><body><header><h1>a</h1>'
    '<nav><a href="#m">m</a></nav></header><main id="m"><section aria-labelledby="h"><h2 id="h">b</h2>BODY</section>'
    "</main><footer></footer></body></html>"
)


@pytest.mark.parametrize(
    "broken",
    [
        "<img src='data:image/png;base64,AA'>",
        "<img src='https://example.org/a.png' alt='a'>",
        "<img src='a.png' alt='a'>",
        "<a href='#elsewhere'>x</a>",
        "<script>1</script>",
        "<p onclick='x'>x</p>",
        "<style>p { background: url(a.png) }</style>",
        "<style>@import 'a.css'</style>",
        "<svg viewBox='0 0 1 1'></svg>",
        "<table><tbody></tbody></table>",
        "<table><caption>c</caption><thead><tr><th>x</th></tr></thead></table>",
        "<h4>x</h4>",
        "<h1>x</h1>",
        "<section><h3>x</h3></section>",
        "<p id='h'>x</p>",
        "<p>x",
        "<p>None</p>",
        "<nav></nav>",
    ],
)
def test_a_page_that_breaks_a_rule_is_found(broken: str) -> None:
    assert problems(FINE.replace("BODY", "").encode()) == []
    assert problems(FINE.replace("BODY", broken).encode())


def test_what_goes_into_a_page_is_escaped() -> None:
    bad = "<script>alert(1)</script>"
    chart = charts.line_chart(
        [charts.Series(name=bad, points=((0, 1), (1, 2)))], title=bad, x=bad, y=bad, limit=3, limit_name=bad
    )
    assert "<script" not in chart
    content = owner_page({bad: {bad: bad, "list": [{bad: bad}]}})
    assert b"<script" not in content
    assert problems(content) == []


def owner_page(measures: dict[str, Any]) -> bytes:
    return render(
        "owner.html",
        title="t",
        eyebrow="e",
        contents=(),
        facts=[("a", 1.0)],
        charts=[],
        pictures=[],
        shares_head=("release",),
        shares=[],
        by_class=owner_report.by_class(measures, ()),
        headline=owner_report.headline(measures),
        measures=[(name, owner_report.blocks(value)) for name, value in measures.items()],
        audits=[],
        run="r",
    )


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (None, "—"),
        (1.0, "1"),
        (1e-5, "1e-05"),
        (0.12345678, "0.1235"),
        (268435456.0, "2.684e+08"),
        (math.inf, "inf"),
        (7, "7"),
        ([1, 0.5], "1, 0.5"),
        ([], "none"),
        ("a", "a"),
    ],
)
def test_numbers_are_said_as_a_person_writes_them(value: Any, text: str) -> None:
    assert said(value) == text


# --- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 86), (0.2, 0.93), (-3, 5e6), (1e-9, 2e-9), (5, 5), (0, 0), (-2, -2)]
)
def test_ticks_are_round_and_hold_everything(low: float, high: float) -> None:
    marks = charts.ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high
    assert 2 <= len(marks) <= 8
    steps = np.diff(marks)
    assert np.allclose(steps, steps[0]) and steps[0] > 0


def test_a_line_goes_through_its_points() -> None:
    drawn = charts.line_chart([charts.Series(name="a", points=((0, 0), (10, 1)))], title="t", x="x", y="y")
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    low, high = charts.HEIGHT - charts.BOTTOM, charts.TOP
    assert f'd="M{left}.0 {low}.0L{right}.0 {high}.0"' in drawn
    stairs = charts.line_chart(
        [charts.Series(name="a", points=((0, 0), (10, 1)), stairs=True)], title="t", x="x", y="y"
    )
    assert f'd="M{left}.0 {low}.0H{right}.0V{high}.0"' in stairs


def test_a_chart_says_what_it_shows_and_leaves_out_what_is_not_finite() -> None:
    assert charts.line_chart([charts.Series(name="a", points=((0, math.nan),))], title="t", x="x", y="y") == ""
    drawn = charts.line_chart(
        [charts.Series(name="exact", points=((0, 0.0), (3, math.inf), (4, 0.5)))], title="T", x="steps", y="ε"
    )
    assert "T. Line chart of ε against steps. exact: from 0 at 0 to 0.5 at 4." in drawn
    assert "inf" not in drawn.split("<svg class")[1].split("viewBox")[1]


def test_long_numbers_have_room() -> None:
    drawn = charts.line_chart([charts.Series(name="a", points=((0, 0), (1, -1.25e9)))], title="t", x="x", y="y")
    places = [float(at) for at in re.findall(r'<text x="([0-9.]+)" y="[0-9.]+" text-anchor="end">-1\.25e\+09<', drawn)]
    assert places and places[0] > 8 * len("-1.25e+09")


def test_long_series_are_thinned_and_keep_their_ends() -> None:
    assert charts.thinned(5, 10) == [0, 1, 2, 3, 4]
    kept = charts.thinned(100_000, 40)
    assert len(kept) == 40 and (kept[0], kept[-1]) == (0, 99_999)


# --- seals and files ------------------------------------------------------------------------------


def test_a_seal_holds_for_one_content_and_one_certificate() -> None:
    page = sealed(b'<meta name="datalens-certificate" content="' + b"a" * 64 + b'">\n')
    assert seal_problem(page, "a" * 64) is None
    assert "another certificate" in str(seal_problem(page, "b" * 64))
    for broken in (page + b" ", page.replace(b"meta", b"Meta"), page[:-2], sealed(b"no certificate")):
        assert "changed" in str(seal_problem(broken, "a" * 64))


def test_only_pages_of_ours_are_overwritten(tmp_path: Path) -> None:
    check_may_replace(tmp_path / "new.html")
    (tmp_path / "ours.html").write_bytes(b"<html>" + GENERATOR)
    check_may_replace(tmp_path / "ours.html")
    (tmp_path / "thesis.html").write_text("years of work")
    for path in (tmp_path / "thesis.html", tmp_path):
        with pytest.raises(DatalensError, match="--out"):
            check_may_replace(path)


# --- the budget -----------------------------------------------------------------------------------

BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")


def vote(step: int, sigma: float = 100.0) -> GaussianEvent:
    return GaussianEvent(
        row_unit="teacher",
        l2_bound=1.0,
        diameter=2.0,
        relation="add-remove",
        sigma=sigma,
        queries=1,
        step=step,
        noise="operating-system",
    )


def test_the_curves_are_what_the_accountants_say() -> None:
    events = [vote(step) for step in range(100)]
    exact, rdp = report.budget_curves(BUDGET, events)
    assert (exact.name, rdp.name) == ("exact accountant", "rdp accountant")
    for charged, price in exact.points[1:]:
        assert f"{price:.4g}" == upwards(BUDGET.pricing().epsilon(events[: int(charged)], 1e-5), 4)
    assert exact.points[0] == (0.0, 0.0) and exact.points[-1][0] == 100
    assert all(a[1] <= b[1] for a, b in zip(exact.points, rdp.points, strict=True))
    assert [point[1] for point in rdp.points] == sorted(point[1] for point in rdp.points)


def test_an_accountant_that_has_no_price_draws_no_curve() -> None:
    event = SubsampledGaussianEvent(
        row_unit="record",
        l2_bound=1.0,
        rate=0.01,
        relation="add-remove",
        sigma=1.0,
        queries=0,
        step=0,
        noise="operating-system",
        repeats=10,
    )
    budget = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="rdp-improved")
    assert [curve.name for curve in report.budget_curves(budget, [event])] == [
        "rdp-improved accountant",
        "rdp accountant",
    ]
    assert report.grouped([event, event], None) == [  # type: ignore[arg-type]
        ("a sum over a random sample, with Gaussian noise", 20, 1.0, 1.0, 0.01)
    ]


def test_equal_releases_are_one_line() -> None:
    events = [vote(0), vote(1), vote(2, sigma=50.0), unprotected("add-remove"), UnknownEvent(kind="new")]
    lines = report.grouped(events, Settings())
    assert [line[1] for line in lines] == [2, 1, 1, 1]
    assert lines[0] == ("a sum, with Gaussian noise", 2, 2.0, 100.0)
    assert lines[2][0] == "without noise"
    assert "does not know" in lines[3][0]


def test_a_large_picture_is_drawn_smaller(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "samples.png")
    assert (tmp_path / "samples.png").stat().st_size > report.MOST_PICTURE
    found = report.picture_of(tmp_path, ("a",), "noise")
    assert len(found["base64"]) < 4_100_000
    assert found["width"] == found["height"] < 1200
    with Image.open(BytesIO(base64.b64decode(found["base64"]))) as drawn:
        assert drawn.size == (found["width"], found["height"])
    (tmp_path / "samples.png").write_bytes(b"no picture")
    with pytest.raises(DatalensError, match="not a picture"):
        report.picture_of(tmp_path, ("a",), "noise")


# --- the owner's side -----------------------------------------------------------------------------


def test_any_json_becomes_tables() -> None:
    found = owner_report.blocks(
        {
            "a": 1,
            "deep": {"b": [1, 2], "c": {"d": "e"}},
            "rows": [{"x": 1, "long": [[1]]}, {"y": {"z": 2}}],
            "m": [[1, 0], [0, 1]],
        }
    )
    assert [(block["kind"], block["title"]) for block in found] == [
        ("plain", ""),
        ("plain", "deep"),
        ("plain", "deep · c"),
        ("table", "rows"),
        ("matrix", "m"),
    ]
    assert found[3]["rows"] == [[1, None], [None, "z 2"]]
    assert found[4]["names"] == ["0", "1"]


def test_a_confusion_is_by_the_names_of_classes() -> None:
    (found,) = owner_report.blocks({"confusion": [[9, 1], [2, 8]]}, classes=["cat", "dog"])
    assert found["names"] == ["cat", "dog"] and "(row) was classified as each class (column)" in found["title"]
    assert owner_report.blocks({"m": [[1, 2]]}, classes=["cat", "dog"])[0]["names"] == ["0", "1"]


def test_of_one_seed_there_is_no_spread() -> None:
    assert owner_report.with_spread(0.5, 0.0) == owner_report.with_spread(0.5, None) == "0.5"
    assert owner_report.with_spread(0.5, 0.01) == "0.5 ± 0.01"


def test_the_headline_has_the_ceiling_beside_the_accuracy() -> None:
    by = {"classifier": "PaperCNN: conv 3x3 32", "synthetic": 1000, "epochs": 3}
    found = owner_report.headline(
        {
            "note": "for the owner",
            "utility": {"accuracy": 0.71, "accuracy_std": 0.02, "accuracy_real": 0.97, **by},
            "fid": {"fid": 12.5, "fid_real": 1.5, "features": "own"},
            "faithfulness": {"precision": 0.8, "overlap_real": {"precision": 0.9}, "nearness": {"leak": True}},
        }
    )
    assert [line[1:] for line in found] == [
        ("0.71 ± 0.02", "real images: 0.97; PaperCNN, 1000 images, 3 epochs"),
        ("12.5", "real images: 1.5; own"),
        ("0.8", "real images: 0.9"),
        ("FOUND", ""),
    ]
    assert owner_report.headline({"utility": {"accuracy": math.nan}, "fid": "broken", "inception_score": {}}) == []


def test_metrics_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    assert owner_report.read_metrics(tmp_path) == []
    lines = [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0}, {"step": 1, "x": 3.0}]
    text = "\n".join(json.dumps(line) for line in lines) + '\n[]\n{"step": 2, "x'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [line["x"] for line in owner_report.read_metrics(tmp_path)] == [1.0, 3.0]


def test_facts_that_are_damaged_are_an_error(tmp_path: Path) -> None:
    for content in ("[1]", "{", ""):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(DatalensError, match="damaged"):
            owner_report.read_facts(tmp_path, "evaluation.json")


def test_what_is_kept_stays_beside_what_was_there(tmp_path: Path) -> None:
    owner_report.keep(tmp_path, "audit.json", {"a": {"x": 1}})
    owner_report.keep(tmp_path, "audit.json", {"b": {"y": 2}})
    assert owner_report.read_facts(tmp_path, "audit.json") == {"a": {"x": 1}, "b": {"y": 2}}
    assert (tmp_path / "audit.json").stat().st_mode & 0o777 == 0o600


def test_the_text_of_a_page_is_what_a_reader_sees() -> None:
    assert Page("<style>p {}</style><p>a  b</p>").text == "a b"
