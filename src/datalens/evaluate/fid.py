"""Fréchet distance between synthetic and real images (Heusel et al. 2017), by torchmetrics' arithmetic.

‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½) of means and covariances of features: how far apart two Gaussians with these are.
Called FID where the features are Inception-v3's; in others it is another number, so their name stands beside it. Biased
upwards by few images, so compare at equal counts only. Measured with real data: for the owner, not covered by ε.
"""

import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from datalens.errors import DatalensError
from datalens.evaluate import cache
from datalens.evaluate.features import Features

if TYPE_CHECKING:
    from torchmetrics.image.fid import FrechetInceptionDistance

_STATES = ("features_sum", "features_cov_sum", "features_num_samples")  # torchmetrics' names


@dataclass(frozen=True, kw_only=True)
class Fid:
    fid: float
    fid_real: float | None  # of real images held out: no generator does better than that
    features: str
    synthetic: int
    real: int
    held_out: int
    enough: bool  # more images than features on either side: else covariances are singular, and it says little

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fid(
    synthetic: np.ndarray,
    real: np.ndarray,
    features: Features,
    *,
    held_out: np.ndarray | None = None,
    fresh: bool = False,
) -> Fid:
    """Of images uint8 [n, h, w, c], and to read it against of real ones held out."""
    reference = moments(real, features, "FID: real images", fresh=fresh)
    other = None
    if held_out is not None:
        other = distance(moments(held_out, features, "FID: held-out real images", fresh=fresh), reference)
    return Fid(
        fid=distance(_moments(synthetic, features, "FID: synthetic images"), reference),
        fid_real=other,
        features=features.name,
        synthetic=len(synthetic),
        real=len(real),
        held_out=0 if held_out is None else len(held_out),
        enough=min(len(synthetic), len(real)) > features.size,
    )


def moments(images: np.ndarray, features: Features, label: str, *, fresh: bool = False) -> dict[str, Tensor]:
    """Sum, sum of products and number of the features of real images; kept, since other runs need them too."""
    name = cache.key("moments", images, features.fingerprint)
    return cache.remembered_tensors(f"moments-{name}", lambda: _moments(images, features, label), fresh=fresh)


def _moments(images: np.ndarray, features: Features, label: str) -> dict[str, Tensor]:
    if len(images) < 2:
        raise DatalensError("a Fréchet distance needs at least two images on either side")
    metric = _metric(features.size)
    for part in features.stream(images, label):
        metric.to(part.device)
        metric.update(part.double(), real=True)
    return {state: getattr(metric, f"real_{state}").cpu() for state in _STATES}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Between two Gaussians given by their moments."""
    metric = _metric(one["features_sum"].numel())
    metric.orig_dtype = torch.float64
    for side, values in (("fake", one), ("real", other)):
        for state in _STATES:
            setattr(metric, f"{side}_{state}", values[state])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing was added up: it was, before
        return metric.compute().item()


def _metric(size: int) -> "FrechetInceptionDistance":
    from torchmetrics.image.fid import FrechetInceptionDistance

    return FrechetInceptionDistance(feature=_Given(size))


class _Given(nn.Identity):
    """Features come as they are; torchmetrics asks a network for their number by this name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size
