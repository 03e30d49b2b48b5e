"""Rows by a function somebody else wrote: of one teacher's gradient at a time, and held to a bound like all rows."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients
from datalens.errors import DatalensError
from datalens.public import streams

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class PerTeacher:
    """`row` is mapped over the teachers: it has one teacher's gradient and uniforms, [m, d] each; returns [m, cells].

    It is called for one teacher at a time: mapped over many at once, an operator with a `vmap` rule of its own would
    be handed all of their gradients. So a row depends on its own teacher alone, unless `row` keeps something between
    calls; the first row is made again after the last, and refused if it has changed. Only two rows at most twice the
    bound apart are assumed; and `sum_bounded` enforces the bound.
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
        with _ONE_AT_A_TIME:  # chunks of teachers run side by side, and somebody else's code may keep scratch memory
            return self._rows_of(gradients)

    def _rows_of(self, gradients: Gradients) -> Contributions:
        values = gradients.values  # [teachers, m, d]
        count = values[0].numel()
        uniform = streams.uniform(self.seed, "plug-in", gradients.step, teachers=gradients.teachers, count=count)
        uniform = uniform.view(values.shape)
        mapped = torch.vmap(self.row, randomness="error", chunk_size=1)
        try:
            rows = mapped(values, uniform)
            again = mapped(values[:1], uniform[:1])
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
        if not _same(rows[:1], again, self.l2_bound):
            raise DatalensError("--compress: the plug-in's row is another when it is made again: it must keep no state")
        return Contributions(
            rows=rows if self.whole_numbers else rows.to(torch.float64),
            l2_bound=self.l2_bound,
            diameter=2 * self.l2_bound,
            row_unit="teacher",
            units=gradients.teachers,
        )


def _same(rows: Tensor, again: Tensor, bound: float) -> bool:
    """Up to the rounding that a GPU may add up in another order."""
    if rows.shape != again.shape or not rows.is_floating_point():
        return torch.equal(rows, again)
    return torch.allclose(rows, again, rtol=1e-5, atol=1e-6 * bound, equal_nan=True)
