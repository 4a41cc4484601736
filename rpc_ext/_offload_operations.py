"""What a client of an offload service has under way: the futures that its user has, counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from cudafuture import CUDAFuture, executors, wait
from rpc_ext._histogram import Histogram
from rpc_ext._offload_flow import Flow
from rpc_ext._offload_statistics import RemoteOffloaderStatistics
from rpc_ext._turns import begun, outcome

__all__ = ["Operations"]

T = TypeVar("T")
Kind = Literal["write", "read", "delete"]
_THREAD = executors.callback_thread


@dataclass(eq=False)
class _Operation:
    kind: Kind
    since: int
    future: CUDAFuture[Any]  # the user's
    ended: CUDAFuture[BaseException | None]  # with what it has failed with


class Operations:
    """Those of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._pending: dict[_Operation, None] = {}
        self._bytes = {"write": 0, "read": 0, "delete": 0}
        self._failed = 0
        self._latencies = Histogram()

    def begin(
        self,
        kind: Kind,
        what: str,
        begin: Callable[[], CUDAFuture[T]],
        priority: int = 0,
        released: CUDAFuture[None] | None = None,
    ) -> CUDAFuture[T]:
        """Begin something, and return the user's future of it, which cannot be cancelled: the memory is in use."""
        future: CUDAFuture[T] = CUDAFuture(name=f"{kind} {what}", priority=priority, executor=_THREAD)
        future.set_running_or_notify_cancel()
        if released is not None:
            future.released = released
        operation = _Operation(kind, time.perf_counter_ns(), future, CUDAFuture(executor=executors.inline))
        with self._lock:
            self._pending[operation] = None
        done = begun(begin)
        done.add_done_callback(lambda done: self._ended(operation, done), executor=executors.inline)
        return future

    def _ended(self, operation: _Operation, done: CUDAFuture[Any]) -> None:
        value, error = outcome(done)
        try:
            nbytes = _bytes_of(value)
        except Exception as e:  # it is not the value that was asked for
            nbytes, error = 0, e
        with self._lock:
            self._latencies.add(time.perf_counter_ns() - operation.since)
            self._failed += error is not None
            self._bytes[operation.kind] += nbytes
        if error is None:
            operation.future.set_result(value)
        else:
            operation.future.set_exception(error)
        with self._lock:
            self._pending.pop(operation, None)
        operation.ended.set_result(error)

    def changes(self) -> list[CUDAFuture[BaseException | None]]:
        """Return the ends of pending writes and deletions, with what they have failed with."""
        with self._lock:
            return [operation.ended for operation in self._pending if operation.kind != "read"]

    def wait(self) -> None:
        """Wait until all have ended."""
        with self._lock:
            pending = [operation.ended for operation in self._pending]
        if pending:
            wait(pending)

    def statistics(self, flow: Flow) -> RemoteOffloaderStatistics:
        """Return what there is, and what has been done so far."""
        with self._lock:
            return RemoteOffloaderStatistics(
                pending=len(self._pending),
                under_way=flow.under_way,
                waiting=flow.waiting,
                window=flow.window,
                bytes_written=self._bytes["write"],
                bytes_read=self._bytes["read"],
                operations=self._latencies.total,
                failed=self._failed,
                latency_p50=self._latencies.quantile(0.5),
                latency_p99=self._latencies.quantile(0.99),
            )


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(tensor.nbytes for tensor in value) if isinstance(value, list) else value or 0
