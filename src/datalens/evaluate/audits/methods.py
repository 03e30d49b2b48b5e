"""Audits of the other methods' mechanisms: their own rows, bounds and gates, in two worlds that differ in one record.

The attacker knows everything but that record, and computes the likelihood ratio of the release, which is the most
powerful test. Her thresholds are fixed in advance (`THRESHOLDS`). Her error rates give a lower bound on ε at δ for any
mechanism: P[she says "present" | present] ≤ e^ε·P[she says "present" | absent] + δ, and vice versa. For a Gaussian
mechanism a stronger bound holds (see `privacy.audit.Errors`).

The deliberately broken twins are defined here, and no run imports them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from datalens.bounded.clip import clip_images
from datalens.bounded.norm_topk import NormTopK
from datalens.data.records import Dataset
from datalens.data.schema import Schema
from datalens.evaluate.audits.claim import ACCOUNTANT, Question, Trials
from datalens.evaluate.audits.mechanism import make_mechanism
from datalens.evaluate.audits.votes import LISTED
from datalens.methods import dpmerf
from datalens.options import TrainOptions
from datalens.plans.registry import make_plan
from datalens.privacy import audit
from datalens.privacy.calibration import calibrate_event
from datalens.privacy.curves import exact_epsilon
from datalens.privacy.dpsgd import GradientGate, Schedule, poisson_sample
from datalens.privacy.events import OneOfManyEvent
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import SecureNoise
from datalens.privacy.one_of_many import charge_block
from datalens.private.embedding import embed
from datalens.private.pool import Pool
from datalens.progress import bar
from datalens.public.fourier import Fourier

THRESHOLDS = (0.0, 0.5, 1.0, 2.0, 4.0)  # of the log-likelihood ratio
STATISTIC = "log-likelihood ratio of the releases"
PART = 500  # trials at a time
METHODS = ("dpmerf", "gswgan", "dpgan, dpsgd-gan", "pategan", "gpate")  # audited methods; two of them share one gate


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A mechanism of a method, or a broken twin of it."""

    name: str
    method: str
    broken: bool
    trials: Trials
    gaussian: bool = False  # the claim is that of a Gaussian mechanism


# --- DP-MERF --------------------------------------------------------------------------------------

SIDE, FREQUENCIES = 8, 4
SCHEMA = Schema(name="audit", height=SIDE, width=SIDE, channels=1, classes=("others", "canary"), nominal_size=1000)


def _embedding(question: Question, *, weaker: float = 1.0, counts_in_the_clear: bool = False) -> Trials:
    """Return trials of DP-MERF's release: a record that is alone in its class, present or absent.

    Many trials are one release: as many copies of the data set, each with classes of its own.

    Args:
        question: the claim.
        weaker: the factor by which the noise of a broken twin is too small.
        counts_in_the_clear: release counts without noise, as a broken twin.
    """
    options = TrainOptions(
        data="audit",
        out=Path("nowhere"),
        method="dpmerf",
        epsilon=question.epsilon,
        delta=question.delta,
        accountant=ACCOUNTANT,
    )
    settings = cast(dpmerf.DpmerfSettings, make_plan(options, SCHEMA)[1])
    fourier = Fourier(SCHEMA.shape, FREQUENCIES, seed=0)
    slope = np.broadcast_to(np.arange(SIDE, dtype=np.uint8) * 30, (SIDE, SIDE))
    images = np.stack([slope, slope.T, 255 - slope])[..., None]

    def sums(there: bool, copies: int) -> Any:
        world, labels = (images, np.array([0, 0, 1])) if there else (images[:2], np.array([0, 0]))
        shifted = (labels + 2 * np.arange(copies)[:, None]).ravel()
        data = Dataset(schema=SCHEMA, images=np.tile(world, (copies, 1, 1, 1)), labels=shifted)
        pool = Pool.gather(data, device=torch.device("cpu"))
        return embed(pool, fourier, classes=2 * copies, grid=settings.grid, counted=settings.counted)

    def exactly(there: bool, copies: int) -> np.ndarray:
        gate = GaussianSum(sigma=0.0, noise=SecureNoise())
        return gate.release(sums(there, copies), question.free, step=0).value.astype(np.float64)

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger = Ledger.in_memory(question.budget)
        gate = make_mechanism(settings.noise, settings.sigma)
        value = gate.release(sums(there, count), ledger, step=0).value.astype(np.float64)
        without, with_it = exactly(False, count), exactly(True, count)
        sigma = settings.sigma / weaker
        if weaker != 1.0:
            gate = make_mechanism(settings.noise, sigma)
            value = gate.release(sums(there, count), question.free, step=0).value.astype(np.float64)
        if counts_in_the_clear:
            value[:, -1] = exactly(there, count)[:, -1]
        row = with_it - without
        ratio = ((value - (without + with_it) / 2) * row) / sigma**2
        if counts_in_the_clear:
            ratio[:, -1] = 1e3 * np.sign(ratio[:, -1])  # exact counts decide the test
        return ratio.reshape(count, -1).sum(axis=1), ledger.spent()

    return trials


