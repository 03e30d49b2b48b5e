"""Accuracy from a noisy table of a classifier's answers, with intervals that include the noise.

Cell (i, j) counts the held-out records of class i that were taken for class j, plus discrete Laplace noise. Everything
here follows from the table, the scale of its noise and the declared number of held-out records.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binom

from datalens.privacy.curves import bisect

SURE = 0.95  # of an interval
WIDE = 0.2  # an interval of accuracy from here on says little
LEAST_SCALE, MOST_SCALE = 0.01, 1e3  # of noise: with more any table is drowned, and its law takes long to add up


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a noisy table: fractions from 0 to 1, to four digits. An interval goes from `low` to `high`."""

    accuracy: float
    low: float
    high: float
    noise: float  # half the width of an interval for the noise alone
    majority: float  # the accuracy of always guessing the largest class
    majority_low: float
    majority_high: float
    classes: tuple[tuple[float, float, float] | None, ...]  # accuracy, low and high; None: too few records to tell

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {**vars(self), "classes": [None if one is None else list(one) for one in self.classes]}

    @property
    def verdict(self) -> str:
        """The figures in words."""
        if self.high - self.low > WIDE:
            return (
                f"of little use: the interval is {100 * (self.high - self.low):.0f} points wide; more held-out records "
                "or a larger epsilon would narrow it"
            )
        if self.low > self.majority_high:
            return "better than always guessing the largest class"
        if self.high < self.majority_low:
            return "worse than always guessing the largest class"
        return "no better than always guessing the largest class, as far as this interval can tell"


def figures(table: Sequence[Sequence[int]], *, scale: float, records: int, exact: bool = True) -> Figures:
    """Return what a noisy table says.

    Args:
        table: Noisy counts, [classes, classes]: true class, guessed class.
        scale: Scale of the discrete Laplace noise on every cell.
        records: The declared number of held-out records.
        exact: Whether that is how many there are. If it is a round figure, the number is estimated from the table.
    """
    counts = np.array(table, dtype=np.float64)
    classes = len(counts)
    right, sizes = float(np.trace(counts)), counts.sum(axis=1)
    noise, largest = _noise_interval(classes, scale), float(sizes.max())
    if exact:
        few = many = number = float(records)
        low, high = interval(right, records, cells=classes, scale=scale)
    else:
        number = max(float(counts.sum()), 1.0)
        few, many, low, high = _of_unknown_number(right, number, classes, scale)
    return Figures(
        accuracy=_fraction(right / number),
        low=_fraction(low),
        high=_fraction(high),
        noise=round(min((noise + right / number * (many - number)) / number, 1.0), 4),
        majority=_fraction(largest / number),
        majority_low=_fraction((largest - noise) / many),
        majority_high=_fraction((largest + noise) / few),
        classes=tuple(_of_class(float(counts[i, i]), float(sizes[i]), classes, scale) for i in range(classes)),
    )


def interval(right: float, records: int, *, cells: int, scale: float, sure: float = SURE) -> tuple[float, float]:
    """Return an interval for the chance p of a right answer: it holds p in at least `sure` of all cases.

    Clopper and Pearson's interval for the law of what was seen: a binomial number plus the noise of `cells` cells. It
    includes both the noise and the chance of which records are held out.

    Args:
        right: Noisy number of right answers.
        records: Number of answers.
        cells: Number of cells that were added up.
        scale: Scale of the noise on each.
        sure: How often it must hold p.
    """
    noise, law = _noise_law(cells, scale)
    tail = (1 - sure) / 2

    def at_least(p: float) -> float:  # P[binomial + noise >= right], which rises with p
        return float(law @ binom.sf(np.ceil(right - noise) - 1, records, p))

    def at_most(p: float) -> float:
        return float(law @ binom.cdf(np.floor(right - noise), records, p))

    low = 0.0 if at_least(0.0) > tail else bisect(lambda p: p >= 1 or at_least(p) > tail)[0]
    high = 1.0 if at_most(1.0) > tail else bisect(lambda p: p >= 1 or at_most(p) <= tail)[1]
    return min(low, 1.0), min(high, 1.0)


