"""Models and collate functions that mix records are found by trial; those that do not are let through."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from datalens.bounded.norm_topk import NormTopK
from datalens.errors import DatalensError
from datalens.gradients import mixing
from datalens.gradients.optimizer import PrivateOptimizer, make_private

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

Three = tuple[GradSampleModule, PrivateOptimizer, DataLoader[Any]]
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)) + 2
RECORDS = TensorDataset(X, torch.arange(32) % 3)


def private(model: nn.Module, records: Dataset[Any] = RECORDS, *, collate: Any = None, **asked: Any) -> Three:
    facts = {"epsilon": 2.0, "delta": 1e-3, "epochs": 10, "clip": 1.0, "accountant": "rdp-improved", "noise_seed": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(records, batch_size=min(32, len(records)), collate_fn=collate)  # type: ignore[arg-type]
    return make_private(model, optimizer, loader, **{**facts, **asked})


def learn(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Net(nn.Module):
    """A head on what `look` makes of a batch."""

    def __init__(self, look: Callable[[Tensor], Tensor], *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.drop, self.head = look, nn.Dropout(dropout), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.look(x)))


def blended(x: Tensor) -> Tensor:
    return 0.9 * x + 0.1 * x[torch.randperm(len(x))]


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(dim=0),
    "detached mean": lambda x: x - x.detach().mean(dim=0),
    "spread": lambda x: x / (x.std(dim=0) + 1),
    "a little": lambda x: x + 0.01 * x.sum(dim=0),
    "the row before": lambda x: x + 0.1 * x.roll(1, dims=0),
    "mixup": blended,
    "attention": lambda x: F.softmax(x @ x.T / 100, dim=1) @ x,
    "the largest": lambda x: x / x.abs().max(),
    "ranks": lambda x: x + x.argsort(dim=0),
    "how many": lambda x: x / len(x),
    "place": lambda x: x + torch.arange(len(x))[:, None],
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_records_is_refused(kind: str, dropout: float) -> None:
    model = Net(MIXING[kind], dropout=dropout)
    with pytest.raises(DatalensError, match="the model mixes records") as caught:
        private(model)
    assert "\n" not in str(caught.value)
    model.look = lambda x: x  # and nothing of the attempt is left: the same model may be given again
    private(model)


def test_it_is_tried_in_the_mode_in_which_it_trains() -> None:
    class OnlyThen(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x - x.mean(dim=0) if self.training else x)

    with pytest.raises(DatalensError, match="mixes records"):
        private(OnlyThen(blended))


def test_a_model_that_mixes_in_large_batches_only_is_found_in_a_real_one() -> None:
    model, _, _ = private(Net(lambda x: x - x.mean(dim=0) if len(x) > 20 else x))
    with pytest.raises(DatalensError, match="in a batch of 32, its output for one record changed"):
        model(X)


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_is_called_otherwise_is_tried_when_it_is_first_called(named: bool) -> None:
    """`make_private` can only guess how; with what it is then called, however long the first batches are."""

    class Two(Net):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.head(self.look(x) * scale)

    scale = torch.ones(32, 1)
    calls: list[Callable[[nn.Module], Tensor]] = [lambda m: m(X, scale=scale), lambda m: m(X, scale)]
    model, optimizer, _ = private(Two(MIXING["mean"]))
    model(X[:0], scale[:0])
    model(X[:1], scale[:1])
    with pytest.raises(DatalensError, match="mixes records"):
        calls[named](model)
    model, optimizer, _ = private(Two(lambda x: x))
    calls[named](model)
    assert optimizer._tried


def test_what_cannot_be_tried_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Loss(nn.Module):
        """Returns one number, as models do that are given the labels."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y)

    model, _, loader = private(Loss())
    assert "could not be tried" not in capsys.readouterr().err
    for _ in range(2):
        model(*next(iter(loader)))
    said = capsys.readouterr().err
    assert said.count("could not be tried whether the model mixes records (no output has one row per record)") == 1


