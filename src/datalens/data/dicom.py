"""Read DICOM files: pixels and patient ids, and nothing else (needs `pip install 'datalens[medical]'`).

Only the elements that are named here are parsed. Names, birth dates and everything else that identifies a patient are
skipped. The patient id decides which images belong together; it is kept in memory, and never written or printed.

The rule by which stored values become 8 bits looks at one file alone, so no file changes what becomes of another:

| photometric interpretation | becomes |
|---|---|
| MONOCHROME2 | grey: modality LUT or rescale slope and intercept, then the first window, black to white |
| MONOCHROME1 | the same, inverted, so that bright tissue is bright in both |
| without a window, with a VOI LUT | the first LUT's output, black to white |
| without either | the smallest value of the image is black, the largest white (padding left out) |
| RGB, YBR_… | colour |
| PALETTE COLOR | colour, by the palette |
| anything else | an error that names the file |

Overlays and presentation states are not applied. Several frames, videos and deflated files are refused by name;
compressed images are decoded where pydicom has a decoder for them (JPEG, JPEG 2000 and RLE always).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image

from datalens.data.regular import MOST_PIXELS, first_bytes, open_regular
from datalens.errors import DatalensError

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MARK, MARK_AT = b"DICM", 128
SUFFIXES = (".dcm", ".dicom", ".ima")
INDEX = "DICOMDIR"  # an index of a disc, which repeats names of patients: never opened
DICOM = "dicom"  # --record-id dicom: the patient id in the file, which is the default for DICOM files

WHOSE = ("PatientID", "IssuerOfPatientID")
STUDY = ("StudyInstanceUID", "SeriesInstanceUID", "BurnedInAnnotation")
SIZE = ("SOPClassUID", "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PhotometricInterpretation")
PIXELS = (
    *SIZE,
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration", "PixelData"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("PixelPaddingValue", "PixelPaddingRangeLimit"),
    *(
        f"{colour}PaletteColorLookupTable{part}"
        for colour in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
)

_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "PALETTE COLOR")
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_NATIVE = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", _BIG_ENDIAN)
_DEFLATED = "1.2.840.10008.1.2.1.99"
_META_BYTES = 2**16  # where the transfer syntax must be stated
_LONG = (b"OB", b"OW", b"OF", b"SQ", b"UT", b"UN")  # value representations with a length of four bytes


def are_dicom(paths: Sequence[str], *, skip_unreadable: bool = False) -> bool:
    """Return whether these files are DICOM files: all of them, or none.

    Among other images, a file that only its name calls DICOM is one more that cannot be read; with `skip_unreadable`
    every DICOM file among them is.

    Raises:
        DatalensError: some are and some are not.
    """
    kinds = [is_dicom(path) for path in paths]
    if all(kinds):
        return any(kinds)
    one = next((path for path, kind in zip(paths, kinds, strict=True) if kind and _has_mark(path)), None)
    if one is not None and not skip_unreadable:
        other = paths[kinds.index(False)]
        raise DatalensError(
            f"{other} is no DICOM file, and {one} is one: read them as two data sets, or convert one kind"
        )
    return False


def is_dicom(path: str) -> bool:
    """Return whether a file is a DICOM file: by the end of its name, or else by its first bytes."""
    name = os.path.basename(path).lower()
    if name.endswith(SUFFIXES):
        return True
    if name.endswith((".png", ".jpg", ".jpeg", ".webp")):
        return False
    return _has_mark(path)


def _has_mark(path: str) -> bool:
    return first_bytes(path, MARK_AT + len(MARK))[MARK_AT:] == MARK


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Counts for `datalens inspect`. For the owner only."""

    study: str
    series: str
    burned_in: bool  # whether the file says that there is text in the pixels


def facts(data: bytes, name: str) -> Facts:
    """Return which study and series an image belongs to."""
    found = _parsed(BytesIO(data), name, STUDY)
    study, series, burned_in = (_text(found, keyword) for keyword in STUDY)
    return Facts(study=study, series=series, burned_in=burned_in.upper() == "YES")


