"""Tables 8-11 and Figure 3 without their trainings: which settings, what is shown, and what is kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from datalens.errors import DatalensError
from datalens.released import release
from datalens.released.certificate import read_certificate
from datalens.released.verification import check_release
from datalens.reproduce import dpsgd, dpsgd_runs, harness
from datalens.reproduce.dpsgd import GM_DP, KS, TABLE8, TABLE11, TITLES


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dpsgd.Setting, int]]:
    """Trainings that take no time: more noise, less accuracy."""
    asked: list[tuple[dpsgd.Setting, int]] = []

    def run(setting: dpsgd.Setting, seed: int, device: str, folder: Path) -> dict[str, Any]:
        asked.append((setting, seed))
        solved = setting.solved()
        sigma = 0.0 if setting.noise == "none" else float(solved.sigma or 0)
        return {
            "setting": {key: str(value) for key, value in dpsgd_runs.asdict(setting).items()},
            "accuracy": 0.85, "averaged": 0.9 - 0.01 * sigma + 0.001 * seed, "epsilon_spent": str(setting.epsilon),
            "delta": 1e-5, "relation": "add-remove", "accountant": setting.accountant, "private": sigma > 0,
            "sigma": sigma, "steps": solved.steps, "extractor": "none", "seconds": 1.0, "date": "2026-11-16",
            "certificate_sha256": f"{seed:064x}"[::-1], "method_version": dpsgd_runs.version(),
        }  # fmt: skip

    monkeypatch.setattr(dpsgd_runs, "run", run)
    monkeypatch.setattr(dpsgd, "load", lambda *_: None)
    monkeypatch.setattr(dpsgd, "_cores", lambda: 1)
    # Prices take seconds, and are tested elsewhere.
    monkeypatch.setattr(
        dpsgd.Setting,
        "solved",
        lambda self: dpsgd.replace(self, sigma=self.sigma or 1.0, steps=self.steps or 50),
    )
    return asked


@pytest.mark.parametrize("name", TITLES)
def test_every_table_is_written(name: str, pretended: list[Any], tmp_path: Path) -> None:
    assert name in harness.listing()
    found = harness.reproduce(name, full=False, out=tmp_path, device="cpu")
    text = Path(found["markdown"]).read_text(encoding="utf-8")
    assert "quick" in text and "not covered by ε" in text
    assert "± 0.00" not in text  # one seed has no spread
    written = json.loads(Path(found["markdown"]).with_suffix(".json").read_text(encoding="utf-8"))
    assert written["rows"] == found["rows"]
    if name != "table11":
        assert Path(found["plot"]).stat().st_size > 1000
        before = len(pretended)
        harness.reproduce(name, full=False, out=tmp_path, device="cpu")
        assert len(pretended) == before  # what was trained is kept


def test_what_is_not_private_says_so(pretended: list[Any], tmp_path: Path) -> None:
    found = dpsgd.reproduce("table10", full=False, out=tmp_path, device="cpu")
    private = {(row["row"].split(", ")[1], row["column"]): row["private"] for row in found["rows"]}
    assert {key for key, value in private.items() if not value} == {
        ("NormTopK k=0.8", "no noise"),
        ("no compression", "no noise"),
    }
    same = {(row["clip"], row["steps"]) for row in found["rows"]}
    assert len(same) == 1


def test_printed_settings_are_run_as_printed() -> None:
    for (data, epsilon), settings in TABLE11.items():
        for k, (clip, sigma, batch, rate) in settings.items():
            (found,) = dpsgd.printed(data, epsilon, k, "norm")
            assert (found.clip, found.sigma, found.batch, found.rate, found.steps) == (clip, sigma, batch, rate, None)
            assert found.selector == ("none" if k == GM_DP else "norm")
    assert [s.sigma for s in dpsgd.printed("mnist", 0.1, 0.8, "norm")] == [7.4, 3.6]
    assert dpsgd.printed("mnist", math.inf, 0.8, "norm")[0].steps == round(15 * 60_000 / 512)
    assert dpsgd.printed("mnist", 0.2, 0.4, "dim")[0].sigma == 3.4  # of plain DP-SGD


def test_the_best_candidate_is_searched_on_seeds_of_its_own(pretended: list[Any], tmp_path: Path) -> None:
    mode, lab = dpsgd.Mode.of(True), dpsgd.Lab(tmp_path / "cells.jsonl", "cpu", workers=1)
    cell: dpsgd.Cell = ("mnist", 0.2, 0.8, "norm", "prv")
    figure = dpsgd.figures(lab, mode, [cell])[cell]
    assert figure is not None and len(figure.runs) == 10
    assert all(s.held_out == (seed >= 1000) for s, seed in pretended)  # the test set chooses nothing
    tried = {(s.clip, s.rate) for s, seed in pretended if seed >= 1000}
    assert tried == {(10, 0.1), (0.3, 6.0), (0.3, 12.0), (8.0, 0.6)}
    assert {seed for s, seed in pretended if s == figure.setting and seed < 1000} == set(range(10))
    theirs = dpsgd.as_printed(lab, mode, [cell])[cell]
    assert theirs is not None and theirs.setting.clip == 10


def test_a_table_of_what_is_kept(pretended: list[Any], tmp_path: Path) -> None:
    """Some cells, and some seeds of them, as they come with the project: shown, and nothing is trained."""
    mode, lab = dpsgd.Mode.of(True), dpsgd.Lab(tmp_path / "kept" / "dpsgd.jsonl", "cpu", workers=1)
    first = dpsgd.candidates("mnist", 0.2, 0.8, "norm", mode)[0]
    (theirs,) = dpsgd.printed("mnist", 0.2, 0.8, "norm")
    second = dpsgd.replace(first, clip=0.7, rate=3)  # of no grid
    lab.all([(second, seed) for seed in (0, 1, 2)] + [(dpsgd.replace(first, held_out=True), 1000), (first, 0)])
    lab.all([(theirs, seed) for seed in (0, 1, 2, 3)])
    assert set(lab.kept()) == {first, second, dpsgd.replace(first, held_out=True), theirs}
    pretended.clear()
    found = harness.reproduce("table8", full=True, out=tmp_path / "shown", device="cpu", stored=tmp_path / "kept")
    assert not pretended
    shown = [row for row in found["rows"] if row["ours"] is not None]
    assert [(row["row"], row["column"], row["seeds"]) for row in shown] == [("MNIST ε=0.2", "TopAgg norm k=0.8", 3)]
    assert shown[0]["ours"] == pytest.approx(89.1) and (shown[0]["clip"], shown[0]["last"]) == (second.clip, 85.0)
    assert shown[0]["certificates"] == [f"{seed:064x}"[::-1] for seed in (0, 1, 2)] and len(shown[0]["dates"]) == 3
    assert "| 00000000, 10000000, 20000000 |" in Path(found["markdown"]).read_text(encoding="utf-8")
    assert " ".join(shown[0]["certificates"]) in Path(found["csv"]).read_text(encoding="utf-8")
    assert shown[0]["at_printed"] == pytest.approx(86.55)  # four seeds of the paper's setting are not ours for that
    assert Path(found["plot"]).exists() and "not run" in Path(found["markdown"]).read_text(encoding="utf-8")
    (tmp_path / "none").mkdir()
    with pytest.raises(DatalensError, match="no trainings"):
        harness.reproduce("table8", full=True, out=tmp_path, device="cpu", stored=tmp_path / "none")


def test_cells_seeds_and_stale_trainings_are_chosen(
    pretended: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fills the holes of Tables 8 to 11 and Figure 3 piece by piece: k = 0.6, ε = ∞, ε = 1 of Table 10."""
    how: dict[str, Any] = {"full": True, "out": tmp_path, "device": "cpu", "seeds": 2}
    made = harness.reproduce("table8", only="mnist-eps0.3-norm0.6", **how)
    shown = [row for row in made["rows"] if row["ours"] is not None]
    assert [(row["row"], row["column"], row["seeds"]) for row in shown] == [("MNIST ε=0.3", "TopAgg norm k=0.6", 2)]
    assert {(s.epsilon, s.k) for s, _ in pretended} == {(0.3, 0.6)}
    harness.reproduce("table8", only="mnist-epsinf-*", **how)
    assert {s.k for s, _ in pretended if s.epsilon == dpsgd.INF} == {0.6, 0.7, 0.8, 1.0}
    tens = harness.reproduce("table10", only="mnist-eps1-norm0.8", **how)["rows"]
    assert {row["row"].split(",")[0] for row in tens if row["ours"] is not None} == {"MNIST ε=1"}
    eleven = harness.reproduce("table11", only="mnist-eps0.2-*", **how)["rows"]
    assert {row["row"] for row in eleven if row["ours"] is not None} == {"MNIST ε=0.2"}
    with pytest.raises(DatalensError, match=r"fits no cell of table8, such as mnist-eps0\.05-norm0\.6"):
        harness.reproduce("table8", only="mnist-eps0.4-*", **how)

    before = len(pretended)
    monkeypatch.setattr(dpsgd, "version", lambda: 99)
    monkeypatch.setattr(dpsgd_runs, "version", lambda: 99)
    stale = harness.reproduce("table8", only="mnist-eps0.3-norm0.6", **how)
    assert len(pretended) == before
    assert [row["marks"] for row in stale["rows"] if row["row"] == "MNIST ε=0.3" and row["ours"]] == [["stale"]]
    assert "(2) (stale)" in Path(stale["markdown"]).read_text(encoding="utf-8")
    fresh = harness.reproduce("table8", only="mnist-eps0.3-norm0.6", again=True, **how)
    assert len(pretended) > before
    assert [row["marks"] for row in fresh["rows"] if row["row"] == "MNIST ε=0.3" and row["ours"]] == [[]]


