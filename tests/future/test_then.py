"""Callbacks: then, then_async, add_done_callback, and what they find when they run."""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from cudafuture import CUDAFuture, DeviceMismatchError, InvalidStateError, executors, submit


def test_callback_gets_future_and_makes_child() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    got = []
    child = future.then(lambda f: got.append(f) or 2 * f.value())  # type: ignore[func-returns-value]
    assert not child.done()
    future.set_result(4)
    assert child.wait() == 8
    assert got == [future]
    assert got[0] is future


def test_then_on_done_future_runs_immediately() -> None:
    assert CUDAFuture.completed(1).then(lambda f: f.value() + 1).value() == 2


def test_raising_callback_fails_child_with_object() -> None:
    error = LookupError("mine")

    def fail(_: object) -> None:
        raise error

    child = CUDAFuture.completed(1).then(fail)
    assert child.exception() is error


def test_callback_runs_for_any_outcome() -> None:
    failed: CUDAFuture[None] = CUDAFuture()
    cancelled: CUDAFuture[None] = CUDAFuture()
    looked = [f.then(lambda f: f.cancelled() or type(f.exception())) for f in (failed, cancelled)]
    failed.set_exception(OSError())
    cancelled.cancel()
    assert [f.wait() for f in looked] == [OSError, True]


def test_error_keeps_identity_along_chain() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    end = future.then(lambda f: f.value()).then(lambda f: f.value()).then(lambda f: f.value())
    error = ZeroDivisionError()
    future.set_exception(error)
    assert end.exception() is error


def test_callbacks_run_in_registration_order() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    order = []
    future.add_done_callback(lambda _: order.append(0))
    future.then(lambda _: order.append(1))
    future.add_done_callback(lambda _: order.append(2))
    future.then_async(lambda _: order.append(3) or CUDAFuture.completed(0))  # type: ignore[func-returns-value]
    future.set_result(None)
    assert order == [0, 1, 2, 3]


def test_raising_callback_spares_next_one(caplog: pytest.LogCaptureFixture) -> None:
    future: CUDAFuture[None] = CUDAFuture(name="noisy")
    future.add_done_callback(lambda _: 1 / 0)
    child = future.then(lambda _: "ran")
    future.set_result(None)
    assert child.wait() == "ran"
    assert "ZeroDivisionError" in caplog.text
    assert "'noisy'" in caplog.text


def test_state_is_visible_before_callbacks() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    seen = []
    future.add_done_callback(lambda f: seen.append((f.done(), future.value())))
    future.set_result(5)
    assert seen == [(True, 5)]


def test_nested_completion_does_not_nest_callbacks() -> None:
    outer: CUDAFuture[None] = CUDAFuture()
    inner: CUDAFuture[None] = CUDAFuture()
    order = []
    inner.add_done_callback(lambda _: order.append("inner"))

    def callback(_: object) -> None:
        inner.set_result(None)
        order.append("callback ends")

    outer.add_done_callback(callback)
    outer.add_done_callback(lambda _: order.append("second"))
    outer.set_result(None)
    assert order == ["callback ends", "second", "inner"]


@pytest.mark.parametrize("fn", [None, 3, "name"])
def test_uncallable_callback_is_refused(fn: Any) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    for register in (future.then, future.then_async, future.add_done_callback):
        with pytest.raises(TypeError, match="takes a callable that takes the future"):
            register(fn)


def test_unknown_arguments_name_allowed_ones() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with pytest.raises(ValueError, match="'pool', 'caller'"):
        future.then(print, stream="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.Stream"):
        future.then(print, stream=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"concurrent\.futures\.Executor"):
        future.then(print, executor="pool")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        future.then(print, priority="high")  # type: ignore[arg-type]


def test_stream_outside_bounding_set_is_refused() -> None:
    stream = torch.Stream(stream_id=0, device_index=1, device_type=1)  # cuda:1, never used
    with pytest.raises(DeviceMismatchError, match=r"cuda:1.*\{cuda:0\}"):
        CUDAFuture(devices=["cuda:0"]).then(print, stream=stream)
    with pytest.raises(DeviceMismatchError, match=r"cuda:1"):
        CUDAFuture[int](devices=["cuda:0"]).set_result(1, stream=stream)