@dataclass(frozen=True)
class Patients:
    """A reader of patient ids, which checks that one id means one patient.

    Hospitals number their patients by themselves, so the same id from two issuers is two persons. They would be one
    privacy unit, and neither would be protected at the stated ε.
    """

    issuers: dict[str, str] = field(default_factory=dict)  # patient id → who issued it

    def __call__(self, path: str) -> str:
        """Return the patient id of a file.

        Raises:
            DatalensError: the file cannot be read, or its id was issued to another patient elsewhere.
        """
        try:
            with open_regular(path) as file:
                found = _parsed(file, path, WHOSE)
        except OSError as error:
            raise DatalensError(f"{path} cannot be read ({error.strerror}): mend it, or leave it out") from None
        patient, issuer = (_text(found, keyword) for keyword in WHOSE)
        if issuer and self.issuers.setdefault(patient, issuer) != issuer:
            raise DatalensError(
                f"{path} has a patient id that another file has from another issuer, so one id may be two patients: "
                "say whose each image is in a .csv, with --record-id COLUMN"
            )
        return patient


def size_and_mode(data: bytes, name: str) -> tuple[int, int, str]:
    """Return height, width and mode ("L" or "RGB") of an image, without decoding its pixels."""
    found = _parsed(BytesIO(data), name, SIZE)
    _check(found, name)
    return int(found.Rows), int(found.Columns), "L" if found.PhotometricInterpretation in _GREY else "RGB"


def picture(data: bytes, name: str) -> Image.Image:
    """Return the image in 8 bits, by the rule above.

    Raises:
        DatalensError: there is no rule for such a file, or no decoder.
    """
    from pydicom.pixels import apply_color_lut, pixel_array

    found = _parsed(BytesIO(data), name, PIXELS)
    _check(found, name)
    if "PixelData" not in found:
        raise DatalensError(f"{name} has no pixels of whole numbers: convert it, or take it out")
    _check_decoder(found, name)
    if found.PhotometricInterpretation in _GREY:
        return Image.fromarray(_grey(pixel_array(found), found))
    values, bits = pixel_array(found), int(found.BitsStored)
    if found.PhotometricInterpretation == "PALETTE COLOR":
        values = apply_color_lut(values, found)
        bits = 8 * values.itemsize
    return Image.fromarray(_bytes(values / (2**bits - 1)))


def _grey(stored: np.ndarray, found: "Dataset") -> np.ndarray:
    """Return the values [h, w] of a monochrome image as bytes, of which 255 is the brightest."""
    from pydicom.pixels import apply_modality_lut

    values = np.asarray(apply_modality_lut(stored, found))
    if found.get("WindowCenter") is not None and found.get("WindowWidth") is not None:
        shade = _window(values.astype(np.float64), found)
    elif found.get("VOILUTSequence"):
        shade = _lookup(values, found)
    else:
        shade = _whole_range(values.astype(np.float64), ~_padding(stored, found))
    grey = _bytes(shade)
    return 255 - grey if found.PhotometricInterpretation == "MONOCHROME1" else grey


def _window(values: np.ndarray, found: "Dataset") -> np.ndarray:
    """Return values as shades from 0 to 1, by the file's first window (PS3.3, C.11.2.1.2)."""
    center, width = (float(np.atleast_1d(found[keyword].value)[0]) for keyword in ("WindowCenter", "WindowWidth"))
    function = str(found.get("VOILUTFunction") or "LINEAR").upper()
    if function == "SIGMOID" and width > 0:
        return 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
    if function == "LINEAR" and width >= 1:
        center, width = center - 0.5, width - 1
    elif function != "LINEAR_EXACT" or not width > 0:
        raise ValueError(f"a window of width {width:g} by {function}")
    if width == 0:
        return (values > center).astype(np.float64)
    return (values - center) / width + 0.5


def _lookup(values: np.ndarray, found: "Dataset") -> np.ndarray:
    """Return values as shades by the file's first VOI LUT. (pydicom's own takes large values modulo 256 for 8 bits.)"""
    item = found.VOILUTSequence[0]
    entries, first, bits = (int(number) for number in item.LUTDescriptor)
    entries, data = entries or 2**16, item.LUTData
    if isinstance(data, bytes):
        order = ">u2" if found.file_meta.TransferSyntaxUID == _BIG_ENDIAN else "<u2"
        data = np.frombuffer(data, np.uint8 if len(data) < 2 * entries else order)
    table = np.asarray(data, dtype=np.float64)[:entries] / (2**bits - 1)
    return table[np.clip(np.rint(values).astype(np.int64) - first, 0, len(table) - 1)]


