"""Batches of any iterable, on the device before the program asks for them."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.prefetch._reader import Reader
from cudafuture.prefetch._sender import Batch, Sender
from cudafuture.prefetch.statistics import PrefetchStatistics

__all__ = ["Prefetcher", "prefetch"]


def prefetch(
    iterable: Iterable[Any] | AsyncIterable[Any],
    device: torch.device | str | int | None = None,
    *,
    depth: int = 2,
    bytes: int | None = None,
    priority: int = 0,
    pin: bool | Literal["auto"] = "auto",
    transform: Callable[[Any], Any] | None = None,
    pack: bool = True,
    futures: bool = False,
    across_epochs: bool | Callable[[int], object] = False,
) -> Prefetcher:
    """Read an iterable ahead, and copy its batches to a device while the batches before are in use.

    Args:
        iterable: a DataLoader, or any other iterable or async iterable. Each ``for`` over the prefetcher makes one
            iterator of it, in the caller's thread; a thread of the prefetcher pulls the items. An async iterable is
            pulled in the running event loop, and is for ``async for``.
        device: where to; None (default): the current accelerator, or the host where there is none. On the host nothing
            is copied, and all else is the same.
        depth: batches that are read ahead of the one in use, at least 1. Default 2.
        bytes: bytes of tensors that are read ahead; reading stops at `depth` or at `bytes`, whichever is reached first,
            and one batch is always read. None (default): any number.
        priority: of the stream of the copies; lower is more urgent, 0 (default), -1 high.
        pin: whether staging buffers are pinned memory, without which a copy on CUDA blocks the reader. "auto"
            (default): where that is possible; True: an error comes out at the first batch where it is not.
        transform: called with each batch on the device, in the prefetcher's thread, with the stream of the copies
            current and the grad mode and autocast of the thread that began the epoch. The program gets its result.
            None (default): none.
        pack: copy the tensors of a batch at once, through one staging buffer; see ``cudafuture.copy``. One tensor that
            is kept then keeps the memory of its batch. Default True.
        futures: yield a CUDAFuture of each batch as soon as the iterable has given it, which completes when the copy is
            enqueued, and fails where there was an error. Default False: yield batches.
        across_epochs: at the end of the iterable make the next iterator at once, and read ahead for the next ``for``. A
            callable is called with the number of the epoch, from 0, before each iterator is made: such as
            ``sampler.set_epoch``. Default False.

    A batch is a tensor or any nesting of lists, tuples, named tuples, mappings, dataclasses, and classes that
    ``torch.utils._pytree`` knows. Objects with a method ``to`` are moved by it, after their ``pin_memory`` if they have
    one. What is no tensor, and what is on the device already, is passed on.

    Streams are ordered both ways. The stream that is current where a batch is taken waits for the batch's copy. Batches
    lie in memory of that stream, and a copy into memory waits for what the consumer had enqueued before it took a
    batch. So batches can be dropped, or kept as long as one likes. ``record_stream`` is called only for batches that
    are taken on another stream than the one before, for results of `transform`, for what was on the device before, and
    with `futures`. The current streams of the caller stay as they are.

    An error of the iterable, of the copy or of the transform is raised at its batch, and ends the epoch.

    Raises:
        TypeError: no iterable.
        ValueError: a depth or a number of bytes below 1, a priority above 0, or a device without streams.

    >>> for batch in prefetch([{"x": torch.ones(2), "id": 7}], "cpu"):
    ...     print(batch)
    {'x': tensor([1., 1.]), 'id': 7}
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__aiter__"):
        raise TypeError(f"prefetch() takes an iterable, not {type(iterable).__name__}")
    if depth < 1:
        raise ValueError(f"depth={depth}: at least one batch is read ahead")
    if bytes is not None and bytes < 1:
        raise ValueError(f"bytes={bytes}: at least 1, or None for any number")
    if pin not in (True, False, "auto"):
        raise ValueError(f"pin={pin!r}: pass True, False or 'auto'")
    if priority > 0:
        raise ValueError(f"priority={priority}: 0 (the default) or negative (more urgent)")
    target = _device_of(device)
    sender = None if target.type == "cpu" else Sender(target, priority, pin, pack, transform, futures)
    return Prefetcher(iterable, sender, _Options(depth, bytes or math.inf, transform, futures, across_epochs))


@dataclass(frozen=True)
class _Options:
    """Arguments of ``prefetch``."""

    depth: int
    bytes: float
    transform: Callable[[Any], Any] | None
    futures: bool
    across_epochs: bool | Callable[[int], object]


