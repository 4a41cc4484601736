"""Delay between the end of work on a CUDA device and the moment at which the host notices it.

The end of the work is known on the host's clock: a loop that does nothing else notes when a first event is reached, and
the device measures the time between that event and the last one.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from cudafuture.bench._rows import Row, Timed, by_turns
from cudafuture.future import CUDAFuture
from cudafuture.testing import fakecuda

WARM_UP_MS = 200.0  # of work, after which the clock has risen
now = time.perf_counter_ns
cuda: Any = torch.cuda


@cache
def cycles_per_microsecond() -> float:
    """Return the device's clock after it has risen: an idle device works for a while before that."""
    if fakecuda.is_active():
        return 1000.0
    cycles, least, total = 10_000_000, math.inf, 0.0
    for _ in range(100):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        cuda._sleep(cycles)
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
        total += took
        agrees = total > WARM_UP_MS and abs(took - least) <= 0.01 * took
        least = min(least, took)
        if agrees:
            break
    return float(cycles / (1000 * least))


class Kernel:
    """Work of so many microseconds on the current stream, and when the device has finished it."""

    def __init__(self, microseconds: float) -> None:
        self.cycles = int(microseconds * cycles_per_microsecond())
        self.begin, self.end = (cuda.Event(enable_timing=True) for _ in range(2))
        self.seen = 0

    def launch(self) -> None:
        cuda.synchronize()
        self.begin.record()
        while not self.begin.query():
            pass
        self.seen = now()
        cuda._sleep(self.cycles)
        self.end.record()

    def late(self, at: int) -> float:
        """Return the nanoseconds between the end of the work and `at`."""
        self.end.synchronize()
        return float(at - self.seen - 1e6 * self.begin.elapsed_time(self.end))


def host_wait(kernel: Kernel, since_launch: bool) -> tuple[Timed, Timed]:
    """Return our delay and the peer's between the device's end (or the launch) and the return of a blocking wait."""
    tensor = torch.zeros(8, device="cuda")

    def took(at: int) -> float:
        return at - kernel.seen if since_launch else kernel.late(at)

    def ours() -> float:
        kernel.launch()
        CUDAFuture.completed(tensor).wait()
        return took(now())

    def peer() -> float:
        event = cuda.Event()
        kernel.launch()
        event.record()
        event.synchronize()
        return took(now())

    return ours, peer


def waiting_ratio(microseconds: float, rounds: int) -> Row:
    """Measure from the launch of a kernel until a blocking wait for it has returned."""
    us, them = map(statistics.median, by_turns(20 * rounds, *host_wait(Kernel(microseconds), True)))
    what = f"cuda: a kernel of {microseconds:,.0f} us and a blocking wait for it"
    name = f"cuda-blocking-{microseconds:.0f}us"
    return Row(name, what, "ns", us, them, "synchronize", "x", us / them, 1.3)


def waiting_latency(microseconds: float, rounds: int) -> Row:
    """Measure from the end of a kernel until a blocking wait for it has returned."""
    us, them = map(statistics.median, by_turns(5 * rounds, *host_wait(Kernel(microseconds), False)))
    what = f"cuda: from the end of {microseconds:,.0f} us of work to the return of a blocking wait"
    return Row(f"cuda-latency-{microseconds:.0f}us", what, "ns", us, them, "synchronize", "ns", us, 30_000)


def calling_back(microseconds: float, rounds: int) -> Row:
    """Measure from the end of a kernel until the callback of a blocking then() runs."""
    kernel = Kernel(microseconds)
    tensor = torch.zeros(8, device="cuda")

    def ours() -> float:
        done = threading.Event()
        ran: list[int] = []

        def note(future: CUDAFuture[Any]) -> None:
            ran.append(now())
            done.set()

        kernel.launch()
        CUDAFuture.completed(tensor).then(note, non_blocking=False)
        done.wait()
        return kernel.late(ran[0])

    us, them = map(statistics.median, by_turns(5 * rounds, ours, host_wait(kernel, False)[1]))
    what = f"cuda: from the end of {microseconds:,.0f} us of work to the callback of a blocking then()"
    return Row(f"cuda-callback-{microseconds:.0f}us", what, "ns", us, them, "synchronize", "ns", us, 300_000)


ROWS: dict[str, Callable[[int], Row]] = {"cuda-blocking-100us": partial(waiting_ratio, 100)}
ROWS |= {f"cuda-latency-{us}us": partial(waiting_latency, us) for us in (100, 1_000, 20_000)}
ROWS |= {f"cuda-callback-{us}us": partial(calling_back, us) for us in (100, 1_000)}
