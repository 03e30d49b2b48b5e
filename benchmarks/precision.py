"""How many votes change if large products use tf32 instead of (nearly) float32. Needs a GPU.

python -m benchmarks.precision [--teachers 1000] [--networks compact paper] [--steps 20]

Prints JSON lines. `same_weights`: one set of teachers votes in both precisions. `after_training`: two sets are trained
separately, one in each precision. `other_draw`: the same gradients, with other random draws of the sign (with the
paper's clipping constant nearly every sign is certain, so this is close to 0). `sums_correlate`: correlation of the
vote sums of the two sets.
"""

import argparse
import json

import torch

from benchmarks.machine import describe
from benchmarks.teachers import LEARNING, STEPS, make_fakes, make_network, make_shares
from datalens.bounded.topk_sign import TopKSign
from datalens.private import kernels
from datalens.private.teachers import Teachers


def measure(name: str, count: int, steps: int, device: torch.device) -> dict[str, object]:
    network, fakes = make_network(name), make_fakes(device)
    shares = make_shares(network, count, device)

    def trained(precision: str) -> Teachers:
        kernels.PRECISION = precision
        ensemble = Teachers(network, shares, learning_rate=1e-3, weight_decay=0.0, **LEARNING)
        for step in range(steps):
            ensemble.fit_step(fakes, step=step, repeats=STEPS)
        return ensemble

    def votes(ensemble: Teachers, precision: str, seed: int = 0) -> torch.Tensor:
        kernels.PRECISION = precision
        compress = TopKSign(k=200, clip=1e-5, quantise=True, seed=seed)
        return torch.cat([compress(g).rows for g in ensemble.image_gradients(fakes, step=steps)])

    exact, fast = trained(kernels.EXACT), trained("tf32")
    base = votes(exact, kernels.EXACT)
    return {
        "network": name,
        "teachers": count,
        "steps": steps,
        "same_weights": _changed(base, votes(exact, "tf32")),
        "after_training": _changed(base, votes(fast, "tf32")),
        "other_draw": _changed(base, votes(exact, kernels.EXACT, seed=1)),
        "sums_correlate": round(_correlation(base, votes(fast, "tf32")), 5),
    }


def _changed(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the fraction of votes cast in either that are not the same in both."""
    return round(float((a != b).sum() / ((a != 0) | (b != 0)).sum()), 5)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    sums = torch.stack([x.sum(dim=0, dtype=torch.float64).flatten() for x in (a, b)])
    return float(torch.corrcoef(sums)[0, 1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, default=1000)
    parser.add_argument("--networks", nargs="+", default=["compact", "paper"])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    chosen = torch.device("cuda")
    print(json.dumps({"machine": describe(chosen)}), flush=True)
    for network_name in arguments.networks:
        print(json.dumps(measure(network_name, arguments.teachers, arguments.steps, chosen)), flush=True)
