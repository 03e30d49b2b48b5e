"""make_private, misused: all ways we know in which a step would not be of one Poisson sample's rows are refused."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.data import DataLoader, TensorDataset

from datalens.errors import DatalensError
from datalens.gradients import mixing
from datalens.gradients.optimizer import PrivateOptimizer, make_private

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:SyncBatchNorm")

Three = tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]
COUNT = 64


def data(width: int = 6, *, count: int = COUNT) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, width, generator=random), torch.arange(count) % 3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def private(model: nn.Module | None = None, *, workers: int = 0, batch: int = 16, **asked: Any) -> Three:
    model = network() if model is None else model
    asked = {"epsilon": 2.0, "delta": 1e-3, "epochs": 4, "clip": 1.0, "accountant": "rdp-improved", **asked}
    asked.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    asked.setdefault("loader", DataLoader(data(), batch_size=batch, num_workers=workers))
    asked.setdefault("noise_seed", 0)
    return make_private(model, **asked)


def learn(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def refused(said: str, step: Callable[[], object], optimizer: PrivateOptimizer) -> None:
    """In one line, and nothing was released; nor is anything of it kept for the next release."""
    before = optimizer.taken, [p.detach().clone() for p in optimizer.params]
    with pytest.raises(DatalensError, match=said) as caught:
        step()
    assert "\n" not in str(caught.value)
    assert optimizer.taken == before[0] and optimizer._sum is None
    assert all(torch.equal(a, b) for a, b in zip(optimizer.params, before[1], strict=True))
    assert all(p.grad is None and p.grad_sample is None for p in optimizer.params)
    assert optimizer._batches is not None and not optimizer._batches._sizes  # until the next pass


# --- one row is one record ----------------------------------------------------------------------------------------


class Frames(nn.Module):
    """Puts the frames of a record into the batch, as models of films do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x.reshape(-1, 2)).view(len(x), -1, 3).mean(dim=1)


class FramesAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames, self.head = Frames(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frames(x))


