"""Types that a type checker infers for calls to other workers. Read by mypy, never run."""

from __future__ import annotations

import torch
from torch._C._distributed_rpc import WorkerInfo
from typing_extensions import reveal_type

import rpc_ext
from cudafuture import CUDAFuture
from rpc_ext import RRef, async_execution, batch, broadcast_call, init_rpc, map_call, remote, rpc_async, rpc_sync


def half(number: int, *, rounded: bool = False) -> float:
    return number // 2 if rounded else number / 2


@async_execution
def later(number: int) -> CUDAFuture[str]:
    return CUDAFuture.completed(str(number))


class Counter:
    @async_execution
    def add(self, number: int) -> CUDAFuture[int]:
        return CUDAFuture.completed(number)


def sessions() -> None:
    with init_rpc() as session:
        reveal_type(session)  # R: Session
        reveal_type(session.workers)  # R: list[str]
    reveal_type(init_rpc("me", rank=0, world_size=1, secret=b"0123456789abcdef", device_maps=None))  # R: Session
    init_rpc("me", device_maps={"other": {"cuda:0": torch.device("cuda", 1)}})
    init_rpc("me", device_maps="none")  # E: arg-type
    init_rpc("me", 0)  # E: call-arg
    reveal_type(rpc_ext.shutdown(graceful=False))  # R: None


def calls(info: WorkerInfo) -> None:
    reveal_type(rpc_async("other", half, (3,)))  # R: CUDAFuture[float]
    reveal_type(rpc_async(1, half, (3,), {"rounded": True}, timeout=1, priority=-1))  # R: CUDAFuture[float]
    reveal_type(rpc_async(info, half, [3], non_blocking=True).then(lambda f: int(f.value())))  # R: CUDAFuture[int]
    reveal_type(rpc_sync("other", half, (3,)))  # R: float
    reveal_type(rpc_sync("other", torch.ones, (3,)))  # R: Tensor
    rpc_async(1.5, half)  # E: call-overload
    rpc_async("other", "half")  # E: call-overload


def functions_that_return_futures() -> None:
    reveal_type(later(3))  # R: CUDAFuture[str]
    reveal_type(Counter().add(3))  # R: CUDAFuture[int]
    reveal_type(rpc_async("other", later, (3,)))  # R: CUDAFuture[str]
    reveal_type(rpc_sync("other", later, (3,)))  # R: str


def many(workers: list[str]) -> None:
    reveal_type(broadcast_call(workers, half, (3,)))  # R: CUDAFuture[list[float]]
    reveal_type(broadcast_call(workers, later, (3,)))  # R: CUDAFuture[list[str]]
    reveal_type(map_call(workers, later, [(3,)]))  # R: CUDAFuture[list[str]]
    map_call(workers, half)  # E: call-overload
    reveal_type(map_call([0, 1], half, [(3,), (4,)]).wait())  # R: list[float]
    with batch("other") as together:
        reveal_type(together)  # R: batch
        reveal_type([rpc_async("other", half, (i,)) for i in range(3)])  # R: list[CUDAFuture[float]]


def references() -> None:
    there = remote("other", Counter)
    reveal_type(there)  # R: RRef[Counter]
    reveal_type(remote("other", later, (3,)))  # R: RRef[str]
    reveal_type(RRef(3))  # R: RRef[int]
    reveal_type(there.get_future())  # R: CUDAFuture[Counter]
    reveal_type(there.to_here())  # R: Counter
    reveal_type(there.owner())  # R: WorkerInfo
    reveal_type(there.rpc_async().add(3))  # R: Any


def count_calls() -> None:
    reveal_type(rpc_ext.statistics().destinations["other"].latency_p99)  # R: float
    reveal_type(rpc_ext.statistics().refused)  # R: Mapping[str, int]
