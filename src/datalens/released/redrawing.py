"""Whether a file of synthetic images is what the generator of a release draws: it is drawn again, and compared."""

from pathlib import Path
from typing import Any

import numpy as np

from datalens.errors import DatalensError
from datalens.released.drawing import draw
from datalens.released.extras import extras
from datalens.released.loading import load
from datalens.released.synthetic import nearly
from datalens.released.weights import load_generator

FIELDS = {"seed", "count", "balanced", "classes", "device"}


def check_samples(release: Path, samples: Path, certificate: dict[str, Any]) -> list[str]:
    """Return what is wrong with a file that `datalens sample` wrote, beside a release whose certificate stands.

    Images drawn on another kind of machine differ in last bits; `nearly` says how much they may.

    Raises:
        DatalensError: it is not a synthetic data set at all.
    """
    dataset = load(samples)
    found = [f"{samples.name} holds something besides synthetic images: {name}" for name in extras(samples)[:3]]
    if dataset.certificate != certificate:
        return [*found, f"{samples.name} carries another certificate than the release"]
    if dataset.drawn is None:
        return [
            *found,
            f"{samples.name} does not say how it was drawn (datalens 0.1.0 did not write it): draw it again",
        ]
    generator, names = load_generator(release)
    try:
        asked = _asked(dataset.drawn, classes=len(names), count=len(dataset))
        images, labels = draw(generator, classes=len(names), **asked)
    except (DatalensError, ValueError, TypeError, OverflowError, RuntimeError, IndexError) as error:
        return [*found, f"{samples.name} was drawn in no way that can be repeated ({type(error).__name__})"]
    if dataset.classes != names or not np.array_equal(dataset.labels, labels) or not nearly(dataset.images, images):
        found.append(f"{samples.name} is not what the generator draws with that seed")
    return found


def _asked(drawn: dict[str, Any], *, classes: int, count: int) -> dict[str, Any]:
    """The arguments of `draw`, from JSON that anybody may have edited."""
    if set(drawn) != FIELDS or type(drawn["seed"]) is not int or type(drawn["balanced"]) is not bool:
        raise ValueError("fields are missing, or too many")
    if drawn["count"] != count or drawn["device"] not in ("cpu", "cuda"):
        raise ValueError("another number of images, or no device")
    among = drawn["classes"]
    if among is not None and not all(type(number) is int and 0 <= number < classes for number in among):
        raise ValueError("no classes")
    return {"seed": drawn["seed"], "count": count, "balanced": drawn["balanced"], "among": among}