class Turned(nn.Module):
    """Takes the first dimension for time."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x.T.unsqueeze(-1)).mean(dim=0)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Frames(), r"a step on \d+ rows .* had drawn"),
        (FramesAndHead(), "layers of the model saw"),
        (Turned(), "a step on 6"),
    ],
)
def test_rows_that_are_not_records_are_refused(model: nn.Module, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatalensError, match=r"gets .* rows for 7 records"):
        private(model)
    monkeypatch.setattr(mixing, "_turned", lambda *_: "")  # where it could not be tried: refused at the step
    made, optimizer, loader = private(model)
    x, y = next(batch for batch in loader if len(batch[0]) not in (0, 6))
    next(iter(loader))  # and a pass that was begun anew does not help
    refused(said, lambda: learn(made, optimizer, x, y), optimizer)


def test_such_rows_are_longer_together_than_one_record_may_be() -> None:
    """What the refusal above is for."""
    model = GradSampleModule(Frames())
    x = torch.ones(1, 600)
    F.cross_entropy(model(x), torch.tensor([0])).backward()
    _, optimizer, _ = private(clip=0.01)
    total = optimizer.plan.compress.sum([p.grad_sample for p in model.parameters()])  # type: ignore[misc]
    assert float(total.private_total.norm()) > 50 * total.l2_bound


def test_batch_first_is_how_it_is() -> None:
    with pytest.raises(DatalensError, match="batch_first=False"):
        private(GradSampleModule(network(), batch_first=False))
    private(GradSampleModule(network()))


@pytest.mark.parametrize(("inside", "outside"), [("mean", "sum"), ("sum", "mean")])
def test_a_module_that_was_wrapped_for_another_loss_is_refused(inside: str, outside: str) -> None:
    """Its rows would be multiplied by the number of records in the batch, or not, which one record moves."""
    with pytest.raises(DatalensError, match=f"loss_reduction={outside!r}.*{inside!r}") as caught:
        private(GradSampleModule(network(), loss_reduction=inside), loss_reduction=outside)
    assert "\n" not in str(caught.value)
    private(GradSampleModule(network(), loss_reduction=inside), loss_reduction=inside)


def test_it_is_the_hooks_that_count() -> None:
    """What the module says of itself is not what it does, once its hooks were added anew; nor need layers agree."""
    model = GradSampleModule(network())
    model.remove_hooks()
    with pytest.raises(DatalensError, match="has no hooks"):
        private(model)
    model.add_hooks(loss_reduction="sum")
    assert model.loss_reduction == "mean"
    with pytest.raises(DatalensError, match="'sum'"):
        private(model)
    model.remove_hooks()
    model.add_hooks(batch_first=False)
    with pytest.raises(DatalensError, match="batch_first=False"):
        private(model)
    made, optimizer, loader = private(batch=COUNT)
    learn(made, optimizer, *next(iter(loader)))
    made.remove_hooks()
    made.add_hooks(loss_reduction="sum")  # and later, too
    refused("'sum'", lambda: learn(made, optimizer, *next(iter(loader))), optimizer)
    for unknown in ("median", "none"):
        with pytest.raises(DatalensError, match="mean or sum"):
            private(loss_reduction=unknown)
    nested = nn.Sequential(GradSampleModule(network(), loss_reduction="sum"), nn.Linear(3, 3))
    with pytest.raises(DatalensError, match="hooks already"):
        private(nested)


@pytest.mark.parametrize(("inside", "others", "one"), [("sum", 99.0, -1e3), ("mean", 0.01, 1.0)])
def test_the_wrong_reduction_moves_the_sum_further_than_is_paid_for(inside: str, others: float, one: float) -> None:
    """What the refusals above are for. The gradient of a record is the record here, and C = 1."""
    outside = {"sum": "mean", "mean": "sum"}[inside]
    compress = private()[1].plan.compress

    def total(records: list[float], reduction: str) -> Tensor:
        model = GradSampleModule(nn.Linear(1, 1, bias=False), loss_reduction=inside)
        out = model(torch.tensor(records)[:, None])
        (out.mean() if reduction == "mean" else out.sum()).backward()
        return compress.sum([p.grad_sample for p in model.parameters()]).private_total  # type: ignore[misc]

    def moved(reduction: str) -> float:
        return float((total([others] * 99 + [one], reduction) - total([others] * 99, reduction)).norm())

    assert moved(inside) <= compress.l2_bound and moved(outside) > 1.95 * compress.l2_bound


# --- a step is one sample -----------------------------------------------------------------------------------------


def test_records_from_elsewhere_are_refused() -> None:
    model, optimizer, loader = private()
    x, y = data().tensors
    for _ in loader:
        refused(r"a step on 64 rows", lambda: learn(model, optimizer, x, y), optimizer)
        break


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_used_once(workers: int) -> None:
    """Workers fetch ahead: that samples were drawn is not enough."""
    model, optimizer, loader = private(workers=workers, epochs=20, batch=20)
    assert optimizer._batches is not None
    for x, y in loader:
        learn(model, optimizer, x, y)
        if list(optimizer._batches._sizes)[:1] != [len(x)]:  # where the next is as large by chance, nothing is noticed
            refused("a step (on|without)", lambda x=x, y=y: learn(model, optimizer, x, y), optimizer)  # type: ignore[misc]
            break
    else:
        raise AssertionError("all of one size")


def test_two_batches_are_two_steps() -> None:
    model, optimizer, loader = private()
    steps = iter(loader)
    (x1, y1), (x2, y2) = next(steps), next(steps)
    x, y = torch.cat([x1, x2]), torch.cat([y1, y2])
    refused("a step on", lambda: learn(model, optimizer, x, y), optimizer)
    (x1, y1), (x2, y2) = list(loader)[:2]

    def both() -> None:
        (F.cross_entropy(model(x1), y1) + F.cross_entropy(model(x2), y2)).backward()
        optimizer.step()

    next(iter(loader))
    refused("2 forward passes", both, optimizer)


@pytest.mark.parametrize("inner", [False, True])
def test_public_images_beside_records_are_refused(inner: bool) -> None:
    """Row i would be that of the i-th record and the i-th public image: one record fewer moves them all."""
    model, optimizer, loader = private()
    used = model._module if inner else model
    x, y = next(iter(loader))

    def both() -> None:
        (F.cross_entropy(used(x), y) + F.cross_entropy(used(torch.zeros_like(x)), y)).backward()
        optimizer.step()

    refused("2 forward passes", both, optimizer)


def test_looking_on_the_way_is_allowed() -> None:
    model, optimizer, loader = private()
    steps = 0
    for x, y in loader:
        model.eval()
        model(x)
        model.train()
        with torch.no_grad():
            model(x)
        learn(model, optimizer, x, y)
        steps += 1
    assert optimizer.taken == steps == 4


def test_learning_in_eval_mode_is_refused_in_a_line() -> None:
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    model.eval()
    with pytest.raises(DatalensError, match=r"Linear in eval\(\) mode.*call model\.train"):
        F.cross_entropy(model(x), y).backward()
    model.disable_hooks()  # a look at what an image does to the loss, say
    F.cross_entropy(model(x), y).backward()
    assert optimizer.taken == 0


def test_an_empty_batch_is_a_step() -> None:
    """Where nobody was drawn, noise is all there is; who leaves it out shows that nobody was."""
    model, optimizer, loader = private(batch=1, epochs=1)

    def skipping() -> None:
        for x, y in loader:
            if len(x):
                learn(model, optimizer, x, y)

    with pytest.raises(DatalensError, match=r"had drawn 0 records: make one step of every batch \(empty ones too\)"):
        skipping()


# --- virtual steps ------------------------------------------------------------------------------------------------


def released(optimizer: PrivateOptimizer) -> list[int]:
    """Fills up with the rows of every release."""
    rows: list[int] = []
    release = optimizer.gate.release

    def counted(total: Any) -> Any:
        rows.append(optimizer._rows)
        return release(total)

    optimizer.gate.release = counted  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_was_broken_off_leaves_nothing_behind(after_step: bool, workers: int) -> None:
    model, optimizer, loader = private(batch=COUNT, workers=workers)  # everybody is in every sample
    rows = released(optimizer)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=20, optimizer=optimizer) as small:
        for number, (x, y) in enumerate(small):
            if number == 1 and not after_step:
                break
            learn(model, optimizer, x, y)
            if number == 1:
                break
        for x, y in small:
            learn(model, optimizer, x, y)
    assert rows == [COUNT]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_begins_anew(workers: int) -> None:
    """What an earlier one drew, and no step was made of, is forgotten; what was paid for is not."""
    model, optimizer, loader = private(workers=workers, epochs=10)
    assert optimizer.plan.schedule.steps == 40 and optimizer.gate._block == 4
    for _ in range(3):
        learn(model, optimizer, *next(iter(loader)))
    assert (optimizer.gate.charged, optimizer.gate.left) == (4, 1)
    for _ in range(20):
        for x, y in loader:
            learn(model, optimizer, x, y)
    assert optimizer.taken == 40


def test_a_part_that_was_left_out_is_missed() -> None:
    model, optimizer, loader = private(batch=COUNT)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=20, optimizer=optimizer) as small:
        parts = list(small)
        for x, y in parts[:2]:
            learn(model, optimizer, x, y)
        assert optimizer._sum is not None and optimizer.taken == 0
        learn(model, optimizer, *parts[2][:2])
        refused("a step on 48 rows", lambda: learn(model, optimizer, parts[3][0][:0], parts[3][1][:0]), optimizer)


# --- what is left of a step ---------------------------------------------------------------------------------------


def test_what_was_refused_is_in_no_later_sum() -> None:
    model, optimizer, loader = private()
    rows = released(optimizer)
    x, y = next(iter(loader))
    F.cross_entropy(model(torch.cat([x, x])), torch.cat([y, y])).backward()
    with pytest.raises(DatalensError):
        optimizer.step()
    sizes = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()  # and nobody says zero_grad
        optimizer.step()
        sizes.append(len(x))
    assert rows == sizes


def test_the_optimizer_that_was_given_makes_no_steps_any_more() -> None:
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    made, optimizer, loader = private(model, optimizer=own)
    slower = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x, y = next(iter(loader))
    F.cross_entropy(made(x), y).backward()
    before = model[0].weight.detach().clone()
    with pytest.raises(DatalensError, match="whose gradients have no noise"):
        own.step()
    assert torch.equal(model[0].weight, before)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    with pytest.raises(DatalensError, match="whose gradients have no noise"):
        own.step()
    slower.step()
    assert own.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_gradient_without_noise_is_never_followed(when: str) -> None:
    """One that was left from before, or of what was frozen between the two passes and the step."""
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "before":
        model[2].weight.grad = torch.ones_like(model[2].weight)
        model[2].requires_grad_(False)
    made, optimizer, loader = private(model, optimizer=own)
    before = model[2].weight.detach().clone()
    x, y = next(iter(loader))
    F.cross_entropy(made(x), y).backward()
    model[2].requires_grad_(False)
    optimizer.step()
    assert optimizer.taken == 1 and torch.equal(model[2].weight, before)


def test_a_private_optimizer_is_not_copied() -> None:
    model, optimizer, loader = private()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(DatalensError, match=r"state_dict\(\)"):
            copied(optimizer)
    learn(model, optimizer, *next(iter(loader)))
    assert optimizer.taken == 1 and optimizer.state_dict()["param_groups"]


def test_one_model_has_one_budget() -> None:
    model = network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    made, _, _ = private(model, optimizer=own)
    for again in (model, made):
        with pytest.raises(DatalensError, match="a second budget"):
            private(again)
    other = network()
    with pytest.raises(DatalensError, match="a second budget"):
        private(other, optimizer=own)
    with pytest.raises(DatalensError, match="hooks already"):
        private(copy.deepcopy(made)._module)
    other.load_state_dict(model.state_dict())
    private(other)


# --- layers that keep or mix records ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        nn.BatchNorm1d(5, track_running_stats=False).requires_grad_(False),
        nn.SyncBatchNorm(5, track_running_stats=False).requires_grad_(False),
    ],
)
def test_batch_norm_without_statistics_mixes_records_too(layer: nn.Module) -> None:
    with pytest.raises(DatalensError, match=r"layer 1 \((Sync)?BatchNorm.*GroupNorm"):
        private(nn.Sequential(nn.Linear(6, 5), layer, nn.Linear(5, 3)))


class Remembers(nn.Module):
    mean: Tensor

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self._anew = anew

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.detach().mean(dim=0)
            self.mean = now if self._anew else self.mean.lerp_(now, 0.1)
        return x


@pytest.mark.parametrize("anew", [True, False])
def test_a_layer_that_remembers_records_is_noticed(anew: bool) -> None:
    """When it is handed over, and what it remembered by then is gone; or when it begins to (test_watched_model.py)."""
    layer = Remembers(anew=anew)
    with pytest.raises(DatalensError, match=r"buffer 0\.mean of the model has changed"):
        private(nn.Sequential(layer, nn.Linear(6, 3)))
    assert torch.equal(layer.mean, torch.zeros(6))
    made, optimizer, loader = private(nn.Sequential(layer.eval(), nn.Linear(6, 3)))
    layer.train()
    x, y = next(iter(loader))
    refused(r"buffer 0\.mean of the model has changed", lambda: learn(made, optimizer, x, y), optimizer)


def test_a_buffer_that_stays_is_no_trouble() -> None:
    made, optimizer, loader = private(nn.Sequential(Remembers(anew=True).eval(), nn.Linear(6, 3)))
    made._module[0].train = lambda mode=True: made._module[0]  # type: ignore[index, assignment, method-assign, union-attr]
    learn(made, optimizer, *next(iter(loader)))
    assert optimizer.taken == 1


# --- numbers and words --------------------------------------------------------------------------------------------


def test_under_autocast_a_step_is_as_private() -> None:
    """Gradients are in half precision then, and parameters are not."""
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert {p.grad_sample.dtype for p in optimizer.params} == {torch.bfloat16}  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.taken == 1


def test_a_weighed_mean_is_no_mean() -> None:
    """docs/dpsgd.md says so, and that nothing can notice: it is divided by the weights of all records of the batch."""
    compress, weight = private()[1].plan.compress, torch.tensor([1.0, 100.0, 1.0])
    x, y = data(count=90).tensors
    x, y = torch.cat([x[y != 1], x[y == 1][:1]]), torch.cat([y[y != 1], y[y == 1][:1]])

    def total(count: int, **asked: Any) -> Tensor:
        model = GradSampleModule(network())
        F.cross_entropy(model(x[:count]), y[:count], **asked).backward()
        return compress.sum([p.grad_sample for p in model.parameters()]).private_total  # type: ignore[misc]

    assert float((total(len(x)) - total(len(x) - 1)).norm()) <= compress.l2_bound
    assert float((total(len(x), weight=weight) - total(len(x) - 1, weight=weight)).norm()) > 10 * compress.l2_bound


def test_what_is_not_private_says_so_with_its_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ({"epsilon": 2.0}, {"epsilon": math.inf, "noise_seed": None}, {"epsilon": 2.0, "noise_seed": None}):
        spent = private(**asked)[1].epsilon_spent()
        private_at_all = asked == {"epsilon": 2.0, "noise_seed": None}
        assert ("NOT PRIVATE" in spent) == ("NOT PRIVATE" in capsys.readouterr().err) == (not private_at_all)


def test_budgets_that_promise_little_are_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    private(epsilon=50.0, delta=0.1)
    said = capsys.readouterr().err
    assert "delta 0.1 is more than 1 / 64 records" in said and "epsilon 50 is more than 10" in said
