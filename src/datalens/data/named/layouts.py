"""Data sets whose owners hand them out by agreement: read from a folder in which the user has put them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datalens.data.named import folders
from datalens.data.parquet import parquet_records
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import DatalensError

CELEBA_CROP = 148  # of 178 x 218, as usual for the aligned faces
SHARDS = "parquet files train*.parquet, val*.parquet and test*.parquet"


class Local(Protocol):
    """How a data set lies in a folder."""

    @property
    def family(self) -> str:
        """The folder at home that sets made of the same files share."""
        ...

    @property
    def files(self) -> str:
        """For people: what belongs into the folder."""
        ...

    def present(self, folder: Path) -> bool:
        """Whether anything of it is there at all; whether it is whole is found when it is read."""
        ...

    def records(self, folder: Path, schema: Schema, split: str) -> Records: ...


@dataclass(frozen=True, kw_only=True)
class Celeba:
    """CelebA by one attribute (has it not, has it) or by which one of several; from official files or shards."""

    attributes: tuple[str, ...]
    family: str = "celeba"
    files: str = (
        f"{folders.CELEBA_IMAGES}/, {folders.CELEBA_ATTRIBUTES} and {folders.CELEBA_SPLITS} (or {SHARDS} with columns "
        "image, male, black_hair, blond_hair, brown_hair)"
    )

    def present(self, folder: Path) -> bool:
        return bool(_shards(folder)) or any((folder / name).exists() for name in self._official())

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        how: dict[str, Any] = {"columns": self.attributes, "label": by_attributes, "crop": CELEBA_CROP}
        if any((folder / name).exists() for name in self._official()):
            return folders.celeba(folder, schema, split, **how)
        return parquet_records(shards_of(folder, split, self.files), schema, **how)

    @staticmethod
    def _official() -> Sequence[str]:
        return folders.CELEBA_IMAGES, folders.CELEBA_ATTRIBUTES, folders.CELEBA_SPLITS


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places365-Standard in its official layout; the classes of the schema are level-2 groups of its hierarchy."""

    images_each: int
    family: str = "places365"
    files: str = (
        f"the small images {folders.PLACES_TRAIN}/ and {folders.PLACES_VAL}/, {folders.PLACES_VAL_LIST}, "
        f"{folders.PLACES_CATEGORIES} and the hierarchy as {folders.PLACES_HIERARCHY!r}"
    )

    def present(self, folder: Path) -> bool:
        return any(folder.glob(f"{folders.PLACES_TRAIN}*")) or (folder / folders.PLACES_HIERARCHY).exists()

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        return folders.places(folder, schema, split, groups=schema.classes, images_each=self.images_each)


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Photographs of scenes in shards with a column `class`; those of the schema's classes are taken."""

    family: str = "scenes"
    files: str = "parquet files train*.parquet and test*.parquet with columns image and class"

    def present(self, folder: Path) -> bool:
        return bool(_shards(folder))

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        def label(columns: dict[str, np.ndarray]) -> np.ndarray:
            numbers = {name: number for number, name in enumerate(schema.classes)}
            return np.array([numbers.get(str(name), -1) for name in columns["class"]], dtype=np.int64)

        return parquet_records(shards_of(folder, split, self.files), schema, columns=("class",), label=label)


def by_attributes(columns: dict[str, np.ndarray]) -> np.ndarray:
    """One attribute: 1 where it is there, else 0. Several: which one is there; -1 where none or more than one is."""
    try:
        there = np.stack([column.astype(np.int64) > 0 for column in columns.values()], axis=1)  # 0/1, −1/1, False/True
    except (TypeError, ValueError, OverflowError):
        raise DatalensError(f"columns {', '.join(columns)} must hold numbers: 1 where the attribute is there") from None
    if there.shape[1] == 1:
        return there[:, 0].astype(np.int64)
    return np.where(there.sum(axis=1) == 1, there.argmax(axis=1), -1)


def shards_of(folder: Path, split: str, files: str) -> list[Path]:
    """The files of a split, by name: train-00000-of-00004.parquet, valid.parquet, …"""
    start = "val" if split == "valid" else split
    found = [path for path in _shards(folder) if path.name.startswith(start)]
    if not found:
        raise DatalensError(f"{folder} holds no {start}*.parquet: there should be {files}")
    return found


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))
