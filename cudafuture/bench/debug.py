"""Benchmark of what is always on for `cudafuture.debug`, and of the question to other processes.

    cudafuture bench debug [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

"register" is the difference between two loops with the same calls: in the peer's, the future is done before it is
registered, which has no effect.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cudafuture import _C, debug
from cudafuture.bench._rows import Row, Suite, by_turns, control
from cudafuture.executors import inline
from cudafuture.future import CUDAFuture

__all__ = ["SUITE"]

now = time.perf_counter_ns

PROCESS = """
import sys
from cudafuture import CUDAFuture, debug

futures = []
for number in range(int(sys.argv[1]) // 2):
    read = CUDAFuture(name=f"read shard {number}")
    debug.register(read, debug.OperationPlace.find("store", "benchmark"), number=number, nbytes=4096)
    futures += [read, read.then(lambda f: f.value())]
print("ready", flush=True)
sys.stdin.read()
"""


def registered(count: int) -> float:
    start = now()
    for number in range(count):
        future = CUDAFuture[None](executor=inline)  # as the futures of engines have one
        _C.register(future, None, number, 8)
        future.set_result(None)
    return (now() - start) / count


def unregistered(count: int) -> float:
    start = now()
    for number in range(count):
        future = CUDAFuture[None](executor=inline)  # as the futures of engines have one
        future.set_result(None)
        _C.register(future, None, number, 8)
    return (now() - start) / count


def register(rounds: int) -> Row:
    """Measure what an operation of an engine pays: to enter the registry, and to leave it."""
    ours, peer, same = by_turns(
        rounds, lambda: registered(20_000), lambda: unregistered(20_000), lambda: unregistered(20_000)
    )
    difference = statistics.median(o - p for o, p in zip(ours, peer, strict=True))
    what = "create, register, complete; the peer registers too late"
    noise = control("peer - peer, ns", [s - p for s, p in zip(same, peer, strict=True)])
    medians = statistics.median(ours), statistics.median(peer)
    return Row("register", what, "ns", *medians, "unregistered", "more", difference, 40, *noise)


def ps(rounds: int, processes: int = 16, futures: int = 100_000) -> Row:
    """Ask 16 processes with 100,000 pending futures each, and merge the answers, as the command does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROCESS, str(futures)]
        environment = {"CUDAFUTURE_DEBUG_DIR": folder, "PATH": ""}
        asked = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(processes)
        ]
        try:
            for process in asked:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"

            def ask() -> float:
                start = now()
                job = debug.look_at([process.pid for process in asked], Path(folder))
                text = str(job)
                took = now() - start
                assert text.count(f"{futures // 2} like ") == 2 * processes, text[:2000]
                return took

            (took,) = by_turns(min(rounds, 5), ask)
        finally:
            for process in asked:
                process.kill()
                process.wait()
    seconds = statistics.median(took) / 1e9
    what = f"ps of {processes} processes with {futures:,} pending futures each"
    return Row("ps", what, "ns", seconds * 1e9, seconds * 1e9, "itself", "s", seconds, 5)


LIMITS: dict[str, Callable[[int], Row]] = {"register": register, "ps": ps}

SUITE = Suite("debug", "Pending operations", LIMITS, rounds=21)
