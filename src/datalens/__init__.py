"""Private images in, synthetic images out, with a differential-privacy certificate.

from datalens import DataLens

model = DataLens(epsilon=1.0, delta=1e-5, nominal_size=60_000).fit(images, labels)
synthetic = model.sample(10_000)
model.save("release/")

The steps of the command line, from Python:

from pathlib import Path
from datalens import TrainOptions, check_release, sample, train

train(TrainOptions(data="digits", epsilon=1.0, out=Path("runs/a")))
synthetic = sample(Path("runs/a/release"), count=1000, seed=0)
assert not check_release(Path("runs/a/release")).problems
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# On some CPUs MKL, which torch uses for products, rounds them differently depending on the memory addresses of the
# factors, unless this is set before its first product. A teacher's row must not depend on them (docs/decisions.md).
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:  # for type checkers and editors; at run time see below
    from datalens.api.estimator import DataLens
    from datalens.api.topagg import topagg
    from datalens.data.schema import Schema
    from datalens.driver import train
    from datalens.errors import BudgetExceeded, DatalensError
    from datalens.gradients.optimizer import make_private
    from datalens.options import TrainOptions
    from datalens.privacy.ledger import Budget, Ledger
    from datalens.released.release import sample
    from datalens.released.synthetic import SyntheticDataset
    from datalens.released.verification import check_release

_HOMES = {
    "Budget": "datalens.privacy.ledger",
    "BudgetExceeded": "datalens.errors",
    "DataLens": "datalens.api.estimator",
    "DatalensError": "datalens.errors",
    "Ledger": "datalens.privacy.ledger",
    "Schema": "datalens.data.schema",
    "SyntheticDataset": "datalens.released.synthetic",
    "TrainOptions": "datalens.options",
    "check_release": "datalens.released.verification",
    "make_private": "datalens.gradients.optimizer",
    "sample": "datalens.released.release",
    "topagg": "datalens.api.topagg",
    "train": "datalens.driver",
}
__all__ = [
    "Budget",
    "BudgetExceeded",
    "DataLens",
    "DatalensError",
    "Ledger",
    "Schema",
    "SyntheticDataset",
    "TrainOptions",
    "check_release",
    "make_private",
    "sample",
    "topagg",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing datalens does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'datalens' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