def _padding(stored: np.ndarray, found: "Dataset") -> np.ndarray:
    """Return which stored values are padding around the image, as a mask."""
    first = found.get("PixelPaddingValue")
    if first is None:
        return np.zeros(stored.shape, dtype=bool)
    low, high = sorted((int(first), int(found.get("PixelPaddingRangeLimit", first))))
    return (stored >= low) & (stored <= high)


def _whole_range(values: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Return values as shades, from the smallest to the largest of those inside the image."""
    seen = values[inside] if inside.any() else values
    low, high = seen.min(), seen.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _bytes(shade: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(shade, 0, 1) * 255).astype(np.uint8)


def _check(found: "Dataset", name: str) -> None:
    """Raise unless this is one image, of a kind for which there is a rule."""
    if "Rows" not in found or "Columns" not in found or "PhotometricInterpretation" not in found:
        raise DatalensError(f"{name} holds no image ({_name(found.get('SOPClassUID'))}): take it out")
    frames = int(found.get("NumberOfFrames") or 1)
    if frames > 1:
        raise DatalensError(f"{name} has {frames} frames: write each frame that is to be used to a file of its own")
    if not 0 < found.Rows * found.Columns <= MOST_PIXELS:
        raise DatalensError(f"{name}: {found.Columns}x{found.Rows} pixels are none, or more than the limit of 2^26")
    kind, samples = str(found.PhotometricInterpretation), int(found.get("SamplesPerPixel") or 1)
    if kind not in (*_GREY, *_COLOUR) or samples != (1 if kind in (*_GREY, "PALETTE COLOR") else 3):
        raise DatalensError(f"{name} has {samples} samples of {kind[:40]}, for which there is no rule: convert it")


def _check_decoder(found: "Dataset", name: str) -> None:
    from pydicom.pixels import get_decoder

    syntax = found.file_meta.TransferSyntaxUID
    try:
        ready = syntax in _NATIVE or get_decoder(syntax).is_available
    except NotImplementedError:
        raise DatalensError(f"{name} is compressed as {_name(syntax)}, which is not read: decompress it") from None
    if not ready:
        raise DatalensError(
            f"{name} is compressed as {_name(syntax)}, for which no decoder is installed: pip install python-gdcm, or "
            "decompress it"
        )


def _name(uid: object) -> str:
    """Return the standard's name of a UID; not the UID itself, in which some devices write who was examined when."""
    from pydicom.uid import UID_dictionary

    return UID_dictionary[str(uid)][0] if str(uid) in UID_dictionary else "of an unknown kind"


def _parsed(file: BinaryIO, name: str, keywords: tuple[str, ...]) -> "Dataset":
    """Return these elements of a DICOM file, and no others."""
    try:
        from pydicom import dcmread
    except ImportError:
        raise DatalensError(f"{name} is a DICOM file, which needs pydicom: pip install 'datalens[medical]'") from None
    head = file.read(_META_BYTES)
    if head[MARK_AT : MARK_AT + len(MARK)] != MARK:
        raise DatalensError(f"{name} is no DICOM file (it has no DICM mark): repair it, or leave it out")
    if _transfer_syntax(head) == _DEFLATED:  # would be unpacked whole, before anything could be checked
        raise DatalensError(f"{name} is compressed as {_name(_DEFLATED)}, which is not read: decompress it")
    file.seek(0)
    try:
        return dcmread(file, specific_tags=list(keywords), stop_before_pixels="PixelData" not in keywords)
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises many kinds; their texts may hold values
        raise DatalensError(
            f"{name} is no readable DICOM file ({type(error).__name__}): repair it, or leave it out"
        ) from None


def _transfer_syntax(head: bytes) -> str:
    """Return the transfer syntax that a file states in its first group, which is always explicit little-endian."""
    at = MARK_AT + len(MARK)
    while head[at : at + 2] == b"\x02\x00":
        long = head[at + 4 : at + 6] in _LONG
        begins = at + (12 if long else 8)
        size = int.from_bytes(head[begins - (4 if long else 2) : begins], "little")
        if head[at + 2 : at + 4] == b"\x10\x00":
            return head[begins : begins + size].decode("ascii", "replace").strip("\0 ")
        at = begins + size
    return ""


def _text(found: "Dataset", keyword: str) -> str:
    """Return the text of an element; its bytes are not interpreted, which could print them in a warning."""
    if keyword not in found:
        return ""
    value: Any = found.get_item(keyword).value
    return (value.decode("latin-1") if isinstance(value, bytes) else str(value or "")).strip("\0 ")
