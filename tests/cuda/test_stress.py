"""Many threads and streams at once, whose values are all checked: futures of work that is late, or held.

Each round makes futures on new streams, attaches callbacks, copies or conversions, gathers the results on another
stream and compares each element. Memory that was freed is overwritten at once, so that a block that is reused too
early shows as a wrong value.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from cudafuture import CUDAFuture, collect_any, copy, gather
from cudafuture.testing import fakecuda
from support.harness import PRIORITIES, Cuda, empty_caches
from support.soak import soak_count

pytestmark = [pytest.mark.cuda, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]

SECONDS = 60  # on a GPU
ROUNDS = soak_count(200)  # of each thread on fake devices
HELD = 0.05  # share of futures whose stream is held until everything is attached
LARGEST_DELAY = 400_000  # cycles

Future = CUDAFuture[torch.Tensor]


class Kind(NamedTuple):
    """Operation on a pending future, and the value that its result has for a value of the future."""

    attach: Callable[[Future], Future]
    expected: Callable[[float], float]


class Part(NamedTuple):
    """Operation of a round: its name, the stream of its producer, its future and the value that it must have."""

    name: str
    stream: torch.cuda.Stream
    future: Future
    expected: float


def through_the_host(future: Future) -> Future:
    return future.then_async(lambda f: copy(f.value(), "cpu")).then_async(lambda f: copy(f.value(), "cuda"))


def pack(future: Future) -> Future:
    copied = future.then_async(lambda f: copy([f.value(), f.value() * 3], "cuda", pack=True))
    return copied.then(lambda f: f.value()[1])


def pack_from_host(future: Future) -> Future:
    host = future.then_async(lambda f: copy(f.value(), "cpu"))
    both = host.then_async(lambda f: copy([f.value(), f.value() + 1], "cuda", pack=True), non_blocking=False)
    return both.then(lambda f: f.value()[0] + f.value()[1])


KINDS: dict[str, Kind] = {
    "then": Kind(lambda future: future.then(lambda f: f.value() * 2), lambda v: 2 * v),
    "urgent then": Kind(lambda future: future.then(lambda f: f.value() * 2, priority=-1), lambda v: 2 * v),
    "then after the device": Kind(
        lambda future: future.then(lambda f: f.value() + 1, non_blocking=False), lambda v: v + 1
    ),
    "copies": Kind(through_the_host, lambda v: v),
    "packed copies": Kind(pack, lambda v: 3 * v),
    "packed copies from the host": Kind(pack_from_host, lambda v: 2 * v + 1),
    "torch's future": Kind(lambda future: CUDAFuture.from_torch(future.to_torch()), lambda v: v),
    "the first of one": Kind(lambda future: collect_any([future]).then(lambda f: f.value()[1]), lambda v: v),
}


class Worker:
    """Thread that makes rounds until `goes_on` ends it, and collects the values that are wrong."""

    def __init__(self, seed: int, device: Cuda, sizes: tuple[int, ...], goes_on: Callable[[int], bool]) -> None:
        self.numbers, self.device, self.sizes, self.goes_on = random.Random(seed), device, sizes, goes_on
        self.rounds, self.wrong = 0, list[str]()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name=f"stress-{seed}")
        self.thread.start()

    def run(self) -> None:
        torch.cuda.set_device(0)
        try:
            while self.goes_on(self.rounds) and not self.wrong:
                self.round()
                self.rounds += 1
        except BaseException as e:
            self.error = e

    def hold(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return self.device.hold(stream) if self.numbers.random() < HELD else nullcontext()

    def produce(self, future: Future, size: int, value: float, stream: torch.cuda.Stream) -> None:
        """Complete the future with memory that the stream fills late."""
        with torch.cuda.stream(stream):
            x = torch.empty(size, device="cuda")
            torch.cuda._sleep(self.numbers.randrange(1000, LARGEST_DELAY))
            future.set_result(x.fill_(value))

    def part(self, size: int) -> Part:
        """Return an operation that has begun."""
        name = self.numbers.choice(list(KINDS))
        value = float(self.numbers.randrange(1000))
        future: Future = CUDAFuture()
        is_attached_late = self.numbers.random() < 0.3
        stream = torch.cuda.Stream(priority=self.numbers.choice(PRIORITIES))
        with self.hold(stream):
            if is_attached_late:
                self.produce(future, size, value, stream)
            child = KINDS[name].attach(future)
            if not is_attached_late:
                self.produce(future, size, value, stream)
        return Part(name, stream, child, KINDS[name].expected(value))

    def overwrite(self, size: int, streams: list[torch.cuda.Stream]) -> None:
        """Fill new memory of these streams: memory that was freed there too early is in it."""
        for stream in streams:
            with torch.cuda.stream(stream):
                others = [torch.full((size,), -1.0, device="cuda") for _ in range(3)]
                del others

    def round(self) -> None:
        size = self.numbers.choice(self.sizes)
        parts = [self.part(size) for _ in range(self.numbers.randrange(1, 5))]
        expected = [(part.name, part.expected) for part in parts]
        consumer = torch.cuda.Stream()
        streams = [*(part.stream for part in parts), consumer]
        with torch.cuda.stream(consumer):
            got = gather(*(part.future for part in parts)).wait(non_blocking=self.numbers.random() < 0.7)
            del parts
            torch.cuda._sleep(self.numbers.randrange(1000, LARGEST_DELAY))
            ranges = [torch.stack(x.aminmax()) for x in got]
            del got
            self.overwrite(size, streams)
            for (name, value), extremes in zip(expected, ranges, strict=True):
                low, high = extremes.tolist()
                if not low == high == value:
                    self.wrong.append(f"{name}, {size} floats: {low} to {high}, not {value}")


@pytest.fixture
def no_cache_is_left() -> Iterator[None]:
    """Give the memory of all streams back, which the tests after this one may need."""
    yield
    empty_caches()


@pytest.mark.usefixtures("no_cache_is_left")
def test_threads_and_streams_see_each_value(cuda: Cuda) -> None:
    is_fake = fakecuda.is_active()
    sizes = (64, 1 << 10, 1 << 14) if is_fake else (64, 1 << 12, 1 << 16, 1 << 20)
    end = time.monotonic() + SECONDS

    def goes_on(rounds: int) -> bool:
        return rounds < ROUNDS if is_fake else time.monotonic() < end

    workers = [Worker(seed, cuda, sizes, goes_on) for seed in range(4 if is_fake else 10)]
    for worker in workers:
        worker.thread.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    assert [line for worker in workers for line in worker.wrong] == []
    assert all(worker.rounds > 0 for worker in workers)
    print(f"{sum(worker.rounds for worker in workers)} rounds")
