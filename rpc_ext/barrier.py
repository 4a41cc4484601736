"""A barrier between workers.

The first of the participants counts those that have arrived. All participants call it, including itself::

    barrier() ──► _arrive(names, number, ...) on the first worker ──► after the last arrival: the reply to each
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Sequence

from cudafuture import CUDAFuture, executors, timer
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext._serve import async_execution
from rpc_ext.calls import Worker, listed, rpc_async
from rpc_ext.session import Session, current

__all__ = ["barrier"]

_SLACK = 0.5  # seconds after the timeout that the first worker's reply may take

_lock = threading.Lock()  # guards what follows, and all barriers; a leaf
_Names = tuple[str, ...]
_numbers: weakref.WeakKeyDictionary[Session, collections.Counter[_Names]] = weakref.WeakKeyDictionary()
_barriers: weakref.WeakKeyDictionary[Session, dict[tuple[_Names, int], _Barrier]] = weakref.WeakKeyDictionary()


def barrier(workers: Sequence[Worker] | None = None, timeout: float | None = None) -> CUDAFuture[None]:
    """Return a future that completes when all `workers` have called ``barrier`` with the same workers.

    The n-th call of a worker matches the n-th call of each other worker. If a worker does not arrive in time, the
    barrier is broken: it fails for all workers, including those that arrive later.

    Args:
        workers: the participants by name, rank or WorkerInfo, in any order, including this worker; default: all.
        timeout: seconds; default: `rpc_timeout` of ``init_rpc``. inf: no limit.

    Raises:
        InvalidStateError: RPC has not begun.
        ValueError: there is no such worker, or this worker is not a participant.
        TypeError: `workers` is a str.

    The future fails with TimeoutError, which names the missing workers, or the first of the workers if it does not
    answer; or with WorkerLostError if that worker is lost.

    >>> barrier().wait()
    >>> barrier(["me"], timeout=10).wait()
    """
    session = current()
    taking_part = (
        session.destinations if workers is None else [session.destination(worker) for worker in listed(workers)]
    )
    names = tuple(d.name for d in sorted({d.rank: d for d in taking_part}.values(), key=lambda d: d.rank))
    if session.name not in names:
        raise ValueError(
            f"worker '{session.name}' is not a participant of a barrier of {', '.join(names) or 'no workers'}"
        )
    seconds = session.timeout(timeout)
    with _lock:
        numbers = _numbers.setdefault(session, collections.Counter())
        numbers[names] += 1
        number = numbers[names]
    arrival = (names, number, session.name, seconds)
    arrived = rpc_async(names[0], _arrive, arrival, timeout=seconds + _SLACK if seconds else math.inf)
    return arrived.then(functools.partial(_passed, names, seconds), executor=executors.inline)


def _passed(names: _Names, seconds: float, arrived: CUDAFuture[None]) -> None:
    """Raise the error of a barrier: that of the first worker, or one that names the first worker if it is lost."""
    try:
        arrived.value()
    except (TimeoutError, WorkerLostError) as e:
        if getattr(e, "remote_traceback", ""):
            raise  # the first worker has raised it
        how = f"has not answered within {seconds:g} s" if isinstance(e, TimeoutError) else "was lost"
        message = f"{_name_of(names)}: worker '{names[0]}', which counts the arrivals, {how}"
        raise TimeoutError(message) if isinstance(e, TimeoutError) else WorkerLostError(message, worker=names[0]) from e


@async_execution
def _arrive(names: _Names, number: int, name: str, seconds: float) -> CUDAFuture[None]:
    """Record the arrival of a worker; return the future of the barrier."""
    with _lock:
        barriers = _barriers.setdefault(current(), {})
        found = barriers.setdefault((names, number), _Barrier(names))
        found.arrived.add(name)
        is_complete = len(found.arrived) == len(names)
        if is_complete:
            del barriers[names, number]
        elif seconds:
            found.seconds = min(found.seconds, seconds)
            found.due = min(found.due, time.perf_counter() + seconds)
    if is_complete:
        with contextlib.suppress(InvalidStateError):  # it was broken before
            found.future.set_result(None)
    elif seconds:
        timer.schedule(found, found.due)
    return found.future


def _name_of(names: _Names) -> str:
    return f"barrier of {', '.join(names)}"


class _Barrier:
    """One barrier, on the worker that counts. Its future is the reply to all workers."""

    def __init__(self, names: _Names) -> None:
        self._names = names
        self.arrived: set[str] = set()
        self.due = self.seconds = math.inf
        self.future: CUDAFuture[None] = CUDAFuture(name=_name_of(names))

    def look(self, now: float) -> float | None:
        """Fail the barrier unless all workers have arrived. Called by the timer thread."""
        with _lock:
            missing = [name for name in self._names if name not in self.arrived]
            if not missing:
                return None
            if now < self.due:
                return self.due
        who = ", ".join(f"'{name}'" for name in missing)
        with contextlib.suppress(
            InvalidStateError
        ):  # the last worker has just arrived, or the barrier was broken before
            self.future.set_exception(
                TimeoutError(f"worker {who} has not arrived at the barrier within {self.seconds:g} s")
            )
        return None
