"""Calls that a type checker must refuse, with the kind of error as ``# E:``. Read by mypy, never run."""

# ruff: noqa: B018, F841

from __future__ import annotations

from typing import Any

import torch

import cudafuture.distributed as cfd
from cudafuture import (
    CUDAFuture,
    EventView,
    as_completed,
    collect_all,
    collect_any,
    copy,
    current_streams,
    gather,
    pool_stream,
    submit,
    use_streams,
    wait,
    wait_all,
)


def takes_float(_: CUDAFuture[float]) -> None: ...


def takes_int(_: CUDAFuture[int]) -> None: ...


def takes_object(_: CUDAFuture[object]) -> None: ...


def a_future_is_invariant(i: CUDAFuture[int], b: CUDAFuture[bool]) -> None:
    takes_float(i)  # E: arg-type
    takes_int(b)  # E: arg-type
    takes_object(i)  # E: arg-type
    other: CUDAFuture[int | str] = i  # E: assignment


def a_future_is_final() -> None:
    class Derived(CUDAFuture[int]):  # E: misc
        pass


def making(i: int) -> None:
    future = CUDAFuture()  # E: var-annotated
    CUDAFuture[int](devices=0)  # E: arg-type
    CUDAFuture[int](devices=[1.5])  # E: list-item
    CUDAFuture[int](None, -1)  # E: call-arg
    CUDAFuture[int](priority="high")  # E: arg-type
    CUDAFuture[int](name=3)  # E: arg-type
    CUDAFuture[int](lifetime="keep")  # E: arg-type
    two: CUDAFuture[int, str] = CUDAFuture()  # E: type-arg
    CUDAFuture.completed()  # E: call-arg
    CUDAFuture.failed("no exception")  # E: arg-type
    CUDAFuture.failed(int)  # E: arg-type
    CUDAFuture.from_torch(i)  # E: arg-type


def consuming(future: CUDAFuture[int]) -> None:
    future.wait(1.0)  # E: call-arg
    future.wait(timeout="1")  # E: arg-type
    future.wait().upper()  # E: attr-defined
    future.result(1, 2)  # E: call-arg
    text: str = future.value()  # E: assignment
    future.exception().args  # E: union-attr
    for _ in future:  # E: attr-defined
        pass


async def awaiting(future: CUDAFuture[int]) -> str:
    return await future  # E: return-value


def producing(future: CUDAFuture[int], tensor: torch.Tensor) -> None:
    future.set_result("text")  # E: arg-type
    future.set_result()  # E: call-arg
    future.set_result(1, tensor)  # E: call-arg
    future.set_result(1, stream="cuda:0")  # E: arg-type
    future.set_result(1, tensors=3)  # E: arg-type
    future.set_exception("text")  # E: arg-type
    future.set_exception(int)  # E: arg-type


def facts(future: CUDAFuture[int], event: EventView) -> None:
    future.name = "other"  # E: misc
    future.devices = ()  # E: misc
    future.state  # E: attr-defined
    future.events[torch.device("cpu")] = event  # E: index
    event.record()  # E: attr-defined


def takes_text(future: CUDAFuture[str]) -> int:
    return len(future.value())


def chaining(future: CUDAFuture[int]) -> None:
    future.then(None)  # E: arg-type
    future.then(takes_text)  # E: arg-type
    future.then(lambda: 1)  # E: arg-type
    future.then(lambda f, g: 1)  # E: arg-type
    future.then(lambda f: f.value().upper())  # E: attr-defined
    future.then(len)  # E: arg-type
    future.then(takes_int, "pool")  # E: call-arg
    future.then(takes_int, stream="own")  # E: arg-type
    future.then(takes_int, executor=3)  # E: arg-type
    future.then(takes_int, executor="inline")  # E: arg-type
    future.then(takes_int, priority="high")  # E: arg-type
    future.then_async(lambda f: f.value())  # E: arg-type
    future.then_async(takes_text)  # E: arg-type
    future.add_done_callback(None)  # E: arg-type
    future.add_done_callback(takes_text)  # E: arg-type
    future.add_done_callback(takes_int, stream="caller")  # E: call-arg


def combining(i: CUDAFuture[int], s: CUDAFuture[str], futures: list[CUDAFuture[int]]) -> None:
    gather(futures)  # E: call-overload
    gather(1, 2)  # E: call-overload
    for value in gather(i, s).wait():
        value.upper()  # E: union-attr
    collect_all(i)  # E: arg-type
    collect_all([1])  # E: arg-type
    collect_any(i, i)  # E: call-arg
    wait_all(i)  # E: arg-type
    wait(futures, "1")  # E: arg-type
    wait(futures, return_when="ANY")  # E: arg-type
    as_completed(i)  # E: arg-type


def sources(tensor: torch.Tensor) -> None:
    submit(3)  # E: call-overload
    submit(len, "x", executor=3)  # E: call-arg
    submit(len, "x", priority="high")  # E: call-arg
    submit(len, "x").value().upper()  # E: attr-defined
    copy(tensor)  # E: call-arg
    copy(tensor, 1.5)  # E: arg-type
    pool_stream(None)  # E: arg-type
    current_streams(0)  # E: arg-type
    use_streams("cuda:0")  # E: arg-type
    use_streams([pool_stream(0)])  # E: arg-type


def collectives(tensor: torch.Tensor, ops: list[torch.distributed.P2POp], pg: cfd.ProcessGroup) -> None:
    cfd.all_reduce([tensor])  # E: arg-type
    cfd.all_reduce(tensor, async_op=True)  # E: call-arg
    cfd.all_reduce_coalesced(tensor)  # E: arg-type
    cfd.broadcast(tensor, "0")  # E: arg-type
    cfd.all_gather(tensor, tensor)  # E: arg-type
    cfd.reduce(tensor, 0).value().sum()  # E: union-attr
    cfd.recv(tensor).value().sum()  # E: attr-defined
    cfd.batch_isend_irecv(ops).value()[0].source  # E: union-attr
    cfd.barrier(timeout=1.5)  # E: arg-type
    pg.all_reduce(tensor, group=pg)  # E: call-arg
    pg.split([0, 1])  # E: list-item
    cfd.ddp_comm_hook(takes_int)  # E: arg-type


def unknown_names(future: CUDAFuture[Any]) -> None:
    future.get_future()  # E: attr-defined
    future.add_callback(print)  # E: attr-defined
