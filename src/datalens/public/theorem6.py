"""Theorem 6 (DataLens, Section 4.3 and Appendix D): how far from a stationary point TopAgg may stay, term by term.

    factor · mean over t of min{‖∇f(x_t)‖², ‖∇f(x_t)‖₁} ≤ bias + noise + start + disagreement + variance

`printed` is Equation 3, `sketch` the same with the noise term of the proof sketch. `corrected` mends what does not
follow (docs/theory.md has the derivation), with the constants of the paper's proof. `sharp` is the same proof without
its losses.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Version = Literal["printed", "sketch", "corrected", "sharp"]
VERSIONS: tuple[Version, ...] = get_args(Version)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is assumed of the teachers' losses F_n and their mean f."""

    dimensions: int  # d
    teachers: int  # N
    smoothness: float  # L: ∇f is L-Lipschitz
    gradient: float  # M: the mean of ‖F_n'‖² over teachers is at most M²
    deviation: float  # ‖σ‖: coordinate i of the teachers' gradients has at most standard deviation σ_i
    deviation_l1: float  # ‖σ‖₁
    gap: float  # f(x₀) − f(x*)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is done: Equation 2."""

    k: int
    clip: float  # c, of a coordinate
    rate: float  # γ
    steps: int  # T
    noise: float  # A: the noise has variance A·k in each coordinate
    tau: float  # τ_k: ‖g − top_k(g)‖ ≤ τ_k‖g‖ for every teacher's gradient
    quantised: bool = True  # Q rounds to −1, 0, 1 by chance
    drawn: Literal["per teacher", "once"] = "per teacher"  # Equation 2; Algorithm 3 adds noise once, to the sum


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The bound. All but `factor` are on its right."""

    factor: float  # on the left
    bias: float  # of top-k
    noise: float  # for privacy
    start: float  # how far there is to go
    disagreement: float  # of teachers, through clipping
    variance: float  # of a step: of quantisation, and the step itself

    @property
    def right(self) -> float:
        return self.bias + self.noise + self.start + self.disagreement + self.variance

    @property
    def gradient(self) -> float:
        """What the mean of min{‖∇f‖², ‖∇f‖₁} may be at most."""
        return self.right / self.factor

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bound(problem: Problem, choice: Choice, version: Version = "corrected") -> Terms:
    """Equation 3 in one of its versions."""
    p, q = problem, choice
    check(p, q)
    pace = p.smoothness * q.rate  # Lγ
    exact = version in ("corrected", "sharp")
    start = p.gap / (q.steps * q.rate)
    apart = 2 * (q.clip if exact else 1.0) * p.deviation_l1  # Claim 1 has 2c‖σ‖₁: the c is lost on the way
    disagreement = max(p.deviation**2 + p.deviation * p.gradient, apart)
    squared = min((q.k if exact else 1) * q.clip**2, p.gradient**2)  # of ‖clip(top_k(g))‖²: k coordinates, not one
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
    """Of a coordinate of the mean over teachers."""
    n = problem.teachers
    return choice.noise * choice.k / (n if choice.drawn == "per teacher" else n**2)


def rounding_variance(k: int, clip: float) -> float:
    """σ̃²: the most that E‖Q(x) − x‖² can be for k coordinates within ±c, each a coin of chance |x_i|."""
    chance = min(clip, 0.5)
    return k * chance * (1 - chance)


def check(problem: Problem, choice: Choice) -> None:
    p, q = problem, choice
    if not 1 <= q.k <= p.dimensions:
        raise ValueError(f"k is {q.k}, not one of 1 … {p.dimensions}")
    if min(q.clip, q.rate, p.smoothness, p.gradient) <= 0 or q.steps < 1 or p.teachers < 1:
        raise ValueError("c, γ, L, M, T and N are above 0")
    if min(q.noise, q.tau, p.deviation, p.deviation_l1, p.gap) < 0:
        raise ValueError("A, τ_k, σ and the gap are not below 0")
    if q.quantised and q.clip > 1:
        raise ValueError("a coordinate that is rounded by a coin is a chance: c is at most 1 there")
