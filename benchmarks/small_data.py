"""How utility depends on the number of records: the default method on subsets of a training set.

python -m benchmarks.small_data --data mnist [--epsilon 1 10] [--counts 1000 3000 10000 50000]

The scores are accuracies of classifiers on records that were held out of training. For the owner: not covered by ε.
Prints one JSON line per score.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks import held_out
from benchmarks.machine import describe
from datalens.driver import train
from datalens.errors import BudgetExceeded
from datalens.options import TrainOptions
from datalens.released.release import load_generator


def measure(data: str, count: int, epsilon: float, device: torch.device, folder: Path) -> None:
    common, *held = held_out.split(data, folder, count)
    facts = {"data": data, "records": count, "epsilon": epsilon}
    try:
        trained = train(TrainOptions(out=folder / f"{count}-{epsilon}", epsilon=epsilon, **common))
    except BudgetExceeded as error:
        print(json.dumps({**facts, "refused": str(error)}), flush=True)
        return
    facts |= {key: trained[key] for key in ("delta", "relation", "accountant")}
    model, names = load_generator(folder / f"{count}-{epsilon}" / "release")
    left_out = len(names) - len(getattr(model, "present", names))
    held_out.score("private moments", model.to(device), *held, device, **facts, classes_left_out=left_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 3000, 10_000, 50_000])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=held_out.COUNT, help="number of training images of a classifier")
    parser.add_argument("--epochs", type=int, default=held_out.EPOCHS)
    asked = parser.parse_args()
    held_out.COUNT, held_out.EPOCHS = asked.images, asked.epochs
    print(json.dumps({"machine": describe(torch.device(asked.device))}), flush=True)
    for number in asked.counts:
        for budget in asked.epsilon:
            with tempfile.TemporaryDirectory() as place:
                measure(asked.data, number, budget, torch.device(asked.device), Path(place))
