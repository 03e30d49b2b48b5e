"""Exact discrete Gaussian draws from OpenDP's sampler, and a process that draws them ahead and writes them to a pipe.

The noise depends on no data, so it may be drawn before it is needed. It goes from memory to memory through a pipe,
whose bytes can be read only once: nothing is written to disk, and no draw can be used twice. `noise.py` runs this file
as a script, which imports OpenDP and nothing of datalens, so that it starts in half a second.
"""

import os
import select
import sys
from array import array
from collections.abc import Callable

CHUNK = 2048  # draws per call of the sampler
# A pipe that reports room takes a write of this size without waiting and undivided, so that no draw is ever split.
PIECE = select.PIPE_BUF


def sampler(sigma: float) -> Callable[[int], list[int]]:
    """Return a function that draws `count` samples of N_Z(0, sigma²), exactly, from secure random bits.

    P[z] is proportional to exp(−z²/(2·sigma²)). OpenDP turns sigma into a fraction and samples with integer arithmetic
    (Canonne, Kamath, Steinke 2020, Algorithm 3). Its vector mechanism for integers, run on zeros, returns the noise.

    Args:
        sigma: Width of the noise.

    Returns:
        The function; its argument is `count`.
    """
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    add_noise = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=float(sigma))
    return lambda count: add_noise([0] * count)


def feed(out: int, draw: Callable[[int], list[int]], *, parent: int, patience_ms: int = 1000) -> None:
    """Write draws to a pipe until its reader closes it or the parent process ends.

    Args:
        out: File descriptor of the pipe.
        draw: Returns a given number of draws.
        parent: Process id of the parent.
        patience_ms: How often to check for the parent while the pipe is full.
    """
    room = select.poll()
    room.register(out, select.POLLOUT)
    while os.getppid() == parent:
        content = array("q", draw(CHUNK)).tobytes()
        for start in range(0, len(content), PIECE):
            while not room.poll(patience_ms):
                if os.getppid() != parent:  # the parent ended, but a child of it may still hold the other end
                    return
            try:
                os.write(out, content[start : start + PIECE])
            except BrokenPipeError:
                return


def main(arguments: list[str]) -> None:
    """Run as the process that draws noise: write draws to stdout until the parent process ends.

    Args:
        arguments: Sigma, and the process id of the parent.
    """
    sigma, parent = arguments
    try:
        feed(sys.stdout.fileno(), sampler(float(sigma)), parent=int(parent))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":  # pragma: no cover
    main(sys.argv[1:])
