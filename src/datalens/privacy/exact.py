"""Exact discrete Gaussian draws from OpenDP's sampler, and a process that makes them ahead and writes them to a pipe.

The noise depends on no data, so it may be made before it is needed. It goes from memory to memory through
a pipe, whose bytes are read once: nothing is written to disk, and nothing can be read twice. `noise.py` runs this file
by itself, with OpenDP and nothing of datalens, so that it starts in half a second.
"""

import os
import select
import sys
from array import array
from collections.abc import Callable

CHUNK = 2048  # draws made at a time
# A pipe that says it has room takes this much without waiting, and takes it whole: no draw is ever split.
PIECE = select.PIPE_BUF


def sampler(sigma: float) -> Callable[[int], list[int]]:
    """Draws of N_Z(0, sigma²): P[z] proportional to exp(−z²/(2·sigma²)), sampled exactly, from secure bits.

    OpenDP turns sigma into a fraction and samples with whole numbers (Canonne, Kamath, Steinke 2020, Algorithm 3).
    Added to zeros, its vector mechanism for integers gives the noise.
    """
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    add_noise = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=float(sigma))
    return lambda count: add_noise([0] * count)


def feed(out: int, draw: Callable[[int], list[int]], *, parent: int, patience_ms: int = 1000) -> None:
    """Write draws to the descriptor `out` until nobody reads there, or the parent is gone."""
    room = select.poll()
    room.register(out, select.POLLOUT)
    while os.getppid() == parent:
        content = array("q", draw(CHUNK)).tobytes()
        for start in range(0, len(content), PIECE):
            while not room.poll(patience_ms):
                if os.getppid() != parent:  # gone, but a child of it may still hold the other end
                    return
            try:
                os.write(out, content[start : start + PIECE])
            except BrokenPipeError:
                return


def main(arguments: list[str]) -> None:
    sigma, parent = arguments
    try:
        feed(sys.stdout.fileno(), sampler(float(sigma)), parent=int(parent))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":  # pragma: no cover
    main(sys.argv[1:])
