"""What a layer writes into the model by itself has no noise: however it is written, it is noticed before it leaves."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.utils.data import DataLoader, TensorDataset

from datalens.errors import DatalensError
from datalens.gradients.optimizer import PrivateOptimizer, make_private
from datalens.gradients.watching import StateWatch

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

Three = tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)) + 2
RECORDS = TensorDataset(X, torch.arange(32) % 3)


def private(model: nn.Module, **asked: Any) -> Three:
    facts = {"epsilon": 2.0, "delta": 1e-3, "epochs": 10, "clip": 1.0, "accountant": "rdp-improved", "noise_seed": 0}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return make_private(model, optimizer, DataLoader(RECORDS, batch_size=32), **{**facts, **asked})


def learn(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Keeper(nn.Module):
    """Keeps the mean of what it sees, from the moment `keeps` is set."""

    kept: Tensor

    def __init__(self, write: Callable[["Keeper", Tensor], object], *, frozen: bool = False) -> None:
        super().__init__()
        if frozen:
            self.kept = nn.Parameter(torch.zeros(6), requires_grad=False)
        else:
            self.register_buffer("kept", torch.zeros(6))
        self._write, self.keeps = write, False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.keeps:
            self._write(self, x.detach().mean(dim=0))
        return x


def data_copy(layer: Keeper, mean: Tensor) -> None:
    layer.kept.data.copy_(mean)


def data_lerp(layer: Keeper, mean: Tensor) -> None:
    layer.kept.data.lerp_(mean, 0.1)


def data_new(layer: Keeper, mean: Tensor) -> None:
    layer.kept.data = mean


def one_bit(layer: Keeper, mean: Tensor) -> None:
    layer.kept.data[3] = -0.0


def unknowable(layer: Keeper, mean: Tensor) -> None:
    layer.kept.data[3] = math.nan


def from_numpy(layer: Keeper, mean: Tensor) -> None:
    layer.kept.detach().numpy()[:] = mean.numpy()


def in_no_grad(layer: Keeper, mean: Tensor) -> None:
    with torch.no_grad():
        layer.kept.copy_(mean)


def another_buffer(layer: Keeper, mean: Tensor) -> None:
    layer.register_buffer("also", mean)


WRITES = [data_copy, data_lerp, data_new, one_bit, unknowable, from_numpy, in_no_grad, another_buffer]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_layer_writes_is_refused_at_the_step(write: Any, frozen: bool) -> None:
    keeper = Keeper(write, frozen=frozen)
    model, optimizer, loader = private(nn.Sequential(keeper, nn.Linear(6, 3)))
    learn(model, optimizer, *next(iter(loader)))
    keeper.keeps = True
    charged = optimizer.gate.charged, optimizer.gate.left
    with pytest.raises(DatalensError, match=r"(buffer|parameter) 0\.(kept|also) of the model has changed") as caught:
        learn(model, optimizer, *next(iter(loader)))
    assert "\n" not in str(caught.value)
    assert optimizer.taken == 1 and (optimizer.gate.charged, optimizer.gate.left) == charged
    with pytest.raises(DatalensError, match="has changed"):  # and it does not leave otherwise either
        model.state_dict()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_after_the_last_step_it_does_not_leave_by_the_state_dict(write: Any, frozen: bool) -> None:
    """No further step looks: the model is asked for what it learned."""
    keeper = Keeper(write, frozen=frozen)
    model, optimizer, loader = private(nn.Sequential(keeper, nn.Linear(6, 3)))
    learn(model, optimizer, *next(iter(loader)))
    assert model.state_dict()
    keeper.keeps = True
    model(X)
    for out in (model.state_dict, model._module.state_dict, keeper.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(DatalensError, match="has changed"):
            out()


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_copy_takes_it_along(wrapped: bool) -> None:
    """Also where the model came with Opacus's hooks: a copy has no noise in it either."""
    keeper = Keeper(data_copy)
    plain = nn.Sequential(keeper, nn.Linear(6, 3))
    model, optimizer, loader = private(GradSampleModule(plain) if wrapped else plain)
    learn(model, optimizer, *next(iter(loader)))
    copies: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(model),
        lambda: copy.copy(model),
        lambda: copy.deepcopy(plain),
        lambda: torch.optim.swa_utils.AveragedModel(plain),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(keeper),  # a part
        lambda: torch.optim.swa_utils.AveragedModel(keeper),
        lambda: torch.save(keeper, io.BytesIO()),
    ]
    for good in (copies[0](), copies[3](), copies[5](), copies[6]()):
        assert copy.deepcopy(good).state_dict()
    copies[7]()
    early = copy.deepcopy(keeper)
    keeper.keeps = True
    model(X)
    assert copy.deepcopy(early).state_dict()  # a copy is of its own day
    for take in copies:
        with pytest.raises(DatalensError, match="has changed"):
            take()


