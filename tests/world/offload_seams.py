"""What holds an offload up until a test lets it go on: its disk, or a service that keeps requests to itself."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.storage import Engine
from rpc_ext._offload_desk import Desk
from rpc_ext.remote_offloader import RemoteOffloader
from world.rpc_callees import PATIENCE, wait_for


def held() -> Engine:
    """Return a disk that gives no result before ``let_go()``."""
    return Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})


@contextlib.contextmanager
def let_go_at_the_end(engine: Engine) -> Iterator[None]:
    """Let the disk go also when the test fails: whoever is closed waits for it."""
    try:
        yield
    finally:
        engine._native.let_go()


def expect_idle(remote: RemoteOffloader) -> None:
    """See that nothing is under way any more: else ``close()`` would wait for ever."""

    def is_idle() -> bool:
        found = remote.statistics()
        return (found.pending, found.under_way, found.waiting) == (0, 0, 0)

    wait_for(is_idle)


class Lost:
    """Requests of a kind that get no answer while this lasts, as where a connection has stalled; they are made later.

    Args:
        kind: begin, end, keys or stat: a function of a service that returns at once.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._goes_on = threading.Event()
        self.made: collections.deque[None] = collections.deque()
        """one entry for each request that has been made in the end"""

    def let_go(self) -> None:
        """Have all of them made now."""
        self._goes_on.set()

    def __enter__(self) -> Lost:
        self._patch = pytest.MonkeyPatch()
        real: Callable[..., Any] = getattr(Desk, self._kind)

        def wait(desk: Desk, *args: object) -> Any:
            assert self._goes_on.wait(PATIENCE)
            try:
                return real(desk, *args)
            finally:
                self.made.append(None)

        self._patch.setattr(Desk, self._kind, wait)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._patch.undo()
        self._goes_on.set()


class Kept:
    """Requests of a kind, which the services of this process keep until the test lets them go on, or fails.

    Args:
        kind: put, get, or delete.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._come: queue.Queue[CUDAFuture[None]] = queue.Queue()
        self._kept: list[CUDAFuture[None]] = []

    def next(self) -> CUDAFuture[None]:
        """Wait for the next request, and return what is to be completed for it to go on."""
        return self._come.get(timeout=PATIENCE)

    def has_more(self) -> bool:
        """Say whether another one has come."""
        return not self._come.empty()

    def __enter__(self) -> Kept:
        self._patch = pytest.MonkeyPatch()
        real: Callable[..., CUDAFuture[Any]] = getattr(Desk, self._kind)

        def keep(desk: Desk, *args: object) -> CUDAFuture[Any]:
            goes_on: CUDAFuture[None] = CUDAFuture()
            self._kept.append(goes_on)
            self._come.put(goes_on)
            return goes_on.then_async(lambda _: real(desk, *args))

        self._patch.setattr(Desk, self._kind, keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Keep none that comes from now on; and none at all where the test has failed."""
        self._patch.undo()
        for goes_on in self._kept if error is not None else ():
            with contextlib.suppress(InvalidStateError):  # it has gone on
                goes_on.set_result(None)
