"""Write a release folder, and sample from it. No pickle is written or loaded."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.pages import REPORT
from datalens.plans.base import Settings
from datalens.privacy.ledger import Ledger
from datalens.public import streams
from datalens.released import certificate as certificates
from datalens.released import report
from datalens.released.classifier import Classifier
from datalens.released.drawing import draw, draw_picture, known_classes
from datalens.released.generator import Generator, recalibrated
from datalens.released.publication import LEDGER, publication_of
from datalens.released.synthetic import SyntheticDataset
from datalens.released.verification import verified
from datalens.released.weights import AnyGenerator, load_classifier, load_generator, save_weights

__all__ = ["AnyGenerator", "load_classifier", "load_generator"]  # re-exported from `weights`


def write_release(
    run: Path,
    model: "AnyGenerator | Classifier",
    *,
    settings: Settings,
    schema: Schema,
    ledger: Ledger,
    completed: int | None = None,
    answered: int | None = None,
) -> Path:
    """Write the release of a run to a temporary folder, then rename it to `release/`.

    Args:
        run: the folder of the run.
        model: the trained model. For a classifier, no picture is written.
        settings: the settings of the run.
        schema: the public facts about the data set.
        ledger: the ledger of the run.
        completed: number of steps that the model learned from; by default all planned steps. `verify` looks for a
            charge for each.
        answered: number of queries that were answered, for methods that charge for answers separately.

    Returns:
        The path of the release folder.
    """
    if isinstance(model, Generator):
        model = recalibrated(model, streams.generator(settings.seed, "batch norm"))
    counts = {"completed": settings.steps_planned if completed is None else completed, "answered": answered}
    picture = None if isinstance(model, Classifier) else draw_picture(model, schema)

    def fill(draft: Path) -> None:
        weights = certificates.MODEL if picture is None else certificates.WEIGHTS
        save_weights(draft / weights, model, schema.classes, **counts)
        if picture is not None:
            picture.save(draft / certificates.PICTURE)

    return write_folder(run, fill, settings=settings, schema=schema, ledger=ledger)


def write_folder(
    run: Path, fill: Callable[[Path], None], *, settings: Settings, schema: Schema, ledger: Ledger
) -> Path:
    """Write a release folder with the files that `fill` writes, the ledger and the certificate; all of it, or nothing.

    Args:
        fill: called with the path of the folder, to write the model and its picture.
    """
    draft, target, old = run / "release.new", run / "release", run / "release.old"
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    fill(draft)
    shutil.copyfile(run / "ledger.jsonl", draft / certificates.LEDGER)
    weights = next(draft / name for name in (certificates.WEIGHTS, certificates.MODEL) if (draft / name).exists())
    published = publication_of(run, certificates.file_hash(weights), schema)
    if published is not None:
        shutil.copyfile(published[1], draft / LEDGER)
    certificate = certificates.make_certificate(
        settings=settings,
        schema=schema,
        ledger=ledger,
        sha256=certificates.release_hashes(draft),
        published=None if published is None else published[0],
    )
    (draft / certificates.PAGE).write_bytes(certificates.page_bytes(certificate))
    (draft / certificates.CERTIFICATE).write_bytes(certificates.certificate_bytes(certificate))
    (draft / REPORT).write_bytes(report.page(draft))
    for file in draft.iterdir():
        file.chmod((draft / certificates.CERTIFICATE).stat().st_mode)  # safetensors writes weights with mode 0600
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    if target.exists():
        os.replace(target, old)
    os.replace(draft, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def write_again(run: Path, *, settings: Settings, schema: Schema, ledger: Ledger) -> Path:
    """Write the release of a run again, with the same model and picture; a signature is left out.

    Args:
        run: the folder of the run.
        settings: the settings of the run.
        schema: the public facts about the data set.
        ledger: the ledger of the run.
    """

    def fill(draft: Path) -> None:
        for name in (certificates.WEIGHTS, certificates.MODEL, certificates.PICTURE):
            if (run / "release" / name).exists():
                shutil.copyfile(run / "release" / name, draft / name)

    return write_folder(run, fill, settings=settings, schema=schema, ledger=ledger)


def sample(
    release: Path,
    *,
    count: int,
    seed: int,
    balanced: bool = False,
    labels: Sequence[int | str] | None = None,
    device: torch.device | str = "cpu",
) -> SyntheticDataset:
    """Draw synthetic images from a release. The same seed gives the same images on the same kind of device.

    Args:
        release: the release folder; its certificate is verified first.
        count: the number of images.
        seed: the seed of labels and images.
        balanced: draw equally often from each class. By default classes are drawn in proportion to their released
            counts, where a release has counts.
        labels: draw from these classes only, by name or number.
        device: where to compute.

    Raises:
        TamperedError: the certificate does not stand.
        DatalensError: the folder is no release of a generator, or `count` or `labels` are invalid.
    """
    if count < 1:
        raise DatalensError(f"--count must be at least 1, not {count}")
    if certificates.weights_of(certificates.read_certificate(release)) == certificates.MODEL:
        raise DatalensError(
            f"{release} holds a classifier, which makes no images: sample from a run of `datalens train`"
        )
    certificate = verified(release)  # it is stored with the images, and printed
    generator, names = load_generator(release)
    among = None if labels is None else numbers_of(labels, names)
    available = known_classes(generator, len(names)).tolist()
    if missing := [names[number] for number in among or () if number not in available]:
        raise DatalensError(
            f"there are no images of class {missing[0]}: this release's budget was too small to learn anything about it"
        )
    images, drawn_labels = draw(
        generator.to(device), count=count, seed=seed, classes=len(names), balanced=balanced, among=among
    )
    drawn = {"seed": seed, "count": count, "balanced": balanced, "classes": among, "device": torch.device(device).type}
    return SyntheticDataset(images=images, labels=drawn_labels, classes=names, certificate=certificate, drawn=drawn)


def numbers_of(labels: Sequence[int | str], names: tuple[str, ...]) -> list[int]:
    """Return the numbers of classes given by name or by number: each once, in the order of the data set.

    Raises:
        DatalensError: a label is neither, or there are no labels.
    """
    numbers = {str(number): number for number in range(len(names))} | {name: i for i, name in enumerate(names)}
    unknown = [str(label) for label in labels if str(label) not in numbers]
    if unknown or not len(labels):
        some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise DatalensError(f"--class {' '.join(unknown)} is none of the {len(names)} classes: {some}")
    return sorted({numbers[str(label)] for label in labels})
