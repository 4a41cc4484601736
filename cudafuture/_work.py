"""Following a ``Work`` whose class is written in Python and that has no future: called by the native ``from_torch``."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from cudafuture import _C
from cudafuture.errors import InvalidStateError

__all__ = ["follow"]


def follow(work: Any, future: _C.CUDAFuture[Any]) -> None:
    """Complete `future` when `work` is done, which only a thread that is blocked in its ``wait()`` learns."""
    threading.Thread(target=_wait, args=(work, future), name="cudafuture-work", daemon=True).start()


def _wait(work: Any, future: _C.CUDAFuture[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # completed by hand, or by nobody any more
        try:
            work.wait()
            value = _result(work)
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(value)


def _result(work: Any) -> list[Any]:
    try:
        return list(work.result())
    except (RuntimeError, TypeError):  # it has none to show
        return []
