"""DPImageBench's protocol: its networks, their training, the epoch that counts, and what is printed beside ours."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from datalens.cli.main import main
from datalens.data import formats
from datalens.data.records import Dataset
from datalens.driver import train
from datalens.errors import DatalensError
from datalens.evaluate import compare, published
from datalens.evaluate import dpimagebench as bench
from datalens.options import TrainOptions
from datalens.released.synthetic import SyntheticDataset
from datalens.reproduce import dpimagebench as table
from datalens.reproduce import harness

TINY = {"tiny": bench.resnet(8)}


@pytest.mark.parametrize(
    ("name", "millions", "convolutions"), [("ResNet-110", 1.73, 109), ("WRN-40-4", 8.95, 37), ("ResNeXt-29", 34.4, 28)]
)
def test_networks_have_the_published_size(name: str, millions: float, convolutions: int) -> None:
    with torch.device("meta"):
        net = bench.NETWORKS[name](channels=3, height=32, width=32, classes=10)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    shortcuts = sum(isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) and m.stride == (2, 2) for m in net.modules())
    every = sum(isinstance(m, nn.Conv2d) for m in net.modules())
    assert every - convolutions in (shortcuts, shortcuts + 1)  # the first stage has one too, where its width changes


@pytest.mark.parametrize("build", [bench.resnet(8), bench.wide_resnet(10, 1), bench.resnext(11, 8, 1)])
def test_blocks_halve_the_side_twice_and_pass_gradients(build: Any) -> None:
    net = build(channels=1, height=8, width=12, classes=3)
    sides: list[tuple[int, ...]] = []
    pool = next(m for m in net.modules() if isinstance(m, nn.AdaptiveAvgPool2d))
    pool.register_forward_hook(lambda _, inputs, __: sides.append(tuple(inputs[0].shape[2:])))
    net(torch.randn(4, 1, 8, 12)).sum().backward()
    assert sides == [(2, 3)]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    with pytest.raises(DatalensError, match="8x8"):
        build(channels=1, height=7, width=12, classes=3)


def test_a_mean_of_weights_and_statistics() -> None:
    net = nn.BatchNorm1d(1)
    mean = bench._Mean(net)
    expected = 1.0
    for step in range(1, 200):
        with torch.no_grad():
            net.weight.fill_(step)
        net.running_mean.fill_(-step)  # type: ignore[union-attr]
        mean.add()
        expected += (step - expected) * (1 - min(bench.MEAN, (1 + step) / (10 + step)))
    assert mean.net.weight.item() == pytest.approx(expected, rel=1e-5)
    assert 150 < expected < 199  # late steps weigh most
    assert mean.net.running_mean.item() < -100  # type: ignore[union-attr, operator]


def striped(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that anybody can tell apart: stripes across and stripes down."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    images = random.integers(0, 60, (count, 8, 8, 1))
    images[:, ::2] += 150 * (labels == 0)[:, None, None, None]
    images[:, :, ::2] += 150 * (labels == 1)[:, None, None, None]
    return images.astype(np.uint8), labels


def records(count: int, seed: int) -> Dataset:
    images, labels = striped(count, seed)
    schema = dataclasses.replace(formats.schema("digits"), name="stripes", classes=("across", "down"))
    return dataclasses.replace(formats.load("digits", "test"), images=images, labels=labels, schema=schema)


def synthetic_of(images: np.ndarray, labels: np.ndarray) -> SyntheticDataset:
    return SyntheticDataset(images=images, labels=labels, classes=("across", "down"), certificate={})


def test_the_protocol_learns_what_is_there_and_only_that() -> None:
    training, test = records(240, 0), records(200, 1)
    images, labels = striped(600, 2)
    how: dict[str, Any] = {"device": "cpu", "epochs": 6, "networks": TINY, "trained_on": 550}
    good = bench.evaluate(synthetic_of(images, labels), training, test, **how)
    assert good["last"] > 0.95 and good["real"]["chosen"] > 0.9
    assert (good["synthetic"], good["validation"], good["test"]) == (550, 20, 200)
    assert np.sum(good["confusion"]) == 200
    shuffled = np.random.default_rng(3).permutation(labels)
    bad = bench.evaluate(synthetic_of(images, shuffled), training, test, ceiling=False, **how)
    assert bad["last"] < 0.75 and "real" not in bad
    assert any("not covered by ε" in line for line in bench.lines(good))
    assert bench.evaluate(synthetic_of(images, labels), training, test, ceiling=False, **how)["last"] == good["last"]


def test_the_epoch_is_chosen_on_validation_records_never_on_test_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = striped(300, 2)
    held, test = striped(50, 3), striped(60, 4)
    of_epoch = iter([0.5, 0.9, 0.9, 0.7])
    asked: list[int] = []

    def accuracy(net: nn.Module, images: np.ndarray, labels: np.ndarray, device: Any) -> float:
        asked.append(len(images))
        return next(of_epoch) if len(images) == 50 else 0.25 * len(asked)

    monkeypatch.setattr(bench, "_accuracy", accuracy)
    score = bench.train_and_test(
        "tiny", TINY["tiny"], images, labels, held, test, classes=2, epochs=4, seed=0, device="cpu"
    )
    assert score.epoch == 2  # the first of equals
    assert asked == [50, 60, 50, 60, 50, 50] and score.chosen == 1.0
    assert np.sum(score.confusion) == 60


def test_validation_records_are_apart_and_always_the_same() -> None:
    training = records(120, 0)
    mine, held = bench.validation_split(training)
    assert (len(mine), len(held)) == (110, 10)
    assert sorted([*mine, *held]) == list(range(120))
    assert bench.validation_split(training)[1].tolist() == held.tolist()
    with pytest.raises(DatalensError, match="none to train on"):
        bench.validation_split(dataclasses.replace(training, images=training.images[:1]))


def test_what_is_published() -> None:
    assert all(0.1 < one.accuracy < 1 and one.epsilon in (1, 10) for one in published.PUBLISHED)
    assert published.of("mnist")["FETA-Pro, as printed (DPImageBench)"] == [(1.0, 0.973), (10.0, 0.985)]
    assert any("with public images" in name for name in published.of("fashion-mnist"))
    assert published.of("digits") == {}


def test_the_page_prints_what_is_published() -> None:
    page = (Path(__file__).parents[2] / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    of_page = {row[0].split(",")[0]: row for row in rows}
    for method in {one.method for one in published.PUBLISHED}:
        mine = [one for one in published.PUBLISHED if one.method == method]
        for column, data in enumerate(published.DATA, start=1):
            figures = [f"{one.accuracy:.4f}" for one in sorted(mine, key=lambda one: one.epsilon) if one.data == data]
            assert of_page[method][column] == (" / ".join(figures) or "—"), (method, data)
        assert of_page[method][4] == mine[0].source


def test_the_table_is_run_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8×8 digits: the training records of the run are those without the validation records."""
    tiny = {"coordinates": 16, "texture": 0}
    monkeypatch.setattr(table, "METHODS", {"datalens": {"method": "datalens", **tiny}})
    monkeypatch.setattr(bench, "SMALL", TINY)
    cell = {"options": {"data": "digits", "epsilon": 10.0, "method": "datalens", **tiny}, "small": True}
    wanted = {"digits-eps10-datalens-small": cell | {"count": 300, "epochs": 2}}
    monkeypatch.setattr(table, "cells", lambda full, small: wanted if small else {})
    how: dict[str, Any] = {"full": False, "out": tmp_path, "device": "cpu", "small": True}
    made = harness.reproduce("dpimagebench", **how)
    [row] = made["rows"]
    total = len(formats.load("digits", "train").images)
    config = json.loads(next(tmp_path.rglob("config.json")).read_text())
    assert config["options"]["nominal_size"] == total - max(1, total // 12)
    assert float(row["delta"]) == pytest.approx(table.delta(total - total // 12))
    assert 0 < row["ours"] <= 1 and 0 < row["real"] <= 1
    text = Path(made["markdown"]).read_text(encoding="utf-8")
    assert "small (1)" in text and "not comparable" in text and "no ε covers the choice" in text
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "dpimagebench.jsonl").write_bytes((tmp_path / "dpimagebench-quick" / "cells.jsonl").read_bytes())
    again = harness.reproduce("dpimagebench", **how | {"stored": kept, "out": tmp_path / "b", "small": False})
    assert again["rows"] == made["rows"]
    with pytest.raises(DatalensError, match="--small is for dpimagebench"):
        harness.reproduce("table1", **how)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SMALL", TINY)
    run = tmp_path / "run"
    train(TrainOptions(data="digits", epsilon=10.0, out=run, coordinates=16, texture=0))
    asked = ["evaluate", str(run), "--data", "digits", "--protocol", "dpimagebench", "--small", "--epochs", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--count", "300", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["small"] and found["epochs"] == 1
    assert "own training" in found["warning"]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(run), "--data", "digits", "--small"])
    assert ended.value.code == 2
    few = ["--classifier", "authors", "--epochs", "1", "--count", "128", "--seeds", "1"]
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--data", "digits", *few, "--json"])
    authors = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "best epoch on test data" in authors["classifier"] and authors["synthetic"] == 128
    monkeypatch.setattr(compare, "published_points", lambda data: {"DPDM, as printed (DPImageBench)": [(1.0, 0.9)]})
    for more, drawn in ((["--published"], True), ([], False)):
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(run), *more, "--out", str(tmp_path / "page.html")])
        assert ended.value.code == 0
        assert ("DPDM, as printed" in (tmp_path / "page.html").read_text(encoding="utf-8")) is drawn
