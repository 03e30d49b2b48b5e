"""Cells know the code that made them, and a table says what its reader must know beside a figure."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datalens.errors import DatalensError
from datalens.methods import topagg
from datalens.reproduce import cells as cells_file
from datalens.reproduce import harness
from datalens.reproduce.cells import Cell, Scoring, Table, marks, rows_of_accuracies, show_accuracies, stale
from datalens.reproduce.kept import keep_cell, read_cells

CELL = Cell(
    row="digits ε=1", column="DataLens", paper=0.5, options={"data": "digits", "warm_start": "off", "teachers": 20}
)
SCORING = Scoring(count=60, epochs=1, seeds=1)
PAPER = "PaperCNN: conv 3x3 32, conv 3x3 64, FC 64, dropout 0.5"


def result(**more: Any) -> dict[str, Any]:
    score = {"accuracy": 0.8, "classifier": PAPER, "epochs": 1, "synthetic": 60, "seeds": 1, "accuracy_std": 0.0}
    train = {"epsilon": 1.0, "epsilon_spent": 1.0, "delta": 1e-5, "relation": "add-remove", "accountant": "exact"}
    made = {"utility": score, "train": train | {"private": True, "steps": 2, "seconds": 1.0}, "settings": {}}
    return {"options": CELL.asked, "method_version": CELL.version, **made, **more}


def test_a_cell_is_current_stale_or_of_unknown_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CELL.version == topagg.TOPAGG.version
    assert stale(CELL, result(), SCORING) is None
    assert "version 1 of the method" in str(stale(CELL, result(method_version=1), SCORING))
    unknown = result()
    del unknown["method_version"]
    assert "an earlier version" in str(stale(CELL, unknown, SCORING))
    assert stale(CELL, result(), dataclasses.replace(SCORING, epochs=2)) == "scored with other epochs"
    assert stale(CELL, result(), dataclasses.replace(SCORING, classifier="mlp", count=9)) == (
        "scored with other classifier, synthetic"
    )
    before = CELL.run_name
    monkeypatch.setattr(topagg, "TOPAGG", dataclasses.replace(topagg.TOPAGG, version=99))
    assert CELL.version == 99
    assert stale(CELL, result(method_version=2), SCORING) == "made by version 2 of the method, which is at version 99"
    assert CELL.run_name != before  # a run of older code is another run, and is not found


@pytest.mark.parametrize(
    ("confusion", "accuracy", "expected"),
    [
        ([[95, 5], [96, 4]], 0.495, ["one class in 96% of guesses"]),
        ([[50, 50], [45, 55]], 0.525, []),
        ([[0, 100, 0], [50, 50, 0], [0, 50, 50]], 1 / 3, ["one class always has 0.333"]),
        ([[160, 40], [70, 30]], 0.633, ["one class always has 0.667"]),  # under naming the larger class always
        (np.full((10, 10), 10).tolist(), 0.1, ["one class always has 0.100"]),
    ],
)
def test_who_names_one_class_always_is_known_by_a_rule(
    confusion: list[list[int]], accuracy: float, expected: list[str]
) -> None:
    assert marks({"utility": {"accuracy": accuracy, "confusion": confusion}}) == expected


def test_other_marks() -> None:
    assert marks(None) == [] and marks({"utility": {"accuracy": 0.1}}) == []
    assert marks({"stale": "made by an earlier version"}) == ["stale"]
    above = {"settings": {"decode": "threshold", "beta": 2.1}}
    assert marks(above) == ["β above unanimity"]
    assert marks({"settings": {"decode": "linear", "beta": 2.1}}) == marks(
        {"settings": {"decode": "threshold", "beta": 1}}
    )
    [row] = rows_of_accuracies([CELL], {CELL.name: result(stale="x", settings={"decode": "threshold", "beta": 0.7})})
    assert "0.8000 (stale)" in show_accuracies([row]) and "| 0.70 |" in show_accuracies([row])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"data": "mnist", "method": "datalens-paper", "network": "compact"},
            "not run: up to 47 minutes of two cores",
        ),
        ({"data": "mnist", "method": "datalens-paper", "network": "compact", "teachers": 40}, "not run"),
        ({"data": "mnist", "method": "datalens-paper", "preset": "code", "network": "paper"}, "not run: needs a GPU"),
        ({"data": "mnist", "method": "gswgan", "steps": 20}, "not run: needs a GPU"),
        ({"data": "mnist", "method": "gswgan", "preset": "quick"}, "not run"),
        ({"data": "scenes", "method": "dpgan"}, "not run: needs a GPU"),
        ({"data": "scenes", "method": "datalens-paper", "network": "compact"}, "not run: needs --data-folder"),
        ({"data": "celeba-hair", "method": "datalens-paper", "network": "compact"}, "not run: needs a GPU"),
    ],
)
def test_an_empty_cell_says_what_it_needs(options: dict[str, Any], expected: str) -> None:
    cell = Cell(row="x ε=1", column="y", paper=0.5, options=options)
    [row] = rows_of_accuracies([cell], {})
    assert cell.not_run == expected and f"| {expected} |" in show_accuracies([row])


def test_tables_show_stale_cells_and_run_them_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Path] = []

    def run_cell(cell: Cell, scoring: Scoring, run: Path, *_: Any, **__: Any) -> dict[str, Any]:
        ran.append(run)
        return result()

    monkeypatch.setattr(harness, "run_cell", run_cell)
    table = Table(title="One", cells=lambda full: [CELL], note=lambda full: "Tiny.", scoring=lambda full: SCORING)
    monkeypatch.setattr(harness, "tables", lambda: {"one": table})
    how: dict[str, Any] = {"full": False, "out": tmp_path, "device": "cpu"}
    place = tmp_path / "one-quick" / "cells.jsonl"
    keep_cell(place, CELL.name, result(method_version=1))
    shown = harness.reproduce("one", **how)
    assert shown["rows"][0]["marks"] == ["stale"] and not ran
    assert "1 stale cell" in capsys.readouterr().err
    text = Path(shown["markdown"]).read_text(encoding="utf-8")
    assert "(stale)" in text and "Adam (rate 0.001" in text and "60 synthetic images for 1 epochs" in text
    made = harness.reproduce("one", again=True, **how)
    assert made["rows"][0]["marks"] == [] and len(ran) == 1
    assert read_cells(place)[CELL.name]["method_version"] == CELL.version
    assert "stale" not in json.loads(place.read_text(encoding="utf-8"))
    harness.reproduce("one", again=True, **how)
    assert len(ran) == 1
    assert cells_file.MARKED in text


def test_what_the_command_refuses(tmp_path: Path) -> None:
    from datalens.cli.reproduce import Reproduce

    with pytest.raises(DatalensError, match="--from runs nothing"):
        Reproduce(what="table1", stale=True, from_=tmp_path)()
    with pytest.raises(DatalensError, match="tables 8 to 11"):
        harness.reproduce("table1", full=False, out=tmp_path, device="cpu", seeds=2)
