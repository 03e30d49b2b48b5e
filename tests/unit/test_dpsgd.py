"""make_private: plain Opacus at k = 1, what it refuses and how it says so, and the ways a batch may come."""

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import datalens
from datalens.bounded.norm_topk import NormTopK
from datalens.errors import BudgetExceeded, DatalensError
from datalens.gradients.optimizer import Plan, PrivateOptimizer, make_private, plan_steps
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.events import SubsampledGaussianEvent
from datalens.privacy.ledger import Budget, Ledger, read_ledger

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

COUNT, BATCH = 64, 8
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-3, "accountant": "rdp-improved"}  # prv takes longer to look


def data(count: int = COUNT) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=random), torch.randint(0, 3, (count,), generator=random))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def private(model: nn.Module | None = None, **asked: Any) -> tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]:
    model = network() if model is None else model
    asked = {"loader": DataLoader(data(), batch_size=BATCH), "epochs": 2, "clip": 1.0, "noise_seed": 0, **asked}
    if "optimizer" not in asked:
        asked["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make_private(model, **{**BUDGET, **asked})


def train(model: nn.Module, optimizer: Any, batches: Any) -> int:
    steps = 0
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
    return steps


class TorchNoise:
    """What plain Opacus draws, in its order: a normal tensor per parameter."""

    origin = "seeded"

    def __init__(self, shapes: list[torch.Size]) -> None:
        self._random, self._shapes = torch.Generator().manual_seed(7), shapes

    def standard_normal(self, count: int) -> np.ndarray:
        drawn = [torch.normal(0.0, 1.0, size=shape, generator=self._random) for shape in self._shapes]
        return torch.cat([part.flatten() for part in drawn]).double().numpy()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Unequal ones, as Poisson samples are; one of them empty."""
    x, y = data().tensors
    return [(x[a:b], y[a:b]) for a, b in ((0, 9), (9, 12), (12, 12), (12, 25), (25, 33), (40, 41))]


@pytest.mark.parametrize("selector", ["norm", "dim", "none"])
def test_with_k_1_the_weights_are_those_of_plain_opacus(selector: Any) -> None:
    clip, sigma = 0.7, 1.3
    theirs = GradSampleModule(network())
    plain = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=BATCH,
        generator=torch.Generator().manual_seed(7),
    )
    train(theirs, plain, batches())
    model = network()
    compress = NormTopK(clip=clip, topk=1.0, selector=selector)
    schedule = Schedule(sigma=sigma, rate=0.1, steps=6, unit=compress.bound, l2_bound=compress.l2_bound)
    budget = Budget(epsilon=100.0, delta=1e-3, relation="add-remove", accountant="rdp-improved")
    noise: Any = TorchNoise([p.shape for p in model.parameters()])
    gate = GradientGate(Ledger.in_memory(budget), schedule, noise)
    plan = Plan(compress=compress, schedule=schedule, batch_size=BATCH)
    ours = GradSampleModule(model)
    optimizer = PrivateOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), plan=plan, gate=gate)
    assert train(ours, optimizer, batches()) == 6
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_three_lines_and_the_loop_stays_as_it_was() -> None:
    model, optimizer, loader = private(topk=0.8)
    assert len(loader) == 8
    sizes = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    assert len(sizes) == optimizer.taken == 16 and len(set(sizes)) > 2  # Poisson: not all of a size
    events = optimizer.gate.ledger.events
    assert all(isinstance(event, SubsampledGaussianEvent) and event.rate == BATCH / COUNT for event in events)
    spent = optimizer.gate.ledger.spent()
    assert 0.9 * 2.0 < spent <= 2.0
    assert "δ = 0.001, add-remove, rdp-improved" in optimizer.epsilon_spent()
    assert list(loader) == []  # the epochs are over
    optimizer._batches = None
    with pytest.raises(BudgetExceeded, match="all 16 steps"):
        train(model, optimizer, batches()[:1])


def test_what_a_plan_is_made_of() -> None:
    budget = Budget(epsilon=2.0, delta=1e-3, relation="add-remove", accountant="rdp-improved")
    facts: dict[str, Any] = {"budget": budget, "nominal_size": 100, "clip": 1.0}
    plan = plan_steps(**facts, batch_size=10, epochs=0.001)
    assert (plan.schedule.steps, plan.schedule.rate, plan.compress.topk, plan.batch_size) == (1, 0.1, 1.0, 10)
    with pytest.raises(DatalensError, match="batch-size must lie between 1"):
        plan_steps(**facts, batch_size=0, epochs=1)
    open_ended = plan_steps(**{**facts, "budget": replace(budget, epsilon=math.inf)}, batch_size=1, epochs=1, sigma=0.0)
    assert open_ended.schedule.sigma == 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_is_not_divided(reduction: str) -> None:
    model, optimizer, loader = private(epsilon=math.inf, clip=1e6, loss_reduction=reduction)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    plain = network()
    F.cross_entropy(plain(x), y, reduction="sum").backward()
    for ours, whole in zip(optimizer.params, plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, whole.grad / (BATCH if reduction == "mean" else 1))  # type: ignore[operator]


def test_noise_shrinks_with_the_bound() -> None:
    by_norm, by_dim, plain = (
        private(topk=topk, selector=selector)[1] for topk, selector in ((0.25, "norm"), (0.25, "dim"), (1.0, "none"))
    )
    for optimizer, bound in ((by_norm, 0.5), (by_dim, 1.0), (plain, 1.0)):
        event = optimizer.gate.schedule.event(repeats=1, step=0, noise="seeded")
        assert event.sigma == pytest.approx(optimizer.plan.schedule.sigma * bound)
        assert event.l2_bound == pytest.approx(bound, rel=1e-5)
    assert by_norm.plan.schedule.sigma == plain.plan.schedule.sigma


def test_sigma_given_solves_for_the_steps() -> None:
    _, optimizer, loader = private(sigma=2.0, epochs=None)
    schedule = optimizer.plan.schedule
    assert schedule.price(optimizer.gate.ledger.budget.pricing(), 1e-3) <= 2.0
    assert schedule.steps > 8 and len(loader) == 8
    with pytest.raises(BudgetExceeded, match="not even one"):
        private(sigma=0.2, epochs=None)
    with pytest.raises(BudgetExceeded, match="leave out"):
        private(sigma=0.5, epochs=50)
    with pytest.raises(DatalensError, match="--epochs"):
        private(epochs=None)


def test_virtual_steps_are_one_step() -> None:
    model, optimizer, loader = private()
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        for x, y in small:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="mean").backward()
            optimizer.step()
            sizes.append(len(x))
    assert max(sizes) <= 3 and len(sizes) > 8
    assert optimizer.taken == 8


def test_virtual_steps_add_up_to_the_whole_batch() -> None:
    """Without noise: the same step from one batch of eight, and from three parts of it."""
    weights = []
    for parts in ([8], [3, 3, 2]):
        model, optimizer, _ = private(epsilon=math.inf, topk=0.8)
        optimizer._batches = None
        x, y = (part[:8] for part in data().tensors)
        for number, (a, b) in enumerate(zip(x.split(parts), y.split(parts), strict=True)):
            optimizer.signal_skip_step(do_skip=number + 1 < len(parts))
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, three in zip(*weights, strict=True):
        torch.testing.assert_close(one, three)


def test_frozen_layers_and_parameter_groups() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[operator, index]
    before = model[0].weight.clone()  # type: ignore[index]
    groups = [{"params": [model[2].weight], "lr": 0.1}, {"params": [model[2].bias], "lr": 0.0}]  # type: ignore[index]
    bias = model[2].bias.clone()  # type: ignore[index]
    changed = model[2].weight.clone()  # type: ignore[index]
    made, optimizer, loader = private(model, optimizer=torch.optim.SGD(groups, lr=0.5))
    train(made, optimizer, loader)
    assert torch.equal(model[0].weight, before) and torch.equal(model[2].bias, bias)  # type: ignore[index]
    assert not torch.equal(model[2].weight, changed)  # type: ignore[index]


def test_noise_is_as_fine_as_the_parameter_it_is_for() -> None:
    """However coarse the first one is."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coarse, self.fine = nn.Linear(6, 5).to(torch.bfloat16), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fine(self.coarse(x.to(torch.bfloat16)).float())

    model = Mixed()
    made, optimizer, loader = private(model)
    x, y = next(iter(loader))
    F.cross_entropy(made(x), y).backward()
    optimizer.step()
    found = model.fine.weight.grad
    assert found is not None and model.coarse.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert not torch.equal(found, found.to(torch.bfloat16).float())


def test_a_ledger_on_disk_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made = private(ledger=path)
    train(made[0], made[1], made[2])
    made[1].gate.ledger.close()
    charged = made[1].gate.charged
    again = private(ledger=path)
    assert again[1].gate.charged == charged and again[1].gate.left == 0
    assert len(list(again[2])) == 16 - charged
    again[1].gate.ledger.close()
    _, events = read_ledger(path)
    assert all(event.noise == "seeded" for event in events if isinstance(event, SubsampledGaussianEvent))
    with pytest.raises(DatalensError, match="another budget"):
        private(ledger=path, epsilon=3.0)


def test_real_noise_is_the_operating_systems() -> None:
    made = private(noise_seed=None)
    train(made[0], made[1], made[2])
    assert {event.noise for event in made[1].gate.ledger.events if isinstance(event, SubsampledGaussianEvent)} == {
        "operating-system"
    }


def test_nobody_in_any_batch() -> None:
    """A rate so low that most samples are empty, the first one too: steps are taken on noise alone."""
    loader = DataLoader(data(3), batch_size=1)
    model, optimizer, sampled = private(loader=loader, nominal_size=1000, epochs=0.02)
    before = [p.clone() for p in model.parameters()]
    assert train(model, optimizer, sampled) == 20
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


class LongStream(Stream):
    def __len__(self) -> int:
        return COUNT


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"loader": DataLoader(data(), batch_size=8, drop_last=True)}, "drop_last"),
        ({"loader": DataLoader(Stream(), batch_size=8)}, "stream"),
        ({"loader": DataLoader(LongStream(), batch_size=8)}, "stream"),
        ({"loader": DataLoader(data(), sampler=WeightedRandomSampler([1.0] * 64, 64), batch_size=8)}, "WeightedRandom"),
        ({"loader": DataLoader(data(), sampler=RandomSampler(data(), replacement=True), batch_size=8)}, "replacement"),
        ({"loader": DataLoader(data(), batch_size=None)}, "batch_size"),
        ({"clip": 0.0}, "clip"),
        ({"topk": 1.5}, "topk"),
        ({"epochs": -1}, "epochs"),
        ({"epochs": 0}, "epochs must be a number above 0"),
        ({"epochs": math.inf}, "epochs must be a number above 0"),
        ({"sigma": -1.0}, "noise multiplier"),
        ({"sigma": 0.0}, "noise multiplier"),
        ({"sigma": math.inf}, "noise multiplier"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 2.0}, "delta"),
        ({"nominal_size": 3}, "batch-size"),
        ({"epsilon": 0.01, "accountant": "moments"}, "no noise brings 16 steps"),
    ],
)
def test_bad_input_is_one_clear_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(DatalensError, match=said) as caught:
        private(**asked)
    assert "\n" not in str(caught.value)


