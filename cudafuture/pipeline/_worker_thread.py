"""Thread of one device behind ``Workers``, its waiting tasks, and their deadlines."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture, relax_library_thread
from cudafuture.errors import CUDAFutureError, InvalidStateError
from cudafuture.pipeline.stream import DeviceLike, current_stream, use_device, use_stream
from cudafuture.timer import cancel, schedule

__all__ = ["Deadlines", "WorkerTask", "WorkerThread", "is_inside", "table"]

_log = logging.getLogger("cudafuture.pipeline.workers")


class _Here(threading.local):
    worker: WorkerThread | None = None
    deadlines: Deadlines | None = None  # those of the workers that the thread belongs to
    is_in_task = False  # False while the callbacks of a completed future run


_here = _Here()


def is_inside(deadlines: Deadlines) -> bool:
    """Return whether the calling thread is a worker of these deadlines, or a thread that fails their overdue tasks."""
    return _here.deadlines is deadlines


class WorkerTask:
    """Submitted function. It is also the executor that receives its own job, a callable with the caller's settings."""

    __slots__ = (
        *("began", "compute", "finalize", "future", "has_deadline", "job", "name", "outcome", "records", "refusal"),
        *("since", "stream"),
    )

    future: CUDAFuture[Any]

    def __init__(
        self, compute: Callable[[], Any], finalize: Any, stream: torch.Stream | None, name: str, records: bool = True
    ) -> None:
        self.compute = compute
        self.finalize = finalize  # called with the value; or None
        self.stream = stream
        self.name = name
        self.records = records  # the future has an event of the stream
        self.job: Callable[[], object] = int  # does nothing, until `submit`
        self.since = time.perf_counter()
        self.began = 0.0
        self.outcome = ""  # "completed" or "failed"; "": it has not ended
        self.has_deadline = False
        self.refusal: Callable[[], object] | None = None  # called by the thread instead of the job

    def submit(self, job: Callable[[], object]) -> None:
        """Keep the job; the native module calls this, because it uses the task as an executor."""
        self.job = job

    def run(self) -> None:
        """Run the function and complete the future; the job calls this with the caller's settings."""
        outer, _here.is_in_task = _here.is_in_task, True
        try:
            if self.stream is None:
                value = self._call()
            else:
                with use_stream(self.stream):
                    value = self._call()
        except BaseException as error:
            self.outcome, _here.is_in_task = "failed", outer
            traceback = error.__traceback__  # without this frame, which would keep the task alive
            _C.fail(self.future, error.with_traceback(None if traceback is None else traceback.tb_next))
            return
        self.outcome, _here.is_in_task = "completed", outer
        if not self.future.done():
            with contextlib.suppress(InvalidStateError):  # its deadline completed it first
                self.future.set_result(value, stream=self.stream if self.records else None)

    def _call(self) -> Any:
        value = self.compute()
        if self.finalize is not None:
            self.finalize(value)
        return value

    def drop(self) -> None:
        """Drop all references except the future, which is cancelled if the job has not run."""
        for slot in ("job", "compute", "finalize", "stream", "refusal"):
            with contextlib.suppress(AttributeError):  # dropped before
                delattr(self, slot)


