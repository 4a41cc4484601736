"""Helpers of the tests of stores: known contents, engines, and a comparison of all keys of a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.patience import PATIENCE

BACKENDS = ["io_uring", "threads"]
MIB = 1 << 20
SMALL, LARGE = 1000, 3 << 18  # float32s: packed, and more than a block
KINDS: dict[str, dict[str, Any]] = {
    "ephemeral": {},
    "durable": {"durable": True},
    "cached": {"direct": False},
    "unchecked": {"checksum": False},
}


def contents(size: int, seed: int = 0) -> torch.Tensor:
    """Return so many bytes, other ones for each seed."""
    numbers = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, device="cpu", generator=numbers)


def count_descriptors(path: Path) -> int:
    """Return how many descriptors of this process are of a file."""
    links = [descriptor for descriptor in Path("/proc/self/fd").iterdir() if descriptor.is_symlink()]
    return sum(os.path.realpath(link) == str(path.resolve()) for link in links)


def engine_on(backend: Any) -> Engine:
    """Return an engine that cuts what is large into many blocks, or skip the test where there is none."""
    try:
        return Engine(backend, queue_depth=8, block_size=1 << 18, threads=2)
    except StorageError as e:
        pytest.skip(str(e))


def open_held_store(folder: Path, **options: Any) -> tuple[Engine, DiskStore]:
    """Return a store whose engine gives no result before it is released."""
    engine = Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})
    return engine, DiskStore(folder, engine=engine, **options)


def make_numbered(size: int, seed: int = 0) -> torch.Tensor:
    """Return so many float32s, counted from the seed."""
    return torch.arange(size, dtype=torch.float32) + seed


def get(store: DiskStore, key: str) -> torch.Tensor:
    """Read a tensor, and wait for it."""
    return store.read(key).wait(timeout=PATIENCE)


def error_number(future: CUDAFuture[Any]) -> int:
    """Return with which errno the future fails; 0: it does not. Any other failure than a StorageError is raised."""
    error = future.exception(timeout=PATIENCE)
    if error is None:
        return 0
    if not isinstance(error, StorageError):
        raise error
    assert error.errno is not None
    return error.errno


def expect(store: DiskStore, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the store has exactly these tensors, whole, and takes no room for others."""
    assert sorted(store.keys()) == sorted(expected)
    reads = {key: store.read(key) for key in expected}
    for key, read in reads.items():
        assert torch.equal(read.wait(timeout=PATIENCE), expected[key]), key
    found = store.statistics()
    total = sum(tensor.nbytes for tensor in expected.values())
    assert (found.keys, found.bytes, found.used, found.pending) == (len(expected), total, total, 0)


def slabs(folder: Path) -> list[Path]:
    """Return the files with the tensors of the store in that folder."""
    return sorted(folder.rglob("slab-*"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change a bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
