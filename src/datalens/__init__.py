"""Private images in, synthetic images out, with a differential-privacy certificate.

from pathlib import Path
from datalens import TrainOptions, check_release, sample, train

train(TrainOptions(data="digits", epsilon=1.0, out=Path("runs/a")))
synthetic = sample(Path("runs/a/release"), count=1000, seed=0)
assert not check_release(Path("runs/a/release")).problems
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BudgetExceeded": "datalens.errors",
    "DatalensError": "datalens.errors",
    "Schema": "datalens.datasets.schema",
    "SyntheticDataset": "datalens.released.synthetic",
    "TrainOptions": "datalens.config",
    "check_release": "datalens.released.certificate",
    "make_private": "datalens.methods.dpsgd",
    "sample": "datalens.released.release",
    "train": "datalens.training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: importing datalens does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'datalens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
