"""Futures of a session that wait for other workers, and fail when the session ends."""

from __future__ import annotations

import contextlib
from typing import Any

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError

__all__ = ["Awaited"]


class Awaited:
    """Pending futures; they fail when the session ends. From then on so does each that is added."""

    def __init__(self) -> None:
        self._futures: set[CUDAFuture[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: CUDAFuture[Any]) -> None:
        """Fail the future when the session ends, unless it is done before."""
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        if self._is_closed:  # looked at last: close() may not have seen it
            _fail(future)

    def close(self) -> None:
        """Fail them."""
        self._is_closed = True
        for future in list(self._futures):
            _fail(future)


def _fail(future: CUDAFuture[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # it has just come
        future.set_exception(
            InvalidStateError("RPC was shut down before an RRef was confirmed, or its value was there")
        )
