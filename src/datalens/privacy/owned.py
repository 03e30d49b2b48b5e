"""What is paid for, and the right to pay: one process has it, one thread at a time uses it, and nobody copies it.

A block of steps that were charged ahead, in a forked child or in a copy, would be used up twice for one charge.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from datalens.errors import DatalensError


class Owned:
    """To be inherited; every use is made `with self._alone()`."""

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if os.getpid() != self._owner:  # first: after a fork the lock may be held by a thread that is not there
            raise DatalensError(
                f"this {type(self).__name__} belongs to the process that made it, and what was paid for is used there "
                "only: make another here, with a ledger of its own, and count both"
            )
        with self._lock:
            yield

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DatalensError(
            f"a {type(self).__name__} is not copied or sent to another process: both would use what was paid for once"
        )
