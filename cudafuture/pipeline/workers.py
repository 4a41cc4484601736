"""Threads of devices that run tasks and return futures.

::

    submit() ──► job with the caller's settings ──► waiting tasks of a device ──► thread ──► compute, finalize
                                                       │ at most `queue`                          └──► future
                                                       └── lower priority first, then the order of submission
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeVar, cast

import torch

from cudafuture import _C, openmetrics
from cudafuture._arguments import expect_callable, listed, parse_device
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.pipeline._worker_thread import Deadlines, WorkerTask, WorkerThread, is_inside, table
from cudafuture.pipeline.stream import AbstractStream, DeviceLike, current_stream, normalize_device
from cudafuture.statistics import StatisticsBase

__all__ = ["Workers", "WorkersStatistics"]

T = TypeVar("T")

_PATIENCE = 2.0  # seconds that the exit of the process waits for running tasks
_all: weakref.WeakSet[Workers] = weakref.WeakSet()


@dataclass(frozen=True, repr=False)
class WorkersStatistics(StatisticsBase):
    """Counters of ``Workers`` since they were created."""

    GAUGES: ClassVar = frozenset({"waiting", "running"})
    SECONDS: ClassVar = frozenset({"busy"})

    submitted: int
    completed: int
    """Tasks that returned."""
    failed: int
    """Tasks that raised."""
    cancelled: int
    """Tasks that never began: cancelled, or overdue before they could begin."""
    waiting: int
    running: int
    busy: Mapping[DeviceLike, float]
    """Seconds that each device's thread ran tasks that have ended."""