def test_child_inherits_priority_name_bounding_set() -> None:
    parent: CUDAFuture[Any] = CUDAFuture(devices=["cuda:0"], priority=-1, name="parent")
    child = parent.then(lambda f: f)
    assert (child.priority, child.name, child.devices) == (-1, "parent", (torch.device("cuda:0"),))
    assert parent.then(lambda f: f, priority=-2).priority == -2


@pytest.mark.parametrize("stream", ["pool", "caller", []])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_every_option_works_for_host_values(
    stream: Literal["pool", "caller"] | list[torch.Stream], non_blocking: bool
) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    child = future.then(lambda f: f.value(), stream=stream, non_blocking=non_blocking)
    future.set_result(torch.ones(1))
    assert child.wait().item() == 1


# ---- then_async


def test_then_async_takes_inner_outcome() -> None:
    inner: CUDAFuture[str] = CUDAFuture()
    child = CUDAFuture.completed(1).then_async(lambda _: inner)
    assert not child.done()
    inner.set_result("inner")
    assert child.wait() == "inner"
    assert child.value() is inner.value()


def test_then_async_takes_failure_and_cancellation() -> None:
    error = OSError()
    assert CUDAFuture.completed(1).then_async(lambda _: CUDAFuture.failed(error)).exception() is error
    inner: CUDAFuture[Any] = CUDAFuture()
    child = CUDAFuture.completed(1).then_async(lambda _: inner)
    inner.cancel()
    assert child.cancelled()


def test_then_async_refuses_plain_value() -> None:
    with pytest.raises(TypeError, match=r"then_async\(\) returned 7, which is no CUDAFuture; use then\(\)"):
        CUDAFuture.completed(1).then_async(lambda _: 7).wait()  # type: ignore[arg-type, return-value]


def test_then_async_returning_own_child_fails() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    child = future.then_async(lambda _: child)
    future.set_result(None)
    with pytest.raises(InvalidStateError, match="itself"):
        child.wait(timeout=10)


def test_waiting_child_can_be_cancelled_alone() -> None:
    inner: CUDAFuture[int] = CUDAFuture()
    child = CUDAFuture.completed(1).then_async(lambda _: inner)
    assert child.cancel()
    assert not inner.done()
    inner.set_result(1)
    assert child.cancelled()


# ---- cancelling children


def test_cancelled_child_skips_callback_only() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    ran = []
    child = future.then(lambda _: ran.append(1))
    assert child.cancel()
    assert not future.done()
    future.set_result(None)
    assert ran == []
    assert child.cancelled()


def test_child_with_running_callback_refuses_cancel() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    answers = []
    child = future.then(lambda _: answers.append(child.cancel()) or "done")  # type: ignore[func-returns-value]
    future.set_result(None)
    assert answers == [False]
    assert child.wait() == "done"


def test_dropped_parent_fails_child() -> None:
    child: CUDAFuture[Any] = CUDAFuture().then(lambda f: f.value())
    with pytest.raises(InvalidStateError, match="dropped before it completed"):
        child.wait(timeout=10)


# ---- context

variable = contextvars.ContextVar("variable", default="unset")


def modes(_: object = None) -> tuple[bool, bool, bool, torch.dtype | None, str]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        variable.get(),
    )


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("where", ["inline", "thread", "executor"])
def test_then_carries_modes_of_caller(context: str, where: str) -> None:
    future: CUDAFuture[None] = CUDAFuture()
    token = variable.set("caller")
    with ThreadPoolExecutor(1) as pool:
        with CONTEXTS[context]():
            expected = modes()
            child = future.then(modes, executor=pool if where == "executor" else None)
        variable.reset(token)
        if where == "thread":
            thread = threading.Thread(target=future.set_result, args=(None,))
            thread.start()
            thread.join()
        else:
            future.set_result(None)
        assert child.wait() == expected
    assert modes() == (True, False, False, None, "unset")


