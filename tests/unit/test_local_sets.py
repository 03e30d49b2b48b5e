"""CelebA, Places365 and scenes from small generated folders and parquet files, and what is wrong with broken ones."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from datalens.data import formats, images
from datalens.data.named import layouts, sources
from datalens.data.named.layouts import by_attributes
from datalens.data.records import Records, collect
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.private.partition import Hashed
from datalens.private.shares import Shares

ATTRIBUTES = ("5_o_Clock_Shadow", "Black_Hair", "Blond_Hair", "Brown_Hair", "Male")
# number of the image: split, black, blond, brown, male
FACES = {
    1: (0, 1, 0, 0, 1),
    2: (0, 0, 1, 0, 0),
    3: (0, 1, 1, 0, 0),  # two colours of hair
    4: (1, 0, 0, 1, 1),
    5: (0, 0, 0, 0, 1),  # none of the three
    6: (0, 0, 0, 1, 0),
    7: (2, 0, 1, 0, 0),
    8: (2, 1, 0, 0, 1),
}
SPLITS = ("train", "valid", "test")


def name(number: int) -> str:
    return f"{number:06d}.jpg"


def jpeg(number: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """A plain colour that tells the image: red = 20 × number."""
    out = io.BytesIO()
    Image.new("RGB", size, (20 * number, 100, 255 - 20 * number)).save(out, "JPEG", quality=95)
    return out.getvalue()


def reds(dataset: Any) -> list[int]:
    return [round(float(image[..., 0].mean()) / 20) for image in dataset.images]


@pytest.fixture
def official(tmp_path: Path) -> Path:
    folder = tmp_path / "official"
    (folder / "img_align_celeba").mkdir(parents=True)
    lines = [str(len(FACES)), " ".join(ATTRIBUTES)]
    for number, (_, *attributes) in FACES.items():
        (folder / "img_align_celeba" / name(number)).write_bytes(jpeg(number, (178, 218)))
        values = [-1, *(1 if there else -1 for there in attributes)]
        lines.append(f"{name(number)}  " + " ".join(f"{value:2d}" for value in values))
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    parts = "".join(f"{name(number)} {facts[0]}\n" for number, facts in FACES.items())
    (folder / "list_eval_partition.txt").write_text(parts)
    return folder


def table(numbers: Iterable[int], **other: Any) -> pa.Table:
    numbers = list(numbers)
    columns: dict[str, Any] = {
        "image": [{"bytes": jpeg(n), "path": name(n)} for n in numbers],
        **{
            key: [FACES[n][at] for n in numbers]
            for at, key in enumerate(("black_hair", "blond_hair", "brown_hair", "male"), 1)
        },
    }
    return pa.table({key: value for key, value in (columns | other).items() if value is not None})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for part, split in enumerate(SPLITS):
        numbers = [n for n, facts in FACES.items() if facts[0] == part]
        if split == "train":  # two files, and row groups of one record
            pq.write_table(table(numbers[:2]), folder / "train-00000-of-00002.parquet", row_group_size=1)
            pq.write_table(table(numbers[2:]), folder / "train-00001-of-00002.parquet", row_group_size=1)
        else:
            pq.write_table(table(numbers), folder / f"{split}.parquet")
    return folder


@pytest.fixture(params=["official", "shards"])
def celeba(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def opened(data: str, folder: Path, split: str = "train") -> Records:
    return formats.open_records(data, split, folder=folder)


def whole(data: str, folder: Path, split: str = "train") -> Any:
    return formats.load(data, split, folder=folder)


def stream_facts(records: Records) -> tuple[list[int], list[bytes]]:
    """Positions and keys as `choose` sees them; nothing is decoded."""
    positions: list[int] = []
    names: list[bytes] = []

    def choose(index: np.ndarray, keys: Iterable[bytes]) -> np.ndarray:
        positions.extend(index.tolist())
        names.extend(keys)
        return np.full(len(index), -1)

    for block in records.blocks(choose):
        assert not len(block.images)
    return positions, names


# CelebA


def test_gender(celeba: Path) -> None:
    train = whole("celeba-gender", celeba)
    assert train.images.shape == (5, 64, 64, 3) and train.images.dtype == np.uint8
    assert reds(train) == [1, 2, 3, 5, 6]
    assert train.labels.tolist() == [1, 0, 0, 1, 0]
    assert train.schema.classes == ("not male", "male")
    assert reds(whole("celeba-gender", celeba, "valid")) == [4]
    assert whole("celeba-gender", celeba, "test").labels.tolist() == [0, 1]


def test_gender_at_32_pixels_is_the_same_records_made_smaller(celeba: Path) -> None:
    large, small = whole("celeba-gender", celeba), whole("celeba-gender-32", celeba)
    assert small.images.shape == (5, 32, 32, 3) and small.schema.classes == large.schema.classes
    assert reds(small) == reds(large) and small.labels.tolist() == large.labels.tolist()
    positions_and_keys = stream_facts(opened("celeba-gender-32", celeba))
    assert positions_and_keys == stream_facts(opened("celeba-gender", celeba))


def test_hair_takes_records_with_exactly_one_colour(celeba: Path) -> None:
    train = whole("celeba-hair", celeba)
    assert reds(train) == [1, 2, 6]
    assert train.labels.tolist() == [0, 1, 2]
    assert train.schema.classes == ("black hair", "blond hair", "brown hair")
    # A record that is not of the set keeps its place, so that replacing one by another shifts nothing.
    assert stream_facts(opened("celeba-hair", celeba)) == (
        [0, 1, 4],
        [b"id:000001.jpg", b"id:000002.jpg", b"id:000006.jpg"],
    )


def test_both_layouts_give_a_record_the_same_share(official: Path, shards: Path) -> None:
    assert stream_facts(opened("celeba-gender", official)) == stream_facts(opened("celeba-gender", shards))


def test_only_wanted_records_are_decoded(celeba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode = images.decode

    def spy(data: bytes, name: str, *rest: Any) -> np.ndarray:
        decoded.append(name)
        return decode(data, name, *rest)

    monkeypatch.setattr(images, "decode", spy)
    rule, all_of_them = Hashed(teachers=3, salt=b""), opened("celeba-gender", celeba)
    shares = [
        Shares.gather(all_of_them, rule, numbers=range(i, i + 1), features=lambda x: x, device=torch.device("cpu"))
        for i in range(3)
    ]
    assert [part.seen for part in shares] == [5, 5, 5]
    assert sum(part.count for part in shares) == len(decoded) == len(set(decoded)) == 5


def test_the_centre_is_cut_out_and_resized() -> None:
    picture = np.zeros((218, 178, 3), dtype=np.uint8)
    picture[35:183, 15:163] = 200  # the square of 148 in the middle
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    schema = sources.schema("celeba-gender")
    assert (images.decode(out.getvalue(), "x", schema, 148) == 200).all()
    assert not (images.decode(out.getvalue(), "x", schema) == 200).all()
    assert images.decode(jpeg(3), "x", schema, 148).shape == (64, 64, 3)  # of that size already: as it is
    half = np.zeros((64, 64, 3), dtype=np.uint8)
    half[:, 32:] = 200
    out = io.BytesIO()
    Image.fromarray(half).save(out, "PNG")
    small = images.decode(out.getvalue(), "x", sources.schema("celeba-gender-32"), 148)  # cut before: all of it
    assert (small[:, :14] == 0).all() and (small[:, 18:] == 200).all()


def test_grey_images_become_colour(shards: Path) -> None:
    out = io.BytesIO()
    Image.new("L", (64, 64), 40).save(out, "JPEG")
    grey = [{"bytes": out.getvalue(), "path": "000001.jpg"}]
    pq.write_table(table([1], image=grey), shards / "test.parquet")
    assert (whole("celeba-gender", shards, "test").images == 40).all()


def test_records_without_a_path_are_known_by_their_pixels(shards: Path) -> None:
    nameless = [{"bytes": jpeg(n), "path": None} for n in (1, 2)]
    pq.write_table(table([1, 2], image=nameless), shards / "test.parquet")
    test = opened("celeba-gender", shards, "test")
    assert stream_facts(test)[1] == [b"content:" + image.tobytes() for image in collect(test).images]


def test_capital_letters_and_signs_in_columns(shards: Path) -> None:
    """As other conversions of CelebA have them."""
    renamed = table([1, 2]).drop(["male"]).append_column("Male", pa.array([True, False]))
    pq.write_table(renamed, shards / "test.parquet")
    assert whole("celeba-gender", shards, "test").labels.tolist() == [1, 0]
    assert by_attributes({"a": np.array([-1, 1]), "b": np.array([1, -1])}).tolist() == [1, 0]


def test_the_order_of_files_and_their_number_change_no_key(shards: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    pq.write_table(table([6, 5, 3, 2, 1]), one / "train.parquet")
    assert sorted(stream_facts(opened("celeba-gender", one))[1]) == sorted(
        stream_facts(opened("celeba-gender", shards))[1]
    )


def test_found_at_home(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALENS_HOME", str(tmp_path / "home"))
    with pytest.raises(
        DatalensError, match=r"celeba-hair cannot be downloaded: put img_align_celeba/, .* --data-folder"
    ) as error:
        sources.get("celeba-hair")
    assert "\n" not in str(error.value) and str(tmp_path / "home" / "celeba") in str(error.value)
    assert not sources.cached("celeba-hair")
    with pytest.raises(DatalensError, match="cannot be downloaded"):
        formats.open_records("celeba-hair")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "celeba").symlink_to(shards)
    for data in ("celeba-gender", "celeba-hair"):  # one folder for both
        assert sources.cached(data) and sources.get(data) == tmp_path / "home" / "celeba"
    assert len(sources.load("celeba-gender").images) == 5
    (tmp_path / "home" / "celeba-hair").mkdir()
    pq.write_table(table([2]), tmp_path / "home" / "celeba-hair" / "train.parquet")
    assert len(formats.load("celeba-hair").images) == 1  # its own folder comes first


def remove(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def replace(path: str, old: str, new: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return act


def cut_short(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:300])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (remove("list_attr_celeba.txt"), r"list_attr_celeba.txt does not exist"),
        (remove("list_eval_partition.txt"), r"list_eval_partition.txt does not exist"),
        (lambda f: (f / "img_align_celeba").rename(f / "elsewhere"), r"img_align_celeba: No such file"),
        (remove("img_align_celeba/000003.jpg"), r"img_align_celeba lacks 000003.jpg: put it there"),
        (
            lambda f: [(f / "img_align_celeba" / name(n)).unlink() for n in (2, 3, 5)],
            r"lacks 000002.jpg and 2 more",
        ),
        (cut_short("img_align_celeba/000005.jpg"), r"000005.jpg is not a readable image"),
        (lambda f: (f / "img_align_celeba/000005.jpg").write_bytes(b""), r"000005.jpg is empty"),
        (
            lambda f: (f / "img_align_celeba/000005.jpg").write_bytes(jpeg(5, (100, 100))),
            r"000005.jpg is 100x100, too small to cut 148x148",
        ),
        (replace("list_attr_celeba.txt", "Male", "Female"), r"no attribute male in its second line"),
        (replace("list_attr_celeba.txt", "000003.jpg", "000033.jpg"), r"no line for 000003.jpg"),
        (replace("list_attr_celeba.txt", "000003.jpg", "000003.jpg 1"), r"the line of 000003.jpg must hold 5 values"),
        (replace("list_attr_celeba.txt", "000006.jpg  -1 -1 -1  1 -1", "000006.jpg  -1 -1 -1  1 2"), r"of -1 or 1"),
        (lambda f: (f / "list_attr_celeba.txt").write_text(""), r"no attribute male"),
        (lambda f: (f / "list_attr_celeba.txt").write_bytes(b"\xff\xfe\x00"), r"cannot be read"),
        (replace("list_eval_partition.txt", " 0", " 3"), r"an image and 0, 1 or 2"),
        (replace("list_eval_partition.txt", " 0", " 1"), r"names no image of the train split"),
    ],
)
def test_broken_official_folders(official: Path, harm: Callable[[Path], object], says: str) -> None:
    harm(official)
    with pytest.raises(DatalensError, match=says) as error:
        whole("celeba-gender", official)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ({"male": None}, r"has no column male; its columns are image, black_hair"),
        ({"image": None}, r"has no column image"),
        ({"image": ["a", "b"]}, r"column image must be a struct of bytes and path, not string"),
        ({"image": [{"bytes": "text", "path": "a"}] * 2}, r"column image must be a struct"),
        ({"image": [{"bytes": jpeg(1)}] * 2}, r"column image must be a struct"),
        ({"male": [1, None]}, r"column male has missing values"),
        ({"male": ["yes", "no"]}, r"columns male must hold numbers"),
        (
            {"image": [{"bytes": jpeg(1), "path": "a.jpg"}, {"bytes": jpeg(2)[:200], "path": "b.jpg"}]},
            r"image b.jpg is not a readable image",
        ),
        (
            {"image": [{"bytes": jpeg(1), "path": "a.jpg"}, {"bytes": None, "path": "b.jpg"}]},
            r"image b.jpg has no bytes",
        ),
        ({"image": [{"bytes": b"", "path": None}] * 2}, r"image in row 0 of the split is empty"),
    ],
)
def test_broken_shards(shards: Path, harm: dict[str, Any], says: str) -> None:
    for file in shards.glob("train*"):
        file.unlink()
    pq.write_table(table([1, 2], **harm), shards / "train.parquet")
    with pytest.raises(DatalensError, match=says) as error:
        whole("celeba-gender", shards)
    assert "\n" not in str(error.value)


def test_files_that_are_no_parquet_or_missing(shards: Path, tmp_path: Path) -> None:
    whole_file = (shards / "valid.parquet").read_bytes()
    for content in (b"", b"PAR1", whole_file[:-20]):
        (shards / "valid.parquet").write_bytes(content)
        with pytest.raises(DatalensError, match=r"valid\.parquet is not a readable parquet file"):
            opened("celeba-gender", shards, "valid")
    (shards / "valid.parquet").write_bytes(whole_file[:4] + bytes(500) + whole_file[504:])  # the footer is there
    with pytest.raises(DatalensError, match=r"valid\.parquet"):
        whole("celeba-gender", shards, "valid")
    (shards / "valid.parquet").unlink()
    with pytest.raises(DatalensError, match=r"holds no val\*\.parquet"):
        opened("celeba-gender", shards, "valid")
    with pytest.raises(DatalensError, match="is not a folder"):
        opened("celeba-gender", tmp_path / "nowhere")
    with pytest.raises(DatalensError, match="unknown split"):
        opened("celeba-gender", shards, "all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatalensError, match=r"holds no train\*\.parquet: put img_align_celeba"):
        opened("celeba-gender", tmp_path / "empty")


# What is declared


def test_a_nominal_size_may_be_declared_for_a_folder(shards: Path) -> None:
    assert formats.schema("celeba-gender", folder=shards).nominal_size == 162_770
    assert formats.schema("celeba-gender", nominal_size=40_000, folder=shards).nominal_size == 40_000
    assert opened("celeba-gender", shards).schema == formats.schema("celeba-gender", folder=shards)
    declared = formats.open_records("celeba-gender", nominal_size=40_000, folder=str(shards))
    assert declared.schema == formats.schema("celeba-gender", nominal_size=40_000, folder=shards)
    assert len(collect(declared).images) == 5
    with pytest.raises(DatalensError, match="the size of a named data set is public"):
        formats.schema("celeba-gender", nominal_size=40_000)
    with pytest.raises(DatalensError, match="from 1 to"):
        formats.schema("celeba-gender", nominal_size=0, folder=shards)


def test_folders_are_for_sets_that_have_them(shards: Path) -> None:
    with pytest.raises(DatalensError, match="digits can: leave it out"):
        formats.open_records("digits", folder=shards)
    (shards / "x.npz").write_bytes(b"")
    with pytest.raises(DatalensError, match=r"x\.npz is a file, leave it out"):
        formats.open_records(str(shards / "x.npz"), nominal_size=5, folder=shards)


def test_some_records_for_the_ceiling(shards: Path) -> None:
    some = formats.load_some("celeba-gender", most=3, folder=shards)
    assert some.images.shape == (3, 64, 64, 3)
    assert set(reds(some)) < {1, 2, 3, 5, 6}
    assert len(formats.load_some("celeba-gender", most=30, folder=shards).images) == 5


def test_a_note_is_public_and_optional() -> None:
    scenes, mnist = sources.schema("scenes"), sources.schema("mnist")
    assert scenes.as_dict()["note"] == "a stand-in for Places365"
    assert "note" not in mnist.as_dict()
    for public in (scenes, mnist):
        assert Schema.from_dict(public.as_dict()) == public


# Scenes


def test_scenes_take_three_of_six_classes(tmp_path: Path) -> None:
    kinds = ["buildings", "sea", "forest", "glacier", "mountain", "street", "sea"]
    images_ = [{"bytes": jpeg(n), "path": f"{kind}/{n}.jpg"} for n, kind in enumerate(kinds)]
    pq.write_table(pa.table({"image": images_, "label": list(range(7)), "class": kinds}), tmp_path / "train.parquet")
    train = whole("scenes", tmp_path)
    assert reds(train) == [1, 2, 4, 6]
    assert [train.schema.classes[label] for label in train.labels] == ["sea", "forest", "mountain", "sea"]
    assert stream_facts(opened("scenes", tmp_path)) == (
        [1, 2, 4, 6],
        [b"id:sea/1.jpg", b"id:forest/2.jpg", b"id:mountain/4.jpg", b"id:sea/6.jpg"],
    )


# Places365

WATER, MOUNTAINS, FOREST = sources.PLACES_GROUPS
LEVEL1 = ("indoor", "outdoor, natural", "outdoor, man-made")
LEVEL2 = ("shopping and dining", WATER, MOUNTAINS, FOREST, "man-made elements")
CATEGORIES = {
    "/a/alley": ("man-made elements",),
    "/b/bayou": (WATER,),
    "/d/desert/sand": (MOUNTAINS,),
    "/f/field/wild": (FOREST,),
    "/g/glacier": (WATER, MOUNTAINS),  # in two groups: taken by neither
    "/l/lagoon": (WATER,),
}


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Five images a category; the validation set has one of each."""
    folder = tmp_path / "places"
    rows = [",Level 1,,,Level 2,,,,", "category," + ",".join(f'"{n}"' for n in (*LEVEL1, *LEVEL2))]
    listing, validation = [], []
    (folder / "val_256").mkdir(parents=True)
    for number, (category, groups) in enumerate(CATEGORIES.items()):
        (folder / f"data_256{category}").mkdir(parents=True)
        for image in range(1, 6):
            (folder / f"data_256{category}" / f"{image:08d}.jpg").write_bytes(jpeg(number, (256, 256)))
        (folder / "val_256" / f"Places365_val_{number:08d}.jpg").write_bytes(jpeg(number, (256, 256)))
        validation.append(f"Places365_val_{number:08d}.jpg {number}")
        listing.append(f"{category} {number}")
        rows.append(f"'{category}',0,1,0," + ",".join("1" if group in groups else "0" for group in LEVEL2))
    (folder / "categories_places365.txt").write_text("\n".join(listing))
    (folder / "places365_val.txt").write_text("\n".join(validation))
    (folder / layouts.PLACES_HIERARCHY).write_text("\n".join(rows))
    return folder


def test_places(places: Path) -> None:
    train, test = whole("places365", places), whole("places365", places, "test")
    assert train.schema.classes == (WATER, MOUNTAINS, FOREST)
    assert train.images.shape == (20, 64, 64, 3)
    assert reds(train) == [1] * 5 + [2] * 5 + [3] * 5 + [5] * 5
    assert train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [0] * 5
    assert (reds(test), test.labels.tolist()) == ([1, 2, 3, 5], [0, 1, 2, 0])
    assert stream_facts(opened("places365", places))[1][0] == b"id:b/bayou/00000001.jpg"
    assert stream_facts(opened("places365", places, "test"))[0] == [1, 2, 3, 5]


def test_places_takes_the_first_of_each_category_by_number(places: Path) -> None:
    """A record is in by its own name: removing another one lets nobody in, which would cost a second teacher."""
    schema = sources.schema("places365")

    def names(images_each: int) -> set[bytes]:
        records = layouts.places(places, schema, "train", groups=schema.classes, images_each=images_each)
        return set(stream_facts(records)[1])

    few = names(4)
    assert len(few) == 2 * 2 + 4 + 4  # two categories of water share
    (places / "data_256/b/bayou/00000001.jpg").unlink()
    assert names(4) == few - {b"id:b/bayou/00000001.jpg"}


