"""Open what --data names: a named data set, or the user's own file or folder (docs/data.md)."""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from datalens.data.dicom import DICOM
from datalens.data.named import sources
from datalens.data.own import idx_files, npz
from datalens.data.own.arrays import shaped
from datalens.data.own.folder import FOLDER, PREFIX, image_folder
from datalens.data.own.python import from_arrays as from_arrays
from datalens.data.own.reading import NONE, Found, Reading, check_not_larger, records_of
from datalens.data.parts import Part, Piece
from datalens.data.records import Dataset, OnDisk, Records, collect
from datalens.data.remote import Remote, is_address, is_pattern, matching
from datalens.data.schema import LARGEST_NUMBER, Schema
from datalens.errors import DatalensError

DEFAULTS = Reading()
METADATA = "metadata.csv"  # in a folder of images: a table with columns about them
RULES = (None, PREFIX, FOLDER, DICOM, NONE)


def is_own(data: str) -> bool:
    """Return whether this is a file or folder of the user's own, not a named data set. A folder mnist is ./mnist."""
    if data in sources.names():
        return False
    return data.endswith((".npz", ".csv", ".parquet")) or "/" in data or os.path.exists(data)


def open_records(
    data: str,
    split: str = "train",
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = DEFAULTS,
) -> Records:
    """Open a named data set, or the user's own data, as a stream of records: what training reads.

    Args:
        data: a name, or a path.
        split: train or test.
        nominal_size: number of records that the owner declares; the true number is private. Required for own data.
        folder: where a named set lies that cannot be downloaded. How much of the set is there is private, so a nominal
            size may be declared with it.
        reading: how own data is read.

    Raises:
        DatalensError: there is no such data, it is damaged, or an option does not apply to it.
    """
    _check(data, nominal_size, folder, reading)
    if is_own(data):
        if split == "train" and nominal_size is None:
            raise DatalensError(
                f"the number of records in {data} is private: declare a public round figure with --nominal-size"
            )
        return _own(data, split, reading, nominal_size or 0)
    records = sources.open_records(data, split, data_folder=None if folder is None else Path(folder))
    return records if nominal_size is None else _declared(records, nominal_size)


def training_records(options: Mapping[str, Any]) -> Records:
    """Open the training records of a run.

    Args:
        options: of the run, as config.json keeps them.

    Raises:
        DatalensError: the data are not there any more, or damaged.
    """
    return open_records(
        options["data"],
        nominal_size=options["nominal_size"],
        folder=options.get("data_folder"),
        reading=Reading.of(options),
    )


def load(
    data: str,
    split: str = "train",
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = DEFAULTS,
) -> Dataset:
    """Return all records of a split in memory, for test sets and small sets; the arguments are `open_records`'s."""
    return collect(open_records(data, split, nominal_size=nominal_size, folder=folder, reading=reading))


def load_some(data: str, *, most: int, folder: Path | str | None = None, reading: Reading = DEFAULTS) -> Dataset:
    """Return at most `most` training records in memory, drawn at random, to compare with as many synthetic ones."""
    nominal = 1 if is_own(data) else None  # required, and not used here
    return collect(open_records(data, nominal_size=nominal, folder=folder, reading=reading), most=most)


def schema(
    data: str,
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = DEFAULTS,
) -> Schema:
    """Return the public facts about the training records (see `schema_and_records`)."""
    return schema_and_records(data, nominal_size=nominal_size, folder=folder, reading=reading)[0]


def schema_and_records(
    data: str,
    *,
    nominal_size: int | None = None,
    folder: Path | str | None = None,
    reading: Reading = DEFAULTS,
) -> tuple[Schema, Records | None]:
    """Return the public facts about the training records and, for own data, the records.

    The schema of a named data set is known, and no file is touched. Own data has to be opened to know its schema; the
    records that are returned state what was read (`looked_at`), and need not be opened again. The arguments are those
    of `open_records`.
    """
    if is_own(data):
        records = open_records(data, nominal_size=nominal_size, folder=folder, reading=reading)
        return records.schema, records
    _check(data, nominal_size, folder, reading)
    public = sources.schema(data)
    return (public if nominal_size is None else dataclasses.replace(public, nominal_size=nominal_size)), None


