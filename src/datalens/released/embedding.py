"""Fit a generator to a released mean embedding. This is post-processing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.progress import bar
from datalens.public import streams
from datalens.public.fourier import Fourier
from datalens.public.learner import Learner
from datalens.released.generator import Generator, draw_latent

PRESENT = 4.0  # a class counts as present if its noisy count is this many standard deviations of noise above zero


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Mean features of each class, as released. A class that seems to have no records has mean zero."""

    means: Tensor  # [classes, size]
    present: Tensor  # [classes] bool: whether a class seems to have records


def read_embedding(released: Released, *, grid: int, counted: int) -> Embedding:
    """Return the mean embedding in a released sum of rows.

    Args:
        released: sums of rows [classes, size + 1] on the integer grid; the last column holds counts.
        grid: the norm of a whole row.
        counted: what a record adds to the column of counts.
    """
    if not isinstance(released, Released):
        raise TypeError("an embedding is read from released values only")
    value = torch.from_numpy(released.value.astype("float64"))
    room = int((grid**2 - counted**2) ** 0.5)
    counts = value[:, -1:] / counted
    present = counts > max(1.0, PRESENT * released.event.sigma / counted)
    means = torch.where(present, value[:, :-1] / room / counts.clamp(min=1.0), 0.0)
    return Embedding(means=means.to(torch.float32), present=present.squeeze(1))


def fit(
    generator: Generator, embedding: Embedding, fourier: Fourier, *, steps: int, batch: int, rate: float, seed: int
) -> Generator:
    """Minimise the squared distance between mean embeddings (MMD) of each class, over `batch` images of each class."""
    device = next(generator.parameters()).device
    means, present = embedding.means.to(device), embedding.present.to(device)
    learner = Learner(generator, rate=rate, betas=(0.9, 0.999))
    labels = torch.arange(len(means), device=device).repeat_interleave(batch)
    with bar("generator", steps) as (progress, task):
        for step in range(steps):
            learner.rate(rate * (1 + math.cos(math.pi * step / steps)) / 2)
            random = streams.generator(seed, "fakes", step)
            images = generator(draw_latent(len(labels), generator.architecture, random).to(device), labels)
            sums = fourier.features(images).unflatten(0, (len(means), batch)).sum(dim=1)
            # Leave out the pairs of an image with itself (features have norm 1), which bias the estimate.
            own = (sums.square().sum(dim=1) - batch) / (batch * (batch - 1))
            distance = own - 2 * (sums * means).sum(dim=1) / batch + means.square().sum(dim=1)
            learner.step(distance[present].sum())
            progress.advance(task)
    return generator
