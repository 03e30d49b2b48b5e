"""Broken twins: noise that is weak, old, narrow or known, and releases nobody pays for. `evaluate.wiring` finds all."""

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datalens import driver
from datalens.methods import dpmerf, gswgan, noisy_critic
from datalens.privacy import dpsgd, mechanisms, noise, one_of_many
from datalens.privacy.journal import Journal
from datalens.privacy.ledger import Budget, Ledger
from datalens.private.pool import Pool
from datalens.released.student import Student
from datalens.run.folder import Run
from tests.wiring.twins import Patch, Twins

TWINS = Twins()
twin = TWINS.add


# --- noise ----------------------------------------------------------------------------------------


def few_bits() -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(os.urandom(4), "little"))


@twin("sgd", "noise")
@twin("gpate", "noise")
@twin("datalens topk", "noise")
def seeded_with_32_bits(patch: Patch) -> None:
    patch.setattr(noise.SecureNoise, "standard_normal", lambda self, count: few_bits().standard_normal(count))


@twin("dpgan", "noise")
def samples_seeded_with_32_bits(patch: Patch) -> None:
    words = lambda self, count: few_bits().integers(0, 2**32, count, dtype=np.uint32)  # noqa: E731
    patch.setattr(noise.SecureNoise, "words", words)


@twin("pategan laplace", "noise")
def laplace_seeded_with_32_bits(patch: Patch) -> None:
    make = noise.LaplaceNoise.__init__

    def weak(self: Any, scale: float, seed: int | None = None) -> None:
        make(self, scale, seed)
        self._random = random.Random(int.from_bytes(os.urandom(4), "little"))

    patch.setattr(noise.LaplaceNoise, "__init__", weak)


@twin("sgd", "noise")
@twin("dpgan", "noise")
@twin("gswgan", "noise")
def the_config_seed_called_secure(patch: Patch) -> None:
    class CalledSecure(noise.SeededNoise):
        origin = "operating-system"

        def __init__(self) -> None:
            super().__init__(0)

    for module in (noise, noisy_critic, gswgan):
        patch.setattr(module, "SecureNoise", CalledSecure)


@twin("datalens topk", "noise")
def a_source_of_its_own(patch: Patch) -> None:
    """Not even of our classes: whatever is called the operating system's must be seen to ask it."""

    class Own:
        origin, standard_normal = "operating-system", np.random.default_rng(3).standard_normal

    patch.setattr(noise, "SecureNoise", Own)


@twin("datalens topk", "noise")
@twin("sgd", "noise")
def one_block_of_noise_for_all_steps(patch: Patch) -> None:
    draw, kept = noise.SecureNoise.standard_normal, {}
    patch.setattr(
        noise.SecureNoise,
        "standard_normal",
        lambda self, count: kept.setdefault(count, draw(self, count)) if count not in kept else kept[count],
    )


@twin("dpsgd-gan", "noise")
def noise_drawn_once_by_the_gate(patch: Patch) -> None:
    release = dpsgd.GradientGate.release

    class Once:
        def __init__(self, source: Any) -> None:
            self.origin, self.words, self._source, self._kept = source.origin, source.words, source, None

        def standard_normal(self, count: int) -> np.ndarray:
            self._kept = self._source.standard_normal(count) if self._kept is None else self._kept
            return self._kept

    def once(self: Any, contributions: Any) -> Any:
        self.noise = self.noise if isinstance(self.noise, Once) else Once(self.noise)
        return release(self, contributions)

    patch.setattr(dpsgd.GradientGate, "release", once)


@twin("datalens topk-sign", "noise")
@twin("dpmerf", "noise")
def exact_noise_of_half_the_width(patch: Patch) -> None:
    def narrow(self: Any, sigma: float, *, threads: int = 1) -> None:
        self.sigma, self._draw, self._threads = sigma, noise.exact.sampler(sigma / 2), threads

    patch.setattr(noise.ExactNoise, "__init__", narrow)


