"""Contexts: a process that uses one device has a context on that device alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, gather
from cudafuture.testing import sim
from rpc_ext._device_order import DeviceOrder

sim.prepare()  # torch knows the name of the device from here on
LAST = torch.device("sim:2")
pytestmark = pytest.mark.sim(devices=3, schedule="lazy", strict_devices=True)


def in_a_new_thread(body: Callable[[], Any]) -> Any:
    """Run `body` in a thread that never selected a device: on CUDA its current device is 0."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(body()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(autouse=True)
def fresh() -> None:
    sim.enable(devices=3, schedule="lazy", strict_devices=True)
    assert sim.contexts() == []


def test_first_use_makes_context() -> None:
    torch.ones(1, device="sim:1")
    assert sim.contexts() == [torch.device("sim:1")]
    torch.accelerator.set_device_index(2)  # as cudaSetDevice does from CUDA 12 on
    assert sim.contexts() == [torch.device("sim:1"), LAST]
    torch.accelerator.set_device_index(0)


def test_event_use_elsewhere_makes_context() -> None:
    event = torch.Event("sim:1")
    with torch.accelerator.device_index(1):
        event.record()
    sim.enable(devices=3)
    event.query()
    assert sim.contexts() == [torch.device("sim:0")]
    with torch.accelerator.device_index(1):
        del event


def test_waiting_stream_makes_no_context() -> None:
    def use() -> None:
        future: CUDAFuture[torch.Tensor] = CUDAFuture.completed(torch.ones(4, device=LAST))
        future.wait(non_blocking=True)
        future.events[LAST].wait(torch.Stream(LAST))
        both = gather(future, CUDAFuture.completed(torch.ones(4, device=LAST)))
        both.then(lambda done: done.value()).wait(non_blocking=True)

    in_a_new_thread(use)
    assert sim.contexts() == [LAST]


def test_raising_callback_makes_no_context() -> None:
    def use() -> CUDAFuture[Any]:
        future: CUDAFuture[torch.Tensor] = CUDAFuture()

        def fail(done: CUDAFuture[torch.Tensor]) -> None:
            raise KeyError("no")

        child = future.then(fail, stream="caller")
        future.set_result(torch.ones(4, device=LAST))
        return child

    child = in_a_new_thread(use)
    assert list(child.events) == [LAST]
    assert isinstance(child.exception(), KeyError)
    assert sim.contexts() == [LAST]


def test_bounded_failure_makes_no_context() -> None:
    def use() -> CUDAFuture[Any]:
        torch.ones(4, device=LAST)
        future: CUDAFuture[Any] = CUDAFuture(devices=["sim:0", "sim:1", "sim:2"])
        child = future.then(lambda done: done.value())
        future.set_exception(KeyError("no"))
        return child

    assert isinstance(in_a_new_thread(use).exception(), KeyError)
    assert sim.contexts() == [LAST]


@pytest.mark.parametrize("devices", [None, ["sim:0", "sim:1", "sim:2"]], ids=["unbounded", "bounded"])
def test_to_torch_of_pending_makes_no_context(devices: list[str] | None) -> None:
    def use() -> float:
        x = torch.ones(4, device=LAST)
        future: CUDAFuture[torch.Tensor] = CUDAFuture(devices=devices)
        target = future.to_torch()
        child = target.then(lambda done: done.value() + 1)
        future.set_result(x)
        return float(child.wait().sum())

    sim.enable(devices=3)  # not strict: torch's own future uses events while another device is current
    assert in_a_new_thread(use) == 8.0
    assert LAST in sim.contexts()
    assert torch.device("sim:1") not in sim.contexts()  # 0 is current, and torch selects it


def test_unused_mapped_devices_get_no_context() -> None:
    order = DeviceOrder()
    order.set_devices([torch.device("sim", i) for i in range(3)])
    order.call(0, int, (), {})
    assert sim.contexts() == []
    order.call(0, torch.ones, (2,), {"device": "sim:2"})
    assert sim.contexts() == [LAST]
    order.close()


def test_torch_future_takes_later_device() -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    target = future.to_torch()
    x = torch.ones(4, device=LAST) * 3
    child = target.then(lambda done: float(done.value().sum()))
    future.set_result(x)
    assert child.wait() == 12.0
    assert future.ready()  # the host has waited: torch's future knows nothing of that device
