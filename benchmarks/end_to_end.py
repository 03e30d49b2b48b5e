"""Time of a whole run of `datalens train --data mnist --epsilon 1`, compared with training teachers one by one.

python -m benchmarks.end_to_end [--method datalens] [--epsilon 1] [--loop 20]

Prints one JSON line: seconds from start to release, seconds per iteration, the peak memory of the process, and the time
of an iteration of the same teachers trained one by one as plain PyTorch modules, measured in the same call.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import teachers
from benchmarks.machine import describe
from datalens.bounded.topk_sign import TopKSign
from datalens.data.named import sources


def measure(method: str, epsilon: float, loop: int, device: torch.device) -> dict[str, object]:
    sources.get("mnist")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "datalens", "train", "--data", "mnist", "--epsilon", str(epsilon)]
        command += ["--warm-start", "off"]  # this benchmark times teachers
        done = subprocess.run(
            [*command, "--method", method, "--device", device.type, "--out", str(run), "--json"],
            stdout=subprocess.PIPE,
            check=True,
        )
        result = json.loads(done.stdout.splitlines()[-1])
        settings = json.loads((run / "config.json").read_text())["settings"]
        times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    iteration = statistics.median(after - before for before, after in pairwise(times))
    network = teachers.make_network(settings["network"])
    shares = teachers.make_shares(network, loop, device)
    compress = TopKSign(k=settings["k"], clip=settings["clip"], quantise=True, seed=0)
    each = teachers.one_by_one(network, shares, teachers.make_fakes(device), compress, loop, device)
    return {
        "machine": describe(device),
        "method": method,
        "epsilon": epsilon,
        "delta": result["delta"],
        "relation": result["relation"],
        "accountant": result["accountant"],
        "teachers": settings["teachers"],
        "network": settings["network"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "iteration_seconds": round(iteration, 4),
        "one_by_one_iteration_seconds": round(each * settings["teachers"], 3),
        "speedup_of_an_iteration": round(each * settings["teachers"] / iteration, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="datalens")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--loop", type=int, default=20, help="number of teachers to train one by one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    print(json.dumps(measure(arguments.method, arguments.epsilon, arguments.loop, chosen)), flush=True)
