"""Several ranks: their speed-up on this machine, the bytes they exchange, and a model of clusters. Prints JSON lines.

python -m benchmarks.ranks measure [--ranks 1 2 4] [--teachers 4000] [--network spectral] [--iterations 12]
python -m benchmarks.ranks wire
python -m benchmarks.ranks model [--seconds-per-1000-teachers S] [--latency S] [--bandwidth BYTES/S] …

`measure` uses gloo with one thread per rank. An iteration is two teacher steps and the vote of all teachers. The
numbers of ranks take turns, so that other load on the machine affects all of them equally.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORDS_EACH = 15


# --- measured here --------------------------------------------------------------------------------


def be_a_rank(rank: int, size: int, port: int, options: dict[str, Any], answer: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from datalens.run.ranks import World
    from datalens.run.remote_teachers import Crowd

    torch.set_num_threads(1)
    with World.start("cpu") as world:
        teachers, compress, shape, fakes = prepare(options, world.numbers(options["teachers"]))
        crowd = Crowd(
            teachers, compress, world=world, count=options["teachers"], shape=shape, folder=Path("/nonexistent")
        )
        if not world.leads:
            crowd.follow()
            return
        times = []
        for step in range(options["iterations"] + 2):
            begin = time.perf_counter()
            crowd.fit_step(fakes(step), repeats=2)
            crowd.votes(fakes(step))
            times.append(time.perf_counter() - begin)
        crowd.dismiss()
        answer.put(times[2:])  # the first two warm up


def prepare(options: dict[str, Any], numbers: range) -> tuple[Any, Any, tuple[int, int, int, int], Any]:
    """Return this rank's teachers on random records, their compressor, a batch's shape, and a function of fakes."""
    import numpy as np
    import torch

    from datalens.bounded.topk_sign import TopKSign
    from datalens.private.networks import Network, Spectral, compact_network
    from datalens.private.partition import Partition
    from datalens.private.shares import Shares
    from datalens.private.teachers import Teachers
    from datalens.public.basis import make_basis
    from datalens.run.remote_teachers import Shown

    shape, classes, batch = (1, 28, 28), 10, 15
    spectral = options["network"] == "spectral"
    basis = make_basis("dct", shape, 64) if spectral else make_basis("pixel", shape, None)
    network: Network = (
        Spectral(basis=basis, classes=classes, hidden=16) if spectral else compact_network(basis, classes)
    )
    random = torch.Generator().manual_seed(numbers.start)
    share = np.repeat(np.arange(numbers.start, numbers.stop), RECORDS_EACH)
    images = torch.randint(256, (len(share), 28, 28, 1), generator=random, dtype=torch.uint8)
    rows = torch.cat([network.record_features(part) for part in images.split(10_000)])
    labels = torch.randint(classes, (len(share),), generator=random)
    shares = Shares(rows, labels, Partition(share=share, teachers=options["teachers"]), numbers=numbers)
    teachers = Teachers(network, shares, batch=batch, learning_rate=1e-3, weight_decay=0.0, seed=0)
    pictures = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(1))

    def fakes(step: int) -> Shown:
        return Shown(images=pictures, labels=torch.arange(batch) % classes, step=step)

    return teachers, TopKSign(k=32 if spectral else 200, clip=1e-5, quantise=True, seed=0), (batch, *shape), fakes


def once(size: int, options: dict[str, Any]) -> list[float]:
    """Return the seconds of each iteration on `size` ranks."""
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = spawn.SimpleQueue()
    ranks = [spawn.Process(target=be_a_rank, args=(rank, size, port, options, answer)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(f"a rank of {size} failed")
    return answer.get()


def measure(sizes: list[int], options: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Return the median time of an iteration by number of ranks, and of its messages alone (one teacher per rank)."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    messages: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            times[size] += once(size, options)
            messages[size] += once(size, options | {"teachers": size, "iterations": 100})
    rows = []
    for size in sizes:
        middle = _median(times[size])
        rows.append(
            {
                "ranks": size,
                **{name: options[name] for name in ("teachers", "network")},
                "seconds_per_iteration": round(middle, 4),
                "times_as_fast": round(_median(times[sizes[0]]) / middle, 2),
                # One teacher per rank: the part of an iteration that does not depend on the number of teachers.
                "seconds_with_one_teacher_a_rank": round(_median(messages[size]), 5),
                "iterations": len(times[size]),
                "cores": os.cpu_count(),
            }
        )
    return rows


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# --- what crosses the wire ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Bytes of one iteration. Rank 0 broadcasts to every rank; what it receives is reduced on the way."""

    words: int  # from rank 0: two commands, each of three numbers and space for the labels, in int64
    fakes: int  # from rank 0: images in float32
    facts: int  # from every rank to every rank: a hash and a range
    loss: int  # to rank 0
    votes: int  # to rank 0: the sum, in int32


