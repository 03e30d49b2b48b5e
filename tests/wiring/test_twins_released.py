"""Broken twins: loops that stop, and students that learn, by what records say. `evaluate.wiring` must catch each."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from datalens import driver
from datalens.methods import dpmerf, gpate, gswgan, moments, noisy_critic, pategan, refined, sgd
from datalens.plans.base import Method
from datalens.private.pool import Pool
from datalens.released.student import Student
from datalens.run.folder import Run
from datalens.run.remote_teachers import Crowd
from tests.wiring.twins import Patch, Twins, noting

TWINS = Twins()
twin = TWINS.add


# --- when a loop stops ----------------------------------------------------------------------------


def stop_when(patch: Patch, wanted: Callable[[], bool]) -> None:
    steps = Run.steps

    def stopping(self: Run, count: int, **named: Any) -> Any:
        for step in steps(self, count, **named):
            yield step
            if wanted():
                return

    patch.setattr(Run, "steps", stopping)


def losses_of_teachers(patch: Patch) -> list[float]:
    """As a method has them: `loss = teachers.fit_step(…)`, for its log."""
    losses, log = [9.0], Run.log
    patch.setattr(Run, "log", lambda self, step, **v: losses.append(v["teacher_loss"]) or log(self, step, **v))
    return losses


@twin("datalens topk-sign", "records")
@twin("pategan gnmax", "records")
@twin("gpate", "records")
def stops_early_on_a_private_loss(patch: Patch) -> None:
    losses = losses_of_teachers(patch)
    stop_when(patch, lambda: losses[-1] < 0.01)


@twin("datalens topk-sign", "records")
@twin("datalens-paper", "records")
def stops_when_a_private_loss_rises(patch: Patch) -> None:
    losses = losses_of_teachers(patch)
    stop_when(patch, lambda: losses[-1] > losses[-2])


@twin("sgd", "records")
def stops_when_the_records_are_learned(patch: Patch) -> None:
    said: list[float] = []
    entropy = torch.nn.functional.cross_entropy

    def listening(*a: Any, **n: Any) -> Any:
        said.append(float(entropy(*a, **n)))
        return entropy(*a, **n)

    patch.setattr(torch.nn.functional, "cross_entropy", listening)
    stop_when(patch, lambda: said[-1] < said[0] * 0.97)


@twin("dpgan", "records")
def stops_at_an_empty_sample(patch: Patch) -> None:
    sizes: list[int] = []
    sample = noisy_critic.poisson_sample
    patch.setattr(noisy_critic, "poisson_sample", noting(sample, lambda found: sizes.append(len(found))))
    stop_when(patch, lambda: sizes[-1] < 180)


@twin("dpsgd-gan", "records")
def as_many_steps_as_there_are_records(patch: Patch) -> None:
    train = noisy_critic.train

    def longer(run: Run, pool: Pool, settings: Any, place: Any) -> Any:
        return train(run, pool, dataclasses.replace(settings, critic_steps=1 + pool.count % 5), place)

    patch.setattr(noisy_critic, "METHOD", dataclasses.replace(noisy_critic.METHOD, train=longer))


def watched(module: Any, gather: Any) -> Method:
    """The module's method, with another `gather`."""
    return dataclasses.replace(module.DATALENS if module is refined else module.METHOD, gather=gather)


# --- what the released side learns from -----------------------------------------------------------


@twin("datalens topk-sign", "records")
def a_student_that_hears_the_teachers_loss(patch: Patch) -> None:
    losses, fit, step = [], Crowd.fit_step, Student.step
    patch.setattr(Crowd, "fit_step", lambda *a, **n: losses.append(fit(*a, **n)) or losses[-1])

    def leaky(self: Student, fakes: Any, direction: Any) -> None:
        step(self, fakes, direction)
        next(self.generator.parameters()).data.add_(1e-6 * losses[-1])

    patch.setattr(Student, "step", leaky)


@twin("dpgan", "records")
def a_critic_that_keeps_a_mean_of_records(patch: Patch) -> None:
    rows = noisy_critic.sum_gradients

    def leaky(critic: Any, pool: Pool, sample: Any, *rest: Any) -> Any:
        critic.dense.weight.data.mul_(1 + 1e-3 * pool.batch(torch.arange(3))[0].mean())
        return rows(critic, pool, sample, *rest)

    patch.setattr(noisy_critic, "sum_gradients", leaky)


@twin("pategan laplace", "records")
def labels_of_fakes_like_those_of_records(patch: Patch) -> None:
    gather, make = pategan.share_out, pategan.make_student
    counts: list[int] = []
    patch.setattr(pategan, "METHOD", watched(pategan, noting(gather, lambda found: counts.append(found.count))))
    patch.setattr(pategan, "make_student", lambda s, *a: make(dataclasses.replace(s, seed=counts[-1]), *a))


@twin("gpate", "records")
def a_direction_of_the_largest_gradient(patch: Patch) -> None:
    kept: list[float] = []
    binned, decode = gpate.binned, gpate.DecodeBins.__call__
    patch.setattr(
        gpate, "binned", lambda part, *a, **n: kept.append(float(part.values.abs().max())) or binned(part, *a, **n)
    )

    def louder(self: Any, *a: Any) -> Any:
        found = decode(self, *a)
        return type(found)(value=found.value * (1 + 1e-3 * kept[-1]))

    patch.setattr(gpate.DecodeBins, "__call__", louder)


@twin("datalens moments", "records")
def a_floor_that_follows_the_true_count(patch: Patch) -> None:
    gather, counts = moments.gather, []
    patch.setattr(refined, "DATALENS", watched(refined, noting(gather, lambda found: counts.append(found.count))))
    patch.setattr(moments, "smallest_class", lambda schema: float(counts[-1]))


@twin("dpmerf", "records")
def a_rate_that_follows_the_true_count(patch: Patch) -> None:
    fit, gather, counts = dpmerf.fit, dpmerf.gather, []
    patch.setattr(dpmerf, "METHOD", watched(dpmerf, noting(gather, lambda found: counts.append(found.count))))
    patch.setattr(dpmerf, "fit", lambda *a, **n: fit(*a, **n | {"rate": n["rate"] * counts[-1] / 180}))


@twin("gswgan", "records")
def fakes_with_the_labels_of_a_share(patch: Patch) -> None:
    make, gather, kept = gswgan.fakes, gswgan.gather, []
    patch.setattr(gswgan, "METHOD", watched(gswgan, noting(gather, lambda found: kept.append(found.count))))
    patch.setattr(gswgan, "fakes", lambda *a, step: make(*a, step=step + kept[-1]))


@twin("dpmerf", "records")
def the_number_of_records_in_the_log(patch: Patch) -> None:
    gather = dpmerf.gather
    patch.setattr(dpmerf, "METHOD", watched(dpmerf, noting(gather, lambda found: driver.say(f"{found.count} records"))))


@twin("sgd", "records")
def the_number_of_records_in_the_facts(patch: Patch) -> None:
    train = sgd.train

    def counted(run: Any, data: Any, settings: Any, place: Any) -> Any:
        run.facts["n"] = len(data.x)
        return train(run, data, settings, place)

    patch.setattr(sgd, "METHOD", dataclasses.replace(sgd.METHOD, train=counted))


@pytest.mark.parametrize("name", list(TWINS))
def test_a_twin_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert TWINS.caught(name, monkeypatch, tmp_path)
