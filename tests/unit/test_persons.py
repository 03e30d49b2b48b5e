"""A person with many images, in several classes, is one unit: one row, one share, one price."""

import dataclasses

import numpy as np
import pytest
import torch

from datalens.bounded.outer import Outer, outer_diameter, sum_outer
from datalens.data.records import Dataset
from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.methods.moments import MomentSettings
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.privacy.events import GaussianEvent, unprotected
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.private import moments
from datalens.private.moments import RecordRows
from datalens.private.partition import rule_named
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released.checks import _wrong_unit

SIDE, SIZE, GRID, COUNTED = 8, 6, 2**14, 2**13
SCHEMA = Schema(
    name="p", height=SIDE, width=SIDE, channels=1, classes=("a", "b", "c"), nominal_size=20, record_unit=PERSON
)
RNG = np.random.default_rng(3)
# Persons 0 … 9 of one to four images each, spread over the stream; person 99 has fifty, in three classes.
WHOSE = RNG.permutation(np.repeat(np.arange(11) % 11, np.r_[RNG.integers(1, 5, 10), 50]))
WHOSE = np.where(WHOSE == 10, 99, WHOSE)
IMAGES = RNG.integers(0, 256, (len(WHOSE), SIDE, SIDE, 1), dtype=np.uint8)
IMAGES[WHOSE == 99] = IMAGES[WHOSE == 99][0]  # all alike, and mostly of one class: the longest sum there can be
LABELS = np.where((WHOSE == 99) & (np.arange(len(WHOSE)) % 10 > 1), 2, RNG.integers(0, 3, len(WHOSE)))
MEANS = torch.zeros(3, SIZE, dtype=torch.float64)
EDGES = torch.linspace(0, 20, 9, dtype=torch.float64)


def gather(member=slice(None), *, unit=PERSON, order=None):
    pick = np.arange(len(WHOSE))[member]
    pick = pick if order is None else pick[order]
    schema = dataclasses.replace(SCHEMA, record_unit=unit)
    data = Dataset(schema=schema, images=IMAGES[pick], labels=LABELS[pick], ids=WHOSE[pick])
    return RecordRows.gather(data, basis=make_basis("opponent", SCHEMA.shape, SIZE), texture=Texture(SCHEMA.shape))


SUMS = {
    "histogram": lambda r: r.histogram(r.coordinates, means=None, edges=EDGES, grid=GRID),
    "sums": lambda r: r.sums(r.coordinates, clip=3.0, classes=3, grid=GRID, counted=COUNTED),
    "covariances": lambda r: r.covariances(r.coordinates, means=MEANS, clip=3.0, grid=GRID),
}
EVERY = pytest.mark.parametrize("total", SUMS.values(), ids=SUMS.keys())


def moved(total, **how):
    """How far the sum moves when person 99 goes, and the event that is charged for it."""
    there, gone = total(gather(**how)), total(gather(WHOSE != 99, **how))
    ledger = Ledger.in_memory(Budget(epsilon=np.inf, delta=0.5, relation="add-remove", accountant="exact"))
    event = GaussianSum(sigma=1.0, noise=SecureNoise()).release(there, ledger, step=0).event
    return float((there.private_total - gone.private_total).double().norm()), event


@EVERY
def test_a_person_moves_a_sum_by_no_more_than_is_paid_for(total):
    distance, event = moved(total)
    assert isinstance(event, GaussianEvent)
    assert event.row_unit == "person"
    assert event.sensitivity == event.l2_bound
    assert 0.5 * event.sensitivity < distance <= event.sensitivity  # and the check has something to find


@EVERY
def test_priced_by_the_image_the_same_person_is_caught(total):
    """The broken twin: every image a row of its own, at the price of one."""
    distance, event = moved(total, unit="image")
    assert event.row_unit == "record"
    assert distance > 10 * event.sensitivity


@EVERY
def test_a_persons_row_is_theirs_alone(total):
    there, gone, alone = (total(gather(who)).private_total for who in (slice(None), WHOSE != 99, WHOSE == 99))
    assert torch.equal(there - gone, alone)


@EVERY
def test_where_images_lie_in_the_stream_is_all_one(total, monkeypatch):
    expected = total(gather()).private_total
    assert torch.equal(total(gather(order=RNG.permutation(len(WHOSE)))).private_total, expected)
    for chunk in (1, 7, 60):  # person 99 is larger than a chunk, or cut by one
        monkeypatch.setattr(moments, "CHUNK", chunk)
        assert torch.equal(total(gather()).private_total, expected)


@EVERY
def test_persons_of_one_image_are_records(total):
    once = np.unique(WHOSE, return_index=True)[1]
    assert torch.equal(total(gather(once)).private_total, total(gather(once, unit="image")).private_total)


def test_a_run_knows_whose_images_it_was_begun_with(monkeypatch):
    """Who goes on with the same images and other ids would protect other persons."""
    begun, image = gather().fingerprint, gather(unit="image").fingerprint
    monkeypatch.setitem(globals(), "WHOSE", np.where(WHOSE == 3, 4, WHOSE))
    assert gather().fingerprint != begun
    assert gather(unit="image").fingerprint == image


def test_many_images_alike_count_as_one():
    alike = np.flatnonzero((WHOSE == 99) & (LABELS == 2))
    for total in SUMS.values():
        many, one = (total(gather(pick)).private_total.double() for pick in (alike, alike[:1]))
        assert (many - one).abs().max() <= 2 + 1e-8 * one.abs().max()