def wire(*, batch: int, pixels: int, coordinates: int) -> Wire:
    return Wire(words=2 * 8 * (3 + batch), fakes=4 * batch * pixels, facts=48, loss=8, votes=4 * batch * coordinates)


SETTINGS = {  # batch, values in an image, coordinates voted in
    "mnist, datalens": (15, 784, 64),
    "mnist, datalens-paper": (15, 784, 784),
    "celeba-gender, datalens": (15, 12288, 64),
    "celeba-gender, datalens-paper": (27, 12288, 12288),
}


# --- a model of clusters --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the model, in seconds and bytes, measured on one machine or taken from a network's data sheet."""

    seconds_per_1000_teachers: float  # one iteration of 1000 teachers on one GPU
    seconds_at_least: float  # one iteration of very few teachers: the time of kernel launches
    seconds_of_rank_0: float  # work of rank 0 alone: student, charge, noise, journal
    latency: float  # of one message between two machines, through the CPU
    latency_gpu: float  # of one hop between two GPUs
    bandwidth: float  # bytes a second between two machines


def model(gpus: int, teachers: int, sizes: Wire, c: Constants) -> dict[str, Any]:
    """Return the modelled time of one iteration. Broadcast and reduce are trees of depth log2 of the number of GPUs."""
    mine = math.ceil(teachers / gpus)
    depth = math.ceil(math.log2(gpus)) if gpus > 1 else 0
    compute = max(c.seconds_at_least, mine * c.seconds_per_1000_teachers / 1000)
    through_cpu = 4 * depth * c.latency + (gpus > 1) * gpus * sizes.facts / c.bandwidth  # two words, facts, loss
    through_gpu = depth * (2 * c.latency_gpu + (sizes.fakes + sizes.votes) / c.bandwidth)  # images, votes
    total = compute + through_cpu + through_gpu + c.seconds_of_rank_0
    alone = max(c.seconds_at_least, teachers * c.seconds_per_1000_teachers / 1000) + c.seconds_of_rank_0
    return {
        "gpus": gpus,
        "teachers": teachers,
        "teachers_a_gpu": mine,
        "seconds_teachers": round(compute, 6),
        "seconds_messages": round(through_cpu + through_gpu, 6),
        "seconds_rank_0": c.seconds_of_rank_0,
        "seconds_per_iteration": round(total, 6),
        "times_as_fast_as_one": round(alone / total, 2),
        "part_of_linear": round(alone / total / gpus, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("measure")
    here.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    here.add_argument("--teachers", type=int, default=4000)
    here.add_argument("--network", choices=["spectral", "compact"], default="spectral")
    here.add_argument("--iterations", type=int, default=12)
    here.add_argument("--rounds", type=int, default=2)
    commands.add_parser("wire")
    there = commands.add_parser("model")
    there.add_argument("--seconds-per-1000-teachers", type=float, default=0.03)
    there.add_argument("--seconds-at-least", type=float, default=0.004)
    there.add_argument("--seconds-of-rank-0", type=float, default=0.008)
    there.add_argument("--latency", type=float, default=50e-6)
    there.add_argument("--latency-gpu", type=float, default=15e-6)
    there.add_argument("--bandwidth", type=float, default=12.5e9)
    there.add_argument("--settings", choices=list(SETTINGS), default="mnist, datalens-paper")
    there.add_argument(
        "--teachers", type=int, default=4000, help="number in all, or per GPU where it grows with the number of GPUs"
    )
    options = vars(parser.parse_args())
    command = options.pop("command")
    if command == "measure":
        sizes, rounds = options.pop("ranks"), options.pop("rounds")
        for row in measure(sizes, options, rounds):
            print(json.dumps(row), flush=True)
        return
    if command == "wire":
        for name, (batch, pixels, coordinates) in SETTINGS.items():
            print(json.dumps({"settings": name, **asdict(wire(batch=batch, pixels=pixels, coordinates=coordinates))}))
        return
    batch, pixels, coordinates = SETTINGS[options.pop("settings")]
    teachers = options.pop("teachers")
    constants, sizes = Constants(**options), wire(batch=batch, pixels=pixels, coordinates=coordinates)
    print(json.dumps({"constants": asdict(constants), "wire": asdict(sizes)}))
    for gpus in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        print(json.dumps({"kind": "the same teachers", **model(gpus, teachers, sizes, constants)}))
    for gpus in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        # Compared with one GPU that has all teachers, in chunks.
        print(json.dumps({"kind": "teachers grow with the GPUs", **model(gpus, teachers * gpus, sizes, constants)}))


if __name__ == "__main__":
    main()
