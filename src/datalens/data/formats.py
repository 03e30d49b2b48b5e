"""Data by what was given for --data: a named data set, or the user's own file or folder (docs/data.md)."""

import dataclasses
import os
from pathlib import Path

from datalens.data.named import sources
from datalens.data.own import idx_files, npz
from datalens.data.own.arrays import shaped
from datalens.data.own.folder import FOLDER, PREFIX, image_folder
from datalens.data.own.python import from_arrays as from_arrays
from datalens.data.own.reading import NONE, Found, Reading, check_not_larger, records_of
from datalens.data.records import Dataset, Records, collect
from datalens.data.schema import LARGEST_NUMBER, Schema
from datalens.errors import DatalensError

NOTHING_SAID = Reading()
METADATA = "metadata.csv"  # in a folder of images: columns about them
RULES = (None, PREFIX, FOLDER)


def is_own(data: str) -> bool:
    """Whether this is a file or folder of the user's, and not a name. A folder called mnist is ./mnist."""
    if data in sources.names():
        return False
    return data.endswith((".npz", ".csv", ".parquet")) or "/" in data or os.path.exists(data)


def open_records(
    data: str,
    split: str = "train",
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = NOTHING_SAID,
) -> Records:
    """A named data set, or the user's own, as a stream of records: what training reads.

    `nominal_size` is what the owner declares: the true count is private. `folder`: where a set that cannot be
    downloaded lies; what of it is there is private too, so a nominal size may be declared with it. `reading`: how own
    data is read.
    """
    _check(data, nominal_size, folder, reading)
    if is_own(data):
        if split == "train" and nominal_size is None:
            raise DatalensError(
                f"how many records {data} holds is private: declare a public round figure with --nominal-size"
            )
        return _own(Path(data), split, reading, nominal_size or 0)
    records = sources.open_records(data, split, data_folder=None if folder is None else Path(folder))
    return records if nominal_size is None else _declared(records, nominal_size)


def load(
    data: str,
    split: str = "train",
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = NOTHING_SAID,
) -> Dataset:
    """The same, all of it in memory: for test sets and small sets."""
    return collect(open_records(data, split, nominal_size=nominal_size, folder=folder, reading=reading))


def load_some(data: str, *, most: int, folder: Path | str | None = None, reading: Reading = NOTHING_SAID) -> Dataset:
    """At most so many training records, drawn at random, in memory: enough to compare with as many synthetic ones."""
    nominal = 1 if is_own(data) else None  # nothing is planned by it here
    return collect(open_records(data, nominal_size=nominal, folder=folder, reading=reading), most=most)


def schema(
    data: str,
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = NOTHING_SAID,
) -> Schema:
    """What is public. Of a named data set no file is touched for it."""
    if is_own(data):
        return open_records(data, nominal_size=nominal_size, folder=folder, reading=reading).schema
    _check(data, nominal_size, folder, reading)
    public = sources.schema(data)
    return public if nominal_size is None else dataclasses.replace(public, nominal_size=nominal_size)


def _check(data: str, nominal_size: int | None, folder: Path | str | None, reading: Reading) -> None:
    own = is_own(data)
    if nominal_size is not None and not 1 <= nominal_size <= LARGEST_NUMBER:
        raise DatalensError(f"--nominal-size must be from 1 to {LARGEST_NUMBER}, not {nominal_size}")
    if own and folder is not None:
        raise DatalensError(f"--data-folder is for named data sets: {data} is a file, leave it out")
    if not own and reading.given:
        sources.schema(data)  # or there is no such name at all
        raise DatalensError(f"--{reading.given} is for your own data: {data} is a named data set, leave it out")
    if not own and nominal_size is not None and folder is None:
        sources.schema(data)
        raise DatalensError(
            "--nominal-size is for your own file, or with --data-folder: what a named data set holds is public"
        )


def _own(path: Path, split: str, reading: Reading, nominal_size: int) -> Records:
    if path.suffix == ".npz" or idx_files.is_idx(path):
        of_kind = npz.open_npz if path.suffix == ".npz" else idx_files.open_idx
        records = shaped(of_kind(path, split, nominal_size, reading), reading)
        check_not_larger(records.schema)
        return records
    return records_of(find(path, split, reading), reading, nominal_size=nominal_size)


def own_images(path: Path, reading: Reading, split: str = "train") -> Found | Dataset:
    """Own images as they lie there: for who looks at them before anything is declared."""
    if path.suffix == ".npz":
        return npz.open_npz(path, split, 0, reading)
    return idx_files.open_idx(path, split, 0, reading) if idx_files.is_idx(path) else find(path, split, reading)


def find(path: Path, split: str, reading: Reading) -> Found:
    """Own images in files: listed, and not decoded."""
    from datalens.data.own import tables

    if path.suffix == ".csv":
        return tables.csv_list(path, split, reading)
    if (path.is_dir() and any(path.glob("*.parquet"))) or path.suffix == ".parquet":
        return tables.parquet_list(path, split, reading)
    if path.is_file():
        raise DatalensError(f"{path} is no folder of images, .npz, .csv, .parquet or idx file")
    if (path / METADATA).is_file() and (reading.label not in (None, NONE) or reading.record_id not in RULES):
        return dataclasses.replace(tables.csv_list(path / METADATA, split, reading), path=path)
    return image_folder(path, split, reading)


def _declared(records: Records, nominal_size: int) -> Records:
    public = dataclasses.replace(records.schema, nominal_size=nominal_size)
    return dataclasses.replace(records, schema=public)  # type: ignore[type-var]
