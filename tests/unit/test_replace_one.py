"""Replace-one where teachers' shares go by position: a record is replaced by one of another class and another name, in
every format, and what changes is compared with what is charged."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from datalens.data import formats, idx
from datalens.data.named import layouts
from datalens.data.own.python import from_arrays
from datalens.data.own.reading import Reading
from datalens.data.parquet import is_one_table
from datalens.data.records import Records, check_fixed_positions, collect, has_fixed_positions
from datalens.data.schema import Schema
from datalens.driver import train
from datalens.errors import DatalensError
from datalens.methods import topagg
from datalens.methods.topagg import TopAggSettings
from datalens.options import TrainOptions
from datalens.plans.base import Place, StepSettings
from datalens.plans.registry import make_plan, method_named, names
from datalens.privacy.events import GaussianEvent
from datalens.private.partition import Balanced
from datalens.private.shares import Shares
from datalens.released.generator import dcgan_architecture
from datalens.released.student import Student

CPU = torch.device("cpu")
CLASSES = [f"c{i}" for i in range(10)]
REPLACED = 9  # in the list; a nine


@dataclasses.dataclass(frozen=True)
class Record:
    image: np.ndarray
    label: int
    name: str


def a_list(count: int) -> list[Record]:
    digits = load_digits()
    images = np.rint(digits.images[:count] * 255 / 16).astype(np.uint8)
    return [Record(images[i], int(digits.target[i]), f"m{i:04}.png") for i in range(count)]


def neighbours(count: int) -> tuple[list[Record], list[Record]]:
    """Two lists that differ in one record: its image, its class (9, then 0) and its name."""
    before = a_list(count)
    assert before[REPLACED].label == 9
    after = [*before]
    after[REPLACED] = Record(255 - before[REPLACED].image, 0, "a.png")
    return before, after


# --- the same list in every format ------------------------------------------------------------------------------------


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def as_folder(root: Path, records: list[Record]) -> Path:
    for name in CLASSES:
        (root / name).mkdir(parents=True)
    for record in records:
        (root / CLASSES[record.label] / record.name).write_bytes(png(record.image))
    return root


def as_split_folder(root: Path, records: list[Record]) -> Path:
    as_folder(root / "train", records)
    as_folder(root / "test", records[:3])
    return root


def as_flat_folder(root: Path, records: list[Record]) -> Path:
    root.mkdir()
    for record in records:
        (root / record.name).write_bytes(png(record.image))
    return root


def as_csv(root: Path, records: list[Record], name: str = "list.csv") -> Path:
    as_folder(root / "images", records)
    lines = [
        f"images/{CLASSES[r.label]}/{r.name},{CLASSES[r.label]},{'test' if i == 1 else 'train'}"
        for i, r in enumerate(records)
    ]
    (root / name).write_text("\n".join(["file_name,label,split", *lines]), encoding="utf-8")
    return root / name


def as_metadata(root: Path, records: list[Record]) -> Path:
    return as_csv(root, records, "metadata.csv").parent


def as_npz(root: Path, records: list[Record]) -> Path:
    root.mkdir()
    images, labels = np.stack([r.image for r in records]), np.array([r.label for r in records])
    np.savez(root / "x.npz", images=images, labels=labels, classes=CLASSES, ids=[r.name for r in records])
    return root / "x.npz"


def as_idx(root: Path, records: list[Record]) -> Path:
    root.mkdir()
    (root / "train-images-idx3-ubyte").write_bytes(idx.dump(np.stack([r.image for r in records])))
    (root / "train-labels-idx1-ubyte").write_bytes(idx.dump(np.array([r.label for r in records], np.uint8)))
    return root


def write_parquet(path: Path, records: list[Record]) -> Path:
    path.parent.mkdir(exist_ok=True)
    pictures = [{"bytes": png(r.image), "path": r.name} for r in records]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array([CLASSES[r.label] for r in records], pa.string())
    pq.write_table(pa.table({"image": pa.array(pictures, kind), "label": labels}), path)
    return path


def as_parquet(root: Path, records: list[Record]) -> Path:
    return write_parquet(root / "x.parquet", records)


def as_shards(root: Path, records: list[Record]) -> Path:
    half = len(records) // 2
    write_parquet(root / "train-00000-of-00002.parquet", records[:half])
    return write_parquet(root / "train-00001-of-00002.parquet", records[half:]).parent


def as_a_file_a_class(root: Path, records: list[Record]) -> Path:
    for label, name in enumerate(CLASSES):
        write_parquet(root / f"{name}.parquet", [r for r in records if r.label == label])
    return root


LISTS: dict[str, Callable[[Path, list[Record]], Path]] = {
    "csv": as_csv,
    "metadata.csv": as_metadata,
    "npz": as_npz,
    "idx": as_idx,
    "parquet": as_parquet,
    "shards": as_shards,
}
SORTED: dict[str, Callable[[Path, list[Record]], Path]] = {
    "folder": as_folder,
    "train and test": as_split_folder,
    "folder without classes": as_flat_folder,
    "a parquet file a class": as_a_file_a_class,
}
READ: dict[str, dict[str, Any]] = {"metadata.csv": {"label": "label"}, "npz": {}, "folder without classes": {}}


def opened(kind: str, root: Path, records: list[Record]) -> Records:
    path = (LISTS | SORTED)[kind](root, records)
    reading = Reading(**READ.get(kind, {"classes": ",".join(CLASSES)}))
    return formats.open_records(str(path), nominal_size=len(records), reading=reading)


def shares_that_change(before: Records, after: Records, teachers: int) -> int:
    """By how many teachers' records the two differ, where shares go by position."""
    rule = Balanced(teachers=teachers)

    def held(records: Records) -> list[list[tuple[int, bytes]]]:
        found: list[list[tuple[int, bytes]]] = [[] for _ in range(teachers)]
        for block in records.blocks(rule.shares):
            for share, label, image in zip(block.share, block.labels, block.images, strict=True):
                found[share].append((int(label), image.tobytes()))
        return [sorted(share) for share in found]

    return sum(a != b for a, b in zip(held(before), held(after), strict=True))


