"""Records as a stream: what training reads, whether they are in memory, in parquet files or in folders.

A reader yields blocks and decodes only the records that its caller chooses. So a data set may be larger than memory,
and a machine that holds some of the teachers decodes only the records of these.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datalens.data.schema import Schema
from datalens.errors import DatalensError

# (positions in the stream [b], the key of each record) → the share of each [b]; -1: the record is not wanted.
Choose = Callable[[np.ndarray, Iterable[bytes]], np.ndarray]

BLOCK_RECORDS = 4096
BLOCK_BYTES = 2 * 2**20  # of pixels: the features of a block take many times that while they are computed


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The chosen ones among some consecutive records of the stream, decoded."""

    images: np.ndarray  # uint8 [b, h, w, c]
    labels: np.ndarray  # int64 [b]
    index: np.ndarray  # int64 [b]: position of each in the whole stream of its split
    share: np.ndarray  # int64 [b]: what `choose` returned


class Records(Protocol):
    """One split of a data set as a stream, which need not fit into memory."""

    @property
    def schema(self) -> Schema: ...

    @property
    def fixed_positions(self) -> bool:
        """Whether the records are a list: when a record is replaced by any other, all records keep their positions.

        This does not hold where the order depends on the records, such as that of files sorted by name.
        """
        ...

    def blocks(self, choose: Choose) -> Iterator[Block]:
        """Yield all records in their order, block by block. `choose` is called once for every record."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Records in memory: images uint8 [n, h, w, c], labels int64 [n], and stable ids of the records, if any."""

    schema: Schema
    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray | None = None
    fixed_positions: bool = True  # an array is a list

    def blocks(self, choose: Choose) -> Iterator[Block]:
        size = block_records(self.schema)
        for start in range(0, len(self.images), size):
            index = np.arange(start, min(start + size, len(self.images)), dtype=np.int64)
            ids = None if self.ids is None else self.ids[index]
            share = choose(index, record_keys(self.images[index], ids, by_person=self.schema.by_person))
            wanted = share >= 0
            index = index[wanted]
            yield Block(images=self.images[index], labels=self.labels[index], index=index, share=share[wanted])


@dataclass(frozen=True, kw_only=True, eq=False)
class OnDisk:
    """Records in files of arrays, which were opened for their schema; images are loaded when they are first needed.

    Attributes:
        count: number of records, from a header. Private.
        looked_at: what was read to know the schema, in words.
        load: read the arrays, and check their values. They are not kept here.
    """

    schema: Schema
    count: int
    looked_at: str
    load: Callable[[], Dataset]
    fixed_positions: bool = True

    def blocks(self, choose: Choose) -> Iterator[Block]:
        return self.load().blocks(choose)


def record_keys(images: np.ndarray, ids: np.ndarray | None, *, by_person: bool = False) -> Iterable[bytes]:
    """Return the key of each record: its id where it has one, else its pixels; never its position or label.

    Args:
        images: [n, h, w, c].
        ids: [n], or None where records have no ids.
        by_person: the ids say whose each record is, and are required.

    Raises:
        DatalensError: ids are missing, or there is not one for each image.
    """
    if by_person and ids is None:
        raise DatalensError(
            "to protect persons, every image needs an id that says whose it is, and there are no ids: add them"
        )
    if ids is not None:
        if len(ids) != len(images):
            raise DatalensError(f"there are {len(ids)} record ids for {len(images)} images: give each image one id")
        return ((person_key if by_person else id_key)(identity) for identity in ids.tolist())
    return (content_key(image) for image in images)


def id_key(identity: object) -> bytes:
    return b"id:" + str(identity).encode(errors="surrogateescape")  # a file name may be any bytes


# Spellings of a missing id, reduced to letters and digits: "NA", "N/A" and "<NA>" become "na"; "-" and "?" become "".
MISSING = frozenset(
    (
        *("", "na", "nan", "nat", "none", "null", "nil", "void", "blank", "empty", "missing", "undefined"),
        *("unspecified", "notspecified", "notavailable", "notapplicable", "notknown", "notgiven", "noid", "nodata"),
        *("noname", "tbd", "unknown", "unk", "unbekannt", "inconnu", "desconocido", "sconosciuto"),
        *("anonymous", "anonymized", "anonymised", "anon", "withheld", "redacted", "unassigned", "unidentified"),
        *("notrecorded", "notreported", "notprovided", "norecord", "missingvalue", "undef", "nacharacter", "nainteger"),
        *("unknownperson", "unknownpatient", "unknownsubject", "unknownparticipant", "unknownuser"),
        *("onbekend", "nichtbekannt", "keineangabe", "\u043d\u0435\u0438\u0437\u0432\u0435\u0441\u0442\u043d\u043e"),
        *("\u672a\u77e5", "\u4e0d\u660e"),
    )
)
# Other spellings: negative numbers such as -1 and -999, \N as in dumps of MySQL, and the nil UUID.
CODES = re.compile(r"[-\u2212](1|9+)(\.0*)?|\\n|0{8}-(0{4}-){3}0{12}")


