"""The student: a generator trained on released directions for its images (Algorithm 1, lines 3-4 and 16-18)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens.public import streams
from datalens.released.decode import Direction
from datalens.released.generator import Architecture, Generator, draw_latent, initialise


@dataclass(frozen=True, kw_only=True)
class Fakes:
    """A batch of synthetic images and the public labels they were made for."""

    images: Tensor  # [m, c, h, w], attached to the generator's graph
    labels: Tensor  # [m]
    step: int


class Student:
    """A generator and its optimiser. Every batch is a function of (seed, step), so a resumed run draws the same.

    Over `decay_over` steps the learning rate falls to zero along a cosine; None: it is constant.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        batch: int,
        gamma: float,
        learning_rate: float,
        decay_over: int | None,
        balanced_labels: bool,
        seed: int,
        device: torch.device,
    ) -> None:
        self.generator = Generator(architecture)
        initialise(self.generator, streams.generator(seed, "student"))
        self.generator.to(device)
        self._adam = torch.optim.Adam(self.generator.parameters(), lr=learning_rate, betas=(0.5, 0.999))
        self._rate = learning_rate
        self._decay_over = decay_over
        self._balanced_labels = balanced_labels
        self._batch = batch
        self._gamma = gamma
        self._seed = seed
        self._device = device

    def generate(self, step: int) -> Fakes:
        """Return m synthetic images, with labels drawn uniformly or, if balanced, cycling through the classes."""
        random = streams.generator(self._seed, "fakes", step)
        architecture = self.generator.architecture
        z = draw_latent(self._batch, architecture, random).to(self._device)
        labels = torch.randint(architecture.classes, (self._batch,), generator=random).to(self._device)
        if self._balanced_labels:
            labels = (labels[0] + torch.arange(self._batch, device=self._device)) % architecture.classes
        self.generator.train()
        return Fakes(images=self.generator(z, labels), labels=labels, step=step)

    def step(self, fakes: Fakes, direction: Direction) -> None:
        """Take one Adam step on (1/m) Σ ‖Ψ(z) − x̂‖², with x̂ = Ψ(z) + γ·direction held fixed."""
        if not isinstance(direction, Direction):
            raise TypeError("the student learns from directions decoded from released values only")
        if self._decay_over:
            # Votes do not shrink as the student converges, and Adam would cancel it if they did: decay the rate.
            done = min(fakes.step / self._decay_over, 1.0)
            self._adam.param_groups[0]["lr"] = self._rate * (1 + math.cos(math.pi * done)) / 2
        target = fakes.images.detach() + self._gamma * direction.value.to(self._device)
        loss = (fakes.images - target).square().sum() / len(fakes.images)
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        state = {f"generator.{name}": value for name, value in self.generator.state_dict().items()}
        for name, parameter in self.generator.named_parameters():
            for key, moment in self._adam.state[parameter].items():
                state[f"adam.{name}.{key}"] = moment
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.generator.load_state_dict(
            {k.removeprefix("generator."): v for k, v in state.items() if k.startswith("generator.")}
        )
        for name, parameter in self.generator.named_parameters():
            self._adam.state[parameter] = {
                key: state[f"adam.{name}.{key}"].to(self._device) if key != "step" else state[f"adam.{name}.{key}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"adam.{name}.{key}" in state
            }
