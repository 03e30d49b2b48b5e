"""`datalens audit`: what it prints, and that it exits with 1 when a claim is broken or a control is missed."""

import dataclasses
import json

import numpy as np
import pytest

from datalens.evaluate.audits import end_to_end as whole_runs
from datalens.evaluate.audits import mechanism
from datalens.privacy import audit
from datalens.privacy.audit import Finding

KEYS = {
    *("audit", "claimed", "lower_bound", "verdict_bound", "statistic", "trials", "controls"),
    *("delta", "relation", "accountant", "level", "ok"),
}
QUICK = ("audit", "mechanism", "--noise", "gaussian", "--trials", 2000, "--epsilon", 4)

pytestmark = pytest.mark.usefixtures("quickly")


def honest(name="x"):
    return Finding(name=name, claimed=4.0, lower_bound=2.0, verdict_bound=1.0, trials=100)


def broken(name="x"):
    return Finding(name=name, claimed=4.0, lower_bound=9.0, verdict_bound=8.0, trials=100)


# --- mechanism ------------------------------------------------------------------------------------


def test_mechanism_prints_one_json_object(datalens):
    result = datalens(*QUICK, "--releases", 2, "--json").succeeded()
    assert result.out.count("\n") == 1
    found = result.json
    assert set(found) >= KEYS
    assert found["controls"] == dict.fromkeys(
        ("half the noise", "sensitivity √k for 2√k", "charged per batch, not per image"), True
    )
    assert (found["delta"], found["relation"], found["accountant"]) == (1e-5, "add-remove", "exact")
    assert found["claimed"] == pytest.approx(4.0)
    assert 0 < found["verdict_bound"] < found["lower_bound"]
    assert [one["releases"] for one in found["findings"]] == [1, 2]
    assert found["trials"] == 4000
    assert found["ok"] is True


def test_every_printed_epsilon_says_which(datalens):
    result = datalens(*QUICK, "--relation", "replace-one", "--accountant", "rdp").succeeded()
    with_epsilon = [line for line in result.out.splitlines() if "ε" in line]
    assert with_epsilon
    assert all("δ = 1e-05, replace-one, rdp accountant" in line for line in with_epsilon)
    assert result.out.count("caught") == 3


def test_a_broken_mechanism_is_exit_1(datalens, monkeypatch):
    """Noise a third as large as what is charged, where the command makes its mechanism."""
    make = mechanism.make_mechanism

    def weak(law, sigma):
        return audit.Weakened(charged=make(law, sigma), released=make(law, sigma / 3))

    monkeypatch.setattr(mechanism, "make_mechanism", weak)
    result = datalens(*QUICK)
    assert result.code == 1
    assert "BROKEN" in result.out
    assert "Traceback" not in result.err


def test_a_missed_control_is_exit_1(datalens, monkeypatch):
    def harmless(plan, make):
        return [dataclasses.replace(audit.honest(plan, make), name="half the noise")]

    monkeypatch.setattr(audit, "controls", harmless)
    result = datalens(*QUICK, "--json")
    assert result.code == 1
    assert result.json["controls"] == {"half the noise": False}
    assert result.json["ok"] is False
    assert not any(one["broken"] for one in result.json["findings"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trials", 3), "--trials"),
        (("--releases", 0), "--releases"),
        (("--images", 2), "--images"),
        (("--epsilon", "inf"), "finite"),
        (("--epsilon", "-1"), "above 0"),
        (("--delta", 0), "delta"),
    ],
)
def test_mechanism_refuses_nonsense(datalens, options, says):
    assert says in datalens("audit", "mechanism", *options).refused()


# --- end to end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attacked", "control", "code"), [(honest, broken, 0), (broken, broken, 1), (honest, honest, 1)]
)
def test_end_to_end_exit_codes(datalens, monkeypatch, attacked, control, code):
    """What was found is made up here: the audits themselves are tested elsewhere, and take minutes."""

    def two(worlds, name, *, runs, tick):
        return (attacked if name.startswith("with and without") else control)(name)

    def one(question, name, *, weaken=1.0):
        return (attacked if weaken == 1 else control)(name)

    monkeypatch.setattr(whole_runs, "two_worlds", lambda question, **options: None)
    monkeypatch.setattr(whole_runs, "audit_two_worlds", two)
    monkeypatch.setattr(whole_runs, "audit_one_run", one)
    result = datalens("audit", "end-to-end", "--json")
    assert result.code == code
    assert set(result.json) >= KEYS
    assert set(result.json["controls"].values()) == {control is broken}
    assert len(result.json["controls"]) == 3
    shown = datalens("audit", "end-to-end")
    assert shown.code == code
    assert all("δ = 1e-05, add-remove, exact accountant" in line for line in shown.out.splitlines() if "ε" in line)


