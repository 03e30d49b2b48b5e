"""Decoding of released vote sums into directions in image space. This is post-processing and costs no privacy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.public.basis import Basis

DecodeName = Literal["threshold", "sign", "linear"]


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The direction in which each fake image should move, [m, c, h, w], computed from a `Released` value alone."""

    value: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeBins:
    """Decoder of the winning bins of projected coordinates (`bounded.ballots.binned`) into images.

    Bin b of B stands for the middle of its part of [−1, 1]; a coordinate without a winner becomes zero. The public
    `projection` [d, p] has orthonormal columns.
    """

    bins: int
    basis: Basis

    def __call__(self, released: Released, projection: Tensor) -> Direction:
        if not isinstance(released, Released):
            raise TypeError("only a released value may be decoded")
        won = torch.from_numpy(released.value).view(-1, projection.shape[1])  # [m, p]
        middle = torch.where(won >= 0, (2 * won + 1) / self.bins - 1, 0.0)
        return Direction(value=self.basis.inverse(middle.to(torch.float32) @ projection.T.to(torch.float32)))


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Decoder of sums of votes into directions.

    Rules: `threshold` is Algorithm 3, lines 9-11, with thresholds ±βN; `sign` is the same without a threshold;
    `linear` is the mean vote. N is the configured number of teachers, not the number of those that voted.
    """

    rule: DecodeName
    beta: float
    teachers: int
    basis: Basis
    unpack: Callable[[Tensor], Tensor] | None = None  # sums of encoded rows → sums of votes

    def __call__(self, released: Released) -> Direction:
        if not isinstance(released, Released):
            raise TypeError("only a released value may be decoded")
        votes = torch.from_numpy(released.value).to(torch.float32)  # [m, cells]
        if self.unpack is not None:
            votes = self.unpack(votes)  # [m, d]
        if self.rule == "linear":
            directions = votes / self.teachers
        elif self.rule == "sign":
            directions = votes.sign()
        else:
            at = self.beta * self.teachers
            directions = (votes.abs() >= at) * votes.sign()  # a sum of exactly 0 points nowhere, even at β = 0
        return Direction(value=self.basis.inverse(directions))


def agreement(released: Released, *, teachers: int, longest: float) -> tuple[float, float]:
    """Return how far teachers agree, and the level below which chance can explain the result.

    The agreement is the norm of the released sum, after the noise's expected contribution is subtracted, divided by
    the norm that the sum would have if all teachers sent the same row. The level is the root of the squared norm of the
    sum of N rows that have nothing in common, with two standard deviations of the noise's contribution added, divided
    by the same norm. Both follow from the released value alone.

    Args:
        released: a released sum of rows.
        teachers: the number of teachers.
        longest: the largest norm of a row.
    """
    value, variance = released.value.astype(np.float64), released.event.sigma**2
    signal = float(np.square(value).sum()) - value.size * variance
    whole = teachers * longest
    by_chance = teachers * longest**2 + 2 * math.sqrt(2 * value.size) * variance
    return math.sqrt(max(signal, 0.0)) / whole, math.sqrt(by_chance) / whole
