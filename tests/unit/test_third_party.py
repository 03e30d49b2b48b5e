"""Code of others near the gate: rows are mapped and bounded, and what can be seen of a mechanism is checked."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.third_party import PerTeacher
from datalens.errors import DatalensError
from datalens.privacy.events import DiscreteGaussianEvent, GaussianEvent
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum, ThirdParty, make_mechanism
from datalens.privacy.noise import SecureNoise, open_noise
from datalens.privacy.released import Released
from datalens.public import streams

# --- rows of somebody else's -----------------------------------------------------------------------


def per_teacher(row: Callable[..., torch.Tensor], **change: Any) -> PerTeacher:
    facts: dict[str, Any] = {"l2_bound": 3.0, "cells": 5, "whole_numbers": True, "seed": 0}
    return PerTeacher(row=row, **{**facts, **change})


def gradients(values: torch.Tensor) -> Gradients:
    return Gradients(teachers=torch.arange(len(values)), values=values, step=0)


VALUES = torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(0))


def signs(gradient: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return ((gradient > 0).to(torch.int8) * 2 - 1) * (uniform < 0.5)


def test_the_bound_is_enforced_whatever_comes() -> None:
    honest = sum_bounded([per_teacher(signs)(gradients(VALUES))])
    assert honest.diameter == 6.0 and honest.row_unit == "teacher" and int(honest.private_total.abs().max()) <= 7
    long = per_teacher(lambda g, u: (g * 1000).to(torch.int32))(gradients(VALUES))
    assert int(sum_bounded([long]).private_total.abs().sum()) == 0  # too long, in whole numbers: nothing
    real = per_teacher(lambda g, u: g * 1000, whole_numbers=False)(gradients(VALUES))
    norms = [
        float(
            sum_bounded(
                [per_teacher(lambda g, u: g * 1000, whole_numbers=False)(gradients(VALUES[i : i + 1]))]
            ).private_total.norm()
        )
        for i in range(7)
    ]
    assert max(norms) <= 3.0 * (1 + 1e-12) and float(sum_bounded([real]).private_total.norm()) <= 21.0


def test_a_row_is_its_own_teachers() -> None:
    """Also of a function that means to look at all of them: what it takes for the crowd is one teacher."""
    nosy = per_teacher(lambda g, u: (g.mean(dim=0, keepdim=True) > 0).to(torch.int8).expand(2, 5))
    rows = nosy(gradients(VALUES)).rows
    other = VALUES.clone()
    other[3] = -other[3]
    changed = (nosy(gradients(other)).rows != rows).flatten(1).any(dim=1)
    assert changed.tolist() == [False, False, False, True, False, False, False]


class Mixes(torch.autograd.Function):
    """Whose vmap rule, which is handed all that are mapped over at once, gives each the sum of all."""

    @staticmethod
    def forward(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign().to(torch.int8)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, int]:
        return gradients.sum(dim=0, keepdim=True).sign().to(torch.int8).expand(gradients.shape), 0


def mixing(gradient: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return Mixes.apply(gradient)


def how_far(rows_of: Callable[[torch.Tensor], torch.Tensor], teachers: int = 101) -> float:
    """How far the sum of rows moves when one teacher's gradient changes, by the diameter that is charged."""
    bound = 10**0.5  # two images of five signs
    values = torch.ones(teachers, 2, 5) * (-1.0) ** torch.arange(teachers).view(-1, 1, 1)  # 51 up, 50 down
    other = values.clone()
    other[0] = -2 * other[0]
    moved = rows_of(other).double().sum(dim=0) - rows_of(values).double().sum(dim=0)
    return float(moved.norm()) / (2 * bound)


def test_a_vmap_rule_of_its_own_sees_one_teacher() -> None:
    """The broken twin maps it over all at once: every row turns with one teacher."""
    ours = per_teacher(mixing, l2_bound=10**0.5)
    assert how_far(lambda values: ours(gradients(values)).rows) <= 1
    assert how_far(lambda values: torch.vmap(mixing)(values, torch.zeros_like(values))) > 50
    rows = ours(gradients(VALUES)).rows
    other = VALUES.clone()
    other[3] = -other[3]
    changed = (ours(gradients(other)).rows != rows).flatten(1).any(dim=1)
    assert changed.tolist() == [False, False, False, True, False, False, False]


