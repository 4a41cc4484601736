"""Reads and writes whose completions are collected by the threads that submit: in turn, and with their callbacks.

::

    submit() ──► pending ──► its I/O ends ──► settled ──► collected ──► callback
                                              │            └── in a thread that calls in
                                              └── by whoever comes first: the library's callback thread, or who waits

Callbacks submit, too, so collecting goes deeper with each of them; at ``DEEPEST`` the rest is left to the calls above.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cudafuture._C import CUDAFuture
from cudafuture.storage._tensor_memory import TensorMemory
from cudafuture.streams import pool_stream, use_streams

__all__ = ["DEEPEST", "Completions", "Operation", "raise_first"]

DEEPEST = 32


class Operation:
    """A read or write, from its submission to the end of its callback.

    Args:
        memory: of its tensors.
        callback: to be called once it has succeeded.
        reported: whether its error goes to who has submitted it; else the next who synchronizes is told.
    """

    reads: bool

    def __init__(self, memory: list[TensorMemory], callback: Callable[[], object] | None, reported: bool) -> None:
        self.memory = memory
        self.callback = callback
        self.reported = reported
        self.thread = threading.get_ident()
        self.transfer: CUDAFuture[Any] = CUDAFuture.completed(None)  # until it has begun
        self.future: CUDAFuture[Any] | None = None  # of its user, who may have asked for one
        self.error: Exception | None = None
        self.settled = False
        self.ended = threading.Event()  # its callback, too
        self.turn = threading.Lock()  # held while it is settled; taken before the lock of the completions

    def begin(self) -> CUDAFuture[Any]:
        """Begin the transfer, under the lock of the completions; raise what keeps it from that."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what is to be done when the transfer has ended, or raise what it has failed with."""
        raise NotImplementedError

    def value(self) -> Any:
        """Return what the future of the operation gives."""
        raise NotImplementedError


class Completions:
    """What is pending, at most so much of it, and what has failed.

    Args:
        most: operations that may be with the disk at a time.
        lock: guards what is below, and what operations touch as they begin. Nothing is awaited under it.

    ``failed`` has the errors that nobody has been told of, and whether they are of reads.
    """

    def __init__(self, most: int, lock: threading.Lock) -> None:
        self._most = most
        self._lock = lock
        self._pending: dict[Operation, None] = {}  # in the order in which they were submitted
        self._called: dict[Operation, None] = {}  # whose callbacks are running
        self.failed: list[tuple[bool, Exception]] = []
        self._local = threading.local()

    def submit(self, operation: Operation) -> None:
        """Begin an operation when there is room, and when none that is pending has to do with the same storage."""
        while True:
            with self._lock:
                other = self._in_the_way(operation)
                if other is None:
                    operation.transfer = operation.begin()
                    self._pending[operation] = None
                    break
            self.end(other)
        operation.transfer.add_done_callback(lambda _: self.settle(operation))

    def _in_the_way(self, operation: Operation) -> Operation | None:
        storages = {id(m.storage) for m in operation.memory}
        mine = self._next(lambda other: any(id(m.storage) in storages for m in other.memory))
        if mine is not None:
            return mine
        on_disk = [other for other in self._pending if not other.settled]
        return on_disk[0] if len(on_disk) >= self._most else None

    def _next(self, wanted: Callable[[Operation], bool]) -> Operation | None:
        """Return the first such operation of which there is something left to do in this thread."""
        deepest = self._depth >= DEEPEST
        return next((op for op in self._pending if wanted(op) and not (deepest and op.settled)), None)

    @property
    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def settle(self, operation: Operation) -> None:
        """Do what is to be done when the transfer has ended; once, whoever comes."""
        with operation.turn:
            if operation.settled:
                return
            error: Exception | None = None
            try:
                operation.finish()
            except Exception as e:
                error = e.with_traceback(None)  # whose frames would keep the offloader
            with self._lock:
                operation.settled = True
                if error is not None:
                    self._fail(operation, error)
                elif operation.callback is None:
                    self._forget(operation)
            late = _complete(operation)
            if late is not None:
                with self._lock:
                    self._fail(operation, late)

    def _fail(self, operation: Operation, error: Exception) -> None:
        operation.error = error
        self._forget(operation)
        if not operation.reported:
            self.failed.append((operation.reads, error))

    def _forget(self, operation: Operation) -> None:
        self._pending.pop(operation, None)
        operation.ended.set()

    def end(self, operation: Operation) -> None:
        """Wait for an operation, and call its callback, unless another thread does."""
        late: Exception | None = None
        try:
            operation.transfer.wait()
        except Exception as e:
            late = e
        self.settle(operation)
        with self._lock:
            if late is not None and operation.error is None:  # of a device, after the transfer was complete
                self._fail(operation, late)
            if self._depth >= DEEPEST or operation not in self._pending:
                return
            del self._pending[operation]
            self._called[operation] = None
        self._call_back(operation)

    def _call_back(self, operation: Operation) -> None:
        self._local.depth = self._depth + 1
        try:
            if operation.callback is not None:
                operation.callback()
        finally:
            self._local.depth -= 1
            with self._lock:
                del self._called[operation]
            operation.ended.set()

    def collect(self, last: Operation) -> None:
        """End what is done; if the last one that was submitted has a callback, return when that has run.

        Another thread may be the one that runs it.
        """
        here = threading.get_ident() if last.callback is not None else None
        while self._end_next(lambda op: op.transfer.done() or (op.thread == here and op.callback is not None)):
            pass
        if here is not None and self._depth < DEEPEST:
            last.ended.wait()

    def drain(self, *, reads: bool | None = None) -> None:
        """End all reads, all writes, or (None) both, and what their callbacks submit meanwhile; raise the first error.

        That is the first one of an operation, if any, else of a callback. The others are named in a note.
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
        """Wait for a callback that another thread is running, if there is one.

        Not from within a callback: another one may be waiting for that.
        """
        if self._depth > 0:
            return False
        with self._lock:
            called = next((op for op in self._called if reads in (None, op.reads)), None)
        if called is not None:
            called.ended.wait()
        return called is not None

    def _end_next(self, wanted: Callable[[Operation], bool]) -> bool:
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


def _complete(operation: Operation) -> Exception | None:
    """Complete the future of an operation that is settled. Its callbacks do not run in here: it has an executor.

    Return the error with which the future fails although the transfer succeeded, if there is one.
    """
    future = operation.future
    if future is None:
        return None
    if operation.error is not None:
        future.set_exception(operation.error)
        return None
    try:
        with use_streams(*(pool_stream(device) for device in operation.transfer.devices)):
            operation.transfer.wait(non_blocking=True)
            future.set_result(operation.value())
    except BaseException as e:
        if not future.done():
            future.set_exception(e.with_traceback(None))  # whose frames would keep the offloader
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
