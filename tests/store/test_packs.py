"""Small tensors of a device on the way to a store and back: one copy takes many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture.io import Engine
from cudafuture.store import DiskStore
from cudafuture.testing import sim
from support.patience import PATIENCE

COUNT = 256
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with Engine(block_size=4 * MIB, queue_depth=2, threads=2) as engine, DiskStore(tmp_path, engine=engine) as store:
        yield store


def make_tensor(i: int) -> torch.Tensor:
    return torch.full((256 + i % 3,), float(i), device="cpu")  # of 1 KiB, and sizes between which there are gaps


def count_submissions(store: DiskStore, tensors: dict[str, torch.Tensor]) -> int:
    before = sim.statistics().submitted
    store.writev(tensors).wait(timeout=PATIENCE)
    return sim.statistics().submitted - before


@pytest.mark.sim(schedule="lazy")
def test_one_copy_takes_small_device_tensors(store: DiskStore) -> None:
    tensors = {f"{i}": make_tensor(i).to("sim") for i in range(COUNT)}
    one = count_submissions(store, {"0": tensors["0"]})
    assert count_submissions(store, tensors) <= one + 2  # zeros for the gaps, and the kernel that gathers
    for i, got in enumerate(store.readv(tensors, device="sim").wait(timeout=PATIENCE)):
        assert torch.equal(got.cpu(), make_tensor(i))
    for i, got in enumerate(store.readv(tensors, device="cpu").wait(timeout=PATIENCE)):
        assert torch.equal(got, make_tensor(i))


@pytest.mark.sim(devices=2)
def test_one_copy_skips_other_tensors(store: DiskStore) -> None:
    """Tensors of the host, of another device, and one that is not small."""
    places = ["sim:0"] * 5 + ["cpu"] + ["sim:0"] * 2 + ["sim:1"] * 3 + ["cpu", "sim:1", "sim:0"]
    tensors = {f"{i}": make_tensor(i).to(place) for i, place in enumerate(places)}
    tensors["5000"] = torch.arange(100_000.0, device="cpu").to("sim:0")
    tensors |= {f"later {i}": make_tensor(i).to("sim:0") for i in range(5)}
    with sim.detect_races():
        store.writev(tensors).wait(timeout=PATIENCE)
        outs = [torch.zeros_like(tensor) for tensor in tensors.values()]
        store.readv(tensors, outs).wait(timeout=PATIENCE)
    for out, tensor in zip(outs, tensors.values(), strict=True):
        assert torch.equal(out.cpu(), tensor.cpu())


def all_memory() -> list[torch.Tensor]:
    """Return tensors that occupy all free memory of the device."""
    taken: list[torch.Tensor] = []
    try:
        while True:
            taken.append(torch.empty(64 * 1024, dtype=torch.uint8, device="sim"))
    except torch.OutOfMemoryError:
        return taken


@pytest.mark.sim(memory=4 * MIB)
def test_full_device_copies_tensors_singly(store: DiskStore) -> None:
    tensors = {f"{i}": torch.full((4000,), float(i), device="cpu").to("sim") for i in range(100)}  # 1.6 MB
    rest = all_memory()
    store.writev(tensors).wait(timeout=PATIENCE)
    outs = list(tensors.values())
    for out in outs:
        out.zero_()
    store.readv(tensors, outs).wait(timeout=PATIENCE)
    del rest
    for i, out in enumerate(outs):
        assert out.cpu().eq(float(i)).all()
