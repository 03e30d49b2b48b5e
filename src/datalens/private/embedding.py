"""The sums that DP-MERF releases with noise: class sums of random Fourier features, and counts."""

from collections.abc import Iterator

import torch

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.outer import Outer, sum_outer
from datalens.private.pool import Pool
from datalens.public.fourier import Fourier

CHUNK = 2048  # records at a time


def embed(pool: Pool, fourier: Fourier, *, classes: int, grid: int, counted: int) -> BoundedSum:
    """Return the class sums of features and a count: [classes, features + 1].

    A record's row has norm at most `grid` and is a function of that record alone.

    Args:
        pool: All records.
        fourier: The public random features.
        classes: Number of classes.
        grid: Bound on the norm of a row of integers, count included.
        counted: A record's entry in the count.
    """
    room = int((grid**2 - counted**2) ** 0.5)

    def rows() -> Iterator[Outer]:
        for images, labels in pool.chunks(CHUNK):
            features = fourier.whole(images.cpu(), grid=room)
            one = torch.full((len(features), 1), float(counted), dtype=torch.float64)
            yield Outer(slots=labels.cpu(), left=torch.ones_like(one), right=torch.cat([features, one], dim=1))

    return sum_outer(rows(), slots=classes, left_bound=1, right_bound=grid)
