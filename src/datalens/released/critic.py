"""A critic that learns of records by released gradients only, and of synthetic images freely."""

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
    """One step along the released sum over about `batch` records, and the mean over fakes."""
    if not isinstance(released, Released):
        raise TypeError("a critic learns of records by released gradients only")
    parameters = dict(critic.module.named_parameters())
    flat = torch.from_numpy(released.value[0]).to(torch.float32) / batch
    parts = flat.to(next(iter(parameters.values())).device).split([value.numel() for value in parameters.values()])
    real = {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
    critic.descend({name: value + fake[name] for name, value in real.items()})


def fake_gradient(critic: Critic, images: Tensor, labels: Tensor, loss: Loss, *, clip: float) -> dict[str, Tensor]:
    """The mean over fakes of gradients clipped as those of records are, so that neither side outweighs the other."""
    found = example_gradients(critic, images, labels, loss)
    squares = torch.stack([value.flatten(1).square().sum(dim=1) for value in found.values()])
    scale = (clip / squares.sum(dim=0).sqrt().clamp(min=1e-12)).clamp(max=1.0) / len(images)
    return {name: torch.einsum("i,i...->...", scale, value) for name, value in found.items()}


def fakes(generator: Generator, count: int, *, seed: int, purpose: str, step: int) -> tuple[Tensor, Tensor]:
    """A batch of synthetic images, with the graph back to the generator, and their labels: a function of the seed."""
    random = streams.generator(seed, purpose, step)
    device = next(generator.parameters()).device
    z = draw_latent(count, generator.architecture, random).to(device)
    labels = torch.randint(generator.architecture.classes, (count,), generator=random).to(device)
    return generator(z, labels), labels
