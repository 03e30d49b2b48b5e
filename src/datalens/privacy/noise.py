"""Sources of privacy noise: the operating system, and, for tests, a seed, which voids the guarantee.

There are two laws: standard normals in float64, and the exact discrete Gaussian, sampled by OpenDP if it is installed.
(Discrete Laplace noise for counts of ballots is sampled here.)
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
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import TracebackType
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np

from datalens.errors import DatalensError
from datalens.privacy import exact
from datalens.privacy.events import NoiseLaw, NoiseOrigin
from datalens.privacy.owned import Owned

# Up to this many exact draws take less time than starting the process that would draw them ahead.
FEW_DRAWS = 30_000


class NoiseSource(Protocol):
    """A source of standard normal draws, each used once. `origin` goes into every event, ledger and certificate."""

    @property
    def origin(self) -> NoiseOrigin: ...

    def standard_normal(self, count: int) -> np.ndarray:
        """Return new draws from N(0, 1): [count] float64.

        Args:
            count: Number of draws.
        """

    def words(self, count: int) -> np.ndarray:
        """Return new uniform integers below 2³²: [count] uint32. For secret choices.

        Args:
            count: Number of draws.
        """


class SecretSource(NoiseSource, Protocol):
    """A noise source that can also choose in secret: `below(count)` is uniform on 0 … count−1."""

    def below(self, count: int) -> int:
        """Return a new uniform integer in 0 … count−1.

        Args:
            count: Number of values to choose from.
        """


@runtime_checkable
class IntegerNoise(Protocol):
    """A source of draws of the discrete Gaussian N_Z(0, sigma²), each used once."""

    @property
    def origin(self) -> NoiseOrigin: ...

    @property
    def sigma(self) -> float: ...

    def check(self) -> None:
        """Raise if the source cannot draw. Called before a charge that a missing draw would waste."""

    def integers(self, count: int) -> np.ndarray:
        """Return new draws: [count] int64.

        Args:
            count: Number of draws.

        Raises:
            DatalensError: the source cannot draw.
        """


class Held:
    """Noise that is drawn before its charge, so that nothing slow happens between charge and release.

    It depends on no record. It is kept in the memory of this process and never written to disk. It is handed out once,
    and only in the process that drew it: a forked child cannot take it, and it cannot be copied or sent.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = [values]
        self._process = os.getpid()

    def take(self) -> np.ndarray:
        """Return the draws. To be called once, after the charge.

        Raises:
            DatalensError: they were taken before, or this is a forked child.
        """
        if os.getpid() != self._process:
            raise DatalensError("noise drawn ahead belongs to the process that drew it: no other may use it too")
        try:
            return self._values.pop()  # atomic, so that only one of two threads gets it
        except IndexError:
            raise DatalensError("noise can be used only once, and this noise was used: draw again") from None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise DatalensError("noise drawn ahead cannot be copied, stored or sent to another process: it is for one use")


