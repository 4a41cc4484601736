"""The priority of reads and writes in an engine: urgent operations overtake others, and none starves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
from support.patience import PATIENCE

BLOCK = 4096
Backend = Literal["io_uring", "threads"]

pytestmark = pytest.mark.usefixtures("on_the_host")


def make_idle_engine(backend: Backend, block_size: int = BLOCK) -> Engine:
    """Return an engine with one block, whose first result is held until ``release_held``."""
    try:
        return Engine(backend, queue_depth=1, block_size=block_size, threads=1, _faults={"held": True})
    except StorageError as e:
        pytest.skip(str(e))


def blocks(count: int) -> torch.Tensor:
    return torch.ones(count * BLOCK, dtype=torch.uint8, device="cpu")


def note(order: list[str], name: str, future: CUDAFuture[Any]) -> CUDAFuture[Any]:
    future.add_done_callback(lambda _: order.append(name))
    return future


def occupy(engine: Engine, file: File, order: list[str]) -> CUDAFuture[Any]:
    """Write a block, and wait until the engine has begun it, so that no operation can overtake it."""
    first = note(order, "first", file.write(blocks(1)))
    deadline = time.monotonic() + PATIENCE
    while engine.statistics().blocks == 0:
        assert time.monotonic() < deadline
        time.sleep(0)
    return first


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("size", [1, 10], ids=["one block", "many blocks"])
def test_urgent_read_overtakes_queued_writes(backend: Backend, size: int, tmp_path: Path) -> None:
    order: list[str] = []
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        file.truncate(1000 * BLOCK)
        first = occupy(engine, file, order)
        writes = [note(order, "write", file.write(blocks(20), 20 * i * BLOCK)) for i in range(1, 10)]
        later = note(order, "read", file.read(blocks(size)))
        urgent = note(order, "urgent", file.read(blocks(size), priority=-1))
        engine._native.release_held()
        wait_all([first, *writes, later, urgent], timeout=PATIENCE)
    assert order[:2] == ["first", "urgent"]
    assert sorted(order[2:]) == ["read"] + ["write"] * 9


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("size", [1, 3], ids=["one block", "many blocks"])
def test_every_eighth_block_is_not_urgent(backend: Backend, size: int, tmp_path: Path) -> None:
    order: list[str] = []
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        file.truncate(1000 * BLOCK)
        first = occupy(engine, file, order)
        writes = [note(order, "write", file.write(blocks(size), 100 * i * BLOCK)) for i in range(1, 4)]
        urgent = [note(order, "urgent", file.read(blocks(1), i * BLOCK, priority=-1)) for i in range(100)]
        engine._native.release_held()
        wait_all([first, *writes, *urgent], timeout=PATIENCE)
    ended = [at for at, name in enumerate(order) if name == "write"]
    assert all(at <= 8 * (size * i + 1) for i, at in enumerate(ended, 1)), ended
    assert ended[0] >= 7


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_urgent_store_read_overtakes_small_operations(backend: Backend, tmp_path: Path) -> None:
    order: list[str] = []
    with Engine(backend) as engine, DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev({f"{i}": torch.full((1000,), float(i)) for i in range(200)}).wait(timeout=PATIENCE)
    with make_idle_engine(backend, 1 << 18) as engine, DiskStore(tmp_path, engine=engine, durable=True) as store:
        futures = [note(order, "read", store.read(f"{i}")) for i in range(0, 199, 2)]
        futures += [note(order, "write", store.write(f"new {i}", torch.ones(100_000))) for i in range(10)]
        urgent = note(order, "urgent", store.read("199", priority=-1))
        engine._native.release_held()
        wait_all([*futures, urgent], timeout=PATIENCE)
        assert urgent.value()[0] == 199
    assert order.index("urgent") <= 1
