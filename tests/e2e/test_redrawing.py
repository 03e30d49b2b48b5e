"""A file of synthetic images is bound to its release by how it was drawn: `verify --samples` draws it again."""

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from datalens.released.extras import extras
from datalens.released.loading import load
from datalens.released.synthetic import SyntheticDataset, save
from tests.e2e.conftest import call
from tests.e2e.test_forgeries import METHODS

FORMATS = ["s.npz", "s.parquet", "s/"]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("redrawn")
    for name in ("moments", "topagg"):
        call(*METHODS[name], "--out", folder / name).succeeded()
    return {name: folder / name / "release" for name in ("moments", "topagg")}


def drawn(release: Path, out: str, *options: object) -> None:
    call("sample", release, "--count", 30, "--out", out, *options).succeeded()


@pytest.mark.parametrize("name", ["moments", "topagg"])
@pytest.mark.parametrize("file", FORMATS)
def test_what_was_drawn_is_drawn_again(releases: dict[str, Path], tmp_path: Path, name: str, file: str) -> None:
    out = f"{tmp_path}/{file}"
    drawn(releases[name], out, "--seed", 7, "--balanced", "--class", 3, 5)
    assert load(out).drawn == {"seed": 7, "count": 30, "balanced": True, "classes": [3, 5], "device": "cpu"}
    said = call("verify", releases[name], "--samples", out).succeeded().out
    assert "is what its generator draws" in said


def forged(out: Path, change: Callable[[SyntheticDataset], dict[str, Any]]) -> None:
    dataset = load(out)
    save(dataclasses.replace(dataset, **change(dataset)), out, force=True)


def real_image_in_place_of_one(dataset: SyntheticDataset) -> dict[str, Any]:
    images = dataset.images.copy()
    images[11] = np.random.default_rng(0).integers(0, 256, images[11].shape)
    return {"images": images}


FORGERIES: dict[str, tuple[Callable[[SyntheticDataset], dict[str, Any]], str]] = {
    "one other image": (real_image_in_place_of_one, "not what the generator draws"),
    "other labels": (lambda d: {"labels": d.labels[::-1].copy()}, "not what the generator draws"),
    "another seed": (lambda d: {"drawn": {**d.drawn, "seed": 8}}, "not what the generator draws"),
    "another count": (lambda d: {"drawn": {**d.drawn, "count": 29}}, "cannot be repeated"),
    "a field more": (lambda d: {"drawn": {**d.drawn, "note": "AAAA"}}, "cannot be repeated"),
    "no such class": (lambda d: {"drawn": {**d.drawn, "classes": [99]}}, "cannot be repeated"),
    "no class": (lambda d: {"drawn": {**d.drawn, "classes": []}}, "cannot be repeated"),
    "nothing said": (lambda d: {"drawn": None}, "does not state how it was drawn"),
    "another certificate": (lambda d: {"certificate": {**d.certificate, "private": False}}, "another certificate"),
    "other classes": (lambda d: {"classes": tuple(f"c{i}" for i in range(10))}, "not what the generator draws"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_file_that_was_changed_is_refused(releases: dict[str, Path], tmp_path: Path, name: str) -> None:
    change, said = FORGERIES[name]
    out = tmp_path / "s.npz"
    drawn(releases["moments"], str(out))
    forged(out, change)
    refused = call("verify", releases["moments"], "--samples", out)
    assert refused.code == 1 and said in refused.out
    assert call("verify", releases["moments"]).code == 0  # the release itself stands


def test_images_of_another_release_are_refused(releases: dict[str, Path], tmp_path: Path) -> None:
    drawn(releases["topagg"], str(tmp_path / "s.npz"))
    refused = call("verify", releases["moments"], "--samples", tmp_path / "s.npz")
    assert refused.code == 1 and "another certificate" in refused.out


def test_what_is_no_synthetic_set_is_refused_in_one_line(releases: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"no zip")
    assert "not a synthetic data set" in call("verify", releases["moments"], "--samples", tmp_path / "s.npz").refused()


@pytest.mark.parametrize("file", FORMATS)
def test_anything_else_in_a_file_is_named(releases: dict[str, Path], tmp_path: Path, file: str) -> None:
    out = Path(f"{tmp_path}/{file}")
    drawn(releases["moments"], f"{tmp_path}/{file}")
    assert extras(out) == []
    if file == "s.npz":
        arrays = dict(np.load(out))
        np.savez(out, **arrays, records=np.zeros(3))
    elif file == "s.parquet":
        table = pq.read_table(out)
        pq.write_table(table.append_column("records", [[0] * len(table)]), out)
    else:
        (out / "records.bin").write_bytes(b"AAAA")
    refused = call("verify", releases["moments"], "--samples", out)
    assert refused.code == 1 and "something besides synthetic images: records" in refused.out


def test_text_hidden_in_an_image_is_found(releases: dict[str, Path], tmp_path: Path) -> None:
    drawn(releases["moments"], f"{tmp_path}/s/")
    image = next((tmp_path / "s").rglob("*.png"))
    text = PngImagePlugin.PngInfo()
    text.add_text("records", "AAAA")
    with Image.open(image) as picture:
        picture.load()
        picture.save(image, pnginfo=text)
    refused = call("verify", releases["moments"], "--samples", tmp_path / "s")
    assert refused.code == 1 and "more than pixels" in refused.out


def twice_named(out: Path) -> None:
    with zipfile.ZipFile(out) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", b"records")
        for name in contents.keys() - {"images.npy"}:
            archive.writestr(name, contents[name])
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("images.npy", contents["images.npy"])


def repacked(out: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(out) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, change(name, content))


def in_a_gap(out: Path) -> None:
    """Before the list of members, whose place is set right at the end of the file."""
    content = out.read_bytes()
    at = int.from_bytes(content[-6:-2], "little")
    out.write_bytes(content[:at] + b"records" + content[at:-6] + (at + 7).to_bytes(4, "little") + content[-2:])


def text_twice(out: Path) -> None:
    arrays = dict(np.load(out))
    said = arrays["certificate"].item()
    np.savez_compressed(out, **arrays | {"certificate": np.array('{"private": "records",' + said[1:])})


HIDDEN_IN_NPZ: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda out: repacked(out, lambda _, content: content), ""),
    "two of one name": (twice_named, "images.npy"),
    "behind an array": (lambda out: repacked(out, lambda _, content: content + b"records"), "between or behind"),
    "behind the last array": (in_a_gap, "between or behind"),
    "a field twice": (text_twice, "more text in certificate"),
}


