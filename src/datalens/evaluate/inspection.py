"""`datalens inspect`: counts, sizes and problems of the user's own data, and the plans for it. For the owner only.

The figures are exact, so no ε covers them. They are printed on the terminal and never written to a file or release.
"""

import dataclasses
import hashlib
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data import dicom as dicom_files
from datalens.data import formats
from datalens.data.images import WORKERS, Encoded, ImageRecords
from datalens.data.own import tables
from datalens.data.own.reading import LARGEST, SMALLEST, Found, Reading
from datalens.data.pixels import WHAT_TO_DO, Kind, checked_kind
from datalens.data.records import Dataset, OnDisk, Records, block_records, draw, person_key
from datalens.data.schema import IMAGE, PERSON, Schema
from datalens.errors import DatalensError, NoTestImages
from datalens.options import TrainOptions
from datalens.plans.base import Settings
from datalens.plans.guidance import warnings
from datalens.plans.registry import make_plan
from datalens.privacy.ledger import Budget
from datalens.progress import bar

OWNER_ONLY = "for the owner only: these are exact figures about the data, not covered by any ε; do not pass them on"
TINY = 20  # with fewer records, nothing can be learned about a class (see released.moments)
NAMED = 5  # number of sizes, and of images of other sizes, that are listed
# Kind of problem, as JSON has it → in words.
PROBLEMS = {
    "no_images": "files that are no images",
    "unreadable": "images that cannot be read",
    "duplicates": "images that are there twice",
    "tiny_classes": "classes that are too small",
    "mixed": "images of different kinds",
    "no_test": "test images that cannot be used",
    "in_both": "test images that are among the training images",
}
EPSILONS = (1.0, 3.0, 10.0)
BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Look:
    """The result of decoding one image."""

    digest: bytes
    kind: Kind | None
    problem: str | None
    dicom: dicom_files.Facts | None = None


def inspect(
    path: Path, reading: Reading, *, nominal_size: int | None, delta: float, most: int | None
) -> dict[str, Any]:
    """Return everything that `datalens inspect` shows, as JSON.

    Args:
        path: the user's data.
        reading: how to read it.
        nominal_size: the declared nominal number of records or persons; None: a round figure near the true one.
        delta: the δ of the plans.
        most: limit of images to decode; None: all.
    """
    if str(path) in formats.sources.names() and not path.exists():
        raise DatalensError(f"{path} is a named data set, whose figures are public: see `datalens data list`")
    # Whatever cannot be an image is listed, whether or not `train` would leave it out.
    listing = reading if path.suffix == ".npz" else dataclasses.replace(reading, skip_unreadable=True)
    listed = formats.own_images(path, listing)
    classes = reading.shown(listed.classes) if isinstance(listed, Found) else listed.schema.classes
    labels, ids, looks, names = _look(listed, most)
    test_images, test_looks, test_names, test_facts = _test_images(path, listing, most)
    both = {look.digest for look in looks if look.digest}
    if reading.skip_unreadable and len(looks) == len(labels):  # count what `train` will read
        kept = np.array([look.problem is None for look in looks], dtype=bool)
        labels, ids = labels[kept], [one for one, kept_ in zip(ids, kept, strict=True) if kept_]
    sizes = Counter(f"{look.kind.height}x{look.kind.width}" for look in looks if look.kind)
    modes = Counter(look.kind.mode for look in looks if look.kind)
    per_class = Counter(dict.fromkeys(classes, 0))
    per_class.update({classes[i]: n for i, n in enumerate(np.bincount(labels, minlength=len(classes)).tolist())})
    whose = reading.id_column if isinstance(listed, OnDisk) else listed.record_id or reading.id_column
    keys = [person_key(one, f"record {i + 1}") for i, one in enumerate(ids if whose is not None else [])]
    images_of = Counter(keys)
    persons = len(images_of) if whose is not None else None
    units = per_class  # number of privacy units in each class: records or persons
    if persons is not None:
        units = Counter(dict.fromkeys(classes, 0))
        units.update(classes[label] for label, _ in {*zip(labels.tolist(), keys, strict=True)})
    found: dict[str, Any] = {
        "path": str(path),
        "records": len(labels),
        "persons": persons,
        "most_images_of_a_person": max(images_of.values()) if persons else None,
        "looked_into": len(looks),
        "classes": dict(per_class),
        "persons_of_classes": None if persons is None else dict(units),
        "test_images": test_images,
        "sizes": dict(sizes.most_common()),
        "modes": dict(modes.most_common()),
        "dicom": _dicom(looks),
        "for": OWNER_ONLY,
    }
    found |= _problems(looks, names, units, reading, by_person=whose is not None)
    found["mixed"] = _mixed([*looks, *test_looks], [*names, *test_names], reading)
    found["unreadable"] += [look.problem for look in test_looks if look.problem]
    found["in_both"] = [
        f"{name} is a training image, too: nothing can be measured on it"
        for look, name in zip(test_looks, test_names, strict=True)
        if look.kind and look.digest in both
    ]
    found["no_test"] = test_facts["no_test"]
    found["no_images"] = [*(listed.no_images if isinstance(listed, Found) else ()), *test_facts["no_images"]]
    found["left_out"] = reading.skip_unreadable
    found["columns"] = columns_of(path) if reading.label is None or reading.record_id is None else []
    found["suggested"] = suggested(found["columns"], reading)
    found["nominal_size"] = nominal_size or _round(len(labels) if persons is None else persons)
    found["nominal_size_declared"] = nominal_size is not None
    found["plans"] = _plans(path, listed, reading, found, delta)
    return found


