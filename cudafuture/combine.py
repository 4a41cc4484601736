"""Combinators that make one future of several, and functions that wait for several futures."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from cudafuture import _C
from cudafuture._arguments import expect_number, listed, shown
from cudafuture._await import await_within
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError

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
        TypeError: `futures` is a single future, or an element is not a CUDAFuture.

    >>> ok, bad = collect_all([CUDAFuture.completed(1), CUDAFuture.failed(ValueError("no"))]).wait()
    >>> ok.value(), bad.exception()
    (1, ValueError('no'))
    """
    return _C.collect_all(_listed(futures))


def collect_any(futures: Iterable[CUDAFuture[T]]) -> CUDAFuture[tuple[int, T]]:
    """Return a future of the index and the value of the first future that completes, with that future's events only.

    If all fail, it fails with AllFailedError, whose ``exceptions`` are in the order of `futures`.

    Raises:
        TypeError: `futures` is a single future, or an element is not a CUDAFuture.
        ValueError: `futures` is empty.

    >>> collect_any([CUDAFuture(), CUDAFuture.completed("second")]).wait()
    (1, 'second')
    """
    return _C.collect_any(_listed(futures))


def wait_all(futures: Iterable[CUDAFuture[T]], timeout: float | None = None) -> list[T]:
    """Wait for all futures as ``wait()`` does, device work included, and return the list of their values.

    Args:
        futures: any number. The first failure is raised at once; the other futures continue.
        timeout: seconds for all futures together; None (default): no limit.

    Raises:
        TimeoutError: some futures were not done in time.
        TypeError: `futures` is a single future, or an element is not a CUDAFuture.
        any exception: that of the first future that failed.

    >>> wait_all([CUDAFuture.completed(1), CUDAFuture.completed(2)])
    [1, 2]
    """
    parts = _listed(futures)
    whole = gather(*parts)
    try:
        return whole.wait(timeout=timeout)
    except TimeoutError:
        if whole.done():  # a part has failed with it, or device work has not finished
            raise
        raise _timed_out(sum(not part.done() for part in parts), len(parts)) from None
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
        TypeError: `futures` is a single future, or an element is not a CUDAFuture.
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
        arrivals = _C.Arrivals(waiting)
        for _ in waiting:
            first = arrivals.next(left())
            if first is None or return_when == "FIRST_COMPLETED" or not _succeeded(first):
                break
        arrivals.close()
    done = {future for future in waiting if future.done()}
    return done, set(waiting) - done


def as_completed(futures: Iterable[CUDAFuture[T]], timeout: float | None = None) -> AsCompleted[T]:
    """Return an iterator over the futures in the order in which they are done, for ``for`` and ``async for``.

    Args:
        futures: the iterator returns each distinct future once.
        timeout: seconds until the last future is done; None (default): no limit.

    Raises:
        TimeoutError: during iteration, after `timeout`. The futures stay usable.
        TypeError: `futures` is a single future, or an element is not a CUDAFuture.

    The iterator keeps a future, and its value, only until it yields the future.

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
        self._total = len(self._futures)
        self._count = 0  # of the futures that an iteration has taken and has not yielded
        self._arrivals: _C.Arrivals | None = None  # of `for`

    def __next__(self) -> CUDAFuture[T]:
        if self._arrivals is None:
            self._arrivals = _C.Arrivals(self._take_futures())
        if self._count == 0:
            raise StopIteration
        future = self._arrivals.next(self._left())
        if future is None:
            raise self._end_in_time()
        self._count -= 1
        return future

    async def __aiter__(self) -> AsyncIterator[CUDAFuture[T]]:
        pending = self._take_futures()
        arrived: deque[CUDAFuture[T]] = deque()
        arrival: CUDAFuture[None] = CUDAFuture()

        def arrive(future: CUDAFuture[T]) -> None:
            arrived.append(future)
            del pending[future]
            with contextlib.suppress(InvalidStateError):  # several futures have arrived
                arrival.set_result(None)

        try:
            for future in tuple(pending):
                _C.add_ready_callback(future, arrive)
                del future  # the loop keeps no future
            while self._count > 0:
                while not arrived:  # again if a future that was yielded meanwhile has completed `arrival`
                    arrival = CUDAFuture()
                    if not arrived:  # otherwise the last one has arrived before `arrival` was new
                        try:
                            await await_within(arrival, self._left())
                        except TimeoutError:
                            raise self._end_in_time() from None
                self._count -= 1
                yield arrived.popleft()
        finally:
            for future in tuple(pending):
                future.remove_done_callback(arrive)

    def _take_futures(self) -> dict[CUDAFuture[T], None]:
        futures, self._futures = self._futures, {}  # a second iteration is empty
        self._count = len(futures)
        return futures

    def _end_in_time(self) -> TimeoutError:
        count, self._count = self._count, 0
        if self._arrivals is not None:
            self._arrivals.close()
        return _timed_out(count, self._total)


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


def _distinct(futures: Iterable[CUDAFuture[T]]) -> dict[CUDAFuture[T], None]:
    given = _listed(futures)
    for place, future in enumerate(given):
        if not isinstance(future, CUDAFuture):
            of_work = getattr(future, "future", None)  # the Work of a group with the backend "cudafuture"
            if isinstance(of_work, CUDAFuture):
                given[place] = of_work
                continue
            raise TypeError(
                f"{shown(future)} is not a CUDAFuture; CUDAFuture.from_torch() converts torch's futures and works"
            )
    return dict.fromkeys(given)


def _listed(futures: Iterable[CUDAFuture[T]]) -> list[CUDAFuture[T]]:
    return listed("futures", futures, "CUDAFutures")


def _timed_out(count: int, total: int) -> TimeoutError:
    return TimeoutError(f"timeout: {count} (of {total}) futures unfinished; they stay valid, so wait for them again")


def _succeeded(future: CUDAFuture[Any]) -> bool:
    return not future.cancelled() and _C.state(future) == "completed"