class SecureNoise:
    """Noise from the operating system's generator: no state to save, to fork or to replay."""

    origin: NoiseOrigin = "operating-system"

    def standard_normal(self, count: int) -> np.ndarray:
        return _box_muller(os.urandom(16 * ((count + 1) // 2)), count)

    def below(self, count: int) -> int:
        """Return a uniform integer in 0 … count−1."""
        return secrets.randbelow(count)

    def words(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(4 * count), dtype=np.uint32)


class SeededNoise:
    """Reproducible noise, for tests and debugging. NOT PRIVATE: whoever knows the seed can subtract it."""

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
    """Discrete Laplace noise, P[z] proportional to exp(−|z|/scale), sampled exactly with integer arithmetic.

    About 20 µs per draw.

    Args:
        scale: Scale of the noise.
        seed: None for the operating system's generator. NOT PRIVATE with a seed.
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
    """Draw once with scale t/s (Canonne, Kamath, Steinke 2020, Algorithm 2), from uniform integers only."""
    while True:
        u = draw.randrange(t)
        if not _bernoulli_exp(u, t, draw):
            continue
        v = 0
        while _bernoulli_exp(1, 1, draw):
            v += 1
        size = (u + t * v) // s
        negative = draw.randrange(2) == 1
        if size > 0 or not negative:  # zero must be counted for one sign only
            return -size if negative else size


def _bernoulli_exp(a: int, b: int, draw: random.Random) -> bool:
    """Return True with probability exp(−a/b), for a <= b (the same paper, Algorithm 1)."""
    k = 1
    while draw.randrange(b * k) < a:
        k += 1
    return k % 2 == 1


def _box_muller(entropy: bytes, count: int) -> np.ndarray:
    """Turn pairs of 64-bit uniforms in (0, 1] into pairs of float64 normals, whose tail ends at 9.4 sigma."""
    uniforms = (np.frombuffer(entropy, dtype=np.uint64).astype(np.float64) + 1.0) * 2.0**-64
    half = len(uniforms) // 2
    radius = np.sqrt(-2.0 * np.log(uniforms[:half]))
    angle = 2.0 * np.pi * uniforms[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@contextlib.contextmanager
def open_noise(
    law: NoiseLaw, sigma: float, *, draws: int, seed: int | None = None, threads: int | None = None
) -> Iterator[NoiseSource | IntegerNoise]:
    """Open the noise source of a run, as a context manager.

    Args:
        law: Distribution of the noise.
        sigma: Its standard deviation (for the discrete Gaussian; standard normals are scaled by the mechanism).
        draws: About how many draws the run will need. If they are many, a second process draws them ahead.
        seed: None for the operating system's generator. NOT PRIVATE with a seed, and used for Gaussian noise only.
        threads: Threads that draw, if the run needs all draws at one time and has nothing to do meanwhile; None: it
            needs them one after the other.

    Raises:
        DatalensError: OpenDP is needed and does not work.
    """
    if law == "gaussian":
        yield SecureNoise() if seed is None else SeededNoise(seed)
    elif draws <= FEW_DRAWS or threads is not None:
        yield ExactNoise(sigma, threads=threads or 1)
    else:
        with DrawnAhead(sigma) as ahead:
            yield ahead


# --- the exact discrete Gaussian ------------------------------------------------------------------

_ADVICE = "reinstall opendp, or begin another run with --noise gaussian"


def opendp_installed() -> bool:
    """Return whether OpenDP is installed. It is not imported."""
    return importlib.util.find_spec("opendp") is not None


class ExactNoise:
    """Discrete Gaussian noise from OpenDP, drawn on demand. About 13 µs per draw on one core.

    Raises:
        DatalensError: OpenDP is missing or does not work.
    """

    origin: NoiseOrigin = "operating-system"

    def __init__(self, sigma: float, *, threads: int = 1) -> None:
        self.sigma = sigma
        self._threads = threads  # of many draws; the sampler is compiled code, and takes bits of its own for every draw
        try:
            self._draw = exact.sampler(sigma)
        except Exception as error:  # OpenDP is missing, or its version has another API
            raise DatalensError(
                f"the exact noise needs OpenDP, which does not work here ({_one_line(error)}): {_ADVICE}"
            ) from error

    def check(self) -> None:
        pass

    def integers(self, count: int) -> np.ndarray:
        def drawn(many: int) -> np.ndarray:
            return np.array(self._draw(many), dtype=np.int64)

        if count <= FEW_DRAWS or self._threads == 1:
            return drawn(count)
        pieces = [min(FEW_DRAWS, count - start) for start in range(0, count, FEW_DRAWS)]
        with ThreadPoolExecutor(self._threads) as pool:
            return np.concatenate(list(pool.map(drawn, pieces)))


class DrawnAhead(Owned):
    """The same noise, drawn ahead by a second process, so that the run does not wait for it (given a second core).

    The second process writes to a pipe (see `exact.py`). It ends when this process closes the pipe or ends, in whatever
    way; Ctrl-C does not reach it. Draws that were not requested yet are in the pipe, so a fork copies none of them, and
    a forked child cannot use the source. Threads take turns: each reads whole draws.
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
            bufsize=0,  # no draw may lie in a buffer of this process, which a fork would copy
            start_new_session=True,  # Ctrl-C is for the run, which may need noise to end cleanly
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        _enlarge(self._pipe)

    def __enter__(self) -> "DrawnAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Wait until the first draws are there, or raise the reason why there will be none.

        Raises:
            DatalensError: the process that draws has ended.
        """
        with self._alone():
            self._check_open()
            waiting = select.poll()
            waiting.register(self._pipe, select.POLLIN)
            if not waiting.poll()[0][1] & select.POLLIN:  # the other end was closed, and the pipe is empty
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
            self.close()  # what was read is lost with the error, and the next read could begin in the middle of a draw
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
    """Enlarge a pipe from the default 8,192 draws to 131,072, about two seconds' worth, if the system allows it."""
    import fcntl

    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 2**20)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
