"""Exact noise: drawn at once or ahead by a process of its own, used once, and gone with whoever ordered it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded, DatalensError
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans import base
from datalens.plans.base import law_said
from datalens.plans.registry import make_plan
from datalens.privacy import exact
from datalens.privacy import noise as noise_module
from datalens.privacy.events import DiscreteGaussianEvent, NoiseOrigin
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import DiscreteGaussianSum, GaussianSum, make_mechanism
from datalens.privacy.noise import DrawnAhead, ExactNoise, SecureNoise, SeededNoise, open_noise

BUDGET = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="exact")
PATIENCE = 20.0


def votes(*rows: Any, dtype: torch.dtype = torch.int8) -> BoundedSum:
    facts: dict[str, Any] = {"l2_bound": 3.0, "diameter": 6.0, "row_unit": "teacher"}
    return sum_bounded([Contributions(rows=torch.tensor(rows, dtype=dtype), **facts)])


class Scripted:
    """Returns the numbers it was given, and notes what it is asked."""

    origin: NoiseOrigin = "seeded"

    def __init__(self, *draws: int, sigma: float = 100.0, broken: bool = False) -> None:
        self.sigma, self._draws, self._broken = sigma, list(draws), broken
        self.asked: list[int] = []

    def check(self) -> None:
        pass

    def integers(self, count: int) -> np.ndarray:
        if self._broken:
            raise DatalensError("no noise today")
        self.asked.append(count)
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return np.array(drawn, dtype=np.int64)


# --- the gate -----------------------------------------------------------------------------------------------------


def test_the_gate_adds_whole_noise_to_whole_votes() -> None:
    ledger = Ledger.in_memory(BUDGET)
    noise = Scripted(5, -3, 0, 700)
    released = DiscreteGaussianSum(noise=noise).release(votes([[1, -1], [0, 1]], [[1, 0], [0, 1]]), ledger, step=3)
    assert released.value.dtype == np.int64
    np.testing.assert_array_equal(released.value, [[7, -4], [0, 702]])
    event = released.event
    assert isinstance(event, DiscreteGaussianEvent) and ledger.events == (event,)
    assert (event.sigma, event.coordinates, event.queries, event.step, event.noise) == (100.0, 4, 2, 3, "seeded")
    assert (event.l2_bound, event.diameter, event.row_unit, event.relation) == (3.0, 6.0, "teacher", "add-remove")


def test_charged_before_noise_is_taken_and_nothing_taken_past_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, seen = Ledger.in_memory(BUDGET), []
    take = noise_module.Held.take
    monkeypatch.setattr(noise_module.Held, "take", lambda held: seen.append(len(ledger.events)) or take(held))
    with pytest.raises(BudgetExceeded):
        DiscreteGaussianSum(noise=Scripted(1, 2, sigma=10.0)).release(votes([[1, 1]]), ledger, step=0)
    assert seen == [] and not ledger.events
    with pytest.raises(ValueError, match="reshape"):  # too few draws are found out before the charge
        DiscreteGaussianSum(noise=Scripted(1)).release(votes([[1, 1]]), ledger, step=0)
    assert seen == [] and not ledger.events
    DiscreteGaussianSum(noise=Scripted(1, 2)).release(votes([[1, 1]]), ledger, step=0)
    assert seen == [1] == [len(ledger.events)]


def test_no_charge_is_wasted_on_noise_that_cannot_come() -> None:
    ledger = Ledger.in_memory(BUDGET)
    with pytest.raises(DatalensError, match="no noise today"):
        DiscreteGaussianSum(noise=Scripted(broken=True)).release(votes([[1]]), ledger, step=0)
    assert not ledger.events


def test_real_rows_are_refused_before_any_charge() -> None:
    ledger = Ledger.in_memory(BUDGET)
    with pytest.raises(DatalensError, match="--noise gaussian"):
        DiscreteGaussianSum(noise=Scripted(1)).release(votes([[0.5]], dtype=torch.float32), ledger, step=0)
    assert not ledger.events


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_a_width_that_is_none_is_refused(sigma: float) -> None:
    with pytest.raises(DatalensError, match="sigma"):
        DiscreteGaussianSum(noise=Scripted(sigma=sigma))


def test_a_source_finds_its_gate() -> None:
    assert isinstance(make_mechanism(7.0, SecureNoise()), GaussianSum)
    assert isinstance(make_mechanism(100.0, Scripted()), DiscreteGaussianSum)
    with pytest.raises(ValueError, match="width"):
        make_mechanism(99.0, Scripted())


def test_a_run_opens_the_noise_it_planned() -> None:
    with open_noise("gaussian", 5.0, draws=10) as source:
        assert isinstance(source, SecureNoise)
    with open_noise("gaussian", 5.0, draws=10, seed=3) as source:
        assert isinstance(source, SeededNoise)
    with open_noise("discrete-gaussian", 5.0, draws=10) as source:
        assert isinstance(source, ExactNoise) and source.sigma == 5.0
        source.check()
    with open_noise("discrete-gaussian", 5.0, draws=10**6) as source:
        assert isinstance(source, DrawnAhead) and source.sigma == 5.0
        worker = source._process
    assert worker.poll() is not None


def test_many_draws_at_once_are_drawn_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw is asked for once, in whatever thread."""
    monkeypatch.setattr(noise_module, "FEW_DRAWS", 4)
    counts: list[int] = []

    def draw(count: int) -> list[int]:
        counts.append(count)
        return list(range(count))

    monkeypatch.setattr(exact, "sampler", lambda sigma: draw)
    for threads, pieces in ((1, [11]), (3, [3, 4, 4])):
        with open_noise("discrete-gaussian", 5.0, draws=11, threads=threads) as source:
            assert isinstance(source, ExactNoise)
            assert source.integers(11).tolist() == [number for many in reversed(pieces) for number in range(many)]
            assert sorted(counts) == pieces
            counts.clear()


