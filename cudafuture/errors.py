"""Every error that the library raises by itself.

The tree::

    CUDAFutureError (RuntimeError)
    |-- InvalidStateError                                    asked of a future in the wrong state
    |-- CancelledError      (concurrent.futures.CancelledError)
    |-- DeviceMismatchError (ValueError)                     a device outside the bounding set
    |-- TensorSearchError   (ValueError)                     a value too large to be searched for tensors
    |-- CollectiveError                                      a collective failed: a dead peer, a timeout
    |-- RemoteError                                          an exception of another worker, of an unknown type
    |   `-- WorkerLostError (ConnectionError)                a worker that cannot be reached any more
    |-- CallsFailedError                                     some of the calls to several workers failed
    |-- AuthenticationError                                  a peer that cannot prove who it is
    |-- AllFailedError                                       collect_any, when no future completed
    |-- StorageError        (OSError)                        the disk failed, or moved fewer bytes than asked
    |   |-- ChecksumError                                    bytes are not those that were written, or sent
    |   `-- QuotaError                                       the store is full
    |-- ArchiveError        (ValueError)                     an archive of images, or a member of it, cannot be used
    |-- SwapError                                            optimizer state that cannot be read or written
    |-- ScheduleError       (ValueError)                     a table of a pipeline that cannot run
    `-- NotFoundError       (KeyError)                       no such key in the store

Timeouts are the builtin ``TimeoutError``, wrong arguments are ``TypeError`` and ``ValueError``, and an exception
raised by a user's function comes out of ``wait()`` as the object it was.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AllFailedError",
    "ArchiveError",
    "AuthenticationError",
    "CUDAFutureError",
    "CallsFailedError",
    "CancelledError",
    "ChecksumError",
    "CollectiveError",
    "DeviceMismatchError",
    "InvalidStateError",
    "NotFoundError",
    "QuotaError",
    "RemoteError",
    "ScheduleError",
    "StorageError",
    "SwapError",
    "TensorSearchError",
    "WorkerLostError",
]


class CUDAFutureError(RuntimeError):
    """The root of the tree. Catch it to catch whatever the library itself has to say."""


class InvalidStateError(CUDAFutureError):
    """The future is not in a state that allows the call.

    Completed twice: let one producer own the future. Value asked while pending: ``wait()``, or test ``done()`` first.
    Used after fork or at exit: make futures in the process, and in the part of its life, that uses them.
    """


class CancelledError(CUDAFutureError, concurrent.futures.CancelledError):
    """The future was cancelled before its producer completed it. Ask ``cancelled()`` first where that is expected."""


class DeviceMismatchError(CUDAFutureError, ValueError):
    """A value, a stream or a set of devices does not fit the future's bounding set.

    The message names both sets. Give the future all the devices that its values may use, or leave ``devices`` out.
    """


class TensorSearchError(CUDAFutureError, ValueError):
    """A value has more objects than the search for its tensors visits.

    The future fails, because tensors that the search did not reach would have no event. Name the tensors that the value
    uses: ``set_result(value, tensors=[...])``. Then a search that cannot finish is no error.
    """


class CollectiveError(CUDAFutureError):
    """A collective failed: a peer died, timed out, or issued something else. The group should be made anew.

    ``operation``, ``group`` (its name), ``rank`` (in the group), ``sequence`` (how many this rank had issued there
    before; -1: none was issued) and ``shapes`` (of the tensors given) say which; ``__cause__`` is torch's own error.
    Survivors of a dead peer make a new group of themselves: ``ProcessGroup(group).new_group(ranks)``.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        group: str = "",
        rank: int = -1,
        sequence: int = -1,
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.group = group
        self.rank = rank
        self.sequence = sequence
        self.shapes = shapes


class RemoteError(CUDAFutureError):
    """An exception raised on another worker whose type cannot be imported here.

    ``type_name`` is the remote type, ``remote_traceback`` its traceback as text, ``worker`` who raised it.
    """

    def __init__(self, message: str, *, type_name: str = "", remote_traceback: str = "", worker: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.worker = worker


class WorkerLostError(RemoteError, ConnectionError):
    """The connection to a worker broke, or there is none: it died, or its network did. ``worker`` says who.

    Whether the call ran there is not known. Calls to the same worker go on failing: start the job anew.
    """

    def __init__(self, message: str, *, worker: str = "") -> None:
        RemoteError.__init__(self, message, worker=worker)

    def __str__(self) -> str:  # OSError has its own
        return RuntimeError.__str__(self)


class CallsFailedError(CUDAFutureError):
    """Calls to several workers were made, and some failed.

    ``failures`` holds the errors and ``results`` the values of the others, both by the worker's name.
    """

    def __init__(
        self,
        message: str,
        failures: Mapping[str, BaseException] | None = None,
        results: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})
        self.results = dict(results or {})

    def __str__(self) -> str:
        parts = "".join(f"\n  {worker}: {type(e).__name__}: {e}" for worker, e in self.failures.items())
        return f"{super().__str__()}{parts}"


class AuthenticationError(CUDAFutureError):
    """A peer did not prove that it knows the secret. Check that both sides were given the same one."""


class AllFailedError(CUDAFutureError):
    """Every future given to ``collect_any`` failed. ``exceptions`` holds their errors, in the order of the futures."""

    def __init__(self, message: str, exceptions: Sequence[BaseException] = ()) -> None:
        super().__init__(message)
        self.exceptions: tuple[BaseException, ...] = tuple(exceptions)

    def __str__(self) -> str:
        parts = "".join(f"\n  [{i}] {type(e).__name__}: {e}" for i, e in enumerate(self.exceptions))
        return f"{super().__str__()}{parts}"


class StorageError(CUDAFutureError, OSError):
    """A read or a write failed. ``path``, ``offset``, ``wanted`` and ``got`` (bytes) say where and by how much."""

    def __init__(
        self, message: str, *, errno: int | None = None, path: str = "", offset: int = 0, wanted: int = 0, got: int = 0
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**self.__dict__, "errno": self.errno}  # OSError keeps that beside


class ChecksumError(StorageError):
    """Bytes have changed: what was read is not what was written, or what came to be written is not what was meant.

    The data is not returned, or not written. In the first case write it again, and look at the disk.
    """


class QuotaError(StorageError):
    """The store's capacity does not hold the write; nothing was changed. Delete keys or raise ``capacity``."""


class ArchiveError(CUDAFutureError, ValueError):
    """An archive of images, or a member of it, cannot be used; the message names both.

    ``path``, ``member`` and ``reason`` (a word such as "corrupt", see ``data.TgzImages``) are empty where the error
    comes from a DataLoader worker: torch passes on the message only. Pass ``on_error="skip"`` to count such members.
    """

    def __init__(self, message: str, *, path: str = "", member: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.member = member
        self.reason = reason


class ScheduleError(CUDAFutureError, ValueError):
    """A table that cannot run: a cell is missing or stands twice, a stage lies on two devices, or cells deadlock.

    The message names the cells, their devices and their positions. Change the table there.
    """


class SwapError(CUDAFutureError):
    """The optimizer state of a parameter cannot be read or written; the message names the parameter.

    ``parameter`` is the parameter, ``__cause__`` the error of the store. Each parameter has its old value with its old
    state, or its new value with its new state. Mend the cause, and call ``step()`` again.
    """

    def __init__(self, message: str, *, parameter: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class NotFoundError(CUDAFutureError, KeyError):
    """The store has no such key."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return RuntimeError.__str__(self)
