"""Records from parquet files by the Hugging Face convention: `image` = {bytes, path}, and columns for labels.

Files are read batch by batch, and images stay encoded until they are wanted. `image.path` is the stable id of a
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
from datalens.data.schema import Schema
from datalens.errors import DatalensError

# Columns by their lower-case name → the label of each record; -1: not of this data set.
Labelling = Callable[[dict[str, np.ndarray]], np.ndarray]

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.parquet")
READ_BYTES = 2**20  # read ahead; without a limit a whole row group would be read at once
# Encoded images hardly compress. A row group that does, this many times, and to this size, is a trap or a mistake.
MOST_COMPRESSED, FROM_BYTES = 50, 2**26


def parquet_records(
    files: Sequence[Path], schema: Schema, *, columns: Sequence[str], label: Labelling, crop: int | None = None
) -> ImageRecords:
    """One split. `columns`, in lower case, are what `label` needs."""
    stream = encoded_rows(files, columns=columns, label=label)
    return ImageRecords(
        schema=schema,
        encoded=lambda: stream(block_records(schema)),
        crop=crop,
        fixed_positions=is_one_table(files),
    )


def is_one_table(files: Sequence[Path]) -> bool:
    """Whether the rows of the files, one file after the other, are one list: there is one file, or the files are all
    shards of a table (train-00000-of-00004.parquet, …).

    Any other names may follow what is in the files, such as cats.parquet and dogs.parquet: a record that is replaced
    by one of another kind would then stand elsewhere.
    """
    shards = [_SHARD.fullmatch(file.name) for file in files]
    numbers = [(found["stem"], int(found["number"]), int(found["count"])) for found in shards if found]
    stem = numbers[0][0] if numbers else ""
    return len(files) == 1 or numbers == [(stem, number, len(files)) for number in range(len(files))]


def encoded_rows(
    files: Sequence[Path], *, columns: Sequence[str], label: Labelling, record_id: str | None = None
) -> Callable[[int], Iterator[Encoded]]:
    """So many rows at a time, still encoded; without columns all are of class 0. `record_id`: the column that is, in
    the place of `image.path`, the id of a record."""
    found = [(file, _columns(file, columns)) for file in files]

    def encoded(size: int) -> Iterator[Encoded]:
        start = 0
        for file, names in found:
            for batch in _batches(file, ["image", *names.values()], size):
                values = {name: _values(batch, real, file) for name, real in names.items()}
                ids = None if record_id is None else values[record_id].tolist()
                labels = label(values) if values else np.zeros(batch.num_rows, np.int64)
                yield _encoded(batch, file, start, labels, ids)
                start += batch.num_rows

    return encoded


def _encoded(batch: Any, file: Path, start: int, labels: np.ndarray, ids: list[Any] | None) -> Encoded:
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
            raise DatalensError(f"{names[i]} has no bytes: the file must carry the images themselves")
        return content

    return Encoded(
        index=start + member.astype(np.int64),
        labels=labels[member].astype(np.int64),
        ids=[(paths[i] or None) if ids is None else ids[i] for i in member.tolist()],
        names=names,
        read=read,
    )


def _columns(file: Path, wanted: Sequence[str]) -> dict[str, str]:
    """Lower-case names → the names in the file; also that `image` is what it should be."""
    try:
        with pq.ParquetFile(file) as opened:
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


def check_unpacked(metadata: Any, file: Path) -> None:
    """That no row group unpacks to far more than the file holds: a few kilobytes could fill the memory.

    Row groups and not their columns: pyarrow ends the whole process over a column whose statistics are damaged.
    """
    most = max(FROM_BYTES, MOST_COMPRESSED * file.stat().st_size)
    for group in range(metadata.num_row_groups):
        unpacked = metadata.row_group(group).total_byte_size
        if unpacked > most:
            raise ValueError(f"row group {group} would unpack to {unpacked / 2**20:.0f} MiB")


def _batches(file: Path, columns: list[str], size: int) -> Iterator[Any]:
    try:
        with pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False) as opened:
            yield from opened.iter_batches(batch_size=size, columns=columns, use_threads=False)
    except MemoryError:  # also one of Arrow's
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatalensError(f"{file} cannot be read to its end ({error})") from None


def _values(batch: Any, name: str, file: Path) -> np.ndarray:
    column = batch.column(name)
    if column.null_count:
        raise DatalensError(f"{file}: column {name} has gaps: every record needs a value")
    return column.to_numpy(zero_copy_only=False)
