"""The gate of DP-SGD: what is charged, when, and what is refused; the law of its samples and of its noise."""

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.norm_topk import ROUNDING, NormTopK
from datalens.errors import BudgetExceeded, DatalensError, TamperedError, UnpriceableEvent
from datalens.privacy import curves, tables
from datalens.privacy.accountant import Accountant, side_by_side
from datalens.privacy.dpsgd import GradientGate, Schedule, calibrate_sigma, calibrate_steps, poisson_sample
from datalens.privacy.events import GaussianEvent, SubsampledGaussianEvent, parse_event
from datalens.privacy.ledger import Budget, Ledger, read_ledger
from datalens.privacy.noise import NoiseSource, SecureNoise, SeededNoise

COMPRESS = NormTopK(clip=2.0, topk=0.64)  # √k·C = 1.6


def budget(epsilon: float = 1.0, accountant: str = "rdp-improved", **other: Any) -> Budget:
    facts: dict[str, Any] = {"delta": 1e-5, "relation": "add-remove", "accountant": accountant} | other
    return Budget(epsilon=epsilon, **facts)


def schedule(**other: Any) -> Schedule:
    facts: dict[str, Any] = {"sigma": 2.0, "rate": 0.01, "steps": 25, "unit": COMPRESS.bound}
    return Schedule(**{**facts, "l2_bound": COMPRESS.l2_bound, **other})


def rows(count: int = 3, d: int = 40) -> BoundedSum:
    return COMPRESS.sum([torch.ones(count, d)])


class Watching:
    """Noise that looks at the ledger's file at the moment it is drawn."""

    origin = "operating-system"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seen: list[int] = []

    def standard_normal(self, count: int) -> np.ndarray:
        _, events = read_ledger(self._path)
        self.seen.append(sum(event.repeats for event in events if isinstance(event, SubsampledGaussianEvent)))
        return np.zeros(count)

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint32)


def test_steps_are_on_disk_before_their_noise_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    noise: Any = Watching(path)
    gate = GradientGate(Ledger.create(path, budget()), schedule(), noise)
    for _ in range(25):
        gate.release(rows())
    assert all(charged > step for step, charged in enumerate(noise.seen))
    assert noise.seen[-1] == 25 and len(set(noise.seen)) == 9  # in blocks of 3, the last one of 1
    with pytest.raises(BudgetExceeded, match="all 25 steps"):
        gate.release(rows())
    assert len(noise.seen) == 25


def test_the_event_says_what_happened() -> None:
    gate = GradientGate(Ledger.in_memory(budget()), schedule(), SeededNoise(0))
    released = gate.release(rows())
    event = released.event
    assert isinstance(event, SubsampledGaussianEvent)
    assert (event.repeats, event.step, event.rate, event.row_unit) == (3, 0, 0.01, "record")
    assert (event.noise, event.relation) == ("seeded", "add-remove")
    assert event.sigma == pytest.approx(2.0 * 1.6) and event.l2_bound == pytest.approx(1.6)
    assert event.mu == pytest.approx(0.5, rel=1e-5)
    assert parse_event(event.as_dict()) == event
    for _ in range(3):
        released = gate.release(rows())
    assert released.event.step == 3 and released.number == 1


def test_what_was_charged_and_lost_stays_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = GradientGate(Ledger.create(path, budget()), schedule(), SecureNoise())
    for _ in range(4):
        first.release(rows())
    first.ledger.close()  # killed: 6 are charged, 4 were taken, nobody knows how many
    second = GradientGate(Ledger.open(path), schedule(), SecureNoise())
    assert (second.charged, second.left) == (6, 0)
    for _ in range(19):
        second.release(rows())
    with pytest.raises(BudgetExceeded):
        second.release(rows())
    second.ledger.close()
    parked = GradientGate(Ledger.open(path), schedule(), SecureNoise(), left=2)
    parked.release(rows())
    parked.release(rows())
    with pytest.raises(BudgetExceeded):
        parked.release(rows())


@pytest.mark.parametrize("broken", [False, True])
def test_two_gates_on_one_ledger_keep_to_one_schedule(broken: bool) -> None:
    """What is set aside in a data set's budget is the schedule; the run's own budget may have room for more."""
    ledger = Ledger.in_memory(budget(1e3))
    gates = [GradientGate(ledger, schedule(), SecureNoise()) for _ in range(2)]
    for gate in gates if broken else ():  # the twin remembers what it found at the start
        gate._counted = lambda gate=gate: (gate.charged, gate._number)  # type: ignore[method-assign,misc]
    for gate in gates:
        with pytest.raises(BudgetExceeded):
            deque((gate.release(rows()) for _ in range(100)), maxlen=0)
    paid = sum(event.repeats for event in ledger.events if isinstance(event, SubsampledGaussianEvent))
    assert paid == schedule().steps * (2 if broken else 1)


