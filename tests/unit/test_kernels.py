"""The Triton kernels against plain torch: on a GPU where there is one, else in Triton's interpreter.

On a GPU large products are in tf32, so what they are compared with is allowed to be off by that; everything else, and
everything in the interpreter, agrees to float32.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.optim.adam import adam

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds, and on Linux with the extra `dev`")

from datalens.bounded import kernels as votes
from datalens.bounded.contributions import Gradients, enforce, sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.private import kernels, layers
from datalens.public import streams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-6
ROUGH = 0.03 if DEVICE == "cuda" else CLOSE


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def random(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))
    return made.to(DEVICE).requires_grad_()


def worst(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> float:
    """The largest gap of the values and of the gradients of all inputs."""
    slope = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    pairs = zip(torch.autograd.grad(ours, inputs, slope), torch.autograd.grad(theirs, inputs, slope), strict=True)
    return max(gap(ours, theirs), *(gap(a, b) for a, b in pairs))


# Odd sizes, one channel, colour, more filters than a block holds, and with the maps of labels.
SHAPES = [(2, 3, 8, 7, 1, 11, None), (2, 3, 9, 14, 3, 5, 4), (2, 2, 14, 14, 11, 42, 4), (1, 2, 4, 5, 20, 70, None)]


@pytest.mark.parametrize(("n", "b", "h", "w", "c", "o", "classes"), SHAPES)
@pytest.mark.parametrize("leaky", [False, True])
def test_convolution(n: int, b: int, h: int, w: int, c: int, o: int, classes: int | None, leaky: bool) -> None:
    x, weight, bias = random(n, b, h, w, c), random(n, 25 * c, o), random(n, o)
    maps = random(n, classes, (h + 1) // 2 * ((w + 1) // 2), o) if classes else None
    labels = torch.randint(classes or 3, (n, b), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ours = kernels.Convolve.apply(x, weight, bias, maps, labels, leaky)
    # By torch's own convolution, teacher by teacher.
    theirs = []
    for i in range(n):
        kernel = weight[i].view(5, 5, c, o).permute(3, 2, 0, 1)
        out = F.conv2d(x[i].permute(0, 3, 1, 2), kernel, bias[i], stride=2, padding=2).permute(0, 2, 3, 1)
        out = out if maps is None else out + maps[i][labels[i]].view(out.shape)
        theirs.append(F.leaky_relu(out, layers.SLOPE) if leaky else out)
    inputs = [x, weight, bias] + ([maps] if maps is not None else [])
    assert worst(ours, torch.stack(theirs), inputs) < ROUGH
    # And the torch code that runs on a CPU is the same function.
    if DEVICE == "cpu":
        assert gap(layers.convolve(x, weight, bias, maps, labels, leaky=leaky), torch.stack(theirs)) < CLOSE


def test_products_of_any_strides() -> None:
    a, b = random(3, 70, 5), random(3, 70, 9)
    ours = kernels.Multiply.apply(a.transpose(1, 2), b, kernels.EXACT)
    assert worst(ours, a.transpose(1, 2) @ b, [a, b]) < CLOSE
    shared = random(1, 5, 70).expand(3, -1, -1)
    assert gap(kernels.multiply(shared, b), shared @ b) < CLOSE


@pytest.mark.parametrize("groups", [[8, 6], [14]])
def test_batch_norm_keeps_real_and_fake_apart(groups: list[int]) -> None:
    x, scale, shift = random(3, 14, 10, 9), random(3, 9), random(3, 9)
    ours = kernels.NormLeaky.apply(x.view(3, 140, 9), scale, shift, [10 * g for g in groups]).view(x.shape)
    parts = []
    for part in x.split(groups, dim=1):
        mean, variance = part.mean((1, 2), keepdim=True), part.var((1, 2), correction=0, keepdim=True)
        parts.append((part - mean) * torch.rsqrt(variance + 1e-5))
    theirs = F.leaky_relu(torch.cat(parts, dim=1) * scale[:, None, None] + shift[:, None, None], layers.SLOPE)
    assert worst(ours, theirs, [x, scale, shift]) < CLOSE


def test_adam_of_an_outer_product_is_adam_of_its_gradient() -> None:
    x, slope, weight = random(2, 5, 37).detach(), random(2, 5, 20).detach(), random(2, 37, 20).detach()
    mean, square = 0.1 * random(2, 37, 20, seed=1).detach(), random(2, 37, 20, seed=2).detach().square()
    before, theirs = weight.clone(), [weight.clone(), mean.clone(), square.clone()]
    adam(
        [theirs[0]], [x.transpose(1, 2) @ slope], [theirs[1]], [theirs[2]], [], [torch.tensor(6.0, device=DEVICE)],
        fused=True, amsgrad=False, beta1=0.5, beta2=0.999, lr=0.01, weight_decay=0.03, eps=1e-8, maximize=False,
    )  # fmt: skip
    kernels.adam_outer(x, slope, weight, mean, square, updates=6, rate=0.01, decay=0.03)
    assert gap(weight - before, theirs[0] - before) < max(ROUGH, 1e-5)
    assert gap(mean, theirs[1]) < ROUGH
    assert gap(square, theirs[2]) < ROUGH


@pytest.mark.parametrize(("d", "k"), [(64, 32), (100, 100), (784, 200), (70, 7), (3, 1)])
def test_votes_are_bit_for_bit_those_of_the_torch_code(d: int, k: int) -> None:
    values = torch.randn(6, 3, d, generator=torch.Generator().manual_seed(d)) * 1e-5
    values[0, 0] = 0  # nothing to say
    values[1, 1, 1] = float("nan")
    values[2, 0, 0] = float("inf")
    values[3, 1] = 1e-6  # ties
    values[3, 2, ::2] = -1e-6
    values[4, 0, 2:] = 0  # fewer than k
    values[5] = torch.randint(-5, 6, (3, d), generator=torch.Generator().manual_seed(1)) * 1e-6  # ties at every level
    teachers = torch.arange(6) + 3
    compress = TopKSign(k=k, clip=1e-5, quantise=True, seed=4)
    expected = compress(Gradients(teachers=teachers, values=values, step=9)).rows
    keys, again = streams.row_keys(4, "sign", 9, teachers=teachers.to(DEVICE))
    assert torch.equal(votes.top_k_sign(values.to(DEVICE), keys, again, k=k, clip=1e-5).cpu(), expected)
    # The check has teeth: another teacher's stream, or one vote fewer, is told apart.
    if d > 3:
        assert not torch.equal(votes.top_k_sign(values.to(DEVICE), again, keys, k=k, clip=1e-5).cpu(), expected)
        assert not torch.equal(votes.top_k_sign(values.to(DEVICE), keys, again, k=k - 1, clip=1e-5).cpu(), expected)


def test_the_sum_of_votes_enforces_the_bound() -> None:
    rows = torch.randint(-128, 128, (700, 2, 300), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    squares = rows.flatten(1).to(torch.int64).square().sum(1)
    most = float(squares.median())
    ours = votes.sum_votes(rows.to(DEVICE), most).cpu()
    assert torch.equal(ours, enforce(rows, most**0.5).sum(0, dtype=torch.int32))
    assert torch.equal(ours, rows[squares <= most].sum(0, dtype=torch.int32))
    assert not torch.equal(ours, rows.sum(0, dtype=torch.int32))  # half of them were too long


def test_votes_and_their_sum_go_through_the_kernels_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, end to end; the interpreter takes tensors of the CPU, so that can be asked for here."""
    values = torch.randn(40, 3, 50, generator=torch.Generator().manual_seed(0)) * 1e-5
    compress = TopKSign(k=7, clip=1e-5, quantise=True, seed=4)

    def total() -> Tensor:
        teachers = torch.arange(40, device=DEVICE)
        chunks = zip(teachers.split(16), values.to(DEVICE).split(16), strict=True)
        return sum_bounded(compress(Gradients(teachers=t, values=v, step=2)) for t, v in chunks).private_total.cpu()

    expected = total()
    used = []
    for module in ("topk_sign", "contributions"):
        monkeypatch.setattr(f"datalens.bounded.{module}.kernels_for", lambda x, m=module: used.append(m) or True)
    assert torch.equal(total(), expected)
    assert used == ["topk_sign", "contributions"] * 3
