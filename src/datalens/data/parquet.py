"""Records from parquet files in the Hugging Face convention: `image` = {bytes, path}, and columns for labels.

Files are read batch by batch, and images are decoded only when they are chosen. `image.path` is the stable id of a
record, so its share does not depend on how records are spread over files.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datalens.data.images import Encoded, ImageRecords
from datalens.data.records import block_records
from datalens.data.remote import Remote, size_of, source
from datalens.data.schema import Schema
from datalens.errors import DatalensError, UnreadableImage

# Columns by their lower-case name → the label of each record; -1: the record does not belong to this data set.
Labelling = Callable[[dict[str, np.ndarray]], np.ndarray]

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.parquet")
ROWS_AT_ONCE = 2**16  # of columns without images
READ_BYTES = 2**20  # read ahead; without a limit, a whole row group would be read at once
# Encoded images hardly compress. A row group that unpacks to this multiple and this size is an attack or a mistake.
MOST_COMPRESSED, FROM_BYTES = 50, 2**26


def parquet_records(
    files: Sequence[Path | Remote], schema: Schema, *, columns: Sequence[str], label: Labelling, crop: int | None = None
) -> ImageRecords:
    """Return the records of one split.

    Args:
        columns: lower-case names of the columns that `label` needs.
        label: returns the label of each record.
        crop: see `ImageRecords`.
    """
    stream = encoded_rows(files, columns=columns, label=label)
    return ImageRecords(
        schema=schema,
        encoded=lambda: stream(block_records(schema)),
        crop=crop,
        fixed_positions=is_one_table(files),
    )


def is_one_table(files: Sequence[Path | Remote]) -> bool:
    """Return whether the rows of the files, one file after the other, are one list.

    They are if there is one file, or if the files are all shards of a table (train-00000-of-00004.parquet, …). Other
    names may depend on what is in the files, such as cats.parquet and dogs.parquet: a record that is replaced by one of
    another kind would then change its position.
    """
    shards = [_SHARD.fullmatch(file.name) for file in files]
    numbers = [(found["stem"], int(found["number"]), int(found["count"])) for found in shards if found]
    stem = numbers[0][0] if numbers else ""
    return len(files) == 1 or numbers == [(stem, number, len(files)) for number in range(len(files))]


def encoded_rows(
    files: Sequence[Path | Remote], *, columns: Sequence[str], label: Labelling, record_id: str | None = None
) -> Callable[[int], Iterator[Encoded]]:
    """Return a function that yields the rows, so many at a time, with images still encoded.

    Args:
        columns: lower-case names of the columns that are read; without columns all records are of class 0.
        label: returns the label of each record.
        record_id: the column with the id of each record, instead of `image.path`.

    Raises:
        DatalensError: a file is damaged, or lacks a column.
    """
    columns_of = [(file, _columns(file, columns)) for file in files]

    def encoded(size: int) -> Iterator[Encoded]:
        start = 0
        for file, names in columns_of:
            for batch in _batches(file, ["image", *names.values()], size):
                labels, ids = _labels_and_ids(batch, file, names, label, record_id)
                yield _encoded(batch, file, start, labels, ids)
                start += batch.num_rows

    return encoded


def listed_rows(
    files: Sequence[Path], *, columns: Sequence[str], label: Labelling, record_id: str | None
) -> Iterator[tuple[np.ndarray, list[Any] | None]]:
    """Yield labels and ids of the rows; of the files, no other column is read. The arguments are `encoded_rows`'s."""
    for file in files:
        names = _columns(file, columns)
        if not names:
            yield np.zeros(pq.read_metadata(file).num_rows, np.int64), None
            continue
        for batch in _batches(file, list(names.values()), ROWS_AT_ONCE):
            yield _labels_and_ids(batch, file, names, label, record_id)


def _labels_and_ids(
    batch: Any, file: Path | Remote, names: dict[str, str], label: Labelling, record_id: str | None
) -> tuple[np.ndarray, list[Any] | None]:
    values = {name: _values(batch, real, file) for name, real in names.items()}
    ids = None if record_id is None else values[record_id].tolist()
    return label(values) if values else np.zeros(batch.num_rows, np.int64), ids


def _encoded(batch: Any, file: Path | Remote, start: int, labels: np.ndarray, ids: list[Any] | None) -> Encoded:
    member = np.flatnonzero(labels >= 0)
    image = batch.column("image")
    try:
        data, paths = image.field("bytes"), image.field("path").to_pylist()
    except UnicodeDecodeError as error:
        raise DatalensError(f"{file}: a path of column image is not text ({error})") from None
    names = [f"{file}: image {paths[i] or f'in row {start + i} of the split'}" for i in member.tolist()]

    def read(i: int) -> bytes:
        content = data[int(member[i])].as_py()
        if content is None:
            raise UnreadableImage(f"{names[i]} has no bytes: the file must carry the images themselves")
        return content

    return Encoded(
        index=start + member.astype(np.int64),
        labels=labels[member].astype(np.int64),
        ids=[(paths[i] or None) if ids is None else ids[i] for i in member.tolist()],
        names=names,
        read=read,
    )


def _columns(file: Path | Remote, wanted: Sequence[str]) -> dict[str, str]:
    """Return lower-case names → the names in the file.

    Raises:
        DatalensError: the file is damaged, lacks a column, or its column `image` does not hold images.
    """
    try:
        with pq.ParquetFile(source(file)) as opened:
            schema = opened.schema_arrow
            check_unpacked(opened.metadata, file)
    except FileNotFoundError:
        raise DatalensError(f"{file} does not exist") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatalensError(f"{file} is not a readable parquet file ({error})") from None
    here = {name.lower(): name for name in schema.names}
    missing = [name for name in ("image", *wanted) if name not in here]
    if missing:
        raise DatalensError(
            f"{file} has no column {' and no column '.join(missing)}; its columns are {', '.join(schema.names)}"
        )
    kind = schema.field(here["image"]).type
    fields = (
        {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)} if pa.types.is_struct(kind) else {}
    )
    bytes_, path = fields.get("bytes"), fields.get("path")
    if here["image"] != "image" or bytes_ not in (pa.binary(), pa.large_binary()) or path is None:
        raise DatalensError(f"{file}: column image must be a struct of bytes and path, not {kind}")
    return {name: here[name] for name in wanted}


def check_unpacked(metadata: Any, file: Path | Remote) -> None:
    """Raise if a row group would unpack to far more than the file holds: a few kilobytes could fill the memory.

    Row groups are checked rather than columns, since pyarrow ends the process on a column with damaged statistics.
    """
    most = max(FROM_BYTES, MOST_COMPRESSED * size_of(file))
    for group in range(metadata.num_row_groups):
        unpacked = metadata.row_group(group).total_byte_size
        if unpacked > most:
            raise ValueError(f"row group {group} would unpack to {unpacked / 2**20:.0f} MiB")


def _batches(file: Path | Remote, columns: list[str], size: int) -> Iterator[Any]:
    try:
        with pq.ParquetFile(source(file), buffer_size=READ_BYTES, pre_buffer=False) as opened:
            yield from opened.iter_batches(batch_size=size, columns=columns, use_threads=False)
    except MemoryError:  # Arrow's own is an ArrowException, too
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatalensError(f"{file} cannot be read to its end ({error})") from None


def _values(batch: Any, name: str, file: Path | Remote) -> np.ndarray:
    column = batch.column(name)
    if column.null_count:
        raise DatalensError(f"{file}: column {name} has missing values: every record needs one")
    return column.to_numpy(zero_copy_only=False)
