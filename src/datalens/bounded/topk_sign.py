"""TopkStoSignGrad, DataLens Algorithm 2: a teacher's gradient becomes k votes of +1 or −1.

Differs from the paper: a coordinate that is exactly zero has no vote. (As printed it would vote +1 or −1 with equal
probability, which only adds noise.) The bound √k per image holds either way.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients
from datalens.errors import DatalensError
from datalens.public import streams
from datalens.public.triton import kernels_for


@dataclass(frozen=True, kw_only=True)
class TopKSign:
    """Compress gradients by top-k, clipping at c, division by the infinity norm, and stochastic sign.

    A teacher's row over m images has norm at most √(k·m), and two rows are at most 2·√(k·m) apart (DataLens, Lemma 1,
    for a batch).

    | gradient of one image | its votes |
    |---|---|
    | NaN or infinity anywhere, or all zero | none |
    | fewer than k nonzero coordinates | those only |
    | ties at the k-th place | the lower index first |
    | k = d | every nonzero coordinate |

    Args:
        k: Coordinates that a teacher votes on per image.
        clip: c, the bound on the magnitude of a coordinate.
        quantise: False leaves out the stochastic sign.
        seed: Seed of the public random streams.

    Raises:
        DatalensError: an argument is out of range, or k is more than the coordinates of a gradient.
    """

    k: int
    clip: float
    quantise: bool
    seed: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise DatalensError(f"k must be at least 1, not {self.k}")
        if not self.clip > 0:
            raise DatalensError(f"clip must be above 0, not {self.clip:g}")

    def __call__(self, gradients: Gradients) -> Contributions:
        values = gradients.values  # [teachers, m, d]
        _, images, d = values.shape
        if self.k > d:
            raise DatalensError(f"k = {self.k} is more than the {d} coordinates of a gradient: choose --k at most {d}")
        bound = math.sqrt(self.k * images)
        facts: dict[str, Any] = {
            "l2_bound": bound,
            "diameter": 2 * bound,
            "row_unit": "teacher",
            "units": gradients.teachers,
        }
        if self.quantise and kernels_for(values):
            return Contributions(rows=self._votes_on_gpu(gradients), **facts)
        size = values.abs()
        largest = size.amax(dim=-1, keepdim=True)
        if not bool((largest < math.inf).all()):  # the comparison is false for NaN too
            values, size, largest = (torch.where(largest < math.inf, x, 0.0) for x in (values, size, largest))
        chosen = top_k_mask(size, self.k)  # line 2
        clipped = torch.where(chosen, values, 0.0).clamp_(-self.clip, self.clip)  # line 3
        largest = largest.clamp(max=self.clip)  # line 4: top-k keeps the largest, so this is the norm of what is kept
        if self.quantise:
            return Contributions(rows=self._stochastic_sign(clipped, largest, chosen, gradients), **facts)  # lines 6-8
        return Contributions(rows=clipped / torch.where(largest > 0, largest, 1.0), **facts)

    def _votes_on_gpu(self, gradients: Gradients) -> Tensor:
        """Return the same votes, bit for bit, by one kernel instead of a dozen passes over memory."""
        from datalens.bounded.kernels import top_k_sign

        keys, again = streams.row_keys(self.seed, "sign", gradients.step, teachers=gradients.teachers)
        return top_k_sign(gradients.values, keys, again, k=self.k, clip=self.clip)

    def _stochastic_sign(self, clipped: Tensor, largest: Tensor, chosen: Tensor, gradients: Gradients) -> Tensor:
        """Return +1 with probability (1 + g/‖g‖∞)/2, to one part in 65536, else −1; and 0 where nothing was chosen."""
        count = clipped[0].numel()
        draws = streams.halfwords(self.seed, "sign", gradients.step, teachers=gradients.teachers, count=count)
        level = draws.to(torch.float32).mul_(2.0**-15).sub_(1).view(clipped.shape)  # uniform in [−1, 1)
        return (level.mul_(largest) < clipped).to(torch.int8).mul_(2).sub_(1).mul_(chosen)


def top_k_mask(magnitudes: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest entries along the last dimension. Of equal ones the lower index; never a zero.

    Args:
        magnitudes: [..., d], not negative.
        k: How many.
    """
    d = magnitudes.shape[-1]
    if k >= d:
        return magnitudes > 0
    kth, next_one = (_by_topk if magnitudes.is_cuda else _by_partition)(magnitudes, k)
    chosen = (magnitudes >= kth) & (magnitudes > 0)
    tied = ((kth == next_one) & (kth > 0)).squeeze(-1)
    if bool(tied.any()):
        rows, kth = magnitudes[tied], kth[tied]
        above, level = rows > kth, rows == kth
        room = k - above.sum(dim=-1, keepdim=True)
        chosen[tied] = above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))
    return chosen


def _by_topk(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k-th largest entry and the one after it."""
    largest = magnitudes.topk(k + 1, dim=-1).values
    return largest[..., k - 1 : k], largest[..., k : k + 1]


def _by_partition(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same by numpy, which selects several times faster than torch on a CPU."""
    place = magnitudes.shape[-1] - k
    ordered = torch.from_numpy(np.partition(magnitudes.numpy(), (place - 1, place), axis=-1))
    return ordered[..., place : place + 1], ordered[..., place - 1 : place]
