"""Many events composed by tables of their privacy loss: PLD by dp-accounting, PRV by Opacus. Both round towards more ε.

A part is (mu, sampling rate, how many times).
"""

import functools
import math
import warnings

import numpy as np

from datalens.errors import DatalensError, UnpriceableEvent
from datalens.privacy.curves import one_of_many_delta, total

# Of mu, and of different events, for which the pld accountant does its work.
PLD_LARGEST, PLD_MOST, PLD_EQUAL = 30.0, 200, 10_000
PLD_LOUDEST = 1e4  # of the mu of one sampled unit: beyond, dp-accounting's own numbers overflow
# PRV: the finest and coarsest error of ε it is asked for, the most cells it may take, and where it hands over to RDP.
PRV_FINEST, PRV_COARSEST, PRV_CELLS, PRV_LARGEST = 5e-4, 1e-2, 2**24, 40.0
PRV_SMALLEST_DELTA = 1e-10  # below, rounding of its transforms is no longer small against δ
PRV_QUIETEST = 1e-6  # of the mu of a Gaussian beside sampled steps: what is quieter is priced as this


def pld_epsilon(mu_squared: float, delta: float) -> float:
    """One Gaussian of this mu, by dp-accounting."""
    return pld_composed(((math.sqrt(mu_squared), 1.0, 1),), delta)


@functools.lru_cache(maxsize=256)
def pld_composed(
    parts: tuple[tuple[float, float, int], ...], delta: float, chosen: tuple[tuple[float, float, int], ...] = ()
) -> float:
    """(mu, sampling rate, how many times), composed by dp-accounting, rounded towards more ε.

    `chosen`: the same for one-of-many events.
    """
    parts = tuple(part for part in parts if part[0] > 0)
    chosen = tuple(part for part in chosen if part[0] > 0)
    if not parts and not chosen:
        return 0.0
    whole = math.sqrt(total([_loudness(mu, rate) * count for mu, rate, count in (*parts, *chosen)]))
    if whole > PLD_LARGEST or max(mu for mu, _, _ in (*parts, *chosen)) > PLD_LOUDEST:
        return math.inf  # true, if coarse: tables of what may leak grow with mu², and there is nothing left to protect
    # A crowd of equal Gaussians is one Gaussian too, and millions of convolutions are no better a check than thousands.
    parts = tuple(
        (mu * math.sqrt(n), rate, 1) if rate == 1 and n > PLD_EQUAL else (mu, rate, n) for mu, rate, n in parts
    )
    if len(parts) > PLD_MOST:  # one Gaussian is what Gaussians compose to; the rest is refused before it takes hours
        plain = math.sqrt(total([mu * mu * count for mu, rate, count in parts if rate == 1]))
        parts = (*(((plain, 1.0, 1),) if plain > 0 else ()), *(part for part in parts if part[1] < 1))
        if len(parts) > PLD_MOST:
            raise UnpriceableEvent(f"the pld accountant composes at most {PLD_MOST} different subsampled events")
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError as error:
        raise DatalensError(
            f"the pld accountant needs dp-accounting, which cannot be imported ({error}): pip install dp-accounting, "
            "or use another --accountant"
        ) from error
    # Fine against the whole, and not finer: the work grows with the number of cells.
    cell = max(whole / 2000, max(mu * mu / 2 + 10 * mu for mu, _, _ in (*parts, *chosen)) / 1e6)
    composed = None
    for mu, rate, count in parts:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, sensitivity=1.0, sampling_prob=rate, value_discretization_interval=cell
        )
        many = one.self_compose(count) if count > 1 else one
        composed = many if composed is None else composed.compose(many)
    for mu, rate, count in chosen:
        # Beyond the last dot less than 1e-20 of probability is left; it counts as lost.
        last = math.ceil(math.log1p(rate * math.expm1(min(mu * mu / 2 + 10 * mu, 700.0))) / cell) + 1
        upper = one_of_many_delta(mu, rate, cell * np.arange(last + 1))
        below = np.exp(-cell * np.arange(last, 0, -1))
        curve = np.concatenate([1 - below + below * upper[:0:-1], upper])
        dots = pld_pmf.create_pmf_pessimistic_connect_dots(cell, np.arange(-last, last + 1), curve)
        one = privacy_loss_distribution.PrivacyLossDistribution(dots)
        many = one.self_compose(count) if count > 1 else one
        composed = many if composed is None else composed.compose(many)
    assert composed is not None
    return max(0.0, float(composed.get_epsilon_for_delta(delta)))


@functools.lru_cache(maxsize=1024)
def prv_composed(parts: tuple[tuple[float, float, int], ...], delta: float, rough: float) -> float:
    """(mu, sampling rate, how many times), composed by Opacus (Gopi et al. 2021); the upper end of its interval.

    A rate of 1 is a Gaussian: Opacus's table is then that of N(mu²/2, mu²), which is its privacy loss.

    Args:
        parts: Sampled steps, and Gaussians, of any mu above 0.
        delta: At which ε is asked for.
        rough: ε by RDP. The error asked for is a fiftieth of it, so that it follows from the events alone.

    Raises:
        UnpriceableEvent: Opacus has no price for it.
        DatalensError: Opacus is not installed.
    """
    if not rough <= PRV_LARGEST:
        return rough  # true, if coarse: there is nothing left to protect
    if delta < PRV_SMALLEST_DELTA:
        raise UnpriceableEvent(
            f"the prv accountant is not reliable below delta {PRV_SMALLEST_DELTA:g}: use --accountant rdp-improved"
        )
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise DatalensError(
            f"the prv accountant needs Opacus, which cannot be imported ({error}): pip install opacus, or use another "
            "--accountant"
        ) from error
    error_of_epsilon = prv_error(sum(count for _, _, count in parts), delta, rough)
    accountant = PRVAccountant()
    accountant.history = [(1 / mu, rate, count) for mu, rate, count in parts]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about orders of the RDP that only sizes its tables
            epsilon = float(accountant.get_epsilon(delta, eps_error=error_of_epsilon))
    except (RuntimeError, ValueError) as error:
        raise UnpriceableEvent(
            f"the prv accountant has no price for this ({error}): use --accountant rdp-improved"
        ) from error
    if not math.isfinite(epsilon):
        raise UnpriceableEvent("the prv accountant has no price for this: use --accountant rdp-improved")
    return max(0.0, epsilon)


def prv_error(steps: int, delta: float, rough: float) -> float:
    """Return the error of ε that PRV is asked for: what it answers lies at most twice that above the true ε."""
    wanted = min(max(rough / 50, PRV_FINEST), PRV_COARSEST)
    finest = 2 * (rough + 4) * math.sqrt(steps * math.log(12_000 / delta) / 2) / PRV_CELLS
    return max(wanted, finest)


def _loudness(mu: float, rate: float) -> float:
    """About what an event adds to mu² of the whole: exact for plain Gaussians, the central limit for sampled ones.

    (Or twice their Kullback-Leibler divergence, at most q·mu²/2, where the noise is small.)
    """
    return mu * mu if rate == 1 else min(rate * mu * mu, rate * rate * math.expm1(min(mu * mu, 100.0)))