class WorkerThread:
    """Daemon thread that runs the tasks of one device, of which at most `limit` wait; 0: no limit."""

    def __init__(self, device: DeviceLike, limit: int, name: str, deadlines: Deadlines) -> None:
        with use_device(device):  # raises here, not in the thread, for a device that does not exist
            self.is_accelerator = isinstance(current_stream(device), torch.Stream)
        self.device = device
        self.place = _C.OperationPlace.find("worker thread", f"{name}-{device}", "on")
        self.deadlines = deadlines
        self.thread = threading.Thread(target=self._run, name=f"{name}-{device}", daemon=True)
        self._limit = limit
        self._wake_ups: SimpleQueue[None] = SimpleQueue()  # one or more, or the thread is awake, while tasks wait
        self._lock = threading.RLock()  # guards the fields below; re-entrant, as garbage collection may run any code
        self._changed = threading.Condition(self._lock)
        self._sleepers = 0  # threads that wait for `_changed`
        # A heap, by priority and then arrival. Each change is one call, so Ctrl-C or a collection cannot tear it.
        self._waiting: list[tuple[int, int, WorkerTask]] = []
        self._order = itertools.count()
        self._current: WorkerTask | None = None
        self._nested = 0  # tasks that run inside the current one
        self._is_closed = False
        self._has_ended = False
        self._death: BaseException | None = None
        self._counts = {"completed": 0, "failed": 0, "": 0}  # "": tasks that never began
        self.busy = 0.0

    # ---- any thread

    def wake(self) -> None:
        """Wake the thread to look for tasks."""
        if self._wake_ups.empty():
            self._wake_ups.put(None)

    def put(self, task: WorkerTask, priority: int) -> None:
        """Queue the task; run it at once inside a task of this worker. Block while too many tasks wait."""
        is_own = _here.worker is self and _here.is_in_task
        with self._lock:
            self._expect_open()
            if self._limit and not is_inside(self.deadlines):
                self._wait_for_room()
            if not is_own:
                heapq.heappush(self._waiting, (priority, next(self._order), task))
                self.wake()
            else:
                self._nested += 1
        if not is_own:
            return
        task.job()
        self._drop(task)
        with self._lock:
            self._nested -= 1
            self._counts[task.outcome] += 1

    def withdraw(self, task: WorkerTask) -> None:
        """Remove a task whose submission failed or was interrupted. One that has begun continues."""
        self.deadlines.remove(task)
        task.future.cancel()
        self._sweep()
        if not task.began:
            task.drop()

    def cancel_waiting(self, error: BaseException | None) -> int:
        """Cancel the waiting tasks, or fail them with `error`; return their number."""
        with self._lock:  # they stay in the heap, so that after Ctrl-C the thread handles the rest
            tasks = [task for _, _, task in sorted(self._waiting)]
            number = sum(not task.future.done() for task in tasks)
            refusals = [task.future.cancel if error is None else partial(_C.fail, task.future, error) for task in tasks]
            for task, refusal in zip(tasks, refusals, strict=True):
                task.refusal = refusal
        for refusal in refusals:
            refusal()
        self._sweep()
        return number

    def end(self) -> None:
        """Make the thread end after the waiting tasks, and refuse further ones.

        It takes no lock: garbage collection may call it, in a thread that holds any lock.
        """
        self._is_closed = True
        self._wake_ups.put(None)

    def wake_sleepers(self) -> None:
        """Wake the threads that wait for room, or for the end of the tasks."""
        with self._lock:
            self._notify()

    def wait_until_idle(self, deadline: float | None) -> bool:
        """Block until no task waits or runs; return False if that took time, so other workers may have new tasks."""
        was_idle = True
        with self._lock:
            while self._current is not None or self._waiting:
                was_idle = False
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._sleep(left)
        return was_idle

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Return the numbers of tasks submitted, completed, failed, cancelled, waiting and running."""
        with self._lock:
            counts, running, waiting = dict(self._counts), self._nested, len(self._waiting)
            if self._current is not None:
                if self._current.outcome:  # its future may be done, so it counts as ended
                    counts[self._current.outcome] += 1
                else:
                    running += 1
            ended = tuple(counts.values())
            return (sum(ended) + waiting + running, *ended, waiting, running)  # type: ignore[return-value]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the lines of the table: worker, task, state, seconds."""
        now = time.perf_counter()
        with self._lock:
            tasks = [(task.name, "waiting", f"{now - task.since:.3f}") for _, _, task in sorted(self._waiting)]
            if self._current is not None:
                tasks.insert(0, (self._current.name, "running", f"{now - self._current.began:.3f}"))
        state = "dead" if self._death is not None else "idle" if self.thread.is_alive() else "ended"
        return [(str(self.device), *row) for row in tasks or [("-", state, "-")]]

    def _expect_open(self) -> None:
        if self._death is not None:
            raise self._died()
        if self._is_closed:
            raise InvalidStateError(f"the worker of {self.device} takes no further tasks: close() was called")

    def _died(self) -> CUDAFutureError:
        error = CUDAFutureError(f"the worker thread of {self.device} died of {self._death!r}; create new Workers")
        error.__cause__ = self._death
        return error

    def _wait_for_room(self) -> None:
        while len(self._waiting) >= self._limit:
            self._sweep()  # their owners may have cancelled some
            if len(self._waiting) >= self._limit:
                self._sleep(None)
                self._expect_open()

    def _sweep(self) -> None:
        """Remove the waiting tasks whose futures are done."""
        with self._lock:
            done = [entry for entry in sorted(self._waiting) if entry[2].future.done()]
            self._remove(done)
            self._notify()
        for _, _, task in done:
            task.drop()

    def _remove(self, entries: list[tuple[int, int, WorkerTask]]) -> None:
        try:
            for entry in entries:
                self.deadlines.remove(entry[2])
                self._waiting.remove(entry)
                self._counts[""] += 1
        finally:
            heapq.heapify(self._waiting)

    def _sleep(self, timeout: float | None) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._sleepers -= 1

    def _notify(self) -> None:
        if self._sleepers:
            self._changed.notify_all()

    def _drop(self, task: WorkerTask) -> None:
        self.deadlines.remove(task)
        task.drop()

    # ---- the worker's thread

    def _run(self) -> None:
        _here.worker, _here.deadlines = self, self.deadlines
        try:
            with use_device(self.device):
                task = None
                while True:
                    if (task := self._next_task(task)) is not None:
                        relax_library_thread()
                        (task.refusal or task.job)()
                    elif self._has_ended:
                        return
                    else:
                        self._wake_ups.get()
        except BaseException as error:
            self._die(error)

    def _next_task(self, ended: WorkerTask | None) -> WorkerTask | None:
        """End a task, then begin and return the next one, or None."""
        now = time.perf_counter()
        if ended is not None:
            self._drop(ended)
        with self._lock:
            if ended is not None:
                self.busy += now - ended.began
                self._counts[ended.outcome] += 1
            self._current = task = heapq.heappop(self._waiting)[2] if self._waiting else None
            if task is not None:
                task.began = now
            else:
                self._has_ended = self._is_closed
            self._notify()
        return task

    def _die(self, error: BaseException) -> None:
        _log.error("the worker thread of %s died", self.device, exc_info=error)
        with self._lock:
            self._death = error
            tasks = [task for _, _, task in sorted(self._waiting)]
            self._waiting = []
            if self._current is not None:
                tasks.append(self._current)
                self._current = None
            for task in tasks:
                self._counts[task.outcome] += 1
            self._notify()
        for task in tasks:
            _C.fail(task.future, self._died())
            self._drop(task)


