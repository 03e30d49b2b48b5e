"""Training randomness: uniform, keyed by (seed, purpose, teacher, step), and the same however teachers are chunked."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from datalens.public import streams

Draw = Callable[[int, int], np.ndarray]  # (teachers, count) → [teachers, count]


def ours(teachers: int, count: int, *, step: int = 0, purpose: str = "sign", seed: int = 0) -> np.ndarray:
    return streams.uniform(seed, purpose, step, teachers=torch.arange(teachers), count=count).double().numpy()


def looks_uniform(draws: np.ndarray) -> bool:
    """In [0, 1), Kolmogorov-Smirnov, chi-square of 256 leading and of 256 trailing bits' cells; p = 1e-6 each."""
    flat = draws.ravel()
    if flat.min() < 0 or flat.max() >= 1:
        return False
    words = (flat * 2**24).astype(np.int64)
    for cells in (words >> 16, words & 255):
        expected = len(flat) / 256
        statistic = float(((np.bincount(cells, minlength=256) - expected) ** 2 / expected).sum())
        if not chi2.ppf(1e-6, 255) < statistic < chi2.isf(1e-6, 255):
            return False
    return bool(kstest(flat, "uniform").pvalue > 1e-6)


def looks_independent(draws: np.ndarray) -> bool:
    """No two rows correlate, neither in step nor shifted by up to three places; nor do neighbours within a row."""
    rows, count = draws.shape
    standard = (draws - 0.5) * np.sqrt(12)
    limit = 7 / np.sqrt(count - 3)
    for shift in range(4):
        correlation = standard[:, shift:] @ standard[:, : count - shift].T / (count - shift)
        if shift == 0:
            np.fill_diagonal(correlation, 0.0)
        if np.abs(correlation).max() > limit:
            return False
    return len(np.unique(draws[:, 0])) > rows * 0.99


def test_uniforms_are_uniform() -> None:
    assert looks_uniform(ours(100, 2000))
    assert looks_uniform(ours(20_000, 10))  # many teachers, few draws each
    assert looks_uniform(ours(1, 100_000))


def test_what_is_not_uniform_is_caught() -> None:
    rng = np.random.default_rng(0)
    good = rng.integers(0, 2**24, 200_000) / 2**24
    assert looks_uniform(good)
    assert not looks_uniform(good**1.05)
    assert not looks_uniform(np.append(good, 1.0))
    assert not looks_uniform((good * 2**24 // 2 * 2) / 2**24)  # the last bit always zero
    assert not looks_uniform(np.arange(200_000) / 200_000)  # too even


def test_teachers_draw_independently() -> None:
    assert looks_independent(ours(150, 2000))


def same_for_all(teachers: int, count: int) -> np.ndarray:
    return np.tile(np.random.default_rng(0).random(count), (teachers, 1))


def one_long_stream(teachers: int, count: int) -> np.ndarray:
    """Broken twin: teacher t reads the same stream from place t on."""
    stream = np.random.default_rng(0).random(teachers + count)
    return np.stack([stream[t : t + count] for t in range(teachers)])


def weakly_mixed(teachers: int, count: int) -> np.ndarray:
    """Broken twin: a teacher's number only shifts the values."""
    base = np.random.default_rng(0).random(count)
    return (base + np.arange(teachers)[:, None] / teachers) % 1


@pytest.mark.parametrize("twin", [same_for_all, one_long_stream, weakly_mixed])
def test_teachers_that_share_randomness_are_caught(twin: Draw) -> None:
    assert looks_independent(np.random.default_rng(1).random((150, 2000)))
    assert not looks_independent(twin(150, 2000))


@pytest.mark.parametrize(
    "other",
    [{"step": 1}, {"step": 2**40}, {"purpose": "batch"}, {"seed": 1}],
    ids=["step", "far step", "purpose", "seed"],
)
def test_steps_purposes_and_seeds_draw_independently(other: dict[str, int]) -> None:
    here, there = ours(50, 2000), ours(50, 2000, **other)  # type: ignore[arg-type]
    assert looks_independent(np.concatenate([here, there]))
    assert not np.array_equal(here, there)
    assert not looks_independent(np.concatenate([here, here]))


@given(
    seed=st.integers(0, 2**62),
    step=st.integers(0, 10**6),
    numbers=st.lists(st.integers(0, 10_000), min_size=1, max_size=10, unique=True),
    count=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_chunks_do_not_change_a_bit(seed: int, step: int, numbers: list[int], count: int) -> None:
    together = streams.uniform(seed, "sign", step, teachers=torch.tensor(numbers), count=count)
    alone = [streams.uniform(seed, "sign", step, teachers=torch.tensor([n]), count=count)[0] for n in numbers]
    assert torch.equal(together, torch.stack(alone))
    longer = streams.uniform(seed, "sign", step, teachers=torch.tensor(numbers), count=count + 5)
    assert torch.equal(longer[:, :count], together)
    assert together.dtype == torch.float32


def by_hand(seed: int, parts: tuple[object, ...], teacher: int, count: int) -> list[int]:
    """The documented construction in Python's whole numbers: no wrapping, no sign bits, no torch."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
        x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
        return x ^ (x >> 16)

    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little") >> 1
    row = mix((mix(teacher ^ (key & mask)) + (key >> 32)) & mask)
    again = mix((row + 0x9E3779B9) & mask)
    return [mix(mix((place + row) & mask) ^ again) >> 8 for place in range(count)]


@pytest.mark.parametrize(("seed", "step", "teacher"), [(0, 0, 0), (7, 3, 5), (123456, 85, 3999), (2**40, 1, 2**31 - 1)])
def test_every_bit_is_the_documented_one(seed: int, step: int, teacher: int) -> None:
    """Runs are resumed and repeated on other machines: these numbers may never change."""
    drawn = streams.uniform(seed, "sign", step, teachers=torch.tensor([teacher]), count=500)[0]
    assert (drawn.double() * 2**24).long().tolist() == by_hand(seed, ("sign", step), teacher, 500)


def test_no_two_teachers_share_a_key() -> None:
    """32-bit keys would collide for thousands of teachers if they were hashed; they are permuted instead."""
    drawn = ours(50_000, 2)
    words = (drawn * 2**24).astype(np.int64)
    assert len(np.unique(words[:, 0] << 24 | words[:, 1])) > 49_990


def test_normals_are_normal() -> None:
    def looks_normal(draws: np.ndarray) -> bool:
        return bool(kstest(draws.ravel(), "norm").pvalue > 1e-6)

    drawn = streams.normal(0, "w1", teachers=torch.arange(40), count=1000).double().numpy()
    assert np.isfinite(drawn).all()
    assert looks_normal(drawn)
    for scale in (2 / 3, 3 / 2):
        assert not looks_normal(drawn * scale)
    assert np.abs(np.corrcoef(drawn) - np.eye(40)).max() < 7 / np.sqrt(1000)


def test_generators_start_afresh_every_time() -> None:
    one, again = (torch.rand(5, generator=streams.generator(3, "fakes", 1)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, torch.rand(5, generator=streams.generator(3, "fakes", 2)))


@given(seed=st.integers(), parts=st.lists(st.one_of(st.text(max_size=4), st.integers()), max_size=3))
@settings(max_examples=60, deadline=None)
def test_derived_numbers_fit_and_tell_paths_apart(seed: int, parts: list[object]) -> None:
    number = streams.derive(seed, *parts)
    assert 0 <= number < 2**63
    assert number != streams.derive(seed, *parts, "more")
    assert number != streams.derive(seed + 1, *parts)