# --- GS-WGAN --------------------------------------------------------------------------------------

TEACHERS, IMAGES = 20, 64


def _one_of_many(question: Question, *, weaker: float = 1.0, image_by_image: bool = False) -> Trials:
    """Return trials of one step of GS-WGAN: all discriminators have the same gradients, or one has the opposite ones.

    Args:
        question: the claim.
        weaker: the factor by which the noise of a broken twin is too small.
        image_by_image: price every image separately, as published, which is a broken twin.
    """
    bound = math.sqrt(IMAGES) * (1 + 1e-9)

    def event(sigma: float, *, images: int = IMAGES, repeats: int = 1) -> OneOfManyEvent:
        norm = bound * math.sqrt(images / IMAGES)
        return OneOfManyEvent(
            row_unit="teacher",
            l2_bound=norm,
            diameter=2 * norm,
            teachers=TEACHERS,
            relation="add-remove",
            sigma=sigma,
            repeats=repeats,
            queries=images,
            step=0,
            noise="operating-system",
        )

    def paid_for(sigma: float) -> OneOfManyEvent:
        """Return the charged event. The published price treats every image as if it had a discriminator of its own."""
        return event(sigma, images=1, repeats=IMAGES) if image_by_image else event(sigma)

    goal: dict[str, Any] = {"epsilon": question.epsilon, "delta": question.delta}
    sigma = calibrate_event(paid_for, times=1, accountant=question.budget.pricing(), **goal)
    ones = torch.ones(IMAGES, 1)
    same = [clip_images(-ones, clip=1.0, teacher=teacher) for teacher in range(TEACHERS)]
    other = [clip_images(ones, clip=1.0, teacher=0), *same[1:]]

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger = Ledger.in_memory(question.budget)
        ledger.charge(paid_for(sigma))
        actual = sigma / weaker
        block = charge_block(question.free, event(actual, repeats=count), SecureNoise())
        rows = other if there else same
        sums = np.array([block.release(rows.__getitem__).value.sum() for _ in range(count)])
        odds = np.minimum(2 * sums / actual**2, 700.0)  # N(1, ·) against N(−1, ·), all images together
        return np.log1p(np.expm1(odds) / TEACHERS), ledger.spent()

    return trials


# --- DP-GAN and the GAN trained with DP-SGD -------------------------------------------------------

RATE = 0.2  # sampling rate of the record


def _noisy_critic(question: Question, *, unclipped: float = 1.0) -> Trials:
    """Return trials of one DP-SGD step on a single record, present or absent, whose gradient has the maximum norm.

    Args:
        question: the claim.
        unclipped: the factor by which the record exceeds the clipping norm; more than 1 in a broken twin.
    """
    rows = NormTopK(clip=1.0, selector="none")

    def schedule(sigma: float, *, steps: int = 1) -> Schedule:
        return Schedule(sigma=sigma, rate=RATE, steps=steps, unit=rows.bound, l2_bound=rows.l2_bound)

    goal: dict[str, Any] = {"epsilon": question.epsilon, "delta": question.delta}
    sigma = calibrate_event(
        lambda sigma: schedule(sigma).event(repeats=1, step=0, noise="operating-system"),
        times=1,
        accountant=question.budget.pricing(),
        **goal,
    )
    gradient = [torch.full((1, 1), 9.0)]
    sums = [rows.sum([value[:0] for value in gradient]), rows.sum(gradient)]  # of no record, and of the record

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger, noise = Ledger.in_memory(question.budget), SecureNoise()
        GradientGate(ledger, schedule(sigma), noise).release(sums[there])
        # A row that is too long by a factor is equivalent to a correct row with noise smaller by that factor.
        actual = sigma / unclipped
        gate = GradientGate(question.free, schedule(actual, steps=count), noise, blocks=1)
        values = [
            gate.release(sums[there and len(poisson_sample(noise, 1, RATE)) > 0]).value.item() for _ in range(count)
        ]
        odds = np.minimum((np.array(values) - 0.5) / actual**2, 700.0)
        return np.log1p(np.expm1(odds) * RATE), ledger.spent()

    return trials


