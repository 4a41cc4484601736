"""Several stores as one, with tensors on devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, gather
from cudafuture.io import Engine
from cudafuture.store import DiskStore, ShardedStore
from support.harness import PRIORITIES, SIZE, Device
from support.patience import PATIENCE

KEYS = [f"{i}" for i in range(6)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardedStore]:
    with (
        Engine(queue_depth=4, block_size=1 << 18, threads=2) as engine,
        ShardedStore({name: DiskStore(tmp_path / name, engine=engine) for name in ("one", "two")}) as store,
    ):
        assert {store.where(key) for key in KEYS} == {"one", "two"}
        yield store


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("size", [SIZE, 300_000])
def test_streams_stay_in_order(accelerator: Device, store: ShardedStore, priority: int, size: int) -> None:
    with accelerator.on(accelerator.stream()):
        tensors = {key: torch.empty(size, device=accelerator.at()) for key in KEYS}
        accelerator.delay()
        for tensor in tensors.values():
            tensor.fill_(3.0)
        written = store.writev(tensors, priority=priority)
        assert written.released is not None
        written.released.wait(non_blocking=True, timeout=PATIENCE)
        for tensor in tensors.values():
            tensor.fill_(4.0)
        written.wait(non_blocking=True, timeout=PATIENCE)
        outs = [torch.empty(size, device=accelerator.at()) for _ in KEYS]
        accelerator.delay()
        for out in outs:
            out.fill_(5.0)
        read = store.readv(KEYS, outs, priority=priority)
    with accelerator.on(accelerator.stream()):
        assert [accelerator.read(got) for got in read.wait(non_blocking=True, timeout=PATIENCE)] == [3.0] * 6
    doubled = read.then(lambda done: [got * 2 for got in done.value()], priority=priority)
    assert [accelerator.read(got) for got in doubled.wait(timeout=PATIENCE)] == [6.0] * 6


def test_tensors_move_between_any_devices(accelerator: Device, store: ShardedStore) -> None:
    places = [torch.device("cpu"), *(accelerator.at(i) for i in accelerator.indices())]
    tensors = {key: torch.full((1000,), float(i), device=places[i % len(places)]) for i, key in enumerate(KEYS)}
    store.writev(tensors).wait(timeout=PATIENCE)
    for place in places:
        for got, tensor in zip(store.readv(KEYS, device=place).wait(timeout=PATIENCE), tensors.values(), strict=True):
            assert got.device == place
            assert torch.equal(got.cpu(), tensor.cpu())


class Elsewhere:
    """A shard whose device is not done when its futures are."""

    durable = False

    def __init__(self, worker: str, parts: dict[str, CUDAFuture[torch.Tensor]]) -> None:
        self.worker, self.parts = worker, parts

    def read(self, key: str, *args: Any, **options: Any) -> CUDAFuture[torch.Tensor]:
        return self.parts[key]

    def readv(self, keys: Iterable[str], *args: Any, **options: Any) -> CUDAFuture[list[torch.Tensor]]:
        return gather(*(self.parts[key] for key in keys))


@pytest.mark.parametrize("many", [False, True])
def test_waiter_follows_device_of_remote_shard(accelerator: Device, many: bool) -> None:
    side, reader = accelerator.stream(), accelerator.stream()
    with accelerator.hold(side):
        parts = {key: accelerator.complete(float(i), stream=side) for i, key in enumerate(KEYS)}
        shards: dict[str, Any] = {name: Elsewhere(name, parts) for name in ("one", "two")}
        store = ShardedStore(shards)
        reads = [store.readv(KEYS)] if many else [store.read(key).then(lambda done: [done.value()]) for key in KEYS]
        with accelerator.on(reader):
            values = [got * 2 for read in reads for got in read.wait(non_blocking=True, timeout=PATIENCE)]
            assert not any(read.ready() for read in reads)
    with accelerator.on(reader):
        assert [accelerator.read(value) for value in values] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
