"""Where privacy noise comes from: the operating system, and for tests a seed that voids the guarantee."""

import os
from typing import Protocol

import numpy as np

from datalens.privacy.events import NoiseOrigin


class NoiseSource(Protocol):
    """Standard normal draws, each used once. `origin` goes into every event, ledger and certificate."""

    @property
    def origin(self) -> NoiseOrigin: ...

    def standard_normal(self, count: int) -> np.ndarray: ...


class SecureNoise:
    """Noise from the operating system's generator: no state to save, to fork or to replay."""

    origin: NoiseOrigin = "operating-system"

    def standard_normal(self, count: int) -> np.ndarray:
        return _box_muller(os.urandom(16 * ((count + 1) // 2)), count)


class SeededNoise:
    """Reproducible noise, for tests and debugging. Whoever knows the seed can subtract it: NOT PRIVATE."""

    origin: NoiseOrigin = "seeded"

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def standard_normal(self, count: int) -> np.ndarray:
        return _box_muller(self._generator.bytes(16 * ((count + 1) // 2)), count)


def _box_muller(entropy: bytes, count: int) -> np.ndarray:
    """Two 64-bit uniforms give two normals in float64. Uniforms in (0, 1]: the tail reaches 9.4 sigma."""
    uniforms = (np.frombuffer(entropy, dtype=np.uint64).astype(np.float64) + 1.0) * 2.0**-64
    half = len(uniforms) // 2
    radius = np.sqrt(-2.0 * np.log(uniforms[:half]))
    angle = 2.0 * np.pi * uniforms[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
