"""What rank 0 says is what the other ranks do: two ranks in one process, which exchange what they would send."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from datalens.run import remote_teachers
from datalens.run.ranks import World
from datalens.run.remote_teachers import Crowd, Shown

TEACHERS, SHAPE = 5, (4, 1, 8, 8)
WAIT = 20.0  # seconds: ranks that wait for each other in vain fail


class Line:
    """Between the two. Each puts something in and takes what both have put in."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.both: list[Any] = [None, None]

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.both[rank] = mine
        self.barrier.wait(WAIT)
        both = list(self.both)
        self.barrier.wait(WAIT)
        return both


class Side(World):
    def __init__(self, line: Line, rank: int) -> None:
        super().__init__(rank=rank, size=2)
        self.line = line

    def broadcast(self, tensor: Tensor) -> Tensor:
        sent = self.line.exchange(self.rank, tensor.clone())[0]
        assert isinstance(sent, Tensor)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        return tensor.copy_(sent)

    def gather(self, data: bytes, *, width: int | None = None) -> list[bytes]:
        assert isinstance(data, bytes)
        return self.line.exchange(self.rank, data)

    def add(self, tensor: Tensor) -> Tensor | None:
        both = self.line.exchange(self.rank, tensor.clone())
        return both[0] + both[1] if self.rank == 0 else None

    def together(self, work: Callable[[], Any]) -> Any:
        done = work()
        self.line.exchange(self.rank, None)
        return done


class Noting:
    """Teachers that write down what they are asked to do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[tuple[Any, ...]] = []

    def fit_step(self, fakes: Shown, *, step: int, repeats: int) -> float:
        self.asked.append(("fit", step, repeats, fakes.step, fakes.labels.tolist(), float(fakes.images.sum())))
        return 1.0 + self.rank

    def rows(self, fakes: Shown, compress: Any, *, step: int) -> Iterator[Any]:
        self.asked.append(("vote", step, fakes.labels.tolist()))
        yield torch.full((2,), 10.0 + self.rank)

    def state(self) -> dict[str, Tensor]:
        self.asked.append(("save",))
        return {
            "w": torch.full((len(range(TEACHERS)[self.rank :: 2]), 1), float(self.rank)),
            "steps": torch.tensor(7.0),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.asked.append(("restore", state["w"].flatten().tolist()))

    def state_bytes(self) -> int:
        return 0


def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Noting]]:
    """What rank 0 got, and what both did. Rank 0 is the thread: only the main one may set signals."""
    monkeypatch.setattr(remote_teachers, "sum_bounded", lambda rows: next(iter(rows)))
    monkeypatch.setattr(remote_teachers, "sum_over_ranks", lambda mine, world, units: world.add(mine))
    line, teachers = Line(), [Noting(0), Noting(1)]
    crowds = [
        Crowd(mine, lambda rows: rows, world=Side(line, mine.rank), count=TEACHERS, shape=SHAPE, folder=folder)  # type: ignore[arg-type, return-value]
        for mine in teachers
    ]
    got: list[Any] = []

    def lead() -> None:
        try:
            for step in (0, 3):
                fakes = Shown(images=torch.full(SHAPE, 0.25 * (1 + step)), labels=torch.arange(4) + step, step=step)
                got.append(crowds[0].fit_step(fakes, repeats=2 + step))
                got.append(crowds[0].votes(fakes).tolist())  # type: ignore[attr-defined]
            names = crowds[0].save(9)
            got.append(names)
            crowds[0].restore(9, names)
            crowds[0].dismiss()
        except BaseException:
            line.barrier.abort()  # so that the other does not wait
            raise

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    crowds[1].follow()
    leader.join(WAIT)
    return got, teachers


def test_the_other_rank_does_what_rank_0_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, (first, second) = two_ranks(tmp_path, monkeypatch)
    loss = (1.0 * 3 + 2.0 * 2) / TEACHERS  # the mean over all teachers, of which rank 0 has three
    names = sorted(path.name for path in tmp_path.iterdir())
    assert got == [loss, [21.0, 21.0], loss, [21.0, 21.0], got[4]] and sorted(got[4]) == names and len(names) == 2
    assert (
        first.asked[:5]
        == second.asked[:5]
        == [
            ("fit", 0, 2, 0, [0, 1, 2, 3], 64.0),
            ("vote", 0, [0, 1, 2, 3]),
            ("fit", 3, 5, 3, [3, 4, 5, 6], 256.0),
            ("vote", 3, [3, 4, 5, 6]),
            ("save",),
        ]
    )
    assert (first.asked[5:], second.asked[5:]) == ([("restore", [0.0, 0.0, 0.0])], [("restore", [1.0, 1.0])])


@pytest.mark.parametrize("broken", ["silent", "shifted"])
def test_a_word_that_is_not_said_or_heard_wrongly_shows(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken twins: rank 0 does not announce a restore; the labels begin one place too late."""
    monkeypatch.setitem(globals(), "WAIT", 3.0)
    say, hear = Crowd._say, Crowd._hear
    if broken == "silent":
        monkeypatch.setattr(
            Crowd,
            "_say",
            lambda self, order, *more: None if order == remote_teachers.Order.RESTORE else say(self, order, *more),
        )
    else:
        monkeypatch.setattr(
            Crowd, "_hear", lambda self: (*(heard := hear(self))[:3], torch.cat([heard[3][1:], heard[3][:1]]))
        )
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        test_the_other_rank_does_what_rank_0_says(tmp_path, monkeypatch)
