"""`datalens budget` and runs with --budget, from the shell."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("quickly")
Call = Callable[..., Any]


@pytest.fixture
def budget(datalens: Call, tmp_path: Path) -> Path:
    folder = tmp_path / "the budget"
    datalens("budget", folder, "--epsilon", 1.5, "--delta", 1e-5).succeeded()
    return folder


def left(datalens: Call, folder: Path) -> dict:
    return datalens("budget", folder, "--json").succeeded().json


def test_runs_share_one_budget(datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path) -> None:
    run = ("--steps", 2, "--budget", budget)
    datalens("train", *small, *run, "--epsilon", 1, "--out", tmp_path / "a").succeeded()
    first = left(datalens, budget)
    assert first["epsilon_reserved"] == pytest.approx(1.0, rel=1e-6)
    assert 1.0 < first["epsilon_left"] < 1.5  # events compose: it is not 0.5

    before = (budget / "budget.jsonl").read_bytes()
    why = datalens("train", *small, *run, "--epsilon", 1.4, "--out", tmp_path / "b").refused(3)
    assert "the largest that fits is --epsilon 1.0" in why and "δ = 1e-05, add-remove, exact accountant" in why
    assert not (tmp_path / "b").exists() and (budget / "budget.jsonl").read_bytes() == before

    datalens("sgd", "--data", "digits", "--epsilon", 0.3, "--epochs", 0.2, "--budget", budget, "--out", tmp_path / "s")
    mixed = left(datalens, budget)
    assert len(mixed["runs"]) == 2 and mixed["accountant"] == "prv"
    assert 1.0 < mixed["epsilon_reserved"] <= 1.5
    assert "decided on beforehand" in datalens("budget", budget).succeeded().out
    datalens("report", tmp_path / "a").succeeded()
    page = (tmp_path / "a" / "owner.html").read_text()
    assert "left for one more run with Gaussian noise" in page and "reserved by 2 runs" in page
    for release in (tmp_path / "a" / "release", tmp_path / "s" / "release"):
        said = "".join(file.read_text() for file in release.iterdir() if file.suffix in (".json", ".md", ".jsonl"))
        assert "the budget" not in said.replace("the budget;", "") and str(budget) not in said  # of other runs: nothing
        assert json.loads((release.parent / "config.json").read_text())["data_budget"]["run"] not in said


def test_resume_does_not_reserve_twice(
    datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datalens import driver
    from datalens.privacy.budget import DataBudget

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("kill -9")

    out = tmp_path / "a"
    with monkeypatch.context() as patch:
        patch.setattr(driver, "_opening", crash)
        with pytest.raises(RuntimeError, match="kill -9"):
            datalens("train", *small, "--steps", 2, "--budget", budget, "--out", out)
    assert len(left(datalens, budget)["runs"]) == 1  # charged, though nothing was released
    older = (budget / "budget.jsonl").read_bytes().splitlines(keepends=True)[0]
    datalens("train", "--resume", "--out", out).succeeded()
    assert len(left(datalens, budget)["runs"]) == 1

    shutil.copytree(out, tmp_path / "copy")
    datalens("train", "--resume", "--out", tmp_path / "copy").succeeded()  # the first to go on has the reservation
    before = (budget / "budget.jsonl").read_bytes()
    for _ in range(2):
        assert "a copy of this run was resumed since" in datalens("train", "--resume", "--out", out).refused()
    assert (budget / "budget.jsonl").read_bytes() == before
    out = tmp_path / "copy"
    datalens("train", "--resume", "--out", out).succeeded()

    config = (out / "config.json").read_bytes()
    with monkeypatch.context() as patch:  # killed between the two files
        patch.setattr(DataBudget, "next_turn", crash)
        with pytest.raises(RuntimeError, match="kill -9"):
            datalens("train", "--resume", "--out", out)
    assert (out / "config.json").read_bytes() != config and (out / "config.json").stat().st_mode & 0o077 == 0
    datalens("train", "--resume", "--out", out).succeeded()
    assert len(left(datalens, budget)["runs"]) == 1

    shutil.copytree(budget, tmp_path / "kept")
    (budget / "budget.jsonl").write_bytes(older)  # a restored copy
    assert "does not know this run" in datalens("train", "--resume", "--out", out).refused()
    shutil.rmtree(budget)
    assert "has no budget.jsonl" in datalens("train", "--resume", "--out", out).refused()
    datalens("report", out).succeeded()
    assert "cannot be read" in (out / "owner.html").read_text()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "data_budget": {"run": 3}}))
    assert "config.json is damaged" in datalens("train", "--resume", "--out", out).refused()


def edited(run: Path, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """What config.json was, before somebody changed it."""
    before = (run / "config.json").read_bytes()
    config = json.loads(before)
    change(config)
    (run / "config.json").write_text(json.dumps(config))
    return before


def test_a_run_does_not_go_on_without_its_reservation(
    datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path
) -> None:
    """A copy of it could go on as well, and as often as one likes."""
    out = tmp_path / "a"
    datalens("train", *small, "--steps", 2, "--budget", budget, "--out", out).succeeded()
    before = edited(out, lambda config: config.pop("data_budget"))
    assert "has no data_budget" in datalens("train", "--resume", "--out", out).refused()
    (out / "config.json").write_bytes(before)
    datalens("train", "--resume", "--out", out).succeeded()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_plan_that_was_edited_is_not_what_was_set_aside(
    datalens: Call, budget: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps of much noise are set aside; the run's own budget would have room for many."""
    out = tmp_path / "s"
    plan = ("--epsilon", 1.4, "--sigma", 8, "--epochs", 0.2, "--accountant", "rdp-improved")
    datalens("sgd", "--data", "digits", *plan, "--budget", budget, "--out", out).succeeded()
    spent = left(datalens, budget)["epsilon_reserved"]
    assert spent < 0.4
    for change in ({"steps": 500}, {"sigma": 4.0}, {"batch_size": 200}):
        before = edited(out, lambda config, change=change: config["settings"].update(change))
        said = datalens("sgd", "--resume", "--out", out).refused()
        assert "plan other charges" in said or "another schedule" in said
        (out / "config.json").write_bytes(before)
    datalens("sgd", "--resume", "--out", out).succeeded()
    assert left(datalens, budget)["epsilon_reserved"] == spent
    edited(out, lambda config: config["settings"].update(steps=500))
    monkeypatch.setattr("datalens.run.reservation._check_covered", lambda *_: None)  # the twin
    assert datalens("sgd", "--resume", "--out", out, "--json").succeeded().json["epsilon_spent"] > 2 * spent
    assert left(datalens, budget)["epsilon_reserved"] == spent


