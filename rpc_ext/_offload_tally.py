"""Many things of which each ends by itself, and one future of them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cudafuture import CUDAFuture, executors
from rpc_ext._turns import outcome

__all__ = ["Tally"]


class Tally:
    """Completes a future when all have ended: with their values, or with the error of the first that has failed.

    Unlike ``gather`` it needs no future of each, which counts where there are thousands, and it waits for all: none
    uses memory any more when the future is done.

    Args:
        count: how many there are.
        named: says of an error which one it is of.
        succeeded: called for each that has ended without an error, before the future is done.
    """

    def __init__(
        self,
        count: int,
        named: Callable[[int, BaseException], BaseException],
        succeeded: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._named, self._succeeded = named, succeeded
        self.future: CUDAFuture[list[Any]] = CUDAFuture(executor=executors.inline)
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._values: list[Any] = [None] * count
        self._left = count
        self._error: BaseException | None = None
        if not count:
            self.future.set_result([])

    def count(self, i: int, future: CUDAFuture[Any]) -> None:
        """Let one end with a future."""
        future.add_done_callback(lambda done: self._done(i, done), executor=executors.inline)

    def _done(self, i: int, done: CUDAFuture[Any]) -> None:
        value, error = outcome(done)
        self.ended(i, value, error)

    def ended(self, i: int, value: Any, error: BaseException | None = None) -> None:
        """Note how one has ended."""
        if error is not None and self._error is None:
            error = self._named(i, error)
        if error is None:
            try:
                self._succeeded(i)
            except Exception as e:  # the caller's function: its error is that of the call, which has to end
                error = e
        with self._lock:
            self._values[i] = value
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            self.future.set_result(self._values)
        else:
            self.future.set_exception(self._error)
