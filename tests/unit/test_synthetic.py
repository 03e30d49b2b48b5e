"""The three file formats, what they refuse, and the sample grid."""

import csv
import errno
import io
import json
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datalens.errors import DatalensError
from datalens.released import loading, synthetic
from datalens.released.loading import load
from datalens.released.synthetic import SyntheticDataset, check_target, grid, save

FORMATS = ["out.npz", "out.parquet", "out"]


def make(*, n: int = 12, shape: tuple[int, int, int] = (9, 7, 1), **changes: Any) -> SyntheticDataset:
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {
        "images": rng.integers(0, 256, (n, *shape), dtype=np.uint8),
        "labels": rng.integers(0, 3, n),
        "classes": ("zero", "one", "two", "never used"),
        "certificate": {"epsilon": 1.5, "delta": 1e-5, "notes": ["ε", None, True], "nested": {"a": 1}},
    }
    return SyntheticDataset(**(fields | changes))


def same(a: SyntheticDataset, b: SyntheticDataset) -> bool:
    return (
        np.array_equal(a.images, b.images)
        and np.array_equal(a.labels, b.labels)
        and (a.images.dtype, a.labels.dtype) == (b.images.dtype, b.labels.dtype)
        and a.classes == b.classes
        and a.certificate == b.certificate
    )


