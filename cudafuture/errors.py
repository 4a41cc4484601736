"""Exceptions that the library raises.

The tree::

    CUDAFutureError (RuntimeError)
    |-- InvalidStateError                                    the future's state does not allow the call
    |-- OwnershipError                                       a tensor changed while an operation owned it
    |-- CancelledError      (concurrent.futures.CancelledError)
    |-- DeviceMismatchError (ValueError)                     a device outside the bounding set
    |-- TensorSearchError   (ValueError)                     a value too large to be searched for tensors
    |-- TensorError         (TypeError, ValueError)          a tensor that cannot be sent, stored or filled
    |-- CollectiveError                                      a collective failed: a dead peer, a timeout
    |-- RemoteError                                          an exception of another worker, of an unknown type
    |   `-- WorkerLostError (ConnectionError)                a worker that cannot be reached any more
    |-- CallsFailedError                                     some of the calls to several workers failed
    |-- AuthenticationError                                  a peer that did not prove its identity
    |-- AllFailedError                                       collect_any, when every future failed
    |-- StorageError        (OSError)                        the disk failed, or moved fewer bytes than asked
    |   |-- ChecksumError                                    bytes changed after they were written, or sent
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
    "OwnershipError",
    "QuotaError",
    "RemoteError",
    "ScheduleError",
    "StorageError",
    "SwapError",
    "TensorError",
    "TensorSearchError",
    "WorkerLostError",
]


class CUDAFutureError(RuntimeError):
    """Root of the tree. Catch it to catch every error of the library."""


class InvalidStateError(CUDAFutureError):
    """Error of a call that the future's state does not allow.

    Completed twice: let one producer own the future. Value read while pending: ``wait()``, or test ``done()`` first.
    Used after fork or at exit: create futures in the process that uses them, before its exit begins.
    """


class OwnershipError(CUDAFutureError):
    """Error of a tensor that the program changed while an operation owned it, found by CUDAFUTURE_DEBUG=ownership.

    The operation may have used the old bytes, the new ones, or some of each. Wait for its future, or for the future's
    ``released``, before you change the tensor, or pass a copy.
    """


class CancelledError(CUDAFutureError, concurrent.futures.CancelledError):
    """Error of a future that was cancelled before its producer completed it. Test ``cancelled()`` if you expect it."""


class DeviceMismatchError(CUDAFutureError, ValueError):
    """Error of a value, a stream or a set of devices that does not fit the future's bounding set.

    The message names both sets. Give the future all the devices that its values may use, or omit ``devices``.
    """


class TensorSearchError(CUDAFutureError, ValueError):
    """Error of a value that has more objects than the search for tensors visits.

    The future fails, because tensors that the search did not reach would have no event. Name the tensors that the value
    uses: ``set_result(value, tensors=[...])``. Then an unfinished search is no error.
    """


class TensorError(CUDAFutureError, TypeError, ValueError):
    """Error of a tensor that cannot be sent, stored or filled; the message names the reason.

    It has no memory of its own (nested, functional, inside of ``vmap``), its storage was freed or shrunk, its device
    has no target on the other worker, or its class cannot be pickled. Pass a plain tensor with its elements.
    """


class CollectiveError(CUDAFutureError):
    """Error of a collective: a peer died, timed out, or issued another collective. Create a new group.

    ``operation``, ``group`` (its name), ``rank`` (in the group), ``sequence`` (how many this rank had issued there
    before; -1: none was issued) and ``shapes`` (of the given tensors) identify it; ``__cause__`` is torch's own error.
    Survivors of a dead peer create a group of the survivors: ``ProcessGroup(group).new_group(ranks)``.
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
    """Exception that another worker raised and whose type cannot be imported here.

    ``type_name`` is the remote type, ``remote_traceback`` its traceback as text, ``worker`` the name of that worker.
    """

    def __init__(self, message: str, *, type_name: str = "", remote_traceback: str = "", worker: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.worker = worker


class WorkerLostError(RemoteError, ConnectionError):
    """Error of a lost connection to a worker: the worker or its network died. ``worker`` is its name.

    The caller cannot know whether the call ran there. Later calls to that worker fail too: restart the job.
    """

    def __init__(self, message: str, *, worker: str = "") -> None:
        RemoteError.__init__(self, message, worker=worker)

    def __str__(self) -> str:  # OSError has its own
        return RuntimeError.__str__(self)


class CallsFailedError(CUDAFutureError):
    """Error of calls to several workers of which some failed.

    ``failures`` holds the errors, ``results`` the values of the successful calls, both by worker name.
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
    """Error of a peer that did not prove that it knows the secret. Check that both sides have the same secret."""


class AllFailedError(CUDAFutureError):
    """Error of ``collect_any`` if every future failed. ``exceptions`` holds the errors, in the order of the futures."""

    def __init__(self, message: str, exceptions: Sequence[BaseException] = ()) -> None:
        super().__init__(message)
        self.exceptions: tuple[BaseException, ...] = tuple(exceptions)

    def __str__(self) -> str:
        parts = "".join(f"\n  [{i}] {type(e).__name__}: {e}" for i, e in enumerate(self.exceptions))
        return f"{super().__str__()}{parts}"


class StorageError(CUDAFutureError, OSError):
    """Error of a read or a write. ``path``, ``offset``, ``wanted`` and ``got`` (bytes) show where and by how much."""

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
        return type(self), self.args, {**self.__dict__, "errno": self.errno}  # errno is not in the __dict__


class ChecksumError(StorageError):
    """Error of bytes that changed: after they were written, or on their way to be written.

    The data is not returned, or not written. After a failed read, write the data again and check the disk.
    """


class QuotaError(StorageError):
    """Error of a write that exceeds the store's capacity; nothing changed. Delete keys or raise ``capacity``."""


class ArchiveError(CUDAFutureError, ValueError):
    """Error of an archive of images, or of one of its members; the message names both.

    ``path``, ``member`` and ``reason`` (a word such as "corrupt", see ``data.TgzImages``) are empty if the error
    comes from a DataLoader worker: torch passes only the message. Pass ``on_error="skip"`` to count such members.
    """

    def __init__(self, message: str, *, path: str = "", member: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.member = member
        self.reason = reason


class ScheduleError(CUDAFutureError, ValueError):
    """Error of a table that cannot run: a cell is missing or appears twice, a stage has two devices, or cells deadlock.

    The message names the cells, their devices and their positions. Change the table there.
    """


class SwapError(CUDAFutureError):
    """Error of optimizer state that cannot be read or written; the message names the parameter.

    ``parameter`` is the parameter, ``__cause__`` the error of the store. Each parameter has its old value with its old
    state, or its new value with its new state. Fix the cause, then call ``step()`` again.
    """

    def __init__(self, message: str, *, parameter: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class NotFoundError(CUDAFutureError, KeyError):
    """Error of a key that the store does not have."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return RuntimeError.__str__(self)