def test_an_overspending_schedule_draws_nothing() -> None:
    class Nothing:
        origin = "operating-system"

        def standard_normal(self, count: int) -> np.ndarray:
            raise AssertionError("drawn")

    quiet: Any = Nothing()
    gate = GradientGate(Ledger.in_memory(budget(0.01)), schedule(sigma=0.3), quiet)
    with pytest.raises(BudgetExceeded):
        gate.release(rows())


def test_other_schedules_relations_and_rows_are_refused() -> None:
    ledger = Ledger.in_memory(budget())
    GradientGate(ledger, schedule(), SecureNoise()).release(rows())
    for other in ({"sigma": 3.0}, {"rate": 0.02}, {"unit": 1.0}, {"l2_bound": 1.0}):
        with pytest.raises(DatalensError, match="another schedule"):
            GradientGate(ledger, schedule(**other), SecureNoise())
    with pytest.raises(DatalensError, match="left"):
        GradientGate(ledger, schedule(), SecureNoise(), left=4)
    with pytest.raises(DatalensError, match="add-remove"):
        GradientGate(Ledger.in_memory(budget(relation="replace-one")), schedule(), SecureNoise())
    gate = GradientGate(Ledger.in_memory(budget()), schedule(), SecureNoise())
    with pytest.raises(ValueError, match="another bound or privacy unit"):
        gate.release(NormTopK(clip=1.0).sum([torch.ones(2, 5)]))
    assert not gate.ledger.events
    mixed = Ledger.in_memory(budget())
    mixed.charge(plain_event())
    with pytest.raises(DatalensError, match="another schedule"):
        GradientGate(mixed, schedule(), SecureNoise())