def expected(
    classes: int, records: int, *, scale: float, accuracy: float = 0.8, exact: bool = True
) -> tuple[float, float]:
    """Return half the widths to expect of intervals: for the noise alone, and with the chance of the sample.

    Args:
        classes: Number of classes.
        records: The declared number of held-out records.
        scale: Scale of the noise.
        accuracy: The accuracy to expect it for.
        exact: Whether the number of records is exact (`figures`).
    """
    right, noise = round(accuracy * records), _noise_interval(classes, scale)
    if exact:
        low, high = interval(right, records, cells=classes, scale=scale)
        return noise / records, (high - low) / 2
    _, many, low, high = _of_unknown_number(right, records, classes, scale)
    return min((noise + accuracy * (many - records)) / records, 1.0), (high - low) / 2


def _of_unknown_number(right: float, number: float, classes: int, scale: float) -> tuple[float, float, float, float]:
    """Return the ends of an interval for the number of records, and of one for the chance of a right answer.

    Half of the 5 % is for the number, and half for the chance, at the least favourable number of that interval.

    Args:
        right: Noisy number of right answers.
        number: Noisy number of records: the sum of all cells.
        classes: Number of classes.
        scale: Scale of the noise on each cell.
    """
    sure = (1 + SURE) / 2
    reach = _noise_interval(classes**2, scale, sure=sure)
    few, many = max(number - reach, 1.0), max(number + reach, 1.0)
    low, _ = interval(right, math.ceil(many), cells=classes, scale=scale, sure=sure)
    _, high = interval(right, math.floor(few), cells=classes, scale=scale, sure=sure)
    return few, many, low, high


def _of_class(right: float, size: float, classes: int, scale: float) -> tuple[float, float, float] | None:
    """Return the accuracy of a class with an interval, or None if its records cannot be told from noise.

    Both numbers are noisy, so this interval is that of a ratio for large numbers.
    """
    variance = _variance(scale)
    if size < 4 * math.sqrt(classes * variance):
        return None
    share = min(max(right / size, 0.0), 1.0)
    noise = variance * ((1 - share) ** 2 + (classes - 1) * share**2)
    half = 1.96 * math.sqrt(noise + size * share * (1 - share) + 0.25) / size
    return _fraction(share), _fraction(share - half), _fraction(share + half)


def _fraction(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 4)


def _variance(scale: float) -> float:
    return 0.5 / math.sinh(0.5 / scale) ** 2 if scale > 1e-3 else 0.0


def _noise_interval(cells: int, scale: float, *, sure: float = SURE) -> float:
    """Return the number that the noise of so many cells exceeds, in magnitude, in at most 1 − `sure` of all cases."""
    noise, law = _noise_law(cells, scale)
    within = np.cumsum(law[noise >= 0]) * 2 - law[noise == 0].sum()
    return float(np.searchsorted(within, sure))


def _noise_law(cells: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers around 0, and the probability of each as the sum of the noise of so many cells.

    By the inverse of its characteristic function, ((1 − a)² / (1 − 2a·cos t + a²))^cells with a = e^(−1/scale).
    """
    if scale < 1e-3:
        return np.zeros(1), np.ones(1)
    reach = math.ceil(25 * scale + 12 * math.sqrt(cells * _variance(scale))) + 2
    size = 2 ** math.ceil(math.log2(2 * reach + 1))
    a = math.exp(-1 / scale)
    t = 2 * np.pi * np.arange(size // 2 + 1) / size
    law = np.fft.irfft(((1 - a) ** 2 / (1 - 2 * a * np.cos(t) + a * a)) ** cells, size)
    law = np.maximum(np.roll(law, size // 2), 0.0)
    noise = np.arange(size) - size // 2
    kept = law > 1e-13
    return noise[kept].astype(np.float64), law[kept] / law[kept].sum()
