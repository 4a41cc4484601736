"""Waiting follows completion: it takes no place in the serial queue of a process group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from cudafuture import _C, CUDAFuture, as_completed, wait
from cudafuture.distributed import ProcessGroup

pytestmark = pytest.mark.world

LONG = 60.0  # seconds; reached only when a test fails


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """Give the futures a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def blocked_queue() -> Iterator[_C.HostExecutor]:
    """Give the group's serial queue while a callback in it does not return."""
    queue = ProcessGroup().queue
    entered, go_on = threading.Event(), threading.Event()
    first: CUDAFuture[None] = CUDAFuture(executor=queue)

    def block(_: object) -> None:
        entered.set()
        go_on.wait()

    first.add_done_callback(block)
    behind: CUDAFuture[None] = CUDAFuture(executor=queue)
    is_behind = behind.then(lambda _: None)
    first.set_result(None)
    behind.set_result(None)
    entered.wait()
    yield queue
    assert not is_behind.done()
    go_on.set()
    is_behind.wait(timeout=LONG)


async def await_future(future: CUDAFuture[Any]) -> Any:
    return await asyncio.wait_for(asyncio.ensure_future(_await(future)), LONG)


async def _await(future: CUDAFuture[Any]) -> Any:
    return await future


async def iterate(future: CUDAFuture[Any]) -> list[CUDAFuture[Any]]:
    async def each() -> AsyncIterator[CUDAFuture[Any]]:
        async for done in as_completed([future], timeout=LONG):
            yield done

    return [done async for done in each()]


WAYS: dict[str, Callable[[CUDAFuture[Any]], Any]] = {
    "wait for the first": lambda future: wait([future, CUDAFuture()], LONG, "FIRST_COMPLETED")[0].pop().value(),
    "wait for a failure": lambda future: wait([future], LONG, "FIRST_EXCEPTION")[0].pop().value(),
    "as_completed": lambda future: next(as_completed([future], timeout=LONG)).value(),
    "async as_completed": lambda future: asyncio.run(iterate(future))[0].value(),
    "await": lambda future: asyncio.run(await_future(future)),
    "wait()": lambda future: future.wait(timeout=LONG),
}


@pytest.mark.parametrize("look", WAYS.values(), ids=WAYS.keys())
def test_blocked_serial_queue_spares_waits(
    blocked_queue: _C.HostExecutor, look: Callable[[CUDAFuture[Any]], Any]
) -> None:
    future: CUDAFuture[int] = CUDAFuture(executor=blocked_queue)
    completer = threading.Timer(0.05, future.set_result, (3,))  # after the wait has begun, as a rule
    completer.start()
    assert look(future) == 3
    completer.join()


def test_futures_arrive_before_callbacks_return() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    go_on = threading.Event()
    future.add_done_callback(lambda _: go_on.wait())
    arrivals = as_completed([future, CUDAFuture()], timeout=LONG)
    completer = threading.Thread(target=future.set_result, args=(3,))
    completer.start()
    assert next(arrivals) is future
    assert completer.is_alive()
    go_on.set()
    completer.join()
