"""Behaviour that CPython's own tests of the futures of asyncio and concurrent.futures check, asked of CUDAFuture."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from cudafuture import CancelledError, CUDAFuture, executors, fail, gather, submit
from support.child import run_script

Future = CUDAFuture[Any]
Run = Callable[[Any], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    loop = asyncio.new_event_loop() if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop()
    yield loop.run_until_complete
    loop.close()


def in_a_thread(step: Callable[[], object]) -> None:
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()


# ---- callbacks


class Counter:
    def __init__(self) -> None:
        self.seen: list[Future] = []

    def add(self, future: Future) -> None:
        self.seen.append(future)


def test_removed_callbacks_are_counted_and_skipped() -> None:
    future: Future = CUDAFuture()
    first, second = Counter(), Counter()
    for counter in (first, second, first):
        future.add_done_callback(counter.add)  # each time another object, equal to the others of its counter
    assert future.remove_done_callback(first.add) == 2
    assert future.remove_done_callback(first.add) == 0
    assert future.remove_done_callback(print) == 0
    future.set_result(1)
    assert (first.seen, second.seen) == ([], [future])
    assert future.remove_done_callback(second.add) == 0


def test_callback_with_custom_equality_may_use_future() -> None:
    future: Future = CUDAFuture()

    class Meddling:
        def __call__(self, future: Future) -> None:
            raise AssertionError("removed")

        def __eq__(self, other: object) -> bool:
            future.remove_done_callback(look)
            future.add_done_callback(lambda _: None)
            return isinstance(other, Meddling)

        __hash__ = object.__hash__

    seen: list[Future] = []

    def look(future: Future) -> None:
        seen.append(future)

    future.add_done_callback(Meddling())
    future.add_done_callback(look)
    assert future.remove_done_callback(Meddling()) == 1
    future.set_result(None)
    assert seen == []


def test_then_callbacks_are_not_removed() -> None:
    future: Future = CUDAFuture()
    child = future.then(repr)
    future.add_done_callback(repr, executor=executors.callback_thread)
    assert future.remove_done_callback(repr) == 1
    future.set_result(1)
    assert child.wait().startswith("<CUDAFuture completed")


# ---- callbacks inside a loop


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.wait() of Python 3.10 makes tasks of the futures")
def test_wait_of_asyncio_takes_futures(run: Run) -> None:
    wait: Any = asyncio.wait

    async def main() -> None:
        futures: list[Future] = [CUDAFuture() for _ in range(3)]
        in_a_thread(lambda: futures[0].set_result(0))
        assert await wait(futures, return_when="FIRST_COMPLETED") == ({futures[0]}, set(futures[1:]))
        assert await wait(futures[1:], timeout=0) == (set(), set(futures[1:]))
        asyncio.get_running_loop().call_soon(in_a_thread, lambda: futures[1].set_exception(ValueError("part")))
        assert await wait(futures, return_when="FIRST_EXCEPTION") == (set(futures[:2]), {futures[2]})
        asyncio.get_running_loop().call_soon(in_a_thread, futures[2].cancel)
        assert await wait(futures) == (set(futures), set())
        assert not any(future.remove_done_callback(mock.ANY) for future in futures)

    run(main())


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


@pytest.mark.parametrize("done_before", [True, False])
def test_loop_callback_runs_in_caller_context(run: Run, done_before: bool) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        if done_before:
            future.set_result(1)
        called = asyncio.Event()
        seen: list[object] = []

        def look(done: Future) -> None:
            seen.extend([done, asyncio.get_running_loop(), variable.get()])
            called.set()

        variable.set("caller")
        future.add_done_callback(look)
        variable.set("later")
        if not done_before:
            in_a_thread(lambda: future.set_result(1))
        assert seen == []
        await called.wait()
        assert seen == [future, asyncio.get_running_loop(), "caller"]

    run(main())


def test_callback_with_executor_ignores_loop(run: Run) -> None:
    async def main() -> None:
        future = CUDAFuture.completed(1)
        seen: list[Any] = []
        future.add_done_callback(seen.append, executor=executors.inline)
        assert seen == [future]
        assert future.then(lambda _: threading.get_ident()).value() == threading.get_ident()

    run(main())


def test_raising_loop_callback_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        CUDAFuture.completed(1).add_done_callback(lambda _: 1 // 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run(main())
    assert "ZeroDivisionError" in caplog.text


def test_callback_of_closed_loop_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    future: Future = CUDAFuture()

    async def main() -> None:
        future.add_done_callback(print)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    future.set_result(1)
    assert "closed" in caplog.text


def test_interrupt_in_callback_ends_loop() -> None:
    def interrupt(_: Future) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        CUDAFuture.completed(1).add_done_callback(interrupt)
        await CUDAFuture()

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()


# ---- what asyncio takes a future for


def test_future_is_no_asyncio_future(run: Run) -> None:
    async def main() -> None:
        future = CUDAFuture.completed(1)
        assert not asyncio.isfuture(future)
        assert inspect.isawaitable(future)
        task = asyncio.ensure_future(future)
        assert isinstance(task, asyncio.Task)
        assert await task == 1
        with pytest.raises((AssertionError, TypeError)):
            asyncio.wrap_future(future)  # type: ignore[arg-type]
        assert await asyncio.shield(future) == 1
        assert [await each for each in asyncio.as_completed([future])] == [1]

    run(main())


# ---- running


def test_future_reports_running_during_work() -> None:
    begun, end = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = submit(lambda: begun.set() or end.wait(), executor=pool)  # type: ignore[func-returns-value]
        queued = submit(int, executor=pool)
        begun.wait()
        assert (future.running(), queued.running()) == (True, False)
        end.set()
        future.wait()
    assert not future.running()
    assert not CUDAFuture().running()
    assert not CUDAFuture.completed(1).running()


# ---- cancellation


def test_message_of_cancellation_arrives(run: Run) -> None:
    future: Future = CUDAFuture(name="job")
    part: Future = CUDAFuture()
    whole = gather(part, cancel_parts=True)
    for each in (future, whole):
        assert each.cancel("no longer needed")
        assert not each.cancel("again")

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError) as raised:
            await future
        assert raised.value.args == ("no longer needed",)

    for cancelled in (future, whole, part, future.then_async(lambda _: future)):
        for _ in range(2):
            with pytest.raises(CancelledError) as caught:
                cancelled.wait()
            assert caught.value.args == ("no longer needed",)
    assert caught.value.__notes__ == ["in CUDAFuture 'job'"]  # type: ignore[attr-defined]
    run(main())


def test_cancellation_message_may_be_any_object() -> None:
    future: Future = CUDAFuture()
    assert future.cancel(msg=3)
    with pytest.raises(concurrent.futures.CancelledError) as caught:
        future.result()
    assert caught.value.args == (3,)


# ---- exceptions


def test_class_of_exceptions_is_called() -> None:
    future: Future = CUDAFuture()
    future.set_exception(KeyError)
    assert isinstance(future.exception(), KeyError)
    assert isinstance(CUDAFuture.failed(SystemExit).exception(), SystemExit)
    other: Future = CUDAFuture()
    assert fail(other, StopIteration)
    assert isinstance(other.exception(), StopIteration)


def test_uncallable_exception_class_leaves_future_pending() -> None:
    future: Future = CUDAFuture()
    with pytest.raises(TypeError, match="argument"):
        future.set_exception(UnicodeDecodeError)
    assert not future.done()


def test_stop_iteration_is_refused_or_wrapped(run: Run) -> None:
    future: Future = CUDAFuture()
    with pytest.raises(TypeError, match="no StopIteration"):
        future.set_exception(StopIteration(1))
    assert not future.done()

    async def main() -> None:
        for failed in (submit(next, iter([])), CUDAFuture.failed(StopIteration(2))):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await failed

    run(main())


# ---- debug


@pytest.mark.usefixtures("without_origins")
def test_origin_is_shown_on_request() -> None:
    script = """
from cudafuture import CUDAFuture, gather, submit
def make(): return CUDAFuture(name="x")
x = make()
made = [x, x.then(print), gather(x), submit(int), CUDAFuture.failed(ValueError("lost"))]
for future in made: print(future)
"""
    shown = run_script(script, environment={"CUDAFUTURE_DEBUG": "origin"})
    first, *others = shown.stdout.splitlines()
    assert re.search(r"pending, made at <string>:\d+ in make\(\), ", first)
    assert len(others) == 4
    assert all(re.search(r"made at <string>:\d+ in <module>\(\), ", line) for line in others)
    assert re.search(r"of CUDAFuture '', made at <string>:\d+ in <module>\(\), was never retrieved", shown.stderr)
    assert "made at" not in repr(CUDAFuture())
