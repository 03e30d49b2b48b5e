"""Commands that fill what the paper's tables lack: random projection, accuracy by step, Table 6, shortfalls."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.data import formats
from datalens.driver import train
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.public.basis import make_basis
from datalens.released.verification import check_release
from datalens.reproduce import harness, projection, runtime, shortfalls, steps, table1, table4, table5
from datalens.reproduce.cells import Cell

FEW: dict[str, Any] = {"data": "digits", "method": "datalens-paper", "network": "compact", "teachers": 8, "steps": 2}


def settings_of(cell: Cell) -> Any:
    assert cell.options is not None
    return make_plan(TrainOptions(out=Path("x"), **cell.options), formats.schema(cell.options["data"]))[1]


def test_random_directions_are_orthonormal_and_always_the_same() -> None:
    basis = make_basis("random", (1, 8, 8), 10)
    assert basis.rows is not None and basis.size == 10
    assert torch.allclose(basis.rows @ basis.rows.T, torch.eye(10), atol=1e-5)
    assert torch.equal(basis.rows, make_basis("random", (1, 8, 8), 10).rows)  # type: ignore[arg-type]
    assert float(basis.rows.abs().max()) < 0.7  # not pixels
    assert basis.inverse(torch.eye(10)).shape == (10, 1, 8, 8)


def test_projection_and_top_k_cost_the_same() -> None:
    """Equally long rows, the printed σ: the same ε buys the same number of steps."""
    for row in ("MNIST ε=1", "Fashion-MNIST ε=10"):
        topk, projected = (
            settings_of(next(c for c in projection.cells(True) if (c.row, c.column) == (row, column)))
            for column in (projection.TOPK, projection.PROJECTED)
        )
        assert projected.basis == "random" and projected.basis_size == topk.k
        same = ("l2_bound", "sensitivity", "sigma", "steps", "beta", "teachers", "batch")
        assert [getattr(projected, name) for name in same] == [getattr(topk, name) for name in same]


def test_a_run_votes_in_random_directions(tmp_path: Path) -> None:
    train(TrainOptions(out=tmp_path / "run", **FEW, basis="random", basis_size=12, compress="sign", beta=0.5))
    assert check_release(tmp_path / "run" / "release").problems == ()
    with pytest.raises(DatalensError, match="cosine coefficients"):
        train(TrainOptions(out=tmp_path / "b", data="digits", warm_start="off", basis="random"))
    with pytest.raises(DatalensError):
        train(TrainOptions(out=tmp_path / "c", data="digits", method="gpate", basis="random"))


def test_peers_as_published_are_runs_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick table, on 8×8 digits."""
    tiny = {"data": "digits", "teachers": 6, "steps": 2}
    every = [
        Cell(row=c.row.replace("MNIST", "digits"), column=c.column, paper=c.paper, options=(c.options or {}) | tiny)
        for c in projection.cells(False)
    ]
    cells = [
        c if "basis_size" not in (c.options or {}) else Cell(
            row=c.row, column=c.column, paper=None, options=(c.options or {}) | {"basis_size": 16}
        )
        for c in every
    ]  # fmt: skip
    table = projection.TABLE
    import dataclasses

    scored = dataclasses.replace(table.scoring(False), count=60, epochs=1, test=50)
    small = dataclasses.replace(table, cells=lambda full: cells, scoring=lambda full: scored)
    monkeypatch.setattr(harness, "tables", lambda: {"projection": small})
    rows = harness.reproduce("projection", full=False, out=tmp_path, device="cpu")["rows"]
    assert [row["column"] for row in rows] == [cell.column for cell in cells]
    assert all(row["ours"] is not None for row in rows)
    assert [row["private"] for row in rows][-2:] == [True, False]
    full = {cell.column: cell.options for cell in projection.cells(True) if cell.options}
    assert full[projection.PRINTED_NOISE]["epsilon"] == 347.0 and math.isinf(full[projection.NO_NOISE]["epsilon"])
    assert full[projection.PRINTED_NOISE]["steps"] == 200  # blocks of 100
    for count, options in projection.FEWER_CRITICS.items():
        settings = settings_of(
            next(c for c in projection.cells(True) if c.column == f"GS-WGAN, {count} discriminators, no noise")
        )
        assert (settings.teachers, settings.teacher_rate, settings.steps) == (count, options["teacher_rate"], 100)
    with pytest.raises(DatalensError, match="--student-rate must be between 0 and 1"):
        make_plan(TrainOptions(out=tmp_path, data="mnist", method="gswgan", student_rate=2.0), formats.schema("mnist"))


