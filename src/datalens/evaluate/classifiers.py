"""The classifiers that evaluate synthetic images: network, training and augmentation of each.

`paper` is the paper's. `augmented` has a similar size, but a present-day training recipe with augmentation: synthetic
images lack variety, and the variety that shifts, rotations, scaling and noise add is public knowledge. `logistic`,
`mlp` and `resnet` test whether other models learn from the images too. `authors` is that of the authors' code, for
comparison with their figures only. `judge` is trained on real images, and judges
synthetic ones (see judge.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from datalens.errors import DatalensError

ClassifierName = Literal["paper", "augmented", "logistic", "mlp", "resnet", "authors", "judge"]
UTILITY: tuple[ClassifierName, ...] = ("paper", "augmented", "logistic", "mlp", "resnet")

# Settings of `augmented`, the same for every data set. The first line also applies to the classifiers after it.
_RATE, _WEIGHT_DECAY, _WARM_UP = 2e-3, 1e-2, 0.1
_SHIFT = 2 / 28  # relative to the side
_TURN = 0.15  # radians
_SCALE = 0.1
_NOISE = 0.2  # relative to the range of a pixel
_SMOOTHING = 0.1  # label smoothing, because labels of synthetic images are not reliable


class Layers(nn.Module):
    """Layers one after another: [b, c, h, w] → [b, classes]."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class PaperCNN(Layers):
    """Two convolutions and two dense layers, padded so that 8x8 images work as well as 28x28 ones."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        _check_size(height, width)
        super().__init__(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            # relu(maxpool(x)) equals maxpool(relu(x)) and needs a quarter of the relu's work.
            *(nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            nn.Flatten(),
            *(nn.Linear(64 * (height // 4) * (width // 4), 64), nn.ReLU(), nn.Dropout(0.5)),
            nn.Linear(64, classes),
        )


class AuthorsCNN(Layers):
    """The network of the authors' evaluation: one pooling only, between two convolutions."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        _check_size(height, width)
        super().__init__(
            *(nn.Conv2d(channels, 32, kernel_size=3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU()),
            nn.Flatten(),
            *(nn.Linear(64 * (height // 2) * (width // 2), 64), nn.ReLU(), nn.Dropout(0.5)),
            nn.Linear(64, classes),
        )


class AugmentedCNN(Layers):
    """The paper's convolutions, a wider dense layer, and batch norm, which makes biases before it redundant."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        _check_size(height, width)
        super().__init__(
            # Pooling before the batch norm needs a quarter of the work; with a positive gain the result is the same.
            *(nn.Conv2d(channels, 32, kernel_size=3, padding=1, bias=False), nn.MaxPool2d(2)),
            *(nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=False), nn.MaxPool2d(2)),
            *(nn.BatchNorm2d(64), nn.ReLU()),
            nn.Flatten(),
            *(nn.Linear(64 * (height // 4) * (width // 4), 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()),
            nn.Linear(128, classes),
        )


class Logistic(Layers):
    """Logistic regression on pixels."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(channels * height * width, classes))


class MLP(Layers):
    """Two hidden dense layers, without any notion of neighbouring pixels."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__(
            nn.Flatten(),
            *(nn.Linear(channels * height * width, 512), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(256, classes),
        )


class _Residual(nn.Module):
    """A residual block of two convolutions that halves the side and doubles the channels (He et al. 2016)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.around = nn.Sequential(nn.Conv2d(channels, out, 1, stride=2, bias=False), nn.BatchNorm2d(out))
        self.through = nn.Sequential(
            *(nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.around(x) + self.through(x))


class SmallResNet(nn.Module):
    """A stem and residual blocks until a side is about seven pixels: two for 28x28 and 32x32, three for 64x64."""

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        _check_size(height, width)
        blocks = max(1, round(math.log2(min(height, width) / 7)))
        self.features_of_an_image = 32 * 2**blocks
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(_Residual(32 * 2**i, 64 * 2**i) for i in range(blocks)),
        )
        self.head = nn.Linear(self.features_of_an_image, classes)

    def features(self, images: Tensor) -> Tensor:  # [b, c, h, w] -> [b, f]: inputs of the last layer
        return self.body(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:  # [b, c, h, w] -> [b, classes]
        return self.head(self.features(images))


def shift(images: Tensor, random: torch.Generator) -> Tensor:
    """Shift each image at random by whole pixels, up to a fourteenth of the side; new pixels repeat the border."""
    count, _, height, width = images.shape
    most = round(_SHIFT * min(height, width))
    if not most:
        return images
    padded = F.pad(images, (most, most, most, most), mode="replicate")
    down, across = torch.randint(2 * most + 1, (2, count, 1), generator=random, device=images.device)
    rows = down + torch.arange(height, device=images.device)  # [b, h]
    columns = across + torch.arange(width, device=images.device)  # [b, w]
    which = torch.arange(count, device=images.device).view(-1, 1, 1)
    moved = padded.permute(0, 2, 3, 1)[which, rows.unsqueeze(2), columns.unsqueeze(1)]  # [b, h, w, c]
    return moved.permute(0, 3, 1, 2)  # channels_last already


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Shift, rotate and scale each image at random and add noise. Images [b, c, h, w] have values in [-1, 1].

    The strengths are drawn per image too: digits gain from large shifts, shirts from none. A classifier that sees
    only images with the same amount of noise misclassifies real ones, which have none.
    """

    def between(most: float, *shape: int) -> Tensor:  # uniform in ±most
        return (torch.rand(shape, generator=random, device=images.device) * 2 - 1) * most

    count, _, height, width = images.shape
    strength = torch.rand(count, generator=random, device=images.device)
    turn, scale = between(_TURN, count) * strength, 1 + between(_SCALE, count) * strength
    across, aside = scale * turn.cos(), scale * turn.sin()
    shift = between(2 * _SHIFT, count, 2) * strength.unsqueeze(1)  # a side is 2 long in the coordinates of affine_grid
    rows = [across, -aside * height / width, shift[:, 0], aside * width / height, across, shift[:, 1]]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(count, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    noise = torch.randn(moved.shape, generator=random, device=images.device)
    noise_scale = torch.rand((count, 1, 1, 1), generator=random, device=images.device)
    return moved.add_(noise.mul_(noise_scale), alpha=2 * _NOISE).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A network and its training recipe."""

    description: str
    network: Callable[..., nn.Module]
    optimizer: Callable[[nn.Module, int], tuple[Optimizer, LRScheduler]]  # of a network and the number of steps
    augment: Callable[[Tensor, torch.Generator], Tensor]
    smoothing: float  # of labels
    whole_batches: bool  # drop an incomplete last batch, since batch norm takes its statistics from the batch


def _as_they_are(images: Tensor, random: torch.Generator) -> Tensor:
    return images


def _adam(net: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return optimizer, CosineAnnealingLR(optimizer, T_max=steps)


def _sgd(net: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0)


def _adamw(
    net: nn.Module, steps: int, *, rate: float = _RATE, warm_up: float = _WARM_UP
) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=_WEIGHT_DECAY)
    at_least = round(2 / warm_up)  # with fewer steps the warm-up would have no step
    return optimizer, OneCycleLR(optimizer, rate, total_steps=max(steps, at_least), pct_start=warm_up)


_fast_adamw = partial(_adamw, rate=8e-3, warm_up=0.2)  # a network with global average pooling learns slowly


CLASSIFIERS: dict[ClassifierName, Classifier] = {
    "paper": Classifier(
        description="PaperCNN: conv 3x3 32, conv 3x3 64, FC 64, dropout 0.5",
        network=PaperCNN,
        optimizer=_adam,
        augment=_as_they_are,
        smoothing=0.0,
        whole_batches=False,
    ),
    "augmented": Classifier(
        description="AugmentedCNN: conv 3x3 32, conv 3x3 64, FC 128, batch norm; AdamW, one cycle; "
        "labels smoothed by 0.1; shifts, turns, scales and noise on every batch, of random strength",
        network=AugmentedCNN,
        optimizer=_adamw,
        augment=augment,
        smoothing=_SMOOTHING,
        whole_batches=True,
    ),
    "logistic": Classifier(
        description="logistic regression on pixels; AdamW, one cycle",
        network=Logistic,
        optimizer=_adamw,
        augment=_as_they_are,
        smoothing=0.0,
        whole_batches=False,
    ),
    "mlp": Classifier(
        description="MLP: FC 512, FC 256, dropout 0.2; AdamW, one cycle",
        network=MLP,
        optimizer=_adamw,
        augment=_as_they_are,
        smoothing=0.0,
        whole_batches=False,
    ),
    "resnet": Classifier(
        description="SmallResNet: conv 3x3 32, residual blocks 64, 128, … to about 7x7, batch norm; AdamW, one cycle",
        network=SmallResNet,
        optimizer=_fast_adamw,
        augment=_as_they_are,
        smoothing=0.0,
        whole_batches=True,
    ),
    "authors": Classifier(  # we do not know their rate and batch
        description="AuthorsCNN: conv 3x3 32, pool, conv 3x3 64, FC 64, dropout 0.5; SGD, rate 0.01; its "
        "authors report the best epoch on test data, which is no fair figure",
        network=AuthorsCNN,
        optimizer=_sgd,
        augment=_as_they_are,
        smoothing=0.0,
        whole_batches=False,
    ),
    "judge": Classifier(
        description="SmallResNet; AdamW, one cycle; shifts of up to 1/14 of the side on every batch",
        network=SmallResNet,
        optimizer=_fast_adamw,
        augment=shift,
        smoothing=0.0,
        whole_batches=True,
    ),
}

_FAST = "AdamW (rate {:g}, weight decay 0.01, one cycle), batch 128"
# How each classifier is trained, in words for tables.
TRAINED: dict[ClassifierName, str] = {
    "paper": "Adam (rate 0.001, falling along a cosine), batch 128",
    **dict.fromkeys(("augmented", "logistic", "mlp"), _FAST.format(_RATE)),
    "authors": "SGD (rate 0.01), batch 128",
    **dict.fromkeys(("resnet", "judge"), _FAST.format(8e-3)),
}


def _check_size(height: int, width: int) -> None:
    if min(height, width) < 8:
        raise DatalensError(f"the classifier needs images of at least 8x8, not {height}x{width}")
