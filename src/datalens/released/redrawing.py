"""Check that a file of synthetic images is what the generator of a release draws: draw it again, and compare."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from datalens.errors import DatalensError
from datalens.released.drawing import draw
from datalens.released.extras import extras
from datalens.released.loading import load
from datalens.released.papers import NAMES
from datalens.released.synthetic import SyntheticDataset, beside, nearly, papers_of
from datalens.released.weights import load_generator

_MOST_BYTES = 2**22  # of a paper: no real one is as long
FIELDS = {"seed", "count", "balanced", "classes", "device"}


def check_samples(release: Path, samples: Path, certificate: dict[str, Any]) -> list[str]:
    """Return what is wrong with a file that `datalens sample` wrote.

    Images drawn on another kind of machine differ in last bits; `nearly` defines how much they may differ.

    Args:
        release: a release that was verified.
        samples: the file or folder of synthetic images.
        certificate: the certificate of the release.

    Raises:
        DatalensError: it is not a synthetic data set.
    """
    dataset = load(samples)
    wrong = [f"{samples.name} holds something besides synthetic images: {name}" for name in extras(samples)[:3]]
    if dataset.certificate != certificate:
        return [*wrong, f"{samples.name} carries another certificate than the release"]
    if dataset.drawn is None:
        return [
            *wrong,
            f"{samples.name} does not state how it was drawn (datalens 0.1.0 did not write it): draw it again",
        ]
    generator, names = load_generator(release)
    try:
        arguments = _draw_arguments(dataset.drawn, classes=len(names), count=len(dataset))
        images, labels = draw(generator, classes=len(names), **arguments)
    except (DatalensError, ValueError, TypeError, OverflowError, RuntimeError, IndexError) as error:
        return [*wrong, f"{samples.name} states a way of drawing that cannot be repeated ({type(error).__name__})"]
    if dataset.classes != names or not np.array_equal(dataset.labels, labels) or not nearly(dataset.images, images):
        return [*wrong, f"{samples.name} is not what the generator draws with that seed"]
    return wrong + _papers_problems(samples, dataclasses.replace(dataset, certificate=certificate, verified=True))


def _papers_problems(samples: Path, dataset: SyntheticDataset) -> list[str]:
    """Return which papers of images do not follow from their certificate. Any of them may be missing.

    Args:
        samples: the file or folder.
        dataset: what it holds; its certificate was verified.
    """
    expected, wrong = papers_of(dataset, samples), []
    places = {name: samples / name for name in NAMES} if samples.is_dir() else beside(samples)
    for name, place in places.items():
        if not place.exists() and not place.is_symlink():
            continue
        same = place.is_file() and not place.is_symlink() and place.stat().st_size < _MOST_BYTES
        if not same or place.read_bytes() != expected.get(name, "").encode():
            wrong.append(
                f"{place.name} is not what this version of datalens writes about these images: remove it, or draw them "
                "again"
            )
    return wrong


def _draw_arguments(drawn: dict[str, Any], *, classes: int, count: int) -> dict[str, Any]:
    """Return the arguments of `draw`, from JSON that anybody may have edited."""
    if set(drawn) != FIELDS or type(drawn["seed"]) is not int or type(drawn["balanced"]) is not bool:
        raise ValueError("fields are missing, unknown or of the wrong type")
    if drawn["count"] != count or drawn["device"] not in ("cpu", "cuda"):
        raise ValueError("the number of images or the device is wrong")
    among = drawn["classes"]
    if among is not None and not all(type(number) is int and 0 <= number < classes for number in among):
        raise ValueError("there is no such class")
    return {"seed": drawn["seed"], "count": count, "balanced": drawn["balanced"], "among": among}
