"""`datalens inspect`: counts, sizes and problems of the user's own data, and the plans for it. For the owner only.

The figures are exact, so no ε covers them. They are printed on the terminal and never written to a file or release.
"""

import dataclasses
import hashlib
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data import dicom as dicom_files
from datalens.data import formats
from datalens.data.images import WORKERS, Encoded, ImageRecords
from datalens.data.own import tables
from datalens.data.own.reading import LARGEST, SMALLEST, Found, Reading
from datalens.data.parts import Part
from datalens.data.pixels import WHAT_TO_DO, Kind, checked_kind
from datalens.data.records import Dataset, OnDisk, Records, draw, person_key
from datalens.data.schema import IMAGE, PERSON, Schema
from datalens.errors import DatalensError, NoTestImages
from datalens.options import TrainOptions
from datalens.plans.base import Settings
from datalens.plans.guidance import warnings
from datalens.plans.registry import make_plan
from datalens.privacy.ledger import Budget
from datalens.progress import bar
from datalens.run import cluster
from datalens.run.cluster import if_asked as if_asked

OWNER_ONLY = "for the owner only: these are exact figures about the data, not covered by any ε; do not pass them on"
TINY = 20  # with fewer records, nothing can be learned about a class (see released.moments)
NAMED = 5  # number of sizes, and of images of other sizes, that are listed
# Kind of problem, as JSON has it → in words.
PROBLEMS = {
    "no_images": "files that are not images",
    "unreadable": "images that cannot be read",
    "duplicates": "duplicate images",
    "tiny_classes": "classes that are too small",
    "mixed": "images of different kinds",
    "no_test": "test images that cannot be used",
    "in_both": "test images that are among the training images",
}
EPSILONS = (1.0, 3.0, 10.0)
BLOCK = 1024
KEY = 16  # bytes of a hash that stands for an image or a person
BLANK = bytes(KEY)


@dataclass(frozen=True, kw_only=True)
class Look:
    """The result of decoding one image."""

    digest: bytes
    kind: Kind | None
    problem: str | None
    dicom: dicom_files.Facts | None = None


