"""Theorem 6: every term, problems that satisfy its assumptions and stay below it, and bounds that must fail."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from datalens.cli.main import main
from datalens.errors import DatalensError
from datalens.methods import topagg
from datalens.public import theorem6 as theorem
from datalens.public.theorem6 import Choice, Problem, bound
from datalens.reproduce import theory as reproduced
from datalens.reproduce.harness import reproduce

PROBLEM = Problem(
    dimensions=98, teachers=10, smoothness=2.0, gradient=3.0, deviation=0.5, deviation_l1=4.0, gap=6.0
)  # fmt: skip
CHOICE = Choice(k=49, clip=0.1, rate=0.25, steps=60, noise=0.02, tau=0.2)


def test_every_term_as_printed() -> None:
    terms = bound(PROBLEM, CHOICE, "printed")
    assert terms.factor == pytest.approx(0.1 / 100)
    assert terms.bias == pytest.approx(min(0.2 * 9, 0.1 * 49 * 3))
    assert terms.noise == pytest.approx(2 * 0.25 * 0.02 * 49)  # LγAk
    assert terms.start == pytest.approx(6 / (60 * 0.25))
    assert terms.disagreement == pytest.approx(max(0.25 + 1.5, 8.0))
    rounding = 49 * 0.1 * 0.9
    assert terms.variance == pytest.approx(2 * 2 * 0.25 * (rounding + 0.01))  # 2Lγ(σ̃² + min{c², M²})
    assert terms.right == pytest.approx(sum(terms.as_dict().values()) - terms.factor)
    assert terms.gradient == pytest.approx(terms.right / terms.factor)
    plain = bound(PROBLEM, dataclasses.replace(CHOICE, quantised=False), "printed")
    assert plain.variance == pytest.approx(2 * 0.25 * 0.01)  # the last term without quantisation: Lγ·min{c², M²}


def test_what_is_corrected() -> None:
    printed, sketch, corrected = (bound(PROBLEM, CHOICE, v) for v in ("printed", "sketch", "corrected"))
    assert sketch == dataclasses.replace(printed, noise=2 * printed.noise)
    assert corrected.noise == pytest.approx(98 * printed.noise)  # E‖N(0, Ak·I)‖² is dAk
    squared = 2 * 2 * 0.25 * (min(49 * 0.01, 9) - 0.01)  # ‖clip(top-k)‖² is up to kc²
    assert corrected.variance == pytest.approx(printed.variance + squared)
    assert corrected.disagreement == pytest.approx(max(1.75, 2 * 0.1 * 4))  # 2c‖σ‖₁
    assert (corrected.factor, corrected.bias, corrected.start) == (printed.factor, printed.bias, printed.start)


def test_the_sharp_one() -> None:
    sharp = bound(PROBLEM, CHOICE, "sharp")
    assert sharp.factor == pytest.approx(0.1 * 2 / (math.sqrt(98) + 3))
    assert sharp.noise == pytest.approx(0.25 * 98 * 0.02 * 49 / 10)  # noise per teacher: its mean has an Nth of it
    once = bound(PROBLEM, dataclasses.replace(CHOICE, drawn="once"), "sharp")
    assert once.noise == pytest.approx(sharp.noise / 10)  # Algorithm 3 adds it once
    assert sharp.bias == pytest.approx(3 * min(0.2 * 3, 0.1 * 7))
    assert sharp.gradient < bound(PROBLEM, CHOICE, "corrected").gradient


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"k": 99}, {"clip": 0.0}, {"clip": 1.5}, {"noise": -1.0}, {"steps": 0}, {"tau": -0.1}]
)
def test_what_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"k must be|above 0|not be below|a probability"):
        bound(PROBLEM, dataclasses.replace(CHOICE, **wrong))  # type: ignore[arg-type]


def test_the_dichotomy_has_a_better_constant() -> None:
    """Claim 1's 1/(d + 2) may be 2/(√d + 3): nothing makes both errors too large."""
    rng = np.random.default_rng(0)
    for d in (1, 2, 9, 100):
        alpha = 2 / (math.sqrt(d) + 3)
        assert alpha >= 1 / (d + 2)
        worst = np.full(d, 1 / (math.sqrt(d) + 1))
        worst[0] = 1.0
        for sizes in (worst, *(rng.pareto(rng.uniform(0.3, 3), d) for _ in range(300))):
            share = alpha * sizes.sum() / sizes.max()  # all that may be clipped lies on the largest coordinate
            clipped = sizes.max() ** 2 * min(share, 1.0)
            assert clipped <= (1 - alpha) * (sizes**2).sum() * (1 + 1e-9)
        assert worst.max() * worst.sum() * alpha == pytest.approx((1 - alpha) * (worst**2).sum())  # and no better one


