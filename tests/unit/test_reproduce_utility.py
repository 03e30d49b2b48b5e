"""The utility table: its lines, what is kept, what is not run and said so. Runs are faked, but for one on digits."""

import csv
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from datalens.cli.main import main
from datalens.data.named import sources
from datalens.errors import DatalensError
from datalens.evaluate import utility as measure
from datalens.methods import topagg
from datalens.released import release
from datalens.released.verification import check_release
from datalens.reproduce import harness, utility
from datalens.reproduce.cells import Cell, Scoring
from datalens.reproduce.kept import keep_cell, read_cells

FACES = "CelebA-Gender (32 px)"


@pytest.fixture(autouse=True)
def _nothing_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "home"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No cell is really run: accuracy is 0.9 and a hundredth for each seed. What was asked is kept here."""
    asked: list[dict[str, Any]] = []

    def fake(cell: Cell, scoring: Scoring, run: Path, device: str, **more: Any) -> dict[str, Any]:
        assert cell.options is not None
        asked.append({"name": cell.name, "options": cell.options, "scoring": scoring, **more})
        real = 0.99 if more["accuracy_real"] is None else more["accuracy_real"]
        cost = {"epsilon": cell.options["epsilon"], "epsilon_spent": cell.options["epsilon"] - 0.001, "delta": 1e-5}
        return {
            "options": cell.asked,
            "utility": {
                "accuracy": 0.9 + cell.options["seed"] / 100,
                "accuracy_real": real,
                "classifier": scoring.classifier,
            },
            "train": cost | {"relation": "add-remove", "accountant": "exact", "private": True, "seconds": 40.0},
            "sample_seconds": 3.0,
        }

    monkeypatch.setattr(harness, "run_cell", fake)
    return asked


def made(out: Path, *, full: bool = False, **more: Any) -> tuple[list[dict[str, Any]], str]:
    result = harness.reproduce("utility", full=full, out=out, device="cpu", **more)
    assert Path(result["plot"]).stat().st_size > 1000
    text = Path(result["markdown"]).read_text(encoding="utf-8")
    with open(result["csv"], encoding="utf-8", newline="") as file:
        assert [row["row"] for row in csv.DictReader(file)] == [row["row"] for row in result["rows"]]
    return result["rows"], text


def line_of(text: str, start: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return line


def test_the_lines_of_quick(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    rows, text = made(tmp_path)
    sets = [f"{name} ε=1" for name in ("MNIST", "Fashion-MNIST", FACES)]
    assert [row["row"] for row in rows] == sets
    assert {row["column"] for row in rows} == {"datalens"}
    assert [one["options"] for one in ran] == [
        {"data": data, "epsilon": 1.0, "delta": 1e-5, "method": "datalens", "seed": 0}
        for data in ("mnist", "fashion-mnist")
    ]
    assert all(one["scoring"] == Scoring(count=4_000, epochs=6, seeds=1, classifier="augmented") for one in ran)
    assert all(one["data_folder"] is None for one in ran)
    assert (rows[0]["ours"], rows[0]["std"], rows[0]["seeds"], rows[0]["difference"]) == (0.9, None, 1, -0.0676)
    assert line_of(text, "MNIST ε=1 | datalens") == (
        "| MNIST ε=1 | datalens | 0.9000 | 1 | 0.7123 | 0.9530 | 0.9676 | -0.0676 | 0.9900 | "
        "0.999, 1e-05, add-remove, exact | 40.0 | 3.0 |"
    )
    assert "One seed" in text and "not covered by ε" in text and "64 pixels" in text


def test_what_is_printed_elsewhere(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    rows, _ = made(tmp_path, full=True)
    main = {f"{dataset} ε={epsilon:g}" for dataset, epsilon in utility.PUBLISHED}
    printed = {row["row"]: (row["paper"], row["dpdm"], row["feta_pro"]) for row in rows if row["row"] in main}
    assert printed == {
        "MNIST ε=1": (0.7123, 0.953, 0.9676),
        "MNIST ε=10": (0.8066, 0.981, 0.9836),
        "Fashion-MNIST ε=1": (0.6478, 0.794, 0.8223),
        "Fashion-MNIST ε=10": (0.7061, 0.862, 0.878),
        f"{FACES} ε=1": (0.7058, None, 0.8847),
        f"{FACES} ε=10": (0.7287, None, 0.9462),
    }
    assert sources.schema(utility.DATA[FACES]).shape == (3, 32, 32)


def test_the_lines_of_full(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "faces").mkdir()
    rows, text = made(tmp_path, full=True, data_folder=tmp_path / "faces")
    methods = ["datalens", "datalens, warm start off", "datalens-paper"]
    more = [f"datalens-paper, {how}" for how in ("authors' settings", "full-size teachers")]
    more += ["datalens-paper, authors' settings, full-size teachers"]
    without_noise = [methods[-1], more[0]] * 2
    refined = "datalens, refined"
    grey = [methods[0], refined, *methods[1:], *more] * 4  # at ε = 1, and 10
    faces, small = [*methods, methods[0], refined, *methods[1:]], [methods[0], refined] * 2  # at ε = 3
    assert [row["column"] for row in rows] == grey + faces + methods[:1] * 6 + small + methods[:1] * 8 + without_noise
    count = 12 * 5 + 18 * 2 + 14 * 3 + 4 * 2 + 9  # scenes are not here; nine runs are refined
    assert len({one["name"] for one in ran}) == len(ran) == count
    assert [row["seeds"] for row in rows[35:]] == [3] * 4 + [0] * 2 + [3, 1] * 2 + [3] * 8 + [2] * 4
    assert [(row["row"], row["paper"], row["difference"]) for row in rows[-3:-1]] == [
        ("MNIST ε=∞", None, None),
        ("Fashion-MNIST ε=∞", None, None),
    ]
    for row in rows[:35]:
        runs = 2 if "paper" in row["column"] else 5
        if row["column"] == refined:
            runs = 3 if row["row"] == "Fashion-MNIST ε=10" else 1
        seeds = [0.9, 0.91, 0.92, 0.93, 0.94][:runs]
        assert (row["seeds"], row["ours"]) == (len(seeds), pytest.approx(statistics.fmean(seeds)))
        assert row["std"] == (pytest.approx(statistics.stdev(seeds)) if len(seeds) > 1 else None)
    assert "0.9200 ± 0.0158" in line_of(text, "MNIST ε=10 | datalens, warm start off")
    for one in ran:
        assert one["data_folder"] == (tmp_path / "faces" if "celeba" in one["options"]["data"] else None)
        assert (one["options"].get("warm_start") == "off") == ("warm-start-off" in one["name"])
        assert (one["options"]["method"] == "datalens-paper") == ("datalens-paper" in one["name"])
        alone = "celeba-gender-32" in one["options"]["data"] and ("off" in one["name"] or "paper" in one["name"])
        assert one["options"].get("teachers") == (2500 if alone else None)
    assert [one["name"] for one in ran if one["accuracy_real"] is None] == [  # a ceiling is found once for each set
        "mnist-eps1-datalens-seed0",
        "fashion-mnist-eps1-datalens-seed0",
        "celeba-gender-32-px-eps1-datalens-seed0",
        "celeba-gender-eps1-datalens-seed0",
        "celeba-hair-eps1-datalens-seed0",
    ]
    assert all(row["real"] == pytest.approx(0.99) for row in rows if row["seeds"])
    assert "not run" in line_of(text, "Scenes ε=1 | datalens")
    assert str(tmp_path) not in (tmp_path / "utility-full" / "cells.jsonl").read_text(encoding="utf-8")


def test_faces_need_a_folder_once(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    rows, text = made(tmp_path)
    missing = line_of(text, f"{FACES} ε=1 | datalens")
    assert "not run: needs --data-folder" in missing and "0.7058" in missing and "0.8847" in missing
    assert [row["ours"] for row in rows if row["row"].startswith(FACES)] == [None]
    (tmp_path / "faces").mkdir()
    _, text = made(tmp_path, data_folder=tmp_path / "faces")
    assert "not run" not in text
    before = len(ran)
    _, text = made(tmp_path)  # finished: their figures stand, with no folder
    assert "not run" not in text and len(ran) == before == 3


def test_goes_on_where_it_stopped(ran: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = harness.run_cell

    def stops(cell: Cell, *rest: Any, **more: Any) -> dict[str, Any]:
        if cell.options is not None and cell.options["seed"] == 3:
            raise KeyboardInterrupt
        return fake(cell, *rest, **more)

    monkeypatch.setattr(harness, "run_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, full=True)
    assert len(ran) == 3
    monkeypatch.setattr(harness, "run_cell", fake)
    made(tmp_path, full=True)
    names = [one["name"] for one in ran]
    assert len(names) == len(set(names)) == 8 * 5 + 16 * 2 + 10 * 3 + 4 * 2 + 8  # nothing twice
    assert ran[3]["accuracy_real"] == 0.99  # the ceiling, too, is kept

    # Asked for in another way, a cell is run again.
    cells = tmp_path / "utility-full" / "cells.jsonl"
    other = read_cells(cells)["mnist-eps1-datalens-seed2"]
    other["options"]["epsilon"] = 2.0
    keep_cell(cells, "mnist-eps1-datalens-seed2", other)
    made(tmp_path, full=True)
    assert [one["name"] for one in ran[len(names) :]] == ["mnist-eps1-datalens-seed2"]


def test_a_run_without_privacy_is_stamped(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    made(tmp_path, full=True)
    cells = tmp_path / "utility-full" / "cells.jsonl"
    doctored = read_cells(cells)["mnist-eps1-datalens-seed2"]
    doctored["train"] |= {"private": False, "epsilon_spent": "inf"}
    keep_cell(cells, "mnist-eps1-datalens-seed2", doctored)
    _, text = made(tmp_path, full=True)
    assert "| inf, 1e-05, add-remove, exact NOT PRIVATE |" in line_of(text, "MNIST ε=1 | datalens")
    assert text.count("NOT PRIVATE") == 1


def test_the_command(ran: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "faces").mkdir()
    asked = ["reproduce", "utility", "--quick", "--data-folder", str(tmp_path / "faces"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 0
    assert "| 0.8847 |" in line_of(capsys.readouterr().out, f"{FACES} ε=1 | datalens | 0.9000")
    assert len(ran) == 3
    with pytest.raises(SystemExit):
        main(["reproduce", "--list"])
    assert "best published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "folder", "expected"),
    [
        ("utility", "nowhere", "nowhere is not a folder"),
        ("table1", ".", "table1 needs none: leave it out"),
        ("runtime", ".", "runtime needs none: leave it out"),
        ("table0", ".", "there is no 'table0'.*table1, table2.*utility, ablation, authors, projection, steps, runtime"),
    ],
)
def test_what_is_refused(tmp_path: Path, what: str, folder: str, expected: str) -> None:
    with pytest.raises(DatalensError, match=expected):
        harness.reproduce(what, full=False, out=tmp_path / "out", device="cpu", data_folder=tmp_path / folder)
    assert not (tmp_path / "out").exists()


def test_a_seed_is_that_of_training_sampling_and_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real cells on digits, tiny ones, with a generator of a few thousand weights."""
    make = topagg.dcgan_architecture
    narrow: dict[str, Any] = {"dense": 32, "widths": (8, 8)}
    monkeypatch.setattr(topagg, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
    monkeypatch.setitem(utility.PUBLISHED, ("digits", 1), {"DataLens": 0.5, "FETA-Pro": 0.75})
    options = {"data": "digits", "preset": "quick", "teachers": 20, "steps": 2}
    cells = [Cell(row="digits ε=1", column="tiny", paper=0.5, options=options | {"seed": seed}) for seed in (0, 1)]
    table = dataclasses.replace(
        utility.TABLE,
        cells=lambda full: cells,
        scoring=lambda full: Scoring(count=100, epochs=1, seeds=1, classifier="augmented"),
    )
    monkeypatch.setattr(harness, "tables", lambda: {"small": table})
    seen: list[tuple[str, int, float]] = []
    train_classifier: Callable[..., Any] = measure.train_classifier

    def watched(images: Any, *rest: Any, seed: int, **more: Any) -> Any:
        seen.append((more["classifier"], seed, float(images.mean())))
        return train_classifier(images, *rest, seed=seed, **more)

    monkeypatch.setattr(measure, "train_classifier", watched)
    sampled: list[dict[str, int]] = []
    sample: Callable[..., Any] = release.sample

    def counted(path: Path, **how: int) -> Any:
        sampled.append(how)
        return sample(path, **how)

    monkeypatch.setattr(release, "sample", counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        [row] = harness.reproduce("small", full=False, out=tmp_path, device="cpu")["rows"]
    finally:
        torch.set_num_threads(threads)
    assert [(classifier, seed) for classifier, seed, _ in seen] == [
        *(("augmented", 0), ("augmented", 0)),  # the second is the ceiling
        ("augmented", 1),
    ]
    assert seen[0][2] != seen[2][2]
    cpu = torch.device("cpu")
    assert sampled == [{"count": 100, "seed": 0, "device": cpu}, {"count": 100, "seed": 1, "device": cpu}]
    assert row["seeds"] == 2 and row["private"] and 0 < row["ours"] < 1 and row["epsilon_spent"] <= 1
    assert row["fit_seconds"] > 0 and row["classifier"].startswith("AugmentedCNN")
    runs = [tmp_path / "runs-quick" / cell.run_name for cell in cells]
    assert runs[0].name != runs[1].name
    assert cells[0].run_name == dataclasses.replace(cells[0], options=options).run_name  # seed 0 is the default
    assert [json.loads((run / "config.json").read_text())["settings"]["seed"] for run in runs] == [0, 1]
    assert all(check_release(run / "release").problems == () for run in runs)
