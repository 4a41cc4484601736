"""CUDAFUTURE_DEBUG=order: what two ranks give or ask for must fit, in messages, objects, options and split sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather
from cudafuture.distributed import CollectiveError
from cudafuture.testing import World
from support.comparison import ALL, Place, by_ours, compare, expect_common
from support.ranks import compare_order, run_ranks, short_group

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("failures")]

LONG = 60.0  # seconds; much more than anything takes
Call = Callable[[Any], CUDAFuture[Any]]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def batch(group: Any, function: Any, *tensors: torch.Tensor) -> CUDAFuture[Any]:
    peer = 1 - group.rank()
    ops = [dist.P2POp(function, t, group=group.group, group_peer=peer) for t in tensors]
    return cfd.batch_isend_irecv(ops)


MESSAGES: dict[str, tuple[Call, Call]] = {
    "send float32[2] | recv float32[4]": (lambda g: g.send(ones(2), 1), lambda g: g.recv(ones(4), 0)),
    "send int32[4] | recv float32[4]": (
        lambda g: g.isend(ones(4, dtype=torch.int32), group_dst=1),
        lambda g: g.irecv(ones(4), group_src=0),
    ),
    "recv float32[2, 2] | send float32[5]": (lambda g: g.recv(ones(2, 2), 1), lambda g: g.send(ones(5), 0)),
    "send float32[3] | recv float32[5]": (
        lambda g: cfd.send(ones(3), 1, g, tag=7),
        lambda g: cfd.recv(ones(5), 0, g, tag=7),
    ),
    "batch_isend_irecv float32[2] | batch_isend_irecv float32[3]": (
        lambda g: batch(g, dist.isend, ones(1), ones(2)),
        lambda g: batch(g, dist.irecv, ones(1), ones(3)),
    ),
    "send_object_list 2 objects | recv_object_list 3 objects": (
        lambda g: g.send_object_list([1, 2], 1),
        lambda g: g.recv_object_list([1, 2, 3], 0),
    ),
    "recv_object_list 1 object | send_object_list 2 objects": (
        lambda g: g.recv_object_list([1], 1, use_batch=True),
        lambda g: g.send_object_list([1, 2], 0, use_batch=True),
    ),
    "send float32[9] | recv float32[1]": (lambda g: g.send(ones(9), 1), lambda g: g.recv(ones(1), 0)),
}
OPTIONS: dict[str, tuple[Call, Call]] = {
    "with op=MAX | with the default options": (
        lambda g: g.all_reduce(ones(4), dist.ReduceOp.MAX),
        lambda g: g.all_reduce(ones(4)),
    ),
    "with op=MIN | with op=PRODUCT": (
        lambda g: g.all_reduce_coalesced([ones(1)], dist.ReduceOp(dist.ReduceOp.MIN)),
        lambda g: g.all_reduce_coalesced([ones(1)], dist.ReduceOp.PRODUCT),
    ),
    "with group_dst=0 | with group_dst=1": (lambda g: g.reduce(ones(4), 0), lambda g: g.reduce(ones(4), 1)),
    "with group_src=0 | with group_src=1": (
        lambda g: g.broadcast(ones(4), 0),
        lambda g: g.broadcast(ones(4), group_src=1),
    ),
    "gives float32[3] to rank 1 | takes float32[2] from rank 0": (
        lambda g: g.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3]),
        lambda g: g.all_to_all_single(ones(4), ones(4), [2, 2], [3, 1]),
    ),
    "float32[2] | int64[2]": (
        lambda g: g.all_gather([ones(2), ones(2)], ones(2)),
        lambda g: g.all_gather([ones(2, dtype=torch.int64) for _ in range(2)], ones(2, dtype=torch.int64)),
    ),
    "takes float32[4] from rank 1 | gives float32[2] to rank 0": (
        lambda g: g.gather(ones(4), [ones(4), ones(4)]),
        lambda g: g.gather(ones(2)),
    ),
    "gives float32[4] to rank 1 | takes float32[2, 3] from rank 0": (
        lambda g: g.scatter(ones(4), [ones(4), ones(4)]),
        lambda g: g.scatter(ones(2, 3)),
    ),
    "takes float32[1] from rank 1 | gives float32[3] to rank 0": (
        lambda g: g.gather_single(ones(1), ones(2)),
        lambda g: g.gather_single(ones(3)),
    ),
    "all_gather_object at | broadcast_object_list of 1 object at": (
        lambda g: g.all_gather_object([None, None], 1),
        lambda g: g.broadcast_object_list([1]),
    ),
    "broadcast_object_list of 2 objects at | broadcast_object_list of 3 objects at": (
        lambda g: g.broadcast_object_list([1, 2]),
        lambda g: g.broadcast_object_list([1, 2, 3]),
    ),
    "gather_object at | scatter_object_list at": (
        lambda g: g.gather_object(1, [None, None]),
        lambda g: g.scatter_object_list([None]),
    ),
}


CASES = {"messages": MESSAGES, "options": OPTIONS}


def differ(rank: int, kind: str) -> None:
    for case, calls in CASES[kind].items():
        group = short_group()
        with compare_order():
            error = calls[rank](group).exception(timeout=LONG)
        assert isinstance(error, CollectiveError), f"{case}: {error!r}"
        mine, other = case.split(" | ") if rank == 0 else reversed(case.split(" | "))
        for who, what in ((rank, mine), (1 - rank, other)):
            line = next((line for line in str(error).splitlines() if f"rank {who}: " in line), "")
            assert what in line, f"{case}: {error}"
            assert Path(__file__).name in line


@pytest.mark.parametrize("kind", CASES)
def test_mismatched_operations_name_both_sites(kind: str) -> None:
    run_ranks(2, differ, kind)


class Unloadable:
    """An object that can be pickled, but raises when it is unpickled."""

    def __setstate__(self, _: object) -> None:
        raise ArithmeticError("not loaded")

    def __getstate__(self) -> int:
        return 1


def differ_from_any_rank(rank: int) -> None:
    group = short_group()
    with compare_order():
        if rank == 0:
            for size in (2, 3):
                group.send(ones(size), 1).wait(timeout=LONG)
            for objects in ([1, 2], [Unloadable()], [3]):
                group.send_object_list(objects, 1).wait(timeout=LONG)
            return
        assert group.recv(ones(2)).wait(timeout=LONG).source == 0
        error = group.recv(ones(5)).exception(timeout=LONG)
        assert isinstance(error, CollectiveError)
        assert "message #1 from rank 0 to rank 1" in str(error)
        error = group.recv_object_list([None]).exception(timeout=LONG)
        assert str(error).count(f"{Path(__file__).name}:") == 2, error
        with pytest.raises(ArithmeticError, match="not loaded"):
            group.recv_object_list([None]).wait(timeout=LONG)
        assert group.recv_object_list([None], 0).wait(timeout=LONG) == 0  # message #2, as the sender says


def test_recv_from_any_is_compared_late() -> None:
    run_ranks(2, differ_from_any_rank)


@pytest.mark.world(2)
def test_tensors_of_same_size_fit(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        mine, into = (ones(4), ones(2, 2)) if rank else (ones(2, 2), ones(4))
        parts = [torch.empty_like(mine) for _ in range(2)]
        group = cfd.ProcessGroup()
        with compare_order():
            futures: list[CUDAFuture[Any]] = [
                group.send(mine, 1) if rank == 0 else group.recv(into.view(4, 1), 0),
                group.all_reduce(mine),
                group.all_reduce_coalesced([mine.clone()]),
                group.broadcast(mine.clone(), 0),
                group.reduce(mine.clone(), 0),
                group.all_to_all_single(into.clone(), mine.clone(), [len(into) // 2] * 2, [len(mine) // 2] * 2),
                group.all_to_all_single(mine.clone(), mine.clone()),
                group.all_gather(parts, mine.clone()),
                group.gather(mine.clone(), None if rank else parts),
                group.gather_single(mine.clone(), None if rank else ones(8)),
                group.scatter(mine.clone(), None if rank else parts),
                group.all_gather_into_tensor(ones(8) if mine.dim() == 1 else ones(4, 2), mine.clone()),
                group.reduce_scatter(mine.clone(), parts),
            ]
            gather(*futures).wait(timeout=LONG)

    world.run(run)


@pytest.mark.world(2)
def test_matching_operations_are_not_reported(world: World) -> None:
    def run() -> None:
        rank, peer, pg = dist.get_rank(), 1 - dist.get_rank(), cfd.ProcessGroup()
        taken = compare(Place(root=1), ALL, [torch.float32, torch.complex64], ours)
        expect_common(taken, ALL, [torch.float32])
        with compare_order():
            op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp(dist.ReduceOp.MAX)
            assert cfd.all_reduce(ones(1) * rank, op).wait(timeout=LONG).item() == 1
            everyone: list[Any] = [None, None]
            futures: list[CUDAFuture[Any]] = [cfd.all_gather_object(everyone, rank) for _ in range(3)]
            futures += [cfd.broadcast_object_list([rank, 2], 1), cfd.gather_object(rank, [0, 0] if rank else None, 1)]
            futures.append(cfd.scatter_object_list([None], [1, 2] if rank == 0 else None))
            chain = cfd.all_reduce(ones(1)).then_async(lambda _: cfd.all_gather_object([None, None], rank))
            futures += [chain.then_async(lambda _: cfd.barrier()), cfd.monitored_barrier()]
            for tag, length in enumerate((4, 2, 3)):
                objects: list[Any] = [None] * length
                futures += [cfd.recv(ones(length), peer, tag=tag), cfd.recv_object_list(objects, peer)]
                futures += [pg.isend(ones(length), peer, tag=tag), pg.send_object_list([rank] * length, peer)]
                futures += [batch(pg, dist.irecv, ones(1), ones(2)), batch(pg, dist.isend, ones(1), ones(2))]
            gather(*futures).wait(timeout=LONG)
            mixed = [cfd.recv(ones(n), None if n % 2 else peer, tag=9) for n in (3, 3, 3)]
            gather(*mixed, *[cfd.send(ones(3), peer, tag=9) for _ in mixed]).wait(timeout=LONG)
            # torch's own functions write no entries
            received, work = cfd.recv(ones(2), peer, tag=11), dist.isend(tensor := ones(2), peer, tag=11)
            assert work is not None
            work.wait()
            sent, work = cfd.send(tensor, peer, tag=12), dist.irecv(ones(2), peer, tag=12)
            assert work is not None
            work.wait()
            gather(received, sent).wait(timeout=LONG)

    world.run(run)


@pytest.mark.world(2)
def test_exchangeable_recvs_are_not_compared(world: World) -> None:
    def run() -> None:
        group = short_group()
        with compare_order():
            recvs = [cfd.recv(ones(5), src, group) for src in (0, None)] if group.rank() == 1 else []
            dist.barrier(group=group.group)  # Gloo accepts the smaller messages
            gather(*recvs, *[cfd.send(ones(3), 1, group) for _ in range(2 - len(recvs))]).wait(timeout=LONG)

    world.run(run)


REFUSED: dict[str, tuple[Call, Call]] = {  # a refused call of one rank, and that of the other rank, which waits
    "not a tensor": (lambda g: cfd.send(3, 1, g), lambda g: cfd.recv(ones(3), 0, g)),  # type: ignore[arg-type]
    "no tag": (lambda g: cfd.send(ones(9), 1, g, tag="x"), lambda g: cfd.recv(ones(3), 0, g)),  # type: ignore[arg-type]
    "recv of no tensor": (lambda g: cfd.recv([1], 1, g), lambda g: cfd.send(ones(3), 0, g)),  # type: ignore[arg-type]
    "sparse": (lambda g: cfd.send(ones(5).to_sparse(), 1, g), lambda g: cfd.recv(ones(3), 0, g)),
    "sparse recv": (lambda g: cfd.recv(ones(5).to_sparse(), 1, g), lambda g: cfd.send(ones(3), 0, g)),
    "batch": (lambda g: batch(g, dist.isend, ones(5).to_sparse(), ones(4)), lambda g: cfd.recv(ones(3), 0, g)),
    "batch to itself": (
        lambda g: cfd.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones(7), group=g.group, group_peer=peer) for peer in (1, 1, 0)]
        ),
        lambda g: cfd.recv(ones(3), 0, g),
    ),
}


@pytest.mark.world(2)
def test_refused_message_is_not_compared(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        for case, (refused, fits) in REFUSED.items():
            group = short_group()
            with compare_order():
                pending = fits(group) if rank == 1 else None
                dist.barrier(group=group.group)
                if rank == 0:
                    with pytest.raises((TypeError, ValueError, CollectiveError)):
                        refused(group).wait(timeout=LONG)
                for _ in range(2):  # the first ends after the refusal; before the second, `pending` was compared
                    seen = cfd.recv(ones(1), 0, group, tag=1) if rank else cfd.send(ones(1), 1, group, tag=1)
                    seen.wait(timeout=LONG)
                if rank == 0:
                    is_recv = "recv" in case
                    pending = cfd.recv(ones(3), 1, group) if is_recv else cfd.send(ones(3), 1, group)
                assert pending is not None
                assert pending.exception(timeout=LONG) is None, case

    world.run(run)


def ours(case: Any) -> CUDAFuture[Any]:
    with compare_order():
        return by_ours(case)
