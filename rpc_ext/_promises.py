"""Values that are promised before what makes them has come.

The owner of an RRef hears of it at once, while arguments of the call are still on their way from a device::

    remote() ──► take ──► the future of the RRef ◄── keep ◄── the call, with its arguments
                                                 ◄── give_up ◄── its caller, where the call has failed

``take`` and ``keep`` come in either order; ``give_up`` comes after ``take``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from typing import Any

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError

__all__ = ["Promises"]


class Promises:
    """What was promised, by ticket, until it is taken and kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._open: dict[Hashable, CUDAFuture[list[CUDAFuture[Any]]]] = {}

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
            promise = self._open.get(ticket)
        if promise is not None:
            with contextlib.suppress(InvalidStateError):
                promise.set_exception(error)

    def _first_or_second(self, ticket: Hashable) -> CUDAFuture[list[CUDAFuture[Any]]]:
        with self._lock:
            promise = self._open.pop(ticket, None)
            if promise is None:
                promise = self._open[ticket] = CUDAFuture()
            return promise
