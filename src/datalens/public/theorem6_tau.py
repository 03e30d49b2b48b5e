"""τ_k: how much of a gradient top-k leaves out, measured, at worst, and by the paper's Weibull model."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def tau(gradients: NDArray[np.floating]) -> NDArray[np.float64]:
    """‖g − top_k(g)‖ / ‖g‖ for k = 0 … d, for each row [n, d] that is not zero: [n′, d + 1]."""
    squares = np.sort(np.square(gradients.astype(np.float64)), axis=1)  # the smallest first
    squares = squares[squares[:, -1] > 0]
    squares /= squares[:, -1:]  # so that nothing is too small to be squared and summed
    left = np.concatenate([np.zeros((len(squares), 1)), np.cumsum(squares, axis=1)], axis=1)
    return np.sqrt(left / left[:, -1:])[:, ::-1]


def worst(k: int, dimensions: int) -> float:
    """Of any gradient: top-k keeps at least k of d equal parts of the square."""
    return math.sqrt(1 - k / dimensions)


def printed(kept: NDArray[np.float64], scale: float, shape: float) -> NDArray[np.float64]:
    """The paper's τ_k ∝ exp(−(k/(ρ₁d))^ρ₂) − exp(−1), 1 at k = 0; `kept` is k/d.

    With ρ₁ ≠ 1 it is not 0 at k = d, as the assumption wants: below 0 it is cut off, above it stays.
    """
    values = (np.exp(-((kept / scale) ** shape)) - math.exp(-1)) / (1 - math.exp(-1))
    return np.clip(values, 0.0, 1.0)


def weibull(kept: NDArray[np.float64], shape: float) -> NDArray[np.float64]:
    """τ_k of many coordinates whose sizes are Weibull with this shape; the scale cancels, and τ_d is 0.

    |g| = E^{1/ρ} with E exponential. What is left out has E < −log(k/d), and of the square it is the part that a gamma
    law of 1 + 2/ρ has below that.
    """
    from scipy.special import gammainc

    with np.errstate(divide="ignore"):
        below = -np.log(kept)
    return np.sqrt(gammainc(1 + 2 / shape, below))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Least squares over k = 0 … d, of a mean curve."""

    scale: float  # ρ₁ of the printed model
    shape: float  # ρ₂
    error: float  # root mean square
    weibull_shape: float
    weibull_error: float


def fit(curve: NDArray[np.float64]) -> Fit:
    """Of a curve [d + 1]."""
    from scipy.optimize import curve_fit

    kept = np.linspace(0.0, 1.0, len(curve))
    (scale, shape), _ = curve_fit(printed, kept, curve, p0=(0.5, 0.5), bounds=([1e-3, 0.02], [20.0, 1.0]))
    (own,), _ = curve_fit(weibull, kept, curve, p0=(0.7,), bounds=([0.05], [10.0]))
    return Fit(
        scale=float(scale),
        shape=float(shape),
        error=_rms(curve - printed(kept, scale, shape)),
        weibull_shape=float(own),
        weibull_error=_rms(curve - weibull(kept, own)),
    )


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))