def test_a_module_that_could_copy_itself_is_refused() -> None:
    class Own(GradSampleModule):
        def __deepcopy__(self, memo: Any) -> Any:
            return self._module.kept.clone()

    with pytest.raises(DatalensError, match=r"Own is a GradSampleModule of your own.*wrap the model in") as caught:
        private(Own(nn.Linear(6, 3)))
    assert "\n" not in str(caught.value)


def test_a_trainable_parameter_is_watched_too() -> None:
    """A codebook that follows the records' means, with gradients beside."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.keeps = nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            if self.keeps:
                self.layer.weight.data[0] = x.detach().mean(dim=0)
            return self.layer(x)

    codes = Codes()
    model, optimizer, loader = private(codes)
    learn(model, optimizer, *next(iter(loader)))
    codes.keeps = True
    with pytest.raises(DatalensError, match=r"parameter layer\.weight of the model has changed"):
        learn(model, optimizer, *next(iter(loader)))


@pytest.mark.parametrize("looking", ["eval", "no_grad"])
def test_looking_does_not_write_either(looking: str) -> None:
    """Passes that are no steps: what they leave in the model is refused at the next."""
    keeper = Keeper(data_copy)
    model, optimizer, loader = private(nn.Sequential(keeper, nn.Linear(6, 3)))
    keeper.keeps = True
    if looking == "eval":
        model.eval()
        keeper.train()
        model(X)
        model.train()
    else:
        with torch.no_grad():
            model(X)
    keeper.keeps = False
    with pytest.raises(DatalensError, match="has changed"):
        learn(model, optimizer, *next(iter(loader)))


def test_the_optimizers_own_steps_are_no_change() -> None:
    model, optimizer, loader = private(nn.Sequential(Keeper(data_copy), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    weights = []
    for _ in range(4):
        learn(model, optimizer, *next(iter(loader)))
        weights.append(model.state_dict()["_module.1.weight"].clone())
    assert optimizer.taken == 4 and not torch.equal(weights[0], weights[-1])
    copied = copy.deepcopy(model)
    learn(model, optimizer, *next(iter(loader)))
    assert torch.equal(copied.state_dict()["_module.1.weight"], weights[-1])  # a copy is of its own day
    assert copy.deepcopy(copied).state_dict()
    model._module[1].weight.data.add_(1)  # type: ignore[index, union-attr, operator]
    assert copied.state_dict() and copied._module[1].state_dict()  # type: ignore[index, union-attr]
    with pytest.raises(DatalensError, match="has changed"):
        assert model._module[1].state_dict()  # type: ignore[index, union-attr]


def test_a_step_that_breaks_off_is_remembered_as_far_as_it_came() -> None:
    model, optimizer, loader = private(nn.Linear(6, 3))
    own = optimizer.original_optimizer.step

    def torn(*arguments: Any) -> None:
        own(*arguments)
        raise KeyboardInterrupt

    optimizer.original_optimizer.step = torn  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        learn(model, optimizer, *next(iter(loader)))
    optimizer.original_optimizer.step = own  # type: ignore[method-assign]
    learn(model, optimizer, *next(iter(loader)))
    assert model.state_dict()


@pytest.mark.parametrize("inner", [False, True])
def test_weights_are_set_by_load_state_dict_between_steps(inner: bool) -> None:
    model, optimizer, loader = private(nn.Sequential(Keeper(data_copy), nn.Linear(6, 3)))
    into = model._module if inner else model
    before = {name: value.clone() for name, value in into.state_dict().items()}
    learn(model, optimizer, *next(iter(loader)))
    into.load_state_dict(before)
    learn(model, optimizer, *next(iter(loader)))
    assert optimizer.taken == 2
    model(X)
    with pytest.raises(DatalensError, match="between two steps"):
        into.load_state_dict(before)
    list(loader)  # a new pass forgets what was begun
    into.load_state_dict(before)


def test_what_load_state_dict_leaves_out_stays_watched() -> None:
    keeper = Keeper(data_copy)
    keeper.register_buffer("hidden", torch.zeros(6), persistent=False)
    model, optimizer, loader = private(nn.Sequential(keeper, nn.Linear(6, 3)))
    weights = {name: value.clone() for name, value in model.state_dict().items() if "kept" not in name}
    keeper.kept.data.fill_(1.0)
    model.load_state_dict(weights, strict=False)
    with pytest.raises(DatalensError, match=r"buffer 0\.kept"):
        learn(model, optimizer, *next(iter(loader)))
    model.load_state_dict({**weights, "_module.0.kept": torch.zeros(6)})
    keeper.hidden.data.fill_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(DatalensError, match=r"buffer 0\.hidden"):
        learn(model, optimizer, *next(iter(loader)))


def test_weights_loaded_into_a_copy_excuse_no_change_of_the_model() -> None:
    """A copy has the hooks of its original."""
    keeper = Keeper(data_copy)
    model, optimizer, loader = private(nn.Sequential(keeper, nn.Linear(6, 3)))
    learn(model, optimizer, *next(iter(loader)))
    copied = copy.deepcopy(model._module)
    keeper.keeps = True
    model(X)
    keeper.keeps = False
    copied.load_state_dict(copied.state_dict())
    with pytest.raises(DatalensError, match=r"buffer 0\.kept of the model has changed"):
        model.state_dict()


def test_a_layer_is_watched_whatever_its_name() -> None:
    keeper, model = Keeper(data_copy), nn.Sequential()
    model.add_module("what it saw", keeper)
    model.add_module("a head", nn.Linear(6, 3))
    made, optimizer, loader = private(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    learn(made, optimizer, *next(iter(loader)))
    made._module.load_state_dict(weights)
    learn(made, optimizer, *next(iter(loader)))
    keeper.keeps = True
    made(X)
    with pytest.raises(DatalensError, match=r"buffer what it saw\.kept of the model has changed"):
        keeper.state_dict()


def test_a_trial_that_finds_another_shape_is_refused_in_a_line() -> None:
    def longer(layer: Keeper, mean: Tensor) -> None:
        layer.kept = torch.cat([mean, mean])

    keeper = Keeper(longer)
    keeper.keeps = True
    with pytest.raises(DatalensError, match=r"buffer 0\.kept of the model has changed"):
        private(nn.Sequential(keeper, nn.Linear(6, 3)))


def test_moved_to_another_type_it_is_another_model() -> None:
    model, _, _ = private(nn.Linear(6, 3))
    model._module.weight.data = model._module.weight.data.double()
    with pytest.raises(DatalensError, match="parameter weight of the model has changed"):
        model.state_dict()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1 + 2j, 3j]),
        torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
        torch.tensor([True, False]),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.tensor([[1, 2], [3, 4]])[:, 0],  # not contiguous
        torch.tensor(7, dtype=torch.uint8),
        torch.zeros(0),
    ],
)
def test_buffers_of_all_kinds_are_watched(value: Tensor) -> None:
    layer = nn.Module()
    layer.register_buffer("value", value.clone())
    watch = StateWatch(layer)
    assert watch.changed() is None
    if value.numel():
        layer.value.data.view(-1)[0] = 0  # type: ignore[union-attr, operator]
        assert watch.changed() == "buffer value"
        watch.restore()
        assert watch.changed() is None and torch.equal(layer.value, value)  # type: ignore[arg-type]
    del layer._buffers["value"]
    assert watch.changed() == "buffer value"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_watched_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"mean": 1.0}

    with pytest.raises(DatalensError, match="get_extra_state"):
        private(Extra(6, 3))
    sparse = nn.Sequential(nn.Linear(6, 3), nn.Module())
    sparse[1].register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(DatalensError, match=r"buffer 1\.table cannot be watched"):
        StateWatch(sparse)
    rounded = nn.Module()
    rounded.register_buffer("table", torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8))
    with pytest.raises(DatalensError, match=r"buffer table cannot be watched"):
        StateWatch(rounded)
    with pytest.raises(DatalensError, match=r"parameter weight cannot be watched"):
        StateWatch(nn.LazyLinear(3))


class Saves(nn.Module):
    """Keeps the mean in a plain attribute, and has it saved."""

    mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(dim=0)
        return x


class BySaving(Saves):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "mean"] = self.mean


class ByAnotherDictionary(Saves):
    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {**super().state_dict(*args, **named), "mean": self.mean}


class ByHook(Saves):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda layer, found, prefix, _: found.update({prefix + "mean": layer.mean}))


@pytest.mark.parametrize("kind", [BySaving, ByAnotherDictionary, ByHook])
def test_a_layer_does_not_write_into_the_state_dict_itself(kind: type[Saves]) -> None:
    with pytest.raises(DatalensError, match=r"layer 0 .* has code of its own that makes or changes its state_dict"):
        private(nn.Sequential(kind(), nn.Linear(6, 3)))


def test_nor_by_a_hook_that_it_is_given_later() -> None:
    model, optimizer, loader = private(nn.Sequential(Saves(), nn.Linear(6, 3)))
    learn(model, optimizer, *next(iter(loader)))
    layer = model._module[0]
    layer.register_state_dict_post_hook(lambda layer, found, prefix, _: found.update({prefix + "mean": layer.mean}))
    for out in (model.state_dict, layer.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(DatalensError, match="code of its own"):
            out()


def test_layers_of_opacus_save_themselves_otherwise_and_are_let_through() -> None:
    for layer in (DPMultiheadAttention(6, 2), DPLSTM(6, 3)):
        StateWatch(layer).check()


def test_the_watch_is_the_wiring_of_sgd_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datalens sgd` has its own network; were one of its layers to keep something, it would be noticed."""
    from datalens.gradients.optimizer import plan_steps
    from datalens.methods.sgd import Trainer
    from datalens.privacy.dpsgd import GradientGate
    from datalens.privacy.ledger import Budget, Ledger
    from datalens.privacy.noise import SeededNoise
    from datalens.released.classifier import seeded

    budget = Budget(epsilon=2.0, delta=1e-3, relation="add-remove", accountant="rdp-improved")
    made = plan_steps(budget=budget, nominal_size=32, batch_size=16, epochs=4, clip=1.0)
    gate = GradientGate(Ledger.in_memory(budget), made.schedule, SeededNoise(0))
    model = seeded(0, shape=(6,), classes=3, network="linear")
    trainer = Trainer(model, made, gate, rate=0.1, falls=True)
    x, y = RECORDS.tensors
    trainer.step(x, y)
    state = trainer.state()
    trainer.step(x, y)
    trainer.load_state(state)
    trainer.step(x, y)
    next(model.parameters()).data.add_(1)
    with pytest.raises(DatalensError, match="has changed"):
        trainer.step(x, y)
    with pytest.raises(DatalensError, match="has changed"):
        trainer.state()