# --- what top-k leaves out --------------------------------------------------------------------------------------------


def test_tau_by_hand() -> None:
    found = theorem.tau(np.array([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0], [1e-30, 1e-30, 1e-30]]))
    assert found.shape == (2, 4)  # a gradient that is zero has none
    assert found[0] == pytest.approx([1.0, 0.6, 0.0, 0.0])
    assert found[1] == pytest.approx([1.0, *(theorem.worst(k, 3) for k in (1, 2)), 0.0])


def test_weibull_sizes_have_the_tau_of_their_shape() -> None:
    rng = np.random.default_rng(1)
    for shape in (0.5, 1.0, 2.0):
        curves = theorem.tau(rng.weibull(shape, (40, 2000)))
        kept = np.linspace(0, 1, 2001)
        assert np.abs(curves.mean(axis=0) - theorem.weibull(kept, shape)).max() < 0.05
        fitted = theorem.fit(curves.mean(axis=0))
        assert fitted.weibull_shape == pytest.approx(shape, rel=0.1)
        assert fitted.weibull_error < 0.02
    wrong = theorem.tau(rng.uniform(-1, 1, (40, 2000))).mean(axis=0)  # another law is not taken for one
    assert theorem.fit(wrong).weibull_error > 2 * fitted.weibull_error


def test_the_printed_model() -> None:
    kept = np.array([0.0, 0.5, 1.0])
    assert theorem.printed(kept, 1.0, 0.5) == pytest.approx(
        [1.0, (math.exp(-math.sqrt(0.5)) - math.exp(-1)) / (1 - math.exp(-1)), 0.0]
    )
    assert theorem.printed(kept, 3.0, 0.5)[2] > 0.1  # only ρ₁ = 1 ends at 0, as the assumption wants


# --- simulated teachers -----------------------------------------------------------------------------------------------


def test_the_simulated_problem_satisfies_the_assumptions() -> None:
    teachers = reproduced.problems()["8 teachers that disagree"]
    problem = teachers.problem()
    x = np.random.default_rng(2).normal(0, 3, (50, 24))
    gradients = teachers.gradients(x)
    slope = gradients.mean(axis=1)
    assert ((gradients**2).sum(axis=2).mean(axis=1) <= problem.gradient**2).all()
    deviations = np.sqrt(((gradients - slope[:, None]) ** 2).mean(axis=1).max(axis=0))
    assert np.linalg.norm(deviations) <= problem.deviation
    assert deviations.sum() <= problem.deviation_l1
    step = 1e-5
    for i in (0, 7, 23):
        there = x.copy()
        there[:, i] += step
        assert (teachers.value(there) - teachers.value(x)) / step == pytest.approx(slope[:, i], abs=1e-4)
    near = x + 0.1 * np.random.default_rng(3).normal(size=x.shape)
    moved = np.linalg.norm(teachers.gradients(near).mean(axis=1) - slope, axis=1)
    assert (moved <= problem.smoothness * np.linalg.norm(near - x, axis=1)).all()
    assert (teachers.value(x) >= teachers.value(teachers.best()[None])[0]).all()


