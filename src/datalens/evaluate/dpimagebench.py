"""DPImageBench's protocol, by which the field compares: networks trained on synthetic images, tested on real ones.

Of 60,000 synthetic images 55,000 train each network, without augmentation: Adam, 50 epochs, a rate that falls by steps,
and a mean of the weights, which is what is tested. Two figures for each network: of the last epoch, and of the epoch
with the best accuracy on real validation records. **That choice uses real records without noise, and no ε
covers it**; it is here because published figures are of this kind. For the owner only, like every measure.

Written from a description of the protocol; none of its code is used. CIFAR-10, for which it has deeper networks, is not
supported.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from datalens.data.records import Dataset
from datalens.errors import DatalensError
from datalens.evaluate.classifiers import SmallResNet
from datalens.evaluate.utility import check_like, normalise, per_class
from datalens.progress import bar
from datalens.released.synthetic import SyntheticDataset

COUNT, TRAINED_ON = 60_000, 55_000  # synthetic images: drawn, and trained on
EPOCHS, BATCH, RATE = 50, 256, 0.01
FALLS, EVERY = 0.2, 20  # factor of the rate, and the number of epochs after which it falls
MEAN = 0.9999  # of the weights, once as many steps have been made (`_Mean`)
_LOOK = 500  # test images at a time
# Numbers of validation records, drawn from the training records; of other sets, a twelfth.
VALIDATION = {"mnist": 5_000, "fashion-mnist": 5_000, "celeba-gender-32": 17_706}
NOTE = (
    "DPImageBench's protocol. The chosen epoch is the best on real validation records: noise-free, not covered by ε. "
    "For the owner"
)
WARNING = "unless the run was trained without the validation records, they are records of its own training"
SMALL_NOTE = "our small ResNet in place of DPImageBench's three networks: not comparable with its tables"


# --- networks ---------------------------------------------------------------------------------------------------------


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al. 2016), as in ResNet-110."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.through = nn.Sequential(
            *(nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = _shortcut(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.around(x) + self.through(x))


class Wide(nn.Module):
    """A block of a wide ResNet: norms come before convolutions, dropout between these (Zagoruyko, Komodakis 2016)."""

    def __init__(self, channels: int, out: int, stride: int, *, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.through = nn.Sequential(
            *(nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Conv2d(out, out, 3, padding=1, bias=False)),
        )
        self.around = (
            nn.Identity() if (channels, stride) == (out, 1) else nn.Conv2d(channels, out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        same = isinstance(self.around, nn.Identity)
        return self.through(normed) + (x if same else self.around(normed))


class Grouped(nn.Module):
    """A bottleneck with a grouped 3×3 convolution, beside a shortcut (Xie et al. 2017)."""

    def __init__(self, channels: int, out: int, stride: int, *, groups: int, widening: int) -> None:
        super().__init__()
        inside = groups * out // widening
        self.through = nn.Sequential(
            *(nn.Conv2d(channels, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            nn.Conv2d(inside, inside, 3, stride=stride, padding=1, groups=groups, bias=False),
            *(nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = _shortcut(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.around(x) + self.through(x))


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    if (channels, stride) == (out, 1):
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))


def stages(
    block: Callable[[int, int, int], nn.Module],
    *,
    each: int,
    stem: int,
    widths: tuple[int, int, int],
    normed: bool = True,
) -> Callable[..., nn.Module]:
    """Return a function that builds a network: a 3×3 convolution, three stages of blocks, a mean over pixels, a layer.

    Args:
        block: builds a block from its channels, the channels that it returns, and its stride.
        each: number of blocks of a stage.
        stem: channels of the first convolution.
        widths: channels of the stages.
        normed: whether blocks end with a norm; otherwise one follows the last.
    """

    def build(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
        if min(height, width) < 8:
            raise DatalensError(f"the networks need images of at least 8x8, not {height}x{width}")
        head = [nn.BatchNorm2d(stem), nn.ReLU()] if normed else []
        layers: list[nn.Module] = [nn.Conv2d(channels, stem, 3, padding=1, bias=False), *head]
        before = stem
        for stage, out in enumerate(widths):
            for number in range(each):
                layers.append(block(before, out, 2 if stage and not number else 1))
                before = out
        layers += [] if normed else [nn.BatchNorm2d(before), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))

    return build


def resnet(depth: int) -> Callable[..., nn.Module]:
    return stages(Basic, each=(depth - 2) // 6, stem=16, widths=(16, 32, 64))


def wide_resnet(depth: int, widening: int, dropout: float = 0.3) -> Callable[..., nn.Module]:
    widths = (16 * widening, 32 * widening, 64 * widening)
    return stages(partial(Wide, dropout=dropout), each=(depth - 4) // 6, stem=16, widths=widths, normed=False)


def resnext(depth: int, groups: int, widening: int) -> Callable[..., nn.Module]:
    widths = (64 * widening, 128 * widening, 256 * widening)
    block = partial(Grouped, groups=groups, widening=widening)
    return stages(block, each=(depth - 2) // 9, stem=64, widths=widths)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "ResNet-110": resnet(110),
    "WRN-40-4": wide_resnet(40, 4),
    "ResNeXt-29": resnext(29, 8, 4),
}
SMALL: dict[str, Callable[..., nn.Module]] = {"resnet": SmallResNet}


# --- the protocol -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of one network. Accuracies are on the real test images."""

    network: str
    last: float
    chosen: float  # of the epoch with the best accuracy on real validation records: not covered by ε
    epoch: int  # that epoch, from 1
    confusion: tuple[tuple[int, ...], ...]  # [class, guess], of the last epoch


