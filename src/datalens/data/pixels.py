"""Decode an image to pixels, by one of two rules.

Files of a named data set are converted to the colour mode of its schema, and a square is cut out of the middle
(`decode`). The user's own files may be of any kind, so there is a rule for every kind that is accepted, and an error
message for every other (`to_pixels`):

| kind | becomes |
|---|---|
| grey, colour, palette, black and white | itself |
| grey of 16 bits | value / 257, rounded: 65535 is white |
| with transparency | the image on a white background |
| CMYK | colour by the plain formula, without a colour profile |
| turned by its camera (EXIF) | upright |
| grey, where the first image is in colour | three equal planes |
| colour, with --grayscale | its luma (ITU-R 601-2) |
| colour, where the first image is grey, without --grayscale | an error |
| several frames, 32-bit or other values | an error |

With --image-size, the largest centred part of that shape is cut out and resized (bilinear, averaging over the pixels
that fall together). Without it, all images must have one size.
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from datalens.data import dicom as dicom_files
from datalens.data.regular import MOST_PIXELS
from datalens.data.schema import Schema
from datalens.errors import DatalensError, UnreadableImage, one_line

CUT_BEFORE = (64, 64)  # the size of the copies of CelebA that are in circulation, from which the square was cut already
WHAT_TO_DO = (
    "repair it, or leave it out (`datalens inspect` lists all such files, and --skip-unreadable leaves them out)"
)
NAMED, OWN = ("JPEG", "PNG"), ("JPEG", "PNG", "WEBP")  # formats that are read
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_GREY = ("1", "L", "LA", "La", *_DEEP)
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


def decode(data: bytes, name: str, schema: Schema, crop: int | None = None) -> np.ndarray:
    """Decode an image of a named data set to uint8 [h, w, c]. One that has the right size already is not cropped.

    Args:
        crop: side of the square that is cut out first; None: the largest possible one.

    Raises:
        DatalensError: the image is damaged or too small.
    """
    with _damage_explained(name):
        pixels = _opened(data, name, NAMED).convert("RGB" if schema.channels == 3 else "L")
    goal = (schema.width, schema.height)
    if pixels.size != goal:
        side = min(pixels.size) if crop is None else crop
        if pixels.size != CUT_BEFORE:
            if side > min(pixels.size):
                raise DatalensError(
                    f"{name} is {pixels.width}x{pixels.height}, too small to cut {side}x{side} out of it"
                )
            pixels = _middle(pixels, side, side)
        pixels = pixels.resize(goal, Image.Resampling.BILINEAR)
    return np.asarray(pixels).reshape(schema.height, schema.width, schema.channels)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Size and mode of an image, from its header."""

    height: int
    width: int
    mode: str

    @property
    def grey(self) -> bool:
        return self.mode in _GREY


def kind_of(data: bytes, name: str, *, dicom: bool = False) -> Kind:
    """Return the size and mode of one of the user's images, without decoding its pixels."""
    if dicom:
        with _damage_explained(name):
            height, width, mode = dicom_files.size_and_mode(data, name)
        return Kind(height=height, width=width, mode=mode)
    image = _own(data, name)
    with _damage_explained(name):  # some formats keep these facts behind the pixels
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # by 90 degrees
    width, height = reversed(image.size) if turned else image.size
    return Kind(height=height, width=width, mode=image.mode)


def checked_kind(data: bytes, name: str, *, dicom: bool = False) -> Kind:
    """Return the same, after decoding all of the image to find damage."""
    kind = kind_of(data, name, dicom=dicom)
    as_is = Schema(name="", height=kind.height, width=kind.width, channels=3, classes=("all",), nominal_size=1)
    to_pixels(data, name, as_is, resize=True, grayscale=False, dicom=dicom)
    return kind


def to_pixels(
    data: bytes, name: str, schema: Schema, *, resize: bool, grayscale: bool, dicom: bool = False
) -> np.ndarray:
    """Decode one of the user's images to uint8 [h, w, c], as the schema has it.

    Args:
        resize: whether --image-size was given, so that other sizes are cut and resized.
        grayscale: whether --grayscale was given, so that colour is converted to grey.
        dicom: whether it is a DICOM file (`data.dicom` has the rule by which it becomes 8 bits).

    Raises:
        DatalensError: the image is damaged, or does not fit the schema without these options.
    """
    image = _dicom(data, name) if dicom else _own(data, name)
    if schema.channels == 1 and not grayscale and image.mode not in _GREY:
        _check_whole(image, name)  # a damaged file is damaged, whatever its colours
        raise DatalensError(
            f"{name} is in colour where the first image is grey: add --grayscale, or leave this image out"
        )
    with _damage_explained(name):
        image.load()
        image = ImageOps.exif_transpose(image)
        flat = _deep(image) if image.mode in _DEEP else _on_white(image)
    goal = (schema.width, schema.height)
    if flat.size != goal and not resize:
        raise DatalensError(
            f"{name} is {flat.height}x{flat.width} where the first image is {schema.height}x{schema.width}: resize all "
            f"images, with --image-size {schema.height}x{schema.width} or another size"
        )
    flat = flat.convert("L" if schema.channels == 1 else "RGB")
    return np.asarray(fitted(flat, goal)).reshape(schema.height, schema.width, schema.channels)


def _check_whole(image: Image.Image, name: str) -> None:
    """Raise if the pixels of an image cannot be decoded."""
    with _damage_explained(name):
        image.load()


def fitted(image: Image.Image, goal: tuple[int, int]) -> Image.Image:
    """Return the largest centred part that has the shape of `goal` (width, height), resized to it."""
    if image.size == goal:
        return image
    scale = min(image.width / goal[0], image.height / goal[1])
    width, height = (max(1, min(have, round(scale * want))) for have, want in zip(image.size, goal, strict=True))
    return _middle(image, width, height).resize(goal, Image.Resampling.BILINEAR)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _own(data: bytes, name: str) -> Image.Image:
    """Open one of the user's images, or raise if there is no rule for its kind. Only its header is decoded."""
    with _damage_explained(name):
        image = _opened(data, name, OWN)
        frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
        if frames > 1:
            raise ValueError(f"it has {frames} frames")
        if image.mode not in (*_GREY, *_COLOUR):
            raise ValueError(f"images of mode {image.mode} are not read")
    return image


def _dicom(data: bytes, name: str) -> Image.Image:
    with _damage_explained(name):
        return dicom_files.picture(data, name)


def _opened(data: bytes, name: str, formats: tuple[str, ...]) -> Image.Image:
    if not data:
        raise UnreadableImage(f"{name} is empty (0 bytes): {WHAT_TO_DO}")
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"it is no {' or '.join(formats)}") from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels are more than the limit of 2^26")
    return image


@contextlib.contextmanager
def _damage_explained(name: str) -> Iterator[None]:
    """Turn whatever damaged bytes raise into an error of one line."""
    try:
        yield
    except (MemoryError, DatalensError):
        raise
    except Exception as error:  # Pillow raises many kinds
        reason = one_line(error)
        raise UnreadableImage(f"{name} is not a readable image ({reason}): {WHAT_TO_DO}") from None


def _deep(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits as one of 8 bits."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("its values have more than 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image without transparency, on a white background."""
    if image.mode not in ("LA", "La", "PA", "RGBA") and "transparency" not in image.info:
        return image
    transparent = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", transparent.size, "white"), transparent).convert("RGB")
