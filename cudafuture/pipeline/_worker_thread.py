"""The thread of one device behind ``Workers``, its waiting tasks, and the thread that fails overdue tasks."""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.errors import CUDAFutureError, InvalidStateError
from cudafuture.pipeline.stream import Device, current_stream, is_cuda, use_device, use_stream

__all__ = ["Deadlines", "Task", "WorkerThread", "is_inside", "table"]

_log = logging.getLogger("cudafuture.pipeline.workers")


class _Here(threading.local):
    worker: WorkerThread | None = None
    is_in_task = False  # not while the callbacks of a future that has completed run


_here = _Here()


def is_inside(deadlines: Deadlines) -> bool:
    """Return whether the calling thread runs a task of the workers that these deadlines belong to."""
    return _here.worker is not None and _here.worker.deadlines is deadlines


class Task:
    """One submitted function. It is also the executor that gets its own job, a callable with the caller's settings."""

    __slots__ = ("began", "compute", "finalize", "future", "has_deadline", "job", "name", "outcome", "since", "stream")

    future: CUDAFuture[Any]
    job: Callable[[], object]

    def __init__(self, compute: Callable[[], Any], finalize: Any, stream: torch.Stream | None, name: str) -> None:
        self.compute = compute
        self.finalize = finalize  # called with the value; or None
        self.stream = stream
        self.name = name
        self.since = time.perf_counter()
        self.began = 0.0
        self.outcome = ""  # "completed" or "failed"; "": it has not ended
        self.has_deadline = False

    def submit(self, job: Callable[[], object]) -> None:
        """Keep the job: called by the native module, which knows the task as an executor."""
        self.job = job

    def run(self) -> None:
        """Run the function and complete the future: what the job calls, with the caller's settings."""
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
            fail(self.future, error.with_traceback(None if traceback is None else traceback.tb_next))
            return
        self.outcome, _here.is_in_task = "completed", outer
        if not self.future.done():
            with contextlib.suppress(InvalidStateError):  # its deadline was quicker
                self.future.set_result(value, stream=self.stream)

    def _call(self) -> Any:
        value = self.compute()
        if self.finalize is not None:
            self.finalize(value)
        return value

    def drop(self) -> None:
        """Drop all that the task keeps alive. A job that has not run cancels the future."""
        for slot in ("job", "compute", "finalize", "stream", "future"):
            if hasattr(self, slot):
                delattr(self, slot)


def fail(future: CUDAFuture[Any], error: BaseException) -> None:
    """Fail the future, unless it is done."""
    if not future.done():
        with contextlib.suppress(InvalidStateError):  # another thread was quicker
            future.set_exception(error)


class _TaskQueue:
    """Waiting tasks, lower priority first, equal ones in the order in which they came."""

    def __init__(self) -> None:
        self._tasks: dict[int, deque[Task]] = {0: deque()}  # by priority; the usual one stays, the others come and go
        self._priorities = [0]  # sorted

    def put(self, task: Task, priority: int) -> None:
        tasks = self._tasks.get(priority)
        if tasks is None:
            tasks = self._tasks[priority] = deque()
            bisect.insort(self._priorities, priority)
        tasks.append(task)

    def pop(self) -> Task | None:
        for priority in self._priorities:
            tasks = self._tasks[priority]
            if tasks:
                task = tasks.popleft()
                self._forget(priority)
                return task
        return None

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))

    def __iter__(self) -> Iterator[Task]:
        return (task for priority in self._priorities for task in self._tasks[priority])

    def take(self, wanted: Callable[[Task], bool]) -> list[Task]:
        """Remove the tasks that are wanted, and return them."""
        taken: list[Task] = []
        for priority in list(self._priorities):
            tasks = self._tasks[priority]
            for _ in range(len(tasks)):
                task = tasks.popleft()
                (taken if wanted(task) else tasks).append(task)
            self._forget(priority)
        return taken

    def _forget(self, priority: int) -> None:
        if priority != 0 and not self._tasks[priority]:
            del self._tasks[priority]
            self._priorities.remove(priority)


