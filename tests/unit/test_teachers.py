"""The vectorised ensemble against a plain loop over one nn.Module per teacher, and teacher independence."""

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.one_by_one import OneTeacher
from datalens.errors import DatalensError
from datalens.private.networks import Network, Spectral, compact_network, paper_network
from datalens.private.partition import Partition, hashed, record_keys
from datalens.private.shares import Shares
from datalens.private.teachers import ROOM_ON_CPU, Teachers, matching_weights, plan_memory
from datalens.public.basis import make_basis

SHAPE, CLASSES, TEACHERS, BATCH = (1, 12, 12), 3, 6, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Batch:
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class InDouble:
    """A network in float64. In float32 Adam blows rounding up: a gradient of 1e-9 moves a weight as far as 1 does."""

    network: Network

    def features(self, images: Tensor) -> Tensor:
        return self.network.features(images.double())

    def to_basis(self, gradients: Tensor) -> Tensor:
        return self.network.to_basis(gradients)

    def parameters(self, teachers: Tensor, seed: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in self.network.parameters(teachers, seed).items()}

    outer = ()

    def logits(self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor, *rest: object) -> Tensor:
        return self.network.logits(parameters, features, labels, *rest)

    def record_features(self, records: Tensor) -> Tensor:
        return self.network.record_features(records)

    def from_rows(self, rows: Tensor) -> Tensor:
        return self.network.from_rows(rows).double()

    def bytes_per_teacher(self, batch: int) -> tuple[int, int]:
        return self.network.bytes_per_teacher(batch)


def networks() -> dict[str, Network]:
    dct, pixel = make_basis("dct", SHAPE, 20), make_basis("pixel", SHAPE, None)
    return {
        "spectral": Spectral(basis=dct, classes=CLASSES, hidden=4),
        "compact": compact_network(dct, CLASSES, linear=20.0),
        "paper": paper_network(pixel, CLASSES, linear=20.0),
        "printed": paper_network(pixel, CLASSES),
    }


def records(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, 12, 12, 1), dtype=np.uint8), random.integers(0, CLASSES, count)


def make_teachers(
    network: Network, images: np.ndarray, labels: np.ndarray, *, chunk: int | None = None, device: str = "cpu"
) -> Teachers:
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    return teachers_on(network, partition, images, labels, chunk=chunk, device=device)


def teachers_on(
    network: Network,
    partition: Partition,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    chunk: int | None = None,
    device: str = "cpu",
) -> Teachers:
    rows = network.record_features(torch.from_numpy(images).to(device))
    shares = Shares(rows, torch.from_numpy(labels).to(device), partition)
    return Teachers(network, shares, batch=BATCH, learning_rate=1e-3, weight_decay=0.01, seed=7, chunk=chunk)


def fakes(step: int, device: str = "cpu") -> Batch:
    random = torch.Generator().manual_seed(step)
    return Batch(
        images=torch.rand(4, *SHAPE, generator=random).to(device),
        labels=torch.randint(CLASSES, (4,), generator=random).to(device),
    )


def train_and_vote(teachers: Teachers, steps: int = 3, device: str = "cpu") -> Tensor:
    """Some steps, then everybody's gradient: [teachers, m, d]."""
    for step in range(steps):
        teachers.fit_step(fakes(step, device), step=step, repeats=2)
    return torch.cat([g.values for g in teachers.image_gradients(fakes(steps, device), step=steps)]).cpu()


def loop_train_and_vote(
    network: InDouble, images: np.ndarray, labels: np.ndarray, steps: int = 3, device: str = "cpu"
) -> Tensor:
    """The oracle: one module and one Adam per teacher, one after the other."""
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    rows = network.record_features(torch.from_numpy(images).to(device))
    shares = Shares(rows, torch.from_numpy(labels).to(device), partition)
    found = []
    for number in range(TEACHERS):
        teacher = OneTeacher(network, number, shares, batch=BATCH, rate=1e-3, decay=0.01, seed=7, kind=network.network)
        for step in range(steps):
            batch = fakes(step, device)
            for draw in range(2):
                teacher.fit(network.features(batch.images), batch.labels, step=step, draw=draw)
        batch = fakes(steps, device)
        found.append(teacher.image_gradient(network.features(batch.images), batch.labels).cpu())
    return torch.stack(found)


