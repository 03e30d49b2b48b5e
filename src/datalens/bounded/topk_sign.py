"""TopkStoSignGrad, DataLens Algorithm 2: a teacher's gradient becomes k votes of +1 or −1.

Differs from the paper: a coordinate that is exactly zero votes nothing (as printed it would vote +1 or
−1 with even odds, which is noise on top of the noise). The bound √k per image holds either way.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens import streams
from datalens.bounded.contributions import Contributions, Gradients
from datalens.errors import DatalensError


@dataclass(frozen=True, kw_only=True)
class TopKSign:
    """Top-k, clip at c, divide by the infinity norm, stochastic sign. `quantise=False` leaves the last step out.

    A teacher's row over m images has norm at most √(k·m), and two rows are at most 2·√(k·m) apart
    (DataLens, Lemma 1, over a batch).

    | gradient of one image | its votes |
    |---|---|
    | NaN or infinity anywhere, or all zero | none |
    | fewer than k nonzero coordinates | those only |
    | ties at the k-th place | the lower index first |
    | k = d | no top-k: every nonzero coordinate |
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
            raise DatalensError(f"k = {self.k} is more than the {d} coordinates there are: choose --k at most {d}")
        values = torch.where(values.isfinite().all(dim=-1, keepdim=True), values, 0.0)
        chosen = top_k_mask(values.abs(), self.k)  # line 2
        clipped = values.clamp(-self.clip, self.clip) * chosen  # line 3
        largest = clipped.abs().amax(dim=-1, keepdim=True)  # line 4: top-k holds the largest, so order does not matter
        scaled = clipped / torch.where(largest > 0, largest, 1.0)
        rows = self._stochastic_sign(scaled, gradients) if self.quantise else scaled  # lines 6-8
        bound = math.sqrt(self.k * images)
        return Contributions(rows=rows, l2_bound=bound, diameter=2 * bound, row_unit="teacher")

    def _stochastic_sign(self, scaled: Tensor, gradients: Gradients) -> Tensor:
        """+1 with probability (1 + g)/2, else −1; zero stays zero."""
        draws = streams.uniform(
            self.seed, "sign", gradients.step, teachers=gradients.teachers, count=scaled[0].numel()
        ).view(scaled.shape)
        signs = (draws < (1 + scaled) / 2).to(torch.int8) * 2 - 1
        return signs * (scaled != 0)


def top_k_mask(magnitudes: Tensor, k: int) -> Tensor:
    """True at the k largest of the last dimension; among equals the lower index; never at a zero."""
    if k >= magnitudes.shape[-1]:
        return magnitudes > 0
    kth = magnitudes.topk(k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = magnitudes > kth
    level = magnitudes == kth
    room = k - above.sum(dim=-1, keepdim=True)
    return (above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))) & (magnitudes > 0)
