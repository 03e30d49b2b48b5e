"""Feature spaces in which images are compared: of the data set's own classifier, of Inception-v3, or pixels.

A distance means nothing without its features, so each kind has a name, which is reported with every figure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the usual name)

from datalens.data.named import weights
from datalens.evaluate import inception_v3
from datalens.evaluate.judge import Judge, batches
from datalens.progress import bar

Resize = Literal["bilinear", "bicubic"]
_SIDE = 299  # side of Inception-v3's input images


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """A map from uint8 images [b, h, w, c] to features [b, size]."""

    name: str
    fingerprint: str  # identifies the network in the cache
    size: int
    batch: int
    extract: Callable[[Tensor], Tensor]

    def stream(self, images: np.ndarray, label: str) -> Iterator[Tensor]:
        """Yield the features of all images in batches, float32, with a progress bar."""
        with torch.inference_mode(), bar(f"{label}: features", len(images)) as (progress, task):
            for part in batches(images, self.batch):
                yield self.extract(part)
                progress.advance(task, len(part))

    def of(self, images: np.ndarray, label: str) -> Tensor:
        """Return the features of all images [n, size], on the CPU."""
        return torch.cat([part.cpu() for part in self.stream(images, label)])


def own(judge: Judge) -> Features:
    """Return the inputs of the last layer of the data set's own classifier. Comparable within one data set only."""
    size = judge.network.features_of_an_image
    return Features(
        name=f"own: {size} features of the {judge.name}",
        fingerprint=judge.fingerprint,
        size=size,
        batch=250,
        extract=judge.features,
    )


def inception(device: torch.device | str, *, resize: Resize = "bilinear") -> Features:
    """Return the features of published FIDs: 2048, of Inception-v3, whose weights file is checked."""
    network = inception_v3.load(weights.read("inception")).to(device)

    def extract(images: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):  # full float32 precision
            return network(prepared(images.to(device), resize))

    return Features(
        name=f"inception: 2048 features of Inception-v3 (2015), images resized to 299x299 by {resize} interpolation",
        fingerprint=f"{weights.WEIGHTS['inception'].file.sha256} {resize}",
        size=2048,
        batch=50,
        extract=extract,
    )


def prepared(images: Tensor, resize: Resize = "bilinear") -> Tensor:
    """Convert uint8 [b, h, w, c] to [b, 3, 299, 299] with values (x − 128) / 128, as the weights expect.

    A grey channel is repeated three times. Pixel centres are aligned as in pytorch-fid, not as in TensorFlow 1.
    Antialiasing is used for larger images.
    """
    x = images.permute(0, 3, 1, 2).float()
    x = x[:, :3] if x.shape[1] >= 3 else x[:, :1].expand(-1, 3, -1, -1)  # without alpha
    smooth = max(x.shape[2:]) > _SIDE
    x = F.interpolate(x, size=(_SIDE, _SIDE), mode=resize, align_corners=False, antialias=smooth)
    return x.clamp_(0, 255).sub_(128).div_(128)


def pixels(size: int) -> Features:
    """Return pixel values in [0, 1] as features, which depend on no network."""
    return Features(
        name=f"pixels: {size} values",
        fingerprint="pixels",
        size=size,
        batch=1000,
        extract=lambda images: images.flatten(start_dim=1).float().div_(255),
    )
