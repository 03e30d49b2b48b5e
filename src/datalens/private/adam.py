"""Adam for all teachers at once. It is elementwise, so no teacher affects another, not even by rounding."""

import torch
from torch import Tensor
from torch.optim.adam import adam

BETAS = (0.5, 0.999)
EPSILON = 1e-8
LANES = 16  # floats in the widest vector of a CPU; a GPU's has four


def adam_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    updates: int,
    rate: float,
    decay: float,
) -> None:
    """Make one step in place, after `updates` earlier ones. Weight decay is Adam's own L2 term.

    torch's kernels work on whole vectors, and round the rest at the end of a tensor (on a GPU: all of a tensor that is
    not a multiple of vectors) in another way. So a teacher's last bits would depend on how many teachers are in the
    chunk. Therefore the ends of all tensors are concatenated and padded to whole vectors.
    """
    tables = [weights, [gradient.contiguous() for gradient in gradients], means, squares]
    if all(weight.numel() % LANES == 0 for weight in weights):  # true for chunks of a multiple of sixteen teachers
        _fused(tables, updates, rate, decay)
        return
    whole = [weight.numel() // LANES * LANES for weight in weights]
    ends = [torch.cat([value.view(-1)[n:] for value, n in zip(table, whole, strict=True)]) for table in tables]
    padding = -len(ends[0]) % LANES
    ends = [torch.nn.functional.pad(end, (0, padding)) for end in ends]
    bodies = [[value.view(-1)[:n] for value, n in zip(table, whole, strict=True)] for table in tables]
    _fused([[*body, end] for body, end in zip(bodies, ends, strict=True)], updates, rate, decay)
    for table, end in zip((weights, means, squares), (ends[0], ends[2], ends[3]), strict=True):
        lengths = [value.numel() - n for value, n in zip(table, whole, strict=True)]
        for value, n, part in zip(table, whole, end[: sum(lengths)].split(lengths), strict=True):
            value.view(-1)[n:] = part


def _fused(tables: list[list[Tensor]], updates: int, rate: float, decay: float) -> None:
    weights, gradients, means, squares = tables
    adam(
        weights,
        gradients,
        means,
        squares,
        [],
        list(torch.full((len(weights),), float(updates), device=weights[0].device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=rate,
        weight_decay=decay,
        eps=EPSILON,
        maximize=False,
    )
