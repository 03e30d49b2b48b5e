"""Theorem 6 (DataLens, Section 4.3 and Appendix D): a bound on TopAgg's distance from a stationary point, by terms.

    factor · mean over t of min{‖∇f(x_t)‖², ‖∇f(x_t)‖₁} ≤ bias + noise + start + disagreement + variance

There are four versions. `printed` is Equation 3, and `sketch` is the same with the noise term of the proof sketch.
`corrected` corrects the steps that do not follow (docs/theory.md has the derivation), with the constants of the paper's
proof. `sharp` is the same proof with tighter estimates.

The module also has τ_k, the part of a gradient that top-k leaves out: measured, in the worst case, and by the paper's
Weibull model. And it finds the k with the smallest bound from public facts: k trades the bias of top-k against the
noise.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Version = Literal["printed", "sketch", "corrected", "sharp"]
VERSIONS: tuple[Version, ...] = get_args(Version)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The assumptions about the teachers' losses F_n and their mean f."""

    dimensions: int  # d
    teachers: int  # N
    smoothness: float  # L: ∇f is L-Lipschitz
    gradient: float  # M: the mean of ‖F_n'‖² over teachers is at most M²
    deviation: float  # ‖σ‖, where coordinate i of the teachers' gradients has standard deviation at most σ_i
    deviation_l1: float  # ‖σ‖₁
    gap: float  # f(x₀) − f(x*)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The parameters of the algorithm: Equation 2."""

    k: int
    clip: float  # c, the bound on a coordinate
    rate: float  # γ
    steps: int  # T
    noise: float  # A: the noise has variance A·k in each coordinate
    tau: float  # τ_k: ‖g − top_k(g)‖ ≤ τ_k‖g‖ for every teacher's gradient
    quantised: bool = True  # whether Q rounds to −1, 0 or 1 at random
    drawn: Literal["per teacher", "once"] = "per teacher"  # Equation 2; Algorithm 3 adds noise once, to the sum


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of the bound. All but `factor` are on its right side."""

    factor: float  # on the left side
    bias: float  # of top-k
    noise: float  # for privacy
    start: float  # distance of the start from the optimum
    disagreement: float  # of teachers, through clipping
    variance: float  # of a step: by quantisation, and by the step itself

    @property
    def right(self) -> float:
        """The right side of the bound."""
        return self.bias + self.noise + self.start + self.disagreement + self.variance

    @property
    def gradient(self) -> float:
        """The bound on the mean of min{‖∇f‖², ‖∇f‖₁}."""
        return self.right / self.factor

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bound(problem: Problem, choice: Choice, version: Version = "corrected") -> Terms:
    """Return the terms of Equation 3 in one of its versions.

    Raises:
        ValueError: a parameter is out of range.
    """
    p, q = problem, choice
    check(p, q)
    pace = p.smoothness * q.rate  # Lγ
    exact = version in ("corrected", "sharp")
    start = p.gap / (q.steps * q.rate)
    apart = 2 * (q.clip if exact else 1.0) * p.deviation_l1  # Claim 1 has 2c‖σ‖₁; Equation 3 has lost the c
    disagreement = max(p.deviation**2 + p.deviation * p.gradient, apart)
    squared = min((q.k if exact else 1) * q.clip**2, p.gradient**2)  # bounds ‖clip(top_k(g))‖²: k coordinates, not one
    rounding = rounding_variance(q.k, q.clip) if q.quantised else 0.0
    if version == "sharp":
        kept = q.clip * math.sqrt(p.dimensions - q.k)
        return Terms(
            factor=min(q.clip, 1.0) * 2 / (math.sqrt(p.dimensions) + 3),
            bias=p.gradient * min(q.tau * p.gradient, kept),
            noise=pace / 2 * p.dimensions * noise_variance(p, q),
            start=start,
            disagreement=disagreement,
            variance=pace / 2 * (rounding / p.teachers + squared),
        )
    noisy = {"printed": 1, "sketch": 2, "corrected": p.dimensions}[version]
    return Terms(
        factor=min(q.clip, 1.0) / (p.dimensions + 2),
        bias=min(q.tau * p.gradient**2, q.clip * (p.dimensions - q.k) * p.gradient),
        noise=noisy * pace * q.noise * q.k,
        start=start,
        disagreement=disagreement,
        variance=pace * (2 * (rounding + squared) if q.quantised else squared),
    )


def noise_variance(problem: Problem, choice: Choice) -> float:
    """Return the variance of the noise on a coordinate of the mean over teachers."""
    n = problem.teachers
    return choice.noise * choice.k / (n if choice.drawn == "per teacher" else n**2)


def rounding_variance(k: int, clip: float) -> float:
    """Return σ̃², the largest E‖Q(x) − x‖² of k coordinates within ±c, where x_i is rounded to ±1 with chance |x_i|."""
    chance = min(clip, 0.5)
    return k * chance * (1 - chance)


def check(problem: Problem, choice: Choice) -> None:
    """Raise a ValueError if a parameter is out of range."""
    p, q = problem, choice
    if not 1 <= q.k <= p.dimensions:
        raise ValueError(f"k must be one of 1 … {p.dimensions}, not {q.k}")
    if min(q.clip, q.rate, p.smoothness, p.gradient) <= 0 or q.steps < 1 or p.teachers < 1:
        raise ValueError("c, γ, L, M, T and N must be above 0")
    if min(q.noise, q.tau, p.deviation, p.deviation_l1, p.gap) < 0:
        raise ValueError("A, τ_k, σ and the gap must not be below 0")
    if q.quantised and q.clip > 1:
        raise ValueError("a coordinate that is rounded at random is a probability: c must be at most 1")


# --- τ_k ------------------------------------------------------------------------------------------------------------


def tau(gradients: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return ‖g − top_k(g)‖ / ‖g‖ for k = 0 … d, for each row that is not zero: [n, d] → [n′, d + 1]."""
    squares = np.sort(np.square(gradients.astype(np.float64)), axis=1)  # the smallest first
    squares = squares[squares[:, -1] > 0]
    squares /= squares[:, -1:]  # normalised, so that sums do not underflow
    left = np.concatenate([np.zeros((len(squares), 1)), np.cumsum(squares, axis=1)], axis=1)
    return np.sqrt(left / left[:, -1:])[:, ::-1]


