"""Benchmark of the core beside its peers, every limit a row.

    cudafuture bench core [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

Ours and the peer run in the same process, by turns in a shuffled order; a row shows medians over the rounds. The cyclic
garbage collector is on, as it is by default. Where two figures that ought to be equal are compared, a control measures
the same thing twice, and the row says "noise" when it is over its limit by no more than the control's error.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future as TorchFuture
from torch.futures import collect_all

from cudafuture.bench._ranks import on_ranks
from cudafuture.bench._rows import Row, Suite, Timed, by_turns, control
from cudafuture.combine import gather
from cudafuture.future import CUDAFuture

__all__ = ["SUITE"]

Make = Callable[[], Any]  # a future class without its arguments
now = time.perf_counter_ns
CORES = sorted(os.sched_getaffinity(0))


def look(_future: Any) -> None:
    """Do nothing, as a callback."""


def complete(make: Make) -> float:
    """Create, set_result, wait."""
    many = range(5_000)
    start = now()
    for _ in many:
        future = make()
        future.set_result(None)
        future.wait()
    return (now() - start) / len(many)


def callback(make: Make) -> float:
    """Create, add_done_callback, set_result."""
    many = range(5_000)
    start = now()
    for _ in many:
        future = make()
        future.add_done_callback(look)
        future.set_result(None)
    return (now() - start) / len(many)


def then(make: Make) -> float:
    """Measure chains of 100 links, completed and awaited, per link."""
    chains, links = range(50), range(100)
    start = now()
    for _ in chains:
        first = last = make()
        for _ in links:
            last = last.then(look)
        first.set_result(None)
        last.wait()
    return (now() - start) / len(chains) / len(links)


def gathering(make: Make) -> float:
    """Combine 1,000 pending futures, complete them, wait; making and freeing them is not counted. Per future."""
    repeats, parts = range(4), range(1_000)
    took = 0
    for _ in repeats:
        futures = [make() for _ in parts]
        start = now()
        combined: Any = gather(*futures) if make is CUDAFuture else collect_all(futures)
        for future in futures:
            future.set_result(None)
        combined.wait()
        took += now() - start
    return took / len(repeats) / len(parts)


def compare(name: str, what: str, limit: float, work: Callable[[Make], float], rounds: int) -> Row:
    """Return the ratio of our median to torch's, for the same work."""
    ours, peer = map(statistics.median, by_turns(rounds, partial(work, CUDAFuture), partial(work, TorchFuture)))
    return Row(name, what, "ns", ours, peer, "torch", "x", ours / peer, limit)


def awaiting(rounds: int) -> Row:
    """Await completed futures, 5,000 of them in one coroutine of one loop, ours and the loop's own by turns."""
    repeats, parts = range(5), range(1_000)
    loop = asyncio.new_event_loop()

    async def awaits(futures: list[Any]) -> float:
        start = now()
        for _ in repeats:
            for future in futures:
                await future
        return (now() - start) / len(repeats) / len(parts)

    def complete_all(make: Make) -> Timed:
        futures = [make() for _ in parts]
        for future in futures:
            future.set_result(None)
        return lambda: loop.run_until_complete(awaits(futures))

    ours, peer = map(statistics.median, by_turns(rounds, complete_all(CUDAFuture), complete_all(loop.create_future)))
    loop.close()
    return Row("await", "await of a completed future", "ns", ours, peer, "asyncio", "x", ours / peer, 1.5)


def handoff(make: Make, cores: tuple[int, int]) -> float:
    """Return the median from before set_result in one thread until a blocked wait returns in another."""
    futures = [make() for _ in range(300)]
    waiting, woken = threading.Semaphore(0), threading.Semaphore(0)
    took: list[int] = []

    def waiter() -> None:
        os.sched_setaffinity(0, {cores[1]})  # of this thread only
        for future in futures:
            waiting.release()
            start = future.wait()
            took.append(now() - start)
            woken.release()

    thread = threading.Thread(target=waiter)
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[0]})
    thread.start()
    for future in futures:
        waiting.acquire()
        time.sleep(50e-6)  # lets the waiter go from its handshake into wait(), which is not to be measured
        future.set_result(now())
        woken.acquire()
    thread.join()
    os.sched_setaffinity(0, everywhere)
    return statistics.median(took)


def latency(name: str, where: str, cores: tuple[int, int], rounds: int) -> Row:
    """Set in one thread, wait returns in another; pinned, or the scheduler's whim decides which of the two is shown."""
    measure = partial(handoff, CUDAFuture, cores)
    ours, again, peer = by_turns(rounds, measure, measure, partial(handoff, TorchFuture, cores))
    us, them = statistics.median(ours), statistics.median(peer)
    what = f"set in one thread, wait returns in another, {where}"
    same = [a / b for a, b in zip(ours, again, strict=True)]
    return Row(name, what, "ns", us, them, "torch", "x", us / them, 1.0, *control("ours / ours", same))


