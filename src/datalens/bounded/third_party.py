"""Rows from a compressor of another package: called for one teacher at a time, and bounded like all rows."""

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
    """Applies a function to the gradient of each teacher separately.

    The function is called for one teacher at a time: if it were mapped over many at once, an operator with its own
    `vmap` rule would receive all of their gradients. So a row depends on its own teacher alone, unless the function
    keeps state between calls. To detect that, the first row is computed again after the last one, and must not have
    changed. Two rows are assumed to be at most twice the bound apart, and `sum_bounded` enforces the bound.

    Args:
        row: Takes one teacher's gradient and uniform random numbers, [m, d] each, and returns [m, cells].
        l2_bound: Bound on the norm of a row.
        cells: Numbers per image.
        whole_numbers: Whether rows are integers.
        seed: Seed of the public random streams.

    Raises:
        DatalensError: the bound is not above 0, or the function's result is not as stated.
    """

    row: Callable[[Tensor, Tensor], Tensor]
    l2_bound: float
    cells: int
    whole_numbers: bool
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.l2_bound < math.inf:
            raise DatalensError(f"a compressor's rows need a finite bound above 0, not {self.l2_bound}")

    def __call__(self, gradients: Gradients) -> Contributions:
        with _ONE_AT_A_TIME:  # chunks of teachers run in threads, and the function may use scratch memory of its own
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
        except Exception as error:  # code of another package may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DatalensError(f"--compress: the plug-in cannot be mapped over teachers ({reason})") from error
        if rows.shape != (*values.shape[:2], self.cells):
            raise DatalensError(
                f"--compress: the plug-in stated {self.cells} cells per image, and returned rows of "
                f"{list(rows.shape[1:])}: return [images, cells]"
            )
        if rows.is_complex():
            raise DatalensError(
                "--compress: the plug-in returned complex numbers, which are bounded only in part: return real ones"
            )
        if self.whole_numbers and (rows.is_floating_point() or rows.dtype == torch.bool):
            raise DatalensError(
                "--compress: the plug-in stated whole numbers, and returned others: return an integer tensor"
            )
        if not _same(rows[:1], again, self.l2_bound):
            raise DatalensError(
                "--compress: the plug-in's row has changed when it was computed again: it must keep no state"
            )
        return Contributions(
            rows=rows if self.whole_numbers else rows.to(torch.float64),
            l2_bound=self.l2_bound,
            diameter=2 * self.l2_bound,
            row_unit="teacher",
            units=gradients.teachers,
        )


def _same(rows: Tensor, again: Tensor, bound: float) -> bool:
    """Return whether two rows are equal, up to rounding where a GPU may sum in another order."""
    if rows.shape != again.shape or not rows.is_floating_point():
        return torch.equal(rows, again)
    return torch.allclose(rows, again, rtol=1e-5, atol=1e-6 * bound, equal_nan=True)
