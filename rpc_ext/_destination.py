"""Destinations of calls: one for each worker, which limits the calls in flight and counts all calls."""

from __future__ import annotations

import collections
import errno
import threading
import time
from typing import Any, NamedTuple, Protocol

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from rpc_ext._C import Histogram
from rpc_ext._codec import DeviceMap
from rpc_ext._statistics import DestinationStatistics

__all__ = ["Destination"]


class Admitted(Protocol):
    """The attributes of a call that this module uses."""

    size: int
    started: float
    settled: bool


class _Waiter(NamedTuple):
    size: int
    admitted: CUDAFuture[None]  # completed under the lock


class Destination:
    """A worker, and the calls and bytes in flight to it, which are limited. Further calls wait, in order.

    A call of more bytes than the limit is sent when no other call is in flight.
    """

    def __init__(self, name: str, rank: int, devices: DeviceMap, max_calls: int, max_bytes: int) -> None:
        self.name, self.rank, self.devices = name, rank, devices
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self.batches: set[Any] = set()  # open batches
        self.is_closed = False
        """True after the shutdown of RPC: calls in flight get no reply any more"""
        self._lock = threading.Lock()  # guards all that follows; a leaf
        self._calls = self._bytes = 0  # in flight
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._idle: CUDAFuture[None] | None = None  # completes when no call is in flight
        self._made = self._failed = self._sent = self._received = 0
        self._latencies = Histogram()

    # ---- admission

    def try_admit(self, size: int) -> bool:
        """Take room for a call of `size` bytes; return False if there is none, or if other calls wait for room."""
        with self._lock:
            if self._waiters or not self._fits(size):
                return False
            self._take(1, size)
            return True

    def admit(self, size: int, timeout: float) -> None:
        """Wait until there is room for a call of `size` bytes, and take it.

        Raises:
            TimeoutError: there was no room for `timeout` seconds (0: no limit).
            InvalidStateError: RPC was shut down.
        """
        with self._lock:
            if not self._waiters and self._fits(size):
                self._take(1, size)
                return
            if self.is_closed:  # no later call would admit this one
                raise self._ended()
            waiter = _Waiter(size, CUDAFuture())
            self._waiters.append(waiter)
        try:
            waiter.admitted.wait(timeout=timeout or None)
        except TimeoutError:
            if self._leave_queue(waiter):
                raise TimeoutError(
                    f"no room for another call to worker '{self.name}' within {timeout:g} s: {self._calls} calls and "
                    f"{self._bytes} bytes are in flight"
                ) from None
            waiter.admitted.value()  # the waiter was admitted after the timeout, or RPC was shut down
        except BaseException:
            if not self._leave_queue(waiter) and waiter.admitted.exception() is None:
                self._give_back(size)
            raise

    def would_block(self) -> BlockingIOError:
        """Return the error of a non-blocking call without room."""
        return BlockingIOError(
            errno.EAGAIN,
            f"{self._calls} calls and {self._bytes} bytes are in flight to worker '{self.name}' "
            f"(at most {self._max_calls} and {self._max_bytes})",
        )

    def _ended(self) -> InvalidStateError:
        return InvalidStateError(f"RPC was shut down while a call to worker '{self.name}' waited for room")

    def _fits(self, size: int) -> bool:
        return self._calls == 0 or (self._calls < self._max_calls and self._bytes + size <= self._max_bytes)

    def _take(self, calls: int, size: int) -> None:
        self._calls += calls
        self._bytes += size
        self._made += calls
        self._sent += size

    def _leave_queue(self, waiter: _Waiter) -> bool:
        """Remove a waiter; return False if it has been admitted or refused."""
        with self._lock:
            if waiter.admitted.done():
                return False
            self._waiters.remove(waiter)
            self._note_room()
            return True

    def _give_back(self, size: int) -> None:
        """Undo the admission of a call that is not sent."""
        with self._lock:
            self._take(-1, -size)
            self._note_room()

    def _note_room(self) -> None:
        """Admit waiters for which there is room; end ``wait_until_idle`` if no call is left. Called under the lock."""
        while self._waiters and self._fits(self._waiters[0].size):
            waiter = self._waiters.popleft()
            self._take(1, waiter.size)
            waiter.admitted.set_result(None)
        if self._idle is not None and self._calls == 0:
            self._idle.set_result(None)
            self._idle = None

    # ---- the end of a call

    def finish(self, call: Admitted, received: int, failed: bool) -> bool:
        """Count the end of a call with a reply of `received` bytes; return False if it was counted before."""
        took = int(1e9 * (time.perf_counter() - call.started))
        with self._lock:
            if call.settled:
                return False
            call.settled = True
            self._calls -= 1
            self._bytes -= call.size
            self._received += received
            self._failed += failed
            self._latencies.add(took)
            if self._waiters or self._idle is not None:
                self._note_room()
        return True

    def flush(self) -> None:
        """Send the calls that wait in batches."""
        for batch in list(self.batches):
            batch.flush()

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call is in flight.

        Raises:
            TimeoutError: calls are still in flight after `timeout` seconds.
        """
        with self._lock:
            if self._calls == 0:  # then no call waits for room
                return
            idle = self._idle = CUDAFuture[None]()
        try:
            idle.wait(timeout=timeout)
        except TimeoutError:
            raise TimeoutError(
                f"worker '{self.name}' has not answered {self._calls} calls within {timeout:g} s"
            ) from None

    def close(self) -> None:
        """Refuse the calls that wait for room."""
        with self._lock:
            self.is_closed = True
            while self._waiters:
                self._waiters.popleft().admitted.set_exception(self._ended())

    def statistics(self) -> DestinationStatistics:
        """Return the statistics so far."""
        with self._lock:
            return DestinationStatistics(
                calls=self._made,
                failed=self._failed,
                in_flight=self._calls,
                bytes_in_flight=self._bytes,
                waiting=len(self._waiters),
                bytes_sent=self._sent,
                bytes_received=self._received,
                latency_p50=self._latencies.quantile(0.5),
                latency_p99=self._latencies.quantile(0.99),
                latencies=tuple(self._latencies.buckets()),
            )
