"""Every table and figure: what is printed in one agrees with the others, cells can be planned, run, shared and kept."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datalens import driver
from datalens.cli.main import main
from datalens.data import formats
from datalens.errors import DatalensError
from datalens.methods import topagg
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.reproduce import figure4, harness, output, quality, table1, table2, table4, table5, table7
from datalens.reproduce.cells import Cell, Scoring, Table
from datalens.reproduce.compared import METHODS, PRINTED
from datalens.reproduce.kept import keep_cell, kept, read_cells

DIGITS = {"data": "digits", "method": "datalens", "warm_start": "off", "teachers": 20, "steps": 2}
DIGITS_PNG = "digits-eps1-datalens.png"


def test_all_of_the_paper_is_there() -> None:
    tables, figures = [f"table{n}" for n in range(1, 13)], [f"figure{n}" for n in (2, 3, 4)]
    assert list(harness.listing())[:15] == tables + figures
    assert {"utility", "theory"} <= set(harness.listing())
    assert all(title.strip() for title in harness.listing().values())


# --- what is printed ------------------------------------------------------------------------------------------------


def datalens_of(epsilon: int) -> dict[str, float]:
    return {data: values[-1] for (data, e), values in table1.PAPER.items() if e == epsilon}


def test_tables_of_the_paper_agree_where_they_print_the_same_cell() -> None:
    for data in ("MNIST", "Fashion-MNIST"):
        of_table1, of_table2 = table1.PAPER[data, 1], table2.PAPER[data, 1.0]
        different = [m for m, a, b in zip(PRINTED, of_table1, of_table2, strict=True) if a != b]
        assert different == (["DP-GAN"] if data == "MNIST" else [])  # 0.4036 and 0.4046: both are printed
        assert table4.PAPER[data]["beta"][0.0] == table7.PAPER[data][3]  # no threshold
    for data, printed in datalens_of(1).items():
        if data in table4.PAPER:
            usual = table4.USUAL[data]
            assert {table4.PAPER[data][name][usual[name]] for name in ("k", "teachers", "beta")} == {printed}
            assert table7.PAPER[data][0] == table5.PAPER[data]["TopAgg"] == printed
    assert {len(values) for values in table1.PAPER.values()} == {len(PRINTED)} == {5}
    assert len(table2.PAPER) == 10


def test_the_usual_is_what_the_preset_has() -> None:
    for data, usual in table4.USUAL.items():
        options = {"data": data.lower(), "epsilon": 1.0, "delta": 1e-5, "method": "datalens-paper"}
        settings = make_plan(TrainOptions(out=Path("x"), **options), formats.schema(data.lower()))[1].as_dict()  # type: ignore[arg-type]
        assert {name: settings[name] for name in usual} == usual


@pytest.mark.parametrize("full", [False, True])
def test_cells_can_be_planned(full: bool) -> None:
    """One of each kind; planning is all that a wrong option needs to be found."""
    kinds: dict[Any, Cell] = {}
    for table in harness.tables().values():
        cells = table.cells(full)
        assert len({cell.name for cell in cells}) == len(cells)
        assert all(cell.name.isascii() for cell in cells)
        for cell in cells:
            assert cell.options is not None
            data = cell.options["data"]
            if data in ("mnist", "celeba-hair", "scenes") and cell.options.get("method") not in ("gswgan", "dpgan"):
                kinds.setdefault((data, cell.options.get("method"), *sorted(cell.options)), cell)
    assert len(kinds) > (35 if full else 15)
    for cell in kinds.values():
        assert cell.options is not None
        make_plan(TrainOptions(out=Path("x"), **cell.options), formats.schema(cell.options["data"]))


def test_every_method_of_table_1_is_built() -> None:
    cells = table1.cells(full=True)
    assert all(cell.options is not None for cell in cells)
    assert {cell.column for cell in cells} == set(METHODS)
    ceiling, *without_noise = [c for c in cells if c.row == "MNIST ε=∞"]
    assert all(c.column.startswith("DataLens") and c.paper is None for c in without_noise)
    assert (ceiling.name, ceiling.paper) == ("mnist-epsinf-dc-gan", 0.9653)
    assert ceiling.options is not None and math.isinf(ceiling.options["epsilon"])
    assert ceiling.asked is not None and ceiling.asked["epsilon"] == "inf"
    json.dumps(ceiling.asked, allow_nan=False)


def test_one_parameter_at_a_time() -> None:
    """A cell of tables 4, 5 and 7 differs from Table 1's in one thing, and the unchanged one is Table 1's run."""
    base = {c.row.split(" ")[0]: c for c in table1.cells(True) if c.column == "DataLens" and c.row.endswith("ε=1")}
    for module in (table4, table5, table7):
        for cell in module.cells(True):
            if "cosines" in cell.column:
                continue
            usual = base[cell.row]
            assert cell.options is not None and usual.options is not None
            changed = {k: v for k, v in cell.options.items() if usual.options.get(k) != v}
            assert len(changed.keys() - {"beta", "seed"}) <= 1
            if cell.paper == usual.paper:
                assert cell.run_name == usual.run_name or changed.get("compress") == "topk-sign"


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """With a small generator; what was really trained."""
    make, train = topagg.dcgan_architecture, driver.train
    narrow: dict[str, Any] = {"dense": 32, "widths": (8, 8)}
    monkeypatch.setattr(topagg, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
    done: list[Path] = []

    def counted(options: TrainOptions) -> dict[str, Any]:
        done.append(options.out)
        return train(options)

    monkeypatch.setattr(driver, "train", counted)
    return done


def two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        Cell(row="digits ε=1", column="DataLens", paper=0.5, options=DIGITS),
        Cell(row="digits ε=2", column="DataLens", paper=0.6, options=DIGITS | {"epsilon": 2.0}),
    ]
    how: dict[str, Any] = {"cells": lambda full: cells, "note": lambda full: "Tiny.", "shares_runs": True}
    scored = Scoring(count=60, epochs=1, seeds=1, test=50)
    first = Table(title="One", scoring=lambda full: scored, **how)
    grids = Table(
        title="Pictures", rows=figure4.rows, markdown=figure4.markdown, plot=figure4.plot,
        scoring=lambda full: dataclasses.replace(scored, measure=figure4.score), **how,
    )  # fmt: skip
    monkeypatch.setattr(harness, "tables", lambda: {"one": first, "pictures": grids})


def test_tables_share_runs_and_cells_are_chosen_and_kept(
    trainings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_tables(monkeypatch)
    how: dict[str, Any] = {"full": False, "out": tmp_path, "device": "cpu"}
    made = harness.reproduce("one", only="*-eps1-*", **how)
    assert len(trainings) == 1
    assert [row["ours"] is None for row in made["rows"]] == [False, True]
    assert made["rows"][0]["difference"] == pytest.approx(made["rows"][0]["ours"] - 0.5, abs=1e-4)
    assert "| digits ε=2 | DataLens | 0.6000 | — | — | — | — | not run |" in Path(made["markdown"]).read_text("utf-8")
    first = read_cells(tmp_path / "one-quick" / "cells.jsonl")["digits-eps1-datalens"]
    assert first["utility"]["test"] == 50

    pictures = harness.reproduce("pictures", **how)
    assert len(trainings) == 2  # ε = 2 alone: the other run was there
    drawn = [Image.open(row["picture"]) for row in pictures["rows"]]
    assert [picture.size for picture in drawn] == [(10 * 9 + 1, 10 * 9 + 1)] * 2  # a row of ten for each of ten digits
    assert np.asarray(drawn[0]).std() > 0
    assert Path(pictures["plot"]).stat().st_size > 1000
    cell = read_cells(tmp_path / "pictures-quick" / "cells.jsonl")["digits-eps1-datalens"]
    assert cell["certificate_sha256"] == first["certificate_sha256"]
    assert cell["train"]["seconds"] == first["train"]["seconds"]  # of the run, not of finding it
    assert cell["picture"] == pictures["rows"][0]["picture"] == str(tmp_path / "pictures-quick/cells" / DIGITS_PNG)
    assert DIGITS_PNG not in (tmp_path / "pictures-quick" / "cells.jsonl").read_text("utf-8")

    # From kept cells alone: nothing is run, and what is not there is said.
    keep_cell(tmp_path / "kept" / "one.jsonl", "digits-eps1-datalens", first)
    asked = ["reproduce", "one", "--full", "--from", str(tmp_path / "kept"), "--out", str(tmp_path / "elsewhere")]
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 0
    assert "| digits ε=2 | DataLens | 0.6000 | — | — | — | — | not run |" in capsys.readouterr().out
    assert len(trainings) == 2
    first["options"]["teachers"] = 21  # asked for in another way: not this cell
    keep_cell(tmp_path / "kept" / "one.jsonl", "digits-eps1-datalens", first)
    again = harness.reproduce("one", stored=tmp_path / "kept", **how | {"out": tmp_path / "elsewhere"})
    assert [row["ours"] for row in again["rows"]] == [None, None]


def test_a_run_that_was_changed_is_not_believed(
    trainings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tables(monkeypatch)
    how: dict[str, Any] = {"full": False, "out": tmp_path, "device": "cpu", "only": "*-eps1-*"}
    harness.reproduce("pictures", **how)
    [run] = (tmp_path / "runs-quick").iterdir()
    weights = next((run / "release").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    harness.reproduce("one", **how)
    assert len(trainings) == 2  # gone on with, and released again


def test_quality_of_a_cell(trainings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(quality, "STEPS", 60)
    monkeypatch.setitem(quality.PAPER, ("digits", 1), ((1.0,) * 5, (400.0,) * 5))
    monkeypatch.setitem(quality.REAL, "digits", (9.0, 1.0))
    cell = Cell(row="digits ε=1", column="DataLens", paper=1.0, options=DIGITS)

    def small(table: Table) -> Table:
        scored = dataclasses.replace(table.scoring(False), count=200)
        return dataclasses.replace(table, cells=lambda full: [cell], scoring=lambda full: scored)

    tables = {"table12": small(quality.TABLE12), "table3": small(quality.TABLE3)}
    monkeypatch.setattr(harness, "tables", lambda: tables)
    how: dict[str, Any] = {"full": False, "out": tmp_path, "device": "cpu"}
    scores = harness.reproduce("table3", **how)["rows"]
    assert "fid" not in read_cells(tmp_path / "table12-quick" / "cells.jsonl")["digits-eps1-datalens"]
    rows = harness.reproduce("table12", **how)["rows"]
    assert [(r["measure"], r["column"]) for r in rows] == [
        *(("IS", "Real data"), ("IS", "DataLens")),
        *(("FID", "Real data"), ("FID", "DataLens")),
    ]
    assert 1 <= rows[1]["ours"] < rows[0]["ours"] < 10  # a generator of two steps against real digits
    assert rows[2]["ours"] < rows[3]["ours"]
    assert rows[1]["difference"] == pytest.approx(rows[1]["ours"] - 1.0, abs=1e-3)
    assert rows[3]["difference"] is None and "own" in rows[3]["by"]  # other features: not to be compared
    text = (tmp_path / "table12-quick" / "table12.md").read_text("utf-8")
    assert "digits, FID: own" in text and "not covered by ε" in text
    assert len(trainings) == 1 and scores == rows[:2]  # the same run, to which distances were added
    again = harness.reproduce("table3", **how)
    assert again["rows"] == rows[:2]


def test_faces_are_on_no_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import image

    shown: list[str] = []
    monkeypatch.setattr(image, "imread", lambda path: shown.append(Path(path).name) or np.zeros((4, 4)))
    facts = {"column": "DataLens", "delta": 1e-5, "relation": "add-remove", "accountant": "exact"}
    rows = [{"row": row, "picture": f"{row}.png", **facts} for row in ("MNIST ε=1", "CelebA-Gender ε=1")]
    figure4.plot(rows, "Figure 4", tmp_path / "sheet.png")
    assert shown == ["MNIST ε=1.png"]


def test_a_plot_has_the_papers_bars_where_the_paper_prints_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[tuple[list[str], list[str], int]] = []

    def look(figure: Figure, path: Path, **_: Any) -> None:
        [legend] = figure.legends
        texts = [text.get_text() for axis in figure.axes for text in axis.texts]
        bars = sum(len(axis.patches) for axis in figure.axes)
        drawn.append(([text.get_text() for text in legend.get_texts()], texts, bars))

    monkeypatch.setattr(Figure, "savefig", look)
    bare = [{"row": row, "column": "a", "ours": 0.5, "paper": None, "std": None} for row in "wxyz"]
    output.plot_bars(bare, "t", tmp_path / "a.png")
    output.plot_bars([*bare[:1], bare[1] | {"paper": 0.25}], "t", tmp_path / "b.png")
    output.plot_bars([bare[0] | {"ours": 9.0, "paper": 8.0}], "t", tmp_path / "c.png", high=None)
    assert drawn[0] == (["ours"], ["0.500"] * 4, 4)
    assert (sorted(drawn[1][0]), drawn[1][1], drawn[1][2]) == (["ours", "paper"], ["0.500", "0.500", "0.250"], 3)
    assert drawn[2][1] == ["9.00", "8.00"]


def test_everything_goes_on_after_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path | None]] = []

    def fake(name: str, *, out: Path, data_folder: Path | None, **_: Any) -> dict[str, Any]:
        asked.append((name, data_folder))
        if name == "table6":
            raise DatalensError("no extractor here")
        return {"markdown": str(out / f"{name}.md")}

    monkeypatch.setattr(harness, "reproduce", fake)
    made = harness.reproduce_all(full=True, out=tmp_path, device="cpu", data_folder=tmp_path)
    assert [name for name, _ in asked] == list(harness.listing())
    assert made["failed"] == {"table6": "no extractor here"}
    assert "table6 | — | failed: no extractor here" in (tmp_path / "all-full.md").read_text("utf-8")
    folders = dict(asked)
    assert folders["table1"] == tmp_path and folders["table8"] is None and folders["table2"] is None
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "all", "--quick", "--out", str(tmp_path)])
    assert ended.value.code == 1
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "all", "--cells", "x"])
    assert ended.value.code == 2


def test_where_a_set_lies(tmp_path: Path) -> None:
    find = harness._folder_of
    assert find("celeba-hair", None) is None
    assert find("mnist", tmp_path) is None
    assert find("celeba-hair", tmp_path) == tmp_path  # its files right there
    assert find("scenes", tmp_path) is None and find("places365", tmp_path) is None
    (tmp_path / "data_256").mkdir()
    assert find("places365", tmp_path) == tmp_path and find("celeba-hair", tmp_path) is None
    (tmp_path / "all" / "celeba").mkdir(parents=True)
    (tmp_path / "all" / "scenes").mkdir()
    assert find("celeba-gender", tmp_path / "all") == tmp_path / "all" / "celeba"
    assert find("scenes", tmp_path / "all") == tmp_path / "all" / "scenes"
    assert find("places365", tmp_path / "all") is None


@pytest.mark.parametrize(
    ("what", "asked", "expected"),
    [
        ("table2", {"only": "nothing-*"}, "fits no cell of table2, such as mnist-eps0.2-dp-gan"),
        ("table8", {"only": "x"}, "fits no cell of table8, such as mnist-eps0.2-norm0.8"),
        ("runtime", {"only": "x"}, "it has no cells of that kind"),
        ("table1", {"stored": Path("nowhere")}, "nowhere is not a folder"),
    ],
)
def test_what_is_refused(what: str, asked: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DatalensError, match=expected):
        harness.reproduce(what, full=False, out=tmp_path / "out", device="cpu", **asked)
    assert not (tmp_path / "out").exists()


def test_the_page_of_results_is_made_of_the_kept_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import results

    monkeypatch.chdir(Path(__file__).parents[2])
    page = results.page()
    assert results.PAGE.read_text(encoding="utf-8") == page, "run: python tools/results.py"
    assert page.count("\n## ") == len(harness.listing())  # theory is on a page of its own; shortfalls come first
    assert page.index("## What falls short of the paper") < page.index("## Table 1")


def differences(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a kept cell that are not those of its options today: name → kept and today's value."""
    assert cell.options is not None
    _, settings = make_plan(TrainOptions(out=Path("x"), **cell.options), formats.schema(cell.options["data"]))
    then, now = result["settings"], settings.as_dict()
    return {
        name: (then.get(name), now.get(name))
        for name in then.keys() | now.keys()
        if name != "noise"  # rounded or exact, by what was installed; σ differs by a millionth
        and then.get(name) != now.get(name)
        and not (isinstance(now.get(name), float) and now[name] == pytest.approx(then.get(name), rel=1e-4))
    }


