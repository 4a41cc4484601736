"""Calls with tensors on simulated devices, each of which must go right and without a race under any schedule.

Every scenario takes the name of the worker that it calls, which may be its own. So it runs between two processes, and
in one, where the race detector sees both ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rpc_ext
from cudafuture import CUDAFuture, copy, gather, submit
from cudafuture.testing import sim
from rpc_ext import RRef, remote, rpc_async, rpc_sync
from support.simulated import simulate

LONG = 40.0  # seconds; much more than anything takes
SIZE = 64


@contextlib.contextmanager
def calling(
    schedule: str, meeting: Path, *, rank: int = 0, size: int = 1, devices: int = 2, seed: int = 7, **more: Any
) -> Iterator[rpc_ext.Session]:
    """Begin RPC in this process, between simulated devices; afterwards raise if a race was found."""
    with (
        simulate(schedule, devices, seed),
        rpc_ext.init_rpc(
            rank=rank, world_size=size, init_method=f"file://{meeting}", rpc_timeout=LONG, **more
        ) as session,
    ):
        yield session


def start_fill(value: float, index: int = 0, size: int = SIZE) -> Tensor:
    """Return a tensor that the device fills, after a while."""
    with torch.accelerator.device_index(index):
        sim.sleep(1)
        return torch.empty(size, device=f"sim:{index}").fill_(value)


def only(tensor: Tensor) -> float:
    """Return the value that fills a tensor, as the current stream of its device sees it."""
    low, high = (tensor * 1.0).aminmax()
    assert low.item() == high.item(), f"{low.item()} to {high.item()}"
    return float(high.item())


def where(tensor: Tensor) -> str:
    return str(tensor.device)


# ---- what is called


def double(x: Tensor) -> Tensor:
    with torch.accelerator.device_index(x.device.index):
        sim.sleep(1)
    return x * 2


def use(x: Tensor) -> None:
    """Leave work behind without a wait."""
    double(x)


def add_all(*tensors: Tensor) -> Tensor:
    """Return the sum of what may be on several devices, on the first."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    return total


def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def describe(value: Any) -> Any:
    """Return the properties and values of the tensors that arrived."""
    return [(where(t), tuple(t.shape), t.stride(), t.dtype, t.tolist()) for t in value]


def make(value: float, index: int = 0, size: int = SIZE) -> Tensor:
    return start_fill(value, index, size)


@rpc_ext.async_execution
def double_later(x: Tensor) -> CUDAFuture[Tensor]:
    """Return a future that is done at once, and whose device is still at work on a stream of its own."""
    came = CUDAFuture.completed(x)
    with torch.Stream(x.device):
        return CUDAFuture.completed(double(came.wait(non_blocking=True)))


def double_there(value: float, index: int = 0) -> Tensor:
    """Double a tensor of the callee."""
    return double(start_fill(value, index))


@rpc_ext.async_execution
def double_there_later(value: float, index: int = 0) -> CUDAFuture[Tensor]:
    """Return a future of a tensor of the callee, on which its device is still at work."""
    return double_later(start_fill(value, index))


@rpc_ext.async_execution
def double_elsewhere(x: Tensor) -> CUDAFuture[Tensor]:
    """Return a future that a thread of the host completes."""
    both: CUDAFuture[list[Any]] = gather(CUDAFuture.completed(x), submit(int, 2))
    return both.then(lambda both: both.value()[0] * both.value()[1])


@rpc_ext.async_execution
def double_by(to: str, x: Tensor) -> CUDAFuture[Tensor]:
    return rpc_async(to, double, (x,))


def refuse_there() -> Tensor:
    return refuse(start_fill(1.0))


def refuse(x: Tensor) -> Tensor:
    raise LookupError(f"no such tensor on {x.device}")


def add_to(rref: RRef[Tensor], x: Tensor) -> Tensor:
    return rref.local_value() + x


@rpc_ext.async_execution
def add_later(rref: RRef[Tensor], x: Tensor) -> CUDAFuture[Tensor]:
    """Wait for neither."""
    return gather(rref.get_future(), CUDAFuture.completed(x)).then(lambda both: both.value()[0] + both.value()[1])


