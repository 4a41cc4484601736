"""Futures of writes that a program has, which are done a little later than the writes."""

from __future__ import annotations

from collections import deque
from typing import Any

from cudafuture._C import CUDAFuture

__all__ = ["ReturnedFutures"]


class ReturnedFutures:
    """Futures that may be pending, oldest first. A call that waits for the writes waits for them, too."""

    def __init__(self) -> None:
        self._futures: deque[CUDAFuture[Any]] = deque()

    def add(self, future: CUDAFuture[Any]) -> None:
        """Add a future, and drop the oldest ones that are done."""
        while self._futures and self._futures[0].done():
            self._futures.popleft()
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for all of them; the caller raises the errors of the writes."""
        while self._futures:
            self._futures.popleft().exception()