class WorkerThread:
    """A daemon thread that runs the tasks of one device, of which at most `limit` wait; 0: any number."""

    def __init__(self, device: Device, limit: int, name: str, deadlines: Deadlines) -> None:
        with use_device(device):  # raises here, not in the thread, for a device that is not there
            self.is_accelerator = is_cuda(current_stream(device))
        self.device = device
        self.deadlines = deadlines
        self.thread = threading.Thread(target=self._run, name=f"{name}-{device}", daemon=True)
        self._limit = limit
        self._wake_ups: SimpleQueue[None] = SimpleQueue()  # at least one for each task that waits
        self._lock = threading.RLock()  # guards what follows; re-entrant, as a garbage collection may run anything
        self._changed = threading.Condition(self._lock)
        self._sleepers = 0  # threads that wait for `_changed`
        self._queue = _TaskQueue()
        self._current: Task | None = None
        self._is_closed = False
        self._death: BaseException | None = None
        self._counts = {"submitted": 0, "completed": 0, "failed": 0, "": 0}  # "": those that never began
        self.busy = 0.0

    # ---- any thread

    def put(self, task: Task, priority: int) -> None:
        """Have the task run; at once, inside a task of this worker. Blocks while too many tasks wait."""
        is_own = _here.worker is self and _here.is_in_task
        with self._lock:
            self._expect_open()
            if self._limit and not is_inside(self.deadlines):
                self._wait_for_room()
            self._counts["submitted"] += 1
            if not is_own:
                self._wake_ups.put(None)  # first: an interrupt in between leaves one too many, which is harmless
                self._queue.put(task, priority)
                return
        task.job()
        self._count(task)

    def cancel_waiting(self, error: BaseException | None) -> int:
        """Cancel the tasks that wait, or fail them with `error`; return how many there were."""
        with self._lock:
            tasks = self._queue.take(lambda task: True)
            self._notify()
        number = sum(not task.future.done() for task in tasks)
        for task in tasks:
            if error is None:
                task.future.cancel()
            else:
                fail(task.future, error)
            self._count(task)
        return number

    def end(self) -> None:
        """Have the thread end behind the tasks that wait, and refuse further ones.

        It takes no lock: a garbage collection may call it, in a thread that holds any.
        """
        self._is_closed = True
        self._wake_ups.put(None)

    def wake_sleepers(self) -> None:
        """Have the threads that wait for room, or for the end of the tasks, look again."""
        with self._lock:
            self._notify()

    def wait_until_idle(self, deadline: float | None) -> bool:
        """Block until no task waits or runs; return False if that took time, in which tasks may have come elsewhere."""
        was_idle = True
        with self._lock:
            while self._current is not None or len(self._queue):
                was_idle = False
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._sleep(left)
        return was_idle

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Return the tasks submitted, completed, failed, cancelled, waiting and running."""
        with self._lock:
            counts, current = dict(self._counts), self._current
            if current is not None and current.outcome:  # its future may be done: it counts as ended
                counts[current.outcome] += 1
                current = None
            return (*counts.values(), len(self._queue), int(current is not None))  # type: ignore[return-value]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the lines of the table: worker, task, state, seconds."""
        now = time.perf_counter()
        with self._lock:
            tasks = [(task.name, "waiting", f"{now - task.since:.3f}") for task in self._queue]
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
        error = CUDAFutureError(f"the worker thread of {self.device} died of {self._death!r}; make new Workers")
        error.__cause__ = self._death
        return error

    def _wait_for_room(self) -> None:
        while len(self._queue) >= self._limit:
            for task in self._queue.take(lambda task: task.future.done()):  # cancelled by their owners
                self._count(task)
            if len(self._queue) >= self._limit:
                self._sleep(None)
                self._expect_open()

    def _sleep(self, timeout: float | None) -> None:
        self._sleepers += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._sleepers -= 1

    def _notify(self) -> None:
        if self._sleepers:
            self._changed.notify_all()

    def _count(self, task: Task) -> None:
        """Count a task that has ended or will never begin, and drop it."""
        with self._lock:
            self._counts[task.outcome] += 1
        self._drop(task)

    def _drop(self, task: Task) -> None:
        if task.has_deadline:
            self.deadlines.remove(task)
        task.drop()

    # ---- the worker's thread

    def _run(self) -> None:
        _here.worker = self
        try:
            with use_device(self.device):
                while True:
                    self._wake_ups.get()
                    task = self._begin()
                    if task is not None:
                        task.job()
                        self._end(task)
                        del task
                    elif self._is_closed:
                        return
        except BaseException as error:
            self._die(error)

    def _begin(self) -> Task | None:
        with self._lock:
            self._current = task = self._queue.pop()
            if task is not None:
                task.began = time.perf_counter()
            self._notify()
            return task

    def _end(self, task: Task) -> None:
        with self._lock:
            self.busy += time.perf_counter() - task.began
            self._counts[task.outcome] += 1
            self._current = None
            self._notify()
        self._drop(task)

    def _die(self, error: BaseException) -> None:
        _log.error("the worker thread of %s died", self.device, exc_info=error)
        with self._lock:
            self._death = error
            tasks = self._queue.take(lambda task: True)
            if self._current is not None:
                tasks.append(self._current)
                self._current = None
            self._notify()
        for task in tasks:
            fail(task.future, self._died())
            self._count(task)


