"""States of RPC in which a process ends, and the exits that are right; see test_endings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError
from rpc_ext import rpc_async, rpc_sync
from support.rpc_workers import begin, hold, release, same

ME = "caller"
keep: list[Any] = []  # objects that live until Python takes modules apart
running = threading.Event()


def nothing() -> None:
    pass


def pending_calls() -> None:
    for _ in range(50):
        future = rpc_async(ME, hold)
        future.add_done_callback(print)
        keep.extend([future, future.then(lambda f: f.value()), future.then_async(lambda f: rpc_async(ME, same, (f,)))])
    keep.append(keep)


def calls_in_flight() -> None:
    large = torch.ones(1 << 20)
    keep.extend(rpc_async(ME, same, (large,)) for _ in range(8))
    keep.extend(rpc_async(ME, same, (i,)) for i in range(200))


def calls_that_make_calls() -> None:
    """Leave callbacks that make the next call, whatever came of the last."""

    def again(_: object = None) -> None:
        running.set()
        with contextlib.suppress(InvalidStateError):
            rpc_async(ME, same, (1,)).add_done_callback(again)

    for _ in range(10):
        again()


def busy_threads() -> None:
    """Leave daemon threads that call and wait all the time."""

    def call() -> None:
        while True:
            with contextlib.suppress(Exception):
                rpc_sync(ME, same, (1,))
                running.set()

    for _ in range(4):
        threading.Thread(target=call, daemon=True).start()
    assert running.wait(60)


def an_open_batch() -> None:
    batch = rpc_ext.batch(ME)
    batch.__enter__()
    keep.append(batch)
    for i in range(250):
        keep.extend([rpc_async(ME, hold), rpc_async(ME, same, (i,))])


def references() -> None:
    made = rpc_ext.remote(ME, same, (1,))
    pending = rpc_ext.remote(ME, hold)
    keep.extend([made, pending, pending.get_future(), rpc_ext.RRef(CUDAFuture()), made.rpc_async().bit_length()])


def a_thread_that_waits_for_room() -> None:
    keep.extend(rpc_async(ME, hold) for _ in range(10))

    def wait() -> None:
        running.set()
        keep.append(rpc_async(ME, hold))

    threading.Thread(target=wait, daemon=True).start()
    assert running.wait(60)


def a_function_that_does_not_come_back() -> None:
    keep.append(rpc_async(ME, never_come_back))
    assert running.wait(60)


def never_come_back() -> None:
    running.set()
    release.wait()


def a_function_that_comes_back_at_the_last_moment() -> None:
    """Leave threads that Python does not let in again, when they want to go on."""
    keep.extend(rpc_async(ME, never_stop) for _ in range(2))
    assert running.wait(60)


def never_stop() -> None:
    running.set()
    while True:
        same(1)


SCENARIOS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        nothing,
        pending_calls,
        calls_in_flight,
        calls_that_make_calls,
        busy_threads,
        an_open_batch,
        references,
        a_thread_that_waits_for_room,
    )
}
SLOW = {f.__name__: f for f in (a_function_that_does_not_come_back, a_function_that_comes_back_at_the_last_moment)}


def fail() -> None:
    raise ValueError("the way this process ends")


WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "end": (nothing, 0),
    "sys.exit": (lambda: sys.exit(3), 3),
    "exception": (fail, 1),
    "os._exit": (lambda: os._exit(4), 4),
    "not graceful": (lambda: rpc_ext.shutdown(graceful=False), 0),
}


def main(say: Callable[[str], None], hear: Callable[[], str]) -> None:
    """Fork for each scenario and way that is read, and end so in the child; until "over"."""
    while (line := hear()) != "over":
        scenario, way, folder = json.loads(line)
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            signal.alarm(60)  # which ends a child that hangs
            begin(0, 1, str(Path(folder) / "store"), max_in_flight=10 if "room" in scenario else 4096)
            (SCENARIOS | SLOW)[scenario]()
            WAYS[way][0]()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        say(json.dumps({"code": code, "errors": errors.read()}))
        errors.close()
