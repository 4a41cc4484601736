"""Benchmark of the device half of a future beside torch's own, every limit a row.

    cudafuture bench device [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

Rows that begin with "sim" are measured on the simulated accelerator, where a device costs nothing: what is left is the
host's work. Those that begin with "cuda" are there where torch has CUDA. Ours and the peer run in the same process, by
turns in a shuffled order; a row shows medians over the rounds. torch's futures get their devices, which they require.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.futures import Future as TorchFuture
from torch.futures import collect_all

from cudafuture.bench import _latency
from cudafuture.bench._rows import Row, Suite, Timed, by_turns
from cudafuture.combine import gather
from cudafuture.future import CUDAFuture
from cudafuture.testing import sim

__all__ = ["SUITE"]

now = time.perf_counter_ns
MANY = range(200)  # few enough that a device's queue never fills
PARTS = 64


class Device:
    """Device of the tensors, by its type's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self) -> torch.device:
        """Return the device; the simulated one is made at its first use, after the real ones."""
        if self.name == "sim" and not sim.is_enabled():
            sim.enable(detect=False, poison=False)
        return torch.device(self.name, 0)

    def devices(self) -> list[int | str | torch.device]:
        """Return the devices that torch's futures need."""
        return [self.device()]

    def value(self, tensors: int) -> Any:
        """Return one tensor, or a list of more."""
        made = [torch.zeros(8, device=self.device()) for _ in range(tensors)]
        return made[0] if tensors == 1 else made

    def drain(self) -> None:
        """Let the device finish, so that what is measured next does not wait for what came before."""
        torch.Stream(device=self.device()).synchronize()
        (sim if self.name == "sim" else torch.cuda).synchronize()


def compare(name: str, what: str, limit: float, rounds: int, ours: Timed, peer: Timed) -> Row:
    """Return the ratio of our median to torch's, for the same work."""
    us, them = map(statistics.median, by_turns(rounds, ours, peer))
    return Row(name, what, "ns", us, them, "torch", "x", us / them, limit)


# ---- host costs


def completing(on: Device, tensors: int, limit: float, rounds: int) -> Row:
    """Create, set_result, non-blocking wait."""
    value, devices = on.value(tensors), on.devices()

    def ours() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            future: CUDAFuture[Any] = CUDAFuture()
            future.set_result(value)
            future.wait(non_blocking=True)
        return (now() - start) / len(MANY)

    def peer() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            future = TorchFuture[Any](devices=devices)
            future.set_result(value)
            future.wait()
        return (now() - start) / len(MANY)

    what = f"{on.name}: create + set_result + wait(non_blocking=True), tensors: {tensors}"
    return compare(f"{on.name}-set-{tensors}", what, limit, rounds, ours, peer)


def waiting(on: Device, tensors: int, limit: float, rounds: int) -> Row:
    """Measure non-blocking waits for a future that is done: the current stream waits, the host does not.

    Both tell the allocator of each tensor, which is most of it.
    """
    value = on.value(tensors)
    future: CUDAFuture[Any] = CUDAFuture.completed(value)
    torch_future = TorchFuture[Any](devices=on.devices())
    torch_future.set_result(value)

    def ours() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            future.wait(non_blocking=True)
        return (now() - start) / len(MANY)

    def peer() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            torch_future.wait()
        return (now() - start) / len(MANY)

    what = f"{on.name}: wait(non_blocking=True) alone, tensors: {tensors}"
    return compare(f"{on.name}-wait-{tensors}", what, limit, rounds, ours, peer)


def value_of(future: Any) -> Any:
    """Return the value, as the callback of then()."""
    return future.value()


def chaining(on: Device, limit: float, rounds: int) -> Row:
    """Create, then() on a pool stream, set_result, non-blocking wait for the child."""
    value, devices = on.value(1), on.devices()

    def ours() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            future: CUDAFuture[Any] = CUDAFuture()
            child = future.then(value_of)
            future.set_result(value)
            child.wait(non_blocking=True)
        return (now() - start) / len(MANY)

    def peer() -> float:
        on.drain()
        start = now()
        for _ in MANY:
            future = TorchFuture[Any](devices=devices)
            child = future.then(value_of)
            future.set_result(value)
            child.wait()
        return (now() - start) / len(MANY)

    what = f"{on.name}: create + then() on a pool stream + set_result + wait"
    return compare(f"{on.name}-then", what, limit, rounds, ours, peer)


def gathering(on: Device, limit: float, rounds: int) -> Row:
    """Combine 64 pending futures, complete them with a tensor each, wait without blocking. Per future."""
    values, devices = on.value(PARTS), on.devices()

    def ours() -> float:
        futures: list[CUDAFuture[Any]] = [CUDAFuture() for _ in values]
        on.drain()
        start = now()
        whole = gather(*futures)
        for future, value in zip(futures, values, strict=True):
            future.set_result(value)
        whole.wait(non_blocking=True)
        return (now() - start) / PARTS

    def peer() -> float:
        futures = [TorchFuture[Any](devices=devices) for _ in values]
        on.drain()
        start = now()
        whole = collect_all(futures)
        for future, value in zip(futures, values, strict=True):
            future.set_result(value)
        whole.wait()
        return (now() - start) / PARTS

    what = f"{on.name}: gather of {PARTS} with a tensor each, and wait; per future"
    return compare(f"{on.name}-gather", what, limit, rounds, ours, peer)


