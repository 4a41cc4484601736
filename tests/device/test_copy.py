"""copy(): between a host and devices, ordered after the caller's work and before its waiters."""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from cudafuture import CUDAFuture, copy, gather, use_streams
from cudafuture.errors import TensorError
from cudafuture.transfer import LARGE
from support.harness import PRIORITIES, SIZE, Device

Tensor = torch.Tensor
ROUTES = list(itertools.product(("host", "here", "there"), repeat=2))
HOST = torch.device("cpu")


def at(device: Device, place: str) -> torch.device:
    """Return the host, the first device, or another one where there is one."""
    return HOST if place == "host" else device.at(min(device.count - 1, int(place == "there")))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "part of a larger one": lambda x: x[1:3],
    "expanded": lambda x: x[:1].expand(5, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[1, 1],
    "channels last": lambda x: x.reshape(1, 2, 2, -1).to(memory_format=torch.channels_last),
    "gaps, transposed": lambda x: x[::2, ::2].t(),
    "leaf": lambda x: x.requires_grad_(),
    "result": lambda x: x.requires_grad_() * 1,
    "parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source", "target"), ROUTES)
def test_copy_equals_to_in_new_memory(accelerator: Device, source: str, target: str, layout: str) -> None:
    x = LAYOUTS[layout](torch.arange(16.0).reshape(4, 4).to(at(accelerator, source)))
    copied = copy(x, at(accelerator, target)).wait()
    wanted = x.detach().to(at(accelerator, target), copy=True)
    assert type(copied) is Tensor
    assert (copied.device, copied.dtype, copied.shape) == (wanted.device, wanted.dtype, wanted.shape)
    assert copied.stride() == wanted.stride()
    assert not copied.requires_grad
    assert torch.equal(copied.cpu(), x.detach().cpu())
    if x.numel():
        copied.zero_()
        assert torch.equal(wanted.cpu(), x.detach().cpu())


DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_round_trip(accelerator: Device, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    there = copy(x, accelerator.at()).wait(non_blocking=True)
    assert there.dtype is dtype
    assert torch.equal(copy(there, "cpu").wait(), x)


@pytest.mark.parametrize("to", ["host", "here", "there"])
def test_conjugates_and_negatives_copy_by_value(accelerator: Device, to: str) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    for x in (z, z.to(accelerator.at())):
        for view in (x.conj(), x.conj().imag, x[::2].conj()):
            assert torch.equal(copy(view, at(accelerator, to)).wait().cpu(), view.cpu().resolve_conj().resolve_neg())


class Batch(NamedTuple):
    inputs: Any
    labels: Any


def test_structure_and_other_values_are_kept(accelerator: Device) -> None:
    note = object()
    value = Batch({"x": [torch.ones(2), 3, None]}, OrderedDict(y=(torch.zeros(1, dtype=torch.int64), note)))
    for target in (accelerator.at(), HOST):
        value = copy(value, target).wait()
        assert isinstance(value, Batch)
        assert value.inputs["x"][0].device == value.labels["y"][0].device == target
        assert value.inputs["x"][0].tolist() == [1, 1]
        assert value.inputs["x"][1:] == [3, None]
        assert value.labels["y"][1] is note


@pytest.mark.parametrize("target", ["cpu", "accelerator"])
def test_value_without_tensors_arrives(device: Device, target: str) -> None:
    assert copy([1, "two"], "cpu" if target == "cpu" else device.at()).wait() == [1, "two"]


def test_two_views_become_two_tensors(device: Device) -> None:
    x = torch.zeros(4, device=device.at())
    first, second = copy([x, x], device.at()).wait()
    first.fill_(1)
    assert second.tolist() == [0] * 4


def test_type_alone_means_current_device(pair: Device) -> None:
    with pair.select(1):
        copied = copy(torch.ones(2), pair.name).wait(non_blocking=True)
        assert copied.device == pair.at(1)
        assert torch.equal(copied.cpu(), torch.ones(2))


# ---- ordering


@pytest.mark.parametrize("target", ["host", "here", "there"])
def test_source_is_read_after_earlier_work(accelerator: Device, target: str) -> None:
    with accelerator.hold():
        copying = copy(accelerator.produce(3.0), at(accelerator, target))
        assert copying.done()
        assert not copying.ready()
    with accelerator.on(accelerator.stream()):
        assert accelerator.read(copying.wait().to(accelerator.at())) == 3.0


def test_source_follows_streams_of_caller(pair: Device) -> None:
    streams = [pair.stream(index=i) for i in (0, 1)]
    with use_streams(*streams):
        copying = copy([pair.produce(1.0, 0), pair.produce(2.0, 1)], "cpu")
    assert [x.unique().tolist() for x in copying.wait()] == [[1.0], [2.0]]


@pytest.mark.parametrize("target", ["host", "here", "there"])
def test_source_may_be_dropped_immediately(accelerator: Device, target: str) -> None:
    stream = accelerator.stream()
    with accelerator.on(stream):
        x = accelerator.produce(1.0)
        with accelerator.hold():
            copying = copy(x, at(accelerator, target))
            del x
            others = [accelerator.empty().fill_(9.0) for _ in range(8)]
    assert copying.wait().unique().tolist() == [1.0]
    assert len(others) == 8


@pytest.mark.parametrize("target", ["host", "here", "there"])
def test_waiter_may_change_source(accelerator: Device, target: str) -> None:
    x = accelerator.produce(1.0)
    copying = copy(x, at(accelerator, target))
    with accelerator.on(accelerator.stream()):
        copying.wait(non_blocking=True)
        x.fill_(2.0)
    assert copying.wait().unique().tolist() == [1.0]


def test_waiter_follows_copy(accelerator: Device) -> None:
    for source in (torch.full((SIZE,), 4.0), accelerator.make_pinned(4.0), accelerator.produce(4.0)):
        copying = copy(source, accelerator.at())
        with accelerator.on(accelerator.stream()):
            assert accelerator.read(copying.wait(non_blocking=True)) == 4.0


def test_callback_follows_copy(accelerator: Device) -> None:
    doubled = copy(torch.full((SIZE,), 4.0), accelerator.at()).then(lambda done: done.value() * 2)
    assert copy(doubled.wait(non_blocking=True), "cpu").wait().unique().tolist() == [8.0]


def test_callback_copies_back(accelerator: Device) -> None:
    there = copy(torch.full((SIZE,), 4.0), accelerator.at())
    back = there.then_async(lambda done: copy(done.value() + 1, "cpu"))
    assert back.wait().unique().tolist() == [5.0]


def test_pinned_result_is_read_in_order(accelerator: Device) -> None:
    x = accelerator.produce(5.0)
    pinned = accelerator.make_pinned()
    pinned.copy_(x, non_blocking=True)
    again = copy(pinned, accelerator.at())
    assert accelerator.read(again.wait(non_blocking=True)) == 5.0


def test_waiter_may_copy_host_result_back(accelerator: Device) -> None:
    with accelerator.hold():
        on_host = copy(accelerator.produce(6.0), "cpu").wait(non_blocking=True)
        again = copy(on_host, accelerator.at())
    assert accelerator.read(again.wait(non_blocking=True)) == 6.0


def test_pinned_source_may_be_dropped_immediately(accelerator: Device) -> None:
    pinned = accelerator.make_pinned(7.0)
    with accelerator.hold():
        copying = copy(pinned, accelerator.at())
        del pinned
        others = [accelerator.make_pinned(8.0) for _ in range(4)]
    assert accelerator.read(copying.wait(non_blocking=True)) == 7.0
    assert len(others) == 4


def test_pageable_memory_needs_no_device_wait(accelerator: Device) -> None:
    with accelerator.hold():
        accelerator.produce(0.0)
        copied = copy(torch.full((SIZE,), 1.0), accelerator.at()).wait()  # beside what is held
    assert accelerator.read(copied) == 1.0


def test_other_streams_are_not_waited_for(accelerator: Device) -> None:
    x = accelerator.produce(1.0)
    with accelerator.hold(accelerator.stream()):
        assert copy(x, "cpu").wait().unique().tolist() == [1.0]


def test_ready_result_is_visible_to_host(accelerator: Device) -> None:
    with accelerator.hold():
        copying = copy(accelerator.produce(2.0), "cpu")
        assert copying.wait(non_blocking=True).is_pinned()
        assert not copying.ready()
    while not copying.ready():
        pass
    assert copying.value().unique().tolist() == [2.0]


def test_future_has_devices_of_both_ends(pair: Device) -> None:
    x = [pair.produce(1.0, i) for i in (0, 1)]
    assert set(copy(x[1], pair.at(0)).devices) == {pair.at(0), pair.at(1)}
    assert set(copy(x, "cpu").devices) == {pair.at(0), pair.at(1)}
    assert copy(torch.ones(1), pair.at(1)).devices == (pair.at(1),)


@pytest.mark.parametrize("target", ["host", "here", "there"])
def test_sources_on_several_devices_are_ordered(pair: Device, target: str) -> None:
    value = [pair.produce(1.0, 0), pair.produce(2.0, 1), torch.full((SIZE,), 3.0)]
    copying = copy(value, at(pair, target))
    del value
    with use_streams(*[pair.stream(index=i) for i in (0, 1)]):
        copies = copying.wait(non_blocking=target != "host")  # a stream of one device could read what the other writes
        after = [x.to(pair.at(1), non_blocking=True) for x in copies]
        assert [pair.read(x) for x in after] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("target", ["host", "here", "there"])
def test_current_device_stays_current(pair: Device, current: int, target: str) -> None:
    x = [pair.produce(1.0, i) for i in (0, 1)]
    with pair.select(current):
        before = [pair.current(i) for i in (0, 1)]
        copying = copy([*x, torch.ones(SIZE)], at(pair, target))
        assert pair.current_index() == current
        assert [pair.current(i) for i in (0, 1)] == before
    assert all(c.unique().tolist() == [1.0] for c in copying.wait())


@pytest.mark.parametrize("priority", PRIORITIES)
def test_priority_reaches_future_and_callbacks(accelerator: Device, priority: int) -> None:
    copying = copy(torch.ones(SIZE), accelerator.at(), priority=priority)
    assert copying.priority == priority
    assert copying.then(lambda _: accelerator.priority_of(accelerator.current())).wait() == priority


def test_many_copies_at_once(accelerator: Device) -> None:
    there = [copy(torch.full((SIZE,), float(i)), accelerator.at()) for i in range(40)]
    back = gather(*there).then_async(lambda done: copy(done.value(), "cpu"))
    assert [x[0].item() for x in back.wait()] == list(range(40))


# ---- large host memory


def large(value: float) -> Tensor:
    return torch.full((LARGE // 4 + 1,), value)


def test_large_host_memory_uses_executor(accelerator: Device) -> None:
    with accelerator.on(accelerator.stream()):
        value = [large(1.0), accelerator.produce(2.0), torch.full((SIZE,), 3.0)]
        copies = copy(value, accelerator.at()).wait(non_blocking=True)
        assert [accelerator.read(x) for x in copies] == [1.0, 2.0, 3.0]


def test_large_host_memory_stays_on_host(accelerator: Device) -> None:
    on_host, from_device = copy([large(1.0), accelerator.produce(2.0)], "cpu").wait()
    assert on_host.unique().tolist() == [1.0]
    assert from_device.unique().tolist() == [2.0]


def test_mixed_sources_are_read_in_order(accelerator: Device) -> None:
    stream = accelerator.stream()
    with accelerator.on(stream):
        copying = copy([large(1.0), accelerator.produce(2.0)], accelerator.at())
    assert accelerator.read(copying.wait(non_blocking=True)[1]) == 2.0


# ---- what goes wrong


def test_absent_device_is_refused(accelerator: Device) -> None:
    value: object
    for value in (torch.ones(1), accelerator.produce(1.0), []):
        with pytest.raises((RuntimeError, ValueError)):
            copy(value, torch.device(accelerator.name, accelerator.index(accelerator.count)))


def test_meta_tensor_is_refused(device: Device) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        copy([torch.ones(1, device="meta"), device.empty()], device.at())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_tensor_with_freed_storage_is_refused(device: Device) -> None:
    shrunk, sparse = torch.ones(4), torch.eye(2).to_sparse_csr()
    freed = TwoTensor(torch.ones(3), torch.ones(3))
    for tensor in (shrunk, sparse.values(), freed.a):
        tensor.untyped_storage().resize_(4)
    for tensor in (shrunk, sparse, freed):
        with pytest.raises(TensorError, match="freed or shrunk"):
            copy([torch.ones(1), tensor], device.at())


def test_everything_is_copied_to_meta(accelerator: Device) -> None:
    value = [torch.ones(3), accelerator.produce(1.0), torch.ones(2, device="meta")]
    copied = copy(value, "meta").wait()
    assert [(x.device.type, x.shape) for x in copied] == [("meta", x.shape) for x in value]


def test_failing_device_work_is_reported(accelerator: Device) -> None:
    if accelerator.name != "sim":
        pytest.skip("breaks the device")
    from cudafuture.testing import sim

    x = accelerator.produce(1.0)
    sim.fail("burnt")
    copying: CUDAFuture[Tensor] = copy(x, "cpu")
    with pytest.raises(RuntimeError, match="burnt"):
        copying.wait()
    sim.clear_error(0)
    assert {report.kind for report in sim.races()} <= {"error"}


MEMORY = 8 << 20


@pytest.mark.sim(devices=2, schedule="lazy", memory=MEMORY, strict_devices=True)
@pytest.mark.parametrize("target", ["sim:0", "sim:1"])
def test_memory_shortage_fails_without_leak(target: str) -> None:
    from cudafuture.testing import sim

    gc.collect()  # memory of earlier tests on the devices
    sources = [torch.full((MEMORY // 16,), 1.0, device="sim:0") for _ in range(2)]
    host = torch.ones(MEMORY // 4)
    before = sim.statistics().allocated_bytes
    copying = copy([*sources, host], target)
    side = torch.Stream("sim:0")
    with side:
        with pytest.raises(torch.OutOfMemoryError):
            copying.wait(non_blocking=True)
        for x in sources:  # they are being read by the copies before the error
            x.fill_(2.0)
    sim.synchronize()
    assert sim.statistics().allocated_bytes == before
    assert [x.cpu().unique().tolist() for x in sources] == [[2.0]] * 2


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_sparse_tensor_copies_or_is_refused(device: Device, layout: torch.layout) -> None:
    x = torch.eye(3, device=HOST).to_sparse(layout=layout)
    assert copy(x, HOST).wait().to_dense().tolist() == torch.eye(3).tolist()
    copied = copy(x, device.at())
    error = copied.exception()
    if device.name == "sim":
        assert isinstance(error, RuntimeError)
        assert "sparse" in str(error).lower()
    else:
        assert copied.wait().to(HOST).to_dense().tolist() == torch.eye(3).tolist()
