"""How surely the tests of tests/e2e/test_learning.py pass: the same training with many seeds, and its broken twins.

python -m benchmarks.learning [--method datalens-paper] [--seeds 100] [--twin-seeds 10] [--keep FILE] [--processes 1]

Trains on 8×8 digits, for every seed once as the test does, and for the first seeds also the twins, which must not
learn: `shuffled` has labels that mean nothing; `no linear part` (of Algorithm 1) has votes that labels do not reach.
Scores are accuracies of the test's classifier on real test digits. Prints one JSON line per run and, at the end, the
least, quantiles and the largest per kind of run, with the test's bounds. With --keep, lines are also appended to a
file, and runs that it has are not repeated. A run of Algorithm 1 takes about 17 seconds of one core.
"""

import argparse
import json
import multiprocessing
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.test_learning import IGNORED, QUICK, SLOW, accuracy, write_digits

METHODS = QUICK | SLOW
AS_TESTED, SHUFFLED, NO_LINEAR_PART = "as tested", "shuffled", "no linear part"
Run = tuple[str, int]  # its kind and seed


def runs(method: str, seeds: int, twin_seeds: int) -> list[Run]:
    """Return the runs in the order in which they are made: the twins of a seed follow its run."""
    twins = (SHUFFLED, NO_LINEAR_PART) if method == "datalens-paper" else (SHUFFLED,)
    return [(kind, seed) for seed in range(seeds) for kind in (AS_TESTED, *(twins if seed < twin_seeds else ()))]


def measure(method: str, data: dict[str, Path], folder: Path, run: Run) -> dict[str, Any]:
    kind, seed = run
    options = {**METHODS[method][0], "seed": seed}
    if kind == NO_LINEAR_PART:
        options["linear"] = 0.0
    reached = accuracy(data["shuffled" if kind == SHUFFLED else "real"], folder / f"{kind}-{seed}", **options)
    return {"method": method, "run": kind, "seed": seed, "accuracy": round(reached, 4)}


def summary(method: str, kind: str, reached: list[float]) -> dict[str, Any]:
    """Return the quantiles, and how many runs the test would have failed."""
    least = METHODS[method][1]
    passed = [value > least if kind == AS_TESTED else value < IGNORED for value in reached]
    shown = {f"{part:.0%}": round(float(np.quantile(reached, part)), 4) for part in (0, 0.05, 0.5, 0.95, 1)}
    bound = {"above": least} if kind == AS_TESTED else {"below": IGNORED}
    return {"method": method, "run": kind, "seeds": len(reached), **shown, **bound, "failed": passed.count(False)}


def kept_in(file: Path | None, method: str) -> dict[Run, float]:
    """Return the accuracies that a file has of a method."""
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    found = (json.loads(line) for line in lines)
    return {(one["run"], one["seed"]): one["accuracy"] for one in found if one["method"] == method}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="datalens-paper", choices=METHODS)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--twin-seeds", type=int, default=10, help="number of seeds of each twin")
    parser.add_argument("--keep", type=Path, help="file of results: read first, then appended to")
    parser.add_argument("--processes", type=int, default=1, help="number of runs at a time")
    asked = parser.parse_args()
    wanted = runs(asked.method, asked.seeds, asked.twin_seeds)
    done = kept_in(asked.keep, asked.method)
    with tempfile.TemporaryDirectory() as place, multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        work = partial(measure, asked.method, write_digits(Path(place)), Path(place))
        for line in pool.imap_unordered(work, [run for run in wanted if run not in done]):
            done[line["run"], line["seed"]] = line["accuracy"]
            print(json.dumps(line), flush=True)
            if asked.keep:
                with asked.keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    for kind in dict.fromkeys(kind for kind, _ in wanted):
        print(json.dumps(summary(asked.method, kind, [done[run] for run in wanted if run[0] == kind])))
