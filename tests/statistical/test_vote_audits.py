"""Attacks on the compressors of DataLens, on PATE-GAN's labels and on G-PATE's answers; and on twins that are broken on
purpose, in ways published code was. Noise comes from the operating system: every verdict is at level 1e-4.

The attacker knows all ballots or gradients but one teacher's, which is one of two, as far apart as they can be.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import (
    Ballots,
    BoundedSum,
    Contributions,
    Gradients,
    VoteCounts,
    count_ballots,
    sum_bounded,
)
from datalens.bounded.count_sketch import CountSketch
from datalens.bounded.klevel import KLevel
from datalens.bounded.topk_sign import TopKSign
from datalens.data.schema import Schema
from datalens.evaluate.audits.mechanism import make_mechanism
from datalens.privacy import audit
from datalens.privacy.accountant import Accountant
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.events import confident_check
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import ConfidentGNMax, LaplaceVote
from datalens.privacy.noise import LaplaceNoise, SecureNoise
from datalens.privacy.released import Released
from datalens.public.transforms import Rotation, Sketch
from datalens.released.labelled import CriticStudent
from datalens.released.student import Fakes

DELTA = 1e-5
TRIALS = 10_000


def free() -> Ledger:
    return Ledger.in_memory(Budget(epsilon=math.inf, delta=DELTA, relation="add-remove", accountant="exact"))


def verdict(
    name: str, release: Callable[[bool], np.ndarray], centres: tuple[np.ndarray, np.ndarray], claimed: float
) -> audit.Finding:
    """`release(flipped)` [trials, cells] lies around one of two known centres: which one, by the likelihood ratio?"""
    direction = centres[1] - centres[0]
    middle = float(direction @ (centres[0] + centres[1]) / 2)
    found = [release(flipped) @ direction for flipped in (False, True)]
    errors = audit.count_errors(found[0], found[1], threshold=middle)
    return audit.finding(name, errors, claimed=claimed, delta=DELTA)


# --- compressors -----------------------------------------------------------------------------------------------------

SIZE, LEVELS, K, ROWS = 16, 8, 8, 3


def klevel_sum(*, flipped: bool, trials: int = 1) -> BoundedSum:
    """A gradient that the rotation makes all corners: every level is the outermost one."""
    corner = torch.where(torch.arange(SIZE) % 3 == 0, -1.0, 1.0)
    worst = Rotation(SIZE, 0).inverse(corner)
    values = torch.stack([-worst if flipped else worst, worst]).unsqueeze(1).expand(-1, trials, -1)
    return sum_bounded([KLevel(levels=LEVELS, clip=1e9, seed=0, size=SIZE)(_gradients(values))])


def sketch_sum(*, flipped: bool, trials: int = 1, columns: int = 4) -> BoundedSum:
    """Votes that collide as often as they can in the first row of the table."""
    sketch = Sketch(SIZE, ROWS, columns, 0)
    signs = sketch.forward(torch.eye(SIZE))[:, :columns].sum(dim=1)
    values = torch.stack([-signs if flipped else signs, signs.flip(0)]).unsqueeze(1).expand(-1, trials, -1)
    votes = TopKSign(k=K, clip=1e-9, quantise=True, seed=0)
    return sum_bounded([CountSketch(votes=votes, rows=ROWS, columns=columns, size=SIZE)(_gradients(values))])


def _gradients(values: torch.Tensor) -> Gradients:
    return Gradients(teachers=torch.arange(len(values)), values=values, step=0)


def audit_sums(make: Callable[..., BoundedSum], *, charged_for: float, weaken: float = 1.0) -> audit.Finding:
    """σ for rows of norm `charged_for`, ε = 2; `weaken`: the noise there really is is smaller by this.

    Trials are images of one sum: one release of all of them is as many releases of one.
    """
    sigma = calibrate_sigma(
        sensitivity=2 * charged_for, steps=1, epsilon=2.0, delta=DELTA, accountant=Accountant(name="exact")
    )
    gate = make_mechanism("gaussian", sigma / weaken)
    totals = [make(flipped=flipped) for flipped in (False, True)]
    exact = [make_mechanism("gaussian", 0.0).release(t, free(), step=0).value.ravel() for t in totals]

    def release(flipped: bool) -> np.ndarray:
        return gate.release(make(flipped=flipped, trials=TRIALS), free(), step=0).value.astype(np.float64)

    return verdict("sum", release, (exact[0].astype(float), exact[1].astype(float)), claimed=2.0)


@pytest.mark.parametrize("make", [klevel_sum, sketch_sum])
def test_compressed_sums_keep_their_claim_and_with_half_the_noise_they_do_not(make: Any) -> None:
    bound = make(flipped=False).l2_bound
    honest = audit_sums(make, charged_for=bound)
    assert not honest.broken
    assert audit_sums(make, charged_for=bound, weaken=2.0).broken


def test_the_attack_on_levels_is_the_worst_there_is() -> None:
    assert (
        audit_sums(klevel_sum, charged_for=klevel_sum(flipped=False).l2_bound).lower_bound > 1.0
    )  # half of the claim, six standard errors away


def test_levels_charged_as_signs_are_caught() -> None:
    """Rows of −(levels − 1) … levels − 1 at the price of rows of ±1: a sensitivity that forgets the levels."""
    assert audit_sums(klevel_sum, charged_for=math.sqrt(SIZE)).broken


def test_tables_that_nobody_clips_are_caught() -> None:
    """All votes of a teacher in one column, which makes a table k·√rows long, at the price of √(rows·k)."""
    clipped = sketch_sum(flipped=False, columns=1)
    one_column = functools.partial(sketch_sum, columns=1)
    assert not audit_sums(one_column, charged_for=clipped.l2_bound).broken
    longest = K * math.sqrt(ROWS)

    def unclipped(*, flipped: bool, trials: int = 1) -> BoundedSum:
        sketch = Sketch(SIZE, ROWS, 1, 0)
        signs = sketch.forward(torch.eye(SIZE))[:, 0]
        votes = torch.where(torch.arange(SIZE) < K, -signs if flipped else signs, 0.0)
        table = sketch.forward(votes.view(1, 1, -1)).expand(-1, trials, -1)
        bound = longest * math.sqrt(trials)
        return sum_bounded([Contributions(rows=table, l2_bound=bound, diameter=2 * bound, row_unit="teacher")])

    assert audit_sums(unclipped, charged_for=clipped.l2_bound).broken


def test_noise_after_the_top_k_of_a_sum_is_caught() -> None:
    """As Algorithm 7 is printed, and the authors' code has it: noise for 2√k on the top k of all votes together.

    Ten teachers vote for the first half of the coordinates and ten for the second; one more decides which half is on
    top, and with it k coordinates of size eleven move.
    """
    sketch = Sketch(2 * K, ROWS, 4096, 0)  # no collisions worth the name
    half = torch.where(torch.arange(2 * K) < K, 1.0, 0.0)

    def top(flipped: bool) -> np.ndarray:
        votes = 10.0 + ((1 - half) if flipped else half)
        return sketch.heaviest(sketch.forward(votes.unsqueeze(0)), K)[0].numpy().astype(np.float64)

    sigma = calibrate_sigma(
        sensitivity=2 * math.sqrt(K), steps=1, epsilon=2.0, delta=DELTA, accountant=Accountant(name="exact")
    )

    def release(flipped: bool) -> np.ndarray:
        noise = SecureNoise().standard_normal(TRIALS * 2 * K).reshape(TRIALS, -1)
        return top(flipped) + sigma * noise

    assert verdict("top-k first", release, (top(False), top(True)), claimed=2.0).broken


# --- PATE-GAN: labels ------------------------------------------------------------------------------------------------


def labels(*, flipped: bool, trials: int) -> VoteCounts:
    """The teacher that saw the record says real, or fake; three others say this and that."""
    choices = torch.tensor([[0 if flipped else 1], [0], [1], [1]]).expand(-1, trials)
    return count_ballots([Ballots(teachers=torch.arange(len(choices)), choices=choices)], answers=2)


def pure_bound(errors: audit.Errors, level: float) -> float:
    """P[alarm | with] ≤ e^ε·P[alarm | without] + δ, whatever the mechanism: no Gaussian is assumed."""
    alarm = audit.rate_upper(errors.false_alarms, errors.without, level / 2)
    hit = 1 - audit.rate_upper(errors.misses, errors.with_it, level / 2)
    return math.log(max(hit - DELTA, 1e-300) / alarm)


def audit_labels() -> audit.Finding:
    """One label with Lap(1/λ) on both counts, λ = 1: ε = 2. (Its broken twins: `datalens audit methods`.)"""
    scale = 1.0  # of λ = 1
    paid = free()
    LaplaceVote(noise=LaplaceNoise(scale)).release(labels(flipped=False, trials=1), paid, step=0)
    trials = 2 * TRIALS
    gate = LaplaceVote(noise=LaplaceNoise(scale))
    # Both counts must speak for "fake": the event whose likelihood ratio is largest.
    with_it, without = (labels(flipped=flipped, trials=1) for flipped in (True, False))
    exact = [make_mechanism("gaussian", 0.0).release(v, free(), step=0).value[0] for v in (without, with_it)]

    def alarms(flipped: bool) -> np.ndarray:
        value = gate.release(labels(flipped=flipped, trials=trials), free(), step=0).value
        return (value[:, 0] >= exact[1][0]) & (value[:, 1] <= exact[1][1])

    false_alarm, hit = alarms(False), alarms(True)
    errors = audit.count_errors(false_alarm.astype(float), hit.astype(float), threshold=0.5)
    return audit.Finding(
        name="one label",
        claimed=paid.spent(),
        lower_bound=pure_bound(errors, audit.REPORT_LEVEL),
        verdict_bound=pure_bound(errors, audit.VERDICT_LEVEL),
        trials=2 * trials,
    )


def test_a_label_costs_two_lambda_and_the_attack_reaches_it() -> None:
    found = audit_labels()
    assert found.claimed == pytest.approx(2.0, abs=1e-3)
    assert not found.broken
    assert found.lower_bound > 1.8


SCHEMA = Schema(name="audit", height=8, width=8, channels=1, classes=("0", "1"), nominal_size=100)


class TrainedOnRecords(CriticStudent):
    """Broken on purpose: the critic also learns from a real record that it should never see."""

    record: torch.Tensor

    def _remember(self, fakes: Fakes, answers: torch.Tensor) -> None:
        images = fakes.images.clone()
        images[0] = self.record
        super()._remember(dataclasses.replace(fakes, images=images), answers)


@pytest.mark.parametrize("kind", [CriticStudent, TrainedOnRecords])
def test_a_critic_that_sees_records_is_caught(kind: type[CriticStudent]) -> None:
    """Same releases, another record: what the student becomes must not tell. Where it does, ε is infinite."""
    from datalens.public.critic import Critic

    def after(record: float) -> torch.Tensor:
        student = kind(
            SCHEMA.shape, 2, Critic(SCHEMA.shape, 2, width=4), teachers=4, labels="counts", batch=4, jitter=0.1,
            memory=1, latent=4, critic_steps=1, critic_rate=1e-2, generator_steps=1, generator_batch=4,
            generator_rate=1e-2, average=0.0, spread=0.0, seed=0, device=torch.device("cpu"),
        )  # fmt: skip
        student.record = torch.full(SCHEMA.shape, record)  # type: ignore[attr-defined]
        told = LaplaceVote(noise=LaplaceNoise(4.0, seed=1)).release(labels(flipped=False, trials=4), free(), step=0)
        student.learn(student.generate(0), told)
        return torch.cat([value.double().flatten() for value in student.state().values()])

    tells = not torch.equal(after(0.0), after(1.0))
    runs = audit.Errors(false_alarms=0, without=TRIALS, misses=0 if tells else TRIALS, with_it=TRIALS)
    assert (pure_bound(runs, audit.VERDICT_LEVEL) > 2.0) is (kind is TrainedOnRecords)


def test_only_released_values_reach_the_student() -> None:
    student = CriticStudent.__new__(CriticStudent)
    with pytest.raises(TypeError, match="released"):
        student.learn(Fakes(images=torch.zeros(1), labels=torch.zeros(1), step=0), np.zeros((1, 2)))  # type: ignore[arg-type]


# --- G-PATE: answers -------------------------------------------------------------------------------------------------

QUERIES = 100


def ballots(*, flipped: bool, kind: str, trials: int) -> VoteCounts:
    """`answer`: ten others are split evenly, one decides. `check`: ten agree, and one joins them or not."""
    others = [0] * 5 + [1] * 5 if kind == "answer" else [0] * 10
    choices = torch.tensor([[1 if flipped else 0], *([o] for o in others)]).expand(-1, QUERIES * trials)
    return count_ballots([Ballots(teachers=torch.arange(11), choices=choices)], answers=2)


def audit_answers(kind: str, *, weaken: float = 1.0, charged: int = QUERIES, check: float = 6.0) -> audit.Finding:
    """ε = 4 for `charged` queries, all of which may pass. The attacker counts answers, or checks that passed."""
    sigma = calibrate_sigma(
        sensitivity=math.sqrt(charged * (2 + check**-2)), steps=1, epsilon=4.0, delta=DELTA,
        accountant=Accountant(name="exact"),
    )  # fmt: skip
    gate = ConfidentGNMax(
        sigma_check=check * sigma / weaken,
        sigma=sigma / weaken,
        threshold=-1e9 if kind == "answer" else 10.5,
        noise=SecureNoise(),
    )

    def counted(flipped: bool) -> np.ndarray:
        votes = ballots(flipped=flipped, kind=kind, trials=TRIALS)
        values = gate.release(votes, free(), step=0).value.reshape(TRIALS, -1)
        return (values == 1).sum(axis=1) * 1.0 if kind == "answer" else -(values >= 0).sum(axis=1) * 1.0

    first = [counted(flipped) for flipped in (False, True)]
    threshold = float((np.mean(first[0]) + np.mean(first[1])) / 2)  # from runs that are not counted
    found = [counted(flipped) for flipped in (False, True)]
    return audit.finding(kind, audit.count_errors(*found, threshold=threshold), claimed=4.0, delta=DELTA)


def test_answers_keep_their_claim_and_broken_ones_are_caught() -> None:
    honest = audit_answers("answer")
    assert not honest.broken
    assert honest.lower_bound > 2.0  # the sign of a difference says less than the difference
    assert audit_answers("answer", weaken=2.0).broken
    assert audit_answers("answer", charged=QUERIES // 10).broken  # per image, not per projected coordinate


def test_a_check_that_is_not_paid_for_is_caught() -> None:
    """The check with the noise of an answer a sixtieth as large as what was charged: nobody paid for it."""
    assert not audit_answers("check").broken
    event = confident_check("add-remove", QUERIES, 1.0, "operating-system", 0)
    assert event.sensitivity == 10.0
    assert audit_answers("check", check=0.2, charged=2).broken


def test_released_is_what_gates_make() -> None:
    told = LaplaceVote(noise=LaplaceNoise(1.0)).release(labels(flipped=False, trials=1), free(), step=0)
    assert isinstance(told, Released)
