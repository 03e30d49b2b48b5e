"""`datalens reproduce figure2` on a small set: the run under it is an ordinary one; every output says what it is."""

import csv
from pathlib import Path
from typing import Any

import pytest

from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.privacy import bounds
from datalens.privacy.ledger import read_ledger
from datalens.reproduce import figure2
from datalens.reproduce.figure2 import Panel
from datalens.reproduce.kept import keep_cell, read_cells

pytestmark = pytest.mark.usefixtures("quickly")

SMALL: dict[str, Any] = {"method": "datalens-paper", "network": "compact", "noise": "gaussian"}
SMALL |= {"teachers": 40, "steps": 2, "batch": 3, "k": 4}


@pytest.fixture
def small_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Digits where the noise drowns the votes, digits where it does not, and a set that is not there."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("DATALENS_HOME", str(home))
    drowned = SMALL | {"beta": 0.5, "sigma": 100.0}
    clear = SMALL | {"beta": 1.0, "sigma": 2.0, "epsilon": 1e5}  # 40 teachers do not all agree: ḡ* = 0, almost surely
    noisy = Panel(name="Digits, noisy", data="digits", options=drowned, how="tiny")
    missing = Panel(name="CelebA-Hair", data="celeba-hair", options=SMALL, how="tiny")
    quiet = Panel(name="Digits, clear", data="digits", options=clear, how="tiny")
    monkeypatch.setattr(figure2, "panels", lambda full: [quiet] if full else [noisy, missing])


def test_votes_drowned_in_noise_are_inapplicable(small_figure: None, datalens: Any, tmp_path: Path) -> None:
    result = datalens("reproduce", "figure2", "--out", tmp_path / "out", "--device", "cpu", "--json").succeeded().json
    assert result["warning"] == bounds.WARNING and result["relation"] == "add-remove" and result["delta"] == 1e-5
    assert "CelebA-Hair: left out" in result["left_out"][0]
    row, end = result["rows"][0], result["ends"][0]
    assert row["queries"] == 6 and row["applicable"] == 0
    assert end["data_dependent"] is None and end["inapplicable"] == 6 and end["smaller_is_data_dependent"] == 0
    assert end["smaller_of_both"] == pytest.approx(end["rdp"])
    text = Path(result["markdown"]).read_text(encoding="utf-8")
    assert bounds.WARNING in text and "| inapplicable |" in text and "CelebA-Hair: left out" in text
    others = result["whatever_the_votes"]
    assert [(o["name"], o["settings"]["sigma"], o["settings"]["d"]) for o in others] == [
        ("Fashion-MNIST", 5000.0, 784),
        ("CelebA-Gender", 9000.0, 12288),
    ]
    assert all(o["log10_most_agreement"] < -200 < -3 < o["log10_agreement_to_apply"] for o in others)
    assert text.count("No votes whatever") == 3
    with open(result["csv"], encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["data_dependent"] for line in lines} == {"inapplicable"}
    assert {(line["delta"], line["warning"]) for line in lines} == {("1e-05", bounds.WARNING)}
    assert Path(result["plot"]).stat().st_size > 10_000
    left = {path.name for path in (tmp_path / "out" / "figure2-quick").iterdir()}
    assert left == {"cells.jsonl", "figure2.json", "figure2.csv", "figure2.md", "figure2.png"}  # no votes, no teachers

    # A finished panel is not run again.
    cells = tmp_path / "out" / "figure2-quick" / "cells.jsonl"
    keep_cell(cells, "digits", read_cells(cells)["digits"] | {"applicable": 3})
    again = figure2.reproduce(full=False, out=tmp_path / "out", device="cpu")
    assert again["rows"][0]["applicable"] == 3


def test_where_an_outcome_is_likely_the_bound_is_drawn(small_figure: None, tmp_path: Path) -> None:
    result = figure2.reproduce(full=True, out=tmp_path, device="cpu")
    row, end = result["rows"][0], result["ends"][0]
    assert row["applicable"] == 6
    assert end["data_dependent"] is not None and end["inapplicable"] == 0
    assert end["smaller_is_data_dependent"] == 6 and end["smaller_of_both"] < end["rdp"]


def test_who_looks_changes_nothing(tmp_path: Path) -> None:
    """The ledger of a watched run is, byte for byte, that of one nobody watches, whatever the watcher makes of it."""
    from datalens.driver import train

    def look_with(settings: TopAggSettings) -> Any:
        return lambda votes: bounds.analyse(votes, k=1, threshold=1e9, sigma=1e-3)  # "costs nothing"

    given: dict[str, Any] = SMALL | {"data": "digits", "sigma": 100.0, "beta": 0.5, "device": "cpu"}
    figure2.watched_run(TrainOptions(out=tmp_path / "watched", **given), look_with)
    train(TrainOptions(out=tmp_path / "plain", **given))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("watched", "plain")]
    assert ledgers[0] == ledgers[1]
    budget, events = read_ledger(tmp_path / "watched" / "ledger.jsonl")
    assert len(events) == 2 and budget.epsilon == 1.0


def test_votes_that_are_not_thresholded_are_refused(tmp_path: Path) -> None:
    options = TrainOptions(out=tmp_path / "run", data="digits", preset="quick", device="cpu")
    with pytest.raises(ValueError, match="thresholded"):
        figure2.watched_run(options, lambda settings: lambda votes: None)
    assert not (tmp_path / "run").exists()


def test_the_panels_are_the_papers_and_fashion() -> None:
    for full in (True, False):
        panels = figure2.panels(full)
        assert [panel.name for panel in panels if panel.data != "fashion-mnist"] == ["MNIST", "CelebA-Hair"]
        assert len(panels) == 2 + full
        assert all(panel.options["epsilon"] == 1.0 and panel.options["delta"] == 1e-5 for panel in panels)
        assert full or all("quick" in panel.how for panel in panels)
