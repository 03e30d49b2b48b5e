"""What teachers say about fakes, as ballots: one answer to every query, or none. A ballot is a teacher's own affair."""

import torch
from torch import Tensor

from datalens.bounded.contributions import Ballots, Gradients, Scores

FAKE, REAL = 0, 1


def real_or_fake(scores: Scores, labels: Tensor, *, relative: bool) -> Ballots:
    """A query an image: does the teacher take it for real (logit above 0)?

    `relative`: is it more real than what the same teacher makes, on average, of the batch's images with this label?
    Teachers that see through every fake still have something to say then. NaN: no answer.
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
    """A query for every image and projected coordinate: in which of `bins` equal parts of [−1, 1] does it lie, by the
    largest of the image's projected coordinates? (G-PATE, Algorithm 2.) NaN, infinity or all zero: no answer.

    `projection` [d, p] is public. Answers are [teachers, m·p].
    """
    values = gradients.values  # [teachers, m, d]
    n = len(values)
    twice = values.expand(2, -1, -1) if n == 1 else values  # alone, a product is rounded otherwise
    projected = torch.bmm(twice, projection.to(values).expand(len(twice), -1, -1))[:n]
    largest = projected.abs().amax(dim=-1, keepdim=True)
    known = (largest > 0) & largest.isfinite()  # NaN is neither
    place = (projected / torch.where(known, largest, 1.0) + 1) * (bins / 2)
    place = torch.where(known, place.floor().clamp(0, bins - 1), -1.0)
    return Ballots(teachers=gradients.teachers, choices=place.to(torch.int64).flatten(1))
