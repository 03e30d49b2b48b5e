"""Lists of images with columns: a CSV of paths, or parquet files in the Hugging Face convention."""

import csv
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datalens.data.dicom import DICOM, are_dicom
from datalens.data.own.reading import (
    ALL,
    JOINED,
    NONE,
    TEST,
    Files,
    Found,
    Reading,
    check_classes,
    numbered,
    says_whose,
)
from datalens.data.parquet import encoded_rows, is_one_table, listed_rows
from datalens.data.regular import check_regular
from datalens.data.remote import Remote, source
from datalens.errors import DatalensError, NoTestImages

PATHS = ("file_name", "path", "file", "filename", "image")  # columns that hold the path of an image
LABEL, SPLIT = "label", "split"  # columns that are used if they exist and no other is named


def csv_list(path: Path, split: str, reading: Reading) -> Found:
    """List the images of a CSV, one on each line.

    Paths are relative to the folder of the CSV. A column `split` says which images are for training and for testing.
    """
    columns, rows = read_csv(path)
    file_column = next((name for name in PATHS if name in columns), None)
    if file_column is None:
        raise DatalensError(f"{path} has no column {' or '.join(PATHS)}; its columns are {', '.join(columns)}")
    label = _label(columns, reading)
    record_id = None if reading.record_id == DICOM else reading.id_column
    for name in (file_column, *label, *(() if record_id is None else (record_id,))):
        if name not in columns:
            option = "--record-id" if name == record_id else "--label"
            raise DatalensError(f"{path} has no column {name}; its columns are {', '.join(columns)}: change {option}")
        gap = next((i for i, row in enumerate(rows) if not row[name].strip()), None)
        if gap is not None:
            raise DatalensError(f"{path}: record {gap + 1} has no {name}: every record needs one")
    classes: tuple[str, ...] = (ALL,)
    labels, origin = np.zeros(len(rows), np.int64), ""
    if label:
        values = [JOINED.join(row[name].strip() for name in label) for row in rows]
        labels, classes, origin = numbered(values, reading, origin=_origin(label))
    member = _members(path, rows, split, has_splits=SPLIT in columns and SPLIT not in label)
    files = [rows[i][file_column].strip() for i in member]
    paths = [os.path.join(path.parent, name) for name in files]
    dicom = are_dicom(paths, skip_unreadable=reading.skip_unreadable)
    by_patient = says_whose(reading, dicom=dicom, where=path)
    ids = files if record_id is None else [rows[i][record_id] for i in member]
    listed = Files(paths=paths, labels=labels[member], ids=None if by_patient else ids)
    return Found(
        path=path,
        classes=classes,
        classes_from=origin,
        encoded=listed.encoded,
        listed=listed.listed,
        looked_at=f"all lines of {path.name}" + (", and the first bytes of each file" if dicom else ""),
        count=len(files),
        fixed_positions=True,
        dicom=dicom,
        record_id=DICOM if by_patient else None,
    )


def _members(path: Path, rows: list[dict[str, str]], split: str, *, has_splits: bool) -> list[int]:
    """Return the numbers of the rows of a split."""
    if split != "train" and not has_splits:
        raise NoTestImages(f"{path} has no test images: add a column {SPLIT} that says train or test")
    wanted = ("train", "") if split == "train" else TEST
    member = [i for i, row in enumerate(rows) if not has_splits or row[SPLIT].strip().lower() in wanted]
    if not member:
        raise DatalensError(f"{path} lists no image for {'training' if split == 'train' else 'testing'}")
    return member


