"""Whether Algorithm 1 learns: small ensembles with the noise that 4,000 teachers have at ε = 10, one change at a time.

python -m benchmarks.algorithm1 --data mnist --linear 0 2 5 8 [--network compact] [--teachers 128] [--steps 100]
    [--noise 0]

A teacher has fifteen records. Noise of 0.225·N on a sum of N votes is σ = 900 for the paper's N = 4,000. The scores are
accuracies of classifiers on real images that were held out of training: a sixth of the training set. The test set is
not read. Prints one JSON line per score; `between` and `within` are distances per pixel of the student's images.
For the owner: with so few teachers no such run is private, and none claims to be.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import held_out
from benchmarks.machine import describe
from datalens.driver import train
from datalens.options import TrainOptions
from datalens.released.classes import spread_of
from datalens.released.generator import Generator
from datalens.released.release import load_generator

RECORDS = 15  # records of a teacher
NOISE = 0.225  # σ divided by the number of teachers: 900 / 4,000, as the paper has at ε = 10


def measure(asked: argparse.Namespace, folder: Path) -> None:
    data, images, labels = held_out.split(asked.data, folder, asked.teachers * RECORDS)
    for gain in asked.linear:
        how: dict[str, Any] = {"teachers": asked.teachers, "network": asked.network, "steps": asked.steps}
        how |= {"linear": gain, "student_decay": asked.student_decay, "seed": asked.seed}
        if asked.network in ("spectral", "printed"):
            how.pop("linear")
        noisy = {"k": asked.k, "beta": asked.beta, "sigma": asked.noise * asked.teachers, "epsilon": math.inf}
        out = folder / f"linear-{gain:g}"
        train(TrainOptions(out=out, method="datalens-paper", preset="code", **data, **noisy, **how))
        generator, _ = load_generator(out / "release")
        assert isinstance(generator, Generator)
        spread = spread_of(generator, seed=0)
        facts = {"data": asked.data, **how, "noise": asked.noise}
        facts |= {"between": round(spread.between, 4), "within": round(spread.within, 4)}
        held_out.score("algorithm 1", generator, images, labels, torch.device("cpu"), **facts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--network", default="compact", choices=("compact", "paper", "printed"))
    parser.add_argument("--linear", type=float, nargs="+", default=[0.0, 5.0], help="gains of the linear part")
    parser.add_argument("--teachers", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--beta", type=float, default=0.2)
    parser.add_argument("--noise", type=float, default=NOISE, help="σ divided by the number of teachers; 0: none")
    parser.add_argument("--student-decay", choices=("cosine", "off"), default="off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=3000, help="number of training images of a classifier")
    parser.add_argument("--epochs", type=int, default=held_out.EPOCHS)
    asked = parser.parse_args()
    held_out.COUNT, held_out.EPOCHS = asked.images, asked.epochs
    print(json.dumps({"machine": describe(torch.device("cpu"))}), flush=True)
    with tempfile.TemporaryDirectory() as place:
        measure(asked, Path(place))
