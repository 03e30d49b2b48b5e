"""Seconds per iteration (two teacher steps, then the compressed and summed vote of all teachers), by network.

python -m benchmarks.teachers [--teachers 500 1000 … 16000] [--networks spectral compact paper] [--loop 20] [--earlier]

Compact and paper-size teachers have their linear part, as in `datalens-paper`; `printed` is the paper's without it.
With --earlier, on a CPU, the iteration is also timed with the layers of version 0.1, which copied patches to memory and
took chunks of a gigabyte: the CPU seconds of all threads together are compared, in the same run.

Prints JSON lines: first the machine's measured peak performance, then a line per network and number of teachers. Each
is compared with `--loop` of the same teachers trained one by one as plain PyTorch modules in the same run, and with a
lower bound: the time of the bytes that must move and the products that must be computed, at peak performance.
"""

import argparse
import contextlib
import json
import math
import resource
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.machine import ceilings, describe, seconds, used
from benchmarks.one_by_one import OneTeacher
from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.methods.ensemble import HIDDEN
from datalens.methods.topagg import LINEAR
from datalens.private import layers
from datalens.private.networks import Convolutional, Network, Spectral, network_named
from datalens.private.partition import Partition
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.public.basis import make_basis
from datalens.released.student import Fakes

SHAPE, CLASSES, BATCH, RECORDS_EACH, STEPS = (1, 28, 28), 10, 15, 15, 2
LEARNING = {"batch": BATCH, "seed": 0}


def make_network(name: str) -> Network:
    basis = make_basis("dct", SHAPE, 64) if name == "spectral" else make_basis("pixel", SHAPE, None)
    return network_named(name, basis, CLASSES, hidden=HIDDEN[name], linear=LINEAR / math.sqrt(math.prod(SHAPE)))  # type: ignore[arg-type]


def make_shares(network: Network, teachers: int, device: torch.device) -> Shares:
    random = torch.Generator().manual_seed(0)
    count = teachers * RECORDS_EACH
    images = torch.randint(256, (count, *SHAPE[1:], SHAPE[0]), generator=random, dtype=torch.uint8)
    rows = torch.cat([network.record_features(part.to(device)) for part in images.split(10_000)])
    labels = torch.randint(CLASSES, (count,), generator=random).to(device)
    return Shares(rows, labels, Partition(share=np.arange(count) % teachers, teachers=teachers))


def make_fakes(device: torch.device) -> Fakes:
    random = torch.Generator().manual_seed(1)
    images = torch.rand(BATCH, *SHAPE, generator=random)
    labels = torch.randint(CLASSES, (BATCH,), generator=random)
    return Fakes(images=images.to(device), labels=labels.to(device), step=0)


def floor(network: Network, teachers: int, limits: dict[str, float]) -> tuple[float, float, float]:
    """Return the bytes and operations of one iteration, and the seconds that they take at peak performance.

    Bytes: a step reads and writes weights and moments, and reads the weights twice more (forward, backward); every
    activation is written and read once, and so is its gradient. Caches, or kernels that fuse everything, could need
    fewer bytes.
    """
    weights = sum(value[0].numel() for value in network.parameters(torch.tensor([0]), 0).values())
    if isinstance(network, Spectral):
        d, hidden = network.basis.size, network.hidden
        activations, forward, first = d + 2 * hidden, 2 * d * (hidden + 1), 0
    else:
        assert isinstance(network, Convolutional)
        inputs, height, width = network.shape
        activations, forward, first = inputs * height * width, 0, 0
        for layer, outputs in enumerate(network.channels):
            height, width = (height + 1) // 2, (width + 1) // 2
            operations = 2 * 25 * inputs * outputs * height * width
            first = operations if layer == 0 else first
            forward += operations
            activations += outputs * height * width * (1 if layer == 0 else 2)
            inputs = outputs
        forward += 2 * inputs * height * width * network.hidden
        forward += 2 * network.basis.size * network.classes if network.linear else 0
        activations += 2 * network.hidden
    fit = {"bytes": weights * 4 * (6 + 2) + 2 * BATCH * activations * 16, "flops": 2 * BATCH * (3 * forward - first)}
    vote = {"bytes": weights * 4 * 2 + BATCH * activations * 16, "flops": BATCH * 2 * forward}
    moved = teachers * (STEPS * fit["bytes"] + vote["bytes"])
    computed = teachers * (STEPS * fit["flops"] + vote["flops"])
    fastest = limits.get("tf32_flops", limits["float32_flops"])
    return moved, computed, max(moved / limits["copy_bytes"], computed / fastest)


