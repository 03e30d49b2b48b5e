"""A student with a critic, which learns from released votes alone (PATE-GAN, Algorithm 1).

The teachers vote on whether each generated image is real. The critic learns from generated images and these released
labels; the generator learns from the critic.
"""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from datalens.privacy.released import Released
from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.public.critic import initialise_critic
from datalens.public.learner import Learner
from datalens.released.generator import Generator, draw_latent, fresh_generator
from datalens.released.student import Fakes

LabelName = Literal["majority", "counts"]


class CriticStudent:
    """A generator and a critic, with their optimizers, and a memory of recent queries and answers.

    Every batch is a function of (seed, step), so a resumed run draws the same batches.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        critic: nn.Module,
        *,
        teachers: int,
        labels: LabelName,
        batch: int,
        jitter: float,
        memory: int,
        latent: int,
        critic_steps: int,
        critic_rate: float,
        generator_steps: int,
        generator_batch: int,
        generator_rate: float,
        average: float,
        spread: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.generator: Generator = fresh_generator(shape, classes, latent=latent, seed=seed).to(device)
        initialise_critic(critic, streams.generator(seed, "critic"))
        self._critic = Learner(critic.to(device), rate=critic_rate)
        self._student = Learner(self.generator, rate=generator_rate, average=average)
        self._teachers = teachers
        self._labels = labels
        self._batch, self._classes = batch, classes
        self._jitter, self._basis = jitter, make_basis("dct", shape, JITTERED)
        self._critic_steps, self._generator_steps = critic_steps, generator_steps
        self._pairs, self._spread = max(1, generator_batch // 2), spread
        self._seed, self._device = seed, device
        # Recent queries and their answers, to learn from again.
        self._images = torch.zeros(memory * batch, *shape, device=device)
        self._asked = torch.zeros(memory * batch, dtype=torch.int64, device=device)
        self._answers = torch.zeros(memory * batch, device=device)
        self._known = 0

    def generate(self, step: int) -> Fakes:
        """Return images to ask the teachers about.

        Classes follow each other in turn. Each image is moved a little, at random, along low-frequency cosines.
        """
        random = streams.generator(self._seed, "fakes", step)
        z = draw_latent(self._batch, self.generator.architecture, random).to(self._device)
        first = int(torch.randint(self._classes, (), generator=random))
        labels = (first + torch.arange(self._batch, device=self._device)) % self._classes
        with torch.no_grad():
            images = self.generator.train()(z, labels)
            move = self._basis.inverse(torch.randn(self._batch, self._basis.size, generator=random))
            images = (images + self._jitter * move.to(self._device)).clamp(0, 1)
        return Fakes(images=images, labels=labels, step=step)

    def learn(self, fakes: Fakes, released: Released) -> None:
        """Train the critic on the answers, then the generator on the critic."""
        if not isinstance(released, Released):
            raise TypeError("the student learns from released values only")
        self._remember(fakes, self._targets(released))
        random = streams.generator(self._seed, "learning", fakes.step)
        critic = self._critic.module
        for _ in range(self._critic_steps):
            some = torch.randint(self._known, (self._batch,), generator=random).to(self._device)
            says = critic(self._images[some], self._asked[some])
            # Noisy answers may lie outside [0, 1]; the slope of this loss is still sigmoid(says) − answer.
            self._critic.step((F.softplus(says) - self._answers[some] * says).mean())
        for _ in range(self._generator_steps):
            z = draw_latent(2 * self._pairs, self.generator.architecture, random).to(self._device)
            labels = torch.randint(self._classes, (self._pairs,), generator=random).repeat(2).to(self._device)
            images = self.generator.train()(z, labels)
            loss = F.softplus(-critic(images, labels)).mean()
            self._student.step(loss + self._spread * _sameness(images, z))

    def averaged(self) -> Generator:
        """Return the generator to release, whose weights are an average over the last steps."""
        return self._student.averaged()

    def _targets(self, released: Released) -> Tensor:
        """Return the critic's targets [m]: 1 for real and 0 for fake by majority, or the share of votes for real."""
        fake, real = torch.from_numpy(released.value).to(torch.float32).unbind(dim=1)
        if self._labels == "majority":
            return (real > fake).to(torch.float32)
        return 0.5 + (real - fake) / (2 * self._teachers)

    def _remember(self, fakes: Fakes, answers: Tensor) -> None:
        start = fakes.step * self._batch % len(self._images)
        place = slice(start, start + self._batch)
        self._images[place], self._asked[place] = fakes.images, fakes.labels
        self._answers[place] = answers.to(self._device)
        self._known = min(len(self._images), (fakes.step + 1) * self._batch)

    def state(self) -> dict[str, Tensor]:
        parts = {"critic": self._critic, "generator": self._student}
        state = {f"{part}.{name}": value for part, learner in parts.items() for name, value in learner.state().items()}
        memory = {"images": self._images, "asked": self._asked, "answers": self._answers}
        return state | memory | {"known": torch.tensor(self._known)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for part, learner in (("critic", self._critic), ("generator", self._student)):
            prefix = f"{part}."
            learner.load_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        for memory, name in ((self._images, "images"), (self._asked, "asked"), (self._answers, "answers")):
            memory.copy_(state[name])
        self._known = int(state["known"])


def _sameness(images: Tensor, z: Tensor) -> Tensor:
    """Return the inverse of the distance of images relative to that of their latents (Mao et al. 2019).

    The two halves of the batch have the same labels and are compared in pairs.
    """
    one, other = images.chunk(2)
    first, second = z.chunk(2)
    apart = (one - other).abs().mean() / (first - second).abs().mean()
    return 1 / (apart + 1e-3)


JITTERED = 64  # number of cosines along which images are moved before teachers are asked
