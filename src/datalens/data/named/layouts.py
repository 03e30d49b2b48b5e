"""Named data sets that cannot be downloaded, since their owners give them out by agreement: read from a user's folder.

CelebA and Places365 are read in the layouts that their authors publish; CelebA and Scenes from shards of parquet files.
"""

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datalens.data.images import Encoded, ImageRecords
from datalens.data.parquet import Labelling, parquet_records
from datalens.data.records import Records, block_records
from datalens.data.regular import check_regular, read_regular
from datalens.data.schema import Schema
from datalens.errors import DatalensError

CELEBA_IMAGES, CELEBA_ATTRIBUTES, CELEBA_SPLITS = "img_align_celeba", "list_attr_celeba.txt", "list_eval_partition.txt"
_CELEBA_SPLIT = {"train": "0", "valid": "1", "test": "2"}

PLACES_TRAIN, PLACES_VAL = "data_256", "val_256"
PLACES_CATEGORIES, PLACES_VAL_LIST = "categories_places365.txt", "places365_val.txt"
PLACES_HIERARCHY = "Scene hierarchy - Places365.csv"

CELEBA_CROP = 148  # out of 178 x 218, as is usual for the aligned faces
SHARDS = "parquet files train*.parquet, val*.parquet and test*.parquet"


class Local(Protocol):
    """The layout of a data set in a folder."""

    @property
    def family(self) -> str:
        """Name of the folder below DATALENS_HOME that sets made of the same files share."""
        ...

    @property
    def files(self) -> str:
        """The files that belong into the folder, for messages."""
        ...

    def present(self, folder: Path) -> bool:
        """Return whether any of the files exists; missing ones are reported when the set is read."""
        ...

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        """Return the records of one split."""
        ...


@dataclass(frozen=True, kw_only=True)
class Celeba:
    """CelebA from official files or shards. The class says whether a face has an attribute, or which of several."""

    attributes: tuple[str, ...]
    family: str = "celeba"
    files: str = (
        f"{CELEBA_IMAGES}/, {CELEBA_ATTRIBUTES} and {CELEBA_SPLITS} (or {SHARDS} with columns "
        "image, male, black_hair, blond_hair, brown_hair)"
    )

    def present(self, folder: Path) -> bool:
        return bool(_shards(folder)) or any((folder / name).exists() for name in self._official())

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        how: dict[str, Any] = {"columns": self.attributes, "label": by_attributes, "crop": CELEBA_CROP}
        if any((folder / name).exists() for name in self._official()):
            return celeba(folder, schema, split, **how)
        return parquet_records(shards_of(folder, split, self.files), schema, **how)

    @staticmethod
    def _official() -> Sequence[str]:
        return CELEBA_IMAGES, CELEBA_ATTRIBUTES, CELEBA_SPLITS


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places365-Standard in its official layout. The classes of the schema are level-2 groups of its hierarchy."""

    images_each: int
    family: str = "places365"
    files: str = (
        f"the small images {PLACES_TRAIN}/ and {PLACES_VAL}/, {PLACES_VAL_LIST}, "
        f"{PLACES_CATEGORIES} and the hierarchy as {PLACES_HIERARCHY!r}"
    )

    def present(self, folder: Path) -> bool:
        return any(folder.glob(f"{PLACES_TRAIN}*")) or (folder / PLACES_HIERARCHY).exists()

    def records(self, folder: Path, schema: Schema, split: str) -> Records:
        return places(folder, schema, split, groups=schema.classes, images_each=self.images_each)


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Photographs of scenes in shards with a column `class`. Classes that the schema does not have are left out."""

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
    """Return labels from attributes, whose values may be 0/1, −1/1 or False/True.

    With one attribute, the label is 1 for records that have it, else 0. With several, it is the number of the attribute
    that a record has; -1 if it has none of them, or more than one.
    """
    try:
        present = np.stack([column.astype(np.int64) > 0 for column in columns.values()], axis=1)
    except (TypeError, ValueError, OverflowError):
        raise DatalensError(
            f"columns {', '.join(columns)} must hold numbers: 1 where a record has the attribute"
        ) from None
    if present.shape[1] == 1:
        return present[:, 0].astype(np.int64)
    return np.where(present.sum(axis=1) == 1, present.argmax(axis=1), -1)


def shards_of(folder: Path, split: str, files: str) -> list[Path]:
    """Return the files of a split, by their names: train-00000-of-00004.parquet, valid.parquet, …"""
    start = "val" if split == "valid" else split
    shards = [path for path in _shards(folder) if path.name.startswith(start)]
    if not shards:
        raise DatalensError(f"{folder} holds no {start}*.parquet: put {files} there")
    return shards


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


