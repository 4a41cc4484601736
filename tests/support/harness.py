"""Devices of the device suite, so that a test reads the same on the host, on the simulated accelerator and on CUDA.

The host has no streams: there `stream()` is None, `on(None)` changes nothing, and nothing is ever pending on a device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.testing import fakecuda

SIZE = 256  # floats in a tensor of the suite
MOST_DEVICES = 2  # that a test uses
PRIORITIES = (0, -1)  # that every accelerator has

# Device 0 is current in a new thread. torch selects it again at the end of a stream's scope and after a callback of its
# own futures; from CUDA 12 on that makes a context there.
OTHER_THREAD = pytest.mark.torch_makes_contexts("torch selects device 0 again in a thread that never selected a device")


def empty_caches() -> None:
    """Give back the free memory of torch's allocators, on CUDA devices and pinned on the host."""
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # torch.accelerator.empty_host_cache is new in torch 2.12


class Device:
    """The host, which is finished with everything before a call returns."""

    name = "cpu"
    count = 1
    has_streams = False

    first = 0  # torch's index of the first device that tests use

    def index(self, index: int = 0) -> int:
        """Return torch's index of a device."""
        return self.first + index

    def at(self, index: int = 0) -> torch.device:
        return torch.device(self.name, self.index(index)) if self.has_streams else torch.device(self.name)

    def select(self, index: int) -> AbstractContextManager[Any]:
        """Make a device the current one for a scope."""
        return torch.accelerator.device_index(self.index(index))

    def current_index(self) -> int:
        """Return the index of the current device, as `at` counts them."""
        return torch.accelerator.current_device_index() - self.first

    def indices(self) -> list[int]:
        return list(range(min(MOST_DEVICES, self.count)))

    # ---- streams
    def stream(self, priority: int = 0, index: int = 0) -> Any:
        return torch.Stream(self.at(index), priority=priority) if self.has_streams else None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else stream

    def current(self, index: int = 0) -> Any:
        return torch.accelerator.current_stream(self.at(index)) if self.has_streams else None

    def priority_of(self, stream: torch.Stream) -> int | None:
        """Return the priority that the driver gave a stream; None for the default stream."""
        return self.priority_in_driver(stream) if stream.stream_id else None

    def priority_in_driver(self, stream: torch.Stream) -> int:
        raise NotImplementedError

    # ---- pending work
    def hold(self, stream: torch.Stream | None = None) -> AbstractContextManager[Any]:
        """Keep what is enqueued from now on pending, on the current stream or this one, while the context lasts."""
        return contextlib.nullcontext()

    def delay(self) -> None:
        """Enqueue something that takes a while on the current stream."""

    # ---- data
    def empty(self, index: int = 0) -> torch.Tensor:
        return torch.empty(SIZE, device=self.at(index))

    def produce(self, value: float, index: int = 0) -> torch.Tensor:
        """Return a tensor that the current stream fills, after a while."""
        x = self.empty(index)
        if self.has_streams:
            with self.select(index):
                self.delay()
        return x.fill_(value)

    def read(self, x: torch.Tensor) -> float:
        """Return the value that fills `x`, read by its device's current stream and seen by the host."""
        low, high = (x * 1.0).aminmax()
        if not low.item() == high.item():
            raise AssertionError(f"not one value: {low.item()} to {high.item()}")
        return float(high.item())

    def make_pinned(self, value: float = 0.0) -> torch.Tensor:
        return torch.full((SIZE,), value, pin_memory=self.has_streams)

    # ---- futures
    def complete(self, value: float, index: int = 0, stream: torch.Stream | None = None) -> CUDAFuture[torch.Tensor]:
        """Return a future whose value a stream of its own, or this one, fills after a while."""
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        with self.on(stream if stream is not None else self.stream(index=index)):
            future.set_result(self.produce(value, index))
        return future

    def capture(self, mode: str = "global") -> AbstractContextManager[Any]:
        """Return a context in which the current stream captures a graph, in a mode of CUDA."""
        raise NotImplementedError

    def finish(self) -> None:
        """Block until all work has run."""

    def rest(self) -> None:
        """Make current in this thread what is so in a new one: device 0, and the default streams."""
        for index in range(self.count if self.has_streams else 0):
            kind = int(self.current(index).device_type)
            stream = torch.Stream(stream_id=0, device_index=self.index(index), device_type=kind)
            torch.accelerator.set_stream(stream)
        if self.has_streams:
            torch.accelerator.set_device_index(self.index())


