"""Workers in processes of their own, which may die, stop or stay away, and what is called there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import WorkerLostError

LONG = 60.0  # seconds until what has not come is a failure of the test
SHORT = 2.0  # seconds, of calls without a reply
SECRET = "known to the tests' workers"
NAMES = ("caller", "callee", "third")

_calls = itertools.count(1)
held: list[CUDAFuture[Any]] = []  # by the worker that runs these functions
release = threading.Event()


def begin(rank: int, size: int, store: str, **options: Any) -> rpc_ext.Session:
    """Start one of the workers that meet at a file; NAMES has the names of the first ones."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = {"secret": SECRET, "rpc_timeout": LONG, "start_timeout": LONG, **options}
    return rpc_ext.init_rpc(NAMES[rank], rank=rank, world_size=size, init_method=f"file://{store}", **options)


def be_lost() -> NoReturn:
    """Serve until the process is killed."""
    while True:
        signal.pause()


# ---- functions


def same(value: Any) -> Any:
    return value


@rpc_ext.async_execution
def hold() -> CUDAFuture[Any]:
    """Return a future that stays pending."""
    future: CUDAFuture[Any] = CUDAFuture()
    held.append(future)
    return future


@rpc_ext.async_execution
def hold_half(strike_at: int, sent: int) -> CUDAFuture[int]:
    """Answer every second call, and send this process a signal during the one of that number."""
    number = next(_calls)
    if number == strike_at:
        os.kill(os.getpid(), sent)
    return hold() if number % 2 else CUDAFuture.completed(number)


def go_on() -> None:
    """End ``wait_for_release`` in this process."""
    release.set()


def wait_for_release() -> None:
    assert release.wait(LONG)


def count_held() -> int:
    return len(held)


def complete_held(value: Any) -> int:
    """Complete what is held, once."""
    count = len(held)
    while held:
        held.pop().set_result(value)
    return count


# ---- what became of calls


def outcome(future: CUDAFuture[Any]) -> str:
    """Wait for a call to "callee": it ends, and where the worker is to blame it says so."""
    return blame(future.exception(timeout=LONG))


def blame(error: BaseException | None) -> str:
    if error is None:
        return "answered"
    assert isinstance(error, (WorkerLostError, TimeoutError)), repr(error)
    assert "worker 'callee'" in str(error)
    return type(error).__name__


def outcomes(futures: Iterable[CUDAFuture[Any]]) -> Counter[str]:
    return Counter(map(outcome, futures))
