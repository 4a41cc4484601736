"""Stores of several workers as one: all processes find the same keys, and know those lost with a dead worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import WorkerLostError
from cudafuture.store import DiskStore, ShardedStore
from rpc_ext import RemoteStore, rpc_async, serve_store
from rpc_ext.store._wire import PART
from support.ranks import run_ranks
from support.rpc_workers import LONG, NAMES, be_lost, begin, go_on, wait_for_release

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("sharded-store")]

LARGE = PART // 4 + 100  # float32s: two pieces
KEYS = [f"{i}" for i in range(40)]


def tensor_of(key: str, seed: int = 0) -> torch.Tensor:
    return torch.full((LARGE if int(key) % 10 == 0 else 1000,), float(int(key) + seed))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    return {key: tensor_of(key, seed) for key in KEYS}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failure(future: CUDAFuture[Any]) -> BaseException:
    error = future.exception(timeout=LONG)
    assert error is not None
    return error


# ---- every process finds the same keys


def share(rank: int, store: str, folder: str) -> dict[str, list[str]]:
    begin(rank, 3, store)
    with serve_store(f"{folder}/{rank}"):
        dist.barrier()
        order = [NAMES[(rank + i) % 3] for i in range(3)][:: -1 if rank == 2 else 1]
        shards = ShardedStore([RemoteStore(name, namespace="shared") for name in order])
        if rank == 0:
            shards.writev(tensors()).wait(timeout=LONG)
        dist.barrier()
        assert len(shards) == len(KEYS)
        for key, got in zip(KEYS, shards.readv(KEYS).wait(timeout=LONG), strict=True):
            assert torch.equal(got, tensor_of(key))
        assert all(shards.stat(key).nbytes == tensor_of(key).nbytes for key in KEYS)
        found = {name: shard.keys() for name, shard in shards.shards.items()}
        dist.barrier()
        shards.deletev(KEYS[rank::3]).wait(timeout=LONG)
        dist.barrier()
        assert shards.keys() == []
        shards.close()
        rpc_ext.shutdown()
    return found


def test_shard_order_finds_same_keys(tmp_path: Path) -> None:
    first, *others = run_ranks(3, share, str(tmp_path / "store"), str(tmp_path))
    assert all(found == first for found in others)
    assert [*first] == sorted(NAMES)
    assert all(first.values())
    assert sorted(key for keys in first.values() for key in keys) == sorted(KEYS)


# ---- one of them dies


def serve(rank: int, store: str, folder: str) -> None:
    """Serve a store until the caller kills this worker or releases it."""
    begin(rank, 3, store)
    serve_store(f"{folder}/{rank}")
    dist.barrier()
    if rank == 1:
        be_lost()
    wait_for_release()
    rpc_ext.shutdown(graceful=False)


def open_shards(folder: str) -> ShardedStore:
    """Return a store of one shard in this process and two on other workers."""
    dist.barrier()
    return ShardedStore(
        {"here": DiskStore(f"{folder}/here"), "one": RemoteStore("callee"), "two": RemoteStore("third")}
    )


def see_keys_by_asking_before_a_shard_dies(rank: int, store: str, folder: str) -> None:
    if rank != 0:
        serve(rank, store, folder)
        return
    begin(rank, 3, store)
    writer = open_shards(folder)
    writer.writev(tensors()).wait(timeout=LONG)
    here = [key for key in KEYS if writer.where(key) == "one"]
    finder, lister = (ShardedStore(writer.shards) for _ in range(2))
    assert all(finder.find([*here[1:], "no such key"]).wait(timeout=LONG)[:-1])
    assert sorted(lister.list_keys().wait(timeout=LONG)) == sorted(KEYS)
    assert isinstance(failure(rpc_async("callee", die)), WorkerLostError)
    for asker, known in ((finder, here[1:]), (lister, here)):
        assert asker.lost() == {}
        assert isinstance(failure(asker.read(here[0])), WorkerLostError)
        assert {name: sorted(keys) for name, keys in asker.lost().items()} == {"one": sorted(known)}
    writer.close()
    end()


def end() -> None:
    rpc_async("third", go_on).exception(timeout=LONG)  # it may end before it has answered
    rpc_ext.shutdown(graceful=False)


def see_a_shard_die(rank: int, store: str, folder: str) -> None:
    if rank != 0:
        serve(rank, store, folder)
        return
    begin(rank, 3, store)
    shards = open_shards(folder)
    assert shards.writev(tensors()).wait(timeout=LONG) == sum(tensor.nbytes for tensor in tensors().values())
    gone = [key for key in KEYS if shards.where(key) == "one"]
    there = [key for key in KEYS if key not in gone]
    assert {shards.where(key) for key in there} == {"here", "two"}
    assert gone
    assert isinstance(failure(rpc_async("callee", die)), WorkerLostError)

    asked: dict[str, CUDAFuture[Any]] = {
        gone[0]: shards.read(gone[0]),
        gone[1]: shards.write(gone[1], tensor_of(gone[1])),
        gone[2]: shards.delete(gone[2]),
        f"{gone[0]!r}, {gone[1]!r}": shards.readv(KEYS),
        f"{gone[1]!r}, {gone[2]!r}": shards.writev(tensors(seed=1)),
    }
    for keys, future in asked.items():
        error = failure(future)
        assert isinstance(error, WorkerLostError), error
        assert error.worker == "callee"
        assert "shard 'one' (key" in str(error)
        assert keys in str(error)
    assert {name: sorted(keys) for name, keys in shards.lost().items()} == {"one": sorted(gone)}

    for key, got in zip(there, shards.readv(there).wait(timeout=LONG), strict=True):
        assert torch.equal(got, tensor_of(key, seed=1))
    assert all(shards.stat(key).nbytes == tensor_of(key).nbytes and key in shards for key in there)
    for ask in (shards.keys, lambda: len(shards), lambda: shards.stat(gone[0]), lambda: gone[0] in shards):
        with pytest.raises(WorkerLostError, match="shard 'one'"):
            ask()
    left = ShardedStore({name: shard for name, shard in shards.shards.items() if name not in shards.lost()})
    assert sorted(left.keys()) == sorted(there)
    left.writev({key: tensor_of(key, seed=1) for key in gone}).wait(timeout=LONG)
    for key, got in zip(KEYS, left.readv(KEYS).wait(timeout=LONG), strict=True):
        assert torch.equal(got, tensor_of(key, seed=1))
    shards.close()
    end()


def test_remaining_shards_survive_death(tmp_path: Path) -> None:
    run_ranks(3, see_a_shard_die, str(tmp_path / "store"), str(tmp_path), lost=[1])


def test_observed_keys_are_reported_lost(tmp_path: Path) -> None:
    run_ranks(3, see_keys_by_asking_before_a_shard_dies, str(tmp_path / "store"), str(tmp_path), lost=[1])


def see_a_shard_die_in_the_midst(rank: int, store: str, folder: str) -> None:
    if rank != 0:
        serve(rank, store, folder)
        return
    begin(rank, 3, store)
    shards = open_shards(folder)
    shards.writev(tensors()).wait(timeout=LONG)
    gone = {key for key in KEYS if shards.where(key) == "one"}
    calls: list[tuple[list[str], CUDAFuture[Any]]] = []
    for seed in range(1, 4):
        calls += [([key], shards.write(key, tensor)) for key, tensor in tensors(seed).items()]
        calls += [(KEYS, shards.writev(tensors(seed))), (KEYS, shards.readv(KEYS))]
        if seed == 2:
            rpc_async("callee", die)
    for keys, future in calls:
        error = future.exception(timeout=LONG)
        if error is None:
            continue
        assert isinstance(error, WorkerLostError), error
        assert "shard 'one'" in str(error)
        assert gone & {*keys}, "a shard that lives has failed"
    assert failure(shards.readv(KEYS))  # by now it is known
    assert {name: {*keys} for name, keys in shards.lost().items()} == {"one": gone}
    for key in KEYS:
        if key not in gone:
            assert torch.equal(shards.read(key).wait(timeout=LONG), tensor_of(key, seed=3))
    shards.close()
    end()


def test_death_fails_operations_in_flight(tmp_path: Path) -> None:
    run_ranks(3, see_a_shard_die_in_the_midst, str(tmp_path / "store"), str(tmp_path), lost=[1])
