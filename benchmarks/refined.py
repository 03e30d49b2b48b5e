"""A step of the second stage beside a plain training step, and beside Opacus on the same network.

python -m benchmarks.refined [--side 28] [--channels 1] [--images 512]

All are timed in one run, in turns, on one core, and the median is printed, in milliseconds for an image:

| | what |
|---|---|
| plain | forward and backward pass of a chunk, in the same numbers |
| ours | the rows of a chunk, each brought to one length, and their exact sum |
| opacus | per-sample gradients by Opacus, clipped and added, by hooks and by ghost clipping, in float32 |

Also printed: the memory of the process.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

from benchmarks.machine import describe
from datalens.bounded.whole_rows import WholeRows, WholeSum
from datalens.gradients.rows import RowEngine
from datalens.methods.refined import CHUNK, NETWORK, SOFTENING, Examples, kind_of_numbers
from datalens.released.denoiser import Shape, channels_last, fresh_network

CPU = torch.device("cpu")


def made(shape: Shape, count: int, kind: torch.dtype) -> Examples:
    """Return random examples."""
    random = torch.Generator().manual_seed(0)
    channels, height, width = shape.image
    inputs = torch.randn(count, 8 * channels, -(-height // 2), -(-width // 2), generator=random)
    return Examples(
        inputs=inputs.contiguous(memory_format=torch.channels_last).to(kind),
        facts=torch.randn(count, shape.facts, generator=random).to(kind),
        goal=inputs[:, : 4 * channels].contiguous(),
    )


def ways(shape: Shape) -> dict[str, Callable[[], None]]:
    """Return what is timed, each for `CHUNK` images."""
    kind = kind_of_numbers()
    engine = RowEngine(fresh_network(shape, 0), kind=kind, device=CPU)
    total, ones = WholeSum(WholeRows(softening=SOFTENING), engine.size, device=CPU), torch.ones(CHUNK)
    some, exact = made(shape, CHUNK, kind), made(shape, CHUNK, torch.float32)
    half = channels_last(fresh_network(shape, 0).to(kind))
    hooked = GradSampleModule(fresh_network(shape, 0), loss_reduction="sum")
    ghost = GradSampleModuleFastGradientClipping(
        fresh_network(shape, 0), loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
    )

    def plain() -> None:
        half.zero_grad()
        some.losses(half).sum().backward()

    def ours() -> None:
        total.add(engine.rows(some.losses, records=CHUNK), ones)

    def opacus_hooks() -> None:
        hooked.zero_grad()
        exact.losses(hooked).sum().backward()
        parts = [p.grad_sample for p in hooked.parameters()]
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in parts]).norm(dim=0)
        for part in parts:
            torch.einsum("i,i...", 1 / (norms + SOFTENING), part)
        for p in hooked.parameters():
            p.grad_sample = None

    def opacus_ghost() -> None:
        ghost.zero_grad()
        losses = exact.losses(ghost)
        losses.sum().backward(retain_graph=True)
        weights = 1 / (ghost.get_norm_sample() + SOFTENING)
        ghost.zero_grad()
        ghost.disable_hooks()
        (losses * weights).sum().backward()
        ghost.enable_hooks()

    return {"plain": plain, "ours": ours, "opacus, hooks": opacus_hooks, "opacus, ghost clipping": opacus_ghost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--side", type=int, default=28)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--images", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(image=(options.channels, options.side, options.side), classes=10, **NETWORK)
    print(describe(CPU))
    print(f"{shape.parameters} weights, {options.side}x{options.side}x{options.channels}, {kind_of_numbers()}")
    timed = ways(shape)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(max(2, options.images // CHUNK)):
        for name, work in timed.items():
            began = time.perf_counter()
            work()
            if turn:  # the first one warms up
                seconds[name].append((time.perf_counter() - began) / CHUNK)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.2f} ms an image, {median / medians['plain']:.2f} times plain")
    best = min(value for name, value in medians.items() if name.startswith("opacus"))
    print(f"the faster way of Opacus takes {best / medians['ours']:.1f} times as long as ours")
    print(f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