class Accelerator(Device):
    has_streams = True


class Simulated(Accelerator):
    name = "sim"

    def __init__(self) -> None:
        from cudafuture.testing import sim

        self.sim = sim
        self.count = torch.accelerator.device_count()

    def hold(self, stream: torch.Stream | None = None) -> AbstractContextManager[Any]:
        return self.sim.hold(stream)

    def priority_in_driver(self, stream: torch.Stream) -> int:
        return self.sim.priority(stream)

    def delay(self) -> None:
        self.sim.sleep(1)

    @contextlib.contextmanager
    def capture(self, mode: Any = "global") -> Iterator[None]:
        with self.stream(), self.sim.capture(mode=mode):  # never the default stream, as on CUDA
            yield

    def finish(self) -> None:
        self.sim.finish()


class Cuda(Accelerator):
    """A GPU, or a device of fakecuda. On a GPU a hold is a kernel that takes much longer than a test's calls."""

    name = "cuda"

    def __init__(self, *, spares_device_0: bool = False) -> None:
        self.count = torch.cuda.device_count()
        if spares_device_0 and fakecuda.is_active() and self.count > MOST_DEVICES:
            self.first, self.count = 1, self.count - 1  # no test then needs a context on device 0
        for index in range(self.count):
            _warm_up(self.index(index))
        _enable_peers(tuple(map(self.at, self.indices())))
        _cycles_per_ms()  # now: a test may hold the stream that is measured before its first delay

    def hold(self, stream: torch.Stream | None = None) -> AbstractContextManager[Any]:
        if fakecuda.is_active():
            return fakecuda.hold(stream)
        with self.on(stream):
            torch.cuda._sleep(200 * _cycles_per_ms())
        return contextlib.nullcontext()

    def priority_in_driver(self, stream: torch.Stream) -> int:
        return torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        ).priority

    def delay(self) -> None:
        torch.cuda._sleep(5 * _cycles_per_ms())

    @contextlib.contextmanager
    def capture(self, mode: str = "global") -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                yield

    def finish(self) -> None:
        if fakecuda.is_active():
            fakecuda.release()
        for index in range(self.count):
            torch.accelerator.synchronize(self.index(index))


def devices() -> Iterator[str]:
    """Give the names of what the suite can run on here."""
    yield "cpu"
    yield from ("sim-lazy", "sim-jitter", "sim-free")
    if torch.cuda.is_available():
        yield "cuda"


def settle(measure: Callable[[], float], *, warm_up: float = 0.0, tolerance: float = 0.02, at_most: int = 100) -> float:
    """Measure until a figure agrees with the least one before it, at most so many times, and return the least figure.

    An idle device runs at a low clock. Its clock rises only after it has worked for a while, so that the first figures
    agree with each other and are too large. Figures do not count before their sum exceeds `warm_up`. Other programs on
    the device only make a figure larger, hence the least one.
    """
    least, total = math.inf, 0.0
    for _ in range(at_most):
        figure = measure()
        total += figure
        agrees = total > warm_up and abs(figure - least) <= tolerance * figure
        least = min(least, figure)
        if agrees:
            break
    return least


WARM_UP_MS = 200.0  # of work, after which a GPU's clock has risen


@functools.cache
def _cycles_per_ms() -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 1_000_000 if fakecuda.is_active() else 10_000_000

    def milliseconds() -> float:
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    torch.cuda._sleep(1)  # loads the kernel
    warm_up = 0.0 if fakecuda.is_active() else WARM_UP_MS
    return int(cycles / settle(milliseconds, warm_up=warm_up))


@functools.cache
def _enable_peers(devices: tuple[torch.device, ...]) -> None:
    """Copy once between any two: torch then enables peer access, for which it selects every device in turn."""
    for source, target in itertools.permutations(devices, 2):
        torch.zeros(1, device=source).to(target)


@functools.cache
def _warm_up(index: int) -> None:
    """Load every kernel that a test uses: a first launch can wait for all that the device does."""
    device = torch.device("cuda", index)
    with torch.accelerator.device_index(index):
        torch.cuda._sleep(1)
        x = torch.empty(SIZE, device=device).fill_(1)
        host = torch.empty(SIZE, pin_memory=True).copy_(x * 2 + x, non_blocking=True)
        x.copy_(host, non_blocking=True).add_(1).mul_(2).aminmax()
        torch.stack([x / 2 - 1, x]).sum(0).sum().item()
        torch.zeros(SIZE, device=device).cpu()
    torch.accelerator.synchronize(index)