def gathered(records: Records, teachers: int = 10) -> Shares:
    return Shares.gather(records, Balanced(teachers=teachers), features=lambda i: i.flatten(1), device=CPU)


@pytest.mark.parametrize("kind", LISTS)
def test_in_a_list_a_replaced_record_changes_one_share(kind: str, tmp_path: Path) -> None:
    before, after = neighbours(60)
    a, b = opened(kind, tmp_path / "a", before), opened(kind, tmp_path / "b", after)
    gathered(a)
    assert has_fixed_positions(collect(a)) and has_fixed_positions(collect(a, most=5))
    assert shares_that_change(a, b, teachers=10) == 1


@pytest.mark.parametrize("kind", SORTED)
def test_what_is_sorted_by_what_it_is_has_no_positions(kind: str, tmp_path: Path) -> None:
    before, after = neighbours(60)
    a, b = opened(kind, tmp_path / "a", before), opened(kind, tmp_path / "b", after)
    for records in (a, collect(a), collect(a, most=5)):  # in memory it is no other data set
        with pytest.raises(DatalensError, match="under replace-one, teachers' shares go by position") as refused:
            gathered(records)
        assert "\n" not in str(refused.value)
    # The broken twin, shares by position all the same: more teachers change than the one that is paid for.
    assert shares_that_change(a, b, teachers=10) > 1


@pytest.mark.parametrize(
    ("names", "one"),
    [
        (["cats.parquet"], True),
        (["t-00000-of-00002.parquet", "t-00001-of-00002.parquet"], True),
        (["t-00000-of-00003.parquet", "t-00001-of-00003.parquet"], False),
        (["t-00000-of-00002.parquet", "u-00001-of-00002.parquet"], False),
        (["t-00000-of-00002.parquet", "t-00001-of-00002.parquet", "u.parquet"], False),
        (["train-1.parquet", "train-2.parquet"], False),
    ],
)
def test_shards_of_one_table(names: list[str], one: bool) -> None:
    assert is_one_table([Path(name) for name in names]) is one


def test_lists_and_folders_of_published_sets() -> None:
    schema = Schema(name="s", height=8, width=8, channels=3, classes=("a",), nominal_size=9)
    for listed in (True, False):
        files = layouts.Listed(root=Path("x"), ids=[], labels=np.zeros(0, np.int64), fixed_positions=listed)
        assert layouts._records(files, schema, None).fixed_positions is listed
    assert not layouts.Listed(root=Path("x"), ids=[], labels=np.zeros(0, np.int64)).fixed_positions


def test_an_object_that_numbers_its_own_records_is_no_list() -> None:
    """torchvision's ImageFolder sorts by class and name, and nobody can tell it from here."""

    class Items:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            return np.full((8, 8), number, np.uint8), number % 2

    with pytest.raises(DatalensError, match="or arrays"):
        check_fixed_positions(from_arrays(Items(), nominal_size=6))
    images = np.zeros((6, 8, 8), np.uint8)
    for arrays in (images, list(images), torch.from_numpy(images)):
        check_fixed_positions(from_arrays(arrays, np.arange(6) % 2, nominal_size=6))

    class Silent:
        """Another package's stream, which says nothing."""

        schema = from_arrays(images, nominal_size=6).schema

    assert not has_fixed_positions(Silent())  # type: ignore[arg-type]


# --- in the wiring: every method that has teachers --------------------------------------------------------------------


def with_teachers() -> list[str]:
    schema = Schema(name="s", height=8, width=8, channels=1, classes=("a", "b"), nominal_size=1000)
    found = []
    for name in names():
        try:
            _, settings = make_plan(options(name), schema)
        except DatalensError:  # Poisson samples have no price under replace-one
            continue
        found += [name] if hasattr(settings, "shares") else []
    return found