def break_device(x: Tensor) -> Tensor:
    sim.fail("a broken bit")
    return x * 2


@rpc_ext.async_execution
def break_device_later(x: Tensor) -> CUDAFuture[Tensor]:
    return CUDAFuture.completed(break_device(x))


def streams() -> list[int]:
    return [torch.accelerator.current_stream(f"sim:{i}").stream_id for i in range(2)]


def streams_with(x: Tensor) -> list[int]:
    """Leave other streams current, and another device, than was so before."""
    ids = streams()
    torch.accelerator.set_stream(torch.Stream(x.device))
    torch.accelerator.set_device_index(1)
    return ids


class Register:
    """A value that lives on a device of its owner."""

    def __init__(self, start: float) -> None:
        self.total = start_fill(start)

    def add(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return self.total

    @rpc_ext.async_execution
    def add_later(self, x: Tensor) -> CUDAFuture[Tensor]:
        return CUDAFuture.completed(self.add(x)).then(lambda done: done.value() * 1)

    def add_number(self, x: float) -> Tensor:
        return self.add(start_fill(x))

    def set(self, x: Tensor) -> None:
        self.total.copy_(x)


_held: list[Tensor] = []  # on a device of this worker, between calls


def hold(x: Tensor) -> None:
    _held[:] = [x.clone()]


def fill_held(x: Tensor) -> None:
    """Change the tensor on the device, and return nothing that says when the device has done so."""
    with torch.accelerator.device_index(x.device.index):
        sim.sleep(1)
    _held[0].copy_(x)


def fill_held_by_number(value: float) -> None:
    _held[0].fill_(value)


def fill_held_and_fail(x: Tensor) -> None:
    fill_held(x)
    raise LookupError("after the device was given work")


def fill_held_elsewhere(x: Tensor) -> None:
    """Leave another stream current than the one that has the work."""
    fill_held(x)
    torch.accelerator.set_stream(torch.Stream(x.device))


@rpc_ext.async_execution
def fill_held_later(x: Tensor) -> CUDAFuture[None]:
    """Complete with None, and with events of the tensor."""
    filled_later: CUDAFuture[None] = CUDAFuture()

    def fill(done: CUDAFuture[list[Any]]) -> None:
        fill_held(done.value()[0])
        filled_later.set_result(None, tensors=[_held[0]])

    gather(CUDAFuture.completed(x), submit(int, 2)).then(fill)
    return filled_later


def return_held() -> Tensor:
    return _held[0]


def add_to_held(x: Tensor) -> Tensor:
    return _held[0] + x


def release_held() -> None:
    _held.clear()


# ---- scenarios


def arguments_and_results(to: str) -> None:
    """Check that arguments are read after earlier work of the caller, and results written before the waiter reads."""
    with torch.Stream("sim:0"):
        future = rpc_async(to, double, (start_fill(3.0),))
    with torch.Stream("sim:0"):
        result = future.wait(non_blocking=True)
        assert only(result) == 6.0
    assert where(result) == "sim:0"
    assert list(future.events) == [torch.device("sim:0")]
    assert only(rpc_sync(to, double, (start_fill(4.0, 1),))) == 8.0


def drop_at_once(to: str) -> None:
    """Drop the arguments; their memory is reused before the copies have run."""
    with torch.Stream("sim:0"):
        futures = []
        for value in (1.0, 2.0, 3.0):
            with sim.hold():
                x = start_fill(value)
                futures.append(rpc_async(to, double, (x,)))
                del x
                torch.empty(SIZE, device="sim:0").fill_(100.0)
        assert [only(future.wait(timeout=LONG)) for future in futures] == [2.0, 4.0, 6.0]


def write_after_wait(to: str) -> None:
    """Write to the arguments, and to the answer, after a wait for the answer."""
    x = start_fill(2.0)
    future = rpc_async(to, double, (x,))
    with torch.Stream("sim:0"):
        result = future.wait(non_blocking=True)
        x.fill_(9.0)
        assert only(result) == 4.0
        result.zero_()
        assert only(x) == 9.0


def drop_unread(to: str) -> None:
    """Drop replies unread, and reuse their memory."""
    for future in [rpc_async(to, double, (start_fill(float(i)),)) for i in range(4)]:
        future.wait(non_blocking=True)
    del future
    torch.full((640,), 3.0, device="sim:0")


def many_in_a_row(to: str) -> None:
    """Make more calls than a device has streams; some leave work behind without a wait."""
    for value in range(20):
        rpc_sync(to, use, (start_fill(float(value)),))
        assert only(rpc_sync(to, double, (start_fill(float(value)),))) == 2.0 * value


def while_the_device_is_at_work(to: str) -> None:
    """Call while the device of the caller is busy: nothing blocks."""
    with torch.Stream("sim:0"):
        with sim.hold():
            x = start_fill(1.0)
            call = rpc_async(to, double, (x,))
            rref = remote(to, double_there, (1.0,))
            assert not call.done()
        assert only(call.wait(timeout=LONG)) == 2.0
        assert only(rref.to_here()) == 2.0


def several_devices(to: str) -> None:
    """Send tensors of several devices: each arrives on its own, and those on the host stay there."""
    on_host = torch.arange(4.0)
    first, second = start_fill(1.0), start_fill(2.0, 1)
    nested = {"a": [first, (second, on_host)], "b": {"n": 7}}
    (back,), _ = rpc_async(to, echo, (nested,)).wait(non_blocking=True)
    assert (where(back["a"][0]), where(back["a"][1][0]), where(back["a"][1][1])) == ("sim:0", "sim:1", "cpu")
    assert (only(back["a"][0]), only(back["a"][1][0])) == (1.0, 2.0)
    assert torch.equal(back["a"][1][1], on_host)
    assert back["b"] == {"n": 7}
    total = rpc_async(to, add_all, (second, first, torch.full((SIZE,), 4.0)))
    assert only(total.wait(non_blocking=True)) == 7.0
    assert list(total.events) == [torch.device("sim:1")]


def layouts(to: str) -> None:
    """Send views: each arrives with its own values only, and two views of one tensor arrive as two tensors."""
    x = torch.arange(24.0, device="sim:0").view(4, 6)
    views = [x, x.t(), x[:, ::2], x[1], x[0, 0], x[:0], x[:1].expand(3, -1), x.to(torch.int16), x > 3, x.detach()]
    found = rpc_sync(to, describe, (views,))
    for view, (device, shape, _, dtype, values) in zip(views, found, strict=True):
        assert (device, shape, dtype, values) == ("sim:0", tuple(view.shape), view.dtype, view.tolist())
    parts, whole = rpc_sync(to, echo, ([x[0], x[0]], x))[0]
    parts[0].zero_()
    assert only(parts[0]) == 0.0
    assert torch.equal(parts[1].cpu(), x[0].cpu())
    assert torch.equal(whole.cpu(), x.cpu())
    assert torch.equal(rpc_sync(to, double, (torch.nn.Parameter(x),)).cpu(), 2 * x.cpu())


def large_ones(to: str) -> None:
    """Send more than a thread copies to pinned memory by itself."""
    size = 400_000  # floats
    x = start_fill(1.5, size=size)
    future = rpc_async(to, double, (x,))
    del x
    with torch.Stream("sim:0"):
        assert only(future.wait(non_blocking=True)) == 3.0
    mixed = rpc_async(to, add_all, (start_fill(1.0, 1, size), torch.full((size,), 2.0)))
    assert only(mixed.wait(non_blocking=True)) == 3.0


def make_there(to: str) -> None:
    """Return tensors from a function without tensor arguments."""
    futures = [rpc_async(to, make, (float(i), i % 2)) for i in range(4)]
    assert [only(future.wait(non_blocking=True)) for future in futures] == [0.0, 1.0, 2.0, 3.0]
    assert [where(future.value()) for future in futures] == ["sim:0", "sim:1"] * 2


def futures_there(to: str) -> None:
    """Return futures, whose outcomes are read when they are done and their devices have finished."""
    with torch.Stream("sim:1"):
        assert only(rpc_async(to, double_later, (start_fill(3.0, 1),)).wait(non_blocking=True)) == 6.0
    assert only(rpc_sync(to, double_elsewhere, (start_fill(3.0),))) == 6.0
    assert only(rpc_sync(to, double_by, (to, start_fill(3.0)))) == 6.0


def callbacks(to: str) -> None:
    """Call in a callback, which is ordered after the reply and before its own call."""
    first = rpc_async(to, double, (start_fill(1.0),))
    second = first.then_async(lambda done: rpc_async(to, double, (done.value() + 1,)))
    third = second.then(lambda done: done.value() + 1)
    waiting = first.then(lambda done: rpc_sync(to, double, (done.value(),)))  # holds the callback thread
    assert only(waiting.wait(timeout=LONG)) == 4.0
    both: CUDAFuture[Any] = gather(first, third).then(lambda done: sum(done.value()))
    assert only(both.wait(timeout=LONG)) == 9.0


def batch_calls(to: str) -> None:
    """Send calls together, each with tensors of the streams that were current when it was made."""
    with rpc_ext.batch(to):
        with torch.Stream("sim:0"):
            futures = [rpc_async(to, double, (start_fill(float(i), i % 2),)) for i in range(6)]
        with torch.Stream("sim:0"):
            futures.append(rpc_async(to, double_later, (start_fill(6.0),)))
        futures.append(rpc_async(to, double, (torch.full((SIZE,), 7.0, device="sim:0"),)))
        numbers = [rpc_async(to, divmod, (i, 2)) for i in range(3)]
        failing = rpc_async(to, refuse, (start_fill(1.0, 1),))
    assert [only(future.wait(non_blocking=True)) for future in futures] == [2.0 * i for i in range(8)]
    assert [number.wait() for number in numbers] == [(0, 0), (0, 1), (1, 0)]
    assert isinstance(failing.exception(timeout=LONG), LookupError)


def messages_of_a_batch(to: str) -> None:
    """Send a batch of which the thread that takes replies sends most."""
    with torch.Stream("sim:0"), rpc_ext.batch(to):
        futures = [rpc_async(to, double, (start_fill(float(i)),)) for i in range(80)]
    assert [only(future.wait(timeout=LONG)) for future in futures] == [2.0 * i for i in range(80)]


def references(to: str) -> None:
    """Use the object of an RRef, which stays on its owner's device: each use is ordered after its creation."""
    with torch.Stream("sim:0"):
        rref = remote(to, double_there, (2.0,))
    later = remote(to, double_there_later, (5.0, 1))
    with torch.Stream("sim:0"):
        assert only(rref.get_future().wait(non_blocking=True)) == 4.0
        assert only(rpc_sync(to, add_to, (rref, start_fill(1.0)))) == 5.0
        assert only(rpc_sync(to, add_to, (rref, start_fill(2.0)))) == 6.0
    assert only(later.to_here()) == 10.0
    assert isinstance(remote(to, refuse_there).get_future().exception(timeout=LONG), LookupError)


def methods_of_references(to: str) -> None:
    """Call methods, which are ordered after their object and their arguments."""
    register = remote(to, Register, (1.0,))
    with torch.Stream("sim:0"):
        assert only(register.rpc_async().add(start_fill(2.0)).wait(non_blocking=True)) == 3.0
    with torch.Stream("sim:0"):
        assert only(register.rpc_sync().add_later(start_fill(3.0))) == 6.0
        assert only(register.remote().add_number(4.0).to_here()) == 10.0
    later = remote(to, double_there_later, (5.0,))
    assert later.rpc_sync().sum().item() == 10.0 * SIZE


def state_that_calls_change(to: str) -> None:
    """Change state by calls without results, each of which is ordered after the same caller's earlier ones."""
    rpc_sync(to, hold, (start_fill(1.0),))
    for value, fill in enumerate([fill_held, fill_held_elsewhere, fill_held_later, fill_held], 2):
        rpc_sync(to, fill, (start_fill(float(value)),))
        assert only(rpc_sync(to, return_held)) == value
        rpc_sync(to, fill_held_by_number, (10.0 * value,))
        assert only(rpc_sync(to, add_to_held, (start_fill(1.0),))) == 10.0 * value + 1
    assert isinstance(rpc_async(to, fill_held_and_fail, (start_fill(6.0),)).exception(timeout=LONG), LookupError)
    assert only(rpc_sync(to, return_held)) == 6.0
    kept = remote(to, fill_held_by_number, (7.0,))
    assert kept.to_here() is None
    assert only(rpc_sync(to, add_to_held, (start_fill(1.0),))) == 8.0
    with rpc_ext.batch(to):
        rpc_async(to, fill_held, (start_fill(8.0),))
        first = rpc_async(to, add_to_held, (start_fill(1.0),))
        rpc_async(to, fill_held_by_number, (9.0,))
        second = rpc_async(to, add_to_held, (start_fill(1.0),))
    assert (only(first.wait(timeout=LONG)), only(second.wait(timeout=LONG))) == (9.0, 10.0)
    rpc_sync(to, release_held)


def objects_that_methods_change(to: str) -> None:
    """Change objects by methods without results, which are ordered like functions."""
    register = remote(to, Register, (1.0,))
    for value in (2.0, 3.0, 4.0):
        register.rpc_sync().set(start_fill(value))
        assert only(register.rpc_sync().add(start_fill(1.0))) == value + 1


def keep_current(to: str) -> None:
    """Check that calls run on streams of their own and restore the current streams and device."""
    before = rpc_sync(to, streams)
    assert rpc_sync(to, streams_with, (start_fill(1.0),))[0] not in (0, before[0])
    assert rpc_sync(to, streams) == before == [0, 0]
    assert rpc_sync(to, torch.accelerator.current_device_index) == 0


def failures(to: str) -> None:
    """Raise errors in calls with tensors."""
    error = rpc_async(to, refuse, (start_fill(1.0, 1),)).exception(timeout=LONG)
    assert isinstance(error, LookupError)
    assert "sim:1" in str(error)
    cancelled = rpc_async(to, double, (start_fill(1.0),))
    assert cancelled.cancel()
    assert only(rpc_sync(to, double, (start_fill(1.0),))) == 2.0


def copies_of_their_own(to: str) -> None:
    """Move tensors between host and device before and after a call, without waiting."""
    there = copy(torch.full((SIZE,), 2.0), "sim:0")
    called = there.then_async(lambda done: rpc_async(to, double, (done.value(),)))
    back = called.then_async(lambda done: copy(done.value(), "cpu"))
    assert back.wait(timeout=LONG).tolist() == [4.0] * SIZE


def several_workers(to: str) -> None:
    """Send one tensor to several workers, and combine their results."""
    results = rpc_ext.broadcast_call([to, to], double, (start_fill(2.0),)).wait(non_blocking=True)
    assert [only(result) for result in results] == [4.0, 4.0]
    results = rpc_ext.map_call([to, to], double, [(start_fill(1.0),), (start_fill(2.0, 1),)]).wait(non_blocking=True)
    assert [(where(result), only(result)) for result in results] == [("sim:0", 2.0), ("sim:1", 4.0)]


SCENARIOS: tuple[Callable[[str], None], ...] = (
    arguments_and_results,
    drop_at_once,
    write_after_wait,
    drop_unread,
    many_in_a_row,
    while_the_device_is_at_work,
    several_devices,
    layouts,
    large_ones,
    make_there,
    futures_there,
    callbacks,
    batch_calls,
    messages_of_a_batch,
    references,
    methods_of_references,
    state_that_calls_change,
    objects_that_methods_change,
    keep_current,
    failures,
    copies_of_their_own,
    several_workers,
)
