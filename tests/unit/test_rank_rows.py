"""Records on two ranks in one process: the sums of one process, and every record, or person, on one rank."""

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.parts import PartSum
from datalens.data import records
from datalens.data.records import Dataset
from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.methods import moments, refined
from datalens.methods.refined import FEATURES, Helper, RefinedRecords, RefinedSettings, Worker, features_of
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.plans.registry import make_plan
from datalens.privacy.dpsgd import poisson_sample
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.private.moments import RecordRows
from datalens.private.shares import FINGERPRINT_MODULUS
from datalens.public.texture import Texture
from datalens.released.denoiser import Linear
from datalens.released.moments import Start
from datalens.run import rank_rows
from datalens.run.rank_rows import PartOfRank, RankRows
from datalens.run.ranks import World
from tests.unit.test_crowd import WAIT, Line, Side

SCHEMA = Schema(name="toy", height=8, width=8, channels=1, classes=("a", "b", "c"), nominal_size=60)
PERSONS = dataclasses.replace(SCHEMA, record_unit=PERSON, nominal_size=20)
COUNT = 60


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks have no record of a rank."""
    monkeypatch.setattr(records, "BLOCK_RECORDS", 3)


def data_of(schema: Schema) -> Dataset:
    random = np.random.default_rng(0)
    return Dataset(
        schema=schema,
        images=random.integers(0, 256, (COUNT, 8, 8, 1), dtype=np.uint8),
        labels=random.integers(0, 3, COUNT),
        ids=np.array([f"p{i % 20}" for i in range(COUNT)], dtype=object) if schema.by_person else None,
    )


def planned(schema: Schema, **options: Any) -> RefinedSettings:
    given = {"refine_steps": 2, "refine_batch": 10, "accountant": "rdp-improved", "coordinates": 6, "texture": 6}
    given |= {"epsilon": 10.0, "data": "toy", "refine": "diffusion", "noise_seed": 1, **options}
    settings = make_plan(TrainOptions(out=Path("x"), **given), schema)[1]
    assert isinstance(settings, RefinedSettings)
    return settings


def side_by_side(lead: Callable[[Side], Any], follow: Callable[[Side], object]) -> Any:
    """Return what rank 0 does. It is the thread: only the main one may set signals."""
    line, done, failed = Line(), list[Any](), list[BaseException]()

    def leading() -> None:
        try:
            done.append(lead(Side(line, 0)))
        except BaseException as error:
            failed.append(error)
            line.barrier.abort()  # so that the other does not wait

    leader = threading.Thread(target=leading, daemon=True)
    leader.start()
    try:
        follow(Side(line, 1))
    except threading.BrokenBarrierError:
        pass
    except BaseException:
        line.barrier.abort()
        raise
    finally:
        leader.join(WAIT)
    if failed:
        raise failed[0]
    return done[0]


def gathered(side: World, settings: RefinedSettings, schema: Schema, folder: Path) -> RefinedRecords:
    place = Place(device=torch.device("cpu"), folder=folder / "run", world=side)
    return refined.gather(data_of(schema), settings, place)


def start_of(settings: RefinedSettings) -> Start:
    random, size = torch.Generator().manual_seed(1), settings.coordinates
    factors = 0.1 * torch.randn(3, size, size, generator=random)
    return Start(shape=(1, 8, 8), means=torch.rand(3, size, generator=random), factors=factors)


WIDTH = Texture((1, 8, 8)).size
CENTRE, WHITE = torch.full((WIDTH,), 0.125), 2 * torch.eye(WIDTH)
HEAD = 0.01 * torch.ones(WIDTH + 1, 3)


def of_everything(rows: Any, features: Any) -> list[torch.Tensor]:
    """Every kind of sum over all records that both stages ask for."""
    view, texture = rows.coordinates, partial(rows.texture, centre=CENTRE, white=WHITE[:, :5])
    edges, means = torch.linspace(0, 8, 9, dtype=torch.float64), torch.full((3, 6), 0.25)
    totals = [
        rows.histogram(view, means=None, edges=edges, grid=2**10),
        rows.sums(texture, clip=4.0, classes=3, counted=2**9, grid=2**10),
        rows.covariances(view, means=means, clip=2.0, grid=2**10),
        features.errors(features.coordinates, head=HEAD, sharpness=10.0, least=0.5, grid=2**12),
    ]
    return [total.private_total for total in totals]


def network_of(settings: RefinedSettings, schema: Schema) -> tuple[refined.Maker, refined.Network, torch.Tensor]:
    """A maker, a network, and weights that were moved a little, so that no gradient is zero."""
    make = refined.Maker(linear=Linear(start=start_of(settings)), settings=settings, schema=schema)
    network = make.network()
    weights = refined.RowEngine(network, kind=make.kind, device=torch.device("cpu")).flat(network)
    return make, network, weights + 0.05 * torch.randn(len(weights), generator=torch.Generator().manual_seed(0))


def in_one_process(schema: Schema, folder: Path) -> list[torch.Tensor]:
    settings = planned(schema)
    data = gathered(World(), settings, schema, folder)
    assert isinstance(data.rows, RecordRows)
    make, network, weights = network_of(settings, schema)
    sample = poisson_sample(SeededNoise(1), data.units, refined.schedule_of(settings, schema).rate)
    assert 0 < len(sample) < data.units == schema.nominal_size
    gradients = Worker(network, data, make).bounded(sample, weights, 3).private_total
    return [*of_everything(data.rows, features_of(data.rows, CENTRE, WHITE, folder)), gradients]


def on_two_ranks(schema: Schema, folder: Path) -> list[torch.Tensor]:
    settings = planned(schema)

    def lead(side: Side) -> list[torch.Tensor]:
        data = gathered(side, settings, schema, folder)
        rows = data.rows
        assert isinstance(rows, RankRows)
        assert 0 < data.units < schema.nominal_size
        rows.meet()
        rows.order(FEATURES, centre=CENTRE, white=WHITE)
        features = rows.viewed(features_of(rows.mine, CENTRE, WHITE, folder), name=refined.ERRORS)
        found = of_everything(rows, features)
        make, network, weights = network_of(settings, schema)
        start = start_of(settings)
        rows.order(refined.BEGIN, means=start.means, factors=start.factors)
        words = torch.from_numpy(SeededNoise(1).words(data.everyone).astype(np.int64))
        rows.order(refined.STEP, {"step": 3}, weights=weights, words=words)
        found.append(rows.joined(Worker(network, data, make).of_rank(weights, 3, words)).private_total)
        rows.dismiss()
        return found

    def follow(side: Side) -> None:
        data = gathered(side, settings, schema, folder)
        assert isinstance(data.rows, RankRows)
        data.rows.meet()
        place = Place(device=torch.device("cpu"), folder=folder, world=side)
        Helper(data, settings, schema, place).follow()

    found: list[torch.Tensor] = side_by_side(lead, follow)
    return found


@pytest.mark.parametrize("schema", [SCHEMA, PERSONS], ids=["records", "persons"])
def test_sums_over_ranks_are_those_of_one_process(schema: Schema, tmp_path: Path) -> None:
    """Bit by bit: of the moments, of the classifier's errors, and of gradients over a seeded Poisson sample."""
    expected, found = in_one_process(schema, tmp_path), on_two_ranks(schema, tmp_path)
    for here, there in zip(expected, found, strict=True):
        assert here.any()
        assert torch.equal(here, there)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 counts the records that it has twice."""
    errors = RecordRows.sums

    def twice(self: RecordRows, view: Any, **options: Any) -> Any:
        found = errors(self, view, **options)
        return dataclasses.replace(found, private_total=found.private_total * (1 + self.twice))  # type: ignore[attr-defined]

    gather = RecordRows.gather.__func__  # type: ignore[attr-defined]

    def gathered(cls: Any, records: Any, **more: Any) -> RecordRows:
        found: RecordRows = gather(cls, records, **more)
        found.twice = isinstance(records, PartOfRank) and records._world.rank == 1  # type: ignore[attr-defined]
        return found

    patch.setattr(RecordRows, "gather", classmethod(gathered))
    patch.setattr(RecordRows, "sums", twice)


def noise_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 adds noise of its own."""
    real = Worker.of_rank

    def noisy(self: Worker, *given: Any) -> PartSum:
        found = real(self, *given)
        total = found.total.private_total
        moved = total + found.parts[0] * torch.ones_like(total)
        return dataclasses.replace(found, total=dataclasses.replace(found.total, private_total=moved))

    patch.setattr(Worker, "of_rank", noisy)