def test_the_lists_may_lie_as_they_are_unpacked(places: Path) -> None:
    (places / "filelist_places365-standard").mkdir()
    for file in ("categories_places365.txt", "places365_val.txt"):
        (places / file).rename(places / "filelist_places365-standard" / file)
    (places / "data_256").rename(places / "data_256_standard")
    assert len(whole("places365", places, "test").images) == 4
    assert len(whole("places365", places).images) == 20


@pytest.mark.parametrize(
    ("harm", "split", "says"),
    [
        (remove(layouts.PLACES_HIERARCHY), "train", r"hierarchy - Places365.csv does not exist"),
        (lambda f: (f / layouts.PLACES_HIERARCHY).write_text("a,b\n"), "train", r"no columns water, ice, snow"),
        (
            replace(layouts.PLACES_HIERARCHY, "'/f/field/wild'", "'x'"),
            "train",
            r"no category into forest, field, jungle",
        ),
        (lambda f: (f / "data_256/f").rename(f / "data_256/x"), "train", r"data_256/f/field/wild: No such file"),
        (lambda f: (f / "data_256/b/bayou/me.jpg").write_bytes(b""), "train", r"me.jpg is not named by a number"),
        (cut_short("data_256/b/bayou/00000002.jpg"), "train", r"bayou/00000002.jpg is not a readable image"),
        (remove("categories_places365.txt"), "test", r"categories_places365.txt does not exist"),
        (remove("places365_val.txt"), "test", r"places365_val.txt does not exist"),
        (replace("places365_val.txt", " 5", " 55"), "test", r"category 55 is not in categories_places365.txt"),
        (replace("places365_val.txt", " 5", ""), "test", r"a name and a number"),
        (remove("val_256/Places365_val_00000002.jpg"), "test", r"val_256 lacks Places365_val_00000002.jpg"),
        (lambda f: None, "valid", r"places365 has the splits train and test"),
    ],
)
def test_broken_places(places: Path, harm: Callable[[Path], object], split: str, says: str) -> None:
    harm(places)
    with pytest.raises(DatalensError, match=says) as error:
        whole("places365", places, split)
    assert "\n" not in str(error.value)
