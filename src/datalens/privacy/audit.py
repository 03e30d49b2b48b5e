"""Audits of the gate: attacks on a mechanism, and lower bounds on ε from their success.

An attack can prove a claimed ε wrong, but never right: a bound below the claim means only that this attack found
nothing. So every audit also runs on mechanisms that are broken on purpose, and must catch them.

There are two levels. `REPORT_LEVEL`: the bound that is shown holds with 95 % confidence. `VERDICT_LEVEL`: a claim is
called broken, and a control caught, only by a bound that holds with 99.99 % confidence, so that an honest mechanism
whose worst case is attacked perfectly raises a false alarm in at most one audit of 10,000.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta, binom, norm
from torch import Tensor

from datalens.bounded.contributions import BoundedSum, Contributions, sum_bounded
from datalens.errors import DatalensError
from datalens.privacy.accountant import Accountant, AccountantName
from datalens.privacy.calibration import calibrate_sigma
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.events import NoiseLaw, Relation
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import Mechanism
from datalens.privacy.released import Released

REPORT_LEVEL = 0.05
VERDICT_LEVEL = 1e-4
STATISTIC = "⟨release, flip direction⟩"


# --- broken twins: each must be caught ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peeking:
    """Broken twin: releases the first image's sum without noise, and charges as if it had noise."""

    mechanism: Mechanism

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        honest = self.mechanism.release(contributions, ledger, step=step)
        value = honest.value.copy()
        value[0] = contributions.private_total[0].cpu().numpy()
        return Released(value=value, event=honest.event, number=honest.number)


@dataclass(frozen=True, kw_only=True)
class Weakened:
    """Broken twin: releases by one mechanism, and charges for another."""

    charged: Mechanism
    released: Mechanism

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        paid = self.charged.release(contributions, ledger, step=step)
        free = Ledger.in_memory(_unlimited(ledger.budget.delta, ledger.budget.relation, "exact"))
        value = self.released.release(contributions, free, step=step).value
        return Released(value=value, event=paid.event, number=paid.number)


# --- from counted errors to a bound ---------------------------------------------------------------


def rate_upper(count: int, trials: int, level: float) -> float:
    """Return a Clopper-Pearson upper bound: it is at least the true rate with probability 1 − level.

    Args:
        count: How often it happened.
        trials: Number of trials.
        level: Probability that the bound is wrong.
    """
    return 1.0 if count == trials else float(beta.ppf(1 - level, count + 1, trials - count))


def rate_lower(count: int, trials: int, level: float) -> float:
    """Return a Clopper-Pearson lower bound: it is at most the true rate with probability 1 − level.

    Args:
        count: How often it happened.
        trials: Number of trials.
        level: Probability that the bound is wrong.
    """
    return 0.0 if count == 0 else float(beta.ppf(level, count, trials - count + 1))


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The errors of a test, fixed beforehand, that tells the worlds with and without a record apart."""

    false_alarms: int
    without: int  # trials in the world without the record
    misses: int
    with_it: int  # trials in the world with it

    def mu(self, level: float) -> float:
        """Return a lower bound on μ that holds with probability 1 − level.

        The false negative rate of any test on a μ-GDP release is at least Φ(Φ⁻¹(1 − FPR) − μ), so
        μ ≥ −Φ⁻¹(FPR) − Φ⁻¹(FNR) (Dong et al.). Both rates are taken at their upper confidence bounds, each at half the
        level.

        Args:
            level: Probability that the bound is wrong.
        """
        false_alarm = rate_upper(self.false_alarms, self.without, level / 2)
        miss = rate_upper(self.misses, self.with_it, level / 2)
        return max(0.0, float(-norm.ppf(false_alarm) - norm.ppf(miss)))

    def pooled_mu(self, level: float) -> float:
        """Return a lower bound on μ from all errors together, if both worlds had the same number of trials.

        For any test FPR + FNR ≥ 2Φ(−μ/2), and one rate over all trials has a narrower interval than two. If the rates
        of the two worlds differ, the count of errors varies less than a binomial one (Hoeffding 1956), so the level
        holds.

        Args:
            level: Probability that the bound is wrong.

        Raises:
            ValueError: the worlds had different numbers of trials.
        """
        if self.without != self.with_it:
            raise ValueError(f"{self.without} and {self.with_it} trials cannot be pooled: use equal numbers")
        rate = rate_upper(self.false_alarms + self.misses, self.without + self.with_it, level)
        return max(0.0, float(-2 * norm.ppf(rate)))

    def epsilon(self, delta: float, level: float) -> float:
        """Return a lower bound on ε at δ: that of a Gaussian mechanism with the lower bound on μ.

        Args:
            delta: δ at which ε is computed.
            level: Probability that the bound is wrong.
        """
        return exact_epsilon(self.mu(level) ** 2, delta)


def count_errors(without: np.ndarray, with_it: np.ndarray, *, threshold: float) -> Errors:
    """Count the errors of the test that answers "with the record" where the statistic is above the threshold.

    Args:
        without: Statistics from the world without the record.
        with_it: Statistics from the world with it.
        threshold: Must be fixed before the releases are looked at.
    """
    return Errors(
        false_alarms=int((without > threshold).sum()),
        without=len(without),
        misses=int((with_it <= threshold).sum()),
        with_it=len(with_it),
    )


def one_run_p_value(*, canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of this many right guesses, if one run over all canaries is (ε, δ)-DP.

    Each canary was included or not by a fair coin. At δ = 0 the best guesses are those about randomised response, each
    right with probability e^ε/(1 + e^ε). A δ adds at most 2mδ·max over i of P[v − i ≤ Binomial < v]/i (Steinke, Nasr,
    Jagielski 2023, Theorem 5.2).

    Args:
        canaries: Number of canaries, m.
        guesses: Canaries that a guess was made about.
        right: Right guesses, v.
        epsilon: Of the claim that is tested.
        delta: Of the claim that is tested.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    by_luck = float(binom.sf(right - 1, guesses, chance))
    just_under = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))  # P[v − i ≤ Binomial < v]
    by_delta = float((just_under / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, by_luck + 2 * canaries * delta * by_delta)


def one_run_epsilon(*, canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """Return the largest ε that this many right guesses rule out at this level; 0 if they rule out none.

    Args:
        canaries: Number of canaries.
        guesses: Canaries that a guess was made about.
        right: Right guesses.
        delta: δ of the claim.
        level: Probability of ruling out a true claim.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses about {canaries} canaries is impossible")

    def ruled_out(epsilon: float) -> bool:
        return one_run_p_value(canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta) <= level

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low


