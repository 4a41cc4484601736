"""Overlap of loading, copying and computing with prefetch, and its cost on the host; every limit is a row.

    cudafuture bench prefetch [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The rows of overlap run on the simulated accelerator, in its virtual time: a loader computes on the host, a batch is
copied, and the device computes; the program reads the loss after each step, as programs do that print it. The ideal is
the number of batches times the longest of the three. The peers are written as their own documentation and source
describe them: apex's data_prefetcher of the ImageNet example, and timm's PrefetchLoader as it was before and after its
pull request 2784 (a new stream for each epoch and no wait for the consumer's stream before). They load in the thread
of the program.

The rows of host time are real time: what a call costs the thread that makes it.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cudafuture.bench._rows import Row, Suite, by_turns, control
from cudafuture.future import copy
from cudafuture.prefetch import prefetch
from cudafuture.streams import own_stream
from cudafuture.testing import sim

__all__ = ["SUITE"]

BATCHES = 60
FLOATS = 25_000  # of a batch, whose copy takes a millisecond at the speed below
COPY_BYTES_PER_SECOND = FLOATS * 4 / 1e-3
TENSORS = 512  # of a batch of many
now = time.perf_counter_ns


@dataclass(frozen=True)
class Times:
    """Milliseconds of a batch."""

    load: float
    copy: float
    compute: float

    @property
    def ideal(self) -> float:
        """Milliseconds of all batches when everything overlaps."""
        return BATCHES * max(self.load, self.copy, self.compute)

    def __str__(self) -> str:
        return f"{self.load:g}:{self.copy:g}:{self.compute:g}"


class Loader:
    """An iterable whose batches take time of the host."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.batches = [torch.full((int(FLOATS * times.copy),), float(i)) for i in range(4)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(BATCHES):
            sim.spend(ms=self.times.load)
            yield self.batches[i % len(self.batches)]


class PinnedLoader(Loader):
    """The same from a DataLoader that pins, which the peers need."""

    def __init__(self, times: Times) -> None:
        super().__init__(times)
        self.batches = [batch.pin_memory() for batch in self.batches]


# ---- who prefetches


def ours(times: Times, depth: int = 2) -> Iterator[torch.Tensor]:
    yield from prefetch(Loader(times), "sim", depth=depth)


class Apex:
    """data_prefetcher of apex's examples/imagenet/main_amp.py."""

    def __init__(self, loader: Loader) -> None:
        self.loader = iter(loader)
        self.stream = torch.Stream(device="sim")
        self.preload()

    def preload(self) -> None:
        self.next_input = next(self.loader, None)
        if self.next_input is None:
            return
        with self.stream:
            self.next_input = self.next_input.to("sim", non_blocking=True)

    def next(self) -> torch.Tensor | None:
        current = torch.accelerator.current_stream()
        current.wait_stream(self.stream)
        batch = self.next_input
        if batch is not None:
            batch.record_stream(current)
        self.preload()
        return batch


def apex(times: Times) -> Iterator[torch.Tensor]:
    prefetcher = Apex(PinnedLoader(times))
    batch = prefetcher.next()
    while batch is not None:
        yield batch
        batch = prefetcher.next()


def timm(times: Times, *, is_mended: bool) -> Iterator[torch.Tensor]:
    """Yield batches like PrefetchLoader.__iter__ of timm's data/loader.py."""
    stream = torch.Stream(device="sim")
    batch: torch.Tensor | None = None
    for next_batch in PinnedLoader(times):
        if is_mended:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            copied = next_batch.to("sim", non_blocking=True)
        if batch is not None:
            yield batch
        torch.accelerator.current_stream().wait_stream(stream)
        if is_mended:
            copied.record_stream(torch.accelerator.current_stream())
        batch = copied
    assert batch is not None
    yield batch


PEERS: dict[str, Callable[[Times], Iterator[torch.Tensor]]] = {
    "apex": apex,
    "timm before 2784": partial(timm, is_mended=False),
    "timm after 2784": partial(timm, is_mended=True),
}


