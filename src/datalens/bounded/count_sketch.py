"""FetchSGD in DataLens, Algorithm 7 (Rothchild et al. 2020): every teacher's votes go into a count sketch.

Differs from the paper: Algorithm 7 adds up whole sketches, takes the top k of the sum, and then adds noise for rows of
norm √k. But the top k of a sum is not a sum of bounded rows, and with collisions the norm of a teacher's table can be
as large as k·√rows. Here every teacher's table is clipped to √(rows·k), its norm without collisions; noise is added to
the sum of the tables, and the top k is taken afterwards (`Sketch.heaviest`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from datalens.bounded.contributions import Contributions, Gradients
from datalens.bounded.topk_sign import TopKSign
from datalens.public.transforms import Sketch


@dataclass(frozen=True, kw_only=True)
class CountSketch:
    """Compress a teacher's votes on one image to a table of [rows·columns] real numbers, clipped to norm √(rows·k).

    A teacher's row over m images has norm at most √(rows·k·m), and two rows are at most twice that apart. Images
    without votes (see `TopKSign`) have tables of zeros.
    """

    votes: TopKSign
    rows: int
    columns: int
    size: int  # coordinates of a gradient

    def __call__(self, gradients: Gradients) -> Contributions:
        votes = self.votes(gradients)
        tables = self._sketch.forward(votes.rows)  # [teachers, m, rows·columns]
        each = math.sqrt(self.rows * self.votes.k)
        norms = torch.linalg.vecdot(tables, tables).sqrt().unsqueeze(-1)  # sums of integers: exact in any order
        bound = math.sqrt(self.rows * self.votes.k * tables.shape[1])
        return Contributions(
            rows=tables * (each / norms.clamp(min=each)),
            l2_bound=bound,
            diameter=2 * bound,
            row_unit="teacher",
            units=gradients.teachers,
        )

    @cached_property
    def _sketch(self) -> Sketch:
        return Sketch(self.size, self.rows, self.columns, self.votes.seed)