def test_what_is_simulated_is_equation_2() -> None:
    """One step of it by hand: top-k, clipped, by chance, with noise of variance Ak a teacher."""
    gradients = np.array([[[0.9, -0.2, 0.1, 0.05]]])
    kept = reproduced._compressed(
        gradients, dataclasses.replace(CHOICE, k=2, clip=0.5, quantised=False), np.random.default_rng(0)
    )
    assert kept[0, 0] == pytest.approx([0.5, -0.2, 0.0, 0.0])
    many = np.repeat(gradients, 40_000, axis=0)
    rounded = reproduced._compressed(many, dataclasses.replace(CHOICE, k=2, clip=0.5), np.random.default_rng(0))
    assert set(np.unique(rounded)) == {-1.0, 0.0, 1.0}
    assert rounded.mean(axis=0)[0] == pytest.approx([0.5, -0.2, 0.0, 0.0], abs=0.01)
    spread = ((rounded - kept) ** 2).sum(axis=2).mean()
    assert spread <= theorem.rounding_variance(2, 0.5)
    noise = reproduced._noise(np.zeros((20_000, 4)), 200_000, CHOICE, np.random.default_rng(0))
    assert noise.var() == pytest.approx(0.02 * 49 / 10, rel=0.02)  # of ten teachers
    assert noise.var() == pytest.approx(theorem.noise_variance(PROBLEM, CHOICE), rel=0.02)


def test_the_bound_holds_and_its_twins_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    every = reproduced.choices
    monkeypatch.setattr(reproduced, "sizes", lambda full: {"repeats": 8, "ends": (10, 40)})
    monkeypatch.setattr(reproduced, "choices", lambda d: every(d)[::2] + every(d)[1::6])
    lines = reproduced.grid(False)
    assert len(lines) > 400
    for line in lines:
        for version in ("corrected", "sharp"):
            assert line["left"] + 3 * line["error"] <= line[version], (version, line)
        assert line["left_printed"] >= line["left"] * (1 - 1e-9)  # min of means, not the mean of mins
        assert line["tau"] <= theorem.worst(line["k"], 40 if "flat" in line["problem"] else 24) + 1e-9
    assert max(line["sharp_used"] for line in lines) > 0.05  # not true by a mile
    for name, found in reproduced.twins().items():
        assert found["left"] - 3 * found["error"] > found["without d"], name
        assert found["left"] + 3 * found["error"] < found["with d"], name


# --- choosing k -------------------------------------------------------------------------------------------------------


