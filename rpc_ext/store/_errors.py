"""Errors of a store service: their form in messages, and their form for the client, with its key and the worker.

A message carries an error as a problem: kind, message, path, errno, offset, wanted, got (``errors.StorageError``).
"""

from __future__ import annotations

import contextlib
from copy import copy as copy_of
from typing import Any

from cudafuture.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    StorageError,
    WorkerLostError,
)

__all__ = ["error_from", "named", "problem_of"]

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
    AuthenticationError,
    RuntimeError,
)


def problem_of(error: BaseException) -> tuple[Any, ...]:
    """Return the problem of an error."""
    found = next((each for each in type(error).__mro__ if each in _CLASSES[:-1]), None)
    if found is None:
        return len(_CLASSES), _encodable(f"{type(error).__qualname__}: {error}"), "", 0, 0, 0, 0
    kind = 1 + _CLASSES.index(found)
    text = _encodable(str(error.args[0]) if error.args else str(error))
    if not isinstance(error, StorageError):
        return kind, text, "", 0, 0, 0, 0
    return kind, text, _encodable(error.path), error.errno or 0, error.offset, error.wanted, error.got


def _encodable(text: str) -> str:
    """Return a text without surrogates, which stand for bytes of a path that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_from(problem: tuple[Any, ...]) -> Exception:
    """Return the error of a problem."""
    kind, message, path, code, offset, wanted, got = problem
    found: type[Exception] = _CLASSES[kind - 1]
    if issubclass(found, StorageError):
        return found(message, errno=code or None, path=path, offset=offset, wanted=wanted, got=got)
    return found(message)


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