class _Mean:
    """A mean of weights and of the norms' statistics in which late steps weigh most.

    A factor of 0.9999 alone would leave a third of the weight to the first steps of 10,000, so it is approached:
    (1 + t) / (10 + t) in step t. (The description of the protocol has the factor only.)
    """

    def __init__(self, net: nn.Module) -> None:
        self.net, self._steps = copy.deepcopy(net).requires_grad_(False), 0
        pairs = zip(self.net.state_dict().values(), net.state_dict().values(), strict=True)
        self._pairs = [(mine, other) for mine, other in pairs if mine.is_floating_point()]  # the others count batches

    def add(self) -> None:
        """Add the network's weights, as they are now."""
        self._steps += 1
        new = 1 - min(MEAN, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_([mine for mine, _ in self._pairs], [other for _, other in self._pairs], new)


def validation_split(training: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the records to train on, and those of the validation records: a permutation of seed 0."""
    total = len(training.images)
    held = VALIDATION.get(training.schema.name, max(1, total // 12))
    if not 0 < held < total:
        raise DatalensError(f"{held} validation records of {total} leave none to train on")
    order = np.random.default_rng(0).permutation(total)
    return order[:-held], order[-held:]


def train_and_test(
    name: str,
    build: Callable[..., nn.Module],
    images: np.ndarray,
    labels: np.ndarray,
    validation: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    classes: int,
    epochs: int,
    seed: int,
    device: torch.device | str,
) -> Score:
    """Train a network on images [n, h, w, c] and test the mean of its weights.

    Nothing is chosen on the test images; `Score.chosen` is chosen on the validation records.
    """
    if epochs < 1 or len(images) < 2:
        raise DatalensError(f"at least one epoch and two images are needed, not {epochs} and {len(images)}")
    count, height, width, channels = images.shape
    x, y = torch.tensor(images, device=device), torch.tensor(labels, device=device)
    steps = max(1, count // BATCH)
    order = torch.Generator().manual_seed(seed)
    best, chosen, epoch = -1.0, 0.0, 0
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        bar(f"{name}, {epochs} epochs", epochs * steps) as (progress, task),
    ):
        torch.manual_seed(seed)  # initial weights and dropout
        net = build(channels=channels, height=height, width=width, classes=classes).to(device)
        mean = _Mean(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=EVERY, gamma=FALLS)
        for number in range(1, epochs + 1):
            net.train()
            for some in torch.randperm(count, generator=order).to(device).split(min(BATCH, count))[:steps]:
                loss = F.cross_entropy(net(normalise(x[some])), y[some])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean.add()
                progress.advance(task)
            schedule.step()
            if (right := _accuracy(mean.net, *validation, device)) > best:
                best, epoch = right, number
                chosen = _accuracy(mean.net, *test, device)
        guesses = _guesses(mean.net, test[0], device)
    confusion = np.bincount(test[1] * classes + guesses, minlength=classes**2).reshape(classes, classes)
    last = float((guesses == test[1]).mean())
    rows = tuple(map(tuple, confusion.tolist()))
    return Score(network=name, last=last, chosen=chosen, epoch=epoch, confusion=rows)


def _guesses(net: nn.Module, images: np.ndarray, device: torch.device | str) -> np.ndarray:
    net.eval()
    with torch.inference_mode():
        parts = [net(normalise(part.to(device))).argmax(dim=1).cpu() for part in torch.tensor(images).split(_LOOK)]
    return torch.cat(parts).numpy()


def _accuracy(net: nn.Module, images: np.ndarray, labels: np.ndarray, device: torch.device | str) -> float:
    return float((_guesses(net, images, device) == labels).mean())


def evaluate(
    synthetic: SyntheticDataset,
    training: Dataset,
    test: Dataset,
    *,
    device: torch.device | str,
    small: bool = False,
    epochs: int = EPOCHS,
    trained_on: int = TRAINED_ON,
    ceiling: bool = True,
    networks: dict[str, Callable[..., nn.Module]] | None = None,
) -> dict[str, Any]:
    """Score a synthetic set by the protocol.

    Args:
        synthetic: the set; its images are shuffled, and at most `trained_on` are used.
        training: all real training records, from which the validation records are taken (`validation_split`).
        test: real test records.
        device: where to compute.
        small: our small ResNet in place of the three networks.
        epochs: epochs of each network.
        trained_on: the most synthetic images to train on.
        ceiling: also train on as many real training records.
        networks: other networks, for tests.

    Returns:
        Each network's figures, their mean and the best of them, for synthetic and (`real`) for real records.
    """
    if training.schema.name == "cifar10":
        raise DatalensError("the protocol has deeper networks for cifar10, which are not here: choose another data set")
    for name, part in (("real training set", training), ("test set", test)):
        check_like(synthetic, name, part.images, part.labels)
    mine, held = validation_split(training)
    chosen = networks or (SMALL if small else NETWORKS)
    order = np.random.default_rng(0).permutation(len(synthetic.images))[:trained_on]
    real = mine[: len(order)]

    def scores(images: np.ndarray, labels: np.ndarray, said: str) -> dict[str, Any]:
        found = [
            train_and_test(
                f"{name} on {said} images",
                build,
                images,
                labels,
                (training.images[held], training.labels[held]),
                (test.images, test.labels),
                classes=len(synthetic.classes),
                epochs=epochs,
                seed=0,
                device=device,
            )
            for name, build in chosen.items()
        ]
        return summary([asdict(one) for one in found])

    result = scores(synthetic.images[order], synthetic.labels[order], "synthetic")
    result |= {
        "epochs": epochs,
        "synthetic": len(order),
        "validation": len(held),
        "test": len(test.images),
        "small": small,
    }
    if ceiling:
        result["real"] = scores(training.images[real], training.labels[real], "real")
    return result


def summary(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the networks, and over them: the mean of the last epochs, the best of the chosen ones."""
    confusion = np.sum([one["confusion"] for one in networks], axis=0)
    return {
        "networks": [{key: one[key] for key in ("network", "last", "chosen", "epoch")} for one in networks],
        "last": statistics.fmean(one["last"] for one in networks),
        "chosen": statistics.fmean(one["chosen"] for one in networks),
        "best_chosen": max(one["chosen"] for one in networks),
        "accuracy_per_class": per_class(confusion),
        "confusion": confusion.tolist(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the result as lines of text."""
    output = []
    for part, said in ((found, "synthetic"), (found.get("real"), "real")):
        for one in part["networks"] if part else ():
            output.append(
                f"{one['network']} on {found['synthetic']} {said} images: last epoch {one['last']:.4f}; "
                f"epoch {one['epoch']} of {found['epochs']}, chosen on {found['validation']} real validation records: "
                f"{one['chosen']:.4f}"
            )
        if part:
            output.append(
                f"{said}: last epoch {part['last']:.4f} (mean), chosen epoch {part['chosen']:.4f} (mean), "
                f"{part['best_chosen']:.4f} (best)"
            )
    return [*output, *([SMALL_NOTE] if found["small"] else []), WARNING, NOTE]
