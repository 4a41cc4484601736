"""Stream capture: what is recorded into a graph, what is refused, and what goes on beside it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, executors, gather
from support.harness import SIZE, Cuda
from support.patience import PATIENCE

pytestmark = pytest.mark.cuda


@pytest.fixture
def x() -> torch.Tensor:
    """Return the input of every graph here."""
    return torch.zeros(SIZE, device="cuda")


@contextmanager
def capture_at_once(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture while the device is at work: `torch.cuda.graph` would wait for it first.

    In torch's usual mode, in which whatever any thread does that CUDA calls unsafe ends the capture.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        yield
        graph.capture_end()


def replay(graph: torch.cuda.CUDAGraph, x: torch.Tensor, y: torch.Tensor, value: float) -> float:
    x.fill_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.all(y == y[0])
    return float(y[0])


def test_non_blocking_wait_is_recorded(cuda: Cuda, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            future = CUDAFuture.completed(x * 2)
        y = future.wait(non_blocking=True) + 1
    assert replay(graph, x, y, 3) == 7
    assert replay(graph, x, y, 5) == 11


def test_callbacks_record_on_pool_streams(cuda: Cuda, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        doubled = future.then(lambda f: f.value() * 2)
        squared = future.then(lambda f: f.value() ** 2)
        future.set_result(x + 1)
        y: Any = sum(gather(doubled, squared).wait(non_blocking=True))
    assert replay(graph, x, y, 2) == 15
    assert replay(graph, x, y, 3) == 24


def test_refused_blocking_wait_keeps_capture(cuda: Cuda, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        future = CUDAFuture.completed(x * 2)
        with pytest.raises(InvalidStateError, match=r"capture of cuda:0"):
            future.wait()
        y = future.wait(non_blocking=True) + 1
    assert replay(graph, x, y, 3) == 7


def test_query_of_earlier_work_keeps_capture(cuda: Cuda, x: torch.Tensor) -> None:
    earlier = cuda.complete(2.0)
    graph = torch.cuda.CUDAGraph()
    with capture_at_once(graph):
        y = x + 1
        earlier.ready()
        y = y * 2
    assert replay(graph, x, y, 3) == 8


def test_watcher_spares_capture_of_other_thread(cuda: Cuda, x: torch.Tensor) -> None:
    side = cuda.stream()
    ran = threading.Event()
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as held:
        held.enter_context(cuda.hold(side))
        watched = cuda.complete(1.0, stream=side).then(lambda f: ran.set(), non_blocking=False)
        with capture_at_once(graph):
            y = x + 1
            for _ in range(1000):  # the watcher polls meanwhile
                y = y + 1
            held.close()
            assert ran.wait(60)
            y = y + 1
    watched.wait()
    torch.cuda.synchronize()
    assert replay(graph, x, y, 1) == 1003


def test_blocking_wait_elsewhere_keeps_capture(cuda: Cuda, x: torch.Tensor) -> None:
    side = cuda.stream()
    graph = torch.cuda.CUDAGraph()
    with cuda.hold(side):
        future = cuda.complete(1.0, stream=side)
        waiter = threading.Thread(target=future.wait)
        waiter.start()
        with capture_at_once(graph):
            y = x + 1
            for _ in range(200):
                y = y + 1
    waiter.join()
    assert replay(graph, x, y, 1) == 202


def test_captured_events_serve_later(cuda: Cuda, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            CUDAFuture.completed(x * 2).wait(non_blocking=True)
        y = x + 1
    for value in range(50):  # from the pool, where those of the capture are
        assert CUDAFuture.completed(torch.full((8,), float(value), device="cuda")).wait().sum().item() == 8 * value
    assert replay(graph, x, y, 1) == 2


def test_unqueryable_stream_leaves_no_error(cuda: Cuda) -> None:
    runtime, handle, graph = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p(), ctypes.c_void_p()
    earlier = cuda.complete(2.0)
    torch.cuda.synchronize()
    assert runtime.cudaStreamCreate(ctypes.byref(handle)) == 0  # not with cudaStreamNonBlocking
    assert runtime.cudaStreamBeginCapture(handle, 0) == 0
    try:
        earlier.wait()  # it asks for the capture of the current stream, which is the legacy default stream
        assert runtime.cudaGetLastError() == 0
    finally:
        assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert runtime.cudaStreamDestroy(handle) == 0


def test_two_captures_take_different_streams(cuda: Cuda, x: torch.Tensor) -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)
    errors: list[BaseException] = []

    def capture(value: float) -> None:
        graph = torch.cuda.CUDAGraph()
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                future = CUDAFuture.completed(x + value)
                barrier.wait()
                child = future.then(lambda f: f.value() * 2, executor=executors.inline)
                child.wait(non_blocking=True)
            finally:
                barrier.wait()
                graph.capture_end()

    def capture_often(value: float) -> None:
        try:
            for _ in range(40):
                capture(value)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=capture_often, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_torch_futures_avoid_capture_stream(cuda: Cuda, x: torch.Tensor) -> None:
    def follow_many() -> None:
        with torch.cuda.stream(own):
            for _ in range(70):  # torch's pool has 32 streams, and torch.cuda.graph captures on one of them
                source: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[x.device])
                source.set_result(x)
                CUDAFuture.from_torch(source).wait(non_blocking=True)

    own = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        following = threading.Thread(target=follow_many)
        following.start()
        following.join()
    assert replay(graph, x, y, 1) == 2