def test_randomness_of_ones_own_is_refused() -> None:
    own = torch.Generator().manual_seed(0)
    with pytest.raises(DatalensError, match="twice the same"):
        private(Net(lambda x: x + torch.randn(x.shape, generator=own)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(9, 8), DPMultiheadAttention(8, 2, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = self.embed(x)
        return {"out": self.head(self.drop(self.attend(seen, seen, seen)[0].mean(dim=1)))}


def convolutional() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.5), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


HONEST: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "plain": (lambda: Net(lambda x: x), X),
    "dropout": (lambda: Net(lambda x: x, dropout=0.5), X),
    "dropout as a function": (lambda: Net(lambda x: F.dropout(x, 0.5)), X),
    "noise": (lambda: Net(lambda x: x + torch.randn_like(x)), X),
    "noise of numpy's": (lambda: Net(lambda x: x + np.random.normal()), X),
    "noise of Python's": (lambda: Net(lambda x: x * random.random()), X),
    "a row's own mean": (lambda: Net(lambda x: x - x.mean(dim=1, keepdim=True)), X),
    "images": (convolutional, torch.rand(32, 1, 8, 8)),
    "bytes": (lambda: Net(lambda x: x.float() / 255), torch.randint(0, 256, (32, 6), dtype=torch.uint8)),
    "words": (Attending, torch.randint(0, 9, (32, 5))),
    "all the same words": (Attending, torch.zeros(32, 5, dtype=torch.int64)),
    "what it is given is written into": (lambda: Net(lambda x: x.mul_(2)), X.clone()),
    "not a number": (lambda: Net(lambda x: x.log()), torch.zeros(32, 6) - 1),
}


@pytest.mark.parametrize("kind", HONEST)
def test_models_that_mix_nothing_are_let_through(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, x = HONEST[kind]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    before = make()
    torch.set_rng_state(states[0])
    made, optimizer, loader = private(before, TensorDataset(x, torch.arange(32) % 3))
    assert torch.equal(torch.get_rng_state(), states[0])  # as if nothing had been drawn
    assert random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]  # type: ignore[union-attr]
    kept = x.clone()
    batch, y = next(iter(loader))
    out = made(batch)
    F.cross_entropy(out["out"] if isinstance(out, dict) else out, y).backward()
    optimizer.step()
    assert optimizer.taken == 1 and optimizer._tried and torch.equal(x, kept)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_records(count: int) -> None:
    records = TensorDataset(X[:count], torch.arange(count))
    loader = DataLoader(records, batch_size=1)
    for look, mixes in ((lambda x: x, False), (MIXING["mean"], count > 1)):
        model = Net(look)
        asked: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-3, "epochs": 1, "clip": 1.0, "accountant": "rdp-improved"}
        if mixes:
            with pytest.raises(DatalensError, match="mixes records"):
                make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **asked)
        else:
            make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **asked)


