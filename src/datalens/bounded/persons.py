"""Gradients of persons: the mean over each person's images, one row each, bounded as a record's would be."""

import dataclasses

import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.bounded.norm_topk import NormTopK


def sum_persons(
    compress: NormTopK, gradients: list[Tensor], whose: Tensor, onto: BoundedSum | None = None
) -> BoundedSum:
    """`gradients`: one [images, …] tensor per parameter. `whose`: [images], not falling; all of a person's are here.

    A row is a function of that person's images alone; NaN in any of them makes it zero, and no other.
    """
    if whose.shape != gradients[0].shape[:1] or bool((whose[1:] < whose[:-1]).any()):
        raise ValueError("every image has one person, and those of a person come together")
    _, place, images = torch.unique_consecutive(whose, return_inverse=True, return_counts=True)
    means = []
    for gradient in gradients:
        total = gradient.new_zeros(len(images), *gradient.shape[1:]).index_add(0, place, gradient)
        means.append(total / images.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype))
    return dataclasses.replace(compress.sum(means, onto), row_unit="person")
