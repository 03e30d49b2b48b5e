"""DICOM files: what becomes of their values, whose they are, what is refused, and that nothing else is read of them."""

import io
import sys
import warnings

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread, dcmwrite
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_windowing
from pydicom.sequence import Sequence
from pydicom.uid import UID, ExplicitVRLittleEndian, RLELossless

from datalens.data import dicom, formats
from datalens.data.own.reading import Reading
from datalens.data.records import collect
from datalens.data.schema import IMAGE, PERSON
from datalens.data.studies import draw_studies
from datalens.errors import DatalensError
from datalens.evaluate.inspection import inspect
from tests.unit.test_own_data import keys

RNG = np.random.default_rng(0)
STORED = RNG.integers(0, 4096, (10, 8)).astype("<u2")  # not square
NAME, BORN = "Quux^Jane", "19010203"  # must be found nowhere


def file(stored=STORED, kind="MONOCHROME2", *, patient="p1", syntax=ExplicitVRLittleEndian, bits=12, **more):
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = syntax
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.1.1", "2.25.1"
    made.StudyInstanceUID, made.SeriesInstanceUID = "2.25.2", "2.25.3"
    made.PatientName, made.PatientBirthDate = NAME, BORN
    if patient is not None:
        made.PatientID = patient
    if stored is not None:
        made.Rows, made.Columns = stored.shape[:2]
        made.SamplesPerPixel, made.PhotometricInterpretation = 3 if stored.ndim == 3 else 1, kind
        made.BitsAllocated = 8 * stored.itemsize
        made.BitsStored, made.HighBit = min(bits, made.BitsAllocated), min(bits, made.BitsAllocated) - 1
        made.PixelRepresentation = int(stored.dtype.kind == "i")
        made.PixelData = stored.tobytes()
    if stored is not None and stored.ndim == 3:
        made.PlanarConfiguration = 0
    for keyword, value in more.items():
        setattr(made, keyword, value)
    return made


def written(made):
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these files are wrong on purpose
        dcmwrite(stream, made, enforce_file_format=True)
    return stream.getvalue()


def pixels(*arguments, **more):
    return np.asarray(dicom.picture(written(file(*arguments, **more)), "a file"))


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("slope", "intercept"), [(None, None), (1, -1024), (0.5, 3)])
def test_windows_are_those_of_the_standard(function, slope, intercept):
    more = {"WindowCenter": [700, 1], "WindowWidth": [900, 2]}  # the second window is another view: not used
    more |= {} if function is None else {"VOILUTFunction": function}
    more |= {} if slope is None else {"RescaleSlope": slope, "RescaleIntercept": intercept}
    made = file(**more)
    ours = pixels(**more)
    values = apply_modality_lut(STORED, made)
    theirs = apply_windowing(values, made)
    low, high = (0 if slope is None else bound * slope + intercept for bound in (0, 4095))
    high = 4095 if slope is None else high
    assert np.abs(ours - (theirs - low) / (high - low) * 255).max() <= 0.5 + 1e-9
    assert np.abs(pixels(kind="MONOCHROME1", **more).astype(int) - (255 - ours.astype(int))).max() == 0


def test_without_a_window_the_image_fills_the_range_and_padding_does_not_count():
    assert (pixels().min(), pixels().max()) == (0, 255)
    padded = STORED.copy()
    padded[0] = 65535
    assert (pixels(padded, bits=16)[1:] == pixels(padded[1:], bits=16)).sum() < 20  # padding would take the range
    seen = pixels(padded, bits=16, PixelPaddingValue=65535)
    assert (seen[1:] == pixels(padded[1:], bits=16)).all()
    assert not pixels(np.full((8, 8), 77, "<u2")).any()


