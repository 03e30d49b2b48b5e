"""Rows of bounded norm, one per privacy unit, and their sum. The bound is enforced here, not assumed.

Chunks of rows are summed as they come, so [teachers, queries, d] is never held, and the `BoundedSum`
(the total and the facts its sensitivity follows from) is all that reaches the gate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """A chunk of what teachers say about the fakes: one row of `values` per teacher."""

    teachers: Tensor  # [chunk] numbers of the teachers
    values: Tensor = field(repr=False)  # [chunk, queries, d]
    step: int


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Rows of one privacy unit each. A unit's row is all of `rows[i]`, over all queries at once."""

    rows: Tensor = field(repr=False)  # [units, queries, d]: integers (votes) or floats
    l2_bound: float
    diameter: float  # 2·l2_bound unless a smaller one is proved
    row_unit: Literal["teacher", "record", "person"]


@dataclass(frozen=True, kw_only=True)
class BoundedSum:
    """The sum of bounded rows. `private_total` is read only in `privacy/`; a test walks the syntax trees."""

    private_total: Tensor = field(repr=False)  # [queries, d]: int32 or float64; not for logs or tracebacks
    l2_bound: float
    diameter: float
    row_unit: Literal["teacher", "record", "person"]
    queries: int


def _facts(chunk: Contributions) -> tuple[object, ...]:
    return chunk.rows.shape[1:], chunk.rows.dtype, chunk.l2_bound, chunk.diameter, chunk.row_unit


def enforce(rows: Tensor, l2_bound: float) -> Tensor:
    """Rows whose norm is at most `l2_bound`, whatever came in; each row judged by itself alone.

    | row | becomes |
    |---|---|
    | integers, too long | zero (scaling would leave the integers) |
    | floats, too long | scaled down to the bound, in float64 |
    | NaN or infinity anywhere in it | zero |
    """
    if not rows.is_floating_point():
        # int8 squares add up exactly in int32 and int64; wider integers go to float64, where nothing wraps around.
        wide = rows.flatten(1).to(torch.int32 if rows.dtype == torch.int8 else torch.float64)
        squares = wide.square().sum(dim=1).to(torch.float64)
        fits = squares <= l2_bound**2 * (1 + 1e-12)  # a bound such as sqrt(200) is itself rounded
        return rows * fits.view(-1, *[1] * (rows.dim() - 1))
    flat = rows.flatten(1).to(torch.float64)
    flat = torch.where(flat.isfinite().all(dim=1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    # Where even the norm overflows, the scale is 0: a row of astronomic numbers votes nothing.
    return (flat * torch.where(norms > l2_bound, l2_bound / norms, 1.0)).reshape(rows.shape)


def sum_bounded(chunks: Iterable[Contributions]) -> BoundedSum:
    """Enforce the bound row by row, then add. Sums are int32 (votes) or float64."""
    total: Tensor | None = None
    first: Contributions | None = None
    units = 0
    for chunk in chunks:
        if first is None:
            first = chunk
        elif _facts(chunk) != _facts(first):
            raise ValueError("chunks of one sum must agree on shape, kind, bound, diameter and unit")
        rows = enforce(chunk.rows, chunk.l2_bound)
        units += rows.shape[0]
        if not rows.is_floating_point() and units * chunk.l2_bound >= 2**31:
            raise OverflowError(f"{units} rows of norm {chunk.l2_bound:g} could overflow an int32 sum")
        part = rows.sum(dim=0, dtype=torch.float64 if rows.is_floating_point() else torch.int32)
        total = part if total is None else total + part
    if first is None or total is None:
        raise ValueError("nothing to sum: there were no contributions")
    return BoundedSum(
        private_total=total,
        l2_bound=first.l2_bound,
        diameter=first.diameter,
        row_unit=first.row_unit,
        queries=total.shape[0],
    )
