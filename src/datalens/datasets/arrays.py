"""Records that a Python program has at hand: numpy, torch, Hugging Face datasets, torch data sets. Told apart by what
they can do, so that none of these packages is imported for it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datalens.datasets.memory import check_images
from datalens.errors import DatalensError

WHERE = Path("images")  # what messages call them
IMAGE_NAMES, LABEL_NAMES = ("image", "img", "images"), ("label", "labels", "fine_label", "target")


def as_arrays(images: Any, labels: Any = None) -> tuple[np.ndarray, np.ndarray, Sequence[Any] | None]:
    """uint8 [n, h, w, c], labels as they came [n], and the names of all classes where the data brings them."""
    names: Sequence[Any] | None = None
    if hasattr(images, "column_names") and hasattr(images, "features"):
        _unless(labels, "a datasets.Dataset has its labels in a column")
        pixels, labels, names = _from_columns(images)
    elif not _is_array(images) and not isinstance(images, list | tuple) and hasattr(images, "__getitem__"):
        _unless(labels, "a torch Dataset brings (image, label) pairs")
        pixels, labels = _from_items(images)
    else:
        pixels = _stacked(images) if isinstance(images, list | tuple) else _channels_last(images)
    if np.ndim(pixels) == 2:
        raise DatalensError("images must be [n, height, width] or with channels, not rows of pixels: reshape them")
    pixels = check_images(pixels, WHERE)
    found = np.zeros(len(pixels), dtype=np.int64) if labels is None else np.asarray(_plain(labels))
    if labels is None:
        names = ("image",) if names is None else names
    if found.shape != (len(pixels),):
        raise DatalensError(f"labels must be {len(pixels)}, one an image, not {list(found.shape)}")
    return pixels, found, names


def named_labels(labels: np.ndarray, classes: Iterable[Any] | None) -> tuple[np.ndarray, list[Any]]:
    """Numbers of classes [n], and the classes: those declared, or those that occur."""
    values = np.unique(labels).tolist() if classes is None else [_plain(value) for value in classes]
    if not values or len({str(value) for value in values}) != len(values):
        raise DatalensError("classes must be distinct, and there must be at least one")
    numbers = {value: number for number, value in enumerate(values)}
    found = labels.tolist()
    if any(value not in numbers for value in found) and all(type(v) is int and 0 <= v < len(values) for v in found):
        return labels.astype(np.int64), values  # numbers of names
    unknown = [value for value in found if value not in numbers]
    if unknown:
        raise DatalensError(
            f"label {unknown[0]!r} is none of the {len(values)} classes: declare it in classes=, or mend it"
        )
    return np.array([numbers[value] for value in found], dtype=np.int64), values


def as_groups(groups: Any, count: int) -> np.ndarray:
    """Whose image each is, as text."""
    whose = np.asarray(_plain(groups))
    if whose.shape != (count,):
        raise DatalensError(f"groups must be {count}, one an image, not {list(whose.shape)}")
    return whose.astype(str)


def _unless(labels: Any, why: str) -> None:
    if labels is not None:
        raise DatalensError(f"{why}: leave labels out")


def _is_array(thing: Any) -> bool:
    return isinstance(thing, np.ndarray) or _is_tensor(thing) or hasattr(thing, "__array_interface__")


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "detach") and hasattr(thing, "numpy")


def _plain(value: Any) -> Any:
    """numpy for a tensor; a Python value for numpy's."""
    if _is_tensor(value):
        value = value.detach().cpu().numpy()
    return (
        value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    )


def _channels_last(images: Any) -> np.ndarray:
    """torch has channels first; numpy has them last, unless only the first can be channels."""
    first = _is_tensor(images)
    array = np.asarray(_plain(images))
    if array.ndim == 4 and array.shape[1] <= 4 and (first or array.shape[3] > 4):
        array = np.moveaxis(array, 1, -1)
    return array


def _one(image: Any) -> np.ndarray:
    """A picture of Pillow's, a tensor or an array, as [h, w] or [h, w, c]."""
    if getattr(image, "mode", None) in ("P", "1", "CMYK"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    first = _is_tensor(image)
    array = np.asarray(_plain(image))
    if array.ndim == 3 and array.shape[0] <= 4 and (first or array.shape[2] > 4):
        array = np.moveaxis(array, 0, -1)
    return array


def _stacked(images: Iterable[Any]) -> np.ndarray:
    arrays = [_one(image) for image in images]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        found = " and ".join("x".join(map(str, shape)) for shape in shapes[:2]) or "none"
        raise DatalensError(
            f"images must all have one size and the same channels, but there are {found}: bring them to one"
        )
    return np.stack(arrays)


def _from_items(items: Any) -> tuple[np.ndarray, list[Any]]:
    try:
        pairs = [items[number] for number in range(len(items))]
        parts = [(image, _plain(label)) for image, label in pairs]
    except (TypeError, ValueError, KeyError) as error:
        raise DatalensError(
            f"images must be arrays, or a data set of (image, label) pairs with a length ({error})"
        ) from error
    return _stacked(image for image, _ in parts), [label for _, label in parts]


def _from_columns(table: Any) -> tuple[np.ndarray, Any, Sequence[Any] | None]:
    """A Hugging Face data set: a column of images, and one of labels with the names of their classes."""
    kinds = {name: type(table.features[name]).__name__ for name in table.column_names}
    images = [name for name in table.column_names if kinds[name] == "Image" or name in IMAGE_NAMES]
    labels = [name for name in table.column_names if kinds[name] == "ClassLabel" or name in LABEL_NAMES]
    if not images:
        raise DatalensError(f"there is no column of images among {', '.join(table.column_names)}: call it image")
    column = None if not labels else list(table[labels[0]])
    names = getattr(table.features[labels[0]], "names", None) if labels else None
    return _stacked(table[images[0]]), column, names
