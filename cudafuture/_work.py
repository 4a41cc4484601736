"""Following a ``Work`` whose class is written in Python and that has no future: called by the native ``from_torch``."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from cudafuture import _C
from cudafuture.errors import CUDAFutureError, InvalidStateError

__all__ = ["follow"]


def follow(work: Any, future: _C.CUDAFuture[Any]) -> None:
    """Complete `future` when `work` is done, which only a thread that is blocked in its ``wait()`` learns."""
    try:
        threading.Thread(target=_wait, args=(work, future), name="cudafuture-work", daemon=True).start()
    except RuntimeError as e:  # the work goes on, and nothing will tell when it is done
        error = CUDAFutureError(f"no thread could be started for following {work!r}: {e}")
        error.__cause__ = e
        future.set_exception(error)


def _wait(work: Any, future: _C.CUDAFuture[Any]) -> None:
    try:
        work.wait()
        future.set_result(_result(work))
    except BaseException as e:  # also of set_result: the future must not stay pending
        with contextlib.suppress(InvalidStateError):  # completed by hand, or the process is exiting
            future.set_exception(e)


def _result(work: Any) -> list[Any]:
    try:
        return list(work.result())
    except (RuntimeError, TypeError):  # it has none to show
        return []