@pytest.mark.parametrize("context", CONTEXTS)
def test_callback_ignores_modes_of_producer(context: str) -> None:
    future: CUDAFuture[None] = CUDAFuture()
    child = future.then(modes)
    with CONTEXTS[context]():
        inside = modes()
        future.set_result(None)
        assert modes() == inside
    assert child.wait() == (True, False, False, None, "unset")


def test_callback_cannot_leak_its_modes() -> None:
    def leak(_: object) -> tuple[bool, bool, bool, torch.dtype | None, str]:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        variable.set("leaked")
        return modes()

    before = modes()
    assert CUDAFuture.completed(1).then(leak).wait() == (False, False, True, torch.bfloat16, "leaked")
    torch.set_autocast_enabled("cpu", False)
    assert modes() == before


def test_add_done_callback_carries_no_context() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    seen = []
    with torch.no_grad():
        future.add_done_callback(lambda _: seen.append(torch.is_grad_enabled()))
    future.set_result(None)
    assert seen == [True]


# ---- executors


def test_executor_runs_callback() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        child = CUDAFuture.completed(1).then(lambda _: threading.current_thread().name, executor=pool)
        assert child.wait().startswith("mine")
        ran = threading.Event()
        CUDAFuture.completed(1).add_done_callback(lambda _: ran.set(), executor=pool)
        assert ran.wait(10)


def test_library_executors_run_callbacks() -> None:
    here = threading.get_ident()
    future = CUDAFuture.completed(1)
    assert future.then(lambda _: threading.get_ident(), executor=executors.inline).value() == here
    elsewhere = future.then(lambda _: threading.get_ident(), executor=executors.callback_thread)
    assert elsewhere.wait() != here
    assert repr(executors.inline) == "<cudafuture.executors.inline>"


def test_producer_chooses_default_executor() -> None:
    here, library = threading.get_ident(), submit(threading.get_ident, executor=executors.callback_thread).wait()
    future: CUDAFuture[None] = CUDAFuture(executor=executors.callback_thread)
    ran = []
    future.add_done_callback(lambda _: ran.append(threading.get_ident()))
    before = future.then(lambda _: threading.get_ident())
    further = future.then(lambda _: None).then(lambda _: threading.get_ident())
    inline = future.then(lambda _: threading.get_ident(), executor=executors.inline)
    asynchronous = future.then_async(lambda _: CUDAFuture.completed(threading.get_ident()))
    future.set_result(None)
    late = future.then(lambda _: threading.get_ident())
    assert before.wait() == further.wait() == asynchronous.wait() == late.wait() == library
    assert ran == [library]
    assert inline.wait() == here, "who names one gets it"


@pytest.mark.parametrize("executor", [None, executors.inline])
def test_inline_callbacks_run_at_completion(
    executor: executors.HostExecutor | None,
) -> None:
    future: CUDAFuture[None] = CUDAFuture(executor=executor)
    child = future.then(lambda _: threading.get_ident())
    future.set_result(None)
    assert child.value() == threading.get_ident()


def test_producer_executor_must_be_ours() -> None:
    with ThreadPoolExecutor(1) as pool:
        for wrong in (pool, "inline", 1, executors):
            with pytest.raises(TypeError, match=r"CUDAFuture\(executor=\) is cudafuture.executors.inline"):
                CUDAFuture(executor=wrong)  # type: ignore[arg-type]


def test_closed_executor_fails_child() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        CUDAFuture.completed(1).then(print, executor=pool).wait()


def test_dropping_executor_cancels_child() -> None:
    pool = ThreadPoolExecutor(1)
    begun, end = threading.Event(), threading.Event()
    pool.submit(lambda: begun.set() or end.wait())  # type: ignore[func-returns-value]
    begun.wait()
    child = CUDAFuture.completed(1).then(print, executor=pool)
    pool.shutdown(wait=False, cancel_futures=True)
    end.set()
    pool.shutdown(wait=True)
    assert child.cancelled()


def test_parent_lost_during_error_fails_child() -> None:
    children = []

    def make() -> CUDAFuture[Any]:
        parent: CUDAFuture[Any] = CUDAFuture()
        children.append(parent.then(lambda f: f.value()))
        return parent

    with pytest.raises(ZeroDivisionError):
        [make(), 1 / 0]
    assert isinstance(children[0].exception(timeout=10), InvalidStateError)


