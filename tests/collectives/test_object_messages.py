"""send_object_list and recv_object_list."""

from __future__ import annotations

import inspect
import os
import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import gather
from cudafuture.errors import TensorError
from cudafuture.testing import World
from support.comparison import TIMEOUT
from support.ranks import run_ranks

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(dist.send_object_list).parameters


def some_objects(rank: int, turn: int) -> list[Any]:
    """Return one object or more, of another size on every turn."""
    return [(rank, turn), *[{"text": "x" * 10 ** (turn % 6)}, None, Fraction(turn, 7)][: turn % 4]]


@pytest.mark.world(2)
def test_many_messages_fly_both_ways(world: World) -> None:
    def run() -> None:
        rank, pg = dist.get_rank(), cfd.ProcessGroup()
        peer = 1 - rank
        lists: list[list[Any]] = [[None] * len(some_objects(peer, turn)) for turn in range(24)]
        tensors = [torch.zeros(2) for _ in lists]
        received = [(cfd, pg)[turn % 2].recv_object_list(objects, peer) for turn, objects in enumerate(lists)]
        beside = [cfd.recv(tensor, peer) for tensor in tensors]
        assert not any(future.done() or future.cancel() for future in received)
        cfd.barrier().wait(timeout=TIMEOUT)
        sent = [(pg, cfd)[turn % 2].send_object_list(some_objects(rank, turn), peer) for turn in range(len(lists))]
        sent += [cfd.send(torch.full((2,), float(turn)), peer) for turn in range(len(lists))]
        assert gather(*received).wait(timeout=TIMEOUT) == [peer] * len(lists)
        assert gather(*sent).wait(timeout=TIMEOUT) == [None] * len(sent)
        gather(*beside).wait(timeout=TIMEOUT)
        assert lists == [some_objects(peer, turn) for turn in range(len(lists))]
        assert [t[1].item() for t in tensors] == [*range(len(lists))]

    world.run(run)


@pytest.mark.world(2)
def test_messages_spare_object_collectives(world: World) -> None:
    def run() -> None:
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        objects: list[Any] = [None]
        received = cfd.recv_object_list(objects, group_src=peer, use_batch=True)
        chain = received.then_async(lambda f: cfd.all_gather_object([None, None], (f.value(), objects[0])))
        assert cfd.all_gather_object([None, None], rank).wait(timeout=TIMEOUT) == [0, 1]
        cfd.send_object_list(["late"], group_dst=peer, use_batch=True).wait(timeout=TIMEOUT)
        assert chain.wait(timeout=TIMEOUT) == [(1, "late"), (0, "late")]

    world.run(run)


@pytest.mark.world(4)
def test_value_is_global_sender_rank(world: World) -> None:
    def run() -> None:
        group, rank = dist.new_group([1, 2, 3]), dist.get_rank()
        if rank == 0:
            assert cfd.send_object_list([1], 1, group).wait(timeout=TIMEOUT) is None
            assert cfd.ProcessGroup(group).recv_object_list([None]).wait(timeout=TIMEOUT) is None
        elif rank == 3:
            lists: list[list[Any]] = [[None] for _ in range(8)]
            sources = gather(*[cfd.recv_object_list(one, group=group) for one in lists]).wait(timeout=TIMEOUT)
            assert [one[0] for one in lists] == sources
            assert sorted(sources) == [1] * 4 + [2] * 4
        else:
            gather(*[cfd.send_object_list([rank], group=group, group_dst=2) for _ in range(4)]).wait(timeout=TIMEOUT)

    world.run(run)


@pytest.mark.world(2)
def test_different_list_lengths_fail_receiver(world: World) -> None:
    def run() -> None:
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        objects: list[Any] = ["kept", "kept"]
        received = cfd.recv_object_list(objects, peer)
        cfd.send_object_list([1, 2, 3], peer).wait(timeout=TIMEOUT)
        with pytest.raises(cfd.CollectiveError, match=f"rank {peer} sent 3 objects, but the list here has 2"):
            received.wait(timeout=TIMEOUT)
        assert objects == ["kept", "kept"]
        received = cfd.recv_object_list(objects, peer)
        cfd.send_object_list([rank, "good"], peer).wait(timeout=TIMEOUT)
        assert (received.wait(timeout=TIMEOUT), objects) == (peer, [peer, "good"])

    world.run(run)


class Unpicklable:
    def __reduce__(self) -> str:
        raise ArithmeticError("it stays here")


@pytest.mark.world(2)
def test_wrong_arguments_are_refused(world: World) -> None:
    def run() -> None:
        rank, peer = dist.get_rank(), 1 - dist.get_rank()
        owners: list[Any] = [cfd, cfd.ProcessGroup()]
        for owner in owners:
            for function, root in ((owner.send_object_list, "dst"), (owner.recv_object_list, "src")):
                with pytest.raises(ValueError, match="object_list is empty"):
                    function([], peer)
                with pytest.raises(TypeError, match="object_list is a list"):
                    function(3, peer)
                with pytest.raises(ValueError, match=f"{root} is this rank itself"):
                    function([None], rank)
                for wrong in ({root: 2}, {f"group_{root}": -1}, {root: peer, f"group_{root}": peer}):
                    with pytest.raises(ValueError, match="rank"):
                        function([None], **wrong)
        with pytest.raises(ValueError, match="give dst"):
            cfd.send_object_list([1])
        with pytest.raises(ValueError, match="use_batch=True needs src or group_src"):
            cfd.recv_object_list([1], use_batch=True)
        freed = torch.ones(2)
        freed.untyped_storage().resize_(0)
        with pytest.raises(TensorError, match="freed or shrunk"):
            cfd.send_object_list([{"model": freed}], peer)
        assert isinstance(cfd.send_object_list([Unpicklable()], peer).exception(timeout=TIMEOUT), ArithmeticError)

    world.run(run)


@pytest.mark.world(2)
def test_weights_only_refuses_unsafe_objects(world: World) -> None:
    def run() -> None:
        peer, objects = 1 - dist.get_rank(), [None]
        if not HAS_WEIGHTS_ONLY:
            for function in (cfd.send_object_list, cfd.recv_object_list):
                with pytest.raises(ValueError, match=r"weights_only=True needs torch 2\.14 or newer"):
                    function([None], peer, weights_only=True)
            return
        for sent in ({"safe": torch.ones(2)}, Fraction(1, 2)):
            received = cfd.recv_object_list(objects, peer, weights_only=True)
            cfd.send_object_list([sent], peer, weights_only=True).wait(timeout=TIMEOUT)
            error = received.exception(timeout=TIMEOUT)
            assert isinstance(error, pickle.UnpicklingError if isinstance(sent, Fraction) else type(None))

    world.run(run)


def lose_the_sender(rank: int) -> None:
    if rank == 1:
        objects: list[Any] = [None]
        assert cfd.recv_object_list(objects, 0).wait(timeout=TIMEOUT) == 0
        os._exit(0)
    received = cfd.recv_object_list([None], 1)
    cfd.send_object_list(["end"], 1).wait(timeout=TIMEOUT)
    error = received.exception(timeout=TIMEOUT)
    assert isinstance(error, cfd.CollectiveError)
    assert "recv_object_list" in str(error)


def test_dead_sender_fails_receiver() -> None:
    run_ranks(2, lose_the_sender, lost=[1])
