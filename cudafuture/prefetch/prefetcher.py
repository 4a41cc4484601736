"""Prefetcher: batches of any iterable, on the device before the program needs them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Literal

import torch

from cudafuture import _C, openmetrics
from cudafuture._arguments import parse_device, shown
from cudafuture._C import CUDAFuture
from cudafuture._modes import Modes
from cudafuture.prefetch._errors import second_loop
from cudafuture.prefetch._options import PrefetchOptions
from cudafuture.prefetch._reader import Reader
from cudafuture.prefetch._sender import Sender, SentBatch
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
    """Read an iterable ahead, and copy its batches to a device while earlier batches are in use.

    Args:
        iterable: a DataLoader, or any other iterable or async iterable. Each ``for`` over the prefetcher creates one
            iterator, in the caller's thread; a thread of the prefetcher reads the items. An async iterable is read in
            the running event loop, and is for ``async for``.
        device: the destination; None (default): the current accelerator, or the host if there is none. On the host
            nothing is copied, so an iterable that fills a tensor again must return clones, as for pinned tensors.
        depth: batches that are read ahead of the one in use, at least 1. Default 2.
        bytes: bytes of tensors that are read ahead; reading stops at `depth` or at `bytes`, whichever is reached first,
            but one batch is always read. None (default): no limit.
        priority: of the stream of the copies; lower is more urgent, 0 (default), -1 high.
        pin: use pinned memory for staging buffers; without it a copy on CUDA blocks the reader. "auto" (default): if
            possible; True: the first batch raises an error if not.
        transform: called with each batch on the device, in the prefetcher's thread, with the stream of the copies
            current and the grad mode, inference mode and autocast of the thread that began the epoch. The program gets
            its result. None (default): none.
        pack: copy the tensors of a batch in one transfer, through one staging buffer; see ``cudafuture.copy``. One kept
            tensor then keeps the memory of its batch. Default True.
        futures: yield a CUDAFuture of each batch as soon as the iterable has returned it. The future completes when the
            copy is enqueued, and fails on an error. Default False: yield batches.
        across_epochs: at the end of the iterable create the next iterator at once, and read ahead for the next ``for``.
            The next epoch is read in the grad mode, inference mode and autocast in which the previous one began. If it
            begins in others, the batches that were read ahead are dropped, and it starts with a new iterator.
            A callable is called with the number of the epoch, from 0, before each iterator is created: such as
            ``sampler.set_epoch``. Default False.

    A batch is a tensor or any nesting of lists, tuples, named tuples, mappings, dataclasses, and classes that
    ``torch.utils._pytree`` knows. Objects with a method ``to`` are moved by it, after their ``pin_memory`` if they have
    one. Other objects, and tensors that are on the device already, are passed on unchanged. Copies are never inference
    tensors: a batch that is taken in inference mode can be used for training afterwards.

    Streams are ordered in both directions. The stream that is current when a batch is taken waits for the batch's copy.
    Batches lie in memory of that stream, and a copy into memory waits for the work that the consumer had enqueued
    before it took a batch. Batches can therefore be dropped or kept at any time. ``record_stream`` is called only for
    batches that are taken on another stream than the previous one, for results of `transform`, for tensors that were on
    the device before, and with `futures`. The current streams of the caller do not change.

    An error of the iterable, of the copy or of the transform is raised in place of its batch, and ends the epoch.

    Raises:
        TypeError: `iterable` is not an iterable, or an argument has another type.
        ValueError: a depth or a number of bytes below 1, a priority above 0, or a device without streams.

    >>> for batch in prefetch([{"x": torch.ones(2), "id": 7}], "cpu"):
    ...     print(batch)
    {'x': tensor([1., 1.]), 'id': 7}
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__aiter__"):
        remedy = ""
        if hasattr(iterable, "__getitem__"):
            remedy = ": pass a DataLoader of it"
        elif callable(iterable) and not isinstance(iterable, torch.nn.Module):
            remedy = ": call it, and pass the iterable that it returns"
        raise TypeError(f"prefetch() takes an iterable, not {type(iterable).__name__}{remedy}")
    options = PrefetchOptions(depth, bytes, priority, pin, transform, pack, futures, across_epochs)
    target = _device_of(device)
    return Prefetcher(iterable, None if target.type == "cpu" else Sender(target, options), options)


