"""Clipping of the gradients of single images (GS-WGAN, Section 4): a teacher's row is all of them together."""

import math

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum, Contributions, enforce, sum_bounded


def clip_images(gradients: Tensor, *, clip: float, teacher: int) -> BoundedSum:
    """Return one teacher's row, in which the gradient of every image is clipped to norm `clip`.

    The norm of the whole row is at most clip·√images.

    Args:
        gradients: [images, d].
        clip: Bound on the norm of an image's gradient.
        teacher: The teacher's number.
    """
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
