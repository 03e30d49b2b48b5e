"""Attacks on synthetic images: membership inference, and the search for copies of training images.

The results are for the data owner. They are computed from real records without noise: no ε covers them, and publishing
them costs privacy. Differential privacy bounds the success of such attacks; their failure proves nothing by itself.
"""

import dataclasses
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datalens.data.records import Dataset
from datalens.driver import train
from datalens.errors import DatalensError
from datalens.evaluate.audits.mechanism import control_lines, terms
from datalens.options import TrainOptions
from datalens.privacy.audit import REPORT_LEVEL, VERDICT_LEVEL, Errors, count_errors, rate_lower, rate_upper
from datalens.privacy.ledger import Budget, json_number
from datalens.released.release import sample
from datalens.released.synthetic import SyntheticDataset
from datalens.run.folder import read_config
from datalens.run.scratch import Scratch

FALSE_ALARMS = 0.01  # false positive rate for which the threshold of an attack is chosen
COPY = 0.5  # a copy's distance to a training image is below this fraction of its distance to any held-out image
STATISTIC = "distance to the nearest synthetic image of the same class"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The result of a membership attack: how well it distinguishes training records from others. Intervals are 95 %."""

    attack: str
    members: int
    others: int
    auc: float
    auc_interval: tuple[float, float]
    tpr: float  # at the threshold that gives FALSE_ALARMS on one half of the others
    tpr_interval: tuple[float, float]
    fpr: float  # at that threshold, on the other half
    lower_bound: float  # on ε at the claimed δ, at REPORT_LEVEL
    verdict_bound: float  # the same at VERDICT_LEVEL

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Numbers of synthetic images that are copies of a training image or, for comparison, of a held-out image."""

    synthetic: int
    copies: int
    copies_of_held_out: int
    closest: float  # smallest distance to a training image: root mean square over pixel values 0 … 255
    closest_held_out: float

    @property
    def found(self) -> bool:
        """Return whether there are more copies of training images than chance explains, at VERDICT_LEVEL."""
        least = rate_lower(self.copies, self.synthetic, VERDICT_LEVEL / 2)
        return least > rate_upper(self.copies_of_held_out, self.synthetic, VERDICT_LEVEL / 2)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "found": self.found}


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """The results of all attacks on one synthetic set."""

    membership: tuple[Membership, ...]
    reconstruction: Reconstruction

    def caught(self, claimed: float) -> bool:
        """Return whether an attack does better than ε = `claimed` allows, or training images were copied."""
        return self.reconstruction.found or any(attack.verdict_bound > claimed for attack in self.membership)


# --- membership -----------------------------------------------------------------------------------


def membership(
    attack: str, members: np.ndarray, others: np.ndarray, *, delta: float, tests: int = 1, seed: int = 0
) -> Membership:
    """Evaluate a membership attack from its scores.

    Args:
        attack: the name of the attack.
        members: scores of training records; high scores mean membership.
        others: scores of other records. One half of them sets the threshold, the other half estimates the FPR.
        delta: the claimed δ.
        tests: number of attacks among which the significance levels are divided.
        seed: the seed of the division of `others`.
    """
    order = np.random.default_rng(seed).permutation(len(others))
    calibration, rest = others[order[: len(others) // 2]], others[order[len(others) // 2 :]]
    threshold = float(np.quantile(calibration, 1 - FALSE_ALARMS, method="higher"))
    errors = count_errors(rest, members, threshold=threshold)
    hits = len(members) - errors.misses
    auc = area(members, others)
    spread = auc_spread(auc, len(members), len(others))
    return Membership(
        attack=attack,
        members=len(members),
        others=len(others),
        auc=auc,
        auc_interval=(max(0.0, auc - 1.96 * spread), min(1.0, auc + 1.96 * spread)),
        tpr=hits / len(members),
        tpr_interval=(rate_lower(hits, len(members), 0.025), rate_upper(hits, len(members), 0.025)),
        fpr=errors.false_alarms / errors.without,
        lower_bound=rate_epsilon(errors, delta, REPORT_LEVEL / tests),
        verdict_bound=rate_epsilon(errors, delta, VERDICT_LEVEL / tests),
    )


def rate_epsilon(errors: Errors, delta: float, level: float) -> float:
    """Return a lower bound on ε from the errors of an attack, with confidence 1 − `level`.

    An (ε, δ)-private mechanism satisfies TPR ≤ e^ε·FPR + δ and 1 − FPR ≤ e^ε·(1 − TPR) + δ. The bound is the larger ε
    that the two inequalities require.
    """
    false_alarm = rate_upper(errors.false_alarms, errors.without, level / 2)
    miss = rate_upper(errors.misses, errors.with_it, level / 2)
    ratios = [(1 - miss - delta) / false_alarm, (1 - false_alarm - delta) / miss]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0))


