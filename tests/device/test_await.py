"""await with device work pending: the event loop goes on, and what comes out may be used anywhere."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, as_completed, gather
from support.harness import OTHER_THREAD, Device


@OTHER_THREAD
def test_any_stream_may_read_awaited_value(device: Device) -> None:
    async def main() -> float:
        x = await device.complete(2.0)
        with device.on(device.stream()):
            return device.read(x)

    assert asyncio.run(main()) == 2.0


def test_awaiting_waits_for_device(accelerator: Device) -> None:
    async def main() -> bool:
        future = accelerator.complete(2.0)
        await future
        return future.events[accelerator.at()].query()

    assert asyncio.run(main())


def test_loop_runs_during_device_work(accelerator: Device) -> None:
    async def main() -> list[str]:
        order: list[str] = []
        side = accelerator.stream()
        hold = accelerator.hold(side)
        future = accelerator.complete(2.0, stream=side)

        async def consume() -> None:
            order.append(f"read {accelerator.read(await future)}")

        task = asyncio.create_task(consume())
        for i in range(3):
            await asyncio.sleep(0)
            order.append(f"turn {i}")
        with hold:
            pass
        await task
        return order

    assert asyncio.run(main()) == ["turn 0", "turn 1", "turn 2", "read 2.0"]


def test_finished_future_does_not_suspend(device: Device) -> None:
    future = device.complete(2.0)
    future.wait()

    async def main() -> float:
        turns: list[None] = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        x = await future
        assert not turns
        return device.read(x)

    assert asyncio.run(main()) == 2.0


@pytest.mark.parametrize("return_when", ["FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"])
def test_asyncio_wait_ends_with_device(accelerator: Device, return_when: str) -> None:
    wait: Any = asyncio.wait

    async def main() -> float:
        future = accelerator.complete(2.0)
        done, pending = await wait([future], return_when=return_when)
        assert (len(done), len(pending)) == (1, 0)
        assert future.events[accelerator.at()].query()
        return accelerator.read(future.result())  # a wait that blocked here would be an error: a warning of the library

    assert asyncio.run(main()) == 2.0


@pytest.mark.sim
def test_device_wait_in_loop_warns(sim: ModuleType) -> None:
    async def main() -> None:
        with sim.hold():
            future = CUDAFuture.completed(torch.ones(2, device="sim") + 1)
            with pytest.warns(RuntimeWarning, match="use `await future`") as warned, pytest.raises(TimeoutError):
                future.wait(timeout=0.001)
        assert warned[0].filename == __file__

    asyncio.run(main())


def test_host_may_read_after_awaiting(device: Device) -> None:
    async def main() -> float:
        host = device.make_pinned()
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        with device.on(device.stream()):
            x = device.produce(3.0)
            host.copy_(x, non_blocking=True)
            future.set_result(host, tensors=[x])
        return float((await future).mean().item())

    assert asyncio.run(main()) == 3.0


def test_several_tasks_await_one_future(device: Device) -> None:
    async def main() -> list[float]:
        future: CUDAFuture[torch.Tensor] = CUDAFuture()

        async def consume() -> float:
            return device.read(await future)

        tasks = [asyncio.create_task(consume()) for _ in range(3)]
        await asyncio.sleep(0)
        with device.on(device.stream()):
            future.set_result(device.produce(2.0))
        return [await task for task in tasks]

    assert asyncio.run(main()) == [2.0] * 3


def test_cancelled_task_spares_future(accelerator: Device) -> None:
    async def main() -> float:
        side = accelerator.stream()
        with accelerator.hold(side):
            future = accelerator.complete(2.0, stream=side)

            async def consume() -> None:
                await future

            task = asyncio.create_task(consume())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return accelerator.read(await future)

    assert asyncio.run(main()) == 2.0


def test_failure_is_raised_after_device_work(device: Device) -> None:
    async def main() -> float:
        future: CUDAFuture[Any] = CUDAFuture(devices=[device.at()])
        with device.on(device.stream()):
            x = device.produce(2.0)
            future.set_exception(KeyError("no"))
        with pytest.raises(KeyError):
            await future
        assert future.ready()
        return device.read(x)

    assert asyncio.run(main()) == 2.0


def test_awaited_gather_waits_for_parts(device: Device) -> None:
    async def main() -> list[float]:
        values = await gather(device.complete(1.0), device.complete(2.0))
        return [device.read(x) for x in values]

    assert asyncio.run(main()) == [1.0, 2.0]


def test_as_completed_follows_device_order(accelerator: Device) -> None:
    async def main() -> list[float]:
        side = accelerator.stream()
        hold = accelerator.hold(side)
        futures = [accelerator.complete(1.0, stream=side), accelerator.complete(2.0)]
        read: list[float] = []
        async for future in as_completed(futures):
            read.append(accelerator.read(future.value()))
            with hold:
                pass
        return read

    assert asyncio.run(main()) == [2.0, 1.0]


@OTHER_THREAD
def test_awaited_child_may_be_elsewhere(pair: Device) -> None:
    async def main() -> float:
        moved = pair.complete(2.0, 0).then(lambda done: done.value().to(pair.at(1), non_blocking=True))
        return pair.read(await moved)

    assert asyncio.run(main()) == 2.0