def by_patches(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    maps: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    leaky: bool,
) -> torch.Tensor:
    """Do what `layers.convolve` does, as version 0.1 did on a CPU: patches are copied, and multiplied."""
    n, b, height, width, _ = x.shape
    patches = F.pad(x, (0, 0, 2, 2, 2, 2)).unfold(2, 5, 2).unfold(3, 5, 2)  # [n, b, h', w', c, 5, 5], a view
    flat = patches.permute(0, 1, 2, 3, 5, 6, 4).reshape(n, b * patches.shape[2] * patches.shape[3], -1)
    out = torch.baddbmm(bias.unsqueeze(1), flat, weight).view(n, b, (height + 1) // 2, (width + 1) // 2, -1)
    if maps is not None:
        out = out + layers.lookup(maps.flatten(2), labels).view(out.shape)
    return F.leaky_relu(out, layers.SLOPE) if leaky else out


@contextlib.contextmanager
def earlier_layers() -> Iterator[None]:
    kept = layers.convolve
    layers.convolve = by_patches
    try:
        yield
    finally:
        layers.convolve = kept


def earlier_chunk(network: Network, teachers: int) -> int:
    """Return how many teachers version 0.1 took at a time: what fitted into a gigabyte, patches included."""
    work = network.bytes_per_teacher(BATCH)[1]
    if isinstance(network, Convolutional):
        inputs, height, width = network.shape
        for outputs in network.channels:
            height, width = (height + 1) // 2, (width + 1) // 2
            work += 4 * 2 * BATCH * height * width * 2 * 25 * inputs
            inputs = outputs
    return min(teachers, 2**30 // work)


def cpu_seconds(ensemble: Teachers, fakes: Fakes, compress: TopKSign, device: torch.device) -> float:
    """Return the CPU seconds of an iteration."""

    def iteration() -> None:
        ensemble.fit_step(fakes, step=0, repeats=STEPS)
        sum_bounded(ensemble.rows(fakes, compress, step=0))

    return seconds(iteration, device, repeats=3, warm=1, clock=used)


def compare_with_earlier(name: str, teachers: int, device: torch.device) -> dict[str, object]:
    """Return the CPU seconds of an iteration with today's layers and version 0.1's, and their ratio."""
    network, fakes = make_network(name), make_fakes(device)
    shares = make_shares(network, teachers, device)
    compress = TopKSign(k=32 if name == "spectral" else 200, clip=1e-5, quantise=True, seed=0)
    how = {"learning_rate": 1e-3, "weight_decay": 0.0, **LEARNING}
    now = cpu_seconds(Teachers(network, shares, **how), fakes, compress, device)
    with earlier_layers():
        chunk = earlier_chunk(network, teachers)
        before = cpu_seconds(Teachers(network, shares, chunk=chunk, **how), fakes, compress, device)
    found = {"cpu_seconds": round(now, 3), "earlier_cpu_seconds": round(before, 3), "ratio": round(before / now, 2)}
    return {"network": name, "teachers": teachers, **found}


def measure(
    name: str, teachers: int, loop: int, device: torch.device, limits: dict[str, float], room: int | None = None
) -> dict[str, object]:
    network, fakes = make_network(name), make_fakes(device)
    shares = make_shares(network, teachers, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    compress = TopKSign(k=32 if name == "spectral" else 200, clip=1e-5, quantise=True, seed=0)
    ensemble = Teachers(network, shares, learning_rate=1e-3, weight_decay=0.0, room=room, **LEARNING)
    fit = seconds(lambda: ensemble.fit_step(fakes, step=0, repeats=STEPS), device)
    vote = seconds(lambda: sum_bounded(ensemble.rows(fakes, compress, step=0)), device)
    moved, computed, least = floor(network, teachers, limits)
    line: dict[str, object] = {
        "network": name,
        "teachers": teachers,
        "fit_seconds": round(fit, 5),
        "vote_seconds": round(vote, 5),
        "iteration_seconds": round(fit + vote, 5),
        "chunk": ensemble.chunk,
        "in_host_memory": teachers - ensemble.resident,
        "peak_gib": round(peak_gib(device), 2),
        "floor_gigabytes": round(moved / 1e9, 2),
        "floor_gigaflops": round(computed / 1e9, 1),
        "floor_seconds": round(least, 5),
        "fraction_of_ceiling": round(least / (fit + vote), 3),
    }
    if loop:
        each = one_by_one(network, shares, fakes, compress, loop, device)
        line |= {"one_by_one_seconds": round(each * teachers, 3), "speedup": round(each * teachers / (fit + vote), 1)}
    return line


def one_by_one(
    network: Network, shares: Shares, fakes: Fakes, compress: TopKSign, count: int, device: torch.device
) -> float:
    """Return the seconds of an iteration per teacher, averaged over `count` teachers."""
    several = [OneTeacher(network, i, shares, rate=1e-3, decay=0.0, **LEARNING) for i in range(count)]
    fake = network.features(fakes.images)

    def iteration() -> None:
        total: torch.Tensor | float = 0.0
        for teacher in several:
            for draw in range(STEPS):
                teacher.fit(fake, fakes.labels, step=0, draw=draw)
            gradient = teacher.image_gradient(fake, fakes.labels)
            votes = compress(Gradients(teachers=teacher.number, values=gradient.unsqueeze(0), step=0))
            total = total + votes.rows[0].to(torch.int32)

    return seconds(iteration, device, repeats=3, warm=1) / count


def peak_gib(device: torch.device) -> float:
    """Return the peak of GPU memory, or of this process's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def line_through(lines: list[dict[str, object]]) -> dict[str, object]:
    """Fit a straight line to time against the number of teachers, and return its slope and R²."""
    teachers = np.array([line["teachers"] for line in lines], dtype=float)
    times = np.array([line["iteration_seconds"] for line in lines], dtype=float)
    slope, start = np.polyfit(teachers, times, 1)
    residuals = times - slope * teachers - start
    r2 = 1 - (residuals**2).sum() / ((times - times.mean()) ** 2).sum()
    return {"network": lines[0]["network"], "seconds_per_1000_teachers": round(1000 * slope, 5), "r2": round(r2, 5)}


def plot(lines: list[dict[str, object]], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    styles = {"iteration_seconds": "o-", "floor_seconds": ":", "one_by_one_seconds": "x--"}
    for number, name in enumerate(dict.fromkeys(line["network"] for line in lines)):
        mine = [line for line in lines if line["network"] == name]
        for figures, style in styles.items():
            shown = [(line["teachers"], line[figures]) for line in mine if figures in line]
            label = str(name) if figures == "iteration_seconds" else None
            axes.plot(*zip(*shown, strict=True), style, color=f"C{number}", label=label)
    axes.plot([], [], "x--", color="grey", label="the same, one by one")
    axes.plot([], [], ":", color="grey", label="floor at the measured ceilings")
    axes.set(xscale="log", yscale="log", xlabel="teachers", ylabel="seconds an iteration", title=title)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, nargs="+", default=[4000])
    parser.add_argument("--networks", nargs="+", default=["spectral", "compact", "paper"], choices=HIDDEN)
    parser.add_argument("--loop", type=int, default=20, help="number of teachers to train one by one; 0: none")
    parser.add_argument("--earlier", action="store_true", help="time also the layers of version 0.1, on a CPU")
    parser.add_argument("--plot", help="file for a plot of time against the number of teachers")
    parser.add_argument("--room", type=float, help="GiB of GPU memory to use; other teachers are in host memory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    best = ceilings(chosen)
    print(json.dumps({"machine": describe(chosen), "ceilings": best}), flush=True)
    lines = []
    room = int(arguments.room * 2**30) if arguments.room else None
    for network_name in arguments.networks:
        sweep = []
        for number in arguments.teachers:
            sweep.append(measure(network_name, number, arguments.loop, chosen, best, room))
            print(json.dumps(sweep[-1]), flush=True)
            if arguments.earlier and chosen.type == "cpu":
                print(json.dumps(compare_with_earlier(network_name, number, chosen)), flush=True)
        if len(sweep) > 2:
            print(json.dumps(line_through(sweep)), flush=True)
        lines += sweep
    if arguments.plot:
        plot(lines, f"Two teacher steps and a vote, {describe(chosen)['device']}", arguments.plot)
