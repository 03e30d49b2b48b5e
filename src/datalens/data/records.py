"""Records as a stream: what training reads, whether they lie in memory, in parquet files or in folders.

A reader is asked for blocks and decodes only what is wanted, so that a data set larger than memory passes through,
and a machine that holds some of the teachers decodes only what these see.
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

# (positions in the stream [b], what identifies each record) → the share of each [b]; -1: not wanted.
Choose = Callable[[np.ndarray, Iterable[bytes]], np.ndarray]

BLOCK_RECORDS = 4096
BLOCK_BYTES = 2 * 2**20  # of pixels: features of a block take many times that while they are computed


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Some consecutive records of the stream, those that were wanted, decoded."""

    images: np.ndarray  # uint8 [b, h, w, c]
    labels: np.ndarray  # int64 [b]
    index: np.ndarray  # int64 [b]: position of each in the whole stream of that split
    share: np.ndarray  # int64 [b]: what `choose` answered


class Records(Protocol):
    """One split of a data set as a stream; nothing is held whole."""

    @property
    def schema(self) -> Schema: ...

    @property
    def fixed_positions(self) -> bool:
        """Whether the records are a list: one that is replaced, by whatever record, keeps its position, and so do all
        others. Not so where records are sorted by what they are, such as the files of a folder."""
        ...

    def blocks(self, choose: Choose) -> Iterator[Block]:
        """All records in their order, block by block. `choose` is asked once about every record."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Records in memory: images uint8 [n, h, w, c], labels int64 [n], and stable record ids where there are any."""

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


def record_keys(images: np.ndarray, ids: np.ndarray | None, *, by_person: bool = False) -> Iterable[bytes]:
    """What identifies a record: its id where there is one, else its pixels. Never its position or label.

    `by_person`: the ids say whose it is, and there is no way round them.
    """
    if by_person and ids is None:
        raise DatalensError("there are no ids that say whose images these are: none of them can be protected by person")
    if ids is not None:
        if len(ids) != len(images):
            raise DatalensError(f"there are {len(ids)} record ids for {len(images)} images: give one id an image")
        return ((person_key if by_person else id_key)(identity) for identity in ids.tolist())
    return (content_key(image) for image in images)


def id_key(identity: object) -> bytes:
    return b"id:" + str(identity).encode(errors="surrogateescape")  # a file name may be any bytes


# How a gap is spelled, by its letters and digits alone: of "NA", "N/A" and "<NA>" these are "na", of "-" and "?" none.
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
CODES = re.compile(r"[-\u2212](1|9+)(\.0*)?|\\n|0{8}-(0{4}-){3}0{12}")  # by numbers, in MySQL's dumps, and the nil UUID


def person_key(identity: object, where: str = "a record") -> bytes:
    """Whose a record is, in one spelling: two of one person would be two units, and a gap shared by many a false one.

    | id | |
    |---|---|
    | text | without white space around it, in Unicode's form NFC |
    | whole number | its digits, so that 7 is "7" |
    | none, empty or a gap's spelling; a float (which a column with gaps becomes), or anything else | refused |

    Persons who share any other id are one unit, which is protected as a whole: none of them is by themselves.
    """
    if isinstance(identity, bytes):
        identity = identity.decode(errors="surrogateescape")
    gap = identity is None or type(identity).__name__ in ("NAType", "NaTType")  # pandas', which equal nothing
    gap = gap or (isinstance(identity, float) and math.isnan(identity))
    if gap or _is_gap(str(identity)):
        text = "" if gap else str(identity).strip()[:40]
        meant = f" ({text!r} is how a gap is spelled)" if text else ""
        raise DatalensError(f"{where} has no id that says whose it is{meant}: every record needs one with --record-id")
    if type(identity) not in (str, int):
        raise DatalensError(
            f"{where} has an id of kind {type(identity).__name__}: ids of persons are text or whole numbers"
        )
    return id_key(unicodedata.normalize("NFC", str(identity)).strip())


def _is_gap(identity: str) -> bool:
    plain = unicodedata.normalize("NFKC", identity).casefold()
    return CODES.fullmatch(plain.strip()) is not None or "".join(filter(str.isalnum, plain)) in MISSING


def content_key(image: np.ndarray) -> bytes:
    return b"content:" + np.ascontiguousarray(image).tobytes()


def block_records(schema: Schema) -> int:
    """Records in a block, from public facts."""
    return max(1, min(BLOCK_RECORDS, BLOCK_BYTES // schema.dimensions))


def collect(records: Records, *, most: int | None = None, seed: int = 0) -> Dataset:
    """The records in memory: all of them, or `most` of them, drawn at random. For test sets and for small sets."""
    if isinstance(records, Dataset) and (most is None or most >= len(records.images)):
        return records
    order = None if most is None else draw(_count(records), most, seed)
    ids: list[bytes] = []  # of persons, where these are the units

    def everyone(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        if records.schema.by_person:
            ids.extend(keys)
        return np.zeros(len(index), dtype=np.int64)

    blocks = list(records.blocks(everyone if order is None else _those(order)))
    schema = records.schema
    shape = (0, schema.height, schema.width, schema.channels)
    images = np.concatenate([block.images for block in blocks] or [np.zeros(shape, np.uint8)])
    labels = np.concatenate([block.labels for block in blocks] or [np.zeros(0, np.int64)])
    if not len(images):
        raise DatalensError(f"there is no record of {schema.name} in what was given")
    if order is None:
        known = np.array(ids, object) if ids else None
        return Dataset(
            schema=schema, images=images, labels=labels, ids=known, fixed_positions=has_fixed_positions(records)
        )
    as_drawn = np.argsort(np.argsort(order))  # the stream brings them by position
    return Dataset(
        schema=schema,
        images=images[as_drawn],
        labels=labels[as_drawn],
        fixed_positions=has_fixed_positions(records),
    )


def has_fixed_positions(records: Records) -> bool:
    """What the records say of themselves; False for those that say nothing, such as another package's."""
    return getattr(records, "fixed_positions", False) is True


def check_fixed_positions(records: Records) -> None:
    """Raise unless the records are a list, as shares by position need them to be."""
    if not has_fixed_positions(records):
        raise DatalensError(
            f"{records.schema.name}: under replace-one teachers' shares go by position, which must not depend on what "
            "a record is, as it does where files are sorted by name: use .npz, idx, one .parquet, a .csv with a line a "
            "record, or arrays; or leave --relation out"
        )


def _those(which: np.ndarray) -> Choose:
    """Records by their number among those asked about: positions may have gaps where a set leaves records out."""
    asked = 0

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        nonlocal asked
        numbers = np.arange(asked, asked + len(index))
        asked += len(index)
        return np.where(np.isin(numbers, which), 0, -1)

    return choose


def _count(records: Records) -> int:
    """How many records there are; none is decoded for it."""
    asked = 0

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        nonlocal asked
        asked += len(index)
        return np.full(len(index), -1, dtype=np.int64)

    for _ in records.blocks(choose):
        pass
    return asked


def draw(count: int, most: int, seed: int) -> np.ndarray:
    """Numbers of `most` of them, at random; all where there are no more."""
    if most >= count:
        return np.arange(count)
    return np.random.default_rng(seed).choice(count, most, replace=False)
