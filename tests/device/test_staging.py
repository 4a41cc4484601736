"""Collectives that go through the host, in a group of one process: ordered by events at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather, use_streams
from support.harness import SIZE, Device

# torch's, in the threads of ProcessGroupGloo: device 0 is current there.
pytestmark = pytest.mark.torch_makes_contexts("ProcessGroupGloo selects device 0 again after each copy of a tensor")

Tensor = torch.Tensor
LONG = 40.0  # seconds; much more than anything takes


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """Give the tests a process group of this process alone, over Gloo."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Each takes what is read and what is written, and moves the one into the other: Gloo stages some of them by itself.
MOVES: dict[str, Callable[[Tensor, Tensor], CUDAFuture[Any]]] = {
    "all_gather": lambda x, out: cfd.all_gather([out], x),
    "all_gather_into_tensor": lambda x, out: cfd.all_gather_into_tensor(out, x),
    "all_to_all_single": lambda x, out: cfd.all_to_all_single(out, x),
    "gather": lambda x, out: cfd.gather(x, [out]),
    "reduce_scatter": lambda x, out: cfd.reduce_scatter(out, [x]),
    "reduce_scatter_tensor": lambda x, out: cfd.reduce_scatter_tensor(out, x),
    "scatter": lambda x, out: cfd.scatter(out, [x]),
}
moving = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
CHANGES: dict[str, Callable[[Tensor], CUDAFuture[Any]]] = {
    "all_reduce": lambda x: cfd.all_reduce(x),
    "all_reduce_coalesced": lambda x: cfd.all_reduce_coalesced([x]).then(lambda f: f.value()[0]),
    "broadcast": lambda x: cfd.broadcast(x, src=0),
    "reduce": lambda x: cfd.reduce(x, dst=0),
}
changing = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@changing
def test_changed_tensor_is_read_in_order(accelerator: Device, change: Callable[[Tensor], Any]) -> None:
    with accelerator.on(accelerator.stream()):
        changed = change(accelerator.produce(2.0))
    with accelerator.on(accelerator.stream()):
        assert accelerator.read(changed.wait(non_blocking=True)) == 2.0


@moving
def test_input_is_read_after_earlier_work(accelerator: Device, move: Callable[..., Any]) -> None:
    output = accelerator.empty()
    with accelerator.hold():
        moved = move(accelerator.produce(2.0), output)
    moved.wait(non_blocking=True)
    assert accelerator.read(output) == 2.0


@moving
def test_output_is_written_after_earlier_work(accelerator: Device, move: Callable[..., Any]) -> None:
    stream = accelerator.stream()
    with accelerator.on(stream):
        output = accelerator.produce(1.0)
        double = output * 2
        moved = move(torch.full((SIZE,), 3.0, device=accelerator.at()), output)
    with accelerator.on(stream):
        moved.wait(non_blocking=True)
        assert accelerator.read(output) == 3.0
        assert accelerator.read(double) == 2.0


def test_output_elsewhere_is_written_in_order(pair: Device) -> None:
    x, output = pair.produce(2.0, 0), pair.produce(1.0, 1)
    double = output * 2
    cfd.all_gather_into_tensor(output, x).wait(non_blocking=True)
    assert pair.read(output) == 2.0
    assert pair.read(double) == 2.0


def test_write_only_tensor_delays_nothing(pair: Device) -> None:
    x, output = pair.produce(2.0, 0), pair.empty(1)
    double = output.fill_(1.0) * 2
    with pair.hold(pair.current(1)):
        moved = cfd.all_gather_into_tensor(output, x)
        cfd.all_reduce(pair.produce(1.0, 0)).wait(timeout=LONG)  # behind it in the line
        moved.wait(non_blocking=True, timeout=LONG)
        assert not moved.ready()
    assert pair.read(output) == 2.0
    assert pair.read(double) == 2.0


