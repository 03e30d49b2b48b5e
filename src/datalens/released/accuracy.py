"""Accuracy from a noisy table of a classifier's answers, with intervals that include the noise.

Cell (i, j) counts the held-out records of class i that were taken for class j. Beside the table stand two counts, of
right and of wrong answers, with noise of the same scale: a sum over the table's diagonal has the noise of all its
cells. Everything here follows from these numbers, the scale of their discrete Laplace noise and the declared number of
held-out records.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betainc

from datalens.privacy.curves import bisect

SURE = 0.95  # of an interval
WIDE = 0.2  # an interval of accuracy from here on says little
LEAST_SCALE, MOST_SCALE = 0.01, 1e3  # of noise: with more any table is drowned, and its law takes long to add up
MOST_ADDED = 16  # classes: with more, the table's diagonal would add less than 2 % to what the counts tell


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a noisy table: fractions from 0 to 1, to four digits. An interval goes from `low` to `high`."""

    accuracy: float
    low: float
    high: float
    noise: float  # half the width of an interval for the noise alone
    sample: float | None = None  # and of one for the chance of which records are held out; None: not stated
    majority: float  # the accuracy of always guessing the largest class
    majority_low: float
    majority_high: float
    classes: tuple[tuple[float, float, float] | None, ...]  # accuracy, low and high; None: too few records to tell

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        fields = {**vars(self), "classes": [None if one is None else list(one) for one in self.classes]}
        return {name: value for name, value in fields.items() if value is not None}

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


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of a weighted mean of noisy counts.

    Attributes:
        scale: Scale of the discrete Laplace noise on each count.
        added: Pairs (weight, counts): so many counts with that whole number as weight.
        parts: What the weighted sum is divided by.
    """

    scale: float
    added: tuple[tuple[int, int], ...]
    parts: int = 1

    def law(self) -> tuple[np.ndarray, np.ndarray]:
        """Return whole numbers around 0, and the probability of each as the weighted sum: `parts` times the noise.

        By the inverse of its characteristic function, the product over all counts of
        (1 − a)² / (1 − 2a·cos(weight·t) + a²) with a = e^(−1/scale).
        """
        if self.scale < 1e-3:
            return np.zeros(1, dtype=np.int64), np.ones(1)
        widest = max(weight for weight, _ in self.added)
        variance = sum(weight**2 * count for weight, count in self.added) * _variance(self.scale)
        reach = math.ceil(25 * self.scale * widest + 12 * math.sqrt(variance)) + 2
        size = 2 ** math.ceil(math.log2(2 * reach + 1))
        a = math.exp(-1 / self.scale)
        t = 2 * np.pi * np.arange(size // 2 + 1) / size
        function = np.ones(len(t))
        for weight, count in self.added:
            function *= ((1 - a) ** 2 / (1 - 2 * a * np.cos(weight * t) + a * a)) ** count
        law = np.maximum(np.roll(np.fft.irfft(function, size), size // 2), 0.0)
        noise = np.arange(size) - size // 2
        kept = law > 1e-13
        return noise[kept], law[kept] / law[kept].sum()

    def reach(self, *, sure: float = SURE) -> float:
        """Return the number that the noise exceeds, in magnitude, in at most 1 − `sure` of all cases."""
        noise, law = self.law()
        within = np.cumsum(law[noise >= 0]) * 2 - law[noise == 0].sum()
        return float(np.searchsorted(within, sure)) / self.parts


@dataclass(frozen=True, kw_only=True)
class Count:
    """A number that was estimated from noisy counts: `total` / `noise.parts`, both whole numbers."""

    total: int
    noise: Noise

    @property
    def value(self) -> float:
        """The estimate."""
        return self.total / self.noise.parts


def figures(
    table: Sequence[Sequence[int]],
    *,
    scale: float,
    records: int,
    exact: bool = True,
    counts: tuple[int, int] | None = None,
) -> Figures:
    """Return what a noisy table and the counts beside it say.

    Args:
        table: Noisy counts, [classes, classes]: true class, guessed class.
        scale: Scale of the discrete Laplace noise on every cell and count.
        records: The declared number of held-out records.
        exact: Whether that is how many there are. If it is a round figure, the number is estimated.
        counts: Noisy numbers of right and of wrong answers; None for tables that were released without.
    """
    cells = np.array(table, dtype=np.float64)
    classes, sizes = len(cells), cells.sum(axis=1)
    right = _right(table, scale, records if exact else None, counts)
    of_a_class, largest = Noise(scale=scale, added=((1, classes),)).reach(), float(sizes.max())
    if exact:
        few = many = number = float(records)
        low, high = interval(right, records)
    else:
        total = _total(table, scale, counts)
        number = max(total.value, 1.0)
        few, many, low, high = _of_unknown_number(right, total)
    accuracy = _fraction(right.value / number)
    return Figures(
        accuracy=accuracy,
        low=_fraction(low),
        high=_fraction(high),
        noise=round(min((right.noise.reach() + right.value / number * (many - number)) / number, 1.0), 4),
        sample=None if counts is None else _sample(accuracy, round(number)),
        majority=_fraction(largest / number),
        majority_low=_fraction((largest - of_a_class) / many),
        majority_high=_fraction((largest + of_a_class) / few),
        classes=tuple(_of_class(float(cells[i, i]), float(sizes[i]), classes, scale) for i in range(classes)),
    )


def _right(table: Sequence[Sequence[int]], scale: float, records: int | None, counts: tuple[int, int] | None) -> Count:
    """Return the number of right answers, from everything that tells it, weighted by inverse variances.

    | estimate | variance, in that of one cell | told by |
    |---|---|---|
    | the count of right answers | 1 | all |
    | the number of records, less the count of wrong ones | 1 | an exact number |
    | the sum of the diagonal | classes | all |

    Args:
        table: The noisy table.
        scale: Scale of its noise.
        records: The number of records, if it is known.
        counts: Noisy numbers of right and of wrong answers.
    """
    classes, diagonal = len(table), sum(row[number] for number, row in enumerate(table))
    if counts is None:
        return Count(total=diagonal, noise=Noise(scale=scale, added=((1, classes),)))
    told = [counts[0]] if records is None else [counts[0], records - counts[1]]
    if classes > MOST_ADDED:
        return Count(total=sum(told), noise=Noise(scale=scale, added=((1, len(told)),), parts=len(told)))
    noise = Noise(scale=scale, added=((classes, len(told)), (1, classes)), parts=classes * len(told) + 1)
    return Count(total=classes * sum(told) + diagonal, noise=noise)


def _total(table: Sequence[Sequence[int]], scale: float, counts: tuple[int, int] | None) -> Count:
    """Return the number of records: by the two counts, or by all cells where there are none."""
    if counts is None:
        return Count(total=sum(map(sum, table)), noise=Noise(scale=scale, added=((1, len(table) ** 2),)))
    return Count(total=sum(counts), noise=Noise(scale=scale, added=((1, 2),)))


def interval(right: Count, records: int, *, sure: float = SURE) -> tuple[float, float]:
    """Return an interval for the chance p of a right answer: it holds p in at least `sure` of all cases.

    Clopper and Pearson's interval for the law of what was seen: a binomial number plus the noise. It includes both the
    noise and the chance of which records are held out.

    Args:
        right: Estimated number of right answers.
        records: Number of answers.
        sure: How often it must hold p.
    """
    noise, law = right.noise.law()
    total, tail = min(max(right.total, -(2**60)), 2**60), (1 - sure) / 2  # of an edited certificate: any whole number

    def by_number(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # of right answers, with their probabilities
        unique, at = np.unique(np.clip(numbers, -1, records), return_inverse=True)
        return unique, np.bincount(at, law)

    above, weight_above = by_number(-((noise - total) // right.noise.parts) - 1)
    below, weight_below = by_number((total - noise) // right.noise.parts)

    def at_least(p: float) -> float:  # P[binomial + noise >= right], which rises with p
        return float(weight_above @ _more_than(above, records, p))

    def at_most(p: float) -> float:
        return float(weight_below @ (1 - _more_than(below, records, p)))

    low = 0.0 if at_least(0.0) > tail else bisect(lambda p: p >= 1 or at_least(p) > tail)[0]
    high = 1.0 if at_most(1.0) > tail else bisect(lambda p: p >= 1 or at_most(p) <= tail)[1]
    return min(low, 1.0), min(high, 1.0)


def _more_than(numbers: np.ndarray, records: int, p: float) -> np.ndarray:
    """Return the probabilities of more than these numbers of right answers, each from −1 to `records`."""
    inside = (numbers >= 0) & (numbers < records)
    k = np.where(inside, numbers, 0).astype(np.float64)
    return np.where(inside, betainc(k + 1, np.maximum(records - k, 1), p), numbers < 0)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Half the widths to expect of intervals: for the noise alone, for the sample alone, and for both."""

    noise: float
    sample: float
    both: float


