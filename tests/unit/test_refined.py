"""The second stage: what a record adds to a step, what it costs, and what is caught if it is done wrong."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from datalens.bounded import whole_rows
from datalens.bounded.whole_rows import GRID, WholeSum
from datalens.data.records import Dataset
from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.gradients.rows import RowEngine
from datalens.methods import refined
from datalens.methods.refined import Maker, RefinedRecords, RefinedSettings, Trainer
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.plans.registry import make_plan, read_settings
from datalens.privacy.accountant import Accountant
from datalens.privacy.dpsgd import GradientGate
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SeededNoise
from datalens.private.moments import RecordRows
from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released import denoiser
from datalens.released.denoiser import Linear, Network, facts_of, fresh_network, noise_levels
from datalens.released.moments import MomentModel, Start, without_texture

SCHEMA = Schema(name="toy", height=8, width=8, channels=1, classes=("a", "b", "c"), nominal_size=200)
CPU = torch.device("cpu")


def planned(schema: Schema = SCHEMA, **options) -> tuple[Budget, RefinedSettings]:
    given = {"epsilon": 10.0, "data": "toy", "refine": "diffusion", "refine_steps": 4, "pretraining": 2} | options
    budget, settings = make_plan(TrainOptions(out=Path("x"), **given), schema)
    assert isinstance(settings, RefinedSettings)
    return budget, settings


def start_of(settings: RefinedSettings, schema: Schema = SCHEMA) -> Start:
    random, size = torch.Generator().manual_seed(1), settings.coordinates
    factors = 0.1 * torch.randn(len(schema.classes), size, size, generator=random)
    return Start(shape=schema.shape, means=torch.rand(len(schema.classes), size, generator=random), factors=factors)


def data_of(count: int, schema: Schema = SCHEMA, *, ids: list[str] | None = None) -> Dataset:
    random = np.random.default_rng(0)
    return Dataset(
        schema=schema,
        images=random.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8),
        labels=random.integers(0, 3, count),
        ids=None if ids is None else np.array(ids, dtype=object),
    )


def gathered(data: Dataset, settings: RefinedSettings, tmp_path: Path) -> RefinedRecords:
    return refined.gather(data, settings, Place(device=CPU, folder=tmp_path))


def trainer(settings: RefinedSettings, data: RefinedRecords | None, tmp_path: Path, *, schema: Schema = SCHEMA):
    budget, _ = planned(schema)
    ledger = Ledger.create(
        tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", dataclasses.replace(budget, epsilon=math.inf)
    )
    gate = GradientGate(ledger, refined.schedule_of(settings, schema), SeededNoise(0))
    network = fresh_network(settings.shape_for(schema), 0)
    with torch.no_grad():
        for value in network.parameters():
            value += 0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    return Trainer(
        network, gate, data, Maker(linear=Linear(start=start_of(settings)), settings=settings, schema=schema)
    )


def without(data: Dataset, gone: list[int]) -> Dataset:
    kept = np.setdiff1d(np.arange(len(data.images)), gone)
    ids = None if data.ids is None else data.ids[kept]
    return dataclasses.replace(data, images=data.images[kept], labels=data.labels[kept], ids=ids)


def sum_of(settings: RefinedSettings, data: Dataset, tmp_path: Path, *, schema: Schema = SCHEMA) -> torch.Tensor:
    """The sum of everybody's rows."""
    records = gathered(data, settings, tmp_path)
    return trainer(settings, records, tmp_path, schema=schema)._sum(torch.arange(records.units), 0)._total


# --- what one record, or person, adds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 4])
def test_a_record_that_goes_takes_its_own_row_with_it_and_nothing_else(tmp_path: Path, copies: int) -> None:
    """So every other record's row is the same to the last bit, though each of them has another place."""
    _, settings = planned(refine_copies=copies)
    data = data_of(45)
    whole = sum_of(settings, data, tmp_path)
    for gone in (0, 17, 44):
        rest = sum_of(settings, without(data, [gone]), tmp_path)
        alone = sum_of(settings, without(data, [i for i in range(45) if i != gone]), tmp_path)
        assert torch.equal(whole - rest, alone)
        assert 0.9 * GRID < float(alone.norm()) <= GRID