@dataclass(kw_only=True)
class Tally:
    """Findings about some of the records: 41 bytes for each, and the names of problems.

    Attributes:
        labels: the classes of all records.
        persons: a hash for each record that stands for its person; empty where single records are protected.
        digests: a hash of each image that was looked into; BLANK where its file cannot be read.
        fine: whether each of these is an image, a byte for each.
        places: their parts and positions, [m, 2].
        sizes, modes: how many of them have each.
        of_size: the first images of each size, by name.
        unreadable: why images cannot be read.
        burned_in: names of images that state that text is burned into their pixels.
        studies, series: of DICOM files.
    """

    labels: list[np.ndarray] = field(default_factory=list)
    persons: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)
    fine: bytearray = field(default_factory=bytearray)
    places: list[np.ndarray] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    of_size: dict[str, list[str]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    burned_in: list[str] = field(default_factory=list)
    studies: set[str] = field(default_factory=set)
    series: set[str] = field(default_factory=set)

    def add(self, look: Look, name: str) -> None:
        self.digests += look.digest[:KEY] or BLANK
        self.fine.append(look.problem is None)
        if look.problem:
            self.unreadable.append(look.problem)
        if look.kind:
            size = f"{look.kind.height}x{look.kind.width}"
            self.sizes[size] += 1
            self.modes[look.kind.mode] += 1
            if self.sizes[size] <= NAMED:
                self.of_size.setdefault(size, []).append(name)
        if look.dicom:
            self.studies.add(look.dicom.study)
            self.series.add(look.dicom.series)
            if look.dicom.burned_in:
                self.burned_in.append(name)

    def add_records(self, labels: np.ndarray, ids: Iterable[Any], *, before: int) -> None:
        """Count records. `ids`: whose they are, if persons are protected; `before`: how many were counted before."""
        self.labels.append(labels)
        for i, one in enumerate(ids):
            self.persons += hashlib.sha256(person_key(one, f"record {before + i + 1}")).digest()[:KEY]

    def join(self, other: "Tally") -> None:
        """Add what was found in other records."""
        for name in ("labels", "persons", "digests", "fine", "places", "unreadable", "burned_in"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for size, names in other.of_size.items():
            self.of_size[size] = (self.of_size.get(size, []) + names)[:NAMED]
        self.sizes.update(other.sizes)
        self.modes.update(other.modes)
        self.studies |= other.studies
        self.series |= other.series


def inspect(
    path: Path,
    reading: Reading,
    *,
    nominal_size: int | None,
    delta: float,
    most: int | None,
    client: Any = None,
) -> dict[str, Any]:
    """Return everything that `datalens inspect` shows, as JSON.

    Args:
        path: the user's data.
        reading: how to read it.
        nominal_size: the declared nominal number of records or persons; None: a round figure near the true one.
        delta: the δ of the plans.
        most: limit of images to decode; None: all.
        client: of a cluster, whose workers read the parts of the data; None: this process reads it.
    """
    if str(path) in formats.sources.names() and not path.exists():
        raise DatalensError(f"{path} is a named data set, whose figures are public: see `datalens data list`")
    # Whatever cannot be an image is listed, whether or not `train` would leave it out.
    listing = reading if path.suffix == ".npz" else dataclasses.replace(reading, skip_unreadable=True)
    listed = formats.own_images(path, listing)
    classes = reading.shown(listed.classes) if isinstance(listed, Found) else listed.schema.classes
    whose = reading.id_column if isinstance(listed, OnDisk) else listed.record_id or reading.id_column
    by_person = whose is not None
    where = _place(path, listed, listing, "train", client, by_person=by_person)
    tally = where.tally(most, "looking into images")
    labels, persons = np.concatenate([np.zeros(0, np.int64), *tally.labels]), _hashes(tally.persons)
    fine = np.frombuffer(bytes(tally.fine), bool)
    if reading.skip_unreadable and len(fine) == len(labels):  # count what `train` will read
        labels, persons = labels[fine], persons[fine] if by_person else persons
    test_images, test, tested, test_facts = _test_images(path, listing, most, client)
    per_class = _by_class(labels, classes)
    units = _persons_by_class(labels, persons, classes) if by_person else per_class
    images_of = np.unique(persons, return_counts=True)[1]
    found: dict[str, Any] = {
        "path": str(path),
        "records": len(labels),
        "persons": len(images_of) if by_person else None,
        "most_images_of_a_person": int(images_of.max()) if len(images_of) else None,
        "looked_into": len(fine),
        "classes": dict(per_class),
        "persons_of_classes": dict(units) if by_person else None,
        "counted_as": _weights(labels, persons, classes) if by_person else None,
        "test_images": test_images,
        "sizes": dict(tally.sizes.most_common()),
        "modes": dict(tally.modes.most_common()),
        "dicom": {"studies": len(tally.studies), "series": len(tally.series)} if tally.studies else None,
        "for": OWNER_ONLY,
    }
    found |= _problems(tally, where, units, by_person=by_person)
    found["in_both"] = _in_both(tally, test, tested)
    whole = Tally()
    whole.join(tally)
    whole.join(test)
    found["mixed"] = _mixed(whole, reading)
    found["unreadable"] += test.unreadable
    found["no_test"] = test_facts["no_test"]
    found["no_images"] = [*(listed.no_images if isinstance(listed, Found) else ()), *test_facts["no_images"]]
    found["left_out"] = reading.skip_unreadable
    found["columns"] = columns_of(path) if reading.label is None or reading.record_id is None else []
    found["suggested"] = suggested(found["columns"], reading)
    found["nominal_size"] = nominal_size or _round(found["persons"] if by_person else len(labels))
    found["nominal_size_declared"] = nominal_size is not None
    found["plans"] = _plans(path, listed, reading, found, delta)
    return found


def _test_images(
    path: Path, listing: Reading, most: int | None, client: Any
) -> tuple[int | None, "Tally", "Here | OnWorkers | None", dict[str, list[str]]]:
    """Return the number of test images, what was found in them, where they are, and problems of other kinds.

    The number is None if there are none: `datalens evaluate` cannot run.
    """
    facts: dict[str, list[str]] = {"no_test": [], "no_images": []}
    try:
        listed = formats.own_images(path, listing, "test")
        where = _place(path, listed, listing, "test", client, by_person=False)
        tally = where.tally(most, "looking into test images")
    except NoTestImages:
        return None, Tally(), None, facts
    except (DatalensError, OSError) as error:
        return None, Tally(), None, facts | {"no_test": [str(error)]}
    facts["no_images"] = list(listed.no_images) if isinstance(listed, Found) else []
    count = sum(map(len, tally.labels))
    whole = listing.skip_unreadable and len(tally.fine) == count
    return sum(tally.fine) if whole else count, tally, where, facts


def _count(listed: Found | OnDisk) -> int:
    """Return how many images there are. Only parquet files at an address are read for it."""
    if listed.count is not None:
        return listed.count
    assert isinstance(listed, Found)
    return sum(len(some.ids) for some in listed.encoded(BLOCK))


# --- looking into images ----------------------------------------------------------------------------------------------


def tally_of(
    blocks: Iterable[Encoded],
    *,
    by_person: bool,
    dicom: bool = False,
    part: int = 0,
    chosen: np.ndarray | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> Tally:
    """Count images, still encoded, and look into them.

    Args:
        blocks: the images.
        by_person: whether their ids say whose they are.
        dicom: whether they are DICOM files.
        part: the number of the part that they are.
        chosen: whether to look into each of them, [n]; None: into all.
        advance: called with the number of images that were looked into.
    """
    tally, seen = Tally(), 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for some in blocks:
            tally.add_records(some.labels, some.ids if by_person else (), before=seen)
            which = np.arange(len(some.index))
            if chosen is not None:
                which = np.flatnonzero(chosen[seen : seen + len(some.index)])
            looks = pool.map(lambda i, some=some: _one(some, i, dicom=dicom), which.tolist())
            for i, look in zip(which.tolist(), looks, strict=True):
                tally.add(look, some.names[i])
            tally.places.append(np.stack([np.full(len(which), part), some.index[which]], axis=1))
            seen += len(some.index)
            advance(len(which))
    return tally


def tally_of_arrays(listed: Dataset, most: int | None, doing: str, *, by_person: bool) -> Tally:
    """Return the same for arrays, which were checked when they were opened."""
    tally, schema, count = Tally(), listed.schema, len(listed.images)
    ids = () if not by_person else range(count) if listed.ids is None else listed.ids.tolist()
    tally.add_records(listed.labels, ids, before=0)
    kind = Kind(height=schema.height, width=schema.width, mode={1: "L", 3: "RGB"}.get(schema.channels, "other"))
    looked = np.arange(min(count, most or count))
    tally.places.append(np.stack([np.zeros_like(looked), looked], axis=1))
    with bar(doing, len(looked)) as (progress, task):
        for i, image in enumerate(listed.images[: len(looked)]):
            look = Look(digest=hashlib.sha256(image.tobytes()).digest(), kind=kind, problem=None)
            tally.add(look, f"record {i}")
            progress.advance(task, 1)
    return tally


def _one(some: Encoded, i: int, *, dicom: bool) -> Look:
    try:
        data = some.read(i)
    except DatalensError as error:
        return Look(digest=b"", kind=None, problem=str(error))
    digest = hashlib.sha256(data).digest()
    try:
        kind = checked_kind(data, some.names[i], dicom=dicom)
        facts = dicom_files.facts(data, some.names[i]) if dicom else None
        return Look(digest=digest, kind=kind, problem=None, dicom=facts)
    except DatalensError as error:
        return Look(digest=digest, kind=None, problem=str(error))


def names_at(blocks: Iterable[Encoded], positions: np.ndarray) -> list[str]:
    """Return the names of the images at these positions, which increase."""
    names: list[str] = []
    for some in blocks:
        names += [some.names[i] for i in np.flatnonzero(np.isin(some.index, positions)).tolist()]
    return names


class Here:
    """Images that this process reads."""

    def __init__(self, listed: Found | OnDisk, *, by_person: bool) -> None:
        self._listed, self._by_person = listed, by_person

    def tally(self, most: int | None, doing: str) -> Tally:
        if isinstance(self._listed, OnDisk):
            return tally_of_arrays(self._listed.load(), most, doing, by_person=self._by_person)
        total, chosen = self._listed.count, None  # all
        if most is not None:
            chosen = _drawn(_count(self._listed), most)
            total = int(chosen.sum())
        with bar(doing, total) as (progress, task):
            return tally_of(
                self._listed.encoded(BLOCK),
                by_person=self._by_person,
                dicom=self._listed.dicom,
                chosen=chosen,
                advance=lambda count: progress.advance(task, count),
            )

    def names(self, places: np.ndarray) -> list[str]:
        """Return the names of the images at these places, [n, 2], which increase."""
        if isinstance(self._listed, OnDisk):
            return [f"record {i}" for i in places[:, 1].tolist()]
        return names_at(self._listed.encoded(BLOCK), places[:, 1])


class OnWorkers:
    """Images that the workers of a cluster read, part by part."""

    def __init__(self, client: Any, parts: Sequence[Part], *, by_person: bool) -> None:
        self._client, self._parts, self._by_person = client, parts, by_person

    def tally(self, most: int | None, doing: str) -> Tally:
        chosen: list[np.ndarray | None] = [None] * len(self._parts)
        if most is not None:
            counts = cluster.each(self._client, _count_part, self._parts, saying="counting images")
            chosen = list(np.split(_drawn(sum(counts), most), np.cumsum(counts)[:-1]))
        by_person = [self._by_person] * len(self._parts)
        whole = Tally()
        for tally in cluster.each(self._client, _tally_part, self._parts, by_person, chosen, saying=doing):
            whole.join(tally)
        return whole

    def names(self, places: np.ndarray) -> list[str]:
        """Return the names of the images at these places, [n, 2], which increase."""
        wanted = [places[places[:, 0] == part.number, 1] for part in self._parts]
        found = cluster.each(self._client, _names_of_part, self._parts, wanted, saying="naming images")
        return [name for names in found for name in names]


def _place(
    path: Path, listed: Found | OnDisk, reading: Reading, split: str, client: Any, *, by_person: bool
) -> Here | OnWorkers:
    """Return what looks into the images of a split: this process, or the workers, which read parquet files."""
    if client is None:
        return Here(listed, by_person=by_person)
    classes = listed.classes if isinstance(listed, Found) else None
    parts = formats.cut(formats.named_by(path), None, pieces=1, reading=reading, split=split, classes=classes)
    if parts[0].file is None:
        raise DatalensError(f"{path} is not of parquet files, which workers read one by one: leave --engine out")
    return OnWorkers(client, parts, by_person=by_person)


def _count_part(part: Part) -> int:
    return _count(formats.list_part(part))


def _tally_part(part: Part, by_person: bool, chosen: np.ndarray | None) -> Tally:
    return tally_of(formats.list_part(part).encoded(BLOCK), by_person=by_person, part=part.number, chosen=chosen)


def _names_of_part(part: Part, positions: np.ndarray) -> list[str]:
    return names_at(formats.list_part(part).encoded(BLOCK), positions) if len(positions) else []


def _drawn(count: int, most: int) -> np.ndarray:
    """Return which of the images are looked into, [count] bool: at most `most`, at random."""
    chosen = np.zeros(count, dtype=bool)
    chosen[draw(count, most, seed=0)] = True
    return chosen


# --- problems ---------------------------------------------------------------------------------------------------------


def _problems(tally: Tally, where: Here | OnWorkers, units: Counter[str], *, by_person: bool) -> dict[str, list[str]]:
    unit = "persons" if by_person else "records"
    tiny = [
        f"class {name} has {count} {unit}, too few to learn anything about it: add more, or merge it with another class"
        for name, count in units.items()
        if count < TINY
    ]
    return {
        "unreadable": list(tally.unreadable),
        "duplicates": _duplicates(tally, where),
        "tiny_classes": tiny,
    }


def _mixed(tally: Tally, reading: Reading) -> list[str]:
    """Return problems of images that can be read, but not together."""
    mixed, sizes = [], [size for size, _ in tally.sizes.most_common()]
    if len(sizes) > 1 and reading.image_size is None:
        others = [f"{name} ({size})" for size in sizes[1:] for name in tally.of_size[size]][:NAMED]
        left = sum(tally.sizes[size] for size in sizes[1:]) - len(others)
        mixed.append(
            f"images of {len(sizes)} sizes: choose one with --image-size. Most are {sizes[0]}; others are "
            f"{', '.join(others)}" + (f" and {left} more" if left else "")
        )
    if len({Kind(height=1, width=1, mode=mode).grey for mode in tally.modes}) > 1 and not reading.grayscale:
        mixed.append("grey and colour images: the first one decides, and must be colour; or use --grayscale")
    if tally.burned_in:
        mixed.append(
            f"{len(tally.burned_in)} files say that their pixels contain text, {tally.burned_in[0]} among them: cut it "
            "off, or leave them out"
        )
    outside = [size for size in sizes if not all(SMALLEST <= int(side) <= LARGEST for side in size.split("x"))]
    if outside and reading.image_size is None:
        mixed.append(f"images of {outside[0]} need --image-size, {SMALLEST} to {LARGEST}")
    return mixed


def _in_both(tally: Tally, test: Tally, tested: Here | OnWorkers | None) -> list[str]:
    """Return which test images are training images, too, by name."""
    mine = np.flatnonzero(
        np.isin(_numbers(test.digests), _numbers(tally.digests)) & np.frombuffer(bytes(test.fine), bool)
    )
    if tested is None or not len(mine):
        return []
    names = tested.names(np.concatenate(test.places)[mine])
    return [f"{name} is a training image, too: nothing can be measured on it" for name in names]


def _duplicates(tally: Tally, where: Here | OnWorkers) -> list[str]:
    """Return which images are there twice, by name. If there are any, the images are listed again."""
    digests, places = _hashes(tally.digests), np.concatenate([np.zeros((0, 2), np.int64), *tally.places])
    _, firsts, which = np.unique(digests, return_index=True, return_inverse=True)
    first = firsts[which]
    again = np.flatnonzero((first != np.arange(len(first))) & (digests != np.void(BLANK)))
    if not len(again):
        return []
    wanted = np.unique(np.concatenate([again, first[again]]))
    names = dict(zip(wanted.tolist(), where.names(places[wanted]), strict=True))
    pairs = [(names[one], names[before]) for one, before in zip(again.tolist(), first[again].tolist(), strict=True)]
    return [f"{name} is the same as {before}" for name, before in pairs if name != before]


def _hashes(joined: bytearray) -> np.ndarray:
    return np.frombuffer(bytes(joined), f"V{KEY}")


def _numbers(joined: bytearray) -> np.ndarray:
    """Return half of each hash as a number: numpy compares these quickly."""
    return np.frombuffer(bytes(joined), np.uint64)[::2]


def _by_class(labels: np.ndarray, classes: Sequence[str]) -> Counter[str]:
    """Return how many of the labels each class has."""
    return Counter(dict(zip(classes, np.bincount(labels, minlength=len(classes)).tolist(), strict=True)))


def _persons_by_class(labels: np.ndarray, persons: np.ndarray, classes: Sequence[str]) -> Counter[str]:
    """Return how many persons have a record of each class."""
    pairs = np.zeros(len(labels), [("label", np.int64), ("person", persons.dtype)])
    pairs["label"], pairs["person"] = labels, persons
    distinct = np.unique(pairs.view(f"V{pairs.itemsize}")).view(pairs.dtype)
    return _by_class(distinct["label"], classes)


def _weights(labels: np.ndarray, persons: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Return as how many persons with images of one class alone the images of each class are counted.

    A person has one row of bounded length, over all classes. So one with images of several classes counts in each for
    their number, divided by the root of the sum of their squares.
    """
    _, person = np.unique(persons, return_inverse=True)
    pairs, images = np.unique(np.stack([person, labels]), axis=1, return_counts=True)
    length = np.sqrt(np.bincount(pairs[0], images.astype(np.float64) ** 2))
    weights = np.bincount(pairs[1], images / length[pairs[0]], minlength=len(classes))
    return {name: round(float(weight), 1) for name, weight in zip(classes, weights, strict=True)}


def _plans(
    path: Path, listed: Found | OnDisk, reading: Reading, found: dict[str, Any], delta: float
) -> list[dict[str, Any]]:
    """Return what `train` would do at three budgets with these figures, or why it would refuse."""
    plans = []
    for epsilon in EPSILONS:
        plan: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "relation": "add-remove", "accountant": "exact"}
        options = TrainOptions(out=Path("plan"), data=str(path), epsilon=epsilon, delta=delta)
        try:
            schema = _schema(path, listed, reading, found)
            budget, settings = make_plan(options, schema)
        except DatalensError as error:
            plans.append(plan | {"refused": str(error)})
            continue
        parts = {part["release"]: part["noise_to_signal"] for part in settings.costs(schema, budget)}
        plan |= {"accountant": budget.accountant, "method": settings.method, "noise_to_signal": parts}
        plan |= {name: getattr(settings, name, None) for name in ("coordinates", "texture")}
        counts = found["persons_of_classes"] or found["classes"]
        plan["classes"] = judged(settings, schema, budget, counts, found["counted_as"])
        plans.append(plan | {"warnings": warnings(budget, schema, settings)})
    return plans


def judged(
    settings: Settings,
    schema: Schema,
    budget: Budget,
    counts: Mapping[str, int],
    counted_as: Mapping[str, float] | None = None,
) -> list[str]:
    """Return what to expect of each class, by exact counts: for the owner only.

    Args:
        settings, schema, budget: of the plan.
        counts: number of records or persons of each class.
        counted_as: of persons, the number that a class is worth (`_weights`); None: the same.
    """
    unit = "persons" if schema.by_person else "records"
    worth = counts if counted_as is None else counted_as
    outlooks = settings.outlook(schema, budget, [float(worth.get(name, 0)) for name in schema.classes])

    def size(name: str) -> str:
        text = f"{counts.get(name, 0)} {unit}"
        less = round(worth.get(name, 0)) < counts.get(name, 0)
        return f"{text} (worth {round(worth.get(name, 0))}: they have images of other classes, too)" if less else text

    return [
        f"class {name}, {size(name)}: {one.words}" + (f". What helps: {one.remedy}" if one.remedy else "")
        for name, one in zip(schema.classes, outlooks, strict=bool(outlooks))
    ]


def judged_files(settings: Settings, schema: Schema, budget: Budget, records: Records) -> list[str]:
    """Return what to expect of each class of the user's own files, by exact counts: for the owner only.

    [] for methods that cannot tell, and for data that would have to be loaded for it: `datalens inspect` does that.
    """
    listed = records.listed if isinstance(records, ImageRecords) else None
    if listed is None or not settings.outlook(schema, budget, [1.0] * len(schema.classes)):
        return []
    tally = Tally()
    for labels, ids in listed():
        tally.add_records(labels, ids if schema.by_person and ids is not None else (), before=0)
    labels, persons = np.concatenate([np.zeros(0, np.int64), *tally.labels]), _hashes(tally.persons)
    if not schema.by_person or len(persons) != len(labels):
        return judged(settings, schema, budget, _by_class(labels, schema.classes))
    counts = _persons_by_class(labels, persons, schema.classes)
    return judged(settings, schema, budget, counts, _weights(labels, persons, schema.classes))


# --- columns of a table -----------------------------------------------------------------------------------------------

MOST_VALUES = 20  # a column with more distinct values is hardly one of classes
SHOWN = 4  # number of values of a column that are shown


def columns_of(path: Path) -> list[dict[str, Any]]:
    """Return the columns of a table with their kinds and a few values; [] if the data is no table."""
    if path.suffix == ".csv":
        names, rows = tables.read_csv(path)
        values = {name: [row[name].strip() for row in rows] for name in names}
    elif path.is_dir() and (path / formats.METADATA).is_file():
        return columns_of(path / formats.METADATA)
    elif path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        values = tables.parquet_values(formats.parquet_parts(path))
    else:
        return []
    return [_column(name, found) for name, found in values.items()]


def _column(name: str, values: list[str]) -> dict[str, Any]:
    counts = Counter(value for value in values if value)
    distinct = len(counts)
    if all(re.fullmatch(r"[+-]?\d{1,15}", value) for value in counts):
        kind = "whole numbers"
    elif all(re.fullmatch(r"\d{4}-\d\d?-\d\d?.*", value) for value in counts):
        kind = "dates"
    elif all(_is_number(value) for value in counts):
        kind = "numbers"
    else:
        kind = "text"
    shown = [value for value, _ in counts.most_common(SHOWN)]
    return {
        "name": name,
        "kind": kind if counts else "empty",
        "distinct": distinct,
        "missing": len(values) - sum(counts.values()),
        "records": len(values),
        "values": shown,
    }


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


_PERSON = re.compile(r"patient|person|subject|proband|user|customer|kunde|fall|case|(^|_)p?id$", re.IGNORECASE)
_CLASS = re.compile(r"label|class|klasse|diagnos|befund|categor|kategorie|target|finding", re.IGNORECASE)


def suggested(columns: list[dict[str, Any]], reading: Reading) -> dict[str, str]:
    """Return which columns look like the label and the person, where none was named.

    A column of many values that repeat is likely a person; one of few values that all repeat is likely a label.
    """
    found = {}
    rest = [one for one in columns if one["name"].lower() not in (*tables.PATHS, tables.SPLIT) and not one["missing"]]
    labels = [one for one in rest if 2 <= one["distinct"] <= min(MOST_VALUES, one["records"] // 2)]
    if reading.label is None and labels and all(one["name"].lower() != tables.LABEL for one in columns):
        found["label"] = max(labels, key=lambda one: (bool(_CLASS.search(one["name"])), one["kind"] == "text"))["name"]
    persons = [
        one
        for one in rest
        if max(MOST_VALUES, one["records"] / 20) < one["distinct"] < one["records"]
        and one["kind"] in ("text", "whole numbers")
        and (one["kind"] == "text" or _PERSON.search(one["name"]))
    ]
    if reading.record_id is None and persons:
        found["record_id"] = max(persons, key=lambda one: (bool(_PERSON.search(one["name"])), one["distinct"]))["name"]
    return found


def _table_lines(found: dict[str, Any]) -> list[str]:
    """Return the columns of a table, and the command to go on with."""
    lines = ["columns:"] if found["columns"] else []
    for one in found["columns"]:
        gaps = f", {one['missing']} missing" if one["missing"] else ""
        more = ", …" if one["distinct"] > len(one["values"]) else ""
        lines.append(
            f"  {one['name']}: {one['kind']}, {one['distinct']} distinct{gaps} ({', '.join(one['values'])}{more})"
        )
    chosen = found["suggested"]
    if "record_id" in chosen:
        lines.append(
            f"column {chosen['record_id']} has many values that repeat: it is likely a person (or whatever has several "
            "images), who is protected as a whole with --record-id only"
        )
    if chosen:
        options = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in chosen.items()]
        lines.append(f"go on with: datalens inspect {shlex.quote(found['path'])} {' '.join(options)}")
    return lines


def _schema(path: Path, listed: Found | OnDisk, reading: Reading, found: dict[str, Any]) -> Schema:
    """Return the schema to judge by, with the commonest size unless one was given: the first file may be broken."""
    if not found["sizes"]:
        raise DatalensError(f"{path} holds no readable image")
    height, width = next(iter(found["sizes"])).split("x")
    mode = next(iter(found["modes"]))
    declared = reading.size() or (int(height), int(width))
    if not all(SMALLEST <= side <= LARGEST for side in declared) and isinstance(listed, Found):
        raise DatalensError(f"images of {declared[0]}x{declared[1]} need --image-size, {SMALLEST} to {LARGEST}")
    grey = reading.grayscale or Kind(height=1, width=1, mode=mode).grey
    return Schema(
        name=path.name,
        height=declared[0],
        width=declared[1],
        channels=1 if grey else 3,
        classes=tuple(found["classes"]),
        nominal_size=found["nominal_size"],
        record_unit=IMAGE if found["persons"] is None else PERSON,
    )


def _round(count: int) -> int:
    """Return the nearest round figure. A public size need not be close to the true one."""
    unit = 10 ** (len(str(max(count, 1))) - 1)
    figures = [max(1, round(part * unit)) for part in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)]
    return min(figures, key=lambda figure: abs(math.log(figure / max(count, 1))))


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures of `inspect` as lines of text."""
    units = (
        ""
        if found["persons"] is None
        else (f" of {found['persons']} persons (up to {found['most_images_of_a_person']} each)")
    )
    classes = found["classes"]
    persons = found["persons_of_classes"]
    shown = [
        f"  {name}: {count}" + ("" if persons is None else f" images of {persons[name]} persons")
        for name, count in list(classes.items())[:20]
    ]
    more = [f"  … and {len(classes) - 20} more, {min(classes.values())} to {max(classes.values())} records each"]
    output = [
        f"{found['path']}: {found['records']} images{units}, {found['looked_into']} looked into",
        f"THIS IS {OWNER_ONLY}.",
        f"classes: {len(classes)}",
        *shown,
        *(more if len(classes) > 20 else []),
        *_table_lines(found),
        "sizes: " + ", ".join(f"{size} ({count})" for size, count in list(found["sizes"].items())[:NAMED]),
        "modes: " + ", ".join(f"{mode} ({count})" for mode, count in found["modes"].items()),
        *([] if not found["dicom"] else ["DICOM: {studies} studies, {series} series".format(**found["dicom"])]),
        f"test images, for `datalens evaluate`: {found['test_images']}"
        if found["test_images"]
        else "no test images: `datalens evaluate` needs some that are not trained on (docs/data.md)",
    ]
    problems = {words: found[name] for name, words in PROBLEMS.items() if found[name]}
    for words, listed in problems.items():
        output += [f"problem: {words}: {len(listed)}", *(f"  {one.removesuffix(f': {WHAT_TO_DO}')}" for one in listed)]
    if found["unreadable"] or found["no_images"]:
        output.append(
            "--skip-unreadable leaves these out: they are not among the numbers above"
            if found["left_out"]
            else "--skip-unreadable, with every command that reads the data, leaves out what cannot be read as an image"
        )
    if not problems and not found["suggested"]:
        output.append("no problem found")
    size = found["nominal_size"]
    output.append(
        f"plans, for --nominal-size {size}"
        + ("" if found["nominal_size_declared"] else " (a round figure: choose your own, it will be public)")
        + ":"
    )
    for plan in found["plans"]:
        price = (
            f"  ε = {plan['epsilon']:g} (δ = {plan['delta']:g}, {plan['relation']}, {plan['accountant']} accountant): "
        )
        if "refused" in plan:
            output.append(price + plan["refused"])
            continue
        output.append(price.rstrip(" "))
        usable = [line for line in plan["classes"] if ": usable" in line]
        if len(usable) == len(plan["classes"]):
            output += [f"    all classes: {words}" for words in {line.partition(": ")[2] for line in usable}][:1]
        else:
            output += [f"    {line}" for line in plan["classes"]]
        output += [f"  warning: {line}" for line in plan["warnings"]]
    return output