def _test_images(
    path: Path, listing: Reading, most: int | None
) -> tuple[int | None, list[Look], list[str], dict[str, list[str]]]:
    """Return the number of test images, results and names of the decoded ones, and problems of other kinds.

    The number is None if there are none: `datalens evaluate` cannot run.
    """
    facts: dict[str, list[str]] = {"no_test": [], "no_images": []}
    try:
        listed = formats.own_images(path, listing, "test")
        labels, _, looks, names = _look(listed, most, "looking into test images")
    except NoTestImages:
        return None, [], [], facts
    except (DatalensError, OSError) as error:
        return None, [], [], facts | {"no_test": [str(error)]}
    facts["no_images"] = list(listed.no_images) if isinstance(listed, Found) else []
    readable = sum(look.problem is None for look in looks)
    whole = listing.skip_unreadable and len(looks) == len(labels)
    return readable if whole else len(labels), looks, names, facts


def _count(listed: Found | OnDisk) -> int:
    """Return how many images there are. Only parquet files are read for it."""
    if listed.count is not None:
        return listed.count
    assert isinstance(listed, Found)
    return sum(len(some.ids) for some in listed.encoded(BLOCK))


def _look(
    listed: Found | OnDisk, most: int | None, doing: str = "looking into images"
) -> tuple[np.ndarray, list[Any], list[Look], list[str]]:
    """Return labels and ids of all images, results and names of the decoded ones; everything is read once."""
    if isinstance(listed, OnDisk):
        return _look_at_arrays(listed.load(), most, doing)
    labels: list[np.ndarray] = [np.zeros(0, np.int64)]
    ids: list[Any] = []
    looks: list[Look] = []
    names: list[str] = []
    total, chosen = listed.count, None  # all
    if most is not None:
        chosen = np.zeros(_count(listed), dtype=bool)
        chosen[draw(len(chosen), most, seed=0)] = True
        total = int(chosen.sum())
    with ThreadPoolExecutor(WORKERS) as pool, bar(doing, total) as (progress, task):
        for some, start in _numbered(listed.encoded(BLOCK)):
            labels.append(some.labels)
            ids += some.ids
            which = list(range(len(some.index)))
            if chosen is not None:
                which = np.flatnonzero(chosen[start : start + len(some.index)]).tolist()
            looks += pool.map(lambda i, some=some: _one(some, i, dicom=listed.dicom), which)
            names += [some.names[i] for i in which]
            progress.advance(task, len(which))
    return np.concatenate(labels), ids, looks, names


def _numbered(blocks: Iterator[Encoded]) -> Iterator[tuple[Encoded, int]]:
    """Yield each block with the number of records before it."""
    seen = 0
    for some in blocks:
        yield some, seen
        seen += len(some.index)


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


def _dicom(looks: list[Look]) -> dict[str, int] | None:
    """Return how many studies and series the images are of; None: these are no DICOM files."""
    found = [look.dicom for look in looks if look.dicom]
    if not found:
        return None
    return {"studies": len({one.study for one in found}), "series": len({one.series for one in found})}


def _look_at_arrays(
    listed: Dataset, most: int | None, doing: str
) -> tuple[np.ndarray, list[Any], list[Look], list[str]]:
    """Return the same for arrays, which were checked when they were opened."""
    schema, count = listed.schema, len(listed.images)
    kind = Kind(height=schema.height, width=schema.width, mode={1: "L", 3: "RGB"}.get(schema.channels, "other"))
    ids = list(range(count)) if listed.ids is None else listed.ids.tolist()
    chosen = range(min(count, most or count))
    looks, size = [], block_records(schema)
    with bar(doing, len(chosen)) as (progress, task):
        for start in range(0, len(chosen), size):
            part = listed.images[start : min(start + size, len(chosen))]
            looks += [Look(digest=hashlib.sha256(image.tobytes()).digest(), kind=kind, problem=None) for image in part]
            progress.advance(task, len(part))
    return listed.labels, ids, looks, [f"record {i}" for i in chosen]