def test_more_noise_wants_fewer_coordinates() -> None:
    facts = {"dimensions": 784, "teachers": 4000, "k": 200, "steps": 86}
    found = [theorem.suggest_k(sigma=sigma, **facts).k for sigma in (1.0, 500.0, 5000.0, 50_000.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 600
    assert found[-1] < 10
    half = theorem.suggest_k(sigma=5000 * math.sqrt(0.5), **facts | {"k": 100})  # the same budget, said of another k
    assert half.k == theorem.suggest_k(sigma=5000.0, **facts).k
    bias, noise = theorem.trade_off(sigma=5000.0, **facts)
    assert (np.diff(bias) <= 0).all()
    assert (np.diff(noise) > 0).all()
    assert bias[-1] == 0
    best = theorem.suggest_k(sigma=5000.0, **facts)
    assert (bias + noise).min() == pytest.approx(best.bias + best.noise) == pytest.approx((bias + noise)[best.k - 1])


def test_the_plan_suggests_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--data", "mnist", *options])
        assert ended.value.code == 0
        return capsys.readouterr().out

    found = json.loads(plan("--method", "datalens-paper", "--json"))
    assert found["settings"]["k"] == 200  # as printed
    assert 1 <= found["suggested"]["k"] <= 784
    assert found["suggested"]["k"] != 200
    assert f"suggestion: --k {found['suggested']['k']} (here 200)" in plan("--method", "datalens-paper")
    assert "suggestion: --k" in plan("--warm-start", "off")
    assert "suggest" not in plan()  # no teachers, no k
    assert "suggest" not in plan("--warm-start", "off", "--epsilon", "inf")  # no noise


# --- the command ------------------------------------------------------------------------------------------------------


def test_reproduce_theory_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"method": "datalens", "warm_start": "off", "data": "digits", "epsilon": 1.0, "delta": 1e-5}
    crew = reproduced.Crew(name="digits, cosines", options=small | {"teachers": 30, "steps": 2}, how="tiny")
    monkeypatch.setattr(reproduced, "crews", lambda full: [crew])
    monkeypatch.setattr(reproduced, "sizes", lambda full: {"repeats": 3, "ends": (3,)})
    monkeypatch.setattr(reproduced, "choices", lambda d: [CHOICE.__class__(**vars(CHOICE) | {"k": 5, "tau": 0.0})])
    make = topagg.dcgan_architecture
    narrow: dict[str, Any] = {"dense": 32, "widths": (8, 8)}
    monkeypatch.setattr(topagg, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
    made = reproduce("theory", full=False, out=tmp_path, device="cpu")
    [row] = made["rows"]
    assert row["gradients"] > 30 * 2
    assert row["dimensions"] == 64
    assert 0 < row["tau_at_k"] <= row["tau_at_k_most"] <= row["tau_at_k_worst"]
    text = Path(made["markdown"]).read_text(encoding="utf-8")
    assert reproduced.WARNING in text
    assert text.count(": violated |") == 2
    assert text.count(": holds |") == 2
    assert Path(made["plot"]).stat().st_size > 1000
    assert not list((tmp_path / "theory-quick").glob(".run-*"))  # a run that is nobody's release is thrown away
    for name in ("measure_crew", "grid", "twins"):
        monkeypatch.setattr(reproduced, name, lambda *_: pytest.fail("measured again"))
    assert reproduce("theory", full=False, out=tmp_path, device="cpu")["rows"] == made["rows"]
    (tmp_path / "theory-quick" / "cells.jsonl").rename(tmp_path / "theory.jsonl")
    shown = reproduce("theory", full=False, out=tmp_path / "shown", device="cpu", stored=tmp_path)
    assert Path(shown["markdown"]).read_text(encoding="utf-8") == text
    monkeypatch.setattr(reproduced, "sizes", lambda full: {"repeats": 4, "ends": (3,)})
    with pytest.raises(DatalensError, match="leave --from out"):
        reproduce("theory", full=False, out=tmp_path / "shown", device="cpu", stored=tmp_path)


def test_gradients_of_all_teachers_and_images_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride would meet the same image of every other teacher where the batch divides it."""
    from datalens.reproduce import figure2

    rows = torch.zeros(40, 15, 4)
    rows[..., 0] = torch.arange(15.0)  # which image it is
    rows[..., 1] = torch.arange(40.0)[:, None]  # and which teacher's
    seen: list[Any] = []

    def watched(options: Any, _: Any, looking: Any) -> Any:
        looking(lambda gradients: None)(SimpleNamespace(values=rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(figure2, "watched_run", watched)
    monkeypatch.setattr(reproduced, "ROWS", 100)
    monkeypatch.setattr(reproduced.theorem, "tau", lambda found: seen.append(found) or found)
    crew = reproduced.Crew(name="made up", options={"data": "digits", "epsilon": 1.0, "delta": 1e-5}, how="")
    with pytest.raises(KeyboardInterrupt):
        reproduced.measure_crew(crew, tmp_path, "cpu")
    [found] = seen
    assert len(found) == len(np.unique(found, axis=0)) == 100
    assert set(found[:, 0]) == set(range(15)) and len(set(found[:, 1])) > 30