class Prefetcher:
    """An iterable whose batches are read ahead and lie on the device. ``prefetch`` makes one, and says what it does.

    Each ``for`` or ``async for`` over it is one epoch. It can be left at any time; the next one begins with a new
    iterator. One epoch is read at a time, so that a new one ends the one before.
    """

    def __init__(self, iterable: Iterable[Any] | AsyncIterable[Any], sender: Sender | None, options: _Options) -> None:
        self.device = torch.device("cpu") if sender is None else sender.device
        self._iterable = iterable
        self._sender = sender
        self._options = options
        self._number = 0  # of the next epoch
        self._state: Any = None  # of the iterable, behind the batch that was taken last; None: not known
        self._ahead: Epoch | None = None  # that is read already, for the next __iter__
        self._current: weakref.ref[Epoch] | None = None
        self._last: Reader | None = None  # whose thread may still be inside the iterable
        self._counted = PrefetchStatistics()

    def __iter__(self) -> Epoch:
        """Begin an epoch; the one before ends."""
        if not hasattr(self._iterable, "__iter__"):
            raise TypeError("the iterable of this prefetcher is an async one: use `async for`")
        return self._begin()

    def __aiter__(self) -> Epoch:
        """Begin an epoch for ``async for``; the one before ends."""
        return self._begin()

    def __len__(self) -> int:
        """Return the length of the iterable; raise TypeError where it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the epoch that is being read, and the one ahead. The prefetcher can be used again.

        >>> batches = prefetch(["a", "b"], "cpu")
        >>> epoch = iter(batches)
        >>> batches.close()
        >>> list(epoch), list(batches)
        ([], ['a', 'b'])
        """
        current = None if self._current is None else self._current()
        for epoch in (current, self._ahead):
            if epoch is not None:
                epoch.close()
        self._current = self._ahead = None

    def statistics(self) -> PrefetchStatistics:
        """Return what was done since the prefetcher was made.

        >>> batches = prefetch(["a", "b"], "cpu")
        >>> list(batches)
        ['a', 'b']
        >>> batches.statistics().batches
        2
        """
        return self._counted

    def state_dict(self) -> Any:
        """Return what the iterable's own ``state_dict`` returned behind the batch that was taken last.

        Batches that are read ahead do not count, so a resumed program gets them again.

        Raises:
            TypeError: neither the iterable nor its iterator has a method state_dict.

        >>> prefetch([1, 2], "cpu").state_dict()
        Traceback (most recent call last):
            ...
        TypeError: list has no state_dict(), so it cannot be resumed
        """
        if self._state is not None:
            return self._state
        if not hasattr(self._iterable, "state_dict"):
            raise TypeError(f"{type(self._iterable).__name__} has no state_dict(), so it cannot be resumed")
        return self._iterable.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Have the next epoch begin behind the batch at which `state` was taken; the current one ends.

        Raises:
            TypeError: the iterable has no load_state_dict().

        >>> prefetch([1, 2], "cpu").load_state_dict({})
        Traceback (most recent call last):
            ...
        TypeError: list has no load_state_dict(), so it cannot be resumed
        """
        if not hasattr(self._iterable, "load_state_dict"):
            raise TypeError(f"{type(self._iterable).__name__} has no load_state_dict(), so it cannot be resumed")
        self.close()
        self._wait_for_last()
        self._iterable.load_state_dict(state)
        self._state = state

    def _begin(self) -> Epoch:
        if self._ahead is not None:
            epoch, self._ahead = self._ahead, None
        else:
            self.close()
            self._wait_for_last()
            epoch = self._make_epoch(deque())
            self._state = epoch.reader.snapshot() if epoch.reader.snapshot is not None else None
            epoch.start()
        self._current = weakref.ref(epoch)
        return epoch

    def _wait_for_last(self) -> None:
        """Block until the thread of the epoch before is out of the iterable, which may be the same iterator."""
        if self._last is not None and self._last.ended is not None:
            self._last.ended.exception()
        self._last = None

    def _make_epoch(self, pending: deque[Any]) -> Epoch:
        """Make an iterator of the iterable, and what reads it. `pending` are batches that count as read ahead."""
        if callable(self._options.across_epochs):
            self._options.across_epochs(self._number)
        self._number += 1
        is_async = not hasattr(self._iterable, "__iter__")
        iterator: Any = self._iterable.__aiter__() if is_async else iter(self._iterable)  # type: ignore[union-attr,arg-type]
        source: Any = next((each for each in (iterator, self._iterable) if _has_state(each)), None)
        self._last = Reader(
            iterator,
            self._sender,
            self._options.transform,
            self._options.depth,
            self._options.bytes,
            None if source is None else source.state_dict,
            None if self._sender is None else _C.current_streams([self.device])[0],
            pending,
            self._options.futures,
        )
        return Epoch(self, self._last, is_async)

    def _begin_ahead(self, reader: Reader) -> None:
        """Read on with the next epoch when a reader has come to its end; in the consumer's thread."""
        if self._options.across_epochs and reader.has_read_all and self._last is reader and self._ahead is None:
            self._wait_for_last()
            self._ahead = self._make_epoch(reader.pending)
            self._ahead.start()

    def _count(self, batch: Batch, loader: float, since: float, until: float) -> None:
        """Count a batch that was taken, and keep the state behind it. Times are those of ``Epoch._next``."""
        device = min(max((batch.packing_since or since) - since, 0.0), until - since)
        before = self._counted
        self._counted = PrefetchStatistics(
            before.batches + (not batch.is_end),
            before.bytes + batch.nbytes,
            before.waited_for_loader + loader,
            before.waited_for_packing + (until - since) - device,
            before.waited_for_device + device,
        )
        if batch.state is not None:
            self._state = batch.state