def relative_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
@pytest.mark.parametrize("device", DEVICES)
def test_ensemble_equals_a_loop_over_modules(family: str, device: str) -> None:
    network = InDouble(networks()[family])
    images, labels = records()
    ours = train_and_vote(make_teachers(network, images, labels, device=device), device=device)
    oracle = loop_train_and_vote(network, images, labels, device=device)
    assert relative_gap(ours, oracle) < 1e-3
    # The check has teeth: teachers that saw other records, or one step fewer, are told apart.
    assert relative_gap(ours.roll(1, dims=0), oracle) > 0.1
    fewer = train_and_vote(make_teachers(network, images, labels, device=device), steps=2, device=device)
    assert relative_gap(fewer, oracle) > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
def test_on_a_gpu_neither_chunks_nor_host_memory_nor_a_second_run_change_a_bit(family: str) -> None:
    network, (images, labels) = networks()[family], records(200)
    partition = hashed(record_keys(images, None), teachers=48, salt=b"test")
    whole = train_and_vote(teachers_on(network, partition, images, labels, device="cuda"), device="cuda")
    state, work = network.bytes_per_teacher(BATCH)
    for limits in ({}, {"chunk": 16}, {"chunk": 16, "room": 16 * (state + work) + 16 * state}):
        shares = teachers_on(network, partition, images, labels, device="cuda")._shares
        again = Teachers(network, shares, batch=BATCH, learning_rate=1e-3, weight_decay=0.01, seed=7, **limits)
        assert again.resident == (16 if "room" in limits else 48)
        assert torch.equal(train_and_vote(again, device="cuda"), whole), limits


@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
def test_where_memory_is_short_some_teachers_lie_elsewhere(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the test above, which asks for a GPU; by what a teacher needs there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    state, work = networks()[family].bytes_per_teacher(BATCH)
    plan = plan_memory(48, state, work, torch.device("cuda"), chunk=16, room=16 * (state + work) + 16 * state)
    assert (plan.chunk, plan.resident) == (16, 16)


@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
def test_chunks_change_nothing(family: str) -> None:
    network = InDouble(networks()[family])
    images, labels = records()
    whole = train_and_vote(make_teachers(network, images, labels))
    for chunk in (1, 4):
        parts = train_and_vote(make_teachers(network, images, labels, chunk=chunk))
        assert relative_gap(parts, whole) < 1e-3


def others_unchanged(network: Network, changed: tuple[np.ndarray, np.ndarray, Partition], teacher: int) -> bool:
    """Whether every row but `teacher`'s is bit-identical to what the full data gives."""
    images, labels = records()
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    before = train_and_vote(teachers_on(network, partition, images, labels))
    after = train_and_vote(teachers_on(network, changed[2], changed[0], changed[1]))
    others = [t for t in range(TEACHERS) if t != teacher]
    return torch.equal(before[others], after[others]) and not torch.equal(before[teacher], after[teacher])


@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
@pytest.mark.parametrize("victim", [0, 17, 59])
def test_deleting_a_record_leaves_every_other_row_bit_identical(family: str, victim: int) -> None:
    images, labels = records()
    share = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test").share[victim]
    images, labels = np.delete(images, victim, axis=0), np.delete(labels, victim)
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    assert others_unchanged(networks()[family], (images, labels, partition), int(share))


def test_the_independence_check_catches_position_based_shares() -> None:
    """The broken twin: shares by position shift every later record into another share."""
    images, labels = np.delete(records()[0], 0, axis=0), np.delete(records()[1], 0)
    by_position = Partition(share=np.arange(len(images)) % TEACHERS, teachers=TEACHERS)
    assert not others_unchanged(networks()["spectral"], (images, labels, by_position), 0)


@pytest.mark.parametrize("family", ["spectral", "compact", "paper", "printed"])
def test_a_nan_record_spoils_its_own_teacher_only(family: str) -> None:
    network = networks()[family]
    images, labels = records()
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32) / 255
    spoiled = pixels.clone()
    spoiled[partition.share == 2] = float("nan")

    def rows(features: Tensor) -> Tensor:
        # Rows of floats, where a NaN can be planted; a convolutional network takes them for bytes.
        shares = Shares(network.features(features), torch.from_numpy(labels), partition)
        return train_and_vote(Teachers(network, shares, batch=BATCH, learning_rate=1e-3, weight_decay=0.01, seed=7))

    before, after = rows(pixels), rows(spoiled)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(before[others], after[others])
    assert after[2].isnan().all()


def test_an_empty_share_votes_nothing_and_reads_nothing() -> None:
    network = networks()["spectral"]
    images, labels = records()
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    emptied = Partition(share=np.where(partition.share == 3, 4, partition.share), teachers=TEACHERS)
    rows = train_and_vote(teachers_on(network, emptied, images, labels))
    assert (rows[3] == 0).all()
    assert (rows[[0, 1, 2, 4, 5]].abs().sum(dim=(1, 2)) > 0).all()
    # What an empty share draws is the stand-in, not a neighbour's record.
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32) / 255
    shares = Shares(network.features(pixels), torch.from_numpy(labels), emptied)
    drawn, _ = shares.batch(torch.tensor([3]), size=BATCH, seed=0, step=0, draw=0)
    assert (drawn == 0).all()