@pytest.mark.parametrize("name", HIDDEN_IN_NPZ)
def test_what_is_hidden_in_an_npz_is_found(releases: dict[str, Path], tmp_path: Path, name: str) -> None:
    hide, said = HIDDEN_IN_NPZ[name]
    drawn(releases["moments"], str(tmp_path / "s.npz"))
    hide(tmp_path / "s.npz")
    found = call("verify", releases["moments"], "--samples", tmp_path / "s.npz")
    assert (found.code == 1 and said in found.out) if said else found.code == 0


@pytest.mark.parametrize("where", ["an image of another name", "metadata", "a folder", "a certificate"])
def test_what_is_hidden_in_a_folder_is_found(releases: dict[str, Path], tmp_path: Path, where: str) -> None:
    drawn(releases["moments"], f"{tmp_path}/s/")
    folder = tmp_path / "s"
    metadata = (folder / "metadata.csv").read_text()
    image = metadata.splitlines()[1].split(",")[0]
    if where == "an image of another name":
        other = image.replace(".png", ".PNG")
        (folder / other).write_bytes((folder / image).read_bytes() + b"records")
        (folder / image).unlink()
        (folder / "metadata.csv").write_text(metadata.replace(image, other))
    elif where == "metadata":
        (folder / "metadata.csv").write_text(metadata.replace(image, f'"{image}"'))
    elif where == "a folder":
        (folder / "records").mkdir()
    else:
        text = (folder / "certificate.json").read_text()
        (folder / "certificate.json").write_text('{"private": "records",' + text[1:])
    refused = call("verify", releases["moments"], "--samples", folder)
    assert refused.code == 1 and "something besides synthetic images" in refused.out
    assert where != "an image of another name" or "more than pixels" in refused.out


@pytest.mark.parametrize("where", ["names", "features", "a certificate"])
def test_what_is_hidden_in_a_parquet_is_found(releases: dict[str, Path], tmp_path: Path, where: str) -> None:
    out = tmp_path / "s.parquet"
    drawn(releases["moments"], str(out))
    table = pq.read_table(out)
    metadata = dict(table.schema.metadata)
    if where == "names":
        rows = [row | {"path": "records"} for row in table.column("image").to_pylist()]
        table = table.set_column(0, table.schema.field("image"), pa.array(rows, table.schema.field("image").type))
    key = b"huggingface" if where == "features" else b"datalens.certificate"
    if where != "names":
        metadata[key] = b'{"private": "records",' + metadata[key][1:]
    pq.write_table(table.replace_schema_metadata(metadata), out)
    refused = call("verify", releases["moments"], "--samples", out)
    assert refused.code == 1 and "something besides synthetic images: more text in" in refused.out


def test_files_of_the_first_version_are_still_read(releases: dict[str, Path], tmp_path: Path) -> None:
    """They do not say how they were drawn."""
    for file in FORMATS:
        out = Path(f"{tmp_path}/{file}")
        drawn(releases["moments"], f"{tmp_path}/{file}")
        dataset = load(out)
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        save(dataclasses.replace(dataset, drawn=None), f"{tmp_path}/{file}", force=True)  # its papers are still there
        assert load(out).drawn is None
        assert json.dumps(load(out).certificate) == json.dumps(dataset.certificate)
