"""Devices of a future: taken from its value, or given beforehand as a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, DeviceMismatchError
from support.harness import Device

HOST = torch.ones(3)


def test_future_has_devices_of_value(device: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    assert future.devices == ()
    future.set_result([device.produce(1.0, i) for i in device.indices()])
    assert list(future.devices) == [device.at(i) for i in device.indices() if device.has_streams]


def test_given_devices_are_known_immediately(pair: Device) -> None:
    bounds = [pair.at(1), pair.at(0)]
    future = CUDAFuture[Any](devices=bounds)
    assert future.devices == (pair.at(0), pair.at(1))
    future.set_result(pair.produce(1.0))
    assert future.devices == (pair.at(0), pair.at(1))
    assert list(future.events) == [pair.at(0)]


def test_devices_have_names_or_numbers(accelerator: Device) -> None:
    for name in (str(accelerator.at()), accelerator.name, accelerator.index(), accelerator.at()):
        assert CUDAFuture[Any](devices=[name]).devices == (accelerator.at(),)


def test_type_alone_means_current_device(pair: Device) -> None:
    with pair.select(1):
        assert CUDAFuture[Any](devices=[pair.name]).devices == (pair.at(1),)


def test_value_on_other_device_fails(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    future.set_result(pair.produce(1.0, 1))
    with pytest.raises(DeviceMismatchError, match=rf"{pair.at(1)}.*{pair.at(0)}"):
        future.wait()


def test_value_partly_elsewhere_fails(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(1)])
    future.set_result({"a": [pair.produce(1.0, 1)], "b": (pair.produce(1.0, 0), HOST)})
    assert isinstance(future.exception(), DeviceMismatchError)


def test_accelerator_value_fails_host_future(accelerator: Device) -> None:
    future = CUDAFuture[Any](devices=["cpu"])
    future.set_result(accelerator.produce(1.0))
    assert isinstance(future.exception(), DeviceMismatchError)


def test_named_tensors_count_too(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    future.set_result(None, tensors=[pair.produce(1.0, 1)])
    assert isinstance(future.exception(), DeviceMismatchError)


def test_host_tensors_fit_everywhere(device: Device) -> None:
    future = CUDAFuture[Any](devices=[device.at()])
    future.set_result([HOST, device.produce(1.0)])
    assert future.wait()[0] is HOST


def test_producers_stream_must_be_inside(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    with pytest.raises(DeviceMismatchError, match="stream"):
        future.set_result(None, stream=pair.stream(index=1))
    assert not future.done()
    future.set_result(7)
    assert future.wait() == 7


def test_callbacks_stream_must_be_inside(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    with pytest.raises(DeviceMismatchError, match="callback"):
        future.then(lambda _: None, stream=pair.stream(index=1))
    child = future.then(lambda done: done.value(), stream=pair.stream(index=0))
    future.set_result(7)
    assert child.wait() == 7


def test_child_has_bounds_of_parent(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    child = future.then(lambda _: pair.produce(1.0, 1))
    grandchild = child.then(lambda done: done.value())
    future.set_result(None)
    assert child.devices == grandchild.devices == (pair.at(0),)
    assert isinstance(child.exception(), DeviceMismatchError)
    assert isinstance(grandchild.exception(), DeviceMismatchError)


def test_then_async_result_must_be_inside(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0)])
    child = future.then_async(lambda _: pair.complete(1.0, 1))
    future.set_result(None)
    assert isinstance(child.exception(), DeviceMismatchError)


def test_unbounded_child_takes_own_devices(pair: Device) -> None:
    child = pair.complete(1.0, 0).then(lambda done: done.value().to(pair.at(1), non_blocking=True))
    assert child.devices == (pair.at(1),)
    assert pair.read(child.wait(non_blocking=True)) == 1.0


def test_callback_has_streams_of_bounds(pair: Device) -> None:
    future = CUDAFuture[Any](devices=[pair.at(0), pair.at(1)])
    default = [pair.current(i) for i in (0, 1)]
    child = future.then(lambda _: [pair.current(i) for i in (0, 1)])
    future.set_result(None)
    assert all(s != d and s.device == d.device for s, d in zip(child.wait(), default, strict=True))


def test_devices_may_be_given_twice(accelerator: Device) -> None:
    assert CUDAFuture[Any](devices=[accelerator.at()] * 3).devices == (accelerator.at(),)


def test_absent_device_may_be_bound(accelerator: Device) -> None:
    future = CUDAFuture[Any](devices=[accelerator.at(), accelerator.at(7)])
    child = future.then(lambda done: done.value() + 1)
    future.set_result(accelerator.produce(1.0))
    assert accelerator.read(child.wait(non_blocking=True)) == 2.0


def test_empty_bound_allows_only_host(accelerator: Device) -> None:
    future = CUDAFuture[Any](devices=[])
    future.set_result(accelerator.produce(1.0))
    assert isinstance(future.exception(), DeviceMismatchError)
