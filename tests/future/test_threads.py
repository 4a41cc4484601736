"""Threads and order of callbacks, and callbacks that wait or interrupt."""

from __future__ import annotations

import contextvars
import datetime as dt
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cudafuture import CancelledError, CUDAFuture, InvalidStateError, executors, gather, submit
from support.child import run_script
from support.patience import PATIENCE

Future = CUDAFuture[Any]


def here(_: object = None) -> int:
    return threading.get_ident()


def in_another_thread(target: Callable[..., object], *args: object) -> int:
    """Run it to the end in a thread of its own; return which one that was."""
    thread = threading.Thread(target=target, args=args)
    thread.start()
    assert thread.ident is not None
    thread.join()
    return thread.ident


@pytest.fixture
def callback_thread() -> int:
    return CUDAFuture.completed(None).then(here, executor=executors.callback_thread).wait(timeout=PATIENCE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Ranks:
    """Two Gloo ranks in this process. A collective of one is done when the other joins in, on Gloo's own thread."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.groups: list[Any] = [None, None]

        def make(rank: int) -> None:
            self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=PATIENCE))

        other = threading.Thread(target=make, args=(1,))
        other.start()
        make(0)
        other.join()

    def begin(self) -> Future:
        return CUDAFuture.from_torch(self._all_reduce(0))

    def finish(self) -> None:
        self._all_reduce(1).wait()

    def _all_reduce(self, rank: int) -> Any:
        return self.groups[rank].allreduce([torch.ones(2, device="cpu")], dist.AllreduceOptions())


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks()


# ---- which thread


def test_completing_python_thread_runs_callbacks() -> None:
    future: Future = CUDAFuture()
    child = future.then(here)
    completer = in_another_thread(future.set_result, None)
    assert child.value() == completer != here()


@pytest.mark.parametrize("finish", ["set_exception", "cancel"])
def test_failing_or_cancelling_thread_runs_callbacks(finish: str) -> None:
    future: Future = CUDAFuture()
    child = future.then(here)
    completer = in_another_thread(future.cancel if finish == "cancel" else lambda: future.set_exception(OSError()))
    assert child.value() == completer
    future.exception() if finish == "set_exception" else None


def test_late_callback_runs_in_adding_thread() -> None:
    future: Future = CUDAFuture()
    in_another_thread(future.set_result, None)
    assert future.then(here).value() == here()


def test_collective_callbacks_use_callback_thread(ranks: Ranks, callback_thread: int) -> None:
    future = ranks.begin()
    child, ran = future.then(here), threading.Event()
    future.add_done_callback(lambda f: ran.set())
    ranks.finish()
    assert child.wait(timeout=PATIENCE) == callback_thread
    assert ran.wait(PATIENCE)
    assert future.wait()[0].tolist() == [2, 2]


def test_inline_in_cpp_thread_means_callback_thread(ranks: Ranks, callback_thread: int) -> None:
    child = ranks.begin().then(here, executor=executors.inline)
    ranks.finish()
    assert child.wait(timeout=PATIENCE) == callback_thread


def test_children_of_collective_use_callback_thread(ranks: Ranks, callback_thread: int) -> None:
    future = ranks.begin()
    threads = [gather(future, future.then(here)).then(here), future.then_async(lambda f: future).then(here)]
    ranks.finish()
    assert [f.wait(timeout=PATIENCE) for f in threads] == [callback_thread] * 2


def test_executor_overrides_completing_thread(ranks: Ranks, pool: ThreadPoolExecutor) -> None:
    future = ranks.begin()
    child = future.then(here, executor=pool)
    ranks.finish()
    assert child.wait(timeout=PATIENCE) == pool.submit(here).result()


def test_callback_thread_keeps_thread_locals() -> None:
    local = threading.local()

    def count(_: Future) -> int:
        local.count = counted = getattr(local, "count", 0) + 1
        return int(counted)

    counts = [CUDAFuture.completed(0).then(count, executor=executors.callback_thread) for _ in range(3)]
    assert [f.wait(timeout=PATIENCE) for f in counts] == [1, 2, 3]
    again = CUDAFuture.completed(0).then(count, executor=executors.callback_thread)
    assert again.wait(timeout=PATIENCE) == 4


# ---- which order


def test_waiters_are_released_before_callbacks_run() -> None:
    future: Future = CUDAFuture()
    released = threading.Event()
    waiting = threading.Barrier(2)

    def wait() -> None:
        waiting.wait()
        future.wait()
        released.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    child = future.then(lambda f: released.wait(PATIENCE))
    future.set_result(None)
    assert child.value() is True
    thread.join()


@pytest.mark.parametrize("where", ["here", "collective", "callback_thread"])
def test_callbacks_run_in_attachment_order(ranks: Ranks, where: str) -> None:
    future: Future = ranks.begin() if where == "collective" else CUDAFuture()
    executor = executors.callback_thread if where == "callback_thread" else None
    order: list[int] = []
    for i in range(0, 20, 2):
        future.add_done_callback(lambda f, i=i: order.append(i), executor=executor)  # type: ignore[misc]
        future.then(lambda f, i=i: order.append(i + 1), executor=executor)  # type: ignore[misc]
    last = future.then(lambda f: None, executor=executor)
    ranks.finish() if where == "collective" else future.set_result(None)
    last.wait(timeout=PATIENCE)
    assert order == list(range(20))


def test_callback_thread_follows_completion_order() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(10)]
    order: list[int] = []
    children = [
        f.then(lambda f: order.append(f.value()), executor=executors.callback_thread) for f in reversed(futures)
    ]
    for i, future in enumerate(futures):
        future.set_result(i)
    gather(*children).wait(timeout=PATIENCE)
    assert order == list(range(10))


# ---- callbacks that wait


WAYS = {"wait": lambda f: f.wait(), "result": lambda f: f.result(), "exception": lambda f: f.exception()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["here", "collective", "callback_thread", "pool"])
@pytest.mark.parametrize("then", ["then", "then_async"])
def test_callback_waiting_for_own_child_fails(
    ranks: Ranks, pool: ThreadPoolExecutor, where: str, then: str, way: str
) -> None:
    future: Future = ranks.begin() if where == "collective" else CUDAFuture(name="own")
    executor = {"callback_thread": executors.callback_thread, "pool": pool}.get(where)
    child: Future = getattr(future, then)(lambda f: WAYS[way](child), executor=executor)
    ranks.finish() if where == "collective" else future.set_result(None)
    with pytest.raises(InvalidStateError, match=r"waits for its own result.*then_async"):
        child.wait(timeout=PATIENCE)


def test_callback_may_wait_for_queued_future() -> None:
    first, second = CUDAFuture[int](), CUDAFuture[int]()
    order = []

    def complete_and_wait(f: CUDAFuture[int]) -> int:
        second.set_result(5)  # its callbacks go behind this one
        order.append("before")
        value = last.wait(timeout=PATIENCE)
        order.append("after")
        return value

    last = second.then(lambda f: order.append("behind") or f.value() + 1)  # type: ignore[func-returns-value]
    waited = first.then(complete_and_wait)
    first.set_result(0)
    assert waited.value() == 6
    assert order == ["before", "behind", "after"]


@pytest.mark.parametrize("executor", [None, executors.callback_thread], ids=["here", "callback_thread"])
@pytest.mark.parametrize("depth", [1, 20, 200])
def test_chained_waits_in_callbacks_avoid_deadlock(depth: int, executor: Any) -> None:
    future: Future = CUDAFuture()
    children: list[Future] = []

    def wait_for(i: int) -> Callable[[Future], int]:
        return lambda f: children[i].wait(timeout=PATIENCE) + 1 if i <= depth else 0

    children.extend(future.then(wait_for(i + 1), executor=executor) for i in range(depth + 1))
    future.set_result(None)
    error = children[0].exception(PATIENCE)
    assert isinstance(error, InvalidStateError) if depth == 200 else children[0].value() == depth


def test_callback_may_wait_for_collective(ranks: Ranks) -> None:
    future = ranks.begin()
    waited = CUDAFuture.completed(0).then(
        lambda f: future.then(lambda g: g.value()[0].sum().item()).wait(timeout=PATIENCE),
        executor=executors.callback_thread,
    )
    ranks.finish()
    assert waited.wait(timeout=PATIENCE) == 4


def test_callback_thread_wait_times_out() -> None:
    child = CUDAFuture.completed(0).then(lambda f: Future().wait(timeout=0.01), executor=executors.callback_thread)
    with pytest.raises(TimeoutError):
        child.wait(timeout=PATIENCE)


# ---- executors


class Refusing(Executor):
    def submit(self, *_: object, **__: object) -> Any:
        raise OSError("no more threads")


class Losing(Executor):
    def submit(self, *_: object, **__: object) -> Any:
        return None


class Immediate(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        fn(*args, **kwargs)


def test_executor_error_fails_child() -> None:
    with pytest.raises(OSError, match="no more threads"):
        CUDAFuture.completed(0).then(here, executor=Refusing()).value()
    with pytest.raises(OSError, match="no more threads"):
        submit(here, executor=Refusing()).value()


def test_executor_losing_callback_cancels_child() -> None:
    assert CUDAFuture.completed(0).then(here, executor=Losing()).cancelled()


def test_executor_may_run_callback_immediately() -> None:
    assert CUDAFuture.completed(0).then(here, executor=Immediate()).value() == here()


def test_executor_closed_early_fails_child(pool: ThreadPoolExecutor) -> None:
    future: Future = CUDAFuture()
    child = future.then(here, executor=pool)
    pool.shutdown()
    future.set_result(None)
    with pytest.raises((RuntimeError, CancelledError)):
        child.wait(timeout=PATIENCE)


# ---- callbacks that interrupt

COMPLETE: dict[str, Callable[[Future, Callable[[Future], Any]], Any]] = {
    "set_result": lambda f, fn: (f.then(fn), f.set_result(None)),  # type: ignore[func-returns-value]
    "set_exception": lambda f, fn: (f.then(fn), f.set_exception(OSError("seen"))),  # type: ignore[func-returns-value]
    "cancel": lambda f, fn: (f.then(fn), f.cancel()),
    "then": lambda f, fn: (f.set_result(None), f.then(fn)),  # type: ignore[func-returns-value]
    "then_async": lambda f, fn: (f.set_result(None), f.then_async(fn)),  # type: ignore[func-returns-value]
    "add_done_callback": lambda f, fn: (f.set_result(None), f.add_done_callback(fn)),  # type: ignore[func-returns-value]
    "submit": lambda f, fn: (f.set_result(None), submit(fn, f, executor=executors.inline)),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("how", COMPLETE)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_callback_interrupt_reaches_main_thread(how: str, kind: type[BaseException]) -> None:
    interrupt = kind("from a callback")

    def fn(future: Future) -> None:
        future.cancelled() or future.exception()
        raise interrupt

    future: Future = CUDAFuture()
    with pytest.raises(kind) as raised:
        COMPLETE[how](future, fn)
    assert raised.value is interrupt
    Future().set_result(None)  # and only once


def test_interrupt_fails_only_its_child() -> None:
    future: Future = CUDAFuture()
    order: list[str] = []

    def interrupt(_: Future) -> None:
        order.append("interrupt")
        raise KeyboardInterrupt

    child = future.then(interrupt)
    grandchild = child.then(lambda f: order.append("grandchild") or type(f.exception()))  # type: ignore[func-returns-value]
    second = future.then(interrupt)
    future.add_done_callback(lambda f: order.append("last"))
    with pytest.raises(KeyboardInterrupt):
        future.set_result(None)
    assert order == ["interrupt", "interrupt", "last", "grandchild"]
    assert grandchild.value() is KeyboardInterrupt
    assert isinstance(child.exception(), KeyboardInterrupt)
    assert isinstance(second.exception(), KeyboardInterrupt)


@pytest.mark.parametrize("where", ["thread", "callback_thread", "collective"])
def test_interrupt_in_other_thread_fails_child(ranks: Ranks, caplog: pytest.LogCaptureFixture, where: str) -> None:
    future: Future = ranks.begin() if where == "collective" else CUDAFuture()
    executor = executors.callback_thread if where == "callback_thread" else None
    survived: list[bool] = []

    def interrupt(_: Future) -> None:
        raise SystemExit(3)

    child = future.then(interrupt, executor=executor)
    future.add_done_callback(interrupt, executor=executor)
    last = future.then(lambda f: "ran", executor=executor)
    with caplog.at_level(logging.ERROR, "cudafuture"):
        if where == "collective":
            ranks.finish()
        else:
            in_another_thread(lambda: survived.append(future.set_result(None) is None))  # type: ignore[func-returns-value]
            assert survived == [True]
        assert last.wait(timeout=PATIENCE) == "ran"
    assert isinstance(child.exception(), SystemExit)
    assert [r.levelname for r in caplog.records] == ["ERROR"]  # that of add_done_callback, which has no child to tell


# ---- contexts

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def modes(_: object = None) -> tuple[object, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), variable.get()


@pytest.mark.parametrize("where", ["collective", "callback_thread"])
def test_then_carries_context_to_callback_thread(ranks: Ranks, where: str) -> None:
    future: Future = ranks.begin() if where == "collective" else CUDAFuture()
    executor = executors.callback_thread if where == "callback_thread" else None
    token = variable.set("caller")
    with torch.no_grad(), torch.autocast("cpu"):
        expected = modes()
        carried = future.then(modes, executor=executor)
        bare: Future = CUDAFuture()
        future.add_done_callback(lambda f: bare.set_result(modes()), executor=executor)
    variable.reset(token)
    ranks.finish() if where == "collective" else future.set_result(None)
    assert carried.wait(timeout=PATIENCE) == expected == (False, False, True, "caller")
    assert bare.wait(timeout=PATIENCE) == (True, False, False, "unset")


WHILE_A_CAST_IS_FREED = """
import threading, torch
from cudafuture import CUDAFuture

freed, returns = threading.Event(), threading.Event()

class Note:
    def __del__(self):  # torch frees it with the lock of autocast's cache
        freed.set()
        assert returns.wait(60)

def callback(done):
    assert freed.wait(60)
    returns.set()

future = CUDAFuture()
with torch.autocast("cpu"):
    child = future.then(callback)
weight = torch.ones(4, 4, requires_grad=True)
weight.note = Note()
thread = threading.Thread(target=future.set_result, args=(None,))
thread.start()
with torch.autocast("cpu"):
    torch.ones(4, 4) @ weight
    del weight
assert returns.is_set()
child.wait()
thread.join()
"""


def test_autocast_callback_survives_cache_clearing() -> None:
    done = run_script(WHILE_A_CAST_IS_FREED, patience=PATIENCE)
    assert done.returncode == 0, done.stderr
