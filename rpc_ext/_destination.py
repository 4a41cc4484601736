"""Destinations of calls: one object for each worker, which limits the calls in flight to it and counts all calls."""

from __future__ import annotations

import collections
import errno
import math
import threading
import time
from typing import Any, Protocol

from cudafuture.errors import InvalidStateError
from rpc_ext import _naps
from rpc_ext._codec import DeviceMap
from rpc_ext._histogram import Histogram
from rpc_ext._statistics import DestinationStatistics

__all__ = ["Destination"]


class Admitted(Protocol):
    """A call, as far as this module uses it."""

    size: int
    started: float
    settled: bool


class _Waiter:
    def __init__(self, size: int) -> None:
        self.size = size
        self.admitted = threading.Event()
        self.refused = False


class Destination:
    """A worker, seen from this one. At most so many calls and bytes are under way to it; the next wait, in order.

    A call that is larger than all the bytes allowed goes alone.
    """

    def __init__(self, name: str, rank: int, devices: DeviceMap, max_calls: int, max_bytes: int) -> None:
        self.name, self.rank, self.devices = name, rank, devices
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self.batches: set[Any] = set()  # that threads have opened
        self._lock = threading.Lock()  # guards all that follows; a leaf
        self._calls = self._bytes = 0  # under way
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._made = self._failed = self._sent = self._received = 0
        self._latencies = Histogram()
        self._closed = False
        self._idle = threading.Condition(self._lock)

    # ---- admission

    def try_admit(self, size: int) -> bool:
        """Admit a call of `size` bytes if there is room now and nobody waits."""
        with self._lock:
            if self._waiters or not self._fits(size):
                return False
            self._take(1, size)
            return True

    def admit(self, size: int, timeout: float) -> None:
        """Wait until there is room for a call of `size` bytes.

        Raises:
            TimeoutError: there was none for `timeout` seconds (0: for ever).
            InvalidStateError: RPC was shut down meanwhile.
        """
        waiter = _Waiter(size)
        with self._lock:
            if not self._waiters and self._fits(size):
                self._take(1, size)
                return
            if self._closed:  # nobody would admit it any more
                raise self._ended()
            self._waiters.append(waiter)
        try:
            admitted = _naps.wait(waiter.admitted.wait, timeout or math.inf)
        except BaseException:
            if not self._give_up(waiter) and not waiter.refused:
                self._give_back(size)
            raise
        if not admitted and self._give_up(waiter):
            raise TimeoutError(
                f"no room for another call to worker '{self.name}' within {timeout:g} s: {self._calls} calls and "
                f"{self._bytes} bytes are under way"
            )
        if waiter.refused:
            raise self._ended()

    def would_block(self) -> BlockingIOError:
        """Return the error of a call that may not wait."""
        return BlockingIOError(
            errno.EAGAIN,
            f"{self._calls} calls and {self._bytes} bytes are under way to worker '{self.name}' "
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

    def _give_up(self, waiter: _Waiter) -> bool:
        """Leave the queue; false where the waiter was admitted after all."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit_waiters()
                return True
            return False

    def _give_back(self, size: int) -> None:
        """Undo the admission of a call that is not made."""
        with self._lock:
            self._take(-1, -size)
            self._admit_waiters()
            if self._calls == 0:
                self._idle.notify_all()

    def _admit_waiters(self) -> None:
        while self._waiters and self._fits(self._waiters[0].size):
            waiter = self._waiters.popleft()
            self._take(1, waiter.size)
            waiter.admitted.set()

    # ---- what came of a call

    def finish(self, call: Admitted, received: int, failed: bool) -> bool:
        """Count the end of a call, whose answer has `received` bytes; false where it had ended before."""
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
            if self._waiters:
                self._admit_waiters()
            elif self._calls == 0:
                self._idle.notify_all()
        return True

    def flush(self) -> None:
        """Send what waits in batches."""
        for batch in list(self.batches):
            batch.flush()

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until no call is under way.

        Raises:
            TimeoutError: some still are after `timeout` seconds.
        """
        with self._idle:
            if not _naps.wait(lambda nap: self._idle.wait_for(self._is_idle, nap), timeout):
                raise TimeoutError(f"worker '{self.name}' has not answered {self._calls} calls within {timeout:g} s")

    def _is_idle(self) -> bool:
        return self._calls == 0 and not self._waiters

    @property
    def is_closed(self) -> bool:
        """Whether RPC was shut down: calls that are under way have no answer any more."""
        return self._closed

    def close(self) -> None:
        """Let whoever waits for room go, with an error."""
        with self._lock:
            self._closed = True
            while self._waiters:
                waiter = self._waiters.popleft()
                waiter.refused = True
                waiter.admitted.set()

    def statistics(self) -> DestinationStatistics:
        """Return what was counted so far."""
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
