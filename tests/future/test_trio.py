"""`await future` and `async for` under trio, and under anyio on both of its backends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cudafuture import CancelledError, CUDAFuture, as_completed, executors

anyio = pytest.importorskip("anyio")
trio = pytest.importorskip("trio")

Future = CUDAFuture[Any]
Run = Callable[[Callable[[], Any]], Any]


@pytest.fixture(params=["trio", "anyio on trio", "anyio on asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "trio":
        return lambda main: trio.run(main)
    return lambda main: anyio.run(main, backend=request.param.removeprefix("anyio on "))


def in_a_thread(step: Callable[[], object]) -> None:
    threading.Thread(target=step).start()


def test_await_returns_value_or_raises_exception(run: Run) -> None:
    async def main() -> None:
        done, failing, early = CUDAFuture[int](), CUDAFuture[int](), CUDAFuture.completed(2)
        in_a_thread(lambda: done.set_result(1))
        error = OSError("disk")
        in_a_thread(lambda: failing.set_exception(error))
        assert (await done, await early) == (1, 2)
        with pytest.raises(OSError, match="disk") as raised:
            await failing
        assert raised.value is error

    run(main)


def test_tasks_run_during_shared_await(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        values: list[int] = []

        async def wait() -> None:
            values.append(await future)

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(wait)
            await anyio.sleep(0)
            assert values == []
            future.set_result(3)
        assert values == [3] * 10

    run(main)


def test_timeout_detaches_task_and_keeps_future(run: Run) -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        with anyio.move_on_after(0.01) as scope:
            await future
        assert scope.cancelled_caught
        assert not future.done()
        assert future.remove_done_callback(print) == 0
        future.set_result(5)
        assert await future == 5

    run(main)


def test_completion_during_cancellation_wakes_correctly() -> None:
    async def main() -> None:
        future: Future = CUDAFuture()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def end_both() -> None:
                    future.set_result(1)  # the wake-up is on its way to the task
                    scope.cancel()

                nursery.start_soon(end_both)
                await future
        with trio.move_on_after(0.01) as pause:
            await trio.sleep_forever()
        assert pause.cancelled_caught

    trio.run(main)


def test_async_for_yields_and_times_out(run: Run) -> None:
    async def main() -> None:
        futures: list[Future] = [CUDAFuture() for _ in range(3)]
        order = []
        in_a_thread(lambda: futures[1].set_result(None))
        async for future in as_completed(futures[:2], timeout=60):
            order.append(futures.index(future))
            if len(order) == 1:
                in_a_thread(futures[0].cancel)
        assert order == [1, 0]
        iterator = as_completed(futures, timeout=0.01).__aiter__()
        assert {await iterator.__anext__(), await iterator.__anext__()} == {*futures[:2]}
        with pytest.raises(TimeoutError, match=r"1 \(of 3\) futures unfinished"):
            await iterator.__anext__()

    run(main)


def test_future_cancellation_spares_task() -> None:
    async def main() -> None:
        future: Future = CUDAFuture(name="job")
        in_a_thread(future.cancel)
        with pytest.raises(CancelledError, match="'job' was cancelled"):
            await future

    trio.run(main)


def test_run_may_end_before_completion() -> None:
    future: Future = CUDAFuture()

    async def main() -> None:
        with trio.move_on_after(0):
            await future

    trio.run(main)
    future.set_result(1)
    assert future.value() == 1


def test_blocking_wait_in_task_warns() -> None:
    async def main() -> None:
        with pytest.warns(RuntimeWarning, match="use `await future`"), pytest.raises(TimeoutError):
            CUDAFuture().wait(timeout=0.001)

    trio.run(main)


def run_in_asyncio(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


@pytest.mark.parametrize(("outer", "inner"), [(trio.run, run_in_asyncio), (run_in_asyncio, trio.run)])
def test_nested_loop_of_other_library_awaits(outer: Run, inner: Run) -> None:
    future: Future = CUDAFuture()

    async def main() -> None:
        async def awaiting() -> Any:
            assert [each.value() async for each in as_completed([future], timeout=60)] == [1]
            return await CUDAFuture.completed(2).then(lambda done: done.value(), executor=executors.callback_thread)

        in_a_thread(lambda: future.set_result(1))
        assert inner(awaiting) == 2

    outer(main)


def test_trio_asyncio_awaits_on_both_sides() -> None:
    trio_asyncio = pytest.importorskip("trio_asyncio")

    async def await_result() -> Any:
        future: Future = CUDAFuture()
        in_a_thread(lambda: future.set_result(1))
        return await future

    async def main() -> None:
        async with trio_asyncio.open_loop():
            assert (await trio_asyncio.aio_as_trio(await_result)(), await await_result()) == (1, 1)

    trio.run(main)