# --- the command ----------------------------------------------------------------------------------


def subjects(question: Question) -> Iterator[Subject]:
    """Yield the mechanism of every private method, and its broken twins."""
    merf, gswgan = "dpmerf", "gswgan"
    honest, half = _embedding(question), _embedding(question, weaker=2.0)
    yield Subject(name="class sums of features", method=merf, broken=False, trials=honest, gaussian=True)
    yield Subject(name="half the noise", method=merf, broken=True, trials=half, gaussian=True)
    clear = _embedding(question, counts_in_the_clear=True)
    yield Subject(name="true counts to divide by", method=merf, broken=True, trials=clear, gaussian=True)
    yield Subject(name="one of many discriminators", method=gswgan, broken=False, trials=_one_of_many(question))
    published = _one_of_many(question, image_by_image=True)
    yield Subject(name="priced image by image, as published", method=gswgan, broken=True, trials=published)
    tenth = _one_of_many(question, weaker=10.0)
    yield Subject(name="a tenth of the noise", method=gswgan, broken=True, trials=tenth)

    sgd = METHODS[2]
    yield Subject(name="gradients of a Poisson sample", method=sgd, broken=False, trials=_noisy_critic(question))
    long = _noisy_critic(question, unclipped=4.0)
    yield Subject(name="a batch mean that nobody clips", method=sgd, broken=True, trials=long)
    for name, method, broken, trials, gaussian in LISTED:
        yield Subject(name=name, method=method, broken=broken, trials=trials(question), gaussian=gaussian)


def lower_bound(without: np.ndarray, with_it: np.ndarray, *, delta: float, level: float) -> float:
    """Return a lower bound on ε from the errors of all tests, with joint confidence 1 − `level`."""
    each = level / (2 * 2 * len(THRESHOLDS))
    bound = 0.0
    for threshold in THRESHOLDS:
        for yes, no in ((with_it > threshold, without > threshold), (without < -threshold, with_it < -threshold)):
            hit = audit.rate_lower(int(yes.sum()), len(yes), each) - delta
            alarm = audit.rate_upper(int(no.sum()), len(no), each)
            bound = max(bound, math.log(hit / alarm) if hit > 0 else 0.0)
    return bound


def finding(subject: Subject, question: Question, tick: Callable[[int], object]) -> audit.Finding:
    """Run the trials of a subject in both worlds, and bound ε. `tick` is called with the number of trials done."""
    worlds: list[np.ndarray] = []
    claimed = 0.0
    for there in (False, True):
        parts = []
        for start in range(0, question.trials, PART):
            values, claimed = subject.trials(there, min(PART, question.trials - start))
            parts.append(values)
            tick(len(values))
        worlds.append(np.concatenate(parts))

    def bound(level: float) -> float:
        if not subject.gaussian:
            return lower_bound(*worlds, delta=question.delta, level=level)
        return exact_epsilon(audit.count_errors(*worlds, threshold=0.0).pooled_mu(level) ** 2, question.delta)

    return audit.Finding(
        name=f"{subject.method}: {subject.name}",
        claimed=claimed,
        lower_bound=bound(audit.REPORT_LEVEL),
        verdict_bound=bound(audit.VERDICT_LEVEL),
        trials=2 * question.trials,
    )


def report(question: Question) -> dict[str, Any]:
    """Audit all mechanisms and their broken twins, and return the results as JSON."""
    listed = list(subjects(question))
    with bar("releases", len(listed) * 2 * question.trials) as (progress, task):
        results = [(one, finding(one, question, lambda done: progress.advance(task, done))) for one in listed]
    honest = [result for one, result in results if not one.broken]
    controls = [result for one, result in results if one.broken]
    first = honest[0].as_dict()
    return {
        "audit": "methods",
        **{name: first[name] for name in ("claimed", "lower_bound", "verdict_bound", "trials")},
        "delta": question.delta,
        "relation": question.budget.relation,
        "accountant": question.budget.accountant,
        "level": audit.VERDICT_LEVEL,
        "statistic": STATISTIC,
        "controls": {one.name: one.broken for one in controls},
        "findings": [one.as_dict() for one in honest],
        "control_findings": [one.as_dict() for one in controls],
        "ok": not any(one.broken for one in honest) and all(one.broken for one in controls),
    }