def test_the_rule_of_the_command_needs_no_search(pretended: list[Any], tmp_path: Path) -> None:
    how: dict[str, Any] = {"full": True, "out": tmp_path, "device": "cpu", "seeds": 2, "rule": True}
    harness.reproduce("table8", only="mnist-eps0.3-norm0.6", **how)
    assert {(s.clip, s.batch, s.rate, s.steps, s.falls, s.held_out) for s, _ in pretended} == {
        (0.3, 2048, 12.0, 270, True, False)
    }
    assert [seed for _, seed in pretended] == [0, 1]
    pretended.clear()
    harness.reproduce("table8", only="cifar10-eps0.3-norm0.6", **how)
    assert {(s.clip, s.batch, s.rate, s.steps, s.held_out) for s, _ in pretended} == {(1.0, 1024, 0.2, 600, False)}
    with pytest.raises(DatalensError, match="leave it out for table1"):
        harness.reproduce("table1", full=False, out=tmp_path, device="cpu", rule=True)


def test_a_stale_training_is_not_shown_where_there_is_a_current_one(
    pretended: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the stale ones have more seeds, and of the same setting."""
    how: dict[str, Any] = {"full": True, "out": tmp_path, "device": "cpu", "only": "cifar10-eps0.3-norm0.6"}

    def shown() -> tuple[float, int, list[str]]:
        (tmp_path / "dpsgd.jsonl").write_bytes((tmp_path / "dpsgd-full" / "cells.jsonl").read_bytes())
        rows = harness.reproduce("table8", full=True, out=tmp_path / "out", device="cpu", stored=tmp_path)["rows"]
        (row,) = [row for row in rows if row["ours"] is not None]
        return row["rate"], row["seeds"], row["marks"]

    harness.reproduce("table8", seeds=3, rule=True, **how)
    monkeypatch.setattr(dpsgd, "version", lambda: 99)
    monkeypatch.setattr(dpsgd_runs, "version", lambda: 99)
    assert shown() == (0.2, 3, ["stale"])
    harness.reproduce("table8", seeds=1, rule=True, again=True, **how)
    assert shown() == (0.2, 1, [])
    monkeypatch.setitem(dpsgd.RULE, "cifar10", (1.0, 1024, 0.8))
    harness.reproduce("table8", seeds=2, rule=True, **how)
    assert shown() == (0.8, 2, [])


def test_dpdl_is_plain_dp_sgd_at_another_price(pretended: list[Any], tmp_path: Path) -> None:
    """It needs no training of its own: the moments accountant sees the same noise, rate and steps."""
    how: dict[str, Any] = {"full": True, "out": tmp_path, "device": "cpu", "seeds": 1, "rule": True}
    made = harness.reproduce("figure3", only="mnist-eps0.3-gm-dp", **how)
    plain, dpdl = [row for row in made["rows"] if row["ours"] is not None]
    assert (plain["column"], plain["accountant"]) == ("GM-DP", "prv")
    assert dpdl["column"].startswith("DPDL") and dpdl["accountant"] == "moments"
    assert dpdl["ours"] == plain["ours"] and dpdl["certificates"] == plain["certificates"]
    assert float(dpdl["epsilon_spent"]) > 0.36  # the least that this accountant ever states at δ = 1e-5
    assert dpdl["row"] != plain["row"] and len({s for s, _ in pretended}) == 1


def test_table_11_shows_its_settings_without_a_training(tmp_path: Path) -> None:
    (tmp_path / "dpsgd.jsonl").write_text("")
    rows = harness.reproduce("table11", full=True, out=tmp_path / "out", device="cpu", stored=tmp_path)["rows"]
    assert len(rows) == 24 and all(row["ours"] is None and row["clip"] and row["sigma"] for row in rows)


def test_the_papers_tables_are_complete() -> None:
    assert len(TABLE8) == 8 + 13 and all(set(row) == set(KS) for row in TABLE8.values())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dpsgd.Setting:
    """Five steps on forty records of MNIST's shape."""
    import torch

    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 1, 28, 28), generator=random, dtype=torch.uint8)
    y = torch.randint(0, 10, (40,), generator=random)

    def records_of(name: str, records: int | None, device: str) -> Any:
        from datalens.data.named import sources
        from datalens.methods.sgd import SgdSettings

        about = SgdSettings(
            method="dpsgd", preset="reproduce", seed=0, noise_seeded=False, noise="gaussian", network="cnn",
            extractor="none", extractor_sha256="", features=0, selector="none", topk=1.0, clip=1.0, sigma=1.0,
            batch_size=1, steps=1, rate=0.1, falls=False, average=True,
        )  # fmt: skip
        return x, y, x, y, dpsgd.replace(sources.schema("mnist"), nominal_size=40), about

    monkeypatch.setattr(dpsgd_runs, "load", records_of)
    facts: dict[str, Any] = {"data": "mnist", "k": 0.8, "selector": "norm", "clip": 1.0, "batch": 8, "rate": 0.1}
    facts |= {"sigma": 3.0, "steps": 5, "records": 40, "accountant": "rdp-improved"}
    return dpsgd.Setting(epsilon=5.0, **facts)


