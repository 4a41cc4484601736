"""Calls with tensors on GPUs, to another process or to the caller itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rpc_ext
from cudafuture import CUDAFuture, gather
from rpc_ext import RRef, remote, rpc_async, rpc_sync
from support.harness import Cuda

LONG = 60.0  # seconds; much more than anything takes
SIZE = 1 << 20


def begin(meeting: Path, rank: int, size: int, **more: Any) -> rpc_ext.Session:
    return rpc_ext.init_rpc(rank=rank, world_size=size, init_method=f"file://{meeting}", rpc_timeout=LONG, **more)


def slow(value: float) -> Tensor:
    """Return a tensor that the current stream fills, after a while."""
    x = torch.empty(SIZE, device="cuda")
    Cuda().delay()
    return x.fill_(value)


def only(tensor: Tensor) -> float:
    """Return the value that fills a tensor, as the current stream sees it."""
    low, high = tensor.aminmax()
    assert low.item() == high.item(), f"{low.item()} to {high.item()}"
    return float(high.item())


# ---- what is called


def double(x: Tensor) -> Tensor:
    Cuda().delay()
    return x * 2


def double_there(value: float) -> Tensor:
    """Double a tensor of the callee."""
    return double(slow(value))


@rpc_ext.async_execution
def double_there_later(value: float) -> CUDAFuture[Tensor]:
    """Return a future of a tensor of the callee, on which its GPU is still at work."""
    return double_later(slow(value))


def where(x: Tensor) -> str:
    return str(x.device)


def add_to(rref: RRef[Tensor], x: Tensor) -> Tensor:
    return rref.local_value() + x


@rpc_ext.async_execution
def double_later(x: Tensor) -> CUDAFuture[Tensor]:
    """Return a future that is done at once, and whose GPU is still at work on a stream of its own."""
    came = CUDAFuture.completed(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        return CUDAFuture.completed(double(came.wait(non_blocking=True)))


# ---- scenarios


def arguments_and_results(to: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        futures = []
        for value in range(8):
            x = slow(float(value))
            futures.append(rpc_async(to, double, (x,)))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert [only(future.wait(non_blocking=True, timeout=LONG)) for future in futures] == [2.0 * i for i in range(8)]


def make_there(to: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert only(rpc_async(to, slow, (3.0,)).wait(non_blocking=True, timeout=LONG)) == 3.0


def futures_there(to: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert only(rpc_async(to, double_later, (slow(3.0),)).wait(non_blocking=True, timeout=LONG)) == 6.0


def callbacks(to: str) -> None:
    first = rpc_async(to, double, (slow(1.0),))
    second = first.then_async(lambda done: rpc_async(to, double, (done.value() + 1,)))
    both: CUDAFuture[Any] = gather(first, second).then(lambda done: sum(done.value()))
    assert only(both.wait(timeout=LONG)) == 8.0


def batch_calls(to: str) -> None:
    with rpc_ext.batch(to):
        futures = [rpc_async(to, double, (slow(float(i)),)) for i in range(4)]
        futures.append(rpc_async(to, double_later, (slow(4.0),)))
    assert [only(future.wait(non_blocking=True, timeout=LONG)) for future in futures] == [2.0 * i for i in range(5)]


def references(to: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        rref = remote(to, double_there, (2.0,))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert only(rref.get_future().wait(non_blocking=True, timeout=LONG)) == 4.0
        assert only(rpc_sync(to, add_to, (rref, slow(1.0)))) == 5.0
        assert only(rref.rpc_sync().add(slow(2.0))) == 6.0
        assert only(remote(to, double_there_later, (5.0,)).to_here()) == 10.0


SCENARIOS: tuple[Callable[[str], None], ...] = (
    arguments_and_results,
    make_there,
    futures_there,
    callbacks,
    batch_calls,
    references,
)
