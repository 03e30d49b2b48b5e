"""Variants of a method's options, scored on records that are held out of training: a sixth of the training set.

python -m benchmarks.variants --common warm_start=off --variants "" steps=200 teacher_steps=4 [--data mnist …]
    [--epsilon 10] [--seeds 0 1]

A variant is a list of options of `datalens train`, as `name=value` with commas between them; "" is none of them. Every
run has the whole budget and its own ledger, and learns from five sixths of the training records; the test set is not
read. What is chosen by these scores is not covered by ε. Prints one JSON line per score, with the run's ε, δ, relation
and accountant; `between` and `within` are distances per pixel of the student's images (0.1 beside 0.2 is poor).
"""

import argparse
import json
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


def read(text: str) -> dict[str, Any]:
    """Return the options of "steps=200,network=compact"."""
    return {name: value_of(value) for name, _, value in (part.partition("=") for part in text.split(",") if part)}


def value_of(text: str) -> Any:
    try:
        return json.loads(text)  # a number, true or false
    except json.JSONDecodeError:
        return text


def measure(asked: argparse.Namespace, data: str, variant: str, seed: int, folder: Path) -> None:
    files, images, labels = held_out.split(data, folder)
    options = {"epsilon": asked.epsilon, "seed": seed, "device": asked.device, **read(asked.common), **read(variant)}
    trained = train(TrainOptions(out=folder / "run", **files, **options))
    model, _ = load_generator(folder / "run" / "release")
    facts: dict[str, Any] = {"data": data, "seed": seed}
    facts |= {key: trained[key] for key in ("epsilon", "delta", "relation", "accountant", "steps", "seconds")}
    if isinstance(model, Generator):
        spread = spread_of(model, seed=0)
        facts |= {"between": round(spread.between, 4), "within": round(spread.within, 4)}
    device = torch.device(asked.device)
    held_out.score(variant or "as it is", model.to(device), images, labels, device, **facts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--common", default="", help="options of all runs")
    parser.add_argument("--variants", nargs="+", default=[""])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=held_out.COUNT, help="number of training images of a classifier")
    parser.add_argument("--epochs", type=int, default=held_out.EPOCHS)
    arguments = parser.parse_args()
    held_out.COUNT, held_out.EPOCHS = arguments.images, arguments.epochs
    print(json.dumps({"machine": describe(torch.device(arguments.device)), "common": arguments.common}), flush=True)
    for training_seed in arguments.seeds:
        for named in arguments.data:
            for changed in arguments.variants:
                with tempfile.TemporaryDirectory() as place:
                    measure(arguments, named, changed, training_seed, Path(place))