# --- the worst case -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Two sets of votes that differ in all signs of one teacher: 2√(km), the largest distance between two rows.

    `believed` is the diameter that the sum states, in units of the bound. The true value is 2.
    """

    k: int
    images: int
    others: int = 3
    believed: float = 2.0

    def votes(self, *, flipped: bool, trials: int = 1) -> BoundedSum:
        """Return the sum of `trials` concatenated copies of the votes: one release of it equals `trials` releases.

        Args:
            flipped: Whether the first teacher's signs are flipped.
            trials: Number of copies.
        """
        rows = torch.stack([-self.direction if flipped else self.direction, *self._others()])
        bound = math.sqrt(self.k * self.images * trials)
        return sum_bounded(
            [
                Contributions(
                    rows=rows.repeat(1, trials, 1),
                    l2_bound=bound,
                    diameter=self.believed * bound,
                    row_unit="teacher",
                    units=torch.arange(len(rows)),
                )
            ]
        )

    @property
    def direction(self) -> Tensor:
        """The votes of the teacher whose signs are flipped: [images, k] int8."""
        return _pattern(self.images, self.k, 0)

    @property
    def threshold(self) -> float:
        """The midpoint between the two worlds. The attacker knows all other votes; no release is needed."""
        return float(sum((other.to(torch.int64) * self.direction).sum() for other in self._others()))

    def _others(self) -> list[Tensor]:
        return [_pattern(self.images, self.k, teacher) for teacher in range(1, 1 + self.others)]


def _pattern(images: int, k: int, teacher: int) -> Tensor:
    place = torch.arange(images * k) + 5 * teacher
    return torch.where(place % (3 + teacher) == 0, -1, 1).to(torch.int8).view(images, k)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A mechanism, and the charge that is claimed for it. In a control the two differ in exactly one way."""

    name: str
    mechanism: Mechanism
    votes: Neighbours
    charged: Mechanism
    charged_votes: Neighbours
    releases: int = 1

    def claimed(self, delta: float, relation: Relation, accountant: AccountantName) -> float:
        """Return the ε that a ledger states for all releases of one trial.

        Args:
            delta: δ at which ε is computed.
            relation: Of the ledger.
            accountant: Of the ledger.
        """
        ledger = Ledger.in_memory(_unlimited(delta, relation, accountant))
        for step in range(self.releases):
            self.charged.release(self.charged_votes.votes(flipped=False), ledger, step=step)
        return ledger.spent()

    def statistics(self, *, flipped: bool, trials: int, relation: Relation) -> np.ndarray:
        """Return ⟨release, flip direction⟩, summed over the releases of each trial: [trials].

        Args:
            flipped: Whether the first teacher's signs are flipped.
            trials: Number of trials.
            relation: Of the ledger that is charged.
        """
        votes = self.votes.votes(flipped=flipped, trials=trials)
        direction = self.votes.direction.flatten().numpy().astype(np.float64)
        total = np.zeros(trials)
        for step in range(self.releases):
            ledger = Ledger.in_memory(_unlimited(0.5, relation, "exact"))
            value = self.mechanism.release(votes, ledger, step=step).value
            total += value.reshape(trials, -1).astype(np.float64) @ direction
        return total


