"""Calls whose tensors TensorPipe carries between GPUs by itself: device maps, and order without blocking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.testing import World
from rpc_ext import RRef, remote, rpc_async, rpc_sync
from support import cuda_calls
from support.cuda_calls import LONG, begin, only, slow
from support.harness import Cuda

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-cuda")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    pytest.importorskip("cloudpickle")
    with World(2, timeout=120) as world:
        yield world


def both(ranks: World, meeting: Path, scenario: Callable[[str], None], **more: Any) -> None:
    """Let each of two workers call the other."""

    def run() -> None:
        rank = dist.get_rank()
        with begin(meeting, rank, 2, **more):
            scenario(f"worker{1 - rank}")

    ranks.run(run)


@pytest.mark.parametrize("scenario", cuda_calls.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_workers_call_each_other(ranks: World, tmp_path: Path, scenario: Callable[[str], None]) -> None:
    both(ranks, tmp_path / "meeting", scenario)


@pytest.mark.parametrize("seal", ["descriptions", "contents"])
@pytest.mark.parametrize("scenario", cuda_calls.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_signed_session_carries_tensors(
    ranks: World, tmp_path: Path, scenario: Callable[[str], None], seal: str
) -> None:
    both(ranks, tmp_path / "meeting", scenario, secret="what only these two know", seal=seal)


def test_remote_takes_gpu_tensors_unless_sealed(tmp_path: Path, cuda: Cuda) -> None:
    with begin(tmp_path / "meeting", 0, 1):
        assert only(remote("worker0", cuda_calls.double, (slow(2.0),)).to_here()) == 4.0
        assert only(remote("worker0", cuda_calls.double_later, (slow(3.0),)).to_here()) == 6.0
    with (
        begin(tmp_path / "sealed", 0, 1, secret="what only this one knows", seal="contents"),
        pytest.raises(ValueError, match=r"a tensor on cuda:0 cannot be sent .*copy it to the host first"),
    ):
        remote("worker0", cuda_calls.double, (slow(2.0),))


@pytest.mark.parametrize("scenario", cuda_calls.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_worker_calls_itself(tmp_path: Path, cuda: Cuda, scenario: Callable[[str], None]) -> None:
    with begin(tmp_path / "meeting", 0, 1):
        scenario("worker0")


def test_busy_gpu_does_not_block_caller(tmp_path: Path, cuda: Cuda) -> None:
    with begin(tmp_path / "meeting", 0, 1):
        rpc_sync("worker0", cuda_calls.double, (slow(1.0),))  # loads what is needed
        done = torch.cuda.Event()
        with cuda.hold():
            x = torch.full((cuda_calls.SIZE,), 3.0, device="cuda")
            done.record()
            future = rpc_async("worker0", cuda_calls.double, (x,))
            result = future.wait(non_blocking=True, timeout=LONG)
            assert not done.query(), "the host has waited for the GPU"
        assert only(result) == 6.0


def test_device_map_exchanges_devices(ranks: World, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def caller(to: str) -> None:
        x = slow(2.0)
        assert rpc_sync(to, cuda_calls.where, (x,)) == "cuda:1"
        assert str(rpc_sync(to, cuda_calls.double, (x,)).device) == "cuda:0"

    maps = {f"worker{rank}": {"cuda:0": "cuda:1"} for rank in (0, 1)}
    both(ranks, tmp_path / "meeting", caller, device_maps=maps)


def test_gpu_without_target_is_refused(tmp_path: Path, cuda: Cuda) -> None:
    with begin(tmp_path / "meeting", 0, 1, device_maps=None):
        with pytest.raises(ValueError, match=r"on cuda:0 cannot be sent to worker 'worker0'.*device_maps"):
            rpc_async("worker0", cuda_calls.double, (slow(1.0),))
        error = rpc_async("worker0", slow, (1.0,)).exception(timeout=LONG)
        assert isinstance(error, ValueError)


def test_local_value_may_be_requested_here(tmp_path: Path, cuda: Cuda) -> None:
    with begin(tmp_path / "meeting", 0, 1):
        rref = RRef(slow(2.0))
        assert only(rref.local_value()) == 2.0
        future: CUDAFuture[torch.Tensor] = rref.get_future()
        assert only(future.wait(non_blocking=True, timeout=LONG)) == 2.0
        assert only(remote("worker0", cuda_calls.add_to, (rref, slow(1.0))).to_here()) == 3.0
        assert rpc_ext.statistics().refused == {}