def virtual_ms(times: Times, batches: Callable[[Times], Iterator[torch.Tensor]]) -> float:
    """Return the virtual milliseconds of an epoch."""
    sim.enable(speeds=sim.Speeds(copy=COPY_BYTES_PER_SECOND, launch=0), detect=False, memory=1 << 30)
    seen = 0
    for batch in batches(times):
        sim.sleep(times.compute)
        batch[0].item()  # which reads a number, and waits for the step
        seen += 1
        del batch
    assert seen == BATCHES
    sim.synchronize()
    took = sim.clock() * 1e3
    sim.disable()
    return took


def overlap(times: Times, _rounds: int) -> Row:
    """Return the time of an epoch over the ideal; virtual, so that one round is enough."""
    us = virtual_ms(times, ours)
    peers = {name: virtual_ms(times, peer) for name, peer in PEERS.items()}
    told = ", ".join(f"{name} {times.ideal / ms:.2f}" for name, ms in peers.items())
    what = f"load:copy:compute {times} ms, {BATCHES} batches; of the ideal ours {times.ideal / us:.3f}, {told}"
    best = min(peers, key=lambda name: peers[name])
    return Row(f"overlap-{times}", what, "ms", us, peers[best], best, "x ideal", us / times.ideal, 1 / 0.95)


# ---- what it costs the host


def many(rounds: int) -> Row:
    """Compare a packed batch of many small tensors with a copy of each by torch."""
    sim.enable(schedule="lazy", detect=False, memory=1 << 30)  # device work runs in synchronize(), not in the calls
    tensors = [torch.rand(64) for _ in range(TENSORS)]
    pinned = [tensor.pin_memory() for tensor in tensors]
    stream = own_stream("sim")

    def time_copies(copies: Callable[[], Any]) -> float:
        start = now()
        copies()
        took = now() - start
        sim.synchronize()
        return took

    def each() -> list[torch.Tensor]:
        with stream:
            return [tensor.to("sim", non_blocking=True) for tensor in pinned]

    def pack() -> Any:
        return copy(tensors, "sim", pack=True, stream=stream)

    us, them, again = by_turns(
        20 * rounds, lambda: time_copies(pack), lambda: time_copies(each), lambda: time_copies(each)
    )
    sim.disable()
    ns, others = statistics.median(us), statistics.median(them)
    same = control("each / each", [a / b for a, b in zip(again, them, strict=True)])
    what = f"copy(pack=True) of {TENSORS} tensors of 64 floats"
    return Row("many", what, "us", ns / 1e3, others / 1e3, "a copy each", "x", ns / others, 1 / 3, *same)


def ready(rounds: int) -> Row:
    """Compare next() of a batch that is on the device already with a list's."""
    sim.enable(schedule="lazy", detect=False, memory=1 << 30)  # device work runs in synchronize(), not in the calls
    batches = [torch.rand(1024) for _ in range(9)]
    copied = [batch.to("sim") for batch in batches]
    read_all = threading.Event()

    class Source:
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from batches
            read_all.set()  # and sent: one thread does both

    prefetched = prefetch(Source(), "sim", depth=len(batches))

    def ours_next() -> float:
        read_all.clear()
        epoch = iter(prefetched)
        next(epoch)
        read_all.wait()
        took = []
        for _ in range(len(batches) - 1):
            start = now()
            next(epoch)
            took.append(now() - start)
        epoch.close()
        return statistics.median(took)

    def lists_next() -> float:
        each = iter(copied)
        start = now()
        next(each)
        return now() - start

    us, them, again = by_turns(20 * rounds, ours_next, lists_next, lists_next)
    sim.disable()
    ns, others = statistics.median(us), statistics.median(them)
    same = control("list - list, ns", [a - b for a, b in zip(again, them, strict=True)])
    return Row(
        "next", "next() of a batch that is ready", "ns", ns, others, "a list", "more", ns - others, 20_000, *same
    )


def limits() -> dict[str, Callable[[int], Row]]:
    shapes = [Times(0.01, 1, 4), Times(0.01, 1, 1), Times(0.01, 4, 1)]
    shapes += [Times(*order) for order in itertools.permutations((1.0, 2.0, 3.0))]
    return {f"overlap-{times}": partial(overlap, times) for times in shapes} | {"many": many, "next": ready}


SUITE = Suite("prefetch", "Prefetching, and its peers", limits(), rounds=5, prepare=sim.prepare)
