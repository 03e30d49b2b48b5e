"""Gradients of single images, each clipped to a norm (GS-WGAN, Section 4): a teacher's row is all of them."""

import math

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum, Contributions, enforce, sum_bounded


def clip_images(gradients: Tensor, *, clip: float, teacher: int) -> BoundedSum:
    """[images, d] → one teacher's row: every image's gradient at most `clip` long, together clip·√images."""
    clipped = enforce(gradients.flatten(1), clip)
    bound = clip * math.sqrt(len(clipped)) * (1 + 1e-9)  # room for rounding
    row = Contributions(
        rows=clipped.unsqueeze(0),
        l2_bound=bound,
        diameter=2 * bound,
        row_unit="teacher",
        units=torch.tensor([teacher]),
    )
    return sum_bounded([row])
