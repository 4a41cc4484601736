"""Reads and writes whose completions are collected, one after the other, by the threads that submit.

::

    submit() ──► pending ──► its I/O ends ──► settled ──► collected ──► callback
                                              │            └── in a thread that calls a method
                                              └── by the first of the library's callback thread and a waiting thread

Callbacks may submit too, so each callback nests collection deeper; from ``DEEPEST`` on, the outer calls collect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.compat.tensornvme._tensor_memory import TensorMemory
from cudafuture.executors import inline
from cudafuture.streams import pool_stream, use_streams

__all__ = ["DEEPEST", "Completions", "PendingOperation", "raise_first"]

DEEPEST = 32


class PendingOperation:
    """One read or write, from its submission to the end of its callback.

    Args:
        memory: of its tensors.
        callback: called once the operation has succeeded.
        reported: True: the submitting call raises the error; False: the next call that synchronizes raises it.
    """

    reads: bool

    def __init__(self, memory: list[TensorMemory], callback: Callable[[], object] | None, reported: bool) -> None:
        self.memory = memory
        self.callback = callback
        self.reported = reported
        self.thread = threading.get_ident()
        self.transfer: CUDAFuture[Any] = CUDAFuture.completed(None)  # until the operation begins
        self.future: CUDAFuture[Any] | None = None  # the user's, if the call returned one
        self.error: Exception | None = None
        self.settled = False
        self.ended = threading.Event()  # its callback has ended too
        self.settle_lock = threading.Lock()  # held while it is settled; taken before the lock of the completions

    def begin(self) -> CUDAFuture[Any]:
        """Begin the transfer, under the lock of the completions, or raise an error."""
        raise NotImplementedError

    def finish(self) -> None:
        """Finish the operation after its transfer has ended, or raise the error of the transfer."""
        raise NotImplementedError

    def value(self) -> Any:
        """Return the value for the future of the operation."""
        raise NotImplementedError


class Completions:
    """Pending operations, up to a limit, and the errors of failed ones.

    Args:
        most: limit of operations that are in flight at a time.
        lock: guards the fields below, and the state that operations change as they begin. No thread waits under it.

    ``failed`` has the errors that no call has raised yet, each with a flag that is True for reads.
    """

    def __init__(self, most: int, lock: threading.Lock) -> None:
        self._most = most
        self._lock = lock
        self._pending: dict[PendingOperation, None] = {}  # in the order in which they were submitted
        self._called: dict[PendingOperation, None] = {}  # their callbacks are running
        self.failed: list[tuple[bool, Exception]] = []
        self._local = threading.local()

    def submit(self, operation: PendingOperation) -> None:
        """Begin an operation when there is room, and when no pending operation uses the same storage."""
        while True:
            with self._lock:
                other = self._in_the_way(operation)
                if other is None:
                    operation.transfer = operation.begin()
                    self._pending[operation] = None
                    break
            self.end(other)
        operation.transfer.add_done_callback(lambda _: self.settle(operation), executor=inline)

    def _in_the_way(self, operation: PendingOperation) -> PendingOperation | None:
        storages = {id(m.storage) for m in operation.memory}
        mine = self._next(lambda other: any(id(m.storage) in storages for m in other.memory))
        if mine is not None:
            return mine
        on_disk = [other for other in self._pending if not other.settled]
        return on_disk[0] if len(on_disk) >= self._most else None

    def _next(self, wanted: Callable[[PendingOperation], bool]) -> PendingOperation | None:
        """Return the first matching operation that this thread can still advance."""
        deepest = self._depth >= DEEPEST
        return next((op for op in self._pending if wanted(op) and not (deepest and op.settled)), None)

    @property
    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def settle(self, operation: PendingOperation) -> None:
        """Finish an operation whose transfer has ended; only the first call does so."""
        with operation.settle_lock:
            if operation.settled:
                return
            error: Exception | None = None
            try:
                operation.finish()
            except Exception as e:
                error = e.with_traceback(None)  # its frames would keep the offloader
            operation.error = error
            try:
                error = _complete(operation) or error
            finally:  # last: a program that has the future's outcome may synchronize, which raises the error
                with self._lock:
                    operation.settled = True
                    if error is not None:
                        self._fail(operation, error)
                    elif operation.callback is None:
                        self._forget(operation)

    def _fail(self, operation: PendingOperation, error: Exception) -> None:
        operation.error = error
        self._forget(operation)
        if not operation.reported:
            self.failed.append((operation.reads, error))

    def _forget(self, operation: PendingOperation) -> None:
        self._pending.pop(operation, None)
        operation.ended.set()

    def end(self, operation: PendingOperation) -> None:
        """Wait for an operation, and call its callback, unless another thread does."""
        late: Exception | None = None
        try:
            operation.transfer.wait()
        except Exception as e:
            late = e
        self.settle(operation)
        with self._lock:
            if late is not None and operation.error is None:  # a device error, after the transfer completed
                self._fail(operation, late)
            if self._depth >= DEEPEST or operation not in self._pending:
                return
            del self._pending[operation]
            self._called[operation] = None
        self._call_back(operation)

    def _call_back(self, operation: PendingOperation) -> None:
        self._local.depth = self._depth + 1
        try:
            if operation.callback is not None:
                operation.callback()
        finally:
            self._local.depth -= 1
            with self._lock:
                del self._called[operation]
            operation.ended.set()

    def collect(self, last: PendingOperation) -> None:
        """End the operations that are done; if `last` has a callback, return when that has run.

        Another thread may run it.
        """
        here = threading.get_ident() if last.callback is not None else None
        while self._end_next(lambda op: op.transfer.done() or (op.thread == here and op.callback is not None)):
            pass
        if here is not None and self._depth < DEEPEST:
            last.ended.wait()

    def drain(self, *, reads: bool | None = None) -> None:
        """End all reads, all writes, or (None) both, and the operations that their callbacks submit.

        Raise the first error of an operation, or else of a callback. A note names the other errors.
        """
        raised: list[Exception] = []
        while True:
            try:
                if not (self._end_next(lambda op: reads in (None, op.reads)) or self._await_other_thread(reads)):
                    break
            except Exception as e:
                raised.append(e)
        raise_first([*self._take_errors(reads), *raised])

    def _await_other_thread(self, reads: bool | None) -> bool:
        """Wait for a callback that another thread is running, if there is one; return True if there was.

        Inside a callback, do not wait: the other callback may be waiting for this one.
        """
        if self._depth > 0:
            return False
        with self._lock:
            called = next((op for op in self._called if reads in (None, op.reads)), None)
        if called is not None:
            called.ended.wait()
        return called is not None

    def _end_next(self, wanted: Callable[[PendingOperation], bool]) -> bool:
        with self._lock:
            operation = self._next(wanted)
        if operation is not None:
            self.end(operation)
        return operation is not None

    def _take_errors(self, reads: bool | None) -> list[Exception]:
        with self._lock:
            taken = [failure for failure in self.failed if reads in (None, failure[0])]
            self.failed[:] = [failure for failure in self.failed if reads not in (None, failure[0])]
        return [error for _, error in taken]


def _complete(operation: PendingOperation) -> Exception | None:
    """Complete the future of a settled operation. Its callbacks run elsewhere, since the future has an executor.

    Return the error with which the future fails although the transfer succeeded, or None.
    """
    future = operation.future
    if future is None:
        return None
    if operation.error is not None:
        _C.fail(future, operation.error)
        return None
    try:
        with use_streams(*(pool_stream(device) for device in operation.transfer.devices)):
            operation.transfer.wait(non_blocking=True)
            future.set_result(operation.value())
    except BaseException as e:
        _C.fail(future, e.with_traceback(None))  # its frames would keep the offloader
        if not isinstance(e, Exception):
            raise
        return e
    return None


def raise_first(errors: list[Exception]) -> None:
    """Raise the first error, if there is one, with the others in a note."""
    if not errors:
        return
    first, *others = errors
    if others:
        noted: Any = first  # Python 3.10 has no add_note
        lines = "".join(f"\n  {type(e).__name__}: {e}" for e in others)
        noted.__notes__ = [*getattr(first, "__notes__", ()), f"{len(others)} more failed:{lines}"]
    raise first