# --- the plan -----------------------------------------------------------------------------------------------------

MNIST = Schema(name="mnist", height=28, width=28, channels=1, classes=tuple(map(str, range(10))), nominal_size=60_000)


def planned(**options: Any) -> TopAggSettings:
    return make_plan(TrainOptions(out=Path("unused"), **options), MNIST)[1]


def test_exact_noise_is_the_default_wherever_it_can_be() -> None:
    assert planned().noise == "discrete-gaussian"
    assert planned(method="datalens-paper").noise == "discrete-gaussian"
    assert planned(noise="gaussian").noise == "gaussian"
    assert planned(noise_seed=1).noise == "gaussian"
    assert planned(compress="topk").noise == "gaussian"
    assert planned(epsilon=float("inf")).noise == "gaussian"
    votes = planned(warm_start="off")
    rounded = planned(warm_start="off", noise="gaussian")
    assert isinstance(votes, TopAggSettings) and isinstance(rounded, TopAggSettings)
    assert votes.noise == "discrete-gaussian"
    assert votes.sigma > rounded.sigma  # it is paid for


def test_without_opendp_the_noise_is_the_rounded_one_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "opendp_installed", lambda: False)
    for made in (planned(), planned(warm_start="off")):
        assert made.noise == "gaussian"
        assert "OpenDP" in law_said(made)
    with pytest.raises(DatalensError, match="pip install opendp"):
        planned(noise="discrete-gaussian")
    monkeypatch.undo()
    assert "OpenDP" not in law_said(planned(noise="gaussian"))
    assert "exact" in law_said(planned())
    assert "floating-point" in law_said(planned(compress="topk"), real=True)


def test_what_discrete_noise_does_not_fit_is_refused() -> None:
    with pytest.raises(DatalensError, match="--compress topk"):
        planned(noise="discrete-gaussian", compress="topk")
    with pytest.raises(DatalensError, match="--noise-seed"):
        planned(noise="discrete-gaussian", noise_seed=1)


def test_importing_datalens_does_not_import_opendp() -> None:
    """A machine without it must train; one with it must not wait for it."""
    code = "import sys, datalens.driver, datalens.methods.topagg, datalens.released.certificate\n"
    code += "assert not [name for name in sys.modules if name.startswith(('opendp', 'dp_accounting'))]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- drawn at once -------------------------------------------------------------------------------------------------


def test_draws_are_whole_and_new_each_time() -> None:
    source = ExactNoise(1000.0)
    first, second = source.integers(500), source.integers(500)
    assert first.dtype == np.int64 and first.shape == (500,)
    assert not np.array_equal(first, second)
    assert source.integers(0).shape == (0,)


def test_an_opendp_that_does_not_work_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.measurements", None)
    with pytest.raises(DatalensError, match="--noise gaussian") as caught:
        ExactNoise(5.0)
    assert "\n" not in str(caught.value)


# --- drawn ahead ---------------------------------------------------------------------------------------------------


def gone(pid: int, *, within: float = PATIENCE) -> bool:
    """Whether the process ends by itself (a zombie that nobody has waited for counts)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_noise_drawn_ahead_is_the_same_kind_of_noise() -> None:
    with DrawnAhead(50.0) as source:
        source.check()
        drawn = np.concatenate([source.integers(count) for count in (1, 700, 0, 20_000)])
    assert drawn.shape == (20_701,)
    assert len(np.unique(drawn)) > 200
    assert 0.95 < drawn.std() / 50.0 < 1.05
    assert abs(drawn.mean()) < 3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05


def test_the_process_is_ended_on_close_and_nothing_can_be_drawn_then() -> None:
    source = DrawnAhead(50.0)
    pid = source._process.pid
    source.close()
    source.close()  # once more does no harm
    assert gone(pid)
    for ask in (source.check, lambda: source.integers(1)):
        with pytest.raises(DatalensError, match="--resume"):
            ask()


def test_a_process_that_dies_is_one_line_and_no_charge() -> None:
    ledger = Ledger.in_memory(BUDGET)
    with DrawnAhead(100.0) as source:
        mechanism = DiscreteGaussianSum(noise=source)
        mechanism.release(votes([[1, 1]]), ledger, step=0)
        source._process.kill()
        source._process.wait()
        with pytest.raises(DatalensError, match="has ended"):  # what lies in the pipe is used up first
            source.integers(10**6)
        assert len(ledger.events) == 1
        with pytest.raises(DatalensError, match="--resume") as caught:  # and said before the charge
            mechanism.release(votes([[1, 1]]), ledger, step=1)
        assert len(ledger.events) == 1
        assert "\n" not in str(caught.value)


def test_a_draw_that_ends_in_the_middle_is_not_gone_on_with() -> None:
    with DrawnAhead(100.0) as source:
        source.check()
        source._process.kill()
        source._process.wait()
        with pytest.raises(DatalensError, match="has ended"):
            source.integers(10**7)
        with pytest.raises(DatalensError, match="was ended"):
            source.integers(1)


def test_a_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine whose OpenDP is broken: the last line of what the process said."""
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nsys.exit('ImportError: no such library')\n")
    monkeypatch.setattr(exact, "__file__", str(broken))
    with DrawnAhead(100.0) as source, pytest.raises(DatalensError, match=r"\(ImportError: no such library\)"):
        source.check()


