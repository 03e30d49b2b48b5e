"""Draw an example of hospital data: DICOM files of patients who do not exist, and a list of their findings.

Everything that makes real files difficult is in it: several studies for each patient, two kinds of device, of which one
stores its values inverted, 12 bits, windows, and identifying elements (which `data.dicom` must skip).
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datalens.errors import DatalensError
from datalens.progress import bar

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

FINDINGS = ("clear", "effusion")
LIST = "findings.csv"
SIDE = 64  # pixels
TEST_SHARE = 5  # every fifth patient is for testing
_XRAY = "1.2.840.10008.5.1.4.1.1.1.1"  # SOP class: digital X-ray
_ROOT = "2.25"  # root of UIDs that are made of random numbers


def draw_studies(folder: Path, *, patients: int, seed: int) -> dict[str, int]:
    """Write a folder of studies and a list of their images; return how many there are.

    Args:
        folder: a new folder. PATIENT/STUDY/IM00001 are the files, as an archive exports them; findings.csv lists them.
        patients: the number of patients, of whom every fifth is in the test split.
        seed: the same seed gives the same images and ids.

    Raises:
        DatalensError: the folder exists, pydicom is missing, or `patients` is not positive.
    """
    try:
        from pydicom import dcmwrite
    except ImportError:
        raise DatalensError("to write DICOM files needs pydicom: pip install 'datalens[medical]'") from None
    if patients < 1:
        raise DatalensError(f"--patients must be at least 1, not {patients}")
    if folder.exists():
        raise DatalensError(f"{folder} exists: choose a new folder")
    rows = []
    with bar("drawing studies", patients) as (progress, task):
        for number in range(patients):
            for place, finding, file in _studies_of(number, np.random.default_rng([seed, number])):
                path = folder / place
                path.parent.mkdir(parents=True, exist_ok=True)
                dcmwrite(path, file, enforce_file_format=True)
                rows.append([place, finding, "test" if number % TEST_SHARE == 0 else "train"])
            progress.advance(task)
    with (folder / LIST).open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([["file_name", "finding", "split"], *rows])
    studies = len({row[0].rpartition("/")[0] for row in rows})
    return {"patients": patients, "studies": studies, "images": len(rows)}


def _studies_of(number: int, random: np.random.Generator) -> Iterator[tuple[str, str, "Dataset"]]:
    """Yield path, finding and file of each image of a patient: one to three studies, of one or two images."""
    for study in range(int(random.integers(1, 4))):
        finding = FINDINGS[int(random.integers(2))]
        uid = f"{_ROOT}.{random.integers(2**62)}"
        for image in range(int(random.integers(1, 3))):
            density = chest(random, effusion=finding == "effusion")
            place = f"P{number:05}/S{study + 1}/IM{image + 1:05}"
            yield place, finding, _file(density, f"{number:05}", uid, random)


def chest(random: np.random.Generator, *, effusion: bool) -> np.ndarray:
    """Return how much X-ray a made-up chest absorbs, float [SIDE, SIDE] in [0, 1]: little in lungs, much in fluid."""
    down, across = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    shift, width, height = random.normal(0, 0.015, 2), random.uniform(0.13, 0.16), random.uniform(0.27, 0.32)
    absorbs = 0.72 + 0.1 * np.cos(np.pi * (across - 0.5 - shift[1]))
    filled = int(random.integers(2)) if effusion else -1
    level = random.uniform(0.5, 0.58)
    for side, middle in enumerate((0.3, 0.7)):
        lung = ((across - middle - shift[1]) / width) ** 2 + ((down - 0.48 - shift[0]) / height) ** 2 < 1
        ribs = 0.05 * np.cos(2 * np.pi * (down * 7 + abs(across - 0.5) * 2))
        absorbs[lung] = (0.25 + ribs)[lung]
        if side == filled:
            absorbs[lung & (down > level)] = 0.8
    heart = ((across - 0.55 - shift[1]) / 0.14) ** 2 + ((down - 0.62 - shift[0]) / 0.15) ** 2 < 1
    absorbs[heart] = 0.85
    return np.clip(absorbs + random.normal(0, 0.02, absorbs.shape), 0, 1)


def _file(density: np.ndarray, patient: str, study: str, random: np.random.Generator) -> "Dataset":
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    inverted = bool(random.integers(2))  # a device whose values grow with the light that came through
    values = np.rint((1 - density if inverted else density) * 3000 + 500).astype("<u2")
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID, file.SOPInstanceUID = _XRAY, f"{_ROOT}.{random.integers(2**62)}"
    file.StudyInstanceUID, file.SeriesInstanceUID = study, f"{_ROOT}.{random.integers(2**62)}"
    file.Modality, file.BodyPartExamined = "DX", "CHEST"
    file.PatientID, file.PatientName, file.PatientBirthDate = patient, f"Nobody^Patient {patient}", "19010101"
    file.Rows, file.Columns = density.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME1" if inverted else "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.WindowCenter, file.WindowWidth = 2000, 3000
    file.PixelData = values.tobytes()
    return file