class Epoch:
    """The iterator of one epoch. It closes when it is dropped."""

    def __init__(self, prefetcher: Prefetcher, reader: Reader, is_async: bool) -> None:
        self.reader = reader
        self._prefetcher = prefetcher
        self._sender, self._options = prefetcher._sender, prefetcher._options
        self._is_async = is_async
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to read: in a thread, or in a task of the running event loop."""
        if self._is_async:
            self._task = asyncio.get_running_loop().create_task(self.reader.run_async())
        else:
            self.reader.start()

    def __iter__(self) -> Epoch:
        """Return the iterator itself."""
        return self

    def __aiter__(self) -> Epoch:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, for whose copy the current stream waits; raise the error that came instead of it."""
        began = time.perf_counter()
        batch: Batch | None = None
        try:
            while isinstance(taken := self._take(StopIteration), CUDAFuture):
                taken.wait()
            batch, since = taken, time.perf_counter()
            return self._hand_out(batch, since - began, since, StopIteration)
        except BaseException:
            self._abandon(batch)
            raise

    async def __anext__(self) -> Any:
        """Return the next batch as ``__next__`` does, without blocking the event loop."""
        began = time.perf_counter()
        batch: Batch | None = None
        try:
            while isinstance(taken := self._take(StopAsyncIteration), CUDAFuture):
                await taken
            batch, since = taken, time.perf_counter()
            if not self._options.futures:
                await _completion(batch.future)
            return self._hand_out(batch, since - began, since, StopAsyncIteration)
        except BaseException:
            self._abandon(batch)
            raise

    def _take(self, end: type[Exception]) -> Batch | CUDAFuture[None]:
        if self._is_over:
            raise end
        return self.reader.take()

    def _hand_out(self, batch: Batch, loader: float, since: float, end: type[Exception]) -> Any:
        """Order the current stream after the batch and return that; where there is no more, raise `end`."""
        gives_future = self._options.futures and not batch.is_end
        value = batch.future if gives_future else batch.future.wait(non_blocking=True)
        until = time.perf_counter()
        if batch.owner is not None and not gives_future:
            batch.record_use(_C.current_streams([batch.owner.device])[0])
        self._let_read(batch)
        self._prefetcher._count(batch, loader, since, until)
        if batch.is_end:
            raise end
        return value

    def _let_read(self, batch: Batch) -> None:
        """Let the reader read one batch more, into memory of the current stream."""
        if self._sender is not None and not batch.is_end:
            self.reader.consumer = _C.current_streams([self._sender.device])[0]
            self._sender.reserve(self._options.depth)
        batch.taken.set_result(None)
        self._prefetcher._begin_ahead(self.reader)

    def _abandon(self, batch: Batch | None) -> None:
        """Close after an error in a step of this iterator."""
        if batch is not None:
            if not self._options.futures:
                batch.drop()
            batch.forget()
            if not batch.taken.done():
                batch.taken.set_result(None)
        self.close()

    def close(self) -> None:
        """End the epoch and drop the batches that were read ahead; the reader may still be inside the iterable."""
        if self._is_over:
            return
        self._is_over = True
        self.reader.close()
        if self._sender is not None and self._prefetcher._ahead is None:
            self._sender.release_slabs()
        if self._task is not None and not self._task.done():
            loop = self._task.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._task.cancel)

    def __del__(self) -> None:
        """Close."""
        self.close()


def _device_of(device: torch.device | str | int | None) -> torch.device:
    """Return the device with its index; the current accelerator for None, or the host where there is none."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    at = torch.device(device)
    return at if at.type == "cpu" else _C.pool_stream(at, 0).device


def _has_state(iterable: Any) -> bool:
    if isinstance(iterable, Prefetcher):
        return _has_state(iterable._iterable)
    return hasattr(iterable, "state_dict")


def _completion(future: CUDAFuture[Any]) -> CUDAFuture[None]:
    """Return a future that completes when `future` does, and has no device to wait for."""
    completion: CUDAFuture[None] = CUDAFuture(name="prefetch")
    future.add_done_callback(lambda _: completion.set_result(None))
    return completion
