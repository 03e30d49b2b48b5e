"""Gradients of persons: one row per person, the mean over the person's images, bounded like a record's row."""

import dataclasses

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.norm_topk import NormTopK


def sum_persons(
    compress: NormTopK, gradients: list[Tensor], whose: Tensor, onto: BoundedSum | None = None
) -> BoundedSum:
    """Return the bounded sum of the persons' rows.

    A row is a function of that person's images alone. NaN in any of them makes this row zero, and no other.

    Args:
        compress: Bounds the rows.
        gradients: One [images, …] tensor per parameter.
        whose: [images] numbers of the persons, non-decreasing. All images of a person must be in this call.
        onto: The sum of other persons' rows, which is added.

    Raises:
        ValueError: an image has no person, or persons are not in order.
    """
    if whose.shape != gradients[0].shape[:1] or bool((whose[1:] < whose[:-1]).any()):
        raise ValueError("every image must have one person, and the images of a person must come together")
    _, place, images = torch.unique_consecutive(whose, return_inverse=True, return_counts=True)
    means = []
    for gradient in gradients:
        total = gradient.new_zeros(len(images), *gradient.shape[1:]).index_add(0, place, gradient)
        means.append(total / images.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype))
    return dataclasses.replace(compress.sum(means, onto), row_unit="person")
