"""Futures that end when nobody completes them in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError
from rpc_ext import _minder

__all__ = ["cancel_after", "expire"]

_End = Callable[[CUDAFuture[Any]], object]


def expire(future: CUDAFuture[Any], seconds: float, message: str) -> None:
    """Let the future fail with a TimeoutError unless it is done before (0: no limit)."""
    _end_after(future, seconds, lambda late: late.set_exception(TimeoutError(message)))


def cancel_after(future: CUDAFuture[Any], seconds: float) -> None:
    """Cancel the future unless it is done before (0: no limit)."""
    _end_after(future, seconds, lambda late: late.cancel())


def _end_after(future: CUDAFuture[Any], seconds: float, end: _End) -> None:
    if seconds and not future.done():
        expiry = _Expiry(future, end)
        _minder.mind(expiry, time.perf_counter() + seconds)
        future.add_done_callback(expiry.forget, executor=executors.inline)


class _Expiry:
    def __init__(self, future: CUDAFuture[Any], end: _End) -> None:
        self._future: CUDAFuture[Any] | None = future
        self._end = end

    def look(self, _: float) -> None:
        future = self._future
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # it is done after all
                self._end(future)

    def forget(self, _: object) -> None:
        """Let go of the future, and of its value, before the time is over."""
        self._future = None
        _minder.forget(self)
