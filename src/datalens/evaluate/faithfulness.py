"""Faithfulness: whether synthetic images look real, cover the real ones, and are suspiciously near to training images.

For the owner: measured on real data, not covered by ε. The distance to training images proves no privacy; only the
guarantee does. But a leak that is found here is so large that the guarantee cannot hold.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datalens.errors import DatalensError
from datalens.evaluate.attacks import COPY
from datalens.evaluate.features import Features
from datalens.privacy.audit import VERDICT_LEVEL, rate_lower, rate_upper
from datalens.progress import bar
from datalens.released.synthetic import SyntheticDataset

MOST = 10_000  # limit of images of each kind, since distances of all pairs are computed
_ROWS = 500  # rows of a table of distances computed at a time
PRECISION_K, COVERAGE_K = 3, 5  # as published
_NEIGHBOURS = 24  # none of these is in a given half of the pool with probability 2^-24
_SHUFFLES, _RESAMPLES = 2000, 1000
LEVEL = 0.001  # significance level of the verdict on the ratio
MARGIN = 0.95  # a leak needs a smaller ratio: the training set may differ a little from the held-out set


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of synthetic and real images in a feature space. All are fractions except `density`."""

    precision: float  # synthetic images in a neighbourhood of a real one
    recall: float  # real images in a neighbourhood of a synthetic one
    density: float  # mean number of real neighbourhoods that hold a synthetic image, divided by the expected number
    coverage: float  # real images whose neighbourhood holds a synthetic one


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """Distances to the nearest training image and to the nearest held-out image, among equally many of each.

    Distances are root mean squares over pixel values 0 … 255.
    """

    ratio: float  # mean distance to training images divided by that to held-out images: 1 if nothing was memorised
    interval: tuple[float, float]  # 95 % interval of the ratio, for these real images and other synthetic ones
    chance: tuple[float, float]  # interval of 99.8 % of ratios if the two kinds are exchanged at random
    p: float  # probability of a ratio as low as this one under such exchanges
    copies: int  # synthetic images that are copies of a training image
    copies_of_held_out: int
    distance: float
    distance_held_out: float
    synthetic: int
    real: int  # number of images of each kind

    @property
    def leak(self) -> bool:
        """Return whether images are nearer to training images than chance and a small set difference explain."""
        least = rate_lower(self.copies, self.synthetic, VERDICT_LEVEL / 2)
        copied = least > rate_upper(self.copies_of_held_out, self.synthetic, VERDICT_LEVEL / 2)
        return copied or (self.p <= LEVEL and self.ratio < MARGIN)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "leak": self.leak}


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Class frequencies."""

    synthetic: tuple[float, ...]
    real: tuple[float, ...]
    distance: float  # total variation distance: the fraction of images that would have to change class
    missing: tuple[str, ...]  # classes with real images and no synthetic ones


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """All measures of faithfulness."""

    overlap: Overlap
    overlap_real: Overlap  # with held-out real images instead of synthetic ones, as a baseline
    features: str
    nearness: Nearness
    balance: Balance
    synthetic: int  # number of synthetic images compared, with as many real ones

    def as_dict(self) -> dict[str, Any]:
        parts = {"overlap_real": asdict(self.overlap_real), "nearness": self.nearness.as_dict()}
        return {
            **asdict(self.overlap),
            **parts,
            **{k: v for k, v in asdict(self).items() if k not in (*parts, "overlap")},
        }


def faithfulness(
    synthetic: SyntheticDataset,
    training: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray],
    features: Features,
    *,
    device: torch.device | str = "cpu",
) -> Faithfulness:
    """Measure faithfulness on at most MOST images of each kind, drawn at random.

    Args:
        synthetic: the synthetic data set.
        training: images uint8 [n, h, w, c] and labels [n] of training records.
        held_out: the same of records that were not trained on.
        features: the feature space of precision, recall, density and coverage.
        device: where to compute.
    """
    count = min(MOST, len(synthetic.images), len(training[0]), len(held_out[0]))
    if count <= COVERAGE_K:
        raise DatalensError(f"faithfulness needs more than {COVERAGE_K} images of each kind, not {count}")
    shown, seen, unseen = (
        images[_some(len(images), count, number)]
        for number, images in enumerate((synthetic.images, training[0], held_out[0]))
    )
    reference = features.of(seen, "faithfulness: real images").to(device)
    generated = features.of(shown, "faithfulness: synthetic images").to(device)
    others = features.of(unseen, "faithfulness: held-out images").to(device)
    return Faithfulness(
        overlap=overlap(reference, generated),
        overlap_real=overlap(reference, others),
        features=features.name,
        nearness=nearness(shown, seen, unseen, device=device),
        balance=balance(synthetic.labels, training[1], synthetic.classes),
        synthetic=count,
    )


# --- precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020) ----------------------


def overlap(real: Tensor, synthetic: Tensor) -> Overlap:
    """Compute the overlap of real and synthetic features [n, f] and [m, f].

    The neighbourhood of an image is the ball that reaches to the k-th nearest image of its own kind.
    """
    near, far = _radii(real, PRECISION_K), _radii(real, COVERAGE_K)
    theirs = _radii(synthetic, PRECISION_K)
    closest = torch.full((len(real),), math.inf, device=real.device)
    precise, dense = 0, 0
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    start = 0
    for part, table in _tables(synthetic, real, "faithfulness: synthetic among real"):  # [rows, n]
        precise += int((table <= near).any(dim=1).sum())
        dense += int((table <= far).sum())
        closest = torch.minimum(closest, table.min(dim=0).values)
        covered |= (table <= theirs[start : start + len(part)].unsqueeze(1)).any(dim=0)
        start += len(part)
    return Overlap(
        precision=precise / len(synthetic),
        recall=covered.double().mean().item(),
        density=dense / (COVERAGE_K * len(synthetic)),
        coverage=(closest <= far).double().mean().item(),
    )


def _radii(x: Tensor, k: int) -> Tensor:
    """Return the distance [n] of each row to its k-th nearest other row (the row itself is the nearest)."""
    parts = [table.kthvalue(k + 1, dim=1).values for _, table in _tables(x, x, "faithfulness: neighbourhoods")]
    return torch.cat(parts)


def _tables(rows: Tensor, among: Tensor, label: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of rows with their distances [rows of the block, among]."""
    with bar(label, len(rows)) as (progress, task):
        for part in rows.split(_ROWS):
            yield part, torch.cdist(part, among)
            progress.advance(task, len(part))