def test_a_fork_cannot_use_the_noise_of_its_parent() -> None:
    with DrawnAhead(100.0) as source:
        source.check()
        child = os.fork()
        if child == 0:
            try:
                source.integers(4)
                os._exit(1)
            except DatalensError:
                source.close()  # and may not end it either
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert source.integers(4).shape == (4,)


def test_another_process_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with DrawnAhead(100.0) as source:
        with monkeypatch.context() as patch:
            patch.setattr(noise_module.os, "getpid", lambda: 1)
            for ask in (source.check, lambda: source.integers(1)):
                with pytest.raises(DatalensError, match="belongs to the process"):
                    ask()
            source.close()
        assert source._process.poll() is None  # nobody else could end it


PARENT = """
import os, sys, time
from datalens.privacy.noise import DrawnAhead
source = DrawnAhead(100.0)
source.check()
if "fork" in sys.argv:
    if os.fork() == 0:
        time.sleep(60)
sys.stdout.write(f"{source._process.pid}\\n"); sys.stdout.flush()
time.sleep(60)
"""


def parent(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    started = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, start_new_session=True
    )
    assert started.stdout is not None
    return started, int(started.stdout.readline())


def test_killed_with_9_it_leaves_no_process_behind() -> None:
    started, worker = parent()
    assert not gone(worker, within=0.2)
    started.kill()
    started.wait()
    assert gone(worker)


def test_even_if_a_fork_still_holds_the_pipe() -> None:
    started, worker = parent("fork")
    started.kill()
    started.wait()
    try:
        assert gone(worker)
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # the sleeping fork: a session of this test's own


def test_a_ctrl_c_does_not_reach_it_but_the_end_of_its_parent_does() -> None:
    started, worker = parent()
    os.killpg(started.pid, signal.SIGINT)  # what a terminal sends to all of a job
    started.wait()
    assert gone(worker)
    with DrawnAhead(100.0) as source:
        assert os.getpgid(source._process.pid) != os.getpgid(0)


# --- the other end of the pipe, in this process --------------------------------------------------------------------


def test_the_feeder_stops_when_nobody_reads() -> None:
    out, into = os.pipe()
    calls: list[int] = []

    def draw(count: int) -> list[int]:
        calls.append(count)
        if len(calls) == 2:
            os.close(out)
        return list(range(count))

    exact.feed(into, draw, parent=os.getppid())
    os.close(into)
    assert calls == [exact.CHUNK] * 2


def feeds_until(pretend: Callable[[], int], *, monkeypatch: pytest.MonkeyPatch) -> int:
    out, into = os.pipe()
    monkeypatch.setattr(exact.os, "getppid", pretend)
    drawn: list[int] = []
    exact.feed(into, lambda count: drawn.append(count) or [0] * count, parent=1, patience_ms=10)  # type: ignore[func-returns-value]
    os.close(out)
    os.close(into)
    return len(drawn)


def test_the_feeder_stops_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert feeds_until(lambda: 2, monkeypatch=monkeypatch) == 0
    answers = iter([1] * 8 + [2] * 100)  # nobody reads, so it waits with a full pipe, and looks up
    assert feeds_until(lambda: next(answers), monkeypatch=monkeypatch) >= 1


def test_pieces_hold_whole_draws() -> None:
    """A pipe takes a piece whole or not at all, so that no reader ever sees half a draw."""
    assert exact.PIECE % 8 == 0 and (8 * exact.CHUNK) % exact.PIECE == 0


def test_the_script_says_what_went_wrong_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.measurements", None)
    monkeypatch.setattr(exact.sys, "stdout", os.fdopen(os.dup(1), "wb"))
    with pytest.raises(SystemExit, match=r"ImportError|ModuleNotFoundError") as caught:
        exact.main(["5.0", "1"])
    assert "\n" not in str(caught.value.code)
    monkeypatch.undo()
    out, into = os.pipe()
    os.close(out)
    monkeypatch.setattr(exact.sys, "stdout", os.fdopen(into, "wb"))
    exact.main(["5.0", str(os.getppid())])  # nobody reads: it ends at once, without a word
