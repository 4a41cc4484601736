"""One future out of many, and waiting for several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from cudafuture import _C
from cudafuture._C import CUDAFuture

__all__ = ["as_completed", "collect_all", "collect_any", "gather", "wait", "wait_all"]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")

_FOR_EVER = 1e9  # seconds: what event loops and clocks cannot count is no timeout

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

    It fails as soon as the first one fails, with that one's exception; a part that was cancelled counts as failed with
    CancelledError. The others go on. It is ordered after the device work of every part: their events are joined on one
    pool stream per device, of the most urgent part's priority.

    Args:
        futures: any number; none at all gives an empty list.
        cancel_parts: True: cancelling the returned future cancels every part. False (default): only itself.

    Raises:
        TypeError: something else than a CUDAFuture.

    >>> gather(CUDAFuture.completed(1), CUDAFuture.completed(2)).wait()
    [1, 2]
    """
    return _C.gather(futures, cancel_parts)


def collect_all(futures: Iterable[CUDAFuture[T]]) -> CUDAFuture[list[CUDAFuture[T]]]:
    """Return a future of the list of the futures themselves, complete when all are done, whatever their outcome.

    Raises:
        TypeError: something else than a CUDAFuture.

    >>> ok, bad = collect_all([CUDAFuture.completed(1), CUDAFuture.failed(ValueError("no"))]).wait()
    >>> ok.value(), bad.exception()
    (1, ValueError('no'))
    """
    return _C.collect_all(futures)


def collect_any(futures: Iterable[CUDAFuture[T]]) -> CUDAFuture[tuple[int, T]]:
    """Return a future of the index and the value of the first future that completes; it keeps that one's events only.

    When all fail it fails with AllFailedError, whose ``exceptions`` are theirs, in the order of `futures`.

    Raises:
        TypeError: something else than a CUDAFuture.
        ValueError: no futures at all.

    >>> collect_any([CUDAFuture(), CUDAFuture.completed("second")]).wait()
    (1, 'second')
    """
    return _C.collect_any(futures)


def wait_all(futures: Iterable[CUDAFuture[T]], timeout: float | None = None) -> list[T]:
    """Wait for all futures as ``wait()`` does, devices included, and return the list of their values.

    Args:
        futures: any number. As soon as one fails its exception is raised; the others go on.
        timeout: seconds for all together; None (default) waits for ever.

    Raises:
        TimeoutError: in time they were not all done.
        TypeError: something else than a CUDAFuture.
        any exception: that of the first future that failed.

    >>> wait_all([CUDAFuture.completed(1), CUDAFuture.completed(2)])
    [1, 2]
    """
    whole = gather(*futures)
    try:
        return whole.wait(timeout=timeout)
    finally:
        whole.cancel()  # where time was up: it must not take the failure of a part away from those who look later


def wait(
    futures: Iterable[CUDAFuture[T]], timeout: float | None = None, return_when: ReturnWhen = "ALL_COMPLETED"
) -> tuple[set[CUDAFuture[T]], set[CUDAFuture[T]]]:
    """Block until futures are done and return the sets of those that are and those that are not.

    It raises no future's error, and orders no stream: look at each future of the first set.

    Args:
        futures: any number.
        timeout: seconds; None (default) waits for ever. When it is over the sets are returned as they are.
        return_when: "ALL_COMPLETED" (default), "FIRST_COMPLETED" (any outcome), or "FIRST_EXCEPTION" (a failure or a
            cancellation; else all).

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
    """Return an iterator over the futures in the order in which they are done; also for ``async for``.

    Args:
        futures: each distinct one comes once.
        timeout: seconds until the last one; None (default) waits for ever.

    Raises:
        TimeoutError: while iterating, when the time is over. The futures stay good.

    >>> first, second = CUDAFuture(), CUDAFuture()
    >>> second.set_result(2); first.set_result(1)
    >>> sorted(future.value() for future in as_completed([first, second]))
    [1, 2]
    """
    return AsCompleted(futures, timeout)


class AsCompleted(Iterator[CUDAFuture[T]]):
    """What ``as_completed`` returns: an iterator, to be used up once, with ``for`` or with ``async for``."""

    def __init__(self, futures: Iterable[CUDAFuture[T]], timeout: float | None) -> None:
        self._futures = _distinct(futures)
        self._left = _Countdown(timeout)
        self._until_timeout = _until_timeout(self._futures, self._left)

    def __next__(self) -> CUDAFuture[T]:
        return next(self._until_timeout)

    async def __aiter__(self) -> AsyncIterator[CUDAFuture[T]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[CUDAFuture[T]] = asyncio.Queue()
        futures, self._futures = self._futures, ()  # a second time there are none

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
                    raise _time_is_over(futures) from None
        finally:
            for future in futures:
                _C.remove_done_callback(future, arrive)


def _until_timeout(futures: Collection[CUDAFuture[T]], left: _Countdown) -> Iterator[CUDAFuture[T]]:
    count = 0
    for future in _in_order_of_completion(futures, left):
        yield future
        count += 1
    if count < len(futures):
        raise _time_is_over(futures)


def _in_order_of_completion(futures: Collection[CUDAFuture[T]], left: _Countdown) -> Iterator[CUDAFuture[T]]:
    """Yield each future when it is done, whatever its callbacks do, and end early when the time is over."""
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
    """Calling it gives the seconds that are left of a timeout, at least 0; None where there is none."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is None (wait for ever) or seconds >= 0, not {timeout!r}")
        self._end = None if timeout is None or timeout > _FOR_EVER else time.monotonic() + timeout

    def __call__(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def _distinct(futures: Iterable[CUDAFuture[T]]) -> Collection[CUDAFuture[T]]:
    distinct = dict.fromkeys(futures)
    for future in distinct:
        if not isinstance(future, CUDAFuture):
            raise TypeError(
                f"CUDAFutures are wanted, not {future!r}; CUDAFuture.from_torch() makes one of torch's handles"
            )
    return distinct.keys()


def _time_is_over(futures: Collection[CUDAFuture[T]]) -> TimeoutError:
    return TimeoutError(f"{len(futures)} futures: the time is over and not all of them are done")


def _succeeded(future: CUDAFuture[Any]) -> bool:
    return not future.cancelled() and _C.state(future) == "completed"


def _is_ready(future: CUDAFuture[Any]) -> bool:
    try:
        return future.ready()
    except Exception:  # a late error: whoever waits for the future will see it
        return True