def test_a_batch_sampler_of_ones_own_is_refused() -> None:
    class Own(BatchSampler):
        pass

    loader = DataLoader(data(), batch_sampler=Own(RandomSampler(data()), 8, drop_last=False))
    with pytest.raises(DatalensError, match="Own would be replaced"):
        private(loader=loader)


def test_models_that_cannot_be_trained_are_named() -> None:
    with pytest.raises(DatalensError, match=r"layer norm \(BatchNorm1d\).*GroupNorm"):
        private(Normed())
    frozen = Normed()
    frozen.norm.requires_grad_(False)  # its statistics would still be taken from records
    with pytest.raises(DatalensError, match="BatchNorm1d"):
        private(frozen)
    with pytest.raises(DatalensError, match=r"layer 0 \(InstanceNorm1d\)"):
        private(nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True), nn.Linear(6, 3)))
    with pytest.raises(DatalensError, match=r"Opacus cannot train this model.*LSTM"):
        private(nn.LSTM(6, 3))
    model = network()
    with pytest.raises(DatalensError, match=r"parameter 2\.weight is trainable and not in the optimizer"):
        private(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))  # type: ignore[index]
    with pytest.raises(DatalensError, match="the model lacks"):
        private(model, optimizer=torch.optim.SGD([*model.parameters(), *network().parameters()], lr=0.1))
    model.requires_grad_(False)
    with pytest.raises(DatalensError, match="nothing to train"):
        private(model)


