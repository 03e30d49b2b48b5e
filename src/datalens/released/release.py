"""The release folder: writing it, and sampling from it. No pickle is written or loaded."""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from datalens import streams
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError, TamperedError
from datalens.pages import REPORT
from datalens.privacy.ledger import Ledger
from datalens.progress import bar
from datalens.released import certificate as certificates
from datalens.released import report
from datalens.released.classifier import Classifier
from datalens.released.generator import Architecture, Generator, can_show, recalibrated
from datalens.released.moments import MomentModel, Start
from datalens.released.synthetic import SyntheticDataset, grid
from datalens.settings import AnySettings, SgdSettings
from datalens.texture import Texture

# Of a generator that is read: far above any that is written.
MOST_PIXELS, MOST_LAYERS, MOST_STEPS = 2**24, 12, 1000

AnyGenerator = Generator | MomentModel


def write_release(run: Path, generator: AnyGenerator, *, settings: AnySettings, schema: Schema, ledger: Ledger) -> Path:
    """Write `release/` whole beside its place, then swap it in."""
    if isinstance(generator, Generator):
        generator = recalibrated(generator, streams.generator(settings.seed, "batch norm"))
        described: dict[str, object] = {"architecture": generator.architecture.as_dict()}
        weights = {name: value.detach().cpu().contiguous() for name, value in generator.state_dict().items()}
    else:
        described = {"moments": {"shape": generator.start.shape, "steps": generator.steps}}
        weights = {name: value.contiguous() for name, value in generator.tensors().items()}
    # One key: safetensors writes several in no fixed order, and equal weights would hash differently.
    metadata = {"generator": json.dumps({**described, "classes": schema.classes})}
    rows = min(10, len(schema.classes))
    shown = draw(generator, count=10 * rows, seed=0, classes=rows, balanced=True)
    picture = grid(*shown, per_class=10)

    def fill(draft: Path) -> None:
        _save(weights, draft / certificates.WEIGHTS, metadata)
        picture.save(draft / certificates.PICTURE)

    return write_folder(run, fill, settings=settings, schema=schema, ledger=ledger)