def test_batches_come_from_the_own_share_and_reach_all_of_it() -> None:
    images, labels = records()
    partition = hashed(record_keys(images, None), teachers=TEACHERS, salt=b"test")
    numbers = torch.arange(1, len(images) + 1, dtype=torch.float32).view(-1, 1)
    shares = Shares(numbers, torch.from_numpy(labels), partition)
    seen: list[set[int]] = [set() for _ in range(TEACHERS)]
    for step in range(60):
        drawn, drawn_labels = shares.batch(torch.arange(TEACHERS), size=BATCH, seed=0, step=step, draw=0)
        for teacher in range(TEACHERS):
            seen[teacher] |= {int(n) - 1 for n in drawn[teacher, :, 0]}
        assert torch.equal(drawn_labels, torch.from_numpy(labels)[(drawn[..., 0] - 1).long()])
    for teacher in range(TEACHERS):
        assert seen[teacher] == set(np.flatnonzero(partition.share == teacher).tolist())


def test_the_direction_makes_fakes_more_real() -> None:
    """Algorithm 1 prints the opposite sign: teachers whose records are bright must ask for brighter images."""
    network = Spectral(basis=make_basis("dct", SHAPE, 20), classes=CLASSES, hidden=4)
    images, labels = np.full((60, 12, 12, 1), 255, dtype=np.uint8), records()[1]
    partition = Partition(share=np.arange(60) % TEACHERS, teachers=TEACHERS)
    teachers = teachers_on(network, partition, images, labels)
    dark = Batch(images=torch.zeros(4, *SHAPE), labels=torch.tensor([0, 1, 2, 0]))
    for step in range(10):
        teachers.fit_step(dark, step=step, repeats=2)
    rows = torch.cat([g.values for g in teachers.image_gradients(dark, step=10)])
    brightness = rows[:, :, 0]  # the constant cosine
    assert (brightness > 0).all()


def test_paper_network_has_the_papers_size() -> None:
    network = paper_network(make_basis("pixel", (1, 28, 28), None), 10)
    count = sum(p[0].numel() for p in network.parameters(torch.tensor([0]), 0).values())
    assert count == 555_655  # "about 556 k"


def test_compact_network_stays_small_on_large_images() -> None:
    for shape in ((1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 128, 128)):
        network = compact_network(make_basis("pixel", shape, None), 10)
        count = sum(p[0].numel() for p in network.parameters(torch.tensor([0]), 0).values())
        assert count < 40_000, shape


def test_memory_is_planned_from_public_facts() -> None:
    cpu, gpu, gib = torch.device("cpu"), torch.device("cuda"), 2**30
    network = compact_network(make_basis("pixel", (1, 28, 28), None), 10)
    state, work = network.bytes_per_teacher(15)
    plan = plan_memory(4000, state, work, cpu)
    assert plan.chunk * work <= ROOM_ON_CPU < (plan.chunk + 16) * work
    assert 4000 * state < 8 * gib
    # The paper's discriminator on a GPU of 100 GiB: 4000 lie on it, of 17,000 (106 GiB) some lie in host memory.
    state, work = paper_network(make_basis("pixel", (1, 28, 28), None), 10).bytes_per_teacher(15)
    assert plan_memory(4000, state, work, gpu, room=100 * gib).resident == 4000
    plan = plan_memory(17_000, state, work, gpu, room=100 * gib)
    assert 8_000 < plan.resident < 17_000
    assert plan.resident % plan.chunk == 0
    assert plan.resident * state + plan.chunk * (state + work) <= 100 * gib
    assert plan_memory(16_000, state, work, gpu, room=100 * gib, chunk=7).chunk == 7
    # Never so few that their number, which may follow from the records', could decide the last bits of a row.
    assert plan_memory(10, state, work, gpu, room=1).chunk == 10
    assert plan_memory(4000, state, work, gpu, room=1).chunk == 16
    assert plan_memory(4000, state, work, gpu, room=30 * gib).chunk % 16 == 0


class Scarce(InDouble):
    """A network on a device where no more than `fits` teachers have room."""

    fits = 2

    def logits(self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor, *rest: object) -> Tensor:
        if len(labels) > self.fits:
            raise torch.OutOfMemoryError("no room")
        return super().logits(parameters, features, labels, *rest)


