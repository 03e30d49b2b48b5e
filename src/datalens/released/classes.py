"""Test whether a generator uses its labels: the distance between class means, relative to the spread within a class.

Everything is computed from the generator's own images, so it is post-processing and costs no privacy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datalens.released.generator import Generator

PER_CLASS = 40  # images drawn of each class
MOST_CLASSES = 10  # only the first classes are measured: a hundred would cost more than a step of the student
EVERY = 5  # steps between two measurements
FEWEST_STEPS = 20  # steps after which a run can be expected to have learned something
# Below this ratio of the two distances the generator ignores its labels. Measured on digits: 0.0 to 0.3 where labels
# did not reach the votes, over 1 where they were learned; on MNIST 0.1 and 0.8.
IGNORED = 0.3
COLLAPSED = 0.01  # root mean square difference between images and their mean, as a part of a pixel's range


@dataclass(frozen=True, kw_only=True)
class ClassSpread:
    """Root mean square distances, per pixel, of images in [0, 1]."""

    between: float  # between two class means, minus the expected contribution of sampling noise
    within: float  # between an image and its class mean

    @property
    def ratio(self) -> float:
        return self.between / self.within if self.within else math.inf if self.between else 0.0


def class_spread(images: Tensor, labels: Tensor) -> ClassSpread:
    """Measure images [n, …] with labels [n]; every label must occur at least twice.

    Random labels give a `between` of about zero: the expected squared distance of two means of k images with variance
    w² is w²·2/k, and it is subtracted.
    """
    groups = [images[labels == label].flatten(1).double() for label in labels.unique()]
    means = torch.stack([group.mean(dim=0) for group in groups])
    variances = torch.stack([group.var(dim=0, correction=1).mean() for group in groups])  # [classes]
    chance = torch.stack([variance / len(group) for variance, group in zip(variances, groups, strict=True)]).mean()
    between = means.var(dim=0, correction=1).mean() - chance if len(groups) > 1 else torch.zeros(())
    return ClassSpread(between=math.sqrt(2 * max(float(between), 0.0)), within=math.sqrt(float(variances.mean())))


def spread_of(generator: Generator, *, seed: int) -> ClassSpread:
    """Measure images of a generator in its present state, which is not changed."""
    classes = min(generator.architecture.classes, MOST_CLASSES)
    labels = torch.arange(classes).repeat_interleave(PER_CLASS)
    training = generator.training
    generator.eval()
    with torch.no_grad():
        images = generator.images(labels, torch.Generator().manual_seed(seed)).cpu()
    generator.train(training)
    return class_spread(images, labels)


def trouble(spread: ClassSpread, *, classes: int) -> str | None:
    """Return in words what is wrong with a student that should have learned by now, or None."""
    if spread.within < COLLAPSED and spread.between < COLLAPSED:
        return "the student's images have become all alike: it has collapsed"
    if classes > 1 and spread.ratio < IGNORED:
        return (
            "the student ignores its labels: images of two classes differ no more than images of one class do "
            f"({spread.between:.3f} between class means, {spread.within:.3f} within a class)"
        )
    return None