def test_accuracy_by_step_is_of_beginnings_of_one_run(tmp_path: Path) -> None:
    for row in ("MNIST ε=1", "Fashion-MNIST ε=10"):
        made = [settings_of(cell) for cell in steps.cells(True) if cell.row == row]
        assert len({(s.sigma, s.beta, s.k, s.teachers, s.student_decay) for s in made}) == 1
        assert [s.steps for s in made] == list(steps.STEPS[10 if row.endswith("10") else 1])
        last = [cell for cell in steps.cells(True) if cell.row == row][-1]
        assert last.run_name in {cell.run_name for cell in table1.cells(True) if cell.options}
    facts = {"row": "MNIST ε=1", "std": 0.1}
    rows = [facts | {"column": f"{count} steps", "ours": count / 10} for count in (1, 2)] + [
        facts | {"column": "3 steps", "ours": None}
    ]
    steps.plot(rows, "by step", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_table_6_has_faces_and_can_be_shown_without_a_run(tmp_path: Path) -> None:
    cells = runtime.cells_of_table6(True)
    assert {(cell["data"], cell["teachers"]) for cell in cells} == {
        *(("mnist", 4000), ("fashion-mnist", 4000)),
        *(("celeba-gender", 6000), ("celeba-hair", 8000)),
    }
    kept = {**cells[0], "seconds_per_epoch": 0.2, "epochs": 7, "machine": "a machine"}
    line = {"cell": f"{cells[0]['data']}-{cells[0]['compress']}"} | kept
    other = {"cell": "mnist-klevel", **cells[1], "seconds_per_epoch": 0.3, "epochs": 7, "machine": "a machine"}
    (tmp_path / "table6.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (other, line)))
    made = harness.reproduce("table6", full=True, out=tmp_path / "out", device="cpu", stored=tmp_path)
    text = Path(made["markdown"]).read_text(encoding="utf-8")
    assert "| mnist | 4000 | D²P-Fed | 492.43 | 0.300 | 1.46 | 1.50 | a machine |" in text
    assert "| celeba-hair | 8000 | FetchSGD | 2620.63 | — | 2.34 | — | not run |" in text


def test_beta_stays_when_the_number_of_teachers_changes() -> None:
    for cell in table4.cells(True):
        if "teachers=" in cell.column and "cosines" not in cell.column:
            assert settings_of(cell).beta == table4.USUAL[cell.row]["beta"]
    for table, count in ((table4, 13), (table5, 2)):
        again = [cell for cell in table.cells(True) if cell.options and cell.options.get("seed") == 1]
        for row in ("MNIST", "Fashion-MNIST"):
            mine = [cell for cell in again if cell.row == row]
            assert len(mine) == len({cell.run_name for cell in mine}) == count
            assert all(cell.paper is None and cell.column.endswith(", second run") for cell in mine)
    for cell in (*table4.cells(True), *table5.cells(True)):
        made = settings_of(cell)
        assert made.decode != "threshold" or made.beta <= 1


def test_shortfalls_are_counted_from_rows() -> None:
    facts: dict[str, Any] = {"column": "DataLens", "marks": []}
    rows = [
        facts | {"row": "a", "paper": 0.7, "ours": 0.6, "marks": ["stale"]},
        facts | {"row": "b", "paper": 0.7, "ours": 0.4},
        facts | {"row": "c", "paper": 0.7, "ours": 0.8},
        facts | {"row": "d", "paper": 0.7, "ours": None, "not_run": "not run: needs a GPU"},
    ]
    line = shortfalls._line("table1", "DataLens", rows)
    assert (line["printed"], line["run"], line["stale"], line["short"], line["where"]) == (4, 3, 1, 2, "b")
    assert (line["mean"], line["most"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert "| 1 | DataLens | 4 | 3 | 1 | 2 | 0.200 | 0.300 | b |" in shortfalls.markdown([line])
    assert shortfalls.markdown([line]).endswith("| 1: a GPU |\n")
    assert shortfalls._line("table8", "x", rows)["empty"] == ["a GPU, or up to half an hour of a core each"]
    assert shortfalls._line("table3", "x", rows)["empty"] == ["a GPU, and the file of Inception-v3"]
    assert shortfalls._line("table4", "x", rows[:1])["empty"] == []
    distance = facts | {"row": "a", "paper": 100.0, "ours": 90.0, "measure": "FID"}
    assert shortfalls._line("table12", "x", [distance])["short"] == 0
    assert shortfalls._line("table12", "x", [distance | {"ours": 130.0}])["most"] == 30.0
    assert shortfalls.why("table5", "FetchSGD") != shortfalls.why("table1", "DataLens")
    assert shortfalls.why("table1", "unheard of") == "not known"
    assert np.isfinite(line["mean"])


def test_our_default_is_counted_beside_the_papers_own_method() -> None:
    """The paper has no row of it: where it is worse than what is printed for DataLens, the list says so."""
    rows: list[dict[str, Any]] = [
        {"row": "a", "column": "DataLens", "paper": 4.0, "ours": None, "marks": [], "measure": "IS"},
        {"row": "a", "column": "DataLens", "paper": 90.0, "ours": None, "marks": [], "measure": "FID"},
        {"row": "a", "column": "datalens (ours)", "paper": None, "ours": 3.0, "marks": [], "measure": "IS"},
        {"row": "a", "column": "datalens (ours)", "paper": None, "ours": 95.0, "marks": [], "measure": "FID"},
        {"row": "b", "column": "datalens (ours)", "paper": None, "ours": 3.0, "marks": [], "measure": "IS"},
    ]
    found = shortfalls._default_beside_theirs(rows)
    assert [(row["paper"], row["column"]) for row in found] == [
        (4.0, "datalens (ours), beside DataLens"),
        (90.0, "datalens (ours), beside DataLens"),
    ]
    assert [shortfalls._line("table12", "x", [row])["most"] for row in found] == [1.0, 5.0]
    assert "photographs" in shortfalls.why("table3", "datalens (ours), beside DataLens (IS)")


def test_no_cell_of_a_table_has_a_threshold_above_unanimity() -> None:
    """β follows σ/N where N or the compressor is changed and β is not: those cells state the preset's."""
    for name in ("utility", "table4", "table5", "table7", "projection", "steps"):
        for cell in harness.tables()[name].cells(True):
            options = cell.options or {}
            changed = {"teachers", "sigma", "compress", "steps"} & options.keys()
            if changed and options.get("method") == "datalens-paper":
                settings = settings_of(cell)
                assert settings.decode != "threshold" or settings.beta <= 1, cell.name
