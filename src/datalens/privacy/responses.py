"""What randomised responses cost, and with them counts of ballots with Laplace noise (see `LaplaceEvent`)."""

import functools
import math
from collections.abc import Callable

from scipy.stats import binom

from datalens.errors import DatalensError


def response_delta(loss: float, times: int, epsilon: float) -> float:
    """δ(ε) of so many randomised responses of pure cost `loss` (Kairouz, Oh, Viswanath 2015, Theorem 3.3, as a sum).

    The privacy loss is loss·(2K − times) with K binomial; δ = P[K ≥ k] − e^ε·Q[K ≥ k], k the first with more than ε.
    """
    if loss == 0 or times == 0 or epsilon >= loss * times:
        return 0.0
    if math.isinf(loss):
        return 1.0
    first = math.floor((epsilon / loss + times) / 2) + 1
    right = 1 / (1 + math.exp(-loss))
    log_p, log_q = (float(binom.logsf(first - 1, times, chance)) for chance in (right, 1 - right))
    if math.isinf(log_p):
        return 0.0  # below 1e-300
    return math.exp(log_p) * -math.expm1(min(epsilon + log_q - log_p, 0.0))


def response_epsilon(loss: float, times: int, delta: float) -> float:
    """The smallest ε with δ(ε) <= delta; at most the pure loss·times."""
    if math.isinf(loss) and times:
        return math.inf
    return smallest(lambda epsilon: response_delta(loss, times, epsilon) <= delta, most=loss * times)


def response_rdp(loss: float, order: float) -> float:
    """RDP of one randomised response: 1/(λ − 1) · log(p^λ (1 − p)^(1 − λ) + (1 − p)^λ p^(1 − λ))."""
    if loss == 0 or math.isinf(loss):
        return loss
    log_right, log_wrong = -math.log1p(math.exp(-loss)), -loss - math.log1p(math.exp(-loss))
    likely, unlikely = order * log_right + (1 - order) * log_wrong, order * log_wrong + (1 - order) * log_right
    return max(0.0, likely + math.log1p(math.exp(unlikely - likely))) / (order - 1)


@functools.lru_cache(maxsize=256)
def pld_responses(loss: float, times: int, delta: float) -> float:
    """The same by dp-accounting, as discrete Laplace noise, rounded towards more ε."""
    if loss == 0 or times == 0 or math.isinf(loss):
        return loss if times else 0.0
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise DatalensError(f"the pld accountant needs dp-accounting ({error}): use another --accountant") from error
    # Losses are ±loss, so on this grid nothing is rounded at all.
    one = privacy_loss_distribution.from_discrete_laplace_mechanism(
        loss, sensitivity=1, value_discretization_interval=loss
    )
    return max(0.0, float(one.self_compose(times).get_epsilon_for_delta(delta)))


def smallest(holds: Callable[[float], bool], *, most: float) -> float:
    """The smallest x in 0 … `most`, to the last digit, at which a condition holds that holds from there on."""
    low, high = 0.0, most
    if holds(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
