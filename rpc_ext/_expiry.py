"""Futures that fail when nobody completes them in time."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError
from rpc_ext import _minder

__all__ = ["expire"]


def expire(future: CUDAFuture[Any], seconds: float, message: str) -> None:
    """Let the future fail with a TimeoutError unless it is done before (0: no limit)."""
    if seconds and not future.done():
        expiry = _Expiry(future, message)
        _minder.mind(expiry, time.perf_counter() + seconds)
        future.add_done_callback(expiry.forget, executor=executors.inline)


class _Expiry:
    def __init__(self, future: CUDAFuture[Any], message: str) -> None:
        self._future: CUDAFuture[Any] | None = future
        self._message = message

    def look(self, _: float) -> None:
        future = self._future
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # it is done after all
                future.set_exception(TimeoutError(self._message))

    def forget(self, _: object) -> None:
        """Let go of the future, and of its value, before the time is over."""
        self._future = None
        _minder.forget(self)
