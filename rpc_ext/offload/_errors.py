"""Errors of an offload service: their form in messages, and their form for the client, with its key and the worker.

A message carries an error as a problem: kind, message, path, errno, offset, wanted, got (``errors.StorageError``).
"""

from __future__ import annotations

import contextlib
import re
from copy import copy as copy_of
from typing import Any, NoReturn

from cudafuture.errors import (
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    StorageError,
    WorkerLostError,
)

__all__ = ["error_from", "for_client", "named", "no_such_key", "problem_of", "raise_problem"]

# By kind, from 1 on, in the order of the native half. Errors of other classes become the last one.
_CLASSES: tuple[type[Exception], ...] = (
    StorageError,
    ChecksumError,
    QuotaError,
    NotFoundError,
    InvalidStateError,
    TimeoutError,
    BlockingIOError,
    ValueError,
    MemoryError,
    RuntimeError,
)
# The store's message, which counts bytes of pieces; the client counts bytes of tensors.
_SIZE = re.compile(r"^no room for \d+ bytes( in one piece)?")


def problem_of(error: BaseException) -> tuple[Any, ...]:
    """Return the problem of an error."""
    for kind in (2, 3, 4, 1, 5, 6, 7, 8, 9):  # subclasses first
        if isinstance(error, _CLASSES[kind - 1]):
            break
    else:
        return 10, f"{type(error).__qualname__}: {error}", "", 0, 0, 0, 0
    text = str(error.args[0]) if error.args else str(error)
    if not isinstance(error, StorageError):
        return kind, text, "", 0, 0, 0, 0
    return kind, text, error.path, error.errno or 0, error.offset, error.wanted, error.got


def error_from(problem: tuple[Any, ...]) -> Exception:
    """Return the error of a problem."""
    kind, message, path, code, offset, wanted, got = problem
    found: type[Exception] = _CLASSES[kind - 1]
    if issubclass(found, StorageError):
        return found(message, errno=code or None, path=path, offset=offset, wanted=wanted, got=got)
    return found(message)


def raise_problem(problem: tuple[Any, ...]) -> NoReturn:
    """Raise the error of a problem."""
    raise error_from(problem)


def no_such_key(key: str) -> NotFoundError:
    """Return the error of a missing key."""
    return NotFoundError(f"there is no key '{key}'")


def for_client(key: str, error: BaseException, nbytes: int) -> BaseException:
    """Return a copy of a store's error for the client that writes `nbytes` under `key`, without a traceback."""
    told = copy_of(error)
    vars(told).pop("__notes__", None)  # they name futures of the store
    if isinstance(told, QuotaError):
        told.args = (_SIZE.sub(f"no room for {nbytes} bytes", str(error)),)
        told.wanted = nbytes
    return told


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
