"""The operations of one client: their futures and their outcomes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from cudafuture import CUDAFuture, executors, fail
from rpc_ext import _C
from rpc_ext._staging import streams_after
from rpc_ext.store._errors import named
from rpc_ext.store._statistics import RemoteStoreStatistics
from rpc_ext.store._target import filled

__all__ = ["Operations", "StoreOperation"]

Kind = Literal["write", "read", "delete"]


class StoreOperation:
    """One call of the user. It is done when all of its keys are, with the error of the first key that failed.

    Args:
        operations: operations of the client.
        kind: kind of the call.
        keys: keys, with one request each.
        nbytes: size of a write.
        priority: priority of the future.
        released: future of a write; see ``CUDAFuture.released``.
        written: tensor that receives True for each key that was written.
        gives_list: True if the value of a read is a list.
        digests: tensor that receives the digests of a read.
    """

    def __init__(
        self,
        operations: Operations,
        kind: Kind,
        keys: Sequence[str],
        *,
        nbytes: int = 0,
        priority: int = 0,
        released: CUDAFuture[None] | None = None,
        written: torch.Tensor | None = None,
        gives_list: bool = False,
        digests: torch.Tensor | None = None,
    ) -> None:
        self._operations, self.kind, self._keys, self._nbytes = operations, kind, keys, nbytes
        self._priority, self._written, self._gives_list, self._digests = priority, written, gives_list, digests
        name = keys[0] if len(keys) == 1 else f"{len(keys)} keys"
        self.future: CUDAFuture[Any] = CUDAFuture(
            name=f"{kind} {name}", priority=priority, executor=executors.callback_thread
        )
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled while its memory is in use
        if released is not None:
            self.future.released = released
        self.since = time.perf_counter_ns()
        self._on_devices: list[CUDAFuture[Any]] = []
        self.native = _C.StoreOperation(len(keys), kind == "read", self._complete, self._join)
        operations.begin(self)

    def _join(self, index: int, future: CUDAFuture[torch.Tensor]) -> None:
        """Wait for a tensor on its way to a device, whose outcome is that of the key."""
        self._on_devices.append(future)
        future.add_done_callback(lambda done: self._end_on_device(index, done), executor=executors.inline)

    def _end_on_device(self, index: int, done: CUDAFuture[torch.Tensor]) -> None:
        try:
            value = done.value()
        except BaseException as e:
            self.native.end(index, None, e)
        else:
            self.native.end(index, value, None)

    def _complete(
        self, values: list[Any], digests: list[int], written: bytes, error: BaseException | None, failed: int
    ) -> None:
        """Complete the future; see ``_C.StoreOperation``."""
        nbytes = 0
        value: Any = None
        try:
            if error is not None:
                error = named(error, f"{self.kind} {self._keys[failed]}", self._operations.worker)
            if self._written is not None:
                filled(self._written, torch.frombuffer(bytearray(written), dtype=torch.bool))
            if error is None and self.kind == "write":
                value = nbytes = self._nbytes
            elif error is None and self.kind == "read":
                if self._digests is not None:
                    filled(self._digests, torch.tensor(digests, dtype=torch.uint64, device="cpu"))
                value, nbytes = values if self._gives_list else values[0], sum(tensor.nbytes for tensor in values)
        except Exception as e:  # for example, the caller has resized the tensor for the digests
            error = error or e
        self._operations.count(self, nbytes, error)
        if error is not None:
            fail(self.future, error)
        elif self._on_devices:
            with streams_after(self._on_devices, self._priority):
                self.future.set_result(value)
        else:
            self.future.set_result(value)
        self._operations.end(self, error)


class _Flush:
    """A future that is done when a number of operations are, with the error of the first that failed."""

    def __init__(self, count: int) -> None:
        self.future: CUDAFuture[None] = CUDAFuture(name="flush", executor=executors.callback_thread)
        self.left = count
        self.error: BaseException | None = None

    def complete(self) -> None:
        if self.error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self.error)


class Operations:
    """The pending operations of one client, and the counts of those that are done."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._pending: dict[StoreOperation, list[_Flush]] = {}
        self._bytes = {"write": 0, "read": 0, "delete": 0}
        self._failed = 0
        self._latencies = _C.Histogram()

    def begin(self, operation: StoreOperation) -> None:
        """Count an operation as pending."""
        with self._lock:
            self._pending[operation] = []

    def count(self, operation: StoreOperation, nbytes: int, error: BaseException | None) -> None:
        """Count the outcome of an operation, before its future is done."""
        with self._lock:
            self._latencies.add(time.perf_counter_ns() - operation.since)
            self._failed += error is not None
            self._bytes[operation.kind] += nbytes

    def end(self, operation: StoreOperation, error: BaseException | None) -> None:
        """Count an operation as done."""
        ready = []
        with self._lock:
            for flush in self._pending.pop(operation):
                flush.error = flush.error or error
                flush.left -= 1
                if not flush.left:
                    ready.append(flush)
        for flush in ready:
            flush.complete()

    def flush(self, *, with_reads: bool) -> CUDAFuture[None]:
        """Return a future that is done when the pending operations are: all, or only writes and deletions."""
        with self._lock:
            waited = [flushes for each, flushes in self._pending.items() if with_reads or each.kind != "read"]
            flush = _Flush(len(waited))
            for flushes in waited:
                flushes.append(flush)
        if not waited:
            flush.complete()
        return flush.future

    def statistics(self, in_flight: int, waiting: int, window: int, repeated: int) -> RemoteStoreStatistics:
        """Return the statistics, including those of the client's window."""
        with self._lock:
            return RemoteStoreStatistics(
                pending=len(self._pending),
                in_flight=in_flight,
                waiting=waiting,
                window=window,
                repeated=repeated,
                bytes_written=self._bytes["write"],
                bytes_read=self._bytes["read"],
                operations=self._latencies.total,
                failed=self._failed,
                latency_p50=self._latencies.quantile(0.5),
                latency_p99=self._latencies.quantile(0.99),
            )
