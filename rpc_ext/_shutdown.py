"""The joint shutdown of all workers: no worker leaves while another may still need a reply or the store.

::

    all are here ──► references are released ──► no calls are in flight, twice ──► the first worker leaves last
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cudafuture import CUDAFuture, debug, fail
from cudafuture.errors import InvalidStateError, WorkerLostError
from rpc_ext import _C, _engine
from rpc_ext._handshake import Handshake

__all__ = ["leave"]

T = TypeVar("T")

_PAUSE = 0.001  # seconds between two polls of this worker's calls
_MOST_NAMED = 4  # calls in an error
_STORE_PATIENCE = 1.0  # seconds after the deadline that a reply of the store may take
_LAST_PATIENCE = 10.0  # seconds that the first worker, which may host the store, waits for the others to leave


def leave(agent: _C.Agent, handshake: Handshake, deadline: float) -> None:
    """Wait for the other workers until `deadline` (time.monotonic()), and release references to their values.

    Raises:
        TimeoutError: a worker has not arrived, or has calls in flight; or the store does not reply.
        WorkerLostError: the store was lost.
    """
    try:
        _ask(lambda: handshake.round("shutdown", True, deadline=deadline), deadline)
        try:
            _engine.forget_users(max(1.0, deadline - time.monotonic()))
        except RuntimeError as e:
            raise TimeoutError(f"a worker that owns values of RRefs was lost during shutdown: {e}") from e
        _wait_until_no_worker_calls(agent, handshake, deadline)
        agent.join(shutdown=True)
        last = min(deadline, time.monotonic() + _LAST_PATIENCE)
        _ask(lambda: handshake.leave(last), last)
    except _engine.StoreError as e:
        raise WorkerLostError(f"the store was lost during shutdown, with the worker that held it: {e}") from e
    finally:
        handshake.close()


def _wait_until_no_worker_calls(agent: _C.Agent, handshake: Handshake, deadline: float) -> None:
    """Wait until no calls are in flight between any workers.

    Workers poll at different times, and a call that is done may have made another call. So all workers must have no
    calls in flight in two rounds, and make none in between (Mattern's four counter method).
    """
    before: list[Any] = []
    for turn in itertools.count():
        while (active := _engine.calls_in_flight(agent)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if active:
            raise TimeoutError(
                f"{active} calls of this worker had no reply before the timeout of the shutdown{_named_calls()}"
            )
        now = _ask(
            functools.partial(handshake.round, f"idle/{turn}", [active, agent.sent()], deadline=deadline), deadline
        )
        if now == before and not any(active for active, _ in now):
            return
        before = now


def _named_calls() -> str:
    """Return the calls that wait for a reply, the first few by name; empty: none has a future."""
    calls = [
        future.description
        for future in debug.pending().futures()
        if future.operation is not None and future.operation.get("place") == "worker"
    ]
    more = f" and {len(calls) - _MOST_NAMED} more" if len(calls) > _MOST_NAMED else ""
    return f": {', '.join(calls[:_MOST_NAMED])}{more}" if calls else ""


def _ask(question: Callable[[], T], deadline: float) -> T:
    """Call a function of the store in a thread, which is abandoned if the store does not reply in time."""
    answer: CUDAFuture[T] = CUDAFuture()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # too late
            try:
                answer.set_result(question())
            except BaseException as e:
                fail(answer, e)

    threading.Thread(target=run, name="rpc_ext-shutdown", daemon=True).start()
    try:
        with contextlib.suppress(TimeoutError):
            answer.exception(timeout=max(0.0, deadline - time.monotonic()) + _STORE_PATIENCE)
    finally:
        is_late = answer.cancel()
    if is_late:
        raise TimeoutError("the store of the rendezvous did not reply before the timeout of the shutdown")
    return answer.wait()
