"""From released vote sums to directions in image space. Post-processing: it costs no privacy."""

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
    """Where each fake image should move, [m, c, h, w]. Made from a `Released` value and nothing else."""

    value: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeBins:
    """From the winning bins of projected coordinates (`bounded.ballots.binned`) back to images; nothing won: zero.

    Bin b of B stands for the middle of its part of [−1, 1]. `projection` has orthonormal columns [d, p], and is public.
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
    """`threshold`: Algorithm 3, lines 9-11, at ±βN; `sign`: the same without threshold; `linear`: the mean vote.

    N is the configured number of teachers, not a count of those that voted.
    """

    rule: DecodeName
    beta: float
    teachers: int
    basis: Basis
    unpack: Callable[[Tensor], Tensor] | None = None  # from sums of encoded rows (`codes`) to sums of votes

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
    """How long the sum of rows is, noise taken off, as a part of what it would be if all teachers said the same.

    From the released value alone. And what noise by itself hardly ever passes (two standard deviations of the square):
    below that, nothing can be told.
    """
    value, variance = released.value.astype(np.float64), released.event.sigma**2
    signal = float(np.square(value).sum()) - value.size * variance
    whole = teachers * longest
    return math.sqrt(max(signal, 0.0)) / whole, math.sqrt(2 * math.sqrt(2 * value.size) * variance) / whole
