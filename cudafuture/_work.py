"""Completion of ``Work`` objects that are written in Python and have no future; the native ``from_torch`` uses it."""

from __future__ import annotations

import threading
from typing import Any

from cudafuture import _C
from cudafuture._modes import Modes
from cudafuture.errors import CUDAFutureError

__all__ = ["follow"]


def follow(work: Any, future: _C.CUDAFuture[Any]) -> None:
    """Complete `future` when `work` is done; a thread that blocks in ``work.wait()`` detects that."""
    try:
        wait = Modes().applied()(_wait)  # the caller's modes: wait() may copy into the caller's tensors
        threading.Thread(target=wait, args=(work, future), name="cudafuture-work", daemon=True).start()
    except RuntimeError as e:  # the work continues, but nothing can detect its completion
        error = CUDAFutureError(f"no thread could be started to wait for {work!r}: {e}")
        error.__cause__ = e
        future.set_exception(error)


def _wait(work: Any, future: _C.CUDAFuture[Any]) -> None:
    try:
        work.wait()
        future.set_result(_result(work))
    except BaseException as e:  # also from set_result: the future must not stay pending
        _C.fail(future, e)  # unless the user completed it


def _result(work: Any) -> list[Any]:
    try:
        return list(work.result())
    except (RuntimeError, TypeError):  # this work has no result
        return []
