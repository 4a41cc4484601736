"""Optimizer state on another worker: steps, and a worker that dies in the middle of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import rpc_ext
from cudafuture.errors import SwapError, WorkerLostError
from cudafuture.store import ShardedStore
from rpc_ext import RemoteStore, rpc_sync, serve_store
from support.ranks import run_ranks
from support.rpc_workers import LONG, be_lost, begin, go_on, wait_for_release
from support.soak import in_soak_alone
from support.training import OPTIMIZERS, Pair, same

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("swap-remote")]

SHAPES = ((400, 420), (300,), (256, 255), (400, 424))  # three chunks, one, one, and three


class DyingStore(RemoteStore):
    """A remote store whose worker dies when a tensor is read for the n-th time."""

    reads_left = -1

    def readv(self, keys, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As the store of another worker, which may die before."""
        self.reads_left -= 1
        if self.reads_left == 0:
            rpc_ext.rpc_async("callee", die).exception()
        return super().readv(keys, *args, **kwargs)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, place: str, folder: str, dies_at: int) -> list[int]:
    """Return which parameters the step updated in which the worker died."""
    begin(rank, 2, place)
    if rank == 1:
        serve_store(folder)
        rpc_sync("caller", go_on)
        be_lost()
    wait_for_release()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        remote = DyingStore("callee", namespace="kept")
        pair = Pair(OPTIMIZERS["Adam"], remote, SHAPES, chunk_bytes=1 << 18, buffer_bytes=2 << 20, prefetch=0)
        for _ in range(2):
            pair.step()
            pair.expect_same()
        old = [parameter.detach().clone() for parameter in pair.swapped]
        pair.give_gradients()
        pair.optimizer.step()
        remote.reads_left = dies_at
        updated: list[int] = []
        for _ in range(2):  # a step that is repeated updates nobody twice
            with pytest.raises(SwapError, match=r"optimizer state of parameter . of group 0") as caught:
                pair.offloaded.step()
            assert isinstance(caught.value.__cause__, WorkerLostError)
            updated = [i for i, parameter in enumerate(pair.swapped) if not same(parameter.detach(), old[i])]
            assert all(same(pair.swapped[i].detach(), pair.plain[i].detach()) for i in updated)
        with pytest.raises(SwapError):
            pair.offloaded.state_of(pair.swapped[3])
        pair.offloaded.close()
        rpc_ext.shutdown(graceful=False)
        return updated


@pytest.mark.parametrize("dies_at", [3, *(pytest.param(i, marks=in_soak_alone) for i in (1, 2, 4))])
def test_dying_worker_leaves_parameters_whole(tmp_path: Path, dies_at: int) -> None:
    updated = run_ranks(2, train, str(tmp_path / "place"), str(tmp_path / "served"), dies_at, lost=[1])[0]
    assert updated == [0, 1, 2, 3][: len(updated)]
    assert 3 not in updated


def shard(rank: int, place: str, folder: str) -> None:
    begin(rank, 2, place)
    with serve_store(f"{folder}/{rank}"):
        rpc_ext.barrier().wait(timeout=LONG)
        if rank == 0:
            with ShardedStore([RemoteStore("caller"), RemoteStore("callee")]) as store:
                pair = Pair(OPTIMIZERS["AdamW"], store, SHAPES, chunk_bytes=1 << 18, swap_gradients=True)
                for _ in range(2):
                    pair.step()
                    pair.expect_same()
                pair.offloaded.save("now")
                state = pair.offloaded.state_of(pair.swapped[0])
                pair.step()
                pair.offloaded.load("now")
                loaded = pair.offloaded.state_of(pair.swapped[0])
                assert all(same(value, loaded[name]) for name, value in state.items())
                assert loaded["step"] == 2
                pair.offloaded.close()
        rpc_ext.barrier().wait(timeout=LONG)
    rpc_ext.shutdown()


def test_state_and_gradients_are_spread_over_workers(tmp_path: Path) -> None:
    run_ranks(2, shard, str(tmp_path / "place"), str(tmp_path / "served"))
