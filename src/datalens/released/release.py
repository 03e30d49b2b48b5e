"""The release folder: writing it, and sampling from it. No pickle is written or loaded."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from datalens import streams
from datalens.config import Settings
from datalens.datasets.schema import Schema
from datalens.errors import DatalensError
from datalens.privacy.ledger import Ledger
from datalens.progress import bar
from datalens.released import certificate as certificates
from datalens.released.generator import Architecture, Generator, draw_latent, recalibrated
from datalens.released.synthetic import SyntheticDataset, grid


def write_release(run: Path, generator: Generator, *, settings: Settings, schema: Schema, ledger: Ledger) -> Path:
    """Write `release/` whole beside its place, then swap it in."""
    draft, target, old = run / "release.new", run / "release", run / "release.old"
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    architecture = json.dumps(generator.architecture.as_dict())
    generator = recalibrated(generator, streams.generator(settings.seed, "batch norm"))
    weights = {name: value.detach().cpu().contiguous() for name, value in generator.state_dict().items()}
    metadata = {"architecture": architecture, "classes": json.dumps(schema.classes)}
    save_file(weights, draft / certificates.WEIGHTS, metadata=metadata)
    shutil.copyfile(run / "ledger.jsonl", draft / certificates.LEDGER)
    certificate = certificates.make_certificate(
        settings=settings, schema=schema, ledger=ledger, sha256=certificates.release_hashes(draft)
    )
    (draft / certificates.CERTIFICATE).write_text(
        json.dumps(certificate, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    per_class = 10
    shown = sample(draft, count=per_class * min(10, len(schema.classes)), seed=0, classes=10)
    grid(shown.images, shown.labels, per_class=per_class).save(draft / certificates.PICTURE)
    for file in draft.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    if target.exists():
        os.replace(target, old)
    os.replace(draft, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def load_generator(release: Path) -> tuple[Generator, tuple[str, ...]]:
    """The generator and the names of its classes."""
    path = release / certificates.WEIGHTS
    if not path.is_file():
        raise DatalensError(f"{release} has no {certificates.WEIGHTS}: is the run finished? continue it with --resume")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            fields = json.loads(metadata["architecture"])
            classes = tuple(str(name) for name in json.loads(metadata["classes"]))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields |= {"shape": tuple(fields["shape"]), "widths": tuple(fields["widths"])}
        generator = Generator(Architecture(**fields))
        generator.load_state_dict(weights)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DatalensError(
            f"{path} is not a generator of ours ({type(error).__name__}): fetch the release again"
        ) from error
    return generator.eval(), classes


def sample(release: Path, *, count: int, seed: int, classes: int | None = None) -> SyntheticDataset:
    """`count` images, the classes evenly; the same seed gives the same images. `classes`: only the first so many."""
    if count < 1:
        raise DatalensError(f"--count must be at least 1, not {count}")
    generator, names = load_generator(release)
    random = streams.generator(seed, "sample")
    labels = torch.arange(count) % min(classes or len(names), len(names))
    parts = []
    with torch.no_grad(), bar("sampling", count) as (progress, task):
        for part in labels.split(1000):
            images = generator(draw_latent(len(part), generator.architecture, random), part)  # [n, c, h, w]
            parts.append((images * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
            progress.advance(task, len(part))
    return SyntheticDataset(
        images=torch.cat(parts).numpy(),
        labels=labels.numpy(),
        classes=names,
        certificate=certificates.read_certificate(release),
    )
