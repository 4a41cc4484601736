"""submit and copy: functions and copies that run elsewhere."""

import concurrent.futures
import functools
import gc
import threading
import weakref
from collections import namedtuple
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, copy, executors, submit


def test_submit_runs_a_function_with_its_arguments():
    assert submit(divmod, 7, 2).wait() == (3, 1)
    assert submit(sorted, [2, 1], reverse=True).wait() == [2, 1]
    assert submit(threading.get_ident).wait() != threading.get_ident()


def test_submit_takes_any_executor():
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        assert submit(lambda: threading.current_thread().name, executor=pool).wait().startswith("mine")
    assert submit(threading.get_ident, executor=executors.inline).value() == threading.get_ident()
    on_callback_thread = submit(threading.get_ident, executor=executors.callback_thread).wait()
    assert on_callback_thread not in (threading.get_ident(), None)


def test_submit_names_the_future_after_the_function():
    error = submit(int, "not a number").exception()
    assert error.__notes__ == ["in CUDAFuture 'int'"]
    assert submit(print, executor=executors.inline, priority=-1).priority == -1


def test_submit_carries_the_callers_modes():
    with torch.no_grad():
        future = submit(torch.is_grad_enabled)
    assert future.wait() is False


def test_a_submitted_function_can_be_cancelled_until_it_begins():
    begun, end, ran = threading.Event(), threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        blocker = submit(lambda: begun.set() or end.wait(), executor=pool)
        begun.wait()
        queued = submit(ran.append, 1, executor=pool)
        assert queued.cancel()
        assert not blocker.cancel()
        end.set()
        assert blocker.wait() is True
    assert queued.cancelled()
    assert ran == []


def test_submit_refuses_what_it_cannot_call_or_run_on():
    with pytest.raises(TypeError, match="takes a callable"):
        submit(3)
    with pytest.raises(TypeError, match=r"concurrent\.futures\.Executor"):
        submit(print, executor=3)


Point = namedtuple("Point", "x y")


def test_copy_keeps_the_structure_and_copies_the_tensors():
    value = {"a": [torch.arange(3), "text"], "b": Point(torch.ones(2, 2), None), "c": (1,)}
    copied = copy(value, "cpu").wait()
    assert copied["a"][0].tolist() == [0, 1, 2]
    assert copied["a"][1] == "text"
    assert isinstance(copied["b"], Point)
    assert copied["c"] == (1,)
    copied["a"][0].zero_()
    assert value["a"][0].tolist() == [0, 1, 2]


def test_copy_takes_a_single_tensor_any_dtype_and_no_tensor_at_all():
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        source = torch.ones(3, dtype=dtype, device="cpu")
        assert torch.equal(copy(source, "cpu").wait(), source)
    assert copy([], torch.device("cpu")).wait() == []
    assert copy(torch.ones(4, 4)[::2, 1], "cpu", priority=-1).wait().tolist() == [1, 1]


def test_copy_to_a_device_that_is_none_is_refused():
    with pytest.raises((RuntimeError, TypeError)):
        copy(torch.ones(1), "nowhere")


class Refusing(Executor):
    """Takes a call, and fails it without having called it, as executors do that cannot send it where it would run."""

    def __init__(self, error):
        self.error = error

    def submit(self, fn, /, *args, **kwargs):
        handle = concurrent.futures.Future()
        if self.error is None:
            handle.cancel()
        else:
            handle.set_exception(self.error)
        return handle


def test_an_executor_that_fails_a_callback_without_running_it_fails_the_future():
    error = ValueError("cannot be sent")
    assert submit(int, executor=Refusing(error)).exception(timeout=60) is error
    assert CUDAFuture.completed(1).then(int, executor=Refusing(error)).exception(timeout=60) is error
    assert submit(int, executor=Refusing(None)).cancelled()


def test_an_executor_that_was_shut_down_is_an_invalid_state():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(InvalidStateError, match="no longer accepts callbacks: cannot schedule"):
        submit(int, executor=pool).wait(timeout=60)


def test_an_executor_of_processes_is_refused():
    with ProcessPoolExecutor(1) as pool:
        with pytest.raises(TypeError, match="ProcessPoolExecutor"):
            submit(int, executor=pool)
        with pytest.raises(TypeError, match="ProcessPoolExecutor"):
            CUDAFuture.completed(1).then(int, executor=pool)


def test_a_callable_with_an_odd_name_is_submitted():
    odd = functools.partial(str, "called")
    odd.__qualname__ = 3
    assert submit(odd).wait() == "called"


class Handle:
    """What an executor's submit() returns; tells its callbacks what the test says."""

    def __init__(self):
        self.callbacks = []

    def add_done_callback(self, fn):
        self.callbacks.append(fn)

    def cancelled(self):
        return True


class Keeping:
    """An executor that keeps what it is given."""

    def __init__(self):
        self.jobs = []
        self.handle = Handle()

    def submit(self, job):
        self.jobs.append(job)
        return self.handle


def test_a_handle_that_is_cancelled_while_the_callback_runs_changes_nothing():
    executor = Keeping()

    def cancel_the_handle(future):
        for callback in executor.handle.callbacks:
            callback(executor.handle)  # as asyncio's run_in_executor does
        return [future.value()] * 10

    child = CUDAFuture.completed(1).then(cancel_the_handle, executor=executor)
    executor.jobs[0]()
    assert child.wait() == [1] * 10


def test_a_job_that_is_called_twice_runs_once():
    executor, ran = Keeping(), []

    def call_again(future):
        ran.append(1)
        executor.jobs[0]()

    CUDAFuture.completed(1).add_done_callback(call_again, executor=executor)
    executor.jobs[0]()
    executor.jobs[0]()
    assert ran == [1]


@pytest.mark.parametrize("where", ["submit", "add_done_callback"])
def test_an_executor_that_raises_after_it_has_run_the_callback_changes_nothing(where):
    class Raising(Keeping):
        def submit(self, job):
            job()
            if where == "submit":
                raise RuntimeError("after running it")
            return self

        def add_done_callback(self, fn):
            raise KeyError("closed")

    children = [CUDAFuture.completed(i).then(lambda f: [f.value()] * 3, executor=Raising()) for i in range(100)]
    assert [c.wait() for c in children] == [[i] * 3 for i in range(100)]


def test_a_cycle_through_an_executor_that_keeps_its_jobs_is_collected():
    executor = Keeping()
    child = CUDAFuture.completed(1).then(lambda f, executor=executor: executor, executor=executor)
    alive = weakref.ref(executor), weakref.ref(child)
    del executor, child
    gc.collect()
    assert [a() for a in alive] == [None, None]
