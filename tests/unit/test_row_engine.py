"""Per-record gradients from one backward pass, against autograd one record at a time."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from datalens.errors import DatalensError
from datalens.gradients.rows import RowEngine

CPU = torch.device("cpu")


class Small(nn.Module):
    """Every kind of layer that the engine knows: strides, one-by-one kernels, no bias, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, (5, 3), padding=(2, 1))
        self.down = nn.Conv2d(8, 6, (3, 5), stride=(2, 1), padding=(1, 2), bias=False)
        self.thin = nn.Conv2d(6, 4, 1)
        self.light = nn.Linear(5, 4)
        self.last = nn.Linear(4 * 4 * 6, 3, bias=False)

    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        hidden = F.silu(self.down(F.silu(self.first(images))))
        hidden = self.thin(hidden) * (1 + self.light(facts))[:, :, None, None]
        return self.last(hidden.flatten(1))


def examples(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 8, 6, generator=random).contiguous(memory_format=torch.channels_last)
    return images, torch.randn(count, 5, generator=random), torch.randint(3, (count,), generator=random)


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def rows_of(net: nn.Module, parts: tuple[Tensor, Tensor, Tensor], *, repeats: int = 1, kind: torch.dtype) -> Tensor:
    images, facts, labels = parts
    engine = RowEngine(net, kind=kind, device=CPU)

    def losses(copy: nn.Module) -> Tensor:
        return F.cross_entropy(copy(images.to(kind), facts.to(kind)).float(), labels, reduction="none")

    return engine.rows(losses, records=len(images) // repeats, repeats=repeats)


def one_by_one(net: nn.Module, parts: tuple[Tensor, Tensor, Tensor], *, repeats: int) -> Tensor:
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def loss(weights: dict[str, Tensor], images: Tensor, facts: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (images, facts)), labels)  # type: ignore[arg-type]

    cut = [part.unflatten(0, (-1, repeats)) for part in parts]
    found = vmap(grad(loss), in_dims=(None, 0, 0, 0))(weights, *cut)
    engine, each = RowEngine(net, kind=torch.float32, device=CPU), type(net)()
    rows = []
    for i in range(len(cut[0])):
        with torch.no_grad():
            for name, value in each.named_parameters():
                value.copy_(found[name][i])
        rows.append(engine.flat(each))
    return torch.stack(rows)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_rows_are_gradients_of_one_record_at_a_time(repeats: int) -> None:
    net, parts = small(), examples(6)
    expected = one_by_one(net, parts, repeats=repeats)
    torch.testing.assert_close(rows_of(net, parts, repeats=repeats, kind=torch.float32), expected, rtol=1e-4, atol=1e-6)
    halves = rows_of(net, parts, repeats=repeats, kind=torch.bfloat16).float()
    assert float((halves - expected).norm() / expected.norm()) < 0.02


