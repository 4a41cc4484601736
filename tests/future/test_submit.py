"""submit and copy: functions and copies that run elsewhere."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, copy, executors, submit


def test_submit_passes_arguments() -> None:
    assert submit(divmod, 7, 2).wait() == (3, 1)
    assert submit(sorted, [2, 1], reverse=True).wait() == [2, 1]
    assert submit(threading.get_ident).wait() != threading.get_ident()


def test_submit_takes_any_executor() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        assert submit(lambda: threading.current_thread().name, executor=pool).wait().startswith("mine")
    assert submit(threading.get_ident, executor=executors.inline).value() == threading.get_ident()
    on_callback_thread = submit(threading.get_ident, executor=executors.callback_thread).wait()
    assert on_callback_thread not in (threading.get_ident(), None)


def test_submit_names_future_after_function() -> None:
    error = submit(int, "not a number").exception()
    assert error.__notes__ == ["in CUDAFuture 'int'"]  # type: ignore[union-attr]
    assert submit(print, executor=executors.inline, priority=-1).priority == -1


def test_submit_carries_callers_modes() -> None:
    with torch.no_grad():
        future = submit(torch.is_grad_enabled)
    assert future.wait() is False


def test_submitted_function_cancels_until_begun() -> None:
    begun, end = threading.Event(), threading.Event()
    ran: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        blocker = submit(lambda: begun.set() or end.wait(), executor=pool)  # type: ignore[func-returns-value]
        begun.wait()
        queued = submit(ran.append, 1, executor=pool)
        assert queued.cancel()
        assert not blocker.cancel()
        end.set()
        assert blocker.wait() is True
    assert queued.cancelled()
    assert ran == []


def test_submit_refuses_wrong_callables_and_executors() -> None:
    with pytest.raises(TypeError, match="takes a callable"):
        submit(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"concurrent\.futures\.Executor"):
        submit(print, executor=3)  # type: ignore[call-overload]


Point = namedtuple("Point", "x y")


def test_copy_keeps_structure_and_copies_tensors() -> None:
    value = {"a": [torch.arange(3), "text"], "b": Point(torch.ones(2, 2), None), "c": (1,)}
    copied = copy(value, "cpu").wait()
    assert copied["a"][0].tolist() == [0, 1, 2]
    assert copied["a"][1] == "text"
    assert isinstance(copied["b"], Point)
    assert copied["c"] == (1,)
    copied["a"][0].zero_()
    assert value["a"][0].tolist() == [0, 1, 2]


def test_copy_takes_any_dtype_or_no_tensor() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        source = torch.ones(3, dtype=dtype, device="cpu")
        assert torch.equal(copy(source, "cpu").wait(), source)
    assert copy([], torch.device("cpu")).wait() == []
    assert copy(torch.ones(4, 4)[::2, 1], "cpu", priority=-1).wait().tolist() == [1, 1]


def test_copy_to_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device is a .*, not 'nowhere'"):
        copy(torch.ones(1), "nowhere")


class Refusing(Executor):
    """Executor that fails each call without making it, like one that cannot send the call to its worker."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        handle: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self.error is None:
            handle.cancel()
        else:
            handle.set_exception(self.error)
        return handle


def test_executor_refusal_fails_future() -> None:
    error = ValueError("cannot be sent")
    assert submit(int, executor=Refusing(error)).exception(timeout=60) is error
    assert CUDAFuture.completed(1).then(int, executor=Refusing(error)).exception(timeout=60) is error  # type: ignore[arg-type]
    assert submit(int, executor=Refusing(None)).cancelled()


def test_closed_executor_is_invalid_state() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(InvalidStateError, match="no longer accepts callbacks: cannot schedule"):
        submit(int, executor=pool).wait(timeout=60)


def test_executor_of_processes_is_refused() -> None:
    with ProcessPoolExecutor(1) as pool:
        with pytest.raises(TypeError, match="ProcessPoolExecutor"):
            submit(int, executor=pool)
        with pytest.raises(TypeError, match="ProcessPoolExecutor"):
            CUDAFuture.completed(1).then(int, executor=pool)  # type: ignore[arg-type]


def test_callable_with_odd_name_is_submitted() -> None:
    odd: Any = functools.partial(str, "called")
    odd.__qualname__ = 3
    assert submit(odd).wait() == "called"


class Handle:
    """Handle that an executor's submit() returns; the test completes it."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Handle], object]] = []

    def add_done_callback(self, fn: Callable[..., Any]) -> None:
        self.callbacks.append(fn)

    def cancelled(self) -> bool:
        return True


class Keeping:
    """An executor that keeps what it is given."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []
        self.handle = Handle()

    def submit(self, job: Callable[[], object]) -> Any:
        self.jobs.append(job)
        return self.handle


def test_handle_cancelled_during_callback_is_ignored() -> None:
    executor: Any = Keeping()

    def cancel_the_handle(future: CUDAFuture[int]) -> list[int]:
        for callback in executor.handle.callbacks:
            callback(executor.handle)  # as asyncio's run_in_executor does
        return [future.value()] * 10

    child = CUDAFuture.completed(1).then(cancel_the_handle, executor=executor)
    executor.jobs[0]()
    assert child.wait() == [1] * 10


def test_job_called_twice_runs_once() -> None:
    executor: Any = Keeping()
    ran = []

    def call_again(future: CUDAFuture[int]) -> None:
        ran.append(1)
        executor.jobs[0]()

    CUDAFuture.completed(1).add_done_callback(call_again, executor=executor)
    executor.jobs[0]()
    executor.jobs[0]()
    assert ran == [1]


@pytest.mark.parametrize("where", ["submit", "add_done_callback"])
def test_executor_error_after_callback_is_ignored(where: str) -> None:
    class Raising(Keeping):
        def submit(self, job: Callable[[], object]) -> Any:
            job()
            if where == "submit":
                raise RuntimeError("after running it")
            return self

        def add_done_callback(self, fn: Callable[..., Any]) -> None:
            raise KeyError("closed")

    raising: Callable[[], Any] = Raising
    children = [CUDAFuture.completed(i).then(lambda f: [f.value()] * 3, executor=raising()) for i in range(100)]
    assert [c.wait() for c in children] == [[i] * 3 for i in range(100)]


def test_cycle_through_executor_is_collected() -> None:
    executor: Any = Keeping()
    child = CUDAFuture.completed(1).then(lambda f, executor=executor: executor, executor=executor)  # type: ignore[misc]
    alive = weakref.ref(executor), weakref.ref(child)
    del executor, child
    gc.collect()
    assert [a() for a in alive] == [None, None]
