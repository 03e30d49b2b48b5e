"""The user's own images: every format gives the same records, every kind of image becomes what the rule says."""

import gzip
import io
import json
import os
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datalens.data import formats, idx
from datalens.data.own.reading import Reading
from datalens.data.pixels import to_pixels
from datalens.data.records import collect
from datalens.data.schema import IMAGE, PERSON, Schema
from datalens.errors import DatalensError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 8, 10), dtype=np.uint8)  # not square: height and width must not be mixed up
NAMES = ["cat", "dog", "eel"]
LABELS = np.arange(12) % 3


def png(image, **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", **options)
    return buffer.getvalue()


def folder(root, images=IMAGES, labels=LABELS, name="{i:02}.png"):
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = root / NAMES[label] / name.format(i=i, person=i // 4)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(image))
    return root


def listed(root, extra=""):
    folder(root / "images")
    lines = [f"file_name,kind,person{',split' if extra else ''}"]
    for i, label in enumerate(LABELS):
        part = f",{'test' if i >= 9 else 'train'}" if extra else ""
        lines.append(f"images/{NAMES[label]}/{i:02}.png,{NAMES[label]},{i // 4}{part}")
    (root / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / "list.csv"


def parquet(path, *, metadata=None, labels=None, image_path=True):
    pictures = [{"bytes": png(image), "path": f"{i}.png" if image_path else None} for i, image in enumerate(IMAGES)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [NAMES[label] for label in LABELS] if labels is None else labels
    table = pa.table({"image": pa.array(pictures, kind), "label": values, "person": [f"p{i // 4}" for i in range(12)]})
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)
    return path


def opened(path, nominal_size=12, split="train", **reading):
    return formats.open_records(
        str(path), split, nominal_size=nominal_size if split == "train" else None, reading=Reading(**reading)
    )


def keys(records):
    found = []
    for _ in records.blocks(lambda index, keys: found.extend(keys) or np.zeros(len(index), np.int64)):
        pass
    return found


def as_sets(dataset):
    return {
        (dataset.schema.classes[label], image.tobytes())
        for label, image in zip(dataset.labels, dataset.images, strict=True)
    }


EXPECTED = {(NAMES[label], image.tobytes()) for label, image in zip(LABELS, IMAGES, strict=True)}


@pytest.mark.parametrize("kind", ["folder", "csv", "parquet", "parquets", "class-labels", "npz", "idx"])
def test_every_format_gives_the_same_records(tmp_path, kind):
    reading = {}
    if kind == "folder":
        path = folder(tmp_path / "with a space ∂")
    elif kind == "csv":
        path, reading = listed(tmp_path), {"label": "kind"}
    elif kind == "parquet":
        path = parquet(tmp_path / "a.parquet")
    elif kind == "parquets":
        parquet(tmp_path / "train-0.parquet")
        path = tmp_path
    elif kind == "class-labels":
        about = json.dumps({"info": {"features": {"label": {"names": NAMES, "_type": "ClassLabel"}}}})
        path = parquet(tmp_path / "b.parquet", metadata={"huggingface": about}, labels=LABELS.tolist())
    elif kind == "npz":
        np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS, classes=np.array(NAMES))
        path = tmp_path / "a.npz"
    else:
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(idx.dump(IMAGES))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx.dump(LABELS.astype(np.uint8)))
        reading = {"classes": ",".join(NAMES)}
    records = opened(path, **reading)
    schema = records.schema
    assert (schema.height, schema.width, schema.channels, schema.nominal_size) == (8, 10, 1, 12)
    assert schema.classes == tuple(NAMES)
    assert schema.record_unit == IMAGE
    assert as_sets(collect(records)) == EXPECTED


@pytest.mark.parametrize("kind", ["prefix", "folder", "csv", "parquet", "npz"])
def test_a_persons_images_have_one_key(tmp_path, kind):
    """Three persons of four images in three classes: so all of a person's images are in one share."""
    reading = {"record_id": kind}
    if kind == "prefix":
        path = folder(tmp_path, name="p{person}_{i}.png")
    elif kind == "folder":
        path = folder(tmp_path, name="{person}/{i}.png")
    elif kind == "csv":
        path, reading = listed(tmp_path), {"label": "kind", "record_id": "person"}
    elif kind == "parquet":
        path, reading = parquet(tmp_path / "a.parquet"), {"record_id": "person"}
    else:
        np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS, classes=np.array(NAMES), whose=np.arange(12) // 4)
        path, reading = tmp_path / "a.npz", {"record_id": "whose"}
    records = opened(path, 3, **reading)
    found = keys(records)
    assert records.schema.record_unit == PERSON
    assert sorted(found.count(key) for key in set(found)) == [4, 4, 4]


def test_without_a_record_id_every_image_has_its_own_key(tmp_path):
    assert len(set(keys(opened(folder(tmp_path, name="p{person}_{i}.png"))))) == 12


def test_what_was_read_off_is_said_and_what_was_declared_is_not(tmp_path):
    note = opened(folder(tmp_path)).schema.note
    assert note.startswith("read off the data, and declared public by the owner")
    assert all(what in note for what in ("names of folders", "size", "grey"))
    assert opened(tmp_path, classes="eel,dog,cat", image_size="8x10", grayscale=True).schema.note == ""
    assert opened(tmp_path, classes="eel,dog,cat").schema.classes == ("eel", "dog", "cat")


def test_a_thousand_classes_are_named_in_a_line_or_a_file(tmp_path):
    names = [*NAMES, *(f"kind {i}" for i in range(997))]
    (tmp_path / "classes.txt").write_text("\n".join(names), encoding="utf-8")
    folder(tmp_path / "data")
    for given in (",".join(names), str(tmp_path / "classes.txt")):
        assert opened(tmp_path / "data", classes=given).schema.classes == tuple(names)
    with pytest.raises(DatalensError, match="more than 1000"):
        opened(tmp_path / "data", classes=",".join([*names, "one more"]))


def test_a_class_without_images_is_a_class(tmp_path):
    """Or a record would decide which classes there are."""
    folder(tmp_path)
    (tmp_path / "fox").mkdir()
    assert opened(tmp_path).schema.classes == (*NAMES, "fox")


def test_numbers_are_classes_in_their_order(tmp_path):
    values = [10, 9, 2] * 4
    assert opened(parquet(tmp_path / "a.parquet", labels=values)).schema.classes == ("2", "9", "10")


@pytest.mark.parametrize("kind", ["folder", "none", "csv", "parquet", "idx"])
def test_without_labels(tmp_path, kind):
    reading = {"label": "none"} if kind in ("none", "idx", "parquet") else {}
    if kind == "folder":
        for i, image in enumerate(IMAGES):
            (tmp_path / f"{i}.png").write_bytes(png(image))
        path = tmp_path
    elif kind == "none":
        path = folder(tmp_path)
    elif kind == "csv":
        path = listed(tmp_path)
    elif kind == "parquet":
        path = parquet(tmp_path / "a.parquet")
    else:
        path = tmp_path / "images.idx3-ubyte"
        path.write_bytes(idx.dump(IMAGES))
    found = collect(opened(path, **reading))
    assert found.schema.classes == ("all",)
    assert {image.tobytes() for image in found.images} == {image.tobytes() for image in IMAGES}
    assert not found.labels.any()


def test_splits(tmp_path):
    folder(tmp_path / "a" / "train")
    folder(tmp_path / "a" / "test", IMAGES[:1], LABELS[:1])  # of one class only: the classes are those of train
    assert opened(tmp_path / "a").schema.classes == tuple(NAMES)
    test = opened(tmp_path / "a", split="test")
    assert test.schema.classes == tuple(NAMES)
    assert len(collect(test).images) == 1
    path = listed(tmp_path, extra="split")
    assert len(collect(opened(path, label="kind")).images) == 9
    assert len(collect(opened(path, label="kind", split="test")).images) == 3
    assert opened(path, label="kind", split="test").schema.classes == tuple(NAMES)
    parquet(tmp_path / "train.parquet")
    with pytest.raises(DatalensError, match=r"test\.parquet"):
        opened(tmp_path, split="test")
    for name in ("t10k", "train"):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx.dump(IMAGES[: 4 if name == "t10k" else 12]))
    found = opened(tmp_path / "train-images-idx3-ubyte", split="test", label="none")
    assert len(collect(found).images) == 4


