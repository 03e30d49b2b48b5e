"""StoKlevelGrad, DataLens Algorithm 5 (D²P-Fed, Wang et al. 2020): a rotated gradient, quantised to a few levels.

Differs from the paper:
- As printed, the levels and the interval test do not fit together: b[r] = −k/2 + 2r is not symmetric, and coordinates
  in [−1, 1] are compared with b, not with the grid. Here m[r] = −1 + 2r/(levels − 1), b[r] = −(levels − 1) + 2r, and
  the test is on m. In expectation b is (levels − 1) times the coordinate.
- The rotation is a randomised Hadamard transform, the same public one for all teachers, and is undone after the noise
  (`public.transforms.Rotation`). Algorithm 6 never undoes it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients
from datalens.errors import DatalensError
from datalens.public import streams
from datalens.public.transforms import Rotation

MOST_LEVELS = 128  # votes of −127 … 127 fit into int8


@dataclass(frozen=True, kw_only=True)
class KLevel:
    """Compress gradients: clip at c, rotate, divide by the infinity norm, and round without bias to one of the levels.

    With d′ the padded length, a teacher's row over m images has norm at most (levels − 1)·√(d′·m), and two rows are at
    most twice that apart.

    | gradient of one image | its votes |
    |---|---|
    | NaN or infinity anywhere, or all zero | none |

    Args:
        levels: Number of levels.
        clip: c, the bound on the magnitude of a coordinate.
        seed: Seed of the public random streams and of the rotation.
        size: Coordinates of a gradient, d.

    Raises:
        DatalensError: an argument is out of range.
    """

    levels: int
    clip: float
    seed: int
    size: int  # coordinates of a gradient

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= MOST_LEVELS:
            raise DatalensError(f"levels must be from 2 to {MOST_LEVELS}, not {self.levels}")
        if not self.clip > 0:
            raise DatalensError(f"clip must be above 0, not {self.clip:g}")

    def __call__(self, gradients: Gradients) -> Contributions:
        values = gradients.values  # [teachers, m, d]
        sound = values.isfinite().all(dim=-1, keepdim=True)
        clipped = torch.where(sound, values, 0.0).clamp_(-self.clip, self.clip) / self.clip  # line 2
        rotated = self._rotation.forward(clipped)  # line 3
        largest = rotated.abs().amax(dim=-1, keepdim=True)
        normal = rotated / torch.where(largest > 0, largest, 1.0)  # line 4
        bound = (self.levels - 1) * math.sqrt(self._rotation.padded * values.shape[1])
        return Contributions(
            rows=self._round(normal, gradients) * (largest > 0),
            l2_bound=bound,
            diameter=2 * bound,
            row_unit="teacher",
            units=gradients.teachers,
        )

    def _round(self, normal: Tensor, gradients: Gradients) -> Tensor:
        """Round each coordinate to a level at random (lines 6-10).

        m[r] <= x <= m[r + 1] is rounded up with probability (x − m[r])/(m[r + 1] − m[r]), to one part in 65536.
        """
        count = normal[0].numel()
        draws = streams.halfwords(self.seed, "level", gradients.step, teachers=gradients.teachers, count=count)
        place = (normal + 1).mul_((self.levels - 1) / 2)  # r + that probability
        place += (draws.to(torch.float32) + 0.5).mul_(2.0**-16).view(normal.shape)
        level = place.floor_().clamp_(0, self.levels - 1)
        return level.mul_(2).sub_(self.levels - 1).to(torch.int8)

    @cached_property
    def _rotation(self) -> Rotation:
        return Rotation(self.size, self.seed)
