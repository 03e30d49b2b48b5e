"""Broken twins: samples, choices and shares that are not as they were paid for. `evaluate.wiring` must catch each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datalens.bounded.whole_rows import GRID, WholeSum
from datalens.methods import ensemble, noisy_critic, refined, sgd
from datalens.privacy import dpsgd, noise, one_of_many
from datalens.private.critics import Critics
from datalens.public import streams
from datalens.run.folder import Run
from tests.wiring.twins import Patch, Twins, found_in, noting

TWINS = Twins()
twin = TWINS.add


# --- samples and choices --------------------------------------------------------------------------


def shuffled() -> Callable[..., np.ndarray]:
    """Epochs of a shuffled order, cut into batches: every record once an epoch."""
    order: list[int] = []

    def sample(source: Any, count: int, rate: float) -> np.ndarray:
        source.words(count)  # it may well ask for secure randomness
        if len(order) < round(rate * count):
            order[:] = np.random.default_rng(7).permutation(count).tolist()
        return np.sort([order.pop() for _ in range(round(rate * count))])

    return sample


@twin("sgd", "samples")
def batches_of_a_shuffled_epoch(patch: Patch) -> None:
    patch.setattr(dpsgd, "poisson_sample", shuffled())


def tiny_second_stage(patch: Patch) -> None:
    patch.setattr(refined, "NETWORK", {"wide": 8, "deep": 8, "hidden": 8})
    patch.setattr(refined, "ROUNDS", 2)


@twin("datalens refined", "samples")
def batches_of_a_shuffled_epoch_for_the_second_stage(patch: Patch) -> None:
    tiny_second_stage(patch)
    patch.setattr(refined, "poisson_sample", shuffled())


@twin("datalens refined", "samples")
def a_sum_that_is_clipped_after_adding(patch: Patch) -> None:
    """Rows are added as they are, and their sum is brought to the bound of one row."""
    tiny_second_stage(patch)
    bounded = WholeSum.bounded

    def raw(self: WholeSum, gradients: torch.Tensor, weights: torch.Tensor) -> None:
        self._total += GRID * (gradients.to(torch.float64) * weights.unsqueeze(1)).sum(dim=0)

    def clipped(self: WholeSum, **unit: Any) -> Any:
        self._total *= min(1.0, GRID / max(float(self._total.norm()), 1e-9))
        return bounded(self, **unit)

    patch.setattr(WholeSum, "add", raw)
    patch.setattr(WholeSum, "bounded", clipped)


@twin("dpgan", "samples")
def batches_of_a_shuffled_epoch_for_the_critic(patch: Patch) -> None:
    patch.setattr(noisy_critic, "poisson_sample", shuffled())


def at(times: float) -> Callable[..., np.ndarray]:
    sample = dpsgd.poisson_sample
    return lambda source, count, rate: sample(source, count, rate * times)


@twin("sgd", "samples")
def samples_at_twice_the_rate(patch: Patch) -> None:
    patch.setattr(dpsgd, "poisson_sample", at(2.0))


@twin("dpsgd-gan", "samples")
def samples_a_millionth_too_often(patch: Patch) -> None:
    patch.setattr(noisy_critic, "poisson_sample", at(1.000001))


@twin("dpgan", "samples")
def samples_of_the_true_size(patch: Patch) -> None:
    """As if the batch were a part of the records there are, and not of those that were declared."""
    patch.setattr(noisy_critic, "poisson_sample", at(0.5))


@twin("dpgan", "samples")
def one_sample_for_two_steps(patch: Patch) -> None:
    sample, kept = noisy_critic.poisson_sample, []

    def twice(*a: Any) -> np.ndarray:
        kept.append(sample(*a) if len(kept) % 2 == 0 else kept[-1])
        return kept[-1]

    patch.setattr(noisy_critic, "poisson_sample", twice)


@twin("sgd", "samples")
def neighbours_come_in_pairs(patch: Patch) -> None:
    """Whoever is in brings the next one along: no independent choices."""
    sample = dpsgd.poisson_sample

    def pairs(source: Any, count: int, rate: float) -> np.ndarray:
        found = sample(source, count, rate)
        return np.unique(np.minimum(np.concatenate([found, found + 1]), count - 1))

    patch.setattr(dpsgd, "poisson_sample", pairs)


@twin("gswgan", "noise")
def a_public_choice(patch: Patch) -> None:
    patch.setattr(noise.SecureNoise, "below", lambda self, count: streams.derive(0, "choice") % count)


@twin("gswgan", "noise")
def a_choice_in_turn(patch: Patch) -> None:
    release, turns = one_of_many.Block.release, iter(range(10**6))

    def public(self: Any, ask: Any) -> Any:
        class Source:
            below = staticmethod(lambda count: next(turns) % count)
            standard_normal = self._noise.standard_normal

        patch.setattr(self, "_noise", Source, raising=True)
        return release(self, ask)

    patch.setattr(one_of_many.Block, "release", public)


@twin("gswgan", "secrets")
def a_choice_that_is_logged(patch: Patch) -> None:
    log, ask, chosen = Run.log, Critics.image_gradient, []
    patch.setattr(Critics, "image_gradient", lambda self, t, *a: chosen.append(t) or ask(self, t, *a))
    patch.setattr(Run, "log", lambda self, step, **values: log(self, step, **values, asked=float(chosen[-1])))


@twin("gswgan", "secrets")
def whoever_is_asked_learns(patch: Patch) -> None:
    ask = Critics.image_gradient

    def learning(self: Critics, teacher: int, images: Any, labels: Any) -> Any:
        found = ask(self, teacher, images, labels)
        self._updates[teacher] += 1
        return found

    patch.setattr(Critics, "image_gradient", learning)


@twin("dpgan", "secrets")
def the_size_of_a_sample_is_logged(patch: Patch) -> None:
    log, sample, sizes = Run.log, noisy_critic.poisson_sample, []
    patch.setattr(noisy_critic, "poisson_sample", noting(sample, lambda found: sizes.append(len(found))))
    patch.setattr(Run, "log", lambda self, step, **values: log(self, step, **values, sample=float(sizes[-1])))


@twin("datalens topk-sign", "secrets")
def noise_on_disk(patch: Patch) -> None:
    log, draw, kept = Run.log, noise.ExactNoise.integers, []
    patch.setattr(noise.ExactNoise, "integers", noting(draw, kept.append))
    patch.setattr(Run, "log", lambda self, step, **v: log(self, step, **v, first=float(kept[-1][0])))


@pytest.mark.parametrize("name", list(TWINS))
def test_a_twin_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert TWINS.caught(name, monkeypatch, tmp_path)


def test_a_tiny_second_stage_is_not_taken_for_a_broken_one(tmp_path: Path, monkeypatch: Patch) -> None:
    tiny_second_stage(monkeypatch)
    assert found_in("datalens refined", "samples", tmp_path) == []


def test_persons_who_are_ignored_are_caught(tmp_path: Path, monkeypatch: Patch) -> None:
    """Every image a person of its own."""
    monkeypatch.setattr(sgd, "by_person", lambda found: (found, list(range(len(found.images) + 1))))
    assert found_in("sgd", "noise", tmp_path, person=True)


def test_persons_by_record_are_caught_in_shares(tmp_path: Path, monkeypatch: Patch) -> None:
    """Shares by pixels, where a person is what is protected: several teachers change, and one is paid for."""
    from datalens.data import records

    def by_pixels(images: np.ndarray, ids: Any, *, by_person: bool = False) -> Any:
        return map(records.content_key, images)

    monkeypatch.setattr(records, "record_keys", by_pixels)
    assert found_in("datalens topk-sign", "neighbours", tmp_path, person=True)


def test_replaced_records_that_change_teachers_are_caught(tmp_path: Path, monkeypatch: Patch) -> None:
    """Shares by hash under replace-one: a record leaves one teacher and enters another."""
    rule = ensemble.rule_named
    monkeypatch.setattr(ensemble, "rule_named", lambda name, **n: rule("hashed", **n))
    assert found_in("pategan gnmax", "neighbours", tmp_path, relation="replace-one")
