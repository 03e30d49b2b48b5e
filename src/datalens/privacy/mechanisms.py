"""The gate: mechanisms whose `release` every value that leaves the private side goes through. Each charges first."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datalens.bounded.contributions import BoundedSum, VoteCounts
from datalens.errors import DatalensError
from datalens.privacy.events import (
    MOST_NOISE,
    Charge,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    NoiseOrigin,
    confident_answer,
    confident_check,
    unprotected,
)
from datalens.privacy.ledger import Ledger
from datalens.privacy.noise import Held, IntegerNoise, LaplaceNoise, NoiseSource
from datalens.privacy.released import Released


def charged(event: Charge, ledger: Ledger, *, cells: int) -> int:
    """Charge an event and return the number of the charge, which is durable before sum and noise meet.

    To be called after the noise was drawn (`Held`). Room for the released value is made before the charge. So only one
    addition and one write come between the charge and the journal, and a kill or a full disk can lose little.

    Args:
        event: The event to charge.
        ledger: The ledger to charge.
        cells: How many numbers will be released.

    Raises:
        BudgetExceeded: the event does not fit into what is left of the budget.
        DatalensError: there is no room for the value, or the ledger cannot be written.
    """
    ledger.make_room(cells)
    return ledger.charge(event)


class Mechanism(Protocol):
    """A mechanism: the only way out of the private side.

    `release` charges the ledger for the sum of a step, and then returns it with noise.
    """

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        """Charge the ledger, and then return the sum with noise.

        Args:
            contributions: The sum to release.
            ledger: The ledger to charge.
            step: The step that the charge names.

        Raises:
            BudgetExceeded: the charge does not fit into the ledger's budget; nothing is released.
            DatalensError: the ledger could not be written, or these rows cannot be released in this way.
        """


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianSum:
    """Sum of bounded integer rows plus the exact discrete Gaussian N_Z(0, sigma²) on every coordinate.

    Formal guarantees: see `DiscreteGaussianEvent`. All arithmetic is in integers, so there is no floating-point leak,
    and the noise is sampled exactly.

    | rows | released |
    |---|---|
    | int8 votes | int64 |
    | clipped reals | refused, before any charge |
    """

    noise: IntegerNoise
    part: str = ""  # part of the run, named in every charge

    def __post_init__(self) -> None:
        if not 0 < self.noise.sigma <= MOST_NOISE:
            raise DatalensError(f"sigma must be a number above 0, to {MOST_NOISE:g}, not {self.noise.sigma}")

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        total = contributions.private_total.cpu().numpy()
        if not np.issubdtype(total.dtype, np.integer):
            raise DatalensError("discrete noise is for sums of integers: use --noise gaussian with --compress topk")
        event = DiscreteGaussianEvent(
            row_unit=contributions.row_unit,
            l2_bound=contributions.l2_bound,
            diameter=contributions.diameter,
            relation=ledger.budget.relation,
            sigma=self.noise.sigma,
            queries=contributions.queries,
            step=step,
            noise=self.noise.origin,
            part=self.part,
            coordinates=total.size,
        )
        total = total.astype(np.int64)
        noise = Held(self.noise.integers(total.size).reshape(total.shape))  # if this fails, nothing is charged
        number = charged(event, ledger, cells=total.size)
        value = total + noise.take()
        return Released(value=value, event=event, number=number)


@dataclass(frozen=True, kw_only=True)
class GaussianSum:
    """Sum of bounded rows plus N(0, sigma²) on every coordinate (DataLens, Algorithm 3, line 7).

    Formal guarantees: see `GaussianEvent`. Integer sums are released as integers: q + round(N) = round(q + N), so
    rounding is post-processing of the real-valued mechanism, and there are no low bits of a floating-point sum, through
    which Gaussian noise on a computer is known to leak (Mironov 2012). For sums of real rows the floating-point caveat
    applies; the certificate says so.

    | rows | released |
    |---|---|
    | int8 votes | int64 |
    | clipped reals | float64 |
    """

    sigma: float
    noise: NoiseSource
    part: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= MOST_NOISE:
            raise DatalensError(f"sigma must be a number from 0 to {MOST_NOISE:g}, not {self.sigma}")

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        event = GaussianEvent(
            row_unit=contributions.row_unit,
            l2_bound=contributions.l2_bound,
            diameter=contributions.diameter,
            relation=ledger.budget.relation,
            sigma=self.sigma,
            queries=contributions.queries,
            step=step,
            noise=self.noise.origin,
            part=self.part,
        )
        total = contributions.private_total.cpu().numpy()
        drawn = self.sigma * self.noise.standard_normal(total.size).reshape(total.shape)
        whole = np.issubdtype(total.dtype, np.integer)
        total = total.astype(np.int64 if whole else np.float64)
        noise = Held(np.rint(drawn).astype(np.int64) if whole else drawn)
        number = charged(event, ledger, cells=total.size)
        value: np.ndarray = total + noise.take()
        return Released(value=value, event=event, number=number)


@dataclass(frozen=True, kw_only=True)
class LaplaceVote:
    """Counts of ballots plus discrete Laplace noise on every count (PATE-GAN; Papernot et al. 2017).

    Formal guarantees: see `LaplaceEvent`. A label has two counts, and a changed ballot moves both, so with noise
    Lap(1/λ) it is 2λ-DP, as published. Here the composition over all labels is priced exactly.

    | ballots of | relation | a neighbour |
    |---|---|---|
    | teachers | any | has another ballot: two counts per query |
    | records or persons | replace-one | has another ballot: two counts per query |
    | records or persons | add-remove | has one ballot more, or fewer: one count per query |
    """

    noise: LaplaceNoise
    part: str = ""

    def release(self, votes: VoteCounts, ledger: Ledger, *, step: int) -> Released:
        """Charge the ledger, and then return the counts with noise.

        Args:
            votes: Counts of ballots.
            ledger: The ledger to charge.
            step: The step that the charge names.

        Raises:
            BudgetExceeded: the charge does not fit into the ledger's budget; nothing is released.
            TypeError: the rows are not ballots.
        """
        if not isinstance(votes, VoteCounts):
            raise TypeError("Laplace noise is for counts of ballots: other rows may move a count by more than one")
        appears = ledger.budget.relation == "add-remove" and votes.row_unit != "teacher"
        event = LaplaceEvent(
            row_unit=votes.row_unit,
            moved=votes.queries if appears else votes.moved,
            relation=ledger.budget.relation,
            scale=self.noise.scale,
            queries=votes.queries,
            step=step,
            noise=self.noise.origin,
            part=self.part,
        )
        total = votes.private_total.cpu().numpy().astype(np.int64)
        noise = Held(self.noise.integers(total.size).reshape(total.shape))
        number = charged(event, ledger, cells=total.size)
        value = total + noise.take()
        return Released(value=value, event=event, number=number)


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax:
    """The answer most teachers chose, for queries on which enough of them agree (Papernot et al. 2018, Algorithm 1).

    Line 1: is the largest count plus N(0, sigma_check²) at least `threshold`? One ballot moves the largest count of a
    query by at most one, so all of them by at most √queries. Line 2: for queries that pass, the answer with the largest
    count after N(0, sigma²) was added to every count; one ballot moves these counts by at most √(2·passed). The check
    is charged for every query, the answer for those that pass. Gaussian charges may depend on earlier releases (see
    `Accountant`).

    The released value is the number of the answer, [queries], or −1 where the check failed. Noise is rounded to
    integers, which is post-processing.
    """

    sigma_check: float
    sigma: float
    threshold: float
    noise: NoiseSource
    part: str = ""

    def __post_init__(self) -> None:
        for sigma in (self.sigma_check, self.sigma):
            if not 0 <= sigma <= MOST_NOISE:
                raise DatalensError(f"sigma must be a number from 0 to {MOST_NOISE:g}, not {sigma}")

    def release(self, votes: VoteCounts, ledger: Ledger, *, step: int) -> Released:
        """Charge for the check and, where it passed, for the answers; then return the answers.

        Args:
            votes: Counts of ballots.
            ledger: The ledger to charge.
            step: The step that the charge names.

        Raises:
            BudgetExceeded: the charge does not fit into the ledger's budget; nothing is released.
            TypeError: the rows are not ballots.
        """
        if not isinstance(votes, VoteCounts):
            raise TypeError("confident GNMax is for counts of ballots: other rows may move a count by more than one")
        facts = (self.noise.origin, step, self.part)
        check = confident_check(ledger.budget.relation, votes.queries, self.sigma_check, *facts)
        total = votes.private_total.cpu().numpy().astype(np.int64)  # [queries, answers]
        noise = self._noise(self.sigma_check, (len(total),))
        number = charged(check, ledger, cells=len(total))
        passed = total.max(axis=1) + noise.take() >= self.threshold
        answers = np.full(len(total), -1, dtype=np.int64)
        if not passed.any():
            return Released(value=answers, event=check, number=number)
        answer = confident_answer(ledger.budget.relation, int(passed.sum()), self.sigma, *facts)
        counts = total[passed]
        noise = self._noise(self.sigma, counts.shape)
        number = ledger.charge(answer)
        answers[passed] = (counts + noise.take()).argmax(axis=1)
        return Released(value=answers, event=answer, number=number)

    def _noise(self, sigma: float, shape: tuple[int, ...]) -> Held:
        normal = self.noise.standard_normal(math.prod(shape)).reshape(shape)
        return Held(np.rint(sigma * normal).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """A wrapper around a mechanism from another package, which is code inside the gate and named in the certificate.

    It checks what can be checked from outside:

    | the mechanism | result |
    |---|---|
    | did not charge exactly once | the release is refused, and what was charged is lost |
    | charged for other rows, noise (also another law or origin), step or relation than these | the same |
    | named a part of the run, of which it cannot know | the same |
    | released more numbers, or fewer, than these rows have | the same |
    | drew its noise before the charge, or drew too little noise | cannot be detected here |
    """

    mechanism: Mechanism
    sigma: float
    noise: NoiseSource | IntegerNoise

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        before = len(ledger.events)
        ledger.make_room(contributions.cells)
        released = self.mechanism.release(contributions, ledger, step=step)
        charged = ledger.events[before:]
        expected = (contributions.row_unit, contributions.l2_bound, contributions.diameter, self.sigma, step)
        if len(charged) != 1 or not isinstance(released, Released) or released.number != before:
            raise DatalensError("--mechanism: the plug-in did not charge exactly once for its release: not used")
        event = charged[0]
        if released.event != event or not isinstance(event, GaussianEvent):
            raise DatalensError("--mechanism: the plug-in was charged for another event than it released: not used")
        if (event.row_unit, event.l2_bound, event.diameter, event.sigma, event.step) != expected or event.part:
            raise DatalensError("--mechanism: the plug-in was charged for other rows or noise than these: not used")
        cells = contributions.cells if isinstance(self.noise, IntegerNoise) else None  # only exact noise states it
        if (event.noise, getattr(event, "coordinates", None)) != (self.noise.origin, cells):
            raise DatalensError("--mechanism: the plug-in was charged for another law or origin of noise: not used")
        if np.shape(released.value) != tuple(contributions.private_total.shape):
            raise DatalensError(
                "--mechanism: the plug-in released another number of values than the rows have: not used"
            )
        return released


def release_unprotected(ledger: Ledger, *, origin: NoiseOrigin) -> int:
    """Charge once for releasing anything learned from the records, without a gate. The price is infinite.

    To be called before the first record is used.

    Args:
        ledger: The ledger to charge.
        origin: Noise origin that the event states.

    Returns:
        Number of the charge.

    Raises:
        BudgetExceeded: the ledger's budget is finite.
    """
    return ledger.charge(unprotected(ledger.budget.relation, origin=origin))


def make_mechanism(sigma: float, noise: NoiseSource | IntegerNoise, *, part: str = "") -> Mechanism:
    """Return the mechanism that goes with a source of noise.

    Args:
        sigma: Standard deviation of the noise on every coordinate.
        noise: A source of integer noise, for `DiscreteGaussianSum`, or of real noise, for `GaussianSum`.
        part: The part of the run that its charges name, where the run has several kinds of release.

    Raises:
        DatalensError: sigma is out of range.
        ValueError: the integer noise was made for another sigma.
    """
    if not isinstance(noise, IntegerNoise):
        return GaussianSum(sigma=sigma, noise=noise, part=part)
    if noise.sigma != sigma:
        raise ValueError(f"noise of width {noise.sigma} was drawn for a mechanism of width {sigma}")
    return DiscreteGaussianSum(noise=noise, part=part)