@pytest.mark.parametrize("method", ["then", "then_async", "add_done_callback"])
def test_method_refuses_other_objects(method: str) -> None:
    with pytest.raises(TypeError, match="takes CUDAFutures"):
        getattr(CUDAFuture, method)(42, print)


def test_interrupt_in_dropped_callback_is_raised() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt("by a callback")

    parent: CUDAFuture[Any] = CUDAFuture()
    child = parent.then(lambda f: f.value())
    child.add_done_callback(interrupt)
    with pytest.raises(KeyboardInterrupt, match="by a callback"):  # noqa: PT012
        del parent
        for _ in range(1000):  # CPython looks here
            pass
    CUDAFuture[str]().set_result("raises nothing any more")


def test_cancelled_child_does_not_hide_failure(caplog: pytest.LogCaptureFixture) -> None:
    inner: CUDAFuture[Any] = CUDAFuture(name="inner")
    child = CUDAFuture.completed(1).then_async(lambda f, inner=inner: inner)  # type: ignore[misc]
    assert child.cancel()
    inner.set_exception(OSError("disk"))
    del inner
    assert "disk" in caplog.text


@pytest.mark.parametrize("how", ["then", "then_async"])
def test_cancelled_children_leave_pending_parent(how: str) -> None:
    parent: CUDAFuture[None] = CUDAFuture()
    order: list[Any] = []
    kept = [parent.then(lambda f, i=i: order.append(i)) for i in range(100)]  # type: ignore[misc]
    children = []
    for _ in range(1000):
        if how == "then":
            child = parent.then(lambda f: order.append("cancelled"))
        else:  # here the parent is the future that the callback returned
            child = CUDAFuture.completed(1).then_async(lambda f: parent)
        child.cancel()
        children.append(weakref.ref(child))
        del child
    assert sum(alive() is not None for alive in children) <= 1 + 2 * len(kept)
    parent.set_result(None)
    assert order == list(range(100))


# ---- results that stand for work which may not be done yet


async def coroutine_function(*_: object) -> int:
    return 1


@types.coroutine
def generator_coroutine(*_: object) -> Any:
    yield


class Awaitable:
    def __await__(self) -> Any:
        yield


def returns_an_awaitable(*_: object) -> object:
    return Awaitable()


async def async_generator(*_: object) -> Any:
    yield 1


def returns_a_torch_future(*_: object) -> object:
    return torch.futures.Future[int]()


def returns_a_future_of_an_executor(*_: object) -> object:
    return concurrent.futures.Future[int]()


def returns_a_future(*_: object) -> object:
    return CUDAFuture.completed(1)


def returns_a_work(*_: object) -> object:
    return dist.Work()


UNFIT = [
    coroutine_function,
    generator_coroutine,
    returns_an_awaitable,
    async_generator,
    returns_a_torch_future,
    returns_a_future_of_an_executor,
    returns_a_future,
    returns_a_work,
]


@pytest.mark.parametrize("fn", UNFIT)
def test_returned_pending_future_suggests_then_async(fn: Callable[..., Any]) -> None:
    for child, name in (
        (CUDAFuture.completed(1).then(fn), "then"),
        (CUDAFuture.completed(1).then(fn, executor=executors.callback_thread), "then"),
        (submit(fn), "submit"),
        (submit(fn, 1, executor=executors.inline), "submit"),
    ):
        with pytest.raises(TypeError, match=rf"(?s)the callback of {name}\(\) returned .*then_async\(\)"):
            child.wait()


def test_then_async_refuses_coroutine() -> None:
    with pytest.raises(TypeError, match=r"a coroutine, which nothing would run: call asyncio\.run\(\)"):
        CUDAFuture.completed(1).then_async(coroutine_function).wait()  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [coroutine_function, [CUDAFuture[int]()], CUDAFuture, threading.Event()])
def test_other_results_are_values(value: object) -> None:
    assert CUDAFuture.completed(1).then(lambda _: value).wait() is value


def test_returned_parent_is_value() -> None:
    parent = CUDAFuture.completed(1)
    assert parent.then(lambda f: f).wait() is parent
