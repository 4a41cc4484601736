"""Errors of an offload in the words of its client: with its key, and the worker."""

from __future__ import annotations

import contextlib
import re
from copy import copy as copy_of
from typing import Any

from cudafuture.errors import ChecksumError, QuotaError, WorkerLostError

__all__ = ["for_client", "named"]

# In the words of a store, which has names of its own for the client's keys, and knows pieces of tensors.
_SIZE = re.compile(r"^no room for \d+ bytes( in one piece)?")
_KEY = re.compile(r"^key '.*'(?=: its \d+ bytes)", re.DOTALL)


def for_client(key: str, error: BaseException, nbytes: int | None = None) -> BaseException:
    """Return a copy of a store's error with the client's key, and the size of its tensor where that is given.

    The copy has no traceback. The frames of a traceback have the reply among their local variables, so an error in a
    reply would keep the buffer of the reply until the next garbage collection.
    """
    told = copy_of(error)
    vars(told).pop("__notes__", None)  # they name futures of the store
    if isinstance(told, QuotaError) and nbytes is not None:
        told.args = (_SIZE.sub(f"no room for {nbytes} bytes", str(error)),)
        told.wanted = nbytes
    elif isinstance(told, ChecksumError):
        told.args = (_KEY.sub(lambda _: f"key {key!r}", str(error)),)
    return told


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