def test_weights_go_into_a_vector_and_back() -> None:
    net, other = small(), Small()
    engine = RowEngine(net, kind=torch.float32, device=CPU)
    flat = engine.flat(net)
    assert flat.shape == (engine.size,) == (sum(value.numel() for value in net.parameters()),)
    engine.put(flat, other)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_follow_the_weights_that_were_loaded() -> None:
    net, parts = small(), examples(4)
    other = Small()
    engine = RowEngine(net, kind=torch.float32, device=CPU)
    engine.load(engine.flat(other))

    def losses(copy: nn.Module) -> Tensor:
        return F.cross_entropy(copy(*parts[:2]), parts[2], reduction="none")

    expected = one_by_one(other, parts, repeats=1)
    torch.testing.assert_close(engine.rows(losses, records=4), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (0, 1), (2, 1)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_convolutions_of_all_shapes(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 2, kernel, stride=stride, padding=padding)
    images = examples(4)[0]
    engine = RowEngine(net, kind=torch.float64, device=CPU)
    rows = engine.rows(lambda copy: copy(images.double()).square().sum(dim=(1, 2, 3)), records=4)
    for i, row in enumerate(rows):
        net.zero_grad()
        net(images[i : i + 1]).square().sum().backward()
        gradients = nn.Conv2d(3, 2, kernel)
        with torch.no_grad():
            for ours, theirs in zip(gradients.parameters(), net.parameters(), strict=True):
                assert theirs.grad is not None
                ours.copy_(theirs.grad)
        torch.testing.assert_close(row.float(), engine.flat(gradients), rtol=1e-4, atol=1e-4)


class Unused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(5, 2)


def test_an_engine_is_used_again_for_other_records_and_for_more_of_them() -> None:
    """A layer that is not called has rows of zeros, whatever was in the engine's memory before."""
    net, calls = Unused(), []
    engine = RowEngine(net, kind=torch.float32, device=CPU)
    for count, seed, extra in ((4, 0, True), (4, 1, False), (6, 2, False)):
        parts = examples(count, seed=seed)

        def losses(copy: nn.Module, parts: tuple[Tensor, Tensor, Tensor] = parts, extra: bool = extra) -> Tensor:
            found = F.cross_entropy(copy(*parts[:2]), parts[2], reduction="none")
            assert isinstance(copy, Unused)
            return found + copy.extra(parts[1]).sum(dim=1) if extra else found

        rows = engine.rows(losses, records=count)
        expected = one_by_one(net, parts, repeats=1) if not extra else None
        if expected is not None:
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
        calls.append((rows.shape, rows.data_ptr(), bool(rows[:, -12:].any())))
    assert [shape for shape, _, _ in calls] == [(4, engine.size), (4, engine.size), (6, engine.size)]
    assert calls[0][1] == calls[1][1]  # new memory costs more than the work
    assert [learned for _, _, learned in calls] == [True, False, False]
    assert all(p.grad is None and not p.requires_grad for p in engine._net.parameters())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_other_records_change_no_bit_of_a_row(kind: torch.dtype) -> None:
    """A chunk always has the same number of records: one that is missing is another one, of weight zero."""
    net, parts = small(), examples(8)
    whole = rows_of(net, parts, kind=kind)
    others = tuple(part.clone() for part in examples(8, seed=1))
    for kept in range(8):
        mixed = tuple(
            b.index_copy(0, torch.tensor([kept]), a[kept : kept + 1]) for a, b in zip(parts, others, strict=True)
        )
        mixed = (mixed[0].contiguous(memory_format=torch.channels_last), *mixed[1:])
        assert torch.equal(rows_of(net, mixed, kind=kind)[kept], whole[kept])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_where_a_record_lies_in_a_chunk_decides_no_bit_of_its_row(kind: torch.dtype) -> None:
    """With one record fewer, all that follow it lie elsewhere, and there may be fewer in the chunk."""
    net, parts = small(), examples(8)
    whole = rows_of(net, parts, kind=kind)
    for order in (torch.arange(8).flip(0), torch.tensor([3, 0, 5, 1, 7, 2, 6, 4]), torch.arange(1, 8)):
        moved = tuple(part[order] for part in parts)
        moved = (moved[0].contiguous(memory_format=torch.channels_last), *moved[1:])
        assert torch.equal(rows_of(net, moved, kind=kind), whole[order])  # type: ignore[arg-type]


class Mixing(Small):
    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        return super().forward(images - images.mean(dim=0, keepdim=True), facts)


def test_a_twin_that_mixes_records_is_caught() -> None:
    torch.manual_seed(0)
    net, parts = Mixing(), examples(8)
    whole = rows_of(net, parts, kind=torch.float32)
    changed = (parts[0].clone(), *parts[1:])
    changed[0][3] += 1
    assert not torch.equal(rows_of(net, changed, kind=torch.float32)[0], whole[0])


class Twice(Small):
    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        return super().forward(images, facts) + super().forward(-images, facts)


class Loose(Small):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


class Grouped(Small):
    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Conv2d(6, 4, 1, groups=2)


class Dilated(Small):
    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Conv2d(6, 4, 1, dilation=2)


class Mirrored(Small):
    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Conv2d(6, 4, 1, padding_mode="reflect")


class Named(Small):
    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Conv2d(6, 4, 3, padding="same")


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)


class Aside(Small):
    """What this layer makes is thrown away."""

    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        self.light(facts)
        hidden = self.thin(F.silu(self.down(F.silu(self.first(images)))))
        return self.last(hidden.flatten(1))


class Turned(Small):
    """A layer whose first dimension is not the examples: a record's row would be of several records."""

    def forward(self, images: Tensor, facts: Tensor) -> Tensor:
        hidden = self.light(facts.expand(3, *facts.shape)).mean(dim=0)
        down = F.silu(self.down(F.silu(self.first(images))))
        return self.last((self.thin(down) * hidden[:, :, None, None]).flatten(1))


class Shared(Small):
    def __init__(self) -> None:
        super().__init__()
        self.light.weight = nn.Parameter(torch.zeros(4, 5))
        self.more = nn.Linear(5, 4)
        self.more.weight = self.light.weight


class Empty(Small):
    def __init__(self) -> None:
        super().__init__()
        self.light = nn.utils.skip_init(nn.Linear, 0, 4)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Turned, "got 3 rows for 2 examples"),
        (Shared, "layer more shares weights"),
        (Empty, "layer light has no weights"),
        (nn.Identity, "there is nothing to learn"),
        (Twice, "called twice"),
        (Loose, "parameter gain"),
        *((strange, "layer thin has groups, dilation") for strange in (Grouped, Dilated, Mirrored, Named)),
        (Normed, "mixes records"),
        (Aside, "does not reach the loss"),
    ],
)
def test_networks_whose_rows_are_not_known_are_refused(kind: type[nn.Module], why: str) -> None:
    with pytest.raises(DatalensError, match=why):
        rows_of(kind(), examples(2), kind=torch.float32)


def test_one_loss_an_example() -> None:
    engine, parts = RowEngine(small(), kind=torch.float32, device=CPU), examples(4)
    with pytest.raises(ValueError, match="there are"):
        engine.rows(lambda net: F.cross_entropy(net(*parts[:2]), parts[2]), records=4)
