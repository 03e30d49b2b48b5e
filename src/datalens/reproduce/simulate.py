"""Teacher problems that satisfy the assumptions of Theorem 6, and what Equation 2 really does on them.

F_n(x) = Σ_i w_i·s·log cosh((x_i − b_ni)/s): gradients are w_i·tanh, so bounded, and L = max w / s.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datalens.public.theorem6 import Choice, Problem, check
from datalens.public.theorem6_tau import tau

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """weights w [d], centres b [N, d], width s; all start at x₀ = `start` in every coordinate."""

    weights: Array
    centres: Array
    width: float
    start: float

    @classmethod
    def make(
        cls, *, dimensions: int, teachers: int, spread: float, decay: float, width: float, start: float, seed: int
    ) -> "Teachers":
        """Weights fall as i^−decay; centres are normal with standard deviation `spread`."""
        rng = np.random.default_rng(seed)
        return cls(
            weights=np.arange(1, dimensions + 1, dtype=np.float64) ** -decay,
            centres=spread * rng.standard_normal((teachers, dimensions)),
            width=width,
            start=start,
        )

    def gradients(self, x: Array) -> Array:
        """Of every teacher: [r, N, d] at r points."""
        return self.weights * np.tanh((x[:, None, :] - self.centres) / self.width)

    def value(self, x: Array) -> Array:
        """f: [r] at r points."""
        away = np.abs(x[:, None, :] - self.centres) / self.width
        log_cosh = away + np.log1p(np.exp(-2 * away)) - math.log(2)
        return (self.weights * self.width * log_cosh).sum(axis=2).mean(axis=1)

    def best(self) -> Array:
        """x*: every coordinate on its own, by bisection, since its slope rises."""
        low, high = self.centres.min(axis=0), self.centres.max(axis=0)
        for _ in range(80):
            middle = (low + high) / 2
            up = self.gradients(middle[None])[0].mean(axis=0) > 0
            low, high = np.where(up, low, middle), np.where(up, middle, high)
        return (low + high) / 2

    def problem(self) -> Problem:
        """The constants of the assumptions. tanh is 1-Lipschitz, so gradients deviate by w/s times their centres do."""
        w, d = self.weights, len(self.weights)
        deviations = np.minimum(w / self.width * self.centres.std(axis=0), w)
        ends = np.stack([np.full(d, self.start), self.best()])
        first, least = self.value(ends)
        return Problem(
            dimensions=d,
            teachers=len(self.centres),
            smoothness=float(w.max() / self.width),
            gradient=float(np.sqrt((w**2).sum())),
            deviation=float(np.sqrt((deviations**2).sum())),
            deviation_l1=float(deviations.sum()),
            gap=float(first - least),
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """After T steps: the left side without its factor, by many repetitions."""

    steps: int
    left: float  # mean over t of E min{‖∇f‖², ‖∇f‖₁}: what the proof bounds
    error: float  # its standard error
    left_printed: float  # mean over t of min{E‖∇f‖², E‖∇f‖₁}: what is printed, and never smaller
    tau: float  # the largest τ_k of a teacher's gradient on the way


def measure(
    teachers: Teachers, choice: Choice, *, ends: tuple[int, ...], repeats: int, seed: int
) -> Iterator[Measured]:
    """What Equation 2 does up to each of `ends`."""
    check(teachers.problem(), choice)
    rng = np.random.default_rng(seed)
    x = np.full((repeats, len(teachers.weights)), teachers.start)
    smaller, squares, sums, most = np.zeros(repeats), [], [], 0.0
    for step in range(1, max(ends) + 1):
        gradients = teachers.gradients(x)
        slope = gradients.mean(axis=1)
        square, total = (slope**2).sum(axis=1), np.abs(slope).sum(axis=1)
        smaller += np.minimum(square, total)
        squares.append(square.mean())
        sums.append(total.mean())
        rows = gradients.reshape(-1, gradients.shape[2])
        most = max(most, float(tau(rows)[:, choice.k].max(initial=0.0)))
        x = x - choice.rate * (_compressed(gradients, choice, rng).mean(axis=1) + _noise(x, len(rows), choice, rng))
        if step in ends:
            own = smaller / step
            yield Measured(
                steps=step,
                left=float(own.mean()),
                error=float(own.std(ddof=1) / math.sqrt(repeats)),
                left_printed=float(np.mean(np.minimum(squares, sums))),
                tau=most,
            )


def _compressed(gradients: Array, choice: Choice, rng: np.random.Generator) -> Array:
    """Q(clip(top-k(g), c)) of every teacher."""
    size = np.abs(gradients)
    least = -np.partition(-size, choice.k - 1, axis=2)[..., choice.k - 1 : choice.k]
    kept = np.clip(np.where(size >= least, gradients, 0.0), -choice.clip, choice.clip)
    if not choice.quantised:
        return kept
    return np.sign(kept) * (rng.random(kept.shape) < np.abs(kept))


def _noise(x: Array, rows: int, choice: Choice, rng: np.random.Generator) -> Array:
    """Of the mean over teachers."""
    teachers = rows // len(x)
    spread = math.sqrt(choice.noise * choice.k / (teachers if choice.drawn == "per teacher" else teachers**2))
    return spread * rng.standard_normal(x.shape)


def one_step(teachers: Teachers, choice: Choice, *, repeats: int, seed: int) -> tuple[float, float, float, float]:
    """From x*, where teachers agree: E f(x₁) − f(x*) with its standard error, and the most that the proof allows it.

    There every teacher's gradient is 0, so all that moves x is noise. The proof's second inequality leaves Lγ²·Ak of it
    as printed; d times that as corrected.
    """
    x = np.repeat(teachers.best()[None], repeats, axis=0)
    problem = teachers.problem()
    rng = np.random.default_rng(seed)
    moved = x - choice.rate * _noise(x, repeats * problem.teachers, choice, rng)
    rise = teachers.value(moved) - teachers.value(x[:1])
    printed = problem.smoothness * choice.rate**2 * choice.noise * choice.k
    return (
        float(rise.mean()),
        float(rise.std(ddof=1) / math.sqrt(repeats)),
        printed,
        problem.dimensions * printed,
    )
