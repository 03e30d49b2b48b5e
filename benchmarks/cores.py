"""Seconds of the default method, and of sampling from it, with one thread, with several, and with a GPU.

python -m benchmarks.cores [--data mnist] [--threads 1 2] [--images 20000] [--repeats 3] [--device cuda]

All in one process, which takes turns, since the speed of a shared machine changes; of each the least seconds count.
`--device` adds a GPU, with the first number of threads and with the last. Prints a JSON line for each, with the
seconds divided by those of the first; and CPU seconds, of which the main thread's are not spread over cores. (Where
others use the cores, seconds say little: with c CPU seconds of which m are the main thread's, two cores of their own
take about m + (c - m) / 2.) Also says whether all have made the same weights for one noise seed, the same
images from one release, and, of a GPU, the rows of records that the processor computes.
"""

import argparse
import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe
from datalens.bounded.outer import on_grid
from datalens.driver import train
from datalens.options import TrainOptions
from datalens.private.moments import FINE, RecordRows, record_features
from datalens.private.shares import Rows
from datalens.public.basis import make_basis
from datalens.public.texture import Texture
from datalens.released.release import sample


class Clocks:
    """Seconds that have passed, CPU seconds of all threads, and those of the thread that asks, since it was made."""

    def __init__(self) -> None:
        self._began = self._now()

    def _now(self) -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time(), time.thread_time()])

    def read(self) -> np.ndarray:
        return self._now() - self._began


def fit(data: str, device: str, folder: Path) -> np.ndarray:
    """Return the seconds (see `Clocks`) of `datalens train`, from reading to the release."""
    clocks = Clocks()
    with contextlib.redirect_stderr(None):
        train(TrainOptions(data=data, out=folder / "run", device=device))
    return clocks.read()


def draw(folder: Path, count: int, device: str) -> tuple[np.ndarray, str]:
    """Return the seconds (see `Clocks`) of drawing images from a release, and their hash."""
    clocks = Clocks()
    with contextlib.redirect_stderr(None):
        images = sample(folder / "run" / "release", count=count, seed=0, device=device).images
    return clocks.read(), hashlib.sha256(images.tobytes()).hexdigest()[:16]


def same_rows(device: torch.device) -> bool:
    """Return whether a device computes the rows that the processor does, to the last bit, wherever in a batch."""
    shape, random = (1, 28, 28), np.random.default_rng(0)
    basis, texture = make_basis("opponent", shape, 196), Texture(shape)
    images = torch.from_numpy(random.integers(0, 256, (20_000, 28, 28, 1), dtype=np.uint8))
    images[::2] //= torch.from_numpy(random.integers(1, 99, (10_000, 1, 1, 1), dtype=np.uint8))
    centre, white = torch.from_numpy(random.random(texture.size)), torch.randn(texture.size, 196, dtype=torch.float64)
    rows = RecordRows(Rows.of(torch.zeros(1, 1)), torch.zeros(1, dtype=torch.int64), coordinates=196, fingerprint=0)

    def computed(part: torch.Tensor, where: torch.device) -> torch.Tensor:
        stored = record_features(part.to(where), basis=basis, texture=texture)
        whitened = on_grid(rows.texture(stored, centre=centre, white=white), clip=3.0 * FINE, grid=2**14)
        return torch.cat([stored.to(torch.float64), whitened], dim=1).cpu()

    expected = computed(images, torch.device("cpu"))
    cuts = [(0, 20_000), (0, 1), (7, 8), (3, 1030), (19_937, 20_000), (1000, 9192)]
    return all(torch.equal(computed(images[start:end], device), expected[start:end]) for start, end in cuts)


def release(data: str, device: str, folder: Path) -> str:
    """Return the hash of the weights that follow from the data and a noise seed."""
    with contextlib.redirect_stderr(None):
        train(TrainOptions(data=data, out=folder, device=device, noise_seed=1))
    return hashlib.sha256((folder / "release" / "generator.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    ways = [(threads, "cpu") for threads in arguments.threads]
    if arguments.device != "cpu":
        ways += [(arguments.threads[0], arguments.device), (arguments.threads[-1], arguments.device)]
    seconds: dict[Any, list[np.ndarray]] = {way: [] for way in ways}
    facts: dict[Any, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(dir=".") as name:
        first = Path(name) / "first"
        fit(arguments.data, "cpu", first)  # imports; all images are drawn from this release
        for threads, device in ways:
            torch.set_num_threads(threads)
            weights = release(arguments.data, device, Path(name) / f"seeded-{threads}-{device}")
            one = draw(first, 500, device)[1]
            facts[threads, device] = {"device": device, "threads": threads, "weights": weights[:16], "images": one}
            if device != "cpu":
                facts[threads, device]["same_rows"] = same_rows(torch.device(device))
            print(json.dumps(facts[threads, device]), flush=True)
        for number in range(1, arguments.repeats + 1):
            for threads, device in ways:
                torch.set_num_threads(threads)
                fitted = fit(arguments.data, device, Path(name) / f"{threads}-{device}-{number}")
                drawn, hashed = draw(first, arguments.images, device)
                facts[threads, device]["images"] = hashed
                seconds[threads, device].append(np.stack([fitted, drawn]))
            least = {way: np.min(measured, axis=0) for way, measured in seconds.items()}
            for way, measured in least.items():
                line = {"threads": way[0], "repeats": number, "count": arguments.images}
                for what, (wall, cpu, main), first_of in zip(("fit", "images"), measured, least[ways[0]], strict=True):
                    line |= {f"{what}_seconds": round(wall, 2), f"{what}_by_first": round(wall / first_of[0], 3)}
                    line |= {f"{what}_cpu_seconds": round(cpu, 2), f"{what}_cpu_seconds_of_main_thread": round(main, 2)}
                for what in ("weights", "images"):
                    line |= {f"same_{what}": facts[way][what] == facts[ways[0]][what]}
                line |= {"load": round(os.getloadavg()[0], 1)}
                print(json.dumps(line | describe(torch.device(way[1]))), flush=True)
