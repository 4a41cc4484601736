"""The store of tensors by name, with tensors on devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import gather
from cudafuture.errors import ChecksumError
from cudafuture.io import Engine, digest
from cudafuture.store import DiskStore
from support.harness import PRIORITIES, SIZE, Device
from support.patience import PATIENCE

SIZES = [0, 1, 1000, 16384, 32768, 65536, 300_001]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with (
        Engine(queue_depth=4, block_size=1 << 18, threads=2) as engine,
        DiskStore(tmp_path, engine=engine) as store,
    ):
        yield store


def make_numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32, device="cpu") + seed


@pytest.mark.parametrize("size", SIZES)
def test_tensor_moves_between_any_devices(accelerator: Device, store: DiskStore, size: int) -> None:
    places = [torch.device("cpu"), *(accelerator.at(i) for i in accelerator.indices())]
    for source in places:
        store.write("tensor", make_numbers(size).to(source)).wait(timeout=PATIENCE)
        for target in places:
            got = store.read("tensor", device=target).wait(timeout=PATIENCE)
            assert got.device == target
            assert torch.equal(got.cpu(), make_numbers(size))
            out = torch.zeros(size, device=target)
            assert store.read("tensor", out).wait(timeout=PATIENCE) is out
            assert torch.equal(out.cpu(), make_numbers(size))


def test_tensors_of_several_devices_are_packed(accelerator: Device, store: DiskStore) -> None:
    places = [torch.device("cpu"), *(accelerator.at(i) for i in accelerator.indices())]
    tensors = {f"{i}": make_numbers(100 + i, i).to(places[i % len(places)]) for i in range(300)}
    store.writev(tensors).wait(timeout=PATIENCE)
    assert store.statistics().transfers <= 2
    outs = [torch.zeros_like(t) for t in tensors.values()]
    for got, tensor in zip(store.readv(tensors, outs).wait(timeout=PATIENCE), tensors.values(), strict=True):
        assert torch.equal(got.cpu(), tensor.cpu())
    for got, tensor in zip(store.readv(tensors, device="cpu").wait(timeout=PATIENCE), tensors.values(), strict=True):
        assert torch.equal(got, tensor.cpu())


def test_digests_match_device_bytes(accelerator: Device, store: DiskStore) -> None:
    places = [torch.device("cpu"), *(accelerator.at(i) for i in accelerator.indices())]
    hosts = {f"{i}": make_numbers(size, i) for i, size in enumerate(SIZES * len(places))}
    tensors = {key: host.to(places[int(key) % len(places)]) for key, host in hosts.items()}
    expected = {key: digest(host) for key, host in hosts.items()}
    store.writev(tensors, digests=expected).wait(timeout=PATIENCE)
    for device in places:
        told = torch.zeros(len(hosts), dtype=torch.uint64, device="cpu")
        got = store.readv(hosts, device=device, digests=told).wait(timeout=PATIENCE)
        assert told.tolist() == list(expected.values())
        assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(got, hosts.values(), strict=True))


@pytest.mark.parametrize("size", [0, 1000, 300_001])
def test_wrong_digest_on_device_is_not_written(accelerator: Device, store: DiskStore, size: int) -> None:
    store.write("x", make_numbers(size)).wait(timeout=PATIENCE)
    changed = torch.full((size,), 7.0, device=accelerator.at())
    told = torch.ones(1, dtype=torch.bool, device="cpu")
    written = store.writev({"x": changed}, digests={"x": digest(make_numbers(size)) ^ (not size)}, written=told)
    assert isinstance(written.exception(timeout=PATIENCE), ChecksumError)
    assert written.released is not None
    written.released.wait(timeout=PATIENCE)
    assert told.tolist() == [False]
    assert torch.equal(store.read("x", device="cpu").wait(timeout=PATIENCE), make_numbers(size))


def test_device_views_are_stored_and_filled(accelerator: Device, store: DiskStore) -> None:
    tensor = make_numbers(90_000).reshape(300, 300)
    store.write("view", tensor.to(accelerator.at()).t()).wait(timeout=PATIENCE)
    target = torch.zeros(300, 300, device=accelerator.at())
    store.read("view", target.t()).wait(timeout=PATIENCE)
    assert torch.equal(target.cpu(), tensor)


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("size", [SIZE, 300_000])
def test_streams_stay_in_order(accelerator: Device, store: DiskStore, priority: int, size: int) -> None:
    with accelerator.on(accelerator.stream()):
        x = torch.empty(size, device=accelerator.at())
        accelerator.delay()
        written = store.write("tensor", x.fill_(3.0), priority=priority)
        assert written.released is not None
        written.released.wait(non_blocking=True, timeout=PATIENCE)
        x.fill_(4.0)
        written.wait(non_blocking=True, timeout=PATIENCE)
        y = torch.empty(size, device=accelerator.at())
        accelerator.delay()
        y.fill_(5.0)
        read = store.read("tensor", y, priority=priority)
    with accelerator.on(accelerator.stream()):
        assert accelerator.read(read.wait(non_blocking=True, timeout=PATIENCE)) == 3.0
    assert accelerator.read(read.then(lambda done: done.value() * 2, priority=priority).wait(timeout=PATIENCE)) == 6.0


def test_read_result_may_be_dropped_early(accelerator: Device, store: DiskStore) -> None:
    store.write("tensor", make_numbers(100_000)).wait(timeout=PATIENCE)
    reads = [store.read("tensor", device=accelerator.at()) for _ in range(8)]
    whole = gather(*reads)
    del reads
    for got in whole.wait(timeout=PATIENCE):
        assert torch.equal(got.cpu(), make_numbers(100_000))
