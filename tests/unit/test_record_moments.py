"""Private moments: a record's row is a function of that record alone, to the last bit, and never too long."""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datalens.bounded.contributions import BoundedSum
from datalens.data import records as records_module
from datalens.data.records import Dataset
from datalens.data.schema import Schema
from datalens.methods import moments as method
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.plans.registry import make_plan
from datalens.privacy.ledger import Ledger
from datalens.privacy.released import Released
from datalens.private import moments
from datalens.private.moments import FINE, RecordRows, record_features
from datalens.private.shares import Rows
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released import moments as released_moments
from datalens.run import live

SIDE, CLASSES, COUNT, SIZE = 12, 3, 40, 10
SHAPE = (1, SIDE, SIDE)
GRID, COUNTED = 2**14, 2**13
SCHEMA = Schema(name="m", height=SIDE, width=SIDE, channels=1, classes=("a", "b", "c"), nominal_size=COUNT)
TEXTURE = Texture(SHAPE)

HERE = Place(device=torch.device("cpu"), folder=Path("nowhere"))


def images(count: int = COUNT, *, shape: tuple[int, int, int] = SHAPE, seed: int = 1) -> np.ndarray:
    """Noise, flat, black and white, and black, in turn: what a batch does to a sum would show in one of them."""
    channels, height, width = shape
    drawn = np.random.default_rng(seed).integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    drawn[1::4] = drawn[1::4, :1, :1]
    drawn[2::4] = (drawn[2::4] > 127) * np.uint8(255)
    drawn[3::8] = 0
    return drawn


IMAGES = images()
LABELS = np.random.default_rng(2).integers(0, 2, COUNT)  # no record of class c


def gather(pixels: np.ndarray = IMAGES, labels: np.ndarray = LABELS) -> RecordRows:
    data = Dataset(schema=SCHEMA, images=pixels, labels=labels)
    return RecordRows.gather(data, basis=make_basis("opponent", SHAPE, SIZE), texture=TEXTURE)


# --- features -------------------------------------------------------------------------------------

SHAPES = [(channels, side, side) for channels in (1, 3) for side in (28, 32, 64)]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 6, 6), (3, 9, 31), (1, 130, 70)])
def test_features_are_the_same_bits_in_any_company(shape: tuple[int, int, int]) -> None:
    pixels = torch.from_numpy(images(100, shape=shape))
    features = functools.partial(record_features, basis=make_basis("opponent", shape, 48), texture=Texture(shape))
    whole = features(pixels)
    assert whole.dtype == torch.int32
    assert len(whole.unique(dim=0)) > 60  # black images are alike
    for place in (0, 2, 41, 99):
        assert torch.equal(features(pixels[place : place + 1])[0], whole[place])
    for start, end in ((0, 7), (40, 47), (93, 100)):
        assert torch.equal(features(pixels[start:end]), whole[start:end])
    order = torch.from_numpy(np.random.default_rng(0).permutation(100))
    assert torch.equal(features(pixels[order]), whole[order])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_before_they_are_rounded_features_are_the_same_bits_too(shape: tuple[int, int, int]) -> None:
    """Rounding would hide a last bit that depends on the company nearly always, and nearly is not enough."""
    pixels = torch.from_numpy(images(100, shape=shape)).permute(0, 3, 1, 2).double().contiguous()
    basis, texture = make_basis("opponent", shape, 48), Texture(shape)
    coordinates, features = basis.forward(pixels), texture(pixels, full=255.0)
    for start, end in ((0, 1), (2, 3), (40, 47), (93, 100)):
        assert torch.equal(basis.forward(pixels[start:end]), coordinates[start:end])
        assert torch.equal(texture(pixels[start:end], full=255.0), features[start:end])
    # Why: whole pixels times these are whole, so their sums are exact in any order.
    assert basis.rows is not None
    whole = basis.rows.double() * 2**26
    assert torch.equal(whole, whole.round())
    assert float((whole.abs() @ torch.full((whole.shape[1],), 255.0, dtype=torch.float64)).max()) < 2**53


@pytest.mark.parametrize("threads", [1, 2])
def test_features_do_not_depend_on_threads(threads: int) -> None:
    pixels, before = torch.from_numpy(images(9, shape=(3, 32, 32))), torch.get_num_threads()
    features = functools.partial(
        record_features, basis=make_basis("opponent", (3, 32, 32), 48), texture=Texture((3, 32, 32))
    )
    try:
        torch.set_num_threads(threads)
        found = features(pixels)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, torch.cat([features(one[None]) for one in pixels]))


