"""Ballots of teachers about synthetic images: one answer to every query, or none, each a function of one teacher."""

import torch
from torch import Tensor

from datalens.bounded.contributions import Ballots, Gradients, Scores

FAKE, REAL = 0, 1


def real_or_fake(scores: Scores, labels: Tensor, *, relative: bool) -> Ballots:
    """Return the teachers' ballots on whether each image is real (logit above 0). There is one query per image.

    Args:
        scores: Logits; NaN for no answer.
        labels: [m] labels of the images.
        relative: Compare a logit with the same teacher's mean over the batch's images of the same label, instead of 0.
            Then teachers that recognise every synthetic image still give informative answers.
    """
    values = scores.values  # [teachers, m]
    against = torch.zeros_like(values)
    for label in labels.unique() if relative else ():
        alike = labels == label
        against[:, alike] = values[:, alike].mean(dim=1, keepdim=True)
    answers = torch.where(values > against, REAL, FAKE)
    known = values.isfinite() & against.isfinite()
    return Ballots(teachers=scores.teachers, choices=torch.where(known, answers, -1))


def binned(gradients: Gradients, projection: Tensor, *, bins: int) -> Ballots:
    """Return ballots on the bins of projected gradients (G-PATE, Algorithm 2): [teachers, m·p].

    There is one query for every image and projected coordinate. An image's projected coordinates are divided by the
    largest of their magnitudes, and the answer is the number of the bin of [−1, 1] that a coordinate lies in. A
    gradient with NaN or infinity, or of zeros only, gives no answer.

    Args:
        gradients: The teachers' gradients.
        projection: [d, p], public.
        bins: Number of equal parts of [−1, 1].
    """
    values = gradients.values  # [teachers, m, d]
    n = len(values)
    twice = values.expand(2, -1, -1) if n == 1 else values  # a batch of one product is rounded differently
    projected = torch.bmm(twice, projection.to(values).expand(len(twice), -1, -1))[:n]
    largest = projected.abs().amax(dim=-1, keepdim=True)
    known = (largest > 0) & largest.isfinite()  # both are false for NaN
    place = (projected / torch.where(known, largest, 1.0) + 1) * (bins / 2)
    place = torch.where(known, place.floor().clamp(0, bins - 1), -1.0)
    return Ballots(teachers=gradients.teachers, choices=place.to(torch.int64).flatten(1))