@pytest.mark.parametrize("whole", [True, False])
def test_a_plug_in_that_keeps_state_is_refused(whole: bool) -> None:
    calls = 0

    def counting(gradient: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.full_like(gradient, calls).to(torch.int8 if whole else torch.float32)

    with pytest.raises(DatalensError, match="must keep no state"):
        per_teacher(counting, whole_numbers=whole)(gradients(VALUES))
    assert per_teacher(lambda g, u: g, whole_numbers=False)(gradients(VALUES)).rows.shape == VALUES.shape


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (lambda g, u: g[:, :3].to(torch.int8), "stated 5 cells"),
        (lambda g, u: g, "return an integer"),
        (lambda g, u: g > 0, "return an integer"),
        (lambda g, u: torch.complex(g, 1000 * g), "complex"),
        (lambda g, u: {}[0], r"cannot be mapped over teachers \(0\)"),
        (lambda g, u: torch.rand_like(g).to(torch.int8), "cannot be mapped"),
        (lambda g, u: g.to(torch.int8) if g.sum() > 0 else -g.to(torch.int8), "cannot be mapped"),
    ],
)
def test_functions_that_are_refused(row: Callable[..., torch.Tensor], why: str) -> None:
    with pytest.raises(DatalensError, match=why):
        per_teacher(row)(gradients(VALUES))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_bounds_that_are_none(bound: float) -> None:
    with pytest.raises(DatalensError, match="bound above 0"):
        per_teacher(signs, l2_bound=bound)
    assert per_teacher(signs, l2_bound=0.5)(gradients(VALUES)).diameter == 1.0


# --- and their mechanisms --------------------------------------------------------------------------


class Broken:
    """One mechanism with one thing wrong at a time."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def release(self, contributions: Any, ledger: Ledger, *, step: int) -> Any:
        facts: dict[str, Any] = {"row_unit": "teacher", "l2_bound": 3.0, "diameter": 6.0, "relation": "add-remove"}
        facts |= {"sigma": 50.0, "queries": 2, "step": step, "noise": "operating-system"}
        facts |= {"cheaper": {"sigma": 500.0}, "shorter": {"l2_bound": 1.0, "diameter": 1.0}}.get(self.fault, {})
        facts |= {"seeded": {"noise": "seeded"}}.get(self.fault, {})
        event = GaussianEvent(**facts)
        if self.fault == "another law":
            event = DiscreteGaussianEvent(**facts, coordinates=10)
        if self.fault == "free":
            return Released(value=np.zeros(1), event=event, number=0)
        number = ledger.charge(event)
        if self.fault == "twice":
            ledger.charge(event)
        if self.fault == "raw":
            return np.zeros(1)
        if self.fault == "more":
            return Released(value=np.zeros((3, 5)), event=event, number=number)
        if self.fault == "other":
            event = GaussianEvent(**{**facts, "queries": 9})
        return Released(value=np.zeros((2, 5)), event=event, number=number)


FAULTS = ("", "free", "twice", "raw", "other", "cheaper", "shorter", "seeded", "another law", "more")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_can_be_seen_of_a_mechanism_is_checked(fault: str) -> None:
    total = sum_bounded([per_teacher(signs)(gradients(VALUES))])
    ledger = Ledger.in_memory(Budget(epsilon=5.0, delta=1e-5, relation="add-remove", accountant="exact"))
    gate = ThirdParty(mechanism=Broken(fault), sigma=50.0, noise=SecureNoise())
    if not fault:
        assert gate.release(total, ledger, step=0).number == 0
        ours = GaussianSum(sigma=50.0, noise=SecureNoise())
        assert ThirdParty(mechanism=ours, sigma=50.0, noise=SecureNoise()).release(total, ledger, step=1).number == 1
        with open_noise("discrete-gaussian", 50.0, draws=10) as noise:
            exact = ThirdParty(mechanism=make_mechanism(50.0, noise), sigma=50.0, noise=noise)
            assert exact.release(total, ledger, step=2).number == 2
        return
    with pytest.raises(DatalensError, match="--mechanism: the plug-in"):
        gate.release(total, ledger, step=0)


def test_its_uniforms_are_a_stream_of_their_own() -> None:
    """Keyed by seed, step and teacher, so that neither chunks nor ranks change them."""

    def drawn(seed: int, step: int, numbers: list[int]) -> torch.Tensor:
        asked = Gradients(teachers=torch.tensor(numbers), values=torch.zeros(len(numbers), 2, 5), step=step)
        return per_teacher(lambda g, u: u, whole_numbers=False, l2_bound=10.0, seed=seed)(asked).rows

    expected = streams.uniform(3, "plug-in", 7, teachers=torch.tensor([4, 5]), count=10).view(2, 2, 5)
    assert torch.equal(drawn(3, 7, [4, 5]), expected.to(torch.float64))
    assert torch.equal(drawn(3, 7, [5]), drawn(3, 7, [4, 5])[1:])
    for other in (drawn(4, 7, [4, 5]), drawn(3, 8, [4, 5]), drawn(3, 7, [5, 6])):
        assert not torch.equal(other, drawn(3, 7, [4, 5]))
