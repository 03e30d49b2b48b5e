"""Rows of gradients as whole numbers of bounded norm, and their exact sums.

A row is divided by a little more than its length and put on a grid by truncation, so no row is longer than the grid.
Sums of whole numbers are exact in any order: it does not matter how records are cut into chunks, threads or machines,
and a record that is added or removed moves the sum by its own row and by nothing else.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum

GRID = 2**19  # a row's norm at most; a coordinate's, too
MOST_TOGETHER = 32  # rows that are added in float32: 32 · 2^19 is 2^24, up to which its whole numbers are exact
LESS = 1 - 2**-12  # of a row: more than rounding can shorten its measured length by (see `_squares`)
# Squares below 2^-126 may count as 0 in float32, which shortens a row of 2^40 numbers by 2^-43 at most. The softening
# is longer than that, so that a row which seems to have no length is not made longer than the grid.
LEAST_SOFTENING = 2.0**-40
COLUMNS, TOGETHER = 2**13, 2**9  # of rows looked at together, which stay in the cache; and squares added in float32
ON_GPU = 2**9  # rows that are added together on a GPU, in float64, and all their columns at once


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """The rule by which a gradient r becomes a row of whole numbers: trunc(GRID · s∘r / (‖s∘r‖ + softening)).

    Attributes:
        softening: Gradients much shorter than this count for less; all others are brought to one length. At least
            `LEAST_SOFTENING`.
        scale: [size] s, a public weight of every coordinate, or None for ones.

    | gradient | its row becomes |
    |---|---|
    | NaN or infinity anywhere in it, or a norm that overflows | zero |
    | weight 0 | zero |
    """

    softening: float
    scale: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not LEAST_SOFTENING <= self.softening < math.inf:
            raise ValueError(f"softening must be at least 2^-40, and finite, not {self.softening}")

    @property
    def l2_bound(self) -> float:
        return float(GRID)


class WholeSum:
    """The sum of the rows that one thread or machine has added so far.

    Args:
        rows: How gradients become rows.
        size: How many numbers a row has.
    """

    def __init__(self, rows: WholeRows, size: int, *, device: torch.device) -> None:
        self._rows = rows
        self._total = torch.zeros(size, dtype=torch.float64, device=device)
        self._most, self._columns = (MOST_TOGETHER, COLUMNS) if device.type == "cpu" else (ON_GPU, max(size, 1))
        self._work = torch.empty(self._most, self._columns, device=device)  # new memory costs more than the work

    def add(self, gradients: Tensor, weights: Tensor) -> None:
        """Add the rows of some records.

        Args:
            gradients: [n, size], n at most `MOST_TOGETHER`, or `ON_GPU` there.
            weights: [n] 1 for a record, 0 for a row that only fills up the chunk.

        Raises:
            ValueError: shapes or weights are not as stated.
        """
        if len(gradients) > self._most:
            raise ValueError(f"at most {self._most} rows are added together, not {len(gradients)}")
        if gradients.shape != (len(weights), len(self._total)) or weights.dim() != 1:
            raise ValueError(f"{list(weights.shape)} weights do not fit {list(gradients.shape)} gradients")
        if not bool(((weights == 0) | (weights == 1)).all()):
            raise ValueError("a weight is 0 or 1")
        squares = torch.zeros(len(gradients), dtype=torch.float64, device=gradients.device)
        for _, part in self._parts(gradients):
            squares += _squares(part)
        counted = squares.isfinite() & (weights == 1)
        factors = torch.where(counted, GRID * LESS / (squares.sqrt() + self._rows.softening), 0.0).to(torch.float32)
        all_counted = bool(counted.all())
        for start, part in self._parts(gradients):
            if not all_counted:
                part.masked_fill_(~counted.unsqueeze(1), 0.0)  # 0 · NaN is NaN
            _truncate(part.mul_(factors.unsqueeze(1)))
            self._total[start : start + part.shape[1]] += _column_sums(part)

    def _parts(self, gradients: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield where some columns begin, and a scaled copy of them in float32. Each copy overwrites the one before."""
        for start in range(0, gradients.shape[1], self._columns):
            columns = gradients[:, start : start + self._columns]
            part = self._work[: len(columns), : columns.shape[1]].copy_(columns)
            scale = self._rows.scale
            yield start, part if scale is None else part.mul_(scale[start : start + self._columns])

    def join(self, other: "WholeSum") -> None:
        """Add another thread's sum, of other records.

        Args:
            other: A sum of rows of the same `WholeRows`.

        Raises:
            ValueError: its gradients become rows in another way.
        """
        if other._rows is not self._rows:
            raise ValueError("sums of one release must agree on how gradients become rows")
        self._total += other._total

    def bounded(self, *, unit: Literal["record", "person"] = "record") -> BoundedSum:
        """Return the sum for the gate, as whole numbers.

        Args:
            unit: The privacy unit whose row each record has.
        """
        return BoundedSum(
            private_total=self._total.to(torch.int64).unsqueeze(0),
            l2_bound=self._rows.l2_bound,
            diameter=2 * self._rows.l2_bound,
            row_unit=unit,
            queries=1,
        )


def _squares(part: Tensor) -> Tensor:
    """Return the squared norms [n] of float32 rows, in float64.

    512 squares are added in float32, which loses at most 512·2^-24 of their sum; all else is float64. So a norm is
    measured no more than 2^-15 of itself too short.
    """
    whole = part.shape[1] // TOGETHER * TOGETHER
    norms = torch.linalg.vector_norm(part[:, :whole].unflatten(1, (-1, TOGETHER)), dim=2)
    rest = torch.linalg.vector_norm(part[:, whole:], dim=1)
    return norms.to(torch.float64).square().sum(dim=1) + rest.to(torch.float64).square()


def _column_sums(part: Tensor) -> Tensor:
    """Return the exact sums of rows of whole numbers: in float32 as long as these are exact, else in float64."""
    return part.sum(dim=0) if len(part) <= MOST_TOGETHER else part.sum(dim=0, dtype=torch.float64)


def _truncate(part: Tensor) -> None:
    """Drop what is behind the point, in place. On a CPU numpy takes a fifth of torch's time."""
    if part.is_cuda:
        part.trunc_()
    else:
        numbers = part.numpy()
        np.trunc(numbers, out=numbers)
