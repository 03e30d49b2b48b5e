"""Per-example gradients of a critic on records: a record's row is a function of that record and of the critic."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.norm_topk import NormTopK
from datalens.private.pool import Pool

Loss = Callable[[Tensor], Tensor]  # of what the critic says of a record

ROOM_ON_CPU, ROOM_ON_GPU = 2**28, 2**33  # bytes of gradients held at a time


def example_gradients(critic: nn.Module, images: Tensor, labels: Tensor, loss: Loss) -> list[Tensor]:
    """One [n, …] tensor a parameter: the gradient of loss(critic(image, label)) of each example by itself."""

    def one(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(critic, weights, (image.unsqueeze(0), label.unsqueeze(0)))).sum()

    weights = {name: value.detach() for name, value in critic.named_parameters()}
    return list(vmap(grad(one), in_dims=(None, 0, 0))(weights, images, labels).values())


def sum_gradients(critic: nn.Module, pool: Pool, index: Tensor, loss: Loss, rows: NormTopK) -> BoundedSum:
    """The sum of the bounded rows of records `index`; that of none is zero."""
    device = next(critic.parameters()).device
    size = sum(value.nbytes for value in critic.parameters())
    chunk = max(1, (ROOM_ON_GPU if device.type == "cuda" else ROOM_ON_CPU) // size)
    total = rows.sum([value.new_zeros(0, *value.shape) for value in critic.parameters()])
    for part in index.split(chunk):
        if len(part):
            total = rows.sum(example_gradients(critic, *pool.batch(part), loss), onto=total)
    return total
