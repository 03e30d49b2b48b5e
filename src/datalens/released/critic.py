"""A critic that learns about records from released gradients only, and about synthetic images without restriction."""

from collections.abc import Callable

import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.public import streams
from datalens.public.critic import Critic, example_gradients
from datalens.public.learner import Learner
from datalens.released.generator import Generator, draw_latent

Loss = Callable[[Tensor], Tensor]


def learn(critic: Learner, released: Released, fake: dict[str, Tensor], *, batch: float) -> None:
    """Take one step of the critic along the released gradient of real images plus the gradient of fakes.

    Args:
        critic: the critic with its optimizer.
        released: the sum of per-record gradients.
        fake: the mean gradient over fakes, by parameter (see `fake_gradient`).
        batch: the number of records that the sum is divided by.
    """
    if not isinstance(released, Released):
        raise TypeError("a critic learns about records from released gradients only")
    parameters = dict(critic.module.named_parameters())
    flat = torch.from_numpy(released.value[0]).to(torch.float32) / batch
    parts = flat.to(next(iter(parameters.values())).device).split([value.numel() for value in parameters.values()])
    real = {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
    critic.descend({name: value + fake[name] for name, value in real.items()})


def fake_gradient(critic: Critic, images: Tensor, labels: Tensor, loss: Loss, *, clip: float) -> dict[str, Tensor]:
    """Return the mean over fakes of per-example gradients, by parameter.

    They are clipped like those of records, so that neither side outweighs the other.
    """
    gradients = example_gradients(critic, images, labels, loss)
    squares = torch.stack([value.flatten(1).square().sum(dim=1) for value in gradients.values()])
    scale = (clip / squares.sum(dim=0).sqrt().clamp(min=1e-12)).clamp(max=1.0) / len(images)
    return {name: torch.einsum("i,i...->...", scale, value) for name, value in gradients.items()}


def fakes(generator: Generator, count: int, *, seed: int, purpose: str, step: int) -> tuple[Tensor, Tensor]:
    """Return a batch of synthetic images, attached to the generator's graph, and their labels.

    Both are functions of the generator's weights and of (seed, purpose, step).
    """
    random = streams.generator(seed, purpose, step)
    device = next(generator.parameters()).device
    z = draw_latent(count, generator.architecture, random).to(device)
    labels = torch.randint(generator.architecture.classes, (count,), generator=random).to(device)
    return generator(z, labels), labels
