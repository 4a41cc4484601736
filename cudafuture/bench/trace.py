"""Benchmark of traces: what an event costs, and how long a million events take to analyse and to draw.

    cudafuture bench trace [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

"event" is the time of a future's creation and completion while a trace is recorded, less the same without one: two
events. The futures are made in bursts that the ring of a thread holds, with pauses in which the recorder empties it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cudafuture import trace
from cudafuture.bench._rows import Row, Suite, by_turns, control
from cudafuture.future import CUDAFuture
from cudafuture.trace import _file

__all__ = ["SUITE"]

now = time.perf_counter_ns
BURST = 2_000  # futures
EVENTS = 1_000_000


def burst() -> float:
    start = now()
    for _ in range(BURST):
        CUDAFuture[None]().set_result(None)
    return (now() - start) / BURST


def recorded(folder: str) -> float:
    with trace.record(folder):
        return burst()


def event(rounds: int) -> Row:
    """Measure what an event costs the thread."""
    with tempfile.TemporaryDirectory() as folder:
        ours, peer, same = by_turns(rounds, lambda: recorded(folder), burst, burst)
    difference = statistics.median(o - p for o, p in zip(ours, peer, strict=True)) / 2
    noise = control("peer - peer, ns", [s - p for s, p in zip(same, peer, strict=True)])
    medians = statistics.median(ours), statistics.median(peer)
    what = "create and complete a future while a trace is recorded; per event"
    return Row("event", what, "ns", *medians, "no trace", "more", difference, 100, *noise)


def write_million(path: Path) -> None:
    """Write a file with a million events: steps in which the main thread waits for a read and its callback."""
    rows: list[bytes] = []

    def add(time: int, kind: str, future: int = 0, other: int = 0, state: int = 0, text: bytes = b"") -> None:
        numbers = (time, time, future, other, -1, 4096, -1, _file._KINDS.index(kind), state, 0, len(text))
        rows.append(_file._EVENT.pack(*numbers) + text)

    for i in range(EVENTS // 10):
        t, read, child = 10_000 * i, 2 * i + 1, 2 * i + 2
        add(t, "span_begin", text=f"step {i // 100}".encode()) if i % 100 == 0 else add(t, "created", child + EVENTS)
        add(t + 100, "created", read)
        add(t + 200, "issued", read, other=8, text=b"read")
        add(t + 300, "created", child)
        add(t + 400, "follows", child, other=read)
        add(t + 500, "wait_begin", child, text=b"train.py:41 in step()")
        add(t + 5000, "done", read, state=1, text=b"read")
        add(t + 6000, "done", child, state=1 | 2 << 4)
        add(t + 7000, "wait_end", child)
        add(t + 8000, "span_end") if i % 100 == 99 else add(t + 8000, "ready", read)
    chunks = [
        (0, b'{"process": 1, "rank": 0, "host": "here", "boot": "x", "monotonic": 0, "realtime": 0}'),
        (1, _file._THREAD.pack(0, 1) + b"main"),
        (2, _file._PLACE.pack(8) + b'{"kind": "store", "name": "/nvme"}'),
        (3, (0).to_bytes(4, "little") + b"".join(rows)),
    ]
    path.write_bytes(b"cftrace1" + b"".join(_file._CHUNK.pack(kind, len(c)) + c for kind, c in chunks))


def timed(name: str, what: str, limit: float, rounds: int, use: Callable[[Path, Path], object]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.cftrace"
        write_million(path)

        def once() -> float:
            start = now()
            use(path, Path(folder))
            return now() - start

        (took,) = by_turns(min(rounds, 3), once)
    seconds = statistics.median(took) / 1e9
    return Row(name, what, "ns", seconds * 1e9, seconds * 1e9, "itself", "s", seconds, limit)


def analyse(rounds: int) -> Row:
    """Measure how long a million events take to analyse, from the file on."""
    what = f"analyse {EVENTS:,} events"
    return timed("analyse", what, 7, rounds, lambda path, _: str(trace.analyse(path)))


def plot(rounds: int) -> Row:
    """Measure how long a million events take to draw, from the file on."""
    what = f"plot {EVENTS:,} events"
    return timed("plot", what, 8.6, rounds, lambda path, folder: trace.plot(path, folder / "million.png"))


LIMITS: dict[str, Callable[[int], Row]] = {"event": event, "analyse": analyse, "plot": plot}

SUITE = Suite("trace", "Traces", LIMITS, rounds=21)
