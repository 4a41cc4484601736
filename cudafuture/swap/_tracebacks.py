"""Release of memory that tracebacks hold: the local variables of frames that have ended."""

from __future__ import annotations

import traceback
from typing import Any

from cudafuture._C import CUDAFuture

__all__ = ["clear_tracebacks", "error_of"]


def error_of(future: CUDAFuture[Any]) -> BaseException | None:
    """Wait for a future, and return its error, cleared of references to buffers."""
    error = future.exception()
    clear_tracebacks(error)
    return error


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the local variables of the ended frames of an error, its causes and its contexts.

    A program that keeps an exception would otherwise keep the buffers that those variables refer to, and the next read
    would wait for their memory.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__]
