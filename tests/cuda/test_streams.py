"""The streams of torch.cuda: their classes, priorities, and streams that torch did not make."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, copy
from support.harness import Cuda

pytestmark = pytest.mark.cuda


@pytest.fixture
def foreign() -> Iterator[torch.cuda.ExternalStream]:
    """Yield a stream that the driver made."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")  # the context is there, and current
    handle = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    assert handle.value is not None
    yield torch.cuda.ExternalStream(handle.value)
    torch.cuda.synchronize()
    assert driver.cuStreamDestroy_v2(handle) == 0


def test_callback_runs_on_given_cuda_stream(cuda: Cuda) -> None:
    stream = torch.cuda.Stream()
    ran_on = cuda.complete(2.0).then(lambda f: torch.cuda.current_stream(), stream=stream).wait()
    assert ran_on.cuda_stream == stream.cuda_stream


def test_producer_may_name_cuda_stream(cuda: Cuda) -> None:
    stream = torch.cuda.Stream()
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with torch.cuda.stream(stream):
        x = cuda.produce(4.0)
    future.set_result(x, stream=stream)
    assert cuda.read(future.wait(non_blocking=True)) == 4.0


def test_external_stream_produces_and_consumes(cuda: Cuda, foreign: torch.cuda.ExternalStream) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with torch.cuda.stream(foreign):
        x = cuda.produce(5.0)
    future.set_result(x, stream=foreign)
    assert cuda.read(future.wait(non_blocking=True)) == 5.0
    child = cuda.complete(6.0).then(lambda f: (torch.cuda.current_stream().cuda_stream, f.value() + 1), stream=foreign)
    where, y = child.wait(non_blocking=True)
    assert where == foreign.cuda_stream
    assert cuda.read(y) == 7.0


@pytest.mark.parametrize("priority", [0, -1])
def test_pool_streams_have_requested_priority(cuda: Cuda, priority: int) -> None:
    child = cuda.complete(1.0).then(lambda f: torch.cuda.current_stream().priority, priority=priority)
    assert child.wait() == priority


def test_each_priority_has_own_pool(cuda: Cuda) -> None:
    stream = cuda.stream()
    with cuda.hold(stream):
        future = cuda.complete(1.0, stream=stream)
        pools = [
            {future.then(lambda f: torch.cuda.current_stream().cuda_stream, priority=p).value() for _ in range(8)}
            for p in (0, -1)
        ]
    assert all(len(pool) == 4 for pool in pools)
    assert not pools[0] & pools[1]
    assert torch.cuda.default_stream().cuda_stream not in pools[0] | pools[1]


MIB = 1 << 20
RESERVED: dict[str, Callable[[torch.Tensor, torch.Tensor], CUDAFuture[Any]]] = {
    "callbacks": lambda x, host: CUDAFuture.completed(x).then(lambda f: f.value() * 2),
    "callbacks of two priorities": lambda x, host: CUDAFuture.completed(x).then(lambda f: f.value() * 2, priority=-1),
    "copies": lambda x, host: copy(host, "cuda"),
    "packed copies": lambda x, host: copy({"x": host}, "cuda", pack=True),
}


@pytest.mark.parametrize("make", RESERVED.values(), ids=RESERVED.keys())
@pytest.mark.parametrize("waits", [True, False], ids=["one at a time", "at once"])
def test_results_take_memory_of_few_streams(
    cuda: Cuda, make: Callable[[torch.Tensor, torch.Tensor], CUDAFuture[Any]], waits: bool
) -> None:
    if make is RESERVED["packed copies"] and not waits:
        pytest.skip("each slab belongs to the caller's stream, which gets it back after its copy")
    # The caller's thread copies up to 1 MiB itself: no other thread holds a result when the next one takes memory.
    host = torch.ones(MIB // 4)
    x = host.to(cuda.at())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(64):
        future = make(x, host)
        if waits:
            future.wait()
        del future  # its memory goes back to the stream that made it
    assert torch.cuda.memory_reserved() - before <= 4 * 2 * MIB  # a segment of the allocator for each pool stream