class Deadlines:
    """The tasks that have to end by a time. A thread, started for the first of them, fails those that have not.

    Args:
        workers: whose tasks the table in the errors shows; more may be added.
    """

    def __init__(self, workers: Mapping[Any, WorkerThread]) -> None:
        self._workers = workers
        self.thread: threading.Thread | None = None
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        self._is_closed = False
        self._lock = threading.RLock()  # guards what follows; taken after that of a worker
        self._tasks: dict[Task, tuple[float, float, CUDAFuture[Any], Device]] = {}
        self._next = float("inf")  # when the thread looks again

    def add(self, task: Task, timeout: float, device: Device) -> None:
        """Fail the task's future unless the task is removed within `timeout` seconds."""
        with self._lock:
            task.has_deadline = True
            at = time.monotonic() + timeout
            self._tasks[task] = (at, timeout, task.future, device)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="cudafuture-deadlines", daemon=True)
                self.thread.start()
            elif at < self._next:
                self._wake_ups.put(None)

    def remove(self, task: Task) -> None:
        """Forget a task that has ended."""
        with self._lock:
            self._tasks.pop(task, None)
            if self._is_closed and not self._tasks:
                self._wake_ups.put(None)

    def end(self) -> None:
        """Have the thread end when no task is left. Takes no lock."""
        self._is_closed = True
        self._wake_ups.put(None)

    def _run(self) -> None:
        while not (self._is_closed and not self._tasks):
            self._fail_overdue()
            with contextlib.suppress(Empty):
                seconds = self._next - time.monotonic()
                self._wake_ups.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))

    def _fail_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            overdue = {task: entry for task, entry in self._tasks.items() if entry[0] <= now}
            for task in overdue:
                del self._tasks[task]
            self._next = min((at for at, *_ in self._tasks.values()), default=float("inf"))
        for task, (_, timeout, future, device) in overdue.items():
            message = f"task {task.name!r} on {device} did not end within {timeout:g} s:\n{table(self._workers)}"
            fail(future, TimeoutError(message))


def table(workers: Mapping[Any, WorkerThread]) -> str:
    """Return the tasks of the workers, one a line."""
    rows = [("worker", "task", "state", "seconds")]
    rows += (row for worker in dict.fromkeys(workers.values()) for row in worker.rows())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