def parquet_values(files: Sequence[Path | Remote]) -> dict[str, list[str]]:
    """Return the columns of parquet files other than images, as text, for `datalens inspect`."""
    values: dict[str, list[str]] = {}
    for file in files:
        schema = _parquet_schema(file)
        plain = [name for name in schema.names if not pa.types.is_nested(schema.field(name).type)]
        plain = [name for name in plain if not pa.types.is_binary(schema.field(name).type)]
        try:
            with pq.ParquetFile(source(file)) as opened:
                for batch in opened.iter_batches(columns=plain):
                    for name in plain:
                        found = batch.column(name).to_pylist()
                        values.setdefault(name, []).extend("" if value is None else str(value) for value in found)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DatalensError(f"{file} cannot be read to its end ({error})") from None
    return values


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of a CSV file."""
    check_regular(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or ())
            rows = list(reader)
    except FileNotFoundError:
        raise DatalensError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatalensError(f"{path} is not a readable CSV file ({error})") from None
    uneven = next((i for i, row in enumerate(rows) if None in row or None in row.values()), None)
    if uneven is not None:
        raise DatalensError(f"{path}: record {uneven + 1} has more or fewer fields than the first line names")
    return columns, rows


def _label(columns: Sequence[str], reading: Reading) -> tuple[str, ...]:
    """Return the columns of labels: those that were named, or `label` if it exists; none: there are no labels."""
    if reading.label == NONE or (reading.label is None and LABEL not in columns):
        return ()
    return reading.columns(columns) or (LABEL,)


def _origin(label: Sequence[str]) -> str:
    """Return what the classes are read off, in words."""
    return f"column {label[0]}" if len(label) == 1 else f"columns {' and '.join(label)}"


def parquet_list(
    path: Path,
    split: str,
    reading: Reading,
    *,
    files: Sequence[Path | Remote] | None = None,
    declared: tuple[str, ...] | None = None,
) -> Found:
    """List the images of a parquet file, or of a folder of train*.parquet and test*.parquet.

    Where no file of a folder begins with train, all its files are for training.

    Args:
        files: the files of the split, where they are known; `path` is then a name for them.
        declared: the classes, where they are known from all parts of the data.
    """
    files = parquet_files(path, split) if files is None else files
    for file in files:
        if isinstance(file, Path):
            check_regular(file)
    schema = _parquet_schema(files[0])
    label = tuple(name.lower() for name in _label([name.lower() for name in schema.names], reading))
    record_id = None if reading.id_column is None else reading.id_column.lower()
    columns = tuple(dict.fromkeys((*label, *(() if record_id is None else (record_id,)))))
    classes: tuple[str, ...] = (ALL,)
    origin, given = "", None

    def labels(values: dict[str, np.ndarray]) -> np.ndarray:
        if not label:
            return np.zeros(len(next(iter(values.values()))), np.int64)
        column = values[label[0]].tolist()
        if len(label) > 1:
            column = [
                JOINED.join(map(str, row)) for row in zip(*(values[name].tolist() for name in label), strict=True)
            ]
        numbers = {str(name): i for i, name in enumerate(classes)}
        result = [value if given is not None else numbers.get(str(value), -1) for value in column]
        if not all(type(number) is int and 0 <= number < len(classes) for number in result):
            raise DatalensError(f"{path}: {_origin(label)} has a value that is none of the {len(classes)} classes")
        return np.array(result, dtype=np.int64)

    wanted: dict[str, Any] = {"columns": columns, "label": labels, "record_id": record_id}
    stream = encoded_rows(files, **wanted)  # checks the files' columns
    here = [file for file in files if isinstance(file, Path)]
    looked_at = "the names and types of the columns"
    if label:
        given = _class_names(schema, label[0]) if reading.classes is None and len(label) == 1 else None
        if given is not None:
            classes, origin = given, f"the names that column {label[0]} comes with"
            looked_at += f", the names of the classes that column {label[0]} comes with"
            for file in files[1:]:  # its numbers would mean other classes
                if _class_names(_parquet_schema(file), label[0]) != given:
                    raise DatalensError(f"{file}: {_origin(label)} comes with other classes than in {files[0]}")
        elif declared is not None:
            classes = declared
        else:
            train = files if split == "train" else parquet_files(path, "train")
            _, classes, origin = numbered(_distinct(train, label), reading, origin=_origin(label))
            looked_at += f", all of {_origin(label)}"
        check_classes(classes, _origin(label))
    if declared is not None and classes != declared:
        raise DatalensError(f"{files[0]}: {_origin(label)} comes with other classes than in the other parts")
    return Found(
        path=path,
        classes=classes,
        classes_from=origin,
        encoded=stream,
        listed=partial(listed_rows, here, **wanted) if len(here) == len(files) else None,
        looked_at=looked_at,
        count=_rows(here) if len(here) == len(files) else None,
        fixed_positions=is_one_table(files),
    )


def parquet_files(path: Path, split: str, every: Sequence[Path | Remote] | None = None) -> list[Path | Remote]:
    """Return the files of a split. `every`: those that a pattern matched; by default, those of a folder."""
    if every is None and (path.is_file() or path.suffix == ".parquet"):
        if split == "train":
            return [path]
        raise NoTestImages(f"{path} has no test images: put train.parquet and test.parquet into a folder, and name it")
    every = sorted(path.glob("*.parquet")) if every is None else list(every)
    split_up = any(file.name.startswith("train") for file in every)
    if split == "train" and not split_up:
        return every
    starts = ("train",) if split == "train" else ("test", "val")
    named = ([file for file in every if file.name.startswith(start)] for start in starts)
    found = next((files for files in named if files), [])
    if not found:
        raise NoTestImages(f"{path} has no test images: put test.parquet there, beside train.parquet")
    return found


def _parquet_schema(file: Path | Remote) -> pa.Schema:
    try:
        return pq.read_schema(source(file))
    except FileNotFoundError:
        raise DatalensError(f"{file} does not exist") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatalensError(f"{file} is not a readable parquet file ({error})") from None


def _rows(files: Sequence[Path]) -> int | None:
    """Return how many rows the files state; None if one cannot be read, which reading its images will report."""
    try:
        return sum(pq.read_metadata(file).num_rows for file in files)
    except (pa.ArrowException, OSError, ValueError):
        return None


def _class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Return the names of the classes of a Hugging Face ClassLabel, which the file keeps beside its columns."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = {name.lower(): feature for name, feature in features.items()}[label]["names"]
        return tuple(str(name) for name in names) or None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _distinct(files: Sequence[Path | Remote], label: Sequence[str]) -> list[str]:
    """Return the distinct values of the columns of labels, as text."""
    values: set[str] = set()
    for file in files:
        real = {name.lower(): name for name in _parquet_schema(file).names}
        if absent := [name for name in label if name not in real]:
            raise DatalensError(
                f"{file} has no column {absent[0]}; its columns are {', '.join(real.values())}: change --label"
            )
        try:
            with pq.ParquetFile(source(file)) as opened:
                for batch in opened.iter_batches(columns=[real[name] for name in label]):
                    rows = set(zip(*(batch.column(real[name]).to_pylist() for name in label), strict=True))
                    values |= {JOINED.join(map(str, row)) for row in rows if None not in row}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DatalensError(f"{file} cannot be read to its end ({error})") from None
    return sorted(values)
