"""What `python -m benchmarks.teachers --earlier` compares computes the same, and is what is timed."""

import torch

from benchmarks import teachers as benchmark
from datalens.private import layers
from datalens.private.networks import Convolutional


def test_the_earlier_convolution_is_the_same_function() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 9, 7, 2), (3, 50, 8), (3, 8))
    inputs = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    labels = torch.randint(5, (3, 4), generator=random)
    maps = torch.randn(3, 5, 5 * 4, 8, generator=random)
    found = []
    for convolve in (layers.convolve, benchmark.by_patches):
        out = convolve(*inputs, maps, labels, leaky=True)  # type: ignore[operator]
        slopes = torch.autograd.grad(out.square().sum(), inputs)
        found.append([out, *slopes])
    for ours, earlier in zip(*found, strict=True):
        torch.testing.assert_close(ours, earlier, rtol=1e-4, atol=1e-3)


def test_networks_that_are_timed_are_those_that_are_trained() -> None:
    compact, paper, printed = (benchmark.make_network(name) for name in ("compact", "paper", "printed"))
    assert all(isinstance(network, Convolutional) for network in (compact, paper, printed))
    assert compact.linear == paper.linear == 1000 / 7 / 28 and printed.linear == 0  # type: ignore[attr-defined]
    kept = layers.convolve
    with benchmark.earlier_layers():
        assert layers.convolve is benchmark.by_patches
    assert layers.convolve is kept