def test_a_folder_with_columns_beside_its_images(tmp_path):
    csv = listed(tmp_path)
    csv.rename(tmp_path / "metadata.csv")
    found = opened(tmp_path, 3, label="kind", record_id="person")
    assert found.schema.record_unit == PERSON
    assert as_sets(collect(found)) == EXPECTED


# --- what an image becomes ------------------------------------------------------------------------


def seen(data, *, channels, size=(8, 10), resize=False, grayscale=False):
    schema = Schema(name="x", height=size[0], width=size[1], channels=channels, classes=("all",), nominal_size=1)
    return to_pixels(data, "x.png", schema, resize=resize, grayscale=grayscale)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_grey_of_16_bits_keeps_its_range():
    values = np.array([[0, 128, 129, 257 * 200, 65535, 300]] * 8, dtype=np.uint16)
    assert seen(encoded(Image.fromarray(values)), channels=1, size=(8, 6))[0, :, 0].tolist() == [0, 0, 1, 200, 255, 1]


def test_transparency_is_seen_on_white():
    image = np.zeros((8, 10, 4), np.uint8)
    image[:, 5:, 3] = 255  # black, and on the left not there at all
    found = seen(png(image), channels=3)
    assert (found[:, :5] == 255).all() and (found[:, 5:] == 0).all()


