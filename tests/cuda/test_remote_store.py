"""Tensors on a GPU in the store of a worker: read after what was enqueued, and complete for each waiter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rpc_ext
from rpc_ext import RemoteStore, serve_store
from support.cuda_calls import LONG, begin, only, slow
from support.harness import Cuda

pytestmark = [pytest.mark.cuda, pytest.mark.world]

pytest.importorskip("xxhash")

SIZES = [1000, (16 << 20) // 4 + 100]  # float32s: in a batch; in two parts


@pytest.fixture
def remote(cuda: Cuda, tmp_path: Path) -> Iterator[RemoteStore]:
    begin(tmp_path / "meeting", 0, 1)
    with serve_store(tmp_path / "served"), RemoteStore("worker0") as remote:
        yield remote
    rpc_ext.shutdown(timeout=LONG)


@pytest.mark.parametrize("size", SIZES, ids=["small", "pieces"])
def test_pending_gpu_write_is_stored(remote: RemoteStore, size: int) -> None:
    tensor = slow(1.0).repeat(5)[:size]
    write = remote.write("x", tensor)
    assert write.released is not None
    write.released.wait(timeout=LONG)
    tensor.fill_(-1.0)
    write.wait(timeout=LONG)
    assert torch.equal(remote.read("x").wait(timeout=LONG), torch.ones(size))
    assert only(remote.read("x", device="cuda").wait(timeout=LONG, non_blocking=True)) == 1.0


@pytest.mark.parametrize("size", SIZES, ids=["small", "pieces"])
def test_read_follows_pending_gpu_write(remote: RemoteStore, size: int) -> None:
    remote.write("x", torch.full((size,), 3.0)).wait(timeout=LONG)
    out = slow(-1.0).repeat(5)[:size]
    assert remote.read("x", out).wait(timeout=LONG, non_blocking=True) is out
    assert only(out) == 3.0
    outs = [torch.empty_like(out), torch.empty_like(out)]
    remote.readv(["x", "x"], outs, priority=-1).wait(timeout=LONG, non_blocking=True)
    assert [only(each) for each in outs] == [3.0, 3.0]