def _problems(
    looks: list[Look],
    names: list[str],
    units: Counter[str],
    reading: Reading,
    *,
    by_person: bool,
) -> dict[str, Any]:
    first: dict[bytes, str] = {}
    twice = []
    for look, name in zip(looks, names, strict=True):
        if look.digest and first.setdefault(look.digest, name) != name:
            twice.append(f"{name} is the same as {first[look.digest]}")
    unit = "persons" if by_person else "records"
    tiny = [
        f"class {name} has {count} {unit}, too few to learn anything about it: add more, or merge it with another class"
        for name, count in units.items()
        if count < TINY
    ]
    return {"unreadable": [look.problem for look in looks if look.problem], "duplicates": twice, "tiny_classes": tiny}


def _mixed(looks: list[Look], names: list[str], reading: Reading) -> list[str]:
    """Return problems of images that can be read, but not together."""
    mixed, images_of = [], dict[str, list[str]]()
    for look, name in zip(looks, names, strict=True):
        if look.kind:
            images_of.setdefault(f"{look.kind.height}x{look.kind.width}", []).append(name)
    sizes = sorted(images_of, key=lambda size: -len(images_of[size]))
    if len(sizes) > 1 and reading.image_size is None:
        others = [f"{name} ({size})" for size in sizes[1:] for name in images_of[size]]
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        mixed.append(
            f"images of {len(sizes)} sizes: choose one with --image-size. Most are {sizes[0]}; others are "
            f"{', '.join(others[:NAMED])}{more}"
        )
    modes = {look.kind.mode for look in looks if look.kind}
    if len({Kind(height=1, width=1, mode=mode).grey for mode in modes}) > 1 and not reading.grayscale:
        mixed.append("grey and colour images: the first one decides, and must be colour; or use --grayscale")
    if burned_in := [name for look, name in zip(looks, names, strict=True) if look.dicom and look.dicom.burned_in]:
        mixed.append(
            f"text in the pixels of {len(burned_in)} images, says {burned_in[0]}: cut it off, or leave them out"
        )
    outside = [size for size in sizes if not all(SMALLEST <= int(side) <= LARGEST for side in size.split("x"))]
    if outside and reading.image_size is None:
        mixed.append(f"images of {outside[0]} need --image-size, {SMALLEST} to {LARGEST}")
    return mixed


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
        plan["classes"] = judged(settings, schema, budget, counts)
        plans.append(plan | {"warnings": warnings(budget, schema, settings)})
    return plans


def judged(settings: Settings, schema: Schema, budget: Budget, counts: Mapping[str, int]) -> list[str]:
    """Return what to expect of each class, by exact counts: for the owner only."""
    unit = "persons" if schema.by_person else "records"
    outlooks = settings.outlook(schema, budget, [float(counts.get(name, 0)) for name in schema.classes])
    return [
        f"class {name}, {counts.get(name, 0)} {unit}: {one.words}"
        + (f". What helps: {one.remedy}" if one.remedy else "")
        for name, one in zip(schema.classes, outlooks, strict=bool(outlooks))
    ]


def judged_files(settings: Settings, schema: Schema, budget: Budget, records: Records) -> list[str]:
    """Return what to expect of each class of the user's own files, by exact counts: for the owner only.

    [] for methods that cannot tell, and for arrays, which would have to be loaded for it: `datalens inspect` does that.
    """
    if not isinstance(records, ImageRecords) or not settings.outlook(schema, budget, [1.0] * len(schema.classes)):
        return []
    return judged(settings, schema, budget, class_units(records))


def class_units(records: ImageRecords) -> dict[str, int]:
    """Return how many records (or persons) each class has. No image is decoded. For the owner only."""
    classes, by_person = records.schema.classes, records.schema.by_person
    units: Counter[str] = Counter(dict.fromkeys(classes, 0))
    persons: set[tuple[int, bytes]] = set()
    for some in records.encoded():
        labels = some.labels.tolist()
        if by_person:
            persons |= {(label, person_key(one)) for label, one in zip(labels, some.ids, strict=True)}
        else:
            units.update(classes[label] for label in labels)
    units.update(classes[label] for label, _ in persons)
    return dict(units)


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