class Workers:
    """Persistent threads, one for each device, that run functions with the settings of the submitting program.

    Args:
        devices: "cpu:0" is "cpu"; an accelerator without a number is the current one. A device has one thread.
        queue: limit of tasks that wait for one device; 0: no limit. ``submit`` blocks while it is reached.
        name: of the threads.

    A task runs with the grad mode, inference mode, autocast and contextvars of the caller of ``submit``. Every
    exception fails its future, also SystemExit and KeyboardInterrupt, and the thread continues. As a context manager,
    the block ends with ``close()``; if it ends with an error, waiting tasks are cancelled first.

    Tasks may submit to other devices, and wait for those: such a ``submit`` never blocks on a full queue. A task for
    the caller's own device runs at once, before ``submit`` returns, as it could not begin while its caller waits. A
    task that a callback of a future submits in a worker's thread is queued. Tasks of two devices that wait for further
    tasks of each other are in a deadlock, which only a `timeout` ends.

    >>> with Workers(["cpu"]) as workers:
    ...     workers.submit("cpu", lambda: torch.ones(2) + 1).wait()
    tensor([2., 2.])
    """

    _records = True  # an event on the stream of each task

    def __init__(self, devices: Iterable[DeviceLike | str | int], *, queue: int = 0, name: str = "worker") -> None:
        if queue < 0:
            raise ValueError(f"queue is the most tasks that wait for a device, or 0 for any number, not {queue}")
        self._workers: dict[object, WorkerThread] = {}  # by the device, and by its name
        self._deadlines = Deadlines(self._workers)
        self._pid = os.getpid()
        try:
            for given in listed("devices", devices, "devices"):
                device = _device_of(given)
                if device not in self._workers:
                    self._workers[device] = worker = WorkerThread(device, queue, name, self._deadlines)
                    worker.thread.start()
        except BaseException:
            self.close()
            raise
        if not self._workers:
            raise ValueError("Workers need at least one device")
        self._devices = tuple(cast(DeviceLike, device) for device in self._workers)
        self._workers.update({str(device): self._workers[device] for device in self._devices})
        openmetrics.add(self, "workers")
        _all.add(self)

    def __repr__(self) -> str:
        counts = self.statistics()
        devices = ", ".join(map(str, self._devices))
        return f"<Workers for {devices}: {counts.running} tasks running, {counts.waiting} waiting>"

    @property
    def devices(self) -> tuple[DeviceLike, ...]:
        """The devices, each with its number and once."""
        return self._devices

    def submit(
        self,
        device: DeviceLike | str | int,
        compute: Callable[[], T],
        finalize: Callable[[T], object] | None = None,
        stream: AbstractStream | None = None,
        priority: int = 0,
        *,
        name: str = "",
        timeout: float | None = None,
    ) -> CUDAFuture[T]:
        """Run ``compute()`` in the device's thread and return a future of its result.

        Args:
            device: current in the task.
            compute: returns the value.
            finalize: called with the value after `compute`, with the same thread, stream and settings; the future
                completes after it. An exception of it fails the future.
            stream: current in the task; the future's events are recorded on it. None: the caller's current stream of
                the device, so that the caller's enqueued work precedes the task. For another stream, the caller orders
                it after its work, and calls ``record_stream``.
            priority: among waiting tasks; lower comes first, equal ones in the order of submission.
            name: in the table and in errors; "": that of `compute`.
            timeout: seconds from now after which the future fails, unless the task has ended; the task continues.

        Cancelling the future before the task begins prevents it from running; after that, ``cancel()`` returns False.

        Raises:
            InvalidStateError: the workers were closed, or belong to the process that this one was forked from.
            CUDAFutureError: the thread died.
            TypeError: `compute` is not callable; `priority` is not an int.
            ValueError: the device has no worker; `stream` is on another device; `timeout` is not positive.

        The future fails with TimeoutError, whose text has the table of all tasks, when `timeout` has passed.

        >>> with Workers(["cpu"]) as workers:
        ...     workers.submit("cpu", lambda: 6 * 7, print).wait()
        42
        42
        """
        expect_callable("compute", compute, "compute()")
        worker = self._workers.get(device) or self._find(device)
        worker.wake()  # now, because waking a core takes longer than creating the task
        if worker.is_accelerator:
            if stream is None:
                stream = current_stream(worker.device)
            elif not isinstance(stream, torch.Stream) or stream.device != worker.device:
                raise ValueError(f"the stream of a task on {worker.device} must be on that device, not {stream}")
        elif isinstance(stream, torch.Stream):
            raise ValueError(f"a task on {worker.device} cannot use a stream of {stream.device}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is a positive number of seconds, not {timeout}")
        if type(priority) is not int:
            if not isinstance(priority, int) or isinstance(priority, bool):
                raise TypeError(f"priority is an int, not {priority!r}")
            priority = int(priority)
        task = WorkerTask(
            compute,
            finalize,
            cast(torch.Stream, stream) if worker.is_accelerator else None,
            name or getattr(compute, "__qualname__", None) or type(compute).__qualname__,
            self._records,
        )
        run: Any = task.run
        executor: Any = task
        task.future = future = _C.submit(run, executor, 0, task.name)
        _C.register(future, worker.place)
        try:
            if timeout is not None:
                self._deadlines.add(task, timeout, worker.device)
            worker.put(task, priority)
        except BaseException:  # also Ctrl-C, when the task may be queued already
            worker.withdraw(task)
            raise
        return future

    def wait(self, timeout: float | None = None) -> None:
        """Block until no task waits or runs; raise TimeoutError, with the table, after `timeout` seconds.

        >>> with Workers(["cpu"]) as workers:
        ...     future = workers.submit("cpu", lambda: 1)
        ...     workers.wait()
        ...     future.done()
        True
        """
        _C.refuse_after_fork()
        self._refuse_inside("wait()")
        deadline = None if timeout is None else time.monotonic() + timeout
        while not all(worker.wait_until_idle(deadline) for worker in self._each()):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"tasks did not end within {timeout:g} s:\n{self.table()}")

    def cancel_waiting(self, error: BaseException | None = None) -> int:
        """Cancel the tasks that have not begun, or fail them with `error`. Return their number.

        >>> with Workers(["cpu"]) as workers:
        ...     workers.cancel_waiting()
        0
        """
        _C.refuse_after_fork()
        return sum(worker.cancel_waiting(error) for worker in self._each())

    def close(self, timeout: float | None = None) -> None:
        """Refuse further tasks, run the waiting ones, and join the threads. A second call does nothing.

        In a process that was forked from the owner's, nothing happens.

        Raises:
            TimeoutError: after `timeout` seconds, with the table; another call continues to wait.
            InvalidStateError: called inside a task, which would wait for itself.

        >>> Workers(["cpu"]).close()
        """
        if os.getpid() != self._pid:
            return
        self._refuse_inside("close()")
        self._end()
        for worker in self._each():
            worker.wake_sleepers()
        deadline = None if timeout is None else time.monotonic() + timeout
        self._join([worker.thread for worker in self._each()], deadline, timeout)
        self._join(self._deadlines.threads, deadline, timeout)  # now complete: a task has ended or was overdue

    def is_inside(self) -> bool:
        """Return whether the calling thread is a worker: in a task, or in a callback of a future that it completed.

        ``wait()`` and ``close()`` raise there, as they would wait for themselves.

        >>> with Workers(["cpu"]) as workers:
        ...     workers.is_inside(), workers.submit("cpu", workers.is_inside).wait()
        (False, True)
        """
        return is_inside(self._deadlines)

    def table(self) -> str:
        """Return a table of the running and waiting tasks, one per line, with their seconds.

        >>> with Workers(["cpu"]) as workers:
        ...     print(workers.table())
        worker  task  state  seconds
        cpu     -     idle   -
        """
        _C.refuse_after_fork()
        return table(self._workers)

    def statistics(self) -> WorkersStatistics:
        """Return the counters.

        >>> with Workers(["cpu"]) as workers:
        ...     workers.submit("cpu", int).wait(), workers.statistics().completed
        (0, 1)
        """
        _C.refuse_after_fork()
        counts = [worker.counts() for worker in self._each()]
        busy = {worker.device: worker.busy for worker in self._each()}
        submitted, completed, failed, cancelled, waiting, running = (
            sum(column) for column in zip(*counts, strict=True)
        )
        return WorkersStatistics(submitted, completed, failed, cancelled, waiting, running, busy)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is not None and os.getpid() == self._pid:
            self.cancel_waiting()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid():
            self._end()

    def _end(self) -> None:
        """Make the threads end after the waiting tasks. It takes no lock: garbage collection may call it."""
        for worker in self._each():
            worker.end()

    def _join(self, threads: list[threading.Thread], deadline: float | None, timeout: float | None) -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    raise TimeoutError(f"tasks did not end within {timeout:g} s:\n{self.table()}")

    def _each(self) -> list[WorkerThread]:
        return list(dict.fromkeys(self._workers.values()))

    def _find(self, given: DeviceLike | str | int) -> WorkerThread:
        worker = self._workers.get(device := _device_of(given))
        if worker is None:
            raise ValueError(f"no worker for {device}: there are {', '.join(str(own) for own in self._devices)}")
        return worker

    def _refuse_inside(self, call: str) -> None:
        if self.is_inside():
            raise InvalidStateError(f"{call} of Workers inside one of their tasks would wait for that task: a deadlock")


def _device_of(given: DeviceLike | str | int) -> DeviceLike:
    return normalize_device(parse_device("device", given) if isinstance(given, (str, int)) else given)


@atexit.register
def _close_all() -> None:
    """Join the threads before the devices are destroyed; cancel waiting tasks and abandon a task that does not end."""
    deadline = time.monotonic() + _PATIENCE
    everyone = [workers for workers in _all if workers._pid == os.getpid()]
    for workers in everyone:
        workers.cancel_waiting()
        workers._end()
    for workers in everyone:
        with contextlib.suppress(TimeoutError, InvalidStateError):
            workers.close(max(0.0, deadline - time.monotonic()))