def refusal(path: Path) -> str:
    with pytest.raises(DatalensError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_round_trip(tmp_path: Path, name: str, channels: int) -> None:
    dataset = make(shape=(9, 7, channels))
    save(dataset, tmp_path / "new folder" / name)
    assert same(load(tmp_path / "new folder" / name), dataset)
    assert os.listdir(tmp_path / "new folder") == [name]


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_of_many_images_with_a_bar_and_several_row_groups(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_BAR_FROM", 10)
    for module in (synthetic, loading):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    dataset = make(n=30)
    save(dataset, tmp_path / name)
    assert same(load(tmp_path / name), dataset)


def test_npz_can_be_read_with_numpy_alone(tmp_path: Path) -> None:
    grey, colour = make(), make(shape=(9, 7, 3))
    save(grey, tmp_path / "grey.npz")
    save(colour, tmp_path / "colour.npz")
    with np.load(tmp_path / "grey.npz", allow_pickle=False) as arrays:
        assert arrays["images"].shape == (12, 9, 7, 1)
        assert arrays["labels"].dtype == np.int64
        assert arrays["classes"].tolist() == list(grey.classes)
        assert arrays["certificate"].shape == ()
        assert json.loads(arrays["certificate"].item()) == grey.certificate
    with np.load(tmp_path / "colour.npz", allow_pickle=False) as arrays:
        assert arrays["images"].shape == (12, 9, 7, 3)


def test_parquet_follows_the_hugging_face_convention(tmp_path: Path) -> None:
    dataset = make()
    save(dataset, tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("image").type == pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    assert table.schema.field("label").type == pa.int64()
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(dataset.classes)}}
    first = table.column("image")[0].as_py()
    assert first["path"] == "000001.png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(first["bytes"]))), dataset.images[0, ..., 0])


def test_folder_layout(tmp_path: Path) -> None:
    dataset = make()
    save(dataset, f"{tmp_path}/run-0.5/")  # a trailing slash makes a folder in spite of the dot
    folder = tmp_path / "run-0.5"
    with (folder / "metadata.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["file_name", "label", "class"]
    for index, row in enumerate(rows):
        name = dataset.classes[dataset.labels[index]]
        assert row == {
            "file_name": f"{name}/{index + 1:06d}.png",
            "label": str(dataset.labels[index]),
            "class": name,
        }
        assert (folder / row["file_name"]).is_file()
    assert json.loads((folder / "certificate.json").read_text()) == dataset.certificate
    assert same(load(folder), dataset)


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatalensError, match=r"\.npz, \.parquet, or a folder"):
        save(make(), tmp_path / "out.pkl")
    (tmp_path / "in.pkl").touch()
    assert ".npz, .parquet, or a folder" in refusal(tmp_path / "in.pkl")
    assert os.listdir(tmp_path) == ["in.pkl"]


# --- overwriting and atomicity ---------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_overwrites_only_when_forced(tmp_path: Path, name: str) -> None:
    old, new = make(), make(n=5)
    save(old, tmp_path / name)
    with pytest.raises(DatalensError, match="--force"):
        save(new, tmp_path / name)
    with pytest.raises(DatalensError, match="--force"):
        check_target(tmp_path / name, force=False)
    assert same(load(tmp_path / name), old)
    save(new, tmp_path / name, force=True)
    assert same(load(tmp_path / name), new)
    assert os.listdir(tmp_path) == [name]


def test_force_deletes_no_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(DatalensError, match="does not delete"):
        save(make(), tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_force_does_not_turn_files_into_folders_or_back(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    (tmp_path / "out.npz").mkdir()
    for name in ("out", "out.npz"):
        with pytest.raises(DatalensError, match="choose another name"):
            save(make(), tmp_path / name, force=True)


def test_writes_through_a_link(tmp_path: Path) -> None:
    save(make(), tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    save(make(n=5), tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert same(load(tmp_path / "real"), make(n=5))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, name: str, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make()
    if force:
        save(old, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    written = []

    def full(*args: Any) -> bytes:
        written.append(sorted(tmp_path.rglob("*")))
        if len(written) >= 4 or name == "out.npz":
            raise OSError(errno.ENOSPC, "No space left on device")
        return b"png"

    # npz fails when it is complete but for the fsync, the others after three images
    monkeypatch.setattr(*((os, "fsync") if name == "out.npz" else (synthetic, "_png")), full)
    with pytest.raises(DatalensError, match="No space left on device") as caught:
        save(make(n=5), tmp_path / name, force=force)
    assert "\n" not in str(caught.value)
    assert written[-1] != before  # something had been written by then
    assert sorted(tmp_path.rglob("*")) == before
    if force:
        assert same(load(tmp_path / name), old)


def test_a_failed_swap_of_folders_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make(), tmp_path / "out")
    rename, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(DatalensError, match="Input/output error"):
        save(make(n=5), tmp_path / "out", force=True)
    assert os.listdir(tmp_path) == ["out"]
    assert same(load(tmp_path / "out"), make())


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatalensError, match="cannot write"):
        save(make(), tmp_path / "file" / "out.npz")


# --- hostile names ---------------------------------------------------------------------------


def test_class_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    classes = ("../../evil", "/etc/passwd", "..", "", "a\nb", "metadata.csv", "A", "a", "x" * 400)
    dataset = make(classes=classes, labels=np.arange(12) % len(classes))
    save(dataset, tmp_path / "deep" / "out")
    assert os.listdir(tmp_path) == ["deep"]
    assert os.listdir(tmp_path / "deep") == ["out"]
    assert {p.parent.parent for p in tmp_path.rglob("*.png")} == {tmp_path / "deep" / "out"}
    assert same(load(tmp_path / "deep" / "out"), dataset)


@given(st.lists(st.text(max_size=6), unique=True))
def test_folder_names_are_plain_and_distinct(classes: list[str]) -> None:
    names = synthetic.folder_names(tuple(classes))
    assert len({name.casefold() for name in names}) == len(classes)
    for name in names:
        assert Path(name).name == name
        assert name not in ("", ".", "..")


@pytest.mark.parametrize("name", FORMATS)
def test_odd_class_names_survive(tmp_path: Path, name: str) -> None:
    dataset = make(classes=('say "hi", ok', "line\u2028separator", "猫\r\n", " spaces "))
    save(dataset, tmp_path / name)
    assert same(load(tmp_path / name), dataset)


# --- malformed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((12, 9, 7), np.uint8)},
        {"images": np.zeros((12, 9, 7, 1), np.float32)},
        {"images": np.zeros((0, 9, 7, 1), np.uint8), "labels": np.zeros(0, np.int64)},
        {"images": np.broadcast_to(np.uint8(0), (12, 2**14, 2**14, 1))},
        {"labels": np.zeros(11, np.int64)},
        {"labels": np.zeros(12, np.int32)},
        {"labels": np.full(12, 4)},
        {"labels": np.full(12, -1)},
        {"classes": ()},
        {"classes": ("a", "b", "c", "a")},
        {"classes": ("a", "b", "c\0")},
        {"classes": ("a", "b", "\ud800")},
        {"classes": (1, 2, 3)},
        {"certificate": ["not", "an", "object"]},
    ],
)
def test_a_dataset_is_checked_when_made(changes: dict[str, Any]) -> None:
    with pytest.raises(DatalensError):
        make(**changes)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DatalensError, match="JSON"):
        save(make(certificate={"epsilon": float("inf")}), tmp_path / "out.npz")
    with pytest.raises(DatalensError, match="JSON"):
        save(make(certificate={"epsilon": object()}), tmp_path / "out.npz")
    with pytest.raises(DatalensError, match="1 to 4 channels"):
        save(make(shape=(4, 4, 5)), tmp_path / "out.parquet")
    assert os.listdir(tmp_path) == []


GOOD: dict[str, Any] = {
    "images": np.zeros((3, 8, 8), np.uint8),
    "labels": np.array([0, 1, 0]),
    "classes": np.array(["a", "b"]),
    "certificate": np.array("{}"),
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"images": None}, "'images' is missing"),
        ({"labels": None}, "'labels' is missing"),
        ({"classes": None}, "'classes' is missing"),
        ({"certificate": None}, "'certificate' is missing"),
        ({"images": np.zeros((3, 8, 8))}, "float64"),
        ({"images": np.zeros((3, 64), np.uint8)}, "images must be"),
        ({"labels": np.array([0.0, 1.0, 0.0])}, "float64"),
        ({"labels": np.array([0, 1])}, "labels must be int64 [3]"),
        ({"labels": np.array([0, 1, 2])}, "2 classes"),
        ({"classes": np.array([b"a", b"b"])}, "text"),
        ({"classes": np.array([{"a": 1}], dtype=object)}, "text"),
        ({"certificate": np.array(["{}"])}, "text"),
        ({"certificate": np.array("x" * (2**24 + 1))}, "too large"),
        ({"certificate": np.array("[]")}, "JSON object"),
        ({"certificate": np.array("{")}, "Expecting"),
        ({"certificate": np.array('{"a":' * 100_000)}, "recursion"),
    ],
)
def test_malformed_npz(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, allow_pickle=True, **{k: v for k, v in (GOOD | changes).items() if v is not None})
    assert expected in refusal(path)