class Bare:
    """Peer that does nothing: its loss is that of the interpreter when it switches threads."""

    def set_result(self, value: object) -> None:
        self.value = value


def completing(make: Make, count: int, threads: int) -> float:
    """Make and complete so many futures in so many threads; from the first one's start to the last one's end."""
    many = range(count // threads)
    barrier = threading.Barrier(threads)
    spans: list[tuple[int, int]] = []

    def worker() -> None:
        barrier.wait()
        start = now()
        for _ in many:
            make().set_result(None)
        spans.append((start, now()))

    workers = [threading.Thread(target=worker) for _ in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / count


def throughput(rounds: int) -> Row:
    """Compare 8 threads with one, for the same number of futures in all."""
    kinds = ((CUDAFuture, 240_000), (TorchFuture, 40_000), (Bare, 240_000))
    took = by_turns(rounds, *(partial(completing, make, count, threads) for make, count in kinds for threads in (8, 1)))
    eight, one, torch8, torch1, bare8, bare1 = map(statistics.median, took)
    what = f"make and complete in 8 threads (torch {torch8 / torch1:.2f}, an empty class {bare8 / bare1:.3f})"
    each = [a / b for a, b in zip(took[0], took[1], strict=True)]
    return Row("threads", what, "ns", eight, one, "1 thread", "x", eight / one, 1.0, *control("8 / 1", each))


MEMORY = """
import sys
from torch.futures import Future
from cudafuture import CUDAFuture

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

make, count = {"ours": CUDAFuture, "torch": Future}[sys.argv[1]], int(sys.argv[2])
kept = [None] * count
before = resident()
for i in range(count):
    kept[i] = make()
print((resident() - before) / count)
"""


def memory(_rounds: int) -> Row:
    """Measure the resident memory of a million pending futures, each kind in its own process; without their list."""

    def measure(kind: str) -> float:
        command = [sys.executable, "-c", MEMORY, kind, "1000000"]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    ours, peer = measure("ours"), measure("torch")
    return Row("memory", "one of a million pending futures", "bytes", ours, peer, "torch", "bytes", ours, 430)


def all_reduces(rounds: int) -> list[list[float]]:
    """Return the medians of all_reduce + wait, in nanoseconds: through from_torch, raw, raw, as a future of torch."""
    tensor = torch.zeros(256)

    def timed(wait: Callable[[Any], Any]) -> Timed:
        def measure() -> float:
            start = now()
            wait(dist.all_reduce(tensor, async_op=True))
            return now() - start

        return measure

    raw = timed(lambda work: work.wait())
    ours, torch_future = timed(lambda work: CUDAFuture.from_torch(work).wait()), timed(lambda w: w.get_future().wait())
    took = [by_turns(500, ours, raw, raw, torch_future) for _ in range(rounds)]
    return [[statistics.median(turns[which]) for turns in took] for which in range(4)]


def gloo(rounds: int) -> Row:
    """Measure from_torch beside raw all_reduce + wait on Gloo, two processes, 1 KiB; the control is raw against raw."""
    ours, raw, again, torch_future = on_ranks(all_reduces, rounds)
    added, same, torch_adds = ([a - b for a, b in zip(each, raw, strict=True)] for each in (ours, again, torch_future))
    us, them = statistics.median(ours), statistics.median(raw)
    words = (
        f"from_torch of a Gloo all_reduce, and wait (torch's get_future() adds {statistics.median(torch_adds):,.0f})"
    )
    figures = (us, them, "raw", "more", statistics.median(added), 5_000)
    return Row("from_torch", words, "ns", *figures, *control("raw - raw, ns", same))


LIMITS: dict[str, Callable[[int], Row]] = {
    "complete": partial(compare, "complete", "create + set_result + wait", 0.16, complete),
    "callback": partial(compare, "callback", "create + add_done_callback + set_result", 0.25, callback),
    "then": partial(compare, "then", "one then() of a chain of 100", 0.35, then),
    "gather": partial(compare, "gather", "gather of 1,000, per future", 0.175, gathering),
    "await": awaiting,
    "latency-two-cores": partial(latency, "latency-two-cores", "on two cores", (CORES[0], CORES[-1])),
    "latency-one-core": partial(latency, "latency-one-core", "on one core", (CORES[0], CORES[0])),
    "threads": throughput,
    "memory": memory,
    "from_torch": gloo,
}

SUITE = Suite("core", "The core beside its peers", LIMITS, rounds=21)
