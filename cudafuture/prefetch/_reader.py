"""Reading an iterable ahead of its consumer.

::

    iterable ──► Batch ──► Sender ──► queue ──► take()        in the reader's thread, or in a task of the event loop
                   ▲                              │
                   └── at most `depth` batches ───┘           a batch counts until the consumer takes it
"""

from __future__ import annotations

import asyncio
import atexit
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
from cudafuture.future import submit
from cudafuture.prefetch._sender import Batch, Sender
from cudafuture.prefetch._structure import find_leaves

__all__ = ["Reader"]

_PATIENCE = 2.0  # seconds that the end of the process waits for readers that are sending a batch

_readers: weakref.WeakSet[Reader] = weakref.WeakSet()  # those that may have a thread


class Reader:
    """Reads one iterator, sends its items to the device, and keeps them until the consumer takes them.

    Args:
        iterator: of the iterable; an async one is read by ``run_async``.
        sender: None: the target is the host, and items go on as they are.
        transform: for the host; a sender has its own.
        depth: batches that may be read ahead.
        nbytes: bytes of their tensors that may be; at least one batch is always read ahead. None: any number.
        snapshot: returns the state_dict() of the iterable; None where it has none.
        consumer: the stream that the memory of the copies belongs to.
        pending: batches of the epoch before that have not been taken yet; they count.
        shares: whether consumers get futures, and order themselves after the copies.
    """

    def __init__(
        self,
        iterator: Iterator[Any] | AsyncIterator[Any],
        sender: Sender | None,
        transform: Callable[[Any], Any] | None,
        depth: int,
        nbytes: float,
        snapshot: Callable[[], Any] | None,
        consumer: torch.Stream | None,
        pending: deque[_Place],
        shares: bool,
    ) -> None:
        self._iterator = iterator
        self._sender, self._transform = sender, transform
        self._depth, self._nbytes = depth, nbytes
        self.snapshot = snapshot
        self.consumer = consumer
        self.pending = pending
        self._shares = shares
        self._copies: deque[list[_C.EventView]] = deque()  # the events behind the copies that were enqueued last
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._batches: deque[Batch] = deque()
        self._waiting: CUDAFuture[None] | None = None  # completes when the consumer has to look again
        self._is_closed = False
        self.has_read_all = False  # and not failed
        self.is_blocked = False  # inside the iterable, or until the device has finished copies
        self.ended: CUDAFuture[None] | None = None  # completes when nothing is read any more

    # ---- the consumer's side

    def start(self) -> None:
        """Start to read, in a thread, with the settings of the caller's: grad mode, autocast, current device."""
        _readers.add(self)
        self.ended = submit(self.run, executor=_OneThread())

    def take(self) -> Batch | CUDAFuture[None]:
        """Return the next batch, whose copy may not be enqueued yet; where none was read, a future to wait for."""
        with self._lock:
            if self._batches:
                return self._batches.popleft()
            self._waiting = CUDAFuture(name="prefetch")
            return self._waiting

    def close(self) -> None:
        """Stop reading, and drop the batches that nobody has taken. Does not wait for the iterable."""
        if not self.is_of_this_process():  # the thread is not here, and may have held the lock
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dropped = list(self._batches)
            self._batches.clear()
            waiting, self._waiting = self._waiting, None
        for batch in dropped:
            self._drop(batch)
        if waiting is not None:
            waiting.set_result(None)

    def is_of_this_process(self) -> bool:
        """Return False in a process that was forked from the reader's."""
        return os.getpid() == self._pid

    def _drop(self, batch: Batch) -> None:
        if not self._shares:
            batch.drop()
        batch.taken.set_result(None)

    # ---- the reader's side

    def run(self) -> None:
        """Read until the iterable ends or fails, or the consumer closes; blocks."""
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

    async def run_async(self) -> None:
        """Read as ``run`` does, in a task of the running event loop."""
        try:
            while await self._wait_for_room_async():
                batch = self._new_batch()
                try:
                    item = await self._iterator.__anext__()  # type: ignore[union-attr]
                except BaseException as error:
                    self._fail(batch, error)
                    return
                if not self._offer(batch) or not await submit(self._send, batch, item):
                    return
                del batch, item
        finally:
            self._end()

    def _new_batch(self) -> Batch:
        # "hold": the consumer's stream is the one that the memory belongs to, or Batch.record_use() is called.
        lifetime: Any = "record" if self._shares else "hold"
        return Batch(CUDAFuture(name="prefetch", lifetime=lifetime), CUDAFuture(name="prefetch"))

    def _is_full(self) -> bool:
        pending = self.pending
        if not pending or self._is_closed:
            return False
        return len(pending) >= self._depth or sum(place.nbytes for place in pending) >= self._nbytes

    def _wait_for_room(self) -> bool:
        """Block until a batch more may be read; return False when the consumer has closed."""
        while self._is_full():
            self.pending.popleft().taken.wait()
        return not self._is_closed

    async def _wait_for_room_async(self) -> bool:
        while self._is_full():
            await self.pending.popleft().taken
        return not self._is_closed

    def _offer(self, batch: Batch) -> bool:
        """Show a batch that was read to the consumer; return False if that has closed, or the batch has failed."""
        if self.snapshot is not None and not batch.future.done() and (self.has_read_all or not batch.is_end):
            try:
                batch.state = self.snapshot()
            except BaseException as error:
                batch.future.set_exception(_without_frame(error))
        failed = batch.future.done() and not batch.is_end
        self.pending.append(_Place(batch.taken))
        with self._lock:
            if not self._is_closed:
                self._batches.append(batch)
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(None)
        return not (self._is_closed or failed)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Show the error of the iterable to the consumer at its batch. StopIteration is none."""
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            self.has_read_all = True
        elif not (self._is_closed and isinstance(error, asyncio.CancelledError)):
            batch.future.set_exception(_without_frame(error))
            self._offer(batch)

    def _end(self) -> None:
        """Show the end to the consumer, and drop the iterator: its workers end with it."""
        batch = self._new_batch()
        batch.is_end = True
        self._offer(batch)
        batch.future.set_result(None)
        self._iterator, self.snapshot = iter(()), None

    def _send(self, batch: Batch, item: Any) -> bool:
        """Send a batch to the device; return whether that worked."""
        place = self.pending[-1]
        try:
            if self._sender is None:
                batch.packing_since = time.perf_counter()
                place.nbytes = sum(x.nbytes for x in find_leaves(item) if isinstance(x, torch.Tensor))
                batch.future.set_result(item if self._transform is None else self._transform(item))
                return True
            self._wait_for_copies()
            batch.packing_since = time.perf_counter()
            self._sender.send(batch, item, self.consumer)
            place.nbytes = batch.nbytes
            self._copies.append(list(batch.future.events.values()))
        except BaseException as error:
            if self._sender is not None:
                self._sender.keep_memory(batch)
            batch.future.set_exception(_at_batch(error))
            return False
        return True

    def _wait_for_copies(self) -> None:
        """Block until at most `depth` copies are in flight."""
        self.is_blocked = True
        try:
            while len(self._copies) > self._depth:
                for event in self._copies.popleft():
                    event.synchronize()
        finally:
            self.is_blocked = False


class _Place:
    """One of the places of batches that may be read ahead."""

    def __init__(self, taken: CUDAFuture[None]) -> None:
        self.taken = taken
        self.nbytes = 0


class _OneThread(Executor):
    """Runs a function in a thread that the end of the process does not wait for, unlike those of a pool."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Start a thread."""
        threading.Thread(target=fn, args=args, kwargs=kwargs, name="cudafuture-prefetch", daemon=True).start()


def _without_frame(error: BaseException) -> BaseException:
    """Return the error without the reader's own frame in its traceback, which would keep the batch alive."""
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)


def _at_batch(error: BaseException) -> BaseException:
    """Return the error that ends the epoch; StopIteration of a transform must not look like the end of the iterable."""
    if not isinstance(error, (StopIteration, StopAsyncIteration)):
        return _without_frame(error)
    raised = RuntimeError(f"a transform of prefetch() raised {type(error).__name__}")
    raised.__cause__ = _without_frame(error)
    return raised


@atexit.register
def _close_all() -> None:
    """End the readers before the devices go. A reader that is blocked ends with the process."""
    readers = [reader for reader in _readers if reader.is_of_this_process()]
    for reader in readers:
        reader.close()
    deadline = time.monotonic() + _PATIENCE
    for reader in readers:
        if reader.ended is not None and not reader.is_blocked:
            try:
                reader.ended.exception(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue
