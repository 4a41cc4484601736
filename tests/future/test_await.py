"""`await future` and `async for`, under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cudafuture
from cudafuture import CUDAFuture, as_completed, executors, submit, wait, wait_all

Future = CUDAFuture[Any]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "asyncio":
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str) -> Iterator[Run]:
    loop = new_loop(kind)
    yield loop.run_until_complete
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def await_future(future: Future) -> Any:
    return await future


def callbacks_of(future: Future) -> list[object]:
    """Return the functions that a pending future keeps, as it shows them to the collector."""
    return [o for o in gc.get_referents(future) if callable(o) and not isinstance(o, type)]


# ---- who completes it


def in_the_loop(future: Future, finish: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_soon(finish)


def in_another_thread(future: Future, finish: Callable[[], object]) -> None:
    suspended = threading.Event()
    threading.Thread(target=lambda: suspended.wait() and finish()).start()
    asyncio.get_running_loop().call_soon(suspended.set)


def on_the_callback_thread(future: Future, finish: Callable[[], object]) -> None:
    start: Future = CUDAFuture()
    start.add_done_callback(lambda f: finish(), executor=executors.callback_thread)
    asyncio.get_running_loop().call_soon(start.set_result, None)


WHERE = [in_the_loop, in_another_thread, on_the_callback_thread]
Where = Callable[[Future, Callable[[], object]], None]


@pytest.mark.parametrize("where", WHERE)
def test_await_returns_value(run: Run, where: Where) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        value = object()
        where(future, lambda: future.set_result(value))
        assert await future is value

    run(main())


@pytest.mark.parametrize("where", WHERE)
def test_await_raises_exception_itself(run: Run, where: Where) -> None:
    async def main() -> None:
        future: Future = CUDAFuture(name="read")
        error = OSError("disk")
        where(future, lambda: future.set_exception(error))
        with pytest.raises(OSError, match="disk") as raised:
            await future
        assert raised.value is error
        assert raised.value.__notes__ == ["in CUDAFuture 'read'"]  # type: ignore[attr-defined]

    run(main())


@pytest.mark.parametrize("where", WHERE)
def test_await_raises_asyncio_cancellation(run: Run, where: Where) -> None:
    async def main() -> None:
        future: Future = CUDAFuture(name="read")
        where(future, future.cancel)
        with pytest.raises(asyncio.CancelledError, match="'read' was cancelled"):
            await future

    run(main())


# ---- done already


@pytest.mark.parametrize("value", [None, 1, (1, 2), (), StopIteration(3), ValueError("a value"), [ValueError]])
def test_completed_future_needs_no_loop(value: object) -> None:
    future = CUDAFuture.completed(value)
    steps: tuple[Callable[[], object], ...] = (
        lambda: await_future(future).send(None),
        lambda: next(future.__await__()),
    )
    for step in steps:
        with pytest.raises(StopIteration) as stop:
            step()
        assert stop.value.value is value


def test_pending_future_needs_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        await_future(CUDAFuture()).send(None)


def test_repeated_await_keeps_traceback_short(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture.failed(ValueError("again"))
        lengths = set()
        for _ in range(5):
            try:
                await future
            except ValueError as e:
                lengths.add(len(traceback.extract_tb(e.__traceback__)))
        assert len(lengths) == 1

    run(main())


# ---- many at once


def test_await_leaves_loop_running(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        steps = 0

        async def work() -> None:
            nonlocal steps
            for _ in range(10):
                await asyncio.sleep(0)
                steps += 1
            future.set_result(steps)

        task = asyncio.ensure_future(work())
        assert await future == 10
        await task

    run(main())


def test_thousand_tasks_await_one_future(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        resumed = []

        async def wait(i: int) -> int:
            await future
            resumed.append(i)
            return i

        tasks = [asyncio.ensure_future(wait(i)) for i in range(1000)]
        await asyncio.sleep(0)
        assert len(callbacks_of(future)) == 1000
        future.set_result(None)
        assert await asyncio.gather(*tasks) == resumed == list(range(1000))

    run(main())


def test_gather_of_asyncio_takes_futures(run: Run) -> None:
    async def main() -> None:
        futures: list[Future] = [CUDAFuture() for _ in range(5)]
        for i, future in enumerate(futures):
            in_another_thread(future, lambda i=i, future=future: future.set_result(i))  # type: ignore[misc]
        assert await asyncio.gather(*futures) == [0, 1, 2, 3, 4]
        error = ValueError("part")
        assert await asyncio.gather(CUDAFuture.failed(error), futures[1], return_exceptions=True) == [error, 1]  # type: ignore[comparison-overlap]
        with pytest.raises(ValueError, match="part"):
            await asyncio.gather(*futures, CUDAFuture.failed(error))

    run(main())


@pytest.mark.parametrize("kinds", [["asyncio"] * 4, ["uvloop"] * 4, ["asyncio", "uvloop"] * 2], ids=str)
def test_loops_of_several_threads_await_future(kinds: list[str]) -> None:
    future: Future = CUDAFuture()
    waiting = threading.Barrier(len(kinds) + 1)
    values = []

    def serve(kind: str) -> None:
        async def main() -> None:
            asyncio.get_running_loop().call_soon(waiting.wait)
            values.append(await asyncio.gather(*(await_future(future) for _ in range(10))))

        loop = new_loop(kind)
        loop.run_until_complete(main())
        loop.close()

    threads = [threading.Thread(target=serve, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    waiting.wait()
    future.set_result("shared")
    for thread in threads:
        thread.join()
    assert values == [["shared"] * 10] * len(kinds)


# ---- giving up


def test_wait_for_timeout_keeps_future_usable(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        assert not future.done()
        assert callbacks_of(future) == []
        future.set_result(5)
        assert await asyncio.wait_for(future, 1000) == 5

    run(main())


def test_cancelled_task_only_detaches(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        given_up, patient = (asyncio.ensure_future(await_future(future)) for _ in range(2))
        await asyncio.sleep(0)
        assert len(callbacks_of(future)) == 2
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not future.done()
        assert len(callbacks_of(future)) == 1
        future.set_result("late")
        assert await patient == "late"

    run(main())


def test_cancelled_task_of_done_future_stops(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        task = asyncio.ensure_future(await_future(future))
        await asyncio.sleep(0)
        future.set_result("value")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await future == "value"

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is new in Python 3.11")
def test_failed_task_group_spares_futures(run: Run) -> None:
    async def main() -> None:
        pending: Future = CUDAFuture()
        failing: Future = CUDAFuture()
        error = ValueError("in the group")

        async def group_of_two() -> None:
            async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined]
                group.create_task(await_future(pending))
                group.create_task(await_future(failing))
                in_another_thread(failing, lambda: failing.set_exception(error))

        with pytest.raises(BaseExceptionGroup) as raised:  # type: ignore[name-defined]  # noqa: F821
            await group_of_two()
        assert raised.value.exceptions == (error,)
        assert not pending.done()
        assert callbacks_of(pending) == []

    run(main())


def complete_here(future: Future) -> None:
    future.set_result("nobody")


def complete_in_another_thread(future: Future) -> None:
    thread = threading.Thread(target=complete_here, args=(future,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("complete", [complete_here, complete_in_another_thread])
def test_loop_may_close_before_completion(
    kind: str, complete: Callable[[Future], None], caplog: pytest.LogCaptureFixture
) -> None:
    future: Future = CUDAFuture()
    loop = new_loop(kind)
    task = loop.create_task(await_future(future))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    complete(future)
    assert future.value() == "nobody"
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert caplog.records == []


# ---- contexts

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def test_task_keeps_its_context(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()

        async def wait(value: str) -> str:
            variable.set(value)
            await future
            return variable.get()

        tasks = [asyncio.ensure_future(wait(value)) for value in "ab"]
        await asyncio.sleep(0)
        variable.set("completer")
        future.set_result(None)
        assert await asyncio.gather(*tasks) == ["a", "b"]
        assert variable.get() == "completer"

    run(main())


# ---- async for


def test_async_for_yields_in_completion_order(run: Run) -> None:
    async def main() -> None:
        futures: list[Future] = [CUDAFuture() for _ in range(4)]
        futures[3].set_exception(ValueError("first"))
        order = []
        async for future in as_completed(futures):
            order.append(futures.index(future))
            if len(order) < 4:
                following = futures[3 - len(order)]
                in_another_thread(following, lambda following=following: following.set_result(None))  # type: ignore[misc]
        assert order == [3, 2, 1, 0]
        assert isinstance(futures[3].exception(), ValueError)

    run(main())


def test_async_for_timeout_keeps_futures_usable(run: Run) -> None:
    async def main() -> None:
        done, pending = CUDAFuture.completed(1), CUDAFuture[int]()
        iterator = as_completed([pending, done], timeout=0.01).__aiter__()
        assert await iterator.__anext__() is done
        with pytest.raises(TimeoutError, match=r"1 \(of 2\) futures unfinished"):
            await iterator.__anext__()
        assert not pending.done()
        assert callbacks_of(pending) == []

    run(main())


def test_async_for_exit_removes_callbacks(run: Run) -> None:
    async def main() -> None:
        done, pending = CUDAFuture.completed(1), CUDAFuture[int]()
        iterator = as_completed([pending, done]).__aiter__()
        async for future in iterator:
            assert future is done
            break
        await iterator.aclose()  # type: ignore[attr-defined]
        assert callbacks_of(pending) == []

    run(main())


def test_cancelled_async_for_removes_callbacks(run: Run) -> None:
    async def main() -> None:
        pending: Future = CUDAFuture()

        async def iterate() -> None:
            async for _ in as_completed([pending]):
                pass

        task = asyncio.ensure_future(iterate())
        await asyncio.sleep(0)
        assert len(callbacks_of(pending)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert callbacks_of(pending) == []

    run(main())


def test_signal_handler_completion_wakes_loop(run: Run) -> None:
    main_thread = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def signal_when_asleep() -> None:
        while ") S " not in main_thread.read_text():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    async def main() -> str:
        future: CUDAFuture[str] = CUDAFuture()
        usual = signal.signal(signal.SIGUSR1, lambda number, frame: future.set_result("by the handler"))
        thread = threading.Thread(target=signal_when_asleep)
        asyncio.get_running_loop().call_soon(thread.start)
        try:
            return await future
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, usual)

    assert run(main()) == "by the handler"


def test_async_for_survives_late_wake(run: Run) -> None:
    has_arrived, continues = threading.Event(), threading.Event()

    def pause_after_arrival(_: object, event: str, call: Any) -> None:
        if event == "c_return" and call.__name__ == "append":
            has_arrived.set()
            continues.wait()

    def complete(future: CUDAFuture[None]) -> None:
        sys.setprofile(pause_after_arrival)
        future.set_result(None)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first, paused, last = [CUDAFuture[None]() for _ in range(3)]
        thread = threading.Thread(target=complete, args=(paused,))

        def wake_late() -> None:
            continues.set()
            thread.join()
            loop.call_soon(lambda: loop.call_soon(lambda: loop.call_soon(last.set_result, None)))  # the task runs first

        loop.call_soon(first.set_result, None)
        order = []
        async for future in as_completed([first, paused, last]):
            order.append(future)
            if future is first:
                thread.start()
                has_arrived.wait()
            elif future is paused:
                loop.call_soon(wake_late)
        assert order == [first, paused, last]

    run(main())


def test_second_async_for_yields_nothing(run: Run) -> None:
    async def main() -> None:
        each = as_completed([CUDAFuture.completed(1)])
        assert [f.value() async for f in each] == [1]
        assert [f async for f in each] == []

    run(main())


def test_blocking_wait_in_loop_warns_caller() -> None:
    pending: Future = CUDAFuture()

    async def main() -> None:
        blocking: list[Callable[[], object]] = [
            lambda: pending.wait(timeout=0.001),
            lambda: pending.result(0.001),
            lambda: pending.exception(0.001),
            lambda: wait_all([pending], timeout=0.001),
            lambda: next(as_completed([pending], timeout=0.001)),
            lambda: wait([pending], timeout=0.001),
        ]
        for blocks in blocking:
            with pytest.warns(RuntimeWarning, match="use `await future`") as warned, contextlib.suppress(TimeoutError):
                blocks()
            assert {w.filename for w in warned} == {__file__}
        for does_not_block in (lambda: pending.wait(timeout=0), lambda: wait_all([pending], timeout=0)):
            with pytest.raises(TimeoutError):
                does_not_block()
        await asyncio.get_running_loop().run_in_executor(None, CUDAFuture.completed(1).wait)
        assert await submit(lambda: submit(int, executor=executors.callback_thread).wait()) == 0

    asyncio.run(main())


def test_optimizer_step_warning_names_caller() -> None:
    """The library waits in a function that torch calls."""
    library: dict[str, Any] = {"pending": CUDAFuture()}
    code = "def step(self):\n    with __import__('contextlib').suppress(TimeoutError): pending.wait(timeout=0.001)"
    exec(compile(code, str(Path(cudafuture.__file__).with_name("step.py")), "exec"), library)
    optimizer = type("Waiting", (torch.optim.SGD,), {"step": library["step"]})([torch.zeros(1)])

    async def main() -> None:
        with pytest.warns(RuntimeWarning, match="use `await future`") as warned:
            optimizer.step()
        assert {w.filename for w in warned} == {__file__}

    asyncio.run(main())
