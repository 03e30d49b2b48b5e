"""Composition by tables of the privacy loss: PLD by dp-accounting and PRV by Opacus. Both round ε up.

A part is a triple (mu, sampling rate, multiplicity).
"""

import functools
import math
import warnings

import numpy as np

from datalens.errors import DatalensError, UnpriceableEvent
from datalens.privacy.curves import one_of_many_delta, total

# Limits of the pld accountant: the largest mu of all events together, the most different parts, and the multiplicity
# beyond which equal Gaussians are merged into one.
PLD_LARGEST, PLD_MOST, PLD_EQUAL = 30.0, 200, 10_000
PLD_LOUDEST = 1e4  # largest mu of one sampled unit: beyond it dp-accounting's own numbers overflow
# PRV: the finest and the coarsest error of ε that is requested, the most cells of a table, and the ε (by RDP) above
# which the RDP price is returned instead.
PRV_FINEST, PRV_COARSEST, PRV_CELLS, PRV_LARGEST = 5e-4, 1e-2, 2**24, 40.0
PRV_SMALLEST_DELTA = 1e-10  # below it the rounding of Fourier transforms is no longer small against δ
PRV_QUIETEST = 1e-6  # least mu of a Gaussian next to sampled steps: a smaller one is priced as this


def pld_epsilon(mu_squared: float, delta: float) -> float:
    """Return ε of one Gaussian mechanism with this mu², by dp-accounting.

    Args:
        mu_squared: Sum of the squared mu of all releases.
        delta: δ at which ε is computed.
    """
    return pld_composed(((math.sqrt(mu_squared), 1.0, 1),), delta)


@functools.lru_cache(maxsize=256)
def pld_composed(
    parts: tuple[tuple[float, float, int], ...], delta: float, chosen: tuple[tuple[float, float, int], ...] = ()
) -> float:
    """Return ε of the composition of all parts by dp-accounting, rounded up.

    Args:
        parts: (mu, sampling rate, multiplicity) of Gaussian events (rate 1) and of Poisson-sampled ones.
        delta: δ at which ε is computed.
        chosen: (mu, sampling rate, multiplicity) of one-of-many events.

    Raises:
        UnpriceableEvent: there are more than `PLD_MOST` different subsampled events.
        DatalensError: dp-accounting is not installed.
    """
    parts = tuple(part for part in parts if part[0] > 0)
    chosen = tuple(part for part in chosen if part[0] > 0)
    if not parts and not chosen:
        return 0.0
    whole = math.sqrt(total([_loudness(mu, rate) * count for mu, rate, count in (*parts, *chosen)]))
    if whole > PLD_LARGEST or max(mu for mu, _, _ in (*parts, *chosen)) > PLD_LOUDEST:
        return math.inf  # a valid bound: the tables grow with mu², and at this mu nothing is protected anyway
    # Many equal Gaussians compose to one Gaussian; millions of convolutions check that no better than thousands.
    parts = tuple(
        (mu * math.sqrt(n), rate, 1) if rate == 1 and n > PLD_EQUAL else (mu, rate, n) for mu, rate, n in parts
    )
    if len(parts) > PLD_MOST:  # merge all Gaussians into one; refuse what is still too much, before it takes hours
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
    # Small against the whole, but no smaller than needed: the work grows with the number of cells.
    cell = max(whole / 2000, max(mu * mu / 2 + 10 * mu for mu, _, _ in (*parts, *chosen)) / 1e6)
    composed = None
    for mu, rate, count in parts:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, sensitivity=1.0, sampling_prob=rate, value_discretization_interval=cell
        )
        many = one.self_compose(count) if count > 1 else one
        composed = many if composed is None else composed.compose(many)
    for mu, rate, count in chosen:
        # Less than 1e-20 of the probability lies beyond the last point; it is counted as an infinite loss.
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
    """Return ε of the composition of all parts by Opacus (Gopi et al. 2021): the upper end of its interval.

    A rate of 1 is a Gaussian: Opacus's table is then that of N(mu²/2, mu²), which is its privacy loss.

    Args:
        parts: (mu, sampling rate, multiplicity) of sampled steps and Gaussians, each with mu above 0.
        delta: δ at which ε is computed.
        rough: ε by RDP. The error requested of Opacus is a fiftieth of it, so that it follows from the events alone.

    Raises:
        UnpriceableEvent: Opacus has no price for these parts.
        DatalensError: Opacus is not installed.
    """
    if not rough <= PRV_LARGEST:
        return rough  # a valid bound; at this ε nothing is protected anyway
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
            warnings.simplefilter("ignore")  # about the orders of an RDP bound that only sizes its tables
            epsilon = float(accountant.get_epsilon(delta, eps_error=error_of_epsilon))
    except (RuntimeError, ValueError) as error:
        raise UnpriceableEvent(
            f"the prv accountant has no price for this ({error}): use --accountant rdp-improved"
        ) from error
    if not math.isfinite(epsilon):
        raise UnpriceableEvent("the prv accountant has no price for this: use --accountant rdp-improved")
    return max(0.0, epsilon)


def prv_error(steps: int, delta: float, rough: float) -> float:
    """Return the error of ε that is requested of PRV. Its answer lies at most twice that above the true ε.

    Args:
        steps: Number of events.
        delta: δ at which ε is computed.
        rough: ε by RDP.
    """
    wanted = min(max(rough / 50, PRV_FINEST), PRV_COARSEST)
    finest = 2 * (rough + 4) * math.sqrt(steps * math.log(12_000 / delta) / 2) / PRV_CELLS
    return max(wanted, finest)


def _loudness(mu: float, rate: float) -> float:
    """Return approximately how much one event adds to the mu² of all.

    It is exact for plain Gaussians. For sampled ones it is that of the central limit theorem or, where the noise is
    small, twice their Kullback-Leibler divergence (which is at most q·mu²/2).
    """
    return mu * mu if rate == 1 else min(rate * mu * mu, rate * rate * math.expm1(min(mu * mu, 100.0)))
