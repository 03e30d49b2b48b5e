"""Where privacy noise comes from: the operating system, and for tests a seed that voids the guarantee.

Two laws: standard normals in float64, and the exact discrete Gaussian, made by OpenDP where that is installed.
"""

import contextlib
import importlib.util
import os
import random
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from types import TracebackType
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np

from datalens.errors import DatalensError
from datalens.privacy import exact
from datalens.privacy.events import NoiseLaw, NoiseOrigin
from datalens.privacy.owned import Owned

# So few exact draws take less time than the process that would make them ahead takes to start.
FEW_DRAWS = 30_000


class NoiseSource(Protocol):
    """Standard normal draws, each used once. `origin` goes into every event, ledger and certificate."""

    @property
    def origin(self) -> NoiseOrigin: ...

    def standard_normal(self, count: int) -> np.ndarray: ...

    def words(self, count: int) -> np.ndarray: ...  # whole numbers below 2³², all as likely: for secret choices


class SecretSource(NoiseSource, Protocol):
    """And secret choices."""

    def below(self, count: int) -> int: ...


@runtime_checkable
class IntegerNoise(Protocol):
    """Draws of the discrete Gaussian N_Z(0, sigma²), each used once."""

    @property
    def origin(self) -> NoiseOrigin: ...

    @property
    def sigma(self) -> float: ...

    def check(self) -> None:
        """Raise if no draws can come: for a plug-in that draws after its charge, which should not be wasted."""

    def integers(self, count: int) -> np.ndarray: ...


