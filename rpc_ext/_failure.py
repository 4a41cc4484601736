"""Exceptions on their way from one worker to another."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import traceback
from typing import Any, NamedTuple

from cudafuture.errors import AuthenticationError, RemoteError, WorkerLostError

__all__ = ["Failure", "describe", "of_engine", "rebuild"]


class Failure(NamedTuple):
    """An exception as another worker can read it, whatever it can import."""

    module: str
    qualname: str
    message: str
    traceback: str
    worker: str
    pickled: bytes | None


def describe(error: BaseException, worker: str) -> Failure:
    """Describe what was raised on `worker`, which is this one. Never raises."""
    cls = type(error)
    try:
        message = str(error)
    except Exception as e:
        message = f"({cls.__qualname__}.__str__ raised {e!r})"
    try:
        text = "".join(traceback.format_exception(cls, error, error.__traceback__))
    except Exception:
        text = f"{cls.__qualname__}: {message}\n"
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(cls.__module__, cls.__qualname__, message, text, worker, pickled)


def rebuild(failure: Failure) -> BaseException:
    """Return the exception: of its own type where that can be imported here, else a RemoteError."""
    error = _unpickled(failure) or _of_imported_type(failure)
    if error is None:
        type_name = f"{failure.module}.{failure.qualname}"
        error = RemoteError(
            f"{type_name}: {failure.message}",
            type_name=type_name,
            remote_traceback=failure.traceback,
            worker=failure.worker,
        )
    _add_note(error, f"raised on worker '{failure.worker}':\n{failure.traceback.rstrip()}")
    for name, value in (("remote_traceback", failure.traceback), ("worker", failure.worker)):
        with contextlib.suppress(Exception):  # of a type that takes no attributes: the note says the same
            setattr(error, name, value)
    return error


def _unpickled(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickle.loads(failure.pickled)
    except Exception:
        return None
    same_type = (type(error).__module__, type(error).__qualname__) == (failure.module, failure.qualname)
    return error if same_type and isinstance(error, Exception) else None  # SystemExit ends its own process, not ours


def _of_imported_type(failure: Failure) -> BaseException | None:
    """Make one whose constructor or pickling does not cooperate, without either: its message is all that it has."""
    try:
        found: Any = importlib.import_module(failure.module)
        for name in failure.qualname.split("."):
            found = getattr(found, name)
        if not issubclass(found, Exception):
            return None
        error: BaseException = found.__new__(found, failure.message)
        error.args = (failure.message,)
        str(error)
        return error
    except Exception:
        return None


def _add_note(error: Any, note: str) -> None:
    with contextlib.suppress(Exception):
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # Python 3.10 has no add_note


def of_engine(kind: int, message: str, call: str, worker: str, timeout: float) -> Exception:
    """Return the error of a call that failed before the callee could say anything.

    Args:
        kind: as the native module has it: 1 timeout, 2 a reply that was refused, 0 anything else.
        message: torch's.
        call: what was called, for the message.
        worker: on whom.
        timeout: seconds that the call had.
    """
    if kind == 1:
        return TimeoutError(f"{call} on worker '{worker}' has not answered within {timeout:g} s")
    if kind == 2:
        return AuthenticationError(f"{call} on worker '{worker}': {message}")
    if "was refused" in message:
        return AuthenticationError(f"worker '{worker}' has refused {call}: {message}")
    if "originated at tensorpipe" in message or "hutting down" in message:
        return WorkerLostError(f"worker '{worker}' was lost during {call}: {message}", worker=worker)
    return RemoteError(f"{call} on worker '{worker}' failed in the RPC engine: {message}", worker=worker)
