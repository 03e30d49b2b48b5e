"""Ballots, their counts, and the gates for them: exact Laplace noise, its price, and Confident-GNMax."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from datalens.bounded.ballots import binned, real_or_fake
from datalens.bounded.contributions import (
    Ballots,
    BoundedSum,
    Contributions,
    Gradients,
    Scores,
    VoteCounts,
    count_ballots,
    sum_bounded,
)
from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.privacy import calibration
from datalens.privacy.accountant import Accountant
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import GaussianEvent, LaplaceEvent, parse_event
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import ConfidentGNMax, LaplaceVote
from datalens.privacy.noise import Held, LaplaceNoise, SecureNoise, SeededNoise
from datalens.privacy.responses import pld_responses, response_delta, response_epsilon, response_rdp


def ledger(epsilon: float = math.inf, accountant: Any = "exact") -> Ledger:
    return Ledger.in_memory(Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant=accountant))


def counts(choices: Any, answers: int = 2) -> VoteCounts:
    tensor = torch.as_tensor(choices)
    return count_ballots([Ballots(teachers=torch.arange(len(tensor)), choices=tensor)], answers=answers)


NAMES: Any = ("exact", "rdp", "rdp-improved", "pld")


def laplace(**changes: Any) -> LaplaceEvent:
    fields: dict[str, Any] = {"row_unit": "teacher", "moved": 2, "relation": "add-remove", "scale": 10.0, "queries": 1}
    return LaplaceEvent(**(fields | {"step": 0, "noise": "operating-system"} | changes))


# --- ballots ---------------------------------------------------------------------------------------------------------

ballot = st.lists(st.integers(-3, 4), min_size=3, max_size=3)


def total(votes: VoteCounts) -> np.ndarray:
    return votes.private_total.numpy()


@given(others=st.lists(ballot, min_size=1, max_size=4), one=ballot, other=ballot)
@settings(max_examples=100, deadline=None)
def test_another_ballot_moves_two_counts_a_query_by_one_each(others: Any, one: Any, other: Any) -> None:
    before, after = counts([*others, one], answers=3), counts([*others, other], answers=3)
    moved = total(before) - total(after)
    assert np.abs(moved).max() <= 1
    assert (np.abs(moved).sum(axis=1) <= 2).all()
    assert np.linalg.norm(moved) <= before.diameter == pytest.approx(math.sqrt(6))
    assert abs(int(total(before).max(axis=1)[0]) - int(total(after).max(axis=1)[0])) <= 1  # what the check rests on
    assert before.l2_bound == pytest.approx(math.sqrt(3))
    assert (total(before) <= len(others) + 1).all()


def test_chunks_add_up_and_a_teacher_votes_once() -> None:
    parts = [
        Ballots(teachers=torch.tensor([0, 1]), choices=torch.tensor([[0, 1], [1, 1]])),
        Ballots(teachers=torch.tensor([2]), choices=torch.tensor([[-1, 0]])),
    ]
    assert total(count_ballots(parts, answers=2)).tolist() == [[1, 1], [1, 2]]
    with pytest.raises(ValueError, match="once"):
        count_ballots([parts[0], parts[0]], answers=2)
    with pytest.raises(ValueError, match="no ballots"):
        count_ballots([], answers=2)
    with pytest.raises(ValueError, match="each must have exactly one"):
        count_ballots([Ballots(teachers=torch.tensor([0]), choices=torch.tensor([[0], [1]]))], answers=2)


def test_real_or_fake_by_the_logit_or_by_the_teachers_own_mean() -> None:
    scores = Scores(teachers=torch.arange(2), values=torch.tensor([[-3.0, -1.0, 2.0, 4.0], [1.0, math.nan, 1.0, 2.0]]))
    labels = torch.tensor([0, 0, 1, 1])
    assert real_or_fake(scores, labels, relative=False).choices.tolist() == [[0, 0, 1, 1], [1, -1, 1, 1]]
    assert real_or_fake(scores, labels, relative=True).choices.tolist() == [[0, 1, 0, 1], [-1, -1, 0, 1]]
    mixed = Scores(teachers=torch.arange(1), values=torch.tensor([[5.0, 1.0, 7.0, 3.0, 4.0]]))
    labels = torch.tensor([0, 1, 0, 1, 2])  # means 6, 2 and 4: an image like all of its label is not above them
    assert real_or_fake(mixed, labels, relative=True).choices.tolist() == [[0, 0, 1, 1, 0]]
    undecided = Scores(teachers=torch.arange(1), values=torch.zeros(1, 1))
    assert real_or_fake(undecided, labels[:1], relative=False).choices.tolist() == [[0]]


@given(
    values=st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=2, max_size=2),
    bins=st.integers(2, 7),
)
@settings(max_examples=100, deadline=None)
def test_any_gradient_falls_into_a_bin_or_into_none(values: Any, bins: int) -> None:
    gradients = Gradients(teachers=torch.arange(1), values=torch.tensor([values]), step=0)
    choices = binned(gradients, torch.eye(4)[:, :3], bins=bins).choices
    assert choices.shape == (1, 6)
    assert bool(((choices >= -1) & (choices < bins)).all())


def test_bins_are_of_the_image_divided_by_its_largest() -> None:
    values = torch.tensor([[[2.0, -1.0, 0.1], [0.0, 0.0, 0.0], [1.0, math.inf, 0.0]]])
    gradients = Gradients(teachers=torch.tensor([7]), values=values, step=0)
    ballots = binned(gradients, torch.eye(3), bins=4)
    assert ballots.teachers.tolist() == [7]
    assert ballots.choices.tolist() == [[3, 1, 2, -1, -1, -1, -1, -1, -1]]
    faint = Gradients(teachers=torch.tensor([7]), values=torch.tensor([[[-1e-9, 4e-10, 1e-9]]]), step=0)
    assert binned(faint, torch.eye(3), bins=4).choices.tolist() == [[0, 2, 3]]


def test_a_ballot_is_the_same_among_others_and_alone() -> None:
    """Else a record of one teacher could move the ballot of another, by making it the only one of a piece."""
    random = torch.Generator().manual_seed(0)
    values, projection = torch.randn(5, 1, 784, generator=random), torch.randn(784, 6, generator=random)

    def ballots(part: slice) -> torch.Tensor:
        gradients = Gradients(teachers=torch.arange(5)[part], values=values[part], step=0)
        return binned(gradients, projection, bins=2**23).choices  # so many that the last bits show

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # with one, this machine's products are the same either way
        together = ballots(slice(None))
        assert all(torch.equal(ballots(slice(i, i + 1))[0], together[i]) for i in range(5))
    finally:
        torch.set_num_threads(before)


# --- the price of Laplace noise ---------------------------------------------------------------------------------------


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.clip(p - math.exp(epsilon) * q, 0, None).sum())


@pytest.mark.parametrize("loss", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_moved_counts_cost_what_the_noise_itself_leaks(loss: float, times: int) -> None:
    """By brute force: the law of `times` noisy counts, against the same moved by one each, on a grid."""
    z = np.arange(-60, 61)
    law = np.exp(-loss * np.abs(z)) * math.tanh(loss / 2)
    p, q = law, np.concatenate([law[1:], [0.0]])
    for _ in range(times - 1):
        p, q = np.outer(p, law).ravel(), np.outer(q, np.concatenate([law[1:], [0.0]])).ravel()
    tail = 2 * times * math.exp(-60 * loss)
    for epsilon in (0.0, 0.3 * loss, 0.999 * loss * times):
        assert response_delta(loss, times, epsilon) == pytest.approx(hockey_stick(p, q, epsilon), abs=1e-9 + tail)


def test_the_price_of_many_labels() -> None:
    assert response_delta(0.5, 1, 0.2) == pytest.approx((math.exp(0.5) - math.exp(0.2)) / (1 + math.exp(0.5)))
    assert response_epsilon(0.1, 5, 1e-12) == pytest.approx(0.5)  # pure: nothing is better for so few
    assert response_epsilon(0.01, 10_000, 1e-5) < 5 < 100  # advanced composition: √ of the pure 100
    assert response_epsilon(0.01, 10_000, 1e-5) == pytest.approx(exact_epsilon(1.0, 1e-5), rel=0.01)  # nearly Gaussian
    assert response_epsilon(0.0, 5, 1e-5) == response_epsilon(math.inf, 0, 1e-5) == 0.0
    assert response_epsilon(math.inf, 1, 1e-5) == math.inf
    assert response_delta(math.inf, 1, 3.0) == 1.0


@pytest.mark.parametrize("times", [10, 4000])
def test_rdp_and_pld_agree_with_the_exact_price_from_above(times: int) -> None:
    event = laplace(moved=times, scale=0.5 * math.sqrt(times))
    exact, rdp, improved, pld = (Accountant(name=name).epsilon([event], 1e-5) for name in NAMES)
    assert exact <= improved <= rdp < 2 * exact
    assert pld == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize(("loss", "times"), [(1.0, 30), (0.5, 1), (3.0, 1), (0.0, 4), (0.7, 0)])
def test_pld_agrees_at_the_edges(loss: float, times: int) -> None:
    assert pld_responses(loss, times, 1e-2) == pytest.approx(response_epsilon(loss, times, 1e-2), rel=1e-8, abs=1e-12)


def test_rdp_of_a_response_is_its_definition() -> None:
    for loss, order in itertools.product((0.8, 1.0), (1.1, 2.0, 30.0)):
        right = 1 / (1 + math.exp(-loss))
        sums = right**order * (1 - right) ** (1 - order) + (1 - right) ** order * right ** (1 - order)
        assert response_rdp(loss, order) == pytest.approx(math.log(sums) / (order - 1))
    assert response_rdp(math.inf, 2.0) == math.inf
    assert response_rdp(0.0, 2.0) == 0.0


def test_laplace_is_priced_by_itself_and_in_rdp_with_others() -> None:
    gaussian = GaussianEvent(
        row_unit="teacher", l2_bound=1.0, diameter=2.0, relation="add-remove", sigma=20.0, queries=1, step=0,
        noise="operating-system",
    )  # fmt: skip
    for name in ("exact", "pld"):
        for events in ([laplace(), gaussian], [laplace(), laplace(scale=11.0)]):
            with pytest.raises(UnpriceableEvent, match="one scale"):
                Accountant(name=name).epsilon(events, 1e-5)
    both = Accountant(name="rdp").epsilon([laplace(), gaussian], 1e-5)
    assert both > max(Accountant(name="rdp").epsilon([one], 1e-5) for one in (laplace(), gaussian))
    assert Accountant(name="exact").epsilon([laplace(moved=0, scale=0.0)], 1e-5) == 0.0
    assert Accountant(name="pld").epsilon([laplace(moved=0, scale=0.0)], 1e-5) == 0.0
    assert Accountant(name="pld").epsilon([laplace(scale=0.0)], 1e-5) == math.inf
    assert Accountant(name="exact").epsilon([laplace(scale=0.0)], 1e-5) == math.inf


def test_pld_without_dp_accounting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    pld_responses.cache_clear()
    with pytest.raises(DatalensError, match="another --accountant"):
        Accountant(name="pld").epsilon([laplace(scale=77.0)], 1e-5)


def calibrated(moved: int, epsilon: float, pricing: Accountant) -> float:
    """The scale for so many moved counts."""
    return calibrate_event(
        lambda scale: laplace(moved=moved, scale=scale), times=1, epsilon=epsilon, delta=1e-5, accountant=pricing
    )


@pytest.mark.parametrize("name", ["exact", "rdp", "rdp-improved", "moments", "pld"])
@pytest.mark.parametrize("epsilon", [0.5, 10.0])
def test_the_scale_is_the_smallest_that_fits(name: Any, epsilon: float) -> None:
    pricing = Accountant(name=name)
    scale = calibrated(600, epsilon, pricing)
    assert pricing.epsilon([laplace(moved=600, scale=scale)], 1e-5) <= epsilon
    assert pricing.epsilon([laplace(moved=600, scale=scale * 0.999)], 1e-5) > epsilon
    assert calibrated(600, math.inf, pricing) == 0.0


@pytest.mark.parametrize("labels", [1, 100, 10_000, 100_000])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_the_scale_is_found_whatever_the_number_of_labels(labels: int, epsilon: float) -> None:
    """Never more than pure composition asks for, and for many labels as little as Gaussian noise of that σ."""
    exact = Accountant(name="exact")
    scale = calibrated(2 * labels, epsilon, exact)
    assert scale <= 2 * labels / epsilon * (1 + 1e-3)
    if labels >= 10_000:
        goal: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5, "accountant": exact}
        sigma = calibration.calibrate_sigma(sensitivity=math.sqrt(2), steps=labels, **goal)
        assert scale == pytest.approx(sigma, rel=0.01)


def test_a_budget_that_no_noise_fits_is_refused() -> None:
    with pytest.raises(BudgetExceeded, match="no noise is large enough"):
        calibrated(600, 1e-4, Accountant(name="rdp"))


def test_the_event_is_read_back_as_it_was_and_refuses_nonsense() -> None:
    assert parse_event(laplace().as_dict()) == laplace()
    assert laplace().loss == 0.1 and laplace(moved=0, scale=0.0).mu == 0.0
    assert laplace(moved=8).mu == pytest.approx(0.1 * math.sqrt(8))
    assert laplace(scale=0.0).sigma == 0.0
    draws = LaplaceNoise(3.0, seed=0).integers(20_000)
    assert laplace(scale=3.0).sigma == pytest.approx(draws.std(), rel=0.03)
    for changes in ({"scale": -1.0}, {"moved": 1.5}, {"row_unit": "ballot"}, {"relation": "none"}):
        with pytest.raises(TamperedError):
            laplace(**changes)


# --- Laplace noise ----------------------------------------------------------------------------------------------------


def p_value(draws: np.ndarray, scale: float) -> float:
    """Chi-square of the draws against the discrete Laplace law of this scale."""
    edge = int(3 * scale)
    z = np.arange(-edge, edge + 1)
    law = np.exp(-np.abs(z) / scale) * math.tanh(0.5 / scale)
    tail = (1 - law.sum()) / 2
    expected = len(draws) * np.array([tail, *law, tail])
    seen = Counter(np.clip(draws, -edge - 1, edge + 1).tolist())
    found = np.array([seen[value] for value in range(-edge - 1, edge + 2)])
    return float(chi2.sf(((found - expected) ** 2 / expected).sum(), len(found) - 1))


@pytest.mark.parametrize("scale", [0.7, 2.5, 6.1])
def test_draws_have_the_discrete_laplace_law_and_no_other(scale: float) -> None:
    draws = LaplaceNoise(scale).integers(8000)
    assert draws.dtype == np.int64
    assert p_value(draws, scale) > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert p_value(draws, wrong * scale) < 1e-6
    assert p_value(np.rint(np.random.default_rng(0).normal(0, draws.std(), 8000)).astype(int), scale) < 1e-6
    assert p_value(np.where(draws == 0, 1, draws), scale) < 1e-6  # a zero drawn by both signs, or by none


def test_seeded_laplace_noise_says_so() -> None:
    assert LaplaceNoise(2.0).origin == "operating-system"
    one, again = LaplaceNoise(2.0, seed=3), LaplaceNoise(2.0, seed=3)
    assert one.origin == "seeded"
    assert one.integers(50).tolist() == again.integers(50).tolist()
    assert LaplaceNoise(50.0).integers(50).tolist() != LaplaceNoise(50.0).integers(50).tolist()
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(DatalensError, match="scale"):
            LaplaceNoise(scale)


# --- the gates --------------------------------------------------------------------------------------------------------


class Watched:
    """Noise that notes how many charges there were when it was taken to be used."""

    origin: Any = "operating-system"
    scale = 10.0

    def __init__(self, book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.charged: list[int] = []
        take = Held.take
        monkeypatch.setattr(Held, "take", lambda held: self.charged.append(len(book.events)) or take(held))

    def integers(self, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.int64)

    def standard_normal(self, count: int) -> np.ndarray:
        return self.integers(count).astype(np.float64)


def test_laplace_votes_are_charged_before_noise_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    book = ledger()
    noise: Any = Watched(book, monkeypatch)
    released = LaplaceVote(noise=noise).release(counts([[0, 1], [1, 1]]), book, step=4)
    assert noise.charged == [1]
    assert released.value.tolist() == [[1, 1], [0, 2]]
    assert released.event == laplace(moved=4, queries=2, step=4)
    assert book.events == (released.event,)


def test_a_label_with_one_over_lambda_noise_costs_two_lambda() -> None:
    book = ledger()
    LaplaceVote(noise=LaplaceNoise(1 / 0.05)).release(counts([[0], [1]]), book, step=0)
    (event,) = book.events
    assert event.moved * event.loss == pytest.approx(2 * 0.05)  # type: ignore[union-attr]
    assert Accountant(name="exact").epsilon([event], 1e-12) == pytest.approx(0.1, abs=1e-9)


def test_a_spent_budget_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    book = ledger(epsilon=0.3)
    noise: Any = Watched(book, monkeypatch)
    LaplaceVote(noise=noise).release(counts([[0], [1]]), book, step=0)
    with pytest.raises(BudgetExceeded):
        LaplaceVote(noise=noise).release(counts([[0], [1]]), book, step=1)
    assert len(noise.charged) == len(book.events) == 1


@pytest.mark.parametrize(
    "gate",
    [
        LaplaceVote(noise=LaplaceNoise(1.0)),
        ConfidentGNMax(sigma_check=1.0, sigma=1.0, threshold=1.0, noise=SecureNoise()),
    ],
)
def test_rows_that_are_no_ballots_are_refused(gate: Any) -> None:
    rows = torch.full((1, 1, 2), 3, dtype=torch.int8)
    other: BoundedSum = sum_bounded([Contributions(rows=rows, l2_bound=5.0, diameter=10.0, row_unit="teacher")])
    book = ledger()
    with pytest.raises(TypeError):
        gate.release(other, book, step=0)
    assert not book.events


def test_the_check_is_charged_for_all_and_answers_for_those_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = counts([[0, 1, 2], [0, 2, 1], [0, 0, 0], [0, 1, -1]], answers=3)  # largest counts 4, 2, 1
    book = ledger()
    noise: Any = Watched(book, monkeypatch)
    gate = ConfidentGNMax(sigma_check=30.0, sigma=5.0, threshold=2.0, noise=noise)
    released = gate.release(votes, book, step=1)
    assert released.value.tolist() == [0, 1, -1]
    assert noise.charged == [1, 2]
    check, answer = book.events
    assert (check.l2_bound, check.diameter, check.sigma) == (math.sqrt(3), math.sqrt(3), 30.0)  # type: ignore[union-attr]
    assert (answer.diameter, answer.sigma, answer.queries) == (2.0, 5.0, 2)  # type: ignore[union-attr]
    assert released.event == answer and released.number == 1
    spent = exact_epsilon(3 / 30**2 + 2 * 2 / 5**2, 1e-5)
    assert book.spent() == pytest.approx(spent)


def test_a_check_that_fails_is_paid_for() -> None:
    book = ledger()
    gate = ConfidentGNMax(sigma_check=1.0, sigma=5.0, threshold=1e6, noise=SeededNoise(0))
    released = gate.release(counts([[0], [1]]), book, step=0)
    assert released.value.tolist() == [-1]
    assert [event.sigma for event in book.events] == [1.0]  # type: ignore[union-attr]
    assert released.number == 0 and released.event == book.events[0]
    with pytest.raises(DatalensError, match="sigma"):
        ConfidentGNMax(sigma_check=-1.0, sigma=5.0, threshold=1.0, noise=SecureNoise())


def test_noise_decides_where_votes_are_close() -> None:
    close = counts([[0] * 2000, [1] * 2000, [0] * 2000])
    gate = ConfidentGNMax(sigma_check=1e-9, sigma=5.0, threshold=0.0, noise=SecureNoise())
    share = float((gate.release(close, ledger(), step=0).value == 0).mean())
    assert 0.47 < share < 0.65  # Φ(1/(5√2)) ≈ 0.556, rounded noise ties go to the first


def test_laplace_releases_are_journaled(tmp_path: Any) -> None:
    book, journal = ledger(), Journal(tmp_path)
    released = LaplaceVote(noise=LaplaceNoise(4.0)).release(counts([[0, 1], [1, 1]]), book, step=3)
    journal.save(released)
    found = journal.find(book, step=3)
    assert found is not None and found.value.tolist() == released.value.tolist()
    journal.forget_before(book, step=4)
    assert journal.find(book, step=3) is None
