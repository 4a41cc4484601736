"""The tensors of a value, wherever in it they are, are found, ordered and kept."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from support.harness import Device

Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    inputs: torch.Tensor
    more: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Slots:
    __slots__ = ("__hidden", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = None
        self.__hidden = x

    def get(self) -> torch.Tensor:
        return self.__hidden


class Attributes:
    def __init__(self, x: torch.Tensor) -> None:
        self.self = self  # a cycle
        self.inner = {"deep": [x]}


class Wrapped(torch.Tensor):
    """A class of tensors that holds its memory in another one, as DTensor does."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapped.inner = inner
        return wrapped

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Plain(torch.Tensor):
    """A class of tensors that changes nothing."""


SHAPES: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda x: x, lambda v: v),
    "list": (lambda x: [None, [x]], lambda v: v[1][0]),
    "tuple": (lambda x: (1, (x, "two")), lambda v: v[1][0]),
    "dict": (lambda x: {"a": {"b": x}}, lambda v: v["a"]["b"]),
    "key": (lambda x: {x: "value"}, lambda v: next(iter(v))),
    "set": (lambda x: {x}, lambda v: next(iter(v))),
    "named tuple": (lambda x: Point(0, x), lambda v: v.y),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda v: v["a"]),
    "dataclass": (lambda x: Batch(x), lambda v: v.inputs),
    "dataclass, deep": (lambda x: Batch(torch.ones(1), {"a": [x]}), lambda v: v.more["a"][0]),
    "slots": (lambda x: Slots(x), lambda v: v.get()),
    "attributes": (lambda x: Attributes(x), lambda v: v.inner["deep"][0]),
    "deeper than C++ looks": (lambda x: [[[[[[[[[[[x]]]]]]]]]]], lambda v: v[0][0][0][0][0][0][0][0][0][0][0]),
    "parameter": (lambda x: torch.nn.Parameter(x), lambda v: v.detach()),
    "module": (lambda x: torch.nn.ParameterList([torch.nn.Parameter(x)]), lambda v: v[0].detach()),
    "view": (lambda x: x.view(2, -1)[1], lambda v: v),
    "expanded": (lambda x: x[:1].expand(3), lambda v: v),
    "subclass": (lambda x: x.as_subclass(Plain), lambda v: v.as_subclass(torch.Tensor)),
    "wrapper": (lambda x: Wrapped(x), lambda v: v.inner),
    "with a graph": (lambda x: x.requires_grad_() * 1, lambda v: v.detach()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_anywhere_is_ordered(device: Device, shape: str) -> None:
    put, get = SHAPES[shape]
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(device.stream()):
        future.set_result(put(device.produce(3.0)))
    with device.on(device.stream()):
        assert device.read(get(future.wait(non_blocking=True))) == 3.0


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_anywhere_is_kept(device: Device, shape: str) -> None:
    put, get = SHAPES[shape]
    producer, consumer = device.stream(), device.stream()
    future: CUDAFuture[Any] = CUDAFuture()
    with device.on(producer):
        future.set_result(put(device.produce(3.0)))
    with device.on(consumer):
        y = get(future.wait(non_blocking=True)) * 2
    del future
    with device.on(producer):
        device.produce(-1.0)
    with device.on(consumer):
        assert device.read(y) == 6.0


def test_callback_may_return_any_shape(device: Device) -> None:
    def callback(done: CUDAFuture[torch.Tensor]) -> Batch:
        return Batch(done.value() * 2, {"a": [done.value() * 3]})

    child = device.complete(1.0).then(callback)
    with device.on(device.stream()):
        batch = child.wait(non_blocking=True)
        assert [device.read(batch.inputs), device.read(batch.more["a"][0])] == [2.0, 3.0]


def test_sparse_tensor_is_ordered(accelerator: Device) -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    with accelerator.stream():
        x = accelerator.produce(3.0)
        try:
            indices = torch.arange(x.numel(), device=x.device)[None]
            sparse = torch.sparse_coo_tensor(indices, x, is_coalesced=True, check_invariants=False)
        except (NotImplementedError, RuntimeError) as e:
            pytest.skip(f"no sparse tensors on {accelerator.name}: {str(e).partition(chr(10))[0]}")
        future.set_result(sparse)
    assert list(future.events) == [accelerator.at()]
    with accelerator.stream():
        assert accelerator.read(future.wait(non_blocking=True)._values()) == 3.0


def test_many_tensors_are_ordered_at_once(device: Device) -> None:
    future: CUDAFuture[list[torch.Tensor]] = CUDAFuture()
    with device.on(device.stream()):
        future.set_result([device.produce(float(i)) for i in range(64)])
    with device.on(device.stream()):
        assert device.read(torch.stack(future.wait(non_blocking=True)).sum(0)) == sum(range(64))


def test_separately_named_tensors_are_ordered(device: Device) -> None:
    future: CUDAFuture[str] = CUDAFuture()
    with device.on(device.stream()):
        x = device.produce(3.0)
        future.set_result("it is in x", tensors=[x])
    with device.on(device.stream()):
        assert future.wait(non_blocking=True) == "it is in x"
        assert device.read(x) == 3.0


def test_only_tensors_can_be_named(device: Device) -> None:
    with pytest.raises(TypeError, match="tensors= names"):
        CUDAFuture[None]().set_result(None, tensors=["x"])  # type: ignore[list-item]


def test_named_stream_without_tensors_is_ordered(accelerator: Device) -> None:
    future: CUDAFuture[None] = CUDAFuture()
    side = accelerator.stream()
    with side:
        x = accelerator.produce(3.0)
    future.set_result(None, stream=side)
    assert future.devices == (accelerator.at(),)
    with accelerator.stream():
        future.wait(non_blocking=True)
        assert accelerator.read(x) == 3.0


def test_value_may_use_storage_twice(device: Device) -> None:
    future: CUDAFuture[tuple[torch.Tensor, torch.Tensor]] = CUDAFuture()
    producer, consumer = device.stream(), device.stream()
    with device.on(producer):
        x = device.produce(3.0)
        future.set_result((x[: x.numel() // 2], x[x.numel() // 2 :]))
        del x
    with device.on(consumer):
        low, high = future.wait(non_blocking=True)
        y = low + high
    del future, low, high
    with device.on(producer):
        device.produce(-1.0)
    with device.on(consumer):
        assert device.read(y) == 6.0
