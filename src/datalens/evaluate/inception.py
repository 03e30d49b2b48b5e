"""Inception Score (Salimans et al. 2016): whether each image clearly has one class, and all classes occur.

It is exp of the mean KL(p(y|x) ‖ p(y)): 1 if a classifier predicts the same for every image, and the number of classes
if it is certain about each image and all classes are equally frequent. As in the paper (DataLens, Appendix A.3), the
classifier is trained on the real data set. Measured on real data: for the owner, not covered by ε.
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
    """Inception Scores as means and standard deviations over splits, with the judge that computed them."""

    score: float
    score_std: float
    score_real: float  # of real images that the judge was not trained on
    score_real_std: float
    label_agreement: float  # fraction of synthetic images whose label the judge predicts
    splits: int
    synthetic: int
    real: int
    judge: str
    judge_accuracy: float  # on real test images: a score is only as good as its judge
    judge_accuracy_paper: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inception_score(
    synthetic: SyntheticDataset, real_images: np.ndarray, judge: Judge, *, splits: int = SPLITS
) -> InceptionScore:
    """Return the score of synthetic images, plus that of real images (uint8 [n, h, w, c]) as a baseline."""
    predicted = judge.probabilities(synthetic.images, "Inception Score: synthetic images")
    score, spread = score_of(predicted, splits=splits)
    real, real_spread = score_of(judge.probabilities(real_images, "Inception Score: real images"), splits=splits)
    return InceptionScore(
        score=score,
        score_std=spread,
        score_real=real,
        score_real_std=real_spread,
        label_agreement=(predicted.argmax(dim=1) == torch.tensor(synthetic.labels)).double().mean().item(),
        splits=splits,
        synthetic=len(predicted),
        real=len(real_images),
        judge=judge.name,
        judge_accuracy=judge.accuracy,
        judge_accuracy_paper=PAPER.get(judge.data),
    )


def score_of(probabilities: Tensor, *, splits: int = SPLITS) -> tuple[float, float]:
    """Return mean and standard deviation of the score over `splits` equal parts, from probabilities [n, classes].

    *Differs from the original*: images are shuffled first, always in the same way. In a file that is sorted by class,
    each part would otherwise lack most classes.
    """
    count = len(probabilities)
    if splits < 1 or count < splits:
        raise DatalensError(
            f"an Inception Score of {splits} splits needs at least as many images, not {count}: choose another --splits"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    scores = []
    for part in probabilities.double()[order].tensor_split(splits):
        divergence = torch.special.xlogy(part, part) - torch.special.xlogy(part, part.mean(dim=0))
        scores.append(divergence.sum(dim=1).mean().exp().item())
    return float(np.mean(scores)), float(np.std(scores))
