"""Errors of a store service in their form for the client, with the key and the worker."""

from __future__ import annotations

import contextlib
from copy import copy as copy_of
from typing import Any

from cudafuture.errors import WorkerLostError

__all__ = ["named"]


def named(error: BaseException, what: str, worker: str) -> BaseException:
    """Return a copy of an error that names the key and the worker. Never raises."""
    if isinstance(error, WorkerLostError):
        return WorkerLostError(f"{what}: {error}", worker=worker)
    if type(error) is TimeoutError:
        return TimeoutError(f"{what}: {error}")
    with contextlib.suppress(Exception):  # other operations may share the error; some errors cannot be copied
        error = copy_of(error).with_traceback(error.__traceback__)
    with contextlib.suppress(Exception):  # of a class whose attributes cannot be set
        noted: Any = error  # Python 3.10 has no add_note
        noted.__notes__ = [*getattr(error, "__notes__", ()), f"{what} on worker {worker!r}"]
    return error
