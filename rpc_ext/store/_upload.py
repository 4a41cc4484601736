"""Large tensors that a client writes in parts: multipart writes of the store.

::

    first part ──► quota, begin_write ──► order and queue of the key ──► turn ─┐
    each part  ──► put ──────────────────────────────────► all are written ────┴──► commit ──► reply to the last part
"""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.store import DiskStore
from rpc_ext import _C, _timer
from rpc_ext.store._buffers import store_thread
from rpc_ext.store._errors import error_from
from rpc_ext.store._wire import PIECE, Put, parts_of

__all__ = ["Uploads"]

End = Callable[["BaseException | None"], None]
_REMEMBERED = 4096  # uploads that failed


class Uploads:
    """The uploads of one client, by sequence number.

    Args:
        store: store of the service.
        namespace: namespace of the client.
        order: request order of the client.
    """

    def __init__(self, store: DiskStore, namespace: _C.Namespace, order: _C.RequestOrder) -> None:
        self.store, self.namespace, self.order = store, namespace, order
        self._lock = threading.Lock()  # guards what follows; the namespace's is taken under it
        self._uploads: dict[int, _Upload] = {}
        self._over: collections.OrderedDict[int, BaseException] = collections.OrderedDict()  # the last that failed
        self._has_ended = False

    def put(self, entry: Put, data: torch.Tensor, end: End) -> None:
        """Write a part, and call `end` on the store thread: for the last part after the tensor was committed.

        Raises:
            ValueError: the part does not match the other parts, or is a duplicate.
            QuotaError: the tensor exceeds the quota.
            InvalidStateError: the session has ended.
            TimeoutError: the part has arrived after the deadline, or after a later change of its key.
            Exception: the error of an earlier part.
        """
        with self._lock:
            if self._has_ended:
                raise InvalidStateError("the session has ended")
            if (error := self._over.get(entry.sequence)) is not None:
                raise error
            upload = self._uploads.get(entry.sequence)
            is_new = upload is None
            if upload is None:
                try:
                    if (late := too_late(self.order, entry)) is not None:
                        raise late
                    upload = self._uploads[entry.sequence] = _Upload(self, entry)
                except Exception as e:
                    self._note_failure(entry.sequence, e.with_traceback(None))
        if upload is None:
            self.order.pass_on(entry.key, entry.sequence)
            raise self._over[entry.sequence]
        if is_new:
            try:
                upload.begin()
            except BaseException as e:  # the system has no more threads
                upload.fail(e)
                self.order.pass_on(entry.key, entry.sequence)
                raise
        upload.put(entry, data, end)

    def fail(self, sequence: int, error: BaseException) -> None:
        """Abort an upload unless it is done, and refuse its later parts."""
        with self._lock:
            upload = self._uploads.get(sequence)
            if upload is None:
                self._note_failure(sequence, error)
        if upload is not None:
            upload.fail(error)

    def end(self) -> None:
        """Abort all uploads. Called when the session has ended."""
        with self._lock:
            self._has_ended = True
            uploads = list(self._uploads.values())
        for upload in uploads:
            upload.fail(InvalidStateError("the session has ended"))

    def forget(self, sequence: int, error: BaseException | None) -> None:
        """Remove an upload that is done."""
        with self._lock:
            self._uploads.pop(sequence, None)
            if error is not None:
                self._note_failure(sequence, error)

    def _note_failure(self, sequence: int, error: BaseException) -> None:
        self._over[sequence] = error
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)


