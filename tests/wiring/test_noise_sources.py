"""Noise sources by themselves: what they take from the operating system, and that no process shares it."""

import ast
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datalens
from datalens.errors import DatalensError
from datalens.evaluate.audits.wiring_tape import DRAWS, Draw, Tape, gates, sources, told_the_owner
from datalens.privacy import noise

ROOT = Path(datalens.__file__).parent
SECURE: dict[str, Callable[[], Any]] = {
    "SecureNoise": noise.SecureNoise,
    "LaplaceNoise": lambda: noise.LaplaceNoise(20.0),
    "ExactNoise": lambda: noise.ExactNoise(1e6),
    "DrawnAhead": lambda: noise.DrawnAhead(1e6),
}
COUNT = 64


def test_every_source_is_here() -> None:
    assert {kind.__name__ for kind in sources()} == {*SECURE, "SeededNoise"}


def asked(source: Any) -> list[Callable[[], np.ndarray]]:
    """Every kind of draw it has."""
    names = [name for name in DRAWS if hasattr(source, name)]
    return [lambda name=name: np.array(getattr(source, name)(2**62 if name == "below" else COUNT)) for name in names]


# --- how much randomness --------------------------------------------------------------------------


def weak(tape: Tape) -> list[Draw]:
    return [draw for draw in tape.draws if draw.bits < draw.needed]


@pytest.mark.parametrize("name", ["SecureNoise", "LaplaceNoise", "ExactNoise"])
def test_every_draw_takes_its_own_bits(name: str) -> None:
    """DrawnAhead has a process of its own, which runs the sampler that ExactNoise does."""
    tape = Tape()
    with tape.playing():
        source = SECURE[name]()
        for draw in asked(source):
            draw()
            draw()
    assert len(tape.draws) >= 2 and weak(tape) == []


def one_seed(patch: pytest.MonkeyPatch, size: int) -> None:
    def generator() -> np.random.Generator:
        return np.random.default_rng(int.from_bytes(os.urandom(size), "little"))

    patch.setattr(noise.SecureNoise, "standard_normal", lambda self, count: generator().standard_normal(count))
    patch.setattr(noise.SecureNoise, "words", lambda self, count: generator().integers(0, 2**32, count, dtype="u4"))
    patch.setattr(noise.SecureNoise, "below", lambda self, count: int(generator().integers(count)))


@pytest.mark.parametrize(("size", "caught"), [(4, 3), (16, 2)])
def test_a_source_that_takes_a_seed_is_found(size: int, caught: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 bits, or of 128 for any number of draws. (128 bits are plenty for one choice.)"""
    one_seed(monkeypatch, size)
    tape = Tape()
    with tape.playing():
        for draw in asked(noise.SecureNoise()):
            draw()
    assert len(weak(tape)) == caught


def test_the_exact_sampler_is_asked_for_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(noise.exact, "sampler", lambda sigma: lambda count: counts.append(count) or [0] * count)
    source = noise.ExactNoise(3.0)
    source.integers(5)
    source.integers(7)
    assert counts == [5, 7]


# --- other processes ------------------------------------------------------------------------------


def in_a_child(draw: Callable[[], np.ndarray]) -> bytes | None:
    """What a forked child draws; None where it is refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            content = draw().tobytes()
        except DatalensError:
            content = b""
        os.write(write, content)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return content or None


def shared(source: Any) -> list[bytes]:
    """Draws that a child and its parent both have, after a first one by the parent."""
    found = []
    for draw in asked(source):
        draw()
        child, parent = in_a_child(draw), draw().tobytes()
        found += [parent] if child == parent else []
    return found


@pytest.mark.parametrize("name", SECURE)
def test_a_child_has_no_draw_of_its_parent(name: str) -> None:
    source = SECURE[name]()
    assert shared(source) == []
    if isinstance(source, noise.DrawnAhead):
        assert in_a_child(lambda: source.integers(1)) is None
        source.close()


def test_a_source_with_a_state_is_found_in_a_child() -> None:
    """The twin: seeded from the operating system, with all the bits one may ask for, and copied by a fork."""
    stateful = noise.LaplaceNoise(20.0)
    stateful._random = random.Random(os.urandom(32))
    assert len(shared(stateful)) == 1


def test_two_sources_have_nothing_in_common() -> None:
    for name, make in SECURE.items():
        one, other = make(), make()
        for first, second in zip(asked(one), asked(other), strict=True):
            assert first().tobytes() != second().tobytes(), name
        for source in (one, other):
            getattr(source, "close", lambda: None)()


# --- other ranks ----------------------------------------------------------------------------------


def noisy_imports(text: str) -> list[str]:
    """What a module takes from where noise is made or gates are."""
    named = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    noisy = (
        "datalens.privacy.noise",
        "datalens.privacy.mechanisms",
        "datalens.privacy.dpsgd",
        "datalens.privacy.exact",
    )
    return [str(node.module) for node in named if str(node.module).startswith(noisy)]


def test_ranks_that_follow_draw_no_noise() -> None:
    """They have teachers and sums; the gate, with its noise, is where the ledger is: on rank 0, once."""
    for name in ("run/remote_teachers.py", "run/ranks.py"):
        assert noisy_imports((ROOT / name).read_text(encoding="utf-8")) == []
    assert noisy_imports("def f():\n    from datalens.privacy.noise import SecureNoise\n") == ["datalens.privacy.noise"]


def test_what_is_watched_is_there() -> None:
    names = {kind.__name__ for kind in gates()}
    assert names >= {"GaussianSum", "DiscreteGaussianSum", "LaplaceVote", "ConfidentGNMax", "ThirdParty"}
    assert names >= {"GradientGate", "Block"}
    assert ("Teachers", "fit_step") in [(kind.__name__, name) for kind, name in told_the_owner()]