@moving
def test_tensors_may_be_dropped_immediately(accelerator: Device, move: Callable[..., Any]) -> None:
    stream = accelerator.stream()
    with accelerator.on(stream):
        x = accelerator.produce(2.0)
        output = accelerator.empty()
        with accelerator.hold():
            moved = move(x, output)
            del x
            others = [accelerator.empty().fill_(9.0) for _ in range(8)]
        moved.wait(timeout=LONG)
        assert accelerator.read(output) == 2.0
        moved = move(others.pop(), output)
        while not moved.done():
            pass
        del moved, output, others
        again = [accelerator.empty().fill_(7.0) for _ in range(8)]
        assert all(accelerator.read(x) == 7.0 for x in again)


def test_memory_of_ignored_future_is_kept(accelerator: Device) -> None:
    for _ in range(3):
        finished = [cfd.all_reduce_coalesced([accelerator.produce(1.0)]) for _ in range(4)]
        cfd.all_reduce(accelerator.produce(1.0)).wait(timeout=LONG)  # on the host, those before it have ended, too
        del finished
        for x in [accelerator.empty().fill_(7.0) for _ in range(8)]:
            assert accelerator.read(x) == 7.0


@moving
def test_waiter_may_change_tensors(accelerator: Device, move: Callable[..., Any]) -> None:
    x, output = accelerator.produce(2.0), accelerator.empty()
    moved = move(x, output)
    with accelerator.on(accelerator.stream()):
        moved.wait(non_blocking=True)
        x.fill_(5.0)
        assert accelerator.read(output) == 2.0
        output.fill_(6.0)


def test_callbacks_are_ordered_after_result(accelerator: Device) -> None:
    chain = cfd.all_reduce(accelerator.produce(1.0))
    for _ in range(3):
        chain = chain.then_async(lambda f: cfd.all_reduce(f.value() + 1)).then(lambda f: f.value() * 2)
    assert accelerator.read(chain.wait(non_blocking=True)) == 22.0


def test_many_collectives_keep_order(accelerator: Device) -> None:
    order: list[int] = []
    streams = [accelerator.stream() for _ in range(4)]
    children = []
    for i in range(24):
        with accelerator.on(streams[i % 4]):
            reduced = cfd.all_reduce(accelerator.produce(float(i)))
        children.append(reduced.then(lambda f, i=i: (order.append(i), f.value() + 1)[1]))  # type: ignore[func-returns-value, misc]
    assert [accelerator.read(x) for x in gather(*children).wait(timeout=LONG)] == [i + 1.0 for i in range(24)]
    assert order == list(range(24))


def test_current_device_stays_current(pair: Device) -> None:
    for current in (0, 1):
        with pair.select(current):
            before = [pair.current(i) for i in (0, 1)]
            reduced = [cfd.all_reduce(pair.produce(1.0, i)) for i in (0, 1)]
            assert pair.current_index() == current
            assert [pair.current(i) for i in (0, 1)] == before
            assert [pair.read(f.wait(timeout=LONG)) for f in reduced] == [1.0, 1.0]


def test_streams_of_caller_are_joined_everywhere(pair: Device) -> None:
    with use_streams(*[pair.stream(index=i) for i in (0, 1)]):
        x = [pair.produce(float(i + 1), i) for i in (0, 1)]
        reduced = cfd.all_reduce_coalesced(x)
    with use_streams(*[pair.stream(index=i) for i in (0, 1)]):
        assert [pair.read(t) for t in reduced.wait(non_blocking=True)] == [1.0, 2.0]


def test_mixed_device_types_are_refused(accelerator: Device) -> None:
    if accelerator.name == "cuda":
        pytest.skip("Gloo takes them")
    with pytest.raises(ValueError, match="devices of one type"):
        cfd.all_gather([torch.empty(SIZE)], accelerator.empty())


def test_queue_and_objects_keep_caller_device(pair: Device) -> None:
    seen: list[int] = []

    class Pickled:
        def __reduce__(self) -> Any:  # on the thread of the object collective
            seen.append(pair.current_index())
            return int, ()

    done: CUDAFuture[None] = CUDAFuture(executor=cfd.ProcessGroup().queue)
    with pair.select(1):
        child = done.then(lambda _: pair.current_index())
        gathered = cfd.all_gather_object([None], Pickled())
    done.set_result(None)
    assert child.wait(timeout=LONG) == 1
    gathered.wait(timeout=LONG)
    assert set(seen) == {1}
    assert pair.current_index() == 0
