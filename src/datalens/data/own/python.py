"""Records that a Python program passes in: numpy, torch, Pillow, Hugging Face datasets, torch data sets.

Kinds of data are told apart by their attributes, so that none of these packages is imported for it.

How a record is read depends on the record and on what was declared, never on other records: images of several kinds
are refused instead of converted to one, and what a label means follows from the classes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from datalens.data.own.arrays import check_images
from datalens.data.own.reading import ALL, check_classes, check_not_larger
from datalens.data.pixels import OWN
from datalens.data.records import Dataset, record_keys
from datalens.data.schema import IMAGE, LARGEST_NUMBER, PERSON, READ_OFF, Schema
from datalens.errors import DatalensError

WHERE = Path("images")  # the name of the data in messages
IMAGE_NAMES, LABEL_NAMES = ("image", "img", "images"), ("label", "labels", "fine_label", "target")
UNLABELLED = (ALL,)  # the one class of images without labels
COUNTED = "the true number of {} (whoever knows all but one can tell from it if that is there)"


def from_arrays(images: Any, labels: Any = None, **declared: Any) -> Dataset:
    """Return images as records, with their labels unless the data has these inside.

    Args:
        declared: see `records_and_classes`.
    """
    return records_and_classes(images, labels, **declared)[0]


def records_and_classes(
    images: Any,
    labels: Any = None,
    *,
    nominal_size: int | None,
    classes: Iterable[Any] | None = None,
    class_names: Mapping[Any, str] | None = None,
    ids: Any = None,
    by_person: bool = False,
    name: str = "arrays",
    size_is_public: bool = False,
) -> tuple[Dataset, list[Any]]:
    """Return the records, and the classes as they were given.

    Args:
        images: uint8 or floats in [0, 1], [n, h, w] or with channels; Pillow images; a `datasets.Dataset`; or a torch
            data set of (image, label) pairs or of images.
        labels: whole numbers, or names; None: all images are of one class.
        nominal_size: the number of records, declared public; None: the true number, and the schema says so.
        classes: the classes, declared public. A label is one of them or, where they are names, the number of one. None:
            they are read off the data, and the schema says so.
        class_names: a class → its name. Where `classes` is None, its keys are the classes.
        ids: one for each record; with `by_person`, of the person whose image it is.
        by_person: a person with all of their images is the privacy unit, and what the nominal size counts.
        name: of the data set.
        size_is_public: the true number of records is public anyway, so the schema does not mention it.

    Raises:
        DatalensError: images, labels, classes or ids do not fit.
    """
    pixels, found, known = as_arrays(images, labels)
    if class_names is not None and classes is None:
        classes = tuple(class_names)
    numbers, values = named_labels(found, known if classes is None else classes)
    check_classes(tuple(map(str, values)), f"{name}: labels")
    whose = _ids(ids, len(pixels), name, by_person=by_person)
    unit = "persons" if by_person else "records"
    read_off = []
    if classes is None and known is not UNLABELLED:
        read_off = ["the classes that occur" if known is None else "the classes that the data names"]
    if nominal_size is None:
        nominal_size = len(set(record_keys(pixels, whose, by_person=True))) if by_person else len(pixels)
        read_off[:0] = [] if size_is_public else [COUNTED.format(unit)]
    if type(nominal_size) is not int or not 1 <= nominal_size <= LARGEST_NUMBER:
        raise DatalensError(f"nominal_size must be a whole number from 1 to {LARGEST_NUMBER}, not {nominal_size!r}")
    values = _renamed(values, class_names or {})
    _, height, width, channels = pixels.shape
    schema = Schema(
        name=name,
        height=height,
        width=width,
        channels=channels,
        classes=tuple(str(value) for value in values),
        nominal_size=nominal_size,
        record_unit=PERSON if by_person else IMAGE,
        note=f"{READ_OFF}: {' and '.join(read_off)}" if read_off else "",
    )
    check_not_larger(schema)
    listed = not _numbers_its_own(images)
    return Dataset(schema=schema, images=pixels, labels=numbers, ids=whose, fixed_positions=listed), values


DATAFRAME = (
    "a DataFrame is not read: pass fit(list(df['image']), df['label']), with the names of your columns, or "
    "write it to a .parquet file for the command line"
)


def as_arrays(images: Any, labels: Any = None) -> tuple[np.ndarray, np.ndarray, Sequence[Any] | None]:
    """Return images as uint8 [n, h, w, c], labels as they were given [n], and the classes if the data names them."""
    names: Sequence[Any] | None = None
    if hasattr(images, "iloc"):
        images = images.to_list() if hasattr(images, "to_list") and not hasattr(images, "columns") else images
    if hasattr(images, "iloc"):
        raise DatalensError(DATAFRAME)
    if _is_table(images):
        _check_no_labels(labels, "a datasets.Dataset has its labels in a column")
        pixels, labels, names = _from_columns(images)
    elif _numbers_its_own(images):
        _check_no_labels(labels, "a torch Dataset has (image, label) pairs")
        pixels, labels = _from_items(images)
        names = getattr(images, "classes", None)
    else:
        pixels = _stacked(images) if isinstance(images, list | tuple) else _channels_last(images)
    if np.ndim(pixels) == 2:
        raise DatalensError("images must be [n, height, width] or with channels, not rows of pixels: reshape them")
    pixels = check_images(pixels, WHERE)
    found = np.zeros(len(pixels), dtype=np.int64) if labels is None else np.asarray(_plain(labels))
    if labels is None:
        names = UNLABELLED
    if found.shape != (len(pixels),):
        raise DatalensError(f"labels must be {len(pixels)}, one for each image, not {list(found.shape)}")
    return pixels, found, names


def named_labels(labels: np.ndarray, classes: Iterable[Any] | None) -> tuple[np.ndarray, list[Any]]:
    """Return the class numbers of labels [n], and the classes: those declared, or those that occur.

    | a label that is | means |
    |---|---|
    | one of the classes | that class |
    | a whole number, where the classes are names | the class of that number, from 0 |
    | anything else | an error |
    """
    found = [_plain(label) for label in labels.tolist()]
    gap = next((i for i, label in enumerate(found) if label is None or label != label), None)
    if gap is not None:
        raise DatalensError(f"image {gap} has no label: give every image one, or leave labels out")
    if classes is None:
        _one_kind((type(label).__name__ for label in found), "labels")
    values = sorted(set(found)) if classes is None else [_plain(value) for value in classes]
    if not values or len({str(value) for value in values}) != len(values):
        raise DatalensError("classes must be distinct, and there must be at least one")
    numbers = {value: number for number, value in enumerate(values)}
    if all(isinstance(value, str) for value in values):
        numbers |= {number: number for number in range(len(values))}
    unknown = next((label for label in found if label not in numbers), None)
    if unknown is not None:
        raise DatalensError(
            f"label {unknown!r} is none of the {len(values)} classes: declare it in classes=, or mend it"
        )
    return np.array([numbers[label] for label in found], dtype=np.int64), values


def _renamed(values: list[Any], names: Mapping[Any, str]) -> list[Any]:
    """Return the classes as they are called in the release."""
    if not names:
        return values
    if unknown := [value for value in names if value not in values]:
        raise DatalensError(f"class_names names {unknown[0]!r}, which is none of the {len(values)} classes")
    if not all(isinstance(name, str) and name for name in names.values()):
        raise DatalensError("class_names must give every class a text: {0: 'male', 1: 'female'}")
    renamed = [names.get(value, value) for value in values]
    if len({str(value) for value in renamed}) != len(renamed):
        raise DatalensError("class_names gives two classes one name: choose another")
    return renamed


def _ids(ids: Any, count: int, name: str, *, by_person: bool) -> np.ndarray | None:
    """Return ids as an array of Python values: numpy would turn numbers beside text into text."""
    if ids is None:
        if by_person:
            raise DatalensError(f"{name}: give ids, one for each image, to protect the persons whose images they are")
        return None
    listed = [_plain(one) for one in _plain(ids)]
    if len(listed) != count:
        raise DatalensError(f"{name}: ids must be {count}, one for each image")
    found = np.empty(count, dtype=object)
    found[:] = listed
    return found


def _one_kind(kinds: Iterable[str], what: str) -> None:
    """Raise if there are several kinds."""
    found = sorted(set(kinds))
    if len(found) > 1:
        raise DatalensError(f"{what} are of several kinds ({' and '.join(found[:2])}): convert them to one")


def _check_no_labels(labels: Any, why: str) -> None:
    if labels is not None:
        raise DatalensError(f"{why}: leave labels out")


def _is_table(thing: Any) -> bool:
    """Return whether this is a Hugging Face data set."""
    return hasattr(thing, "column_names") and hasattr(thing, "features")


def _numbers_its_own(thing: Any) -> bool:
    """Return whether this is a data set object, which numbers its records by a rule of its own.

    The rule may depend on the records: torchvision's ImageFolder sorts by class and name.
    """
    items = not _is_array(thing) and not isinstance(thing, list | tuple) and hasattr(thing, "__getitem__")
    return _is_table(thing) or items


def _is_array(thing: Any) -> bool:
    return isinstance(thing, np.ndarray) or _is_tensor(thing) or hasattr(thing, "__array_interface__")


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "detach") and hasattr(thing, "numpy")


def _plain(value: Any) -> Any:
    """Return a tensor as a numpy array, and a numpy scalar as a Python value; anything else as it is."""
    if _is_tensor(value):
        value = value.detach().cpu().numpy()
    return (
        value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    )


def _channels_last(images: Any) -> np.ndarray:
    """Return an array of images with channels last.

    A tensor has channels first. A numpy array has them last, unless only its first dimension can be channels.
    """
    first = _is_tensor(images)
    array = np.asarray(_plain(images))
    if array.ndim == 4 and array.shape[1] <= 4 and (first or array.shape[3] > 4):
        array = np.moveaxis(array, 1, -1)
    return array


def _one(image: Any) -> np.ndarray:
    """Return an image as an array [h, w] or [h, w, c]: of Pillow, a tensor, an array, or parquet's {bytes, path}."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        image = _opened(image["bytes"])
    if getattr(image, "mode", None) in ("P", "1", "CMYK"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    first = _is_tensor(image)
    array = np.asarray(_plain(image))
    if array.ndim == 3 and array.shape[0] <= 4 and (first or array.shape[2] > 4):
        array = np.moveaxis(array, 0, -1)
    return array


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(data), formats=OWN)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatalensError(f"an image cannot be read ({error}): mend it, or leave it out") from None
    return image


