"""Rows of a GPU: what futures cost the host, when it notices the end of a kernel, and what memory callbacks reserve."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.futures import Future as TorchFuture

from cudafuture.bench import device
from cudafuture.bench._gpu import IS_FAKE, MIB, Medians, expect, expect_equal, now, sync
from cudafuture.bench._latency import Kernel
from cudafuture.bench._rows import Row, by_turns
from cudafuture.future import CUDAFuture, copy

# ---- host costs


def setting(tensors: int, limit: float, rounds: int) -> Row:
    """Create, set_result, non-blocking wait."""
    value = torch.full((8,), 3.0, device="cuda")
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    future.set_result(value)
    expect_equal(future.wait(non_blocking=True), value, "set_result and wait")
    row = device.completing(device.Device("cuda"), tensors, limit, rounds)
    return replace(row, name=f"host-set-{tensors}")


def chaining(limit: float, rounds: int) -> Row:
    """Create, then() on a stream of the library, set_result, non-blocking wait for the child."""
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    child = future.then(lambda f: f.value() * 2)
    future.set_result(torch.full((8,), 3.0, device="cuda"))
    expect_equal(child.wait(), torch.full((8,), 6.0), "then")
    return replace(device.chaining(device.Device("cuda"), limit, rounds), name="host-then")


# ---- the end of a kernel


class Noticing:
    """Ways in which a program notices the end of a kernel. Each returns nanoseconds from the launch."""

    def __init__(self, microseconds: int) -> None:
        self.kernel = Kernel(microseconds)
        self.tensor = torch.zeros(8, device="cuda")
        self.loop = asyncio.new_event_loop()

    def launch(self) -> None:
        self.kernel.launch()

    def since_launch(self, at: int) -> float:
        expect(self.kernel.end.query(), "the kernel had not finished")
        return float(at - self.kernel.seen)

    def wait(self) -> float:
        self.launch()
        CUDAFuture.completed(self.tensor).wait()
        return self.since_launch(now())

    def callback(self) -> float:
        done, ran = threading.Event(), list[int]()

        def note(_: CUDAFuture[Any]) -> None:
            ran.append(now())
            done.set()

        self.launch()
        CUDAFuture.completed(self.tensor).then(note, non_blocking=False)
        done.wait()
        return self.since_launch(ran[0])

    def await_(self) -> float:
        async def wait() -> int:
            self.launch()
            await CUDAFuture.completed(self.tensor)
            return now()

        return self.since_launch(self.loop.run_until_complete(wait()))

    def event(self) -> float:
        event = torch.cuda.Event()
        self.launch()
        event.record()
        event.synchronize()
        return self.since_launch(now())

    def synchronize(self) -> float:
        self.launch()
        sync()
        return self.since_launch(now())


@cache
def measure_notice(microseconds: int, rounds: int) -> Medians:
    """Return the nanoseconds from the launch of a kernel until each contender notices its end."""
    ways = Noticing(microseconds)
    each = {"wait": ways.wait, "callback": ways.callback, "await": ways.await_}
    each |= {"event.synchronize": ways.event, "synchronize": ways.synchronize}
    took = by_turns(1 if IS_FAKE else 10 * rounds, *each.values())
    ways.loop.close()
    return dict(zip(each, map(statistics.median, took), strict=True))


WAYS = {"wait": 15_000, "callback": 200_000, "await": 200_000}  # nanoseconds more than the peer, at most


def noticing(way: str, microseconds: int, rounds: int) -> Row:
    """Measure from the launch of a kernel until its end is noticed, less the same for event.synchronize()."""
    took = measure_notice(microseconds, rounds)
    us, them = took[way], took["event.synchronize"]
    what = f"{way}: from the launch of {microseconds:,} us of work until its end is noticed"
    what += f" (cuda.synchronize {took['synchronize']:,.0f})"
    name = f"{way}-{microseconds}us"
    return Row(name, what, "ns", us, them, "event.synchronize", "more", us - them, WAYS[way])


# ---- memory

CALLBACKS = 64
LIMIT_MIB = 64


def measure_reserved(make: Callable[[], torch.Tensor], wanted: torch.Tensor) -> int:
    """Return the bytes that the allocator reserves for results that are made and dropped one after another."""
    sync()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(CALLBACKS):
        result = make()
        expect_equal(result[:64], wanted[:64], "the result of a callback")
        del result
    return torch.cuda.memory_reserved() - before


def memory(kind: str, _rounds: int) -> Row:
    """Measure the memory that is reserved after 64 results of 16 MiB, each of them dropped before the next one."""
    mib = 1 if IS_FAKE else 16
    x = torch.full((mib * MIB // 4,), 3.0, device="cuda")
    host = torch.full((mib * MIB // 4,), 6.0)

    def torch_then() -> torch.Tensor:
        future = TorchFuture[Any](devices=[x.device])
        child = future.then(lambda f: f.value() * 2)
        future.set_result(x)
        result: torch.Tensor = child.wait()
        return result

    kinds: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], str]] = {
        "then": (lambda: CUDAFuture.completed(x).then(lambda f: f.value() * 2).wait(), torch_then, "torch"),
        "copy": (lambda: copy(host, "cuda").wait(), lambda: host.cuda(), "cuda()"),
        "pack": (lambda: copy([host], "cuda", pack=True).wait()[0], lambda: host.cuda(), "cuda()"),
    }
    ours, theirs, peer = kinds[kind]
    us, them = (measure_reserved(make, host) / MIB for make in (ours, theirs))
    what = f"reserved by {CALLBACKS} results of {mib} MiB of {kind}, each dropped at once"
    return Row(f"memory-{kind}", what, "MiB", us, them, peer, "MiB", us, LIMIT_MIB)


ROWS: dict[str, Callable[[int], Row]] = {f"host-set-{n}": partial(setting, n, 0.5) for n in (1, 8)}
ROWS["host-then"] = partial(chaining, 0.5)
ROWS |= {f"{way}-{us}us": partial(noticing, way, us) for us in (10, 100, 1_000) for way in WAYS}
ROWS |= {f"memory-{kind}": partial(memory, kind) for kind in ("then", "copy", "pack")}
