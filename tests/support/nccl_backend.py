"""Functions of ranks with the backend "cudafuture" over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError
from support.nccl_ranks import LONG
from support.ranks import compare_order


def _tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((4,), value, device="cuda")


def use_futures(rank: int, size: int) -> None:
    """Follow Works over NCCL and over Gloo on one group."""
    on_device, on_host = _tensor(), torch.ones(4)
    works = [dist.all_reduce(on_device, async_op=True), dist.all_reduce(on_host, async_op=True)]
    for work, tensor in zip(works, (on_device, on_host), strict=True):
        assert isinstance(work, cfd.FutureWork)
        assert work.future.wait(timeout=LONG) is tensor
        assert tensor.tolist() == [float(size)] * 4
    assert dist.all_reduce(_tensor()) is None  # not asynchronous
    chained = works[0].then_async(lambda f: dist.all_reduce(f.value().clone(), async_op=True).future)
    assert chained.wait(timeout=LONG).tolist() == [float(size * size)] * 4
    assert cfd.all_reduce(_tensor()).wait(timeout=LONG).tolist() == [float(size)] * 4
    dist.barrier()


def follow_on_another_stream(rank: int, size: int) -> None:
    """Ask for the future of an operation that another stream issued, after its tensor was dropped."""
    with torch.cuda.stream(torch.cuda.Stream()):
        work = dist.all_reduce(_tensor(), async_op=True)
    assert work.future.wait(timeout=LONG).tolist() == [float(size)] * 4
    with torch.cuda.stream(torch.cuda.Stream()):
        total = dist.all_reduce(_tensor(), async_op=True).then(lambda f: f.value() + 1)
    assert total.wait(timeout=LONG).tolist() == [float(size + 1)] * 4


def compare(rank: int, size: int) -> None:
    """Compare what the ranks issue, with Works and without."""
    with compare_order():
        assert dist.all_reduce(_tensor()) is None
        total = _tensor()
        dist.all_reduce(total, async_op=True).wait()
        assert total.tolist() == [float(size)] * 4
        with pytest.raises(CollectiveError, match=r"rank 1: all_reduce .*nccl_backend.py.*, with op=MAX"):
            dist.all_reduce(_tensor(), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def coalesce(rank: int, size: int) -> None:
    """Issue operations that start together: one Work with a future at their end."""
    group: Any = dist.group.WORLD
    peer, before = (rank + 1) % size, (rank - 1) % size
    sent, received = _tensor(float(rank)), _tensor()
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, before)])
    assert isinstance(work, cfd.FutureWork)
    work.future.wait(timeout=LONG)
    assert received.tolist() == [float(before)] * 4
    tensors = [_tensor(), _tensor(2.0)]
    with dist._coalescing_manager(group, device=torch.device("cuda", rank), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    for work in manager.works:
        work.wait()
    torch.cuda.synchronize()
    assert [t[0].item() for t in tensors] == [float(size), 2.0 * size]
    host, into = torch.full((1,), float(rank)), torch.zeros(1)  # Gloo does not coalesce, and is in the same group
    messages = dist.batch_isend_irecv([dist.P2POp(dist.isend, host, peer), dist.P2POp(dist.irecv, into, before)])
    for work in messages:
        work.wait()
    assert into.item() == float(before)


def make_groups(rank: int, size: int) -> None:
    """Make groups below a default group that is bound to a device: torch splits them from its backend."""
    group: Any = dist.group.WORLD
    assert group.bound_device_id == torch.device("cuda", rank)
    backend = group._get_backend(torch.device("cuda"))
    assert isinstance(backend.inner("cuda"), dist.ProcessGroupNCCL)
    assert backend.inner("cuda").bound_device_id == torch.device("cuda", rank)
    assert backend.uid == backend.inner("cuda").uid  # a method that only NCCL's backend has
    for name in ("nccl", "cudafuture"):
        every = dist.new_group(backend=name)
        tensor = _tensor()
        dist.all_reduce(tensor, group=every)
        assert tensor.tolist() == [float(size)] * 4
        some = dist.new_group([0, 1], backend=name)
        if rank < 2:
            dist.all_reduce(tensor, group=some)
            assert tensor.tolist() == [2.0 * size] * 4
    part = dist.split_group(split_ranks=[[0, 1], [2]])
    for device, before in (("cuda", 1.0), ("cpu", 3.0)):
        tensor = torch.full((4,), before, device=device)
        dist.all_reduce(tensor, group=part)
        assert tensor.tolist() == [before * (2 if rank < 2 else 1)] * 4
    halves = cfd.ProcessGroup().new_group([0, 1]) if rank < 2 else None  # only its members call
    if halves is not None:
        assert halves.all_reduce(_tensor()).wait(timeout=LONG).tolist() == [2.0] * 4
    dist.barrier()


def own_options(rank: int, size: int) -> None:
    """Give NCCL's own options to a group of the backend."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    for given in (options, cfd.BackendOptions(cuda=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))):
        group: Any = dist.new_group(backend="cudafuture", pg_options=given)
        assert group._get_backend(torch.device("cuda")).inner("cuda").options.is_high_priority_stream
        future: CUDAFuture[torch.Tensor] = dist.all_reduce(_tensor(), group=group, async_op=True).future
        assert future.wait(timeout=LONG).tolist() == [float(size)] * 4