def test_a_chunk_that_does_not_fit_is_halved_and_nothing_changes() -> None:
    images, labels = records()
    plenty = train_and_vote(make_teachers(InDouble(networks()["spectral"]), images, labels))
    scarce = make_teachers(Scarce(networks()["spectral"]), images, labels)
    assert torch.equal(train_and_vote(scarce), plenty)
    assert scarce.chunk <= Scarce.fits < TEACHERS


def test_where_numbers_lie_decides_nothing() -> None:
    """On some CPUs it does, unless MKL is told before its first product; and whoever sets it themselves has it so."""
    ask = "import os; from datalens.private.layers import rounds_alike; print(rounds_alike(), os.environ['MKL_CBWR'])"
    unset = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    for given, then in ((unset, "AUTO,STRICT"), (unset | {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE")):
        found = subprocess.run([sys.executable, "-c", ask], env=given, capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["True", then]


@pytest.mark.parametrize("what", ["rounds_alike", "convolves_alike"])
def test_a_cpu_on_which_it_does_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = records()
    monkeypatch.setattr(f"datalens.private.layers.{what}", lambda: False)
    with pytest.raises(DatalensError, match="MKL_CBWR=AUTO,STRICT"):
        make_teachers(InDouble(networks()["spectral"]), images, labels)


def test_a_twin_that_rounds_by_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from datalens.private import layers

    product, calls = torch.bmm, iter(range(100))

    def by_place(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b) * (1 + 1e-6 * (next(calls) % 2))

    layers.rounds_alike.cache_clear()
    monkeypatch.setattr(torch, "bmm", by_place)
    assert not layers.rounds_alike()
    monkeypatch.undo()
    layers.rounds_alike.cache_clear()
    assert layers.rounds_alike()


def test_a_twin_that_convolves_by_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from datalens.private import layers

    convolution = torch.nn.functional.conv2d

    def by_place(images: Tensor, *rest: object, **more: object) -> Tensor:
        return convolution(images, *rest, **more) * (1 + 1e-6 * (images.data_ptr() % 64 > 0))  # type: ignore[arg-type]

    layers.convolves_alike.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "conv2d", by_place)
    assert not layers.convolves_alike()
    monkeypatch.undo()
    layers.convolves_alike.cache_clear()
    assert layers.convolves_alike()


def test_a_chunk_that_was_asked_for_and_does_not_fit_names_one_that_does() -> None:
    images, labels = records()
    teachers = make_teachers(Scarce(networks()["spectral"]), images, labels, chunk=4)
    with pytest.raises(DatalensError, match=r"4 teachers at a time: --chunk 2 should fit; or leave --chunk out"):
        train_and_vote(teachers)


def test_running_out_after_a_step_was_made_is_an_error_and_not_a_step_made_twice() -> None:
    images, labels = records()

    class LaterScarce(Scarce):
        calls = 0

        def logits(self, *arguments: object) -> Tensor:
            type(self).calls += 1
            return InDouble.logits(self, *arguments) if type(self).calls == 1 else super().logits(*arguments)

    with pytest.raises(DatalensError, match="out of GPU memory"):
        train_and_vote(make_teachers(LaterScarce(networks()["spectral"]), images, labels))


@pytest.mark.parametrize("chunk", [None, 4])
def test_state_round_trip_continues_as_if_nothing_happened(chunk: int | None) -> None:
    """Also where the resumed run has less memory, and so other chunks."""
    network = InDouble(networks()["spectral"])
    images, labels = records()
    straight = make_teachers(network, images, labels)
    interrupted = make_teachers(network, images, labels)
    for step in range(2):
        straight.fit_step(fakes(step), step=step, repeats=2)
        interrupted.fit_step(fakes(step), step=step, repeats=2)
    resumed = make_teachers(network, images, labels, chunk=chunk)
    resumed.load_state({name: value.clone() for name, value in interrupted.state().items()})
    for teachers in (straight, resumed):
        teachers.fit_step(fakes(2), step=2, repeats=2)
    rows = [torch.cat([g.values for g in t.image_gradients(fakes(3), step=3)]) for t in (straight, resumed)]
    assert relative_gap(rows[1], rows[0]) < (1e-6 if chunk else 1e-12)


def test_matching_weights_give_both_sides_the_same_labels() -> None:
    labels = torch.tensor([[0, 0, 1, 7], [2, 2, 2, 2]])
    fake_labels = torch.tensor([0, 1, 1, 3])
    real, fake = matching_weights(labels, fake_labels)
    # A record whose label no fake has, and a fake whose label no record has, weigh nothing.
    assert torch.allclose(real, torch.tensor([[0.25, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert torch.allclose(fake, torch.tensor([[0.5, 0.125, 0.125, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    for label in range(8):  # class by class, both sides weigh the same
        assert torch.allclose((real * (labels == label)).sum(1), (fake * (fake_labels == label)).sum(1))


def test_a_teacher_without_a_class_does_not_learn_that_the_class_is_fake() -> None:
    """The broken twin weighs all fakes evenly: its teachers push the logit of a class they never saw down."""
    network = Spectral(basis=make_basis("dct", SHAPE, 20), classes=CLASSES, hidden=4)
    images, labels = records()[0], np.zeros(60, dtype=np.int64)
    partition = Partition(share=np.arange(60) % TEACHERS, teachers=TEACHERS)
    shown = Batch(
        images=torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0)), labels=torch.tensor([0, 0, 1, 1])
    )

    def bias_of_unseen_class() -> float:
        teachers = teachers_on(network, partition, images, labels)
        for step in range(5):
            teachers.fit_step(shown, step=step, repeats=2)
        return float(teachers.state()["parameter.b2"][:, 1].abs().max())

    assert bias_of_unseen_class() < 1e-6
    with pytest.MonkeyPatch.context() as patch:
        even = lambda labels, fake: (torch.full(labels.shape, 1 / BATCH), torch.full((len(labels), len(fake)), 0.25))  # noqa: E731
        patch.setattr("datalens.private.teachers.matching_weights", even)
        assert bias_of_unseen_class() > 1e-3


def test_a_records_features_depend_on_nothing_else() -> None:
    """Bit for bit the same alone, among many, and with the pixels summed in another order."""
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (2000, 28, 28, 1), dtype=np.uint8))
    network = Spectral(basis=make_basis("dct", (1, 28, 28), 64), classes=10, hidden=4)
    together = network.record_features(images)
    for i in (0, 1, 777, 1999):
        assert torch.equal(network.record_features(images[i : i + 1])[0], together[i])
    rows = network.basis.rows
    assert rows is not None
    shuffled = torch.from_numpy(random.permutation(784))
    flat = images.reshape(2000, 784).double() * 2 - 255
    assert torch.equal(flat @ rows.double().T, flat[:, shuffled] @ rows.double()[:, shuffled].T)
    # The broken twin: in float32 the order decides the last bits.
    assert not torch.equal(flat.float() @ rows.T, flat.float()[:, shuffled] @ rows[:, shuffled].T)
    # And they are the features that fakes get, up to rounding.
    assert torch.allclose(together, network.features(images.permute(0, 3, 1, 2) / 255), atol=1e-5)
    compact = compact_network(make_basis("pixel", (1, 28, 28), None), 10)
    assert torch.equal(compact.from_rows(compact.record_features(images)), images.permute(0, 3, 1, 2) / 255)


@pytest.mark.parametrize("family", ["compact", "paper"])  # of spectral, the public features of fakes are one product
def test_threads_change_no_bit_of_a_row(family: str) -> None:
    """Chunks run side by side, each in one thread, and come back in order."""
    before = torch.get_num_threads()
    images, labels = records()
    rows = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(train_and_vote(make_teachers(networks()[family], images, labels, chunk=2)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def vote_cosine(network: Network) -> float:
    """Cosine of what trained teachers say of the same images under their own and under another label."""
    random = np.random.default_rng(1)
    labels = random.integers(0, CLASSES, 120)
    images = np.zeros((120, 12, 12, 1), dtype=np.uint8)
    for i, label in enumerate(labels):  # a bright bar, in a place that its class decides
        images[i, :, 4 * label : 4 * label + 4] = 200
    images += random.integers(0, 50, images.shape, dtype=np.uint8)
    teachers = make_teachers(network, images, labels)
    for step in range(20):
        teachers.fit_step(fakes(step), step=step, repeats=2)
    shown = fakes(20)
    other = Batch(images=shown.images, labels=(shown.labels + 1) % CLASSES)
    own, changed = (
        torch.cat([g.values for g in teachers.image_gradients(batch, step=20)]).flatten(1) for batch in (shown, other)
    )
    return float(torch.nn.functional.cosine_similarity(own, changed).mean())


def test_a_vote_depends_on_the_label() -> None:
    """Without the linear part it does not, and a student never learns which class it was asked for."""
    assert vote_cosine(networks()["compact"]) < 0.9
    assert vote_cosine(compact_network(make_basis("dct", SHAPE, 20), CLASSES)) > 0.97
