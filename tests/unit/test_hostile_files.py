"""What a file names or claims is refused in one line, before memory is filled or anything is set aside."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datalens import DataLens
from datalens.data import formats, regular
from datalens.data.own.python import from_arrays
from datalens.data.own.reading import Reading
from datalens.data.records import collect
from datalens.driver import train
from datalens.errors import DatalensError
from datalens.options import TrainOptions
from datalens.pages import check_may_replace
from datalens.plans.registry import make_plan
from datalens.privacy.budget import Cap, DataBudget
from datalens.privacy.ledger import Budget, check_epsilon
from datalens.released import loading, signing
from datalens.run import reservation

DIGITS = {"data": "digits", "texture": 0, "coordinates": 8, "epsilon": 5.0, "device": "cpu"}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("make", "kind"), [(a_pipe, "a pipe"), (a_device, "a device")])
def test_a_csv_that_names_what_is_no_file(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / "x.png")
    (tmp_path / "a.csv").write_text("path,label\nx.png,a\n", encoding="utf-8")
    with pytest.raises(DatalensError, match=rf"x\.png is {kind}, not a file"):
        collect(formats.open_records(str(tmp_path / "a.csv"), nominal_size=1, reading=Reading(image_size="8")))


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.parquet"])
@pytest.mark.parametrize(("make", "kind"), [(a_pipe, "a pipe"), (a_device, "a device")])
def test_data_that_is_no_file(tmp_path: Path, name: str, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / name)
    with pytest.raises(DatalensError, match=f"is {kind}, not a file"):
        formats.open_records(str(tmp_path / name), nominal_size=1)


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
@pytest.mark.parametrize(("make", "kind"), [(a_pipe, "a pipe"), (a_device, "a device")])
def test_samples_that_are_no_file(tmp_path: Path, name: str, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / name)
    with pytest.raises(DatalensError, match=f"is {kind}, not a file"):
        loading.load(tmp_path / name)


def test_keys_and_pages_that_are_no_file(tmp_path: Path) -> None:
    """A key may come through a pipe, so a device is read as far as the longest of keys."""
    pytest.importorskip("cryptography")
    a_device(tmp_path / "key")
    with pytest.raises(DatalensError, match="too long"):
        signing.public_keys(tmp_path / "key")
    with pytest.raises(DatalensError, match="not a private key"):
        signing.sign(b"", tmp_path / "key")
    a_pipe(tmp_path / "page.html")
    for name in ("key", "page.html"):
        with pytest.raises(DatalensError, match="not a page of datalens"):
            check_may_replace(tmp_path / name)


def test_no_more_is_read_than_an_image_can_have(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert regular.read_regular(tmp_path / "x", most=10) == b"0123456789"
    with pytest.raises(DatalensError, match="larger than the limit"):
        regular.read_regular(tmp_path / "x", most=9)


def an_npz(path: Path, *, side: int = 8, classes: int = 2) -> str:
    np.savez(path, images=np.zeros((3, side, side), np.uint8), labels=np.arange(3) % 2, classes=np.arange(classes))
    return str(path)


def test_images_and_classes_of_an_npz_have_limits(tmp_path: Path) -> None:
    large = an_npz(tmp_path / "large.npz", side=300)
    with pytest.raises(DatalensError, match="images of 300x300 are larger than 128x128"):
        formats.open_records(large, nominal_size=3)
    assert formats.open_records(large, nominal_size=3, reading=Reading(image_size="16")).schema.height == 16
    with pytest.raises(DatalensError, match="makes 1001 classes, more than 1000"):
        formats.open_records(an_npz(tmp_path / "many.npz", classes=1001), nominal_size=3)
    assert formats.open_records(an_npz(tmp_path / "right.npz", classes=1000), nominal_size=3).schema.height == 8


def test_images_from_python_have_them_too() -> None:
    with pytest.raises(DatalensError, match="images of 8x129 are larger"):
        from_arrays(np.zeros((2, 8, 129), np.uint8), nominal_size=2)


# --- a reservation is made last ---------------------------------------------------------------------------------------


@pytest.fixture
def data_budget(tmp_path: Path) -> Path:
    DataBudget.create(tmp_path / "budget", Cap(epsilon=100.0, delta=1e-5, relation="add-remove")).close()
    return tmp_path / "budget"


def reserved(folder: Path) -> int:
    with DataBudget.open(folder) as data:
        return len(data.reservations)


@pytest.mark.parametrize("size", [2**31, 0, -1])
def test_a_nominal_size_that_no_run_can_keep(tmp_path: Path, data_budget: Path, size: int) -> None:
    asked = DIGITS | {"data": an_npz(tmp_path / "x.npz"), "nominal_size": size}
    with pytest.raises(DatalensError, match="nominal-size must be from 1 to 2147483647"):
        train(TrainOptions(out=tmp_path / "run", budget=data_budget, **asked))
    with pytest.raises(DatalensError, match="from 1 to 2147483647"):
        from_arrays(np.zeros((2, 8, 8), np.uint8), nominal_size=size)
    assert reserved(data_budget) == 0


def test_what_could_not_be_read_again_is_not_begun(
    tmp_path: Path, data_budget: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind of it: whatever check a run would fail at when it is opened, it fails at before it is paid for."""

    def refuse(fields: dict[str, Any]) -> None:
        raise ValueError("height cannot be '-1'")

    monkeypatch.setattr(reservation.Schema, "from_dict", refuse)
    with pytest.raises(DatalensError, match="could not be opened again"):
        train(TrainOptions(out=tmp_path / "run", budget=data_budget, **DIGITS))
    assert reserved(data_budget) == 0 and not (tmp_path / "run").exists()


