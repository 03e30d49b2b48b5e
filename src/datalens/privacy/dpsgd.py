"""The gate for parameter gradients (DP-SGD): Poisson samples, and sums of their bounded rows with Gaussian noise.

Differs from Opacus: every step is charged before its noise is drawn, and noise and samples come from the operating
system. The noise is float64 and is added to a sum of float32 rows. What leaks through the low bits of such a sum
(Mironov 2012) is not priced, here or in any other floating-point training. The certificate says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from datalens.bounded.contributions import BoundedSum
from datalens.errors import BudgetExceeded, DatalensError
from datalens.privacy.accountant import Accountant
from datalens.privacy.events import (
    MOST_NOISE,
    Charge,
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

BLOCKS = 10  # charges in a run: each computes a price and writes a line to disk


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise multiplier, sampling rate and number of steps, fixed before the first step.

    The noise on every coordinate of a sum has standard deviation sigma · unit, where `unit` is the bound on the norm of
    rows (√k·C). The price of sampled steps is valid only for a schedule that does not change during the run.

    Raises:
        DatalensError: a value is out of range.
    """

    sigma: float
    rate: float
    steps: int
    unit: float
    l2_bound: float  # bound on a row's norm: `unit`, plus what rounding may add to it
    row_unit: RowUnit = "record"  # what is sampled and has one row
    part: str = ""  # part of the run, where it has other kinds of release too; each part has one schedule

    def __post_init__(self) -> None:
        check_part(self.part)
        if not 0 <= self.sigma <= MOST_NOISE:
            raise DatalensError(f"sigma must be a number from 0 to {MOST_NOISE:g}, not {self.sigma}")
        if not 0 < self.rate <= 1:
            raise DatalensError(f"a sampling rate must be above 0 and at most 1, not {self.rate:g}")
        if self.steps < 1:
            raise DatalensError(f"there must be at least one step, not {self.steps}")

    def event(self, *, repeats: int, step: int, noise: NoiseOrigin) -> SubsampledGaussianEvent:
        """Return the event of a block of steps.

        Args:
            repeats: Steps in the block.
            step: Number of the first.
            noise: Origin of the noise.
        """
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

    def price(self, accountant: Accountant, delta: float, *, beside: Sequence[Charge] = ()) -> float:
        """Return the ε of all steps of the schedule, and of the charges beside them, at this δ.

        Args:
            accountant: The accountant that prices them.
            delta: δ at which ε is computed.
            beside: Everything else that the run will charge.
        """
        steps = self.event(repeats=self.steps, step=0, noise="operating-system")
        return accountant.price([*((event, 1) for event in beside), (steps, 1)], delta)


class GradientGate(Owned):
    """Adds noise to the sums of one schedule. Steps are charged a block at a time, before their noise is drawn.

    Formal guarantees: see `SubsampledGaussianEvent`. The loader must make sure that each sum is over a fresh Poisson
    sample (`poisson_sample`). A block that was begun when the process ended stays charged. Its remaining steps may be
    passed on as `left` only if no step was taken since (see `hand_over`). A gate belongs to one process: in a forked
    child, or a copy, the steps of its block would be taken twice.

    | situation | result |
    |---|---|
    | a sum of rows with another bound | refused, before any charge |
    | a step after all steps of the schedule were charged | refused |
    | a ledger whose events of this part have another schedule, or that has unknown events | refused at the start |
    | a ledger with events of other parts | priced together with these steps, but not counted as steps of this gate |
    | any use in another process, or a copy | refused |

    Args:
        ledger: The ledger to charge; its relation must be add-remove.
        schedule: Noise, sampling rate and steps.
        noise: Source of the noise.
        left: Steps that were charged, and not taken, by an earlier gate of the same ledger.
        blocks: Number of charges into which the steps are divided.

    Raises:
        DatalensError: the ledger does not fit the schedule (see the table).
    """

    def __init__(
        self, ledger: Ledger, schedule: Schedule, noise: NoiseSource, *, left: int = 0, blocks: int = BLOCKS
    ) -> None:
        super().__init__()
        if ledger.budget.relation != "add-remove":
            raise DatalensError(
                "Poisson samples of records are priced for add-remove only, and no price for replace-one is proved "
                "here: use --relation add-remove"
            )
        self.ledger, self.schedule, self.noise = ledger, schedule, noise
        self.charged, self._number = self._counted()  # steps, number of the last charge of this part
        if not 0 <= left <= self.charged:
            raise DatalensError(f"{left} steps cannot be left of {self.charged} that were charged")
        self.left = left  # steps that are charged and not taken yet
        self._block = max(1, math.ceil(schedule.steps / blocks))

    def release(self, contributions: BoundedSum) -> Released:
        """Return the sum with noise on every coordinate. (Which coordinates a row kept is private too.)

        Args:
            contributions: The sum over a fresh Poisson sample.

        Raises:
            BudgetExceeded: all steps of the schedule are charged, or the next block does not fit into the budget.
            ValueError: the rows have another bound or unit than the schedule.
        """
        if (contributions.l2_bound, contributions.row_unit) != (self.schedule.l2_bound, self.schedule.row_unit):
            raise ValueError("the rows have another bound or privacy unit than the schedule says")
        with self._alone():
            if self.left == 0:
                self._charge()
            self.left -= 1  # counted as taken before any noise exists
            event = self.ledger.events[self._number]
            assert isinstance(event, SubsampledGaussianEvent)
            total = contributions.private_total  # a GPU may still be computing it while noise is drawn
            noise = event.sigma * self.noise.standard_normal(total.numel()).reshape(total.shape)
            return Released(value=total.cpu().numpy().astype(np.float64) + noise, event=event, number=self._number)

    def hand_over(self) -> int:
        """Return the remaining steps of the block, for a later gate. The next release of this gate is charged anew."""
        with self._alone():
            left, self.left = self.left, 0
            return left

    def _counted(self) -> tuple[int, int]:
        """Return the number of steps of this part that were charged, and the number of the last of these charges."""
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
                f"all {self.schedule.steps} steps of the schedule are charged, so nothing was released: to train for "
                "more epochs, start again with another ledger"
            )
        block = min(rest, self._block)
        event = self.schedule.event(repeats=block, step=self.charged, noise=self.noise.origin)
        self._number = self.ledger.charge(event)  # durable; raises before overspending
        self.charged += block
        self.left = block


