"""A base class for objects that hold releases already charged: bound to one process, locked, and not copyable.

In a forked child, or in a copy, a block of steps that was charged ahead would be used twice for one charge.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from datalens.errors import DatalensError


class Owned:
    """Base class that binds an object to the process that made it. Subclasses wrap every use in `with self._alone()`.

    Raises:
        DatalensError: on use in another process (after a fork), and on pickling or copying.
    """

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        # Checked before the lock is taken: after a fork it may be held by a thread that does not exist here.
        if os.getpid() != self._owner:
            raise DatalensError(
                f"this {type(self).__name__} belongs to the process that made it, and what it was charged for can be "
                "used only there: make another one here, with its own ledger, and count both"
            )
        with self._lock:
            yield

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DatalensError(
            f"a {type(self).__name__} cannot be copied or sent to another process: both copies would use one charge"
        )