def test_the_sum_does_not_depend_on_the_order_of_records_or_on_threads(tmp_path: Path) -> None:
    _, settings = planned()
    data = data_of(40)
    order = np.random.default_rng(1).permutation(40)
    turned = dataclasses.replace(data, images=data.images[order], labels=data.labels[order])
    whole, before = sum_of(settings, data, tmp_path), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(sum_of(settings, turned, tmp_path), whole)
    finally:
        torch.set_num_threads(before)


def test_a_record_may_have_more_copies_than_a_chunk_has_images() -> None:
    _, settings = planned(refine_copies=20)
    refined.check_places(settings, SCHEMA)


def test_a_row_is_the_mean_of_the_gradients_of_a_records_copies(tmp_path: Path) -> None:
    """The broken twin: a row for each copy, which is as if the record were there several times."""
    one, four = planned()[1], planned(refine_copies=4)[1]
    data = data_of(1)
    row = sum_of(four, data, tmp_path)
    assert 0.9 * GRID < float(row.norm()) <= GRID
    assert not torch.equal(row, sum_of(one, data, tmp_path))
    assert float(sum(sum_of(one, data, tmp_path) for _ in range(4)).norm()) > 2 * GRID


def test_copies_have_noise_levels_from_all_parts_of_the_distribution() -> None:
    """The broken twin: levels drawn as for one copy, which leave parts of the distribution out."""
    normal = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    quarters = torch.special.ndtr(refined._spread(normal)).mul(4).floor()
    assert torch.equal(quarters, torch.arange(4.0).expand(500, 4))
    assert not torch.equal(torch.special.ndtr(normal).mul(4).floor().sort(dim=1).values, quarters)
    assert 0.95 < float(refined._spread(normal).std()) < 1.05


