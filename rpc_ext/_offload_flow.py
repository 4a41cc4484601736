"""Requests to an offload service: no more bytes under way than its window, the rest in the order in which they came.

Small reads and small writes travel many at a time: what is asked for while a request of its kind is under way goes with
the next one, and a request that is full goes at once (Nagle).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from cudafuture import CUDAFuture, executors
from rpc_ext._turns import begun

__all__ = ["Flow", "Packer"]

T = TypeVar("T")


class Flow:
    """Sends requests within a window.

    Args:
        window: bytes that may be under way. A request of more goes when nothing else is.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._waiting: collections.deque[tuple[int, Callable[[], CUDAFuture[Any]], CUDAFuture[Any]]] = (
            collections.deque()
        )
        self.under_way = 0
        """bytes of requests that have been made"""
        self.waiting = 0
        """bytes of those that have not"""

    def send(self, nbytes: int, call: Callable[[], CUDAFuture[T]]) -> CUDAFuture[T]:
        """Make a call when there is room, and return what its future gives."""
        future: CUDAFuture[T] = CUDAFuture(executor=executors.inline)
        with self._lock:
            self._waiting.append((nbytes, call, future))
            self.waiting += nbytes
        self._go_on()
        return future

    def _go_on(self) -> None:
        while (request := self._next()) is not None:
            nbytes, call, future = request
            begun(call).add_done_callback(partial(self._ended, nbytes, future), executor=executors.inline)

    def _next(self) -> tuple[int, Callable[[], CUDAFuture[Any]], CUDAFuture[Any]] | None:
        with self._lock:
            if not self._waiting:
                return None
            nbytes = self._waiting[0][0]
            if self.under_way and self.under_way + nbytes > self.window:
                return None
            self.under_way += nbytes
            self.waiting -= nbytes
            return self._waiting.popleft()

    def _ended(self, nbytes: int, future: CUDAFuture[Any], done: CUDAFuture[Any]) -> None:
        with self._lock:
            self.under_way -= nbytes
        self._go_on()
        error = done.exception()
        if error is None:
            future.set_result(done.value())
        else:
            future.set_exception(error)


class Packer(Generic[T]):
    """Puts small things together.

    Args:
        most: things of one pack; bytes: of one pack.
        send: sends a pack; its future is done when the next one may go.
    """

    def __init__(self, most: int, nbytes: int, send: Callable[[list[T]], CUDAFuture[Any]]) -> None:
        self._most, self._bytes, self._send = most, nbytes, send
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._waiting: collections.deque[tuple[int, T]] = collections.deque()
        self._waiting_bytes = 0
        self._under_way = 0

    def add(self, things: Sequence[tuple[int, T]]) -> None:
        """Take things, each with its bytes."""
        with self._lock:
            self._waiting.extend(things)
            self._waiting_bytes += sum(nbytes for nbytes, _ in things)
        self._go_on()

    def _go_on(self) -> None:
        while pack := self._next():
            self._send(pack).add_done_callback(self._ended, executor=executors.inline)

    def _next(self) -> list[T]:
        with self._lock:
            is_full = len(self._waiting) >= self._most or self._waiting_bytes >= self._bytes
            if not self._waiting or (self._under_way and not is_full):
                return []
            pack: list[T] = []
            size = 0
            while self._waiting and len(pack) < self._most and (not pack or size + self._waiting[0][0] <= self._bytes):
                nbytes, thing = self._waiting.popleft()
                pack.append(thing)
                size += nbytes
            self._waiting_bytes -= size
            self._under_way += 1
            return pack

    def _ended(self, _: object) -> None:
        with self._lock:
            self._under_way -= 1
        self._go_on()