def worst(k: int, dimensions: int) -> float:
    """Return the largest τ_k of any gradient: top-k keeps at least the fraction k/d of the squared norm."""
    return math.sqrt(1 - k / dimensions)


def printed(kept: NDArray[np.float64], scale: float, shape: float) -> NDArray[np.float64]:
    """Return the paper's model of τ_k, proportional to exp(−(k/(ρ₁d))^ρ₂) − exp(−1) and 1 at k = 0.

    With ρ₁ ≠ 1 it is not 0 at k = d, as the assumption requires. Values below 0 are set to 0; values above are kept.

    Args:
        kept: k/d.
        scale: ρ₁.
        shape: ρ₂.
    """
    values = (np.exp(-((kept / scale) ** shape)) - math.exp(-1)) / (1 - math.exp(-1))
    return np.clip(values, 0.0, 1.0)


def weibull(kept: NDArray[np.float64], shape: float) -> NDArray[np.float64]:
    """Return τ_k of many coordinates whose magnitudes are Weibull with this shape. The scale cancels, and τ_d is 0.

    |g| = E^{1/ρ} with E exponential. What is left out has E < −log(k/d). Its part of the squared norm is the
    probability that a gamma distribution with shape 1 + 2/ρ has below that point.

    Args:
        kept: k/d.
        shape: ρ.
    """
    from scipy.special import gammainc

    with np.errstate(divide="ignore"):
        below = -np.log(kept)
    return np.sqrt(gammainc(1 + 2 / shape, below))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A least-squares fit of both models to a mean curve over k = 0 … d."""

    scale: float  # ρ₁ of the printed model
    shape: float  # ρ₂
    error: float  # root mean square
    weibull_shape: float
    weibull_error: float


def fit(curve: NDArray[np.float64]) -> Fit:
    """Fit both models to a curve, [d + 1]."""
    from scipy.optimize import curve_fit

    kept = np.linspace(0.0, 1.0, len(curve))
    (scale, shape), _ = curve_fit(printed, kept, curve, p0=(0.5, 0.5), bounds=([1e-3, 0.02], [20.0, 1.0]))
    (weibull_shape,), _ = curve_fit(weibull, kept, curve, p0=(0.7,), bounds=([0.05], [10.0]))
    return Fit(
        scale=float(scale),
        shape=float(shape),
        error=_rms(curve - printed(kept, scale, shape)),
        weibull_shape=float(weibull_shape),
        weibull_error=_rms(curve - weibull(kept, weibull_shape)),
    )


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


# --- which k --------------------------------------------------------------------------------------------------------

SHAPE = 1.2  # assumed Weibull shape of gradients: about that of MNIST teachers in pixels (docs/theory.md)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A suggested k, with the bias and noise of the bound in units of M², the largest squared gradient."""

    k: int
    bias: float
    noise: float
    shape: float  # the assumed Weibull shape

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def suggest_k(*, dimensions: int, teachers: int, sigma: float, k: int, steps: int, shape: float = SHAPE) -> Suggestion:
    """Return the k with the smallest sum of bias and noise, at equal steps and budget, where σ² is proportional to k.

    It uses the sharp bound with its best rate γ, and with the smallest gap that L and M allow, M²/2L.

    Args:
        dimensions: d.
        teachers: N.
        sigma: Standard deviation of the noise for the present k.
        k: The present k.
        steps: T.
        shape: Assumed Weibull shape of gradients.
    """
    bias, noise = trade_off(dimensions=dimensions, teachers=teachers, sigma=sigma, k=k, steps=steps, shape=shape)
    best = int(np.argmin(bias + noise))
    return Suggestion(k=best + 1, bias=float(bias[best]), noise=float(noise[best]), shape=shape)


def trade_off(
    *, dimensions: int, teachers: int, sigma: float, k: int, steps: int, shape: float = SHAPE
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bias and noise for k = 1 … d. The arguments are those of `suggest_k`.

    Noise: (Lγ/2)(d·v + M²) + gap/(Tγ) at its best γ is M·√((d·v + M²)/T). v is the variance of the noise on a mean
    vote. Votes are gradients divided by their largest coordinate, so M² is that of a Weibull gradient divided by the
    largest of its d coordinates.
    """
    ks = np.arange(1, dimensions + 1, dtype=np.float64)
    squared = dimensions * math.gamma(1 + 2 / shape) / math.log(dimensions + 1) ** (2 / shape)
    variance = ks / k * (sigma / teachers) ** 2
    return weibull(ks / dimensions, shape), np.sqrt((1 + dimensions * variance / squared) / steps)