def poisson_sample(noise: NoiseSource, count: int, rate: float) -> np.ndarray:
    """Return the positions of a Poisson sample: each record is in it independently with probability `rate`.

    (The probability is rounded down to a multiple of 2⁻³².)

    Args:
        noise: Source of the secret choices.
        count: Number of records.
        rate: Sampling probability.
    """
    if rate >= 1:
        return np.arange(count)
    return sample_of(noise.words(count), rate)


def sample_of(words: np.ndarray, rate: float) -> np.ndarray:
    """Return the positions of the Poisson sample that these random words decide.

    Args:
        words: Independent and uniform below 2³², one for each record.
        rate: Sampling probability, below 1.
    """
    return np.flatnonzero(words < math.floor(rate * 2**32))


# --- calibration ----------------------------------------------------------------------------------------------------

CLOSE = 5e-3  # a solution spends all of ε but this fraction, or is this close to one that would overspend
_MOST_SIGMA, _LEAST_SIGMA, _MOST_STEPS = 2.0**20, 2.0**-10, 2**30


def calibrate_sigma(
    *, rate: float, steps: int, budget: Budget, rounding: float, beside: Sequence[Charge] = ()
) -> float:
    """Return approximately the smallest noise multiplier with which `steps` sampled steps fit; 0 if ε is infinite.

    Args:
        rate: Sampling probability.
        steps: Number of steps.
        budget: Must not be exceeded.
        rounding: l2_bound / unit − 1.
        beside: Everything else that the run will charge, with a schedule that is fixed beforehand, too.

    Raises:
        BudgetExceeded: no noise is large enough.
    """
    if math.isinf(budget.epsilon):
        return 0.0

    def price(quiet: float, accountant: Accountant) -> float:
        schedule = Schedule(sigma=1 / quiet, rate=rate, steps=steps, unit=1.0, l2_bound=1 + rounding)
        return schedule.price(accountant, budget.delta, beside=beside)

    quiet = _largest(price, budget, most=1 / _LEAST_SIGMA, least=1 / _MOST_SIGMA, power=0.95)
    if quiet is None:
        raise BudgetExceeded(
            f"no noise brings {steps} steps down to {budget.describe(budget.epsilon)}: raise --epsilon, train for "
            "fewer --epochs, or use another --accountant"
        )
    return 1 / quiet


def calibrate_steps(*, rate: float, sigma: float, budget: Budget, rounding: float) -> int:
    """Return approximately the largest number of sampled steps that fit; 0 if not even one does.

    Args:
        rate: Sampling probability.
        sigma: Noise multiplier.
        budget: Must not be exceeded.
        rounding: l2_bound / unit − 1.

    Raises:
        DatalensError: nothing limits the number of steps.
    """
    if not (0 < sigma <= MOST_NOISE and math.isfinite(budget.epsilon)):
        raise DatalensError("without noise, or with epsilon inf, nothing limits the steps: give --epochs")

    def price(steps: float, accountant: Accountant) -> float:
        schedule = Schedule(sigma=sigma, rate=rate, steps=int(steps), unit=1.0, l2_bound=1 + rounding)
        return schedule.price(accountant, budget.delta)

    most = int(_largest(price, budget, most=float(_MOST_STEPS), least=1.0, power=1.8) or 0)
    if most >= _MOST_STEPS:
        raise DatalensError("so many steps fit that nothing limits them: give --epochs and leave out --sigma")
    return most


def _largest(
    price: Callable[[float, Accountant], float], budget: Budget, *, most: float, least: float, power: float
) -> float | None:
    """Return approximately the largest x whose price is within the budget. The price grows about as x^(1/power).

    Some accountants take seconds per evaluation, so the search begins at the solution for RDP, which is fast.
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