def expected(classes: int, records: int, *, scale: float, accuracy: float = 0.8, exact: bool = True) -> Expected:
    """Return what to expect of a table with two counts beside it.

    Args:
        classes: Number of classes.
        records: The declared number of held-out records.
        scale: Scale of the noise.
        accuracy: The accuracy to expect it for.
        exact: Whether the number of records is exact (`figures`).
    """
    right = round(accuracy * records)
    table = [[0] * classes for _ in range(classes)]
    table[0][0], counts = right, (right, records - right)
    sample = _sample(accuracy, records)
    if exact:
        count = _right(table, scale, records, counts)
        low, high = interval(count, records)
        return Expected(noise=min(count.noise.reach() / records, 1.0), sample=sample, both=(high - low) / 2)
    count = _right(table, scale, None, counts)
    _, many, low, high = _of_unknown_number(count, _total(table, scale, counts))
    noise = min((count.noise.reach() + accuracy * (many - records)) / records, 1.0)
    return Expected(noise=noise, sample=sample, both=(high - low) / 2)


def _of_unknown_number(right: Count, number: Count) -> tuple[float, float, float, float]:
    """Return the ends of an interval for the number of records, and of one for the chance of a right answer.

    Half of the 5 % is for the number, and half for the chance, at the least favourable number of that interval.
    """
    sure = (1 + SURE) / 2
    reach = number.noise.reach(sure=sure)
    few, many = max(number.value - reach, 1.0), max(number.value + reach, 1.0)
    low, _ = interval(right, math.ceil(many), sure=sure)
    _, high = interval(right, math.floor(few), sure=sure)
    return few, many, low, high


def _sample(accuracy: float, records: int) -> float:
    """Return half the width of an interval for the chance of which records are held out."""
    right = Count(total=round(accuracy * records), noise=Noise(scale=0.0, added=((1, 1),)))
    low, high = interval(right, records)
    return round((high - low) / 2, 4)


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
