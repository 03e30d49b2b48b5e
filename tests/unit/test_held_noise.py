"""Noise that is drawn ahead of its charge: in memory, once, in one process; and what a gate does in which order."""

import contextlib
import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import Ballots, BoundedSum, Contributions, VoteCounts, count_ballots, sum_bounded
from datalens.errors import DatalensError
from datalens.privacy import mechanisms
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import ConfidentGNMax, DiscreteGaussianSum, GaussianSum, LaplaceVote
from datalens.privacy.noise import ExactNoise, Held, LaplaceNoise, SecureNoise

BUDGET = Budget(epsilon=1e9, delta=1e-5, relation="add-remove", accountant="rdp")


def votes() -> BoundedSum:
    rows = torch.tensor([[[1, -1, 0], [0, 1, 1]]], dtype=torch.int8)
    return sum_bounded([Contributions(rows=rows, l2_bound=2.0, diameter=4.0, row_unit="teacher")])


def ballots() -> VoteCounts:
    return count_ballots([Ballots(teachers=torch.arange(9), choices=torch.zeros(9, 4, dtype=torch.int64))], answers=2)


def used_in_a_child(held: Any) -> bool:
    """Whether the child of a fork gets the noise that its parent holds."""
    child = os.fork()
    if child == 0:
        try:
            held.take()
            os._exit(1)
        except DatalensError:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


class Shared(Held):
    """Broken twin: whoever has it may use it."""

    def take(self) -> np.ndarray:
        return self._values.pop()


def test_noise_is_used_once() -> None:
    held = Held(np.arange(3))
    assert held.take().tolist() == [0, 1, 2]
    with pytest.raises(DatalensError, match="used only once"):
        held.take()


def test_noise_does_not_survive_a_fork() -> None:
    held = Held(np.arange(3))
    assert not used_in_a_child(held)
    assert held.take().tolist() == [0, 1, 2]  # the parent's it is
    assert used_in_a_child(Shared(np.arange(3)))


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_noise_is_not_copied_kept_or_sent(send: Callable[[Any], Any]) -> None:
    with pytest.raises(DatalensError, match="cannot be copied"):
        send(Held(np.arange(3)))


def test_of_two_threads_one_gets_it() -> None:
    held, got = Held(np.arange(3)), []
    start = threading.Barrier(8)

    def try_it() -> None:
        start.wait()
        with contextlib.suppress(DatalensError):
            got.append(held.take())

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


# --- the order of things in a gate: draw, make room, charge, take -------------------------------------------------

GATES: dict[str, Callable[[], tuple[Any, BoundedSum]]] = {
    "discrete": lambda: (DiscreteGaussianSum(noise=ExactNoise(50.0)), votes()),
    "gaussian": lambda: (GaussianSum(sigma=50.0, noise=SecureNoise()), votes()),
    "laplace": lambda: (LaplaceVote(noise=LaplaceNoise(5.0)), ballots()),
    "gnmax": lambda: (ConfidentGNMax(sigma_check=5.0, sigma=5.0, threshold=-1e9, noise=SecureNoise()), ballots()),
}
ORDER = {"gnmax": ["draw", "room 4", "charge", "take", "draw", "charge", "take"]}


def order_of(gate: Any, total: BoundedSum, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ledger, seen = Ledger.in_memory(BUDGET), []
    charge, take = Ledger.charge, Held.take

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: seen.append(what) or call(*arguments)

    ledger.make_room = lambda cells: seen.append(f"room {cells}")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", noted("charge", charge))
        patch.setattr(Held, "take", noted("take", take))
        for name in ("integers", "standard_normal"):
            if hasattr(gate.noise, name):
                patch.setattr(gate.noise, name, noted("draw", getattr(gate.noise, name)), raising=False)
        gate.release(total, ledger, step=0)
    return seen


@pytest.mark.parametrize("name", GATES)
def test_all_that_is_slow_or_can_fail_comes_before_the_charge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, total = GATES[name]()
    cells = total.cells
    assert order_of(gate, total, monkeypatch) == ORDER.get(name, ["draw", f"room {cells}", "charge", "take"])


def test_a_gate_that_draws_after_its_charge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken twin: the order of version 0.1.0, in which a kill while noise was drawn lost what was paid for."""

    class Late:
        noise = SecureNoise()

        def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> None:
            event = GaussianSum(sigma=50.0, noise=self.noise).release(
                contributions, Ledger.in_memory(BUDGET), step=step
            )
            mechanisms.charged(event.event, ledger, cells=contributions.cells)
            Held(self.noise.standard_normal(contributions.cells)).take()

    assert order_of(Late(), votes(), monkeypatch)[-3:] == ["charge", "draw", "take"]


def test_noise_of_another_process_is_refused_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(np.zeros(3))
    mine = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: mine + 1)
    with pytest.raises(DatalensError, match="belongs to the process that drew it"):
        held.take()
    monkeypatch.undo()
    assert held.take().shape == (3,)
