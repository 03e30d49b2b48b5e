"""Many small discriminators, each on its own share, in tensors with a leading discriminator dimension (GS-WGAN).

The state of a discriminator depends only on its own share, on the synthetic images it was shown (which are released)
and on a stream keyed by (seed, discriminator, step). Which of them learn in a step is public: the next ones in turn. In
the paper only the chosen one learns. Then the states of all would remember the secret choices of the past, and a step
would not be a mechanism that composes with the others.
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.func import functional_call, grad, vmap

from datalens.errors import DatalensError
from datalens.private import layers
from datalens.private.adam import adam_step
from datalens.private.shares import Shares
from datalens.public import streams
from datalens.public.critic import Critic, initialise_critic

Parameters = dict[str, Tensor]
GROUP = 64  # discriminators processed at a time


@cache
def convolves_alike() -> bool:
    """Return whether convolutions on this CPU, and their gradients, do not depend on memory addresses.

    They must be equal to the last bit wherever the numbers of a discriminator lie. (`layers.rounds_alike` checks the
    same for products.)
    """
    random = torch.Generator().manual_seed(0)
    images, kernels = torch.randn(6, 4, 3, 9, 9, generator=random), torch.randn(6, 8, 3, 5, 5, generator=random)

    def slopes(kernel: Tensor, of: Tensor) -> Tensor:
        return F.conv2d(of, kernel, stride=2, padding=2).square().sum()

    offsets = (0, 1, 3, 4, 7, 8, 13)
    gradients = [vmap(grad(slopes))(layers.moved(kernels, by), layers.moved(images, by)) for by in offsets]
    return all(torch.equal(one, gradients[0]) for one in gradients)


class Critics:
    """Conditional critics of a Wasserstein GAN with gradient penalty, one for each share."""

    def __init__(
        self,
        critic: Critic,
        shares: Shares,
        *,
        batch: int,
        rate: float,
        penalty: float,
        seed: int,
    ) -> None:
        if shares.device.type == "cpu" and not (layers.rounds_alike() and convolves_alike()):
            raise DatalensError(
                "on this CPU the last bits of a discriminator would depend on memory addresses: import datalens before "
                "torch is used, or set MKL_CBWR=AUTO,STRICT"
            )
        self._shares = shares
        self._batch, self._rate, self._penalty, self._seed = batch, rate, penalty, seed
        starts = []
        for teacher in range(shares.teachers):
            initialise_critic(critic, streams.generator(seed, "critic", teacher))
            starts.append({name: value.detach().clone() for name, value in critic.named_parameters()})
        self._critic = critic.to(shares.device)
        self._weights = {name: torch.stack([start[name] for start in starts]).to(shares.device) for name in starts[0]}
        self._means = {name: torch.zeros_like(value) for name, value in self._weights.items()}
        self._squares = {name: torch.zeros_like(value) for name, value in self._weights.items()}
        self._updates = torch.zeros(shares.teachers, dtype=torch.int64)
        self._loss_gradient = vmap(grad(self._loss), in_dims=(0, 0, 0, None, None, 0))

    def fit(self, first: int, count: int, fakes: Tensor, labels: Tensor, *, step: int) -> None:
        """Train discriminators `first` … `first + count − 1`, modulo their number, for one step on the same fakes."""
        everyone = torch.arange(first, first + count) % self._shares.teachers
        for part in everyone.split(GROUP):
            for updates in self._updates[part].unique().tolist():  # where a round ends, some have had one update more
                self._fit(part[self._updates[part] == updates], fakes.detach(), labels, step=step, updates=updates)

    def warm_up(self, steps: int, fakes: Tensor, labels: Tensor) -> None:
        """Train all discriminators for `steps` steps. Nothing is released."""
        for step in range(steps):
            self.fit(0, self._shares.teachers, fakes, labels, step=-1 - step)

    def image_gradient(self, teacher: int, fakes: Tensor, labels: Tensor) -> Tensor:
        """Return ∂D/∂x at each fake, [m, d]: the direction in which this discriminator finds it more real.

        It is zero if the discriminator has no record.
        """
        weights = {name: value[teacher] for name, value in self._weights.items()}
        fakes = fakes.detach().requires_grad_()
        (slope,) = torch.autograd.grad(functional_call(self._critic, weights, (fakes, labels)).sum(), fakes)
        number = torch.tensor([teacher], device=fakes.device)
        return slope.flatten(1) * self._shares.occupied(number).to(slope)

    def _fit(self, part: Tensor, fakes: Tensor, labels: Tensor, *, step: int, updates: int) -> None:
        numbers = part.to(fakes.device)
        rows, real_labels = self._shares.batch(numbers, size=self._batch, seed=self._seed, step=step, draw=0)
        real = rows.to(torch.float32) / 255  # [n, batch, c, h, w]
        mixing = streams.uniform(self._seed, "mixing", step, teachers=numbers, count=self._batch)
        weights = {name: value[numbers] for name, value in self._weights.items()}
        gradients = self._loss_gradient(weights, real, real_labels, fakes, labels, mixing)
        names = list(weights)
        means, squares = [self._means[n][numbers] for n in names], [self._squares[n][numbers] for n in names]
        values = [weights[n] for n in names]
        adam_step(
            values, [gradients[n] for n in names], means, squares, updates=updates + 1, rate=self._rate, decay=0.0
        )
        for name, value, mean, square in zip(names, values, means, squares, strict=True):
            self._weights[name][numbers], self._means[name][numbers], self._squares[name][numbers] = value, mean, square
        self._updates[part] += 1

    def _loss(
        self, weights: Parameters, real: Tensor, real_labels: Tensor, fakes: Tensor, labels: Tensor, mixing: Tensor
    ) -> Tensor:
        """Return the loss of one discriminator: D(fake) − D(real), plus the gradient penalty between the two."""

        def score(images: Tensor, of: Tensor) -> Tensor:
            return functional_call(self._critic, weights, (images, of))

        u = mixing[: len(fakes), None, None, None]
        between = u * real[: len(fakes)] + (1 - u) * fakes
        slopes = grad(lambda images: score(images, labels).sum())(between).flatten(1)
        lengths = (slopes.square().sum(dim=1) + 1e-12).sqrt()
        wasserstein = score(fakes, labels).mean() - score(real, real_labels).mean()
        return wasserstein + self._penalty * (lengths - 1).square().mean()

    def state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint needs. Derived from records: it never leaves the owner's machine."""
        tables = {"weights": self._weights, "means": self._means, "squares": self._squares}
        state = {f"{table}.{name}": value for table, values in tables.items() for name, value in values.items()}
        return state | {"updates": self._updates}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for table, values in (("weights", self._weights), ("means", self._means), ("squares", self._squares)):
            for name, value in values.items():
                value.copy_(state[f"{table}.{name}"])
        self._updates.copy_(state["updates"])