def test_a_person_in_several_classes_is_weighed_by_all_of_them():
    """Three images in one class, four in another: each weighs a fifth."""
    chunk = Outer(
        slots=torch.tensor([0] * 3 + [2] * 4),
        left=torch.ones(7, 1),
        right=torch.full((7, 1), 1000.0),
        persons=torch.zeros(7, dtype=torch.int64),
    )
    found = sum_outer([chunk], slots=3, left_bound=1, right_bound=1000).private_total.flatten().tolist()
    assert found == [599, 0, 799]


@pytest.mark.parametrize("name", ["norms", "sums", "covariances"])
def test_two_persons_are_no_further_apart_than_is_paid_for(name):
    """Replace-one: whoever takes whose place."""
    options = TrainOptions(out="unused", relation="replace-one", coordinates=SIZE, texture=0)
    settings = make_plan(options, SCHEMA)[1]
    assert isinstance(settings, MomentSettings) and settings.unit == "person"
    total = SUMS["histogram" if name == "norms" else name]
    rows = [total(gather(who == WHOSE)) for who in np.unique(WHOSE)]
    furthest = max(float((a.private_total - b.private_total).double().norm()) for a in rows for b in rows)
    assert furthest <= rows[0].diameter * (1 + 1e-12)
    assert rows[0].diameter == pytest.approx(settings.diameter(name), rel=1e-11)


def test_truncated_squares_may_be_a_little_further_apart():
    bound = 2.0**28
    assert outer_diameter(bound) < outer_diameter(bound, truncated=2**10) < outer_diameter(bound) * (1 + 2**-17)
    assert outer_diameter(10.0, truncated=2**10) == 20.0


def chunk(persons, slots=None):
    count = len(persons)
    ones = torch.ones(count, 1, dtype=torch.float64)
    return Outer(
        slots=torch.zeros(count, dtype=torch.int64),
        left=ones,
        right=ones,
        persons=torch.tensor(persons, dtype=torch.int64),
    )


@pytest.mark.parametrize("chunks", [[chunk([1, 1]), chunk([1])], [chunk([2, 1, 2])], [chunk([2]), chunk([1])]])
def test_a_person_is_in_a_sum_once(chunks):
    """One who came twice would have two rows at the price of one."""
    with pytest.raises(ValueError, match="must come together"):
        sum_outer(chunks, slots=1, left_bound=1, right_bound=1)


def test_records_and_persons_do_not_mix():
    record = dataclasses.replace(chunk([3]), persons=None)
    with pytest.raises(ValueError, match="of records, or of persons"):
        sum_outer([chunk([1]), record], slots=1, left_bound=1, right_bound=1)


def test_nobody_is_a_sum_too():
    found = sum_outer([chunk([]), chunk([0, 0])], slots=1, left_bound=1, right_bound=1)
    assert found.row_unit == "person"


def test_more_cells_than_the_proof_allows():
    with pytest.raises(ValueError, match="proved"):
        gather().covariances(lambda stored: stored, means=torch.zeros(30, 200), clip=1.0, grid=GRID)


def test_all_images_of_a_person_are_in_one_share():
    rule = rule_named("hashed", teachers=7, seed=0)
    data = Dataset(schema=SCHEMA, images=IMAGES, labels=LABELS, ids=WHOSE)
    share = np.concatenate([block.share for block in data.blocks(rule.shares)])
    assert all(len(set(share[who == WHOSE])) == 1 for who in np.unique(WHOSE))
    assert len(set(share)) > 2


# --- what a plan refuses, and what the certificate's check finds -----------------------------------


@pytest.mark.parametrize("method", ["dpmerf", "dpgan", "dpsgd-gan"])
def test_methods_that_protect_images_refuse_persons(method):
    with pytest.raises(DatalensError, match="--record-id"):
        make_plan(TrainOptions(out="unused", method=method), SCHEMA)


@pytest.mark.parametrize("method", ["datalens-paper", "pategan", "gpate", "gswgan"])
def test_shares_by_position_refuse_persons(method):
    with pytest.raises(DatalensError, match="--record-id"):
        make_plan(TrainOptions(out="unused", method=method, relation="replace-one", teachers=5), SCHEMA)


@pytest.mark.parametrize("method", ["datalens-paper", "pategan", "gpate", "gswgan"])
def test_the_certificate_speaks_of_persons(method):
    budget, settings = make_plan(TrainOptions(out="unused", method=method, teachers=5), SCHEMA)
    for by_person, unit in ((True, "one person changes"), (False, "one record changes")):
        assert unit in settings.mechanism_for(budget, by_person=by_person)["sensitivity"]


def test_the_check_compares_units():
    settings = make_plan(TrainOptions(out="unused"), SCHEMA)[1]
    image = dataclasses.replace(SCHEMA, record_unit="image")
    person = GaussianEvent(
        row_unit="person", l2_bound=1.0, diameter=2.0, relation="add-remove", sigma=1.0, queries=1, step=0,
        noise="operating-system",
    )  # fmt: skip
    record, teacher = (dataclasses.replace(person, row_unit=unit) for unit in ("record", "teacher"))
    assert _wrong_unit(settings, SCHEMA, (person, teacher)) == []
    assert _wrong_unit(settings, image, (record, teacher)) == []
    assert "single images" in _wrong_unit(settings, SCHEMA, (person, record))[0]
    assert _wrong_unit(settings, SCHEMA, (unprotected("add-remove"),)) == []  # DC-GAN protects nobody, and says so
    assert "charged for person" in _wrong_unit(settings, image, (person,))[0]
    family = dataclasses.replace(SCHEMA, record_unit="family")
    assert "one family" in _wrong_unit(settings, family, (record,))[0]
    shares = make_plan(TrainOptions(out="unused", teachers=5, relation="replace-one"), image)[1]
    assert "by position" in _wrong_unit(shares, SCHEMA, (teacher,))[0]