# --- folders of image files -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """Image files of one split, in their order. A record with label -1 is left out, but keeps its position."""

    root: Path
    ids: list[str]  # paths below root
    labels: np.ndarray
    fixed_positions: bool = False  # True where they come from a published list


def _records(listed: Listed, schema: Schema, crop: int | None) -> ImageRecords:
    size = block_records(schema)

    def encoded() -> Iterator[Encoded]:
        for start in range(0, len(listed.ids), size):
            part = listed.labels[start : start + size]
            index = start + np.flatnonzero(part >= 0)
            ids = [listed.ids[i] for i in index.tolist()]

            def read(i: int, ids: list[str] = ids) -> bytes:
                return _bytes(listed.root / ids[i])

            yield Encoded(
                index=index,
                labels=listed.labels[index],
                ids=list(ids),
                names=[str(listed.root / name) for name in ids],
                read=read,
            )

    return ImageRecords(schema=schema, encoded=encoded, crop=crop, fixed_positions=listed.fixed_positions)


def celeba(
    folder: Path, schema: Schema, split: str, *, columns: Sequence[str], label: Labelling, crop: int
) -> ImageRecords:
    """Return one split of CelebA as published: `img_align_celeba/` and the lists of attributes and of splits.

    Args:
        columns: the attributes that `label` needs.
        label: returns the label of each record.
        crop: side of the square that is cut out of each image.
    """
    lines = _lines(folder / CELEBA_SPLITS)
    rows = [line.split() for line in lines if line.strip()]
    if any(len(row) != 2 or row[1] not in _CELEBA_SPLIT.values() for row in rows):
        raise DatalensError(f"{folder / CELEBA_SPLITS}: every line must be an image and 0, 1 or 2")
    names = [name for name, part in rows if part == _CELEBA_SPLIT[split]]
    if not names:
        raise DatalensError(f"{folder / CELEBA_SPLITS} names no image of the {split} split")
    labels = label(_celeba_attributes(folder / CELEBA_ATTRIBUTES, names, columns))
    images = folder / CELEBA_IMAGES
    _check_there(images, [name for name, one in zip(names, labels.tolist(), strict=True) if one >= 0])
    return _records(Listed(root=images, ids=names, labels=labels, fixed_positions=True), schema, crop)


