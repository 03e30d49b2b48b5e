"""A critic that learns by DP-SGD: per-example gradients, whose rows they are, and what is done with a noisy sum."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.func import functional_call, grad, vmap

from datalens.bounded import norm_topk
from datalens.bounded.norm_topk import NormTopK
from datalens.data.records import Dataset
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.methods import noisy_critic
from datalens.plans.base import Request
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SecureNoise
from datalens.private import critic_rows
from datalens.private.critic_rows import sum_gradients
from datalens.private.pool import Pool
from datalens.public.critic import Critic, example_gradients, initialise_critic
from datalens.public.learner import Learner
from datalens.released.critic import fake_gradient, fakes, learn
from datalens.released.generator import Architecture, Generator

SCHEMA = Schema(name="own", height=9, width=8, channels=2, classes=("a", "b"), nominal_size=30)
LUCK = np.random.default_rng(0)
IMAGES = LUCK.integers(0, 256, (30, 9, 8, 2), dtype=np.uint8)
LABELS = np.arange(30) % 2
ROWS = NormTopK(clip=0.5, selector="none")


def pool(images: np.ndarray = IMAGES) -> Pool:
    return Pool.gather(Dataset(schema=SCHEMA, images=images, labels=LABELS), device=torch.device("cpu"))


def critic() -> Critic:
    made = Critic((2, 9, 8), 2, width=4)
    initialise_critic(made, torch.Generator().manual_seed(0))
    return made


def exactly(total) -> torch.Tensor:
    """The sum itself, through a gate without noise."""
    ledger = Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant="rdp"))
    schedule = Schedule(sigma=0.0, rate=1.0, steps=1, unit=ROWS.bound, l2_bound=ROWS.l2_bound)
    return torch.from_numpy(GradientGate(ledger, schedule, SecureNoise()).release(total).value[0])


@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 9, 8), (3, 36, 33)])
def test_gradients_are_those_of_one_example_at_a_time(shape: tuple[int, int, int]) -> None:
    made = Critic(shape, 3, width=4)
    initialise_critic(made, torch.Generator().manual_seed(0))
    images, labels = torch.rand(5, *shape), torch.tensor([0, 1, 2, 1, 0])
    found = example_gradients(made, images, labels, F.softplus)

    def one(weights, image, label):
        return F.softplus(functional_call(made, weights, (image.unsqueeze(0), label.unsqueeze(0)))).sum()

    weights = {name: value.detach() for name, value in made.named_parameters()}
    expected = vmap(grad(one), in_dims=(None, 0, 0))(weights, images, labels)
    assert list(found) == list(expected) == [name for name, _ in made.named_parameters()]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_record_adds_its_own_row_whoever_is_beside_it() -> None:
    made, everyone = critic(), torch.arange(30)
    whole = exactly(sum_gradients(made, pool(), everyone, torch.neg, ROWS))
    for gone in (0, 17):
        less = exactly(sum_gradients(made, pool(), everyone[everyone != gone], torch.neg, ROWS))
        alone = exactly(sum_gradients(made, pool(), torch.tensor([gone]), torch.neg, ROWS))
        torch.testing.assert_close(whole - less, alone, rtol=1e-3, atol=1e-5)
        assert 0.4 < float(alone.norm()) <= ROWS.l2_bound


def test_the_plan_knows_what_rows_are_like() -> None:
    """The same constants, which a plan cannot afford to import; a clip norm that rows would refuse is refused there."""
    assert (noisy_critic.ROUNDING, noisy_critic.LEAST_CLIP) == (norm_topk.ROUNDING, norm_topk.LEAST_CLIP)
    budget = Budget(epsilon=1.0, delta=1e-5, relation="add-remove", accountant="rdp-improved")
    options = noisy_critic.Options(clip=norm_topk.LEAST_CLIP / 2)
    request = Request(method="dpgan", preset="quick", seed=0, noise_seed=None, options=options)
    with pytest.raises(DatalensError, match="--clip must be at least 1e-12"):
        noisy_critic.plan(request, SCHEMA, budget)


def test_nobody_adds_nothing() -> None:
    made = critic()
    none = sum_gradients(made, pool(), torch.zeros(0, dtype=torch.int64), torch.neg, ROWS)
    assert not exactly(none).any()
    assert none.l2_bound == ROWS.l2_bound


def test_some_at_a_time_is_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, everyone = critic(), torch.arange(30)
    whole = exactly(sum_gradients(made, pool(), everyone, torch.neg, ROWS))
    monkeypatch.setattr(critic_rows, "ROOM_ON_CPU", 7 * sum(value.nbytes for value in made.parameters()))
    parts = exactly(sum_gradients(made, pool(), everyone, torch.neg, ROWS))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_a_critic_learns_of_records_by_released_sums_only() -> None:
    made = critic()
    learner = Learner(made, rate=0.1)
    fake = {name: torch.zeros_like(value) for name, value in made.named_parameters()}
    with pytest.raises(TypeError, match="released gradients only"):
        learn(learner, torch.zeros(1, 3), fake, batch=4)  # type: ignore[arg-type]
    ledger = Ledger.in_memory(Budget(epsilon=math.inf, delta=0.5, relation="add-remove", accountant="rdp"))
    schedule = Schedule(sigma=0.0, rate=1.0, steps=6, unit=ROWS.bound, l2_bound=ROWS.l2_bound)
    gate = GradientGate(ledger, schedule, SecureNoise(), blocks=3)
    images, labels = pool().batch(torch.arange(30))
    before = float(made(images, labels).detach().mean())
    for _ in range(5):
        learn(learner, gate.release(sum_gradients(made, pool(), torch.arange(30), torch.neg, ROWS)), fake, batch=30)
    assert float(made(images, labels).mean()) > before  # real images come to look more real
    assert [event.repeats for event in ledger.events] == [2, 2, 2]  # charged by the block


def test_gradients_on_fakes_are_clipped_like_those_on_records() -> None:
    made = critic()
    images, labels = torch.rand(6, 2, 9, 8), torch.zeros(6, dtype=torch.int64)
    found = fake_gradient(made, images, labels, torch.clone, clip=0.01)
    flat = torch.cat([value.flatten() for value in found.values()])
    assert 0.005 < float(flat.norm()) <= 0.01 * (1 + 1e-5)
    free = fake_gradient(made, images, labels, torch.clone, clip=1e9)
    expected = torch.autograd.grad(made(images, labels).mean(), list(made.parameters()))
    for value, true in zip(free.values(), expected, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-4, atol=1e-6)


def test_fakes_follow_the_seed_and_no_record() -> None:
    shape = Architecture(shape=(1, 8, 8), classes=2, latent=4, latent_law="normal", dense=8, widths=(4, 4))
    made = Generator(shape)
    same = [fakes(made, 5, seed=1, purpose="critic", step=3)[0] for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], fakes(made, 5, seed=1, purpose="generator", step=3)[0])


def test_a_learner_keeps_its_average_and_its_state() -> None:
    one, other = (Learner(torch.nn.Linear(3, 2), rate=0.1, average=0.5) for _ in range(2))
    x = torch.ones(4, 3)
    start = one.module.weight.detach().clone()
    one.step(one.module(x).sum())
    moved = one.module.weight.detach().clone()
    torch.testing.assert_close(one.averaged().weight.detach(), (start + moved) / 2)
    other.load_state({name: value.clone() for name, value in one.state().items()})
    for learner in (one, other):
        learner.step(learner.module(x).square().sum())
    for name, value in one.state().items():
        assert torch.equal(value, other.state()[name])
    one.rate(0.0)
    before = one.module.weight.detach().clone()
    one.step(one.module(x).sum())
    assert torch.equal(before, one.module.weight.detach())