def blocking(on: Device, limit: float, rounds: int) -> Row:
    """Measure the host time of a blocking wait when the device has finished already, against an event of torch's."""
    future: CUDAFuture[Any] = CUDAFuture.completed(on.value(1))
    event = torch.Event(on.device())
    event.record()
    on.drain()

    def ours() -> float:
        start = now()
        for _ in MANY:
            future.wait()
        return (now() - start) / len(MANY)

    def peer() -> float:
        start = now()
        for _ in MANY:
            event.synchronize()
        return (now() - start) / len(MANY)

    us, them = map(statistics.median, by_turns(rounds, ours, peer))
    what = f"{on.name}: wait() when the device has finished"
    return Row(f"{on.name}-blocking", what, "ns", us, them, "synchronize", "more", us - them, limit)


# ---- the watcher


@contextmanager
def busy(on: Device) -> Iterator[None]:
    """Keep a device busy for the scope, or (a real one) for two seconds."""
    if on.name == "sim":
        with sim.hold():
            yield
    else:
        _latency.Kernel(2_000_000).launch()
        yield


def watching(on: Device, rounds: int) -> Row:
    """Measure the processor time of the watcher while a future is watched for a second, in per cent of one core."""
    on.drain()

    def second() -> float:
        cpu, start = time.process_time(), time.perf_counter()
        time.sleep(1)
        return 100 * (time.process_time() - cpu) / (time.perf_counter() - start)

    def watch() -> float:
        value = on.value(1)
        with busy(on):
            child = CUDAFuture.completed(value).then(value_of, non_blocking=False)
            took = second()
            assert not child.done()
        child.wait()
        return took

    ours, idle = by_turns(min(rounds, 3), watch, second)
    share, nothing = statistics.median(ours), statistics.median(idle)
    what = f"{on.name}: the watcher's share of a core while a future is watched, thousandths of a per cent"
    return Row(f"{on.name}-watcher", what, "", 1000 * share, 1000 * nothing, "idle", "%", share, 1.0)


def calling_back(rounds: int) -> Row:
    """Measure from the end of the device's work until a blocking then() runs its callback, against waking a thread."""
    on = Device("sim")
    on.drain()

    def ours() -> float:
        done = threading.Event()
        ran: list[int] = []

        def note(future: CUDAFuture[Any]) -> None:
            ran.append(now())
            done.set()

        with sim.hold():
            future: CUDAFuture[Any] = CUDAFuture.completed(on.value(1))
            future.then(note, non_blocking=False)
            time.sleep(200e-6)  # the device works
            start = now()
        done.wait()
        return ran[0] - start

    def peer() -> float:
        woken, done = threading.Event(), threading.Event()
        ran: list[int] = []

        def wait() -> None:
            woken.wait()
            ran.append(now())
            done.set()

        threading.Thread(target=wait).start()
        time.sleep(200e-6)
        start = now()
        woken.set()
        done.wait()
        return ran[0] - start

    us, them = (statistics.median(figures) for figures in by_turns(20 * rounds, ours, peer))
    what = "sim: from the end of the device's work to the callback of a blocking then()"
    return Row("sim-callback", what, "ns", us, them, "a thread", "ns", us, 300_000)


# ---- the rows


def host_rows(
    on: Device, sets: dict[int, float], waits: dict[int, float], then: float, gather: float
) -> dict[str, Callable[[int], Row]]:
    """Return the rows of the host's work, with their limits; those of `sets` and `waits` by the number of tensors."""
    rows: dict[str, Callable[[int], Row]] = {}
    rows |= {f"{on.name}-set-{n}": partial(completing, on, n, limit) for n, limit in sets.items()}
    rows |= {f"{on.name}-wait-{n}": partial(waiting, on, n, limit) for n, limit in waits.items()}
    rows[f"{on.name}-then"] = partial(chaining, on, then)
    rows[f"{on.name}-gather"] = partial(gathering, on, gather)
    rows[f"{on.name}-blocking"] = partial(blocking, on, 2_000)
    rows[f"{on.name}-watcher"] = partial(watching, on)
    return rows


LIMITS: dict[str, Callable[[int], Row]] = {}
if torch.cuda.is_available():
    LIMITS |= host_rows(Device("cuda"), {1: 0.5, 8: 0.5, 64: 0.5}, {1: 1.25, 64: 1.25}, 0.5, 1.0) | _latency.ROWS
LIMITS |= host_rows(Device("sim"), {1: 0.165, 8: 0.17, 64: 0.225}, {1: 0.62, 64: 1.25}, 0.25, 0.19)
LIMITS["sim-callback"] = calling_back

SUITE = Suite("device", "The device half beside its peers", LIMITS, rounds=21)
