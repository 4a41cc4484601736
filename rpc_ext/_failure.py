"""Exceptions on their way from one worker to another."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import traceback
from typing import Any, NamedTuple

from cudafuture.errors import AuthenticationError, RemoteError, WorkerLostError

__all__ = ["Failure", "describe", "of_engine", "rebuild"]

_RAISED_ON = "raised on worker '"  # how the note begins that every worker adds which an exception comes to


class Failure(NamedTuple):
    """An exception as another worker can read it, whatever it can import."""

    module: str
    qualname: str
    message: str
    traceback: str
    worker: str
    notes: tuple[str, ...]
    pickled: bytes | None
    attributes: dict[str, bytes]  # pickled, those that can be


def describe(error: BaseException, worker: str) -> Failure:
    """Describe what was raised on `worker`, which is this one. Never raises."""
    cls = type(error)
    try:
        message = str(error)
    except Exception as e:
        message = f"({cls.__qualname__}.__str__ raised {e!r})"
    try:
        text = _traceback(error)
    except Exception:
        text = f"{cls.__qualname__}: {message}\n"
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(cls.__module__, cls.__qualname__, message, text, worker, _notes(error), pickled, _attributes(error))


def _traceback(error: BaseException) -> str:
    """Format an exception, without the notes of workers that it has come through: they would double with each."""
    formatted: Any = traceback.TracebackException.from_exception(error)
    if getattr(formatted, "__notes__", None):
        formatted.__notes__ = [note for note in _notes(error) if not note.startswith(_RAISED_ON)]
    return "".join(formatted.format())


def _notes(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(note for note in getattr(error, "__notes__", ()) if isinstance(note, str))
    except Exception:
        return ()


def _attributes(error: BaseException) -> dict[str, bytes]:
    attributes = {}
    for name, value in getattr(error, "__dict__", {}).items():
        if name != "__notes__":
            with contextlib.suppress(Exception):
                attributes[name] = pickle.dumps(value)
    return attributes


def rebuild(failure: Failure) -> BaseException:
    """Return the exception: of its own type where that can be imported here, else a RemoteError."""
    error = _unpickled(failure)
    if error is None:
        error = _of_imported_type(failure)
    if error is None:
        type_name = f"{failure.module}.{failure.qualname}"
        error = RemoteError(
            f"{type_name}: {failure.message}",
            type_name=type_name,
            remote_traceback=failure.traceback,
            worker=failure.worker,
        )
    noted: Any = error  # Python 3.10 has no add_note
    with contextlib.suppress(Exception):
        noted.__notes__ = [*failure.notes, f"{_RAISED_ON}{failure.worker}':\n{failure.traceback.rstrip()}"]
    for name, value in (("remote_traceback", failure.traceback), ("worker", failure.worker)):
        with contextlib.suppress(Exception):  # of a type that takes no attributes: the note says the same
            if not getattr(error, name, None):  # it may have one: what it is about, or where it was raised first
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
    if not same_type or not isinstance(error, Exception):  # SystemExit ends its own process, not ours
        return None
    with contextlib.suppress(Exception):
        if str(error) != failure.message:  # its constructor has made a message out of the message
            error.args = (failure.message,)
    return error


def _of_imported_type(failure: Failure) -> BaseException | None:
    """Make one whose constructor or pickling does not cooperate, without either: of its message and attributes."""
    try:
        found: Any = importlib.import_module(failure.module)
        for name in failure.qualname.split("."):
            found = getattr(found, name)
        if not issubclass(found, Exception):
            return None
        error: BaseException = found.__new__(found, failure.message)
        error.args = (failure.message,)
        for name, pickled in failure.attributes.items():
            with contextlib.suppress(Exception):
                setattr(error, name, pickle.loads(pickled))
        str(error)
        return error
    except Exception:
        return None


def of_torch(error: Exception, call: str, worker: str, timeout: float) -> Exception:
    """Return the error of a call that torch has made: its own, unless that says that the time was over."""
    return of_engine(1, "", call, worker, timeout) if "RPCErr:1:" in str(error) else error


def of_answer(error: BaseException, call: str, worker: str) -> BaseException:
    """Return the error of a call whose answer has come, and cannot be unpickled here."""
    what = f"the answer of worker '{worker}' to {call} cannot be read here"
    if not isinstance(error, Exception):
        return RemoteError(f"{what}: {error!r}", worker=worker)
    noted: Any = error
    with contextlib.suppress(Exception):
        noted.__notes__ = [*_notes(error), what]
    return error


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