def plain_event(**other: Any) -> GaussianEvent:
    facts: dict[str, Any] = {"row_unit": "record", "l2_bound": 1.0, "diameter": 2.0, "relation": "add-remove"}
    facts |= {"sigma": 9.0, "queries": 1, "step": 0, "noise": "operating-system"}
    return GaussianEvent(**{**facts, **other})


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"sigma": -1.0}, "sigma"), ({"sigma": 1e20}, "sigma"), ({"rate": 0.0}, "rate"), ({"rate": 1.5}, "rate"),
     ({"steps": 0}, "step")],
)  # fmt: skip
def test_schedules_that_make_no_sense(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(DatalensError, match=said):
        schedule(**asked)


def test_an_event_happened_at_least_once() -> None:
    fields = schedule().event(repeats=1, step=0, noise="seeded").as_dict()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(TamperedError):
            parse_event({**fields, "repeats": wrong})
    with pytest.raises(TamperedError):
        parse_event({name: value for name, value in fields.items() if name != "repeats"})


# --- laws ----------------------------------------------------------------------------------------------------------


def noise_is_right(values: np.ndarray, sigma: float) -> bool:
    return stats.kstest(values / sigma, "norm").pvalue > 1e-6


@pytest.mark.parametrize("noise", [SecureNoise(), SeededNoise(1)])
def test_noise_is_on_every_coordinate_and_of_the_right_size(noise: NoiseSource) -> None:
    gate = GradientGate(Ledger.in_memory(budget()), schedule(), noise)
    empty = COMPRESS.sum([torch.zeros(0, 20_000)])
    values = gate.release(empty).value[0]
    assert (values != 0).all()
    assert noise_is_right(values, 2.0 * 1.6)
    assert not noise_is_right(values, 2.0 * 1.6 * 2 / 3) and not noise_is_right(values, 2.0 * 1.6 * 3 / 2)
    again = gate.release(empty).value[0]
    assert abs(np.corrcoef(values, again)[0, 1]) < 0.05


def samples_are_right(sizes: list[int], count: int, rate: float) -> bool:
    """Mean and variance of binomial sizes, both within six of their own deviations."""
    n, mean, variance = len(sizes), count * rate, count * rate * (1 - rate)
    near = abs(np.mean(sizes) - mean) < 6 * math.sqrt(variance / n)
    return near and abs(np.var(sizes) - variance) < 6 * variance * math.sqrt(2 / n)


@pytest.mark.parametrize("noise", [SecureNoise(), SeededNoise(1)])
def test_samples_are_poisson(noise: NoiseSource) -> None:
    drawn = [poisson_sample(noise, 1000, 0.05) for _ in range(2000)]
    sizes = [len(sample) for sample in drawn]
    assert samples_are_right(sizes, 1000, 0.05)
    assert not samples_are_right(sizes, 1000, 0.055)
    assert not samples_are_right([50] * 2000, 1000, 0.05)  # shuffled batches: the mean is right, the law is not
    often = np.bincount(np.concatenate(drawn), minlength=1000)
    assert samples_are_right(often.tolist(), 2000, 0.05)
    together = np.mean([(0 in sample) and (1 in sample) for sample in drawn])
    assert together < 0.012  # 0.0025 if they are independent, 0.05 if they come in pairs


def test_everybody_and_never_more_than_the_rate() -> None:
    assert poisson_sample(SecureNoise(), 5, 1.0).tolist() == [0, 1, 2, 3, 4]

    class Lowest:
        origin = "seeded"

        def words(self, count: int) -> np.ndarray:
            return np.arange(count, dtype=np.uint32)

    low: Any = Lowest()
    assert len(poisson_sample(low, 100, 10.9 / 2**32)) == 10  # rounded down


# --- what a release says -------------------------------------------------------------------------------------------


def test_a_release_says_which_charge_it_was_paid_by() -> None:
    ledger = Ledger.in_memory(budget())
    gate = GradientGate(ledger, schedule(), SecureNoise(), blocks=2)
    empty = COMPRESS.sum([torch.zeros(0, 3)])
    released = [gate.release(empty) for _ in range(schedule().steps)]
    assert [ledger.events[one.number] for one in released] == [one.event for one in released]
    assert {one.number for one in released} == {0, 1} and {one.event.queries for one in released} == {1}
    again = GradientGate(ledger, schedule(), SecureNoise(), left=1)  # goes on in a block that was paid for
    assert again.release(empty).number == 1


# --- prices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1.6, 512 / 60_000, 200), (0.8, 0.02, 60), (3.0, 0.2, 50), (2.0, 0.5, 3)]
)
def test_prv_lies_between_pld_and_rdp(sigma: float, rate: float, steps: int) -> None:
    """PLD looks at both directions, PRV at one: were the other one dearer, PRV would come out below."""
    pytest.importorskip("dp_accounting")
    event = schedule(sigma=sigma, rate=rate, steps=steps).event(repeats=steps, step=0, noise="operating-system")
    found = side_by_side([(event, 1)], 1e-5)
    assert isinstance(found["exact"], str)
    prv, pld, rdp = (float(found[name]) for name in ("prv", "pld", "rdp-improved"))
    assert pld * (1 - 1e-3) <= prv <= pld + 0.02 * rdp + 1e-3
    assert prv <= rdp + 0.02 * rdp
    assert rdp <= float(found["rdp"]) <= float(found["moments"]) * (1 + 1e-12)


def test_blocks_cost_what_their_steps_cost() -> None:
    s = schedule(steps=60)
    for name in ("rdp", "rdp-improved", "moments", "prv"):
        one = Accountant(name=name).epsilon([s.event(repeats=60, step=0, noise="seeded")], 1e-5)
        many = [s.event(repeats=1, step=i, noise="seeded") for i in range(40)]
        many.append(s.event(repeats=20, step=40, noise="seeded"))
        assert Accountant(name=name).epsilon(many, 1e-5) == pytest.approx(one, rel=1e-12)
        assert s.price(Accountant(name=name), 1e-5) == one


def test_sampling_everybody_is_not_sampling() -> None:
    s = schedule(rate=1.0, steps=7)
    expected = Accountant(name="exact").epsilon(
        [plain_event(l2_bound=s.l2_bound, diameter=2 * s.l2_bound, sigma=3.2)] * 7, 1e-5
    )
    for name in ("exact", "prv"):
        assert s.price(Accountant(name=name), 1e-5) == pytest.approx(expected, rel=1e-9)


def test_rdp_of_sampling_everybody() -> None:
    assert curves.subsampled_rdp(0.5, 1.0, 4.0) == 4.0 * 0.25 / 2