def _celeba_attributes(path: Path, names: list[str], columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return attributes of the named images, -1 or 1, by lower-case name of the attribute.

    The first line of the file is a count, the second has the names of the attributes.
    """
    lines = _lines(path)
    header = [name.lower() for name in lines[1].split()] if len(lines) > 1 else []
    missing = [name for name in columns if name not in header]
    if missing:
        raise DatalensError(f"{path} has no attribute {' and no attribute '.join(missing)} in its second line")
    at = [header.index(name) + 1 for name in columns]
    rows: dict[str, list[str]] = {}
    for line in lines[2:]:
        fields = line.split()
        if not fields:
            continue
        if len(fields) != len(header) + 1 or any(fields[i] not in ("1", "-1") for i in at):
            raise DatalensError(f"{path}: the line of {fields[0]} must hold {len(header)} values of -1 or 1")
        rows[fields[0]] = [fields[i] for i in at]
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise DatalensError(f"{path} has no line for {unknown[0]}{_and_more(unknown)}")
    values = np.array([rows[name] for name in names], dtype=np.int64).reshape(len(names), len(columns))
    return {name: values[:, number] for number, name in enumerate(columns)}


def places(folder: Path, schema: Schema, split: str, *, groups: Sequence[str], images_each: int) -> ImageRecords:
    """Return one split of the small images of Places365-Standard.

    A class is a level-2 group of the hierarchy: all categories that are in this group alone. From every category the
    images with the lowest file numbers are taken, so many that a class has about `images_each`. So whether a record is
    in the set depends on its name alone, never on other records.
    """
    categories = _places_categories(folder, groups)
    if split == "train":
        listed = _places_train(folder, categories, images_each)
    elif split == "test":
        listed = _places_val(folder, categories)
    else:
        raise DatalensError(
            "places365 has the splits train and test (the official validation images, which have labels)"
        )
    return _records(listed, schema, None)


def _places_train(folder: Path, categories: dict[str, int], images_each: int) -> Listed:
    root, ids, labels = folder / PLACES_TRAIN, [], []
    if not root.exists() and (folder / f"{PLACES_TRAIN}_standard").exists():  # some tools rename it
        root = folder / f"{PLACES_TRAIN}_standard"
    sizes = np.bincount(list(categories.values()))
    for category, label in sorted(categories.items()):
        most = images_each // int(sizes[label])
        try:
            names = sorted(entry.name for entry in os.scandir(root / category.lstrip("/")) if entry.is_file())
        except OSError as error:
            raise DatalensError(
                f"{root / category.lstrip('/')}: {error.strerror}: unpack all of {PLACES_TRAIN} there"
            ) from None
        for name in names:
            number = name.partition(".")[0]
            if not number.isdecimal():
                raise DatalensError(
                    f"{root}{category}/{name} is not named by a number, as images of Places365 are: take it out"
                )
            if int(number) <= most:
                ids.append(f"{category}/{name}".lstrip("/"))
                labels.append(label)
    if not ids:
        raise DatalensError(f"{root} holds no image of the three classes")
    return Listed(root=root, ids=ids, labels=np.array(labels, dtype=np.int64))


def _places_val(folder: Path, categories: dict[str, int]) -> Listed:
    numbered: dict[str, int] = {}
    for category, number in _pairs(_listing(folder, PLACES_CATEGORIES)):
        numbered[number] = categories.get(category, -1)
    path = _listing(folder, PLACES_VAL_LIST)
    rows = _pairs(path)
    unknown = [number for _, number in rows if number not in numbered]
    if unknown:
        raise DatalensError(f"{path}: category {unknown[0]} is not in {PLACES_CATEGORIES}")
    ids, labels = [name for name, _ in rows], np.array([numbered[number] for _, number in rows], dtype=np.int64)
    root = folder / PLACES_VAL
    _check_there(root, [name for name, one in zip(ids, labels.tolist(), strict=True) if one >= 0])
    return Listed(root=root, ids=ids, labels=labels, fixed_positions=True)


def _places_categories(folder: Path, groups: Sequence[str]) -> dict[str, int]:
    """Return category → class, for categories that are in a single level-2 group, which is one of ours.

    The sheet has a row with the names of the groups (three columns of level 1, then those of level 2), and a row of 0
    and 1 for each category.
    """
    path = folder / PLACES_HIERARCHY
    try:
        rows = list(csv.reader(_lines(path)))
    except csv.Error as error:
        raise DatalensError(f"{path} is not a CSV file ({error}): save the published sheet as CSV") from None
    names = next((row for row in rows if set(groups) <= {cell.strip().lower() for cell in row}), None)
    if names is None:
        raise DatalensError(f"{path} has no columns {'; '.join(groups)}: save the published sheet as CSV")
    names = [cell.strip().lower() for cell in names]
    level2 = range(4, len(names))
    found: dict[str, int] = {}
    for row in rows:
        category = row[0].strip().strip("'\"") if row else ""
        if not category.startswith("/"):
            continue
        member = [names[i] for i in level2 if i < len(row) and names[i] and row[i].strip() in ("1", "1.0")]
        if len(member) == 1 and member[0] in groups:
            found[category] = list(groups).index(member[0])
    empty = [group for number, group in enumerate(groups) if number not in found.values()]
    if empty:
        raise DatalensError(f"{path} puts no category into {empty[0]} alone: save the published sheet as CSV")
    return found


def _listing(folder: Path, name: str) -> Path:
    """Return the path of a list: in the folder itself, or where the official archive of lists unpacks it."""
    inside = folder / "filelist_places365-standard" / name
    return inside if inside.exists() else folder / name


def _pairs(path: Path) -> list[tuple[str, str]]:
    rows = [line.split() for line in _lines(path) if line.strip()]
    if any(len(row) != 2 for row in rows):
        raise DatalensError(f"{path}: every line must be a name and a number")
    return [(name, number) for name, number in rows]


def _lines(path: Path) -> list[str]:
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DatalensError(f"{path} does not exist: it is a part of the data set, put it there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DatalensError(f"{path} cannot be read ({error})") from None
    if "\0" in text:
        raise DatalensError(f"{path} is not a text file: it contains NUL characters")
    return text.splitlines()


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise DatalensError(f"{path} cannot be read ({error.strerror})") from None


def _check_there(folder: Path, names: list[str]) -> None:
    """Raise if an image is missing, before the first one is read."""
    try:
        present = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise DatalensError(f"{folder}: {error.strerror}: put the images there") from None
    missing = [name for name in names if name not in present]
    if missing:
        raise DatalensError(f"{folder} lacks {missing[0]}{_and_more(missing)}: put it there, or correct the lists")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
