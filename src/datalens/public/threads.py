"""Work on chunks of records in several threads. Results do not depend on how many there are."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import local
from typing import TypeVar

import torch

AHEAD = 2  # items that wait for a thread, or whose results wait

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Here(local):
    """State of one thread. `threads`: the number that `mapped` uses, if torch itself has one."""

    threads: int | None = None


_HERE = _Here()


@contextmanager
def one_core_each() -> Iterator[None]:
    """Let torch use one core in the block, and `mapped` as many threads as torch had before.

    What torch computes in several threads can differ in last bits with their number. And the threads of an operation
    wait for each other without giving up their cores, which takes several times as long where others need these, too.
    """
    threads = torch.get_num_threads()
    before, _HERE.threads = _HERE.threads, side_by_side()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _HERE.threads = before


def mapped(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results in the order of the items, computed by as many threads as torch may use (OMP_NUM_THREADS).

    Each of them runs torch on one core: whole chunks side by side are faster than threads within every operation. Few
    more items than threads are taken ahead, so the items need not fit into memory.
    """
    before = torch.get_num_threads()
    threads = side_by_side()
    if threads == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > threads + AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # threads that begin later take over what was set last


def side_by_side() -> int:
    """Return how many threads `mapped` uses."""
    return _HERE.threads or torch.get_num_threads()
