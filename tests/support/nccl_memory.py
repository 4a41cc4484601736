"""Functions of ranks over NCCL that look at the memory of operations in flight."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, InvalidStateError, gather
from support.nccl_ranks import LONG, meet

FLOATS = 1 << 18  # 1 MiB: a block of its own for the caching allocator
SIZES = (FLOATS, 3 * FLOATS)  # of the ranks, where they may differ

pointers: list[int] = []  # of the tensors that full() made


def full(value: float, floats: int = FLOATS) -> Tensor:
    tensor = torch.full((floats,), value, device="cuda")
    pointers.append(tensor.data_ptr())
    return tensor


def uneven(value: float) -> list[Tensor]:
    return [full(value, size) for size in SIZES]


# Each issues an operation of two ranks on new tensors, to which nothing but the future refers afterwards. The root is
# rank 1. The keys begin with names of the table of operations.
ISSUES: dict[str, Callable[[int], CUDAFuture[Any]]] = {
    "all_reduce": lambda rank: cfd.all_reduce(full(1.0)),
    "all_reduce max": lambda rank: cfd.all_reduce(full(1.0), dist.ReduceOp.MAX),
    "all_reduce_coalesced": lambda rank: cfd.all_reduce_coalesced([full(1.0), full(2.0)]),
    "broadcast": lambda rank: cfd.broadcast(full(1.0), src=1),
    "reduce": lambda rank: cfd.reduce(full(1.0), dst=1),
    "all_gather": lambda rank: cfd.all_gather([full(0.0), full(0.0)], full(1.0)),
    "all_gather uneven": lambda rank: cfd.all_gather(uneven(0.0), full(1.0, SIZES[rank])),
    "all_gather_into_tensor": lambda rank: cfd.all_gather_into_tensor(full(0.0, 2 * FLOATS), full(1.0)),
    "gather": lambda rank: cfd.gather(full(1.0), [full(0.0), full(0.0)] if rank == 1 else None, dst=1),
    "gather_single": lambda rank: cfd.gather_single(full(1.0), full(0.0, 2 * FLOATS) if rank == 1 else None, dst=1),
    "scatter": lambda rank: cfd.scatter(full(0.0), [full(1.0), full(1.0)] if rank == 1 else None, src=1),
    "reduce_scatter": lambda rank: cfd.reduce_scatter(full(0.0), [full(0.5), full(0.5)]),
    "reduce_scatter uneven": lambda rank: cfd.reduce_scatter(full(0.0, SIZES[rank]), uneven(0.5)),
    "reduce_scatter_tensor": lambda rank: cfd.reduce_scatter_tensor(full(0.0), full(0.5, 2 * FLOATS)),
    "all_to_all": lambda rank: cfd.all_to_all([full(0.0), full(0.0)], [full(1.0), full(1.0)]),
    "all_to_all uneven": lambda rank: cfd.all_to_all([full(0.0, SIZES[rank])] * 2, uneven(1.0)),
    "all_to_all_single": lambda rank: cfd.all_to_all_single(full(0.0, 2 * FLOATS), full(1.0, 2 * FLOATS)),
    "all_to_all_single uneven": lambda rank: cfd.all_to_all_single(
        full(0.0, 2 * SIZES[rank]), full(1.0, sum(SIZES)), [SIZES[rank]] * 2, list(SIZES)
    ),
    "send": lambda rank: cfd.send(full(1.0), dst=1) if rank == 0 else cfd.recv(full(0.0), src=0),
    "recv": lambda rank: cfd.recv(full(0.0), src=1) if rank == 0 else cfd.send(full(1.0), dst=0),
    "batch_isend_irecv": lambda rank: cfd.batch_isend_irecv(
        [dist.P2POp(dist.isend, full(1.0), 1 - rank), dist.P2POp(dist.irecv, full(0.0), 1 - rank)]
    ),
}

UNEVEN = [name for name in ISSUES if "uneven" in name]


def start(rank: int) -> None:
    """Create the communicator, and forget the memory that this takes."""
    torch.cuda.set_device(rank)
    for peer in (0, 1):  # those of sends are created by the first send
        cfd.broadcast(full(1.0), src=peer).wait(timeout=LONG)
    cfd.batch_isend_irecv(
        [dist.P2POp(dist.isend, full(1.0), 1 - rank), dist.P2POp(dist.irecv, full(0.0), 1 - rank)]
    ).wait(timeout=LONG)
    (cfd.send(full(1.0), dst=1) if rank == 0 else cfd.recv(full(0.0), src=0)).wait(timeout=LONG)
    gc.collect()
    torch.cuda.synchronize()


def others() -> list[Tensor]:
    """Fill new tensors, whose blocks are those of the operation if they are free."""
    return [full(-7.0, size) for size in (FLOATS, 2 * FLOATS, 3 * FLOATS, 4 * FLOATS, 6 * FLOATS) for _ in range(2)]


def drop_in_flight(rank: int) -> dict[str, str]:
    """Drop each future of rank 0 while its peer is not there; return what that does to other tensors."""
    start(rank)
    wrong: dict[str, str] = {}
    for name, issue in ISSUES.items():
        for how in ("dropped", "consumed on another stream"):
            if rank == 1:
                meet(f"{name} {how}", rank, (0, 1))
                issue(rank).wait(timeout=LONG)
                continue
            pointers.clear()
            future = issue(rank)
            used = set(pointers)
            if how != "dropped":
                child = future.then(lambda f: None)  # on a stream of the pool, which waits for the operation
                del child
            del future
            strangers = others()
            if used & {tensor.data_ptr() for tensor in strangers}:
                wrong[f"{name}, {how}"] = "the memory is given away"
            meet(f"{name} {how}", rank, (0, 1))
            torch.cuda.synchronize()
            if not all(tensor.eq(-7.0).all() for tensor in strangers):
                wrong[f"{name}, {how}"] = "another tensor is overwritten"
            del strangers
    return wrong


def wait_on_another_stream(future: CUDAFuture[Any]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        future.wait(non_blocking=True)
    stream.synchronize()


# The ways to use a future until its device work has finished.
def wait_for_a_callback(future: CUDAFuture[Any]) -> None:
    """Wait for a callback, and for the next one in its queue: the thread keeps the parent a moment longer."""
    future.then(lambda f: None).wait(timeout=LONG)
    CUDAFuture.completed(None).then(lambda f: None, executor=cfd.ProcessGroup().queue).wait(timeout=LONG)


USES: dict[str, Callable[[CUDAFuture[Any]], Any]] = {
    "wait": lambda future: future.wait(timeout=LONG),
    "gather": lambda future: gather(future, future).wait(timeout=LONG),
    "a callback": wait_for_a_callback,
    "a wait on another stream": wait_on_another_stream,
    "value": lambda future: future.value(),
    "nothing": lambda future: None,
}


def wait_for_each(rank: int) -> dict[str, int]:
    """Use each future in each way and drop it; return the bytes that stay allocated."""
    start(rank)
    left: dict[str, int] = {}
    for name, issue in ISSUES.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        issue(rank).wait(non_blocking=True, timeout=LONG)
        if (after := torch.cuda.memory_allocated()) != before:
            left[f"{name}, a non-blocking wait"] = after - before
        for how, use in USES.items():
            torch.cuda.synchronize()
            future = issue(rank)
            use(future)
            torch.cuda.synchronize()  # "value" and "nothing" do not wait
            del future
            if (after := torch.cuda.memory_allocated()) != before:
                left[f"{name}, {how}"] = after - before
    return left


def ask_while_capturing(rank: int) -> list[str]:
    """Ask a finished operation, and drop another, inside a capture; return the errors of the capture."""
    start(rank)
    x = full(1.0)
    errors: list[str] = []
    for mode in ("global", "relaxed"):
        asked, dropped = cfd.all_reduce(full(1.0)), cfd.all_reduce(full(1.0))
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                x.add_(1)
                assert asked.ready()
                del dropped
        except RuntimeError as error:
            errors.append(f"{mode}: {error}")
        meet(f"asked {mode}", rank, (0, 1))
    return errors


def capture_each(rank: int) -> dict[str, str]:
    """Capture each operation on tensors that are dropped at once; return what other captured work gets of them."""
    start(rank)
    wrong: dict[str, str] = {}
    for name, issue in ISSUES.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pointers.clear()
            future = issue(rank)
            used = set(pointers)
            strangers = others()
            if used & {tensor.data_ptr() for tensor in strangers}:
                wrong[name] = "the memory is given away"
            future.wait(non_blocking=True)
        del future, strangers
        meet(f"captured {name}", rank, (0, 1))
    return wrong


def meet_late(rank: int) -> dict[str, list[float]]:
    """Issue the operations of uneven sizes before the peer does; return the values of their outputs."""
    start(rank)
    values: dict[str, list[float]] = {}
    for name in UNEVEN:
        if rank == 1:
            meet(name, rank, (0, 1))
        future = ISSUES[name](rank)
        if rank == 0:
            assert not future.ready(), name
            with pytest.raises(TimeoutError):
                future.wait(timeout=0.0)
            meet(name, rank, (0, 1))
        value = future.wait(timeout=LONG)
        values[name] = sorted({x for t in (value if isinstance(value, list) else [value]) for x in t.tolist()})
    return values


def follow_coalesced(rank: int) -> list[float]:
    """Follow the Works that torch returns for coalesced batches, before the peer has come."""
    start(rank)
    device = torch.device("cuda", rank)

    def batch(kind: str, tensors: list[Tensor]) -> Any:
        if kind == "sends":
            ops = [dist.P2POp(dist.isend, tensors[0], 1 - rank), dist.P2POp(dist.irecv, tensors[1], 1 - rank)]
            return dist.batch_isend_irecv(ops)[0]
        with dist._coalescing_manager(device=device if kind != "fast" else None, async_ops=True) as manager:
            for tensor in tensors:
                if kind == "broadcasts":
                    dist.broadcast(tensor, 1, async_op=True)
                else:
                    dist.all_reduce(tensor, async_op=True)
        return manager.works[0]

    values: list[float] = []
    for kind in ("reductions", "fast", "broadcasts", "sends"):
        if rank == 1:
            meet(kind, rank, (0, 1))
        tensors = [full(rank + 1.0), full(rank + 1.0)]
        future = CUDAFuture.from_torch(batch(kind, tensors))
        if rank == 0:
            assert not future.ready(), kind
            meet(kind, rank, (0, 1))
        future.wait(timeout=LONG)
        values.append(tensors[1][-1].item())
    return values


def issue_while_coalescing(rank: int) -> None:
    """Issue each operation inside torch's coalescing manager."""
    start(rank)
    for issue in ISSUES.values():
        with (
            dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True),
            pytest.raises(InvalidStateError, match="inside torch's coalescing manager"),
        ):
            issue(rank)
    assert cfd.all_reduce(full(1.0)).wait(timeout=LONG)[0].item() == 2.0