def _save(weights: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(weights, path, metadata=metadata)
    except SafetensorError as error:  # also what it makes of a full disk
        raise DatalensError(f"cannot write {path} ({error}): free some space, then continue with --resume") from error


def write_model(run: Path, model: Classifier, *, settings: SgdSettings, schema: Schema, ledger: Ledger) -> Path:
    """The same for a classifier, in the place of a generator and its picture."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    metadata = {"classifier": json.dumps({**model.described(), "classes": schema.classes})}
    return write_folder(
        run,
        lambda draft: _save(weights, draft / certificates.MODEL, metadata),
        settings=settings,
        schema=schema,
        ledger=ledger,
    )


def write_folder(
    run: Path, fill: Callable[[Path], None], *, settings: AnySettings, schema: Schema, ledger: Ledger
) -> Path:
    """What `fill` puts there, the ledger and the certificate; whole, or not at all."""
    draft, target, old = run / "release.new", run / "release", run / "release.old"
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    fill(draft)
    shutil.copyfile(run / "ledger.jsonl", draft / certificates.LEDGER)
    certificate = certificates.make_certificate(
        settings=settings, schema=schema, ledger=ledger, sha256=certificates.release_hashes(draft)
    )
    (draft / certificates.PAGE).write_bytes(certificates.page_bytes(certificate))
    (draft / certificates.CERTIFICATE).write_bytes(certificates.certificate_bytes(certificate))
    (draft / REPORT).write_bytes(report.page(draft))
    for file in draft.iterdir():
        file.chmod((draft / certificates.CERTIFICATE).stat().st_mode)  # weights come as 0600
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    if target.exists():
        os.replace(target, old)
    os.replace(draft, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def load_classifier(release: Path) -> tuple[Classifier, tuple[str, ...]]:
    """A classifier that `datalens sgd` trained, and the names of its classes."""
    path = release / certificates.MODEL
    if not path.is_file():
        raise DatalensError(f"{release} has no {certificates.MODEL}: was it made by `datalens sgd`?")
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {})["classifier"])
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        names = tuple(str(name) for name in described.pop("classes"))
        shape = tuple(int(side) for side in described["shape"])
        if len(shape) not in (1, 3) or not 0 < math.prod(shape) <= MOST_PIXELS or not 0 < len(names) <= MOST_PIXELS:
            raise ValueError("no classifier of ours sees images like that")
        with torch.device("meta"):
            model = Classifier(shape=shape, classes=len(names), network=described["network"])
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise DatalensError(
            f"{path} is not a classifier of ours ({type(error).__name__}): fetch the release again"
        ) from error
    return model.eval(), names


def load_generator(release: Path) -> tuple[AnyGenerator, tuple[str, ...]]:
    """The generator and the names of its classes."""
    path = release / certificates.WEIGHTS
    if not path.is_file():
        raise DatalensError(f"{release} has no {certificates.WEIGHTS}: is the run finished? continue it with --resume")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            described = json.loads(metadata["generator"])
            classes = tuple(str(name) for name in described["classes"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if "moments" in described:
            return _rebuilt_moments(described["moments"], weights, len(classes)), classes
        fields = described["architecture"]
        fields |= {"shape": tuple(fields["shape"]), "widths": tuple(fields["widths"])}
        generator = _rebuilt(Architecture(**fields), weights)
        if len(classes) != generator.architecture.classes:
            raise ValueError("there must be a name for every class")
    except (
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise DatalensError(
            f"{path} is not a generator of ours ({type(error).__name__}): fetch the release again"
        ) from error
    return generator.eval(), classes


def _rebuilt(architecture: Architecture, weights: dict[str, torch.Tensor]) -> Generator:
    """The generator with these weights. Built without memory first: a description may name any size."""
    a = architecture
    if any(type(n) is not int for n in (*a.shape, *a.widths, a.classes, a.latent, a.dense, a.cosines)):
        raise ValueError("sizes are whole numbers")
    channels, height, width = a.shape
    pixels = channels * height * width
    if min(a.shape) < 1 or pixels > MOST_PIXELS or len(a.widths) > MOST_LAYERS:
        raise ValueError("no generator of ours makes images like that")
    if not can_show(a.shape, a.cosines):
        raise ValueError("no generator of ours shows so many cosines")
    with torch.device("meta"):
        generator = Generator(architecture)
    expected = {name: value.dtype for name, value in generator.state_dict().items()}
    # .clone(): a file's tensors may share memory with it
    weights = {name: value.to(expected.get(name)).clone() for name, value in weights.items()}
    generator.load_state_dict(weights, assign=True)
    return generator


def _rebuilt_moments(fields: dict[str, Any], weights: dict[str, torch.Tensor], classes: int) -> MomentModel:
    """The model with these tensors, each of the size the others make it."""
    channels, height, width = (int(side) for side in fields["shape"])
    shape, steps = (channels, height, width), int(fields["steps"])
    if channels > 4 or min(shape) < 1 or channels * height * width > MOST_PIXELS or not 0 <= steps <= MOST_STEPS:
        raise ValueError("no model of ours makes images like that")
    coordinates, texture = weights["means"].shape[1], Texture(shape).size if steps else 0
    head = weights["maps"].shape[-1]
    expected = {
        "means": (classes, coordinates),
        "factors": (classes, coordinates, coordinates),
        "centre": (texture,),
        "white": (texture, texture),
        "before": (classes, texture),
        "after": (classes, texture),
        "maps": (classes, head, head),
    }
    present = weights["present"]
    weights = {"sizes": torch.ones(len(present))} | weights  # the first releases had none: classes came evenly
    expected["sizes"] = (len(present),)
    if set(weights) != {*expected, "present"} or head > texture or coordinates > channels * height * width:
        raise ValueError("tensors are missing, or too many")
    if coordinates * channels * height * width > MOST_PIXELS * 8:  # of the basis that sampling will build
        raise ValueError("no model of ours makes images like that")
    if any(weights[name].shape != size or weights[name].dtype != torch.float32 for name, size in expected.items()):
        raise ValueError("a tensor has another size than the others make it")
    if present.dtype != torch.int64 or present.dim() != 1 or not len(present) or len(present) > classes:
        raise ValueError("it names no classes")
    if not 0 <= int(present.min()) <= int(present.max()) < classes:
        raise ValueError("it names classes it does not have")
    if not bool((weights["sizes"] > 0).all() and weights["sizes"].isfinite().all()):
        raise ValueError("it has classes without records")
    weights = {name: value.clone() for name, value in weights.items()}
    start = Start(shape=shape, means=weights.pop("means"), factors=weights.pop("factors"))
    return MomentModel(start=start, steps=steps, **weights)


def sample(
    release: Path,
    *,
    count: int,
    seed: int,
    balanced: bool = False,
    labels: Sequence[int | str] | None = None,
    device: torch.device | str = "cpu",
) -> SyntheticDataset:
    """`count` images; the same seed gives the same images on the same kind of device.

    - `balanced`: as many of each class; else as often as records of them were counted, where a release has counts.
    - `labels`: of these classes only, by name or number.
    """
    if count < 1:
        raise DatalensError(f"--count must be at least 1, not {count}")
    certificate = certificates.read_certificate(release)
    if not {"private", "statement"} <= set(certificate):
        raise DatalensError(f"{release / certificates.CERTIFICATE} has gaps: fetch the release again")
    if certificates.weights_of(certificate) == certificates.MODEL:
        raise DatalensError(
            f"{release} holds a classifier, which makes no images: sample from a run of `datalens train`"
        )
    weights = certificates.weights_of(certificate)
    if certificates.file_hash(release / weights) != certificate["sha256"].get(weights):
        raise TamperedError(
            f"{release / weights} is not the file the certificate was written for: `datalens verify` says more; fetch "
            "the release again"
        )
    generator, names = load_generator(release)
    among = None if labels is None else numbers_of(labels, names)
    there = known_classes(generator, len(names)).tolist()
    if missing := [names[number] for number in among or () if number not in there]:
        raise DatalensError(
            f"there are no images of class {missing[0]}: at the budget of this release nothing could be said of it"
        )
    images, found = draw(
        generator.to(device), count=count, seed=seed, classes=len(names), balanced=balanced, among=among
    )
    return SyntheticDataset(images=images, labels=found, classes=names, certificate=certificate)


def numbers_of(labels: Sequence[int | str], names: tuple[str, ...]) -> list[int]:
    """Classes by name, or else by number; each once, in the order of the data set."""
    numbers = {str(number): number for number in range(len(names))} | {name: i for i, name in enumerate(names)}
    unknown = [str(label) for label in labels if str(label) not in numbers]
    if unknown or not len(labels):
        some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise DatalensError(f"--class {' '.join(unknown)} is none of the {len(names)} classes: {some}")
    return sorted({numbers[str(label)] for label in labels})


def draw(
    generator: AnyGenerator,
    *,
    count: int,
    seed: int,
    classes: int,
    balanced: bool = False,
    among: list[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [n, h, w, c] and labels [n] of the first `classes` classes, or of those `among` them, as far as
    there is data of them.
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
    parts = []
    with torch.no_grad(), bar("sampling", count) as (progress, task):
        for part in labels.split(1000):
            images = generator.images(part, random).cpu()  # [n, c, h, w]
            parts.append((images * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
            progress.advance(task, len(part))
    return torch.cat(parts).numpy(), labels.numpy()


def known_classes(generator: AnyGenerator, classes: int) -> torch.Tensor:
    """Of the first `classes` classes those there is data of; all there are if that is none of them."""
    if isinstance(generator, Generator):
        return torch.arange(classes)
    among = generator.present < classes
    return generator.present[among] if bool(among.any()) else generator.present


def in_proportion(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers of classes, each as often as its size says, to within a few, well mixed at any length."""
    golden = (math.sqrt(5.0) - 1) / 2  # multiples of it fill [0, 1) evenly
    places = (torch.arange(count, dtype=torch.float64) + 0.5) * golden % 1.0
    ends = sizes.cumsum(0) / sizes.sum()
    return torch.searchsorted(ends, places, right=True).clamp(max=len(sizes) - 1)
