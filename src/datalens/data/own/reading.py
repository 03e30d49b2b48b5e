"""The user's own images in a folder, in parquet files or in a CSV of paths: their schema, and their records.

Under add-remove, one record must not decide what is called public. So classes, size and channels are declared, by
options; or they are read off the data, and the schema's note, which every certificate repeats, says that the owner
declares them public by going on. The number of records is always declared.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datalens.data.dicom import DICOM, Patients
from datalens.data.images import Encoded, ImageRecords, Listed, readable
from datalens.data.pixels import kind_of, to_pixels
from datalens.data.records import block_records
from datalens.data.regular import read_regular
from datalens.data.schema import IMAGE, LEFT_OUT, PERSON, READ_OFF, Schema
from datalens.errors import DatalensError, UnreadableImage

SMALLEST, LARGEST, MOST_CLASSES = 8, 128, 1000
JOINED = " + "  # between the values of several label columns, in the name of a class
ALL = "all"  # the class of images without labels
# --label none: use no labels, even if there are folders or columns for them. --record-id none: protect single images,
# even if the files say whose they are.
NONE = "none"
TEST = ("test", "val", "valid", "validation")  # folders beside train/: the first one that exists is the test split


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options by which the user's own data is read; names and meaning are those of `options.ReadingOptions`."""

    label: str | None = None
    classes: str | None = None
    image_size: str | None = None
    grayscale: bool = False
    record_id: str | None = None
    class_names: str | None = None
    skip_unreadable: bool = False

    @classmethod
    def of(cls, options: Any) -> "Reading":
        """Return the options of a command, or those that a run remembers (older runs have none of these)."""
        known = options if isinstance(options, dict) else vars(options)
        for name in cls.__dataclass_fields__:
            kind = bool if name in ("grayscale", "skip_unreadable") else str
            if not isinstance(known.get(name), kind) and known.get(name) is not None:
                raise DatalensError(f"--{name.replace('_', '-')} cannot be {str(known[name])[:40]!r}")
        return cls(**{name: known[name] for name in cls.__dataclass_fields__ if known.get(name) is not None})

    @property
    def given(self) -> str | None:
        """The name of the first option that was given, if any."""
        return next((name.replace("_", "-") for name, value in vars(self).items() if value), None)

    @property
    def id_column(self) -> str | None:
        """The column with the person of each image; None: single images are protected."""
        return None if self.record_id == NONE else self.record_id

    @property
    def unit(self) -> str:
        return IMAGE if self.id_column is None else PERSON

    def size(self) -> tuple[int, int] | None:
        """Return height and width, if --image-size was given."""
        if self.image_size is None:
            return None
        found = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", self.image_size)
        if found is None:
            raise DatalensError(f"--image-size must be 32, or HEIGHTxWIDTH as 32x48, not {self.image_size}")
        height = int(found[1])
        return height, int(found[2] or height)

    def renamed(self) -> dict[str, str]:
        """Return what --class-names says: a class as the data has it → its name."""
        pairs = [part.partition("=") for part in (self.class_names or "").split(",") if part.strip()]
        names = {value.strip(): name.strip() for value, _, name in pairs}
        whole = all(value.strip() and name.strip() for value, _, name in pairs)
        if not whole or len(names) != len(pairs) or len(set(names.values())) != len(pairs):
            raise DatalensError(
                f"--class-names must be distinct VALUE=NAME with commas between, as 0=male,1=female, not "
                f"{self.class_names}"
            )
        return names

    def shown(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of classes: as the data has them, or as --class-names calls them."""
        names = self.renamed()
        unknown = next((value for value in names if value not in classes), None)
        if unknown is not None:
            raise DatalensError(
                f"--class-names names {unknown!r}, which is none of the classes {', '.join(classes)[:200]}"
            )
        shown = tuple(names.get(name, name) for name in classes)
        if len(set(shown)) != len(shown):
            raise DatalensError(f"--class-names {self.class_names} gives two classes one name: choose another")
        return shown

    def columns(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return the columns that --label names: one, or several with commas between or each with its own --label."""
        if self.label is None or self.label in known:
            return () if self.label is None else (self.label,)
        return tuple(name.strip() for name in self.label.split(","))

    def named_classes(self) -> tuple[str, ...] | None:
        """Return the classes that --classes names, in their order, if it was given; else those of --class-names."""
        if self.classes is None:
            return tuple(sorted(self.renamed(), key=_by_number)) or None
        try:
            listed = self.classes.split(",")
            if os.path.isfile(self.classes):  # false, without an error, for a list too long for a file name
                listed = Path(self.classes).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DatalensError(f"--classes {self.classes} cannot be read ({error})") from None
        names = tuple(name.strip() for name in listed if name.strip())
        if not names or len(set(names)) != len(names):
            raise DatalensError(
                f"--classes must be distinct names with commas between, or a file of them, not {self.classes}"
            )
        return names


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Images that are listed, and not decoded yet.

    Attributes:
        classes_from: what the classes were read off; "" where they were declared.
        encoded: yields the images, still encoded, so many at a time.
        listed: yields labels and ids of all images, and reads none of them; None: it would take too long.
        looked_at: what was read to make this, in words.
        dicom: whether these are DICOM files.
        count: number of images; None where it is known only after reading them. Private.
        fixed_positions: whether they come from a list (`records.Records`).
        no_images: what lies beside the images and cannot be one, each with the reason; only with --skip-unreadable.
    """

    path: Path
    classes: tuple[str, ...]
    classes_from: str
    encoded: Callable[[int], Iterator[Encoded]]
    looked_at: str
    listed: Listed | None = None
    count: int | None = None
    fixed_positions: bool = False
    dicom: bool = False
    record_id: str | None = None  # whose each image is, where the files themselves say it
    no_images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Files:
    """Image files in their order."""

    paths: list[str]
    labels: np.ndarray
    ids: list[str] | None  # of records, or of persons; None: each file says whose it is (DICOM)

    def listed(self) -> Iterator[tuple[np.ndarray, list[Any] | None]]:
        """Yield all labels, and the ids. Of DICOM files, the patient ids are read."""
        yield self.labels, list(map(Patients(), self.paths)) if self.ids is None else self.ids

    def encoded(self, size: int) -> Iterator[Encoded]:
        patients = Patients()
        for start in range(0, len(self.paths), size):
            paths = self.paths[start : start + size]

            def read(i: int, paths: list[str] = paths) -> bytes:
                try:
                    return read_regular(paths[i])
                except (OSError, ValueError) as error:
                    why = getattr(error, "strerror", None) or error
                    raise UnreadableImage(f"{paths[i]} cannot be read ({why}): mend it, or leave it out") from None

            yield Encoded(
                index=np.arange(start, start + len(paths), dtype=np.int64),
                labels=self.labels[start : start + size],
                ids=list(map(patients, paths)) if self.ids is None else list(self.ids[start : start + size]),
                names=paths,
                read=read,
            )


def says_whose(reading: Reading, *, dicom: bool, where: object) -> bool:
    """Return whether the files themselves say whose each image is: DICOM files do, unless an option says otherwise."""
    if reading.record_id == DICOM and not dicom:
        raise DatalensError(f"--record-id {DICOM} is for DICOM files, and {where} has none: leave it out")
    return dicom and reading.record_id in (None, DICOM)


def numbered(values: list[str], reading: Reading, *, origin: str) -> tuple[np.ndarray, tuple[str, ...], str]:
    """Return labels as numbers, the classes, and what these were read off ("" where they were declared)."""
    declared = reading.named_classes()
    classes = declared or tuple(sorted(set(values), key=_by_number))
    check_classes(classes, origin)
    number = {name: i for i, name in enumerate(classes)}
    unknown = next((value for value in values if value not in number), None)
    if unknown is not None:
        option = "--class-names" if reading.classes is None else "--classes"
        raise DatalensError(f"{origin} has {unknown!r}, which is not among {option}: add it there, or mend the data")
    return np.array([number[value] for value in values], dtype=np.int64), classes, "" if declared else origin


def check_classes(classes: tuple[str, ...], origin: str) -> None:
    """Raise if there are too many classes."""
    if len(classes) > MOST_CLASSES:
        raise DatalensError(
            f"{origin} makes {len(classes)} classes, more than {MOST_CLASSES}: choose another --label, or --label none"
        )


def _by_number(name: str) -> tuple[int, int, str]:
    """Return a key by which 2 sorts before 10, and numbers before names."""
    return (0, int(name), "") if re.fullmatch(r"-?\d{1,15}", name) else (1, 0, name)


def records_of(found: Found, reading: Reading, *, nominal_size: int, public: Schema | None = None) -> ImageRecords:
    """Return the images as records, with their schema. `public`: the schema, where it is known from all parts."""
    if found.dicom and reading.skip_unreadable:
        raise DatalensError(
            "--skip-unreadable is for images: take the DICOM files out that `datalens inspect` names, and leave it out"
        )
    schema, first_image_read = (public, False) if public is not None else _schema(found, reading, nominal_size)
    resize = reading.image_size is not None
    looked_at = found.looked_at + (", and the size and colour mode of the first image" if first_image_read else "")

    def decoder(data: bytes, name: str) -> np.ndarray:
        return to_pixels(data, name, schema, resize=resize, grayscale=reading.grayscale, dicom=found.dicom)

    skipped = set(found.no_images)

    def encoded() -> Iterator[Encoded]:
        blocks = found.encoded(block_records(schema))
        return readable(blocks, skipped) if reading.skip_unreadable else blocks

    return ImageRecords(
        schema=schema,
        encoded=encoded,
        decoder=decoder,
        looked_at=looked_at,
        listed=found.listed,
        fixed_positions=found.fixed_positions,
        record_id=found.record_id,
        skipped=skipped,
    )


def _schema(found: Found, reading: Reading, nominal_size: int) -> tuple[Schema, bool]:
    """Return the schema, and whether the first image was read for it."""
    size, channels = reading.size(), 1 if reading.grayscale else None
    read_off = [f"the classes ({found.classes_from})"] if found.classes_from else []
    first_image_read = False
    if size is None or channels is None:
        first_image_read, kind = True, kind_of(*_first(found, reading), dicom=found.dicom)
        if size is None:
            size = (kind.height, kind.width)
            read_off.append("the size of an image")
        if channels is None:
            channels = 1 if kind.grey else 3
            read_off.append("whether images are grey")
    check_size(size)
    note = f"{READ_OFF}: {', '.join(read_off)}" if read_off else ""
    schema = Schema(
        name=name_of(found.path),
        height=size[0],
        width=size[1],
        channels=channels,
        classes=reading.shown(found.classes),
        nominal_size=nominal_size,
        record_unit=PERSON if found.record_id is not None else reading.unit,
        note=note,
        left_out=LEFT_OUT if reading.skip_unreadable else "",
    )
    return schema, first_image_read


def check_size(size: tuple[int, int]) -> None:
    """Raise if images cannot have this height and width."""
    if not all(SMALLEST <= side <= LARGEST for side in size):
        raise DatalensError(
            f"images of {size[0]}x{size[1]} are not between {SMALLEST}x{SMALLEST} and {LARGEST}x{LARGEST}: resize them "
            "with --image-size"
        )


def name_of(path: Path) -> str:
    """Return what the data is called: the last part of its path, or of the folder that a pattern looks into."""
    if path.exists():
        return path.name
    return next((part.name for part in (path, *path.parents) if part.name and not glob.has_magic(part.name)), path.name)


def check_not_larger(schema: Schema) -> None:
    """Raise if images that are arrays already are too large, or have too many classes."""
    if max(schema.height, schema.width) > LARGEST:
        raise DatalensError(
            f"{schema.name}: images of {schema.height}x{schema.width} are larger than {LARGEST}x{LARGEST}: "
            "make them smaller first"
        )
    if min(schema.height, schema.width) < SMALLEST:
        raise DatalensError(
            f"{schema.name}: images of {schema.height}x{schema.width} are smaller than {SMALLEST}x{SMALLEST}: "
            "make them larger first"
        )
    check_classes(schema.classes, schema.name)


def _first(found: Found, reading: Reading) -> tuple[bytes, str]:
    """Return the bytes of the first image, or of the first readable one with --skip-unreadable, and its name."""
    blocks = readable(found.encoded(1), set()) if reading.skip_unreadable else found.encoded(1)
    block = next((block for block in blocks if len(block.index)), None)
    if block is None:
        raise DatalensError(f"{found.path} holds no image" + " that can be read" * reading.skip_unreadable)
    return block.read(0), block.names[0]