def test_moments_are_abadis() -> None:
    """min over λ <= 32 of (T·α(λ) + log 1/δ)/λ, with α by integration (Abadi et al. 2016, Section 3.2)."""
    q, sigma, steps, delta = 0.01, 4.0, 10_000, 1e-5
    x = np.linspace(-80, 80, 20_001)
    without = stats.norm.pdf(x, 0, sigma)
    mixed = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    ratio = 1 - q + q * np.exp((2 * x - 1) / (2 * sigma**2))  # mixed / without

    def alpha(order: int) -> float:
        return math.log(max(np.trapezoid(mixed * ratio**order, x), np.trapezoid(without * ratio**-order, x)))

    expected = min((steps * alpha(order) + math.log(1 / delta)) / order for order in range(1, 33))
    assert expected == pytest.approx(1.26, abs=0.01)  # as their paper prints it: "ε = 1.26"
    s = Schedule(sigma=sigma, rate=q, steps=steps, unit=1.0, l2_bound=1.0)
    assert s.price(Accountant(name="moments"), delta) == pytest.approx(expected, rel=1e-6)
    assert Accountant(name="moments").epsilon([plain_event()], delta) > 0
    assert Accountant(name="moments").epsilon([plain_event(l2_bound=0.0, diameter=0.0)], delta) == 0


def test_prv_knows_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    prv = Accountant(name="prv")
    event = schedule().event(repeats=10, step=0, noise="seeded")
    assert prv.price([(event, 1), (plain_event(), 1)], 1e-5) > prv.price([(event, 1)], 1e-5)  # see test_parts.py
    with pytest.raises(UnpriceableEvent, match="delta"):
        prv.price([(event, 1)], 1e-12)
    assert prv.price([(schedule(l2_bound=0.0).event(repeats=1, step=0, noise="seeded"), 1)], 1e-5) == 0.0
    assert prv.price([(schedule(sigma=0.0).event(repeats=1, step=0, noise="seeded"), 1)], 1e-5) == math.inf
    loud = schedule(sigma=0.05, rate=0.5).event(repeats=9, step=0, noise="seeded")
    assert prv.price([(loud, 1)], 1e-5) == Accountant(name="rdp-improved").price([(loud, 1)], 1e-5)
    import opacus.accountants

    class Broken:
        def get_epsilon(self, delta: float, eps_error: float) -> float:
            raise RuntimeError("Discrete mean differs")

    class Nameless(Broken):
        def get_epsilon(self, delta: float, eps_error: float) -> float:
            return math.nan

    for twin in (Broken, Nameless):
        tables.prv_composed.cache_clear()
        monkeypatch.setattr(opacus.accountants, "PRVAccountant", twin)
        with pytest.raises(UnpriceableEvent, match="no price"):
            prv.price([(event, 1)], 1e-5)
    import sys

    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(DatalensError, match="pip install opacus"):
        prv.price([(event, 1)], 1e-5)


@pytest.mark.parametrize("accountant", ["prv", "rdp-improved", "moments"])
def test_calibration_spends_what_it_may_and_no_more(accountant: Any) -> None:
    goal = budget(1.0, accountant)
    steps = calibrate_steps(rate=0.01, sigma=1.5, budget=goal, rounding=ROUNDING)
    s = Schedule(sigma=1.5, rate=0.01, steps=steps, unit=1.0, l2_bound=1 + ROUNDING)
    assert 0.98 <= s.price(goal.pricing(), 1e-5) <= 1.0
    sigma = calibrate_sigma(rate=0.01, steps=300, budget=goal, rounding=ROUNDING)
    s = Schedule(sigma=sigma, rate=0.01, steps=300, unit=1.0, l2_bound=1 + ROUNDING)
    assert 0.98 <= s.price(goal.pricing(), 1e-5) <= 1.0


def test_calibration_says_what_cannot_be() -> None:
    with pytest.raises(BudgetExceeded, match="no noise"):
        calibrate_sigma(rate=0.01, steps=100, budget=budget(0.3, "moments"), rounding=ROUNDING)
    assert calibrate_sigma(rate=0.01, steps=100, budget=budget(math.inf), rounding=ROUNDING) == 0.0
    assert calibrate_steps(rate=0.9, sigma=0.3, budget=budget(0.1), rounding=ROUNDING) == 0
    with pytest.raises(DatalensError, match="nothing limits"):
        calibrate_steps(rate=0.9, sigma=0.0, budget=budget(0.1), rounding=ROUNDING)
    with pytest.raises(DatalensError, match="nothing limits"):
        calibrate_steps(rate=1e-9, sigma=1e6, budget=budget(1.0), rounding=ROUNDING)
