"""Inception Score (Salimans et al. 2016): are images of one class each, and of all classes?

exp of the mean KL(p(y|x) ‖ p(y)): 1 where a classifier sees the same in every image, the number of classes where it is
sure of each and all come equally often. The paper judges by a classifier trained on the real set (DataLens, Appendix
A.3), and so does this. Measured with real data: for the owner, not covered by ε.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datalens.errors import DatalensError
from datalens.evaluate.judge import PAPER, Judge
from datalens.released.synthetic import SyntheticDataset

SPLITS = 10


@dataclass(frozen=True, kw_only=True)
class InceptionScore:
    """Means and standard deviations over the splits."""

    score: float
    score_std: float
    score_real: float  # of real images the judge was not trained on
    score_real_std: float
    label_agreement: float  # synthetic images that the judge takes for what they are labelled
    splits: int
    synthetic: int
    real: int
    judge: str
    judge_accuracy: float  # on real test images: a score is worth no more than its judge
    judge_accuracy_paper: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inception_score(
    synthetic: SyntheticDataset, real_images: np.ndarray, judge: Judge, *, splits: int = SPLITS
) -> InceptionScore:
    """Of synthetic images, and to read it against of real ones (uint8 [n, h, w, c])."""
    found = judge.probabilities(synthetic.images, "Inception Score: synthetic images")
    score, spread = score_of(found, splits=splits)
    real, real_spread = score_of(judge.probabilities(real_images, "Inception Score: real images"), splits=splits)
    return InceptionScore(
        score=score,
        score_std=spread,
        score_real=real,
        score_real_std=real_spread,
        label_agreement=(found.argmax(dim=1) == torch.tensor(synthetic.labels)).double().mean().item(),
        splits=splits,
        synthetic=len(found),
        real=len(real_images),
        judge=judge.name,
        judge_accuracy=judge.accuracy,
        judge_accuracy_paper=PAPER.get(judge.data),
    )


def score_of(probabilities: Tensor, *, splits: int = SPLITS) -> tuple[float, float]:
    """Mean and standard deviation over `splits` equal parts, from [n, classes].

    *Differs from the original*: images are shuffled first (always in the same way). Files may hold one class after the
    other, and then each part would lack most classes.
    """
    count = len(probabilities)
    if splits < 1 or count < splits:
        raise DatalensError(
            f"an Inception Score of {splits} splits needs at least as many images, not {count}: --splits"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    scores = []
    for part in probabilities.double()[order].tensor_split(splits):
        surprise = torch.special.xlogy(part, part) - torch.special.xlogy(part, part.mean(dim=0))
        scores.append(surprise.sum(dim=1).mean().exp().item())
    return float(np.mean(scores)), float(np.std(scores))
