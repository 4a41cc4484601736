"""Values that are promised before what makes them has come.

The owner of an RRef hears of it at once, while arguments of the call are still on their way from a device::

    remote() ──► take ──► the future of the RRef ◄── keep ◄── the call, with its arguments
                                                 ◄── give_up ◄── its caller, where the call has failed

``take`` and ``keep`` come in either order; ``give_up`` comes after ``take``. One of them may never come, where the
caller dies or a message is lost: what waits for it is forgotten after ten minutes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable
from typing import Any

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError

__all__ = ["Promises"]


_KEPT = 600.0  # seconds: the other half follows at once, or when a device has finished


class Promises:
    """What was promised, by ticket, until it is taken and kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._open: dict[Hashable, tuple[float, CUDAFuture[list[CUDAFuture[Any]]]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, ticket: Hashable) -> CUDAFuture[Any]:
        """Return a future of the value."""
        promise = self._first_or_second(ticket)
        return promise.then_async(lambda kept: kept.value()[0])

    def keep(self, ticket: Hashable, outcome: CUDAFuture[Any]) -> None:
        """Give the value."""
        promise = self._first_or_second(ticket)
        with contextlib.suppress(InvalidStateError):  # it was given up
            promise.set_result([outcome])

    def give_up(self, ticket: Hashable, error: BaseException) -> None:
        """Fail unless the value was given. Whoever keeps the promise after all finds it so."""
        with self._lock:
            entry = self._open.get(ticket)
        if entry is not None:
            _fail(entry[1], error)

    def _first_or_second(self, ticket: Hashable) -> CUDAFuture[list[CUDAFuture[Any]]]:
        now, old = time.monotonic(), []
        with self._lock:
            while self._open and now - next(iter(self._open.values()))[0] > _KEPT:  # the oldest
                old.append(self._open.pop(next(iter(self._open)))[1])
            _, promise = self._open.pop(ticket, (now, None))
            if promise is None:
                promise = CUDAFuture()
                self._open[ticket] = now, promise
        for forgotten in old:
            _fail(forgotten, TimeoutError(f"the value of an RRef was promised, and has not come within {_KEPT:g} s"))
        return promise


def _fail(promise: CUDAFuture[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        promise.set_exception(error)
