"""send, recv and batches of them, next to torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather
from cudafuture.testing import World
from support.comparison import DTYPES, TIMEOUT, bits, values
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

SIZES = pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.world(n)) for n in (2, 3, 4)])


def torch_sends(dtype: torch.dtype) -> bool:
    """Ask torch to send a tensor from rank 0 to rank 1; return False if it refuses, which both ranks do."""
    tensor = values(dtype, 5, dist.get_rank())
    try:
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
            assert torch.equal(bits(tensor), bits(values(dtype, 5, 0)))
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


@pytest.mark.world(2)
def test_every_torch_dtype_arrives(world: World) -> None:
    def run() -> list[torch.dtype]:
        rank, sent = dist.get_rank(), []
        for dtype in DTYPES:
            taken = torch_sends(dtype)
            tensor = values(dtype, 5, rank)
            future: CUDAFuture[Any] = cfd.send(tensor, 1) if rank == 0 else cfd.recv(tensor, 0)
            error = future.exception(timeout=TIMEOUT)
            assert isinstance(error, type(None) if taken else cfd.CollectiveError), f"{dtype}: {error!r}"
            if taken:
                sent.append(dtype)
                assert torch.equal(bits(tensor), bits(values(dtype, 5, 0))), dtype
        return sent

    for sent in world.run(run):
        assert {torch.float32, torch.bool, torch.complex64, torch.int64} <= set(sent)


@SIZES
def test_all_pairs_send_by_every_name(world: World, n: int) -> None:
    def run() -> None:
        rank, size, pg = dist.get_rank(), dist.get_world_size(), cfd.ProcessGroup()
        others = [r for r in range(size) if r != rank]
        sends: list[Any] = [cfd.send, cfd.isend, pg.send, pg.isend]
        recvs: list[Any] = [cfd.irecv, pg.irecv, cfd.recv, pg.recv]
        for tag, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
            for source, destination in (("src", "dst"), ("group_src", "group_dst")):
                inbox = [torch.zeros(2) for _ in others]
                futures = [recv(t, tag=tag, **{source: r}) for t, r in zip(inbox, others, strict=True)]
                out = [send(torch.full((2,), rank * 10.0 + r), tag=tag, **{destination: r}) for r in others]
                assert [f.wait(timeout=TIMEOUT) for f in out] == [None] * len(others)
                for future, tensor, r in zip(futures, inbox, others, strict=True):
                    received = future.wait(timeout=TIMEOUT)
                    assert isinstance(received, cfd.Received)
                    assert (received.tensor is tensor, received.source) == (True, r)
                    assert tensor.tolist() == [r * 10.0 + rank] * 2

    world.run(run)


@pytest.mark.world(4)
def test_recv_returns_global_sender_rank(world: World) -> None:
    def run(ranks: list[int] | None) -> None:
        group = dist.new_group(ranks)
        rank, members = dist.get_rank(), ranks or [0, 1, 2, 3]
        receiver, senders = members[-1], members[:-1]
        if rank not in members:
            assert cfd.recv(torch.zeros(1), group=group).wait() is None
            assert cfd.send(torch.zeros(1), 0, group).wait() is None
        elif rank == receiver:
            tensors = [torch.zeros(1) for _ in range(6 * len(senders))]
            for given in (group, cfd.ProcessGroup(group)):
                futures = [cfd.recv(t, group=given) for t in tensors]
                received = gather(*futures).wait(timeout=TIMEOUT)
                assert all(r.tensor is t for r, t in zip(received, tensors, strict=True))
                assert all(r.source == int(r.tensor) for r in received)
                assert sorted(r.source for r in received) == sorted(senders * 6)
                cfd.barrier(group).wait(timeout=TIMEOUT)
        else:
            for _ in range(2):
                mine = torch.full((1,), float(rank))
                gather(*[cfd.send(mine, receiver, group) for _ in range(6)]).wait(timeout=TIMEOUT)
                cfd.barrier(group).wait(timeout=TIMEOUT)

    world.run(run, None)
    world.run(run, [1, 2, 3])


@pytest.mark.soak
@pytest.mark.world(2)
def test_any_number_may_be_pending(world: World) -> None:
    count = soak_count(2000)  # 200 in every run

    def run() -> None:
        rank = dist.get_rank()
        tensors = [torch.zeros(3) for _ in range(count)]
        if rank == 0:
            # The last ten do not say from whom.
            futures = [cfd.recv(t, 1, tag=tag) for tag, t in enumerate(tensors[10:])]
            futures += [cfd.recv(t, tag=count) for t in tensors[:10]]
            assert not any(f.done() or f.cancel() for f in futures)
            cfd.send(torch.ones(1), 1, tag=count + 1).wait(timeout=TIMEOUT)
            received = gather(*futures).wait(timeout=TIMEOUT)
            assert [int(r.tensor[0]) for r in received] == [*range(count - 10), *range(10)]
            assert {r.source for r in received} == {1}
        else:
            dist.recv(torch.zeros(1), 0, tag=count + 1)
            out = [cfd.send(torch.full((3,), float(tag)), 0, tag=tag) for tag in reversed(range(count - 10))]
            out += [cfd.send(torch.full((3,), float(i)), 0, tag=count) for i in range(10)]
            gather(*out).wait(timeout=TIMEOUT)

    world.run(run)


def around(group: Any, ranks: list[int], name: str) -> None:
    """Send a tensor to the next rank of a group, get one from the one before, in one batch, and in another order."""
    rank, size = dist.get_rank(group), len(ranks)
    after, before = (rank + 1) % size, (rank - 1) % size
    peers = (after, before) if name == "group_peer" else (ranks[after], ranks[before])
    for i, batch in enumerate((cfd.batch_isend_irecv, cfd.ProcessGroup(group).batch_isend_irecv)):
        tensor = torch.zeros(3)
        sending = dist.P2POp(dist.isend, torch.full((3,), float(ranks[rank])), group=group, **{name: peers[0]})
        receiving = dist.P2POp(dist.irecv, tensor, group=group, **{name: peers[1]})
        values = batch([sending, receiving][:: -1 if i else 1]).wait(timeout=TIMEOUT)
        nothing, received = values[:: -1 if i else 1]
        assert nothing is None
        assert received is not None
        assert (received.tensor is tensor, received.source) == (True, ranks[before])
        assert tensor.tolist() == [float(ranks[before])] * 3


@pytest.mark.world(4)
def test_batch_has_value_per_operation(world: World) -> None:
    def run() -> None:
        for ranks in ([0, 1, 2, 3], [1, 2, 3], [1, 3]):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                around(group, ranks, "peer")
                around(group, ranks, "group_peer")
        many = [dist.P2POp(dist.isend, torch.ones(1), r) for r in range(4) if r != dist.get_rank()] * 5
        many += [dist.P2POp(dist.irecv, torch.zeros(1), op.peer) for op in many]
        values = cfd.batch_isend_irecv(tuple(many)).wait(timeout=TIMEOUT)
        assert values[:15] == [None] * 15
        assert [(v.tensor.item(), v.source) for v in values[15:] if v] == [(1.0, op.peer) for op in many[15:]]

    world.run(run)


@pytest.mark.world(2)
def test_wrong_arguments_are_refused(world: World) -> None:
    def run() -> None:
        t, me, peer = torch.ones(2), dist.get_rank(), 1 - dist.get_rank()
        group = dist.new_group([1])
        p2p = dist.P2POp(dist.isend, t, peer)
        for name, root in (("send", "dst"), ("recv", "src")):
            for function in (getattr(cfd, name), getattr(cfd, f"i{name}"), getattr(cfd.ProcessGroup(), name)):
                expect_refusal(function, 3, peer)
                expect_refusal(function, [t], peer)
                expect_refusal(function, t, me)  # to oneself
                expect_refusal(function, t, 2)
                expect_refusal(function, t, **{root: peer, f"group_{root}": peer})
                expect_refusal(function, t, **{f"group_{root}": 2})
            if me == 1:
                expect_refusal(getattr(cfd, name), t, 0, group)  # not in the group
        wrong: Any
        for wrong in ("a", 1.0, [peer]):
            for tensors, function, root in RANKS:
                for name in (root, f"group_{root}"):
                    with pytest.raises(TypeError, match=f"^{name} is an int, not "):
                        function(*tensors(t), **{name: wrong})
            for function in (cfd.send, cfd.recv):
                with pytest.raises(TypeError, match=r"^tag is an int, not "):
                    function(t, peer, tag=wrong)
            with pytest.raises(TypeError, match=r"^tag is an int, not "):
                cfd.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, tag=wrong)])
        expect_refusal(cfd.send, t)
        expect_refusal(cfd.send, torch.ones(4)[::2], peer)
        expect_refusal(cfd.recv, torch.ones(4)[::2], peer)
        expect_refusal(cfd.batch_isend_irecv, [])
        expect_refusal(cfd.batch_isend_irecv, [3])
        expect_refusal(cfd.batch_isend_irecv, [p2p, t])
        expect_refusal(cfd.batch_isend_irecv, p2p)
        if me == 1:
            expect_refusal(cfd.batch_isend_irecv, [p2p, dist.P2POp(dist.isend, t, group=group, group_peer=0)])

    world.run(run)


RANKS: list[tuple[Any, Any, str]] = [  # arguments, function, and what the rank is called
    (lambda t: (t,), cfd.send, "dst"),
    (lambda t: (t,), cfd.recv, "src"),
    (lambda t: ([t],), cfd.send_object_list, "dst"),
    (lambda t: ([t],), cfd.recv_object_list, "src"),
    (lambda t: (t,), cfd.broadcast, "src"),
    (lambda t: (t,), cfd.reduce, "dst"),
    (lambda t: (t,), cfd.gather, "dst"),
    (lambda t: (t,), cfd.gather_single, "dst"),
    (lambda t: (t,), cfd.scatter, "src"),
    (lambda t: ([t],), cfd.broadcast_object_list, "src"),
    (lambda t: ([t],), cfd.scatter_object_list, "src"),
    (lambda t: (t,), cfd.gather_object, "dst"),
]


def expect_refusal(function: Any, *args: Any, **kwargs: Any) -> None:
    """Check that a call raises at once, or returns a future that fails at once."""
    try:
        error = function(*args, **kwargs).exception(timeout=TIMEOUT)
    except (TypeError, ValueError):
        return
    assert isinstance(error, cfd.CollectiveError), f"{function.__name__}{args}{kwargs} comes to {error!r}"
