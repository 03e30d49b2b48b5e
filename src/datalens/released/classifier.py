"""The classifiers that `datalens sgd` trains: the small network of Opacus's MNIST example, or a linear layer."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from datalens.errors import DatalensError

# Mean and standard deviation of pixels in Opacus's example: constants, not computed from the owner's data.
_CENTRE, _SPREAD = 0.1307, 0.3081


class Classifier(nn.Module):
    """A network from images in [0, 1], or features, [n, …] to logits [n, classes].

    | network | layers |
    |---|---|
    | cnn | conv 16 8x8 stride 2, pool, conv 32 4x4 stride 2, pool, dense 32, dense: the paper's for MNIST |
    | linear | dense |
    """

    def __init__(self, *, shape: tuple[int, ...], classes: int, network: Literal["cnn", "linear"]) -> None:
        super().__init__()
        self.shape, self.network = shape, network
        size = 1
        for side in shape:
            size *= side
        if network == "linear":
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
            return
        if network != "cnn":
            raise ValueError(f"there is no network {network!r}")
        if len(shape) != 3 or min(shape[1:]) < 14:
            raise DatalensError(f"the cnn needs images of at least 14x14, not {shape}: use --network linear")
        channels, height, width = shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1)),
            nn.Flatten(),
            *(nn.Linear(32 * _after(height) * _after(width), 32), nn.ReLU()),
            nn.Linear(32, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x - _CENTRE) / _SPREAD if len(self.shape) == 3 else x)

    def described(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "network": self.network}


def _after(side: int) -> int:
    """Return the length of a side after both convolutions and pools."""
    pooled = (side + 6 - 8) // 2 + 1 - 1
    return (pooled - 4) // 2 + 1 - 1


def seeded(seed: int, **facts: Any) -> Classifier:
    """Return a classifier with torch's initial weights at this seed. The global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(**facts)