def _stacked(images: Iterable[Any]) -> np.ndarray:
    arrays = [_one(image) for image in images]
    _one_kind((array.dtype.name for array in arrays), "images")
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        found = " and ".join("x".join(map(str, shape)) for shape in shapes[:2]) or "none"
        raise DatalensError(
            f"images must all have one size and the same channels, but there are {found}: convert them to one"
        )
    return np.stack(arrays)


def _from_items(items: Any) -> tuple[np.ndarray, list[Any] | None]:
    """Return the images and, if there are any, the labels of a data set of (image, label) pairs or of images."""
    try:
        found = [_parts(items[number]) for number in range(len(items))]
        # Read again in reverse order, so that a transform that counts, or draws from a stream, gives other results.
        for number in reversed(range(len(found))):
            _check_same(number, found[number], _parts(items[number]))
    except (TypeError, ValueError, KeyError) as error:
        raise DatalensError(
            f"images must be arrays, or a data set of (image, label) pairs with a length ({error})"
        ) from error
    paired = {len(parts) for parts in found}
    if len(paired) > 1:
        raise DatalensError("a data set must be of (image, label) pairs or of images alone, not of both")
    return _stacked(parts[0] for parts in found), [parts[1] for parts in found] if paired == {2} else None


def _parts(item: Any) -> tuple[Any, ...]:
    """Return an image and its label, if there is one. The image is copied: it may be a buffer that is used again."""
    if not isinstance(item, tuple | list):
        return (_one(item).copy(),)
    image, label = item
    return _one(image).copy(), _plain(label)