class Prefetcher:
    """Iterable whose batches are read ahead and lie on the device. ``prefetch`` creates and documents it.

    Each ``for`` or ``async for`` over it is one epoch. It can be left at any time; the next one begins with a new
    iterator. One epoch is read at a time, so a new one ends the previous one: a step of its iterator raises
    RuntimeError. For two loops at a time, create two prefetchers.
    """

    def __init__(
        self, iterable: Iterable[Any] | AsyncIterable[Any], sender: Sender | None, options: PrefetchOptions
    ) -> None:
        self.device = torch.device("cpu") if sender is None else sender.device
        self._iterable, self._sender, self._options = iterable, sender, options
        self._is_async = not hasattr(iterable, "__iter__")
        self._number = 0  # of the next epoch
        self._state: Any = None  # of the iterable, after the batch that was taken last; None: not known
        self._current: Reader | None = None  # of the epoch that was begun last
        self._ahead: Reader | None = None  # of the epoch that the next __iter__ begins, and that is read already
        self._error: Exception | None = None  # the next __iter__ raises it
        self._counted = PrefetchStatistics()
        openmetrics.add(self, "prefetch", device=str(self.device), iterable=type(iterable).__name__)

    def __iter__(self) -> Epoch:
        """Begin an epoch; the previous one ends."""
        if self._is_async:
            raise TypeError("the iterable of this prefetcher is an async one: use `async for`")
        return self._begin()

    def __aiter__(self) -> Epoch:
        """Begin an epoch for ``async for``; the previous one ends."""
        return self._begin()

    def __repr__(self) -> str:
        reader = self._current
        state = "not reading" if reader is None or reader.is_closed else f"reading epoch {reader.number}"
        kind = type(self._iterable).__name__
        return f"<Prefetcher of a {kind} for {self.device}, {state}, {self._counted.batches} batches so far>"

    def __len__(self) -> int:
        """Return the length of the iterable; raise TypeError if it has none."""
        return len(self._iterable)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the epoch that is being read, and the one ahead. The prefetcher can be used again.

        >>> batches = prefetch(["a", "b"], "cpu")
        >>> epoch = iter(batches)
        >>> batches.close()
        >>> list(epoch), list(batches)
        ([], ['a', 'b'])
        """
        for reader in (self._current, self._ahead):
            if reader is not None:
                reader.close()
        if self._ahead is not None:
            self._number = self._ahead.number  # that epoch has not begun
        self._ahead = self._error = None
        if self._sender is not None:
            self._sender.release_slabs()

    def __del__(self) -> None:
        """Close the prefetcher."""
        with contextlib.suppress(AttributeError):  # its constructor was interrupted
            self.close()

    def statistics(self) -> PrefetchStatistics:
        """Return the counters since the prefetcher was created.

        >>> batches = prefetch(["a", "b"], "cpu")
        >>> list(batches)
        ['a', 'b']
        >>> batches.statistics().batches
        2
        """
        return dataclasses.replace(self._counted, bytes=0 if self._sender is None else self._sender.nbytes)

    def state_dict(self) -> Any:
        """Return a copy of the state of the iterator, or else of the iterable, after the batch that was taken last.

        It is the result of their ``state_dict``. Batches that are read ahead do not count, so a resumed program gets
        them again. If `across_epochs` is a callable, the state is ``{"epoch": number, "iterable": state}``.

        Raises:
            TypeError: neither the iterable nor its iterator has a method state_dict.

        >>> prefetch([1, 2], "cpu").state_dict()
        Traceback (most recent call last):
            ...
        TypeError: list has no state_dict(), so it cannot be resumed
        """
        if self._state is None and not hasattr(self._iterable, "state_dict"):
            raise TypeError(f"{type(self._iterable).__name__} has no state_dict(), so it cannot be resumed")
        epoch, state = self._state or (self._number, self._iterable.state_dict())  # type: ignore[union-attr]
        return {"epoch": epoch, "iterable": state} if callable(self._options.across_epochs) else state

    def load_state_dict(self, state: Any) -> None:
        """Make the next epoch begin after the batch at which `state` was taken; the current one ends.

        Raises:
            TypeError: the iterable has no load_state_dict().
            ValueError: `across_epochs` is a callable, and `state` has no epoch.

        >>> prefetch([1, 2], "cpu").load_state_dict({})
        Traceback (most recent call last):
            ...
        TypeError: list has no load_state_dict(), so it cannot be resumed
        """
        if not hasattr(self._iterable, "load_state_dict"):
            raise TypeError(f"{type(self._iterable).__name__} has no load_state_dict(), so it cannot be resumed")
        has_epoch = isinstance(state, dict) and {"epoch", "iterable"} <= {*state}
        if callable(self._options.across_epochs) and not has_epoch:
            raise ValueError(
                f"state is {{'epoch': number, 'iterable': state}}, as state_dict() returns it, not {shown(state)}"
            )
        self._stop()
        if callable(self._options.across_epochs):
            self._number, state = state["epoch"], state["iterable"]
        self._iterable.load_state_dict(state)
        self._state = (self._number, copy.deepcopy(state))

    def _begin(self) -> Epoch:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        modes = Modes()
        if self._current is not None and not self._current.is_closed:
            self._current.is_replaced = True
        if self._ahead is not None and self._ahead.modes != modes:
            self._drop_ahead()
        if self._ahead is not None and self._ahead.goes_on():
            if self._current is not None:
                self._current.close()
            self._current, self._ahead = self._ahead, None
        else:
            before = self._stop()
            self._current = self._make_reader(deque(), modes)
            try:
                state = self._current.snapshot()
            except BaseException:
                self._current.discard()
                raise
            self._state = None if state is None else (self._current.number, state)
            self._start(self._current, before)
        return Epoch(self, self._current)

    def _stop(self) -> Reader | None:
        """Close, and block until no thread is inside the iterable any more; return the last reader."""
        readers = [reader for reader in (self._current, self._ahead) if reader is not None]
        self.close()
        for reader in readers:
            reader.wait_until_ended()
        return readers[-1] if readers else None

    def _drop_ahead(self) -> None:
        """Drop the epoch ahead, and restore the state of the iterable from before it was read."""
        if self._state is not None and hasattr(self._iterable, "load_state_dict"):
            self.load_state_dict(self.state_dict())
        else:
            self._stop()

    def _make_reader(self, pending: deque[Any], modes: Modes) -> Reader:
        """Create an iterator of the iterable, and its reader. `pending` are batches that count as read ahead."""
        number = self._number
        if callable(self._options.across_epochs):
            self._options.across_epochs(number)
        iterator: Any = self._iterable.__aiter__() if self._is_async else iter(self._iterable)  # type: ignore[union-attr,arg-type]
        self._number = number + 1
        source: Any = next((each for each in (iterator, self._iterable) if _has_state(each)), None)
        snapshot = None if source is None else source.state_dict
        consumer = None if self._sender is None else _C.current_streams([self.device])[0]
        return Reader(iterator, self._sender, self._options, snapshot, consumer, pending, number, modes)

    def _start(self, reader: Reader, before: Reader | None) -> None:
        if self._is_async:
            reader.start_task(before)
        else:
            reader.start()

    def _begin_ahead(self, reader: Reader) -> None:
        """Start to read the next epoch when a reader has reached its end; in the consumer's thread."""
        if not (self._options.across_epochs and reader.has_read_all and self._current is reader):
            return
        if self._ahead is None and self._error is None and not reader.is_closed:
            reader.wait_until_ended()
            try:
                with reader.modes.applied():  # the consumer may be in others while it takes a batch
                    self._ahead = self._make_reader(reader.pending, reader.modes)
            except Exception as error:
                self._error = error
            else:
                self._start(self._ahead, reader)

    def _count(self, reader: Reader, batch: SentBatch, loader: float, since: float, until: float) -> None:
        """Count a batch that was taken, and keep the state after it. Times are those of ``Epoch._next``."""
        device = min(max((batch.packing_since or since) - since, 0.0), until - since)
        before = self._counted
        self._counted = PrefetchStatistics(
            before.batches + (not batch.is_end),
            0,
            before.waited_for_loader + loader,
            before.waited_for_packing + (until - since) - device,
            before.waited_for_device + device,
        )
        if batch.state is not None:
            self._state = (reader.number + batch.is_end, batch.state)


