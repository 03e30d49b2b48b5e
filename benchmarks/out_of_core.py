"""Time and memory of the default method for any number of records, which are made on the fly and stored nowhere.

python -m benchmarks.out_of_core [--records 60000 1000000] [--threads 1 2] [--persons 0]

Every size runs in a process of its own: `datalens train` with images of 28x28, from reading to the release. Prints one
JSON line for each, and one with the R² of a line through the seconds, and through the CPU seconds. Only a run in which
nothing else used the cores says how many seconds it takes; `cpu_seconds` depends less on others.
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe
from datalens.data.records import Block, Choose, block_records
from datalens.data.schema import IMAGE, PERSON, Schema
from datalens.driver import train
from datalens.options import TrainOptions

CLASSES = tuple("0123456789")
IMAGES_OF_A_PERSON = 10
SMOOTH = 512  # smooth images of each class


def smooth_images(side: int) -> np.ndarray:
    """Return smooth images of each class, uint8 [classes, SMOOTH, side, side]."""
    across, shift = np.linspace(0, 3, side), np.linspace(0, 6, SMOOTH)[:, None]
    waves = np.stack([np.sin(across * (1 + label) + shift) for label in range(len(CLASSES))])
    return (waves[..., :, None] * waves[..., None, :] * 100 + 120).astype(np.uint8)


@dataclass(frozen=True)
class Generated:
    """Smooth random images of ten classes, with noise of their own; each block of them follows from its number."""

    schema: Schema
    count: int
    fixed_positions: bool = True

    def blocks(self, choose: Choose) -> Iterator[Block]:
        size, smooth = block_records(self.schema), smooth_images(self.schema.height)
        for start in range(0, self.count, size):
            index = np.arange(start, min(start + size, self.count), dtype=np.int64)
            random = np.random.default_rng(start)
            labels = random.integers(0, len(CLASSES), len(index))
            images = smooth[labels, random.integers(0, SMOOTH, len(index))]
            images += np.frombuffer(random.bytes(images.size), np.uint8).reshape(images.shape) >> 3
            share = choose(index, (b"id:%d" % (i // IMAGES_OF_A_PERSON) for i in index.tolist()))
            yield Block(images=images[..., None], labels=labels, index=index, share=share)


def measure(records: int, threads: int, by_person: bool, folder: str) -> None:
    """Train, and print one JSON line."""
    torch.set_num_threads(threads)
    schema = Schema(
        name="generated",
        height=28,
        width=28,
        channels=1,
        classes=CLASSES,
        nominal_size=records // IMAGES_OF_A_PERSON if by_person else records,
        record_unit=PERSON if by_person else IMAGE,
    )
    began = time.monotonic()
    for _ in Generated(schema, records).blocks(lambda index, keys: index):
        pass
    making = time.monotonic() - began
    options = TrainOptions(data="generated", out=Path(folder) / "run", epsilon=1.0, delta=1e-9, device="cpu")
    began, before = time.monotonic(), time.process_time()
    train(options, records=Generated(schema, records))
    line = {
        "records": records,
        "persons": by_person,
        "threads": threads,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - before, 1),
        "of_these_to_make_the_images": round(making, 1),
        "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load_when_it_ended": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(line | describe(torch.device("cpu"))), flush=True)
    Path(folder, "seconds").write_text(json.dumps([line["seconds"], line["cpu_seconds"]]))


def straightness(sizes: list[int], seconds: list[float]) -> float:
    """Return R² of a straight line through the seconds."""
    line = np.polyval(np.polyfit(sizes, seconds, 1), sizes)
    values = np.array(seconds)
    return float(1 - ((values - line) ** 2).sum() / ((values - values.mean()) ** 2).sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[60_000, 1_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--persons", type=int, default=0, help="1: protect persons, with ten images each")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        seconds = []
        for records in arguments.records:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                facts = (records, threads, bool(arguments.persons), folder)
                process = multiprocessing.get_context("spawn").Process(target=measure, args=facts)
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"the run of {records} records ended with exit code {process.exitcode}")
                seconds.append(json.loads(Path(folder, "seconds").read_text()))
        if len(seconds) > 2:
            names = ("r_squared", "r_squared_of_cpu_seconds")
            fits = [straightness(arguments.records, list(column)) for column in zip(*seconds, strict=True)]
            print(json.dumps({"threads": threads, **dict(zip(names, fits, strict=True))}), flush=True)