def test_no_kept_cell_is_of_an_earlier_loop() -> None:
    """Cells with teachers have the settings of their options today; else a table would show two methods as one."""
    kept_there = Path(__file__).parents[2] / "docs" / "results"
    seen: dict[str, dict[str, Any]] = {}
    for name, table in harness.tables().items():
        results = read_cells(kept_there / f"{table.kept_as or name}.jsonl")
        cells = {cell.name: cell for cell in table.cells(True)}
        assert results.keys() <= cells.keys(), "a cell that no table shows"
        for cell_name, result in results.items():
            cell, settings = cells[cell_name], result["settings"]
            assert result["options"] == cell.asked
            if settings["method"] not in ("datalens", "datalens-paper") or "teachers" not in settings:
                continue
            if cell.run_name not in seen:
                seen[cell.run_name] = differences(cell, result)
            printed = {"network": ("paper", "printed")} if "printed discriminator" in cell.column else {}
            assert seen[cell.run_name] == printed, cell_name  # version 0.1 had no other network of the paper's size
    assert len(seen) > 60
    cell = next(cell for cell in table1.cells(True) if cell.name == "mnist-eps10-datalens-warm-start-off")
    result = read_cells(kept_there / "table1.jsonl")[cell.name]
    twin = result | {"settings": result["settings"] | {"teacher_rate": 5e-4}}
    assert differences(cell, twin) == {"teacher_rate": (5e-4, 1e-3)}


