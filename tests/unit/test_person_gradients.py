"""DP-SGD where a person is the unit: one sample, one clipped row, whatever the number of their images."""

import numpy as np
import pytest
import torch

from datalens.bounded.norm_topk import NormTopK
from datalens.bounded.persons import sum_persons
from datalens.data.records import Dataset, collect
from datalens.data.schema import PERSON, Schema
from datalens.errors import DatalensError
from datalens.methods.sgd import MOST_AT_ONCE, _parts, by_person
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SecureNoise

PLAIN, SPARSE = NormTopK(clip=1.0), NormTopK(clip=1.0, topk=0.5)
WHOSE = torch.tensor([0] * 50 + [1] + [2] * 3)
torch.manual_seed(0)
GRADIENTS = [torch.randn(len(WHOSE), 4, 3), torch.randn(len(WHOSE), 5)]
GRADIENTS[0][:50] = GRADIENTS[0][0] * 3  # all of one mind, and long


@pytest.mark.parametrize("compress", [PLAIN, SPARSE], ids=["plain", "topk"])
def test_a_person_moves_the_sum_by_one_row(compress):
    def distance(summed):
        there, gone = summed(slice(None)), summed(slice(50, None))
        return float((there.private_total - gone.private_total).norm()) / there.l2_bound

    def by_person(rows):
        return sum_persons(compress, [g[rows] for g in GRADIENTS], WHOSE[rows])

    assert 0.5 < distance(by_person) <= 1
    assert distance(lambda rows: compress.sum([g[rows] for g in GRADIENTS])) > 10  # the broken twin: by the image


def test_a_row_is_the_mean_and_parts_add_up():
    means = [torch.stack([g[who == WHOSE].mean(dim=0) for who in range(3)]) for g in GRADIENTS]
    whole = sum_persons(PLAIN, GRADIENTS, WHOSE)
    assert whole.row_unit == "person"
    torch.testing.assert_close(whole.private_total.float(), PLAIN.sum(means).private_total.float())
    roomy = NormTopK(clip=1e3)  # cuts nothing, so that a sum is not taken for a mean
    found = sum_persons(roomy, GRADIENTS, WHOSE).private_total.float()
    torch.testing.assert_close(found, roomy.sum(means).private_total.float())
    torch.testing.assert_close(found[0, : means[0][0].numel()], means[0].sum(0).flatten())
    first = sum_persons(PLAIN, [g[:50] for g in GRADIENTS], WHOSE[:50])
    rest = sum_persons(PLAIN, [g[50:] for g in GRADIENTS], WHOSE[50:], onto=first)
    torch.testing.assert_close(rest.private_total, whole.private_total)
    nobody = sum_persons(PLAIN, [g[:0] for g in GRADIENTS], WHOSE[:0])
    assert not nobody.private_total.any()


def test_one_bad_image_silences_its_person_alone():
    bad = [g.clone() for g in GRADIENTS]
    bad[1][7, 0] = torch.nan
    found = sum_persons(PLAIN, bad, WHOSE).private_total
    torch.testing.assert_close(found, sum_persons(PLAIN, [g[50:] for g in GRADIENTS], WHOSE[50:]).private_total)


@pytest.mark.parametrize("whose", [WHOSE.flip(0), WHOSE[:-1], WHOSE.roll(1) + 2 * (WHOSE > 1), WHOSE % 2])
def test_images_that_do_not_come_together(whose):
    with pytest.raises(ValueError, match="come together"):
        sum_persons(PLAIN, GRADIENTS, whose)


def test_the_gate_tells_persons_from_records():
    budget = Budget(epsilon=5.0, delta=1e-5, relation="add-remove", accountant="rdp-improved")
    facts = {"sigma": 5.0, "rate": 0.1, "steps": 2, "unit": PLAIN.bound, "l2_bound": PLAIN.l2_bound}
    gate = GradientGate(Ledger.in_memory(budget), Schedule(**facts, row_unit="person"), SecureNoise())
    with pytest.raises(ValueError, match="another bound or privacy unit"):
        gate.release(PLAIN.sum(GRADIENTS))
    assert gate.release(sum_persons(PLAIN, GRADIENTS, WHOSE)).event.row_unit == "person"
    assert gate.ledger.events[0].row_unit == "person"


def test_records_are_laid_out_person_after_person():
    schema = Schema(name="x", height=1, width=1, channels=1, classes=("a",), nominal_size=3, record_unit=PERSON)
    ids = np.array(["c", "a", "c", "b", "c", "a"])
    pixels = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1)
    found, starts = by_person(Dataset(schema=schema, images=pixels, labels=np.zeros(6, np.int64), ids=ids))
    assert (found.images.flatten().tolist(), starts) == ([1, 5, 3, 0, 2, 4], [0, 2, 3, 6])

    class Stream:  # what is read block by block keeps whose the records are, too
        schema = found.schema
        blocks = found.blocks

    kept = collect(Stream())
    assert kept.ids is not None and len(set(kept.ids.tolist())) == 3


def test_persons_without_a_name_are_refused_where_records_are_laid_out():
    schema = Schema(name="x", height=1, width=1, channels=1, classes=("a",), nominal_size=2, record_unit=PERSON)
    pixels, ids = np.zeros((2, 1, 1, 1), np.uint8), np.array(["a", "NA"])
    with pytest.raises(DatalensError):  # several persons may hide behind one such id
        by_person(Dataset(schema=schema, images=pixels, labels=np.zeros(2, np.int64), ids=ids))


def test_a_sample_of_persons_is_all_of_their_images():
    starts = torch.tensor([0, 2, 3, 6])
    ((rows, whose),) = _parts(torch.tensor([0, 2]), starts)
    assert (rows.tolist(), whose.tolist()) == ([0, 1, 3, 4, 5], [0, 0, 2, 2, 2])
    ((rows, whose),) = _parts(torch.tensor([], dtype=torch.int64), starts)
    assert len(rows) == len(whose) == 0
    many = torch.arange(0, 10 * MOST_AT_ONCE + 1, MOST_AT_ONCE // 2)
    parts = _parts(torch.arange(20), many)
    assert len(parts) == 10
    assert torch.equal(torch.cat([rows for rows, _ in parts]), torch.arange(10 * MOST_AT_ONCE))
    assert not {int(one) for _, whose in parts[:1] for one in whose} & {int(one) for _, w in parts[1:] for one in w[:1]}


def test_a_large_sample_of_records_is_cut_into_parts():
    many = torch.arange(2 * MOST_AT_ONCE + 1)
    parts = _parts(many, None)
    assert [len(rows) for rows, _ in parts] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]
    assert torch.equal(torch.cat([rows for rows, _ in parts]), many)
    assert [len(rows) for rows, _ in _parts(many[:0], None)] == [0]  # an empty sample takes a step, too
