"""Blocking until the device has finished: soon, interruptible, and in few looks."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from cudafuture import _C, CUDAFuture
from support.harness import Cuda

pytestmark = pytest.mark.cuda


def test_blocking_wait_returns_with_device(cuda: Cuda) -> None:
    event = torch.cuda.Event()
    x = cuda.produce(2.0)
    event.record()
    assert not event.query()
    CUDAFuture.completed(x).wait()
    assert event.query()


def test_timeout_ends_device_wait(cuda: Cuda) -> None:
    with cuda.hold():
        future = CUDAFuture.completed(cuda.produce(2.0))
        with pytest.raises(TimeoutError, match="device work has not finished"):
            future.wait(timeout=0.01)
    assert cuda.read(future.wait()) == 2.0


def test_ctrl_c_ends_device_wait(cuda: Cuda) -> None:
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        signal.raise_signal(signal.SIGINT)

    def wait() -> None:
        begun.set()
        future.wait()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the other thread goes on when this one gives the GIL up, which is in wait()
    thread = threading.Thread(target=interrupt)
    with cuda.hold(), cuda.hold():
        future = CUDAFuture.completed(cuda.produce(2.0))
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
        finally:
            sys.setswitchinterval(interval)
        assert not future.ready()
    thread.join()
    assert cuda.read(future.wait()) == 2.0


def test_device_wait_lets_other_threads_run(cuda: Cuda) -> None:
    steps = 0
    with cuda.hold():
        future = CUDAFuture.completed(cuda.produce(2.0))
        waiter = threading.Thread(target=future.wait)
        waiter.start()
        while steps < 100 and not future.ready():
            steps += 1
    waiter.join()
    assert steps == 100


def test_wait_restores_thread_timers(cuda: Cuda) -> None:
    slack = Path("/proc/self/timerslack_ns")  # of the main thread
    before = slack.read_text()
    for _ in range(3):
        cuda.complete(1.0).wait()
    assert slack.read_text() == before


def test_watcher_polls_less_over_time(cuda: Cuda) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = _C.statistics()["watcher_polls"]
    begin.record()
    with cuda.hold():
        future = CUDAFuture.completed(cuda.produce(2.0))
    end.record()
    future.then(lambda f: None, non_blocking=False).wait()
    polls = _C.statistics()["watcher_polls"] - before
    longest = 0.005
    assert 1 <= polls <= 130 + begin.elapsed_time(end) / 1e3 / longest


def test_pinned_memory_is_written_before_return(cuda: Cuda) -> None:
    host = torch.zeros(1 << 20, pin_memory=True)
    for value in (1.0, 2.0, 3.0):
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((1 << 20,), value, device="cuda")
            torch.cuda._sleep(5_000_000)
            host.copy_(x, non_blocking=True)
            future.set_result(host, tensors=[x])
        assert future.wait().sum().item() == value * (1 << 20)
