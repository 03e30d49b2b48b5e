"""DataLens from Python, as a user of scikit-learn would type it."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from torch.utils.data import DataLoader, Dataset

from datalens import BudgetExceeded, DataLens, DatalensError, TrainOptions, check_release, train
from datalens.data.own.python import as_arrays, named_labels

SMALL: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-3, "options": {"texture": 0, "coordinates": 6}}
PUBLIC: dict[str, Any] = {"nominal_size": 300, "classes": ("cat", "dog")}


def pictures(n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Dark ones and bright ones."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, n)
    dark, bright = random.integers(0, 90, (n, 8, 8)), random.integers(160, 255, (n, 8, 8))
    return np.where(labels[:, None, None] == 0, dark, bright).astype(np.uint8), labels


@pytest.fixture(scope="module")
def model() -> DataLens:
    return DataLens(**SMALL, **PUBLIC).fit(*pictures())


def test_fit_and_sample(model: DataLens) -> None:
    synthetic = model.sample(40)
    assert synthetic.images.shape == (40, 8, 8, 1) and synthetic.images.dtype == np.uint8
    assert synthetic.classes == ("cat", "dog") and list(model.classes_) == ["cat", "dog"]
    brightness = [synthetic.images[synthetic.labels == label].mean() for label in (0, 1)]
    assert brightness[1] - brightness[0] > 60  # it learned something
    assert np.array_equal(synthetic.images, model.sample(40, seed=0).images)
    assert not np.array_equal(synthetic.images, model.sample(40, seed=1).images)
    assert set(model.sample(10, labels=["dog"]).labels) == {1} == set(model.sample(10, labels=[1]).labels)
    assert np.bincount(model.sample(11, balanced=True).labels).tolist() == [6, 5]
    with pytest.raises(DatalensError, match="labels= bird is none of the 2 classes: cat, dog"):
        model.sample(10, labels=["bird"])


def test_the_certificate(model: DataLens) -> None:
    said = model.certificate
    assert (said.epsilon, said.delta, said.relation, said.accountant) == (20.0, 1e-3, "add-remove", "exact")
    assert said.private is True and 0 < said.epsilon_spent <= 20.0
    assert said.public["nominal_size"] == 300 and "note" not in said.public
    assert "present or absent" in repr(said) and said.as_dict()["version"] == said.version
    with pytest.raises(AttributeError, match="no 'price'"):
        said.price  # noqa: B018


def test_save_and_load(model: DataLens, tmp_path: Path) -> None:
    model.save(tmp_path / "release")
    assert not check_release(tmp_path / "release").problems
    again = DataLens.load(tmp_path / "release")
    assert np.array_equal(again.sample(5).images, model.sample(5).images)
    assert again.get_params()["epsilon"] == 20.0 and list(again.classes_) == ["cat", "dog"]
    with pytest.raises(DatalensError, match="exists"):
        model.save(tmp_path / "release")
    model.save(tmp_path / "release", force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DatalensError, match="exists"):
        model.save(tmp_path / "mine", force=True)
    page = tmp_path / "release" / "CERTIFICATE.md"
    page.write_text(page.read_text() + " ")
    with pytest.raises(DatalensError, match="does not stand"):
        DataLens.load(tmp_path / "release")


def test_scikit_learns_habits(model: DataLens) -> None:
    other = clone(model).set_params(epsilon=2.0)
    assert (other.epsilon, model.epsilon) == (2.0, 20.0)
    assert other.get_params()["options"] == {"texture": 0, "coordinates": 6}
    with pytest.raises(DatalensError, match="call fit"):
        other.sample(3)
    with pytest.raises(ValueError, match="Invalid parameter"):
        other.set_params(epsilons=3)


def test_what_is_not_declared_is_read_off_and_said(tmp_path: Path) -> None:
    images, labels = pictures()
    with pytest.warns(UserWarning, match="declared public; under add-remove it is private"):
        model = DataLens(**SMALL).fit(images, labels)
    said = [line for line in model.certificate.declared_public if line.startswith("read off the data")]
    assert len(said) == 1 and "true number of records" in said[0] and "classes that occur" in said[0]
    assert model.certificate.public["nominal_size"] == 300
    model.save(tmp_path / "r")
    assert not check_release(tmp_path / "r").problems
    assert said[0] in (tmp_path / "r" / "CERTIFICATE.md").read_text()
    with warnings.catch_warnings():  # under replace-one the number of records is public
        warnings.simplefilter("error")
        same = DataLens(**SMALL, relation="replace-one", classes=(0, 1)).fit(images, labels)
    assert "note" not in same.certificate.public


def test_labels_that_were_not_declared_are_loud_in_python_in_the_sentence_and_in_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], datalens: Any
) -> None:
    """One record of a rare class is named by the set of labels, whatever epsilon is."""
    images, labels = pictures()
    labels[7] = 41  # the only one of its kind
    with pytest.warns(UserWarning, match="labels that occur are declared public.*classes="):
        model = DataLens(**SMALL, nominal_size=300).fit(images, labels)
    said = model.certificate.statement
    assert "given that what was read off the data is public: the classes that occur" in said
    assert said in repr(model.certificate)
    assert "warning: " in capsys.readouterr().err
    model.save(tmp_path / "r")
    assert said in (tmp_path / "r" / "CERTIFICATE.md").read_text()
    found = check_release(tmp_path / "r")
    assert not found.problems and any("the classes that occur" in line for line in found.warnings)
    shown = datalens("verify", tmp_path / "r").succeeded().out
    assert "warning: read off the data" in shown and "--classes" in shown
    assert any("classes that occur" in line for line in datalens("verify", tmp_path / "r", "--json").json["warnings"])


def test_labels_that_were_declared_qualify_nothing(model: DataLens, tmp_path: Path) -> None:
    assert "given that" not in model.certificate.statement
    model.save(tmp_path / "r")
    assert not any("read off" in line for line in check_release(tmp_path / "r").warnings)
    images, _ = pictures()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        DataLens(**SMALL, nominal_size=300).fit(images)  # no labels: there is nothing to declare


def test_who_takes_the_condition_out_of_the_sentence_is_found_out(tmp_path: Path) -> None:
    """Certificates of version 2 had none, and stand as they were written: tests/fixtures has such releases."""
    from datalens.released.certificate import certificate_bytes, own_hash, page_bytes, read_certificate
    from datalens.released.report import page

    release = tmp_path / "r"
    with pytest.warns(UserWarning, match="classes="):
        DataLens(**SMALL, nominal_size=300).fit(*pictures()).save(release)
    old = read_certificate(release)
    old["statement"] = old["statement"].split(", given that")[0] + "."
    (release / "CERTIFICATE.md").write_bytes(page_bytes(old))
    old["sha256"]["CERTIFICATE.md"] = hashlib.sha256(page_bytes(old)).hexdigest()
    old["sha256"]["certificate"] = own_hash(old)
    (release / "certificate.json").write_bytes(certificate_bytes(old))
    (release / "report.html").write_bytes(page(release))
    found = check_release(release)
    assert any("statement" in problem for problem in found.problems)
    assert any("the classes that occur" in line for line in found.warnings)


def test_persons_as_the_unit(tmp_path: Path) -> None:
    images, labels = pictures()
    persons = [f"patient number {i // 3}" for i in range(300)]
    with pytest.warns(UserWarning, match="true number of persons"):
        model = DataLens(**SMALL, classes=("cat", "dog")).fit(images, labels, groups=persons)
    said = model.certificate
    assert said.privacy_unit.startswith("one person") and said.public["nominal_size"] == 100
    assert said.settings["unit"] == "person"
    model.save(tmp_path / "r")
    assert not check_release(tmp_path / "r").problems
    assert not any(b"patient number" in path.read_bytes() for path in (tmp_path / "r").iterdir())  # no id leaves
    with pytest.raises(DatalensError, match="ids must be 300"):
        DataLens(**SMALL, **PUBLIC).fit(images, labels, groups=persons[:5])


def test_out_is_no_text(tmp_path: Path) -> None:
    """Refused before anything is charged: weights cannot be written there."""
    out = os.fsdecode(os.fsencode(tmp_path) + b"/x\xffy")
    with pytest.raises(DatalensError, match="not UTF-8 text"):
        DataLens(**SMALL, **PUBLIC, out=out).fit(*pictures())
    assert list(tmp_path.iterdir()) == []


def test_nothing_private_is_left_behind(model: DataLens) -> None:
    assert [path.name for path in model.release_.parent.iterdir()] == ["release"]
    assert model.release_.parent.parent.stat().st_mode & 0o077 == 0


def test_a_kept_run_goes_on_with_its_own_data(tmp_path: Path) -> None:
    images, labels = pictures()
    asked = DataLens(**SMALL, **PUBLIC, out=tmp_path / "run").fit(images, labels)
    events = (tmp_path / "run" / "ledger.jsonl").read_text()
    again = clone(asked).fit(images, labels)
    assert (tmp_path / "run" / "ledger.jsonl").read_text() == events  # nothing was charged twice
    assert np.array_equal(again.sample(3).images, asked.sample(3).images)
    with pytest.raises(DatalensError, match="is not the data"):
        clone(asked).fit(images[:200], labels[:200])


def test_a_budget_is_not_ignored_where_the_run_was_begun_without_it(tmp_path: Path, datalens: Any) -> None:
    images, labels = pictures()
    cap = tmp_path / "cap"
    datalens("budget", cap, "--epsilon", 0.5, "--delta", 1e-3).succeeded()
    own = {"options": SMALL["options"], "epsilon": 20.0, "delta": 1e-3, **PUBLIC, "out": tmp_path / "run"}
    DataLens(**own).fit(images, labels)
    with pytest.raises(DatalensError, match="was begun without a budget, so nothing is reserved"):
        DataLens(**own, budget=cap).fit(images, labels)
    assert datalens("budget", cap, "--json").succeeded().json["runs"] == []


def test_another_budget_than_the_one_a_run_is_reserved_in_is_refused(tmp_path: Path, datalens: Any) -> None:
    images, labels = pictures()
    for name in ("mine", "other"):
        datalens("budget", tmp_path / name, "--epsilon", 30, "--delta", 1e-3).succeeded()
    own = {**SMALL, **PUBLIC, "out": tmp_path / "run"}
    DataLens(**own, budget=tmp_path / "mine").fit(images, labels)
    with pytest.raises(DatalensError, match=r"was begun with budget .*mine"):
        DataLens(**own, budget=tmp_path / "other").fit(images, labels)
    DataLens(**own, budget=tmp_path / "mine").fit(images, labels)  # and the same goes on
    DataLens(**own).fit(images, labels)  # left out: the reservation it has still holds
    assert len(datalens("budget", tmp_path / "mine", "--json").json["runs"]) == 1
    persons = [str(i // 3) for i in range(300)]
    own |= {"out": tmp_path / "persons", "nominal_size": 100}
    DataLens(**own, group_name="patient").fit(images, labels, groups=persons)
    with pytest.raises(DatalensError, match="was begun with record-id patient"):
        DataLens(**own, group_name="visit").fit(images, labels, groups=persons)


@pytest.mark.parametrize("begun", [{"epsilon": 8.0}, {"delta": 1e-4}, {"relation": "replace-one"}, {"seed": 3}])
def test_a_kept_run_is_what_is_asked_for(begun: dict[str, Any], tmp_path: Path) -> None:
    """Defaults are asked for, too: a release with another promise is not given in their place."""
    own = {"options": SMALL["options"], **PUBLIC, "out": tmp_path / "run"}
    DataLens(**{"epsilon": 20.0, **begun}, **own).fit(*pictures())
    with pytest.raises(DatalensError, match=f"was begun with {next(iter(begun))} {next(iter(begun.values()))}"):
        DataLens(**({} if "epsilon" in begun else {"epsilon": 20.0}), **own).fit(*pictures())


def test_a_run_with_seeded_noise_does_not_become_private(tmp_path: Path) -> None:
    images, labels = pictures()
    seeded = SMALL | {"options": SMALL["options"] | {"noise_seed": 7}}
    asked = DataLens(**seeded, **PUBLIC, out=tmp_path / "run").fit(images, labels)
    assert asked.certificate.private is False
    with pytest.raises(DatalensError, match="was begun with noise-seed 7"):
        DataLens(**SMALL, **PUBLIC, out=tmp_path / "run").fit(images, labels)


@pytest.mark.parametrize(("name", "begun"), [("epsilon", 8.0), ("delta", 1e-4), ("relation", "replace-one")])
def test_plain_train_goes_on_with_what_was_promised_only(name: str, begun: Any, tmp_path: Path) -> None:
    """A default may be meant: nobody can tell."""
    asked: dict[str, Any] = {"data": "digits", "out": tmp_path / "run", "coordinates": 6, "texture": 0}
    train(TrainOptions(**asked, **{name: begun}))
    with pytest.raises(DatalensError, match=f"was begun with {name} {begun}"):
        train(TrainOptions(**asked, resume=True))
    assert train(TrainOptions(**asked, **{name: begun}, resume=True))["interrupted"] is False


def test_a_second_fit_is_a_second_release() -> None:
    model = DataLens(**SMALL, **PUBLIC).fit(*pictures())
    with pytest.warns(UserWarning, match="a second fit spends a second epsilon"):
        model.fit(*pictures())


def test_ids_of_persons_have_a_name_where_budgets_count_by_it(tmp_path: Path) -> None:
    from datalens.privacy.budget import Cap, DataBudget

    DataBudget.create(tmp_path / "b", Cap(epsilon=90.0, delta=1e-2, relation="add-remove")).close()
    images, labels = pictures()
    own: dict[str, Any] = {**SMALL, **PUBLIC, "budget": tmp_path / "b"}
    with pytest.raises(DatalensError, match="group_name='patient'"):
        DataLens(**own).fit(images, labels, groups=range(300))
    DataLens(**own, group_name="visit").fit(images, labels, groups=range(300))
    with pytest.raises(DatalensError, match="by visit"):
        DataLens(**own, group_name="patient").fit(images, labels, groups=[i // 3 for i in range(300)])


def test_the_data_sets_budget(tmp_path: Path) -> None:
    from datalens.privacy.budget import Cap, DataBudget

    DataBudget.create(tmp_path / "b", Cap(epsilon=25.0, delta=1e-3, relation="add-remove")).close()
    fitted = DataLens(**SMALL, **PUBLIC, budget=tmp_path / "b").fit(*pictures())
    with pytest.raises(BudgetExceeded, match="largest that fits"):
        clone(fitted).fit(*pictures())


def test_a_person_with_several_images_is_protected_as_a_whole(tmp_path: Path) -> None:
    images, labels = pictures()
    public = PUBLIC | {"nominal_size": 100}
    model = DataLens(**SMALL, **public).fit(images, labels, groups=np.arange(300) // 3)
    assert "for one person (all images with the same record id)" in model.certificate.statement
    assert model.certificate.public["nominal_size"] == 100
    model.save(tmp_path / "r")
    assert not check_release(tmp_path / "r").problems
    assert '"row_unit":"person"' in (tmp_path / "r" / "ledger.jsonl").read_text()
    with pytest.raises(DatalensError, match="ids must be 300"):
        DataLens(**SMALL, **public).fit(images, labels, groups=[1, 2])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"relation": "other"}, "relation must be one of add-remove, replace-one"),
        ({"epsilon": "1"}, "epsilon must be a number"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"options": {"textures": 0}}, r"there is no option options=\{'textures': …\}; `datalens train --method"),
        ({"options": {"out": "x"}}, "'out' is no option"),
        ({"options": {"epsilon": 50.0}}, "'epsilon' is a parameter of DataLens itself"),
        ({"options": {"relation": "replace-one"}}, "'relation' is a parameter of DataLens itself"),
        ({"options": {"record_id": "patient"}}, "'record_id' is no option"),
        ({"options": {"nominal_size": 5}}, "'nominal_size' is no option"),
        ({"nominal_size": 0}, "nominal_size must be"),
        ({"classes": ("cat", "cat")}, "distinct"),
        ({"classes": ("cat",)}, "label 1 is none of the 1 classes"),
    ],
)
def test_bad_parameters(change: dict[str, Any], why: str) -> None:
    with pytest.raises(DatalensError, match=why):
        DataLens(**{**SMALL, **PUBLIC, **change}).fit(*pictures())


# --- what may be handed in -------------------------------------------------------------------------


class Pairs(Dataset):  # type: ignore[type-arg]
    def __init__(self, *, as_tensors: bool) -> None:
        self.images, self.labels = pictures(6)
        self.as_tensors = as_tensors

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if self.as_tensors:
            return torch.from_numpy(self.images[i]).unsqueeze(0) / 255, torch.tensor(self.labels[i])
        return Image.fromarray(self.images[i]), int(self.labels[i])


class ClassLabel:
    names = ("cat", "dog")


class Table:
    """What of a Hugging Face `datasets.Dataset` is used: a stand-in, with its own way of naming things."""

    column_names = ("id", "image", "label")
    features = {"id": object(), "image": object(), "label": ClassLabel()}  # noqa: RUF012

    def __getitem__(self, name: str) -> list[Any]:
        images, labels = pictures(6)
        return {"image": [Image.fromarray(image) for image in images], "label": labels.tolist()}[name]


def inputs() -> dict[str, tuple[Any, Any]]:
    images, labels = pictures(6)
    return {
        "uint8": (images, labels),
        "floats": (images / 255, labels),
        "channels last": (images[..., None], labels),
        "channels first": (images[:, None], labels),
        "torch": (torch.from_numpy(images)[:, None], torch.from_numpy(labels)),
        "pictures": ([Image.fromarray(image) for image in images], labels.tolist()),
        "torch data set": (Pairs(as_tensors=True), None),
        "data set of pictures": (Pairs(as_tensors=False), None),
        "datasets": (Table(), None),
    }


@pytest.mark.parametrize("name", inputs())
def test_every_input_becomes_the_same_records(name: str) -> None:
    images, labels = pictures(6)
    pixels, found, names = as_arrays(*inputs()[name])
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, images[..., None])
    assert np.array_equal(found, labels)
    assert names == (("cat", "dog") if name == "datasets" else None)


def test_labels_by_name_by_number_or_not_at_all() -> None:
    assert named_labels(np.array(["b", "a"]), None)[0].tolist() == [1, 0]
    assert named_labels(np.array([7, 3]), (3, 5, 7))[0].tolist() == [2, 0]
    assert named_labels(np.array([1, 0]), ("a", "b"))[0].tolist() == [1, 0]
    images, _ = pictures(6)
    _, found, names = as_arrays(images)
    assert found.tolist() == [0] * 6 and names == ("all",)


@pytest.mark.parametrize(
    ("images", "labels", "why"),
    [
        (np.zeros((4, 64), np.uint8), [0] * 4, "reshape"),
        (np.zeros((4, 8, 8), np.uint8), [0] * 3, "labels must be 4"),
        ([np.zeros((8, 8), np.uint8), np.zeros((9, 8), np.uint8)], [0, 1], "8x8 and 9x8"),
        ([], [], "none"),
        (Table(), [0], "leave labels out"),
        (Pairs(as_tensors=True), [0], "leave labels out"),
        ({"a": 1}, None, r"\(image, label\) pairs"),
        (np.full((2, 8, 8), 3.0), [0, 1], r"\[0, 1\]"),
    ],
)
def test_bad_records(images: Any, labels: Any, why: str) -> None:
    with pytest.raises(DatalensError, match=why):
        as_arrays(images, labels)


# --- what comes out --------------------------------------------------------------------------------


def test_every_format_is_read_with_one_line_of_others(model: DataLens, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    synthetic = model.sample(12, balanced=True)
    synthetic.to_npz(tmp_path / "s.npz")
    synthetic.to_parquet(tmp_path / "s.parquet")
    synthetic.to_folder(tmp_path / "s")
    arrays = np.load(tmp_path / "s.npz", allow_pickle=False)
    assert np.array_equal(arrays["images"], synthetic.images)
    assert "present or absent" in str(arrays["certificate"])
    table = pd.read_parquet(tmp_path / "s.parquet")
    assert table["label"].tolist() == synthetic.labels.tolist()
    rows = pd.read_csv(tmp_path / "s" / "metadata.csv")
    assert rows["class"].tolist() == ["cat", "dog"] * 6
    picture = np.asarray(Image.open(tmp_path / "s" / rows["file_name"][3]))
    assert np.array_equal(picture, synthetic.images[3, ..., 0])
    assert (tmp_path / "s" / "certificate.json").is_file()
    images, labels = next(iter(DataLoader(synthetic.to_torch(), batch_size=12)))
    assert images.shape == (12, 1, 8, 8) and torch.equal(
        (images * 255).round().to(torch.uint8)[:, 0, 0, 0], torch.from_numpy(synthetic.images[:, 0, 0, 0])
    )
    assert labels.tolist() == synthetic.labels.tolist() and len(synthetic) == 12
    for write in (synthetic.to_npz, synthetic.to_parquet):
        with pytest.raises(DatalensError, match="must end in"):
            write(tmp_path / "other")


def test_hugging_face_reads_parquet_and_folder(model: DataLens, tmp_path: Path) -> None:
    """By `datasets` itself where it is installed; its conventions are checked in test_synthetic.py."""
    datasets = pytest.importorskip("datasets")
    synthetic = model.sample(6)
    synthetic.to_parquet(tmp_path / "s.parquet")
    synthetic.to_folder(tmp_path / "s")
    asked = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    table = datasets.load_dataset("parquet", data_files=str(tmp_path / "s.parquet"), **asked)
    folder = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "s"), **asked)
    for found in (table, folder):
        assert found["label"][:] == synthetic.labels.tolist()
        assert np.array_equal(np.asarray(found[2]["image"]), synthetic.images[2, ..., 0])
    assert as_arrays(table)[2] == ["cat", "dog"]


def test_sampling_from_the_shell(model: DataLens, tmp_path: Path, datalens: Any) -> None:
    model.save(tmp_path / "r")
    for name in ("a.npz", "b.npz", "c"):
        asked = ("--count", 9, "--class", "dog", "--seed", 4, "--out", tmp_path / name)
        assert datalens("sample", tmp_path / "r", *asked, "--json").succeeded().json["count"] == 9
    a, b = (np.load(tmp_path / name) for name in ("a.npz", "b.npz"))
    assert np.array_equal(a["images"], b["images"]) and set(a["labels"]) == {1}
    asked = ("--count", 9, "--class", 0, "dog", "--balanced", "--out", tmp_path / "d.parquet")
    datalens("sample", tmp_path / "r", *asked).succeeded()
    assert (
        "none of the 2 classes"
        in datalens("sample", tmp_path / "r", "--class", "bird", "--out", tmp_path / "e.npz").refused()
    )