def person_key(identity: object, where: str = "a record") -> bytes:
    """Return the key of the person whose record this is, normalised to one spelling.

    Two spellings of one id would make two units of a person. A missing id that many records share would make one unit
    of many persons.

    | id | becomes |
    |---|---|
    | text | the text without white space around it, in Unicode's form NFC |
    | whole number | its digits, so that 7 is "7" |
    | missing: None, empty or a spelling of "missing" | an error |
    | a float (into which a table turns a column with gaps), or anything else | an error |

    Persons who share an id are one unit. It is protected as a whole, and none of them is protected alone.

    Args:
        identity: the id as it was given.
        where: the record, for messages.
    """
    if isinstance(identity, bytes):
        identity = identity.decode(errors="surrogateescape")
    gap = identity is None or type(identity).__name__ in ("NAType", "NaTType")  # pandas', which equal nothing
    gap = gap or (isinstance(identity, float) and math.isnan(identity))
    if gap or _is_gap(str(identity)):
        text = "" if gap else str(identity).strip()[:40]
        meant = f" ({text!r} stands for a missing one)" if text else ""
        raise DatalensError(f"{where} has no id that says whose it is{meant}: every record needs one with --record-id")
    if type(identity) not in (str, int):
        raise DatalensError(
            f"{where} has an id of type {type(identity).__name__}: ids of persons must be text or whole numbers"
        )
    return id_key(unicodedata.normalize("NFC", str(identity)).strip())


def _is_gap(identity: str) -> bool:
    plain = unicodedata.normalize("NFKC", identity).casefold()
    return CODES.fullmatch(plain.strip()) is not None or "".join(filter(str.isalnum, plain)) in MISSING


def content_key(image: np.ndarray) -> bytes:
    return b"content:" + np.ascontiguousarray(image).tobytes()


def block_records(schema: Schema) -> int:
    """Return how many records a block has, from public facts."""
    return max(1, min(BLOCK_RECORDS, BLOCK_BYTES // schema.dimensions))


def collect(records: Records, *, most: int | None = None, seed: int = 0) -> Dataset:
    """Return the records in memory: all of them, or at most `most`, drawn at random. For test sets and small sets."""
    if isinstance(records, OnDisk):
        records = records.load()
    if isinstance(records, Dataset) and (most is None or most >= len(records.images)):
        return records
    order = None if most is None else draw(_count(records), most, seed)
    ids: list[bytes] = []  # of persons, where these are the units

    def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        if records.schema.by_person:
            ids.extend(keys)
        return np.zeros(len(index), dtype=np.int64)

    blocks = list(records.blocks(everyone if order is None else those(order)))
    schema = records.schema
    shape = (0, schema.height, schema.width, schema.channels)
    images = np.concatenate([block.images for block in blocks] or [np.zeros(shape, np.uint8)])
    labels = np.concatenate([block.labels for block in blocks] or [np.zeros(0, np.int64)])
    if not len(images):
        raise DatalensError(f"{schema.name} has no record here: check the files")
    if order is None:
        persons = np.array(ids, object) if ids else None
        return Dataset(
            schema=schema, images=images, labels=labels, ids=persons, fixed_positions=has_fixed_positions(records)
        )
    as_drawn = np.argsort(np.argsort(order))  # the stream yields them by position
    return Dataset(
        schema=schema,
        images=images[as_drawn],
        labels=labels[as_drawn],
        fixed_positions=has_fixed_positions(records),
    )


def has_fixed_positions(records: Records) -> bool:
    """Return whether the records state that they are a list; False if they state nothing, as another package's may."""
    return getattr(records, "fixed_positions", False) is True


def check_fixed_positions(records: Records) -> None:
    """Raise unless the records are a list, which shares by position require."""
    if not has_fixed_positions(records):
        raise DatalensError(
            f"{records.schema.name}: under replace-one, teachers' shares go by position, which must not depend on the "
            "records themselves, as it does where files are sorted by name: use .npz, idx, one .parquet, a .csv with "
            "one line for each record, or arrays; or leave --relation out"
        )


def those(which: np.ndarray) -> Choose:
    """Choose records by their number among those seen; positions may have gaps where a set leaves records out."""
    count = 0

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        nonlocal count
        numbers = np.arange(count, count + len(index))
        count += len(index)
        return np.where(np.isin(numbers, which), 0, -1)

    return choose


def _count(records: Records) -> int:
    """Return how many records there are, without decoding any."""
    count = 0

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        nonlocal count
        count += len(index)
        return np.full(len(index), -1, dtype=np.int64)

    for _ in records.blocks(choose):
        pass
    return count


def draw(count: int, most: int, seed: int) -> np.ndarray:
    """Return `most` of the numbers from 0 to count - 1, at random; all of them if there are no more."""
    if most >= count:
        return np.arange(count)
    return np.random.default_rng(seed).choice(count, most, replace=False)