def _check_same(number: int, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Raise unless a record is the same both times it was read.

    The output of a random transform depends on how many records were read before: with one record fewer, others would
    be other images.
    """
    images = [np.asarray(parts[0]) for parts in (first, second)]
    same = [image.shape for image in images], [image.dtype for image in images], [image.tobytes() for image in images]
    is_image = images[0].dtype != object  # anything else is refused elsewhere
    if (is_image and not all(a == b for a, b in same)) or not _same_labels(first[1:], second[1:]):
        raise DatalensError(
            f"record {number} of the data set differs when it is read again: leave random transforms out, since "
            "what they make of a record depends on the other records"
        )


def _same_labels(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether labels are equal. Two NaN are, since a missing label is refused elsewhere."""

    def same(a: Any, b: Any) -> bool:
        missing = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        return missing or np.array_equal(a, b)

    return len(first) == len(second) and all(map(same, first, second))


def _from_columns(table: Any) -> tuple[np.ndarray, Any, Sequence[Any] | None]:
    """Return the images of a Hugging Face data set and, if there are any, its labels and the names of their classes."""
    kinds = {name: type(table.features[name]).__name__ for name in table.column_names}
    images = [name for name in table.column_names if kinds[name] == "Image" or name in IMAGE_NAMES]
    labels = [name for name in table.column_names if kinds[name] == "ClassLabel" or name in LABEL_NAMES]
    if not images:
        raise DatalensError(f"there is no column of images among {', '.join(table.column_names)}: call it image")
    column = None if not labels else list(table[labels[0]])
    names = getattr(table.features[labels[0]], "names", None) if labels else None
    arrays = [_one(image).copy() for image in table[images[0]]]
    for number, image in enumerate(table[images[0]]):
        _check_same(number, (arrays[number],), (_one(image),))
    if column is not None and not _same_labels(column, list(table[labels[0]])):
        raise DatalensError("labels of the data set differ when they are read again: leave random transforms out")
    return _stacked(arrays), column, names
