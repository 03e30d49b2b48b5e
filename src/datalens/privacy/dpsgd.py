"""The gate for parameter gradients (DP-SGD): Poisson samples, and sums of their bounded rows with Gaussian noise.

Differs from Opacus: every step is charged before its noise is drawn, and noise and samples come from the operating
system. The noise is float64 and is added to a sum of float32 rows: what leaks through the low bits of such a sum
(Mironov 2012) is not priced, as it is not by anybody who trains in floating point. The certificate says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from datalens.bounded.contributions import BoundedSum
from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import Accountant
from datalens.privacy.events import (
    MOST_NOISE,
    NoiseOrigin,
    RowUnit,
    SubsampledGaussianEvent,
    UnknownEvent,
    check_part,
)
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import NoiseSource
from datalens.privacy.owned import Owned
from datalens.privacy.released import Released

BLOCKS = 10  # of charges in a run: each is a price and a line on disk


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Fixed before the first step: how much noise, how likely a record is in a sample, and how often.

    `sigma` is the noise multiplier: the noise on every coordinate of a sum has deviation sigma · unit, where unit is
    what the rows are bounded to (√k·C). A price for sampled steps holds for schedules that are not changed on the way.
    """

    sigma: float
    rate: float
    steps: int
    unit: float
    l2_bound: float  # of a row: `unit`, and what rounding may add to it
    row_unit: RowUnit = "record"  # who is in a sample or not, and has one row
    part: str = ""  # of the run, where it has other kinds of release too; one schedule a part

    def __post_init__(self) -> None:
        check_part(self.part)
        if not 0 <= self.sigma <= MOST_NOISE:
            raise DatalensError(f"sigma must be a number from 0 to {MOST_NOISE:g}, not {self.sigma}")
        if not 0 < self.rate <= 1:
            raise DatalensError(f"a sampling rate lies above 0 and is at most 1, not {self.rate:g}")
        if self.steps < 1:
            raise DatalensError(f"there must be at least one step, not {self.steps}")

    def event(self, *, repeats: int, step: int, noise: NoiseOrigin) -> SubsampledGaussianEvent:
        return SubsampledGaussianEvent(
            row_unit=self.row_unit,
            l2_bound=self.l2_bound,
            rate=self.rate,
            relation="add-remove",
            sigma=self.sigma * self.unit,
            queries=1,
            step=step,
            noise=noise,
            repeats=repeats,
            part=self.part,
        )

    def price(self, accountant: Accountant, delta: float) -> float:
        return accountant.price([(self.event(repeats=self.steps, step=0, noise="operating-system"), 1)], delta)


class GradientGate(Owned):
    """Sums of one schedule in, noisy sums out. Steps are charged a block at a time, ahead of their noise.

    Formal guarantees: see `SubsampledGaussianEvent`; that each sum is over a fresh Poisson sample is the loader's part
    (`poisson_sample`). A block that was begun when the process ended stays charged: what is left of it is handed on by
    `left` if and only if no step was taken since (see `hand_over`). A block belongs to one process: in a forked child,
    or a copy, its steps would be taken twice.

    | asked | answer |
    |---|---|
    | a sum of rows with another bound | refused, before any charge |
    | a step after all steps of the schedule were charged | refused |
    | a ledger whose events of this part are of another schedule, or that has unknown ones | refused at the start |
    | a ledger with events of other parts | they are priced with these steps, and counted by whoever charged them |
    | anything, in another process; a copy | refused |
    """

    def __init__(
        self, ledger: Ledger, schedule: Schedule, noise: NoiseSource, *, left: int = 0, blocks: int = BLOCKS
    ) -> None:
        super().__init__()
        if ledger.budget.relation != "add-remove":
            raise DatalensError(
                "Poisson samples of records are priced for add-remove only: under replace-one nobody has proved their "
                "price here; use --relation add-remove"
            )
        self.ledger, self.schedule, self.noise = ledger, schedule, noise
        self.charged, self._number = self._counted()  # steps, and the last charge of this part; -1: there is none
        if not 0 <= left <= self.charged:
            raise DatalensError(f"{left} steps cannot be left of {self.charged} that were charged")
        self.left = left  # charged, and not taken yet
        self._block = max(1, math.ceil(schedule.steps / blocks))

    def release(self, contributions: BoundedSum) -> Released:
        """The sum with noise on every coordinate: which coordinates were kept is private too."""
        if (contributions.l2_bound, contributions.row_unit) != (self.schedule.l2_bound, self.schedule.row_unit):
            raise ValueError("these rows are bounded by something else than the schedule says")
        with self._alone():
            if self.left == 0:
                self._charge()
            self.left -= 1  # before any noise exists
            event = self.ledger.events[self._number]
            assert isinstance(event, SubsampledGaussianEvent)
            total = contributions.private_total  # a GPU may still be at work on it
            noise = event.sigma * self.noise.standard_normal(total.numel()).reshape(total.shape)
            return Released(value=total.cpu().numpy().astype(np.float64) + noise, event=event, number=self._number)

    def hand_over(self) -> int:
        """What is left of the block, for a gate that goes on later: from here on this one would pay anew."""
        with self._alone():
            left, self.left = self.left, 0
            return left

    def _counted(self) -> tuple[int, int]:
        """How many steps of this part the ledger was charged for, and the number of the last of these charges."""
        steps, last = 0, -1
        for number, event in enumerate(self.ledger.events):
            if not isinstance(event, UnknownEvent) and event.part != self.schedule.part:
                continue
            same = isinstance(event, SubsampledGaussianEvent) and event == self.schedule.event(
                repeats=event.repeats, step=event.step, noise=event.noise
            )
            if not same:
                raise DatalensError("this ledger was charged for another schedule: use another ledger")
            assert isinstance(event, SubsampledGaussianEvent)
            steps, last = steps + event.repeats, number
        return steps, last

    def _charge(self) -> None:
        self.charged, _ = self._counted()  # another gate may have charged the same ledger since
        rest = self.schedule.steps - self.charged
        if rest < 1:
            raise BudgetExceeded(
                f"all {self.schedule.steps} steps of the schedule are charged: nothing was released; train for more "
                "epochs from the start, with another ledger"
            )
        block = min(rest, self._block)
        event = self.schedule.event(repeats=block, step=self.charged, noise=self.noise.origin)
        self._number = self.ledger.charge(event)  # durable; raises before overspending
        self.charged += block
        self.left = block