def test_a_private_optimizer_and_ghost_clipping_are_refused() -> None:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

    made = private()
    with pytest.raises(DatalensError, match="already"):
        private(network(), optimizer=made[1])
    with pytest.raises(DatalensError, match="ghost clipping"):
        private(GradSampleModuleFastGradientClipping(network(), max_grad_norm=1.0))


def test_misuse_of_the_loop_is_said() -> None:
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(DatalensError, match="no per-sample gradients"):
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(DatalensError, match="without a batch of the loader"):
        optimizer.step()
    optimizer.zero_grad()
    next(iter(loader))
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(DatalensError, match="two backward passes"):
        optimizer.step()


def test_a_layer_without_a_part_in_the_loss_is_said() -> None:
    model = network()
    model.add_module("idle", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign, index, operator]
    made, optimizer, loader = private(model)
    with pytest.raises(DatalensError, match="freeze what the loss does not depend on"):
        train(made, optimizer, loader)
    for p in made.parameters():
        p.requires_grad_(False)
    with pytest.raises(DatalensError, match="nothing to train"):
        optimizer.step()


def test_persons_are_summed_as_persons() -> None:
    """And a gate that was paid for records does not let them through."""
    model, optimizer, loader = private()
    x, y = next(batch for batch in loader if len(batch[0]))
    F.cross_entropy(model(x), y).backward()
    optimizer.whose, optimizer._batches = torch.zeros(len(x), dtype=torch.int64), None
    with pytest.raises(ValueError, match="another bound or privacy unit"):
        optimizer.step()


def test_replace_one_is_refused() -> None:
    budget = Budget(epsilon=1.0, delta=1e-3, relation="replace-one", accountant="rdp-improved")
    with pytest.raises(DatalensError, match="add-remove"):
        plan_steps(budget=budget, nominal_size=10, batch_size=1, epochs=1, clip=1.0)


def test_it_is_part_of_the_library() -> None:
    assert datalens.make_private is make_private and "make_private" in datalens.__all__
    assert inspect.signature(make_private).parameters["accountant"].default == "prv"
