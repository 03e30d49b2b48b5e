"""The real images for `datalens evaluate`, matched by class, and an estimate of how long it takes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data import formats
from datalens.data.own.reading import Reading
from datalens.data.records import Dataset, collect, draw
from datalens.errors import DatalensError, NoTestImages
from datalens.evaluate import measures
from datalens.evaluate.utility import step_seconds, training_seconds
from datalens.progress import LONG, counted, duration, say
from datalens.run import cluster
from datalens.run.cluster import if_asked as if_asked
from datalens.run.folder import read_config

# What --quick sets, and the most test images that it uses: under 30 s on two cores for images of 64x64.
QUICK = {"count": 800, "seeds": 1, "epochs": 8}
QUICK_TEST = 2000

Training = Callable[[int], Dataset]


def real_images(
    data: str, real_train: str | None, *, folder: Path | None, reading: Reading, run: Path, client: Any = None
) -> tuple[Dataset, Training | None]:
    """Return the test images, and a function that reads training images to compare with (None if there are none).

    Args:
        data: a data set with a test split, or a file of test images alone.
        real_train: where the training images are, if not in `data`.
        folder: of a named data set.
        reading: how own data is read.
        run: what is evaluated; if it is a run, all of what it was trained on is no test set.
        client: of a cluster, whose workers read and decode the images; None: this process does.

    Raises:
        DatalensError: there are no images to test on.
    """

    def load(where: str, split: str, most: int | None = None) -> Dataset:
        nominal = 1 if split == "train" and formats.is_own(where) else None  # required, and not used here
        records = formats.open_records(where, split, nominal_size=nominal, folder=folder, reading=reading)
        if client is None:
            return collect(records, most=most)
        pieces = cluster.pieces(client)
        parts = formats.cut(where, records.schema, pieces=pieces, folder=folder, reading=reading, split=split)
        return cluster.load(client, parts, most=most)

    def training(most: int) -> Dataset:
        return load(real_train or data, "train", most)

    try:
        return load(data, "test"), training
    except NoTestImages as error:
        if trained_on(run, Path(data)):
            raise DatalensError(f"{error}; the run was trained on all that is there") from None
    test = load(data, "train")
    say(f"all {counted(len(test.images), 'image')} of {data} are the test set: none may have been trained on")
    return test, None if real_train is None else training


def trained_on(run: Path, data: Path) -> bool:
    """Return whether a run was trained on this file or folder, or on the folder that it is in."""
    if not measures.is_run(run):
        return False
    trained = Path(read_config(run)["options"]["data"])
    trained = trained / "train" if (trained / "train").is_dir() else trained
    return trained.exists() and trained.resolve() in (data.resolve(), *data.resolve().parents)


def is_kept(run: Path, name: measures.Measure, *, quick: bool) -> bool:
    """Return whether a run keeps this result: a quick look does not replace a careful one."""
    if not measures.is_run(run):
        return False
    before = measures.read(run).get(measures.KEYS[name])
    careful = isinstance(before, dict) and not before.get("settings", {}).get("quick")
    return not (quick and careful)


def say_how_long(settings: measures.Settings, test: Dataset, device: str, *, careful: Callable[[float], float]) -> None:
    """Say about how long utility will take, from a timed step; after a quick look, how long a careful one takes.

    Args:
        careful: the time of a careful look, from that of a training step.
    """
    steps = [step_seconds(test.schema.shape, name, device=device) for name in settings.classifiers]
    if settings.quick:
        say(f"a careful look (without --quick) takes about {duration(careful(steps[0]))} on this machine")
        return
    epochs, held = settings.epochs, len(test.images)
    total = sum(
        (settings.seeds + 1) * training_seconds(step, images=size, test=held, epochs=epochs, tests=epochs)
        for step in steps
        for size in settings.sizes
    )
    if total > LONG:
        say(
            f"about {duration(total)}: {counted(settings.seeds, 'classifier')} on synthetic images and one on real "
            "ones, by a timed step (--quick is much quicker)"
        )


def part_of(test: Dataset, most: int) -> Dataset:
    """Return at most so many test images, drawn at random."""
    if len(test.images) <= most:
        return test
    chosen = draw(len(test.images), most, seed=0)
    return dataclasses.replace(test, images=test.images[chosen], labels=test.labels[chosen], ids=None)


def aligned(real: Dataset, classes: tuple[str, ...], where: str) -> Dataset:
    """Return real images with the labels of the synthetic set: classes are matched by their names.

    A file of test images may lack a class, or have its classes in another order. Where names differ, and there are as
    many classes, they are matched by their order, as those of named data sets are.

    Raises:
        DatalensError: a class of the real images is none of the synthetic set.
    """
    names = real.schema.classes
    if names == classes:
        return real
    unknown = [name for name in names if name not in classes]
    if not unknown:
        numbers = np.array([classes.index(name) for name in names], dtype=np.int64)
        return dataclasses.replace(real, labels=numbers[real.labels])
    if len(names) == len(classes):
        return real
    raise DatalensError(
        f"{where} has the class {unknown[0]!r}, and the synthetic images have {', '.join(classes)[:200]}: name the "
        "same --label, or give the classes these names with --class-names"
    )
