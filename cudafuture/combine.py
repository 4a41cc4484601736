"""Combinators that make one future of several, and functions that wait for several futures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from cudafuture import _C
from cudafuture._arguments import expect_number
from cudafuture._C import CUDAFuture

__all__ = ["as_completed", "collect_all", "collect_any", "gather", "wait", "wait_all"]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")

_LONGEST_TIMEOUT = 1e9  # seconds: event loops and clocks cannot count more, so more means no timeout

ReturnWhen = Literal["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"]


@overload
def gather(f1: CUDAFuture[T1], /, *, cancel_parts: bool = ...) -> CUDAFuture[list[T1]]: ...
@overload
def gather(f1: CUDAFuture[T1], f2: CUDAFuture[T2], /, *, cancel_parts: bool = ...) -> CUDAFuture[list[T1 | T2]]: ...
@overload
def gather(
    f1: CUDAFuture[T1], f2: CUDAFuture[T2], f3: CUDAFuture[T3], /, *, cancel_parts: bool = ...
) -> CUDAFuture[list[T1 | T2 | T3]]: ...
@overload
def gather(*futures: CUDAFuture[T], cancel_parts: bool = ...) -> CUDAFuture[list[T]]: ...
def gather(*futures: CUDAFuture[Any], cancel_parts: bool = False) -> CUDAFuture[list[Any]]:
    """Return a future of the list of the futures' values, in their order.

    It fails with the exception of the first future that fails; a cancelled one counts as failed with CancelledError.
    The other futures continue. The list is ordered after the device work of every future: their events are joined on
    one pool stream per device, with the priority of the most urgent future.

    Args:
        futures: any number; no futures give an empty list.
        cancel_parts: True: cancelling the returned future cancels every given future. False (default): only itself.

    Raises:
        TypeError: an argument is not a CUDAFuture.

    >>> gather(CUDAFuture.completed(1), CUDAFuture.completed(2)).wait()
    [1, 2]
    """
    return _C.gather(futures, cancel_parts)


def collect_all(futures: Iterable[CUDAFuture[T]]) -> CUDAFuture[list[CUDAFuture[T]]]:
    """Return a future of the list of the given futures; it completes when all are done, for every outcome.

    Raises:
        TypeError: an element is not a CUDAFuture.

    >>> ok, bad = collect_all([CUDAFuture.completed(1), CUDAFuture.failed(ValueError("no"))]).wait()
    >>> ok.value(), bad.exception()
    (1, ValueError('no'))
    """
    return _C.collect_all(futures)


def collect_any(futures: Iterable[CUDAFuture[T]]) -> CUDAFuture[tuple[int, T]]:
    """Return a future of the index and the value of the first future that completes, with that future's events only.

    If all fail, it fails with AllFailedError, whose ``exceptions`` are in the order of `futures`.

    Raises:
        TypeError: an element is not a CUDAFuture.
        ValueError: `futures` is empty.

    >>> collect_any([CUDAFuture(), CUDAFuture.completed("second")]).wait()
    (1, 'second')
    """
    return _C.collect_any(futures)


def wait_all(futures: Iterable[CUDAFuture[T]], timeout: float | None = None) -> list[T]:
    """Wait for all futures as ``wait()`` does, device work included, and return the list of their values.

    Args:
        futures: any number. The first failure is raised at once; the other futures continue.
        timeout: seconds for all futures together; None (default): no limit.

    Raises:
        TimeoutError: some futures were not done in time.
        TypeError: an element is not a CUDAFuture.
        any exception: that of the first future that failed.

    >>> wait_all([CUDAFuture.completed(1), CUDAFuture.completed(2)])
    [1, 2]
    """
    whole = gather(*futures)
    try:
        return whole.wait(timeout=timeout)
    finally:
        whole.cancel()  # after a timeout, the combined future must not retrieve a failure before a later consumer


def wait(
    futures: Iterable[CUDAFuture[T]], timeout: float | None = None, return_when: ReturnWhen = "ALL_COMPLETED"
) -> tuple[set[CUDAFuture[T]], set[CUDAFuture[T]]]:
    """Block until futures are done and return two sets: the futures that are done, and the others.

    It raises no future's error and orders no stream: check each future of the first set.

    Args:
        futures: any number.
        timeout: seconds; None (default): no limit. After a timeout, the sets are returned as they are.
        return_when: "ALL_COMPLETED" (default), "FIRST_COMPLETED" (any outcome), or "FIRST_EXCEPTION" (a failure or a
            cancellation; if there is none, all).

    Raises:
        ValueError: an unknown `return_when`, a negative timeout.

    >>> pending = CUDAFuture()
    >>> done, not_done = wait([CUDAFuture.completed(1), pending], return_when="FIRST_COMPLETED")
    >>> len(done), not_done == {pending}
    (1, True)
    """
    if return_when not in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"):
        raise ValueError(f"return_when is 'ALL_COMPLETED', 'FIRST_COMPLETED' or 'FIRST_EXCEPTION', not {return_when!r}")
    waiting = _distinct(futures)
    left = _Countdown(timeout)
    if return_when == "ALL_COMPLETED":
        for future in waiting:
            if not _C.wait_done(future, left()):
                break
    elif return_when == "FIRST_EXCEPTION" or not any(f.done() for f in waiting):
        for future in _in_order_of_completion(waiting, left):
            if return_when == "FIRST_COMPLETED" or not _succeeded(future):
                break
    done = {future for future in waiting if future.done()}
    return done, set(waiting) - done


def as_completed(futures: Iterable[CUDAFuture[T]], timeout: float | None = None) -> AsCompleted[T]:
    """Return an iterator over the futures in the order in which they are done, for ``for`` and ``async for``.

    Args:
        futures: the iterator returns each distinct future once.
        timeout: seconds until the last future is done; None (default): no limit.

    Raises:
        TimeoutError: during iteration, after `timeout`. The futures stay usable.

    >>> first, second = CUDAFuture(), CUDAFuture()
    >>> second.set_result(2); first.set_result(1)
    >>> sorted(future.value() for future in as_completed([first, second]))
    [1, 2]
    """
    return AsCompleted(futures, timeout)


class AsCompleted(Iterator[CUDAFuture[T]]):
    """Iterator that ``as_completed`` returns. Use it once, with ``for`` or with ``async for``."""

    def __init__(self, futures: Iterable[CUDAFuture[T]], timeout: float | None) -> None:
        self._futures = _distinct(futures)
        self._left = _Countdown(timeout)
        self._until_timeout = _until_timeout(self._futures, self._left)

    def __next__(self) -> CUDAFuture[T]:
        return next(self._until_timeout)

    async def __aiter__(self) -> AsyncIterator[CUDAFuture[T]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[CUDAFuture[T]] = asyncio.Queue()
        futures, self._futures = self._futures, ()  # a second iteration is empty

        def arrive(future: CUDAFuture[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, future)

        try:
            for future in futures:
                if _is_ready(future):
                    arrived.put_nowait(future)
                else:
                    _C.add_ready_callback(future, arrive)
            for _ in futures:
                try:
                    yield (
                        arrived.get_nowait() if arrived.qsize() else await asyncio.wait_for(arrived.get(), self._left())
                    )
                except asyncio.TimeoutError:  # the builtin one since Python 3.11
                    raise _timed_out(futures) from None
        finally:
            for future in futures:
                _C.remove_done_callback(future, arrive)


def _until_timeout(futures: Collection[CUDAFuture[T]], left: _Countdown) -> Iterator[CUDAFuture[T]]:
    count = 0
    for future in _in_order_of_completion(futures, left):
        yield future
        count += 1
    if count < len(futures):
        raise _timed_out(futures)


def _in_order_of_completion(futures: Collection[CUDAFuture[T]], left: _Countdown) -> Iterator[CUDAFuture[T]]:
    """Yield each future when it is done, independent of its callbacks; end early after the timeout."""
    arrivals = _C.Arrivals(tuple(futures))
    try:
        for _ in futures:
            future = arrivals.next(left())
            if future is None:
                return
            yield future
    finally:
        arrivals.close()


class _Countdown:
    """Countdown of a timeout. Calling it returns the seconds left, at least 0, or None without a timeout."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None:
            expect_number("timeout", timeout)
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is None (no limit) or seconds >= 0, not {timeout!r}")
        self._end = None if timeout is None or timeout > _LONGEST_TIMEOUT else time.monotonic() + timeout

    def __call__(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def _distinct(futures: Iterable[CUDAFuture[T]]) -> Collection[CUDAFuture[T]]:
    distinct = dict.fromkeys(futures)
    for future in distinct:
        if not isinstance(future, CUDAFuture):
            raise TypeError(
                f"{future!r} is not a CUDAFuture; CUDAFuture.from_torch() converts torch's futures and works"
            )
    return distinct.keys()


def _timed_out(futures: Collection[CUDAFuture[T]]) -> TimeoutError:
    return TimeoutError(f"waiting for {len(futures)} futures timed out: not all of them are done")


def _succeeded(future: CUDAFuture[Any]) -> bool:
    return not future.cancelled() and _C.state(future) == "completed"


def _is_ready(future: CUDAFuture[Any]) -> bool:
    try:
        return future.ready()
    except Exception:  # a late error: the consumer that waits for the future raises it
        return True