def test_who_loses_the_race_for_out_reserves_nothing(
    tmp_path: Path, data_budget: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked at the place and found it free; then both begin."""
    both = threading.Barrier(2, timeout=60)
    begin = reservation._alone_beginning

    def together(out: Path) -> Any:
        both.wait()
        return begin(out)

    monkeypatch.setattr(reservation, "_alone_beginning", together)
    budget, settings = make_plan(TrainOptions(out=tmp_path / "run", **DIGITS), formats.schema("digits"))
    asked = TrainOptions(out=tmp_path / "run", budget=data_budget, **DIGITS)
    ended: list[str] = []

    def one() -> None:
        facts: dict[str, Any] = {"options": asked.remembered(), "data_sha256": "0" * 64}
        try:
            schema = formats.schema("digits")
            reservation.begin(asked, asked.out, settings=settings, schema=schema, budget=budget, **facts).close()
            ended.append("begun")
        except DatalensError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended)[1] == "begun" and "exists already" in sorted(ended)[0]
    assert reserved(data_budget) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["budget", "run"]  # and no lock is left


def test_a_lock_whose_file_was_removed_is_taken_on_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who held it removes it. Whoever waited has a file that others do not see, and would not be alone."""
    path, flock, taken = tmp_path / ".run.begin", reservation.fcntl.flock, list[int]()

    def removed(file: Any, how: int) -> None:
        flock(file, how)
        if not taken:
            path.unlink()
        taken.append(how)

    monkeypatch.setattr(reservation.fcntl, "flock", removed)
    with reservation._locked(path) as lock:
        assert len(taken) == 2 and os.path.samestat(os.fstat(lock.fileno()), path.stat())


def test_a_place_that_cannot_be_made(tmp_path: Path, data_budget: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):  # of which the command line makes one line
        train(TrainOptions(out=tmp_path / "file" / "run", budget=data_budget, **DIGITS))
    assert reserved(data_budget) == 0


# --- epsilon ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e300, 1.1e6])
def test_an_epsilon_that_protects_nobody_is_refused(tmp_path: Path, epsilon: float) -> None:
    with pytest.raises(DatalensError, match="protects nobody: use --epsilon inf"):
        train(TrainOptions(out=tmp_path / "run", **DIGITS | {"epsilon": epsilon}))
    with pytest.raises(DatalensError, match="protects nobody: use --epsilon inf"):
        train(TrainOptions(method="sgd", data="digits", out=tmp_path / "run", epsilon=epsilon))
    assert not (tmp_path / "run").exists()
    Budget(epsilon=epsilon, delta=1e-5, relation="add-remove", accountant="exact")  # as a ledger may have it


def test_the_largest_epsilon_works(tmp_path: Path) -> None:
    check_epsilon(float("inf"))
    facts = train(TrainOptions(out=tmp_path / "run", **DIGITS | {"epsilon": 1e6}))
    assert facts["steps"] == 4


# --- names that are not UTF-8 -----------------------------------------------------------------------------------------

LATIN = os.fsdecode(b"caf\xe9")  # what Python makes of a name in Latin-1


def a_folder_of_classes(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(30):
            Image.fromarray(np.full((8, 8), 8 * i, np.uint8)).save(root / name / f"{i}.png")
    return root


def from_a_folder(root: Path, budget: Path, name: str) -> None:
    folder = a_folder_of_classes(root / "scans", "a", name)
    asked = DIGITS | {"data": str(folder), "nominal_size": 60, "epsilon": 10.0}
    train(TrainOptions(out=root / "run", budget=budget, **asked))


def from_the_command_line(root: Path, budget: Path, name: str) -> None:
    folder = a_folder_of_classes(root / "scans", "a")
    asked = DIGITS | {"data": str(folder), "nominal_size": 60, "epsilon": 10.0, "classes": f"a,{name}"}
    train(TrainOptions(out=root / "run", budget=budget, **asked))


def from_a_path(root: Path, budget: Path, name: str) -> None:
    folder = a_folder_of_classes(root / name, "a")
    asked = DIGITS | {"data": str(folder), "nominal_size": 60, "epsilon": 10.0}
    train(TrainOptions(out=root / "run", budget=budget, **asked))


def from_an_npz(root: Path, budget: Path, name: str) -> None:
    images, labels = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 2
    np.savez(root / "x.npz", images=images, labels=labels, classes=np.array(["a", name]))
    asked = DIGITS | {"data": str(root / "x.npz"), "nominal_size": 60, "epsilon": 10.0}
    train(TrainOptions(out=root / "run", budget=budget, **asked))


def from_python(root: Path, budget: Path, name: str) -> None:
    images, labels = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 2
    options = {"texture": 0, "coordinates": 8}
    model = DataLens(
        epsilon=10.0, nominal_size=60, classes=["a", name], out=root / "run", budget=budget, options=options
    )
    model.fit(images, labels)


def from_sgd(root: Path, budget: Path, name: str) -> None:
    folder = a_folder_of_classes(root / "scans", "a", name)
    train(TrainOptions(method="sgd", data=str(folder), nominal_size=60, out=root / "run", budget=budget))


@pytest.mark.parametrize(
    "begin", [from_a_folder, from_the_command_line, from_a_path, from_an_npz, from_python, from_sgd]
)
def test_a_name_that_is_not_utf8_is_found_before_anything_is_charged(
    tmp_path: Path, data_budget: Path, begin: Callable[[Path, Path, str], None]
) -> None:
    with pytest.raises(DatalensError, match=r"caf\\udce9' is not UTF-8 text: rename it"):
        begin(tmp_path, data_budget, LATIN)
    assert reserved(data_budget) == 0 and not (tmp_path / "run").exists()


def test_an_edited_schema_with_such_a_name_is_damaged() -> None:
    fields = formats.schema("digits").as_dict()
    with pytest.raises(ValueError, match="not UTF-8"):
        reservation.Schema.from_dict({**fields, "classes": ["a", "\ud800"]})


def test_any_utf8_name_will_do(tmp_path: Path, data_budget: Path) -> None:
    from_a_folder(tmp_path, data_budget, "caf\u00e9 \U0001f600")
    assert (tmp_path / "run" / "release" / "certificate.json").is_file()


def test_files_below_a_class_may_have_any_name(tmp_path: Path) -> None:
    folder = a_folder_of_classes(tmp_path / "scans", "a")
    os.rename(folder / "a" / "0.png", folder / "a" / f"{LATIN}.png")
    assert len(collect(formats.open_records(str(folder), nominal_size=30)).images) == 30


@pytest.mark.parametrize("unreadable", ["Schema.from_dict", "read_settings"])
def test_a_run_that_could_not_be_opened_again_reserves_nothing(
    unreadable: str, tmp_path: Path, data_budget: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("no such thing")

    budget, settings = make_plan(TrainOptions(out=tmp_path / "run", **DIGITS), formats.schema("digits"))
    asked = TrainOptions(out=tmp_path / "run", budget=data_budget, **DIGITS)
    facts: dict[str, Any] = {"options": asked.remembered(), "data_sha256": "0" * 64}
    before = {path.name: path.read_bytes() for path in data_budget.iterdir()}
    monkeypatch.setattr(f"datalens.run.reservation.{unreadable}", refuse)
    with pytest.raises(DatalensError, match="could not be opened again"):
        reservation.begin(asked, asked.out, settings=settings, schema=formats.schema("digits"), budget=budget, **facts)
    assert {path.name: path.read_bytes() for path in data_budget.iterdir()} == before
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_a_set_of_another_kind() -> None:
    """Same place, other size or classes: what was planned by public facts would not hold."""
    from datalens.driver import _records

    digits = formats.open_records("digits")
    job = SimpleNamespace(records=digits, schema=digits.schema, options={"data": "digits"})
    assert _records(job) is digits  # type: ignore[arg-type]
    job.schema = replace(digits.schema, nominal_size=digits.schema.nominal_size + 1)
    with pytest.raises(DatalensError, match="is not the data this run was begun with"):
        _records(job)  # type: ignore[arg-type]
