"""TopAgg alone: compress every teacher's gradient, then bound and sum the votes.

python -m benchmarks.aggregate [--sizes 4000,15,784,200 6000,10,12288,700] [--loop 20]

Prints JSON lines. The floor is the time to read the gradients once at the speed of a copy. In the same run, `--loop`
teachers are also compressed one by one.
"""

import argparse
import json

import torch

from benchmarks.machine import ceilings, describe, seconds
from datalens.bounded.contributions import Gradients, sum_bounded
from datalens.bounded.topk_sign import TopKSign


def measure(n: int, m: int, d: int, k: int, loop: int, device: torch.device, copy: float) -> dict[str, object]:
    random = torch.Generator(device=device).manual_seed(0)
    values = torch.randn(n, m, d, generator=random, device=device).mul_(1e-5)
    numbers = torch.arange(n, device=device)
    compress = TopKSign(k=k, clip=1e-5, quantise=True, seed=0)
    # On a CPU, chunks of 256 MB: copies of everything would not fit in memory.
    chunk = n if device.type == "cuda" else max(1, 2**28 // (m * d * 4))

    def chunks() -> list[Gradients]:
        parts = zip(numbers.split(chunk), values.split(chunk), strict=True)
        return [Gradients(teachers=t, values=v, step=0) for t, v in parts]

    compressing = seconds(lambda: [compress(part).l2_bound for part in chunks()], device, repeats=3)
    both = seconds(lambda: sum_bounded(map(compress, chunks())), device, repeats=3)

    def one_by_one() -> None:
        total = torch.zeros(m, d, dtype=torch.int32, device=device)
        for i in range(loop):
            total += compress(Gradients(teachers=numbers[i : i + 1], values=values[i : i + 1], step=0)).rows[0]

    least = values.numel() * 4 / copy
    line = {
        "size": [n, m, d],
        "k": k,
        "compress_seconds": round(compressing, 6),
        "compress_and_sum_seconds": round(both, 6),
        "floor_seconds": round(least, 6),
        "fraction_of_ceiling": round(least / both, 3),
    }
    if loop:
        each = seconds(one_by_one, device, repeats=3, warm=1) / loop
        line |= {"one_by_one_seconds": round(each * n, 4), "speedup": round(each * n / both, 1)}
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4000,15,784,200", "6000,10,12288,700"], help="N,m,d,k")
    parser.add_argument("--loop", type=int, default=20, help="number of teachers to compress one by one; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    best = ceilings(chosen)
    print(json.dumps({"machine": describe(chosen), "ceilings": best}), flush=True)
    for size in arguments.sizes:
        n, m, d, k = map(int, size.split(","))
        print(json.dumps(measure(n, m, d, k, arguments.loop, chosen, best["copy_bytes"])), flush=True)
