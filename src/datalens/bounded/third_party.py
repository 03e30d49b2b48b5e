"""Rows by a function somebody else wrote: of one teacher's gradient at a time, and held to a bound like all rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens import streams
from datalens.bounded.contributions import Contributions, Gradients
from datalens.errors import DatalensError


@dataclass(frozen=True, kw_only=True)
class PerTeacher:
    """`row` is mapped over the teachers: it has one teacher's gradient and uniforms, [m, d] each; returns [m, cells].

    That a row depends on its own teacher alone follows from the mapping, not from good will; only two rows at most
    twice the bound apart are assumed; and `sum_bounded` enforces the bound.
    """

    row: Callable[[Tensor, Tensor], Tensor]
    l2_bound: float
    cells: int
    whole_numbers: bool
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.l2_bound < math.inf:
            raise DatalensError(f"a compressor's rows need a bound above 0, not {self.l2_bound}")

    def __call__(self, gradients: Gradients) -> Contributions:
        values = gradients.values  # [teachers, m, d]
        count = values[0].numel()
        uniform = streams.uniform(self.seed, "plug-in", gradients.step, teachers=gradients.teachers, count=count)
        try:
            rows = torch.vmap(self.row, randomness="error")(values, uniform.view(values.shape))
        except Exception as error:  # whatever somebody else's code does
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DatalensError(f"--compress: the plug-in cannot be mapped over teachers ({reason})") from error
        if rows.shape != (*values.shape[:2], self.cells):
            raise DatalensError(f"--compress: rows of {list(rows.shape[1:])} came where {self.cells} cells were said")
        if rows.is_complex():
            raise DatalensError("--compress: the plug-in brings complex numbers, of which only a part would be bounded")
        if self.whole_numbers and (rows.is_floating_point() or rows.dtype == torch.bool):
            raise DatalensError(
                "--compress: the plug-in said whole numbers, and brings others: return an integer tensor"
            )
        return Contributions(
            rows=rows if self.whole_numbers else rows.to(torch.float64),
            l2_bound=self.l2_bound,
            diameter=2 * self.l2_bound,
            row_unit="teacher",
            units=gradients.teachers,
        )
