"""Adam over all teachers at once. It is elementwise: teachers do not meet in it, and not by rounding either."""

import torch
from torch import Tensor
from torch.optim.adam import adam

BETAS = (0.5, 0.999)
EPSILON = 1e-8
LANES = 16  # floats in the widest vector a CPU works on; a GPU's has four


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
    """One step, in place; `updates` have been made before. Weight decay is Adam's own L2 term.

    torch's kernels work on whole vectors, and round what is left at the end of a tensor (on a GPU: all of a tensor
    that does not fill vectors) in another way, so a teacher's last bits would depend on how many teachers are in the
    chunk. The ends of all tensors are therefore put together and padded to whole vectors.
    """
    tables = [weights, [gradient.contiguous() for gradient in gradients], means, squares]
    if all(weight.numel() % LANES == 0 for weight in weights):  # as in chunks of a multiple of sixteen teachers
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