def test_cmyk_becomes_colour():
    image = Image.new("CMYK", (10, 8), (0, 255, 255, 0))
    red = seen(encoded(image, "JPEG", quality=100), channels=3)[4, 5]
    assert red[0] > 240 and red[1] < 15 and red[2] < 15


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_formats_of_images(kind):
    image = Image.new("RGB", (10, 8), (200, 100, 50))
    assert np.abs(seen(encoded(image, kind), channels=3).astype(int) - (200, 100, 50)).max() < 8


def test_palette_black_and_white_and_grey_among_colour():
    assert (seen(encoded(Image.new("RGB", (10, 8), (9, 8, 7)).quantize()), channels=3) == (9, 8, 7)).all()
    assert (seen(encoded(Image.new("1", (10, 8), 1)), channels=1) == 255).all()
    assert (seen(encoded(Image.new("L", (10, 8), 77)), channels=3) == 77).all()


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    image = np.zeros((10, 8), np.uint8)
    image[:, :4] = 255
    data = encoded(Image.fromarray(image), exif=exif)
    found = seen(data, channels=1)
    assert (found[:4] == 255).all() and (found[4:] == 0).all()


def test_the_middle_is_cut_out_and_resized():
    image = np.zeros((20, 60), np.uint8)
    image[:, 20:40] = 200  # the middle square
    assert (seen(png(image), channels=1, size=(10, 10), resize=True) == 200).all()
    wide = seen(png(image), channels=1, size=(10, 30), resize=True)
    assert (wide[:, 12:18] == 200).all() and (wide[:, :8] == 0).all()


def test_colour_in_a_grey_set_needs_grayscale():
    data = encoded(Image.new("RGB", (10, 8), (255, 0, 0)))
    with pytest.raises(DatalensError, match="--grayscale"):
        seen(data, channels=1)
    assert (seen(data, channels=1, grayscale=True) == 76).all()  # the luma of red


def test_arrays_are_reshaped_by_the_same_rule(tmp_path):
    colour = RNG.integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=colour, labels=np.zeros(5, int), classes=np.array(["a"]))
    found = collect(opened(tmp_path / "a.npz", image_size="8x12", grayscale=True))
    expected = [seen(png(image), channels=1, size=(8, 12), resize=True, grayscale=True) for image in colour]
    assert (found.images == np.stack(expected)).all()


# --- from Python ----------------------------------------------------------------------------------