def a_sample_on_each_rank_from_the_first_words(patch: pytest.MonkeyPatch) -> None:
    """Units of different ranks share their random words: they are in the sample together."""
    real = Worker.of_rank

    def alike(self: Worker, weights: Any, number: int, words: torch.Tensor) -> PartSum:
        count = self._data.units
        self._data = dataclasses.replace(self._data, numbers=torch.arange(count))
        return real(self, weights, number, words)

    patch.setattr(Worker, "of_rank", alike)


@pytest.mark.parametrize("twin", [counted_twice, noise_on_each_rank, a_sample_on_each_rank_from_the_first_words])
def test_broken_twins_have_other_sums(twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_one_process(SCHEMA, tmp_path)
    twin(monkeypatch)
    found = on_two_ranks(SCHEMA, tmp_path)
    assert not all(torch.equal(here, there) for here, there in zip(expected, found, strict=True))


# --- who holds what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_person_is_whole_on_one_rank(size: int) -> None:
    data, holders = data_of(PERSONS), dict[int, set[int]]()
    held = 0
    for rank in range(size):
        part = PartOfRank(data, World(rank=rank, size=size))
        for block in part.blocks(lambda index, names: np.zeros(len(index), np.int64)):
            for index in block.index.tolist():
                holders.setdefault(index % 20, set()).add(rank)
        held += part.held
        assert part.seen == COUNT
    assert held == part.everyone
    assert len(holders) == 20
    assert all(len(ranks) == 1 for ranks in holders.values())


@pytest.mark.parametrize("schema", [SCHEMA, PERSONS], ids=["records", "persons"])
def test_a_rank_may_hold_little_or_nothing(schema: Schema, tmp_path: Path) -> None:
    settings, size = planned(schema), 16
    held = [gathered(World(rank=rank, size=size), settings, schema, tmp_path) for rank in range(size)]
    alone = gathered(World(), settings, schema, tmp_path)
    assert min(data.units for data in held) <= 1
    assert sum(data.units for data in held) == alone.units
    assert sum(data.fingerprint for data in held) % FINGERPRINT_MODULUS == alone.fingerprint
    assert sorted(torch.cat([data.keys for data in held]).tolist()) == sorted(alone.keys.tolist())
    numbers = [data.numbers for data in held if data.numbers is not None]
    assert sorted(torch.cat(numbers).tolist()) == list(range(alone.units))


def meeting(settings: RefinedSettings, folder: Path) -> None:
    def meet(side: Side) -> None:
        data = gathered(side, settings, SCHEMA, folder)
        assert isinstance(data.rows, RankRows)
        data.rows.meet()

    side_by_side(meet, meet)


@pytest.mark.parametrize("everything", [True, False])
def test_a_record_on_two_ranks_or_none_is_found(
    everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, real = planned(SCHEMA), PartOfRank.is_here
    meeting(settings, tmp_path)  # the right one passes
    monkeypatch.setattr(PartOfRank, "is_here", lambda self, n: everything if self._world.rank == 1 else real(self, n))
    with pytest.raises(DatalensError, match="a record is on two ranks, or on none"):
        meeting(settings, tmp_path)


def test_ranks_that_read_different_records_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, blocks = planned(SCHEMA), PartOfRank.blocks

    def fewer(self: PartOfRank, choose: Any) -> Any:
        if self._world.rank == 1:
            data = self._records
            assert isinstance(data, Dataset)
            self._records = dataclasses.replace(data, images=data.images[:50], labels=data.labels[:50])
        return blocks(self, choose)

    monkeypatch.setattr(PartOfRank, "blocks", fewer)
    with pytest.raises(DatalensError, match="the ranks have read different records"):
        meeting(settings, tmp_path)


# --- samples ----------------------------------------------------------------------------------------------------------


def test_each_rank_draws_its_part_of_a_sample_from_the_operating_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word for each of its units, and no more: whether a unit is in a sample is decided once, and in secret."""
    settings, drawn = planned(SCHEMA), list[int]()
    words = SecureNoise.words
    monkeypatch.setattr(SecureNoise, "words", lambda self, count: drawn.append(count) or words(self, count))
    make, network, weights = network_of(settings, SCHEMA)
    units = []
    for rank in range(3):
        data = gathered(World(rank=rank, size=3), settings, SCHEMA, tmp_path)
        units.append(data.units)
        part = Worker(network, data, make).of_rank(weights, 0, None)
        assert part.parts == (rank,)
        assert part.records <= data.units
    assert drawn == units
    assert sum(units) == COUNT


# --- orders -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_waits_hears_from_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_rows, "SECONDS_SILENT", 0.05)
    settings, sent = planned(SCHEMA), []

    def lead(side: Side) -> None:
        rows = gathered(side, settings, SCHEMA, tmp_path).rows
        assert isinstance(rows, RankRows)
        send = side.send
        monkeypatch.setattr(side, "send", lambda data: sent.append(1) or send(data))
        for _ in range(3):
            rows.beat()
            time.sleep(0.06)
            rows.beat()
            rows.beat()  # just heard from: nothing is sent
        rows.dismiss()

    def follow(side: Side) -> None:
        rows = gathered(side, settings, SCHEMA, tmp_path).rows
        assert isinstance(rows, RankRows)
        rows.follow()

    side_by_side(lead, follow)
    assert 4 <= len(sent) <= 7


def test_one_process_sends_to_nobody() -> None:
    assert World().send(b"x") == b"x"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"engine": "dask", "workers": 2}, "has workers of its own"), ({"skip_unreadable": True}, "is for one process")],
)
def test_what_ranks_cannot_do_is_refused_before_records_are_read(options: dict[str, Any], words: str) -> None:
    settings = planned(SCHEMA)
    place = Place(device=torch.device("cpu"), folder=Path("x"), world=World(rank=0, size=2), options=options)
    with pytest.raises(DatalensError, match=words):
        moments.gather(data_of(SCHEMA), settings, place)


@pytest.mark.parametrize("options", [{"refine": "auto"}, {"refine_minutes": 5.0}])
def test_a_plan_that_follows_from_a_timed_step_is_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DatalensError, match="ranks would not agree on a plan"):
        planned(SCHEMA, **options)