class _Upload:
    """The upload of one tensor, which begins with its first part.

    Raises:
        QuotaError, StorageError: the tensor exceeds the quota, or does not fit on the disk.
    """

    def __init__(self, uploads: Uploads, first: Put) -> None:
        namespace = uploads.namespace
        if (problem := namespace.take(first.nbytes)) is not None:
            raise error_from(problem)
        try:
            self._write = uploads.store.begin_write(namespace.prefix + first.key, first.dtype, first.shape)
        except BaseException:
            namespace.give_back(first.nbytes)
            raise
        self._uploads, self._first = uploads, first
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._left = {*range(parts_of(first.nbytes))}  # parts that are not written
        self._has_turn = self._is_over = False
        self._last: End | None = None  # callback of the last part
        self._error: BaseException | None = None  # reason of the abort

    def begin(self) -> None:
        """Enter the order of the key's operations, and schedule the deadline."""
        seconds = self._uploads.order.left(self._first.expires)
        if seconds < math.inf:
            _timer.schedule(self, time.perf_counter() + max(seconds, 0.0))
        if self._uploads.order.arrive(self._first.key, self._first.after, self._enter, self._uploads.namespace):
            self._enter()

    def _enter(self) -> None:
        key, sequence = self._first.key, self._first.sequence
        if not self._uploads.order.note_change(key, sequence, self._first.expires):
            self.fail(error_from(_C.superseded(key)))
        elif self._uploads.namespace.enter(key, True, self._take_turn):
            self._take_turn()
        self._uploads.order.pass_on(key, sequence)

    def _take_turn(self) -> None:
        with self._lock:
            self._has_turn = True
            is_over = self._is_over
        if is_over:
            self._uploads.namespace.leave(self._first.key)
        else:
            self._commit_if_whole()

    def put(self, entry: Put, data: torch.Tensor, end: End) -> None:
        """Write a part; see ``Uploads.put``."""
        first = self._first
        if (first.key, first.dtype, first.shape) != (entry.key, entry.dtype, entry.shape):
            raise ValueError(f"key {entry.key!r}: other parts of that tensor are of key {first.key!r}")
        if self._error is not None:
            raise self._error
        try:
            written = self._write.put(entry.part * PIECE, data, digest=entry.digest)
        except InvalidStateError as e:  # it has just been aborted
            raise (self._error or e) from None
        call(partial(self._part_ended, entry, end), lambda: written)

    def _part_ended(self, entry: Put, end: End, done: CUDAFuture[int]) -> None:
        if (error := error_of(done)) is not None:
            self.fail(error)
            end(self._error or error)
            return
        with self._lock:
            self._left.discard(entry.part)
            error = self._error  # an abort in the meantime leaves no error in the futures of the parts
            is_last = not self._left and not self._is_over
            if is_last:
                self._last = end
        if is_last:
            self._commit_if_whole()
        else:
            end(error)

    def _commit_if_whole(self) -> None:
        with self._lock:
            if not self._has_turn or self._last is None or self._is_over:
                return
            self._is_over = True
        _timer.cancel(self)
        if (error := too_late(self._uploads.order, self._first)) is not None:
            self._write.abort()
            self._settle(error)
        else:
            call(lambda done: self._settle(error_of(done)), self._write.commit)

    def _settle(self, error: BaseException | None) -> None:
        """End the upload, which has all of its parts and was at the head of the key's queue."""
        assert self._last is not None
        self._uploads.forget(self._first.sequence, error)
        self._uploads.namespace.settle(self._first.key, self._first.nbytes, error is None)
        try:
            self._last(error)
        finally:
            self._uploads.namespace.leave(self._first.key)

    def fail(self, error: BaseException) -> None:
        """Abort the upload unless it is done."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._error = True, error
            has_turn, last = self._has_turn, self._last
        _timer.cancel(self)
        self._write.abort()
        self._uploads.forget(self._first.sequence, error)
        self._uploads.namespace.give_back(self._first.nbytes)
        try:
            if last is not None:
                last(error)
        finally:
            if has_turn:
                self._uploads.namespace.leave(self._first.key)

    def look(self, _: float) -> None:
        """Abort the upload, which has expired. Called by the timer thread."""
        self.fail(TimeoutError(f"the write of key {self._first.key!r} was not complete before its deadline"))


def too_late(order: _C.RequestOrder, entry: Put) -> Exception | None:
    """Return the error of an operation that has expired; None: it has not."""
    if (seconds := order.late(entry.expires)) is None:
        return None
    return error_from(_C.too_late(seconds))


def call(done: Callable[[CUDAFuture[Any]], None], start: Callable[..., CUDAFuture[Any]]) -> None:
    """Call `start`, and call `done` with its future on the store thread; if `start` raises, with a failed future."""
    try:
        future = start()
    except Exception as e:
        future = CUDAFuture.failed(e.with_traceback(None))
    future.add_done_callback(done, executor=store_thread)


def error_of(future: CUDAFuture[Any]) -> BaseException | None:
    """Return the error of a future that is done, without its traceback, whose frames hold tensors."""
    error = future.exception()
    return error if error is None else error.with_traceback(None)
