"""Adam on many teachers: torch's own, and bit by bit the same however many teachers there are."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.optim.adam import adam

from datalens.private.adam import adam_step

SHAPES = ((10,), (3, 7), (64, 2), (1,), (16,))  # per teacher; most are no whole number of vectors


def tables(teachers: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Weights, gradients, means, squares: those of teacher i do not depend on how many there are."""
    drawn = [
        torch.randn(4, 40, *shape, generator=torch.Generator().manual_seed(seed + i)) for i, shape in enumerate(SHAPES)
    ]
    found = [[part[i, :teachers].to(dtype).clone() for part in drawn] for i in range(4)]
    return [found[0], found[1], [m * 0.1 for m in found[2]], [s.square() * 0.1 for s in found[3]]]


Step = Callable[..., None]


def torchs_own(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor], **o) -> None:
    adam(
        *(weights, gradients, means, squares, [], [torch.tensor(float(o["updates"])) for _ in weights]),
        **{"fused": True, "amsgrad": False, "beta1": 0.5, "beta2": 0.999, "lr": o["rate"], "eps": 1e-8},
        **{"weight_decay": o["decay"], "maximize": False},
    )


def after(step: Step, teachers: int, *, first: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    weights, gradients, means, squares = ([v[first:teachers].clone() for v in t] for t in tables(teachers, dtype=dtype))
    for updates in range(5):
        step(weights, gradients, means, squares, updates=updates, rate=1e-3, decay=0.03)
    yield from (*weights, *means, *squares)


def parts_differ(step: Step) -> int:
    """How many tensors come out with other bits when the teachers are split in two."""
    count = 0
    for cut in (1, 7, 10, 13):
        halves = zip(after(step, cut), after(step, 21, first=cut), strict=True)
        count += sum(
            not torch.equal(torch.cat(half), whole) for half, whole in zip(halves, after(step, 21), strict=True)
        )
    return count


def test_the_number_of_teachers_changes_no_bit() -> None:
    assert parts_differ(adam_step) == 0


def test_torchs_own_would_change_some() -> None:
    """Should this fail one day, torch rounds the ends alike and `adam_step` can be a plain call."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("no vectors on this machine")
    assert parts_differ(torchs_own) > 0


def test_it_is_adam() -> None:
    for ours, theirs in zip(
        after(adam_step, 21, dtype=torch.float64), after(torchs_own, 21, dtype=torch.float64), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
