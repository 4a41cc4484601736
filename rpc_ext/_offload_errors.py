"""What says of an error which key and worker it is of."""

from __future__ import annotations

import contextlib
from copy import copy as copy_of
from typing import Any

from cudafuture.errors import WorkerLostError

__all__ = ["named"]


def named(error: BaseException, what: str, worker: str) -> BaseException:
    """Return an error that says of which key and worker it is. Never raises."""
    if isinstance(error, WorkerLostError):
        return WorkerLostError(f"{what}: {error}", worker=worker)
    if type(error) is TimeoutError:
        return TimeoutError(f"{what}: {error}")
    with contextlib.suppress(Exception):  # others may have failed with the same one; but some cannot be copied
        error = copy_of(error).with_traceback(error.__traceback__)
    with contextlib.suppress(Exception):  # of a class whose attributes cannot be set
        noted: Any = error  # Python 3.10 has no add_note
        noted.__notes__ = [*getattr(error, "__notes__", ()), f"{what} on worker {worker!r}"]
    return error