def test_the_reservation_of_a_run_that_is_under_way_is_left_alone(
    datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path
) -> None:
    from datalens.run.folder import Run

    out = tmp_path / "a"
    datalens("train", *small, "--steps", 2, "--budget", budget, "--out", out).succeeded()
    before = [(path, path.read_bytes()) for path in (out / "config.json", budget / "budget.jsonl")]
    run = Run.open(out)
    assert "another process is training" in datalens("train", "--resume", "--out", out).refused()
    assert all(path.read_bytes() == content for path, content in before)
    run.close()


def test_a_crash_between_reserving_and_beginning_stays_charged(
    datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("kill -9")

    with monkeypatch.context() as patch:
        patch.setattr("datalens.run.folder.write_atomically", crash)  # of config.json, right after reserving
        with pytest.raises(RuntimeError, match="kill -9"):
            datalens("train", *small, "--steps", 2, "--budget", budget, "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert len(left(datalens, budget)["runs"]) == 1


def test_persons_by_other_ids_are_another_unit(datalens: Call, budget: Path, tmp_path: Path) -> None:
    """By visit, and then by patient: neither total would be anybody's."""
    images = np.random.default_rng(0).integers(0, 256, (800, 8, 8), dtype=np.uint8)
    ids = {"visit": np.arange(800) // 2, "patient": np.arange(800) // 4}
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(800, int), classes=np.array(["a"]), **ids)
    own = ("train", "--data", tmp_path / "a.npz", "--nominal-size", 400, "--coordinates", 4, "--texture", 0)
    own = (*own, "--epsilon", 0.5, "--budget", budget)
    datalens(*own, "--record-id", "visit", "--out", tmp_path / "v").succeeded()
    for other in (("--record-id", "patient"), ()):
        why = datalens(*own, *other, "--out", tmp_path / "p").refused()
        assert "by visit" in why and "use the same --record-id" in why
    datalens(*own, "--record-id", "visit", "--out", tmp_path / "w").succeeded()


def test_bad_options(datalens: Call, small: tuple[str, ...], budget: Path, tmp_path: Path) -> None:
    assert "needs --delta" in datalens("budget", tmp_path / "n", "--epsilon", 3).refused()
    assert "needs --epsilon" in datalens("budget", budget, "--delta", 1e-5).refused()
    assert "set once" in datalens("budget", budget, "--epsilon", 9, "--delta", 1e-5).refused()
    assert "datalens budget" in datalens("budget", tmp_path / "n").refused()
    run = ("train", *small, "--steps", 2, "--out", tmp_path / "a", "--budget")
    assert "has no budget.jsonl" in datalens(*run, tmp_path / "n").refused()
    assert "use --relation add-remove" in datalens(*run, budget, "--relation", "replace-one").refused()
    assert "--noise-seed is not private" in datalens(*run, budget, "--noise-seed", 1).refused()
    datalens("budget", budget, "--data", "faces.npz").succeeded()
    assert "`datalens budget" in datalens(*run, budget).refused()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "method", [("dpmerf",), ("gswgan",), ("dpgan",), ("pategan",), ("pategan", "--aggregate", "laplace"), ("gpate",)]
)
def test_every_method_can_be_reserved(method: tuple[str, ...], budget: Path) -> None:
    """At its own ε, in an empty budget: what its ledger may charge is priced at that, or (Laplace, sampled) near it."""
    from datalens.data import formats
    from datalens.options import TrainOptions
    from datalens.plans.registry import make_plan
    from datalens.privacy.budget import most_charged, price
    from datalens.run.reservation import planned

    name, *more = method
    given = {"aggregate": more[1]} if more else {}
    schema = formats.schema("digits")
    own, settings = make_plan(TrainOptions(data="digits", out=Path("x"), method=name, preset="quick", **given), schema)
    charges = most_charged(planned(settings, schema, own), own)
    assert 0.9 < price(charges, own.delta)[0] < 1.3