class Masked(Net):
    """Its last column, or numbers of each row, are so large that all others are nothing beside them."""

    def __init__(self, look: Callable[[Tensor], Tensor], mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__(look)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(super().forward(x))


@pytest.mark.parametrize("value", [-1e9, -math.inf])
@pytest.mark.parametrize("kind", ["mean", "detached mean", "a little", "the row before", "how many", "place"])
def test_a_masked_class_hides_no_mixing(kind: str, value: float) -> None:
    """Logits of classes that are left out are often -1e9: what moves beside them is small only in comparison."""

    def column(z: Tensor) -> Tensor:
        return torch.cat([z, torch.full((len(z), 1), value)], dim=1)

    for mask in (column, lambda z: torch.cat([z, 1e9 * z[:, :1]], dim=1)):
        with pytest.raises(DatalensError, match="the model mixes records"):
            private(Masked(MIXING[kind], mask))
        private(Masked(lambda x: x, mask))


@pytest.mark.parametrize("kind", ["mean", "a little", "how many"])
def test_a_mask_of_each_records_own_hides_none_either(kind: str) -> None:
    """Every class is masked in some row: no column is without large numbers."""

    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            masked = F.one_hot((x[:, 0].abs() * 1000).long() % 3, 3).bool()
            return super().forward(x).masked_fill(masked, -1e9)

    assert {int(v * 1000) % 3 for v in X[:7, 0].abs()} == {0, 1, 2}
    with pytest.raises(DatalensError, match="the model mixes records"):
        private(Own(MIXING[kind]))
    private(Own(lambda x: x))


def test_a_collate_function_that_masks_hides_no_mixing() -> None:
    def centred(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return torch.cat([x - x.mean(dim=0), torch.full((len(x), 1), -1e9)], dim=1), y

    with pytest.raises(DatalensError, match=r"the collate function .* mixes records"):
        private(nn.Linear(7, 3), collate=centred)


def test_numbers_that_are_rounded_otherwise_are_not_mixed() -> None:
    """One output is 0 but for rounding, beside others that are not; and no output is larger than 1e-9."""
    first, second = torch.tensor([[1.0, 1e-8], [2.0, -1e-8]]), torch.tensor([[1.0 + 1e-6, 2e-8], [2.0, 1e-8]])
    assert not mixing._far([first], [second], mixing.NEAR)
    assert mixing._far([1e-9 * first], [1.1e-9 * first], mixing.NEAR)
    loud = torch.linspace(1e4, 1e5, 20).repeat(2, 1)
    loud[:, 3] = 1e-2  # what rounding leaves of a difference of such numbers
    assert not mixing._far([loud], [loud + 1e-2], mixing.NEAR)
    assert mixing._far([torch.tensor([math.inf])], [torch.tensor([1.0])], mixing.NEAR)
    assert not mixing._far([torch.tensor([math.inf, math.nan])], [torch.tensor([math.inf, math.nan])], mixing.SAME)
    assert not mixing._far([torch.zeros(2, 0)], [torch.zeros(2, 0)], mixing.SAME)


def test_half_precision_is_let_through_and_mixing_in_it_is_not() -> None:
    made, optimizer, loader = private(Net(lambda x: x))
    x, y = next(iter(loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(made(x), y).backward()
    optimizer.step()
    made, optimizer, _ = private(Net(lambda x: x))
    made._module.look = MIXING["mean"]  # type: ignore[assignment]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(DatalensError, match="mixes records"):
        made(x)


# --- collate functions ----------------------------------------------------------------------------------------------


def mixup(draw: Callable[[int], Any], share: Callable[[], float]) -> Callable[[list[Any]], Any]:
    def mixed_up(items: list[Any]) -> Any:
        x, y = default_collate(items)
        order, lam = torch.as_tensor(draw(len(x))), share()
        return lam * x + (1 - lam) * x[order], y

    return mixed_up


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "torch": mixup(torch.randperm, lambda: 0.7),
    "numpy": mixup(np.random.permutation, lambda: float(np.random.beta(0.4, 0.4))),
    "Python": mixup(lambda n: random.sample(range(n), n), lambda: random.betavariate(0.4, 0.4)),
    "the next": mixup(lambda n: torch.arange(n).roll(1), lambda: 0.9),
    "centred": lambda items: (torch.stack([x for x, _ in items]) - X[: len(items)].mean(), torch.zeros(len(items))),
    "labels": lambda items: (default_collate(items)[0], default_collate(items)[1].roll(1)),
    "arrays": lambda items: (np.stack([x.numpy() for x, _ in items]).cumsum(axis=0), np.zeros(len(items))),
}


@pytest.mark.parametrize("kind", COLLATES)
def test_a_collate_function_that_mixes_records_is_refused(kind: str) -> None:
    with pytest.raises(DatalensError, match=r"the collate function .* mixes records") as caught:
        private(Net(lambda x: x), collate=COLLATES[kind])
    assert "\n" not in str(caught.value)


def test_randomness_of_its_own_is_refused_too() -> None:
    own = np.random.default_rng()
    with pytest.raises(DatalensError, match="twice the same"):
        private(Net(lambda x: x), collate=mixup(own.permutation, lambda: 0.7))


def test_padding_to_the_longest_is_refused_and_to_a_length_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """By the longest, one record adds to the rows of all others."""
    words = [(torch.ones(2 + number % 5), number % 3) for number in range(32)]

    def longest(items: list[Any]) -> Any:
        return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])

    def six(items: list[Any]) -> Any:
        return torch.stack([F.pad(x, (0, 6 - len(x))) for x, _ in items]), torch.tensor([y for _, y in items])

    with pytest.raises(DatalensError, match=r"longest mixes records.*pad nothing"):
        private(Net(lambda x: x), words, collate=longest)  # type: ignore[arg-type]
    private(Net(lambda x: x), words, collate=six)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "six mixed no records in a trial; make sure that it never does (docs/dpsgd.md)" in said


def test_collate_functions_that_mix_nothing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return x + torch.randn_like(x), y

    model, optimizer, loader = private(Net(lambda x: x), collate=noisy)
    assert "noisy mixed no records in a trial" in capsys.readouterr().err
    learn(model, optimizer, *next(iter(loader)))
    private(Net(lambda x: x), collate=lambda items: list(zip(*items, strict=True)))
    assert "makes batches that cannot be read" in capsys.readouterr().err
    one = TensorDataset(X[:1], torch.zeros(1, dtype=torch.int64))
    loader = DataLoader(one, batch_size=1, collate_fn=noisy)
    head = nn.Linear(6, 3)
    asked: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-3, "epochs": 1, "clip": 1.0, "accountant": "rdp-improved"}
    make_private(head, torch.optim.SGD(head.parameters(), lr=0.1), loader, **asked)
    assert "could not be tried with so few records" in capsys.readouterr().err


