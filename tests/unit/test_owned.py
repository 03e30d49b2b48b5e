"""What is paid for is used up once: not again in a forked child, by another thread, or by a copy."""

import copy
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.clip import clip_images
from datalens.bounded.norm_topk import NormTopK
from datalens.errors import DatalensError
from datalens.privacy.budget import Cap, DataBudget
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.events import OneOfManyEvent, SubsampledGaussianEvent
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.noise import DrawnAhead, ExactNoise, LaplaceNoise, SecureNoise
from datalens.privacy.one_of_many import Block, charge_block

BUDGET = Budget(epsilon=1e6, delta=1e-5, relation="add-remove", accountant="rdp-improved")
COMPRESS = NormTopK(clip=1.0)


def gate(ledger: Ledger | None = None, noise: Any = None) -> GradientGate:
    schedule = Schedule(sigma=2.0, rate=0.1, steps=20, unit=COMPRESS.bound, l2_bound=COMPRESS.l2_bound)
    return GradientGate(ledger or Ledger.in_memory(BUDGET), schedule, noise or SecureNoise(), blocks=2)


def step(one: GradientGate) -> Any:
    return one.release(COMPRESS.sum([torch.ones(3, 4)]))


def block(noise: Any = None) -> Block:
    facts: dict[str, Any] = {"row_unit": "teacher", "l2_bound": 1.0, "diameter": 2.0, "relation": "add-remove"}
    facts |= {"sigma": 3.0, "queries": 4, "step": 0, "noise": "operating-system", "teachers": 5, "repeats": 10}
    return charge_block(Ledger.in_memory(BUDGET), OneOfManyEvent(**facts), noise or SecureNoise())


def ask(one: Block) -> Any:
    return one.release(lambda teacher: clip_images(torch.ones(4, 9), clip=0.4, teacher=teacher))


def data_budget(folder: Path) -> DataBudget:
    return DataBudget.create(folder, Cap(epsilon=3.0, delta=1e-5, relation="add-remove"))


def in_a_child(act: Callable[[], object]) -> str:
    """What a forked child is told when it tries; nothing if it is let."""

    def tell(pipe: Any) -> None:
        try:
            act()
            pipe.send("")
        except DatalensError as error:
            pipe.send(str(error))

    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=tell, args=(there,))
    child.start()
    said = here.recv()
    child.join()
    return said


def test_a_forked_child_takes_no_step_that_its_parent_paid_for(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    one = gate(Ledger.create(path, BUDGET))
    step(one)
    assert (one.charged, one.left) == (10, 9)
    assert "belongs to the process" in in_a_child(lambda: step(one))
    for _ in range(9):
        step(one)
    charged = [event.repeats for event in read_ledger(path)[1] if isinstance(event, SubsampledGaussianEvent)]
    assert charged == [10]  # ten were taken, here, and nowhere else
    assert "belongs to the process" in in_a_child(lambda: one.hand_over())


def test_nor_asks_a_teacher_nor_reserves(tmp_path: Path) -> None:
    paid = block()
    ask(paid)
    assert "belongs to the process" in in_a_child(lambda: ask(paid))
    with data_budget(tmp_path) as data:
        assert "belongs to the process" in in_a_child(lambda: data.allow("faces"))
        data.allow("digits")
    with DataBudget.open(tmp_path) as data:
        assert data.names == ("digits",)


def elsewhere(thing: Any, use: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(DatalensError, match="belongs to the process") as caught:
            use(thing)
    assert "\n" not in str(caught.value)
    use(thing)


def test_another_process_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(gate(), step, monkeypatch)
    elsewhere(gate(), lambda one: one.hand_over(), monkeypatch)
    elsewhere(block(), ask, monkeypatch)
    with data_budget(tmp_path) as data:
        elsewhere(data, lambda one: one.allow("digits"), monkeypatch)


def test_what_is_paid_for_is_not_copied(tmp_path: Path) -> None:
    with data_budget(tmp_path) as data:
        for one in (gate(), block(), data):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(DatalensError, match="both copies would use"):
                    copied(one)


class Meanwhile:
    """Noise during whose drawing another thread tries the same gate, and is found waiting."""

    origin = "operating-system"

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self.threads = act, []  # type: ignore[var-annotated]
        self.inside, self.most = 0, 0

    def below(self, count: int) -> int:
        return 0

    def standard_normal(self, count: int) -> np.ndarray:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if not self.threads:
            self.threads.append(threading.Thread(target=self._act))
            self.threads[0].start()
            self.threads[0].join(timeout=0.3)  # however long: one that waits is still there
        self.inside -= 1
        return np.zeros(count)


@pytest.mark.parametrize("kind", ["gate", "block"])
def test_threads_take_turns(kind: str) -> None:
    noise: Meanwhile = Meanwhile(lambda: use())
    use: Callable[[], object]
    if kind == "gate":
        one = gate(noise=noise)
        use = lambda: step(one)  # noqa: E731
    else:
        paid = block(noise)
        use = lambda: ask(paid)  # noqa: E731
    use()
    noise.threads[0].join()
    assert noise.most == 1


def test_what_is_handed_over_is_not_taken_as_well() -> None:
    """Parked for the next process: this one has nothing left of the block, and would have to pay."""
    ledger = Ledger.in_memory(BUDGET)
    one = gate(ledger)
    step(one)
    assert one.hand_over() == 9 and (one.charged, one.left) == (10, 0)
    assert one.hand_over() == 0
    step(one)
    assert [event.repeats for event in ledger.events if isinstance(event, SubsampledGaussianEvent)] == [10, 10]


@pytest.mark.parametrize("source", [ExactNoise, LaplaceNoise])
def test_noise_that_is_drawn_when_it_is_asked_for_is_not_drawn_twice_after_a_fork(source: Any) -> None:
    """They have no state of their own, so a child's draws are others (of a width at which none are the same)."""
    pytest.importorskip("opendp")
    noise = source(1e12)
    noise.integers(10)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: there.send(noise.integers(50)))
    child.start()
    theirs = here.recv()
    child.join()
    assert not (theirs == noise.integers(50)).any()


def test_draws_made_ahead_are_read_whole_by_each_thread() -> None:
    """Two threads that read one pipe in turns of bytes would each get halves of numbers."""
    pytest.importorskip("opendp")
    with DrawnAhead(100.0) as source:
        found: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: found.append(source.integers(3000))) for _ in range(4)]
        with source._alone():
            for thread in threads:
                thread.start()
            assert not found and all(thread.is_alive() for thread in threads)  # they wait for their turn
        for thread in threads:
            thread.join()
    assert len(found) == 4 and all(np.abs(part).max() < 1500 for part in found)
