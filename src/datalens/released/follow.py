"""Update a generator along released gradients of its images."""

import torch
from torch import Tensor

from datalens.privacy.released import Released
from datalens.public.learner import Learner


def follow(student: Learner, images: Tensor, released: Released) -> None:
    """Take one step of the student that moves each image along its released gradient [images, d]."""
    if not isinstance(released, Released):
        raise TypeError("a generator follows released gradients only")
    direction = torch.from_numpy(released.value).to(images).view_as(images)
    student.step(-(images * direction).sum() / len(images))
