"""Fréchet distance between synthetic and real images (Heusel et al. 2017), computed by torchmetrics.

It is ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½), the distance of two Gaussians with the means and covariances of features.
With Inception-v3's features it is called FID; with others it is another number, so the name of the features is reported
with it. It is biased upwards for few images, so compare at equal counts only. Measured on real data: for the owner, not
covered by ε.
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
    """A Fréchet distance with the features and the numbers of images it was computed from."""

    fid: float
    fid_real: float | None  # of held-out real images: no generator can be expected to do better
    features: str
    synthetic: int
    real: int
    held_out: int
    enough: bool  # more images than features on both sides; otherwise covariances are singular and it means little

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
    """Return the distance of synthetic images to real ones, plus that of held-out real images as a baseline.

    Args:
        synthetic: images uint8 [n, h, w, c].
        real: real images, in the same format.
        features: the feature space.
        held_out: real images that are not in `real`.
        fresh: compute moments of real images again even if they are in the cache.
    """
    reference = moments(real, features, "FID: real images", fresh=fresh)
    baseline = None
    if held_out is not None:
        baseline = distance(moments(held_out, features, "FID: held-out real images", fresh=fresh), reference)
    return Fid(
        fid=distance(_moments(synthetic, features, "FID: synthetic images"), reference),
        fid_real=baseline,
        features=features.name,
        synthetic=len(synthetic),
        real=len(real),
        held_out=0 if held_out is None else len(held_out),
        enough=min(len(synthetic), len(real)) > features.size,
    )


def moments(images: np.ndarray, features: Features, label: str, *, fresh: bool = False) -> dict[str, Tensor]:
    """Return the features' sum, sum of outer products and count over real images, cached for other runs."""
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
    """Return the Fréchet distance of two Gaussians that are given by their moments."""
    metric = _metric(one["features_sum"].numel())
    metric.orig_dtype = torch.float64
    for side, values in (("fake", one), ("real", other)):
        for state in _STATES:
            setattr(metric, f"{side}_{state}", values[state])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that `update` was not called: the states were set
        return metric.compute().item()


def _metric(size: int) -> "FrechetInceptionDistance":
    from torchmetrics.image.fid import FrechetInceptionDistance

    return FrechetInceptionDistance(feature=_Given(size))


class _Given(nn.Identity):
    """A network that returns its inputs, which are features already. torchmetrics reads their number from it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size
