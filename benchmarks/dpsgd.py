"""Time and memory of a training step with NormTopK, compared with plain Opacus in the same run.

python -m benchmarks.dpsgd [--batch 512] [--topk 0.8] [--device cuda]

Prints JSON lines. Both sides alternate whole steps (forward, per-sample gradients, clipping, noise, update) of the
paper's MNIST network on the same batch; the ratio is that of the medians. Memory is the peak of a process (CPU:
resident, in a separate process for each side; GPU: allocated).
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch.nn import functional as F  # noqa: N812 (the usual name)

from benchmarks.machine import describe, now
from datalens.bounded.norm_topk import NormTopK, Selector
from datalens.gradients.optimizer import Plan, PrivateOptimizer
from datalens.gradients.sampled_model import sampled_module
from datalens.privacy.dpsgd import GradientGate, Schedule
from datalens.privacy.ledger import Budget, Ledger
from datalens.privacy.noise import SecureNoise
from datalens.released.classifier import seeded


def stepper(side: str, batch: int, topk: float, device: torch.device) -> Callable[[], object]:
    """Return a function that does one training step of this side."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(batch, 1, 28, 28, generator=random).to(device)
    y = torch.randint(0, 10, (batch,), generator=random).to(device)
    model = GradSampleModule(seeded(0, shape=(1, 28, 28), classes=10, network="cnn").to(device))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    if side == "opacus":
        optimizer = DPOptimizer(sgd, noise_multiplier=1.6, max_grad_norm=1.0, expected_batch_size=batch)
    else:
        selector: Selector = "none" if topk == 1 else "norm"
        compress = NormTopK(clip=1.0, topk=topk, selector=selector)
        schedule = Schedule(sigma=1.6, rate=0.01, steps=100_000, unit=compress.bound, l2_bound=compress.l2_bound)
        budget = Budget(epsilon=1e6, delta=1e-5, relation="add-remove", accountant="rdp-improved")
        gate = GradientGate(Ledger.in_memory(budget), schedule, SecureNoise(), blocks=1)
        plan = Plan(compress=compress, schedule=schedule, batch_size=batch)
        optimizer = PrivateOptimizer(sgd, plan=plan, gate=gate)
        optimizer.watch(sampled_module(model))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def timed(batch: int, topk: float, device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of each side; the sides take turns."""
    sides = {side: stepper(side, batch, topk, device) for side in ("opacus", "ours")}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats + 3):
        for side, step in sides.items():
            begin = now(device)
            step()
            times[side].append(now(device) - begin)
    return {side: sorted(values[3:])[repeats // 2] for side, values in times.items()}


def peak(side: str, batch: int, topk: float, device: torch.device) -> int:
    """Return the peak memory in bytes, after some steps."""
    step = stepper(side, batch, topk, device)
    for _ in range(4):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--topk", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", help="measure the peak memory of one side; for internal use")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    if arguments.peak:
        print(peak(arguments.peak, arguments.batch, arguments.topk, chosen))
        sys.exit()
    print(json.dumps({"machine": describe(chosen)}), flush=True)
    common = ["--batch", str(arguments.batch), "--topk", str(arguments.topk), "--device", arguments.device]
    # Memory first, while this process is small: a child starts with the peak of its parent.
    memory = {
        side: int(subprocess.check_output([sys.executable, "-m", "benchmarks.dpsgd", *common, "--peak", side]))
        for side in ("opacus", "ours")
    }
    times = timed(arguments.batch, arguments.topk, chosen, arguments.repeats)
    line = {
        "batch": arguments.batch,
        "topk": arguments.topk,
        "opacus_seconds": round(times["opacus"], 5),
        "ours_seconds": round(times["ours"], 5),
        "time_ratio": round(times["ours"] / times["opacus"], 3),
        "opacus_bytes": memory["opacus"],
        "ours_bytes": memory["ours"],
        "memory_ratio": round(memory["ours"] / memory["opacus"], 3),
    }
    print(json.dumps(line), flush=True)
