"""Reader of an iterable that runs ahead of its consumer.

::

    iterable ──► SentBatch ──► Sender ──► queue ──► take()    in the reader's thread, or in a task of the event loop
                     ▲                                │
                     └──── at most `depth` batches ───┘       a batch counts until the consumer takes it
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture._modes import Modes
from cudafuture.executors import inline
from cudafuture.future import submit
from cudafuture.prefetch._errors import at_batch, retrieve_error, without_frame
from cudafuture.prefetch._options import PrefetchOptions
from cudafuture.prefetch._sender import Sender, SentBatch, keep_from_parent
from cudafuture.prefetch._structure import find_all_tensors

__all__ = ["Reader"]

_PATIENCE = 2.0  # seconds that the exit of the process waits for readers that are sending a batch

_readers: weakref.WeakSet[Reader] = weakref.WeakSet()  # those that may have a thread


class Reader:
    """Reader of one iterator, which sends its items to the device, and keeps them until the consumer takes them.

    Args:
        iterator: of the iterable; an async one is read by a task.
        sender: None: the target is the host, and items are passed on without a copy, through the transform.
        options: of the prefetcher.
        snapshot: the state_dict() of the iterable; None if it has none.
        consumer: the stream that the memory of the copies belongs to.
        pending: batches of the previous epoch that have not been taken yet; they count too.
        number: of the epoch.
    """

    def __init__(
        self,
        iterator: Iterator[Any] | AsyncIterator[Any],
        sender: Sender | None,
        options: PrefetchOptions,
        snapshot: Callable[[], Any] | None,
        consumer: torch.Stream | None,
        pending: deque[_BatchSlot],
        number: int,
        modes: Modes,
    ) -> None:
        self._iterator = iterator
        self._sender, self._options, self._transform = sender, options, options.transform
        self._snapshot = snapshot
        self.consumer = consumer
        self.pending = pending
        self.number = number
        self.modes = modes
        self._loader = _C.OperationPlace.find("loader", _described(iterator), "by")  # of what a consumer waits for
        self._given = 0  # batches, to the consumer
        self._copies: deque[CUDAFuture[None]] = deque()  # of the copies that were enqueued last
        self._pid = os.getpid()
        # Guards the fields below. Re-entrant: garbage collection under it may free the epoch, which closes the reader.
        self._lock = threading.RLock()
        self._batches: deque[SentBatch] = deque()
        self._untaken: dict[int, SentBatch] = {}  # by id: those that the consumer has not acknowledged
        self._waiting: deque[CUDAFuture[None]] = deque()  # complete when consumers must check again
        self.is_closed = False
        self.is_replaced = False  # by a later epoch of the same prefetcher
        self.has_read_all = False  # and has not failed
        self.is_blocked = False  # inside the iterable, or until the device has finished copies
        self._ended: CUDAFuture[None] | None = None  # completes when reading has ended; None: never started
        self._task: asyncio.Task[None] | None = None

    # ---- the consumer's side

    def start(self) -> None:
        """Start to read, in a thread, with the modes of the epoch, and the caller's current device."""
        _readers.add(self)
        with self.modes.applied():
            self._ended = submit(self._run, executor=_OneThread())

    def start_task(self, before: Reader | None) -> None:
        """Start to read in a task of the running event loop, once the task of the previous reader has ended."""
        self._ended = CUDAFuture(name="prefetch")
        earlier = None if before is None else before._task
        self._task = asyncio.get_running_loop().create_task(self._run_async(earlier))

    def take(self) -> SentBatch | CUDAFuture[None]:
        """Return the next batch, whose copy may not be enqueued yet, or a future to wait for if none has been read.

        The consumer must acknowledge the batch.
        """
        with self._lock:
            if self._batches:
                self._given += 1
                return self._batches.popleft()
            waiting: CUDAFuture[None] = CUDAFuture(name="prefetch")
            if self.is_closed:
                waiting.set_result(None)
            else:
                _C.register(waiting, self._loader, self._given)
                self._waiting.append(waiting)
            return waiting

    def acknowledge(self, batch: SentBatch) -> None:
        """Acknowledge a batch, so that the reader may read one more."""
        with self._lock:
            if id(batch) in self._untaken:
                if not batch.taken.done():  # an interrupted call may have completed it
                    batch.taken.set_result(None)
                del self._untaken[id(batch)]

    def close(self) -> None:
        """Stop reading, and drop the batches that were not taken. Do not wait for the iterable.

        It can be called again, and finishes the work of an interrupted call.
        """
        if not self.is_of_this_process():  # the thread is not in this process, and may have held the lock
            keep_from_parent(self)
            return
        with self._lock:
            self.is_closed = True
            for batch in list(self._untaken.values()):  # also one that an interrupted consumer had just taken
                self._drop(batch)
                self.acknowledge(batch)
            self._batches.clear()
        self._wake_consumers()
        if self._task is not None and not self._task.done():
            self._cancel(self._task)

    def is_of_this_process(self) -> bool:
        """Return False in a process that was forked from the reader's."""
        return os.getpid() == self._pid

    def wait_until_ended(self, timeout: float | None = None) -> None:
        """Block until no thread or task is inside the iterable any more; raise TimeoutError after `timeout`.

        Do not wait for a task of the running event loop: the next reader's task does that.
        """
        if self._ended is None or not self.is_of_this_process():
            return
        if self._task is not None:
            loop = self._task.get_loop()
            if not loop.is_running() or loop is _running_loop():
                return
        ended = threading.Event()  # a wait for the future would warn in an event loop, which the program cannot help
        self._ended.add_done_callback(lambda _: ended.set(), executor=inline)
        if not ended.wait(timeout):
            raise TimeoutError("the iterable did not return in time")
        self._ended.exception()

    def goes_on(self) -> bool:
        """Return whether a thread or task reads: not in a forked child, nor in the next event loop."""
        if self._ended is None or not self.is_of_this_process():
            return False
        return self._task is None or self._task.get_loop() is _running_loop()

    def discard(self) -> None:
        """Drop the iterator of a reader that was not started."""
        self.close()
        self._iterator, self._snapshot = iter(()), None

    def _drop(self, batch: SentBatch) -> None:
        if not self._options.futures:
            batch.drop()
        batch.future.add_done_callback(retrieve_error, executor=inline)

    def _wake_consumers(self) -> None:
        while self._waiting:
            with self._lock:
                waiting = self._waiting.popleft() if self._waiting else None
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    @staticmethod
    def _cancel(task: asyncio.Task[None]) -> None:
        loop = task.get_loop()
        if loop is _running_loop():
            task.cancel()  # at once: the caller may load another state into the iterable next
        elif not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    # ---- the reader's side

    def _run(self) -> None:
        """Read until the iterable ends or fails, or the consumer closes; block."""
        try:
            while self._wait_for_room():
                batch = self._new_batch()
                self.is_blocked = True
                try:
                    item = next(self._iterator)  # type: ignore[arg-type]
                except BaseException as error:
                    self._fail(batch, error)
                    return
                finally:
                    self.is_blocked = False
                if not self._offer(batch):
                    batch.future.cancel()  # the consumer may have it already
                    return
                if not self._send(batch, item):
                    return
                del batch, item  # the loader's memory, while the reader waits
        finally:
            self._end()

    async def _run_async(self, earlier: asyncio.Task[None] | None) -> None:
        """Read as ``_run`` does. A cancellation that does not come from the consumer is an error of the epoch."""
        batch: SentBatch | None = None
        try:
            if earlier is not None and earlier.get_loop() is asyncio.get_running_loop():
                await asyncio.wait([earlier])
            while await self._wait_for_room_async():
                batch = self._new_batch()
                item = await self._iterator.__anext__()  # type: ignore[union-attr]
                if not self._offer(batch):
                    batch.future.cancel()
                    break
                with self.modes.applied():
                    sending, batch = submit(self._send, batch, item), None
                del item
                if not await _whole(sending):
                    break
        except BaseException as error:
            self._fail(batch or self._new_batch(), error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end()
            assert self._ended is not None
            self._ended.set_result(None)

    def _new_batch(self) -> SentBatch:
        # "hold": the consumer's stream is the one that the memory belongs to, or SentBatch.record_use() is called.
        lifetime: Any = "record" if self._options.futures else "hold"
        return SentBatch(CUDAFuture(name="prefetch", lifetime=lifetime), CUDAFuture(name="prefetch"))

    def _is_full(self) -> bool:
        pending = self.pending
        if not pending or self.is_closed:
            return False
        depth, most = self._options.depth, self._options.bytes
        return len(pending) >= depth or (most is not None and sum(place.nbytes for place in pending) >= most)

    def _wait_for_room(self) -> bool:
        """Block until one more batch may be read; return False if the consumer has closed."""
        while self._is_full():
            self.pending.popleft().taken.wait()
        return not self.is_closed

    async def _wait_for_room_async(self) -> bool:
        while self._is_full():
            await self.pending.popleft().taken
        return not self.is_closed

    def snapshot(self) -> Any:
        """Return a copy of the state of the iterable, which may change it later; None if it has none."""
        return None if self._snapshot is None else copy.deepcopy(self._snapshot())

    def _offer(self, batch: SentBatch) -> bool:
        """Pass a batch to the consumer; return False if the consumer has closed, or the batch has failed."""
        if not batch.future.done() and (self.has_read_all or not batch.is_end):
            try:
                batch.state = self.snapshot()
            except BaseException as error:
                _C.fail(batch.future, without_frame(error))
        failed = batch.future.done() and not batch.is_end
        self.pending.append(_BatchSlot(batch.taken))
        with self._lock:
            if self.is_closed:
                batch.future.add_done_callback(retrieve_error, executor=inline)
                batch.taken.set_result(None)
            else:
                self._untaken[id(batch)] = batch
                self._batches.append(batch)
        self._wake_consumers()
        return not (self.is_closed or failed)

    def _fail(self, batch: SentBatch, error: BaseException) -> None:
        """Pass the error of the iterable to the consumer, in place of a batch. StopIteration is not an error."""
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            self.has_read_all = True
            return
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            cancelled, error = error, RuntimeError("the task of prefetch() that reads the iterable was cancelled")
            error.__cause__ = cancelled
        batch.future.set_exception(without_frame(error))
        self._offer(batch)

    def _end(self) -> None:
        """Pass the end to the consumer, and drop the iterator, which ends its workers."""
        batch = self._new_batch()
        batch.is_end = True
        self._offer(batch)
        if not batch.future.done():  # the state of the iterable was read without an error
            batch.future.set_result(None)
        self._iterator, self._snapshot = iter(()), None

    def _send(self, batch: SentBatch, item: Any) -> bool:
        """Send a batch to the device; return whether that succeeded."""
        place = self.pending[-1]
        try:
            if self._sender is None:
                batch.packing_since = time.perf_counter()
                if self._options.bytes is not None:
                    place.nbytes = sum(tensor.nbytes for tensor in find_all_tensors([item]))
                batch.future.set_result(item if self._transform is None else self._transform(item))
                return True
            self._wait_for_copies()
            _C.relax_library_thread()  # the device may not have been used before
            batch.packing_since = time.perf_counter()
            place.nbytes = self._sender.send(batch, item, self.consumer)
            self._copies.append(self._sender.enqueued())
        except BaseException as error:
            try:
                if self._sender is not None:
                    self._sender.keep_memory(batch)
            finally:
                was_cancelled = batch.future.cancelled()  # by the program, which has it
                _C.fail(batch.future, at_batch(error))  # unless it is done: a device can fail later
            return was_cancelled
        return True

    def _wait_for_copies(self) -> None:
        """Block until at most `depth` copies are in flight."""
        self.is_blocked = True
        try:
            while len(self._copies) > self._options.depth:
                self._copies.popleft().wait()  # polls; a driver's call that waits for an event keeps a core busy
        finally:
            self.is_blocked = False


class _BatchSlot:
    """Slot of one batch that may be read ahead."""

    def __init__(self, taken: CUDAFuture[None]) -> None:
        self.taken = taken
        self.nbytes = 0


class _OneThread(Executor):
    """Executor that runs a function in a thread that the exit of the process does not wait for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Start a thread."""
        threading.Thread(target=fn, args=args, kwargs=kwargs, name="cudafuture-prefetch", daemon=True).start()


async def _whole(sending: CUDAFuture[bool]) -> bool:
    """Await the end of a send, and raise a cancellation only after it: the sender serves one thread at a time."""
    try:
        return await sending
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await sending
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread, if it is running."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _described(iterator: Any) -> str:
    """Name the code that reads: of a generator, or of the type of another iterator."""
    code = getattr(iterator, "gi_code", None) or getattr(iterator, "ag_code", None)
    method = getattr(type(iterator), "__next__", None) or getattr(type(iterator), "__anext__", None)
    code = code or getattr(method, "__code__", None)
    name = getattr(iterator, "__qualname__", None) or type(iterator).__qualname__
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


@atexit.register
def _close_all() -> None:
    """End the readers before the devices are destroyed. A blocked reader ends with the process."""
    readers = [reader for reader in _readers if reader.is_of_this_process()]
    for reader in readers:
        reader.close()
    deadline = time.monotonic() + _PATIENCE
    for reader in readers:
        if not reader.is_blocked:
            with contextlib.suppress(TimeoutError):
                reader.wait_until_ended(max(0.0, deadline - time.monotonic()))
