"""Per-record gradients of a critic: the row of a record is a function of that record and of the critic."""

from collections.abc import Callable

from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.norm_topk import NormTopK
from datalens.private.pool import Pool
from datalens.public.critic import Critic, example_gradients

ROOM_ON_CPU, ROOM_ON_GPU = 2**28, 2**33  # bytes of gradients held in memory at a time


def sum_gradients(
    critic: Critic, pool: Pool, index: Tensor, loss: Callable[[Tensor], Tensor], rows: NormTopK
) -> BoundedSum:
    """Return the sum of the bounded rows of some records; zero if there are none.

    Args:
        critic: The network whose gradients are taken.
        pool: All records.
        index: [n] positions of the records.
        loss: Maps the critic's scores to losses.
        rows: Bounds the gradients and sums them.
    """
    device = next(critic.parameters()).device
    size = sum(value.nbytes for value in critic.parameters())
    chunk = max(1, (ROOM_ON_GPU if device.type == "cuda" else ROOM_ON_CPU) // size)
    names = [name for name, _ in critic.named_parameters()]
    total = rows.sum([value.new_zeros(0, *value.shape) for value in critic.parameters()])
    for part in index.split(chunk):
        if len(part):
            gradients = example_gradients(critic, *pool.batch(part), loss)
            total = rows.sum([gradients[name] for name in names], onto=total)
    return total
