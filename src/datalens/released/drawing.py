"""Draw labels and images from a released generator, and the picture of a release."""

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image

from datalens.data.schema import Schema
from datalens.progress import LONG, bar, duration, say
from datalens.public import streams
from datalens.public.threads import side_by_side
from datalens.released.generator import Generator
from datalens.released.moments import PIECE, MomentModel
from datalens.released.synthetic import grid
from datalens.released.weights import AnyGenerator


def draw_picture(generator: AnyGenerator, schema: Schema, *, shown: bool = True) -> Image.Image:
    """Draw `samples.png`: ten images of each of the first ten classes, from seed 0. `shown`: with a progress bar."""
    rows = min(10, len(schema.classes))
    return grid(*draw(generator, count=10 * rows, seed=0, classes=rows, balanced=True, shown=shown), per_class=10)


def draw(
    generator: AnyGenerator,
    *,
    count: int,
    seed: int,
    classes: int,
    balanced: bool = False,
    among: list[int] | None = None,
    shown: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images and labels; the same arguments give the same images on the same kind of device.

    Args:
        generator: the released generator.
        count: the number of images.
        seed: the seed of labels and images.
        classes: draw from the first so many classes.
        balanced: draw equally often from each class; otherwise in proportion to the released counts, if there are any.
        among: draw from these classes only.
        shown: show a progress bar.

    Returns:
        uint8 images [n, h, w, c] and labels [n]. Classes that the release has no data about are left out.
    """
    random = streams.generator(seed, "sample")
    known, sizes = known_classes(generator, classes), None
    if not isinstance(generator, Generator):
        sizes = generator.sizes[torch.isin(generator.present, known)]
    if among is not None:
        wanted = torch.isin(known, torch.tensor(among))
        known, sizes = known[wanted], None if sizes is None else sizes[wanted]
    if balanced or sizes is None:
        labels = known[torch.arange(count) % len(known)]
    else:
        labels = known[in_proportion(sizes.to(torch.float64), count)]
    _say_how_long(generator, labels)
    parts = []
    with torch.no_grad(), bar("sampling", count, shown=shown) as (progress, task):
        for images in _batches(generator, labels.split(1000), random):  # [n, c, h, w]
            parts.append((images.cpu() * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
            progress.advance(task, len(images))
    return torch.cat(parts).numpy(), labels.numpy()


def _batches(generator: AnyGenerator, parts: Sequence[torch.Tensor], random: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield the images of each part of the labels."""
    if isinstance(generator, MomentModel):
        return generator.batches(parts, random)
    return (generator.images(part, random) for part in parts)


TIMED = 64  # images that are timed, at most
WARM = 8  # images that are drawn before: the first ones take many times as long


def _say_how_long(generator: AnyGenerator, labels: torch.Tensor) -> None:
    """Say how long drawing takes if that is long, from a timed part, whose images are thrown away."""
    seconds = _timed(generator, labels[:WARM]) * len(labels) / WARM
    if len(labels) < 2 * WARM or seconds < LONG:
        return
    few = labels[: min(TIMED, len(labels) // WARM)]
    seconds = _timed(generator, few) * len(labels) / len(few)
    if isinstance(generator, MomentModel) and generator.maps.device.type == "cpu":
        seconds /= min(side_by_side(), -(-len(labels) // PIECE))  # so few images are drawn by one of the threads
    if seconds > LONG:
        say(f"sampling {len(labels)} images takes about {duration(seconds)}, by {len(few)} timed ones")


def _timed(generator: AnyGenerator, labels: torch.Tensor) -> float:
    """Return the seconds of drawing images, which are thrown away."""
    began = time.monotonic()
    with torch.no_grad():
        generator.images(labels, streams.generator(0, "timed")).cpu()
    return time.monotonic() - began


def known_classes(generator: AnyGenerator, classes: int) -> torch.Tensor:
    """Return which of the first `classes` classes the release has data about; if none, all classes with data."""
    if isinstance(generator, Generator):
        return torch.arange(classes)
    among = generator.present < classes
    return generator.present[among] if bool(among.any()) else generator.present


def in_proportion(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` class numbers, each in proportion to its size to within a few, and well mixed at any length."""
    golden = (math.sqrt(5.0) - 1) / 2  # its multiples modulo 1 fill [0, 1) evenly
    places = (torch.arange(count, dtype=torch.float64) + 0.5) * golden % 1.0
    ends = sizes.cumsum(0) / sizes.sum()
    return torch.searchsorted(ends, places, right=True).clamp(max=len(sizes) - 1)
