"""Delay of Ctrl-C in a main thread that waits: at most 100 ms, in every kind of wait.

    cudafuture bench interrupt [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

A child process waits for a future that is never completed. Once its main thread has released the GIL, which it does
only in the wait, this process sends SIGINT after a pause of 0 to 100 ms and notes the time; the child notes when it
catches KeyboardInterrupt. Both read CLOCK_MONOTONIC, which is one clock for all processes. The peer waits in the same
way: a future of asyncio where ours is awaited, else one of concurrent.futures. A round is one Ctrl-C for each of both;
the limit holds for the slowest. torch's own future ignores Ctrl-C.
"""

from __future__ import annotations

import random
import select
import signal
import statistics
import subprocess
import sys
import time
from functools import partial

from cudafuture.bench._rows import Row, Suite

__all__ = ["SUITE"]

LIMIT_MS = 100.0
DEAF_S = 1.0  # a wait that has not noticed after so long never will

WAITS = {
    "wait": "CUDAFuture().wait()",
    "wait-timeout": "CUDAFuture().wait(timeout=1000)",
    "gather": "gather(CUDAFuture(), CUDAFuture()).wait()",
    "wait_all": "wait_all([CUDAFuture(), CUDAFuture()])",
    "wait_set": "wait([CUDAFuture(), CUDAFuture()])",
    "as_completed": "next(as_completed([CUDAFuture()]))",
    "await": "asyncio.run(awaited(CUDAFuture()))",
}
ASYNCIO = ("asyncio", "asyncio.run(awaited_loop_future())")
BLOCKING = ("concurrent.futures", "concurrent.futures.Future().result()")

CHILD = """
import asyncio, concurrent.futures, sys, threading, time
import torch
from cudafuture import CUDAFuture, as_completed, gather, wait, wait_all

async def awaited(future): return await future
async def awaited_loop_future(): return await asyncio.get_running_loop().create_future()

def announce(begun):
    begun.wait()
    print("waiting", flush=True)

sys.setswitchinterval(1000)
for _ in range(int(sys.argv[1])):
    begun = threading.Event()
    thread = threading.Thread(target=announce, args=(begun,))
    thread.start()
    try:
        begun.set()
        {wait}
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
    thread.join()
    sys.stdin.readline()
"""


def measure(name: str, rounds: int) -> Row:
    """Compare the delays of Ctrl-C in one kind of wait with the peer's."""
    peer_name, peer_wait = ASYNCIO if name == "await" else BLOCKING
    ours, peer = delays(WAITS[name], rounds), delays(peer_wait, rounds)
    median, slowest = statistics.median(ours), max(ours)
    what = f"Ctrl-C in {WAITS[name]}, the slowest of {rounds}"
    return Row(name, what, "ms", median, statistics.median(peer), peer_name, "ms", slowest, LIMIT_MS)


def delays(wait: str, count: int) -> list[float]:
    """Interrupt a wait `count` times; return the milliseconds until it was noticed each time."""
    code = CHILD.replace("{wait}", wait)
    command = [sys.executable, "-c", code, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            return [interrupt(child) for _ in range(count)]
        finally:
            child.kill()


def interrupt(child: subprocess.Popen[str]) -> float:
    """Send SIGINT to a child that waits; return after how many milliseconds it noticed."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(random.uniform(0, 0.1))  # anywhere in the interval at which a wait looks for signals
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    noticed, _, _ = select.select([child.stdout], [], [], DEAF_S)
    if not noticed:
        raise AssertionError(f"Ctrl-C had no effect for {DEAF_S:g} s")
    took = float(child.stdout.readline()) - sent
    child.stdin.write("\n")
    child.stdin.flush()
    return took * 1e3


ROWS = {name: partial(measure, name) for name in WAITS}

SUITE = Suite("interrupt", f"Ctrl-C during a wait, limit {LIMIT_MS:.0f} ms", ROWS, rounds=50)
