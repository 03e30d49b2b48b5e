"""`datalens sgd`: a classifier by DP-SGD with TopAgg compression."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from datalens.cli.output import EXIT_INTERRUPTED, DataFolder, Json, show
from datalens.options import Classes, Grayscale, ImageSize, Label, RecordId

_SOLVED = arg(metavar="FLOAT", help_behavior_hint="(default: solved for, from --epochs)")


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Train a classifier by DP-SGD, with compressed gradients, and write it with its certificate.

    Leave --sigma out, and the noise is solved for; give it and leave --epochs out, and as many steps are taken as fit.
    """

    data: Annotated[str | None, arg(metavar="NAME|PATH", help_behavior_hint="(required unless --resume)")] = None
    """A named data set (see `datalens data list`), or a file or folder of your own (docs/data.md)."""
    data_folder: DataFolder = None
    """Where a named data set lies that cannot be downloaded."""
    nominal_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(required for your own data)")] = None
    """For your own file: about how many records it has, declared public."""
    label: Label = None
    classes: Classes = None
    image_size: ImageSize = None
    grayscale: Grayscale = False
    record_id: RecordId = None
    out: Path
    """Folder of the run. Its `release/` is what may be handed on; the rest is private."""
    epsilon: float = 1.0
    """Privacy budget; `inf` trains without noise and without any guarantee."""
    delta: float = 1e-5
    topk: float = 1.0
    """A fraction: of the squared norm (norm) or of the coordinates (dim) that a record's gradient keeps. 1: all."""
    selector: Literal["norm", "dim", "none"] = "norm"
    """norm: noise shrinks by sqrt(topk) with the rows. dim: it does not."""
    sigma: Annotated[float | None, _SOLVED] = None
    """Noise multiplier."""
    clip: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.3; linear: 10; on features: 1)")
    ] = None
    """What the norm of a record's gradient is clipped to."""
    batch_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 1/30 of the records; linear: 512 or 1/20)")
    ] = None
    """Expected number of records in a step: each is in by itself, with probability batch size / nominal size."""
    lr: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: by --clip)")] = None
    """Learning rate."""
    epochs: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: by --epsilon, unless --sigma is given)")
    ] = None
    """How often a record is in, on average."""
    constant_rate: bool = False
    """Keep the learning rate, as the paper does (and a linear head always does); else it falls to nothing."""
    last: bool = False
    """Release the last weights, as the paper does, and not a mean in which late ones weigh most."""
    network: Annotated[
        Literal["cnn", "linear"] | None, arg(help_behavior_hint="(default: cnn; for features and tiny images: linear)")
    ] = None
    extractor: Annotated[str | None, arg(metavar="NAME|FILE", help_behavior_hint="(default: for cifar10 only)")] = None
    """A frozen network whose features are trained on: efficientnet-lite0, a file with ResNet-18 weights, or none."""
    accountant: Literal["prv", "rdp", "rdp-improved", "pld", "moments"] = "prv"
    """prv: Opacus's. rdp: the paper's. moments: of Abadi et al. 2016 (DPDL). All are shown by `datalens verify`."""
    seed: int = 0
    """Of the model's first weights only. Samples and noise come from the operating system."""
    noise_seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Seed samples and noise, for debugging: the run is stamped NOT PRIVATE."""
    budget: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The data set's own budget, over all runs on it (see `datalens budget`): this run is set aside in it first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False
    """Continue the run in --out after an interruption."""
    show_accuracy: bool = False
    """Print accuracy on real test records, which no epsilon covers, also without a terminal (in the log of a job)."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.methods.sgd import SgdOptions, train

        own = ("json", "show_accuracy")
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        result = train(SgdOptions(**asked))
        said, line = accuracy_said(result, shown=self.show_accuracy or sys.stdout.isatty())
        show(said, [f"{result['run']}/release", line], json=self.json)
        return EXIT_INTERRUPTED if result["interrupted"] else 0


def accuracy_said(result: dict[str, Any], *, shown: bool) -> tuple[dict[str, Any], str]:
    """What is printed: accuracy on real records only where the owner sees it, since job logs are read by others."""
    what = "accuracy on real test records"
    if result["accuracy"] is None:
        return result, f"{what}: unknown: there is no test split"
    if shown:
        return result, f"{what}, for the owner only (no epsilon covers it): {result['accuracy']:.4f}"
    where = f"{result['run']}/metrics.jsonl"
    line = f"{what}: for the owner only, in {where} (--show-accuracy prints it)"
    return {**result, "accuracy": None, "accuracy_for_the_owner": where}, line