# --- nearest neighbours ---------------------------------------------------------------------------------------------


def nearness(
    synthetic: np.ndarray, training: np.ndarray, held_out: np.ndarray, *, device: torch.device | str = "cpu"
) -> Nearness:
    """Test whether synthetic images are nearer to training images than to held-out ones. Images are uint8 [n, h, w, c].

    Training and held-out images must be equally many: more images would be nearer. It is a permutation test: a
    generator that memorised nothing cannot distinguish the two kinds, so exchanging them at random changes the ratio
    of distances by chance only. For each synthetic image, only the nearest few of both kinds together are used.
    """
    if len(training) != len(held_out):
        raise DatalensError(f"{len(training)} training and {len(held_out)} held-out images: they must be equally many")
    pool = np.concatenate([training, held_out])
    keep = min(_NEIGHBOURS, len(pool))
    table = torch.tensor(pool, device=device).flatten(start_dim=1).float()
    rows = torch.tensor(synthetic, device=device).flatten(start_dim=1).float()
    distances, which = [], []
    for _, block in _tables(rows, table, "faithfulness: nearest images"):
        nearest = block.topk(keep, dim=1, largest=False)
        distances.append(nearest.values.double() / math.sqrt(rows.shape[1]))
        which.append(nearest.indices)
    distance, place = torch.cat(distances), torch.cat(which)  # [n, keep]
    random = torch.Generator(device).manual_seed(0)
    trained = torch.arange(len(pool), device=device) < len(training)
    mine, others = _first(distance, trained[place])
    ratio = (mine.mean() / others.mean()).item()
    parts = []
    with bar("faithfulness: exchanging the two kinds", _SHUFFLES) as (progress, task):
        for numbers in torch.arange(_SHUFFLES).split(max(1, 2**22 // place.numel())):
            orders = [torch.randperm(len(pool), generator=random, device=device) for _ in numbers]
            near, far = _first(distance, trained[torch.stack(orders)][:, place])  # [shuffles, n]
            parts.append((near.mean(dim=1) / far.mean(dim=1)).cpu())
            progress.advance(task, len(numbers))
    by_chance = torch.cat(parts)
    again = torch.randint(len(rows), (_RESAMPLES, len(rows)), generator=random, device=device)
    resampled = torch.stack([mine[draw].mean() / others[draw].mean() for draw in again])
    return Nearness(
        ratio=ratio,
        interval=_between(resampled, 0.025),
        chance=_between(by_chance, LEVEL),
        p=(1 + int((by_chance <= ratio).sum())) / (1 + _SHUFFLES),
        copies=int((mine < COPY * others).sum()),
        copies_of_held_out=int((others < COPY * mine).sum()),
        distance=mine.mean().item(),
        distance_held_out=others.mean().item(),
        synthetic=len(rows),
        real=len(training),
    )


def _first(distance: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances […, n] to the nearest training image and to the nearest held-out image.

    Args:
        distance: distances [n, k] to the k nearest images, nearest first.
        trained: which of them are training images […, n, k]. If all k are of one kind, the k-th distance is used for
            the other kind.
    """
    last, table = distance.shape[1] - 1, distance.expand(trained.shape)
    first = torch.where(trained.any(dim=-1), trained.to(torch.int8).argmax(dim=-1), last)
    second = torch.where(trained.all(dim=-1), last, (~trained).to(torch.int8).argmax(dim=-1))
    return table.gather(-1, first.unsqueeze(-1)).squeeze(-1), table.gather(-1, second.unsqueeze(-1)).squeeze(-1)


def _between(values: Tensor, tail: float) -> tuple[float, float]:
    low, high = torch.quantile(values.cpu().double(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


# --- classes --------------------------------------------------------------------------------------------------------


def balance(synthetic: np.ndarray, real: np.ndarray, classes: tuple[str, ...]) -> Balance:
    """Compare the class frequencies of labels [n] and [m]."""
    shares = [np.bincount(labels, minlength=len(classes)) / len(labels) for labels in (synthetic, real)]
    return Balance(
        synthetic=tuple(shares[0].tolist()),
        real=tuple(shares[1].tolist()),
        distance=float(np.abs(shares[0] - shares[1]).sum() / 2),
        missing=tuple(name for name, ours, theirs in zip(classes, *shares, strict=True) if theirs and not ours),
    )


def _some(count: int, most: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)[:most]
