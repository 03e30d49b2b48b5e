"""The law of the exact noise against its definition, and against the laws it could be mistaken for.

Random, like the noise: about one false alarm in a million runs.
"""

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from datalens.privacy.noise import DrawnAhead, ExactNoise

ALARM = 1e-6
DRAWS = 20_000


def follows(draws: np.ndarray, sigma: float) -> bool:
    """Chi-square of the counts against P[z] proportional to exp(−z²/2σ²), rare values together."""
    reach = int(12 * sigma) + 3
    z = np.arange(-reach, reach + 1)
    p = np.exp(-(z**2) / (2 * sigma**2))
    p /= p.sum()
    counts = np.bincount(np.clip(draws, -reach, reach) + reach, minlength=len(z))
    usual = p * len(draws) > 10
    observed, expected = np.append(counts[usual], counts[~usual].sum()), np.append(p[usual], p[~usual].sum())
    return bool(chisquare(observed, expected * len(draws)).pvalue > ALARM)


@pytest.mark.parametrize("sigma", [0.8, 3.0, 10.5])
def test_small_noise_has_exactly_its_law(sigma: float) -> None:
    assert follows(ExactNoise(sigma).integers(DRAWS), sigma)


def test_noise_drawn_ahead_has_it_too() -> None:
    with DrawnAhead(3.0) as source:
        assert follows(source.integers(DRAWS), 3.0)


def test_large_noise_looks_like_a_gaussian_and_uses_its_low_bits() -> None:
    draws = ExactNoise(5000.0).integers(DRAWS)
    assert kstest(draws, norm(scale=5000.0).cdf).pvalue > ALARM
    assert abs(np.mean(draws % 2) - 0.5) < 5 * 0.5 / np.sqrt(DRAWS)
    assert (draws.astype(np.float64) / 5000).std() == pytest.approx(1, abs=0.03)


def test_other_laws_are_told_apart() -> None:
    """Broken twins: a rounded Gaussian of the same σ, one cut towards zero, 5 % less noise, and no tails."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(DRAWS)
    assert not follows(np.rint(0.8 * normal).astype(np.int64), 0.8)
    assert not follows(np.trunc(3.0 * normal).astype(np.int64), 3.0)
    exact = ExactNoise(3.0).integers(DRAWS)
    assert not follows(ExactNoise(2.85).integers(4 * DRAWS), 3.0)  # with fewer, chance hides it now and then
    assert not follows(np.clip(exact, -6, 6), 3.0)
    assert not follows(exact + 1, 3.0)