def test_well_formed_npz_from_elsewhere(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **GOOD)
    assert load(tmp_path / "good.npz").images.shape == (3, 8, 8, 1)


@pytest.mark.parametrize("shape", [(3, 2**20, 2**20), (2**62, 8, 8), (3, 2**16, 0)])
def test_npz_bomb_is_refused_by_its_header(tmp_path: Path, shape: tuple[int, ...]) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    np.savez(tmp_path / "bomb.npz", **{k: v for k, v in GOOD.items() if k not in ("images", "labels")})
    labels = io.BytesIO()
    np.lib.format.write_array_header_1_0(labels, {"descr": "<i8", "fortran_order": False, "shape": shape[:1]})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "a") as archive:
        archive.writestr("images.npy", head.getvalue())
        archive.writestr("labels.npy", labels.getvalue())
    assert "limit" in (message := refusal(tmp_path / "bomb.npz")) or "not empty" in message


@pytest.mark.parametrize("name", ["bad.npz", "bad.parquet"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PAR1PAR1", b"hello " * 100])
def test_files_of_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["out.npz", "out.parquet"])
def test_damaged_files_never_crash(tmp_path: Path, name: str) -> None:
    save(make(), tmp_path / name)
    good = (tmp_path / name).read_bytes()
    rng = np.random.default_rng(1)
    for trial in range(150):
        bad = bytearray(good)
        if trial % 3 == 0:
            bad = bad[: rng.integers(len(bad))]
        else:
            for place in rng.integers(len(bad), size=1 + trial % 4):
                bad[place] = rng.integers(256)
        (tmp_path / name).write_bytes(bad)
        with suppress(DatalensError):  # nothing else may come out; damage to a pixel or a name may go unseen
            load(tmp_path / name)


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere.npz")
    (tmp_path / "file").touch()
    assert "without a suffix" in refusal(tmp_path / "file")


def png(mode: str = "L", size: tuple[int, int] = (8, 8)) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, format="PNG")
    return stream.getvalue()


def parquet(path: Path, images: list[bytes | None], labels: list[Any], *, metadata: bool = True) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [pa.array([{"bytes": i, "path": None} for i in images], kind), pa.array(labels)]
    table = pa.table(columns, names=["image", "label"])
    about = {"datalens.classes": '["a", "b"]', "datalens.certificate": "{}"}
    pq.write_table(table.replace_schema_metadata(about if metadata else None), path)


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        ([png(), b"not a png"], [0, 1], "cannot identify"),
        ([png(), png()[:40]], [0, 1], ""),
        ([png(), None], [0, 1], "images are missing"),
        ([png(), png()], [0, None], "labels are missing"),
        ([png(), png()], [0.0, 1.0], "column 'label'"),
        ([png(), png()], [0, 2], "2 classes"),
        ([png(), png(size=(8, 9))], [0, 1], "image 2 is 9x8x1, the first is 8x8x1"),
        ([png(), png("RGB")], [0, 1], "image 2 is 8x8x3"),
        ([png("I;16")], [0], "not 8-bit"),
        ([png("P")], [0], "not 8-bit"),
        ([png("L", (8000, 8000))] * 40, [0] * 40, "limit"),
    ],
)
def test_malformed_parquet(tmp_path: Path, images: list[bytes | None], labels: list[Any], expected: str) -> None:
    parquet(tmp_path / "bad.parquet", images, labels)
    assert expected in refusal(tmp_path / "bad.parquet")