def test_a_signed_image_and_a_lut():
    assert (pixels(STORED.astype("<i2") - 2000, bits=16) == pixels()).all()
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4096, 0, 8], (np.arange(4096) // 16).astype(np.uint16).tolist()
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    assert (pixels(VOILUTSequence=Sequence([table])) == STORED // 16).all()
    table["LUTData"].VR, table["LUTData"].value = "OW", (np.arange(4096) // 16).astype("<u2").tobytes()
    assert (pixels(VOILUTSequence=Sequence([table])) == STORED // 16).all()


def test_colours():
    colour = RNG.integers(0, 256, (9, 8, 3)).astype(np.uint8)
    assert (pixels(colour, "RGB", bits=8) == colour).all()
    palette = {}
    for name, shift in (("Red", 0), ("Green", 1), ("Blue", 2)):
        palette[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        values = ((np.arange(256) + shift) % 256).astype("<u2")
        palette[f"{name}PaletteColorLookupTableData"] = (values * 257).tobytes()
    index = colour[..., 0]
    shown = pixels(index, "PALETTE COLOR", bits=8, **palette)
    assert (shown == np.stack([index, index + np.uint8(1), index + np.uint8(2)], axis=2)).all()


def test_compressed_images_are_decoded():
    packed = file()
    packed.compress(RLELossless)
    assert (np.asarray(dicom.picture(written(packed), "a")) == pixels()).all()
    smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
    for syntax, kind in (("1.2.840.10008.1.2.4.50", "JPEG"), ("1.2.840.10008.1.2.4.90", "JPEG2000")):
        stream = io.BytesIO()
        Image.fromarray(smooth).save(stream, kind, **({"quality": 95} if kind == "JPEG" else {"no_jp2": True}))
        made = file(smooth, bits=8, syntax=UID(syntax), WindowCenter=128, WindowWidth=256)
        made.PixelData = encapsulate([stream.getvalue()])
        made["PixelData"].is_undefined_length = True
        assert np.abs(np.asarray(dicom.picture(written(made), "a")).astype(int) - smooth).max() <= 4


# --- what is refused, by name ---------------------------------------------------------------------


def compressed(syntax):
    made = file(syntax=UID(syntax))
    made.PixelData = encapsulate([b"\0" * 16])
    made["PixelData"].is_undefined_length = True
    return made


REFUSED = {
    "frames": (lambda: file(NumberOfFrames=12), "a file has 12 frames"),
    "no image": (lambda: file(None, SOPClassUID="1.2.840.10008.5.1.4.1.1.88.11"), "no image .Basic Text SR Storage"),
    "deflated": (lambda: file(syntax=UID("1.2.840.10008.1.2.1.99")), "compressed as Deflated Explicit VR"),
    "a video": (lambda: compressed("1.2.840.10008.1.2.4.100"), "compressed as MPEG2 Main Profile"),
    "no rule": (lambda: file(kind="ARGB"), "1 samples of ARGB"),
    "other samples": (lambda: file(kind="RGB"), "1 samples of RGB"),
    "an odd window": (lambda: file(WindowCenter=1, WindowWidth=0), "a window of width 0 by LINEAR"),
    "other function": (lambda: file(WindowCenter=1, WindowWidth=4, VOILUTFunction="LOG"), "width 4 by LOG"),
    "too many pixels": (lambda: file(Rows=65535, Columns=65535), "more than the limit"),
    "fewer bytes": (lambda: file(Rows=100), "not a readable image"),
    "floats": (lambda: file(PixelData=None), "a file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_there_is_no_rule_for_is_refused_by_name(name):
    made, said = REFUSED[name]
    from datalens.data.pixels import checked_kind

    with pytest.raises(DatalensError, match=said):
        checked_kind(written(made()), "a file", dicom=True)


def test_a_missing_decoder_and_a_missing_library_say_what_to_install(monkeypatch):
    from pydicom.pixels.decoders.base import Decoder

    monkeypatch.setattr(Decoder, "is_available", property(lambda self: False))
    with pytest.raises(DatalensError, match=r"compressed as JPEG Lossless, .*pip install python-gdcm"):
        dicom.picture(written(compressed("1.2.840.10008.1.2.4.70")), "a file")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DatalensError, match=r"pip install 'datalens\[medical\]'"):
        dicom.picture(b"\0" * 128 + b"DICM", "a file")
    monkeypatch.undo()
    with pytest.raises(DatalensError, match="no DICM mark"):
        dicom.picture(b"\0" * 200, "a file")


def test_damaged_files_are_refused_in_one_line(tmp_path):
    """Whatever pydicom raises on them; and it prints no value of theirs."""
    from datalens.data.pixels import checked_kind

    whole = written(file(WindowCenter=700, WindowWidth=900))
    random, said = np.random.default_rng(0), []
    for _ in range(150):
        data = bytearray(whole)
        for place in random.integers(132, len(data), 6):
            data[place] = random.integers(256)
        data = bytes(data[: random.integers(140, len(data))] if random.integers(2) else data)
        (tmp_path / "a.dcm").write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for attempt in (
                lambda data=data: checked_kind(data, "a", dicom=True),
                lambda data=data: dicom.facts(data, "a"),
                lambda: dicom.Patients()(str(tmp_path / "a.dcm")),
            ):
                try:
                    attempt()
                except DatalensError as error:
                    said.append(str(error))
    assert len(said) > 100 and not any("Quux" in line or "\n" in line for line in said)


# --- whose they are -------------------------------------------------------------------------------


def folder(root, *, patients=("p1", "p1", "p2", "p3"), name="S{i}/IM00001", **more):
    for i, patient in enumerate(patients):
        path = root / ("yes", "no")[i % 2] / name.format(i=i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written(file(np.roll(STORED, i), patient=patient, **more)))
    return root


def opened(path, split="train", **reading):
    size = 4 if split == "train" else None
    return formats.open_records(str(path), split, nominal_size=size, reading=Reading(**reading))


def test_the_patient_is_the_unit_unless_an_option_says_otherwise(tmp_path):
    folder(tmp_path)
    (tmp_path / "DICOMDIR").write_bytes(b"an index with names")
    records = opened(tmp_path, classes="no,yes")
    assert (records.schema.record_unit, records.record_id) == (PERSON, dicom.DICOM)
    assert "first bytes" in records.looked_at
    by_hand = keys(records)
    assert len(by_hand) == 4 and len(set(by_hand)) == 3
    assert keys(opened(tmp_path, classes="no,yes", record_id="dicom")) == by_hand
    single = opened(tmp_path, classes="no,yes", record_id="none")
    assert single.schema.record_unit == IMAGE and len(set(keys(single))) == 4
    by_folder = opened(tmp_path, classes="no,yes", record_id="folder")
    assert by_folder.schema.record_unit == PERSON and len(set(keys(by_folder))) == 4


def test_a_list_of_files_has_the_same_default_and_a_column_takes_precedence(tmp_path):
    folder(tmp_path)
    lines = ["file_name,finding,ward,split"]
    lines += [f"{('yes', 'no')[i % 2]}/S{i}/IM00001,{i % 2},w,{'test' if i == 3 else 'train'}" for i in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    asked = {"label": "finding", "classes": "0,1"}
    records = opened(tmp_path / "list.csv", **asked)
    assert records.schema.record_unit == PERSON and len(set(keys(records))) == 2
    assert len(set(keys(opened(tmp_path / "list.csv", **asked, record_id="ward")))) == 1
    assert opened(tmp_path / "list.csv", **asked, record_id="none").schema.record_unit == IMAGE
    assert len(collect(opened(tmp_path / "list.csv", "test", **asked)).images) == 1


def test_an_image_does_not_depend_on_the_others(tmp_path):
    alone, among = folder(tmp_path / "a", patients=("p1",)), folder(tmp_path / "b")
    one = collect(opened(alone, label="none", image_size="8", grayscale=True)).images
    assert any((one[0] == other).all() for other in collect(opened(among, label="none", image_size="8")).images)


@pytest.mark.parametrize("patient", [None, "", "UNKNOWN", " n/a "])
def test_a_missing_patient_id_is_refused(tmp_path, patient):
    folder(tmp_path, patients=("p1", patient))
    with pytest.raises(DatalensError, match="IM00001 has no id that says whose it is"):
        keys(opened(tmp_path, classes="no,yes"))


def test_an_id_from_two_issuers_is_refused_without_naming_it(tmp_path):
    folder(tmp_path / "x", patients=("secret7", "p2"), IssuerOfPatientID="A")
    assert keys(opened(tmp_path / "x", label="none"))
    (tmp_path / "x/no/B").write_bytes(written(file(patient="secret7", IssuerOfPatientID="B")))
    with pytest.raises(DatalensError, match="from another issuer") as refused:
        keys(opened(tmp_path / "x", label="none"))
    assert "secret7" not in str(refused.value)


def test_folders_of_dicom_files_are_no_classes_until_they_are_declared(tmp_path):
    folder(tmp_path, name="IM{i}.dcm")
    with pytest.raises(DatalensError, match="declare the classes with --classes"):
        opened(tmp_path)
    assert opened(tmp_path, label="none").schema.classes == ("all",)
    with pytest.raises(DatalensError, match=r"none of the classes no: move it, or add it"):
        opened(tmp_path, classes="no")


def test_dicom_files_are_not_skipped(tmp_path):
    folder(tmp_path)
    with pytest.raises(DatalensError, match="--skip-unreadable is for images"):
        opened(tmp_path, label="none", skip_unreadable=True)


def test_a_file_that_only_its_name_calls_dicom_is_one_more_unreadable_image(tmp_path):
    for label in ("no", "yes"):
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / label / f"{i}.png")
    broken = tmp_path / "no/0.png"
    broken.write_bytes(broken.read_bytes()[:40])
    stray = tmp_path / "yes/a.dcm"
    stray.write_bytes(b"DICM")
    found = inspect(tmp_path, Reading(), nominal_size=6, delta=1e-5, most=None)
    assert {one.split(" ")[0] for one in found["unreadable"]} == {str(broken), str(stray)}
    assert len(collect(opened(tmp_path, skip_unreadable=True)).images) == 5
    stray.write_bytes(bytes(128) + b"DICM")
    with pytest.raises(DatalensError, match=r"0\.png is no DICOM file, and .*a\.dcm is one"):
        opened(tmp_path)
    found = inspect(tmp_path, Reading(), nominal_size=6, delta=1e-5, most=None)
    assert {one.split(" ")[0] for one in found["unreadable"]} == {str(broken), str(stray)}
    assert len(collect(opened(tmp_path, skip_unreadable=True)).images) == 5


def test_other_files_among_dicom_files_and_the_other_way_round(tmp_path):
    folder(tmp_path)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "yes/a.png")
    with pytest.raises(DatalensError, match=r"a\.png is no DICOM file, and .* is one"):
        opened(tmp_path, label="none")
    (tmp_path / "only").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "only/a.png")
    with pytest.raises(DatalensError, match="--record-id dicom is for DICOM files"):
        opened(tmp_path / "only", record_id="dicom")
    assert opened(tmp_path / "only", record_id="none").schema.record_unit == IMAGE


# --- nothing else is read -------------------------------------------------------------------------


def identifying(found):
    """Elements of a parsed file that are none of those that `data.dicom` names, besides the character set."""
    named = {*dicom.WHOSE, *dicom.STUDY, *dicom.PIXELS, "SpecificCharacterSet"}
    return [element.keyword for element in found if element.keyword not in named]


def test_only_the_elements_that_are_named_are_parsed():
    data = written(file())
    for keywords in (dicom.WHOSE, dicom.STUDY, dicom.PIXELS, dicom.SIZE):
        found = dicom._parsed(io.BytesIO(data), "a", keywords)
        assert identifying(found) == []
        assert {element.keyword for element in found} <= {*keywords, "SpecificCharacterSet"}
    assert {"PatientName", "PatientBirthDate"} <= set(identifying(dcmread(io.BytesIO(data))))  # the check sees them
    assert not {*dicom.PIXELS, *dicom.SIZE} & {"PatientID", "PatientName", "StudyDate", *dicom.WHOSE}


def test_an_odd_id_is_used_without_a_warning_that_prints_it(tmp_path):
    path = tmp_path / "a.dcm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(written(file(patient="p" * 80)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dicom.Patients()(str(path)) == "p" * 80


# --- the example ----------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_studies(tmp_path):
    counted = draw_studies(tmp_path / "a", patients=6, seed=1)
    assert counted == draw_studies(tmp_path / "b", patients=6, seed=1)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == counted["images"] + 1
    assert all((tmp_path / "a" / one).read_bytes() == (tmp_path / "b" / one).read_bytes() for one in files)
    draw_studies(tmp_path / "c", patients=6, seed=2)
    assert (tmp_path / "c" / files[0]).read_bytes() != (tmp_path / "a" / files[0]).read_bytes()
    kinds = {dcmread(tmp_path / "a" / one).PhotometricInterpretation for one in files if one.suffix != ".csv"}
    assert kinds == {"MONOCHROME1", "MONOCHROME2"}
    for wrong, said in ((tmp_path / "a", "exists"), (tmp_path / "d", "at least 1")):
        with pytest.raises(DatalensError, match=said):
            draw_studies(wrong, patients=0 if said != "exists" else 1, seed=0)