def _check(data: str, nominal_size: int | None, folder: Path | str | None, reading: Reading) -> None:
    """Raise if an option does not apply to this data, or if there is no such data."""
    own = is_own(data)
    if not own and data not in sources.names():
        meant = difflib.get_close_matches(data.lower(), sources.names(), 1)
        named = f" (did you mean {meant[0]}?)" if meant else ""
        raise DatalensError(
            f"there is no folder or file {data!r} here{_near(Path(data))}, and no named data set of that name{named}: "
            "`datalens data list` shows these"
        )
    if own and not is_pattern(data):
        _check_exists(Path(data))
    if nominal_size is not None and not 1 <= nominal_size <= LARGEST_NUMBER:
        raise DatalensError(f"--nominal-size must be from 1 to {LARGEST_NUMBER}, not {nominal_size}")
    if own and folder is not None:
        raise DatalensError(f"--data-folder is for named data sets: {data} is a file, leave it out")
    if not own and reading.given:
        sources.schema(data)  # an unknown name is reported first
        raise DatalensError(f"--{reading.given} is for your own data: {data} is a named data set, leave it out")
    if not own and nominal_size is not None and folder is None:
        sources.schema(data)  # an unknown name is reported first
        raise DatalensError(
            "--nominal-size is for your own data, or for --data-folder: the size of a named data set is public"
        )


def _own(data: str, split: str, reading: Reading, nominal_size: int) -> Records:
    path = Path(data)
    if not is_pattern(data) and (path.suffix == ".npz" or idx_files.is_idx(path)):
        if reading.skip_unreadable:
            raise DatalensError(f"--skip-unreadable is for image files: {path} holds arrays, leave it out")
        of_kind = npz.open_npz if path.suffix == ".npz" else idx_files.open_idx
        records = shaped(of_kind(path, split, nominal_size, reading), reading)
        try:
            check_not_larger(records.schema)
        except DatalensError as error:
            raise DatalensError(f"{error}, with --image-size") from None
        return records
    return records_of(find(data, split, reading), reading, nominal_size=nominal_size)


def cut(
    data: str,
    schema: Schema | None,
    *,
    pieces: int,
    folder: Path | str | None = None,
    reading: Reading,
    split: str = "train",
    classes: tuple[str, ...] | None = None,
) -> list[Part]:
    """Return the parts of the records, which can be read one by one, in any order.

    Every parquet file is a part. Data of another kind is cut into `pieces`; each of them reads the list of all records,
    and decodes its own.

    Args:
        data: what --data named.
        schema: of all records; None: it is not known, and the parts can be listed only.
        pieces: the number of parts of data that has no files of its own.
        folder: see `open_records`.
        reading: how own data is read.
        split: train or test.
        classes: as the data has them, where there is no schema.
    """
    if schema is not None:
        stored = {name: value for value, name in reading.renamed().items()}  # --class-names has renamed them
        classes = tuple(stored.get(name, name) for name in schema.classes)
    facts: dict[str, Any] = {"reading": reading, "declared": schema, "split": split, "classes": classes}
    if is_own(data) and _is_parquet(data):
        return [
            Part(number=number, name=str(file), file=file, data=data, **facts)
            for number, file in enumerate(parquet_parts(Path(data), split))
        ]
    return [
        Part(
            number=number,
            name=f"piece {number + 1} of {pieces} of {data}",
            data=data if not is_own(data) else os.path.abspath(data),
            folder=None if folder is None else os.path.abspath(folder),
            pieces=pieces,
            **facts,
        )
        for number in range(pieces)
    ]


def _is_parquet(data: str) -> bool:
    path = Path(data)
    return is_pattern(data) or path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))