# --- keeping cells ----------------------------------------------------------------------------------------------------


def test_cells_are_kept_one_line_each_by_name(tmp_path: Path) -> None:
    path = tmp_path / "one-quick" / "cells.jsonl"
    assert read_cells(path) == {}
    keep_cell(path, "b", {"row": "ε=1\u2028\n", "value": (1, 2)})
    assert keep_cell(path, "a", {"value": math.inf, "picture": b"png"})["value"] == math.inf
    keep_cell(path, "b", {"row": "ε=2\u2028\n"})  # in place of the first
    assert path.read_bytes() == '{"cell":"a","value":Infinity}\n{"cell":"b","row":"ε=2\u2028\\n"}\n'.encode()
    assert read_cells(path)["a"]["picture"] == str(path.parent / "cells" / "a.png")
    assert (path.parent / "cells" / "a.png").read_bytes() == b"png"
    asked = {"row": "ε=2\u2028\n"}
    assert kept(path, "b", asked) == asked and kept(path, "b", {"row": "ε=3"}) is None and kept(path, "c", {}) is None


def test_a_kill_loses_no_finished_cell(tmp_path: Path) -> None:
    """Three processes fill one file; two of them are killed on the way. Whatever any had finished is there."""
    path = tmp_path / "cells.jsonl"
    code = (
        "import sys; from pathlib import Path; from datalens.reproduce.kept import keep_cell\n"
        "for n in range(int(sys.argv[2])):\n"
        "    keep_cell(Path(sys.argv[1]), f'{sys.argv[3]}-{n:04}', {'text': 'x' * 3000}); print(n, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    others = [subprocess.Popen([*command, "100000", name], stdout=subprocess.PIPE, text=True) for name in ("a", "b")]
    last = subprocess.Popen([*command, "30", "c"], stdout=subprocess.PIPE, text=True)
    done = {}
    for name, process in zip("ab", others, strict=True):
        assert process.stdout is not None
        for _ in range(15):
            process.stdout.readline()
        process.kill()
        done[name] = 15 + len(process.stdout.read().splitlines())
    last.communicate(timeout=60)
    cells = read_cells(path)
    for name, count in done.items():
        assert {f"{name}-{n:04}" for n in range(count)} <= cells.keys()
    assert sum(name.startswith("c") for name in cells) == 30
    assert list(cells) == sorted(cells) and all(cell == {"text": "x" * 3000} for cell in cells.values())


def test_the_kept_results_are_as_they_are_written(tmp_path: Path) -> None:
    """Sorted, each cell once, and no file of one cell."""
    results = Path(__file__).parents[2] / "docs" / "results"
    files = {path.stem: path for path in results.glob("*.jsonl") if path.stem != "dpsgd-search"}  # a log, not cells
    assert {"table1", "utility", "figure2", "figure4", "theory", "table6", "dpsgd", "dpsgd-earlier"} <= files.keys()
    for path in files.values():
        cells = read_cells(path)
        name = next(iter(cells))
        copy = shutil.copy(path, tmp_path)
        keep_cell(Path(copy), name, {key: value for key, value in cells[name].items() if key != "picture"})
        assert Path(copy).read_bytes() == path.read_bytes(), path.name
    assert not list(results.rglob("*.json"))
