"""Are synthetic images like real ones, are they of all kinds, and are they suspiciously near to training images?

For the owner: measured with real data, not covered by ε. That no image is near to a training image proves nothing: the
guarantee does. A leak that shows here is so plain that the guarantee cannot be right.
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

MOST = 10_000  # images of each kind: distances of all pairs are computed
_ROWS = 500  # of a table of distances at a time
PRECISION_K, COVERAGE_K = 3, 5  # as published
_NEIGHBOURS = 24  # one half of the pool holds none of these with chance 2^-24
_SHUFFLES, _RESAMPLES = 2000, 1000
LEVEL = 0.001  # of the verdict on the ratio
MARGIN = 0.95  # a training set may differ from the held-out one by a little: a smaller ratio than this is a leak


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Fractions, but for `density`, which may exceed 1."""

    precision: float  # synthetic images that lie among real ones
    recall: float  # real images that lie among synthetic ones
    density: float  # how many real images' neighbourhoods a synthetic one lies in, by what is expected
    coverage: float  # real images with a synthetic one in their neighbourhood


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """Distances, in pixels (root mean square, of 255), to the nearest of equally many images of two kinds."""

    ratio: float  # mean distance to training images, by that to held-out images: 1 if nothing was learned by heart
    interval: tuple[float, float]  # 95 %, of the ratio for these real images and more synthetic ones
    chance: tuple[float, float]  # where 99.8 % of ratios lie if the two kinds are exchanged at random
    p: float  # chance of a ratio as low as this one
    copies: int  # synthetic images that are a copy of a training image
    copies_of_held_out: int
    distance: float
    distance_held_out: float
    synthetic: int
    real: int  # of either kind

    @property
    def leak(self) -> bool:
        """Nearer to training images than chance, or than a small difference between the two kinds, could bring it."""
        some = rate_lower(self.copies, self.synthetic, VERDICT_LEVEL / 2)
        copied = some > rate_upper(self.copies_of_held_out, self.synthetic, VERDICT_LEVEL / 2)
        return copied or (self.p <= LEVEL and self.ratio < MARGIN)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "leak": self.leak}


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How often each class comes."""

    synthetic: tuple[float, ...]
    real: tuple[float, ...]
    distance: float  # total variation: the part of images that would have to change class
    missing: tuple[str, ...]  # classes with real images and no synthetic one


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    overlap: Overlap
    overlap_real: Overlap  # of held-out real images in the place of synthetic ones
    features: str
    nearness: Nearness
    balance: Balance
    synthetic: int  # images compared, as many real ones

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
    """`training` and `held_out`: images uint8 [n, h, w, c] and labels [n]. At most MOST of each, drawn at random."""
    count = min(MOST, len(synthetic.images), len(training[0]), len(held_out[0]))
    if count <= COVERAGE_K:
        raise DatalensError(f"faithfulness needs more than {COVERAGE_K} images of each kind, not {count}")
    shown, seen, unseen = (
        images[_some(len(images), count, number)]
        for number, images in enumerate((synthetic.images, training[0], held_out[0]))
    )
    reference = features.of(seen, "faithfulness: real images").to(device)
    found = features.of(shown, "faithfulness: synthetic images").to(device)
    others = features.of(unseen, "faithfulness: held-out images").to(device)
    return Faithfulness(
        overlap=overlap(reference, found),
        overlap_real=overlap(reference, others),
        features=features.name,
        nearness=nearness(shown, seen, unseen, device=device),
        balance=balance(synthetic.labels, training[1], synthetic.classes),
        synthetic=count,
    )


# --- precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020) ----------------------


def overlap(real: Tensor, synthetic: Tensor) -> Overlap:
    """From features [n, f] and [m, f]. The neighbourhood of an image reaches to the k-th nearest of its own kind."""
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
    """[n]: distance of each to the k-th nearest of the others (the nearest is itself)."""
    parts = [table.kthvalue(k + 1, dim=1).values for _, table in _tables(x, x, "faithfulness: neighbourhoods")]
    return torch.cat(parts)


def _tables(rows: Tensor, among: Tensor, label: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Distances [some rows, among], some rows at a time."""
    with bar(label, len(rows)) as (progress, task):
        for part in rows.split(_ROWS):
            yield part, torch.cdist(part, among)
            progress.advance(task, len(part))


# --- nearest neighbours ---------------------------------------------------------------------------------------------


def nearness(
    synthetic: np.ndarray, training: np.ndarray, held_out: np.ndarray, *, device: torch.device | str = "cpu"
) -> Nearness:
    """Images uint8 [n, h, w, c]; training and held-out ones must be equally many, or more would mean nearer.

    Whoever learned nothing by heart cannot tell the two kinds apart, so exchanging them at random changes nothing
    but by chance: that is the test. It goes by the nearest few of both kinds together, for each synthetic image.
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
    """[…, n] each: the nearest that was trained on, and the nearest that was not.

    `distance` [n, k], nearest first; `trained` […, n, k]. If all k are of one kind, the k-th stands in for the other.
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
    """From labels [n] and [m]."""
    shares = [np.bincount(labels, minlength=len(classes)) / len(labels) for labels in (synthetic, real)]
    return Balance(
        synthetic=tuple(shares[0].tolist()),
        real=tuple(shares[1].tolist()),
        distance=float(np.abs(shares[0] - shares[1]).sum() / 2),
        missing=tuple(name for name, ours, theirs in zip(classes, *shares, strict=True) if theirs and not ours),
    )


def _some(count: int, most: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)[:most]
