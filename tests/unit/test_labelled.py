"""PATE-GAN's student: what keeps its images apart, and which weights it releases."""

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import Ballots, count_ballots
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import LaplaceVote
from datalens.privacy.noise import LaplaceNoise
from datalens.privacy.released import Released
from datalens.public.critic import Critic
from datalens.released.generator import draw_latent
from datalens.released.labelled import CriticStudent, _sameness

SHAPE, LABELS, STEPS = (1, 8, 8), 8, 30


def student(*, spread: float = 0.0, average: float = 0.0) -> CriticStudent:
    return CriticStudent(
        SHAPE, 2, Critic(SHAPE, 2, width=4), teachers=4, labels="counts", batch=LABELS, jitter=0.1,
        memory=2, latent=4, critic_steps=1, critic_rate=1e-3, generator_steps=2, generator_batch=8,
        generator_rate=3e-3, average=average, spread=spread, seed=0, device=torch.device("cpu"),
    )  # fmt: skip


def answer(step: int) -> Released:
    votes = torch.ones(4, LABELS, dtype=torch.int64)
    ledger = Ledger.in_memory(Budget(epsilon=1e6, delta=1e-5, relation="add-remove", accountant="rdp"))
    mechanism = LaplaceVote(noise=LaplaceNoise(4.0, seed=step))
    return mechanism.release(
        count_ballots([Ballots(teachers=torch.arange(4), choices=votes)], answers=2), ledger, step=step
    )


def trained(**how: float) -> CriticStudent:
    made = student(**how)
    for step in range(STEPS):
        made.learn(made.generate(step), answer(step))
    return made


def apart(made: CriticStudent) -> float:
    """How far apart images of one label are, for latents that differ."""
    random = torch.Generator().manual_seed(1)
    z = draw_latent(64, made.generator.architecture, random)
    with torch.no_grad():
        images = made.generator.train()(z, torch.zeros(64, dtype=torch.int64))
    return float((images[:32] - images[32:]).abs().mean())


def test_images_of_one_label_are_kept_apart() -> None:
    assert apart(trained(spread=0.03)) > 1.5 * apart(trained())


def test_sameness_is_that_of_images_by_that_of_latents() -> None:
    images = torch.cat([torch.zeros(3, *SHAPE), torch.full((3, *SHAPE), 0.25)])
    z = torch.cat([torch.zeros(3, 4), torch.full((3, 4), 0.5)])
    assert float(_sameness(images, z)) == pytest.approx(1 / (0.5 + 1e-3))
    assert float(_sameness(torch.zeros_like(images), z)) == pytest.approx(1000)


def test_what_is_released_is_the_average_of_the_last_weights() -> None:
    plain, smooth = trained(), trained(average=0.9)
    last = [value.detach().numpy() for value in plain.generator.parameters()]
    assert all(np.array_equal(a, b.detach()) for a, b in zip(last, plain.averaged().parameters(), strict=True))
    assert all(np.array_equal(a, b.detach()) for a, b in zip(last, smooth.generator.parameters(), strict=True))
    assert not all(np.array_equal(a, b.detach()) for a, b in zip(last, smooth.averaged().parameters(), strict=True))
