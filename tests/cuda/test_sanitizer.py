"""Futures under torch's own CUDA sanitizer, which knows who ordered what after what, as the simulated accelerator does.

    TORCH_CUDA_SANITIZER=1 pytest tests/cuda/test_sanitizer.py

It follows what the main thread enqueues, so that is where everything happens here. Without the variable, which torch
reads when it is imported, there is nothing to see.
"""

from __future__ import annotations

import os
from typing import Literal

import pytest
import torch
from torch.futures import Future

from cudafuture import CUDAFuture, collect_any, copy, gather
from support.harness import PRIORITIES, Cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("TORCH_CUDA_SANITIZER" not in os.environ, reason="TORCH_CUDA_SANITIZER is not set"),
]


def test_sanitizer_finds_race(cuda: Cuda) -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors

    x = cuda.empty().fill_(1)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(CUDASanitizerErrors):
        x.mul_(2)


def test_sanitizer_finds_use_without_wait(cuda: Cuda) -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors

    future = cuda.complete(2.0)
    with pytest.raises(CUDASanitizerErrors):
        future.value().mul_(2)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_waiting(cuda: Cuda, non_blocking: bool) -> None:
    x = cuda.complete(2.0).wait(non_blocking=non_blocking)
    assert cuda.read(x.mul_(2)) == 4.0


def test_waiting_on_several_streams_in_turn(cuda: Cuda) -> None:
    future = cuda.complete(2.0)
    for priority in PRIORITIES:
        with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
            assert cuda.read(future.wait(non_blocking=True)) == 2.0


@pytest.mark.parametrize("stream", ["pool", "caller"])
def test_callbacks(cuda: Cuda, stream: Literal["pool", "caller"]) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    child = future.then(lambda f: f.value().mul_(3), stream=stream).then(lambda f: f.value() + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        future.set_result(cuda.produce(2.0))
    assert cuda.read(child.wait(non_blocking=True)) == 7.0


def test_combinators(cuda: Cuda) -> None:
    x, y = gather(cuda.complete(1.0), cuda.complete(2.0)).wait(non_blocking=True)
    assert cuda.read(x.add_(y)) == 3.0
    _, z = collect_any([cuda.complete(3.0)]).wait(non_blocking=True)
    assert cuda.read(z.mul_(2)) == 6.0


def test_recovery_with_pending_work_is_clean(cuda: Cuda) -> None:
    x, side = cuda.empty(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the sanitizer counts an allocation as a write
    future: CUDAFuture[torch.Tensor] = CUDAFuture(devices=[cuda.at()])
    recovered = future.then(lambda f: x.mul_(2) if f.exception() else x)
    with torch.cuda.stream(side):
        x.fill_(4.0)
        future.set_exception(ValueError("half way"))
    assert cuda.read(recovered.wait(non_blocking=True)) == 8.0


def test_to_torch_and_back(cuda: Cuda) -> None:
    x = cuda.complete(2.0).to_torch().wait()
    assert cuda.read(x.mul_(2)) == 4.0
    source: Future[torch.Tensor] = Future(devices=[cuda.at()])
    with torch.cuda.stream(torch.cuda.Stream()):
        source.set_result(cuda.produce(5.0))
    assert cuda.read(CUDAFuture.from_torch(source).wait(non_blocking=True).mul_(2)) == 10.0


def test_future_events_are_clean(cuda: Cuda) -> None:
    future = cuda.complete(2.0)
    stream = torch.cuda.Stream()
    future.events[cuda.at()].wait(stream)
    with torch.cuda.stream(stream):
        assert cuda.read(future.value().mul_(2)) == 4.0


def test_copies(cuda: Cuda) -> None:
    x = copy(torch.full((256,), 2.0), cuda.at()).wait(non_blocking=True)
    host = copy(x.mul_(2), "cpu").wait()
    assert host.eq(4.0).all()
