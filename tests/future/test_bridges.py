"""from_torch and to_torch: torch's own handles, both ways."""

from __future__ import annotations

import datetime as dt
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future as TorchFuture

from cudafuture import CUDAFuture, InvalidStateError


def test_torch_future_completes_ours() -> None:
    source: TorchFuture[Any] = TorchFuture()
    future = CUDAFuture.from_torch(source)
    assert not future.done()
    value = [torch.ones(1), "text"]
    source.set_result(value)
    assert future.wait() is value


def test_done_torch_future_converts_done() -> None:
    source: TorchFuture[int] = TorchFuture()
    source.set_result(3)
    assert CUDAFuture.from_torch(source).value() == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_error_value_becomes_error(when: str) -> None:
    source: TorchFuture[Any] = TorchFuture()
    error = KeyError("k")
    if when == "before":
        source.set_exception(error)
    future = CUDAFuture.from_torch(source)
    if when == "after":
        source.set_exception(error)
    assert future.exception() is error


def test_torch_callback_error_arrives() -> None:
    source: TorchFuture[None] = TorchFuture()
    future = CUDAFuture.from_torch(source.then(lambda f: 1 / 0))
    source.set_result(None)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        future.wait()


def test_dropped_torch_wrapper_still_completes_ours() -> None:
    source: TorchFuture[int] = TorchFuture()
    future = CUDAFuture.from_torch(source.then(lambda f: f.value() + 1))
    gc.collect()
    source.set_result(1)
    assert future.wait() == 2


def test_from_torch_unwraps_our_future() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    assert CUDAFuture.from_torch(future) is future


@pytest.mark.parametrize("source", [None, 3, "work", object(), torch.ones(1)])
def test_from_torch_refuses_everything_else(source: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.futures\.Future or a c10d Work"):
        CUDAFuture.from_torch(source)


def test_to_torch_returns_torch_class_with_value() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    bridged = future.to_torch()
    assert type(bridged) is TorchFuture
    assert not bridged.done()
    value = {"x": torch.ones(2)}
    future.set_result(value)
    assert bridged.wait() is value


@pytest.mark.parametrize("error", [OSError(5, "io"), KeyboardInterrupt("stop"), SystemExit(2)])
def test_to_torch_keeps_exception_object(error: BaseException) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    bridged = future.to_torch()
    future.set_exception(error)
    with pytest.raises(type(error)) as caught:
        bridged.wait()
    assert caught.value is error
    with pytest.raises(type(error)):
        bridged.value()


def test_to_torch_of_cancelled_future_fails() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    bridged = future.to_torch()
    future.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        bridged.wait()


def test_torch_collect_all_takes_bridged_futures() -> None:
    futures: list[CUDAFuture[int]] = [CUDAFuture() for _ in range(3)]
    collected = torch.futures.collect_all([f.to_torch() for f in futures])
    for i, future in enumerate(futures):
        future.set_result(i)
    assert [f.value() for f in collected.wait()] == [0, 1, 2]


def test_round_trip_returns_original() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    back = CUDAFuture.from_torch(future.to_torch())
    error = ZeroDivisionError("round trip")
    future.set_exception(error)
    assert back.exception() is error


def test_other_thread_completes_torch_future() -> None:
    source: TorchFuture[Any] = TorchFuture()
    future = CUDAFuture.from_torch(source)
    child = future.then(lambda f: threading.get_ident())
    thread = threading.Thread(target=source.set_result, args=(1,))
    thread.start()
    assert future.wait(timeout=60) == 1
    assert child.wait(timeout=60)
    thread.join()


def test_dropped_pending_bridge_is_freed() -> None:
    source: TorchFuture[Any] = TorchFuture()
    future = CUDAFuture.from_torch(source)
    alive = weakref.ref(future)
    del future, source
    gc.collect()
    assert alive() is None


def test_error_survives_its_wrapper() -> None:
    for _ in range(50):
        source: TorchFuture[Any] = TorchFuture()
        future = CUDAFuture.from_torch(source)
        source.set_exception(ValueError("kept"))
        del source
        assert isinstance(future.exception(timeout=60), ValueError)


def test_to_torch_suggests_then_async() -> None:
    bridged = CUDAFuture.completed(CUDAFuture[int]()).to_torch()
    with pytest.raises(TypeError, match=r"attached by then_async\(\), not by then\(\)"):
        bridged.wait()


def test_dropped_source_fails_torch_future() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    bridged = future.to_torch()
    child = bridged.then(lambda f: f.wait())
    del future
    with pytest.raises(InvalidStateError, match="dropped before it completed"):
        bridged.wait()
    with pytest.raises(RuntimeError, match="dropped before it completed"):
        child.wait()


def test_dropped_torch_future_fails_ours(caplog: pytest.LogCaptureFixture) -> None:
    source: TorchFuture[Any] = TorchFuture()
    future = CUDAFuture.from_torch(source)
    child = future.then(lambda f: f.value())
    del source
    with pytest.raises(InvalidStateError, match="dropped before it completed"):
        child.wait(timeout=60)
    del future, child
    assert caplog.text == ""


def test_to_torch_spares_completed_target() -> None:
    future: CUDAFuture[str] = CUDAFuture()
    bridged = future.to_torch()
    bridged.set_result("by hand")
    future.set_result("too late")
    assert bridged.wait() == "by hand"


# ---- Works whose class is written in Python, as those of backends in Python are


class PythonWork(dist.Work):
    outcome: Exception | None

    def __init__(self, followed: TorchFuture[Any] | None = None) -> None:
        super().__init__()
        self.followed = followed
        self.finished = threading.Event()

    def get_future(self) -> TorchFuture[Any]:
        if self.followed is None:
            raise NotImplementedError
        return self.followed

    def wait(self, timeout: dt.timedelta = dt.timedelta(0)) -> bool:
        self.finished.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return True


def test_python_work_follows_its_future() -> None:
    for outcome in ([torch.ones(1)], KeyError("typed")):
        source: TorchFuture[Any] = TorchFuture()
        future = CUDAFuture.from_torch(PythonWork(source))
        assert not future.cancel()
        with pytest.raises(TimeoutError):
            future.wait(timeout=0.01)
        (source.set_exception if isinstance(outcome, KeyError) else source.set_result)(outcome)
        if isinstance(outcome, KeyError):
            assert future.exception(timeout=60) is outcome
        else:
            assert future.wait(timeout=60) is outcome


def test_python_work_lives_until_done() -> None:
    source: TorchFuture[int] = TorchFuture()
    work = PythonWork(source)
    gone = threading.Event()
    weakref.finalize(work, gone.set)
    future = CUDAFuture.from_torch(work)
    del work
    gc.collect()
    assert not gone.is_set()
    source.set_result(1)
    assert future.wait(timeout=60) == 1
    del source
    assert gone.wait(60)


@pytest.mark.parametrize("outcome", [None, ValueError("of a wait")])
def test_work_without_future_is_waited_for(outcome: ValueError | None) -> None:
    work = PythonWork()
    work.outcome = outcome
    future, finished = CUDAFuture.from_torch(work), work.finished
    del work
    gc.collect()
    assert not future.done()
    finished.set()
    error = future.exception(timeout=60)
    assert error is outcome
