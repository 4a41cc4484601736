"""Types that a type checker infers for the collectives. Read by mypy, never run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from typing_extensions import assert_type, reveal_type

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture

Tensor = torch.Tensor


def reducing(t: Tensor, ts: list[Tensor], group: dist.ProcessGroup, pg: cfd.ProcessGroup) -> None:
    reveal_type(cfd.all_reduce(t))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.all_reduce(t, dist.ReduceOp.MAX, group).wait())  # R: Tensor
    reveal_type(cfd.all_reduce(t, group=pg).then(lambda f: f.value().shape))  # R: CUDAFuture[Size]
    reveal_type(cfd.all_reduce_coalesced(ts))  # R: CUDAFuture[list[Tensor]]
    reveal_type(cfd.reduce(t, 0))  # R: CUDAFuture[Tensor | None]
    reveal_type(cfd.reduce(t, group_dst=0))  # R: CUDAFuture[Tensor | None]
    reveal_type(cfd.reduce_scatter(t, ts))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.reduce_scatter_tensor(t, t))  # R: CUDAFuture[Tensor]


def moving(t: Tensor, ts: list[Tensor]) -> None:
    reveal_type(cfd.broadcast(t, src=0))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.all_gather(ts, t))  # R: CUDAFuture[list[Tensor]]
    reveal_type(cfd.all_gather_coalesced([ts], ts))  # R: CUDAFuture[list[list[Tensor]]]
    reveal_type(cfd.all_gather_into_tensor(t, t))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.all_gather_single(t, t))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.gather_single(t, t, dst=0))  # R: CUDAFuture[Tensor | None]
    reveal_type(cfd.gather(t, ts, dst=0))  # R: CUDAFuture[list[Tensor] | None]
    reveal_type(cfd.scatter(t, None, group_src=0))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.all_to_all(ts, ts))  # R: CUDAFuture[list[Tensor]]
    reveal_type(cfd.all_to_all_single(t, t, [1, 2], [2, 1]))  # R: CUDAFuture[Tensor]
    reveal_type(cfd.barrier(timeout=timedelta(seconds=1)))  # R: CUDAFuture[None]


def objects(found: list[Any]) -> None:
    reveal_type(cfd.all_gather_object(found, 1))  # R: CUDAFuture[list[Any]]
    reveal_type(cfd.broadcast_object_list(found, 0))  # R: CUDAFuture[list[Any]]
    reveal_type(cfd.scatter_object_list(found, None, 0))  # R: CUDAFuture[list[Any]]
    reveal_type(cfd.gather_object(1, found))  # R: CUDAFuture[list[Any] | None]
    reveal_type(cfd.send_object_list(found, 1))  # R: CUDAFuture[None]
    reveal_type(cfd.recv_object_list(found))  # R: CUDAFuture[int]
    reveal_type(cfd.monitored_barrier(wait_all_ranks=True))  # R: CUDAFuture[None]


def point_to_point(t: Tensor, ops: list[dist.P2POp]) -> None:
    reveal_type(cfd.send(t, 1))  # R: CUDAFuture[None]
    reveal_type(cfd.isend(t, group_dst=1))  # R: CUDAFuture[None]
    assert_type(cfd.recv(t), CUDAFuture[cfd.Received])
    reveal_type(cfd.irecv(t, 1, tag=3).wait().source)  # R: int
    reveal_type(cfd.recv(t).value().tensor)  # R: Tensor
    assert_type(cfd.batch_isend_irecv(ops), CUDAFuture[list[cfd.Received | None]])


def groups(pg: cfd.ProcessGroup) -> None:
    reveal_type(cfd.new_group([0, 1]))  # R: ProcessGroup
    reveal_type(pg.new_group(range(2), timedelta(seconds=1)))  # R: ProcessGroup
    reveal_type(pg.split([[0], (1, 2)]))  # R: ProcessGroup
    reveal_type((pg.rank(), pg.ranks()))  # R: tuple[int, list[int]]
    reveal_type(pg.queue)  # R: HostExecutor
    reveal_type(CUDAFuture.completed(1).then(lambda f: f.value() / 2, executor=pg.queue))  # R: CUDAFuture[float]


def methods(pg: cfd.ProcessGroup, t: Tensor, ts: list[Tensor], found: list[Any], ops: list[dist.P2POp]) -> None:
    """Check that each method has the type of its function."""
    assert_type(pg.all_reduce(t), CUDAFuture[Tensor])
    assert_type(pg.all_reduce_coalesced(ts), CUDAFuture[list[Tensor]])
    assert_type(pg.broadcast(t, 0), CUDAFuture[Tensor])
    assert_type(pg.reduce(t, 0), CUDAFuture[Tensor | None])
    assert_type(pg.all_gather(ts, t), CUDAFuture[list[Tensor]])
    assert_type(pg.all_gather_coalesced([ts], ts), CUDAFuture[list[list[Tensor]]])
    assert_type(pg.all_gather_into_tensor(t, t), CUDAFuture[Tensor])
    assert_type(pg.gather_single(t, t), CUDAFuture[Tensor | None])
    assert_type(pg.reduce_scatter_single(t, t), CUDAFuture[Tensor])
    assert_type(pg.gather(t, ts), CUDAFuture[list[Tensor] | None])
    assert_type(pg.scatter(t, ts), CUDAFuture[Tensor])
    assert_type(pg.reduce_scatter(t, ts), CUDAFuture[Tensor])
    assert_type(pg.reduce_scatter_tensor(t, t), CUDAFuture[Tensor])
    assert_type(pg.all_to_all(ts, ts), CUDAFuture[list[Tensor]])
    assert_type(pg.all_to_all_single(t, t), CUDAFuture[Tensor])
    assert_type(pg.barrier(), CUDAFuture[None])
    assert_type(pg.send(t, 0), CUDAFuture[None])
    assert_type(pg.isend(t, 0), CUDAFuture[None])
    assert_type(pg.recv(t), CUDAFuture[cfd.Received])
    assert_type(pg.irecv(t), CUDAFuture[cfd.Received])
    assert_type(pg.batch_isend_irecv(ops), CUDAFuture[list[cfd.Received | None]])
    assert_type(pg.all_gather_object(found, 1), CUDAFuture[list[Any]])
    assert_type(pg.broadcast_object_list(found), CUDAFuture[list[Any]])
    assert_type(pg.scatter_object_list(found), CUDAFuture[list[Any]])
    assert_type(pg.gather_object(1), CUDAFuture[list[Any] | None])
    assert_type(pg.send_object_list(found, 1), CUDAFuture[None])
    assert_type(pg.recv_object_list(found), CUDAFuture[int])
    assert_type(pg.monitored_barrier(), CUDAFuture[None])


def hooks() -> None:
    def sum_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> CUDAFuture[Tensor]:
        return cfd.all_reduce(bucket.buffer(), group=group)

    reveal_type(cfd.ddp_comm_hook(sum_bucket))  # R: def (ProcessGroup, GradBucket) -> Future[Tensor]