def test_mixed_rows_move_the_sum_further_than_is_paid_for() -> None:
    """What the refusals are for: a record with large numbers moves all others' rows as well."""
    compress = NormTopK(clip=0.1)
    far = torch.cat([X[:20], 100 * torch.ones(1, 6)])
    y = torch.arange(21) % 3

    def total(look: Callable[[Tensor], Tensor], count: int) -> Tensor:
        model = GradSampleModule(Net(look))
        F.cross_entropy(model(far[:count]), y[:count]).backward()
        return compress.sum([p.grad_sample for p in model.parameters()]).private_total  # type: ignore[misc]

    def moved(look: Callable[[Tensor], Tensor]) -> float:
        return float((total(look, 21) - total(look, 20)).norm()) / compress.l2_bound

    assert moved(lambda x: x) <= 1 and moved(MIXING["mean"]) > 4 and moved(MIXING["place"]) <= 1


# --- the first dimension of every layer is the records ----------------------------------------------------------------

MOMENTS = 8  # of each record, and as many records


class Turned(nn.Module):
    """Mixes nothing, but puts time first: a row of gradients is of one moment of all records."""

    def __init__(self, *, turned: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each, self._turned = nn.Linear(6, 3), turned

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x.transpose(0, 1)).mean(dim=0) if self._turned else self.each(x).mean(dim=1)


class Placed(nn.Module):
    """Learns a vector for every moment, which all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Embedding(MOMENTS, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.place(torch.arange(MOMENTS))).mean(dim=1))


def moments() -> Tensor:
    return torch.randn(MOMENTS, MOMENTS, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("make", "what"), [(Turned, r"each \(Linear\)"), (Placed, r"place \(Embedding\)")])
def test_layers_whose_first_dimension_is_not_the_records_are_refused(
    make: Callable[[], nn.Module], what: str, halves: bool
) -> None:
    x, model = moments(), make()
    if halves:
        x, model = x.bfloat16(), model.bfloat16()
    records = TensorDataset(x, torch.arange(MOMENTS) % 3)
    with pytest.raises(DatalensError, match=f"layer {what} gets {MOMENTS} rows for 7 records"):
        private(model, records)


def test_as_many_moments_as_rows_of_the_trial_hide_nothing() -> None:
    x = moments()[:, :7]
    with pytest.raises(DatalensError, match="gets 7 rows for 6 records"):
        private(Turned(), TensorDataset(x, torch.arange(MOMENTS) % 3))


def test_a_model_that_returns_its_loss_is_looked_at_too() -> None:
    """It has no output with a row for each record, so whether it mixes them cannot be told."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Turned()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().sum()

    with pytest.raises(DatalensError, match=f"layer inner.each .* gets {MOMENTS} rows for 7 records"):
        private(Loss(), TensorDataset(moments(), torch.arange(MOMENTS) % 3))


def test_a_model_that_needs_as_many_records_is_looked_at_as_far_as_that_goes() -> None:
    def picky(x: Tensor) -> Tensor:
        if len(x) < 7:
            raise ValueError("too few")
        return x - x.mean(dim=0)

    with pytest.raises(DatalensError, match="mixes records"):
        private(Net(picky))


def test_a_layer_that_does_not_learn_may_turn_its_input() -> None:
    model = nn.Sequential(Turned(), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(moments(), torch.arange(MOMENTS) % 3), batch_size=MOMENTS)
    make_private(model, optimizer, loader, epsilon=2.0, delta=1e-3, epochs=1, clip=1.0, accountant="rdp-improved")


def test_recurrent_layers_are_let_through() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look, self.head = DPLSTM(6, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.look(x)[0].mean(dim=1))

    made, optimizer, loader = private(Recurrent(), TensorDataset(moments(), torch.arange(MOMENTS) % 3))
    learn(made, optimizer, *next(iter(loader)))
    assert optimizer.taken == 1


def test_rows_of_moments_move_the_sum_further_than_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal is for: nothing else notices, where there are as many moments as records in a batch."""
    compress, x = NormTopK(clip=1e-3), moments()
    other = x.clone()
    other[3] *= -50

    def moved(turned: bool) -> float:
        totals = []
        for records in (x, other):
            model = GradSampleModule(Turned(turned=turned))
            F.cross_entropy(model(records), torch.arange(MOMENTS) % 3).backward()
            totals.append(compress.sum([p.grad_sample for p in model.parameters()]).private_total)  # type: ignore[misc]
        return float((totals[0] - totals[1]).norm()) / compress.l2_bound

    assert moved(False) <= 2 < 3 < moved(True)  # a record that is replaced moves it by two bounds
    monkeypatch.setattr(mixing, "_turned", lambda *_: "")
    made, optimizer, loader = private(Turned(), TensorDataset(x, torch.arange(MOMENTS) % 3))
    learn(made, optimizer, *next(iter(loader)))
    assert optimizer.taken == 1