def test_from_arrays():
    import torch

    found = formats.from_arrays(IMAGES, [NAMES[i] for i in LABELS], nominal_size=10)
    assert (found.schema.classes, found.labels.tolist()) == (tuple(NAMES), LABELS.tolist())
    assert "classes" in found.schema.note
    assert formats.from_arrays(IMAGES, LABELS, nominal_size=10, classes=NAMES).schema.note == ""
    colour = RNG.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    tensor = torch.from_numpy(colour).permute(0, 3, 1, 2)
    assert (formats.from_arrays(tensor, nominal_size=4).images == colour).all()
    assert (formats.from_arrays(tensor / 255, nominal_size=4).images == colour).all()
    persons = formats.from_arrays(IMAGES, LABELS, nominal_size=3, ids=LABELS, by_person=True)
    assert persons.schema.by_person and len(set(keys(persons))) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"labels": LABELS[:5]}, "labels must be 12"),
        ({"labels": ["bat"] * 12, "classes": NAMES}, "'bat' is none of the 3 classes"),
        ({"labels": LABELS, "classes": ["one"]}, "1 classes"),
        ({"labels": LABELS, "by_person": True}, "give ids"),
        ({"labels": LABELS, "ids": [1, 2]}, "ids must be 12"),
        ({"labels": LABELS, "nominal_size": 0}, "nominal_size"),
    ],
)
def test_arrays_that_do_not_fit(arguments, words):
    with pytest.raises(DatalensError, match=words):
        formats.from_arrays(IMAGES, **({"nominal_size": 12} | arguments))


def test_from_a_torch_dataset():
    import torch

    pixels = torch.from_numpy(IMAGES).unsqueeze(1).to(torch.float32) / 255
    found = formats.from_arrays(
        torch.utils.data.TensorDataset(pixels, torch.from_numpy(LABELS)), nominal_size=12, classes=NAMES
    )
    assert as_sets(found) == EXPECTED
    pictures = [Image.fromarray(image) for image in IMAGES]
    assert formats.from_arrays(pictures, nominal_size=12).schema.classes == ("all",)
    with pytest.raises(DatalensError, match="there are none"):
        formats.from_arrays([], nominal_size=12)
    with pytest.raises(DatalensError, match=r"8x10 and 4x10|4x10 and 8x10"):
        formats.from_arrays([IMAGES[0], IMAGES[1, :4]], nominal_size=12)


class Items:
    """A torch data set of what it is given."""

    def __init__(self, *items, classes=None):
        self.items, self.classes = items, classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_data_set_of_images_alone_or_with_the_names_of_its_classes():
    alone = formats.from_arrays(Items(*IMAGES), nominal_size=12)
    assert (alone.images[..., 0] == IMAGES).all() and alone.schema.classes == ("all",) and not alone.schema.note
    named = formats.from_arrays(Items(*zip(IMAGES, LABELS.tolist(), strict=True), classes=NAMES), nominal_size=12)
    assert as_sets(named) == EXPECTED and named.schema.note.endswith("the classes that the data names")


def test_one_record_does_not_decide_how_others_are_read():
    """Under add/remove whatever one record changes in all others is outside every sensitivity."""
    dark = [np.ones((8, 8), np.uint8)] * 3  # 1 of 255; among floats it was 1.0, which is white
    with pytest.raises(DatalensError, match=r"several kinds .float64 and uint8"):
        formats.from_arrays([*dark, np.full((8, 8), 0.5)], nominal_size=3)
    with pytest.raises(DatalensError, match="label 0 is none of the 3 classes"):  # it made numbers of all labels
        formats.from_arrays(IMAGES[:3], [1, 2, 0], nominal_size=3, classes=[1, 2, 3])
    with pytest.raises(DatalensError, match="image 2 has no label"):  # and nobody had one
        formats.from_arrays(Items((IMAGES[0], 1), (IMAGES[1], 0), (IMAGES[2], None)), nominal_size=3)
    for missing in (float("nan"), np.float32("nan")):  # NaN is not another the second time
        with pytest.raises(DatalensError, match="image 2 has no label"):
            formats.from_arrays(Items((IMAGES[0], 1), (IMAGES[1], 0), (IMAGES[2], missing)), nominal_size=3)
    with pytest.raises(DatalensError, match=r"several kinds .int and str"):
        formats.from_arrays(IMAGES[:2], np.array([1, "a"], dtype=object), nominal_size=3)