@twin("sgd", "noise")
@twin("dpgan", "noise")
@twin("gpate", "noise")
@twin("gswgan", "noise")
def noise_of_half_the_width(patch: Patch) -> None:
    for gate in (dpsgd.GradientGate, one_of_many.Block):
        release = gate.release
        name = "noise" if gate is dpsgd.GradientGate else "_noise"

        def quiet(self: Any, what: Any, release: Any = release, name: str = name) -> Any:
            if not isinstance(getattr(self, name), Halved):
                setattr(self, name, Halved(getattr(self, name)))
            return release(self, what)

        patch.setattr(gate, "release", quiet)
    answer = mechanisms.ConfidentGNMax._noise

    def narrow(self: Any, *how: Any) -> noise.Held:
        return noise.Held(answer(self, *how).take() // 2)

    patch.setattr(mechanisms.ConfidentGNMax, "_noise", narrow)


class Halved:
    """A source behind which a wire is cut."""

    def __init__(self, source: Any) -> None:
        self.origin, self._source = source.origin, source
        self.words, self.below = getattr(source, "words", None), getattr(source, "below", None)

    def standard_normal(self, count: int) -> np.ndarray:
        return self._source.standard_normal(count) / 2


@twin("datalens topk", "resumed")
def noise_that_a_resumed_run_reads_again(patch: Patch) -> None:
    """Kept on disk, beside the run: the second process begins with the noise of the first."""
    draw, shelf = noise.SecureNoise.standard_normal, Path("noise.json")
    start = Run.open.__func__  # type: ignore[attr-defined]
    kept: dict[str, Any] = {}

    def open_(cls: type[Run], path: Path) -> Run:
        kept["at"] = path / shelf
        kept["left"] = json.loads((path / shelf).read_text()) if (path / shelf).exists() else []
        return start(cls, path)

    def remembered(self: Any, count: int) -> np.ndarray:
        if kept["left"]:
            return np.array(kept["left"].pop(0))
        values = draw(self, count)
        if not kept["at"].exists():
            kept["at"].write_text(json.dumps([values.tolist()]))
        return values

    patch.setattr(Run, "open", classmethod(open_))
    patch.setattr(noise.SecureNoise, "standard_normal", remembered)


@twin("dpgan", "seeded")
@twin("pategan laplace", "seeded")
def a_seeded_run_called_secure(patch: Patch) -> None:
    patch.setattr(noise.SeededNoise, "origin", "operating-system")
    make = noise.LaplaceNoise.__init__

    def named(self: Any, scale: float, seed: int | None = None) -> None:
        make(self, scale, seed)
        self.origin = "operating-system"

    patch.setattr(noise.LaplaceNoise, "__init__", named)


@twin("sgd", "seeded")
def a_seeded_run_without_its_stamp(patch: Patch) -> None:
    said = driver.say
    patch.setattr(driver, "say", lambda text: said(text.replace("NOT PRIVATE", "")))


# --- charges --------------------------------------------------------------------------------------


def free() -> Ledger:
    return Ledger.in_memory(Budget(epsilon=float("inf"), delta=1e-5, relation="add-remove", accountant="exact"))


class Twice:
    """Asks two times, and pays once."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate

    def release(self, contributions: Any, ledger: Ledger, *, step: int) -> Any:
        self._gate.release(contributions, free(), step=step)
        return self._gate.release(contributions, ledger, step=step)


@twin("dpmerf", "charges")
def asks_twice_and_pays_once(patch: Patch) -> None:
    make = dpmerf.make_mechanism
    patch.setattr(dpmerf, "make_mechanism", lambda *a: Twice(make(*a)))


@twin("gpate", "charges")
def answers_that_are_not_charged(patch: Patch) -> None:
    release = mechanisms.ConfidentGNMax.release

    def cheap(self: Any, tally: Any, ledger: Ledger, *, step: int) -> Any:
        released = release(self, tally, free(), step=step)
        number = ledger.charge(released.event)
        return dataclasses.replace(released, number=number)

    patch.setattr(mechanisms.ConfidentGNMax, "release", cheap)


@twin("sgd", "charges")
@twin("dpgan", "charges")
def a_block_that_is_never_used_up(patch: Patch) -> None:
    release = dpsgd.GradientGate.release

    def generous(self: Any, contributions: Any) -> Any:
        released = release(self, contributions)
        self.left += 1
        return released

    patch.setattr(dpsgd.GradientGate, "release", generous)


@twin("gswgan", "charges")
def a_block_of_releases_that_is_paid_for_once(patch: Patch) -> None:
    charge, kept = gswgan.charge_block, {}

    def once(ledger: Ledger, event: Any, source: Any) -> Any:
        if id(ledger) not in kept:
            kept[id(ledger)] = charge(ledger, event, source)
        block = kept[id(ledger)]
        block._left = event.repeats
        return block

    patch.setattr(gswgan, "charge_block", once)


@twin("datalens topk-sign", "charges")
def something_called_released_that_passed_no_gate(patch: Patch) -> None:
    step = Student.step

    def around(self: Student, fakes: Any, direction: Any) -> None:
        mechanisms.Released(value=np.ones(3), event=None, number=0)  # type: ignore[arg-type]
        step(self, fakes, direction)

    patch.setattr(Student, "step", around)


@twin("dpmerf", "resumed")
@twin("gpate", "resumed")
@twin("datalens topk-sign", "resumed")
def what_was_kept_is_asked_for_again(patch: Patch) -> None:
    patch.setattr(Journal, "find", lambda self, ledger, *, step, part="": None)


@twin("dpmerf", "neighbours")
def a_record_that_counts_three_times(patch: Patch) -> None:
    chunks = Pool.chunks
    patch.setattr(Pool, "chunks", lambda self, size: [chunk for chunk in chunks(self, size) for _ in range(3)])


@pytest.mark.parametrize("name", list(TWINS))
def test_a_twin_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert TWINS.caught(name, monkeypatch, tmp_path)