class Held:
    """Noise drawn ahead of the charge that pays for it, so that nothing slow comes between charge and release.

    It depends on no record. It lies in this process's memory and is never written to disk, it is handed out once, and
    only to the process that drew it: the child of a fork has none, and it is not copied or sent.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = [values]
        self._process = os.getpid()

    def take(self) -> np.ndarray:
        """The draws, after the charge."""
        if os.getpid() != self._process:
            raise DatalensError("noise drawn ahead belongs to the process that drew it: no other may use it too")
        try:
            return self._values.pop()  # one step, so of two threads one gets it
        except IndexError:
            raise DatalensError("noise is used once, and this was used: draw again") from None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise DatalensError("noise drawn ahead is not copied, kept or sent to another process: both would use it")


class SecureNoise:
    """Noise from the operating system's generator: no state to save, to fork or to replay."""

    origin: NoiseOrigin = "operating-system"

    def standard_normal(self, count: int) -> np.ndarray:
        return _box_muller(os.urandom(16 * ((count + 1) // 2)), count)

    def below(self, count: int) -> int:
        """0 … count−1, each as likely."""
        return secrets.randbelow(count)

    def words(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(4 * count), dtype=np.uint32)


class SeededNoise:
    """Reproducible noise, for tests and debugging. Whoever knows the seed can subtract it: NOT PRIVATE."""

    origin: NoiseOrigin = "seeded"

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def standard_normal(self, count: int) -> np.ndarray:
        return _box_muller(self._generator.bytes(16 * ((count + 1) // 2)), count)

    def below(self, count: int) -> int:
        return int(self._generator.integers(count))

    def words(self, count: int) -> np.ndarray:
        return np.frombuffer(self._generator.bytes(4 * count), dtype=np.uint32)


class LaplaceNoise:
    """Discrete Laplace noise, P[z] proportional to exp(−|z|/scale), sampled exactly with whole numbers.

    From the operating system, or NOT PRIVATE from a seed. Some 20 µs a draw.
    """

    def __init__(self, scale: float, seed: int | None = None) -> None:
        if not 0 < scale <= 2.0**40:
            raise DatalensError(f"the scale of Laplace noise must be above 0, and at most 2^40, not {scale:g}")
        self.scale = scale
        self.origin: NoiseOrigin = "operating-system" if seed is None else "seeded"
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def integers(self, count: int) -> np.ndarray:
        fraction = Fraction(self.scale)
        draws = [_discrete_laplace(*fraction.as_integer_ratio(), self._random) for _ in range(count)]
        return np.array(draws, dtype=np.int64)


def _discrete_laplace(t: int, s: int, draw: random.Random) -> int:
    """Of scale t/s (Canonne, Kamath, Steinke 2020, Algorithm 2). Only uniform whole numbers are drawn."""
    while True:
        u = draw.randrange(t)
        if not _bernoulli_exp(u, t, draw):
            continue
        v = 0
        while _bernoulli_exp(1, 1, draw):
            v += 1
        size = (u + t * v) // s
        negative = draw.randrange(2) == 1
        if size > 0 or not negative:  # zero is drawn by one sign only
            return -size if negative else size


def _bernoulli_exp(a: int, b: int, draw: random.Random) -> bool:
    """True with probability exp(−a/b), for a <= b (the same, Algorithm 1)."""
    k = 1
    while draw.randrange(b * k) < a:
        k += 1
    return k % 2 == 1


def _box_muller(entropy: bytes, count: int) -> np.ndarray:
    """Two 64-bit uniforms give two normals in float64. Uniforms in (0, 1]: the tail reaches 9.4 sigma."""
    uniforms = (np.frombuffer(entropy, dtype=np.uint64).astype(np.float64) + 1.0) * 2.0**-64
    half = len(uniforms) // 2
    radius = np.sqrt(-2.0 * np.log(uniforms[:half]))
    angle = 2.0 * np.pi * uniforms[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@contextlib.contextmanager
def open_noise(
    law: NoiseLaw, sigma: float, *, draws: int, seed: int | None = None
) -> Iterator[NoiseSource | IntegerNoise]:
    """The noise of a run. `draws`: about how many it will take; `seed`: NOT PRIVATE."""
    if law == "gaussian":
        yield SecureNoise() if seed is None else SeededNoise(seed)
    elif draws <= FEW_DRAWS:
        yield ExactNoise(sigma)
    else:
        with DrawnAhead(sigma) as ahead:
            yield ahead


# --- the exact discrete Gaussian ------------------------------------------------------------------

_ADVICE = "reinstall opendp, or begin another run with --noise gaussian"


def opendp_installed() -> bool:
    return importlib.util.find_spec("opendp") is not None


class ExactNoise:
    """Discrete Gaussian noise from OpenDP, drawn when it is asked for. About 13 µs a draw of one core."""

    origin: NoiseOrigin = "operating-system"

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        try:
            self._draw = exact.sampler(sigma)
        except Exception as error:  # missing, or of a version that calls things otherwise
            raise DatalensError(
                f"the exact noise needs OpenDP, which does not work here ({_one_line(error)}): {_ADVICE}"
            ) from error

    def check(self) -> None:
        pass

    def integers(self, count: int) -> np.ndarray:
        return np.array(self._draw(count), dtype=np.int64)


class DrawnAhead(Owned):
    """The same noise, drawn ahead by a process of its own: the run does not wait for it, given a second core.

    The process writes to a pipe (see `exact.py`) and ends when this one closes it or ends, however it ends. Ctrl-C does
    not reach it. What this process has not asked for yet lies in the pipe, so a fork copies no draw, and in the
    child of a fork the source refuses to be used. Threads take turns: each reads whole draws.
    """

    origin: NoiseOrigin = "operating-system"

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma
        self._process = subprocess.Popen(
            [sys.executable, "-P", exact.__file__, repr(float(sigma)), str(self._owner)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # not one draw in a buffer of ours
            start_new_session=True,  # a Ctrl-C in the terminal is for the run, which may need noise to end well
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        _enlarge(self._pipe)

    def __enter__(self) -> "DrawnAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Wait for the first draws, or say why there will be none."""
        with self._alone():
            self._check_open()
            waiting = select.poll()
            waiting.register(self._pipe, select.POLLIN)
            if not waiting.poll()[0][1] & select.POLLIN:  # the other end was closed, and nothing is left
                raise self._failure()

    def integers(self, count: int) -> np.ndarray:
        with self._alone():
            self._check_open()
            return self._read(count)

    def _read(self, count: int) -> np.ndarray:
        content = bytearray()
        try:
            while len(content) < 8 * count:
                piece = os.read(self._pipe, 8 * count - len(content))
                if not piece:
                    raise self._failure()
                content += piece
        except BaseException:
            self.close()  # what was read is gone with the error: nobody shall go on from the middle of a draw
            raise
        return np.frombuffer(bytes(content), dtype=np.int64)

    def close(self) -> None:
        """End the process, and wait until it has."""
        if os.getpid() != self._owner or self._process.stdout is None or self._process.stdout.closed:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _check_open(self) -> None:
        if self._process.stdout is None or self._process.stdout.closed:
            raise DatalensError("the noise process was ended: continue with --resume")

    def _failure(self) -> DatalensError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        said = b"" if self._process.stderr is None else self._process.stderr.read()
        reason = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {self._process.returncode}"]
        return DatalensError(f"the process that draws the noise has ended ({reason[0]}): continue with --resume")


def _enlarge(pipe: int) -> None:
    """Room for 131,072 draws, about two seconds' worth, where the system grants it; else the usual 8,192."""
    import fcntl

    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 2**20)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