def poisson_sample(noise: NoiseSource, count: int, rate: float) -> np.ndarray:
    """Positions of those of `count` records that are in: each by itself, with probability `rate`, or 2⁻³² less."""
    if rate >= 1:
        return np.arange(count)
    return np.flatnonzero(noise.words(count) < math.floor(rate * 2**32))


# --- calibration ----------------------------------------------------------------------------------------------------

CLOSE = 5e-3  # a solution spends all but this part of ε, or is this near to one that would spend too much
_MOST_SIGMA, _LEAST_SIGMA, _MOST_STEPS = 2.0**20, 2.0**-10, 2**30


def calibrate_sigma(*, rate: float, steps: int, budget: Budget, rounding: float) -> float:
    """About the smallest noise multiplier with which so many sampled steps fit. `rounding`: of l2_bound over unit."""
    if math.isinf(budget.epsilon):
        return 0.0

    def price(quiet: float, accountant: Accountant) -> float:
        schedule = Schedule(sigma=1 / quiet, rate=rate, steps=steps, unit=1.0, l2_bound=1 + rounding)
        return schedule.price(accountant, budget.delta)

    quiet = _largest(price, budget, most=1 / _LEAST_SIGMA, least=1 / _MOST_SIGMA, power=0.95)
    if quiet is None:
        raise BudgetExceeded(
            f"no noise brings {steps} steps down to {budget.describe(budget.epsilon)}: raise --epsilon, train for "
            "fewer --epochs, or use another --accountant"
        )
    return 1 / quiet


def calibrate_steps(*, rate: float, sigma: float, budget: Budget, rounding: float) -> int:
    """About the most sampled steps of this noise multiplier that fit; 0 if not even one does."""
    if not (0 < sigma <= MOST_NOISE and math.isfinite(budget.epsilon)):
        raise DatalensError("without noise, or with epsilon inf, nothing limits the steps: give --epochs")

    def price(steps: float, accountant: Accountant) -> float:
        schedule = Schedule(sigma=sigma, rate=rate, steps=int(steps), unit=1.0, l2_bound=1 + rounding)
        return schedule.price(accountant, budget.delta)

    found = int(_largest(price, budget, most=float(_MOST_STEPS), least=1.0, power=1.8) or 0)
    if found >= _MOST_STEPS:
        raise DatalensError("so many steps fit that nothing limits them: give --epochs, and no --sigma")
    return found


def _largest(
    price: Callable[[float, Accountant], float], budget: Budget, *, most: float, least: float, power: float
) -> float | None:
    """About the largest x whose price, which rises about as x^(1/power), is within the budget.

    Some accountants take seconds to look, so looking begins where RDP, which takes none, would stop.
    """
    rough = Accountant(name="rdp-improved")
    low, high = least, most
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if price(middle, rough) <= budget.epsilon else (low, middle)
    at, fits, fails = low, 0.0, math.inf
    for _ in range(60):
        cost = price(at, budget.pricing())
        if cost <= budget.epsilon:
            fits = at
            if cost >= budget.epsilon * (1 - CLOSE) or at >= most:
                break
        else:
            fails = at
            if at <= least:
                break
        if fails <= max(fits * (1 + CLOSE), least):
            break
        near = at * (budget.epsilon * (1 - CLOSE / 2) / cost) ** power if cost > 0 else 2 * at
        inside = fits < near < fails
        at = near if inside else math.sqrt(max(fits, least) * min(fails, most))
        at = min(max(at, least), most)
    return fits or None