def test_the_way_of_a_gpu_gives_the_same_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger chunks, one after the other: how a convolution rounds may change with the size of a chunk, not more."""
    _, settings = planned()
    data = data_of(90)
    expected = sum_of(settings, data, tmp_path)
    monkeypatch.setattr(refined, "chunk_on", lambda device, copies: 32)
    monkeypatch.setattr(refined, "each_on", lambda device: map)
    found = sum_of(settings, data, tmp_path)
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.999
    half = sum_of(settings, without(data, list(range(45))), tmp_path)
    assert torch.nn.functional.cosine_similarity(half, expected, dim=0) < 0.99


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_a_record_takes_its_own_row_with_it(tmp_path: Path) -> None:
    _, settings = planned(refine_copies=2)
    refined.check_places(settings, SCHEMA, torch.device("cuda"))


def test_a_person_has_one_row_whatever_the_number_of_their_images(tmp_path: Path) -> None:
    schema = dataclasses.replace(SCHEMA, record_unit=PERSON)
    _, settings = planned(schema)
    ids = ["p"] * 30 + [f"q{i // 2}" for i in range(12)]
    data = data_of(42, schema, ids=ids)
    whole = sum_of(settings, data, tmp_path, schema=schema)
    rest = sum_of(settings, without(data, list(range(30))), tmp_path, schema=schema)
    assert 0.9 * GRID < float((whole - rest).norm()) <= GRID
    turned = dataclasses.replace(data, images=data.images[::-1], labels=data.labels[::-1], ids=data.ids[::-1])
    assert torch.equal(sum_of(settings, turned, tmp_path, schema=schema), whole)
    # The broken twin: an image, not a person, has a row.
    images = dataclasses.replace(data, schema=SCHEMA, ids=None)
    twin = sum_of(settings, images, tmp_path) - sum_of(settings, without(images, list(range(30))), tmp_path)
    assert float(twin.norm()) > 2 * GRID


def test_which_image_of_a_person_is_used_changes_with_the_step(tmp_path: Path) -> None:
    schema = dataclasses.replace(SCHEMA, record_unit=PERSON)
    _, settings = planned(schema)
    records = gathered(data_of(40, schema, ids=[f"p{i // 10}" for i in range(40)]), settings, tmp_path)
    drawn = {tuple(records.chosen(torch.arange(4), seed=0, step=step)[2].tolist()) for step in range(8)}
    assert len(drawn) == 8
    for keys in drawn:
        for person, key in enumerate(keys):
            assert key in records.keys[10 * person : 10 * person + 10]


class Mixing(torch.nn.Module):
    """The broken twin: its output for one image depends on the others."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.inner = network

    def forward(self, inputs: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        found = self.inner(inputs, facts)
        return found + found.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("copies", [1, 3, 7])
def test_it_is_tried_whether_rows_depend_on_their_place(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    _, settings = planned(refine_copies=copies)  # chunks of 16, 5 and 2 records
    refined.check_places(settings, SCHEMA)  # this machine does it right
    engine = refined.RowEngine
    monkeypatch.setattr(refined, "RowEngine", lambda network, **facts: engine(Mixing(network), **facts))
    with pytest.raises(DatalensError, match="nothing was charged: use --refine off"):
        refined.check_places(settings, SCHEMA)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_it_is_tried_as_it_is_done_with_one_core_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = planned()
    cores: list[int] = []
    monkeypatch.setattr(refined, "rounds_alike", lambda *_: cores.append(torch.get_num_threads()) or True)
    refined.check_places(settings, SCHEMA)
    assert cores == [1]


@pytest.mark.usefixtures("two_threads")
def test_threads_of_later_steps_use_the_engines_of_earlier_ones(tmp_path: Path) -> None:
    """An engine for each new thread would take all memory in a long run."""
    _, settings = planned()
    one = trainer(settings, gathered(data_of(64), settings, tmp_path), tmp_path)
    for step in range(4):
        one._sum(torch.arange(64), step)
    assert len(one._engines._idle) <= 2


@pytest.mark.parametrize("person", [False, True])
def test_no_records_have_a_sum_too(tmp_path: Path, person: bool) -> None:
    """A run on nothing goes like any other: it must not say, before it is charged, that there is nothing."""
    schema = dataclasses.replace(SCHEMA, record_unit=PERSON) if person else SCHEMA
    _, settings = planned(schema)
    data = data_of(0, schema, ids=[] if person else None)
    assert not sum_of(settings, data, tmp_path, schema=schema).any()


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 9, 11), (3, 64, 48)])
def test_images_of_all_sizes_go_through_the_network(shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    schema = dataclasses.replace(SCHEMA, height=height, width=width, channels=channels)
    _, settings = planned(schema, coordinates=20, texture=0)
    refined.check_places(settings, schema)


def test_a_row_that_is_not_measured_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the bound: a gradient that is taken for a short one. The same look as above finds it."""
    _, settings = planned()
    data = data_of(20)
    monkeypatch.setattr(whole_rows, "_squares", lambda part: torch.zeros(len(part), dtype=torch.float64))
    moved = sum_of(settings, data, tmp_path) - sum_of(settings, without(data, [3]), tmp_path)
    assert float(moved.norm()) > 2 * GRID


def clipped_after_adding(patch: pytest.MonkeyPatch) -> None:
    """The broken twin of a bound on every row: rows are added as they are, and their sum is clipped."""

    def raw(self: WholeSum, gradients: torch.Tensor, weights: torch.Tensor) -> None:
        self._total += GRID * (gradients.to(torch.float64) * weights.unsqueeze(1)).sum(dim=0)

    def clipped(self: Trainer, sample: torch.Tensor, number: int, *, real=Trainer._sum) -> WholeSum:  # type: ignore[no-untyped-def]
        found = real(self, sample, number)
        found._total = (found._total * min(1.0, GRID / max(float(found._total.norm()), 1e-9))).trunc()
        return found

    patch.setattr(WholeSum, "add", raw)
    patch.setattr(Trainer, "_sum", clipped)


def moved_by_others(settings: RefinedSettings, tmp_path: Path) -> bool:
    """Whether a record that goes takes more or less than its own row with it."""
    data = data_of(20)
    whole, rest = sum_of(settings, data, tmp_path), sum_of(settings, without(data, [3]), tmp_path)
    alone = sum_of(settings, without(data, [i for i in range(20) if i != 3]), tmp_path)
    return not torch.equal(whole - rest, alone)


def test_a_sum_that_is_clipped_instead_of_its_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = planned()
    assert not moved_by_others(settings, tmp_path)
    clipped_after_adding(monkeypatch)
    assert moved_by_others(settings, tmp_path)


def shuffled_batches(patch: pytest.MonkeyPatch) -> None:
    """The broken twin of Poisson samples: a shuffled order, cut into batches of one size."""
    order: list[int] = []

    def batch(noise: SeededNoise, count: int, rate: float) -> np.ndarray:
        size = round(rate * count)
        if len(order) < size:
            order[:] = np.argsort(noise.words(count)).tolist()
        return np.array([order.pop() for _ in range(size)])

    patch.setattr(refined, "poisson_sample", batch)


def samples_of(
    settings: RefinedSettings, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[set[int]]:
    """The samples of these steps, whose sums are not computed."""
    one, samples = trainer(settings, gathered(data_of(150), settings, tmp_path), tmp_path), list[set[int]]()
    nothing = WholeSum(one._rule, one._layout.size, device=CPU)
    monkeypatch.setattr(one, "_sum", lambda sample, number: samples.append(set(sample.tolist())) or nothing)
    for step in range(steps):
        one._total(step)
    return samples


def drawn_one_by_one(samples: list[set[int]], units: int, rate: float) -> bool:
    """Whether sizes vary as those of Poisson samples do, and a unit may be in two samples that follow each other."""
    variance = units * rate * (1 - rate)
    varied = 0.6 * variance < float(np.var([len(sample) for sample in samples])) < 1.6 * variance
    again = np.mean([len(one & other) for one, other in itertools.pairwise(samples)])
    return varied and 0.7 < float(again) / (units * rate**2) < 1.3


def test_a_shuffled_order_is_not_taken_for_poisson_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = planned(refine_batch=40)
    rate = refined.schedule_of(settings, SCHEMA).rate
    assert drawn_one_by_one(samples_of(settings, 200, tmp_path, monkeypatch), 150, rate)
    shuffled_batches(monkeypatch)
    assert not drawn_one_by_one(samples_of(settings, 200, tmp_path, monkeypatch), 150, rate)


def test_noise_by_place_changes_the_rows_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of noise that follows from a hash of the record: the first look above finds it."""
    _, settings = planned()
    data, normal = data_of(20), streams.normal
    monkeypatch.setattr(
        refined.streams,
        "normal",
        lambda *path, teachers, count: normal(*path, teachers=torch.arange(len(teachers)), count=count),
    )
    moved = sum_of(settings, data, tmp_path) - sum_of(settings, without(data, [3]), tmp_path)
    alone = sum_of(settings, without(data, [i for i in range(20) if i != 3]), tmp_path)
    assert not torch.equal(moved, alone)
    assert float(moved.norm()) > GRID


def test_every_step_has_its_own_sample_and_its_own_noise(tmp_path: Path) -> None:
    _, settings = planned()
    one = trainer(settings, gathered(data_of(150), settings, tmp_path), tmp_path)
    samples, noises = [], []
    real_sum, real_release = one._sum, one._gate.release

    def watched_sum(sample: torch.Tensor, number: int) -> WholeSum:
        samples.append(tuple(sample.tolist()))
        return real_sum(sample, number)

    def watched_release(total):  # type: ignore[no-untyped-def]
        found = real_release(total)
        noises.append(found.value[0] - total.private_total[0].numpy())
        return found

    one._sum, one._gate.release = watched_sum, watched_release  # type: ignore[method-assign]
    for step in range(4):
        one.step(step)
    assert len(set(samples)) == 4
    assert len({len(sample) for sample in samples}) > 1  # a shuffle would have one size
    sigma = refined.schedule_of(settings, SCHEMA).sigma * GRID
    for i, noise in enumerate(noises):
        assert float(noise.std()) == pytest.approx(sigma, rel=0.02)
        for other in noises[:i]:
            assert abs(float(np.corrcoef(noise, other)[0, 1])) < 0.02  # noise drawn once would be equal
    with pytest.raises(DatalensError, match="all 4 steps of the schedule are charged"):
        one.step(4)


def test_the_second_stage_learns_from_records(tmp_path: Path) -> None:
    """And its broken twin, whose samples are empty, does not."""
    _, settings = planned(refine_steps=15, refine_rate=3e-3)
    settings = dataclasses.replace(settings, sigma=0.01)
    data = data_of(120)
    stripes = np.zeros_like(data.images)
    stripes[:, ::2] = 200
    data = dataclasses.replace(data, images=(stripes + data.images // 6).astype(np.uint8))
    records = gathered(data, settings, tmp_path)

    def loss_after(steps: int, *, empty: bool = False) -> float:
        one = trainer(settings, records, tmp_path)
        for step in range(steps):
            if empty:
                one._gate.noise.words = lambda count: np.full(count, 2**32 - 1, np.uint32)  # type: ignore[method-assign]
            one.step(step)
        network = fresh_network(settings.shape_for(SCHEMA), 0)
        one._layout.put(one._adam.weights, network)
        images, labels, keys = records.chosen(torch.arange(120), seed=0, step=0)
        examples = one._make(images, labels, keys, stage="held out", step=0)
        with torch.no_grad():
            return float(examples.losses(network.to(one._make.kind)).mean())

    before = loss_after(0)
    assert loss_after(15) < 0.6 * before
    assert loss_after(15, empty=True) > 0.9 * before


# --- the linear classifier --------------------------------------------------------------------------------------------


def striped(count: int, *, person: bool = False, shuffled: bool = False) -> Dataset:
    """Images whose stripes tell the class; `shuffled`: labels say nothing."""
    random = np.random.default_rng(3)
    labels = random.integers(0, 3, count)
    images = random.integers(0, 60, (count, 8, 8, 1))
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:: label + 2] += 150
    schema = dataclasses.replace(SCHEMA, record_unit=PERSON) if person else SCHEMA
    ids = np.array([f"p{i // 3}" for i in range(count)], dtype=object) if person else None
    labels = random.permutation(labels) if shuffled else labels
    return Dataset(schema=schema, images=images.astype(np.uint8), labels=labels, ids=ids)


def rows_of(data: Dataset) -> RecordRows:
    return RecordRows.gather(data, basis=make_basis("opponent", (1, 8, 8), 10), texture=Texture((1, 8, 8)), shown=False)


def errors_of(data: Dataset, *, head: torch.Tensor) -> torch.Tensor:
    rows = rows_of(data)
    total = rows.errors(rows.coordinates, head=head, sharpness=10.0, least=0.5, grid=2**12)
    assert total.l2_bound == 2**24
    assert total.row_unit == ("person" if data.schema.by_person else "record")
    return total.private_total.to(torch.float64)


@pytest.mark.parametrize("person", [False, True])
def test_one_unit_moves_the_errors_by_one_row(person: bool) -> None:
    data = striped(60, person=person)
    head = 0.01 * torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    whole = errors_of(data, head=head)
    for gone in ([0, 1, 2], [57, 58, 59]) if person else ([0], [31], [59]):
        rest = errors_of(without(data, gone), head=head)
        alone = errors_of(without(data, [i for i in range(60) if i not in gone]), head=head)
        assert torch.equal(whole - rest, alone)
        assert 0.2 * 2**24 < float(alone.norm()) <= 2**24
    order = np.random.default_rng(0).permutation(60)
    turned = dataclasses.replace(
        data, images=data.images[order], labels=data.labels[order], ids=None if data.ids is None else data.ids[order]
    )
    assert torch.equal(errors_of(turned, head=head), whole)


@pytest.mark.parametrize("person", [False, True])
def test_rows_can_be_kept_as_what_they_are_read_as(person: bool) -> None:
    data = striped(50, person=person)
    rows, head = rows_of(data), torch.zeros(5, 3)

    def first_five(stored: torch.Tensor) -> torch.Tensor:
        return rows.coordinates(stored)[:, :5]

    kept = rows.viewed(first_five, 5)
    limits = {"head": head, "sharpness": 10.0, "least": 0.5, "grid": 2**12}
    direct, again = rows.errors(first_five, **limits), kept.errors(kept.coordinates, **limits)
    assert torch.equal(direct.private_total, again.private_total)
    assert direct.row_unit == again.row_unit


def test_rows_that_are_kept_are_cut_off_where_their_squares_stay_exact() -> None:
    rows = rows_of(striped(20))
    kept = rows.viewed(lambda stored: torch.full((len(stored), 3), 1e12, dtype=torch.float64), 3)
    assert torch.equal(kept.coordinates(kept._read(0, 20)[0]), torch.full((20, 3), 2.0**21, dtype=torch.float64))


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_classifier_learns_and_not_from_labels_that_say_nothing(shuffled: bool) -> None:
    data, head, moving = striped(300, shuffled=shuffled), torch.zeros(10, 3), torch.zeros(10, 3)
    rows = rows_of(data)
    for number in range(30):
        total = rows.errors(rows.coordinates, head=head, sharpness=10.0, least=0.5, grid=2**12)
        moving = 0.9 * moving + total.private_total.view(10, 3) / (2**24 * 300)
        head = head - 8 * (1 - number / 30) * moving
    values = rows.coordinates(rows._read(0, 300)[0]).float()
    right = float(((values @ head).argmax(dim=1) == torch.from_numpy(data.labels)).float().mean())
    assert (right < 0.6) if shuffled else (right > 0.9)


def test_an_image_is_used_for_the_class_that_it_shows() -> None:
    """Labels stay as they were asked for; images change places between them, or are drawn again."""
    start = Start(shape=(1, 8, 8), means=torch.zeros(2, 4), factors=torch.zeros(2, 4, 4))
    network = fresh_network(denoiser.Shape(image=(1, 8, 8), classes=2, wide=8, deep=8, hidden=8), 0)
    empty = {"centre": torch.zeros(0), "white": torch.zeros(0, 0), "maps": torch.zeros(2, 0, 0)}
    first = MomentModel(
        start=start,
        present=torch.arange(2),
        sizes=torch.ones(2),
        before=torch.zeros(2, 0),
        after=torch.zeros(2, 0),
        steps=0,
        **empty,
    )

    class Bright(denoiser.Head):
        """Class 1 is bright."""

        def answers(self, moments: MomentModel, images: torch.Tensor) -> torch.Tensor:
            return (images.mean(dim=(1, 2, 3)) > 0.5).long()

    class Chance(denoiser.DiffusionModel):
        """Images are bright or dark by chance, whatever the label."""

        def _drawn(self, labels: torch.Tensor, random: torch.Generator) -> torch.Tensor:
            return torch.rand(len(labels), 1, 1, 1, generator=random).round().repeat(1, 1, 8, 8)

    labels = torch.arange(400) % 2
    model = Chance(moments=first, network=network, begin=1.0, head=Bright(weights=torch.ones(1, 2)))
    right = (model.images(labels, torch.Generator().manual_seed(0)).mean(dim=(1, 2, 3)).long() == labels).float().mean()
    assert float(right) > 0.98
    without_head = dataclasses.replace(model, head=Bright(weights=torch.zeros(0, 2)))
    again = without_head.images(labels, torch.Generator().manual_seed(0)).mean(dim=(1, 2, 3)).long()
    assert 0.3 < float((again == labels).float().mean()) < 0.7


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_both_stages_together_cost_the_budget_and_no_more(epsilon: float) -> None:
    budget, settings = planned(epsilon=epsilon, refine_steps=20, refine_batch=50)
    plan = [(part.event, part.times) for part in settings.schedule(SCHEMA, budget)]
    price = budget.pricing().price(plan, budget.delta)
    assert budget.accountant == "prv"
    assert 0.98 * epsilon < price <= epsilon
    assert Accountant(name="pld").price(plan, budget.delta) == pytest.approx(price, rel=0.02)
    assert sum(line["share"] for line in settings.costs(SCHEMA, budget)) == pytest.approx(1)
    own = settings.own_budget(budget)
    assert own.epsilon < epsilon
    alone = [(part.event, part.times) for part in settings.of_moments(SCHEMA, budget)]
    assert Accountant(name="exact").price(alone, budget.delta) == pytest.approx(own.epsilon, rel=1e-4)


def test_a_classifier_that_nothing_was_charged_for_is_found() -> None:
    _, settings = planned(coordinates=10, labels_share=0.0)
    assert settings.rounds == 0
    start = Start(shape=(1, 8, 8), means=torch.zeros(3, 10), factors=torch.zeros(3, 10, 10))
    first = without_texture(start, torch.arange(3), torch.ones(3))
    network = fresh_network(settings.shape_for(SCHEMA), 0)
    for rows, problems in ((0, 0), (1, 1)):
        head = denoiser.Head(weights=torch.zeros(rows, 3))
        model = denoiser.DiffusionModel(moments=first, network=network, begin=settings.begin, head=head)
        assert len(settings.wrong_weights(model, [])) == problems


def test_without_a_budget_there_is_no_noise() -> None:
    _, settings = planned(epsilon=math.inf)
    assert settings.sigma == 0


def test_settings_are_read_again_and_nothing_else_is() -> None:
    _, settings = planned(texture=5)
    fields = settings.as_dict()
    assert read_settings(fields) == settings
    for change in (
        {"sigma": -1.0},
        {"moments_share": 1.5},
        {"wide": 100_000},
        {"deep": 65},
        {"labels_share": 0.0},
        {"rounds": 0},
        {"begin": 50.0},
        {"steps": 0},
        {"refine": "x"},
    ):
        with pytest.raises(DatalensError):
            read_settings(fields | change)
    with pytest.raises(DatalensError):
        read_settings({name: value for name, value in fields.items() if name != "sigma"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"relation": "replace-one"}, "add-remove only"),
        ({"accountant": "exact"}, "leave --accountant out"),
        ({"moments_share": 1.0}, "between 0 and 1"),
        ({"refine_batch": 500}, "at most the 200 records"),
        ({"refine": "off"}, "add --refine diffusion"),
        ({"refine": None}, "add --refine diffusion"),
        ({"warm_start": "off"}, "private moments"),
        ({"engine": "dask", "workers": 2}, "one process"),
        ({"refine": "much"}, "auto, off, diffusion"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(options: dict, words: str) -> None:
    with pytest.raises(DatalensError, match=words):
        planned(**options)


def test_auto_stays_with_moments_where_there_is_little_to_learn_from() -> None:
    budget, settings = make_plan(TrainOptions(out=Path("x"), data="toy", epsilon=1.0, refine="auto"), SCHEMA)
    assert not isinstance(settings, RefinedSettings)
    assert budget.accountant == "exact"


# --- the network and its sampler --------------------------------------------------------------------------------------


def test_the_linear_estimate_is_the_best_one_for_gaussian_images() -> None:
    _, settings = planned()
    start = start_of(settings)
    linear, random = Linear(start=start), torch.Generator().manual_seed(0)
    labels = torch.zeros(4000, dtype=torch.int64)
    normal = torch.randn(4000, settings.coordinates, generator=random)
    clear = 2 * start.basis.inverse(start.means[0] + normal @ start.factors[0].mT) - 1
    errors = {}
    for noise in (0.3, 0.6, 2.0):
        noisy = clear + noise * torch.randn(clear.shape, generator=random)
        found = linear(noisy, labels, torch.full((4000,), noise))
        errors[noise] = float((found - clear).square().mean())
        assert errors[noise] < 0.9 * noise**2
        wrong = linear(noisy, labels + 1, torch.full((4000,), noise))
        assert float((wrong - clear).square().mean()) > errors[noise]
    spread = float((clear - clear.mean(dim=0)).square().mean())
    assert errors[0.3] < errors[0.6] < errors[2.0] < spread


def test_an_untrained_network_corrects_nothing_and_no_image_knows_of_another() -> None:
    shape = denoiser.Shape(image=(1, 8, 8), classes=3, wide=8, deep=8, hidden=8)
    network = fresh_network(shape, 0)
    inputs = torch.randn(6, 8, 4, 4)
    facts = facts_of(torch.arange(6) % 3, torch.rand(6) + 0.1, 3)
    assert not network(inputs, facts).any()
    torch.nn.init.normal_(network.leave.weight)
    whole = network(inputs, facts)
    assert torch.allclose(network(inputs[2:3], facts[2:3]), whole[2:3], atol=1e-4)
    assert sum(value.numel() for value in network.parameters()) == shape.parameters


def test_noise_levels_fall_to_zero() -> None:
    levels = noise_levels(1.0, 10)
    assert levels[0] == pytest.approx(1.0)
    assert levels[-1] == 0
    assert all(a > b for a, b in itertools.pairwise(levels))


def test_pretraining_learns_what_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its broken twin, whose labels say nothing, learns less about classes."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 3
    images = torch.zeros(256, 1, 8, 8)
    for i, label in enumerate(labels.tolist()):
        images[i, 0, :, 2 * label : 2 * label + 2] = 1
    images = (images * 200 + 20 * torch.rand(images.shape, generator=random)).to(torch.uint8)
    _, settings = planned()
    start = Start(shape=(1, 8, 8), means=torch.zeros(3, 10), factors=0.1 * torch.eye(10).repeat(3, 1, 1))
    monkeypatch.setattr(refined, "kind_of_numbers", lambda _: torch.float32)
    make = Maker(linear=Linear(start=start), settings=settings, schema=SCHEMA)

    def loss_after(steps: int, told: torch.Tensor) -> float:
        network = fresh_network(settings.shape_for(SCHEMA), 0)
        engine = RowEngine(network, kind=torch.float32, device=CPU)
        adam = refined.Adam.of(engine.flat(network))
        for step in range(steps):
            parts = [(images, told, torch.arange(256))]
            gradient = refined._plain_gradient(engine, network, adam, parts, make, step=step)
            adam.step(gradient / 256, rate=2e-3, steps=steps)
        engine.put(adam.weights, network)
        with torch.no_grad():
            return float(make(images, told, torch.arange(256), stage="held out", step=0).losses(network).mean())

    before, after = loss_after(0, labels), loss_after(40, labels)
    assert after < 0.5 * before
    assert after < loss_after(40, labels[torch.randperm(256, generator=random)])
