"""A file of synthetic images is bound to its release by how it was drawn: `verify --samples` draws it again."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from datalens.released.loading import extras, load
from datalens.released.saving import save
from datalens.released.synthetic import SyntheticDataset
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
    "another count": (lambda d: {"drawn": {**d.drawn, "count": 29}}, "no way that can be repeated"),
    "a field more": (lambda d: {"drawn": {**d.drawn, "note": "AAAA"}}, "no way that can be repeated"),
    "no such class": (lambda d: {"drawn": {**d.drawn, "classes": [99]}}, "no way that can be repeated"),
    "no class": (lambda d: {"drawn": {**d.drawn, "classes": []}}, "no way that can be repeated"),
    "nothing said": (lambda d: {"drawn": None}, "does not say how it was drawn"),
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


def test_files_of_the_first_version_are_still_read(releases: dict[str, Path], tmp_path: Path) -> None:
    """They do not say how they were drawn."""
    for file in FORMATS:
        out = Path(f"{tmp_path}/{file}")
        drawn(releases["moments"], f"{tmp_path}/{file}")
        dataset = load(out)
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        save(dataclasses.replace(dataset, drawn=None), f"{tmp_path}/{file}")
        assert load(out).drawn is None
        assert json.dumps(load(out).certificate) == json.dumps(dataset.certificate)
