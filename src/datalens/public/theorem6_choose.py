"""Which k the bound is smallest for, from public facts: k only sets the bias of top-k against the noise."""

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from datalens.public.theorem6_tau import weibull

SHAPE = 1.2  # of the Weibull law gradients are taken to follow: about that of MNIST teachers in pixels (docs/theory.md)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """In units of M², the largest squared gradient."""

    k: int
    bias: float
    noise: float
    shape: float  # that was assumed

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def suggest_k(*, dimensions: int, teachers: int, sigma: float, k: int, steps: int, shape: float = SHAPE) -> Suggestion:
    """The k for which bias and noise together are smallest, at equal steps and budget: σ² is in proportion to k.

    `sigma` is that of `k`. The sharp bound, with its best rate γ and the smallest gap that fits L and M, M²/2L.
    """
    bias, noise = trade_off(dimensions=dimensions, teachers=teachers, sigma=sigma, k=k, steps=steps, shape=shape)
    best = int(np.argmin(bias + noise))
    return Suggestion(k=best + 1, bias=float(bias[best]), noise=float(noise[best]), shape=shape)


def trade_off(
    *, dimensions: int, teachers: int, sigma: float, k: int, steps: int, shape: float = SHAPE
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both parts for k = 1 … d.

    Noise: (Lγ/2)(d·v + M²) + gap/(Tγ) at its best γ is M·√((d·v + M²)/T). v is the noise on a mean vote; votes are
    gradients by their largest coordinate, so M² is that of a Weibull gradient by its largest of d.
    """
    ks = np.arange(1, dimensions + 1, dtype=np.float64)
    squared = dimensions * math.gamma(1 + 2 / shape) / math.log(dimensions + 1) ** (2 / shape)
    variance = ks / k * (sigma / teachers) ** 2
    return weibull(ks / dimensions, shape), np.sqrt((1 + dimensions * variance / squared) / steps)