def test_ids_from_python_stay_what_they_are():
    found = formats.from_arrays(IMAGES[:3], nominal_size=None, ids=[7, "7", np.int64(8)], by_person=True)
    assert found.schema.nominal_size == 2 and "true number of persons" in found.schema.note
    assert keys(found) == [b"id:7", b"id:7", b"id:8"]
    with pytest.raises(DatalensError, match="type float"):
        formats.from_arrays(IMAGES[:2], nominal_size=None, ids=np.array([1.0, 2.0]), by_person=True)


# --- bad input: one line, which names the file and the option --------------------------------------


def bomb(side=20_000):
    """A valid PNG of a few hundred kilobytes that unpacks to 400 million pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(side + 1) * 100)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def frames(kind="WEBP"):
    first, *rest = [Image.fromarray(image) for image in IMAGES[:3]]
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=rest)
    return buffer.getvalue()


BAD = {
    "0 bytes": ("cat/00.png", b"", "00.png is empty"),
    "0 bytes, later": ("eel/11.png", b"", "11.png is empty"),
    "text": ("eel/11.png", b"hello", "11.png is not a readable image"),
    "cut short": ("eel/11.png", png(IMAGES[0])[:-30], "11.png is not a readable image"),
    "a bomb": ("eel/11.png", bomb(9_000), "limit of 2^26"),
    "a larger bomb": ("eel/11.png", bomb(), "pixels"),
    "frames": ("eel/11.png", frames(), "frames"),
    "another size": ("eel/11.png", png(IMAGES[0][:, :8]), "--image-size"),
    "colour among grey": ("eel/11.png", png(np.zeros((8, 10, 3), np.uint8)), "--grayscale"),
    "another format": ("eel/11.tif", b"II*\0", "11.tif is no .png"),
    "beside the classes": ("zzz.png", png(IMAGES[0]), "lies beside folders of classes"),
}


@pytest.mark.parametrize(("name", "content", "words"), BAD.values(), ids=BAD.keys())
def test_bad_images_are_named(tmp_path, name, content, words):
    folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatalensError) as error:
        collect(opened(tmp_path))
    assert words in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_files_of_other_formats_are_counted(tmp_path):
    folder(tmp_path)
    for name in ("cat/a.bmp", "eel/b.tif"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DatalensError, match=r"a\.bmp is no .* file, nor is another: convert them"):
        opened(tmp_path)
    (tmp_path / "eel/c.bmp").write_bytes(b"")
    with pytest.raises(DatalensError, match=r"a\.bmp is no .* file, nor are 2 others: convert them"):
        opened(tmp_path)


def test_links_are_refused(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(IMAGES[0]))
    inside = folder(tmp_path / "data")
    (inside / "cat" / "link.png").symlink_to(secret)
    with pytest.raises(DatalensError, match=r"link\.png is a symbolic link"):
        opened(inside)
    (inside / "cat" / "link.png").unlink()
    (inside / "more").symlink_to(tmp_path)
    with pytest.raises(DatalensError, match="more is a symbolic link"):
        opened(inside)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ({"image_size": "4"}, "--image-size"),
        ({"image_size": "200"}, "--image-size"),
        ({"image_size": "big"}, "HEIGHTxWIDTH"),
        ({"classes": "cat,dog"}, "eel is none of the classes"),
        ({"classes": "cat,cat"}, "distinct"),
        ({"label": "kind"}, r"metadata\.csv"),
        ({"record_id": "person"}, "prefix"),
        ({"record_id": "prefix"}, "has no _"),
    ],
)
def test_options_that_do_not_fit_a_folder(tmp_path, reading, words):
    folder(tmp_path)
    with pytest.raises(DatalensError, match=words):
        opened(tmp_path, **reading)


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(folder(tmp_path) / "cat" / "pipe.png")
    with pytest.raises(DatalensError, match=r"pipe\.png is not a file"):
        opened(tmp_path)


def test_folders_without_images(tmp_path):
    for there in ("nothing", "classes", "not there"):
        path = tmp_path / there
        if there != "not there":
            (path / "cat" if there == "classes" else path).mkdir(parents=True)
        with pytest.raises(DatalensError, match=r"holds no image|does not exist"):
            opened(path)
    with pytest.raises(DatalensError, match="no test images"):
        opened(folder(tmp_path / "all"), split="test")
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(DatalensError, match="neither a folder of images nor"):
        opened(tmp_path / "x.bin")


def test_a_file_name_of_any_bytes(tmp_path):
    folder(tmp_path)
    try:
        with open(os.fsencode(tmp_path) + b"/cat/\xff.png", "wb") as file:
            file.write(png(IMAGES[0]))
    except OSError:
        pytest.skip("this file system has no such names")
    assert len(set(keys(opened(tmp_path)))) == 13


@pytest.mark.parametrize(
    ("text", "reading", "words"),
    [
        ("file_name,label\n", {}, "lists no image"),
        ("name,label\na.png,1\n", {}, "no column file_name"),
        ("path\na.png\n", {"label": "age"}, "no column age; its columns are path: change --label"),
        ("path\na.png\n", {"record_id": "who"}, "change --record-id"),
        ("path,label\na.png,\n", {}, "record 1 has no label"),
        ("path,label\na.png\n", {}, "more or fewer fields"),
        ('path,label\n"a.png,1\n', {}, "not a readable CSV"),
        ("path,label\nnone.png,1\n", {}, r"none\.png cannot be read"),
        ("path,label\na.png,1\n", {"classes": "a,b"}, "not among --classes"),
        ("path,label\n" + "".join(f"a.png,{i}\n" for i in range(1001)), {}, "more than 1000"),
    ],
)
def test_bad_lists(tmp_path, text, reading, words):
    (tmp_path / "a.png").write_bytes(png(IMAGES[0]))
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DatalensError, match=words):
        collect(opened(tmp_path / "list.csv", **reading))


@pytest.mark.parametrize(
    ("reading", "words"),
    [({"label": "age"}, "no column age"), ({"record_id": "who"}, "no column who"), ({"classes": "cat"}, "--classes")],
)
def test_columns_that_are_not_there(tmp_path, reading, words):
    with pytest.raises(DatalensError, match=words):
        opened(parquet(tmp_path / "a.parquet"), **reading)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(idx.dump(IMAGES)), "unpack it first"),
        (idx.dump(IMAGES)[:-1], "bytes follow"),
        (b"", "0 bytes is too short for an idx header of 16"),
        (idx.dump(IMAGES), "no labels beside it"),
    ],
)
def test_bad_idx(tmp_path, content, words):
    (tmp_path / "images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DatalensError, match=words):
        opened(tmp_path / "images-idx3-ubyte")


def test_options_of_own_data_are_not_for_named_sets():
    with pytest.raises(DatalensError, match="--grayscale is for your own data"):
        formats.open_records("digits", reading=Reading(grayscale=True))


# --- what is read for a schema --------------------------------------------------------------------

DECLARED = {"image_size": "8x10", "grayscale": True}
NO_IMAGE = b"no image"


def a_folder(root):
    return folder(root), sorted(root.rglob("*.png"))


def a_list(root):
    return listed(root), sorted(root.rglob("*.png"))


@pytest.mark.parametrize(
    ("make", "reading", "unread", "looked_at"),
    [
        (a_folder, {}, 1, "the names of all files, and the size and colour mode of the first image"),
        (a_folder, DECLARED, 0, "the names of all files"),
        (a_list, {"label": "kind"}, 1, "all lines of list.csv, and the size and colour mode of the first image"),
        (a_list, {"label": "kind"} | DECLARED, 0, "all lines of list.csv"),
    ],
)
def test_of_image_files_a_schema_needs_the_first_at_most(tmp_path, make, reading, unread, looked_at):
    """All others may be anything; they are found out when the records are read."""
    path, files = make(tmp_path)
    for file in files[unread:]:
        file.write_bytes(NO_IMAGE)
    records = opened(path, **reading)
    assert (records.schema.height, records.schema.width, records.schema.channels) == (8, 10, 1)
    assert formats.looked_at(records) == looked_at
    with pytest.raises(DatalensError, match="not a readable image"):
        collect(records)


@pytest.mark.parametrize(
    ("about", "reading", "looked_at"),
    [
        (None, {}, "all of column label, and the size and colour mode of the first image"),
        (None, {"classes": "eel,dog,cat"} | DECLARED, "all of column label"),
        (None, {"label": "none"} | DECLARED, "the names and types of the columns"),
        (NAMES, DECLARED, "the names of the classes that column label comes with"),
    ],
)
def test_of_parquet_a_schema_needs_labels_and_the_first_image_at_most(tmp_path, monkeypatch, about, reading, looked_at):
    if about:
        about = json.dumps({"info": {"features": {"label": {"names": about, "_type": "ClassLabel"}}}})
    labels = LABELS.tolist() if about else None
    path = parquet(tmp_path / "a.parquet", metadata=about and {"huggingface": about}, labels=labels)
    asked = []
    read = pq.ParquetFile.iter_batches

    def watched(self, batch_size=65536, columns=None, **more):
        for batch in read(self, batch_size=batch_size, columns=columns, **more):
            asked.append((batch.num_rows, columns))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    records = opened(path, **reading)
    assert formats.looked_at(records).endswith(looked_at)
    assert (12, ["label"]) in asked or "all of column" not in looked_at
    assert [rows for rows, columns in asked if "image" in columns] == ([1] if "first image" in looked_at else [])


def test_of_an_npz_a_schema_needs_headers_and_class_names(tmp_path):
    """Its images may be damaged, and larger than what opening the file allocates."""
    import tracemalloc

    images = np.zeros((400, 100, 100), np.float64)  # 32 MB
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(400) % 3, classes=np.array(NAMES), ids=np.arange(400))
    tracemalloc.start()
    records = opened(tmp_path / "a.npz", nominal_size=400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert (records.schema.height, records.schema.channels, records.schema.classes) == (100, 1, tuple(NAMES))
    assert formats.looked_at(records) == "the headers of its arrays and the names of the classes"
    found = collect(records)
    assert found.images.shape == (400, 100, 100, 1) and found.ids is not None
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[10_000] ^= 1  # of an image: the archive has a checksum of it
    (tmp_path / "a.npz").write_bytes(content)
    damaged = opened(tmp_path / "a.npz", nominal_size=400)
    assert damaged.schema == records.schema
    with pytest.raises(DatalensError, match=r"not a readable \.npz"):
        collect(damaged)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": LABELS + 1}, "label 3 has no name"),
        ({"labels": LABELS - 1}, "labels must be 0 or more"),
        ({"images": IMAGES / 1.0}, r"must lie in \[0, 1\]"),
        ({"images": IMAGES[:, :, :9]}, "array images is not the one whose header was read"),
        ({"labels": LABELS.astype(np.int32)}, "array labels is not the one whose header was read"),
    ],
)
def test_the_values_of_an_npz_are_checked_when_they_are_read(tmp_path, change, words):
    arrays = {"images": IMAGES, "labels": LABELS, "classes": np.array(NAMES)}
    np.savez(tmp_path / "a.npz", **(arrays | ({"images": IMAGES / 255.0} if "[0, 1" in words else {})))
    records = opened(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **(arrays | change))  # in the meantime
    with pytest.raises(DatalensError, match=words):
        collect(records)


def test_an_npz_without_a_class_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS, classes=np.array([], str))
    with pytest.raises(DatalensError, match="names no class"):
        opened(tmp_path / "a.npz")


def test_of_idx_a_schema_needs_labels_only_for_their_largest(tmp_path):
    path, beside = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(idx.dump(IMAGES))
    beside.write_bytes(idx.dump(LABELS.astype(np.uint8)))
    records = opened(path)
    assert records.schema.classes == ("0", "1", "2")
    assert formats.looked_at(records).startswith("the header of the images and all labels")
    beside.write_bytes(idx.dump(np.full(12, 3, np.uint8)))
    declared = opened(path, classes=",".join(NAMES))
    assert formats.looked_at(declared) == "the header of the images and that of the labels"
    with pytest.raises(DatalensError, match="label 3 has no name"):
        collect(declared)
    assert formats.looked_at(opened(path, label="none")) == "the header of the images"
    beside.write_bytes(idx.dump(np.zeros(11, np.uint8)))
    with pytest.raises(DatalensError, match="labels must be 12"):
        opened(path, classes=",".join(NAMES))


@pytest.mark.parametrize("kind", ["folder", "parquet", "prefix"])
def test_plan_reads_one_image_and_says_what_else(tmp_path, monkeypatch, kind, capsys):
    """Labels, and ids of persons, are counted to judge each class."""
    from datalens.cli.plan import Plan
    from datalens.data import parquet as of_parquet
    from datalens.data.own import reading as of_reading

    path = parquet(tmp_path / "a.parquet") if kind == "parquet" else folder(tmp_path / "data", name="p{i:03}_0.png")
    reading = {"record_id": "prefix"} if kind == "prefix" else {}
    read, columns = [], []
    real, batches = of_reading.read_regular, of_parquet._batches
    monkeypatch.setattr(of_reading, "read_regular", lambda path: read.append(path) or real(path))
    monkeypatch.setattr(of_parquet, "_batches", lambda file, names, n: columns.append(names) or batches(file, names, n))
    assert Plan(data=str(path), nominal_size=120, epsilon=20.0, **reading).run(set()) == 0
    said = capsys.readouterr().out
    assert f"for the part above, the class{' and the person' if reading else ''} of every image." in said
    assert f"class cat, 4 {'persons' if reading else 'records'}: " in said
    assert len(read) == (kind != "parquet")
    assert columns == ([["image", "label"], ["label"]] if kind == "parquet" else [])


@pytest.mark.parametrize("kind", ["folder", "csv", "npz", "idx"])
@pytest.mark.parametrize("verb", ["plan", "train", "inspect"])
def test_data_is_opened_once(tmp_path, monkeypatch, kind, verb, capsys):
    """`inspect` counts the test images, too, which are another split."""
    from datalens.cli.plan import Plan
    from datalens.data.own import idx_files, npz
    from datalens.driver import train
    from datalens.evaluate.inspection import inspect
    from datalens.options import TrainOptions

    images, labels = np.tile(IMAGES, (10, 1, 1)), np.tile(LABELS, 10)
    reading = {}
    if kind == "folder":
        path = folder(tmp_path / "data", images, labels, name="{i:03}.png")
    elif kind == "csv":
        folder(tmp_path / "data", images, labels, name="{i:03}.png")
        path, reading = tmp_path / "data" / "list.csv", {"label": "kind"}
        rows = [f"{NAMES[label]}/{i:03}.png,{NAMES[label]}" for i, label in enumerate(labels)]
        path.write_text("\n".join(["path,kind", *rows]), encoding="utf-8")
    elif kind == "npz":
        path = tmp_path / "a.npz"
        np.savez(path, images=images, labels=labels, classes=np.array(NAMES))
    else:
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(idx.dump(images))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx.dump(labels.astype(np.uint8)))
    calls, loads = [], []

    def watched(module, name, split):
        real = getattr(module, name)

        def call(*arguments):
            calls.append(arguments[split])
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    watched(npz, "open_npz", 1)
    watched(idx_files, "open_idx", 1)
    watched(formats, "find", 1)
    arrays = npz._arrays
    monkeypatch.setattr(npz, "_arrays", lambda path, headers: loads.append(set(headers)) or arrays(path, headers))

    shared = {"data": str(path), "nominal_size": 120, "epsilon": 20.0} | reading
    if verb == "plan":
        assert Plan(**shared).run(set()) == 0
        assert "read from the data: the header" in capsys.readouterr().out or kind in ("folder", "csv")
    elif verb == "train":
        train(TrainOptions(out=tmp_path / "run", coordinates=8, texture=0, device="cpu", **shared))
    else:
        inspect(path, Reading(**reading), nominal_size=None, delta=1e-5, most=None)
    assert calls == ["train", *(["test"] if verb == "inspect" else [])]
    assert loads.count({"images", "labels"}) == (1 if kind == "npz" and verb != "plan" else 0)
