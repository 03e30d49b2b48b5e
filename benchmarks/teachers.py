"""Seconds per iteration (two teacher steps and the vote of all teachers) by network. Prints one JSON line each.

python benchmarks/teachers.py [--teachers 4000] [--networks spectral compact paper] [--repeats 5]
"""

import argparse
import json
import time

import numpy as np
import torch

from datalens.basis import make_basis
from datalens.bounded.contributions import sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.private.networks import Network, Spectral, compact_network, paper_network
from datalens.private.partition import Partition
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.released.student import Fakes

SHAPE, CLASSES, BATCH, RECORDS_EACH = (1, 28, 28), 10, 15, 15


def make_network(name: str) -> Network:
    if name == "spectral":
        return Spectral(basis=make_basis("dct", SHAPE, 64), classes=CLASSES, hidden=16)
    pixels = make_basis("pixel", SHAPE, None)
    return compact_network(pixels, CLASSES) if name == "compact" else paper_network(pixels, CLASSES)


def measure(name: str, teachers: int, repeats: int, device: torch.device) -> dict[str, object]:
    network = make_network(name)
    random = torch.Generator().manual_seed(0)
    images = torch.rand(teachers * RECORDS_EACH, *SHAPE, generator=random).to(device)
    labels = torch.randint(CLASSES, (len(images),), generator=random).to(device)
    partition = Partition(share=np.arange(len(images)) % teachers, teachers=teachers)
    shares = Shares(network.features(images), labels, partition)
    ensemble = Teachers(network, shares, batch=BATCH, learning_rate=1e-3, weight_decay=0.0, seed=0)
    fakes = Fakes(
        images=torch.rand(BATCH, *SHAPE, generator=random).to(device), labels=labels[:BATCH].contiguous(), step=0
    )
    compress = TopKSign(k=32 if name == "spectral" else 200, clip=1e-5, quantise=True, seed=0)

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    fit, vote = [], []
    for step in range(repeats + 2):
        begin = wait()
        ensemble.fit_step(fakes, step=step, repeats=2)
        middle = wait()
        sum_bounded(map(compress, ensemble.image_gradients(fakes, step=step)))
        end = wait()
        if step >= 2:  # the first two warm up
            fit.append(middle - begin)
            vote.append(end - middle)
    return {
        "network": name,
        "teachers": teachers,
        "device": str(device),
        "fit_seconds": round(float(np.mean(fit)), 4),
        "vote_seconds": round(float(np.mean(vote)), 4),
        "chunks": len(ensemble.chunk_sizes),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teachers", type=int, default=4000)
    parser.add_argument("--networks", nargs="+", default=["spectral", "compact", "paper"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for network_name in arguments.networks:
        print(json.dumps(measure(network_name, arguments.teachers, arguments.repeats, chosen)), flush=True)
