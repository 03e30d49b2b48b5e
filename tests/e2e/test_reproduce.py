"""The harness on a table of our own: cells are runs, finished cells are kept, the paper's figures stand beside."""

import csv
from pathlib import Path

import pytest

from datalens.errors import DatalensError
from datalens.released.verification import check_release
from datalens.reproduce import compared, harness, runtime, table1
from datalens.reproduce.cells import Cell, Scoring, Table
from datalens.reproduce.kept import keep_cell, read_cells


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"data": "digits", "preset": "quick", "teachers": 20, "steps": 2}
    cells = [
        Cell(row="digits ε=1", column="DataLens", paper=0.5, options=tiny),
        Cell(row="digits ε=1", column="ours", paper=None, options=tiny | {"epsilon": 2.0}),
        Cell(row="digits ε=1", column="later", paper=0.25, options=None),
    ]
    table = Table(
        title="A small table",
        cells=lambda full: cells,
        note=lambda full: "Tiny.",
        scoring=lambda full: Scoring(count=100, epochs=1, seeds=1),
    )
    monkeypatch.setattr(harness, "tables", lambda: {"small": table})


def test_cells_are_runs_and_are_kept(small_table: None, tmp_path: Path) -> None:
    result = harness.reproduce("small", full=False, out=tmp_path, device="cpu")
    folder = tmp_path / "small-quick"
    rows = list(csv.DictReader((folder / "small.csv").open(encoding="utf-8")))
    assert [row["column"] for row in rows] == ["DataLens", "ours", "later"]
    assert rows[2]["ours"] == "" and rows[2]["paper"] == "0.25"
    assert float(rows[0]["difference"]) == pytest.approx(float(rows[0]["ours"]) - 0.5, abs=1e-4)
    for run in (folder / "runs").iterdir():
        assert check_release(run / "release").problems == ()
    text = Path(result["markdown"]).read_text(encoding="utf-8")
    assert "0.5000" in text and "add-remove, exact" in text and "not run" in text
    assert Path(result["plot"]).stat().st_size > 1000

    # A finished cell is not run again: its figure is read back, even a doctored one.
    doctored = read_cells(folder / "cells.jsonl")["digits-eps1-datalens"]
    doctored["utility"]["accuracy"] = 0.125
    keep_cell(folder / "cells.jsonl", "digits-eps1-datalens", doctored)
    again = harness.reproduce("small", full=False, out=tmp_path, device="cpu")
    assert again["rows"][0]["ours"] == 0.125


def test_unknown_table_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DatalensError, match="table1"):
        harness.reproduce("table99", full=False, out=tmp_path, device="cpu")
    assert not any(tmp_path.iterdir())


def test_table1_is_the_papers() -> None:
    cells = table1.cells(full=True)
    # Six sets, two budgets and none; on the grey ones also a second stage, and four other kinds of teachers, of which
    # three have runs without noise.
    assert len({cell.name for cell in cells}) == len(cells) == 6 * (1 + 2 * 7) + 2 * (2 * 5 + 3)
    datalens = {cell.row: cell.paper for cell in cells if cell.column == "DataLens" and "∞" not in cell.row}
    stand_in = "Scenes (stand-in for Places365)"
    assert datalens == {
        "MNIST ε=1": 0.7123,
        "MNIST ε=10": 0.8066,
        "Fashion-MNIST ε=1": 0.6478,
        "Fashion-MNIST ε=10": 0.7061,
        "CelebA-Gender ε=1": 0.7058,
        "CelebA-Gender ε=10": 0.7287,
        "CelebA-Hair ε=1": 0.6061,
        "CelebA-Hair ε=10": 0.6224,
        "Places365 ε=1": 0.4313,
        "Places365 ε=10": 0.4875,
        f"{stand_in} ε=1": 0.4313,
        f"{stand_in} ε=10": 0.4875,
    }
    quick = [cell for cell in table1.cells(full=False) if cell.column == "DataLens"]
    few = str(compared.FEW_TEACHERS["teachers"])
    assert all(cell.options is not None and str(cell.options["teachers"]) == few for cell in quick)
    assert f"**{few} compact" in table1.note(full=False)  # the smaller size is said where the figures are


def test_runtime_times_real_runs_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "DATA", "digits")
    monkeypatch.setattr(runtime, "STEPS", 3)
    wanted = [{"network": "spectral", "teachers": 20}, {"network": "compact", "teachers": 4}]
    monkeypatch.setattr(runtime, "cells", lambda full: wanted)
    result = harness.reproduce("runtime", full=False, out=tmp_path, device="cpu")
    assert [row["teachers"] for row in result["rows"]] == [20, 4]
    assert all(0 < row["seconds_per_epoch"] < 60 and row["epochs"] == 2 for row in result["rows"])
    assert all(row["paper"] is None for row in result["rows"])  # the paper's seconds are for the paper's teachers
    assert Path(result["plot"]).stat().st_size > 1000
    assert "| spectral | 20 | — |" in Path(result["markdown"]).read_text(encoding="utf-8")
    for run in (tmp_path / "runtime-quick" / "runs").iterdir():
        assert check_release(run / "release").problems == ()
    monkeypatch.setattr(runtime, "_run", lambda *_: pytest.fail("a finished cell was run again"))
    assert harness.reproduce("runtime", full=False, out=tmp_path, device="cpu")["rows"] == result["rows"]


def test_runtime_full_is_the_papers() -> None:
    full = runtime.cells(True)
    assert [cell["teachers"] for cell in full if cell["network"] == "paper"] == [2000, 4000]
    assert runtime.PAPER == {2000: 149.92, 4000: 322.17}