def options(method: str, **others: Any) -> TrainOptions:
    infinite = {"epsilon": float("inf")} if method == "dcgan" else {}
    return TrainOptions(
        out="unused",
        method=method,
        relation="replace-one",
        warm_start="off" if method == "datalens" else None,
        **infinite | others,
    )


def test_which_methods_have_teachers() -> None:
    assert set(with_teachers()) == {"datalens", "datalens-paper", "pategan", "gpate", "gswgan"}


def gathered_by(method: str, records: Records) -> Shares:
    _, settings = make_plan(options(method, teachers=6), records.schema)
    if isinstance(settings, StepSettings):
        return method_named(method).gather(records, settings, Place(device=CPU, folder=Path("nowhere")))
    assert isinstance(settings, TopAggSettings)
    return topagg.gather(records, settings, Place(device=CPU, folder=Path("nowhere")))


@pytest.mark.parametrize("method", with_teachers())
def test_no_method_shares_out_a_folder_by_position(method: str, tmp_path: Path) -> None:
    records = a_list(60)
    assert gathered_by(method, opened("npz", tmp_path / "npz", records)).count == 60
    with pytest.raises(DatalensError, match="shares go by position"):
        gathered_by(method, opened("folder", tmp_path / "folder", records))


@pytest.mark.parametrize("method", with_teachers())
def test_a_run_on_a_folder_is_refused_before_it_exists(method: str, tmp_path: Path) -> None:
    asked = options(
        method,
        data=str(as_folder(tmp_path / "scans", a_list(60))),
        nominal_size=60,
        teachers=6,
        steps=1,
        device="cpu",
    )
    with pytest.raises(DatalensError, match="scans: under replace-one, teachers' shares go by position"):
        train(dataclasses.replace(asked, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_plan_refuses_it_too(tmp_path: Path) -> None:
    from datalens.cli.plan import Plan

    folder, table = as_folder(tmp_path / "scans", a_list(60)), as_csv(tmp_path / "listed", a_list(60))
    asked: dict[str, Any] = {"nominal_size": 60, "relation": "replace-one", "json": True}
    with pytest.raises(DatalensError, match="shares go by position"):
        Plan(data=str(folder), method="datalens-paper", **asked).run(set())
    assert Plan(data=str(table), method="datalens-paper", **asked).run(set()) == 0
    assert Plan(data=str(folder), **asked).run(set()) == 0  # private moments: nobody has a position


# --- how far votes move, against what is charged ----------------------------------------------------------------------

COUNT, TEACHERS = 600, 100


def votes_move(before: Records, after: Records) -> float:
    """How far the sum of votes in the first step moves, by the sensitivity that is charged."""
    asked = options("datalens", teachers=TEACHERS, batch=16, k=64, basis_size=64, steps=1)
    settings = make_plan(asked, before.schema)[1]
    schema = before.schema
    architecture = dcgan_architecture(schema.shape, len(schema.classes), latent=8, latent_law="normal")
    student = Student(
        architecture, batch=16, gamma=1.0, learning_rate=1e-3, decay_over=None, balanced_labels=True, seed=0, device=CPU
    )
    fakes, compress = student.generate(0), topagg.make_compress(settings)

    def votes(records: Records) -> np.ndarray:
        rule = topagg.share_rule(settings)
        network = topagg.make_network(
            settings, topagg.make_basis(settings.basis, schema.shape, settings.basis_size), len(schema.classes)
        )
        shares = Shares.gather(records, rule, features=network.record_features, device=CPU)
        teachers = topagg.make_teachers(shares, settings, schema)
        teachers.fit_step(fakes, step=0, repeats=4)
        return sum(compress(part).rows.sum(0) for part in teachers.image_gradients(fakes, step=0)).numpy()

    charged = GaussianEvent(
        row_unit="teacher",
        l2_bound=settings.l2_bound,
        diameter=2 * settings.l2_bound,
        relation="replace-one",
        sigma=1.0,
        queries=settings.batch,
        step=0,
        noise="operating-system",
    )
    moved = votes(after).astype(float) - votes(before).astype(float)
    return float(np.linalg.norm(moved)) / charged.sensitivity


def test_votes_move_by_no_more_than_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = neighbours(COUNT)
    lists = [opened("csv", tmp_path / name, some) for name, some in (("a", before), ("b", after))]
    assert 0 < votes_move(*lists) <= 1
    # The broken twin: shares by position in a folder, as if its files were a list.
    monkeypatch.setattr("datalens.private.shares.check_fixed_positions", lambda records: None)
    folders_ = [opened("folder", tmp_path / name, some) for name, some in (("c", before), ("d", after))]
    moved = votes_move(*folders_)
    assert moved > 1.2
