"""`datalens.topagg`: the function charges before it draws, and gives what TopAgg gives."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from datalens import Budget, BudgetExceeded, DatalensError, Ledger, topagg
from datalens.api.topagg import by_content
from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign


def ledger(epsilon: float = 5.0) -> Ledger:
    return Ledger.in_memory(Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant="exact"))


def agreed(teachers: int = 4000) -> torch.Tensor:
    return torch.ones(teachers, 6) * torch.tensor([0.5, -0.5, 0.5, 0.0, 0.0, 0.0])


def test_the_direction_all_teachers_want() -> None:
    book = ledger()
    found = topagg(agreed(), k=3, sigma=100.0, ledger=book, beta=0.5)
    assert found.direction.tolist() == [1, -1, 1, 0, 0, 0]
    assert len(book.events) == 1 and found.released.event == book.events[0]
    event = book.events[0]
    assert (event.l2_bound, event.diameter, event.sigma) == (math.sqrt(3), 2 * math.sqrt(3), 100.0)  # type: ignore[union-attr]
    assert found.spent == book.spent() and "δ = 1e-05, add-remove, exact" in found.cost
    again = topagg(agreed().numpy(), k=3, sigma=100.0, ledger=book, decode="linear")
    assert again.spent > found.spent and again.direction[0] == pytest.approx(1.0, abs=0.2)


def test_queries_together_cost_what_they_cost_one_by_one() -> None:
    together, alone = ledger(), ledger()
    found = topagg(agreed().unsqueeze(1).repeat(1, 4, 1), k=3, sigma=100.0, ledger=together)
    assert found.direction.shape == (4, 6)
    for _ in range(4):
        topagg(agreed(), k=3, sigma=100.0, ledger=alone)
    assert together.spent() == pytest.approx(alone.spent(), rel=1e-9)


def test_past_the_budget_no_noise_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from datalens.privacy import noise

    book = ledger(0.1)

    def never(*_: object) -> None:
        raise AssertionError("noise was taken before it was paid for")

    monkeypatch.setattr(noise.Held, "take", never)
    with pytest.raises(BudgetExceeded):
        topagg(agreed(), k=3, sigma=1.0, ledger=book)
    assert book.events == ()
    with pytest.raises(AssertionError):  # the check can fail
        topagg(agreed(), k=3, sigma=1000.0, ledger=book)
    assert len(book.events) == 1  # and what was charged stays so


def test_it_is_the_votes_of_training_with_noise() -> None:
    random = torch.Generator().manual_seed(1)
    gradients = torch.randn(50, 9, generator=random)
    found = topagg(gradients, k=4, sigma=0.01, ledger=ledger(math.inf), noise="gaussian", noise_seed=1)
    compress = TopKSign(k=4, clip=math.inf, quantise=True, seed=0)
    votes = sum_bounded([compress(Gradients(teachers=by_content(gradients), values=gradients.unsqueeze(1), step=0))])
    assert np.array_equal(found.released.value, votes.private_total.numpy())


def exact_votes(gradients: torch.Tensor) -> np.ndarray:
    """The sum without its noise."""
    return topagg(gradients, k=4, sigma=0.01, ledger=ledger(math.inf), noise="gaussian", noise_seed=1).released.value


@pytest.mark.parametrize("like_it", [0, 1, 5])
def test_a_row_that_is_left_out_moves_the_sum_by_its_own_votes(like_it: int) -> None:
    """As of a teacher without records: 2 long at most, for k = 4; by places in the matrix all later rows would move."""
    gradients = torch.randn(400, 9, generator=torch.Generator().manual_seed(1))
    gradients[100 : 100 + like_it] = gradients[0]  # others of the same content
    whole = exact_votes(gradients)
    assert np.linalg.norm(whole - exact_votes(gradients[1:])) == 2.0
    assert np.array_equal(whole, exact_votes(gradients.flip(0)))
    changed = gradients.clone()
    changed[0] = gradients[7]
    assert np.linalg.norm(whole - exact_votes(changed)) <= 4.0


def test_a_twin_that_draws_by_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datalens.api.topagg.by_content", lambda values: torch.arange(len(values)))
    gradients = torch.randn(400, 9, generator=torch.Generator().manual_seed(1))
    assert np.linalg.norm(exact_votes(gradients) - exact_votes(gradients[1:])) > 20


def test_rows_have_numbers_of_their_own() -> None:
    rows = torch.randn(3000, 1, 4, generator=torch.Generator().manual_seed(0))
    numbers = by_content(torch.cat([rows, rows]))
    assert len(numbers.unique()) == 6000 and int(numbers.min()) >= 0 and int(numbers.max()) > 2**60
    assert torch.equal(numbers[:3000], by_content(rows))


def test_signs_follow_all_of_a_rows_number() -> None:
    """Not the lower half alone."""
    values = torch.full((1, 1, 64), 0.1)
    values[..., 0] = 1.0
    compress = TopKSign(k=64, clip=math.inf, quantise=True, seed=0)
    first, other = (compress(Gradients(teachers=torch.tensor([n]), values=values, step=0)).rows for n in (5, 5 + 2**40))
    assert not torch.equal(first, other)


def test_how_many_teachers_there_are_is_declared() -> None:
    rows = agreed(10)
    facts: dict[str, Any] = {"k": 3, "sigma": 0.001, "ledger": ledger(math.inf), "noise_seed": 0}
    assert topagg(rows, **facts, decode="linear", teachers=20).direction.tolist()[:2] == [0.5, -0.5]
    assert topagg(rows, **facts, beta=0.75, teachers=20).direction.any() == torch.tensor(False)
    assert topagg(rows, **facts, beta=0.75).direction.tolist()[:2] == [1.0, -1.0]
    with pytest.raises(DatalensError, match="10 rows for 9 teachers"):
        topagg(rows, **facts, teachers=9)


def test_seeded_noise_is_marked_and_never_the_same() -> None:
    book = ledger()
    first = topagg(agreed(), k=3, sigma=100.0, ledger=book, noise_seed=3)
    again = topagg(agreed(), k=3, sigma=100.0, ledger=book, noise_seed=3)
    assert not np.array_equal(first.released.value, again.released.value)
    assert "NOT PRIVATE" in first.cost and "NOT PRIVATE" in topagg(agreed(), k=3, sigma=900.0, ledger=book).cost
    assert "NOT PRIVATE" not in topagg(agreed(), k=3, sigma=100.0, ledger=ledger()).cost


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(0, 3), torch.zeros(1, 2, 3, 4)])
def test_bad_shapes(bad: torch.Tensor) -> None:
    with pytest.raises(DatalensError, match="gradients must be"):
        topagg(bad, k=1, sigma=1.0, ledger=ledger())


def test_no_noise_and_too_large_k() -> None:
    with pytest.raises(DatalensError, match="sigma must be above 0"):
        topagg(agreed(), k=1, sigma=0.0, ledger=ledger())
    assert topagg(agreed(), k=1, sigma=np.float64(100.0), ledger=ledger()).spent > 0
    with pytest.raises(DatalensError, match=r"k must be a whole number, not 2\.5"):
        topagg(agreed(), k=2.5, sigma=9.0, ledger=ledger())  # type: ignore[arg-type]
    with pytest.raises(DatalensError, match="k = 9"):
        topagg(agreed(), k=9, sigma=9.0, ledger=ledger())


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": "laplace"},
        {"decode": "loudest"},
        {"beta": math.nan},
        {"beta": -1.0},
        {"beta": 1.01},
        {"sigma": math.inf},
    ],
)
def test_what_is_spelled_wrong_costs_nothing(wrong: dict[str, Any]) -> None:
    spent = ledger()
    with pytest.raises(DatalensError, match=f"{next(iter(wrong))} must be"):
        topagg(torch.randn(9, 4), **{"k": 2, "sigma": 50.0, "ledger": spent, **wrong})
    assert not spent.events


def test_gradients_may_come_with_their_graph() -> None:
    gradients = torch.randn(9, 4, requires_grad=True)
    assert not topagg(gradients * 2, k=2, sigma=50.0, ledger=ledger()).direction.requires_grad
