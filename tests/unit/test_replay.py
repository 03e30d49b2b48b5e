"""Functions that are recorded as CUDA graphs, without a GPU: what is asked for is what is returned."""

from typing import Any

import pytest
import torch
from torch import Tensor

from datalens.public import replay
from datalens.public.replay import Replay

ONE, TWO = torch.arange(3.0), torch.ones(3)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_gpu(of: Tensor) -> Tensor:
    return of.clone().as_subclass(OnGpu)


def both(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a + b, a * b]


def test_on_a_cpu_the_function_is_called() -> None:
    found = Replay(both)(ONE, TWO)
    assert torch.equal(found[0], ONE + TWO) and torch.equal(found[1], ONE)


class Pretended:
    """A recording, which may give something else."""

    made = 0

    def __init__(self, function: Any, inputs: Any) -> None:
        type(self).made += 1

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return [one + self.wrong for one in both(*inputs)]

    wrong = 0.0


@pytest.mark.parametrize(("wrong", "used"), [(0.0, True), (0.5, False)])
def test_a_recording_is_used_if_it_gives_the_same(wrong: float, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretended, "made", 0)
    monkeypatch.setattr(Pretended, "wrong", wrong)
    monkeypatch.setattr(replay, "_Recording", Pretended)
    calls = []
    replayed = Replay(lambda a, b: calls.append(1) or both(a, b))  # type: ignore[func-returns-value]
    for _ in range(3):
        assert torch.equal(replayed(on_gpu(ONE), on_gpu(TWO))[0], ONE + TWO)
    assert Pretended.made == 1 and len(calls) == (1 if used else 4)
    replayed(on_gpu(ONE[:2]), on_gpu(TWO[:2]))  # other shapes are recorded for themselves
    assert Pretended.made == 2


def test_where_recording_fails_the_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "_Recording", fails)
    assert torch.equal(Replay(both)(on_gpu(ONE), on_gpu(TWO))[0], ONE + TWO)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_gives_what_the_function_gives() -> None:
    a, b = torch.rand(50, device="cuda"), torch.rand(50, device="cuda")
    replayed = Replay(both)
    for _ in range(3):
        a = a + 1
        assert all(torch.equal(x, y) for x, y in zip(replayed(a, b), both(a, b), strict=True))
    assert all(recording is not None for recording in replayed._recorded.values())