def test_one_training_is_charged_certified_and_measured(few: dpsgd.Setting, tmp_path: Path) -> None:
    """For real, but small: five steps on a few records of MNIST's shape."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ledger.jsonl").write_text("of a training that was killed")
    found = dpsgd_runs.run(few, 0, "cpu", tmp_path / "a")
    assert (tmp_path / "a" / "ledger.jsonl").read_text() == "of a training that was killed"  # it was spent
    assert 0 < float(found["epsilon_spent"]) <= 5.0 and found["private"] and found["steps"] == 5
    assert 0 <= found["accuracy"] <= 1 and 0 <= found["averaged"] <= 1
    louder = dpsgd_runs.run(dpsgd.replace(few, noise="clip"), 0, "cpu", tmp_path / "b")  # than √k·C needs
    assert louder["private"] and 0 < float(louder["epsilon_spent"]) < float(found["epsilon_spent"])
    bare = dpsgd_runs.run(dpsgd.replace(few, noise="none"), 0, "cpu", tmp_path / "c")
    assert not bare["private"] and bare["epsilon_spent"] == "inf"
    for name, result in (("a.2", found), ("b", louder), ("c", bare)):
        assert result["run"] == name
        checked = check_release(tmp_path / name / "release")
        assert not checked.problems and checked.private == result["private"]
        assert str(checked.spent) == result["epsilon_spent"]
        certificate = read_certificate(tmp_path / name / "release")
        assert result["certificate_sha256"] == certificate["sha256"]["certificate"]
        assert certificate["settings"]["steps"] == 5 and result["date"] and result["versions"]


def test_a_training_whose_certificate_does_not_stand_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few: dpsgd.Setting
) -> None:
    """The broken twin: a certificate that states less noise than was charged for."""
    written = release.write_release

    def quieter(*args: Any, settings: Any, **others: Any) -> Path:
        return written(*args, settings=dpsgd.replace(settings, sigma=2.0), **others)

    monkeypatch.setattr(release, "write_release", quieter)
    lab = dpsgd.Lab(tmp_path / "cells.jsonl", "cpu", workers=1)
    with pytest.raises(DatalensError, match="another sigma"):
        lab.all([(few, 0)])
    assert not (tmp_path / "cells.jsonl").exists()