class Deadlines:
    """Deadlines of tasks: the timer finds the tasks that have not ended in time, and a thread fails them.

    Args:
        workers: the errors show the table of their tasks; more may be added.
    """

    def __init__(self, workers: Mapping[Any, WorkerThread]) -> None:
        self._workers = workers
        self.threads: list[threading.Thread] = []
        """The threads that fail overdue tasks; each ends with its tasks."""
        self._lock = threading.RLock()  # guards `threads` and `_tasks`; between the locks of a worker and of the timer
        self._tasks: dict[WorkerTask, tuple[float, float, CUDAFuture[Any], DeviceLike]] = {}

    def add(self, task: WorkerTask, timeout: float, device: DeviceLike) -> None:
        """Fail the task's future unless the task is removed within `timeout` seconds."""
        with self._lock:
            task.has_deadline = True
            at = time.perf_counter() + timeout
            self._tasks[task] = (at, timeout, task.future, device)
            schedule(self, at)

    def remove(self, task: WorkerTask) -> None:
        """Remove a task that has ended."""
        if not task.has_deadline:
            return
        with self._lock:
            self._tasks.pop(task, None)
            if not self._tasks:
                cancel(self)

    def look(self, now: float) -> None:
        """Start a thread that fails the overdue tasks, as their callbacks may block. Called by the timer thread."""
        with self._lock:
            overdue = {task: entry for task, entry in self._tasks.items() if entry[0] <= now}
            if overdue:
                thread = threading.Thread(target=self._fail, args=(overdue,), name="cudafuture-overdue", daemon=True)
                thread.start()  # raises if the system has no more threads: the timer calls again
                self.threads = [thread, *(other for other in self.threads if other.is_alive())]
            for task in overdue:
                del self._tasks[task]
            if self._tasks:
                schedule(self, min(at for at, *_ in self._tasks.values()))

    def _fail(self, overdue: dict[WorkerTask, tuple[float, float, CUDAFuture[Any], DeviceLike]]) -> None:
        _here.deadlines = self
        for task, (_, timeout, future, device) in overdue.items():
            message = f"task {task.name!r} on {device} did not end within {timeout:g} s:\n{table(self._workers)}"
            _C.fail(future, TimeoutError(message))


def table(workers: Mapping[Any, WorkerThread]) -> str:
    """Return the tasks of the workers, one per line."""
    rows = [("worker", "task", "state", "seconds")]
    rows += (row for worker in dict.fromkeys(workers.values()) for row in worker.rows())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