def test_end_to_end_refuses_nonsense(datalens):
    assert "--runs" in datalens("audit", "end-to-end", "--runs", 1).refused()


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_end_to_end_for_real(datalens, relation):
    options = ("--epsilon", 4, "--relation", relation)
    found = datalens("audit", "end-to-end", *options, "--json").succeeded().json
    assert all(found["controls"].values())
    assert found["lower_bound"] > 4 / 3
    assert found["verdict_bound"] < found["claimed"] <= 4


# --- attacks --------------------------------------------------------------------------------------


def test_attacks_on_a_run(datalens, copy):
    result = datalens("audit", "attacks", copy, "--data", "digits", "--count", 500, "--json").succeeded()
    assert result.out.count("\n") == 1
    found = result.json
    assert set(found) >= KEYS
    assert found["controls"] == {"a generator that copies training images": True}
    assert (found["claimed"], found["delta"], found["relation"]) == (1.0, 1e-5, "add-remove")
    (membership,) = found["membership"]
    assert membership["auc_interval"][0] <= membership["auc"] <= membership["auc_interval"][1]
    assert found["reconstruction"]["found"] is False
    kept = json.loads((copy / "audit.json").read_text())["attacks"]  # for the owner's page
    assert kept["membership"] == found["membership"] and kept["lines"]
    assert (copy / "audit.json").stat().st_mode & 0o777 == 0o600


def test_attacks_for_people_say_what_is_not_covered(datalens, copy):
    lines = datalens("audit", "attacks", copy, "--data", "digits", "--count", 500).succeeded().out.splitlines()
    assert lines[-1] == "measured on real data: for the owner, not covered by ε"
    assert "δ = 1e-05, add-remove, exact accountant" in lines[0]


def test_a_set_of_copies_is_exit_1(datalens, trained, tmp_path):
    """A certificate does not save it."""
    from datalens.data import formats
    from datalens.released.loading import load
    from datalens.released.synthetic import save

    datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 300).succeeded()
    real = formats.load("digits")
    copied = dataclasses.replace(load(tmp_path / "s.npz"), images=real.images[:300], labels=real.labels[:300])
    save(copied, tmp_path / "copied.npz")
    result = datalens("audit", "attacks", tmp_path / "copied.npz", "--data", "digits", "--json")
    assert result.code == 1
    assert result.json["reconstruction"]["copies"] >= 290
    assert result.json["controls"] == {"a generator that copies training images": True}


def test_attacks_with_shadow_models(datalens, copy):
    options = ("--data", "digits", "--count", 300, "--shadows", 2)
    found = datalens("audit", "attacks", copy, *options, "--json").succeeded().json
    plain, sharp = found["membership"]
    assert sharp["attack"] == "likelihood ratio over 2 shadow models"
    assert plain["members"] == sharp["members"]


def test_attacks_refuse_what_they_cannot_read(datalens, trained, tmp_path):
    assert "exist" in datalens("audit", "attacks", tmp_path / "no.npz", "--data", "digits").refused()
    assert "--records" in datalens("audit", "attacks", trained, "--data", "digits", "--records", 0).refused()
    few = ("--data", "digits", "--records", 20, "--count", 20)
    assert "too few" in datalens("audit", "attacks", trained, *few).refused()
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 8, 8, 1), np.uint8))
    datalens("audit", "attacks", tmp_path / "x.npz", "--data", "digits").refused()
    datalens("sample", trained, "--out", tmp_path / "s.npz", "--count", 30).succeeded()
    shadowed = datalens("audit", "attacks", tmp_path / "s.npz", "--data", "digits", "--shadows", 2)
    assert "not a run" in shadowed.refused()
