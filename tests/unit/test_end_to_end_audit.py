"""The pieces of the end-to-end audit: its worst case is one, its attacker's replay is exact, its scores tell."""

import dataclasses

import numpy as np
import pytest
import torch

from datalens.data.records import record_keys
from datalens.errors import DatalensError
from datalens.evaluate.audits import end_to_end
from datalens.evaluate.audits.end_to_end import Question
from datalens.evaluate.audits.watched_run import Observed, share_names, watch
from datalens.methods import topagg as method
from datalens.privacy.audit import Weakened
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SeededNoise

RELATIONS = ["add-remove", "replace-one"]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    """One thread, and a small generator: neither matters to what is attacked."""
    make, threads = method.dcgan_architecture, torch.get_num_threads()
    narrow = {"dense": 16, "widths": (4, 4)}
    monkeypatch.setattr(method, "dcgan_architecture", lambda *a, **k: dataclasses.replace(make(*a, **k), **narrow))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(sigma: float) -> GaussianSum:
    return GaussianSum(sigma=sigma, noise=SeededNoise(1))


def noiseless(worlds: end_to_end.TwoWorlds) -> Weakened:
    """The full price, no noise: what is released is the sum itself."""
    return Weakened(charged=worlds.mechanism, released=seeded(0.0))


def moved(seen: list[Observed]) -> list[set[int]]:
    """Teachers whose votes the canary changes, step by step."""
    return [set(np.flatnonzero((step.rows[0] != step.rows[1]).any(axis=(1, 2))).tolist()) for step in seen]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("copies", [1, 2])
def test_the_replay_is_exact_and_the_case_nearly_the_worst(relation, copies):
    question = Question(epsilon=4.0, delta=1e-5, relation=relation)
    worlds = end_to_end.two_worlds(question, copies=copies)
    s = worlds.setup.settings
    for present, actual in enumerate((worlds.without, worlds.with_it)):
        seen, claimed = watch(worlds.setup, actual, (worlds.without, worlds.with_it), noiseless(worlds))
        assert claimed == pytest.approx(4.0, abs=1e-3)
        assert len(seen) == question.steps
        for step in seen:  # the attacker computes to the last vote what the teachers of this world said
            assert (step.released == step.rows[present].astype(int).sum(axis=0)).all()
            assert (step.released != step.rows[1 - present].astype(int).sum(axis=0)).any()
        assert all(len(teachers) == copies for teachers in moved(seen))
        distance = sum(float((np.diff(step.rows.astype(float).sum(axis=1), axis=0) ** 2).sum()) for step in seen)
        worst = 4 * s.k * s.batch * s.steps
        assert distance > 0.85 * worst * copies**1.5  # copies push the same way: more than √copies as far


def test_the_worst_seed_lets_the_canary_be_drawn_always():
    seed, (number,) = end_to_end.worst_seed(copies=1, steps=2)
    worlds = end_to_end.two_worlds(Question(epsilon=4.0, delta=1e-5))
    assert worlds.setup.settings.seed == seed
    features, _ = worlds.with_it.batch(torch.tensor([number]), size=2, seed=seed, step=0, draw=0)
    alone, _ = worlds.without.batch(torch.tensor([number]), size=2, seed=seed, step=0, draw=0)
    assert torch.equal(features[0, 0], features[0, 1])
    assert torch.equal(alone[0, 0], alone[0, 1])
    assert not torch.equal(features[0, 0], alone[0, 0])


def test_names_hash_into_the_shares_that_were_asked_for():
    setup = Question(epsilon=1.0, delta=1e-5).setup(teachers=16, batch=2, steps=1, seed=3)
    wanted = [5, 0, 5, 15, 5]
    names = share_names(setup, wanted)
    keys = record_keys(np.empty((5, 0)), np.array(names))
    assert method.share_rule(setup.settings).shares(np.arange(5), keys).tolist() == wanted
    assert len(set(names)) == 5


def observed(released, without, with_it):
    rows = np.array([without, with_it])[:, None, None, :]  # one teacher, one image
    return Observed(released=np.array([released]), rows=rows)


def test_statistics_by_hand():
    near_with = [observed([1.0, 0.0], [-1, 0], [1, 0])]
    assert end_to_end.log_likelihood(near_with) == 2.0
    assert end_to_end.exact_match(near_with) == 2.0
    half_way = [observed([0.0, 7.0], [-1, 0], [1, 0])]
    assert end_to_end.log_likelihood(half_way) == 0.0
    assert end_to_end.exact_match(half_way) == 0.0
    # One image of many without noise decides the match, whatever the others look like.
    leak = [observed([-90.0, 3.0], [-1, 0], [1, 0]), observed([1.0, 0.0], [-1, 0], [1, 0])]
    assert end_to_end.log_likelihood(leak) < 0 < end_to_end.exact_match(leak)


def test_coins_are_read_off_a_sum_in_spite_of_each_other():
    random = np.random.default_rng(0)
    rows = random.choice([-1, 1], (2, 60, 4, 64))
    coins = random.random(60) < 0.5
    total = np.where(coins[:, None, None], rows[1], rows[0]).sum(axis=0)
    scores = end_to_end.coin_scores([Observed(released=total + random.normal(size=total.shape), rows=rows)], 1.0)
    assert ((scores > 0) == coins).all()
    assert np.abs(scores).max() < 0.7


@pytest.mark.parametrize("relation", RELATIONS)
def test_one_run_bounds_honest_noise_and_catches_none(relation):
    question = Question(epsilon=2.0, delta=1e-5, relation=relation, canaries=150)
    honest = end_to_end.audit_one_run(question, "honest")
    assert not honest.broken
    assert honest.trials == 150
    assert honest.claimed == pytest.approx(2.0, abs=1e-3)
    broken = end_to_end.audit_one_run(question, "broken", weaken=end_to_end.WEAKER)
    assert broken.broken
    assert broken.claimed == pytest.approx(2.0, abs=1e-3)


def test_a_peek_is_seen_at_once():
    worlds = end_to_end.two_worlds(Question(epsilon=1.0, delta=1e-5, relation="replace-one", steps=1), peek=True)
    ticks = []
    found = end_to_end.audit_two_worlds(worlds, "peek", runs=25, tick=ticks.append)
    assert len(ticks) == 50
    assert found.broken
    assert found.claimed == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"runs": 1}, "--runs"),
        ({"canaries": 3}, "--canaries"),
        ({"epsilon": float("inf")}, "finite"),
        ({"epsilon": 9.0}, "cannot refute"),
    ],
)
def test_questions_that_make_no_sense(changed, says):
    with pytest.raises(DatalensError, match=says):
        Question(**{"epsilon": 1.0, "delta": 1e-5, **changed})
