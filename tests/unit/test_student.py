"""The student's side: generators of all sizes, steps along released directions, state, and batch norm."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from datalens.bounded.contributions import Contributions, sum_bounded
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.released.decode import Decode, Direction
from datalens.released.generator import Architecture, Generator, dcgan_architecture, draw_latent, recalibrated
from datalens.released.student import Student

TINY = Architecture(shape=(1, 8, 8), classes=3, latent=4, latent_law="normal", dense=16, widths=(8, 8))


def student(*, seed: int = 0, decay_over: int | None = None, balanced: bool = False, batch: int = 6) -> Student:
    return Student(
        TINY,
        batch=batch,
        gamma=1e-3,
        learning_rate=1e-2,
        decay_over=decay_over,
        balanced_labels=balanced,
        seed=seed,
        device=torch.device("cpu"),
    )


def direction(votes: int) -> Direction:
    """Everybody votes `votes` on every pixel, released without noise."""
    rows = torch.full((1, 6, 64), votes, dtype=torch.int8)
    total = sum_bounded([Contributions(rows=rows, l2_bound=20.0, diameter=40.0, row_unit="teacher")])
    ledger = Ledger.in_memory(Budget(epsilon=float("inf"), delta=1e-5, relation="add-remove", accountant="exact"))
    released = GaussianSum(sigma=0.0, noise=SecureNoise()).release(total, ledger, step=0)
    return Decode(rule="sign", beta=0.0, teachers=1, basis=make_basis("pixel", (1, 8, 8), None))(released)


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 32, 32), (3, 64, 64), (3, 30, 45)])
def test_generators_of_all_sizes(shape: tuple[int, int, int]) -> None:
    architecture = dcgan_architecture(shape, 5, latent=7, latent_law="uniform")
    z = draw_latent(3, architecture, streams.generator(0, "z"))
    assert z.min() >= -1 and z.max() <= 1
    images = Generator(architecture)(z, torch.tensor([0, 4, 2]))
    assert images.shape == (3, *shape)
    assert images.min() >= 0 and images.max() <= 1


def test_a_generator_of_some_cosines_shows_nothing_but_those() -> None:
    plain = Generator(replace(TINY, shape=(3, 8, 8))).eval()
    few = Generator(replace(TINY, shape=(3, 8, 8), cosines=12)).eval()
    few.load_state_dict(plain.state_dict())
    z, labels = draw_latent(6, TINY, streams.generator(0, "z")), torch.arange(6) % 3
    with torch.no_grad():
        whole, shown = plain(z, labels), few(z, labels)
    basis = make_basis("dct", (3, 8, 8), 12)
    assert torch.allclose(basis.inverse(basis.forward(shown - 0.5)), shown - 0.5, atol=1e-5)
    assert torch.allclose(basis.forward(shown), basis.forward(whole), atol=1e-5)
    assert not torch.allclose(basis.inverse(basis.forward(whole - 0.5)), whole - 0.5, atol=1e-5)


def test_the_label_changes_the_image() -> None:
    generator = Generator(TINY).eval()
    z = draw_latent(1, TINY, streams.generator(0, "z"))
    assert not torch.equal(generator(z, torch.tensor([0])), generator(z, torch.tensor([1])))


@pytest.mark.parametrize(("votes", "sign"), [(1, 1), (-1, -1)])
def test_images_move_where_the_votes_point(votes: int, sign: int) -> None:
    """x̂ = Ψ(z) + γḡ: a vote for brighter makes brighter. The paper's printed sign would do the opposite."""
    learner = student()
    before = learner.generate(0).images.detach().mean()
    for _ in range(5):
        learner.step(learner.generate(0), direction(votes))
    assert sign * float(learner.generate(0).images.detach().mean() - before) > 0.01


def test_the_student_takes_directions_only() -> None:
    learner = student()
    with pytest.raises(TypeError, match="released"):
        learner.step(learner.generate(0), torch.ones(6, 1, 8, 8))  # type: ignore[arg-type]


def test_batches_are_a_function_of_seed_and_step() -> None:
    first, again, other = student(), student(), student(seed=1)
    assert torch.equal(first.generate(3).images, again.generate(3).images)
    assert not torch.equal(first.generate(3).images, first.generate(4).images)
    assert not torch.equal(first.generate(3).images, other.generate(3).images)


def test_balanced_labels_go_round_the_classes() -> None:
    drawn = [student(balanced=True, batch=7).generate(step).labels for step in range(20)]
    assert all(np.ptp(torch.bincount(labels, minlength=3).numpy()) <= 1 for labels in drawn)
    assert len({int(labels[0]) for labels in drawn}) == 3  # no class is always the first
    uniform = [student(batch=7).generate(step).labels for step in range(20)]
    assert any(np.ptp(torch.bincount(labels, minlength=3).numpy()) > 1 for labels in uniform)


def test_a_decayed_rate_ends_at_zero() -> None:
    learner = student(decay_over=10)
    fakes = learner.generate(10)
    before = {name: value.clone() for name, value in learner.generator.named_parameters()}
    learner.step(fakes, direction(1))
    assert all(torch.equal(before[name], value) for name, value in learner.generator.named_parameters())
    learner.step(learner.generate(0), direction(1))
    assert not all(torch.equal(before[name], value) for name, value in learner.generator.named_parameters())


def test_state_round_trip_continues_as_if_nothing_happened() -> None:
    straight, resumed = student(), student()
    for step in range(2):
        straight.step(straight.generate(step), direction(1))
    resumed.load_state({name: value.clone() for name, value in straight.state().items()})
    for learner in (straight, resumed):
        learner.step(learner.generate(2), direction(1))
    assert torch.equal(straight.generate(3).images, resumed.generate(3).images)


def test_recalibration_makes_sampling_agree_with_training_and_leaves_the_original_alone() -> None:
    generator = student().generator
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.mul_(3)  # weights that moved on, away from the running averages
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    final = recalibrated(generator, streams.generator(0, "batch norm"))
    assert all(torch.equal(before[name], value) for name, value in generator.state_dict().items())
    z, labels = draw_latent(300, TINY, streams.generator(1, "z")), torch.arange(300) % 3
    with torch.no_grad():
        by_batch = generator.train()(z, labels)
        gap = [float((g.eval()(z, labels) - by_batch).abs().mean()) for g in (final, generator)]
    assert gap[0] < gap[1] / 2