class Epoch:
    """Iterator of one epoch. It closes when it is freed."""

    def __init__(self, prefetcher: Prefetcher, reader: Reader) -> None:
        self._prefetcher, self._reader = prefetcher, reader
        self._sender, self._options = prefetcher._sender, prefetcher._options

    def __iter__(self) -> Epoch:
        """Return the iterator itself."""
        return self

    def __aiter__(self) -> Epoch:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, for whose copy the current stream waits; raise an error in place of its batch."""
        if self._prefetcher._is_async:
            raise TypeError("the iterable of this prefetcher is an async one: use `async for`")
        began = time.perf_counter()
        batch: SentBatch | None = None
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
        batch: SentBatch | None = None
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

    def _take(self, end: type[Exception]) -> SentBatch | CUDAFuture[None]:
        if self._reader.is_replaced:
            raise second_loop()
        if self._reader.is_closed:
            raise end
        return self._reader.take()

    def _hand_out(self, batch: SentBatch, loader: float, since: float, end: type[Exception]) -> Any:
        """Order the current stream after the batch and return the batch; raise `end` if there is no more."""
        gives_future = self._options.futures and not batch.is_end
        value = batch.future if gives_future else batch.future.wait(non_blocking=True)
        until = time.perf_counter()
        if batch.owner is not None and not gives_future:
            batch.record_use(_C.current_streams([batch.owner.device])[0])
        self._let_read(batch)
        self._prefetcher._count(self._reader, batch, loader, since, until)
        if batch.is_end:
            raise end
        return value

    def _let_read(self, batch: SentBatch) -> None:
        """Allow the reader to read one more batch, into memory of the current stream."""
        if self._sender is not None and not batch.is_end:
            self._reader.consumer = _C.current_streams([self._sender.device])[0]
            self._sender.reserve(self._options.depth)
        self._reader.acknowledge(batch)
        self._prefetcher._begin_ahead(self._reader)

    def _abandon(self, batch: SentBatch | None) -> None:
        """Close after an error in a step of this iterator."""
        if batch is not None:
            if not self._options.futures:
                batch.drop()
            batch.forget()
        self.close()

    def close(self) -> None:
        """End the epoch and drop the batches that were read ahead; the reader may still be inside the iterable."""
        self._reader.close()
        if self._sender is not None and self._prefetcher._current is self._reader and self._prefetcher._ahead is None:
            self._sender.release_slabs()

    def __del__(self) -> None:
        """Close the epoch."""
        with contextlib.suppress(AttributeError):  # its constructor was interrupted
            self.close()


def _device_of(device: torch.device | str | int | None) -> torch.device:
    """Return the device with its index; for None, the current accelerator, or the host if there is none."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    at = parse_device("device", device)
    return at if at.type == "cpu" else _C.with_index(at)


def _has_state(iterable: Any) -> bool:
    if isinstance(iterable, Prefetcher):
        return _has_state(iterable._iterable)
    return hasattr(iterable, "state_dict")


def _completion(future: CUDAFuture[Any]) -> CUDAFuture[None]:
    """Return a future that completes when `future` does, without waiting for a device."""
    completion: CUDAFuture[None] = CUDAFuture(name="prefetch")
    future.add_done_callback(lambda _: completion.set_result(None), executor=_C.inline_executor)
    return completion
