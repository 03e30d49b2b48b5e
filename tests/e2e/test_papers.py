"""The papers that travel with synthetic images: tools read them, and they say what the certificate says."""

import copy
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image, PngImagePlugin

from datalens.errors import TamperedError
from datalens.released import papers
from datalens.released.certificate import own_hash
from datalens.released.loading import load
from datalens.released.release import sample
from datalens.released.synthetic import SyntheticDataset, file_name, more_than_pixels, save
from tests.e2e.conftest import call
from tests.e2e.test_forgeries import METHODS

COUNT = 24
PLACES = {"s": "s/{}", "s.parquet": "s.{}"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release, and images of it in both forms. Look, do not touch."""
    folder = tmp_path_factory.mktemp("papers")
    call(*METHODS["moments"], "--out", folder / "run").succeeded()
    for name in PLACES:
        call("sample", folder / "run", "--count", COUNT, "--out", folder / name).succeeded()
    return folder


@pytest.fixture
def touched(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "copy"))


def certificate(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/release/certificate.json").read_text(encoding="utf-8"))


def card(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """YAML and text of a dataset card."""
    _, head, text = (folder / PLACES[name].format("README.md")).read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


# --- other tools read them ------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("offline")
def test_hugging_face_loads_a_folder_by_its_card(drawn: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    expected = load(drawn / "s")
    found = datasets.load_dataset(str(drawn / "s"), cache_dir=str(tmp_path / "cache"))["train"]
    assert found["label"][:] == expected.labels.tolist()
    assert str(found["class"][3]) == expected.classes[expected.labels[3]]
    assert all(np.array_equal(np.asarray(found[i]["image"]), expected.images[i, ..., 0]) for i in range(COUNT))
    asked = {"data_files": str(drawn / "s.parquet"), "split": "train", "cache_dir": str(tmp_path / "cache")}
    table = datasets.load_dataset("parquet", **asked)
    assert table.features["label"].names == list(expected.classes) and table["label"][:] == expected.labels.tolist()


@pytest.mark.parametrize("name", PLACES)
def test_croissant_validates_and_loads(drawn: Path, name: str) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    path = drawn / PLACES[name].format("croissant.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pandas, in mlcroissant
        dataset = mlcroissant.Dataset(str(path))
        records = list(dataset.records("images"))
    assert not dataset.metadata.ctx.issues.errors
    assert dataset.metadata.ctx.conforms_to.value == "http://mlcommons.org/croissant/1.1"
    expected = load(drawn / name)
    assert len(records) == COUNT
    for i, record in enumerate(records):
        number = i if name != "s" else int(Path(record["images/file_name"].decode()).stem) - 1
        assert record["images/label"] == expected.labels[number]
        assert np.array_equal(np.asarray(record["images/image"].convert("L")), expected.images[number, ..., 0])
    classes = [record["classes/name"] for record in dataset.records("classes")]
    assert classes == list(expected.classes)


def test_croissant_that_is_wrong_does_not_validate(touched: Path) -> None:
    """The check above can fail: where a field's source is missing, and where the table is another one."""
    mlcroissant = pytest.importorskip("mlcroissant")
    path = touched / "s/croissant.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"@id": "image-files"', '"@id": "others"', 1), encoding="utf-8")
    with pytest.raises(mlcroissant.ValidationError):
        mlcroissant.Dataset(str(path))
    path.write_text(text, encoding="utf-8")
    with (touched / "s/metadata.csv").open("a", encoding="utf-8") as table:
        table.write("a/1.png,0,0\n")
    with pytest.raises(Exception, match=r"Download\(table\)"):
        list(mlcroissant.Dataset(str(path)).records("images"))


# The registry's schema, as of 2026: which fields there are in each part, and what some of them may be.
FIELDS = {
    "basic": "name data_curators description intended_use data_product_type data_product_region data_product_sector "
    "publication_date",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details trust_assumptions actors release_type release_type_details "
    "data_source_type data_source_type_details access_type access_type_details",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition post_processing justification "
    "utility additional_information",
    "administrative": "evidence_sources status registry_authors tier",
}
VALUES = {
    "data_product_type": ("Summary statistics", "Machine learning model", "Dataset", "Synthetic data"),
    "variant_name": ("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
    "model_name": ("Local", "Central", "Shuffle", "Federated"),
    "release_type": ("One release", "Many releases"),
    "data_source_type": ("Static", "Dynamic"),
    "access_type": ("Interactive", "Non-interactive"),
    "status": ("Draft",),
}
LEFT_OPEN = 7  # only the publisher knows: who (twice), why (twice), where, when, and who filled this in


@pytest.mark.parametrize("name", PLACES)
def test_the_entry_fits_the_registry_and_says_what_the_certificate_says(drawn: Path, name: str) -> None:
    text = (drawn / PLACES[name].format("deployment.yaml")).read_text(encoding="utf-8")
    entry, c = yaml.safe_load(text), certificate(drawn)
    assert set(entry) == {"url_slug", "deployment"} and set(entry["deployment"]) == set(FIELDS)
    for part, fields in entry["deployment"].items():
        assert set(fields) <= set(FIELDS[part].split()), part
        for field, value in fields.items():
            assert value in VALUES.get(field, (value,))
            assert isinstance(value, dict | list | int) or (isinstance(value, str) and value)
    assert text.count(papers.FILL_IN) == LEFT_OPEN
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": c["budget"]["epsilon"], "delta": c["budget"]["delta"]}
    assert all(isinstance(value, float) for value in loss["privacy_parameters"].values())
    assert loss["privacy_unit"] == c["privacy_unit"] and c["statement"] in loss["privacy_parameters_details"]
    done = entry["deployment"]["implementation"]
    assert all(item in done["preprocessing_and_hyperparameter_tuning"] for item in c["not_covered"])
    assert all(item in entry["deployment"]["dp_variant"]["unprotected_quantities"] for item in c["declared_public"])
    assert f"datalens {c['versions']['datalens']}" in done["mechanisms"] and c["accountant"] in done["composition"]


@pytest.mark.parametrize("name", PLACES)
def test_the_card_names_every_figure_of_the_guarantee(drawn: Path, name: str) -> None:
    head, text = card(drawn, name)
    c = certificate(drawn)
    assert c["sha256"]["certificate"] in text
    said = re.findall(r"ε = \S+ \(δ = \S+, [a-z-]+, [a-z-]+ accountant\)", text)
    assert len(said) == text.count("ε = ") == 1
    assert "synthetic" in head["tags"] and head["license"] == "unknown"


# --- every image says that it is synthetic --------------------------------------------------------


def pngs(folder: Path) -> Iterator[bytes]:
    import pyarrow.parquet as pq

    yield from (path.read_bytes() for path in sorted((folder / "s").rglob("*.png")))
    yield from (row["bytes"] for row in pq.read_table(folder / "s.parquet").column("image").to_pylist())


def test_every_image_says_that_it_is_synthetic(drawn: Path, tmp_path: Path) -> None:
    for png in pngs(drawn):
        (tmp_path / "a.png").write_bytes(png)
        with Image.open(tmp_path / "a.png") as picture:
            picture.verify()
            said = picture.info["XML:com.adobe.xmp"]
        assert f'DigitalSourceType="{papers.SOURCE_TYPE}"' in said and said.count("<") == said.count(">")
        assert not more_than_pixels(png)


def test_only_that_text_may_be_in_an_image(drawn: Path) -> None:
    png = next(pngs(drawn))
    end = 33 + 12 + int.from_bytes(png[33:37])
    assert png[37:41] == b"iTXt"
    said = png[33:end]
    assert more_than_pixels(png[:end] + said + png[end:])  # twice
    assert more_than_pixels(png[:33] + png[end:-12] + said + png[-12:])  # elsewhere
    other = PngImagePlugin.PngInfo()
    other.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta>AAAA</x:xmpmeta>")
    import io

    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(stream, "PNG", pnginfo=other)
    assert more_than_pixels(stream.getvalue())


# --- made from what was verified, and nothing else ------------------------------------------------


def refusal(folder: Path, name: str) -> str:
    done = call("verify", folder / "run", "--samples", folder / name)
    assert done.code == 1
    return done.out


@pytest.mark.parametrize("paper", papers.NAMES)
@pytest.mark.parametrize("name", PLACES)
def test_a_paper_that_says_anything_else_is_refused(touched: Path, name: str, paper: str) -> None:
    call("verify", touched / "run", "--samples", touched / name).succeeded()
    place = touched / PLACES[name].format(paper)
    text = place.read_text(encoding="utf-8")
    for other in (text + " ", text.replace("4", "1", 1)):
        place.write_text(other, encoding="utf-8")
        assert f"{place.name} is not what this version of datalens writes" in refusal(touched, name)
    place.unlink()
    call("verify", touched / "run", "--samples", touched / name).succeeded()  # without it, too
    place.symlink_to(touched / "run/metrics.jsonl")
    assert place.name in refusal(touched, name)


def test_no_papers_from_a_certificate_that_does_not_stand(touched: Path, drawn: Path) -> None:
    dataset = sample(drawn / "run/release", count=3, seed=0)
    changed = copy.deepcopy(dataset.certificate)
    changed["budget"]["epsilon"] = 0.1
    with pytest.raises(TamperedError, match="was changed: no papers"):
        save(dataclasses.replace(dataset, certificate=changed), touched / "forged")
    assert not (touched / "forged").exists()
    path = touched / "run/release/certificate.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"epsilon": 4.0', '"epsilon": 0.1', 1), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert "does not stand" in call("sample", touched / "run", "--out", touched / "t").refused()
    assert not (touched / "t").exists()


def test_no_papers_for_images_from_elsewhere(drawn: Path, tmp_path: Path) -> None:
    for name in PLACES:
        save(load(drawn / name), tmp_path / name)  # whose certificate nobody verified
    save(sample(drawn / "run/release", count=3, seed=0), tmp_path / "s.npz")
    assert not [path.name for path in tmp_path.rglob("*") if path.name.endswith(papers.NAMES)]


def test_a_file_is_not_replaced_without_being_asked_and_old_papers_go_with_it(touched: Path) -> None:
    (touched / "s.parquet").unlink()
    said = call("sample", touched / "run", "--count", 5, "--out", touched / "s.parquet").refused()
    assert "README.md exists; pass --force" in said
    save(load(touched / "s"), touched / "s.parquet", force=True)
    assert not list(touched.glob("s.*.*"))


def test_without_a_guarantee_there_is_no_entry_and_the_card_says_so(tmp_path: Path) -> None:
    call(*METHODS["dcgan"], "--out", tmp_path / "run").succeeded()
    call("sample", tmp_path / "run", "--count", 5, "--out", tmp_path / "s").succeeded()
    assert not (tmp_path / "s/deployment.yaml").exists()
    text = card(tmp_path, "s")[1]
    assert "NOT PRIVATE" in text and "without a guarantee" in text and "under differential privacy" not in text
    call("verify", tmp_path / "run", "--samples", tmp_path / "s").succeeded()


# --- odd names ------------------------------------------------------------------------------------

ODD = ("a|b", "`c`\n# d", "\u2028e: f", "no", "1.0", "README.md", '"', "\U0001f600 ε", "\x7f\x85")


def test_odd_names_break_neither_yaml_nor_tables(drawn: Path, tmp_path: Path) -> None:
    dataset = sample(drawn / "run/release", count=len(ODD), seed=0)
    named = copy.deepcopy(dataset.certificate)
    named["public"]["name"] = "a | b\n`c` ε"
    named["sha256"]["certificate"] = own_hash(named)
    odd = SyntheticDataset(
        images=dataset.images,
        labels=np.arange(len(ODD)),
        classes=ODD,
        certificate=named,
        drawn=dataset.drawn,
        verified=True,
    )
    save(odd, tmp_path / "s")
    head, text = card(tmp_path, "s")
    assert head["pretty_name"].endswith("made from a | b\n`c` ε")
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {3}
    assert load(tmp_path / "s").classes == ODD
    assert len(list((tmp_path / "s").rglob(file_name(5)))) == 1
    entry = yaml.safe_load((tmp_path / "s/deployment.yaml").read_text(encoding="utf-8"))
    assert ", ".join(ODD) in entry["deployment"]["dp_variant"]["data_domain"]
    croissant = json.loads((tmp_path / "s/croissant.json").read_text(encoding="utf-8"))
    assert [row["classes/name"] for row in croissant["recordSet"][0]["data"]] == list(ODD)


texts = some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0"))
values = some.recursive(
    texts | some.integers(-(2**60), 2**60) | some.floats(allow_nan=False, allow_infinity=False) | some.booleans(),
    lambda inner: some.lists(inner, min_size=1) | some.dictionaries(texts, inner, min_size=1),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(some.dictionaries(texts, values, min_size=1))
def test_what_is_written_as_yaml_is_read_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load("\n".join(papers._yaml(value))) == value
