"""Worker threads of devices with queues of tasks: the protocol of torchgpipe's and fairscale's worker modules.

An in-queue takes a ``Task``, or None for the end. An out-queue returns ``(True, (task, batch))``, or
``(False, exc_info)`` for a task that raised. Its last item is ``(False, None)``. ``cudafuture.pipeline.workers`` has
the same with futures.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from cudafuture import _C
from cudafuture._modes import ThreadContext
from cudafuture.compat.torchgpipe.microbatch import Batch
from cudafuture.pipeline.stream import AbstractStream, DeviceLike, normalize_device, use_device, use_stream

__all__ = ["Task", "create_workers", "join_workers", "spawn_workers", "worker"]

T = TypeVar("T")

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]

if TYPE_CHECKING:
    InQueue: TypeAlias = Queue["Task | None"]
    OutQueue: TypeAlias = Queue["tuple[bool, tuple[Task, Batch] | ExcInfo | None]"]
else:
    InQueue = Queue
    OutQueue = Queue

_threads: weakref.WeakKeyDictionary[OutQueue, threading.Thread] = weakref.WeakKeyDictionary()
_joined: weakref.WeakSet[OutQueue] = weakref.WeakSet()


class Task:
    """Computation of one micro-batch on one stage, in two parts.

    Args:
        stream: current in both parts, with its device; None: the thread's current streams.
        compute: returns the batch; called by a worker thread.
        finalize: called with the batch by the thread that takes the task from the out-queue. None: nothing.

    Both parts run with the settings of the thread that created the task: grad mode, inference mode, autocast,
    contextvars.

    >>> task = Task(None, compute=lambda: Batch(torch.ones(1) + 1), finalize=lambda batch: print(batch.tensor))
    >>> task.finalize(task.compute())
    tensor([2.])
    """

    def __init__(
        self,
        stream: AbstractStream | None,
        *,
        compute: Callable[[], Batch],
        finalize: Callable[[Batch], None] | None,
    ) -> None:
        self.stream = stream
        self._compute = compute
        self._finalize = finalize
        self._context = ThreadContext()

    def compute(self) -> Batch:
        """Return the batch.

        >>> Task(None, compute=lambda: Batch(torch.ones(1)), finalize=None).compute().tensor
        tensor([1.])
        """
        batch: Batch = self._context.run(self._run, self._compute)
        return batch

    def finalize(self, batch: Batch) -> None:
        """Finish the batch that ``compute`` returned.

        >>> Task(None, compute=lambda: Batch(torch.ones(1)), finalize=print).finalize(Batch(torch.ones(2)))
        Batch[atomic=True](tensor([1., 1.]))
        """
        if self._finalize is not None:
            self._context.run(self._run, self._finalize, batch)

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        with use_stream(self.stream):
            return function(*args)


def worker(in_queue: InQueue, out_queue: OutQueue, device: DeviceLike, grad_mode: bool | None = None) -> None:
    """Run the tasks of the in-queue until None arrives: the body of a worker thread.

    Args:
        in_queue: of tasks.
        out_queue: gets their results or exceptions, any BaseException included. The last item is ``(False, None)``.
        device: current in the thread.
        grad_mode: without effect, as each task has its own; torchgpipe passes it.

    >>> tasks, results = InQueue(), OutQueue()
    >>> tasks.put(None)
    >>> worker(tasks, results, torch.device("cpu"))
    >>> results.get()
    (False, None)
    """
    try:
        with use_device(device):
            while (task := in_queue.get()) is not None:
                _C.relax_library_thread()
                out_queue.put(_outcome(task))
                del task  # its batch, while the thread waits
    finally:
        out_queue.put((False, None))


def _outcome(task: Task) -> tuple[bool, tuple[Task, Batch] | ExcInfo]:
    try:
        return True, (task, task.compute())
    except BaseException:
        return False, cast(ExcInfo, sys.exc_info())


def create_workers(devices: Iterable[DeviceLike]) -> tuple[list[InQueue], list[OutQueue]]:
    """Start a daemon thread for each device; return an in-queue and an out-queue for each request, in order.

    Args:
        devices: requests for one device share a thread and its queues. "cpu:0" is "cpu"; an accelerator without a
            number is the current one. Objects other than torch.device need `type` and `index`.

    An error is raised after the started threads have ended. Call ``join_workers`` with the queues at the end.

    >>> in_queues, out_queues = create_workers([torch.device("cpu"), torch.device("cpu:0")])
    >>> in_queues[0] is in_queues[1]
    True
    >>> join_workers(in_queues, out_queues)
    """
    queues: dict[DeviceLike, tuple[InQueue, OutQueue]] = {}
    requests: list[tuple[InQueue, OutQueue]] = []
    try:
        for given in devices:
            device = normalize_device(given)
            if device not in queues:
                queues[device] = _start_worker(device)
            requests.append(queues[device])
    except BaseException:
        join_workers([pair[0] for pair in queues.values()], [pair[1] for pair in queues.values()])
        raise
    return [in_queue for in_queue, _ in requests], [out_queue for _, out_queue in requests]


def _start_worker(device: DeviceLike) -> tuple[InQueue, OutQueue]:
    with use_device(device):  # raises here, not in the thread, for a device that does not exist
        in_queue, out_queue = InQueue(), OutQueue()
    name = f"cudafuture-worker-{device.type}" + ("" if device.index is None else f":{device.index}")
    thread = threading.Thread(target=worker, args=(in_queue, out_queue, device), name=name, daemon=True)
    thread.start()
    _threads[out_queue] = thread
    return in_queue, out_queue


def join_workers(in_queues: Iterable[InQueue], out_queues: Iterable[OutQueue]) -> None:
    """Run the waiting tasks, end the worker threads and join them. A second call does nothing.

    The remaining items of the out-queues are dropped.

    >>> join_workers(*create_workers([torch.device("cpu")]))
    """
    outs = [queue for queue in dict.fromkeys(out_queues) if queue not in _joined]
    if not outs:
        return
    for in_queue in dict.fromkeys(in_queues):
        in_queue.put(None)
    for out_queue in outs:
        while out_queue.get() != (False, None):
            pass
        thread = _threads.pop(out_queue, None)  # None: the caller's own thread, which runs worker()
        if thread is not None:
            thread.join()
        _joined.add(out_queue)


@contextmanager
def spawn_workers(devices: Iterable[DeviceLike]) -> Iterator[tuple[list[InQueue], list[OutQueue]]]:
    """Pass the queues of ``create_workers`` to a block, and join the threads after it.

    >>> import torch
    >>> from cudafuture.compat.torchgpipe.microbatch import Batch
    >>> from cudafuture.compat.torchgpipe.worker import Task, spawn_workers
    >>> with spawn_workers([torch.device("cpu")]) as (in_queues, out_queues):
    ...     in_queues[0].put(Task(None, compute=lambda: Batch(torch.ones(1)), finalize=None))
    ...     ok, (task, batch) = out_queues[0].get()
    >>> ok, batch.tensor
    (True, tensor([1.]))
    """
    in_queues, out_queues = create_workers(devices)
    try:
        yield in_queues, out_queues
    finally:
        join_workers(in_queues, out_queues)
