"""The public API where torch's default device is not the host and its default dtype is float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cudafuture import copy, distributed, gather, prefetch, submit
from cudafuture.compat.deepspeed import OptimizerSwapper
from cudafuture.compat.tensornvme import AsyncFileWriter, DiskOffloader
from cudafuture.compat.torchgpipe import GPipe
from cudafuture.data import TgzImages
from cudafuture.io import BufferPool, File
from cudafuture.pipeline import Pipeline
from cudafuture.store import DiskStore, ShardedStore, Store
from cudafuture.swap import offload
from data.archives import images, numbers, write_archive
from rpc_ext import RemoteStore, rpc_async, serve_store
from support.rpc_callees import ME, alone

pytestmark = pytest.mark.sim(devices=2)
SIM = "sim:0"


@pytest.fixture(autouse=True, params=[SIM, "meta"])
def _defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(request.param):
            yield
    finally:
        torch.set_default_dtype(before)


def make_numbers(size: int) -> torch.Tensor:
    return torch.arange(float(size), device=SIM)


def expect(tensor: Any, device: str, values: Any, dtype: torch.dtype = torch.float64) -> None:
    assert (str(tensor.device), tensor.dtype, tensor.tolist()) == (device, dtype, values)


def test_futures_and_copies() -> None:
    x = make_numbers(3)
    there, here, packed = gather(submit(lambda: x + 1), copy(x, "cpu"), copy([x, x], "cpu", pack=True)).wait()
    expect(there, SIM, [1, 2, 3])
    for copied in (here, *packed):
        expect(copied, "cpu", [0, 1, 2])


def test_collectives_of_tensors_and_of_objects() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expect(distributed.all_reduce(make_numbers(3)).wait(), SIM, [0, 1, 2])
        expect(distributed.reduce_scatter_tensor(make_numbers(2), make_numbers(2)).wait(), SIM, [0, 1])
        found: list[Any] = [None]
        distributed.all_gather_object(found, {"x": make_numbers(2)}).wait()
        distributed.broadcast_object_list(found, src=0).wait()
        expect(found[0]["x"], SIM, [0, 1])
        distributed.monitored_barrier().wait()
    finally:
        dist.destroy_process_group()


def expect_stored(store: Store) -> None:
    """Write and read tensors of the host and of the device, with the flags and digests of each key."""
    is_written = torch.zeros(2, dtype=torch.bool, device="cpu")
    store.writev({"x": make_numbers(5), "n": torch.arange(3, device="cpu")}, written=is_written).wait()
    assert is_written.all()
    digests = torch.zeros(2, dtype=torch.uint64, device="cpu")
    x, n = store.readv(["x", "n"], device=SIM, digests=digests).wait()
    expect(x, SIM, [0, 1, 2, 3, 4])
    expect(n, SIM, [0, 1, 2], torch.int64)
    expect(store.read("x").wait(), "cpu", [0, 1, 2, 3, 4])
    assert 0 not in digests.tolist()


def test_files_and_stores(tmp_path: Path) -> None:
    with File(tmp_path / "file", "w+") as file:
        file.write(make_numbers(3)).wait()
        out = torch.zeros(3, device=SIM)
        file.read(out).wait()
        expect(out, SIM, [0, 1, 2])
    with DiskStore(tmp_path / "one") as one, DiskStore(tmp_path / "two") as two:
        expect_stored(one)
        expect_stored(ShardedStore([one, two]))
    expect(BufferPool(1 << 20).take(16).wait().view(2, torch.uint8).zero_(), "cpu", [0, 0], torch.uint8)


@pytest.mark.world
@pytest.mark.xdist_group("rpc-defaults")
def test_rpc_and_remote_stores(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous"):
        expect(rpc_async(ME, torch.add, (torch.ones(2, device="cpu"), 1)).wait(), "cpu", [2, 2])
        with serve_store(tmp_path / "served"), RemoteStore(ME) as remote:
            expect_stored(remote)


def test_optimizers_keep_state_in_store(tmp_path: Path) -> None:
    weights = [nn.Parameter(make_numbers(5)), nn.Parameter(torch.ones(3, device="cpu", dtype=torch.float32))]
    same = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = offload(torch.optim.AdamW(weights, lr=0.1), tmp_path / "states", min_bytes=0, swap_gradients=True)
    usual = torch.optim.AdamW(same, lr=0.1, foreach=False)
    expect(optimizer.clip_grad_norm_(1.0), "cpu", 0.0, torch.float32)  # there are no gradients yet
    for scale in (2.0, torch.tensor(2.0, device="cpu")):
        for weight, other in zip(weights, same, strict=True):
            weight.square().sum().mul(2).backward()
            other.square().sum().backward()
        assert optimizer.unscale_(scale)
        optimizer.step()
        usual.step()
        optimizer.zero_grad()
        usual.zero_grad()
    assert all(map(torch.equal, weights, same))
    swapper = OptimizerSwapper(usual, tmp_path / "swapped", min_bytes=0)
    swapper.initialize_parameters(same)
    swapper.swap_in_optimizer_state(same[0])
    assert torch.equal(weights[0], same[0])


def test_images_reach_device_through_pinned_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("cpu"):
        archive = write_archive(tmp_path, images(7))
    for x, labels in prefetch(TgzImages(archive, batch=4), SIM):
        assert str(x.device) == str(labels.device) == SIM
    for index in (True, False):
        dataset = TgzImages(archive, index=index, batch=2, shuffle=3, transform=lambda x: (x, 1.0))
        dataset.load_state_dict({"epoch": 1, "batches": 1})
        for (x, ones), labels in dataset:
            assert str(x.device) == str(ones.device) == str(labels.device) == "cpu"
            assert (x.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert sorted(numbers((x, None) for (x, _), _ in dataset)) == list(range(7))
        assert sorted(numbers(TgzImages(archive, index=index))) == list(range(7))
    assert "not pinned" not in caplog.text


def test_pipelines_compute_whole_model() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4, device=SIM), nn.Linear(4, 1, device=SIM)]

    x, whole = torch.randn(6, 4, device=SIM), nn.Sequential(*layers())
    whole(x).mean().backward()
    split = GPipe(nn.Sequential(*layers()), [1, 1], devices=[SIM, "sim:1"], chunks=3, checkpoint="always")
    split(x).mean().backward()
    pipeline = Pipeline(layers(), [SIM, "sim:1"], microbatches=3, schedule="1f1b", loss=lambda y: y.mean())
    pipeline.step(x)
    for divided in (split, pipeline):
        for ours, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
            assert ours.dtype == torch.float64
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad.to(ours.device))


def test_tensornvme_api_stores_tensors(tmp_path: Path) -> None:
    x, path = make_numbers(3), tmp_path / "file"
    offloader = DiskOffloader(tmp_path)
    offloader.sync_write(x)
    offloader.sync_read(x)
    expect(x, SIM, [0, 1, 2])
    with AsyncFileWriter(path) as writer:
        torch.save({"x": x}, writer)  # type: ignore[arg-type]
    expect(torch.load(path)["x"], SIM, [0, 1, 2])