def test_features_are_what_they_are_called() -> None:
    """Coordinates, then texture, in units of 1/FINE of full brightness."""
    basis = make_basis("opponent", SHAPE, SIZE)
    pixels = torch.from_numpy(IMAGES)
    found = record_features(pixels, basis=basis, texture=TEXTURE).to(torch.float64) / FINE
    bright = pixels.permute(0, 3, 1, 2).to(torch.float64) / 255
    expected = torch.cat([basis.forward(bright), TEXTURE(bright)], dim=1)
    assert (found - expected).abs().max() <= 0.5 / FINE + 1e-9
    assert float(found[0].abs().max()) > 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_how_the_stream_is_cut_does_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gather()
    monkeypatch.setattr(records_module, "block_records", lambda schema: size)
    found = gather()
    assert (found.count, found.fingerprint) == (expected.count, expected.fingerprint)
    for ask in ASKS.values():
        assert torch.equal(ask(found).private_total, ask(expected).private_total)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("memory", [0, 2**28])
def test_neither_threads_nor_the_place_of_rows_matter(
    threads: int, memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In memory or in a file, in one thread or several, cut into few groups or many: the same whole numbers."""
    expected, before = gather(), torch.get_num_threads()
    wanted = {kind: ask(expected).private_total for kind, ask in ASKS.items()}
    monkeypatch.setattr(moments, "CHUNK", 7)
    monkeypatch.setattr(records_module, "block_records", lambda schema: 3)
    monkeypatch.setattr(moments, "EXACT", 9)
    data = Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS)
    try:
        torch.set_num_threads(threads)
        basis = make_basis("opponent", SHAPE, SIZE)
        found = RecordRows.gather(data, basis=basis, texture=TEXTURE, folder=tmp_path, memory=memory)
        assert torch.get_num_threads() == threads
        assert (found.in_file, list(tmp_path.iterdir())) == (memory == 0, [])  # a file without a name
        assert found.fingerprint == expected.fingerprint
        for kind, ask in ASKS.items():
            assert torch.equal(ask(found).private_total, wanted[kind]), kind
    finally:
        torch.set_num_threads(before)


def test_a_device_computes_what_the_processor_does(tmp_path: Path) -> None:
    """At toy size the device is the processor; `benchmarks.cores rows` compares a GPU with it."""
    basis, device = make_basis("opponent", SHAPE, SIZE), torch.device("cpu")
    assert moments.same_rows_on(device, SCHEMA, basis=basis, texture=TEXTURE)
    data = Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS)
    found, expected = RecordRows.gather(data, basis=basis, texture=TEXTURE, device=device), gather()
    for kind, ask in ASKS.items():
        assert torch.equal(ask(found).private_total, ask(expected).private_total), kind


def test_a_device_that_rounds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Rounding(Texture):
        def __call__(self, pixels: Tensor, *, full: float = 1.0) -> Tensor:
            return super().__call__(pixels, full=full) + (0.3 / FINE if len(calls) else 0)

    real, calls = moments.record_features, []

    def features(pixels: Tensor, **how: Any) -> Tensor:
        found = real(pixels, basis=how["basis"], texture=Rounding(SHAPE))
        calls.append(0)
        return found

    monkeypatch.setattr(moments, "record_features", features)
    assert not moments.same_rows_on(
        torch.device("cpu"), SCHEMA, basis=make_basis("opponent", SHAPE, SIZE), texture=TEXTURE
    )
    monkeypatch.setattr(moments, "record_features", real)
    monkeypatch.setattr(method, "same_rows_on", lambda *args, **kwargs: False)
    data = Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS)
    settings = make_plan(TrainOptions(out=Path("unused"), epsilon=math.inf), SCHEMA)[1]
    gpu = dataclasses.replace(HERE, device=torch.device("cuda"))
    assert method.gather(data, settings, gpu).fingerprint == gather().fingerprint
    assert "the records are summed without it" in capsys.readouterr().err


def test_the_fingerprint_is_of_the_records_and_not_of_their_order() -> None:
    order, other = np.random.default_rng(1).permutation(COUNT), IMAGES.copy()
    other[7, 3, 3] ^= 1
    assert gather(IMAGES[order], LABELS[order]).fingerprint == gather().fingerprint
    assert gather(other).fingerprint != gather().fingerprint
    assert gather(IMAGES, 1 - LABELS).fingerprint != gather().fingerprint
    parts = gather(IMAGES[:9], LABELS[:9]).fingerprint + gather(IMAGES[9:], LABELS[9:]).fingerprint
    assert parts % 2**256 == gather().fingerprint


@pytest.mark.parametrize(("shape", "kind"), [((28, 28, 1), torch.int16), ((32, 32, 3), torch.int32)])
def test_rows_are_stored_in_numbers_that_are_large_enough(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    height, width, channels = shape
    schema = dataclasses.replace(SCHEMA, height=height, width=width, channels=channels)
    assert moments.stored_type(schema) == kind
    extreme = images(64, shape=schema.shape)
    extreme[0], extreme[1, ::2], extreme[2, :, ::2] = 255, 255, 255
    rows = record_features(
        torch.from_numpy(extreme), basis=make_basis("opponent", schema.shape, 48), texture=Texture(schema.shape)
    )
    assert torch.equal(rows.to(kind).to(torch.int32), rows)
    assert int(rows.max()) > 25_000


# --- every kind of sum ----------------------------------------------------------------------------

EDGES = torch.cat([torch.zeros(1), torch.logspace(-1, 1, 8)]).to(torch.float64)
CENTRE = TEXTURE(torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255).mean(dim=0)
WHITE = torch.randn(TEXTURE.size, 6, generator=torch.Generator().manual_seed(3))
MEANS = torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(4))
TEXTURE_MEANS = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(5))


def coordinates(records: RecordRows) -> moments.View:
    return records.coordinates


def whitened(records: RecordRows) -> moments.View:
    return functools.partial(records.texture, centre=CENTRE, white=WHITE)


def histogram(view: Callable[[RecordRows], moments.View], means: Tensor | None) -> Callable[[RecordRows], BoundedSum]:
    return lambda records: records.histogram(view(records), means=means, edges=EDGES, grid=GRID)


def sums(view: Callable[[RecordRows], moments.View]) -> Callable[[RecordRows], BoundedSum]:
    return lambda records: records.sums(view(records), clip=2.5, classes=CLASSES, grid=GRID, counted=COUNTED)


def covariances(view: Callable[[RecordRows], moments.View], means: Tensor) -> Callable[[RecordRows], BoundedSum]:
    return lambda records: records.covariances(view(records), means=means, clip=2.5, grid=GRID)


ASKS: dict[str, Callable[[RecordRows], BoundedSum]] = {
    "norms": histogram(coordinates, None),
    "sums": sums(coordinates),
    "residual-norms": histogram(coordinates, MEANS),
    "covariances": covariances(coordinates, MEANS),
    "texture-norms": histogram(whitened, None),
    "texture-sums": sums(whitened),
    "texture-residual-norms": histogram(whitened, TEXTURE_MEANS),
    "texture-covariances": covariances(whitened, TEXTURE_MEANS),
}
kinds = pytest.mark.parametrize("kind", ASKS)


def total(kind: str, pixels: np.ndarray = IMAGES, labels: np.ndarray = LABELS) -> Tensor:
    return ASKS[kind](gather(pixels, labels)).private_total


def squares(row: Tensor) -> int:
    """In Python's integers: exact whatever the size."""
    return sum(value * value for value in row.flatten().tolist())


def without(place: int) -> tuple[np.ndarray, np.ndarray]:
    return np.delete(IMAGES, place, axis=0), np.delete(LABELS, place)


@kinds
@pytest.mark.parametrize("size", [1, 7, 39, 4096])
def test_one_record_more_adds_its_own_row_and_nothing_else(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, in the middle and at the end: chunks behind it shift, and nothing of the others changes."""
    monkeypatch.setattr(moments, "CHUNK", size)
    bound = ASKS[kind](gather()).l2_bound
    assert bound == (GRID**2 if kind.endswith("covariances") else GRID)
    everyone = total(kind)
    for place in (0, 6, 19, 38, COUNT - 1):
        row = everyone - total(kind, *without(place))
        alone = total(kind, IMAGES[place : place + 1], LABELS[place : place + 1])
        assert torch.equal(row, alone)
        assert 0 < squares(row) <= bound**2


@kinds
def test_rows_are_nearly_as_long_as_the_bound_allows(kind: str) -> None:
    """A bound that nothing comes near would be paid for and not used."""
    bound = ASKS[kind](gather()).l2_bound
    longest = max(squares(total(kind, IMAGES[place : place + 1], LABELS[place : place + 1])) for place in range(COUNT))
    assert 0.99 < longest / bound**2 <= 1


@kinds
def test_replacing_a_record_moves_the_sum_by_no_more_than_the_diameter(kind: str) -> None:
    diameter, found = ASKS[kind](gather()).diameter, []
    others, labels = images(12, seed=9), np.arange(12) % CLASSES
    before = total(kind)
    for place in range(12):
        pixels, changed = IMAGES.copy(), LABELS.copy()
        pixels[place], changed[place] = others[place], labels[place]
        found.append(math.sqrt(squares(total(kind, pixels, changed) - before)))
    assert max(found) <= diameter
    assert max(found) > 0.5 * diameter
    assert diameter < 1.5 * ASKS[kind](gather()).l2_bound or kind.endswith("sums")


@kinds
def test_the_order_of_records_does_not_matter(kind: str) -> None:
    order = np.random.default_rng(1).permutation(COUNT)
    assert torch.equal(total(kind, IMAGES[order], LABELS[order]), total(kind))


@kinds
def test_no_records_and_an_absent_class(kind: str) -> None:
    everyone = total(kind)
    nobody = total(kind, IMAGES[:0], LABELS[:0])
    assert nobody.shape == everyone.shape
    assert nobody.dtype == everyone.dtype == torch.int64
    assert not nobody.any()
    if not kind.endswith("norms"):
        assert len(everyone) == CLASSES
        assert everyone[:2].any(dim=1).all()
        assert not everyone[2].any()  # and it is there: it gets its noise like the others


@kinds
def test_the_label_says_in_which_cells_a_row_lies(kind: str) -> None:
    place = 4
    rows = [total(kind, IMAGES[place : place + 1], np.array([label])) for label in range(CLASSES)]
    for label, row in enumerate(rows):
        if not kind.endswith("norms"):
            assert row.any(dim=1).nonzero().flatten().tolist() == [label]
        elif not kind.endswith("residual-norms"):  # of a norm alone
            assert torch.equal(row, rows[0])
    if kind.endswith("sums"):
        assert torch.equal(rows[0][0], rows[2][2])
    if kind.endswith("covariances"):  # around another mean
        assert not torch.equal(rows[0][0], rows[2][2])


def test_histograms_count_and_sums_count() -> None:
    assert int(total("norms").sum()) == COUNT * GRID
    counts = total("sums")[:, -1].tolist()
    assert counts == [COUNTED * int((label == LABELS).sum()) for label in range(CLASSES)]


def test_a_histogram_by_hand() -> None:
    stored = record_features(torch.from_numpy(IMAGES), basis=make_basis("opponent", SHAPE, SIZE), texture=TEXTURE)
    residuals = stored[:, :SIZE].double() / FINE - MEANS[LABELS]
    found = np.histogram(residuals.norm(dim=1).clamp(max=float(EDGES[-1])).numpy(), bins=EDGES.numpy())[0]
    assert (total("residual-norms")[0].numpy() == found * GRID).all()


def test_sums_and_covariances_by_hand() -> None:
    """In floating point, without a grid: the same up to what truncation takes, a unit a coordinate and record."""
    stored = record_features(torch.from_numpy(IMAGES), basis=make_basis("opponent", SHAPE, SIZE), texture=TEXTURE)
    values = stored[:, :SIZE].double() / FINE

    def clipped(rows: Tensor) -> Tensor:
        return rows * (2.5 / rows.norm(dim=1, keepdim=True).clamp(min=2.5))

    mine = torch.from_numpy(LABELS) == 1
    room = int(math.sqrt(GRID**2 - COUNTED**2))
    found = total("sums")[1, :-1].double() / room * 2.5
    assert (found - clipped(values[mine]).sum(dim=0)).abs().max() < COUNT * 2.5 / room
    residuals = clipped(values[mine] - MEANS[1])
    found = total("covariances")[1].view(SIZE, SIZE).double() / GRID**2 * 2.5**2
    assert (found - residuals.T @ residuals).abs().max() < COUNT * 2 * 2.5**2 / GRID + 0.02


@pytest.mark.parametrize("kind", ["sums", "covariances", "texture-norms", "texture-covariances"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_released_values_of_any_kind_leave_rows_bounded(kind: str, value: float) -> None:
    """Means and whitening come out of noise, and of arithmetic on it: whatever they are, the bound holds."""
    records = gather(IMAGES[:1], LABELS[:1])
    broken = torch.full_like(MEANS, value, dtype=torch.float64)
    white = WHITE.double()
    white[0] = value

    def view(stored: Tensor) -> Tensor:
        return records.texture(stored, centre=CENTRE, white=white)

    found = {
        "sums": lambda: records.sums(view, clip=1.0, classes=CLASSES, grid=GRID, counted=COUNTED),
        "covariances": lambda: records.covariances(records.coordinates, means=broken, clip=1.0, grid=GRID),
        "texture-norms": lambda: records.histogram(view, means=None, edges=EDGES, grid=GRID),
        "texture-covariances": lambda: records.covariances(view, means=TEXTURE_MEANS, clip=1.0, grid=GRID),
    }[kind]()
    assert squares(found.private_total) <= found.l2_bound**2


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e6, 1e9, 1e15])
def test_a_whitened_row_is_the_same_in_any_company_however_steep_the_whitening(factor: float) -> None:
    """Where first images hardly differ, whitening magnifies: sums must stay exact, or rows would depend on others."""
    texture = Texture((1, 28, 28))
    stored = torch.from_numpy(np.random.default_rng(6).integers(-(2**15), 2**15, (100, texture.size))).double()
    records = RecordRows(Rows.of(stored[:0]), torch.zeros(0, dtype=torch.int64), coordinates=0, fingerprint=0)
    white = torch.randn(texture.size, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * factor
    view = functools.partial(records.texture, centre=torch.zeros(texture.size), white=white)
    whole = view(stored)
    assert whole.any()
    assert (whole == whole.round()).all()
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(20, 90)):
        assert torch.equal(view(stored[rows].clone()), whole[rows])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 128, 128)])
def test_features_are_as_small_as_exact_sums_need_them(shape: tuple[int, int, int]) -> None:
    """What `STEEPEST` rests on."""
    texture = Texture(shape)
    pixels = torch.from_numpy(images(20, shape=shape))
    found = record_features(pixels, basis=make_basis("opponent", shape, 1), texture=texture)[:, 1:]
    assert int(found.abs().max()) < 2**14  # twice around a centre
    assert texture.size < 2**10
    assert 2**15 * texture.size * moments.STEEPEST < 2**53


# --- what is asked of records ---------------------------------------------------------------------


class Asked:
    """Records that write down what they are asked for: every number that reaches a row."""

    def __init__(self, records: RecordRows) -> None:
        self._records = records
        self.coordinates, self.texture = records.coordinates, records.texture
        self.asked: list[dict[str, object]] = []

    def __getattr__(self, name: str) -> Callable[..., BoundedSum]:
        def noted(view: functools.partial[Tensor], **options: object) -> BoundedSum:
            seen = {**getattr(view, "keywords", {}), **options}
            self.asked.append(
                {key: value.tolist() if isinstance(value, Tensor) else value for key, value in seen.items()}
            )
            found: BoundedSum = getattr(self._records, name)(view, **options)
            return found

        return noted


@dataclass
class OneRun:
    """As much of a run as the method asks for; `told` are releases to give out instead of its own."""

    ledger: Ledger
    told: list[Released] | None = None
    schema: Schema = SCHEMA
    completed: int = 0
    noise_seed: None = None
    released: list[Released] = field(default_factory=list)

    @property
    def journal(self) -> "OneRun":
        return self

    def find(self, ledger: Ledger, *, step: int) -> None:
        pass

    def save(self, found: Released) -> None:
        self.released.append(found)

    def log(self, step: int, **values: float) -> None:
        pass

    def preview(self, *given: object, **named: object) -> None:
        pass

    def watched(self, what: str, total: int) -> AbstractContextManager[live.View]:
        return live.view(what, total, self.ledger)

    def release(self, contributions: BoundedSum, ledger: Ledger, *, step: int) -> Released:
        assert self.told is not None
        ledger.charge(self.told[step].event)
        return self.told[step]


def test_what_is_asked_and_what_is_made_depend_on_what_was_released_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data sets that have nothing in common, and by a miracle of noise the same releases: all else is the same."""
    monkeypatch.setattr(released_moments, "WHITENING", 400)
    options = TrainOptions(data="m", out=Path("nowhere"), epsilon=50.0)
    budget, planned = make_plan(options, SCHEMA)
    settings = dataclasses.replace(planned, coordinates=SIZE, texture=6, noise="gaussian")
    first = OneRun(ledger=Ledger.in_memory(budget))
    many = Asked(gather(images(300), np.arange(300) % CLASSES))
    model = method.train(first, many, settings, HERE)  # type: ignore[arg-type]
    assert len(first.released) == len(many.asked) == 8
    assert first.ledger.spent() == pytest.approx(50.0, abs=0.01)

    second = OneRun(ledger=Ledger.in_memory(budget), told=first.released)
    monkeypatch.setattr(method, "make_mechanism", lambda sigma, noise: second)
    few = Asked(gather(images(5, seed=77), np.zeros(5, dtype=np.int64)))
    again = method.train(second, few, settings, HERE)  # type: ignore[arg-type]
    assert few.asked == many.asked
    assert {"means", "clip", "edges", "centre", "white", "grid", "counted", "classes"} <= set().union(*many.asked)
    for name, tensor in model.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
