"""Calls between workers with tensors on devices that the agent cannot carry: through the host, ordered at both ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture.testing import World, sim
from cudafuture.testing.sim import RaceError
from rpc_ext import remote, rpc_async, rpc_sync
from support import device_calls
from support.device_calls import LONG, SIZE, calling, double, echo, make, only, start_fill, where
from support.simulated import SCHEDULES

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-device-world")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Yield two ranks of this module alone: none has computed a gradient before it has simulated devices."""
    with World(2) as world:
        yield world


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    return tmp_path / "meeting"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("scenario", device_calls.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_mutual_calls_have_no_race(ranks: World, meeting: Path, scenario: Callable[[str], None], schedule: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with calling(schedule, meeting, rank=rank, size=2, seed=rank):
            scenario(f"worker{1 - rank}")

    ranks.run(run)


@pytest.mark.parametrize("edge", ["copy.source_wait", "copy.done_record"])
@pytest.mark.parametrize("end", ["caller", "callee"])
def test_missing_edge_is_found_at_its_end(ranks: World, meeting: Path, edge: str, end: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        guilty = rank == (0 if end == "caller" else 1)
        with (
            pytest.raises(RaceError, match="nothing orders the two") if guilty else contextlib.nullcontext(),
            calling("lazy", meeting, rank=rank, size=2),
        ):
            _C.cut_sync_edge(edge if guilty else None)
            dist.barrier()
            try:
                if rank == 0:
                    with torch.Stream("sim"):
                        rpc_async(1, double, (start_fill(1.0),)).wait(non_blocking=True, timeout=LONG).mul_(2)
                dist.barrier()
            finally:
                _C.cut_sync_edge(None)

    ranks.run(run)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_call_waiting_for_owner_keeps_streams(ranks: World, meeting: Path, schedule: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with calling(schedule, meeting, rank=rank, size=2), torch.Stream("sim:0"):
            rref = remote(1 - rank, device_calls.double_there, (2.0,))
            assert only(rref.to_here()) == 4.0
            for _ in range(4):  # this worker becomes another holder, of which the owner has to hear first
                assert only(rpc_sync(rank, device_calls.add_later, (rref, start_fill(3.0)))) == 7.0

    ranks.run(run)


def test_lost_device_on_callee_fails_call(ranks: World, meeting: Path) -> None:
    def run() -> None:
        rank = dist.get_rank()
        with calling("lazy", meeting, rank=rank, size=2):
            if rank == 0:
                for call in (device_calls.break_device, device_calls.break_device_later):
                    error = rpc_async(1, call, (start_fill(1.0),)).exception(timeout=LONG)
                    assert type(error) is RuntimeError
                    assert "a broken bit" in str(error)
                    assert error.worker == "worker1"  # type: ignore[attr-defined]
                    rpc_sync(1, sim.clear_error)
                    assert only(rpc_sync(1, double, (start_fill(2.0),))) == 4.0

    ranks.run(run)


# ---- device maps


def run_with_maps(
    ranks: World, meeting: Path, counts: list[int], maps: list[Any], caller: Callable[[str], None]
) -> None:
    """Let rank 0 call rank 1, each with so many devices and its own map."""

    def run() -> None:
        rank = dist.get_rank()
        with calling("lazy", meeting, rank=rank, size=2, devices=counts[rank], device_maps=maps[rank]):
            if rank == 0:
                caller("worker1")

    ranks.run(run)


def test_map_moves_tensors_both_ways(ranks: World, meeting: Path) -> None:
    def caller(to: str) -> None:
        first, second = start_fill(1.0), start_fill(2.0, 1)
        assert rpc_sync(to, device_calls.describe, ([first, second, torch.ones(2)],)) == [
            ("sim:1", (SIZE,), (1,), torch.float32, [1.0] * SIZE),
            ("sim:0", (SIZE,), (1,), torch.float32, [2.0] * SIZE),
            ("cpu", (2,), (1,), torch.float32, [1.0, 1.0]),
        ]
        (back, other), _ = rpc_sync(to, echo, (first, second))
        assert (where(back), where(other), only(back), only(other)) == ("sim:0", "sim:1", 1.0, 2.0)
        rref = remote(to, device_calls.double_there, (1.0, 1))
        assert where(rref.to_here()) == "sim:0"
        assert rref.rpc_sync().get_device() == 1
        assert where(rpc_sync(to, make, (3.0, 1))) == "sim:0"

    maps = {"worker1": {"sim:0": "sim:1", "sim:1": "sim:0"}}
    run_with_maps(ranks, meeting, [2, 2], [maps, None], caller)


def test_auto_maps_common_devices(ranks: World, meeting: Path) -> None:
    def caller(to: str) -> None:
        assert only(rpc_sync(to, double, (start_fill(1.0),))) == 2.0
        with pytest.raises(ValueError, match=r"on sim:1 cannot be sent to worker 'worker1'.*mapped: sim:0 to sim:0\)"):
            rpc_async(to, double, (start_fill(1.0, 1),))

    run_with_maps(ranks, meeting, [2, 1], ["auto", "auto"], caller)


def test_reply_without_way_back_fails(ranks: World, meeting: Path) -> None:
    def caller(to: str) -> None:
        error = rpc_async(to, make, (1.0, 2)).exception(timeout=LONG)
        assert isinstance(error, ValueError)
        assert "a tensor on sim:2 cannot be sent to worker 'worker0'" in str(error)
        assert error.worker == to  # type: ignore[attr-defined]
        rref = remote(to, make, (1.0, 2))  # stays where it is
        assert isinstance(rref.get_future().exception(timeout=LONG), ValueError)
        assert rref.rpc_sync().get_device() == 2

    run_with_maps(ranks, meeting, [2, 3], ["auto", "auto"], caller)


def test_tensors_keep_device_without_map(ranks: World, meeting: Path) -> None:
    def caller(to: str) -> None:
        x = start_fill(1.0)
        for call in (rpc_async, remote):
            with pytest.raises(ValueError, match=r"on sim:0 cannot be sent to worker 'worker1'.*device_maps"):
                call(to, double, (x,))
        assert isinstance(rpc_async(to, make, (1.0,)).exception(timeout=LONG), ValueError)
        assert rpc_sync(to, divmod, (7, 2)) == (3, 1)

    run_with_maps(ranks, meeting, [1, 1], [None, "auto"], caller)


def test_worker_without_devices_answers_on_host(ranks: World, meeting: Path) -> None:
    def run() -> None:
        rank = dist.get_rank()
        if rank == 0:
            with calling("lazy", meeting, rank=0, size=2):
                assert torch.equal(rpc_sync(1, torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
                with pytest.raises(ValueError, match=r"cannot be sent to worker 'worker1'.*mapped: nothing"):
                    rpc_async(1, double, (start_fill(1.0),))
        else:
            import rpc_ext

            with rpc_ext.init_rpc(rank=1, world_size=2, init_method=f"file://{meeting}"):
                pass

    ranks.run(run)


@pytest.mark.parametrize(
    ("maps", "says"),
    [
        ({"worker7": {"sim:0": "sim:0"}}, "names worker7; the workers are worker0, worker1"),
        ({"worker1": {"sim:0": "sim:2"}}, "worker 'worker1' has no device sim:2"),
        ({"worker1": {"sim:2": "sim:0"}}, "worker 'worker0' has no device sim:2"),
        ({"worker1": {"sim:0": "sim:1", "sim:1": "sim:1"}}, "sends two devices to one of worker 'worker1'"),
    ],
)
def test_all_workers_refuse_wrong_map(ranks: World, meeting: Path, maps: Any, says: str) -> None:
    def run() -> None:
        rank = dist.get_rank()
        given = maps if rank == 0 else "auto"
        with (
            pytest.raises(ValueError, match=says),
            calling("lazy", meeting, rank=rank, size=2, device_maps=given),
        ):
            pass

    ranks.run(run)
