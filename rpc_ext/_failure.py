"""Exceptions in replies, and errors of the engine."""

from __future__ import annotations

import contextlib
import importlib
import operator
import pickle
import re
import traceback
from typing import Any, NamedTuple

from cudafuture.errors import AuthenticationError, RemoteError, WorkerLostError

__all__ = [
    "ENGINE",
    "REFUSED",
    "TIMEOUT",
    "RemoteFailure",
    "add_note",
    "describe",
    "of_answer",
    "of_engine",
    "of_torch",
    "rebuild",
    "without_frame",
]

# Kinds of errors, numbered as in the native module: an engine error, the timeout of a call, a refused reply.
ENGINE, TIMEOUT, REFUSED = 0, 1, 2

_REFUSED = "the message was refused: "  # prefix of the native module's message
# The last: TensorPipe's agent asserts so about a connection that broke between the call's registration and its
# sending; the break has failed the call already, in another thread.
_LOST = re.compile(
    r"\(this error originated at tensorpipe/[^()]*\)\s*$"
    r"|^[^\n]*[sS]hutting down[^\n]*$"
    r"|INTERNAL ASSERT FAILED at [^\n]*tensorpipe_agent[^\n]*Future marked complete from outside the thread pool"
)
_RAISED_ON = "raised on worker '"  # prefix of the note that each receiving worker adds to an exception


class RemoteFailure(NamedTuple):
    """An exception in a form that another worker can read even if it cannot import the type."""

    module: str
    qualname: str
    message: str
    traceback: str
    worker: str
    notes: tuple[str, ...]
    pickled: bytes | None  # the exception, or a tuple: type, arguments of the constructor, and `args` after it
    attributes: dict[str, bytes]  # pickled attributes that `pickled` does not have


def describe(error: BaseException, worker: str) -> RemoteFailure:
    """Describe an exception that was raised on this worker. Never raises."""
    cls = type(error)
    try:
        message = str(error)
    except Exception as e:
        message = f"({cls.__qualname__}.__str__ raised {e!r})"
    try:
        text = _traceback(error)
    except Exception:
        text = f"{cls.__qualname__}: {message}\n"
    pickled, attributes = _pickled(error)
    return RemoteFailure(cls.__module__, cls.__qualname__, message, text, worker, _notes(error), pickled, attributes)


def _traceback(error: BaseException) -> str:
    """Return an exception's traceback without the notes of earlier workers, which would double with each worker."""
    formatted: Any = traceback.TracebackException.from_exception(error)
    if getattr(formatted, "__notes__", None):
        formatted.__notes__ = [note for note in _notes(error) if not note.startswith(_RAISED_ON)]
    return "".join(formatted.format())


def _notes(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(note for note in getattr(error, "__notes__", ()) if isinstance(note, str))
    except Exception:
        return ()


def _pickled(error: BaseException) -> tuple[bytes | None, dict[str, bytes]]:
    """Pickle an exception and its attributes separately, because each may fail to pickle or to unpickle."""
    cls: Any = type(error)
    try:
        reduced: Any = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        made, args, *more = reduced
        state = more[0] if more else {}
        if made is cls and cls.__setstate__ is BaseException.__setstate__ and len(more) <= 1 and type(state) is dict:
            return pickle.dumps((cls, args, error.args)), _attributes(state)
        return pickle.dumps(error), {}  # the class defines its own pickling
    except Exception:
        return None, _attributes(getattr(error, "__dict__", {}))


def _attributes(of: dict[str, Any]) -> dict[str, bytes]:
    attributes = {}
    for name, value in of.items():
        if name != "__notes__":
            with contextlib.suppress(Exception):
                attributes[name] = pickle.dumps(value)
    return attributes


def rebuild(failure: RemoteFailure) -> BaseException:
    """Return the exception of a failure: of its type if that can be imported here, otherwise a RemoteError."""
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
        with contextlib.suppress(Exception):  # the type has no such attribute: the note has both
            if not getattr(error, name, None):  # keep the type's own attribute, or that of the first worker
                setattr(error, name, value)
    return error


def _unpickled(failure: RemoteFailure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickle.loads(failure.pickled)
        if type(error) is tuple:
            cls, args, args_then = error
            error = cls(*args)
            if len(error.args) != len(args_then) or any(map(operator.is_not, error.args, args_then)):
                error.args = args_then  # the constructor has formatted the message a second time
    except Exception:
        return None
    same_type = (type(error).__module__, type(error).__qualname__) == (failure.module, failure.qualname)
    if not same_type or not isinstance(error, Exception):  # SystemExit ends only its own process
        return None
    _set_attributes(error, failure)
    return error


def _set_attributes(error: BaseException, failure: RemoteFailure) -> None:
    for name, pickled in failure.attributes.items():
        with contextlib.suppress(Exception):
            setattr(error, name, pickle.loads(pickled))


def _of_imported_type(failure: RemoteFailure) -> BaseException | None:
    """Build an exception from its message and attributes, without its constructor, which may fail."""
    try:
        found: Any = importlib.import_module(failure.module)
        for name in failure.qualname.split("."):
            found = getattr(found, name)
        if not issubclass(found, Exception):
            return None
        error: BaseException = found.__new__(found, failure.message)
        error.args = (failure.message,)
        _set_attributes(error, failure)
        str(error)
        return error
    except Exception:
        return None


def without_frame(error: BaseException) -> BaseException:
    """Remove the catching frame from an error's traceback, and return the error.

    The frame would keep its callers and their local variables alive, which are tensors.
    """
    caught = error.__traceback__
    return error.with_traceback(None if caught is None else caught.tb_next)


def of_torch(error: Exception, call: str, worker: str) -> Exception:
    """Return the error of a call that torch sent without a timeout."""
    if type(error) is not RuntimeError:  # torch has rebuilt the exception of the callee
        return error
    message = str(error)
    kind = REFUSED if message.startswith("the reply was refused: ") else ENGINE
    return of_engine(kind, message, call, worker, 0)


def of_answer(error: BaseException, call: str, worker: str) -> BaseException:
    """Return the error of a call whose reply cannot be unpickled here."""
    what = f"the answer of worker '{worker}' to {call} cannot be read here"
    if not isinstance(error, Exception):
        return RemoteError(f"{what}: {error!r}", worker=worker)
    add_note(error, what)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless its class forbids that."""
    noted: Any = error  # Python 3.10 has no add_note
    with contextlib.suppress(Exception):
        noted.__notes__ = [*_notes(error), note]


def of_engine(kind: int, message: str, call: str, worker: str, timeout: float) -> Exception:
    """Return the error of a call that failed without a reply of the callee.

    Args:
        kind: ENGINE, TIMEOUT or REFUSED.
        message: message of the engine.
        call: name of the function.
        worker: name of the callee.
        timeout: timeout of the call in seconds.
    """
    if kind == TIMEOUT:
        return TimeoutError(f"{call} on worker '{worker}' has not answered within {timeout:g} s")
    if kind == REFUSED:
        return AuthenticationError(f"{call} on worker '{worker}': {message}")
    if message.startswith(_REFUSED):
        return AuthenticationError(f"worker '{worker}' has refused {call}: {message}")
    if _LOST.search(message):
        return WorkerLostError(f"worker '{worker}' was lost during {call}: {message}", worker=worker)
    return RemoteError(f"{call} on worker '{worker}' failed in the RPC engine: {message}", worker=worker)
