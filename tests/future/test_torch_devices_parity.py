"""Behaviour that PyTorch's own tests of CUDA futures check, as far as it needs no device.

The last table of docs/coming-from-torch.md lists the tests that need one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, DeviceMismatchError
from support.parity import answers


@answers("test_cuda_future_device_as_str", "test_cuda_future_device_as_device")
@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 0)], ids=["str", "torch.device"])
def test_devices_by_name_and_by_object(device: str | torch.device) -> None:
    assert CUDAFuture[int](devices=[device]).devices == (torch.device("cuda", 0),)


@answers("test_cuda_future_device_as_int")
def test_index_means_current_accelerator() -> None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        with pytest.raises(RuntimeError, match="accelerator"):
            CUDAFuture[int](devices=[0])
    else:
        assert CUDAFuture[int](devices=[0]).devices == (torch.device(accelerator.type, 0),)


@answers("test_cuda_future_device_not_cuda")
def test_cpu_needs_no_event() -> None:
    # torch: ValueError("Expected devices to have indices, got cpu")
    assert CUDAFuture[int](devices=["cpu"]).devices == ()
    assert CUDAFuture[int](devices=["cuda:1", "cpu"]).devices == (torch.device("cuda", 1),)


def test_no_devices_need_to_be_named() -> None:
    future = CUDAFuture[torch.Tensor]()
    assert future.devices == ()
    future.set_result(torch.ones(2, device="cpu"))
    assert (future.devices, dict(future.events)) == ((), {})


@pytest.mark.parametrize("devices", [["nonsense"], ["cuda:-1"], [-1], ["cuda:x"]])
def test_impossible_device_is_refused(devices: list[Any]) -> None:
    with pytest.raises(RuntimeError):
        CUDAFuture[int](devices=devices)


def test_mixed_device_types_are_refused() -> None:
    with pytest.raises(DeviceMismatchError, match="cuda:0 and xpu:1"):
        CUDAFuture[int](devices=["cuda:0", "cpu", "xpu:1"])


def test_child_has_devices_of_parent() -> None:
    parent = CUDAFuture[int](devices=["cuda:1", "cuda:0"])
    assert (
        parent.then(lambda f: f.value()).devices == parent.devices == (torch.device("cuda:0"), torch.device("cuda:1"))
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_bound_on_absent_device_runs_callbacks() -> None:
    future = CUDAFuture[int](devices=["cuda:0"])
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    future.set_result(5)
    assert seen == [future], "a callback that is never called leaves who awaits the future hanging"


@answers("test_cuda_future_modify_tensor_inplace", "test_cuda_future_replace_tensor")
def test_changed_value_is_visible_after_completion() -> None:
    tensors = [torch.zeros(4)]
    future = CUDAFuture[list[torch.Tensor]]()
    future.set_result(tensors)
    tensors[0].fill_(1)
    assert future.wait()[0].tolist() == [1] * 4
    tensors[0] = torch.full((4,), 2.0)
    assert future.wait()[0].tolist() == [2] * 4