def open_part(part: Part) -> Records:
    """Open one part of the records. Positions in the stream are those within the part, or have gaps.

    Raises:
        DatalensError: it cannot be read, or has another schema than the whole.
    """
    schema = part.schema
    if part.file is not None:
        return records_of(list_part(part), part.reading, nominal_size=schema.nominal_size, public=schema)
    own = is_own(part.data)
    nominal = (schema.nominal_size or None) if own or part.folder is not None else None  # 0: of a test set
    records = open_records(part.data, part.split, nominal_size=nominal, folder=part.folder, reading=part.reading)
    if records.schema != schema:
        raise DatalensError(f"{part.name} has another schema where it was opened: is it the same data there?")
    return Piece(records=records, number=part.number, pieces=part.pieces)


def list_part(part: Part) -> Found:
    """List the images of one parquet file, without decoding them."""
    assert part.file is not None
    found: Found = _tables().parquet_list(
        Path(part.data), part.split, part.reading, files=[part.file], declared=part.classes
    )
    return found


def _check_exists(path: Path) -> None:
    """Raise if there is nothing at this path, and name what is near it."""
    if not path.exists() and not path.is_symlink():
        raise DatalensError(f"{path} does not exist{_near(path)}: check the name")


def _near(path: Path) -> str:
    """Return a hint at something in the same folder whose name is similar; "" if there is nothing."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    meant = difflib.get_close_matches(path.name, beside, 1)
    return f" (did you mean {path.parent / meant[0]}?)" if meant else ""


def own_images(path: Path, reading: Reading, split: str = "train") -> Found | OnDisk:
    """Return own images as they are stored, for `datalens inspect`, which needs no declarations."""
    data = named_by(path)
    if is_pattern(data):
        return find(data, split, reading)
    _check_exists(path)
    if path.suffix == ".npz":
        return npz.open_npz(path, split, 0, reading)
    return idx_files.open_idx(path, split, 0, reading) if idx_files.is_idx(path) else find(data, split, reading)


def find(data: str, split: str, reading: Reading) -> Found:
    """List own images in files, without decoding them. `data`: a path, an address, or a pattern of either."""
    path = Path(data)
    if is_pattern(data):
        files = _tables().parquet_files(path, split, _parquet_matching(data))
        return _tables().parquet_list(path, split, reading, files=files)
    if path.suffix == ".csv":
        return _tables().csv_list(path, split, reading)
    if _is_parquet(data):
        return _tables().parquet_list(path, split, reading)
    if path.is_file():
        raise DatalensError(f"{path} is neither a folder of images nor a .npz, .csv, .parquet or idx file")
    if (path / METADATA).is_file() and (reading.label not in (None, NONE) or reading.record_id not in RULES):
        return dataclasses.replace(_tables().csv_list(path / METADATA, split, reading), path=path)
    return image_folder(path, split, reading)


def _tables() -> ModuleType:
    """Return the module that needs pyarrow, which takes long to load."""
    from datalens.data.own import tables

    return tables


def parquet_parts(path: Path, split: str = "train") -> list[Path | Remote]:
    """Return the parquet files of a split: of a folder, of a pattern, or the one file."""
    data = named_by(path)
    files: list[Path | Remote] = _tables().parquet_files(
        path, split, _parquet_matching(data) if is_pattern(data) else None
    )
    return files


def named_by(path: Path) -> str:
    """Return what a user named; a Path of an address has lost a slash."""
    return re.sub(r"^(\w+):/(?=[^/])", r"\1://", str(path))


def _parquet_matching(data: str) -> list[Path | Remote]:
    """Return the parquet files that a pattern matches."""
    files = matching(data)
    other = next((file for file in files if not file.name.endswith(".parquet")), None)
    if other is not None:
        where = "at an address" if is_address(data) else "of a pattern"
        raise DatalensError(f"{other} is no .parquet file: parts {where} are parquet files (docs/cluster.md)")
    return files


def _declared(records: Records, nominal_size: int) -> Records:
    public = dataclasses.replace(records.schema, nominal_size=nominal_size)
    return dataclasses.replace(records, schema=public)  # type: ignore[type-var]


def looked_at(records: Records) -> str:
    """Return what was read of the user's own data to know its schema, in words."""
    return str(getattr(records, "looked_at", ""))
