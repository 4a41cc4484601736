"""Requests to an offload service: no more bytes under way than its window, the rest in the order in which they came.

Small reads and small writes travel many at a time: what is asked for while a request of its kind is under way goes with
the next one, and a request that is full goes at once (Nagle).
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from cudafuture import CUDAFuture, executors
from rpc_ext import _minder
from rpc_ext._turns import begun, outcome

__all__ = ["Flow", "NoRoomError", "Packer"]

_PAUSE = 0.005  # seconds until what RPC had no room for is tried again

T = TypeVar("T")


class NoRoomError(Exception):
    """RPC has too much under way to this worker: to be tried again."""


class Flow:
    """Sends requests within a window.

    Args:
        window: bytes that may be under way. A request of more goes when nothing else is.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._waiting: collections.deque[_Request] = collections.deque()
        self.under_way = 0
        """bytes of requests that have been made"""
        self.waiting = 0
        """bytes of those that have not"""
        self._is_held_up = False  # the first has found no room

    def send(self, nbytes: int, call: Callable[[], CUDAFuture[T]]) -> CUDAFuture[T]:
        """Make a call when there is room, and return what its future gives.

        One that fails with NoRoomError is made again.
        """
        request = _Request(nbytes, call)
        with self._lock:
            self._waiting.append(request)
            self.waiting += nbytes
        self._go_on()
        return request.future

    def _go_on(self) -> None:
        while (request := self._next()) is not None:
            begun(request.call).add_done_callback(partial(self._ended, request), executor=executors.inline)

    def _next(self) -> _Request | None:
        with self._lock:
            if not self._waiting or self._is_held_up:
                return None
            nbytes = self._waiting[0].nbytes
            if self.under_way and self.under_way + nbytes > self.window:
                return None
            self.under_way += nbytes
            self.waiting -= nbytes
            return self._waiting.popleft()

    def _ended(self, request: _Request, done: CUDAFuture[Any]) -> None:
        value, error = outcome(done)
        with self._lock:
            self.under_way -= request.nbytes
            self._is_held_up = isinstance(error, NoRoomError)
            if self._is_held_up:
                self._waiting.appendleft(request)
                self.waiting += request.nbytes
        if isinstance(error, NoRoomError):
            _minder.mind(self, time.perf_counter() + _PAUSE)
            return
        try:
            self._go_on()
        finally:  # whatever becomes of the others
            if error is None:
                request.future.set_result(value)
            else:
                request.future.set_exception(error)

    def look(self, _: float) -> None:
        """Try again what had no room."""
        with self._lock:
            self._is_held_up = False
        self._go_on()


class _Request:
    def __init__(self, nbytes: int, call: Callable[[], CUDAFuture[Any]]) -> None:
        self.nbytes, self.call = nbytes, call
        self.future: CUDAFuture[Any] = CUDAFuture(executor=executors.inline)


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
            begun(self._send, pack).add_done_callback(self._ended, executor=executors.inline)

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

    def _ended(self, done: CUDAFuture[Any]) -> None:
        outcome(done)  # the things themselves have heard of it
        with self._lock:
            self._under_way -= 1
        self._go_on()
