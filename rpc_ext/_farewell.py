"""The shutdown of all workers together: none leaves while another may still need an answer, or the store.

::

    all are here ──► references are given back ──► nobody has calls under way, twice ──► the first worker leaves last
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cudafuture.errors import WorkerLostError
from rpc_ext import _C, _engine, _naps
from rpc_ext._exchange import Exchange

__all__ = ["leave"]

T = TypeVar("T")

_PAUSE = 0.001  # seconds between two looks at one's own calls
_STORE_PATIENCE = 1.0  # seconds that an answer of the store may be late
_LAST_PATIENCE = 10.0  # seconds that the first worker, which may hold the store, waits for the others to be gone


def leave(agent: _C.Agent, exchange: Exchange, deadline: float) -> None:
    """Wait for the other workers, until `deadline` (time.monotonic()), and let go of their values.

    Raises:
        TimeoutError: a worker has not come, or has calls under way; or the store does not answer.
        WorkerLostError: the store is gone.
    """
    try:
        with _Asker(exchange) as asker:
            asker.ask(functools.partial(exchange.meet, "shutdown", True, deadline), deadline)
            _give_references_back(deadline)
            _wait_until_nobody_calls(agent, exchange, asker, deadline)
            agent.join(shutdown=True)
            last = min(deadline, time.monotonic() + _LAST_PATIENCE)
            asker.ask(functools.partial(exchange.leave, last), last)
    except _engine.StoreError as e:
        raise WorkerLostError(f"the store was lost during shutdown, with the worker that held it: {e}") from e


def _give_references_back(deadline: float) -> None:
    try:
        _engine.forget_users(max(1.0, deadline - time.monotonic()))
    except RuntimeError as e:
        raise TimeoutError(f"a worker that owns values of RRefs was lost in the midst of shutdown: {e}") from e


def _wait_until_nobody_calls(agent: _C.Agent, exchange: Exchange, asker: _Asker, deadline: float) -> None:
    """Wait until no calls are under way anywhere.

    Workers look at different moments, and a call that is answered may have made another. So nobody calls when all have
    seen that they do not, and have made no calls since they saw it before. (The idea is Mattern's four counter method.)
    """
    before: list[Any] = []
    for turn in itertools.count():
        while (active := _engine.calls_under_way(agent)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if active:
            raise TimeoutError(f"{active} calls of this worker had no answer when the time for shutdown was over")
        show = functools.partial(exchange.meet, f"idle/{turn}", [active, agent.sent()], deadline)
        now = asker.ask(show, deadline)
        if now == before and not any(active for active, _ in now):
            return
        before = now


class _Asker:
    """Asks things of the store, in a thread that is left behind where no answer comes: the network may be gone.

    Should one come later, the thread ends, and leaves the store alone.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._asks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def __enter__(self) -> _Asker:
        threading.Thread(target=self._run, name="rpc_ext-farewell", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.is_over = True
        self._asks.put(None)

    def ask(self, question: Callable[[], T], deadline: float) -> T:
        self._asks.put(question)
        answers: list[tuple[Any, BaseException | None]] = []

        def has_come(nap: float) -> bool:
            with contextlib.suppress(queue.Empty):
                answers.append(self._answers.get(timeout=nap))
            return bool(answers)

        if not _naps.wait(has_come, max(0.0, deadline - time.monotonic()) + _STORE_PATIENCE):
            raise TimeoutError("the store at which the workers meet did not answer in the time for shutdown")
        value, error = answers[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _run(self) -> None:
        while (question := self._asks.get()) is not None:
            try:
                self._answers.put((question(), None))
            except BaseException as e:
                self._answers.put((None, e))
