"""Fixtures of the tests of swapped optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture.io import Engine
from cudafuture.store import DiskStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """Give a store whose engine cuts a large tensor into many blocks."""
    with Engine(queue_depth=8, block_size=1 << 18) as engine, DiskStore(tmp_path / "store", engine=engine) as store:
        yield store


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: several test processes with threads that spin slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
