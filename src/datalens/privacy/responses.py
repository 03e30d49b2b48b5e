"""The price of randomised response, and so of ballot counts with discrete Laplace noise (see `LaplaceEvent`)."""

import functools
import math
from collections.abc import Callable

from scipy.stats import binom

from datalens.errors import DatalensError


def response_delta(loss: float, times: int, epsilon: float) -> float:
    """Return δ(ε) of `times` composed randomised responses (Kairouz, Oh, Viswanath 2015, Theorem 3.3, as a sum).

    The privacy loss is loss·(2K − times) with K binomial; δ = P[K ≥ k] − e^ε·Q[K ≥ k], where k is the smallest K whose
    loss exceeds ε.

    Args:
        loss: Pure ε of one response.
        times: Number of responses.
        epsilon: ε at which δ is computed.
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
    """Return the smallest ε with δ(ε) <= delta for `times` responses; at most the pure ε of loss·times.

    Args:
        loss: Pure ε of one response.
        times: Number of responses.
        delta: δ at which ε is computed.
    """
    if math.isinf(loss) and times:
        return math.inf
    return smallest(lambda epsilon: response_delta(loss, times, epsilon) <= delta, most=loss * times)


def response_rdp(loss: float, order: float) -> float:
    """Return the RDP of one randomised response: 1/(λ − 1) · log(p^λ (1 − p)^(1 − λ) + (1 − p)^λ p^(1 − λ)).

    Args:
        loss: Pure ε of the response.
        order: λ.
    """
    if loss == 0 or math.isinf(loss):
        return loss
    log_right, log_wrong = -math.log1p(math.exp(-loss)), -loss - math.log1p(math.exp(-loss))
    likely, unlikely = order * log_right + (1 - order) * log_wrong, order * log_wrong + (1 - order) * log_right
    return max(0.0, likely + math.log1p(math.exp(unlikely - likely))) / (order - 1)


@functools.lru_cache(maxsize=256)
def pld_responses(loss: float, times: int, delta: float) -> float:
    """Return ε as `response_epsilon` does, by dp-accounting's discrete Laplace mechanism; rounded up.

    Args:
        loss: Pure ε of one response.
        times: Number of responses.
        delta: δ at which ε is computed.

    Raises:
        DatalensError: dp-accounting is not installed.
    """
    if loss == 0 or times == 0 or math.isinf(loss):
        return loss if times else 0.0
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise DatalensError(f"the pld accountant needs dp-accounting ({error}): use another --accountant") from error
    # The privacy loss is ±loss, so on this grid nothing is rounded.
    one = privacy_loss_distribution.from_discrete_laplace_mechanism(
        loss, sensitivity=1, value_discretization_interval=loss
    )
    return max(0.0, float(one.self_compose(times).get_epsilon_for_delta(delta)))


def smallest(holds: Callable[[float], bool], *, most: float) -> float:
    """Return the smallest x in [0, most] for which `holds(x)`, to the last digit of a float.

    Args:
        holds: A monotone condition: once true, it stays true for larger x.
        most: Upper end of the search, and the result if the condition holds nowhere below.
    """
    low, high = 0.0, most
    if holds(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
