"""The audit of private moments: its worst case is one, the claim stands, and what is broken on purpose is caught.

Noise comes from the operating system, so some tests are random. Verdicts are at level 1e-4 (`VERDICT_LEVEL`). With the
trials used here half of the claim lies more than four standard errors under the bound, and no control comes nearer to
its claim.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

from datalens.cli import main
from datalens.errors import DatalensError
from datalens.evaluate.audits import moments
from datalens.evaluate.audits.mechanism import laws
from datalens.evaluate.audits.moments import CONTROLS, HONEST, Attack, Question, Subject
from datalens.methods.moments import RELEASES
from datalens.privacy import audit
from datalens.privacy.ledger import Ledger

QUESTION = Question(epsilon=1.0, delta=1e-5)
SETTINGS = QUESTION.settings("gaussian")
ALL, *SINGLE = HONEST


def rows(name: str, copies: int = 1) -> np.ndarray:
    """What the record adds, [copies, cells]."""
    both = (
        moments.exactly(moments.total_of(name, SETTINGS, present=present, copies=copies)) for present in (False, True)
    )
    without, with_it = (total.reshape(copies, -1).astype(np.float64) for total in both)
    return with_it - without


# --- the worst case -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASES)
def test_the_records_row_is_as_long_as_the_bound_allows(name: str) -> None:
    total = moments.total_of(name, SETTINGS, present=True)
    assert total.row_unit == "record"
    assert total.l2_bound == SETTINGS.l2_bound(name)
    assert 0.999 * total.l2_bound < np.linalg.norm(rows(name)) <= total.l2_bound


@pytest.mark.parametrize("name", RELEASES)
def test_copies_are_the_same_release_again_and_again(name: str) -> None:
    one, many = (moments.total_of(name, SETTINGS, present=True, copies=copies) for copies in (1, 5))
    assert (moments.exactly(many).reshape(5, -1) == moments.exactly(one).reshape(1, -1)).all()
    assert (many.l2_bound, many.diameter, many.row_unit) == (one.l2_bound, one.diameter, one.row_unit)
    assert (rows(name, 5) == rows(name)).all()


def test_nobody_else_is_in_the_records_class() -> None:
    without = moments.exactly(moments.total_of("sums", SETTINGS, present=False))
    assert without[0].any() and not without[1].any()


def test_a_run_of_eight_has_the_shares_of_a_plan_and_one_release_has_everything() -> None:
    assert ALL.releases == RELEASES
    assert ALL.settings(QUESTION, "gaussian").releases == SETTINGS.releases
    for subject in (*SINGLE, *CONTROLS):
        (name,) = subject.releases
        later = RELEASES[RELEASES.index(name) :]
        shares = subject.settings(QUESTION, "gaussian").releases
        assert sum(shares[other] for other in later) == shares[name] > 0


@pytest.mark.parametrize("subject", [*HONEST, *CONTROLS], ids=lambda subject: subject.name)
def test_every_subject_claims_all_of_the_budget_and_no_more(subject: Subject) -> None:
    _, claimed = Attack(subject, QUESTION, "gaussian").statistics(present=True, copies=2)
    assert claimed <= 1.0
    assert claimed == pytest.approx(1.0, abs=1e-5)


# --- twins ----------------------------------------------------------------------------------------


def ask(name: str, sigma: float = 1e4) -> moments.Ask:
    return moments.Ask(
        total=moments.total_of(name, SETTINGS, present=False),
        sigma=sigma,
        law="gaussian",
        grid=SETTINGS.grid,
        ledger=Ledger.in_memory(dataclasses.replace(QUESTION.budget, epsilon=math.inf)),
        step=0,
    )


def test_the_twins_by_hand() -> None:
    asked = ask("sums")
    exact = moments.exactly(asked.total)
    honest = moments.as_it_is(asked)
    assert (honest != exact).all()
    hidden = moments.no_noise_on_absent_classes(asked)
    assert (hidden[0] != exact[0]).all() and not hidden[1].any()
    counted = moments.true_counts(asked)
    assert (counted[:, -1] == [2 * SETTINGS.counted, 0]).all()
    assert (counted[:, :-1] != exact[:, :-1]).all()
    assert [event.mu for event in asked.ledger.events] == [SETTINGS.grid / 1e4] * 3  # type: ignore[union-attr]


def test_the_square_is_charged_as_if_it_were_the_norm() -> None:
    sigma = 2.0**30
    asked, honest = ask("covariances", sigma), ask("covariances", sigma)
    moments.as_it_is(honest)
    drawn = [moments.norm_for_its_square(asked) - moments.exactly(asked.total) for _ in range(100)]
    assert np.std(drawn) == pytest.approx(sigma / moments.CLIP, rel=0.15)
    assert {event.mu for event in asked.ledger.events} == {honest.ledger.events[0].mu}  # type: ignore[union-attr]


# --- the audit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_the_claim_of_a_run_stands_and_half_of_it_is_reached(epsilon: float) -> None:
    found = Attack(ALL, dataclasses.replace(QUESTION, epsilon=epsilon), "gaussian").finding()
    assert not found.broken
    assert found.verdict_bound <= found.claimed <= epsilon
    assert epsilon / 2 <= found.lower_bound
    assert found.trials == 20_000


@pytest.mark.parametrize("subject", SINGLE, ids=lambda subject: subject.name)
def test_the_claim_of_each_kind_of_release_stands(subject: Subject) -> None:
    found = Attack(subject, dataclasses.replace(QUESTION, epsilon=2.0), "gaussian").finding()
    assert not found.broken
    assert found.lower_bound >= 1.0


@pytest.mark.parametrize("subject", CONTROLS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_what_is_broken_is_caught(subject: Subject, epsilon: float) -> None:
    found = Attack(subject, dataclasses.replace(QUESTION, epsilon=epsilon), "gaussian").finding()
    assert found.broken
    assert found.claimed == pytest.approx(epsilon, abs=1e-5)


@pytest.mark.skipif(laws()[0] != "discrete-gaussian", reason="OpenDP is not installed")
def test_exact_discrete_noise_keeps_the_claim_too() -> None:
    question = Question(epsilon=4.0, delta=1e-5, trials=1000)
    sums, square = SINGLE[1], CONTROLS[0]
    found = Attack(sums, question, "discrete-gaussian").finding()
    assert not found.broken
    assert found.lower_bound >= 2.0
    assert Attack(square, question, "discrete-gaussian").finding().broken


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"trials": 10}, "--trials"),
        ({"epsilon": math.inf}, "finite"),
        ({"epsilon": 0.0}, "above 0"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_questions_that_make_no_sense(changed: dict[str, float], says: str) -> None:
    with pytest.raises(DatalensError, match=says):
        dataclasses.replace(QUESTION, **changed)  # type: ignore[arg-type]


# --- the command ----------------------------------------------------------------------------------

COMMAND = ["audit", "moments", "--noise", "gaussian", "--trials", "1000", "--epsilon", "4"]


def call(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main.main([*COMMAND, *more])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_one_json_object_in_the_shape_of_the_other_audits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = call(capsys, "--json")
    assert code == 0
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["audit"] == "moments"
    assert found["controls"] == dict.fromkeys((control.name for control in CONTROLS), True)
    assert (found["delta"], found["relation"], found["accountant"]) == (1e-5, "add-remove", "exact")
    assert (found["trials"], found["ok"], found["level"]) == (2000, True, audit.VERDICT_LEVEL)
    assert found["statistic"] == moments.STATISTIC
    assert found["lower_bound"] > 2
    assert found["verdict_bound"] < found["claimed"] <= 4
    assert [one["subject"] for one in found["findings"]] == [subject.name for subject in HONEST]
    assert {one["law"] for one in found["findings"] + found["control_findings"]} == {"gaussian"}


def test_every_printed_epsilon_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = call(capsys)
    assert code == 0
    with_epsilon = [line for line in out.splitlines() if "ε" in line]
    assert len(with_epsilon) == len(HONEST)
    assert all("δ = 1e-05, add-remove, exact accountant" in line for line in with_epsilon)
    assert out.count("caught") == len(CONTROLS)


def test_noise_that_is_too_small_is_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make = moments.make_mechanism
    monkeypatch.setattr(
        moments,
        "make_mechanism",
        lambda law, sigma: audit.Weakened(charged=make(law, sigma), released=make(law, sigma / 3)),
    )
    code, out = call(capsys)
    assert code == 1
    assert out.count("BROKEN") == len(HONEST)


def test_a_missed_control_is_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = dataclasses.replace(CONTROLS[0], release=moments.as_it_is)
    monkeypatch.setattr(moments, "CONTROLS", (harmless, *CONTROLS[1:]))
    code, out = call(capsys, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["controls"] == {control.name: control is not CONTROLS[0] for control in CONTROLS}
    assert not any(one["broken"] for one in found["findings"])
    assert found["ok"] is False