def area(members: np.ndarray, others: np.ndarray) -> float:
    """Return the AUC: the probability that a member scores higher than a non-member; ties count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, side="left") + np.searchsorted(ordered, members, side="right")
    return float(below.mean() / 2 / len(others))


def auc_spread(auc: float, members: int, others: int) -> float:
    """Return the standard error of an AUC (Hanley and McNeil 1982)."""
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (members - 1) * (q1 - auc**2) + (others - 1) * (q2 - auc**2)
    return math.sqrt(max(variance, 0.0) / (members * others))


def nearest(images: np.ndarray, labels: np.ndarray, among: np.ndarray, among_labels: np.ndarray) -> np.ndarray:
    """Return the root mean square distance [n] of each image to the nearest one of its class in `among`, or inf."""
    distances = np.full(len(images), np.inf)
    for label in np.unique(labels):
        mine, theirs = np.flatnonzero(labels == label), np.flatnonzero(among_labels == label)
        if len(theirs):
            table = torch.from_numpy(among[theirs].reshape(len(theirs), -1)).float()
            for part in np.array_split(mine, max(1, math.ceil(len(mine) / 1000))):
                rows = torch.from_numpy(images[part].reshape(len(part), -1)).float()
                # The fast formula has rounding errors near 0, so the distance to the winner is computed exactly.
                best = torch.cdist(rows, table, compute_mode="use_mm_for_euclid_dist").argmin(dim=1)
                distances[part] = (rows - table[best]).square().mean(dim=1).sqrt().numpy()
    return distances


# --- reconstruction -------------------------------------------------------------------------------


def reconstruction(synthetic: SyntheticDataset, training: Dataset, held_out: Dataset) -> Reconstruction:
    """Count copies: synthetic images that are much nearer to some training image than to every held-out image."""
    to_training = nearest(synthetic.images, synthetic.labels, training.images, training.labels)
    to_held_out = nearest(synthetic.images, synthetic.labels, held_out.images, held_out.labels)
    return Reconstruction(
        synthetic=len(synthetic.images),
        copies=int((to_training < COPY * to_held_out).sum()),
        copies_of_held_out=int((to_held_out < COPY * to_training).sum()),
        closest=float(to_training.min()),
        closest_held_out=float(to_held_out.min()),
    )


# --- all of it ------------------------------------------------------------------------------------


def attack(
    synthetic: SyntheticDataset, training: Dataset, held_out: Dataset, *, delta: float, shadows: "Shadows | None" = None
) -> Attacked:
    """Run all attacks on one synthetic set. `shadows` adds the attack that needs shadow models."""
    _check_like(synthetic, training, held_out)
    tests = 1 if shadows is None else 2
    scores = [-nearest(real.images, real.labels, synthetic.images, synthetic.labels) for real in (training, held_out)]
    attacks = [membership("nearest synthetic image", scores[0], scores[1], delta=delta, tests=tests)]
    if shadows is not None:
        calibrated = shadows.scores(-np.concatenate(scores))
        count = len(training.images)
        attacks.append(membership(shadows.name, calibrated[:count], calibrated[count:], delta=delta, tests=tests))
    return Attacked(membership=tuple(attacks), reconstruction=reconstruction(synthetic, training, held_out))


def copying(synthetic: SyntheticDataset, training: Dataset, *, seed: int = 0) -> SyntheticDataset:
    """Return the control: training images with a little noise, as a generator that copies makes. It must be caught."""
    random = np.random.default_rng(seed)
    count = len(synthetic.images)
    shown = random.choice(len(training.images), count, replace=count > len(training.images))
    noisy = training.images[shown] + random.normal(scale=4.0, size=training.images[shown].shape)
    images = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    return dataclasses.replace(synthetic, images=images, labels=training.labels[shown])


def _check_like(synthetic: SyntheticDataset, *real: Dataset) -> None:
    for dataset in real:
        if dataset.images.shape[1:] != synthetic.images.shape[1:]:
            raise DatalensError(
                f"the real images are {list(dataset.images.shape[1:])}, the synthetic ones "
                f"{list(synthetic.images.shape[1:])}: give --data the data set that they were made from"
            )
        if len(dataset.images) < 200:
            raise DatalensError(
                f"{len(dataset.images)} real images are too few to tell members from others: at least 200 of each are "
                "needed"
            )


# --- shadow models --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shadows:
    """Distances of records to the images of shadow models: models like the released one, each of half the records."""

    inside: np.ndarray  # [models, records] bool: whether the model was trained on the record
    distances: np.ndarray  # [models, records]: to the nearest synthetic image of the record's class

    @property
    def name(self) -> str:
        return f"likelihood ratio over {len(self.inside)} shadow models"

    def scores(self, distances: np.ndarray) -> np.ndarray:
        """Return the log-likelihood ratio of membership [records], under normal laws of equal variance."""
        inside = np.where(self.inside, self.distances, np.nan)
        outside = np.where(self.inside, np.nan, self.distances)
        middle_in, middle_out = np.nanmean(inside, axis=0), np.nanmean(outside, axis=0)
        residuals = np.where(self.inside, self.distances - middle_in, self.distances - middle_out)
        width = math.sqrt(float(np.mean(residuals**2))) + 1e-9
        scores: np.ndarray = ((distances - middle_out) ** 2 - (distances - middle_in) ** 2) / (2 * width**2)
        return scores


def shadows_of(run: Path, training: Dataset, held_out: Dataset, synthetic: SyntheticDataset, *, count: int) -> Shadows:
    """Train shadow models with the options of a run, in pairs on random complementary halves of all records.

    Args:
        run: the folder of the attacked run.
        count: number of models, rounded up to an even number.
    """
    config = read_config(run)
    claim_of(synthetic)  # raise before the long training
    _check_like(synthetic, training, held_out)
    pool = Dataset(
        schema=training.schema,
        images=np.concatenate([training.images, held_out.images]),
        labels=np.concatenate([training.labels, held_out.labels]),
    )
    each = config["settings"]["teachers"] / config["schema"]["nominal_size"]
    random, inside, distances = np.random.default_rng(0), [], []
    chosen = np.zeros(len(pool.images), dtype=bool)
    for number in range(math.ceil(count / 2) * 2):
        # Every second model has the complement, so that each record is in half of the models.
        chosen = ~chosen if number % 2 else random.permutation(len(pool.images)) < len(pool.images) // 2
        drawn = _shadow(config["options"], pool, chosen, teachers_each=each, seed=number, count=len(synthetic.images))
        inside.append(chosen)
        distances.append(nearest(pool.images, pool.labels, drawn.images, drawn.labels))
    return Shadows(inside=np.stack(inside), distances=np.stack(distances))


def _shadow(
    options: dict[str, Any], pool: Dataset, chosen: np.ndarray, *, teachers_each: float, seed: int, count: int
) -> SyntheticDataset:
    """Return images of a run like the attacked one on the chosen records, with as many records per teacher."""
    size = int(chosen.sum())
    with Scratch() as folder:  # mode 0700, deleted afterwards
        file, out = Path(folder) / "half.npz", Path(folder) / "run"
        np.savez(file, images=pool.images[chosen], labels=pool.labels[chosen], classes=np.array(pool.schema.classes))
        known = dict(options)
        known |= {"data": str(file), "data_folder": None, "nominal_size": size, "out": out, "seed": seed}
        known |= {"label": None, "classes": None, "image_size": None, "grayscale": False, "record_id": None}
        known |= {"teachers": max(1, round(teachers_each * size)), "epsilon": float(options["epsilon"])}
        if train(TrainOptions(**known))["interrupted"]:
            raise KeyboardInterrupt  # a run ends in good order on Ctrl-C; the attack ends with it
        return sample(out / "release", count=count, seed=0)


# --- the command ----------------------------------------------------------------------------------


def report(
    synthetic: SyntheticDataset, training: Dataset, held_out: Dataset, *, shadows: Shadows | None = None
) -> dict[str, Any]:
    """Run the attacks and their control, and compare with the claim of the images' certificate.

    Returns:
        The results as JSON. `ok`: no attack beats the claim, and every control is caught.
    """
    budget = claim_of(synthetic)
    attacked = attack(synthetic, training, held_out, delta=budget.delta, shadows=shadows)
    control = attack(copying(synthetic, training), training, held_out, delta=budget.delta)
    caught = {"a generator that copies training images": control.caught(budget.epsilon)}
    return {
        "audit": "attacks",
        "claimed": json_number(budget.epsilon),
        "lower_bound": max(one.lower_bound for one in attacked.membership),
        "verdict_bound": max(one.verdict_bound for one in attacked.membership),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "level": VERDICT_LEVEL,
        "statistic": STATISTIC,
        "trials": len(training.images) + len(held_out.images),
        "controls": caught,
        "membership": [one.as_dict() for one in attacked.membership],
        "reconstruction": attacked.reconstruction.as_dict(),
        "control_findings": {
            "membership": [one.as_dict() for one in control.membership],
            "reconstruction": control.reconstruction.as_dict(),
        },
        "ok": not attacked.caught(budget.epsilon) and all(caught.values()),
    }


def claim_of(synthetic: SyntheticDataset) -> Budget:
    """Return the budget that the certificate of a synthetic set states. It is not checked here; `verify` does."""
    stated = synthetic.certificate
    try:
        return Budget(
            epsilon=float(stated["budget"]["epsilon"]),
            delta=float(stated["budget"]["delta"]),
            relation=stated["relation"],
            accountant=stated["accountant"],
        )
    except (KeyError, TypeError, ValueError, DatalensError) as error:
        raise DatalensError(
            f"the certificate of these images states no budget to test ({type(error).__name__}): "
            "attack a run, or a set written by `datalens sample`"
        ) from error


def report_lines(result: dict[str, Any]) -> list[str]:
    reconstructed = result["reconstruction"]
    lines = [
        f"claimed ε = {float(result['claimed']):.4g} ({terms(result)}); the attacks force "
        f"ε ≥ {result['lower_bound']:.3g} at the same δ (95 % confidence; a bound, not a price)"
    ]
    for one in result["membership"]:
        lines.append(
            f"membership by {one['attack']}: AUC {one['auc']:.4f} [{one['auc_interval'][0]:.4f}, "
            f"{one['auc_interval'][1]:.4f}], TPR {one['tpr']:.4f} [{one['tpr_interval'][0]:.4f}, "
            f"{one['tpr_interval'][1]:.4f}] at FPR {one['fpr']:.4f} ({one['members']} members, {one['others']} others)"
        )
    lines += [
        f"reconstruction: {reconstructed['copies']} of {reconstructed['synthetic']} synthetic images are copies of a "
        f"training image, {reconstructed['copies_of_held_out']} of one held out; closest "
        f"{reconstructed['closest']:.1f} and {reconstructed['closest_held_out']:.1f} grey values",
        *control_lines(result),
        "measured on real data: for the owner, not covered by ε",
    ]
    return lines