def _unlimited(delta: float, relation: Relation, accountant: AccountantName) -> Budget:
    return Budget(epsilon=math.inf, delta=delta, relation=relation, accountant=accountant)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of one audit: the claim that the mechanism is calibrated to, and the trials.

    Raises:
        DatalensError: a value is out of range.
    """

    epsilon: float
    delta: float
    relation: Relation = "add-remove"
    accountant: AccountantName = "exact"
    law: NoiseLaw = "gaussian"
    trials: int = 10_000  # in each world
    releases: int = 1
    k: int = 8
    images: int = 4

    def __post_init__(self) -> None:
        for name, least in (("trials", 100), ("releases", 1), ("k", 1), ("images", 4)):
            if getattr(self, name) < least:
                raise DatalensError(f"--{name} must be at least {least} for an audit, not {getattr(self, name)}")
        if not math.isfinite(self.epsilon):
            raise DatalensError("an infinite epsilon claims nothing that an audit could prove wrong: give a finite one")
        _unlimited(self.delta, self.relation, self.accountant)
        if not self.epsilon > 0:
            raise DatalensError(f"epsilon must be above 0, not {self.epsilon:g}")

    def sigma(self, sensitivity: float) -> float:
        """Return the σ at which the releases of one trial cost the plan's ε, for this sensitivity.

        Args:
            sensitivity: The largest distance between two neighbouring sums.
        """
        return calibrate_sigma(
            sensitivity=sensitivity,
            steps=self.releases,
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=Accountant(name=self.accountant),
            law=self.law,
            coordinates=self.k * self.images,
        )


MakeMechanism = Callable[[float], Mechanism]  # σ → mechanism


def honest(plan: Plan, make: MakeMechanism) -> Subject:
    """Return the unmodified mechanism, charged for what it releases.

    Args:
        plan: Settings of the audit.
        make: Makes the mechanism from σ.
    """
    votes = Neighbours(k=plan.k, images=plan.images)
    mechanism = make(plan.sigma(2 * math.sqrt(plan.k * plan.images)))
    return Subject(
        name="as it is",
        mechanism=mechanism,
        votes=votes,
        charged=mechanism,
        charged_votes=votes,
        releases=plan.releases,
    )


def controls(plan: Plan, make: MakeMechanism) -> list[Subject]:
    """Return three controls, errors found in published code: the real mechanism, wrongly calibrated or charged.

    Args:
        plan: Settings of the audit.
        make: Makes the mechanism from σ.
    """
    votes, one_image = Neighbours(k=plan.k, images=plan.images), Neighbours(k=plan.k, images=1)
    short = Neighbours(k=plan.k, images=plan.images, believed=1.0)
    sigma = plan.sigma(2 * math.sqrt(plan.k * plan.images))
    too_short, too_few = make(plan.sigma(math.sqrt(plan.k * plan.images))), make(plan.sigma(2 * math.sqrt(plan.k)))
    wrong = (
        ("half the noise", make(sigma / 2), votes, make(sigma), votes),
        ("sensitivity √k for 2√k", too_short, short, too_short, short),
        ("charged per batch, not per image", too_few, votes, too_few, one_image),
    )
    return [
        Subject(
            name=name,
            mechanism=mechanism,
            votes=asked,
            charged=charged,
            charged_votes=paid,
            releases=plan.releases,
        )
        for name, mechanism, asked, charged, paid in wrong
    ]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of an audit of one claim. Both bounds are lower bounds on ε at the claim's δ."""

    name: str
    claimed: float
    lower_bound: float  # at REPORT_LEVEL
    verdict_bound: float  # at VERDICT_LEVEL
    trials: int

    @property
    def broken(self) -> bool:
        """Whether the claim is refuted: more leaks than claimed. For a control: whether it was caught."""
        return self.verdict_bound > self.claimed

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return {**asdict(self), "broken": self.broken}


def finding(name: str, errors: Errors, *, claimed: float, delta: float) -> Finding:
    """Return the finding that these errors give about a claimed ε at δ.

    Args:
        name: Of what was audited.
        errors: Of the test.
        claimed: The claimed ε.
        delta: δ of the claim.
    """
    return Finding(
        name=name,
        claimed=claimed,
        lower_bound=errors.epsilon(delta, REPORT_LEVEL),
        verdict_bound=errors.epsilon(delta, VERDICT_LEVEL),
        trials=errors.without + errors.with_it,
    )


PART = 250  # trials between two ticks of a progress bar


def audit(subject: Subject, plan: Plan, tick: Callable[[int], object] = lambda done: None) -> Finding:
    """Release in both worlds, tell them apart by a threshold fixed beforehand, and bound ε by the errors.

    Args:
        subject: What is audited.
        plan: Settings of the audit.
        tick: Called with the number of trials that were just made.
    """
    found: dict[bool, np.ndarray] = {}
    for flipped in (False, True):
        parts = []
        for start in range(0, plan.trials, PART):
            count = min(PART, plan.trials - start)
            parts.append(subject.statistics(flipped=flipped, trials=count, relation=plan.relation))
            tick(count)
        found[flipped] = np.concatenate(parts)
    errors = count_errors(found[True], found[False], threshold=plan.releases * subject.votes.threshold)
    claimed = subject.claimed(plan.delta, plan.relation, plan.accountant)
    return finding(subject.name, errors, claimed=claimed, delta=plan.delta)
