"""Audits of teachers' votes (PATE-GAN, G-PATE): one teacher's ballot is one of two, and the others' are known.

They are part of `datalens audit methods`. The deliberately broken twins are defined here, and no run imports them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from datalens.bounded.contributions import Ballots, VoteCounts, count_ballots
from datalens.evaluate.audits.claim import Question, Trials
from datalens.methods.gpate import CHECK, DIGITS
from datalens.privacy.calibration import calibrate_event, calibrate_sigma
from datalens.privacy.events import LaplaceEvent
from datalens.privacy.ledger import Ledger
from datalens.privacy.mechanisms import ConfidentGNMax, GaussianSum, LaplaceVote
from datalens.privacy.noise import LaplaceNoise, SecureNoise

LABELS = 2  # number of labels in one trial
QUERIES, PROJECTIONS = 64, 16  # number of queries in one trial, and of projections of one image
OTHERS = (0, 1) * 3  # the answers of the other teachers to every query


def _counts(*, there: bool, queries: int, voters: int = 1) -> VoteCounts:
    """Return vote counts. `voters` teachers answer 1 with the record and 0 without it; the others are split evenly."""
    choices = torch.tensor([*[int(there)] * voters, *OTHERS]).unsqueeze(1).expand(-1, queries)
    return count_ballots([Ballots(teachers=torch.arange(len(choices)), choices=choices)], answers=2)


def laplace_labels(question: Question, *, weaker: float = 1.0, voters: int = 1) -> Trials:
    """Return trials of labels with Laplace noise on both counts.

    Args:
        question: the claim.
        weaker: the factor by which the noise of a broken twin is too small.
        voters: the number of teachers that one record changes; more than 1 in a broken twin.
    """
    facts: dict[str, Any] = {"row_unit": "teacher", "relation": "add-remove", "noise": "operating-system", "step": 0}
    facts |= {"moved": 2 * LABELS, "queries": LABELS}
    goal: dict[str, Any] = {"epsilon": question.epsilon, "delta": question.delta}
    scale = calibrate_event(
        lambda scale: LaplaceEvent(scale=scale, **facts), times=1, accountant=question.budget.pricing(), **goal
    )

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger = Ledger.in_memory(question.budget)
        LaplaceVote(noise=LaplaceNoise(scale)).release(_counts(there=there, queries=LABELS), ledger, step=0)
        gate = LaplaceVote(noise=LaplaceNoise(scale / weaker))
        votes = _counts(there=there, queries=LABELS * count, voters=voters)
        released = gate.release(votes, question.free, step=0).value
        without, with_it = (_exactly(question, there=world, voters=voters) for world in (False, True))
        ratio = (np.abs(released - without) - np.abs(released - with_it)) * (weaker / scale)
        return ratio.reshape(count, -1).sum(axis=1), ledger.spent()

    return trials


def gaussian_labels(question: Question, *, weaker: float = 1.0, voters: int = 1) -> Trials:
    """Return trials of labels with Gaussian noise (GNMax); see `laplace_labels`."""
    sigma = calibrate_sigma(sensitivity=math.sqrt(2 * LABELS), **_goal(question))

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger = Ledger.in_memory(question.budget)
        paid = GaussianSum(sigma=sigma, noise=SecureNoise())
        paid.release(_counts(there=there, queries=LABELS), ledger, step=0)
        gate = GaussianSum(sigma=sigma / weaker, noise=SecureNoise())
        votes = _counts(there=there, queries=LABELS * count, voters=voters)
        released = gate.release(votes, question.free, step=0).value.astype(np.float64)
        without, with_it = (_exactly(question, there=world, voters=voters) for world in (False, True))
        ratio = (released - (without + with_it) / 2) * (with_it - without) * (weaker / sigma) ** 2
        return ratio.reshape(count, -1).sum(axis=1), ledger.spent()

    return trials


def answers(question: Question, *, weaker: float = 1.0, charged: int = QUERIES) -> Trials:
    """Return trials of G-PATE's winning answers, all of which pass the noisy check.

    Args:
        question: the claim.
        weaker: the factor by which the noise of a broken twin is too small.
        charged: the number of queries that are charged; fewer than QUERIES in a broken twin.
    """
    sigma = DIGITS * calibrate_sigma(sensitivity=math.sqrt(charged * (2 + CHECK**-2)), **_goal(question))

    def gate(width: float) -> ConfidentGNMax:
        return ConfidentGNMax(sigma_check=CHECK * width, sigma=width, threshold=-1e9, noise=SecureNoise())

    actual = sigma / weaker
    agrees = float(norm.cdf(1 / (actual * math.sqrt(2))))  # probability that the winner is the answer of the teacher
    odds = math.log(agrees / (1 - agrees))

    def trials(there: bool, count: int) -> tuple[np.ndarray, float]:
        ledger = Ledger.in_memory(question.budget)
        gate(sigma).release(_counts(there=there, queries=charged), ledger, step=0)
        winners = gate(actual).release(_counts(there=there, queries=QUERIES * count), question.free, step=0).value
        return odds * (2.0 * winners - 1).reshape(count, -1).sum(axis=1), ledger.spent()

    return trials


def _exactly(question: Question, *, there: bool, voters: int) -> np.ndarray:
    """Return the exact counts [2] of one label."""
    gate = GaussianSum(sigma=0.0, noise=SecureNoise())
    return gate.release(_counts(there=there, queries=1, voters=voters), question.free, step=0).value[0]


def _goal(question: Question) -> dict[str, Any]:
    facts = {"epsilon": question.epsilon, "delta": question.delta}
    return facts | {"steps": 1, "accountant": question.budget.pricing()}


# (name, method, whether it is broken, its trials, whether the claim is that of a Gaussian mechanism)
Listed = tuple[str, str, bool, Callable[[Question], Trials], bool]
LISTED: tuple[Listed, ...] = (
    ("Laplace noise on labels", "pategan", False, laplace_labels, False),
    ("half the Laplace noise", "pategan", True, lambda q: laplace_labels(q, weaker=2.0), False),
    ("overlapping teachers, Laplace noise", "pategan", True, lambda q: laplace_labels(q, voters=2), False),
    ("Gaussian noise on labels", "pategan", False, gaussian_labels, True),
    ("half the Gaussian noise", "pategan", True, lambda q: gaussian_labels(q, weaker=2.0), True),
    ("overlapping teachers, Gaussian noise", "pategan", True, lambda q: gaussian_labels(q, voters=2), True),
    ("winning answers", "gpate", False, answers, True),
    ("a quarter of the noise", "gpate", True, lambda q: answers(q, weaker=4.0), True),
    ("a query an image", "gpate", True, lambda q: answers(q, charged=QUERIES // PROJECTIONS), True),
)
