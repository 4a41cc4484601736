"""Destinations of calls: one for each worker, which limits the calls in flight and counts all calls."""

from __future__ import annotations

import collections
import errno
import threading
from typing import Any, NamedTuple

from cudafuture import CUDAFuture, debug
from cudafuture.errors import InvalidStateError
from rpc_ext import _C
from rpc_ext._codec import DeviceMap
from rpc_ext._statistics import DestinationStatistics

__all__ = ["Destination"]


class _QueuedCall(NamedTuple):
    size: int
    admitted: CUDAFuture[None]  # completed under the lock


class Destination(_C.Destination):
    """A worker, and the calls and bytes in flight to it, which are limited. Further calls wait, in order.

    A call of more bytes than the limit is sent when no other call is in flight. The native class counts the calls; this
    one adds those that wait.
    """

    def __init__(self, name: str, rank: int, devices: DeviceMap, max_calls: int, max_bytes: int) -> None:
        super().__init__(name, rank, max_calls, max_bytes)
        self.devices = devices
        self.place = debug.OperationPlace.find("worker", name, "")  # the names of calls have it
        self.batches: set[Any] = set()  # open batches
        self.is_closed = False  # RPC was shut down: calls in flight get no reply
        self._lock = threading.Lock()  # guards what follows, and `waiting` and `is_awaited`; a leaf
        self._waiters: collections.deque[_QueuedCall] = collections.deque()
        self._idle: CUDAFuture[None] | None = None  # completes when no call is in flight

    # ---- admission

    def admit(self, size: int, timeout: float) -> None:
        """Wait until there is room for a call of `size` bytes, and take it.

        Raises:
            TimeoutError: there was no room for `timeout` seconds (0: no limit).
            InvalidStateError: RPC was shut down.
        """
        waiter = _QueuedCall(size, CUDAFuture(name=f"room for a call to worker '{self.name}'"))
        is_done = False
        try:
            with self._lock:
                if self.try_admit(size):
                    is_done = True
                    return
                if self.is_closed:  # no later call would admit this one
                    raise self._ended()
                debug.register(waiter.admitted, self.place, nbytes=size)
                try:
                    self._waiters.append(waiter)
                finally:
                    self.waiting = len(self._waiters)
                self._admit_waiters()  # a call may have ended since there was no room
            try:
                waiter.admitted.wait(timeout=timeout or None)
            except TimeoutError:
                if self._leave_queue(waiter):
                    raise self._no_room(timeout) from None
                waiter.admitted.value()  # the waiter was admitted after the timeout, or RPC was shut down
            is_done = True
        finally:
            if not is_done:
                self._withdraw(waiter)

    def _no_room(self, timeout: float) -> TimeoutError:
        counts = self.counts()
        return TimeoutError(
            f"no room for another call to worker '{self.name}' within {timeout:g} s: {counts['in_flight']} calls and "
            f"{counts['bytes_in_flight']} bytes are in flight"
        )

    def would_block(self) -> BlockingIOError:
        """Return the error of a non-blocking call without room."""
        counts = self.counts()
        return BlockingIOError(
            errno.EAGAIN,
            f"{counts['in_flight']} calls and {counts['bytes_in_flight']} bytes are in flight to worker '{self.name}' "
            f"(at most {self.max_calls} and {self.max_bytes})",
        )

    def _ended(self) -> InvalidStateError:
        return InvalidStateError(f"RPC was shut down while a call to worker '{self.name}' waited for room")

    def _withdraw(self, waiter: _QueuedCall) -> None:
        """Remove a waiter, or release the room that it has been given."""
        if not self._leave_queue(waiter) and waiter.admitted.done() and waiter.admitted.exception() is None:
            self.give_back(waiter.size)

    def _leave_queue(self, waiter: _QueuedCall) -> bool:
        """Remove a waiter; return False if it is not in the queue: it has been admitted or refused."""
        with self._lock:
            if waiter not in self._waiters:
                return False
            try:
                self._waiters.remove(waiter)
            finally:
                self.waiting = len(self._waiters)
            self._admit_waiters()
            return True

    def _admit_waiters(self) -> None:
        """Admit waiters for which there is room. Called under the lock."""
        while self._waiters and self.take_room(self._waiters[0].size):
            try:
                admitted = self._waiters.popleft().admitted
            finally:
                self.waiting = len(self._waiters)
            admitted.set_result(None)

    def note_room(self) -> None:
        """Admit waiters, and end ``wait_until_idle`` if no call is left. The native class calls this."""
        with self._lock:
            self._admit_waiters()
            self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and self.in_flight == 0:
            self.is_awaited = False
            idle, self._idle = self._idle, None
            idle.set_result(None)

    def flush(self) -> None:
        """Send the calls that wait in batches."""
        for batch in list(self.batches):
            batch.flush()

    # ---- the end

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call is in flight.

        Raises:
            TimeoutError: calls are still in flight after `timeout` seconds.
        """
        with self._lock:
            if self._idle is None:
                self._idle = CUDAFuture()
            idle = self._idle
            self.is_awaited = True
            self._note_idle()
        try:
            idle.wait(timeout=timeout)
        except TimeoutError:
            raise TimeoutError(
                f"worker '{self.name}' has not answered {self.in_flight} calls within {timeout:g} s"
            ) from None

    def close(self) -> None:
        """Refuse the calls that wait for room."""
        with self._lock:
            self.is_closed = True
            waiters = list(self._waiters)
            self._waiters.clear()
            self.waiting = 0
            for waiter in waiters:
                waiter.admitted.set_exception(self._ended())

    def statistics(self) -> DestinationStatistics:
        """Return the statistics so far."""
        latencies = self.latencies
        return DestinationStatistics(
            **self.counts(),
            waiting=self.waiting,
            latency_p50=latencies.quantile(0.5),
            latency_p99=latencies.quantile(0.99),
            latencies=tuple(latencies.buckets()),
        )
