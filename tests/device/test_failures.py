"""Failing with device work pending: who recovers is ordered after it. And devices that fail themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cudafuture import AllFailedError, CUDAFuture, collect_all, collect_any, gather
from support.harness import Device, Simulated


def make_bounded(device: Device, priority: int = 0) -> CUDAFuture[Any]:
    return CUDAFuture(devices=[device.at(i) for i in device.indices()], priority=priority)


def fail_while_filling(device: Device, value: float) -> tuple[CUDAFuture[Any], torch.Tensor]:
    """Return a future that failed while the device still fills the tensor."""
    future = make_bounded(device)
    with device.on(device.stream()):
        x = device.produce(value)
        future.set_exception(KeyError("half done"))
    return future, x


def test_failure_handler_follows_work(device: Device) -> None:
    future, x = fail_while_filling(device, 3.0)
    with device.on(device.stream()):
        with pytest.raises(KeyError):
            future.wait(non_blocking=True)
        assert device.read(x) == 3.0


def test_blocking_wait_for_failure_waits_for_device(device: Device) -> None:
    future, x = fail_while_filling(device, 3.0)
    assert isinstance(future.exception(), KeyError)
    assert future.ready()
    with device.on(device.stream()):
        assert device.read(x) == 3.0


def test_failure_has_events_of_bounds(pair: Device) -> None:
    future, _ = fail_while_filling(pair, 3.0)
    assert sorted(future.events, key=str) == [pair.at(0), pair.at(1)]
    assert isinstance(future.exception(), KeyError)


def test_recovering_callback_follows_work(device: Device) -> None:
    future, x = fail_while_filling(device, 3.0)

    def recover(done: CUDAFuture[Any]) -> torch.Tensor:
        assert isinstance(done.exception(), KeyError)
        return x * 2

    child = future.then(recover)
    with device.on(device.stream()):
        assert device.read(child.wait(non_blocking=True)) == 6.0


def test_callback_recovers_without_blocking_host(accelerator: Device) -> None:
    future = make_bounded(accelerator)
    side = accelerator.stream()
    with accelerator.hold(side):
        with side:
            x = accelerator.produce(3.0)
            future.set_exception(KeyError("half done"))

        def recover(done: CUDAFuture[Any]) -> torch.Tensor:
            with pytest.raises(KeyError):
                done.wait(non_blocking=True)
            return x * 2

        child = future.then(recover)
        assert child.done()
        assert not child.ready()
    with accelerator.stream():
        assert accelerator.read(child.wait(non_blocking=True)) == 6.0


def test_raising_callback_leaves_ordered_work(device: Device) -> None:
    x = device.empty()
    if device.has_streams:
        torch.accelerator.synchronize()

    def callback(done: CUDAFuture[Any]) -> None:
        x.copy_(done.value())
        raise KeyError("half done")

    child = device.complete(3.0).then(callback)
    with device.on(device.stream()):
        with pytest.raises(KeyError):
            child.wait(non_blocking=True)
        assert device.read(x) == 3.0


def test_failure_keeps_order_along_chain(device: Device) -> None:
    future, x = fail_while_filling(device, 3.0)
    last = future.then(lambda done: done.value()).then(lambda done: done.value())
    with device.on(device.stream()):
        with pytest.raises(KeyError):
            last.wait(non_blocking=True)
        assert device.read(x) == 3.0


def test_then_async_keeps_failure_order(device: Device) -> None:
    inner, x = fail_while_filling(device, 3.0)
    child = CUDAFuture.completed(None).then_async(lambda _: inner)
    with device.on(device.stream()):
        with pytest.raises(KeyError):
            child.wait(non_blocking=True)
        assert device.read(x) == 3.0


def test_gather_keeps_failure_order(device: Device) -> None:
    part, x = fail_while_filling(device, 3.0)
    whole = gather(device.complete(1.0), part)
    with device.on(device.stream()):
        with pytest.raises(KeyError):
            whole.wait(non_blocking=True)
        assert device.read(x) == 3.0


def test_collect_all_keeps_failure_order(device: Device) -> None:
    (first, x), (second, y) = fail_while_filling(device, 3.0), fail_while_filling(device, 4.0)
    whole = collect_all([first, second])
    with device.on(device.stream()):
        assert all(isinstance(f.exception(), KeyError) for f in whole.wait(non_blocking=True))
        assert [device.read(x), device.read(y)] == [3.0, 4.0]


def test_collect_any_keeps_failure_order(device: Device) -> None:
    (first, x), (second, y) = fail_while_filling(device, 3.0), fail_while_filling(device, 4.0)
    whole = collect_any([first, second])
    with device.on(device.stream()):
        with pytest.raises(AllFailedError):
            whole.wait(non_blocking=True)
        assert [device.read(x), device.read(y)] == [3.0, 4.0]


def test_failure_without_bounds_has_no_events(device: Device) -> None:
    future = CUDAFuture.failed(KeyError("no"))
    assert dict(future.events) == {}
    assert isinstance(future.exception(), KeyError)


def test_cancelled_future_has_no_events(device: Device) -> None:
    future = make_bounded(device)
    assert future.cancel()
    assert dict(future.events) == {}
    assert future.ready()


def test_value_outside_bounds_fails_in_order(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    with pair.stream(index=0):
        x = pair.produce(3.0, 0)
        future.set_result([x, pair.produce(4.0, 1)])
    with pair.stream(index=0):
        with pytest.raises(ValueError, match="devices"):
            future.wait(non_blocking=True)
        assert pair.read(x) == 3.0


# ---- the device itself fails


@contextlib.contextmanager
def breaking(device: Any) -> Iterator[None]:
    """Let the simulated device 0 fail in this context; afterwards it is whole again."""
    if device.name != "sim":
        pytest.skip("a broken CUDA context breaks the process")
    yield
    device.sim.clear_error(0)
    assert not device.sim.races()


def fails_on_the_device(device: Any, future: CUDAFuture[Any] | None = None) -> CUDAFuture[Any]:
    future = CUDAFuture() if future is None else future
    with device.stream():
        x = device.produce(1.0)
        device.sim.fail("illegal address")
        future.set_result(x)
    return future


def test_device_error_becomes_late_error(accelerator: Device) -> None:
    with breaking(accelerator):
        future = fails_on_the_device(accelerator)
        with pytest.raises(RuntimeError, match="illegal address"):
            future.wait()
        assert "illegal address" in str(future.late_error)
        assert future.done()
        with pytest.raises(RuntimeError, match="illegal address"):
            future.ready()


def test_polling_ends_on_device_failure(accelerator: Device) -> None:
    with breaking(accelerator):
        future = fails_on_the_device(accelerator)

        def poll() -> None:
            while not future.ready():
                pass

        with pytest.raises(RuntimeError, match="illegal address"):
            poll()


def test_blocking_callback_runs_despite_device_failure(accelerator: Device) -> None:
    with breaking(accelerator):
        child = fails_on_the_device(accelerator).then(lambda done: str(done.late_error), non_blocking=False)
        assert "illegal address" in child.wait()


def test_blocking_callbacks_keep_order_behind_error(accelerator: Device) -> None:
    ran: list[int] = []
    with breaking(accelerator):
        future: CUDAFuture[Any] = CUDAFuture()
        children = [future.then(lambda _, i=i: ran.append(i), non_blocking=False) for i in range(5)]  # type: ignore[misc]
        fails_on_the_device(accelerator, future)
        for child in children:
            child.wait()
    assert ran == list(range(5))


def test_later_device_error_keeps_failure(accelerator: Device) -> None:
    with breaking(accelerator):
        future = make_bounded(accelerator)
        with accelerator.stream():
            accelerator.produce(1.0)
            future.set_exception(KeyError("mine"))
            accelerator.sim.fail("illegal address")  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="illegal address"):
                torch.accelerator.synchronize()
        for non_blocking in (False, True):
            with pytest.raises(KeyError, match="mine"):
                future.wait(non_blocking=non_blocking)
        assert isinstance(future.exception(), KeyError)
        assert "illegal address" in str(future.late_error)


def test_device_error_keeps_failure(accelerator: Device) -> None:
    with breaking(accelerator):
        future = make_bounded(accelerator)
        with accelerator.stream():
            accelerator.sim.fail("illegal address")  # type: ignore[attr-defined]
            future.set_exception(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            future.wait()
        assert "illegal address" in str(future.late_error)


def test_finished_future_has_no_late_error(accelerator: Device) -> None:
    with breaking(accelerator):
        future = accelerator.complete(1.0)
        future.wait()
        late = fails_on_the_device(accelerator).then(lambda done: str(done.late_error), non_blocking=False)
        assert "illegal address" in late.wait()
        assert future.late_error is None


def test_await_raises_device_error(accelerator: Device) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="illegal address"):
            await fails_on_the_device(accelerator)

    with breaking(accelerator):
        asyncio.run(main())


def test_gather_has_late_error_of_device(accelerator: Device) -> None:
    with breaking(accelerator):
        whole = gather(fails_on_the_device(accelerator), accelerator.complete(1.0))
        with pytest.raises(RuntimeError, match="illegal address"):
            whole.wait()


def test_unrecorded_event_fails_future(accelerator: Device) -> None:
    if not isinstance(accelerator, Simulated):
        pytest.skip("a stream of a device that is not there cannot be made")
    kind = int(accelerator.current().device_type)
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(7, stream=torch.Stream(stream_id=0, device_index=7, device_type=kind))
    assert "7" in str(future.exception(timeout=60))