def test_parquet_that_is_no_synthetic_dataset(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"], "label": [1]}), tmp_path / "bad.parquet")
    assert "column 'image'" in refusal(tmp_path / "bad.parquet")
    parquet(tmp_path / "bare.parquet", [png()], [0], metadata=False)
    assert "metadata" in refusal(tmp_path / "bare.parquet")
    parquet(tmp_path / "empty.parquet", [], pa.array([], pa.int64()))
    assert "0 images" in refusal(tmp_path / "empty.parquet")


@pytest.mark.parametrize("name", ["metadata.csv", "certificate.json", "classes.json", "zero/000003.png"])
def test_folder_with_a_file_missing(tmp_path: Path, name: str) -> None:
    save(make(labels=np.zeros(12, np.int64)), tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    assert "missing" in refusal(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("metadata.csv", "", "columns"),
        ("metadata.csv", "file,label\n", "columns"),
        ("metadata.csv", "file_name,label,class\n", "0 images"),
        ("metadata.csv", "file_name,label,class\nzero/000001.png,0\n", "row 2"),
        ("metadata.csv", "file_name,label,class\nzero/000001.png,9,zero\n", "row 2"),
        ("metadata.csv", "file_name,label,class\nzero/000001.png,-1,zero\n", "row 2"),
        ("metadata.csv", "file_name,label,class\nzero/000001.png,1,zero\n", "row 2"),
        ("metadata.csv", "file_name,label,class\n../secret.png,0,zero\n", "outside"),
        ("metadata.csv", "file_name,label,class\n/etc/hostname,0,zero\n", "outside"),
        ("metadata.csv", "file_name,label,class\nzero,0,zero\n", "missing"),
        ("metadata.csv", 'file_name,label,class\n"zero,0,zero\n', "unexpected end"),
        ("classes.json", "{}", "list"),
        ("classes.json", "[1, 2, 3, 4]", "row 2"),
        ("certificate.json", "7", "JSON object"),
        ("zero/000001.png", "text", "cannot identify"),
    ],
)
def test_malformed_folder(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    save(make(labels=np.zeros(12, np.int64)), tmp_path / "out")
    (tmp_path / "out" / name).write_text(content)
    assert expected in refusal(tmp_path / "out")


def test_folder_with_a_link_to_the_outside(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    save(make(labels=np.zeros(12, np.int64)), tmp_path / "out")
    (tmp_path / "out/zero/000001.png").unlink()
    (tmp_path / "out/zero/000001.png").symlink_to(tmp_path / "secret.png")
    assert "outside" in refusal(tmp_path / "out")


# --- grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "classes", "per_class", "size", "mode"),
    [
        ((28, 28, 1), 10, 8, (8 * 58 + 2, 10 * 58 + 2), "L"),  # 28 * 2 + a gap of 2
        ((8, 8, 3), 3, 5, (5 * 66 + 2, 3 * 66 + 2), "RGB"),
        ((100, 80, 1), 2, 4, (4 * 82 + 2, 2 * 102 + 2), "L"),
        ((28, 28, 1), 25, 50, (10 * 58 + 2, 10 * 58 + 2), "L"),
    ],
)
def test_grid_dimensions(
    shape: tuple[int, int, int], classes: int, per_class: int, size: tuple[int, int], mode: str
) -> None:
    labels = np.tile(np.arange(classes), 12)
    picture = grid(np.zeros((len(labels), *shape), np.uint8), labels, per_class=per_class)
    assert picture.size == size
    assert picture.mode == mode


def test_grid_has_a_row_for_each_class() -> None:
    labels = np.array([7, 2, 7, 2, 7])  # class 2 has one image fewer: its last cell stays white
    images = np.zeros((5, 32, 32, 1), np.uint8) + labels[:, None, None, None].astype(np.uint8)
    pixels = np.asarray(grid(images, labels))
    assert pixels.shape == (2 * 66 + 2, 3 * 66 + 2)
    middles = pixels[[34, 100]][:, [34, 100, 166]]
    assert middles.tolist() == [[2, 2, 255], [7, 7, 7]]
